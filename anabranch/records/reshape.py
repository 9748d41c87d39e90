"""Convert rows to another schema of the same columns. DataFrame -> DataFrame."""

from __future__ import annotations

from pyiceberg.table import Table
from pyspark.sql import DataFrame
from pyspark.sql.types import StructType

from anabranch.iceberg.schema_evolution import Columns
from anabranch.protocol.rolled_back import is_rolled_back


def to_schema(frame: DataFrame, schema: StructType) -> DataFrame:
    """Select the columns of `schema` in its types; columns and fields that the frame lacks are
    null. DataFrame -> DataFrame."""
    # For Spark, a nullable column does not fit one that is not.
    return frame.to(schema.toNullable())


def fit_to_table(rows: DataFrame, catalog: str, table: Table, columns: Columns) -> DataFrame:
    """Convert rows to stage to the table's schema if the stream's file was rolled back: fields that
    only the table has are null. Spark itself adds missing columns, but not missing fields of
    structs. DataFrame -> DataFrame."""
    if not is_rolled_back(table, columns):
        return rows
    return to_schema(rows, rows.sparkSession.table(f"{catalog}.{'.'.join(table.name())}").schema)
