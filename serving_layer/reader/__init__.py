"""The reader of the serving tables, for people and notebooks, with the provenance of results.

`anabranch.open("game_events").arrow(columns=[…], hours=…)` is a stream's table for Python. It reads
only the given columns, and skips files that cannot contain a matching row.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import pyarrow.dataset as ds
import pyarrow.parquet as pq

from anabranch import config, family_streams
from anabranch.common.errors import ConfigurationError, installed
from anabranch.common.logs import Progress
from anabranch.common.temporary import process_folder
from anabranch.config import Stream, View
from anabranch.iceberg.lake import Lake
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
    Source,
    open_query,
    open_relation,
    source,
)
from serving_layer.query.datasets import quoted, quoted_table
from serving_layer.reader.selection import (
    Provenance,
    Selection,
    provenance,
    select,
    shown,
    snapshot_as_of,
)
from serving_layer.views import derive, spark_sql

if TYPE_CHECKING:
    import duckdb
    import pandas
    import pyarrow as pa
    from pyspark.sql import DataFrame, SparkSession

    from serving_layer.reader.topic_tail import TopicTail

LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class Reader:
    """The tables and views of a configuration. `streams`: the stream of each table name."""

    lake: Lake
    streams: Mapping[str, Stream]

    @contextmanager
    def query(
        self,
        sql: str,
        selection: Selection,
        progress: Progress | None = None,
        tails: list[TopicTail] | None = None,
    ) -> Iterator[Answer]:
        """Run one reading statement (`open_query`) over the selected rows of the current tables,
        and yield the answer; `progress` counts the files read. `tails`: the answer is also over the
        records of the topics after these rows, and the list gets what was read of them."""
        views = [
            (stream, view)
            for stream in {s.name: s for s in self.streams.values()}.values()
            for view in stream.views
        ]
        tables: dict[str, Source] = {
            name: partial(self.rows, name, selection) for name in self.streams
        }
        is_live = tails is not None
        for stream, view in views:
            of_view = partial(self.derived, stream, view, selection, is_live)
            tables[stream.view_table(view)] = of_view
        with ExitStack() as files:
            if tails is not None:
                for stream in self.streams.values():
                    # The topic is read when the query needs it.
                    read = partial(self._read_topic, stream, selection, tails, files)
                    tables[stream.table] = partial(self.rows, stream.table, selection, read)
            yield files.enter_context(
                open_query(
                    sql,
                    tables,
                    catalog=self.lake.catalog_name,
                    # Needed only for views.
                    unlisted=frozenset(stream.partials_table(view) for stream, view in views),
                    progress=progress,
                )
            )

    def rows(
        self, name: str, selection: Selection, read: Callable[[], Derived] | None = None
    ) -> SelectedRows:
        """Return the selected rows of a table, or those that `read` returns instead. Raises as
        `Lake.load`."""
        table = self.lake.load(name)
        chosen = partial(select, self.lake, self.streams[name], selection, name, table)
        return SelectedRows(name, table, chosen, read)

    def _read_topic(
        self, stream: Stream, selection: Selection, tails: list[TopicTail], files: ExitStack
    ) -> Derived:
        """Return the rows of a stream's table and the records of its topic after them, which
        `files` deletes. Raises ConfigurationError for one revision of an hour, and as
        `TopicTail`."""
        # Imported here: a query of tables alone needs no Kafka.
        from anabranch.kafka.client import KafkaAdapter
        from serving_layer.reader.topic_tail import TopicTail

        if selection.revision is not None:
            raise ConfigurationError(
                f"read {stream.table} and its topic: expected rows of all hours, found --revision"
            )
        with KafkaAdapter(self.lake.environment.kafka) as kafka:
            tail = TopicTail(self.lake, stream, kafka, selection, keeps_letters=False)
            # In a file: there may be more records than fit into memory.
            path = process_folder("query") / f"{uuid4().hex}.parquet"
            files.callback(path.unlink, missing_ok=True)
            with pq.ParquetWriter(path, tail.schema) as file:
                for rows in tail.read():
                    file.write_table(rows)
        tails.append(tail)
        topic = f"topic of {stream.table}"
        return Derived(
            f"SELECT * FROM {source(stream.table)} UNION ALL SELECT * FROM {source(topic)}",
            {stream.table: tail.stored.files()},
            {topic: ds.dataset(path)},
        )

    def derived(
        self, stream: Stream, view: View, selection: Selection, is_live: bool = False
    ) -> Derived:
        """Return a view over the selected rows. Raises ConfigurationError for a selection of one
        revision of an hour, or with the topic's records, which no view has; Terminal, Transient."""
        if is_live:
            raise ConfigurationError(
                f"read {stream.view_table(view)} and its topic: expected {stream.table}, found a "
                "view, which has rows of the table alone; leave --live out, or query the table"
            )
        if selection.revision is not None:
            raise ConfigurationError(
                f"read {stream.view_table(view)}: expected {stream.table}, found a view; only the "
                "table's rows are kept by revision"
            )
        rows = self.rows(stream.table, selection)
        selected = rows.select()
        state = shown(rows.table, selected.snapshot_id).state
        return derive(self.lake, stream, view, state, selected.snapshot_id, selected.hours)

    def provenance(self, answer: Answer, selection: Selection) -> list[Provenance]:
        return provenance(self.lake, self.streams, selection, answer.files)


