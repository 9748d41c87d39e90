"""The folder of a real query of Spark's file sink is imported; the stream goes on."""

import json
import os
import shutil
import subprocess
import sys
import uuid
from contextlib import nullcontext
from pathlib import Path

import file_sink_query
import pytest
from budget import full
from commands import call, run, run_into
from imports import assert_exact, import_from, records_of, values_of
from pyspark.sql import SparkSession
from world import Make, World, past_hour, spread

from anabranch.iceberg.s3 import open_store
from anabranch.offsets.hours import shift
from anabranch.operations.audit import audit
from anabranch.spark import session


def upload(one: World, folder: Path) -> str:
    """A copy of a folder on S3; returns its location."""
    store = open_store(one.job.environment.s3)
    for path in (path for path in folder.rglob("*") if path.is_file()):
        key = f"old/{one.name}/{path.relative_to(folder)}"
        store.put("tests", key, path.read_bytes(), "application/octet-stream")
    return f"s3://tests/old/{one.name}"


@pytest.mark.full
def test_a_twice_killed_sink_is_imported(world: Make, spark: SparkSession, tmp_path: Path) -> None:
    """The hazard: a query that is killed twice within a micro-batch, once a file of it is there."""
    one, folder, old = world(partitions=2), tmp_path / "sink", past_hour(25)
    for number in range(24):
        one.send(spread(shift(old, number), 20, f"h{number}"))
    support = str(Path(file_sink_query.__file__).parent)
    servers = str(one.job.environment.kafka.bootstrap_servers)
    command = [sys.executable, file_sink_query.__file__, str(folder), one.name, servers]
    environment = os.environ | {
        "PYTHONPATH": support,
        "SPARK_LOCAL_IP": "127.0.0.1",
        "PYSPARK_PYTHON": sys.executable,
    }

    def write(*killed_at: str) -> int:
        with (tmp_path / "query.log").open("ab") as log:
            return subprocess.run(
                [*command, *killed_at], env=environment, stdout=log, stderr=log
            ).returncode

    for number, event_id in enumerate(("h3-1", "h15-1"), 1):
        assert write(event_id) != 0
        unlisted = file_sink_query.unlisted_files(folder)
        assert len(unlisted) == number, (tmp_path / "query.log").read_text()
    assert write() == 0, (tmp_path / "query.log").read_text()
    assert len(file_sink_query.unlisted_files(folder)) == 2
    # Nothing but the compact file has the files of the first micro-batches.
    log = {path.name for path in (folder / "_spark_metadata").glob("[0-9]*")}
    assert "0" not in log and any(name.endswith(".compact") for name in log)
    by_spark = spark.read.parquet(str(folder)).collect()
    assert len(by_spark) == 480
    (folder / f"part-00001-{uuid.uuid4()}-c000.snappy.parquet").write_bytes(b"PAR1 and no end")
    # Kafka has deleted a part of the last hour's records; there the stream begins.
    begins = {0: 233, 1: 236}
    one.delete_records(begins)
    one.serve()
    location = upload(one, folder)
    done = import_from(one, spark, location, old)
    last = max(int(name.removesuffix(".compact")) for name in log)
    assert f"through micro-batch {last}; 3 files that the log does not list" in done.plan.notes[0]
    assert (done.good, done.duplicate, done.plan.after) == (469, 0, 11)
    imported = (row for row in one.rows() if row["kafka_partition"] == -1)
    assert values_of(imported) == values_of(
        row for row in by_spark if row["offset"] < begins[row["partition"]]
    )
    assert_exact(one)
    assert import_from(one, spark, location, old).hours == ()


