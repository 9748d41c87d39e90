"""A Delta table on S3 is imported, while it is written on, and the stream goes on from Kafka."""

from collections.abc import Mapping

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from deltalake import DeltaTable, write_deltalake
from imports import assert_exact, import_from, records_of, values_of
from pyspark.sql import SparkSession
from world import Make, World, past_hour, spread

from anabranch.offsets.hours import shift

PARTITIONS = ["day", "player"]


def access_to(one: World) -> dict[str, str]:
    """The settings of delta-rs to write to the S3 of a world."""
    s3 = one.job.environment.s3
    assert s3.endpoint is not None and s3.access_key is not None and s3.secret_key is not None
    return {
        "AWS_ENDPOINT_URL": s3.endpoint, "AWS_ALLOW_HTTP": "true", "AWS_REGION": "us-east-1",
        "AWS_ACCESS_KEY_ID": s3.access_key.get_secret_value(),
        "AWS_SECRET_ACCESS_KEY": s3.secret_key.get_secret_value(),
    }  # fmt: skip


def records_by_day(one: World, spark: SparkSession) -> pa.Table:
    """Kafka's records as another job would have written them, with their places and their day."""
    found = records_of(one, spark).selectExpr("*", "CAST(timestamp AS DATE) AS day").toArrow()
    return found.sort_by([("partition", "ascending"), ("offset", "ascending")])


def behind(rows: pa.Table, begins: Mapping[int, int]) -> pa.Array:
    """Which rows are at offsets that the stream does not read."""
    masks = [
        pc.and_(pc.equal(rows["partition"], p), pc.less(rows["offset"], o))
        for p, o in begins.items()
    ]
    return pc.or_(*masks)


@pytest.mark.full
def test_a_delta_table_in_use_is_imported(world: Make, spark: SparkSession) -> None:
    one, old = world(partitions=2), past_hour(5)
    for number in range(4):
        one.send(spread(shift(old, number), 50, f"h{number}"))
    location, access = f"s3://tests/old/{one.name}", access_to(one)

    def write(rows: pa.Table, mode: str = "append") -> None:
        write_deltalake(location, rows, mode=mode, partition_by=PARTITIONS, storage_options=access)

    records = records_by_day(one, spark)
    # A first try that was overwritten, appends of a few rows, and a compaction: their files stay in
    # storage.
    write(records.slice(0, 120))
    write(records.slice(0, 40), "overwrite")
    for begin in range(40, 200, 40):
        write(records.slice(begin, 40))
    table = DeltaTable(location, storage_options=access)
    assert table.optimize.compact()["numFilesRemoved"] > 0
    version = DeltaTable(location, storage_options=access).version()
    by_delta = DeltaTable(location, version=version, storage_options=access).to_pyarrow_table()
    assert len(by_delta) == 200
    # Kafka has deleted a part of the last hour's records; there the stream begins.
    begins = {0: 90, 1: 95}
    one.delete_records(begins)
    one.serve()
    first = import_from(one, spark, location, shift(old, 2))
    assert first.plan.version == version
    # Written on meanwhile: a record that is late, and the removal of a player.
    write(records.slice(0, 1))
    DeltaTable(location, storage_options=access).delete("player = 'p3'")
    done = import_from(one, spark, location, old)
    assert (done.plan.version, first.good + done.good, done.duplicate, done.plan.after) == (
        version, 185, 0, 15,
    )  # fmt: skip
    imported = (row for row in one.rows() if row["kafka_partition"] == -1)
    assert values_of(imported) == values_of(by_delta.filter(behind(by_delta, begins)).to_pylist())
    assert_exact(one)
    assert import_from(one, spark, location, old).hours == ()
