"""Folders that other programs only add to (Data Docs, Airflow's logs, Spark's event logs): files go by age, and the
oldest beyond a number.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from heapq import heappop, heappush
from itertools import islice
from pathlib import Path

from anabranch.config import Environment
from anabranch.config.bounded import BoundedFolder
from anabranch.errors import Transient
from anabranch.protocol.maintained import Size
from anabranch.table.files import Stored, delete_files, list_files, same_file

LOG = logging.getLogger(__name__)

# A folder that a program has just made for a file that it is about to write stays.
_EMPTY_FOR = timedelta(days=1)
_FILES_AT_ONCE = 1000


@dataclass(frozen=True)
class Bounded:
    """What is (or would be) deleted of a folder, and what is left of its files."""

    gone: Size
    left: Size


class Bounds:
    """A folder's bounds over its files, in any order: no more of them is in memory than may stay."""

    def __init__(self, folder: BoundedFolder, now: datetime) -> None:
        self._folder, self._oldest = folder, now - folder.after
        self._base = len(same_file(folder.place)) + 1
        self._kept: list[tuple[datetime, str, Stored]] = []

    def beyond(self, files: Iterable[Stored]) -> Iterator[Stored]:
        """Those that are older than the folder keeps them, and the oldest beyond its number."""
        for file in files:
            if not self._folder.holds(same_file(file.path)[self._base :]):
                continue
            if file.modified < self._oldest:
                yield file
                continue
            heappush(self._kept, (file.modified, file.path, file))
            if len(self._kept) > self._folder.most:
                yield heappop(self._kept)[-1]

    def left(self) -> Size:
        """What stays of the files that were shown."""
        return size_of([file for _, _, file in self._kept])


def size_of(files: Sequence[Stored]) -> Size:
    """How many files, and their bytes. Pure."""
    return Size(len(files), sum(f.size for f in files))


def bound_folder(environment: Environment, folder: BoundedFolder, now: datetime, dry_run: bool) -> Bounded:
    """Delete what is beyond a folder's bounds; with `dry_run` only say what. One that is not there is within them.
    Raises Transient: of files that cannot be deleted, once all others are."""
    bounds, gone = Bounds(folder, now), Size()
    failed: Transient | None = None
    beyond = bounds.beyond(list_files(environment, folder.place))
    while some := list(islice(beyond, _FILES_AT_ONCE)):
        of_some = size_of(some)
        gone = Size(gone.files + of_some.files, gone.bytes + of_some.bytes)
        try:
            if not dry_run:
                delete_files(environment, [f.path for f in some])
        except Transient as error:
            failed = failed or error
    if failed is not None:
        raise failed
    if gone.files and not dry_run:
        LOG.info("%s: %d files deleted, %d bytes", folder.name, gone.files, gone.bytes)
    if folder.place.startswith("file://") and not dry_run:
        _remove_empty(Path(folder.place.removeprefix("file://")), now)
    return Bounded(gone, bounds.left())


def _remove_empty(folder: Path, now: datetime) -> None:
    """Remove the folders below it that have been empty for a day."""
    for path, _, _ in os.walk(folder, topdown=False):
        below = Path(path)
        if below != folder:
            try:
                if now.timestamp() - below.stat().st_mtime >= _EMPTY_FOR.total_seconds():
                    below.rmdir()
            except OSError:
                continue  # not empty, or gone
