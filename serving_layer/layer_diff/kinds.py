"""The difference of the two layers for one hour: row by row on (partition, offset), by a hash of
the content.

`KIND` defines the kind of a row once, in SQL that both Spark and DuckDB read: the batch job
compares in Spark, `anabranch diff` without it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from anabranch.offsets.partition_sql import inside
from anabranch.offsets.position import Ranges
from anabranch.protocol.ledger_row import Diff

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import Column, DataFrame, Row
    from pyspark.sql.types import StructField


SAMPLE = 5

# Over `speed` and `batch` (hashes of the content, null without the row), `removed` (batch dropped it as a duplicate)
# and `unread` (outside of what the speed layer's rows account for).
KIND = """CASE
    WHEN speed IS NULL AND unread THEN 'unread'
    WHEN speed IS NULL THEN 'missing'
    WHEN batch IS NULL AND coalesce(removed, false) THEN 'duplicate'
    WHEN batch IS NULL THEN 'extra'
    WHEN speed <> batch THEN 'changed'
    ELSE 'same'
END"""
# The order of samples: unexplained kinds first.
SHOWN = ("changed", "extra", "missing", "unread")

_PLACE = ["kafka_partition", "kafka_offset"]
# Blocks of 1,024 offsets.
_BLOCK_BITS = 10

# Gaps of these classes: offsets that Kafka once had and the batch layer could no longer read.
_GONE = ("compacted", "retention")


@dataclass(frozen=True)
class Difference:
    """`missing`: in batch, not in speed. `extra`: in speed, not read by batch. `changed`: other content.

    Of those missing, `unread` are offsets that the speed layer's rows did not account for when they were compared.
    What batch removed as a `duplicate` is no difference.
    """

    speed_rows: int
    missing: int
    extra: int
    changed: int
    duplicate: int
    unread: int
    sample: tuple[dict[str, Any], ...]

    @property
    def diff(self) -> Diff:
        """As the ledger has it."""
        return Diff(self.missing, self.extra, self.changed, self.duplicate, self.unread, self.sample)


def to_difference(counts: Mapping[str, int], sample: Sequence[dict[str, Any]]) -> Difference:
    """The difference, from the number of rows of each `KIND`. Pure."""
    of = {kind: counts.get(kind, 0) for kind in ("missing", "unread", "extra", "changed", "duplicate", "same")}
    speed_rows = of["extra"] + of["changed"] + of["duplicate"] + of["same"]
    missing = of["missing"] + of["unread"]
    return Difference(speed_rows, missing, of["extra"], of["changed"], of["duplicate"], of["unread"], tuple(sample))


def unexplained_counts(diff: Diff | None, gaps: Mapping[str, int] | None, covered: bool) -> dict[str, int]:
    """The unexplained counts of a ledger's `diff`, by kind; empty when all is explained. Pure.
    Duplicates that batch removed are not a difference. Missing rows are explained by offsets that
    the speed layer had not read at the time; for a ledger row without that count, `covered`
    decides: whether the speed layer's rows account for the whole hour now. Extra rows are explained
    by offsets that Kafka no longer had for the batch layer. Changed content is never explained.
    """
    if diff is None:
        return {}
    unread = diff.unread
    if unread is None:
        unread = 0 if covered else diff.missing
    gone = sum((gaps or {}).get(name, 0) for name in _GONE)
    left = {"missing": diff.missing - unread, "extra": diff.extra - gone, "changed": diff.changed}
    return {kind: n for kind, n in left.items() if n > 0}


def compare(speed: DataFrame, batch: DataFrame, duplicates: DataFrame, unread: Ranges) -> Difference:
    """Compare the rows of one hour in Spark. All frames have `kafka_partition` and `kafka_offset`,
    the first two the whole rows. `unread`: the offsets that the speed layer's rows do not account
    for (`anabranch.protocol.coverage`).

    Digests of blocks of offsets are compared first, and of blocks that differ the rows: one pass, without a shuffle of
    rows, where the layers agree.
    """
    import pyarrow as pa
    from pyspark.sql import functions as F

    left, right = _hashed(speed, batch)
    removed = duplicates.select(*_PLACE, F.lit(True).alias("removed"))
    equal = _equal_blocks(left, right, removed)
    counts = Counter({"same": equal["same"] or 0, "duplicate": equal["duplicates"] or 0})
    if not equal["others"]:
        return to_difference(counts, [])
    # Of an Arrow table Spark knows the size.
    blocks = pa.schema([("kafka_partition", pa.int32()), ("block", pa.int64())])
    table = pa.Table.from_pylist([row.asDict() for row in equal["others"]], blocks)
    others = left.sparkSession.createDataFrame(table)
    left, right = (rows.join(F.broadcast(others), _in_block(rows, others), "left_semi") for rows in (left, right))
    by_row = left.withColumnRenamed("hash", "speed").join(
        right.withColumnRenamed("hash", "batch"), _PLACE, "full_outer"
    )
    judged = by_row.join(removed, _PLACE, "left").withColumn("unread", F.expr(inside(unread)))
    judged = judged.select(*_PLACE, F.expr(KIND).alias("kind"))
    counts += Counter({row["kind"]: row["count"] for row in judged.groupBy("kind").count().collect()})
    differing = judged.where(F.col("kind").isin(*SHOWN))
    shown = differing.orderBy("kind", *_PLACE).limit(SAMPLE).collect() if set(counts) & set(SHOWN) else []
    sample = [
        {"kind": row["kind"], "partition": row["kafka_partition"], "offset": row["kafka_offset"]} for row in shown
    ]
    return to_difference(counts, sample)


def read_hashes(speed: DataFrame, batch: DataFrame) -> tuple[pa.Table, pa.Table]:
    """The places of few rows of both layers, each with a hash of its content: read by one task into the driver's
    memory, for `serving_layer.layer_diff.duckdb.compare_hashes`."""
    import pyarrow.compute as pc
    from pyspark.sql import functions as F

    left, right = _hashed(speed, batch)
    every = left.withColumn("is_batch", F.lit(False)).unionAll(right.withColumn("is_batch", F.lit(True)))
    read = every.coalesce(1).toArrow()
    is_batch = read.column("is_batch")
    hashes = read.select([*_PLACE, "hash"])
    return hashes.filter(pc.invert(is_batch)), hashes.filter(is_batch)


def _hashed(speed: DataFrame, batch: DataFrame) -> tuple[DataFrame, DataFrame]:
    """The places of both layers' rows, each with a `hash` of its content."""
    content = [field for field in batch.schema.fields if field.name not in _PLACE]
    hash = _hash(content).alias("hash")
    return speed.select(*_PLACE, hash), batch.select(*_PLACE, hash)


