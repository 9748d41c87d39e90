"""Counting an hour: which offsets of its ranges are there, in the staged files and in what was read.

Offsets are told apart by bits: one number for 64 neighbours, joined by OR. So an offset that is there twice counts
once, exactly, and what is shuffled is a sixtieth of the rows and less, since neighbours are read together.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pyspark.sql import Window
from pyspark.sql import functions as F

from anabranch.lookups import inside
from anabranch.position import Offsets, Ranges
from anabranch.records import REFUSED_FIELD, UNKNOWN
from batch_layer.balance import Counted

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pyspark.sql import DataFrame, Row


DRIFTS = f"size({UNKNOWN}) > 0 AND (NOT is_dead OR error_code = '{REFUSED_FIELD}')"
"""Whether a decoded record has fields that the schema does not know, and is a row, or would be one without them."""


def within_log(ranges: Ranges, log_starts: Offsets) -> Ranges:
    """The part of the ranges that Kafka still holds."""
    kept = {p: (max(s, log_starts.get(p, 0)), e) for p, (s, e) in ranges.items()}
    return {p: (s, e) for p, (s, e) in kept.items() if s < e}


def count(rows: DataFrame, ranges: Ranges) -> Counted:
    """Count distinct offsets inside the ranges by partition, all rows, and rows outside."""
    counts = _counts(rows, ranges, {"rows": "count(*)"})
    return Counted(
        distinct={row["kafka_partition"]: row["offsets"] for row in counts if row["within"]},
        rows=sum(row["rows"] for row in counts),
        outside=sum(row["rows"] for row in counts if not row["within"]),
    )


@dataclass(frozen=True)
class ReadCounts:
    """What was read of an hour: distinct offsets inside what Kafka holds by partition; the good, the dead, and all by
    source; and those that hold unknown fields."""

    given: Offsets
    good: int
    dead: int
    sources: dict[str, int]
    drifting: int = 0


def count_read(decoded: DataFrame, in_kafka: Ranges, sources: Sequence[str]) -> ReadCounts:
    """Count decoded records, which come from `sources`, in one pass."""
    of_source = {source: f"count_if(source = '{source}')" for source in sources}
    of_rows = {"good": "count_if(NOT is_dead)", "dead": "count_if(is_dead)", **of_source}
    of_rows |= {"drifting": f"count_if({DRIFTS})"}
    counts = _counts(decoded, in_kafka, of_rows)
    by_source = {source: sum(row[source] for row in counts) for source in sorted(sources)}
    return ReadCounts(
        given={row["kafka_partition"]: row["offsets"] for row in counts if row["within"]},
        good=sum(row["good"] for row in counts),
        dead=sum(row["dead"] for row in counts),
        sources={source: number for source, number in by_source.items() if number},
        drifting=sum(row["drifting"] for row in counts),
    )


def _counts(rows: DataFrame, ranges: Ranges, of_rows: Mapping[str, str]) -> list[Row]:
    """By partition and whether they are inside the ranges: how many distinct `offsets`, and sums `of_rows`."""
    by_neighbours = (
        rows.withColumn("within", F.expr(inside(ranges)))
        .groupBy("kafka_partition", "within", F.expr("shiftright(kafka_offset, 6)").alias("neighbours"))
        .agg(
            F.expr("bit_or(shiftleft(1L, CAST(kafka_offset & 63 AS INT)))").alias("bits"),
            *(F.expr(sql).alias(name) for name, sql in of_rows.items()),
        )
    )
    return (
        by_neighbours.groupBy("kafka_partition", "within")
        .agg(F.expr("sum(bit_count(bits))").alias("offsets"), *(F.sum(name).alias(name) for name in of_rows))
        .collect()
    )


def span_of_missing(given: DataFrame, ranges: Ranges) -> Ranges:
    """By partition of the ranges, from the first to behind the last offset that `given` lacks, if any."""
    edges = [(p, offset) for p, (s, e) in ranges.items() for offset in (s - 1, e)]
    bounds = given.sparkSession.createDataFrame(edges, "kafka_partition INT, kafka_offset BIGINT")
    offsets = given.where(inside(ranges)).select("kafka_partition", "kafka_offset").union(bounds)
    following = F.lead("kafka_offset").over(Window.partitionBy("kafka_partition").orderBy("kafka_offset"))
    holes = offsets.withColumn("_next", following).where("_next > kafka_offset + 1")
    spans = holes.groupBy("kafka_partition").agg(F.min("kafka_offset").alias("first"), F.max("_next").alias("end"))
    return {row["kafka_partition"]: (row["first"] + 1, row["end"]) for row in spans.collect()}


def count_aborted(given: DataFrame, uncommitted: DataFrame) -> Offsets:
    """Offsets that only an uncommitted reading finds, by partition: records of aborted transactions."""
    everything = uncommitted.select(F.col("partition").alias("kafka_partition"), F.col("offset").alias("kafka_offset"))
    only = everything.join(
        given.select("kafka_partition", "kafka_offset"), ["kafka_partition", "kafka_offset"], "left_anti"
    )
    counts = only.groupBy("kafka_partition").agg(F.count_distinct("kafka_offset").alias("offsets")).collect()
    return {row["kafka_partition"]: row["offsets"] for row in counts}
