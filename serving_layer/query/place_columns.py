"""Where the rows of another program's table are in Kafka: the columns with partition, offset, time
and topic, and their values."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc

from anabranch.common.errors import ConfigurationError
from anabranch.records.hashes import in_duckdb
from serving_layer.query.datasets import quoted

FAMILIES = (
    "_kafka_metadata_{}",  # Iceberg's transform for Kafka Connect (KafkaMetadataTransform)
    "_kafka_metadata.{}",  # the same, nested
    "redpanda.{}",  # Redpanda's Iceberg topics
    "RECORD_METADATA.{}",  # Snowflake's connector; also as JSON text
    "_hoodie_kafka_source_{}",  # Hudi's streamer
    "$${}",  # Confluent's Tableflow
    "kafka_{}",
    "{}",  # Spark's and Flink's names
)
"""Names of the columns with partition, offset, timestamp and topic, by program."""
_TIMES = ("timestamp", "CreateTime")


@dataclass(frozen=True)
class Column:
    """A column, a field of one (`a.b`), or a value in a column of JSON text. `reads`: what a data
    file has to return for it; `head`: the column that it is in, whose name may have dots; `sql`:
    its value in DuckDB; `kind`: its type, text for JSON."""

    name: str
    reads: str
    head: str
    sql: str
    kind: pa.DataType


def find_column(schema: pa.Schema, name: str) -> Column | None:
    """Return the column of a name, in any case of letters; None if the table has none. Pure."""
    if (whole := _named(schema, name)) is not None:
        return Column(name, whole.name, whole.name, quoted(whole.name), whole.type)
    head, dot, rest = name.partition(".")
    field = _named(schema, head) if dot else None
    if field is None:
        return None
    if pa.types.is_string(field.type) or pa.types.is_large_string(field.type):
        path = rest.replace("'", "''")
        sql = f"TRY(json_extract_string({quoted(field.name)}, '$.{path}'))"
        return Column(name, field.name, field.name, sql, pa.string())
    parts, kind = [field.name], field.type
    for part in rest.split("."):
        inner = _named(kind, part) if pa.types.is_struct(kind) else None
        if inner is None:
            return None
        parts, kind = [*parts, inner.name], inner.type
    # In brackets: else a table of the struct's name is taken, and a column for its field.
    sql = ".".join((f"({quoted(field.name)})", *map(quoted, parts[1:])))
    return Column(name, ".".join(parts), field.name, sql, kind)


def _named(fields: Iterable[pa.Field], name: str) -> pa.Field | None:
    found = [field for field in fields if field.name.lower() == name.lower()]
    return next((field for field in found if field.name == name), found[0] if found else None)


@dataclass(frozen=True)
class PlaceColumns:
    """The columns that locate a row: partition and offset in Kafka (both or none), and the time at
    which Kafka received it and its topic, where the table has them."""

    partition: Column | None
    offset: Column | None
    time: Column | None
    topic: Column | None

    @property
    def all(self) -> tuple[Column, ...]:
        found = (self.partition, self.offset, self.time, self.topic)
        return tuple(column for column in found if column is not None)

    def of(self, schema: pa.Schema) -> PlaceColumns:
        """Return these columns in another file, which may lack some, have the topic besides, or
        write names in letters of another case. Pure."""

        def there(column: Column | None) -> Column | None:
            return find_column(schema, column.name) if column is not None else None

        topic, offset = there(self.topic), self.offset.name if self.offset is not None else ""
        if self.topic is None and offset.lower().endswith("offset"):
            topic = find_column(schema, f"{offset[:-6]}topic")
        return PlaceColumns(there(self.partition), there(self.offset), there(self.time), topic)

    @property
    def reads(self) -> list[str]:
        """The columns and fields to read from a data file."""
        return list(dict.fromkeys(column.reads for column in self.all))


def find_columns(
    schema: pa.Schema, partition: str | None, offset: str | None, time: str | None
) -> PlaceColumns:
    """Return the named columns, and otherwise those of the first of `FAMILIES` whose partition and
    offset the table has. Pure. Raises ConfigurationError for a name that the table lacks."""

    def named(name: str, option: str) -> Column:
        if (found := find_column(schema, name)) is None:
            raise ConfigurationError(
                f"{option} {name}: expected a column of the table, found {', '.join(schema.names)}"
            )
        return found

    by_time = named(time, "--time-column") if time is not None else None
    if partition is not None and offset is not None:
        place = named(partition, "--partition-column"), named(offset, "--offset-column")
        beside = f"{offset.rpartition('.')[0]}.{{}}" if "." in offset else "{}"
        topics = (find_column(schema, one.format("topic")) for one in (beside, *FAMILIES))
        return PlaceColumns(*place, by_time, next(filter(None, topics), None))
    for family in FAMILIES:
        p, o, topic = (
            find_column(schema, family.format(n)) for n in ("partition", "offset", "topic")
        )
        if p is not None and o is not None:
            # Snowflake has no `timestamp`.
            name = _TIMES[family.startswith("RECORD_METADATA")]
            own_time = find_column(schema, family.format(name)) or _plain_time(schema)
            return PlaceColumns(p, o, by_time or own_time, topic)
    return PlaceColumns(None, None, by_time or _plain_time(schema), None)


def _plain_time(schema: pa.Schema) -> Column | None:
    times = (find_column(schema, name) for name in ("kafka_timestamp", "timestamp"))
    return next(filter(None, times), None)


def locate(batch: pa.Table, columns: PlaceColumns, topic: str) -> pa.Table:
    """Return the place of each row: partition `p` and offset `o`, null where there is no whole
    number from 0 on, its `time` in UTC, and whether it is the topic's `own`. `batch` may lack
    columns."""
    if (found := _typed(batch, columns)) is not None:
        return found
    there = {*batch.schema.names}
    sql = {
        key: column.sql if column.head in there else "NULL"
        for key, column in vars(columns).items()
        if column is not None
    }
    p = _whole_sql(sql.get("partition", "NULL"), "INTEGER")
    o = _whole_sql(sql.get("offset", "NULL"), "BIGINT")
    time = _time_sql(sql["time"], columns.time.kind) if columns.time is not None else "NULL"
    literal = "'" + topic.replace("'", "''") + "'"
    topic_sql = f"CAST({sql['topic']} AS VARCHAR)" if "topic" in sql else "NULL"
    own = f"coalesce({topic_sql} = {literal}, true)"
    for i, column in enumerate(batch.columns):
        # DuckDB does not cast nanoseconds with a zone, as ORC's reader and pandas have them.
        if (kind := _in_micros(column.type)) != column.type:
            batch = batch.set_column(i, batch.field(i).name, column.cast(kind, safe=False))
    # DuckDB refuses a batch without columns, from a file that has none of them.
    rows = batch.append_column("anabranch_row", pa.nulls(len(batch)))
    return in_duckdb(
        f"SELECT {p} AS p, {o} AS o, CAST({time} AS TIMESTAMP) AS time, {own} AS own FROM rows",
        rows=rows,
    )


def _in_micros(kind: pa.DataType) -> pa.DataType:
    if pa.types.is_timestamp(kind) and kind.unit == "ns":
        return pa.timestamp("us", kind.tz)
    if pa.types.is_struct(kind):
        return pa.struct([field.with_type(_in_micros(field.type)) for field in kind])
    return kind


def _typed(batch: pa.Table, columns: PlaceColumns) -> pa.Table | None:
    """Return `locate`'s result for columns of its types, without DuckDB; else None. Pure."""
    if columns.topic is not None:
        return None
    t, n = pa.types, len(batch)
    kinds = {"p": pa.int32(), "o": pa.int64(), "time": pa.timestamp("us")}
    found: dict[str, pa.ChunkedArray | pa.Array] = {"own": pa.repeat(True, n)}
    for (key, kind), column in zip(
        kinds.items(), (columns.partition, columns.offset, columns.time), strict=True
    ):
        if column is None or column.head not in batch.schema.names:
            found[key] = pa.nulls(n, kind)
            continue
        if column.reads not in batch.schema.names:
            return None
        # By the batch: a file may have another type than the table.
        values = batch[column.reads]
        if values.type != kind and not (t.is_timestamp(kind) and t.is_timestamp(values.type)):
            return None
        if t.is_timestamp(kind):
            micros = values.cast(pa.timestamp("us", values.type.tz), safe=False).cast(pa.int64())
            values = micros.cast(kind)
        elif (pc.min(values).as_py() or 0) < 0:
            return None
        found[key] = values
    return pa.table({key: found[key] for key in (*kinds, "own")})


def _whole_sql(sql: str, kind: str) -> str:
    """Return SQL: a whole number from 0 on, or null. A cast alone would round others, to the place
    of another record. Pure."""
    is_whole = f"TRY_CAST({sql} AS DOUBLE) >= 0 AND TRY_CAST({sql} AS DOUBLE) % 1 = 0"
    return f"CASE WHEN {is_whole} THEN TRY_CAST({sql} AS {kind}) END"


def _time_sql(sql: str, kind: pa.DataType) -> str:
    """Return SQL: a time in UTC, also of text with another offset. Numbers, also as text, are
    milliseconds since 1970. Pure."""
    if pa.types.is_timestamp(kind):
        return f"CAST({sql} AS TIMESTAMP)"
    if pa.types.is_date(kind):
        return "NULL"  # A day has no hour.
    millis = f"TRY(make_timestamp(TRY_CAST({sql} AS BIGINT) * 1000))"
    if pa.types.is_integer(kind):
        return millis
    # A cast to TIMESTAMP would drop the offset of a text: another hour.
    return f"coalesce({millis}, CAST(TRY_CAST({sql} AS TIMESTAMPTZ) AS TIMESTAMP))"
