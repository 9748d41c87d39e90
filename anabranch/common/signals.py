"""What a process does on a signal, without the deadlocks of Python's signal handlers."""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue


def in_own_thread(call: Callable[[], None]) -> Callable[[], None]:
    """A function that asks a thread of its own for `call` and returns at once. Safe to call in a
    signal handler.

    A handler interrupts the main thread anywhere, also where it holds a lock that `call` needs: an
    Event's, which `wait` holds for a moment, or logging's. The handler would then wait for its own
    thread, for ever.
    """
    requests: SimpleQueue[None] = SimpleQueue()  # its put() is reentrant, as that of no other queue

    def run() -> None:
        while True:
            requests.get()
            call()

    threading.Thread(target=run, name="signals", daemon=True).start()
    return lambda: requests.put(None)
