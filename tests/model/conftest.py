"""Few snapshots, hours and ids are remembered, so that explorations forget some."""

import gc
from collections.abc import Iterator

import pytest
from exploration import forget

from anabranch.iceberg import expiry, state_properties
from anabranch.protocol import dead_letters, state


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(expiry.plan_expiry, "__defaults__", (3,))
    monkeypatch.setattr(state, "REMEMBERED_HOURS", 1)
    monkeypatch.setattr(state, "MAX_MAIN_ONLY_HOURS", 1)
    monkeypatch.setattr(dead_letters, "_REMEMBERED", 1)
    monkeypatch.setattr(state_properties, "_WORTH_A_PROPERTY", 0)
    forget()
    # millions of small values without a cycle: looking through them takes a fifth of the time
    gc.disable()
    yield
    gc.enable()
    forget()
