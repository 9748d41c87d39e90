"""The folder of a real query of Spark's file sink is imported, and the stream goes on from Kafka."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import file_sink_query
from pyspark.sql import SparkSession
from world import World, past_hour, spread

from anabranch.iceberg.s3 import open_store
from anabranch.offsets.hours import shift
from anabranch.operations.audit import audit
from anabranch.operations.importing import run
from anabranch.protocol.publisher import Publisher

Make = Callable[..., World]


def import_from(one: World, location: str, hour: str) -> run.Imported:
    return run.run(one.job, Publisher(one.lake, one.job.stream), run.Order(location, hour))


def upload(one: World, folder: Path) -> str:
    """A copy of a folder on S3; returns its location."""
    store = open_store(one.job.environment.s3)
    for path in (path for path in folder.rglob("*") if path.is_file()):
        key = f"old/{one.name}/{path.relative_to(folder)}"
        store.put("tests", key, path.read_bytes(), "application/octet-stream")
    return f"s3://tests/old/{one.name}"


def values_of(rows: Iterable[Any]) -> list[tuple[Any, ...]]:
    return sorted((row["event_id"], row["player"], row["level"]) for row in rows)


def assert_exact(one: World) -> None:
    """The stream goes on from Kafka, and each record is in the table once, read from files or from Kafka."""
    one.send_now(20, "now")
    one.speed()
    one.batch()
    assert sorted(row["event_id"] for row in one.rows()) == sorted(event_id for _, _, event_id in one.acknowledged())
    assert audit(one.job, None, with_kafka=True).agrees


def test_the_folder_of_a_file_sink_is_imported_and_the_stream_goes_on(
    world: Make, spark: SparkSession, tmp_path: Path
) -> None:
    one, folder, old = world(), tmp_path / "sink", past_hour(5)
    one.topic()
    for number in range(4):
        one.send(spread(shift(old, number), 50, f"h{number}"))
    session = spark.newSession()
    for key, value in file_sink_query.LOG.items():
        session.conf.set(key, value)
    file_sink_query.write(session, folder, one.name, one.job.environment.kafka.bootstrap_servers)
    # Nothing but the compact file has the files of the first micro-batches.
    log = {path.name for path in (folder / "_spark_metadata").glob("[0-9]*")}
    assert log == {"2.compact", "3", "4"}
    by_spark = spark.read.parquet(str(folder)).collect()
    assert len(by_spark) == 200
    # What micro-batches leave that are killed: a file that no log file lists, and one that is cut short.
    again = spark.createDataFrame(by_spark[:30], spark.read.parquet(str(folder)).schema)
    again.coalesce(1).write.parquet(str(tmp_path / "again"))
    for path in (tmp_path / "again").glob("part-*.parquet"):
        path.rename(folder / path.name)
    (folder / f"part-00001-{uuid.uuid4()}-c000.snappy.parquet").write_bytes(b"PAR1 and no end")
    # Kafka has deleted a part of the last hour's records; there the stream begins.
    begins = {0: 90, 1: 95}
    one.delete_records(begins)
    one.apply()
    one.speed()
    location = upload(one, folder)
    done = import_from(one, location, old)
    assert done.plan.notes[0].endswith("micro-batches up to 4; 2 others are left out")
    assert (done.good, done.duplicate, done.plan.after) == (185, 0, 15)
    imported = (row for row in one.rows() if row["kafka_partition"] == -1)
    assert values_of(imported) == values_of(row for row in by_spark if row["offset"] < begins[row["partition"]])
    assert_exact(one)
    assert import_from(one, location, old).hours == ()
