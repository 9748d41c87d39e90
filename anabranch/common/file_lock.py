"""A lock between processes, on a file; the kernel lets go of it when its holder dies."""

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
    """Holds `file` for this process alone; `waiting` is called once if another one holds it.

    Raises Transient after `seconds`. The file itself is left: removing it would let two processes
    hold two files of one name.
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
