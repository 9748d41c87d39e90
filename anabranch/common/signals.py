"""Signal handling without the deadlocks of Python's signal handlers."""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue


def in_own_thread(call: Callable[[], None]) -> Callable[[], None]:
    """Return a function that runs `call` in a separate thread and returns at once. Safe to use in a
    signal handler.

    A handler interrupts the main thread anywhere, also where it has a lock that `call` needs, such
    as logging's or an Event's, which `wait` takes for a moment. The handler would then wait for its
    own thread for ever.
    """
    requests: SimpleQueue[None] = SimpleQueue()  # the only queue whose put() is reentrant

    def run() -> None:
        while True:
            requests.get()
            call()

    threading.Thread(target=run, name="signals", daemon=True).start()
    return lambda: requests.put(None)
