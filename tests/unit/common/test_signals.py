"""What a process does on a signal."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator

import pytest

from anabranch.common.signals import in_own_thread


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    before = signal.getsignal(signal.SIGUSR1)
    yield
    signal.signal(signal.SIGUSR1, before)


def test_a_signal_while_its_event_s_lock_is_held_sets_the_event_and_does_not_wait() -> None:
    event = threading.Event()
    request = in_own_thread(event.set)
    signal.signal(signal.SIGUSR1, lambda *_: request())
    with event._cond:  # as `wait` holds it for a moment
        signal.raise_signal(signal.SIGUSR1)
        assert not event.is_set()
    assert event.wait(30)


def test_each_signal_calls() -> None:
    calls = threading.Semaphore(0)
    request = in_own_thread(calls.release)
    signal.signal(signal.SIGUSR1, lambda *_: request())
    for _ in range(3):
        signal.raise_signal(signal.SIGUSR1)
        assert calls.acquire(timeout=30)
