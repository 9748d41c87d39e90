"""The Iceberg schemas of a stream's tables: rows, dead letters, archive, a view's partials."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import TYPE_CHECKING

from pyiceberg.schema import Schema
from pyiceberg.types import (
    BinaryType,
    BooleanType,
    DateType,
    DecimalType,
    DoubleType,
    FloatType,
    IcebergType,
    IntegerType,
    ListType,
    LongType,
    MapType,
    NestedField,
    StringType,
    StructType,
    TimestamptzType,
)

from anabranch.config import Stream, View
from anabranch.config.views import WINDOW_START, group_column
from anabranch.iceberg.physical_design import PhysicalDesign
from anabranch.iceberg.schema_evolution import Columns

if TYPE_CHECKING:
    from sqlglot import exp

_PRIMITIVES: dict[str, IcebergType] = {
    "string": StringType(),
    "int": IntegerType(),
    "bigint": LongType(),
    "float": FloatType(),
    "double": DoubleType(),
    "boolean": BooleanType(),
    "date": DateType(),
    "timestamp": TimestamptzType(),
    "binary": BinaryType(),
}

FROM_KAFKA = (
    ("kafka_partition", IntegerType()),
    ("kafka_offset", LongType()),
    ("kafka_timestamp", TimestamptzType()),
    ("ingest_hour", StringType()),
    ("event_date", DateType()),
)
"""The provenance columns of a row, which follow the stream's own columns."""


def iceberg_type(spark_type: str, ids: list[int]) -> IcebergType:
    """Return the Iceberg type of Spark's simple string. `ids`: a counter of nested field ids, which
    is advanced."""
    from sqlglot import parse_one

    quoted = re.sub(r"(\w+):", r"`\1`:", spark_type)  # a field's name may be an SQL keyword
    return _convert(parse_one(f"CAST(NULL AS {quoted})", dialect="spark").args["to"], ids)


def _convert(kind: exp.DataType, ids: list[int]) -> IcebergType:
    def next_id() -> int:
        ids[0] += 1
        return ids[0]

    name, inner = kind.this.name, kind.expressions
    if name == "ARRAY":
        return ListType(next_id(), _convert(inner[0], ids), element_required=False)
    if name == "MAP":
        key, value = next_id(), next_id()
        return MapType(
            key, _convert(inner[0], ids), value, _convert(inner[1], ids), value_required=False
        )
    if name == "STRUCT":
        return StructType(
            *(NestedField(next_id(), f.name, _convert(f.args["kind"], ids)) for f in inner)
        )
    if name == "DECIMAL":
        return DecimalType(int(inner[0].name), int(inner[1].name))
    return _PRIMITIVES[
        {"TEXT": "string", "VARCHAR": "string", "TIMESTAMPTZ": "timestamp"}.get(name, name.lower())
    ]


# Iceberg's `write.metadata.metrics.max-inferred-column-defaults`.
_FIELDS_WITH_BOUNDS = 100


# Cached for all streams of a process: parsing the types takes as long as a small publish.
@lru_cache(maxsize=1 << 12)
def rows_schema(stream: Stream) -> Schema:
    """Return the schema of the stream's table: its own columns, then the provenance columns."""
    fields: list[NestedField] = []
    ids = [1000]
    for column in stream.columns:
        kind = iceberg_type(column.type, ids)
        fields.append(NestedField(len(fields) + 1, column.name, kind, required=not column.nullable))
    for name, kind in FROM_KAFKA:
        fields.append(NestedField(len(fields) + 1, name, kind, required=name != "kafka_timestamp"))
    return Schema(*fields)


def rows_columns(stream: Stream) -> Columns:
    """Return the columns of the stream's table, and how they may change."""
    source = f"subject {stream.subject}" if stream.subject_schema is not None else "`schema:`"
    return Columns(
        rows_schema(stream),
        f"stream {stream.name} ({source})",
        stream.key,
        True,
        before="kafka_partition",
    )


def rows_design(stream: Stream) -> PhysicalDesign:
    """Return the physical design of the stream's table. Event time and provenance columns, which
    readers filter by, have bounds in a wide table too: Iceberg keeps those of 100 fields."""
    if len(rows_schema(stream).field_ids) <= _FIELDS_WITH_BOUNDS:
        return PhysicalDesign(stream.files.sort, stream.files.bloom)
    times = (stream.event_time.column,) if stream.event_time is not None else ()
    bounded = (*times, *(name for name, _ in FROM_KAFKA))
    return PhysicalDesign(stream.files.sort, stream.files.bloom, bounded)


def dead_letters_schema() -> Schema:
    header = StructType(
        NestedField(12, "key", StringType()), NestedField(13, "value", BinaryType())
    )
    return Schema(
        NestedField(1, "topic_id", StringType(), required=True),
        NestedField(2, "kafka_partition", IntegerType(), required=True),
        NestedField(3, "kafka_offset", LongType(), required=True),
        NestedField(4, "kafka_timestamp", TimestamptzType()),
        NestedField(5, "ingest_hour", StringType(), required=True),
        NestedField(6, "key", BinaryType()),
        NestedField(7, "value", BinaryType()),
        NestedField(8, "headers", ListType(11, header, element_required=False)),
        NestedField(9, "error_code", StringType(), required=True),
        NestedField(10, "error_text", StringType()),
        NestedField(14, "layer", StringType(), required=True),
    )


def archive_schema() -> Schema:
    """Return the columns of dead letters without those of the error: a record as Kafka has it."""
    own = ("error_code", "error_text", "layer")
    return Schema(*(field for field in dead_letters_schema().fields if field.name not in own))


def partials_schema(stream: Stream, view: View) -> Schema:
    """Return the schema of a view's partials. A row has the hour's partial of one window and group,
    and its inputs: the acceptance of the hour, and digests of its files and of the view's
    definition."""
    ids = [1000]
    fields = [
        NestedField(1, "ingest_hour", StringType(), required=True),
        NestedField(2, WINDOW_START, TimestamptzType()),
    ]
    columns = [
        ("decision", "string"),
        ("files", "string"),
        ("definition", "string"),
        ("records", "bigint"),
    ]
    columns += [(group_column(name), stream.column_type(name)) for name in view.group]
    columns += [(partial.name, partial.type) for partial in stream.partials(view)]
    for name, kind in columns:
        fields.append(NestedField(len(fields) + 1, name, iceberg_type(kind, ids)))
    return Schema(*fields)
