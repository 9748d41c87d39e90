"""A table with any number of accepted hours, made of small Parquet files and Anabranch's own
commits, with a filled view. A reader of one hour has to plan over it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from unittest import mock

import pyarrow as pa
from lakes import StreamLake, new_environment, new_stream
from pyiceberg.io.pyarrow import schema_to_pyarrow
from pyiceberg.manifest import DataFile
from scale import ScaledStream

from anabranch.config import EventTime, Stream
from anabranch.config.columns import parse_columns
from anabranch.iceberg import admin, table_schemas
from anabranch.iceberg.file_io import write_files
from anabranch.iceberg.lake import Lake
from anabranch.iceberg.snapshots import Staged
from anabranch.offsets.hours import Timeline, shift, start_of
from anabranch.offsets.position import Position
from anabranch.protocol import apply
from anabranch.protocol.publish import Publish
from anabranch.protocol.state import POSITION, TIMELINE, Accepted
from batch_layer.plan import Rebuilt, plan_publish
from serving_layer import views as filling
from serving_layer.reader import Reader

DDL = "id STRING NOT NULL, at TIMESTAMP NOT NULL, n BIGINT"
VIEW = {"window": "10 minutes", "group": [], "aggregates": {"events": "count", "total": "sum(n)"}}
FILES, ROWS = 2, 12
"""Files of each hour, and rows of each file."""


class HourFiles(ScaledStream):
    """A stream whose hours have two Parquet files each, with twelve rows five minutes apart."""

    @classmethod
    def open(cls, folder: Path, catalog: str = "lake") -> HourFiles:
        """Open a stream that `make` has created in a folder."""
        environment = new_environment(folder)
        environment = environment.model_copy(
            update={"catalog": environment.catalog.model_copy(update={"name": catalog})}
        )
        return cls(StreamLake(folder, Lake(environment), _stream(), environment), 1)

    @classmethod
    def make(cls, folder: Path, first: str, catalog: str = "lake") -> HourFiles:
        stream = cls.open(folder, catalog)
        made, declared = stream.lake, stream.lake.stream
        said = {
            POSITION: Position("t", {0: 0}).to_json(),
            TIMELINE: Timeline(first, first, {0: 0}).to_json(),
        }
        for name, schema, by, properties in (
            (
                declared.table,
                table_schemas.rows_schema(declared),
                ("event_date", "ingest_hour"),
                said,
            ),
            (
                declared.dead_letters_table,
                table_schemas.dead_letters_schema(),
                ("ingest_hour",),
                {},
            ),
            (declared.hours_table, apply.LEDGER_SCHEMA, (), None),
            *(
                (
                    declared.partials_table(v),
                    table_schemas.partials_schema(declared, v),
                    ("ingest_hour",),
                    {},
                )
                for v in declared.views
            ),
        ):
            admin.create(made.lake, name, schema, by, admin.TABLE_PROPERTIES)
            if properties is not None:
                admin.add_branches(made.lake, name, properties)
        return stream

    @property
    def reader(self) -> Reader:
        """A new reader, which has loaded nothing yet."""
        stream = self.lake.stream
        names = (stream.table, stream.hours_table, *map(stream.partials_table, stream.views))
        return Reader(Lake(self.lake.environment), dict.fromkeys(names, stream))

    def fill(self) -> None:
        """Fill the view, 48 hours per commit."""
        stream = self.lake.stream
        with mock.patch.object(filling, "_HOURS_A_COMMIT", 48):
            filling.fill(self.lake.lake, stream, stream.views[0])

    def past(self, first: str, count: int, at_once: int = 48) -> None:
        """Accept `count` hours from `first` on, each with its row in the ledger."""
        for start in range(0, count, at_once):
            hours = [shift(first, i) for i in range(start, min(count, start + at_once))]
            self.seal(hours)
            self.accept_many(hours)
            self.lake.ledger.record_waiting(self.lake.state())

    def accept_many(self, hours: Sequence[str], files: int = FILES) -> None:
        state = self.lake.state()
        by_hour = self._written(hours, files)
        rebuilt = [
            Rebuilt(
                h, Accepted(1, state.cuts[h]), Staged(h, 0, 0, tuple(by_hour[h])), (),
                self._account(),
            )
            for h in hours
        ]  # fmt: skip
        publish: Publish = plan_publish(
            state, rebuilt, datetime.now(UTC), frozenset(d.decision_id for d in state.decisions)
        )
        assert self.lake.publish(publish, state).name == "LANDED"

    def _written(self, hours: Sequence[str], files: int) -> dict[str, list[DataFile]]:
        table = self.lake.table()
        schema = schema_to_pyarrow(table.schema(), include_field_ids=False)
        by_hour: dict[str, list[DataFile]] = defaultdict(list)
        for file in range(files):
            rows = [
                {
                    "id": f"{hour}-{file}-{i}", "at": start_of(hour) + timedelta(minutes=5 * i),
                    "n": i, "kafka_partition": 0, "kafka_offset": file * ROWS + i,
                    "kafka_timestamp": start_of(hour), "ingest_hour": hour,
                    "event_date": start_of(hour).date(),
                }
                for hour in hours
                for i in range(ROWS)
            ]  # fmt: skip
            for made in write_files(table, pa.Table.from_pylist(rows, schema=schema), {}):
                by_hour[str(made.partition[1])].append(made)
        return by_hour


def _stream() -> Stream:
    bounds = EventTime(column="at", past=timedelta(hours=2), future=timedelta(minutes=30))
    return new_stream(
        schema=DDL, columns=parse_columns(DDL), event_time=bounds, views={"per_10_minutes": VIEW}
    )
