"""The records of a stream's topic after the rows of a snapshot of `main`, decoded without Spark."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from anabranch.common.errors import Refused
from anabranch.config import Stream
from anabranch.decode import Decoder, UnlistedSchema, decode_spec, letters_of
from anabranch.decode.inputs import assign_hours, batch_of, check_hours
from anabranch.iceberg.lake import Lake
from anabranch.iceberg.snapshots import heads
from anabranch.kafka.client import KafkaAdapter
from anabranch.offsets.hours import HourRange, hour_ranges, undecided
from anabranch.offsets.position import Offsets, Ranges, clip, ranges_between, ranges_to_keys, size
from anabranch.protocol.apply import require_columns
from anabranch.protocol.erasure import HourFilter, load_filter
from anabranch.protocol.ledger import Ledger
from anabranch.protocol.merge import plan_seam, state_at
from anabranch.protocol.sealing import BoundaryResolver, ask, resolve_state
from anabranch.protocol.state import check_topic
from anabranch.subjects.schemas import Schemas, open_schemas
from serving_layer.query import Selected, SelectedRows
from serving_layer.reader.selection import Selection, Shown, snapshot_as_of

LOG = logging.getLogger(__name__)

_PLACE = ("ingest_hour", "kafka_partition", "kafka_offset")


@dataclass
class Counts:
    """The records by result: rows, dead letters, or erased. `lost`: offsets that Kafka deleted
    before a layer or this reader read them."""

    rows: int = 0
    dead: int = 0
    erased: int = 0
    lost: int = 0


class TopicTail:
    """The records after a snapshot of `main`: exactly the offsets that the snapshot does not
    account for, below the last stable offsets.

    They are decoded as both layers do, by the stream's file as it is now, and records of an erasure
    are left out. Duplicates by key are rows, as those of the speed layer are. The ingest hour is
    provisional where no layer has decided the hour's end.

    `seam`: the snapshot and its offsets. `stored`: the rows of the snapshot. `letters`: the dead
    letters so far, if `keeps_letters`, in the columns of their table; a reader that follows the
    topic may clear it.
    """

    def __init__(
        self,
        lake: Lake,
        stream: Stream,
        kafka: KafkaAdapter,
        selection: Selection,
        keeps_letters: bool = True,
    ) -> None:
        """Raises Refused for a snapshot of another log, or older than the hours whose offsets the
        table lists, ConfigurationError, PositionError for a recreated topic, Transient."""
        self._lake, self._stream, self._kafka = lake, stream, kafka
        self._keeps_letters = keeps_letters
        self._resolver = BoundaryResolver(stream, lake, kafka)
        self.counts, self.letters = Counts(), list[pa.Table]()
        ends = self._look()
        table, as_of = self._decided.state.table, selection.as_of
        require_columns(table, stream)
        self.schema: pa.Schema = table.schema().as_arrow()
        at = heads(table)["main"] if as_of is None else snapshot_as_of(lake, stream, table, as_of)
        state, hours = state_at(table, at), None
        self.seam = plan_seam(state, at, selection.only_accepted)
        if selection.only_accepted:
            hours = Shown(state).accepted_hours()
        self.stored = SelectedRows(stream.table, table, lambda: Selected(at, hours))
        self._require_same_log()
        self._parts = self.seam.ranges(ends)
        self._next = {p: max(o, ends.get(p, 0)) for p, o in (ends | self.seam.start).items()}

    def read(self) -> Iterator[pa.Table]:
        """Yield the rows of the records up to the topic's end when this object was made, in the
        table's columns; each call continues. Raises as `read_new`."""
        while self._parts:
            yield from self._rows(self._parts.pop(0))

    def read_new(self) -> Iterator[pa.Table]:
        """Yield the rows of the records since the last call. Raises Refused if the stream continues
        in another log, PositionError for a recreated topic, Transient; then make a new object."""
        ends = self._look()
        self._require_same_log()
        # The registry may have schemas by now that it lacked.
        self._schemas.forget_missing()
        self.__dict__.pop("_decoder", None)
        new = ranges_between(self._next, ends)
        self._next = {p: max(o, ends.get(p, 0)) for p, o in (ends | self._next).items()}
        yield from self._rows(clip(new, new))

    def _look(self) -> Offsets:
        """Load the table and hours' ends. Return the topic's ends before: all have an hour."""
        topic = self._kafka.describe(self._stream.topic)
        ends = self._kafka.stable_ends(topic) if topic is not None else {}
        decided = self._resolver.decide()
        # The topic of the ends may be another one than that of the table.
        check_topic(decided.position, topic, self._stream.topic)
        # Hours of a long standstill, which the layers would decide in their next publishes.
        while undecided(decided.timeline, decided.position.offsets, decided.now):
            state, now = replace(decided.state, timeline=decided.timeline), decided.now
            asked = ask(self._kafka, self._stream.topic, state, now, timedelta(0))
            if (further := resolve_state(state, asked)) is None:
                break
            decided = further
        self._decided = decided
        return ends

    def _require_same_log(self) -> None:
        decided = self._decided
        log = decided.position.topic_id, len(decided.timeline.adoptions)
        if self.seam.topic_id not in ("", log[0]) or self.seam.adoptions != log[1]:
            raise Refused(
                f"stream {self._stream.name}: read main and then its topic: expected the log that "
                f"snapshot {self.seam.snapshot_id} was read from, found that the stream continues "
                "in another one since; read the rows of now"
            )

    def _hours(self, ranges: Ranges) -> tuple[HourRange, ...]:
        """Return the hours of offsets. Raises Refused if the table no longer lists them."""
        decided = self._decided
        timeline, cuts = decided.timeline, decided.state.cuts
        known = next((c.starts for h, c in sorted(cuts.items()) if h >= timeline.since), None)
        low = {p: start for p, (start, _) in ranges.items()}
        # An offset of an hour that is not listed would get the hour of the next one.
        if early := [p for p, o in low.items() if o < (known or timeline.start).get(p, 0)]:
            raise Refused(
                f"stream {self._stream.name}: read main and then its topic: expected the hours of "
                f"offsets from {low[early[0]]} of partition {early[0]} on in the table, found only "
                "later ones; read the rows of now"
            )
        return check_hours(hour_ranges(timeline, cuts, low, decided.now))

    def _rows(self, ranges: Ranges) -> Iterator[pa.Table]:
        ranges = self._readable(ranges)
        if not ranges:
            return
        hours = self._hours(ranges)
        for _, records in self._kafka.read_records(self._stream.topic, ranges):
            if records and len(rows := self._decoded(records, hours)):
                yield rows

    def _readable(self, ranges: Ranges) -> Ranges:
        """Return the part of `ranges` that Kafka still has; count the rest."""
        topic = self._kafka.describe(self._stream.topic)
        starts = self._kafka.log_starts(topic) if topic is not None and ranges else {}
        kept = clip(ranges, {p: (starts.get(p, 0), end) for p, (_, end) in ranges.items()})
        if lost := size(ranges) - size(kept):
            self.counts.lost += lost
            LOG.warning(
                "stream %s: Kafka deleted offsets before they were read count=%d of=%s",
                self._stream.name,
                lost,
                ranges_to_keys(ranges),
            )
        return kept

    @cached_property
    def _schemas(self) -> Schemas:
        return open_schemas(self._lake.environment, self._stream)

    @cached_property
    def _decoder(self) -> Decoder:
        secret = self._lake.environment.masking_secret
        return Decoder(decode_spec(self._stream, self._schemas.known, secret=secret))

    def _decoded(self, records: Sequence[Any], hours: Sequence[HourRange]) -> pa.Table:
        """Return the good rows of records, and keep their dead letters."""
        batch = assign_hours(batch_of(records), hours)
        while True:
            try:
                decoded = self._decoder.decode(batch)
                break
            except UnlistedSchema as error:
                # Without a new schema the same error would follow without end.
                if not self._schemas.learn(error.ids):
                    raise
                del self._decoder
        rows = decoded.rows
        erased = self._erased(rows)
        dead = np.zeros(len(rows), np.bool_)
        dead[list(decoded.errors)] = True
        letters = letters_of(batch, decoded, self._decided.position.topic_id, "topic")
        letters = letters.filter(pa.array(~erased[dead]))
        if len(letters) and self._keeps_letters:
            self.letters.append(letters)
        good = rows.filter(pa.array(~dead & ~erased))
        self.counts.rows += len(good)
        self.counts.dead += len(letters)
        self.counts.erased += int(erased.sum())
        # A column that the file lacks is null, as in the rows of the layers.
        nulls = pa.nulls(len(good))
        columns = [
            good.column(name) if name in good.column_names else nulls for name in self.schema.names
        ]
        return pa.table(columns, self.schema.names).cast(self.schema)

    def _erased(self, rows: pa.Table) -> NDArray[np.bool_]:
        """Return which records an erasure covers."""
        erased = np.zeros(len(rows), np.bool_)
        if not self._decided.state.erasures.all:
            return erased
        by_hour = dict[str, Ranges]()
        offsets = rows.group_by(["ingest_hour", "kafka_partition"]).aggregate(
            [("kafka_offset", "min"), ("kafka_offset", "max")]
        )
        for one in offsets.to_pylist():
            span = one["kafka_offset_min"], one["kafka_offset_max"] + 1
            by_hour.setdefault(one["ingest_hour"], {})[one["kafka_partition"]] = span
        found = load_filter(
            self._lake.environment,
            self._stream,
            Ledger(self._lake, self._stream.hours_table),
            self._decided.state,
            self._decided.position.topic_id,
            by_hour,
        )
        if not found:
            return erased
        filters = {one.hour: one for one in found}
        columns = {hashed.column for one in filters.values() for hashed in one.values}
        for i, row in enumerate(rows.select([*_PLACE, *sorted(columns)]).to_pylist()):
            one = filters.get(row["ingest_hour"])
            erased[i] = one is not None and _is_erased(row, one)
        return erased


def _is_erased(row: Mapping[str, Any], one: HourFilter) -> bool:
    p, o = row["kafka_partition"], row["kafka_offset"]
    return (p, o) in one.places or any(
        row[hashed.column] is not None and hashed.matches(str(row[hashed.column]))
        for hashed in one.values
        for start, end in (hashed.ranges.get(p, (0, 0)),)
        if start <= o < end
    )
