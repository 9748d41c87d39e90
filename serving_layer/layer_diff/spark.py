"""Bring both layers' rows of an hour to one schema for comparison, after the table's schema evolved.

A snapshot is read with its own schema, and a file has its writer's columns. So both sides get the columns that every
speed file of the hour has, in today's types. A DOUBLE that once was FLOAT is compared as FLOAT, the precision of the
old rows.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from pyiceberg.manifest import DataFile
from pyiceberg.schema import Schema
from pyiceberg.table import Table
from pyiceberg.types import ListType, NestedField
from pyiceberg.types import MapType as IcebergMap
from pyiceberg.types import StructType as IcebergStruct
from pyspark.sql import DataFrame
from pyspark.sql.types import ArrayType, DataType, DoubleType, FloatType, MapType, StructField, StructType

from anabranch.records.reshape import to_schema
from serving_layer.layer_diff.columns import held_fields, once_floats


def to_common_schema(
    speed: DataFrame, batch: DataFrame, table: Table, files: Sequence[DataFile]
) -> tuple[DataFrame, DataFrame]:
    """Both layers' rows in the schema in which they are compared.

    `speed` may be read with an older schema than `batch`, whose columns are the table's. `files`: the speed layer's.
    """
    schema = common_schema(batch.schema, list(table.schemas().values()), table.schema(), files)
    return to_schema(speed, schema), to_schema(batch, schema)


def common_schema(rows: StructType, schemas: Sequence[Schema], now: Schema, files: Sequence[DataFile]) -> StructType:
    """The schema in which rows with schema `rows` are compared with those in `files`. Pure."""
    return _struct(rows, now.as_struct(), held_fields(schemas, files), once_floats(schemas))


def _struct(kind: StructType, iceberg: IcebergStruct, known: Collection[int], floats: Collection[int]) -> StructType:
    fields = {f.name: f for f in iceberg.fields}
    kinds = [(f, _kind(f.dataType, fields[f.name], known, floats)) for f in kind.fields if f.name in fields]
    return StructType([StructField(f.name, k, f.nullable) for f, k in kinds if k is not None])


def _kind(kind: DataType, field: NestedField, known: Collection[int], floats: Collection[int]) -> DataType | None:
    """The type to compare a column in; None if a file lacks it."""
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
