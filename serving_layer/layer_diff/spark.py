"""What two layers' rows of an hour can be compared by, when the table was evolved since some of them were written.

A snapshot is read with the schema of its own time, and a file holds the columns that its writer knew. So both sides are
brought to one shape: the columns that every file of the speed layer's hour holds, in the types of today, but a DOUBLE
that once was FLOAT as FLOAT, since that is all that an old row knows of its number. What differs in that shape differs.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from pyiceberg.types import ListType, NestedField
from pyiceberg.types import MapType as IcebergMap
from pyiceberg.types import StructType as IcebergStruct
from pyspark.sql import functions as F
from pyspark.sql.types import ArrayType, DataType, DoubleType, FloatType, MapType, StructField, StructType

from anabranch.protocol.rolled_back import is_rolled_back
from serving_layer.layer_diff.columns import held_fields, once_floats

if TYPE_CHECKING:
    from pyiceberg.manifest import DataFile
    from pyiceberg.schema import Schema
    from pyiceberg.table import Table
    from pyspark.sql import Column, DataFrame

    from anabranch.iceberg.schema_evolution import Columns


def alike(speed: DataFrame, batch: DataFrame, table: Table, files: Sequence[DataFile]) -> tuple[DataFrame, DataFrame]:
    """Both layers' rows in the shape in which they can be compared. `speed` may be read with an older schema than
    `batch`, whose columns are the table's; `files` are those that hold the speed layer's rows."""
    shape = comparable(batch.schema, list(table.schemas().values()), table.schema(), files)
    return shaped(speed, shape), shaped(batch, shape)


def comparable(rows: StructType, schemas: Sequence[Schema], now: Schema, files: Sequence[DataFile]) -> StructType:
    """The shape in which rows like `rows` are compared with those of `files`. Pure."""
    return _struct(rows, now.as_struct(), held_fields(schemas, files), once_floats(schemas))


def shaped(frame: DataFrame, shape: StructType) -> DataFrame:
    """The columns of `shape`, in its types; what the frame lacks is null. DataFrame -> DataFrame."""
    have = {f.name: f.dataType for f in frame.schema.fields}
    columns = (_as(F.col(f"`{f.name}`"), have.get(f.name), f.dataType).alias(f.name) for f in shape.fields)
    return frame.select(*columns)


def fitted(rows: DataFrame, catalog: str, table: Table, columns: Columns) -> DataFrame:
    """Rows to be staged, with null in what the table has beyond the columns of a file that was put back to an older
    one: Spark fills in whole columns by itself, and no fields of structs. DataFrame -> DataFrame."""
    if not is_rolled_back(table, columns):
        return rows
    return shaped(rows, rows.sparkSession.table(f"{catalog}.{'.'.join(table.name())}").schema)


def _struct(kind: StructType, iceberg: IcebergStruct, known: Collection[int], floats: Collection[int]) -> StructType:
    fields = {f.name: f for f in iceberg.fields}
    kinds = [(f, _kind(f.dataType, fields[f.name], known, floats)) for f in kind.fields if f.name in fields]
    return StructType([StructField(f.name, k, f.nullable) for f, k in kinds if k is not None])


def _kind(kind: DataType, field: NestedField, known: Collection[int], floats: Collection[int]) -> DataType | None:
    """The type to compare a column in; None when some file holds none of it."""
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


def _as(read: Column, have: DataType | None, want: DataType) -> Column:
    """A column of one type as another that holds as much or less: the fields of structs by name, numbers by a cast."""
    if have is None:
        return F.lit(None).cast(want)
    if have == want:
        return read
    if isinstance(have, StructType) and isinstance(want, StructType):
        kinds = {f.name: f.dataType for f in have.fields}
        fields = [_as(read.getField(f.name), kinds.get(f.name), f.dataType).alias(f.name) for f in want.fields]
        return F.when(read.isNotNull(), F.struct(*fields))
    if isinstance(have, ArrayType) and isinstance(want, ArrayType):
        return F.transform(read, lambda item: _as(item, have.elementType, want.elementType))
    if isinstance(have, MapType) and isinstance(want, MapType):
        return F.transform_values(read, lambda _, value: _as(value, have.valueType, want.valueType))
    return read.cast(want)
