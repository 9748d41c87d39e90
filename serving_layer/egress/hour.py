"""An hour to deliver: its rows in `main` at the snapshot of the change, as a stream; and its
records in a topic: keys, values, tombstones, and the sender's position."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from typing import Any, TypeVar

import pyarrow as pa
from pyiceberg.manifest import DataFile
from pyiceberg.table import Table

from anabranch.common.arrays import groups_by_size
from anabranch.common.errors import ConfigurationError, Transient
from anabranch.common.json_values import parse
from anabranch.common.logs import Progress
from anabranch.common.output import plain
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
from serving_layer.query.datasets import TableFiles, connected, plan_files, reading_failures

T = TypeVar("T")

# Bytes: Kafka's default limit (`offset.metadata.max.bytes`).
MAX_POSITION_BYTES = 4096


@dataclass(frozen=True)
class LastPlace:
    """The last place, in the order of partition and offset, that was sent of an hour with this
    content."""

    hour: str
    source: str
    partition: int
    offset: int


@dataclass(frozen=True)
class SenderPosition:
    """The sender's position, stored with each transaction. `done`: the last complete hour in the
    topic. `at`: between the transactions of the next hour, its last place that was sent."""

    place: str
    done: Delivery | None = None
    at: LastPlace | None = None

    def encode(self) -> str:
        """Return the position as text. Raises Transient if it is longer than Kafka accepts, as with
        a token while many decisions wait for their rows."""
        text = json.dumps(plain(asdict(self)), separators=(",", ":"))
        if len(text.encode()) > MAX_POSITION_BYTES:
            raise Transient(
                f"deliver hour {self.done.hour if self.done else ''}: expected a position of "
                f"{MAX_POSITION_BYTES} bytes at most, found {len(text)}: decisions wait to be "
                "recorded; run `anabranch merge STREAM`, then again"
            )
        return text

    @staticmethod
    def decode(text: str) -> SenderPosition:
        """Return the position. Raises ConfigurationError for text that `encode` did not write."""
        try:
            return parse(SenderPosition, text)
        except ValueError as error:
            raise ConfigurationError(
                "egress: expected a position of its own in the group's offsets, found "
                f"{text[:80]!r}; if they are not needed, delete the group"
            ) from error


@dataclass(frozen=True)
class Identity:
    """The identity of the records of an hour: the topic's id, partition and offset. `replaced`: as
    in `Timeline.replaced_before`. If Kafka lost a record and assigned its offset to another one,
    the key of the later one also contains the number of such losses."""

    topic_id: str
    replaced: Sequence[tuple[Mapping[int, int], Mapping[int, int]]] = ()

    def key_of(self, partition: int, offset: int) -> bytes:
        """Return the permanent identity of a record."""
        times = sum(
            begins.get(partition, 0) <= offset < ends.get(partition, 0)
            for begins, ends in self.replaced
        )
        again = f"~{times}" if times else ""
        return f"{self.topic_id}{again}:{partition}:{offset}".encode()


def value_of(row: Mapping[str, Any]) -> bytes:
    return json.dumps(plain(row), ensure_ascii=False, separators=(",", ":")).encode()


def places(
    rows: Iterable[Mapping[str, Any]], cut: Cut
) -> Iterator[tuple[int, int, Mapping[str, Any] | None]]:
    """Yield each row with its partition and offset, in that order, and every other place of the cut
    without a row, because an earlier delivery that the table does not remember may have sent one.
    `rows` are in that order too."""
    waiting = iter(rows)
    row = next(waiting, None)
    for partition, (start, end) in sorted(cut.ranges.items()):
        for offset in range(start, end):
            if row is not None and (row["kafka_partition"], row["kafka_offset"]) == (
                partition,
                offset,
            ):
                yield partition, offset, row
                row = next(waiting, None)
            else:
                yield partition, offset, None
    while row is not None:
        yield row["kafka_partition"], row["kafka_offset"], row
        row = next(waiting, None)


def chunks(
    items: Iterable[T], at_most: int, max_bytes: int, size_of: Callable[[T], int]
) -> Iterator[tuple[list[T], bool]]:
    """Yield the items in chunks of at most `at_most` items and `max_bytes` bytes, each with whether
    it is the last. A single item may be larger. Yields one empty chunk if there are no items."""
    groups = groups_by_size(items, size_of, max_bytes, at_most)
    chunk = next(groups, [])
    for following in groups:
        yield chunk, False
        chunk = following
    yield chunk, True


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
