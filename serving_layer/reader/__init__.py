"""The reader of the serving tables, for people and notebooks, with the provenance of results."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING
from uuid import uuid4

import pyarrow.dataset as ds
import pyarrow.parquet as pq

from anabranch import config, family_streams
from anabranch.common.errors import ConfigurationError
from anabranch.common.temporary import process_folder
from anabranch.config import Stream, View
from anabranch.iceberg.lake import Lake
from anabranch.subjects.follow import with_table_columns
from serving_layer.query import Answer, Derived, SelectedRows, Source, open_query, source
from serving_layer.query.reading import QueryProgress
from serving_layer.reader.selection import Provenance, Selection, provenance, select, shown
from serving_layer.views import derive

if TYPE_CHECKING:
    from serving_layer.reader.topic_tail import TopicTail

LOG = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class LiveRows(SelectedRows):
    """The rows of a table, and of its topic after them. `read` reads the topic to its end."""

    read: Callable[[], Derived]

    def derived(self) -> Derived:
        return self.read()


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
        reading: QueryProgress | None = None,
        tails: list[TopicTail] | None = None,
    ) -> Iterator[Answer]:
        """Run one reading statement (`open_query`) over the selected rows of the current tables,
        and yield the answer; `reading` follows its progress. `tails`: the answer is also over the
        records of the topics after these rows, and the list gets what was read of them."""
        views = [
            (stream, view)
            for stream in {s.name: s for s in self.streams.values()}.values()
            for view in stream.views
        ]
        tables: dict[str, Source] = {
            name: partial(self.rows, name, selection) for name in self.streams
        }
        for stream, view in views:
            tables[stream.view_table(view)] = partial(self.derived, stream, view, selection)
        if tails is not None:
            for stream in self.streams.values():
                tables[stream.table] = partial(self.live_rows, stream, selection, tails)
        with open_query(
            sql,
            tables,
            catalog=self.lake.catalog_name,
            # Needed only for views.
            unlisted=frozenset(stream.partials_table(view) for stream, view in views),
            reading=reading,
        ) as answer:
            yield answer

    def rows(self, name: str, selection: Selection) -> SelectedRows:
        """Return the selected rows of a table. Raises as `Lake.load`."""
        table = self.lake.load(name)
        return SelectedRows(
            name, table, partial(select, self.lake, self.streams[name], selection, name, table)
        )

    def live_rows(self, stream: Stream, selection: Selection, tails: list[TopicTail]) -> LiveRows:
        """Return the selected rows of a stream's table and the records of its topic after them,
        which are read when a query needs them. Raises as `Lake.load`."""
        table = self.lake.load(stream.table)
        read = partial(self._read_topic, stream, selection, tails)
        return LiveRows(stream.table, table, read=read)

    def _read_topic(self, stream: Stream, selection: Selection, tails: list[TopicTail]) -> Derived:
        """Raises ConfigurationError for one revision of an hour, and as `TopicTail`."""
        # Imported here: a query of tables alone needs no Kafka.
        from anabranch.kafka.client import KafkaAdapter
        from serving_layer.reader.topic_tail import TopicTail

        if selection.revision is not None:
            raise ConfigurationError(
                f"read {stream.table} and its topic: expected rows of all hours, found --revision"
            )
        with KafkaAdapter(self.lake.environment.kafka) as kafka:
            tail = TopicTail(self.lake, stream, kafka, selection)
            # In a file: there may be more records than fit into memory.
            path = process_folder("query") / f"{uuid4().hex}.parquet"
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

    def derived(self, stream: Stream, view: View, selection: Selection) -> Derived:
        """Return a view over the selected rows. Raises ConfigurationError for a selection of one
        revision of an hour, Terminal, Transient."""
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
    """Return a reader of the configuration's streams, and of the streams of families that have
    tables. A stream whose file is wrong is logged and left out. Raises ConfigurationError; with
    families also Transient."""
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
