"""What a rebuild is at: the pass over its hour, and how many tasks of what Spark runs for it are done.

It stands beside the job's progress, and names Spark's jobs in its user interface and its event log.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from anabranch.common.progress import Progress

LOG = logging.getLogger(__name__)

_LOOKED_AT_EVERY_S = 1.0


class Passes:
    """The passes over a job's hours, one hour at a time; they are begun by the thread that asks Spark for them."""

    def __init__(self, spark: SparkSession) -> None:
        self._spark = spark
        self._hour = self._now = ""

    @contextmanager
    def of(self, hour: str) -> Iterator[None]:
        """The passes that are begun inside are this hour's, and are over with it."""
        self._hour = hour
        try:
            yield
        finally:
            self._hour = self._now = ""
            self._spark.sparkContext.setLocalProperty("spark.job.description", None)  # type: ignore[arg-type]

    def begin(self, doing: str) -> None:
        """What this thread asks Spark for is, from here on, this pass's."""
        self._now = f"hour {self._hour}: {doing}"
        self._spark.sparkContext.setJobDescription(self._now)

    @contextmanager
    def beside(self, progress: Progress) -> Iterator[None]:
        """`progress` says the pass, as it is each second."""
        ended = threading.Event()

        def look() -> None:
            while not ended.wait(_LOOKED_AT_EVERY_S):
                try:
                    progress.beside(self.text())
                except Exception:
                    # Spark is being stopped, perhaps; telling of work ends no work.
                    LOG.debug("the pass is not told any longer", exc_info=True)
                    return

        watch = threading.Thread(target=look, name="passes", daemon=True)
        watch.start()
        try:
            yield
        finally:
            ended.set()
            watch.join(_LOOKED_AT_EVERY_S)

    def text(self) -> str:
        """The pass, with the tasks of the oldest stage that runs and has several; empty between hours."""
        now = self._now
        if not now:
            return ""
        tracker = self._spark.sparkContext.statusTracker()
        for stage in sorted(tracker.getActiveStageIds()):
            about = tracker.getStageInfo(stage)
            if about is not None and about.numTasks > 1:
                return f"{now}, {about.numCompletedTasks:,} of {about.numTasks:,} tasks"
        return now
