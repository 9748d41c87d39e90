"""Count an hour's offsets: those of its ranges in the staged files, and those that were read.

Offsets are counted as bits: one number for 64 neighbours, combined by OR. An offset that occurs
twice counts once, exactly. At most a sixtieth of the rows is shuffled, since neighbours are read
together.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa
from pyspark.sql import DataFrame, Row
from pyspark.sql import functions as F

from anabranch.decode import REFUSED_FIELD
from anabranch.kafka.batches import Missing
from anabranch.offsets.partition_sql import inside
from anabranch.offsets.position import Offsets, Ranges
from anabranch.records import UNKNOWN
from anabranch.records.staged import PLACE
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


@dataclass(frozen=True)
class OffsetMasks:
    """Offsets of ranges by partition, a byte each: `start + i` is among them if its mask is True.
    `outside`: the number of places outside the ranges."""

    masks: dict[int, Missing]
    outside: int = 0

    @staticmethod
    def of(places: Iterable[pa.Table], ranges: Ranges) -> OffsetMasks:
        masks = {p: np.zeros(max(0, e - s), bool) for p, (s, e) in ranges.items()}
        outside = 0
        for table in places:
            partitions, offsets = (table.column(name).to_numpy() for name in PLACE)
            for p in np.unique(partitions).tolist():
                start, end = ranges.get(p, (0, 0))
                of = offsets[partitions == p]
                within = of[(start <= of) & (of < end)]
                outside += len(of) - len(within)
                if len(within):
                    masks[p][within - start] = True
        return OffsetMasks({p: Missing(ranges[p][0], mask) for p, mask in masks.items()}, outside)

    @property
    def distinct(self) -> Offsets:
        return {p: of.count for p, of in self.masks.items() if of.count}

    def lacks(self, places: Iterable[pa.Table]) -> bool:
        """Return whether one of `places`, inside the ranges, is not among the offsets."""
        ranges = {p: (of.start, of.start + len(of.mask)) for p, of in self.masks.items()}
        others = OffsetMasks.of(places, ranges).masks
        return any((others[p].mask & ~of.mask).any() for p, of in self.masks.items())

    def missing(self) -> dict[int, Missing]:
        """Return the other offsets of the ranges, by partition."""
        others = {p: Missing(of.start, ~of.mask) for p, of in self.masks.items()}
        return {p: of for p, of in others.items() if of.count}


def count_places(places: Iterable[pa.Table], rows: int, ranges: Ranges) -> Counted:
    """Count like `count`: places in the driver's memory, of `rows` rows."""
    found = OffsetMasks.of(places, ranges)
    return Counted(found.distinct, rows, found.outside)


@dataclass(frozen=True)
class ReadCounts:
    """Counts of the records read: distinct offsets inside the cut by partition, good and dead
    records, and all records by source."""

    held: Offsets = field(default_factory=dict)
    good: int = 0
    dead: int = 0
    sources: dict[str, int] = field(default_factory=dict)


def count_read(decoded: DataFrame, ranges: Ranges, sources: Sequence[str]) -> ReadCounts:
    """Count decoded records from `sources`, in one pass."""
    source_sums = {source: f"count_if(source = '{source}')" for source in sources}
    sums = {"good": "count_if(NOT is_dead)", "dead": "count_if(is_dead)", **source_sums}
    counts = _counts(decoded, ranges, sums)
    by_source = {source: sum(row[source] for row in counts) for source in sorted(sources)}
    return ReadCounts(
        held={row["kafka_partition"]: row["offsets"] for row in counts if row["within"]},
        good=sum(row["good"] for row in counts),
        dead=sum(row["dead"] for row in counts),
        sources={source: number for source, number in by_source.items() if number},
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
