"""Functions for tests of imports into a stream of a real broker."""

from collections.abc import Iterable
from typing import Any

from pyspark.sql import DataFrame, SparkSession
from world import SCHEMA, World

from anabranch.lifecycle.importing import run, tasks
from anabranch.operations.audit import audit


def import_from(
    one: World, spark: SparkSession, location: str, hour: str, **order: Any
) -> run.Imported:
    request = run.ImportRequest(location, hour, **order)
    return run.run(one.job, one.publisher, request, tasks.on_spark(spark))


def records_of(one: World, spark: SparkSession) -> DataFrame:
    """Kafka's records as another job reads them: the fields of their values, and their places."""
    read = spark.read.format("kafka").option("subscribe", one.name)
    read = read.option("kafka.bootstrap.servers", one.job.environment.kafka.bootstrap_servers)
    value = f"from_json(CAST(value AS STRING), '{SCHEMA.replace(' NOT NULL', '')}') AS v"
    rows = read.load().selectExpr(value, "partition", "offset", "timestamp")
    return rows.select("v.*", "partition", "offset", "timestamp")


def values_of(rows: Iterable[Any]) -> list[tuple[Any, ...]]:
    return sorted((row["event_id"], row["player"], row["level"]) for row in rows)


def assert_exact(one: World) -> None:
    """Assert that each record is in the table once, and that the stream continues from Kafka."""
    one.send_now(20, "now")
    one.speed()
    one.batch()
    assert one.ids() == sorted(event_id for _, _, event_id in one.acknowledged())
    assert audit(one.job, None, with_kafka=True).agrees
