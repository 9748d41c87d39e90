"""Two decoders of an hour: Python workers decode certain records, Spark the others, and some of the
certain ones again.

Workers compare both results for a block of offsets, value by value (`anabranch.records.packed`).
The hour's name determines the blocks, so each attempt compares the same ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import cached_property
from typing import Any

from pyspark.sql import DataFrame

from anabranch.common.errors import Unexpected
from anabranch.config import Stream
from anabranch.protocol.ledger_row import Decoders
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


class Decoding(Enum):
    """The decoders of an hour: workers and Spark, with the share of certain records that are
    compared; or Spark alone."""

    SAMPLED = "some blocks are compared"
    AUDITED = "all blocks are compared"
    SPARK = "Spark decodes all records"


@dataclass(frozen=True)
class CertainRecords:
    """An hour's records as workers decoded them (`anabranch.records.packed`), and their tasks'
    reports."""

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
    def for_spark(self) -> DataFrame:
        """The records that workers left and the records to compare, in Kafka's form; the latter
        with their `ROW`."""
        row = ", ".join(f"`{name}`: {kind}" for name, kind in self.types.items())
        return packed.unpacked(
            self.pieces, [packed.LEFT, packed.COMPARED], f"{packed.RAW}, {packed.ROW} STRUCT<{row}>"
        )

    @property
    def has_records_for_spark(self) -> bool:
        return self.left_count + self.reports.compared > 0

    def compare(self, decoded: DataFrame, spec: packed.PackSpec) -> CertainRecords:
        """Return the same records with the result of the comparison. `decoded`: Spark's decoding of
        `for_spark`. Raises Unexpected if records are missing in it."""
        if not (expected := self.reports.compared):
            return self
        found = packed.Reports.of(
            bytes(row["data"]) for row in packed.compared(decoded, spec).collect()
        )
        if found.compared != expected:
            raise Unexpected(
                f"compare the decoders: expected {expected} records, found {found.compared}; "
                "nothing is published, report this"
            )
        return replace(
            self, reports=replace(self.reports, differing=found.differing, sample=found.sample)
        )

    @property
    def decoders(self) -> Decoders:
        """The counts for the ledger."""
        return Decoders(
            self.count, self.left_count, self.reports.compared, self._first_differing or None
        )

    @property
    def problems(self) -> list[str]:
        """The reasons why the hour may not be published: records that the decoders decoded
        differently."""
        reports = self.reports
        if not reports.differing:
            return []
        shown = "; ".join(
            f"partition {s['partition']}, offset {s['offset']}: {', '.join(s['columns'])}"
            for s in self._first_differing
        )
        return [
            (
                "decoders: expected equal values from Python workers and Spark in "
                f"{reports.compared} records, found {reports.differing} that differ: {shown}; the "
                "next run decodes the hour by Spark; report this"
            )
        ]

    @property
    def _first_differing(self) -> tuple[dict[str, Any], ...]:
        return tuple(
            sorted(self.reports.sample, key=lambda s: (s["partition"], s["offset"]))[
                : packed.SAMPLE
            ]
        )


def read_certain(pieces: DataFrame, stream: Stream, offsets: int) -> CertainRecords:
    """Return the records in the pieces of an hour of `offsets` offsets, with the reports of their
    tasks. Runs the tasks if they have not run yet."""
    reports = pieces.where(f"kind = '{packed.REPORT}'").select("data").collect()
    types = {column.name: column.type for column in stream.columns} | _KAFKA_TYPES
    keys = frozenset((*PLACE_COLUMNS, *stream.key))
    read = packed.Reports.of(bytes(row["data"]) for row in reports)
    return CertainRecords(in_one_task(pieces, offsets), types, keys, read)
