"""The passes of a rebuild over its hour: their progress, the division of work, and records that
they read again.

Progress, the pass and the completed tasks of the running Spark job, is shown with the job's, and as
the description of Spark's jobs in its UI and event log. Tasks, shuffle partitions and files follow
an hour's size, not the machine. Records are computed once and cached on the executors' disks: a
thread builds one hour at a time, and other threads may build other streams' hours in the same
Spark, so each releases its own records.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

from pyiceberg.manifest import DataFile
from pyspark import StorageLevel
from pyspark.sql import DataFrame

from anabranch.common.logs import Progress, repeating
from anabranch.spark.session import LazySpark

_UPDATE_SECONDS = 1.0


class Passes:
    """The passes over a job's hours, one hour at a time, begun by the thread of Spark's jobs."""

    def __init__(self, spark: LazySpark) -> None:
        self._spark = spark
        self._hour = self._now = ""

    @contextmanager
    def for_hour(self, hour: str) -> Iterator[None]:
        """Assign the passes begun inside to this hour, and end them with it."""
        self._hour = hour
        try:
            yield
        finally:
            self._hour = self._now = ""
            if self._spark.opened is not None:
                self._spark.opened.sparkContext.setLocalProperty("spark.job.description", None)  # type: ignore[arg-type]

    def begin(self, doing: str) -> None:
        """Name the Spark jobs that this thread starts from now on."""
        self._now = f"hour {self._hour}: {doing}"
        if self._spark.opened is not None:
            self._spark.opened.sparkContext.setJobDescription(self._now)

    @contextmanager
    def show_on(self, progress: Progress) -> Iterator[None]:
        """Show the current pass on `progress`, updated each second."""
        # Spark may be stopping: a failed update must not end the job.
        with repeating(lambda: progress.beside(self.text()), _UPDATE_SECONDS):
            yield

    def text(self) -> str:
        """Return the pass, with the tasks of the oldest running stage; empty between hours."""
        now = self._now
        if not now or self._spark.opened is None:
            return now
        tracker = self._spark.opened.sparkContext.statusTracker()
        for stage in sorted(tracker.getActiveStageIds()):
            about = tracker.getStageInfo(stage)
            if about is not None and about.numTasks > 1:
                return f"{now}, {about.numCompletedTasks:,} of {about.numTasks:,} tasks"
        return now


SMALL = 50_000
"""Maximum number of offsets of a small hour: once read, one task does each step of it."""

MOST_HASHED = 8_000_000
"""Maximum number of offsets of an hour whose keys' hashes the driver compares: 8 bytes each, in
Java, Python, and once more while they are sorted."""

# Files of at least this size are written by a task each, while cores are free.
_SMALL_FILE_BYTES = 16 * 2**20
# Estimated bytes of a row if the speed layer has no file of the hour.
_ROW_BYTES = 128
_RECORDS_PER_SHUFFLE = 250_000


def in_one_task(rows: DataFrame, offsets: int) -> DataFrame:
    """Return the rows, read by one task if the hour is small. Spark then does not shuffle them, and
    compiles and runs fewer stages."""
    return rows.coalesce(1) if offsets <= SMALL else rows


def shuffle_partitions(offsets: int, at_once: int) -> int:
    """Return the number of shuffle partitions of an hour; `at_once` tasks run in parallel."""
    return max(at_once, math.ceil(offsets / _RECORDS_PER_SHUFFLE))


def write_tasks(rows: int, of_speed: Sequence[DataFile], at_once: int, file_bytes: int) -> int:
    """Return the number of tasks that write an hour's rows; each writes one file per event date.

    No file is larger than `file_bytes`, estimated by the bytes of a row in the speed layer's files.
    Up to `at_once` tasks are used as long as the files are not small.
    """
    known = sum(f.record_count for f in of_speed)
    row_bytes = sum(f.file_size_in_bytes for f in of_speed) / known if known else _ROW_BYTES
    size = rows * row_bytes
    return max(1, math.ceil(size / file_bytes), min(at_once, math.floor(size / _SMALL_FILE_BYTES)))


_THREAD_STATE = threading.local()


def cached(
    frame: DataFrame, level: StorageLevel = StorageLevel.DISK_ONLY, *, is_lazy: bool = False
) -> DataFrame:
    """Return the same records, computed now and cached: by default on disk, so that memory does not
    grow with the hour. `is_lazy`: the first action computes and caches the part that it reads.

    Within `released_at_the_end`, the records stay cached until its end.
    """
    checkpoint = frame.localCheckpoint(eager=not is_lazy, storageLevel=level)
    # Spark itself frees them only after a garbage collection of Java.
    records = checkpoint._jdf.queryExecution().analyzed().rdd()
    getattr(_THREAD_STATE, "kept", []).append(lambda: records.unpersist(False))
    return checkpoint


@contextmanager
def released_at_the_end() -> Iterator[None]:
    """Free the records that this thread caches inside."""
    before, _THREAD_STATE.kept = getattr(_THREAD_STATE, "kept", None), []
    try:
        yield
    finally:
        # If the JVM is gone there is nothing to free, and its own error is raised.
        with suppress(Exception):
            for release in _THREAD_STATE.kept:
                release()
        _THREAD_STATE.kept = before if before is not None else []
