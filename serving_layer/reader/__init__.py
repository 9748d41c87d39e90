"""Reader: the serving tables as people and notebooks read them: which rows, and what a result rests on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from anabranch import config
from anabranch.config import Stream
from anabranch.table.lake import Lake
from serving_layer.query import Answer, open_query
from serving_layer.reader.provenance import Provenance, provenance
from serving_layer.reader.selection import Selection, Selector


@dataclass(frozen=True)
class Reader:
    """The tables of a configuration's streams. `streams` has a stream by the name of each of its tables."""

    lake: Lake
    streams: Mapping[str, Stream]

    @contextmanager
    def query(self, sql: str, selection: Selection) -> Iterator[Answer]:
        """The answer to one reading statement (`open_query`) over the rows that are selected, of tables as they are
        now."""
        tables, select = self.lake.tables(self.streams), Selector(self.lake, self.streams, selection)
        with open_query(sql, tables, catalog=self.lake.catalog_name, select=select) as answer:
            yield answer

    def provenance(self, answer: Answer, selection: Selection) -> list[Provenance]:
        """What an answer rests on, once its rows were read."""
        return provenance(self.lake, self.streams, selection, answer.files)


def open_reader(conf: str | Path | None = None) -> Reader:
    """Read the configuration; nothing else is opened. Raises ConfigurationError."""
    streams = [config.load_stream(name, conf) for name in config.stream_names(conf)]
    by_table = {name: s for s in streams for name in (s.table, s.dead_letters_table, s.hours_table)}
    return Reader(Lake(config.load_environment(conf)), by_table)
