"""A stream's table for Python: `anabranch.open("game_events").arrow(columns=[…], hours=…)`.

Reads only the given columns, and skips files that cannot contain a matching row.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow.dataset as ds

from anabranch import config, family_streams
from anabranch.common.errors import ConfigurationError
from anabranch.config import Stream, View
from anabranch.iceberg.owner import open_lake
from anabranch.iceberg.snapshots import snapshot_properties
from anabranch.offsets.hours import start_of
from anabranch.protocol.state import load_state
from anabranch.protocol.watermarks import Watermarks
from anabranch.subjects.follow import with_table_columns
from serving_layer.query import (
    Answer,
    Derived,
    SelectedRows,
    open_derived,
    open_query,
    open_relation,
    source,
)
from serving_layer.query.datasets import quoted, quoted_table
from serving_layer.reader import Reader
from serving_layer.reader.selection import Provenance, Selection, snapshot_as_of
from serving_layer.views import spark_sql

if TYPE_CHECKING:
    import duckdb
    import pandas
    import pyarrow as pa
    from pyspark.sql import DataFrame, SparkSession


@dataclass(frozen=True)
class Rows:
    """The wanted rows and columns; all by default.

    `columns`: by name. `hours`: one ingest hour, or the first and the last. `since` and `until`:
    event time, the latter exclusive; UTC without an offset. `where`: a condition in DuckDB's SQL.
    """

    columns: Sequence[str] | None = None
    hours: str | tuple[str, str] | None = None
    since: datetime | str | None = None
    until: datetime | str | None = None
    where: str | None = None


@dataclass(frozen=True)
class StreamTable:
    """A stream's table: its current rows at each call, or those of the selection with which it was
    opened. Methods with `rows` take the fields of `Rows`. Raises ConfigurationError for wrong
    columns, hours or times, Transient when the lake does not answer."""

    reader: Reader
    stream: Stream
    selection: Selection

    def arrow(self, **rows: Any) -> pa.Table:
        """Return the rows as a PyArrow table, in memory."""
        with self._answer(Rows(**rows)) as answer:
            return answer.rows.read_all()

    def pandas(self, **rows: Any) -> pandas.DataFrame:
        """Return the rows as a pandas data frame, in memory."""
        return self.arrow(**rows).to_pandas()

    def polars(self, **rows: Any) -> Any:
        """Return a polars data frame. Raises ConfigurationError without polars."""
        try:
            import polars
        except ImportError as error:
            raise ConfigurationError(
                f"read {self.stream.name}: expected polars to be installed, found none; run `pip "
                "install polars`"
            ) from error
        return polars.from_arrow(self.arrow(**rows))

    def duckdb(self, **rows: Any) -> duckdb.DuckDBPyRelation:
        """Return the rows as a relation of a new DuckDB connection, which reads lazily and only
        what the whole query needs."""
        relation = open_relation(self._selected())
        wanted = Rows(**rows)
        if conditions := self._conditions(wanted):
            relation = relation.filter(conditions)
        return relation.project(self._columns(wanted)) if wanted.columns is not None else relation

    def dataset(self) -> ds.Dataset:
        """Return all rows as a PyArrow dataset, of the table at this call. Registered with any
        DuckDB connection, it opens only the files that each statement needs. Raises Refused,
        Transient."""
        return self._selected().files().dataset()

    def watermarks(self) -> Watermarks:
        """Return the hour and the time through which `main` is complete. Raises Transient."""
        table, as_of = self.reader.lake.load(self.stream.table), self.selection.as_of
        if as_of is None:
            return Watermarks.from_properties(table.properties)
        at = snapshot_as_of(self.reader.lake, self.stream, table, as_of)
        return Watermarks.from_properties(snapshot_properties(table, at))

    def provenance(self, **rows: Any) -> Provenance:
        """Return the rows' provenance: hours, serving layers, whether more may come."""
        with self._answer(Rows(**(rows | {"columns": ("kafka_offset",)}))) as answer:
            for _ in answer.rows:
                pass
            [found] = self.reader.provenance(answer, self.selection)
        return found

    def then_topic(self, *, follow: bool = False, every: float = 1.0, **rows: Any) -> RowsThenTopic:
        """Return the rows, and then the records of the topic after them, as Arrow batches: up to
        the topic's end at this call, or with `follow` without end, asking for new records `every`
        so many seconds. Raises as `TopicTail`."""
        wanted = Rows(**rows)
        return RowsThenTopic(self, self._statement(wanted), every if follow else None)

    def _selected(self) -> SelectedRows:
        return self.reader.rows(self.stream.table, self.selection)

    def view(self, name: str) -> StreamView:
        """Return one of the stream's views. Raises ConfigurationError for an unknown name."""
        for view in self.stream.views:
            if view.name == name:
                return StreamView(self.reader, self.stream, view, self.selection)
        known = ", ".join(v.name for v in self.stream.views) or "none"
        raise ConfigurationError(
            f"stream {self.stream.name}: expected one of its views ({known}), found {name!r}"
        )

    @contextmanager
    def _answer(self, wanted: Rows) -> Iterator[Answer]:
        with self.reader.query(self._statement(wanted), self.selection) as answer:
            yield answer

    def _statement(self, wanted: Rows) -> str:
        conditions = self._conditions(wanted)
        where = f" WHERE {conditions}" if conditions else ""
        return f"SELECT {self._columns(wanted)} FROM {quoted_table(self.stream.table)}{where}"

    def _columns(self, wanted: Rows) -> str:
        if isinstance(wanted.columns, str):
            raise ConfigurationError(f"columns: expected a list of names, found {wanted.columns!r}")
        if wanted.columns is None:
            return "*"
        return ", ".join(quoted(column) for column in wanted.columns)

    def _conditions(self, wanted: Rows) -> str:
        conditions = [f"({wanted.where}\n)"] if wanted.where is not None else []
        if wanted.hours is not None:
            first, last = (
                (wanted.hours, wanted.hours) if isinstance(wanted.hours, str) else wanted.hours
            )
            if start_of(first) > start_of(last):
                raise ConfigurationError(
                    f"hours: expected the earlier hour first, found {first} and {last}"
                )
            conditions.append(f"ingest_hour BETWEEN '{first}' AND '{last}'")
        for name, when, comparison in (("since", wanted.since, ">="), ("until", wanted.until, "<")):
            if when is None:
                continue
            if self.stream.event_time is None:
                raise ConfigurationError(
                    f"{name}: expected a stream whose file has an event_time, found "
                    f"{self.stream.name}; ask by hours="
                )
            moment = _moment(name, when).isoformat()
            conditions.append(
                f"{quoted(self.stream.event_time.column)} {comparison} TIMESTAMPTZ '{moment}'"
            )
        return " AND ".join(conditions)


