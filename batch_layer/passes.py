"""A rebuild's progress: the pass over its hour, and the completed tasks of the running Spark job.

Shown with the job's progress, and as the description of Spark's jobs in its UI and event log.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from anabranch.common.progress import Progress, repeating
from anabranch.spark.session import LazySpark

_UPDATE_SECONDS = 1.0


class Passes:
    """The passes over a job's hours, one hour at a time. The thread that runs Spark jobs calls
    `begin`."""

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
        """Return the pass, with the task count of the oldest running stage of several tasks; empty
        between hours."""
        now = self._now
        if not now or self._spark.opened is None:
            return now
        tracker = self._spark.opened.sparkContext.statusTracker()
        for stage in sorted(tracker.getActiveStageIds()):
            about = tracker.getStageInfo(stage)
            if about is not None and about.numTasks > 1:
                return f"{now}, {about.numCompletedTasks:,} of {about.numTasks:,} tasks"
        return now
