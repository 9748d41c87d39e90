"""What all explorations share: few snapshots and few remembered hours, so that forgetting happens in a small world."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
from exploration import forget

from anabranch import snapshots, state


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(snapshots.plan_expiry, "__defaults__", (3,))
    monkeypatch.setattr(state, "REMEMBERED_HOURS", 1)
    forget()
    gc.disable()  # millions of small values without a cycle: looking through them takes a fifth of the time
    yield
    gc.enable()
    forget()
