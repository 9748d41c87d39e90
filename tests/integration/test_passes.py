"""A rebuild shows what it is at while it works: its pass, and how far Spark is with it."""

import threading
import time
from collections.abc import Iterator
from pathlib import Path

from pyspark.sql import SparkSession
from waiting import wait_for
from world import hours_of_now, past_hour

from anabranch.common.logs import LOG, Progress
from anabranch.spark.session import LazySpark
from batch_layer.passes import Passes

HOUR = past_hour(1)
hours_of_each_test = hours_of_now(globals(), HOUR=1)


def test_the_tasks_of_the_stage_that_runs_are_counted(spark: SparkSession, tmp_path: Path) -> None:
    passes, may_end = Passes(LazySpark.of(spark)), tmp_path / "may-end"
    reported: list[str] = []

    def wait(numbers: Iterator[int]) -> Iterator[int]:
        deadline = time.monotonic() + 60
        while not may_end.exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        return numbers

    def work() -> None:
        with passes.for_hour(HOUR):
            passes.begin("read and decode")
            spark.sparkContext.parallelize(range(5), 5).mapPartitions(wait).count()

    progress = Progress(LOG, "stream s", "hours", 1)
    worker = threading.Thread(target=work)
    with passes.show_on(progress):
        worker.start()
        wait_for(lambda: "tasks" in progress.line(), "tasks to be counted")
        reported.append(progress.line())
        may_end.touch()
        worker.join(300)
        assert not worker.is_alive()
        wait_for(lambda: not progress.line().endswith("tasks"), "the end of the tasks")
        reported.append(progress.line())
    assert reported[0].endswith(f"so far; hour {HOUR}: read and decode, 0 of 5 tasks")
    assert reported[1].endswith("so far")
