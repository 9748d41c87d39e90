"""Temporary folders, and locks between processes, which the kernel releases when a process ends.

A process locks each of its folders while it lives, so that a clean-up on the same machine
recognises folders of killed processes.
"""

from __future__ import annotations

import atexit
import fcntl
import logging
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import datetime, timedelta
from functools import cache
from itertools import repeat
from pathlib import Path

from anabranch.common.errors import Transient
from anabranch.common.retry import attempts

LOG = logging.getLogger(__name__)

_PREFIX = "anabranch-"
_LOCK, _CONTENT = "held", "content"
# A folder is created a moment before it is locked: a young one is not taken for abandoned.
_MIN_AGE = timedelta(hours=1)


@contextmanager
def temporary_folder(kind: str) -> Iterator[Path]:
    """Create an empty folder for this process; delete it at the end of the block."""
    made = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{kind}-"))
    try:
        with (made / _LOCK).open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX)
            except OSError:
                # Without file locks a folder in use is not recognised, so no clean-up removes it.
                (made / _LOCK).unlink()
            content = made / _CONTENT
            content.mkdir()
            yield content
    finally:
        shutil.rmtree(made, ignore_errors=True)


@cache
def process_folder(kind: str) -> Path:
    """Return a folder that is deleted when this process ends."""
    context = temporary_folder(kind)
    folder = context.__enter__()
    atexit.register(context.__exit__, None, None, None)
    return folder


def clear_abandoned(now: datetime, dry_run: bool = False) -> tuple[int, int]:
    """Delete killed processes' temporary folders of an hour or more on this machine; return files
    and bytes. With `dry_run` only count. Concurrent calls delete a folder once."""
    files = size = 0
    for folder in _abandoned(now):
        try:
            sizes = [path.lstat().st_size for path in folder.rglob("*") if not path.is_dir()]
        except OSError as error:
            LOG.warning("%s: left by a killed process, but cannot be listed: %s", folder, error)
            continue
        files, size = files + len(sizes), size + sum(sizes)
        if not dry_run:
            LOG.info("%s: left by a killed process; deleted", folder)
            # The lock file last: if this process is killed, the next clean-up finds the folder.
            shutil.rmtree(folder / _CONTENT, ignore_errors=True)
            shutil.rmtree(folder, ignore_errors=True)
    return files, size


def _abandoned(now: datetime) -> Iterator[Path]:
    """Yield the temporary folders of killed processes, each locked while the caller has it."""
    for path in sorted(Path(tempfile.gettempdir()).glob(f"{_PREFIX}*/{_LOCK}")):
        with suppress(OSError), path.open("r+") as lock:  # at work, another user's, or gone
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if now.timestamp() - path.stat().st_mtime >= _MIN_AGE.total_seconds():
                yield path.parent


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