def open_reader(conf: str | Path | None = None) -> Reader:
    """Return a reader of the streams, and of families' streams with tables. A wrong file is logged
    and left out. Raises ConfigurationError; with families also Transient."""
    environment = config.load_environment(conf)
    members = partial(family_streams.members_with_tables, environment, conf)
    has_streams = config.stream_names(conf) or config.family_names(conf)
    selected = config.select_streams(conf, every=True, members=members) if has_streams else {}
    for name, error in config.broken(selected).items():
        LOG.warning("stream %s: file ignored: %s", name, error)
    streams = config.loaded(selected)
    lake = Lake(environment)
    by_table = {
        name: s
        for s in (with_table_columns(stream, lake) for stream in streams)
        for name in (s.table, *s.branched_tables, *s.plain_tables)
    }
    return Reader(lake, by_table)


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
        with installed(f"read {self.stream.name}", "the package polars", "polars"):
            import polars
        return polars.from_arrow(self.arrow(**rows))

    def duckdb(self, **rows: Any) -> duckdb.DuckDBPyRelation:
        """Return the rows as a relation of a new DuckDB connection, which reads lazily and only
        what the whole query needs."""
        sql = self._statement(Rows(**rows), source(self.stream.table))
        return open_relation(replace(self._selected().derived(), sql=sql))

    def dataset(self) -> ds.Dataset:
        """Return all rows as a PyArrow dataset of the table now. In any DuckDB connection, it opens
        only the files that each statement needs. Raises Refused, Transient."""
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
        return RowsThenTopic(self, self._statement(Rows(**rows)), every if follow else None)

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

    def _answer(self, wanted: Rows) -> AbstractContextManager[Answer]:
        return self.reader.query(self._statement(wanted), self.selection)

    def _statement(self, wanted: Rows, table: str | None = None) -> str:
        if isinstance(wanted.columns, str):
            raise ConfigurationError(f"columns: expected a list of names, found {wanted.columns!r}")
        names = wanted.columns
        columns = "*" if names is None else ", ".join(quoted(name) for name in names)
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
        where = f" WHERE {' AND '.join(conditions)}" if conditions else ""
        return f"SELECT {columns} FROM {table or quoted_table(self.stream.table)}{where}"


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
        """Return the rows, or those that meet `where` (a condition in DuckDB's SQL), as a PyArrow
        table, in memory."""
        condition = f" WHERE {where}" if where is not None else ""
        sql = f"SELECT * FROM {quoted_table(self.stream.view_table(self.definition))}{condition}"
        with self.reader.query(sql, self.selection) as answer:
            return answer.rows.read_all()

    def pandas(self, where: str | None = None) -> pandas.DataFrame:
        """Return the rows as a pandas data frame, in memory."""
        return self.arrow(where).to_pandas()

    def duckdb(self) -> duckdb.DuckDBPyRelation:
        """Return the view's rows, as of this call, as a relation of a new DuckDB connection."""
        return open_relation(self.reader.derived(self.stream, self.definition, self.selection))

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