class RowsThenTopic:
    """The rows of a stream's table at one snapshot, then the records of its topic that the snapshot
    does not account for, each once: an iterator of Arrow batches with equal columns.

    `counts`: what became of the topic's records so far. `letters`: those that are dead letters, as
    Arrow tables in the columns of their table; a reader that follows may clear the list.
    """

    def __init__(self, table: StreamTable, sql: str, every: float | None) -> None:
        # Imported here: rows alone need no Kafka.
        from anabranch.kafka.client import KafkaAdapter
        from serving_layer.reader.topic_tail import TopicTail

        self._sql, self._every, self._name = sql, every, table.stream.table
        self._kafka = KafkaAdapter(table.reader.lake.environment.kafka)
        self._tail = TopicTail(table.reader.lake, table.stream, self._kafka, table.selection)
        self.counts, self.letters = self._tail.counts, self._tail.letters
        self.snapshot_id = self._tail.seam.snapshot_id

    def __iter__(self) -> Iterator[pa.RecordBatch]:
        """Read, once. Raises as `TopicTail.read_new`."""
        with self._kafka:
            yield from self._selected(self._tail.stored.derived())
            for rows in self._tail.read():
                yield from self._selected(_derived(rows))
            while self._every is not None:
                for rows in self._tail.read_new():
                    yield from self._selected(_derived(rows))
                time.sleep(self._every)

    def _selected(self, rows: Derived) -> Iterator[pa.RecordBatch]:
        with open_query(self._sql, {self._name: lambda: rows}) as answer:
            yield from answer.rows


