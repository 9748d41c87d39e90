"""The tables of a stream: their schemas, and `apply`, which creates or evolves them and says what it changed."""

from __future__ import annotations

import logging
import re
from datetime import UTC, datetime
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
from sqlglot import exp, parse_one

from anabranch import lake, s3
from anabranch.config import Environment, Stream
from anabranch.errors import Refused, Terminal
from anabranch.hours import Timeline, hour_of
from anabranch.kafka import KafkaAdapter
from anabranch.ledger import LEDGER_SCHEMA
from anabranch.neighbours import explain
from anabranch.position import Position
from anabranch.restore import restore_ledger
from anabranch.state import POSITION, TIMELINE

if TYPE_CHECKING:
    from pyiceberg.table import Table

    from anabranch.lake import Lake

LOG = logging.getLogger(__name__)

_PRIMITIVES: dict[str, IcebergType] = {
    "string": StringType(), "int": IntegerType(), "bigint": LongType(), "float": FloatType(), "double": DoubleType(),
    "boolean": BooleanType(), "date": DateType(), "timestamp": TimestamptzType(), "binary": BinaryType(),
}  # fmt: skip


def iceberg_type(spark_type: str, ids: list[int]) -> IcebergType:
    """Spark's simple string as an Iceberg type; `ids` is a counter of field ids for what is nested."""
    return _convert(parse_one(f"CAST(NULL AS {spark_type})", dialect="spark").args["to"], ids)


def _convert(kind: exp.DataType, ids: list[int]) -> IcebergType:
    def next_id() -> int:
        ids[0] += 1
        return ids[0]

    name, inner = kind.this.name, kind.expressions
    if name == "ARRAY":
        return ListType(next_id(), _convert(inner[0], ids), element_required=False)
    if name == "MAP":
        key, value = next_id(), next_id()
        return MapType(key, _convert(inner[0], ids), value, _convert(inner[1], ids), value_required=False)
    if name == "STRUCT":
        return StructType(*(NestedField(next_id(), f.name, _convert(f.args["kind"], ids)) for f in inner))
    if name == "DECIMAL":
        return DecimalType(int(inner[0].name), int(inner[1].name))
    return _PRIMITIVES[{"TEXT": "string", "VARCHAR": "string", "TIMESTAMPTZ": "timestamp"}.get(name, name.lower())]


def rows_schema(stream: Stream) -> Schema:
    """The stream's own columns, then where each row came from."""
    fields: list[NestedField] = []
    ids = [1000]
    for column in stream.columns:
        kind = iceberg_type(column.type, ids)
        fields.append(NestedField(len(fields) + 1, column.name, kind, required=not column.nullable))
    for name, kind in (
        ("kafka_partition", IntegerType()), ("kafka_offset", LongType()), ("kafka_timestamp", TimestamptzType()),
        ("ingest_hour", StringType()), ("event_date", DateType()),
    ):  # fmt: skip
        fields.append(NestedField(len(fields) + 1, name, kind, required=name != "kafka_timestamp"))
    return Schema(*fields)


def dead_letters_schema() -> Schema:
    header = StructType(NestedField(12, "key", StringType()), NestedField(13, "value", BinaryType()))
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


