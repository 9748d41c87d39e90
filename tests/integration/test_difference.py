"""The difference of the two layers, on frames of every type that a stream may have."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.types import StructType

from anabranch.offsets.position import Ranges
from anabranch.records.reshape import to_schema
from serving_layer.layer_diff import spark as layer_diff
from serving_layer.layer_diff.duckdb import compare_hashes
from serving_layer.layer_diff.kinds import SAMPLE, Difference

SCHEMA = (
    "kafka_partition INT, kafka_offset BIGINT, a INT, b INT, tags ARRAY<STRING>, scores "
    "MAP<STRING, DOUBLE>, nested STRUCT<n: INT, m: MAP<STRING, INT>>"
)
NOTHING = (None, None, None, None, None)


def rows(spark: SparkSession, *values: tuple[Any, ...]) -> DataFrame:
    return spark.createDataFrame(list(values), SCHEMA)


def compare(speed: DataFrame, batch: DataFrame, removed: DataFrame, unread: Ranges) -> Difference:
    """Return what Spark finds; the comparison of a small hour without Spark finds the same."""
    found = layer_diff.compare(speed, batch, removed, unread)
    assert compare_hashes(*layer_diff.read_hashes(speed, batch), removed.toArrow(), unread) == found
    return found


def test_missing_extra_and_duplicate_rows_are_distinguished(spark: SparkSession) -> None:
    speed = rows(spark, (0, 1, *NOTHING), (0, 2, *NOTHING), (0, 3, *NOTHING))
    batch = rows(spark, (0, 1, *NOTHING), (0, 4, *NOTHING))
    removed = spark.createDataFrame([(0, 2)], "kafka_partition INT, kafka_offset BIGINT")
    found = compare(speed, batch, removed, {})
    diff = found.diff
    assert (found.speed_rows, diff.missing, diff.extra, diff.changed, diff.duplicate) == (
        3,
        1,
        1,
        0,
        1,
    )
    assert [(s["kind"], s["offset"]) for s in diff.sample or ()] == [("extra", 3), ("missing", 4)]


def test_unread_offsets_explain_missing_rows(spark: SparkSession) -> None:
    no_rows = spark.createDataFrame([], "kafka_partition INT, kafka_offset BIGINT")
    batch = rows(spark, (0, 1, *NOTHING), (0, 2, *NOTHING), (1, 2, *NOTHING))
    diff = compare(rows(spark, (0, 1, *NOTHING)), batch, no_rows, {0: (2, 9)}).diff
    assert (diff.missing, diff.unread, diff.extra) == (2, 1, 0)
    assert [(s["kind"], s["partition"]) for s in diff.sample or ()] == [
        ("missing", 1),
        ("unread", 0),
    ]


def test_every_kind_is_counted_wherever_among_the_offsets_it_is(spark: SparkSession) -> None:
    """Against a plain count, over many blocks: most alike, some with one thing in them, some with
    several."""
    at, dice = "kafka_partition INT, kafka_offset BIGINT", random.Random(7)
    kinds = ["same"] * 400 + ["missing", "extra", "changed", "duplicate", "absent"]
    speed, batch, removed, counted = [], [], [], Counter[str]()
    for offset in range(6_000):
        kind = dice.choice(kinds) if offset % 1_500 > 300 else "same"
        # Unread offsets are a range.
        kind = "unread" if 2_000 <= offset < 2_200 else kind
        counted[kind] += 1
        if kind in ("same", "extra", "changed", "duplicate"):
            speed.append((1, offset, f"v{offset % 7}"))
        if kind in ("same", "missing", "unread", "changed"):
            batch.append((1, offset, f"v{offset % 7}" if kind != "changed" else "other"))
        if kind == "duplicate":
            removed.append((1, offset))
    # Two that changed places, and a row three times: what a digest alone would not see.
    speed[0], speed[1] = (1, 0, speed[1][2]), (1, 1, speed[0][2])
    speed += [speed[200], speed[200]]
    assert all(
        counted[kind] > 1 for kind in ("missing", "unread", "extra", "changed", "duplicate")
    ), counted
    ours, theirs = (spark.createDataFrame(rows, f"{at}, v STRING") for rows in (speed, batch))
    found = compare(ours, theirs, spark.createDataFrame(removed, at), {1: (2_000, 2_200)})
    diff = found.diff
    assert found.speed_rows == len(speed)
    assert (diff.missing, diff.unread) == (
        counted["missing"] + counted["unread"],
        counted["unread"],
    )
    # The row that the speed layer has three times counts three times.
    assert found.batch_rows == len(batch) + 2
    assert (diff.extra, diff.changed, diff.duplicate) == (
        counted["extra"],
        counted["changed"] + 2,
        counted["duplicate"],
    )
    assert [s["offset"] for s in (diff.sample or ())[:2]] == [0, 1]


CHANGES: list[tuple[tuple[Any, ...], tuple[Any, ...]]] = [
    ((1, None, None, None, None), (None, 1, None, None, None)),
    ((1, 2, ["a"], None, None), (1, 2, ["b"], None, None)),
    ((1, 2, [None], None, None), (1, 2, [], None, None)),
    ((1, 2, None, {"k": 1.0}, None), (1, 2, None, {"k": 2.0}, None)),
    ((1, 2, None, {"k": None}, None), (1, 2, None, {}, None)),
    ((1, 2, None, None, (1, {"k": 1})), (1, 2, None, None, (None, {"k": 1}))),
    ((1, 2, None, None, (None, None)), (1, 2, None, None, None)),
]


def test_other_content_is_seen_in_every_type(spark: SparkSession) -> None:
    no_rows = spark.createDataFrame([], "kafka_partition INT, kafka_offset BIGINT")
    # Far apart: no block of offsets has two changes.
    at = {10_000 * i: change for i, change in enumerate(CHANGES)}

    def frame(which: int) -> DataFrame:
        return rows(spark, *((0, offset, *change[which]) for offset, change in at.items()))

    for which in (0, 1):
        assert compare(frame(which), frame(which), no_rows, {}).diff.changed == 0
    diff = compare(frame(0), frame(1), no_rows, {}).diff
    assert (diff.missing, diff.extra, diff.changed) == (0, 0, len(CHANGES))
    assert [(s["kind"], s["offset"]) for s in diff.sample or ()] == [
        ("changed", offset) for offset in [*at][:SAMPLE]
    ]


def test_rows_of_an_earlier_schema_differ_by_value_and_not_by_type(spark: SparkSession) -> None:
    at = "kafka_partition INT, kafka_offset BIGINT"
    earlier = f"{at}, n INT, f FLOAT, s STRUCT<a: INT>, tags ARRAY<INT>, m MAP<STRING, INT>"
    later = (
        f"{at}, n BIGINT, f DOUBLE, s STRUCT<a: BIGINT, b: STRING>, tags ARRAY<BIGINT>, m "
        "MAP<STRING, BIGINT>, z INT"
    )
    common = StructType.fromDDL(
        f"{at}, n BIGINT, f FLOAT, s STRUCT<a: BIGINT>, tags ARRAY<BIGINT>, m MAP<STRING, BIGINT>"
    )
    assert isinstance(common, StructType)
    no_rows = spark.createDataFrame([], at)
    same = (0.1, (1,), [1], {"k": 1})
    speed = [
        (0, 1, 1, *same),
        (0, 2, 1, *same),
        (0, 3, None, *same),
        (0, 4, 1, None, None, None, None),
    ]
    now = (0.1, (1, "b"), [1], {"k": 1}, 7)
    batch = [
        (0, 1, 1, *now),
        (0, 2, 2, *now),
        (0, 3, None, *now),
        (0, 4, 1, None, None, None, None, 7),
    ]
    ours, theirs = spark.createDataFrame(speed, earlier), spark.createDataFrame(batch, later)
    diff = compare(to_schema(ours, common), to_schema(theirs, common), no_rows, {}).diff
    assert (diff.missing, diff.extra, diff.changed) == (0, 0, 1)
    assert diff.sample == ({"kind": "changed", "partition": 0, "offset": 2},)
    # Without it, every row that the widened number is in would be called another.
    names = [field.name for field in ours.schema.fields]
    assert compare(ours, theirs.select(*names), no_rows, {}).diff.changed > 1
