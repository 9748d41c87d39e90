"""Counting an hour: which offsets of its ranges are there, in the staged files and in what was read."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyspark.sql import Window
from pyspark.sql import functions as F

from anabranch.lookups import inside
from anabranch.position import Offsets, Ranges
from batch_layer.balance import Counted

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


def within_log(ranges: Ranges, log_starts: Offsets) -> Ranges:
    """The part of the ranges that Kafka still holds."""
    kept = {p: (max(s, log_starts.get(p, 0)), e) for p, (s, e) in ranges.items()}
    return {p: (s, e) for p, (s, e) in kept.items() if s < e}


def count(rows: DataFrame, ranges: Ranges) -> Counted:
    """Count distinct offsets inside the ranges by partition, all rows, and rows outside."""
    counts = (
        rows.select("kafka_partition", "kafka_offset", F.expr(inside(ranges)).alias("within"))
        .groupBy("kafka_partition", "within")
        .agg(F.count("*").alias("rows"), F.count_distinct("kafka_offset").alias("offsets"))
        .collect()
    )
    return Counted(
        distinct={row["kafka_partition"]: row["offsets"] for row in counts if row["within"]},
        rows=sum(row["rows"] for row in counts),
        outside=sum(row["rows"] for row in counts if not row["within"]),
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