@pytest.mark.parametrize(("seam", "form"), [("offsets", "parquet"), full("key", "json")])
def test_a_folder_whose_log_is_gone_is_imported_once(
    world: Make, spark: SparkSession, tmp_path: Path, seam: str, form: str
) -> None:
    one, folder, old = world(partitions=2), tmp_path / "sink", past_hour(4)
    for number in range(3):
        one.send(spread(shift(old, number), 40, f"h{number}"))
    rows = records_of(one, spark)
    rows.coalesce(1).write.format(form).save(str(folder))
    # A micro-batch that was written twice, since its job was killed.
    again = rows.where("offset BETWEEN 5 AND 30").coalesce(1)
    again.write.format(form).mode("append").save(str(folder))
    one.delete_records({0: 50, 1: 45})
    one.serve()
    one.batch()
    done = import_from(one, spark, str(folder), old, by_key=seam == "key")
    assert "it has no _spark_metadata" in done.plan.notes[0]
    assert (done.good, done.duplicate) == (95, 52)
    assert_exact(one)


@pytest.mark.full
def test_a_killed_import_is_continued_and_taken_back(world: Make, tmp_path: Path) -> None:
    one, old = world(partitions=2), past_hour(30)
    one.send_now(5, "now")
    one.serve()
    lines = [
        {"event_id": f"old-{hour}-{n % 40}", "event_time": f"{shift(old, hour)}:10:00Z", "level": n}
        for hour in range(20)
        for n in range(50)
    ]
    (tmp_path / "old").mkdir()
    (tmp_path / "old/a.log").write_text("\n".join(map(json.dumps, lines)))
    given = ["import", one.name, "--from", f"json:{tmp_path}/old", "--hours", f"{old}.."]
    given += ["--seam", "key"]
    # The hazard: files are written, and no commit names them.
    run_into(one, "import.decided:1", *given)
    assert {row["kafka_partition"] for row in one.rows()} == {0, 1}
    assert "imported 800 of 1000 rows into 30 hours; left out 200" in run(one, *given)
    rows = [row for row in one.rows() if row["kafka_partition"] == -1]
    assert sorted(row["event_id"] for row in rows) == sorted({line["event_id"] for line in lines})
    assert audit(one.job, None, with_kafka=True).agrees
    undone = call(one, "import", one.name, "--undo", "--why", "a try")
    assert "took 30 imported hours back" in undone and "with 800 rows" in undone
    assert {row["kafka_partition"] for row in one.rows()} == {0, 1}
    assert audit(one.job, None, with_kafka=True).agrees


def test_a_file_sink_whose_log_broke_is_taken_over_while_the_producer_goes_on(
    world: Make, spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, folder = world(partitions=2), tmp_path / "sink"
    for ago in (5, 4, 3, 2):
        one.send(spread(past_hour(ago), 50, f"h{ago}"))
    servers = str(one.job.environment.kafka.bootstrap_servers)
    file_sink_query.write(spark.newSession(), folder, one.name, servers)
    # What the forums describe: a log file is cut short, the checkpoint is deleted, Kafka's
    # retention goes on, and a batch was written twice.
    for log in (folder / "_spark_metadata").glob("[1-3]"):
        log.write_text("v1\n{")
    shutil.rmtree(f"{folder}-checkpoint")
    twice = min(folder.glob("part-*.parquet"))
    shutil.copy(twice, folder / f"part-00009-{uuid.uuid4()}-c000.snappy.parquet")
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    one.delete_records({0: 90, 1: 95})
    one.send_now(20, "meanwhile")
    one.serve()
    given = ["import", one.name, "--from", str(folder), "--takeover"]
    run_into(one, "import.published:1", *given)
    one.send_now(20, "later")
    # The same command, which need not start another Spark.
    monkeypatch.setattr(session, "session_here", lambda *_: nullcontext(spark))
    text = call(one, *given)
    assert "all files count, also those of killed micro-batches, since its log is damaged" in text
    assert "each record is in the table once" not in text and "rows too many" in text
    assert before == {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    imported = [row for row in one.rows() if row["kafka_partition"] == -1]
    assert len(imported) == 185
    assert_exact(one)
