"""The roll-up of a running hour by the real Spark: few files, the same rows for every engine."""

from datetime import UTC, datetime

import pytest
from world import Make, World, event

from anabranch.iceberg import rewriting

SCHEMA = (
    "event_id STRING NOT NULL, event_time TIMESTAMP NOT NULL, small DECIMAL(9,2), mid "
    "DECIMAL(18,3), large DECIMAL(38,4), day DATE, raw BINARY, f FLOAT, d DOUBLE, yes BOOLEAN, i "
    "INT, l BIGINT, list ARRAY<DOUBLE>, map MAP<STRING, STRUCT<x: FLOAT, y: ARRAY<STRING>>>, deep "
    "STRUCT<a: STRUCT<b: DOUBLE>, c: ARRAY<ARRAY<INT>>>"
)
MORE = SCHEMA + ", more STRING"
VALUES = {
    "small": 1.25, "mid": -3.125, "large": 12345678901234567890, "day": "2026-11-01", "raw": "eA==",
    "f": 0.1, "d": -0.0, "yes": True, "i": 7, "l": -5, "list": [1.5, None],
    "map": {"k": {"x": 0.5, "y": ["z", None]}, "n": None},
    "deep": {"a": {"b": 2.5}, "c": [[1, None], [], None]}, "more": "later",
}  # fmt: skip


def by_engines(one: World) -> tuple[list[str], list[str]]:
    """The rows as Spark and PyIceberg read them."""
    by_spark = one.spark.table(f"lake.{one.job.stream.table}").collect()
    return sorted(map(str, by_spark)), sorted(map(repr, one.rows()))


@pytest.mark.full
def test_rolled_up_files_are_read_by_spark_and_pyiceberg(world: Make) -> None:
    few = {"trigger": "1 second", "max_offsets_per_trigger": 2, "roll_up": False}
    one = world(schema=SCHEMA, speed=few, create=2)
    now = datetime.now(UTC)
    for prefix, schema in (("old", SCHEMA), ("new", MORE)):
        one.evolve(schema=schema)
        values = [event(f"{prefix}-{i}", now, **(VALUES if i % 3 else {})) for i in range(9)]
        one.send([(i % 2, now, value) for i, value in enumerate(values)])
        one.speed()
    rows, many = by_engines(one), len(one.files())
    assert many >= 18

    one.reconfigure(speed={"trigger": "1 second"})
    one.speed()

    table, left = one.state.table, one.files()
    assert 2 <= len(left) <= many - 14, "files of the two schemas are not put together"
    kinds = {rewriting.schema_text(rewriting.opened(table, f)) for f in left}
    assert len(kinds) == 2
    assert by_engines(one) == rows


def test_a_micro_batch_leaves_a_file_for_each_task_that_runs_at_once(world: Make) -> None:
    one = world(speed={"trigger": "1 second", "max_offsets_per_trigger": 1000, "roll_up": False})
    one.topic(partitions=6)
    one.send_now(60, "now", partitions=6)
    one.serve([(5, datetime.now(UTC), b"{")])
    # Six partitions, two cores.
    assert len(one.files()) == 2
    assert len(one.dead()) == 1
    one.sent = one.sent[:-1]
    assert one.contents() == one.contents("speed") == one.acknowledged()
