"""Compare the layers' rows of an hour in Spark, in a common schema, since the table's schema may
have evolved.

A snapshot is read with its own schema, and a file has its writer's columns. So both sides get the
columns that every speed file of the hour has, in the table's current types. A DOUBLE that once was
FLOAT is compared as FLOAT, the precision of the old rows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence

import pyarrow as pa
import pyarrow.compute as pc
from pyiceberg.manifest import DataFile
from pyiceberg.schema import Schema
from pyiceberg.table import Table
from pyiceberg.types import ListType, NestedField
from pyiceberg.types import MapType as IcebergMap
from pyiceberg.types import StructType as IcebergStruct
from pyspark.sql import Column, DataFrame, Row
from pyspark.sql import functions as F
from pyspark.sql.types import (
    ArrayType,
    DataType,
    DoubleType,
    FloatType,
    MapType,
    StructField,
    StructType,
)

from anabranch.offsets.partition_sql import inside
from anabranch.offsets.position import Ranges
from anabranch.records.reshape import to_schema
from serving_layer.layer_diff.kinds import (
    KIND,
    SAMPLE,
    SHOWN,
    Difference,
    common_fields,
    former_floats,
    to_difference,
)

_PLACE = ["kafka_partition", "kafka_offset"]
# Blocks of 1,024 offsets.
_BLOCK_BITS = 10


def to_common_schema(
    speed: DataFrame, batch: DataFrame, table: Table, files: Sequence[DataFile]
) -> tuple[DataFrame, DataFrame]:
    """Return both layers' rows in a common schema. `speed` may be read with an older schema than
    `batch`, whose columns are the table's. `files`: the hour's files of the speed layer."""
    schema = common_schema(batch.schema, list(table.schemas().values()), table.schema(), files)
    return to_schema(speed, schema), to_schema(batch, schema)


def common_schema(
    rows: StructType, schemas: Sequence[Schema], now: Schema, files: Sequence[DataFile]
) -> StructType:
    """Return the schema in which rows with schema `rows` are compared with those in `files`.
    Pure."""
    return _struct(rows, now.as_struct(), common_fields(schemas, files), former_floats(schemas))


def with_content(rows: DataFrame, schema: StructType, other: Collection[str]) -> DataFrame:
    """Return the places of rows, each with a hash of its `content` in a common schema, without the
    columns of `other`."""
    content = [field for field in schema.fields if field.name not in other]
    return to_schema(rows, schema).select(*_PLACE, _hash(content).alias("content"))


def _struct(
    kind: StructType, iceberg: IcebergStruct, known: Collection[int], floats: Collection[int]
) -> StructType:
    fields = {f.name: f for f in iceberg.fields}
    kinds = [
        (f, _kind(f.dataType, fields[f.name], known, floats))
        for f in kind.fields
        if f.name in fields
    ]
    return StructType([StructField(f.name, k, f.nullable) for f, k in kinds if k is not None])


def _kind(
    kind: DataType, field: NestedField, known: Collection[int], floats: Collection[int]
) -> DataType | None:
    """Return the type in which to compare a column; None if a file lacks it."""
    iceberg = field.field_type
    if isinstance(kind, StructType) and isinstance(iceberg, IcebergStruct):
        inside = _struct(kind, iceberg, known, floats)
        return inside if inside.fields else None
    if isinstance(kind, ArrayType) and isinstance(iceberg, ListType):
        element = _kind(kind.elementType, iceberg.element_field, known, floats)
        return ArrayType(element) if element is not None else None
    if isinstance(kind, MapType) and isinstance(iceberg, IcebergMap):
        value = _kind(kind.valueType, iceberg.value_field, known, floats)
        return MapType(kind.keyType, value) if value is not None else None
    if field.field_id not in known:
        return None
    return FloatType() if isinstance(kind, DoubleType) and field.field_id in floats else kind


def compare(
    speed: DataFrame, batch: DataFrame, duplicates: DataFrame, unread: Ranges
) -> Difference:
    """Compare the rows of one hour in Spark. All frames have `kafka_partition` and `kafka_offset`;
    the first two have whole rows. `unread`: the offsets that the speed layer's rows do not account
    for (`anabranch.protocol.coverage`).

    Digests of blocks of offsets are compared first, then the rows of blocks that differ. Where the
    layers agree, this takes one pass without a shuffle of rows.
    """
    left, right = _hashed(speed, batch)
    removed = duplicates.select(*_PLACE, F.lit(True).alias("removed"))
    equal = _equal_blocks(left, right, removed)
    counts = Counter({"same": equal["same"] or 0, "duplicate": equal["duplicates"] or 0})
    if not equal["others"]:
        return to_difference(counts, [])
    # Spark knows the size of an Arrow table.
    blocks = pa.schema([("kafka_partition", pa.int32()), ("block", pa.int64())])
    table = pa.Table.from_pylist([row.asDict() for row in equal["others"]], blocks)
    others = left.sparkSession.createDataFrame(table)
    left, right = (
        rows.join(F.broadcast(others), _in_block(rows, others), "left_semi")
        for rows in (left, right)
    )
    by_row = left.withColumnRenamed("hash", "speed").join(
        right.withColumnRenamed("hash", "batch"), _PLACE, "full_outer"
    )
    judged = by_row.join(removed, _PLACE, "left").withColumn("unread", F.expr(inside(unread)))
    judged = judged.select(*_PLACE, F.expr(KIND).alias("kind"))
    counts += Counter(
        {row["kind"]: row["count"] for row in judged.groupBy("kind").count().collect()}
    )
    differing = judged.where(F.col("kind").isin(*SHOWN))
    shown = (
        differing.orderBy("kind", *_PLACE).limit(SAMPLE).collect()
        if set(counts) & set(SHOWN)
        else []
    )
    sample = [
        {"kind": row["kind"], "partition": row["kafka_partition"], "offset": row["kafka_offset"]}
        for row in shown
    ]
    return to_difference(counts, sample)


def read_hashes(speed: DataFrame, batch: DataFrame) -> tuple[pa.Table, pa.Table]:
    """Read the places of both layers' rows, each with a hash of its content, by one task into the
    driver's memory, for `serving_layer.layer_diff.duckdb.compare_hashes`. For few rows."""
    left, right = _hashed(speed, batch)
    every = left.withColumn("is_batch", F.lit(False)).unionAll(
        right.withColumn("is_batch", F.lit(True))
    )
    read = every.coalesce(1).toArrow()
    is_batch = read.column("is_batch")
    hashes = read.select([*_PLACE, "hash"])
    return hashes.filter(pc.invert(is_batch)), hashes.filter(is_batch)


