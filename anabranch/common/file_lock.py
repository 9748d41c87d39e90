"""A file lock between processes; the kernel releases it when its process ends."""

from __future__ import annotations

import fcntl
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import repeat
from pathlib import Path

from anabranch.common.attempts import attempts
from anabranch.common.errors import Transient


@contextmanager
def locked(file: Path, seconds: float, waiting: Callable[[], None] | None = None) -> Iterator[None]:
    """Lock `file` for this process; call `waiting` once if another process has the lock.

    Raises Transient after `seconds`. The file is not deleted: otherwise two processes could lock
    two files of the same name.
    """
    with file.open("a") as handle:
        for number in attempts(repeat(0.1), seconds):
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if number == 1 and waiting is not None:
                    waiting()
        else:
            raise Transient(
                f"lock {file}: expected it within {seconds:.0f} s, found it taken by another "
                f"process; `fuser {file}` names it; try again once it has ended"
            )
        yield
