"""An hour to deliver: its rows in `main` at the snapshot of the change, as a stream."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import pyarrow as pa
from pyiceberg.manifest import DataFile
from pyiceberg.table import Table

from anabranch.common.progress import Progress
from anabranch.common.remote_errors import lake_errors
from anabranch.iceberg.snapshots import heads, snapshot_properties
from anabranch.job import Job
from anabranch.offsets.hours import Cut
from anabranch.protocol import ledger
from anabranch.protocol.deliveries import Delivery
from anabranch.protocol.ledger_row import Layer
from anabranch.protocol.registers import Erasures
from anabranch.protocol.state import load_state
from serving_layer.changes import HourChange
from serving_layer.egress.records import Identity
from serving_layer.query.datasets import TableFiles, connected, plan_files, reading_failures

LOG = logging.getLogger(__name__)

# Memory limit for an hour's rows; beyond it the sort spills to a temporary folder.
_MEMORY = "1GB"
_BATCH_ROWS = 16_384


class Restored(Exception):
    """A target has a later reading of an hour than the table that serves it, so the table was
    restored to an earlier time. Other hours may be affected too."""


@dataclass(frozen=True)
class Batches:
    """A stream of rows. A request for more rows means that the earlier ones were processed."""

    reader: pa.RecordBatchReader
    progress: Progress

    @property
    def schema(self) -> pa.Schema:
        return self.reader.schema

    def __iter__(self) -> Iterator[pa.RecordBatch]:
        for batch in self.reader:
            yield batch
            self.progress.step(batch.num_rows)

    def rows(self) -> Iterator[Mapping[str, Any]]:
        for batch in self:
            yield from batch.to_pylist(maps_as_pydicts="strict")


@dataclass(frozen=True)
class Hour:
    """An accepted hour at a snapshot of `main`. `source`: identifies its content, by a digest of
    the names of its data files, which never change. `sequence`: the snapshot's sequence number,
    which orders two contents."""

    stream: str
    name: str
    revision: int
    served: Layer
    snapshot_id: int
    sequence: int
    source: str
    rows: int
    files: TableFiles = field(repr=False, compare=False)

    def delivered(self, target: str, place: str, id: str, files: int, token: str) -> Delivery:
        return Delivery(
            delivery_id=id,
            hour=self.name,
            target=target,
            place=place,
            revision=self.revision,
            served=self.served,
            snapshot_id=self.snapshot_id,
            rows=self.rows,
            files=files,
            token=token,
            delivered_at=datetime.now(UTC),
        )

    @contextmanager
    def batches(self, target: str) -> Iterator[Batches]:
        """Read all rows with all columns, by partition and offset, in bounded memory, and report
        the progress of their delivery to `target`. Raises Transient when a file cannot be read,
        also while the rows are read."""
        doing = f"egress {target} of stream {self.stream}: hour {self.name}"
        with (
            reading_failures(f"read hour {self.name}: expected its files", "; run it again"),
            lake_errors(f"read hour {self.name}"),
            connected(_MEMORY) as connection,
        ):
            connection.register("hour", self.files.dataset())
            rows = connection.sql("SELECT * FROM hour ORDER BY kafka_partition, kafka_offset")
            progress = Progress(LOG, doing, "rows", self.rows)
            yield Batches(rows.to_arrow_reader(_BATCH_ROWS), progress)


def cut_of(job: Job, hour: Hour) -> tuple[Cut, Identity]:
    """Return the hour's cut, which never changes, and the identity of its records. Raises Refused
    when the cut is no longer known."""
    state = load_state(job.lake, job.stream.table)
    accepted = job.ledger.accepted(state, hour.name)
    # An hour whose import was taken back: the places of its rows are cleared.
    cut = accepted.cut if accepted is not None else _last_cut(job, hour.name)
    return cut, Identity(cut.topic_id, state.timeline.replaced_before(hour.name, cut.topic_id))


def _last_cut(job: Job, hour: str) -> Cut:
    row = ledger.newest(job.ledger.history([hour])).get(hour)
    return row.cut if row is not None and row.cut is not None else Cut("", {})


def is_current(job: Job, hour: Hour) -> bool:
    """Return whether the table now serves this content of the hour. If so, a later reading at a
    target does not belong to this table: it was delivered before the table was restored to an
    earlier time. Raises Transient."""
    stream = job.stream
    table = job.lake.load(stream.table)
    planned = plan_files(stream.table, table, heads(table)["main"], {hour.name})
    with lake_errors(f"read the manifests of {stream.table}"):
        return _source(table, planned.select()) == hour.source


def _source(table: Table, files: Iterable[DataFile]) -> str:
    paths = "\n".join(sorted(file.file_path for file in files))
    return hashlib.sha256(f"{table.metadata.table_uuid}\n{paths}".encode()).hexdigest()[:32]


def _is_erased_since(table: Table, snapshot_id: int) -> bool:
    """Return whether an erasure has removed rows from `main` since one of its snapshots."""
    then, now = (
        Erasures.from_properties(snapshot_properties(table, id)).changed
        for id in (snapshot_id, heads(table)["main"])
    )
    return now is not None and now != then


def open_hour(job: Job, change: HourChange) -> Hour | None:
    """Return the hour of a change; None if the change's snapshot has expired, or rows were erased
    since. Raises Transient."""
    stream = job.stream
    table = job.lake.load(stream.table)
    snapshot = table.metadata.snapshot_by_id(change.snapshot)
    if snapshot is None or _is_erased_since(table, change.snapshot):
        return None
    planned = plan_files(stream.table, table, change.snapshot, {change.hour})
    with lake_errors(f"read the manifests of {stream.table}"):
        files = planned.select()
    return Hour(
        stream=stream.name,
        name=change.hour,
        revision=change.revision,
        served=change.served,
        snapshot_id=change.snapshot,
        sequence=snapshot.sequence_number or 0,
        source=_source(table, files),
        rows=sum(file.record_count for file in files),
        files=planned,
    )