def _hashed(speed: DataFrame, batch: DataFrame) -> tuple[DataFrame, DataFrame]:
    """Return the places of both layers' rows, each with a `hash` of its content."""
    content = [field for field in batch.schema.fields if field.name not in _PLACE]
    hash = _hash(content).alias("hash")
    return speed.select(*_PLACE, hash), batch.select(*_PLACE, hash)


def _equal_blocks(speed: DataFrame, batch: DataFrame, removed: DataFrame) -> Row:
    """Return a row of three values. `same` and `duplicates`: the number of rows, and of removed
    rows, in blocks where both layers have the same rows apart from removed ones. `others`: the
    other blocks, by partition and block."""
    # With the place, so that two swapped rows differ.
    digest = F.xxhash64(*_PLACE, "hash").alias("digest")
    marked = speed.join(removed, _PLACE, "left").withColumn("sign", F.expr("IF(removed, 0, 1)"))
    every = marked.select(*_PLACE, digest, "sign").unionAll(
        batch.select(*_PLACE, digest, F.lit(-1))
    )
    blocks = every.groupBy(
        "kafka_partition", F.shiftright("kafka_offset", _BLOCK_BITS).alias("block")
    ).agg(
        F.count_if(F.expr("sign = -1")).alias("batch_rows"),
        F.count_if(F.expr("sign = 0")).alias("removed_rows"),
        F.sum("sign").alias("rows"),
        # The sums of digests' halves fit a BIGINT.
        F.expr("sum(sign * shiftright(digest, 32))").alias("high"),
        F.expr("sum(sign * (digest & 4294967295L))").alias("low"),
    )
    is_equal = F.expr("rows = 0 AND high = 0 AND low = 0")
    [found] = (
        blocks.withColumn("is_equal", is_equal)
        .agg(
            F.expr("sum(batch_rows) FILTER (WHERE is_equal)").alias("same"),
            F.expr("sum(removed_rows) FILTER (WHERE is_equal)").alias("duplicates"),
            F.expr(
                "collect_list(struct(kafka_partition, block)) FILTER (WHERE NOT is_equal)"
            ).alias("others"),
        )
        .collect()
    )
    return found


def _in_block(rows: DataFrame, blocks: DataFrame) -> Column:
    is_block = F.shiftright(rows["kafka_offset"], _BLOCK_BITS) == blocks["block"]
    return (rows["kafka_partition"] == blocks["kafka_partition"]) & is_block


def _hash(content: Sequence[StructField]) -> Column:
    """Return a hash of the content. Spark's hash skips nulls, so their positions are hashed too. It
    refuses maps, so nested values are hashed as text, in the order in which both layers decoded the
    same bytes."""
    parts = []
    for field in content:
        nested = isinstance(field.dataType, (ArrayType, MapType, StructType))
        column = F.col(f"`{field.name}`")
        parts.append(
            F.to_json(F.struct(column), {"ignoreNullFields": "false"}) if nested else column
        )
        parts.append(column.isNull())
    return F.xxhash64(*parts)
