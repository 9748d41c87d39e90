"""Convert rows to another schema of the same columns. DataFrame -> DataFrame."""

from __future__ import annotations

from pyiceberg.table import Table
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F
from pyspark.sql.types import ArrayType, DataType, MapType, StructType

from anabranch.iceberg.schema_evolution import Columns
from anabranch.protocol.rolled_back import is_rolled_back


def to_schema(frame: DataFrame, schema: StructType) -> DataFrame:
    """Select the columns of `schema` in its types; columns that the frame lacks are null. DataFrame
    -> DataFrame."""
    have = {f.name: f.dataType for f in frame.schema.fields}
    columns = (
        _cast(F.col(f"`{f.name}`"), have.get(f.name), f.dataType).alias(f.name)
        for f in schema.fields
    )
    return frame.select(*columns)


def fit_to_table(rows: DataFrame, catalog: str, table: Table, columns: Columns) -> DataFrame:
    """Convert rows to stage to the table's schema if the stream's file was rolled back: fields that
    only the table has are null. Spark itself adds missing columns, but not missing fields of
    structs. DataFrame -> DataFrame."""
    if not is_rolled_back(table, columns):
        return rows
    return to_schema(rows, rows.sparkSession.table(f"{catalog}.{'.'.join(table.name())}").schema)


def _cast(read: Column, have: DataType | None, want: DataType) -> Column:
    """Convert a column to another type: struct fields by name, other types by a cast."""
    if have is None:
        return F.lit(None).cast(want)
    if have == want:
        return read
    if isinstance(have, StructType) and isinstance(want, StructType):
        kinds = {f.name: f.dataType for f in have.fields}
        fields = [
            _cast(read.getField(f.name), kinds.get(f.name), f.dataType).alias(f.name)
            for f in want.fields
        ]
        return F.when(read.isNotNull(), F.struct(*fields))
    if isinstance(have, ArrayType) and isinstance(want, ArrayType):
        return F.transform(read, lambda item: _cast(item, have.elementType, want.elementType))
    if isinstance(have, MapType) and isinstance(want, MapType):
        return F.transform_values(
            read, lambda _, value: _cast(value, have.valueType, want.valueType)
        )
    return read.cast(want)
