"""A lock between processes, on a file; the kernel lets go of it when its holder dies."""

from __future__ import annotations

import fcntl
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from anabranch.errors import Transient


@contextmanager
def locked(file: Path, seconds: float, waiting: Callable[[], None] | None = None) -> Iterator[None]:
    """Holds `file` for this process alone; `waiting` is called once if another one holds it.

    Raises Transient after `seconds`. The file itself is left: removing it would let two processes hold two files of
    one name.
    """
    deadline = time.monotonic() + seconds
    with file.open("a") as handle:
        told = False
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if not told and waiting is not None:
                    waiting()
                told = True
                if time.monotonic() >= deadline:
                    raise Transient(f"Another process has held {file} for {seconds:.0f} s; try again later.") from None
                time.sleep(0.1)
        yield