def apply(environment: Environment, stream: Stream, lake_: Lake, kafka: KafkaAdapter) -> list[str]:
    """Create or evolve everything that a stream needs; returns what was changed, in words. Idempotent.

    The first commit records where the stream begins: position and first hour. Nothing is ever taken from Kafka's own
    defaults again. Raises Refused for a change of schema that would lose or hide data.
    """
    changes = []
    bucket = s3.bucket_of(environment.catalog.warehouse)
    if bucket is not None and s3.ObjectStore(environment.s3).ensure_bucket(bucket):
        changes.append(f"created bucket {bucket}")
    # Kafka first: the recorded beginning must not be older than the tables.
    first = {} if lake_.exists(stream.table) else _beginning(stream, kafka)
    for name, schema, by in (
        (stream.table, rows_schema(stream), ("event_date", "ingest_hour")),
        (stream.dead_letters_table, dead_letters_schema(), ("ingest_hour",)),
        (stream.hours_table, LEDGER_SCHEMA, ()),
    ):
        if lake_.create(name, schema, by, lake.TABLE_PROPERTIES):
            changes.append(f"created table {name}")
        elif name == stream.table:
            changes += _evolve(lake_.load(name), schema)
    if not first and lake_.load(stream.table).current_snapshot() is None:
        first = _beginning(stream, kafka)
    made = lake_.add_branches(stream.table, first)
    changes += [f"created branch {b} of {stream.table}" for b in made]
    if "main" in made and first:
        changes.append(f"recorded the beginning: {first[POSITION]}")
    changes += [
        f"created branch {b} of {stream.dead_letters_table}" for b in lake_.add_branches(stream.dead_letters_table, {})
    ]
    if rows := restore_ledger(lake_, stream):
        changes.append(
            f"wrote {rows} rows of {stream.hours_table} from what the branches say: it had none of these hours"
        )
    return changes


def _beginning(stream: Stream, kafka: KafkaAdapter) -> dict[str, str]:
    """Position and timeline of the first commit. A topic that does not exist yet will begin at offset 0."""
    topic = kafka.describe(stream.topic)
    now = datetime.now(UTC)
    if topic is None:
        LOG.warning("topic %s does not exist yet: the stream will begin at its first record", stream.topic)
        position = Position("", {})
    else:
        offsets = kafka.log_starts(topic) if stream.start == "earliest" else kafka.stable_ends(topic)
        position = Position(topic.id, offsets)
    timeline = Timeline(hour_of(now), hour_of(now), dict(position.offsets))
    return {POSITION: position.to_json(), TIMELINE: timeline.to_json()}


def require_columns(table: Table, stream: Stream) -> None:
    """That the table has every column of the stream, as the stream's file has it. Raises Terminal."""
    have = {f.name: f for f in table.schema().fields}
    for f in rows_schema(stream).fields:
        found = have.get(f.name)
        if found is None or _words(found) != _words(f):
            raise Terminal(
                f"table {'.'.join(table.name())}: expected column {f.name} {_words(f)}, found "
                f"{_words(found) if found is not None else 'none'}; run `anabranch apply {stream.name}`"
            )


def _words(f: NestedField) -> str:
    """A field's type in words. The ids of what is nested are the table's own, so they stay out."""
    return re.sub(r"(?<=[< ])\d+: ", "", str(f.field_type))


def _evolve(table: Table, wanted: Schema) -> list[str]:
    """Add the columns that are new; refuse what would change or drop a column."""
    have = {f.name: f for f in table.schema().fields}
    new = [f for f in wanted.fields if f.name not in have]
    for f in wanted.fields:
        if f.name in have and (_words(have[f.name]) != _words(f) or have[f.name].required != f.required):
            raise Refused(
                f"table {'.'.join(table.name())}: column {f.name}: expected it unchanged ({have[f.name]}), found {f}; "
                "add a new column instead, or a new stream with its own table"
            )
    if dropped := sorted(set(have) - {f.name for f in wanted.fields}):
        raise Refused(
            f"table {'.'.join(table.name())}: expected column {dropped[0]} in the schema, found it gone; "
            "put it back: rows that have it would lose it"
        )
    if not new:
        return []
    if required := [f.name for f in new if f.required]:
        raise Refused(
            f"table {'.'.join(table.name())}: expected the new column {required[0]} to be nullable, found NOT NULL; "
            "old rows do not have it"
        )
    try:
        with table.update_schema() as update:
            for f in new:
                update.add_column(f.name, f.field_type, required=False)
                update.move_before(f.name, "kafka_partition")
    except Exception as error:
        raise explain(f"add columns to {'.'.join(table.name())}", error) from error
    return [f"added column {f.name} to {'.'.join(table.name())}" for f in new]
