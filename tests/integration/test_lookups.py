"""Offsets inside ranges and hours of offsets, in Spark, against plain arithmetic."""

import random
from collections import Counter
from typing import Any

import pytest
from budget import budget, full
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from anabranch.decode import REFUSED_FIELD
from anabranch.offsets.position import Ranges, size
from anabranch.records import UNKNOWN, inside, trim
from batch_layer.balance import Counted
from batch_layer.offset_counts import (
    OffsetMasks,
    ReadCounts,
    count,
    count_places,
    count_read,
    missing_offsets,
)
from serving_layer.layer_diff import kinds_of

AT = "kafka_partition INT, kafka_offset BIGINT"

PARTITIONS = st.integers(0, 5)
RANGES = st.dictionaries(PARTITIONS, st.tuples(st.integers(0, 12), st.integers(0, 12)), max_size=4)
# How far each hour goes beyond the one before it, by partition; a partition may come later.
ANY_FIXTURE = [HealthCheck.function_scoped_fixture]
FEW = settings(max_examples=budget(4, 25), suppress_health_check=ANY_FIXTURE)

PLACES = [(p, o) for p in range(7) for o in range(14)]


def offsets_of(ranges: Ranges) -> set[tuple[int, int]]:
    return {(p, o) for p, (s, e) in ranges.items() for o in range(s, e)}


def places(
    spark: SparkSession, rows: list[tuple[int, int]], names: str = "partition INT, offset BIGINT"
) -> DataFrame:
    return spark.createDataFrame(rows, names)


def code_of(frame: DataFrame) -> list[str]:
    """The code that Spark generates for a frame."""
    stages: Any = frame._jdf.queryExecution().debug().codegenToSeq()
    return [stages.apply(i)._2() for i in range(stages.size())]


@FEW
@given(ranges=RANGES)
def test_a_row_is_in_its_window(spark: SparkSession, ranges: Ranges) -> None:
    rows = places(spark, PLACES, AT).select("*", F.expr(inside(ranges)).alias("within")).collect()
    assert {(r.kafka_partition, r.kafka_offset) for r in rows if r.within} == offsets_of(ranges)
    assert {r.within for r in rows} <= {True, False}
    assert {tuple(r) for r in trim(places(spark, PLACES), ranges).collect()} == offsets_of(ranges)


@FEW
@given(ranges=RANGES, data=st.data())
def test_offsets_are_counted_once_and_rows_with_repetitions(
    spark: SparkSession, ranges: Ranges, data: st.DataObject
) -> None:
    # Neighbours share a number of 64 bits: at its edges, and beyond the first.
    offset = st.one_of(
        st.integers(0, 14), st.sampled_from([62, 63, 64, 65, 127, 128, 2**40 - 1, 2**40, 2**63 - 1])
    )
    error_code = st.sampled_from([None, "missing_field", REFUSED_FIELD])
    unknown = st.one_of(st.none(), st.lists(st.just("season"), max_size=2))
    record = st.tuples(PARTITIONS, offset, st.sampled_from(["kafka", "speed"]), error_code, unknown)
    records = data.draw(st.lists(record, max_size=40))
    wide = {p: (s, 2**63 - 1 if e == 12 else e) for p, (s, e) in ranges.items()}
    rows = spark.createDataFrame(
        records, f"{AT}, source STRING, error_code STRING, {UNKNOWN} ARRAY<STRING>"
    )
    rows = rows.withColumn("is_dead", F.expr("error_code IS NOT NULL")).repartition(3)

    counted, read = count(rows, wide), count_read(rows, wide, ("kafka", "speed", "dead_letters"))

    def is_inside(p: int, o: int) -> bool:
        return p in wide and wide[p][0] <= o < wide[p][1]

    there = {(p, o) for p, o, *_ in records if is_inside(p, o)}
    distinct = dict(Counter(p for p, _ in there))
    # In the driver's memory, a byte is needed for each offset of the ranges.
    near = {p: span for p, span in wide.items() if span[1] < 2**20}
    held = rows.toArrow()
    assert count_places([held], len(records), near) == count(rows, near)
    beyond = sum(not is_inside(p, o) for p, o, *_ in records)
    assert counted == Counted(distinct, len(records), beyond)
    dead = sum(error_code is not None for *_, error_code, _ in records)
    sources = dict(Counter(source for _, _, source, _, _ in records))
    assert read == ReadCounts(distinct, len(records) - dead, dead, sources)


@pytest.mark.parametrize("partitions", [100, full(1000)], ids=["100", "1000"])
def test_a_thousand_partitions(spark: SparkSession, partitions: int) -> None:
    """The size where a plan that grows with partitions overflows the stack, or takes minutes."""
    rng = random.Random(5)
    ranges = {p: (p, p + 1 + rng.randrange(3)) for p in range(partitions)}
    rows = places(spark, sorted(offsets_of(ranges)), AT)
    outside = places(spark, [(0, 99), (partitions, 0), (partitions - 1, 0)], AT)
    counted = count(rows.union(outside), ranges)
    assert counted.distinct == {p: e - s for p, (s, e) in ranges.items()}
    assert (counted.rows, counted.outside) == (size(ranges) + 3, 3)
    lacking = missing_offsets(
        rows.where("kafka_partition <> 7 AND (kafka_partition <> 8 OR kafka_offset > 8)"), ranges
    )
    assert {p: (of.start, of.mask.tolist()) for p, of in lacking.items()} == {
        7: (7, [True] * (ranges[7][1] - 7)), 8: (8, [True] + [False] * (ranges[8][1] - 9)),
    }  # fmt: skip
    speed, batch = (
        frame.withColumn("hash", F.lit(1)).toArrow() for frame in (outside, rows.union(outside))
    )
    none = outside.limit(0).toArrow()
    kinds, _ = kinds_of(speed, batch, none, none, ranges)
    assert kinds == {"same": 3, "unread": size(ranges)}


def test_the_offsets_that_are_missing(spark: SparkSession) -> None:
    """Around the ends of the 64 neighbours in one number, and with no offsets at all."""
    rng = random.Random(6)
    ranges = {
        0: (0, 1), 1: (63, 65), 2: (64, 128), 3: (1 << 40, (1 << 40) + 500), 4: (5, 900), 5: (7, 9),
    }  # fmt: skip
    there = sorted(place for place in offsets_of(ranges) if rng.random() < 0.8 and place[0] != 5)
    outside = [(0, 1), (1, 62), (2, 63), (2, 128), (9, 0)]
    held = places(spark, there + outside + there[:9], AT)
    lacking = missing_offsets(held, ranges)
    in_memory = OffsetMasks.of([held.toArrow()], ranges)
    assert in_memory.outside == len(outside)
    assert {p: of.mask.tolist() for p, of in in_memory.missing().items()} == {
        p: of.mask.tolist() for p, of in lacking.items()
    }
    found = {(p, of.start + int(i)) for p, of in lacking.items() for i in of.mask.nonzero()[0]}
    assert found == set(offsets_of(ranges)) - set(there)
    assert all(len(of.mask) == ranges[p][1] - ranges[p][0] for p, of in lacking.items())


def test_other_offsets_compile_no_code_again(spark: SparkSession) -> None:
    """Code compiled for one micro-batch serves the next: offsets are not part of it."""
    rows = spark.range(10).selectExpr("CAST(id AS INT) AS partition", "id AS offset")
    codes = [code_of(trim(rows, dict.fromkeys(range(12), (far, far + 9)))) for far in (5, 70_000)]
    assert codes[0] == codes[1]
    assert codes[0], "nothing was compiled at all"