def _equal_blocks(speed: DataFrame, batch: DataFrame, removed: DataFrame) -> Row:
    """Of the blocks in which both have the same rows, removed ones aside: the number of rows that are the `same`, and
    of `duplicates`. And the `others`, by partition and block."""
    from pyspark.sql import functions as F

    # By its place, so that two rows that changed places differ.
    digest = F.xxhash64(*_PLACE, "hash").alias("digest")
    marked = speed.join(removed, _PLACE, "left").withColumn("sign", F.expr("IF(removed, 0, 1)"))
    every = marked.select(*_PLACE, digest, "sign").unionAll(batch.select(*_PLACE, digest, F.lit(-1)))
    blocks = every.groupBy("kafka_partition", F.shiftright("kafka_offset", _BLOCK_BITS).alias("block")).agg(
        F.count_if(F.expr("sign = -1")).alias("batch_rows"),
        F.count_if(F.expr("sign = 0")).alias("removed_rows"),
        F.sum("sign").alias("rows"),
        # In halves, whose sums fit a BIGINT.
        F.expr("sum(sign * shiftright(digest, 32))").alias("high"),
        F.expr("sum(sign * (digest & 4294967295L))").alias("low"),
    )
    is_equal = F.expr("rows = 0 AND high = 0 AND low = 0")
    [found] = (
        blocks.withColumn("is_equal", is_equal)
        .agg(
            F.expr("sum(batch_rows) FILTER (WHERE is_equal)").alias("same"),
            F.expr("sum(removed_rows) FILTER (WHERE is_equal)").alias("duplicates"),
            F.expr("collect_list(struct(kafka_partition, block)) FILTER (WHERE NOT is_equal)").alias("others"),
        )
        .collect()
    )
    return found


def _in_block(rows: DataFrame, blocks: DataFrame) -> Column:
    from pyspark.sql import functions as F

    is_block = F.shiftright(rows["kafka_offset"], _BLOCK_BITS) == blocks["block"]
    return (rows["kafka_partition"] == blocks["kafka_partition"]) & is_block


def _hash(content: Sequence[StructField]) -> Column:
    """A hash of the content. Spark's hash skips nulls, so their positions are hashed too; it
    refuses maps, so nested values are hashed as text, in the order in which both layers decoded the
    same bytes."""
    from pyspark.sql import functions as F
    from pyspark.sql.types import ArrayType, MapType, StructType

    parts = []
    for field in content:
        nested = isinstance(field.dataType, (ArrayType, MapType, StructType))
        column = F.col(f"`{field.name}`")
        parts.append(F.to_json(F.struct(column), {"ignoreNullFields": "false"}) if nested else column)
        parts.append(column.isNull())
    return F.xxhash64(*parts)
