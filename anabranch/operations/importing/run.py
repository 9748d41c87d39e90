"""Import hours from files: `anabranch import`, some hours in a commit, newest first, until all are done
(`anabranch.protocol.imported`)."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
from pyiceberg.io.pyarrow import schema_to_pyarrow

from anabranch.common.errors import Refused, Transient
from anabranch.common.fail_points import Step, reach
from anabranch.common.progress import Progress
from anabranch.common.remote_errors import lake_errors
from anabranch.iceberg.hour_files import files_by_hour
from anabranch.iceberg.snapshot_writer import delete_quietly
from anabranch.iceberg.snapshots import head
from anabranch.job import Job
from anabranch.offsets.hours import shift
from anabranch.operations.importing.rows import TableRows, checksum, counts_by_hour, find_duplicates, ordinals
from anabranch.operations.importing.sources import (
    HOUR,
    Counted,
    SourceReader,
    from_number,
    list_source,
    location_of,
    to_number,
)
from anabranch.protocol import ledger, merge
from anabranch.protocol.acts import Act, act_now
from anabranch.protocol.apply import require_columns
from anabranch.protocol.erasure import marks_of
from anabranch.protocol.erasure_filter import load_filter
from anabranch.protocol.imported import (
    ImportedHour,
    account_of,
    begins_of,
    cut_of,
    plan_hours,
    plan_import,
)
from anabranch.protocol.publish import Again, Decision, new_id
from anabranch.protocol.publisher import Publisher
from anabranch.protocol.state import State, load_state

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from pyiceberg.manifest import DataFile

LOG = logging.getLogger(__name__)

# Hours and rows of one commit, so that files are written well within the age by which it has to land. One hour may
# have more rows.
_HOURS_A_COMMIT = 48
_ROWS_A_COMMIT = 2_000_000
_ATTEMPTS = 20
_RECEIVED = ("kafka_timestamp", "timestamp")


@dataclass(frozen=True)
class Order:
    """What an operator wants imported: the files of a folder, into hours from `first` to `last` (None: up to the one
    before the stream's first). `time`: the column that a row's hour follows from."""

    source: str
    first: str
    last: str | None = None
    time: str | None = None
    why: str | None = None


@dataclass(frozen=True)
class Plan:
    """What an import has to do: hours and their source rows, newest first. `before` and `after`: the rows of the source
    that are of hours before the first of them, and of hours that have Kafka's records. `known`: hours that are imported
    already."""

    source: str
    files: int
    hours: Mapping[str, int]
    before: int
    after: int
    known: tuple[str, ...]

    @property
    def rows(self) -> int:
        return sum(self.hours.values())


@dataclass(frozen=True)
class Imported:
    """What a run imported: hours, and their source rows by what became of them."""

    plan: Plan
    hours: tuple[str, ...] = ()
    rows: int = 0
    good: int = 0
    duplicate: int = 0
    erased: int = 0

    def plus(self, hours: Sequence[ImportedHour]) -> Imported:
        accounts = [one.account for one in hours]
        return Imported(
            self.plan,
            tuple(sorted({*self.hours, *(one.hour for one in hours)})),
            self.rows + sum(a.offsets or 0 for a in accounts),
            self.good + sum(a.good or 0 for a in accounts),
            self.duplicate + sum(a.duplicate or 0 for a in accounts),
            self.erased + sum(a.erased or 0 for a in accounts),
        )


def plan(job: Job, order: Order) -> Plan:
    """What `run` would do now; nothing is changed. Raises as `run`."""
    return _Import(job, order).plan(load_state(job.lake, job.stream.table))


def run(job: Job, publisher: Publisher, order: Order) -> Imported:
    """Import the hours of an order, some in a commit; each hour is accepted once its files were read back.

    Idempotent: hours that are imported stay, and a run that was killed is continued by the next. Raises Refused, with
    nothing published of an hour, for files that do not fit the table, for hours that cannot be imported, and for an
    imported hour of which the source has other rows by now; Transient.
    """
    return _Import(job, order).run(publisher)


@dataclass(frozen=True)
class _Written:
    """Hours whose files are written, and what they were decided by."""

    id: str
    began: datetime
    hours: tuple[ImportedHour, ...]
    basis: frozenset[str]

    @property
    def files(self) -> tuple[DataFile, ...]:
        return tuple(f for one in self.hours for f in one.files)


class _Import:
    def __init__(self, job: Job, order: Order) -> None:
        self._job, self._order = job, order
        self._stream, self._lake = job.stream, job.lake
        self._location = location_of(order.source)
        self._act: Act = act_now("import", order.why)
        table = self._lake.load(self._stream.table)
        require_columns(table, self._stream)
        columns = [column.name for column in self._stream.columns]
        physical = schema_to_pyarrow(table.schema(), include_field_ids=False)
        event_time = self._stream.event_time
        self._reader = SourceReader(
            table.io,
            pa.schema([physical.field(name) for name in columns]),
            order.time,
            event_time.column if event_time is not None else None,
        )
        self._counted: list[Counted] | None = None

    def counted(self) -> list[Counted]:
        """The files with their rows by hour. They are listed and counted once."""
        if self._counted is None:
            files = list_source(self._job.environment, self._location)
            self._counted = []
            with Progress(LOG, f"count rows of {self._order.source}", "files", len(files)) as progress:
                for file in files:
                    self._counted.append(self._reader.count(file))
                    progress.step()
        return self._counted

    def plan(self, state: State) -> Plan:
        order = self._order
        todo = plan_hours(state, order.first, order.last, self._stream.keep.rows, self._lake.clock.now())
        files = self.counted()
        total = Counter[int]()
        for counted in files:
            total.update(counted.rows)
        begin, end = to_number(order.first), to_number(state.timeline.first_of_kafka)
        known = {from_number(n): rows for n, rows in total.items() if to_number(state.timeline.first) <= n < end}
        self._require_same(known)
        return Plan(
            order.source,
            len(files),
            {hour: total.get(to_number(hour), 0) for hour in todo},
            sum(n for hour, n in total.items() if hour < begin),
            sum(n for hour, n in total.items() if hour >= end),
            tuple(sorted(known)),
        )

    def _require_same(self, known: Mapping[str, int]) -> None:
        rows = ledger.newest(self._job.ledger.history(known, ("partitions", "quality", "diff", "unknown")))
        for hour, number in sorted(known.items()):
            imported = rows[hour].imported if hour in rows else None
            if imported is not None and imported["rows"] != number:
                raise Refused(
                    f"import {self._order.source}: hour {hour}: expected the {imported['rows']} rows that it was "
                    f"imported with from {imported['source']}, found {number}; the hour stays as it is: remove the "
                    "files that were added, or import them into a stream of their own"
                )

    def run(self, publisher: Publisher) -> Imported:
        state = publisher.recover()
        todo = self.plan(state)
        done = Imported(todo)
        with Progress(LOG, f"import hours of {self._stream.name}", "hours", len(todo.hours)) as progress:
            for _ in range(_ATTEMPTS + len(todo.hours)):
                state = load_state(self._lake, self._stream.table)
                hours = [h for h in todo.hours if h < state.timeline.first]
                if not hours:
                    return done
                written = self._write(state, _some(hours, todo.hours))
                if self._publish(publisher, written):
                    done = done.plus(written.hours)
                    progress.step(len(written.hours))
        raise Transient(
            f"import hours of {self._stream.name}: expected other publishes to leave it alone in one of {_ATTEMPTS} "
            "attempts; run the command again: it goes on where it was left"
        )

    def _write(self, state: State, hours: Sequence[str]) -> _Written:
        """Write the files of `hours`, which follow each other, and prove them."""
        began = self._lake.clock.now()
        first, last = to_number(hours[0]), to_number(hours[-1])
        lookback = self._stream.batch.lookback_hours
        behind = max(first - lookback, to_number(self._order.first))
        read = self._reader.read(self.counted(), behind, last)
        repeated = find_duplicates(read, self._stream.key, lookback, self._later(state, hours[-1]))
        own = read[HOUR].to_numpy() >= first
        rows, repeated = read.filter(pa.array(own)), repeated[own]
        numbers = rows[HOUR].to_numpy()
        self._require_counted(hours, counts_by_hour(numbers))
        erased = self._erased(state, rows)
        repeated &= ~erased
        good = ~(repeated | erased)
        made = self._maker(state).made(rows.filter(pa.array(good)), ordinals(numbers)[good])
        files = self._maker(state).write(made)
        reach(Step.IMPORT_WRITTEN)
        imported = []
        for hour in hours:
            of_hour = numbers == to_number(hour)
            said = self._said(hour, rows.filter(pa.array(of_hour)))
            account = account_of(int(of_hour.sum()), int(repeated[of_hour].sum()), int(erased[of_hour].sum()), said)
            own_files = tuple(f for f in files if f.partition[1] == hour)
            assert sum(f.record_count for f in own_files) == account.good
            imported.append(ImportedHour(hour, own_files, account))
        return _Written(new_id(), began, tuple(imported), self._basis(state, imported))

    def _require_counted(self, hours: Sequence[str], found: Mapping[int, int]) -> None:
        """Raise Transient where a file has other rows than those that were counted."""
        for hour in hours:
            number = to_number(hour)
            counted = sum(c.rows.get(number, 0) for c in self.counted())
            if found.get(number, 0) != counted:
                raise Transient(
                    f"import {self._order.source}: hour {hour}: expected the {counted} rows that were counted before, "
                    f"found {found.get(number, 0)}: its files changed meanwhile; run it again"
                )

    def _said(self, hour: str, rows: pa.Table) -> dict[str, Any]:
        """What the ledger records of an hour's source rows."""
        files = sum(1 for c in self.counted() if to_number(hour) in c.rows)
        sum_ = checksum(rows.drop_columns([HOUR]))
        return {"source": self._location, "files": files, "rows": len(rows), "checksum": sum_}

    def _maker(self, state: State) -> TableRows:
        file, event_time = self.counted()[0].file, self._stream.event_time
        time = self._reader.time_of(file, self._reader.names_of(file))
        return TableRows(state.table, time in _RECEIVED, event_time.column if event_time is not None else None)

    def _later(self, state: State, last: str) -> pa.Table:
        """The keys of the hours behind `last` that look for duplicates in it, as `main` has them."""
        hours = [shift(last, by + 1) for by in range(self._stream.batch.lookback_hours)]
        names = list(self._stream.key)
        if not hours:
            return pa.schema([*(self._reader.schema.field(n) for n in names), pa.field(HOUR, pa.int64())]).empty_table()
        wanted = ", ".join(f"'{hour}'" for hour in hours)
        with lake_errors(f"read rows of {self._stream.table}"):
            rows = state.table.scan(
                row_filter=f"ingest_hour IN ({wanted})",
                selected_fields=(*names, "ingest_hour"),
                snapshot_id=head(state.table, "main").snapshot_id,
            ).to_arrow()
        numbers = pa.array([to_number(h) for h in rows["ingest_hour"].to_pylist()], pa.int64())
        return rows.select(names).append_column(HOUR, numbers)

    def _erased(self, state: State, rows: pa.Table) -> NDArray[Any]:
        """Which rows are of erased persons, as a mask."""
        mask = np.zeros(len(rows), bool)
        hours = rows[HOUR].to_numpy()
        counts = counts_by_hour(hours)
        ranges = {from_number(n): cut_of(count).ranges for n, count in counts.items()}
        found = load_filter(self._job.environment, self._job.ledger, state, cut_of(0).topic_id, ranges)
        for one in found.hours if found is not None else ():
            of_hour = np.flatnonzero(hours == to_number(one.hour))
            for hashed in one.values:
                texts = rows[hashed.column].take(pa.array(of_hour)).cast(pa.string()).to_pylist()
                known: dict[str, bool] = {text: hashed.matches(text) for text in set(texts) if text is not None}
                mask[of_hour] |= np.array([text is not None and known[text] for text in texts], bool)
        return mask

    def _basis(self, state: State, imported: Sequence[ImportedHour]) -> frozenset[str]:
        """What written hours rest on: the erasures that are of them, and of the hours that they were compared with
        those that the batch layer has accepted, by their files."""
        last = max(one.hour for one in imported)
        later = [shift(last, by + 1) for by in range(self._stream.batch.lookback_hours)]
        accepted = [h for h in later if state.is_accepted(h)]
        files = files_by_hour(state.table, "batch", accepted) if accepted else {}
        marks = {mark for one in imported for mark in marks_of(state, one.hour, one.cut)}
        return frozenset({*marks, *(f"{h} {p}" for h, of_hour in files.items() for p in of_hour)})

    def _publish(self, publisher: Publisher, written: _Written) -> bool:
        """Publish written hours; False, with their files deleted, where others have to be written in their place."""
        stream, first = self._stream, min(one.hour for one in written.hours)
        last = max(one.hour for one in written.hours)
        reason = f"imported from {self._location}"

        def decide() -> Decision[None] | Again:
            state = load_state(self._lake, stream.table)
            if merge.needs_merge(state):
                merge.merge(self._lake, stream)
                return Again.AGAIN
            if self._basis(state, written.hours) != written.basis:
                return Decision(state, None, None)
            begins, now = begins_of(state, self._job.ledger), self._lake.clock.now()
            publish = plan_import(state, written.hours, begins, written.id, written.began, now, reason, self._act)
            reach(Step.IMPORT_DECIDED)
            return Decision(state, publish, None)

        published = publisher.run(decide, f"import hours of {stream.name}")
        if published.landed is None:
            delete_quietly(published.state.table, [f.file_path for f in written.files])
            LOG.info("stream %s: import of hours %s to %s is decided again", stream.name, first, last)
            return False
        reach(Step.IMPORT_PUBLISHED)
        publisher.record_decisions(published.state)
        reach(Step.IMPORT_RECORDED)
        rows = sum(one.account.good or 0 for one in written.hours)
        LOG.info("stream %s: imported hours count=%d first=%s last=%s rows=%d", stream.name, len(written.hours), first,
                 last, rows)  # fmt: skip
        return True


def _some(hours: Sequence[str], rows: Mapping[str, int]) -> list[str]:
    """The newest of `hours`, which are newest first, that one commit takes; oldest first. Pure."""
    some: list[str] = []
    number = 0
    for hour in hours[:_HOURS_A_COMMIT]:
        number += rows[hour]
        if some and number > _ROWS_A_COMMIT:
            break
        some.insert(0, hour)
    return some