def _derived(rows: pa.Table) -> Derived:
    return Derived(f"SELECT * FROM {source('topic')}", {}, {"topic": ds.dataset(rows)})


@dataclass(frozen=True)
class StreamView:
    """A view of a stream: one row for each window and group, from `main` at each read, or from the
    stream's selection. Raises as `StreamTable` does."""

    reader: Reader
    stream: Stream
    definition: View
    selection: Selection

    def arrow(self, where: str | None = None) -> pa.Table:
        """Return the rows, or those that meet `where` (DuckDB's SQL), as a PyArrow table."""
        condition = f" WHERE {where}" if where is not None else ""
        sql = f"SELECT * FROM {quoted_table(self.stream.view_table(self.definition))}{condition}"
        with self.reader.query(sql, self.selection) as answer:
            return answer.rows.read_all()

    def pandas(self, where: str | None = None) -> pandas.DataFrame:
        """Return the rows as a pandas data frame, in memory."""
        return self.arrow(where).to_pandas()

    def duckdb(self) -> duckdb.DuckDBPyRelation:
        """Return the view's rows, as of this call, as a relation of a new DuckDB connection."""
        return open_derived(self.reader.derived(self.stream, self.definition, self.selection))

    def spark(self, session: SparkSession) -> DataFrame:
        """Return the rows as a data frame of a Spark session that has the catalog under its
        configured name. The frame reads the current snapshots, while these are kept. Raises
        ConfigurationError for a handle that was opened as of another time or for accepted hours
        only."""
        if self.selection != Selection():
            raise ConfigurationError(
                f"view {self.definition.name}: expected a table opened without as_of and "
                "only_accepted, found one with a selection; Spark reads current rows only"
            )
        state = load_state(self.reader.lake, self.stream.table)
        return session.sql(spark_sql(self.reader.lake, self.stream, self.definition, state))


def _moment(name: str, when: datetime | str) -> datetime:
    try:
        moment = datetime.fromisoformat(when) if isinstance(when, str) else when
    except ValueError as error:
        raise ConfigurationError(
            f"{name}: expected a time such as 2026-11-21T03:00, found {when!r}"
        ) from error
    return moment.replace(tzinfo=moment.tzinfo or UTC).astimezone(UTC)


def open_table(
    stream: str,
    *,
    conf: str | Path | None = None,
    as_of: str | None = None,
    only_accepted: bool = False,
) -> StreamTable:
    """Return a stream's table for reading: its current rows, or those `as_of` a tag, a branch, a
    snapshot's id or a time; of all hours, or of accepted ones only. `conf`: the configuration
    folder (default: ANABRANCH_CONF, else conf).

    Opens only the configuration, and the catalog if the stream may belong to a family or its
    columns come from its subject. Raises ConfigurationError, Transient.
    """
    environment = config.load_environment(conf)
    has_file = stream in config.stream_names(conf)
    members = {} if has_file else family_streams.streams_with_tables(environment, conf)
    definition = members[stream] if stream in members else config.load_stream(stream, conf)
    lake = open_lake(environment, definition)
    definition = with_table_columns(definition, lake)
    reader = Reader(lake, {definition.table: definition})
    return StreamTable(reader, definition, Selection(as_of, only_accepted))
