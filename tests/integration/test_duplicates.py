"""Duplicates: which record of an event is kept, within the hour and against what `main` serves."""

from __future__ import annotations

import random
import re

import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from batch_layer.duplicates import drop_duplicates

SCHEMA = "id STRING, part INT, kafka_partition INT, kafka_offset BIGINT, payload STRING"
Rows = list[tuple[str | None, int | None, int, int, str]]


def frame(spark: SparkSession, rows: Rows, slices: int = 1) -> DataFrame:
    return spark.createDataFrame(rows, SCHEMA).repartition(slices)


def kept(result: DataFrame) -> list[tuple[int, int]]:
    return sorted((r.kafka_partition, r.kafka_offset) for r in result.collect())


def test_smallest_offset_then_partition_wins(spark: SparkSession) -> None:
    rows: Rows = [
        ("a", 1, 0, 9, "late"),
        ("a", 1, 2, 5, "same offset, higher partition"),
        ("a", 1, 1, 5, "kept"),
        ("b", 1, 0, 1, "kept"),
        ("b", 2, 0, 2, "kept: another key by its second part"),
    ]
    result = drop_duplicates(frame(spark, rows), ["id", "part"], None)
    assert kept(result) == [(0, 1), (0, 2), (1, 5)]
    assert {r.payload[:4] for r in result.collect()} == {"kept"}
    assert result.schema == frame(spark, rows).schema


def test_event_that_is_served_is_dropped_with_all_its_records(spark: SparkSession) -> None:
    rows: Rows = [("a", 1, 0, 1, ""), ("a", 1, 0, 2, ""), ("b", 1, 0, 3, ""), ("c", 1, 0, 4, "")]
    served = frame(spark, [("a", 1, 0, 0, ""), ("a", 1, 7, 0, ""), ("c", 2, 0, 0, "")])
    assert kept(drop_duplicates(frame(spark, rows), ["id", "part"], served)) == [(0, 3), (0, 4)]
    assert kept(drop_duplicates(frame(spark, rows), ["id"], served.select("id"))) == [(0, 3)]


def test_nulls_in_a_key_equal_each_other(spark: SparkSession) -> None:
    rows: Rows = [(None, 1, 0, 1, ""), (None, 1, 0, 2, ""), ("a", None, 0, 4, ""), ("a", None, 0, 5, "")]
    assert kept(drop_duplicates(frame(spark, rows), ["id", "part"], None)) == [(0, 1), (0, 4)]
    served = frame(spark, [(None, 1, 0, 0, "")])
    assert kept(drop_duplicates(frame(spark, rows), ["id", "part"], served)) == [(0, 4)]


def test_records_without_any_key_repeat_nothing(spark: SparkSession) -> None:
    rows: Rows = [(None, None, 0, 1, ""), (None, None, 0, 2, ""), (None, 1, 0, 3, ""), (None, 1, 1, 3, "")]
    served = frame(spark, [(None, None, 0, 0, "")])
    for known in (None, served):
        assert kept(drop_duplicates(frame(spark, rows), ["id", "part"], known)) == [(0, 1), (0, 2), (0, 3)]
    assert kept(drop_duplicates(frame(spark, rows), ["part"], served)) == [(0, 1), (0, 2), (0, 3)]


def test_rows_of_the_same_table_on_both_sides(spark: SparkSession) -> None:
    """Self-joins confuse columns of one origin: here both sides come from the same frame."""
    rows = frame(spark, [("a", 1, 0, 1, ""), ("b", 1, 0, 2, ""), ("b", 1, 0, 3, "")])
    assert kept(drop_duplicates(rows, ["id"], rows.where("id = 'a'"))) == [(0, 2)]
    assert kept(drop_duplicates(rows, ["id"], rows.where("false"))) == [(0, 1), (0, 2)]


@pytest.mark.parametrize("slices", [1, 5])
def test_same_result_whatever_the_partitioning(spark: SparkSession, slices: int) -> None:
    rng = random.Random(7)
    rows: Rows = [(f"e{rng.randrange(60)}", None, p, o, "") for p in range(3) for o in range(70)]
    known = {f"e{i}" for i in range(0, 60, 7)}
    first: dict[str | None, tuple[int, int]] = {}
    for key, _, p, o, _ in rows:
        first[key] = min(first.get(key, (o, p)), (o, p))
    expected = sorted((p, o) for key, (o, p) in first.items() if key not in known)
    rng.shuffle(rows)
    served = frame(spark, [(key, None, 0, 0, "") for key in known], slices)
    assert kept(drop_duplicates(frame(spark, rows, slices), ["id"], served)) == expected


def test_joins_by_key_not_by_comparing_all_pairs(spark: SparkSession) -> None:
    def plan(result: DataFrame) -> str:
        return str(result._jdf.queryExecution().executedPlan().toString())

    rows = frame(spark, [("a", 1, 0, 1, "")])
    every_pair = re.compile("NestedLoop|Cartesian")
    # The hazard: a comparison by either of two columns has no key to join by.
    either = rows.alias("a").join(rows.alias("b"), F.expr("a.id = b.id OR a.part = b.part"))
    assert every_pair.search(plan(either))
    joined = plan(drop_duplicates(rows, ["id", "part"], rows))
    assert not every_pair.search(joined)
    assert re.search(r"(SortMerge|BroadcastHash|ShuffledHash)Join \[[^]]*id", joined)
