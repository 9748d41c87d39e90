"""Count an hour's offsets: those of its ranges in the staged files, and those that were read.

Offsets are counted as bits: one number for 64 neighbours, combined by OR. An offset that occurs
twice counts once, exactly. At most a sixtieth of the rows is shuffled, since neighbours are read
together.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import DataFrame, Row
from pyspark.sql import functions as F

from anabranch.decode import REFUSED_FIELD
from anabranch.kafka.batches import Missing
from anabranch.offsets.partition_sql import inside
from anabranch.offsets.position import Offsets, Ranges
from anabranch.records import UNKNOWN
from batch_layer.balance import Counted

DRIFTS = f"size({UNKNOWN}) > 0 AND (NOT is_dead OR error_code = '{REFUSED_FIELD}')"
"""SQL condition: a decoded record has fields unknown to the schema, and is a row or would be a row
without them."""


def count(rows: DataFrame, ranges: Ranges) -> Counted:
    """Count distinct offsets inside the ranges by partition, all rows, and rows outside."""
    counts = _counts(rows, ranges, {"rows": "count(*)"})
    return Counted(
        distinct={row["kafka_partition"]: row["offsets"] for row in counts if row["within"]},
        rows=sum(row["rows"] for row in counts),
        outside=sum(row["rows"] for row in counts if not row["within"]),
    )


def count_few(places: pa.Table, ranges: Ranges) -> Counted:
    """Count like `count`, few rows in the driver's memory."""
    partitions, offsets = (
        places.column(name).to_numpy() for name in ("kafka_partition", "kafka_offset")
    )
    distinct, rows = {}, 0
    for p, (start, end) in ranges.items():
        inside_ranges = offsets[partitions == p]
        inside_ranges = inside_ranges[(start <= inside_ranges) & (inside_ranges < end)]
        rows += len(inside_ranges)
        if len(inside_ranges):
            distinct[p] = len(np.unique(inside_ranges))
    return Counted(distinct, len(places), len(places) - rows)


@dataclass(frozen=True)
class ReadCounts:
    """Counts of the records read: distinct offsets inside the cut by partition, good and dead
    records, all records by source, and records with unknown fields."""

    held: Offsets = field(default_factory=dict)
    good: int = 0
    dead: int = 0
    sources: dict[str, int] = field(default_factory=dict)
    drifting: int = 0


def count_read(decoded: DataFrame, ranges: Ranges, sources: Sequence[str]) -> ReadCounts:
    """Count decoded records from `sources`, in one pass."""
    source_sums = {source: f"count_if(source = '{source}')" for source in sources}
    sums = {"good": "count_if(NOT is_dead)", "dead": "count_if(is_dead)", **source_sums}
    sums |= {"drifting": f"count_if({DRIFTS})"}
    counts = _counts(decoded, ranges, sums)
    by_source = {source: sum(row[source] for row in counts) for source in sorted(sources)}
    return ReadCounts(
        held={row["kafka_partition"]: row["offsets"] for row in counts if row["within"]},
        good=sum(row["good"] for row in counts),
        dead=sum(row["dead"] for row in counts),
        sources={source: number for source, number in by_source.items() if number},
        drifting=sum(row["drifting"] for row in counts),
    )


def count_few_read(places: pa.Table, ranges: Ranges) -> ReadCounts:
    """Count like `count_read`, few records in the driver's memory: their places, `source`, verdict
    and whether each `drifts`."""
    good, dead, drifting = (
        pc.sum(flags).as_py() or 0
        for flags in (
            pc.invert(places.column("is_dead")),
            places.column("is_dead"),
            places.column("drifts"),
        )
    )
    sources = {
        row["values"]: row["counts"] for row in pc.value_counts(places.column("source")).to_pylist()
    }
    return ReadCounts(
        held=count_few(places, ranges).distinct,
        good=good,
        dead=dead,
        sources=dict(sorted(sources.items())),
        drifting=drifting,
    )


def _counts(rows: DataFrame, ranges: Ranges, sums: Mapping[str, str]) -> list[Row]:
    """Return the number of distinct `offsets` and the `sums`, by partition and whether the rows are
    inside the ranges."""
    by_neighbours = (
        rows.withColumn("within", F.expr(inside(ranges)))
        .groupBy(
            "kafka_partition", "within", F.expr("shiftright(kafka_offset, 6)").alias("neighbours")
        )
        .agg(
            F.expr("bit_or(shiftleft(1L, CAST(kafka_offset & 63 AS INT)))").alias("bits"),
            *(F.expr(sql).alias(name) for name, sql in sums.items()),
        )
    )
    return (
        by_neighbours.groupBy("kafka_partition", "within")
        .agg(
            F.expr("sum(bit_count(bits))").alias("offsets"),
            *(F.sum(name).alias(name) for name in sums),
        )
        .collect()
    )


def missing_offsets(held: DataFrame, ranges: Ranges) -> dict[int, Missing]:
    """Return the offsets of the ranges that are missing in `held`, by partition. Takes a byte of
    driver memory for each offset."""
    words = (
        held.where(inside(ranges))
        .groupBy("kafka_partition", F.expr("shiftright(kafka_offset, 6)").alias("word"))
        .agg(F.expr("bit_or(shiftleft(1L, CAST(kafka_offset & 63 AS INT)))").alias("bits"))
        .toArrow()
    )
    partitions, at, bits = (words[name].to_numpy() for name in ("kafka_partition", "word", "bits"))
    missing = {}
    for p, (start, end) in ranges.items():
        first, in_partition = start >> 6, partitions == p
        present = np.zeros((((end - 1) >> 6) - first + 1, 64), np.uint8)
        present[at[in_partition] - first] = np.unpackbits(
            bits[in_partition].astype("<i8").view(np.uint8).reshape(-1, 8),
            axis=1,
            bitorder="little",
        )
        mask = present.reshape(-1)[start - (first << 6) : end - (first << 6)] == 0
        if mask.any():
            missing[p] = Missing(start, mask)
    return missing


def split_missing(
    missing: Mapping[int, Missing], in_kafka: Ranges
) -> tuple[Offsets, dict[int, Missing]]:
    """Split missing offsets into the number before Kafka's log start and the offsets after it, by
    partition."""
    lost, rest = {}, {}
    for p, offsets in missing.items():
        begins = in_kafka.get(p, (offsets.start + len(offsets.mask), 0))[0]
        before, after = (
            offsets.mask[: begins - offsets.start],
            Missing(begins, offsets.mask[begins - offsets.start :]),
        )
        if before.any():
            lost[p] = int(np.count_nonzero(before))
        if after.count:
            rest[p] = after
    return lost, rest
