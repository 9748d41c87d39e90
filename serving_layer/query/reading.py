"""The progress of a query: the number of files read."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import pyarrow as pa
import pyarrow.dataset as ds

from anabranch.common.logs import Progress, repeating

LOG = logging.getLogger(__name__)

_UPDATE_SECONDS = 0.5


@dataclass
class FollowedScan:
    """One scan of files, which DuckDB gets in place of a scanner."""

    scanner: ds.Scanner
    files: int
    done: int = 0

    @property
    def projected_schema(self) -> pa.Schema:
        return self.scanner.projected_schema

    def to_reader(self) -> pa.RecordBatchReader:
        """Return the scanner's batches, file by file, and count the files."""
        return pa.RecordBatchReader.from_batches(self.scanner.projected_schema, self._batches())

    def _batches(self) -> Iterator[pa.RecordBatch]:
        file = None
        for read in self.scanner.scan_batches():
            path = read.fragment.path
            if file is not None and path != file:
                self.done += 1
            file = path
            yield read.record_batch
        self.done = self.files


@dataclass
class QueryProgress:
    """The scans of a query, which may run in any thread."""

    followed: list[FollowedScan] = field(default_factory=list)

    def follow(self, scanner: ds.Scanner, files: int) -> FollowedScan:
        followed = FollowedScan(scanner, files)
        self.followed.append(followed)
        return followed

    @contextmanager
    def show_progress(self, doing: str) -> Iterator[None]:
        """Show how many of the planned files have been read."""
        shown = 0

        def update() -> None:
            nonlocal shown
            begun = list(self.followed)
            progress.expect(sum(one.files for one in begun))
            done = sum(one.done for one in begun)
            progress.step(done - shown)
            shown = done

        progress = Progress(LOG, doing, "files")
        with repeating(update, _UPDATE_SECONDS):
            yield
