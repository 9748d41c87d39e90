"""Exclude erased records while a layer stages, by the keyed hash of a column or by the place of a
dead letter.

The driver hashes the distinct values of the column, so that no key is in a plan or on an executor.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import reduce

from pyiceberg.table import Table
from pyspark.sql import DataFrame
from pyspark.sql import functions as F
from pyspark.sql.types import StructType

from anabranch.iceberg.schema_evolution import Columns
from anabranch.protocol.apply import is_rolled_back
from anabranch.protocol.erasure import HourFilter
from anabranch.records import inside
from anabranch.records.hashes import PLACE

_PLACE_TYPES = "kafka_partition INT, kafka_offset BIGINT"


def find_erased(decoded: DataFrame, erased: Sequence[HourFilter]) -> DataFrame:
    """Return the distinct places of the records that the filters erase. `decoded` has
    `records.decode`'s columns and the filters' hours; it is read for each erasure of an hour."""
    found = [
        frame
        for one in erased
        for frame in _erased_in_hour(decoded.where(F.col("ingest_hour") == one.hour), one)
    ]
    places = [place for one in erased for place in sorted(one.places)]
    if places:
        at = decoded.sparkSession.createDataFrame(places, _PLACE_TYPES)
        found.append(decoded.select(*PLACE).join(F.broadcast(at), [*PLACE], "left_semi"))
    return reduce(
        lambda one, other: one.unionByName(other), found, decoded.select(*PLACE).limit(0)
    ).distinct()


def without(frame: DataFrame, erased: DataFrame) -> DataFrame:
    return frame.join(erased, [*PLACE], "left_anti")


def _erased_in_hour(records: DataFrame, one: HourFilter) -> Iterator[DataFrame]:
    for hashed in one.values:
        in_range = records.where(inside(hashed.ranges))
        text = F.col(f"`{hashed.column}`").cast("string")
        values = (
            in_range.select(text.alias("value"))
            .where("value IS NOT NULL")
            .distinct()
            .toArrow()["value"]
        )
        matching = [value for value in values.to_pylist() if hashed.matches(value)]
        if matching:
            wanted = in_range.sparkSession.createDataFrame(
                [(value,) for value in matching], "_erased STRING"
            )
            yield in_range.join(F.broadcast(wanted), text == F.col("_erased"), "left_semi").select(
                *PLACE
            )


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
