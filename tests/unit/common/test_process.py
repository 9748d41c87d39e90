"""Behaviour of a process on a signal."""

import signal
import threading
from collections.abc import Iterator

import pytest

from anabranch.common.process import in_own_thread


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    before = signal.getsignal(signal.SIGUSR1)
    yield
    signal.signal(signal.SIGUSR1, before)


def test_each_signal_calls_also_under_the_lock_that_its_call_needs() -> None:
    calls = threading.Semaphore(0)
    request = in_own_thread(calls.release)
    signal.signal(signal.SIGUSR1, lambda *_: request())
    for _ in range(3):
        signal.raise_signal(signal.SIGUSR1)
        assert calls.acquire(timeout=30)
    lock, called = threading.Lock(), threading.Event()

    def call() -> None:
        with lock:  # as Event.set and logging have one
            called.set()

    locked = in_own_thread(call)
    signal.signal(signal.SIGUSR1, lambda *_: locked())
    with lock:
        signal.raise_signal(signal.SIGUSR1)
        assert not called.is_set()
    assert called.wait(30)
