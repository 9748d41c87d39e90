"""The rows of an hour that Python workers decoded (`anabranch.records.packed`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from pyspark.sql import DataFrame

from anabranch.config import Stream
from anabranch.records import packed
from batch_layer.sizes import in_one_task

PLACE_COLUMNS = ["kafka_partition", "kafka_offset"]

_KAFKA_TYPES = {
    "kafka_partition": "INT",
    "kafka_offset": "BIGINT",
    "kafka_timestamp": "TIMESTAMP",
    "ingest_hour": "STRING",
    "event_date": "DATE",
}


@dataclass(frozen=True)
class PackedRows:
    """An hour's good rows as workers decoded them, and their tasks' reports."""

    pieces: DataFrame
    types: dict[str, str]
    keys: frozenset[str]
    reports: packed.Reports

    @cached_property
    def count(self) -> int:
        return self.reports.rows.total()

    @cached_property
    def left_count(self) -> int:
        return self.reports.left.total()

    def rows(self, columns: Sequence[str]) -> DataFrame:
        data = "keys" if self.keys.issuperset(columns) else "data"
        ddl = ", ".join(f"`{name}` {self.types[name]}" for name in columns)
        return packed.unpacked(self.pieces, [packed.ROWS], ddl, columns, data)

    @property
    def left(self) -> DataFrame:
        """The records without a row or with unknown fields, in Kafka's form."""
        return packed.unpacked(self.pieces, [packed.LEFT], packed.RAW)


def read_packed(pieces: DataFrame, stream: Stream, offsets: int) -> PackedRows:
    """Return the rows in the pieces of an hour of `offsets` offsets, with the reports of their
    tasks. Runs the tasks if they have not run yet."""
    reports = pieces.where(f"kind = '{packed.REPORT}'").select("data").collect()
    types = {column.name: column.type for column in stream.columns} | _KAFKA_TYPES
    keys = frozenset((*PLACE_COLUMNS, *stream.key))
    read = packed.Reports.of(bytes(row["data"]) for row in reports)
    return PackedRows(in_one_task(pieces, offsets), types, keys, read)
