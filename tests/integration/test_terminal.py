"""Permanent errors end both jobs, with cause and exit code; nothing is lost."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from pyspark.sql import functions as F
from world import Make, past_hour, spread

from anabranch import job as session
from anabranch.common.errors import JvmGone, Unexpected, Unexplained
from anabranch.records import staged
from anabranch.spark.session import explain_spark, explained
from batch_layer import sources
from speed_layer import micro_batch

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


@pytest.fixture
def overflowing(monkeypatch: pytest.MonkeyPatch, by_spark: None) -> Iterator[pytest.MonkeyPatch]:
    """Every task that reads throws a real ArithmeticException for the records of one hour."""
    stage_certain = staged.stage_certain

    def overflow(frame: DataFrame) -> DataFrame:
        # The first ten offsets are of the first of the two hours.
        return frame.where(F.expr("9223372036854775807 + if(offset < 10, 1, -1) > 0"))

    with monkeypatch.context() as patched:
        for layer in (sources, micro_batch):
            patched.setattr(
                layer, "stage_certain", lambda frame, *rest: stage_certain(overflow(frame), *rest)
            )
        yield patched


def test_an_arithmetic_exception_in_a_task_ends_both_jobs_and_nothing_is_lost(
    world: Make, overflowing: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    one = world(partitions=1)
    one.begin(
        [*spread(past_hour(2), 10, "e", partitions=1), *spread(past_hour(1), 10, "f", partitions=1)]
    )
    speed = one.state.heads["speed"]
    for job in (one.speed, one.batch):

        def run(_: object, job: Callable[[], object] = job) -> int:
            job()
            return 0

        with pytest.raises(SystemExit) as ended:
            session.main(run, [])
        said = capfd.readouterr().err.splitlines()
        lines = [line for line in said if " ERROR   " in line or " WARNING " in line]
        assert ended.value.code == 70, lines
        assert ": ArithmeticException: [ARITHMETIC_OVERFLOW]" in lines[-1], lines
        # The hazard was tried for ever by the speed job, and was a traceback with exit code 1 in
        # the batch job.
        assert not [line for line in lines if "try 2" in line]
        if job == one.speed:
            assert one.state.heads["speed"] == speed
    # The hour that broke the batch job held back no other.
    assert set(one.state.accepted) == {past_hour(1)}
    assert not [r for r in one.job.ledger.history() if r.decision == "refused"]
    overflowing.undo()
    one.speed()
    one.batch()
    assert set(one.state.accepted) == {past_hour(2), past_hour(1)}
    assert one.contents() == one.acknowledged()


def test_errors_of_spark_are_classified(spark: SparkSession) -> None:
    rows = spark.range(1, 3)
    with pytest.raises(Unexpected, match="ARITHMETIC_OVERFLOW"), explained(spark, "count"):
        rows.select(F.expr("9223372036854775807 + id")).collect()
    # Another try loads the table again, so a schema that changed meanwhile, or a table that was not
    # there for a moment, is said by its own name.
    with pytest.raises(Unexplained, match=r"UNRESOLVED_COLUMN|nope"), explained(spark, "select"):
        rows.select("nope")
    with pytest.raises(Unexplained, match="TABLE_OR_VIEW_NOT_FOUND"), explained(spark, "load"):
        spark.table("lake.nowhere.to_be_found").count()
    # What else Spark finds wrong with a plan, it finds each time.
    with pytest.raises(Unexpected, match="UNRESOLVED_ROUTINE"), explained(spark, "select"):
        rows.select(F.expr("nope(id)"))
    with pytest.raises(Unexpected, match="PARSE_SYNTAX_ERROR"), explained(spark, "select"):
        rows.selectExpr("id +")


def test_a_stopped_context_and_a_lost_jvm_end_the_process_with_exit_code_75(tmp_path: Path) -> None:
    """The hazards: a master that removes an application stops its context, but the JVM answers. A
    machine that slept ends the whole JVM; stopping Spark then raises over the first error."""
    script = (
        "import os, signal\nfrom pyspark.sql import SparkSession\nfrom anabranch.job import "
        "main\nfrom anabranch.spark.session import close_session, explain_spark, explained\nspark "
        "= SparkSession.builder.master('local[1]').config('spark.ui.enabled', "
        "'false').getOrCreate()\njvm = "
        "spark.sparkContext._jvm.java.lang.ProcessHandle.current().pid()\nspark.sparkContext._jsc.sc().stop()\ntry:\n    "
        "spark.range(3).count()\nexcept Exception as error:\n    print('FOUND', "
        "type(explain_spark(spark, 'count', error)).__name__)\ndef run(_):\n    try:\n        "
        "os.kill(jvm, signal.SIGKILL)\n        with explained(spark, 'count'):\n            "
        "spark.range(3).count()\n    finally:\n        close_session(spark)\nmain(run, [])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, timeout=120,
        check=False,
    )  # fmt: skip
    assert f"FOUND {JvmGone.__name__}" in done.stdout, done.stdout + done.stderr[-2000:]
    assert done.returncode == JvmGone("").exit_code == 75, done.stderr[-2000:]
    # py4j logs the broken connection before.
    gone = "expected Spark's JVM to answer, found it gone; nothing is lost, start it again"
    assert gone in done.stderr.rstrip().splitlines()[-1]
    assert "in close_session" not in done.stderr


def test_our_errors_pass_through_spark_unchanged(spark: SparkSession) -> None:
    error = Unexpected("no")
    assert explain_spark(spark, "count", error) is error
