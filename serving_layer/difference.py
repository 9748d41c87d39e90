"""The difference of the two layers for one hour: row by row on (partition, offset), by a hash of the content."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pyspark.sql import functions as F
from pyspark.sql.types import ArrayType, MapType, StructField, StructType

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

SAMPLE = 5


@dataclass(frozen=True)
class Difference:
    """`missing`: in batch, not in speed. `extra`: in speed, not read by batch. `changed`: other content.

    What batch removed as a duplicate is no difference.
    """

    speed_rows: int
    missing: int
    extra: int
    changed: int
    sample: tuple[dict[str, Any], ...]

    def as_dict(self) -> dict[str, Any]:
        counts = {"missing": self.missing, "extra": self.extra, "changed": self.changed}
        return counts | {"sample": list(self.sample)}


def compare(speed: DataFrame, batch: DataFrame, duplicates: DataFrame) -> Difference:
    """Compare the rows of one hour. All hold `kafka_partition` and `kafka_offset`, the first two the whole rows."""
    key = ["kafka_partition", "kafka_offset"]
    content = [field for field in batch.schema.fields if field.name not in key]
    left = speed.select(*key, _hash(content).alias("speed"))
    right = batch.select(*key, _hash(content).alias("batch"))
    removed = duplicates.select(*key, F.lit(True).alias("removed"))
    joined = left.join(right, key, "full_outer").join(removed, key, "left")
    kind = (
        F.when(F.col("speed").isNull(), "missing")
        .when(F.col("batch").isNull() & F.col("removed").isNull(), "extra")
        .when(F.col("batch").isNull(), "duplicate")
        .when(F.col("speed") != F.col("batch"), "changed")
        .otherwise("same")
    )
    judged = joined.select(*key, kind.alias("kind"))
    counts = {row["kind"]: row["count"] for row in judged.groupBy("kind").count().collect()}
    differing = judged.where(F.col("kind").isin("missing", "extra", "changed"))
    shown = differing.orderBy(*key).limit(SAMPLE).collect() if set(counts) - {"same", "duplicate"} else []
    sample = tuple(
        {"kind": row["kind"], "partition": row["kafka_partition"], "offset": row["kafka_offset"]} for row in shown
    )
    speed_rows = sum(n for kind, n in counts.items() if kind != "missing")
    missing, extra, changed = (counts.get(kind, 0) for kind in ("missing", "extra", "changed"))
    return Difference(speed_rows, missing, extra, changed, sample)


def _hash(content: Sequence[StructField]) -> Column:
    """A hash of the content. Spark's own passes over nulls, so where they are is hashed too; it refuses maps, so
    what is nested is hashed as text, in the order in which both layers decoded the same bytes."""
    parts = []
    for field in content:
        nested = isinstance(field.dataType, (ArrayType, MapType, StructType))
        column = F.col(f"`{field.name}`")
        parts.append(F.to_json(F.struct(column), {"ignoreNullFields": "false"}) if nested else column)
        parts.append(column.isNull())
    return F.xxhash64(*parts)
