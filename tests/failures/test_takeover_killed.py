"""The takeover of a broken file sink, killed at each step while the producer goes on; then taken
back, killed at each step, and taken over again. Every record is in the table once."""

import shutil
from collections import Counter
from pathlib import Path

import file_sink_query
from commands import call, run_into
from imports import assert_exact
from pyspark.sql import SparkSession
from world import Make, past_hour, spread

from anabranch.common.fail_points import Step
from anabranch.offsets.hours import shift
from anabranch.operations.audit import audit

ONE_HOUR = "from anabranch.lifecycle.importing import {0}; {0}._HOURS_A_COMMIT = 1"
# The steps are the driver's: only the first run starts a JVM, which takes most of the time, and the
# others run the same tasks in their own process.
HERE = (
    "from contextlib import nullcontext; from anabranch.lifecycle.importing import tasks; "
    "from anabranch.spark import session; session.session_here = lambda *_: nullcontext(); "
    f"tasks.on_spark = lambda _: tasks.HERE; {ONE_HOUR.format('run')}"
)
LOST = Step.COMMIT_REQUEST_LOST.label
# In the order in which an hour reaches them. Each run reaches one, and goes on behind the last.
STEPS = [
    Step.IMPORT_WRITTEN.label, Step.IMPORT_DECIDED.label, Step.COMMIT_PREPARED.label,
    f"{LOST},{Step.COMMIT_DOUBTED.label}", f"{LOST},{Step.COMMIT_FENCED.label}",
    Step.COMMIT_LANDED.label, Step.IMPORT_PUBLISHED.label, Step.LEDGER_PREPARED.label,
    Step.LEDGER_APPENDED.label, Step.IMPORT_RECORDED.label, Step.COMMIT_ANSWER_LOST.label,
]  # fmt: skip
UNDO = [Step.UNDO_DECIDED.label, Step.COMMIT_LANDED.label, Step.UNDO_PUBLISHED.label]


def test_a_killed_takeover_is_exact(world: Make, spark: SparkSession, tmp_path: Path) -> None:
    one, folder, old = world(partitions=2), tmp_path / "sink", past_hour(10)
    for number in range(9):
        one.send(spread(shift(old, number), 20, f"h{number}"))
    servers = str(one.job.environment.kafka.bootstrap_servers)
    file_sink_query.write(spark.newSession(), folder, one.name, servers)
    for log in (folder / "_spark_metadata").glob("[1-3]"):
        log.write_text("v1\n{")
    shutil.rmtree(f"{folder}-checkpoint")
    one.delete_records({0: 85, 1: 88})
    one.serve()
    command = ["import", one.name, "--from", str(folder), "--takeover"]
    for number, step in enumerate(STEPS):
        one.send_now(5, f"meanwhile-{number}")
        run_into(one, step, *command, first=HERE if number else ONE_HOUR.format("run"))
        imported = Counter(row["event_id"] for row in one.rows() if row["kafka_partition"] == -1)
        assert max(imported.values(), default=1) == 1, step
    assert imported.total() == 173
    for step in UNDO:
        run_into(one, step, "import", one.name, "--undo", first=ONE_HOUR.format("undo"))
    call(one, "import", one.name, "--undo")
    assert {row["kafka_partition"] for row in one.rows()} == {0, 1}
    assert audit(one.job, None, with_kafka=True).agrees
    run_into(one, Step.COMMIT_ANSWER_LOST.label, *command, first=HERE)
    assert_exact(one)
