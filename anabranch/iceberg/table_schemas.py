"""The Iceberg schemas of a stream's tables: rows, dead letters, archive, a view's partials."""

from __future__ import annotations

from functools import lru_cache

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
from anabranch.config.columns import parts_of
from anabranch.config.views import WINDOW_START, group_column
from anabranch.iceberg.physical_design import PhysicalDesign
from anabranch.iceberg.schema_evolution import Columns

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


def iceberg_type(kind: str, ids: list[int]) -> IcebergType:
    """Return the Iceberg type of a column's type (`Column.type`), with ids after `ids[0]`, which
    is advanced."""

    def next_id() -> int:
        ids[0] += 1
        return ids[0]

    name, parts = parts_of(kind)
    if name == "array":
        return ListType(next_id(), iceberg_type(parts[0], ids), element_required=False)
    if name == "map":
        key, value = next_id(), next_id()
        return MapType(key, iceberg_type(parts[0], ids), value, iceberg_type(parts[1], ids), False)
    if name == "struct":
        fields = (part.partition(":") for part in parts)
        return StructType(
            *(NestedField(next_id(), name, iceberg_type(of, ids)) for name, _, of in fields)
        )
    if name == "decimal":
        return DecimalType(int(parts[0]), int(parts[1]))
    return _PRIMITIVES[name]


# Iceberg's `write.metadata.metrics.max-inferred-column-defaults`.
_FIELDS_WITH_BOUNDS = 100


# Cached for all streams of a process.
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
