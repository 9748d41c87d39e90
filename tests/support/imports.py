"""Functions for tests of imports into a stream of a real broker."""

from collections.abc import Iterable
from typing import Any

from pyspark.sql import SparkSession
from world import World

from anabranch.lifecycle.importing import run, tasks
from anabranch.operations.audit import audit
from anabranch.protocol.publisher import Publisher


def import_from(
    one: World, spark: SparkSession, location: str, hour: str, **order: Any
) -> run.Imported:
    request = run.ImportRequest(location, hour, **order)
    return run.run(one.job, Publisher(one.lake, one.job.stream), request, tasks.on_spark(spark))


def values_of(rows: Iterable[Any]) -> list[tuple[Any, ...]]:
    return sorted((row["event_id"], row["player"], row["level"]) for row in rows)


def assert_exact(one: World) -> None:
    """Assert that the stream continues from Kafka, and that each record is in the table once, from
    files or from Kafka."""
    one.send_now(20, "now")
    one.speed()
    one.batch()
    assert sorted(row["event_id"] for row in one.rows()) == sorted(
        event_id for _, _, event_id in one.acknowledged()
    )
    assert audit(one.job, None, with_kafka=True).agrees
