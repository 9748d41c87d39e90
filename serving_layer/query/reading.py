"""How far the files are that a query reads, told while it runs."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import pyarrow as pa
import pyarrow.dataset as ds

from anabranch.common.progress import Progress

LOG = logging.getLogger(__name__)

_LOOKED_AT_EVERY_S = 0.5


def noted(rows: pa.RecordBatchReader, note: Callable[[], object], at_end: bool) -> pa.RecordBatchReader:
    """The same rows; `note` is called before the first of them, or behind the last."""

    def batches() -> Iterator[pa.RecordBatch]:
        for number, batch in enumerate(rows):
            if not number and not at_end:
                note()
            yield batch
        note()

    return pa.RecordBatchReader.from_batches(rows.schema, batches())


@dataclass
class Followed:
    """One reading of files: what DuckDB is given in place of a scanner."""

    scanner: ds.Scanner
    files: int
    done: int = 0

    @property
    def projected_schema(self) -> pa.Schema:
        return self.scanner.projected_schema

    def to_reader(self) -> pa.RecordBatchReader:
        """The scanner's batches, of which the file is noted; they come file by file."""
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
class Reading:
    """The readings of a query: each is followed from its beginning, by whatever thread it runs in."""

    followed: list[Followed] = field(default_factory=list)

    def follow(self, scanner: ds.Scanner, files: int) -> Followed:
        followed = Followed(scanner, files)
        self.followed.append(followed)
        return followed

    @contextmanager
    def told(self, doing: str) -> Iterator[None]:
        """While it is entered, it is told how many files were read, of those that are known to be."""
        ended = threading.Event()

        def look() -> None:
            told = 0
            while not ended.wait(_LOOKED_AT_EVERY_S):
                begun = list(self.followed)
                progress.expect(sum(one.files for one in begun))
                done = sum(one.done for one in begun)
                progress.step(done - told)
                told = done

        with Progress(LOG, doing, "files") as progress:
            watch = threading.Thread(target=look, name="reading", daemon=True)
            watch.start()
            try:
                yield
            finally:
                ended.set()
                watch.join(_LOOKED_AT_EVERY_S)
