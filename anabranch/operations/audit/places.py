"""The places in Kafka of the rows of a table that another program writes: which columns have
partition and offset, and the rows' offsets, on disk beyond a fixed amount of memory."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from anabranch.common.errors import ConfigurationError
from anabranch.common.progress import Progress
from anabranch.iceberg.other_tables import OtherTable
from anabranch.offsets.position import Offsets, Ranges
from serving_layer.query.datasets import connected, quoted

if TYPE_CHECKING:
    import duckdb
    from numpy.typing import NDArray

LOG = logging.getLogger(__name__)

_MEMORY = "512MB"
_BATCH_ROWS = 1 << 20

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
    file has to return for it; `sql`: its value in DuckDB; `kind`: its type, text for JSON."""

    name: str
    reads: str
    sql: str
    kind: pa.DataType


def find_column(schema: pa.Schema, name: str) -> Column | None:
    """Return the column of a name, in any case of letters; None if the table has none. Pure."""
    fields = {field.name.lower(): field for field in schema}
    if (whole := fields.get(name.lower())) is not None:
        return Column(name, whole.name, quoted(whole.name), whole.type)
    head, dot, rest = name.partition(".")
    field = fields.get(head.lower()) if dot else None
    if field is None:
        return None
    if pa.types.is_string(field.type) or pa.types.is_large_string(field.type):
        sql = f"json_extract_string({quoted(field.name)}, '$.{rest}')"
        return Column(name, field.name, sql, pa.string())
    parts, kind = [field.name], field.type
    for part in rest.split("."):
        inner = _field_of(kind, part)
        if inner is None:
            return None
        parts, kind = [*parts, inner.name], inner.type
    return Column(name, ".".join(parts), ".".join(map(quoted, parts)), kind)


def _field_of(kind: pa.DataType, name: str) -> pa.Field | None:
    fields = list(kind) if pa.types.is_struct(kind) else []
    return next((field for field in fields if field.name.lower() == name.lower()), None)


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
        return PlaceColumns(
            named(partition, "--partition-column"), named(offset, "--offset-column"), by_time, None
        )
    for family in FAMILIES:
        p, o, topic = (
            find_column(schema, family.format(n)) for n in ("partition", "offset", "topic")
        )
        if p is not None and o is not None:
            # Snowflake has no `timestamp`.
            name = _TIMES[family.startswith("RECORD_METADATA")]
            return PlaceColumns(p, o, by_time or find_column(schema, family.format(name)), topic)
    times = (find_column(schema, name) for name in ("kafka_timestamp", "timestamp"))
    return PlaceColumns(None, None, by_time or next(filter(None, times), None), None)


@dataclass(frozen=True)
class TimeCounts:
    """Rows by the hour of their time; `first` has the first offset of each hour by partition. A row
    without a time counts for the hour ''."""

    rows: dict[str, int]
    first: dict[str, Offsets]


class Places:
    """The rows of a table by partition and offset. Opened by `read_places`.

    `unplaced`: rows whose partition or offset is null; `elsewhere`: rows of other topics."""

    def __init__(self, connection: duckdb.DuckDBPyConnection, topic: str) -> None:
        self._connection, self._topic = connection, topic
        self.rows = self.unplaced = self.elsewhere = 0
        self.spans: Ranges = {}
        self.times = TimeCounts(Counter(), {})
        connection.execute("CREATE TABLE places (p INTEGER, o BIGINT)")

    def add(self, batch: pa.RecordBatch, columns: PlaceColumns) -> None:
        there = {*batch.schema.names}
        sql = {
            key: column.sql if column.reads.partition(".")[0] in there else "NULL"
            for key, column in vars(columns).items()
            if column is not None
        }
        # A value that is no whole number, such as an offset as text of another form, has no place.
        p = f"TRY_CAST({sql.get('partition', 'NULL')} AS INTEGER)"
        o = f"TRY_CAST({sql.get('offset', 'NULL')} AS BIGINT)"
        time = _time_sql(sql["time"], columns.time.kind) if columns.time is not None else "NULL"
        own = f"coalesce({sql['topic']} = $topic, true)" if "topic" in sql else "true"
        # DuckDB refuses a batch without columns, from a file that has none of them.
        rows = pa.table(batch).append_column("anabranch_row", pa.nulls(batch.num_rows))
        self._connection.register("batch", rows)
        self._connection.execute(
            f"CREATE OR REPLACE TEMP TABLE one AS SELECT {p} AS p, {o} AS o, "
            f"coalesce(strftime({time}, '%Y-%m-%dT%H'), '') AS hour, {own} AS own FROM batch",
            {"topic": self._topic} if "topic" in sql else {},
        )
        self._connection.execute(
            "INSERT INTO places SELECT p, o FROM one WHERE own AND p IS NOT NULL AND o IS NOT NULL"
        )
        self._summarize()

    def _summarize(self) -> None:
        found = self._ask(
            "SELECT p, hour, own, min(o), max(o), count(*), count(o) FROM one GROUP BY ALL"
        )
        for p, hour, own, low, high, rows, placed in found:
            self.rows += rows
            if not own:
                self.elsewhere += rows
                continue
            self.times.rows[hour] += rows
            if p is None or low is None:
                self.unplaced += rows
                continue
            self.unplaced += rows - placed
            start, end = self.spans.get(p, (low, high + 1))
            self.spans[p] = (min(start, low), max(end, high + 1))
            first = self.times.first.setdefault(hour, {})
            first[p] = min(low, first.get(p, low))

    def count(self, partition: int, start: int, end: int) -> NDArray[np.int64]:
        """Return how many rows each offset in `[start, end)` of a partition has."""
        offsets = self._connection.execute(
            "SELECT o FROM places WHERE p = ? AND o >= ? AND o < ?", [partition, start, end]
        ).fetchnumpy()["o"]
        counts: NDArray[np.int64] = np.bincount(offsets - start, minlength=end - start)
        return counts

    def outside(self, ends: Offsets) -> int:
        """Return how many rows have a partition or an offset that the topic's log never had."""
        known = " OR ".join(f"(p = {p} AND o >= 0 AND o < {end})" for p, end in ends.items())
        [(number,)] = self._ask(f"SELECT count(*) FROM places WHERE NOT ({known or 'false'})")
        return int(number)

    def _ask(self, sql: str) -> list[tuple[Any, ...]]:
        return self._connection.execute(sql).fetchall()


def _time_sql(sql: str, kind: pa.DataType) -> str:
    """Return SQL: a time in UTC. Numbers, also as text, are milliseconds since 1970, as in Kafka's
    records. Pure."""
    if pa.types.is_timestamp(kind):
        return f"CAST({sql} AS TIMESTAMP)"
    millis = f"TRY(make_timestamp(TRY_CAST({sql} AS BIGINT) * 1000))"
    if pa.types.is_integer(kind):
        return millis
    return f"coalesce({millis}, TRY_CAST({sql} AS TIMESTAMP))"


@contextmanager
def read_places(table: OtherTable, columns: PlaceColumns, topic: str) -> Iterator[Places]:
    """Read the places of a table's rows. Raises Refused, Transient."""
    # Without such columns the rows are counted by any other one.
    wanted = list(dict.fromkeys(c.reads for c in columns.all)) or table.schema.names[:1]
    with connected(_MEMORY) as connection:
        places = Places(connection, topic)
        with Progress(LOG, f"read {table.what.partition(',')[0]}", "files", len(table.parts)) as at:
            for part in table.parts:
                for batch in part.iter_batches(_BATCH_ROWS, wanted):
                    places.add(batch, columns)
                at.step()
        yield places
