"""`anabranch import`: import hours from files, some hours in a commit, newest first
(`anabranch.protocol.imported`)."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
from numpy.typing import NDArray
from pyiceberg.expressions import In
from pyiceberg.manifest import DataFile

from anabranch.common.arrays import find_sorted, groups_by_size
from anabranch.common.errors import Refused, Transient, Unexpected
from anabranch.common.fail_points import Step, reach
from anabranch.common.logs import Progress
from anabranch.common.remote_errors import lake_errors
from anabranch.iceberg.ledger_files import Span
from anabranch.iceberg.manifests import files_by_hour, hour_of_file
from anabranch.iceberg.other_tables import OtherTable, location_of, open_other
from anabranch.iceberg.parquet_writer import data_file_of, fields_of, plain_target
from anabranch.iceberg.snapshot_writer import delete_quietly
from anabranch.iceberg.snapshots import head
from anabranch.job import Job
from anabranch.kafka.batches import COMPACTED, RETENTION
from anabranch.lifecycle.importing.files import maker, split_form
from anabranch.lifecycle.importing.sources import (
    HOUR,
    NUMBER,
    PLACE,
    READ_FROM_KAFKA,
    CountedPart,
    Seam,
    SourceReader,
    counts_by_hour,
    find_duplicates,
    find_known,
    find_repeated_places,
    hours_of,
)
from anabranch.lifecycle.importing.tasks import (
    HASH,
    HERE,
    Window,
    Workers,
    WriteSpec,
    count_parts,
    plan_window,
    read_facts,
    read_keys,
    write_rows,
)
from anabranch.offsets.hours import (
    IMPORTED,
    from_number,
    hour_of,
    hours_between,
    shift,
    start_of,
    to_number,
)
from anabranch.protocol import ledger
from anabranch.protocol.apply import require_columns
from anabranch.protocol.erasure import HourFilter, load_filter, marks_of
from anabranch.protocol.imported import (
    PARTITION,
    UNUSED_COLUMNS,
    ImportedHour,
    account_of,
    begins_of,
    cut_of,
    plan_hours,
    plan_import,
)
from anabranch.protocol.ledger_row import Act, LedgerRow, act_now
from anabranch.protocol.publish import Decision, new_id
from anabranch.protocol.publisher import Publisher
from anabranch.protocol.state import State, load_state
from anabranch.protocol.watermarks import Watermarks
from anabranch.records.hashes import hash_keys
from serving_layer.query.datasets import plan_files

LOG = logging.getLogger(__name__)

# The most hours and rows of one commit: few enough to be written well before the commit's deadline.
# A single hour may have more rows.
_HOURS_A_COMMIT = 48
_ROWS_A_COMMIT = 5_000_000
_ATTEMPTS = 20


@dataclass(frozen=True)
class ImportRequest:
    """An operator's request to import a source, `[FORMAT:]PATH|TABLE`, and `others` into hours from
    `first` (None: the hour of the source's first row) to `last` (None: the hour before the stream's
    first). `time`: the column with the time
    of a row's hour. `by_key`: ignore Kafka's partitions and offsets in the files. `version`: that
    of a Delta table; None for the version of hours imported from it earlier, else the newest."""

    source: str
    first: str | None
    last: str | None = None
    time: str | None = None
    by_key: bool = False
    why: str | None = None
    version: int | None = None
    others: tuple[str, ...] = ()
    takeover: bool = False


@dataclass(frozen=True)
class ImportPlan:
    """The work of an import: hours, newest first, and the number of their source rows. `before` and
    `after`: the numbers of source rows of hours before the first requested hour, and of hours with
    Kafka's records. `known`: hours that are imported already. `notes`: sentences about the source
    and the seam. `version`: that of a Delta table."""

    source: str
    files: int
    hours: Mapping[str, int]
    before: int
    after: int
    known: tuple[str, ...]
    notes: tuple[str, ...] = ()
    version: int | None = None

    @property
    def rows(self) -> int:
        return sum(self.hours.values())


@dataclass(frozen=True)
class Imported:
    """The result of a run: imported hours, and their source rows by outcome."""

    plan: ImportPlan
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


def plan(job: Job, request: ImportRequest, workers: Workers = HERE) -> ImportPlan:
    """Return what `run` would do now, without changing anything. Raises the errors of `run`."""
    return _Import(job, request, workers).plan(load_state(job.lake, job.stream.table))


def run(
    job: Job, publisher: Publisher, request: ImportRequest, workers: Workers = HERE
) -> Imported:
    """Import the hours of a request, some in a commit; each hour is accepted after its files were
    read back.

    Idempotent: imported hours stay, and the next run continues a killed one. Raises Refused before
    publishing an hour: for files that do not fit the table, for hours that cannot be imported, and
    for an imported hour whose source rows have changed since. Raises Transient.
    """
    return _Import(job, request, workers).run(publisher)


@dataclass(frozen=True)
class _Written:
    """Hours whose files are written, and the `basis` of their rows (`_Import._basis`)."""

    id: str
    began: datetime
    hours: tuple[ImportedHour, ...]
    basis: frozenset[str]

    @property
    def files(self) -> tuple[DataFile, ...]:
        return tuple(f for one in self.hours for f in one.files)


class _Import:
    def __init__(self, job: Job, request: ImportRequest, workers: Workers) -> None:
        self._job, self._request, self._workers = job, request, workers
        self._stream, self._lake = job.stream, job.lake
        self._sources = [split_form(one) for one in (request.source, *request.others)]
        places = [name if "/" not in name else location_of(name) for _, name in self._sources]
        self._location = ", ".join(places)
        self._act: Act = act_now("import", request.why)
        state = load_state(self._lake, self._stream.table)
        require_columns(state.table, self._stream)
        target = plain_target(state.table)
        if target is None:
            raise Refused(
                f"import into {self._stream.table}: expected partition fields and paths as `apply` "
                f"makes them, found {', '.join(fields_of(state.table))}; remove the table's "
                "property write.data.path, if it has one; nothing was written"
            )
        self._target = target
        event_time = self._stream.event_time
        self._event_time = event_time.column if event_time is not None else None
        self._reader = SourceReader(
            pa.schema([self._target.schema.field(column.name) for column in self._stream.columns]),
            self._stream.topic,
            request.time,
            self._event_time,
            None if request.by_key else self._seam(state),
        )
        self._late: NDArray[np.int64] | None = None
        self._version: int | None = None
        self._undone = dict[str, int]()
        """The revisions of hours that were taken back."""
        self._rows = Counter[int]()
        """The source rows of each hour, in hours since 1970."""

    @cached_property
    def _tables(self) -> list[OtherTable]:
        found = []
        for form, name in self._sources:
            make = maker(form, self._stream)
            environment = self._job.environment
            strict = not self._request.takeover
            found.append(open_other(environment, name, form, self._version, make, strict))
        return found

    @cached_property
    def _counted(self) -> list[CountedPart]:
        """The parts of the source with their numbers of rows by hour."""
        counted = list[CountedPart]()
        parts = [part for table in self._tables for part in table.parts]
        progress = Progress(LOG, f"count rows of {self._request.source}", "files", len(parts))
        for some in count_parts(self._workers, self._reader, parts):
            counted += some
            progress.step(len(some))
        return counted

    def _files(self, counted: Iterable[CountedPart]) -> int:
        return len({one.part.path for one in counted})

    @property
    def _seam_key(self) -> tuple[str, ...]:
        """The columns by which a row without a place is recognized as one of Kafka's."""
        key = tuple(self._stream.key)
        return key or (tuple(self._reader.schema.names) if self._request.takeover else ())

    @property
    def _table_version(self) -> int | None:
        return self._tables[0].version if len(self._tables) == 1 else None

    def _seam(self, state: State) -> Seam | None:
        """Return where the stream begins in Kafka; None if it left the log in which it began:
        offsets in the files may then belong to any of its logs."""
        logs = [adoption.topic_id for adoption in state.timeline.adoptions]
        if [topic_id for topic_id in logs if topic_id != IMPORTED]:
            return None
        return Seam(
            begins_of(state, self._job.ledger), to_number(state.timeline.first_of_kafka) - 1
        )

    @cached_property
    def _first(self) -> str:
        """The first hour to import."""
        if self._request.first is not None:
            return self._request.first
        state = load_state(self._lake, self._stream.table)
        end = to_number(state.timeline.first_of_kafka) - 1
        return from_number(min((hour for one in self._counted for hour in one.rows), default=end))

    def plan(self, state: State) -> ImportPlan:
        request = self._request
        plan_first = request.first or state.timeline.first
        todo = plan_hours(
            state, plan_first, request.last, self._stream.keep.rows, self._lake.clock.now()
        )
        if request.first is None:
            # The rows are counted once it is certain that hours can be imported.
            first = min(self._first, shift(state.timeline.first_of_kafka, -1))
            keep, now = self._stream.keep.rows, self._lake.clock.now()
            todo = plan_hours(state, first, request.last, keep, now)
        known_rows = self._imported_rows(state)
        self._version = (
            request.version if request.version is not None else self._version_before(known_rows)
        )
        files = self._counted
        self._require_log(state)
        total = Counter[int]()
        for counted in files:
            total.update(counted.rows)
        names = self._reader.schema.names
        if files and all(len(one.lacking) == len(names) for one in files):
            # All values would be null, as of records that were never decoded.
            raise Refused(
                f"import {request.source}: expected columns {', '.join(names)}, found none of them "
                f"but {', '.join(files[0].part.schema_arrow.names)}; write the records' fields as "
                "columns first"
            )
        if not total and (elsewhere := sum(one.elsewhere for one in files)):
            raise Refused(
                f"import {request.source}: expected rows of topic {self._stream.topic}, found "
                f"{elsewhere} rows of other topics alone; name another source"
            )
        begin, end = to_number(self._first), to_number(state.timeline.first_of_kafka)
        after = {hour: n for hour, n in total.items() if end <= hour < READ_FROM_KAFKA}
        if after and self._last_of_files(state) in todo:
            self._late = self._find_late(state, after)
            total[end - 1] += len(self._late)
        late = len(self._late) if self._late is not None else 0
        self._rows = total
        known = {
            from_number(n): rows
            for n, rows in total.items()
            if to_number(state.timeline.first) <= n < end
        }
        self._require_same(known, known_rows)
        return ImportPlan(
            request.source,
            self._files(files),
            {hour: total.get(to_number(hour), 0) for hour in todo},
            sum(n for hour, n in total.items() if hour < begin),
            sum(n for hour, n in total.items() if hour >= end) - late,
            tuple(sorted(known)),
            (
                *(table.what for table in self._tables),
                *self._null_notes(),
                *self._seam_notes(state, late),
            ),
            self._table_version,
        )

    def _null_notes(self) -> Iterator[str]:
        """Yield a sentence for each column that files lack: its nulls are final."""
        every = self._files(self._counted)
        for name in self._reader.schema.names:
            if lacking := self._files(one for one in self._counted if name in one.lacking):
                yield f"{lacking} of {every} files have no column {name}: it is null in their rows"

    def _seam_notes(self, state: State, late: int) -> list[str]:
        """Return sentences about how the import recognizes rows that Kafka has too."""
        exact = self._files(one for one in self._counted if one.ends is not None)
        words = []
        if exact:
            words.append(
                f"the seam to Kafka is exact in {exact} files, which have Kafka's partitions and "
                "offsets"
            )
        if others := self._files(self._counted) - exact:
            words.append(
                f"the seam to Kafka is by {', '.join(self._seam_key)} in {others} files; {late} "
                "of their rows are of hours with Kafka's records but not in the table"
            )
            if not self._stream.key:
                words.append(
                    f"rows of {others} files that repeat another, as a killed job writes them, "
                    "are imported too: the stream has no key, and the files no places in Kafka"
                )
        if exact and (unread := self._unread(state)):
            words.append(
                f"{unread} offsets of the stream were compacted or deleted in Kafka "
                "when it read them: rows of the source there are left out, and not counted"
            )
        if gone := self._in_neither(state):
            words.append(
                f"{gone} offsets between the last row and the first record that the stream reads "
                "are in neither: whether they were records cannot be known"
            )
        if elsewhere := sum(one.elsewhere for one in self._counted):
            words.append(f"{elsewhere} rows are of other topics, and do not count")
        return words

    def _unread(self, state: State) -> int:
        """Return the offsets of accepted hours that Kafka no longer had when they were read."""
        span = Span(state.timeline.first_of_kafka, state.timeline.open)
        rows = ledger.newest(self._job.ledger.history(span, UNUSED_COLUMNS)).values()
        return sum((row.gaps or {}).get(name, 0) for row in rows for name in (COMPACTED, RETENTION))

    def _in_neither(self, state: State) -> int:
        """Return the offsets between the source's last row and the stream's first record."""
        ends = self._ends()
        if not ends or not all(one.ends is not None for one in self._counted):
            return 0
        begins = begins_of(state, self._job.ledger)
        return sum(max(0, begin - ends.get(p, 0)) for p, begin in begins.items())

    def _ends(self) -> dict[int, int]:
        """Return the offset after the source's last row, by partition."""
        ends = dict[int, int]()
        for counted in self._counted:
            ends |= {p: max(e, ends.get(p, 0)) for p, e in (counted.ends or {}).items()}
        return ends

    def _require_log(self, state: State) -> None:
        """Raise Refused if offsets in the files belong to another log. Raises Transient."""
        early = next((c for c in self._counted if c.early), None)
        unread = {p: e for p, e in self._ends().items() if e > state.position.offsets.get(p, 0)}
        found = None
        if early is not None:
            name = early.part.path.rpartition("/")[2]
            found = (
                f"{early.early} rows of {name} that are older than hour "
                f"{state.timeline.first_of_kafka}"
            )
        elif unread:
            topic = self._job.kafka.describe(self._stream.topic, state.position)
            log = self._job.kafka.stable_ends(topic) if topic is not None else {}
            found = next(
                (
                    f"offset {e - 1} of partition {p}"
                    for p, e in unread.items()
                    if e > log.get(p, 0)
                ),
                None,
            )
        if found is not None:
            raise Refused(
                f"import {self._request.source}: expected offsets of the log that the stream "
                f"reads, found {found}: the files are of another topic, or from before it was "
                "recreated; use --seam key"
            )

    def _find_late(self, state: State, hours: Mapping[int, int]) -> NDArray[np.int64]:
        """Return the numbers of the rows of hours with Kafka's records that are not in the table,
        by the stream's key: Kafka had deleted these records before the stream began. They are
        imported into the hour before the first with Kafka's records. Raises Transient while the
        table is not fresh through `hours`."""
        if not self._seam_key:
            raise Refused(
                f"import {self._request.source}: expected Kafka's partitions and offsets in its "
                "rows, or a key, by which rows that Kafka has too are recognized, found `key: none`"
            )
        until = start_of(
            from_number(min(max(hours) + 1, to_number(hour_of(self._lake.clock.now()))))
        )
        fresh = Watermarks.from_properties(state.branch_properties["main"]).fresh_through
        if fresh is None or fresh < until:
            raise Transient(
                f"import {self._request.source}: expected a table that has Kafka's records up to "
                f"{until:%F %T} UTC, since the import adds rows that the table lacks, found it "
                f"fresh through {fresh}; run it again later"
            )
        # All hours: a record may be hours away from others of its time, if its producer stamped it.
        known, key = self._known_keys(state), self._seam_key
        late = [np.zeros(0, np.int64)]
        for some in groups_by_size(sorted(hours), hours.__getitem__, _ROWS_A_COMMIT):
            window = plan_window(self._workers, self._reader, self._counted, some[0], some[-1])
            rows = read_keys(self._workers, window, key)
            self._require_keys(rows)
            late.append(rows[NUMBER].to_numpy()[~find_known(rows, key, known)])
        return np.concatenate(late)

    def _known_keys(self, state: State) -> ds.Dataset:
        """Return the rows of `main` of all hours with Kafka's records, read as they are needed."""
        timeline, now = state.timeline, hour_of(self._lake.clock.now())
        hours = hours_between(timeline.first_of_kafka, shift(max(timeline.open, now), 1))
        snapshot = head(state.table, "main").snapshot_id
        return plan_files(self._stream.table, state.table, snapshot, frozenset(hours)).dataset()

    def _require_keys(self, rows: pa.Table) -> None:
        """Raise Refused if a row of Kafka's hours has no key: whether the table has it too is then
        unknown, and it would be imported a second time."""
        if without := hash_keys(rows, self._seam_key).null_count:
            raise Refused(
                f"import {self._request.source}: expected a key ({', '.join(self._seam_key)}) in "
                "each row of hours with Kafka's records, by which rows that Kafka has too are "
                f"recognized, found {without} rows without one; name a source with Kafka's "
                "partitions and offsets, or one without these rows"
            )

    def _imported_rows(self, state: State) -> dict[str, LedgerRow]:
        """Return the newest decisions about imported hours, also about hours that are missing on a
        branch that was set back."""
        span = Span(min(self._first, state.timeline.first), self._last_of_files(state))
        rows = ledger.newest(self._job.ledger.history(span, UNUSED_COLUMNS))
        self._undone = {h: row.revision for h, row in rows.items() if row.decision == "undone"}
        return {hour: row for hour, row in rows.items() if row.imported is not None}

    def _version_before(self, rows: Mapping[str, LedgerRow]) -> int | None:
        """Return the Delta table's version from which the earliest hour of this location was
        imported; None if there is no such hour."""
        of_hours = {
            h: row.imported for h, row in rows.items() if row.imported and "version" in row.imported
        }
        versions = [
            of_hours[h]["version"]
            for h in sorted(of_hours)
            if of_hours[h]["source"] == self._location
        ]
        return int(versions[0]) if versions else None

    def _require_same(self, known: Mapping[str, int], rows: Mapping[str, LedgerRow]) -> None:
        for hour, number in sorted(known.items()):
            imported = rows[hour].imported if hour in rows else None
            if imported is not None and imported["rows"] - imported.get("late", 0) != number:
                raise Refused(
                    f"import {self._request.source}: hour {hour}: expected the {imported['rows']} "
                    f"rows that it was imported with from {imported['source']}, found {number}; "
                    "the hour stays as it is: remove the files that were added, or import them "
                    "into a stream of their own"
                )

    def run(self, publisher: Publisher) -> Imported:
        state = publisher.recover()
        todo = self.plan(state)
        done = Imported(todo)
        progress = Progress(LOG, f"import hours of {self._stream.name}", "hours", len(todo.hours))
        for _ in range(_ATTEMPTS + len(todo.hours)):
            state = load_state(self._lake, self._stream.table)
            hours = [h for h in todo.hours if h < state.timeline.first]
            if not hours:
                return done
            if hours[0] != shift(state.timeline.first, -1):
                raise Transient(
                    f"import hours of {self._stream.name}: expected the hours that it has "
                    "imported, found that they were taken back meanwhile; run it again"
                )
            written = self._write(state, _hours_of_commit(hours, todo.hours), todo.hours)
            if self._publish(publisher, written):
                done = done.plus(written.hours)
                progress.step(len(written.hours))
        raise Transient(
            f"import hours of {self._stream.name}: expected no conflicting publish in one of "
            f"{_ATTEMPTS} attempts, found one each time; run the command again: it continues"
        )

    def _write(self, state: State, hours: Sequence[str], planned: Mapping[str, int]) -> _Written:
        """Write the files of consecutive `hours`, and prove them. `planned`: the numbers of their
        source rows."""
        began = self._lake.clock.now()
        first, last = to_number(hours[0]), to_number(hours[-1])
        late = self._late if hours[-1] == self._last_of_files(state) else None
        # Step 1: find the rows that repeat others, and erased ones.
        earliest = max(first - self._stream.lookback_hours, to_number(self._first))
        repeated, erased = self._left_out(state, hours, self._window(earliest, last, late))
        # Step 2: write the others.
        dropped = np.union1d(repeated, erased)
        window = self._window(first, last, late)
        written = write_rows(
            self._workers, WriteSpec(window, dropped, self._target, self._event_time)
        )
        reach(Step.IMPORT_WRITTEN)
        # Step 3: close the account over the written files.
        seen, checksums = Counter[int](), Counter[int]()
        for one in written:
            seen.update(one.seen)
            checksums.update(one.checksums)
        self._require_counted(hours, seen, planned)
        files = [data_file_of(state.table, output) for one in written for output in one.outputs]
        twice, gone = (counts_by_hour(hours_of(numbers)) for numbers in (repeated, erased))
        imported = []
        for hour in hours:
            at = to_number(hour)
            description = self._description(hour, seen[at], checksums[at])
            if late is not None and at == last:
                description["late"] = len(late)
            account = account_of(seen[at], twice.get(at, 0), gone.get(at, 0), description)
            own_files = tuple(f for f in files if hour_of_file(state.table, f) == hour)
            if sum(f.record_count for f in own_files) != account.good:
                raise Unexpected(
                    f"import hour {hour}: expected {account.good} rows in its files, found "
                    f"{sum(f.record_count for f in own_files)}; nothing was published: report this"
                )
            imported.append(ImportedHour(hour, own_files, account))
        return _Written(new_id(), began, tuple(imported), self._basis(state, imported))

    def _window(self, first: int, last: int, late: NDArray[np.int64] | None) -> Window:
        return plan_window(self._workers, self._reader, self._counted, first, last, late)

    def _left_out(
        self, state: State, hours: Sequence[str], window: Window
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the numbers of rows of `hours`, the last ones of a window, that repeat others, and
        of those that were erased."""
        key, filters = self._stream.key, self._erasures(state, window)
        columns = {hashed.column: None for one in filters for hashed in one.values}
        facts = read_facts(self._workers, window, tuple(key), tuple(columns))
        numbers = facts[NUMBER].to_numpy()
        # As in the batch layer, an erased row makes no other row a duplicate.
        erased = _erased(facts, hours_of(numbers), filters)
        left = facts.filter(pa.array(~erased)) if erased.any() else facts
        found = [self._repeated_keys(state, hours, window, left)] if key else []
        places = left.filter(left[PLACE[0]].is_valid())
        if len(places):
            own, *at = (places[name].to_numpy() for name in (NUMBER, *PLACE))
            found.append(own[find_repeated_places(*at)])
        repeated = np.unique(np.concatenate([np.zeros(0, np.int64), *found]))
        first = cut_of(hours[0], 0).ranges[PARTITION][0]
        both = (repeated, numbers[erased])
        return tuple(of[of >= first] for of in both)  # type: ignore[return-value]

    def _repeated_keys(
        self, state: State, hours: Sequence[str], window: Window, facts: pa.Table
    ) -> NDArray[np.int64]:
        """Return the rows whose key another row has; hashes select candidates, keys decide."""
        key, later = self._stream.key, self._keys(state, self._hours_after(hours[-1]))
        named = facts.filter(facts[HASH].is_valid()) if facts[HASH].null_count else facts
        hashes = np.sort(named[HASH].to_numpy())
        of_later = (
            np.sort(hash_keys(later, key).drop_null().to_numpy()) if len(later) else hashes[:0]
        )
        twice = hashes[1:][np.diff(hashes) == 0]
        several = np.union1d(twice, of_later[find_sorted(of_later, hashes) >= 0])
        if not len(several):
            return several
        chosen = named.filter(pc.is_in(named[HASH], pa.array(several)))
        rows = read_keys(self._workers, window, key, chosen[NUMBER].to_numpy())
        numbers = rows[NUMBER].to_numpy()
        rows = rows.append_column(HOUR, pa.array(hours_of(numbers)))
        repeated = find_duplicates(rows, key, self._stream.lookback_hours, later)
        found: NDArray[np.int64] = numbers[repeated]
        return found

    def _last_of_files(self, state: State) -> str:
        return shift(state.timeline.first_of_kafka, -1)

    def _require_counted(
        self, hours: Sequence[str], found: Mapping[int, int], planned: Mapping[str, int]
    ) -> None:
        """Raise Transient if hours have another number of rows than was counted."""
        for hour in hours:
            number = found.get(to_number(hour), 0)
            if number != planned[hour]:
                raise Transient(
                    f"import {self._request.source}: hour {hour}: expected the {planned[hour]} "
                    f"rows that were counted before, found {number}: its files changed meanwhile; "
                    "run it again"
                )

    def _description(self, hour: str, rows: int, checksum: int) -> dict[str, Any]:
        """Return the ledger's description of an hour's source rows."""
        files = self._files(one for one in self._counted if to_number(hour) in one.rows)
        version = {} if self._table_version is None else {"version": self._table_version}
        found = {"files": files, "rows": rows, "checksum": f"{checksum % 2**64:016x}"}
        return {"source": self._location, **version, **found}

    def _hours_after(self, hour: str) -> list[str]:
        """Return the later hours whose look-back for duplicates contains an hour."""
        return hours_between(shift(hour, 1), shift(hour, 1 + self._stream.lookback_hours))

    def _keys(self, state: State, hours: Sequence[str]) -> pa.Table:
        """Return the keys of some hours' rows on `main`, with `HOUR`."""
        names = list(self._stream.key)
        if not hours:
            kinds = [self._reader.schema.field(name) for name in names]
            return pa.schema([*kinds, (HOUR, pa.int64())]).empty_table()
        with lake_errors(f"read rows of {self._stream.table}"):
            # As text, the filter's parser would leave exceptions in cycles with the frames of their
            # callers, which hold the facts of this commit: half a gigabyte, one more each commit.
            rows = state.table.scan(
                row_filter=In(term="ingest_hour", literals={*hours}),
                selected_fields=(*names, "ingest_hour"),
                snapshot_id=head(state.table, "main").snapshot_id,
            ).to_arrow()
        of_rows = rows["ingest_hour"].combine_chunks().dictionary_encode()
        numbers = pa.array([to_number(h) for h in of_rows.dictionary.to_pylist()], pa.int64())
        return rows.select(names).append_column(HOUR, numbers.take(of_rows.indices))

    def _erasures(self, state: State, window: Window) -> tuple[HourFilter, ...]:
        """Return the erased values of a window's hours."""
        counts = {h: n for h in range(window.first, window.last + 1) if (n := self._rows[h])}
        ranges = {from_number(h): cut_of(from_number(h), n).ranges for h, n in counts.items()}
        environment, ledger_ = self._job.environment, self._job.ledger
        return load_filter(environment, self._stream, ledger_, state, IMPORTED, ranges)

    def _basis(self, state: State, imported: Sequence[ImportedHour]) -> frozenset[str]:
        """Return what the rows of imported hours depend on: the marks of erasures that cover them,
        and the files of the accepted hours after them, with which they were compared."""
        last = max(one.hour for one in imported)
        accepted = [h for h in self._hours_after(last) if state.is_accepted(h)]
        files = files_by_hour(state.table, "batch", accepted) if accepted else {}
        marks = {mark for one in imported for mark in marks_of(state, one.hour, one.cut)}
        return frozenset({*marks, *(f"{h} {p}" for h, of_hour in files.items() for p in of_hour)})

    def _publish(self, publisher: Publisher, written: _Written) -> bool:
        """Publish written hours. If they must be written again, delete their files and return
        False."""
        stream, first = self._stream, min(one.hour for one in written.hours)
        last = max(one.hour for one in written.hours)
        reason = f"imported from {self._location}"

        def decide(state: State) -> Decision[None]:
            if self._basis(state, written.hours) != written.basis:
                return Decision(state, None, None)
            begins, now = begins_of(state, self._job.ledger), self._lake.clock.now()
            publish = plan_import(
                state, written.hours, begins, written.id, written.began, now, reason, self._act,
                self._undone,
            )  # fmt: skip
            reach(Step.IMPORT_DECIDED)
            return Decision(state, publish, None)

        published = publisher.run_merged(decide, f"import hours of {stream.name}")
        if published.landed is None:
            delete_quietly(published.state.table, [f.file_path for f in written.files])
            LOG.info(
                "stream %s: the table changed during the import of hours %s to %s, trying again",
                stream.name,
                first,
                last,
            )
            return False
        reach(Step.IMPORT_PUBLISHED)
        publisher.record_decisions(published.state)
        reach(Step.IMPORT_RECORDED)
        rows = sum(one.account.good or 0 for one in written.hours)
        LOG.info(
            "stream %s: imported hours count=%d first=%s last=%s rows=%d",
            stream.name,
            len(written.hours),
            first,
            last,
            rows,
        )
        return True


def _erased(
    facts: pa.Table, hours: NDArray[np.int64], filters: Sequence[HourFilter]
) -> NDArray[np.bool_]:
    """Return the mask of rows with erased values. They are hashed here: no task gets the key."""
    mask = np.zeros(len(facts), bool)
    for one in filters:
        of_hour = np.flatnonzero(hours == to_number(one.hour))
        for hashed in one.values:
            texts = facts[hashed.column].take(pa.array(of_hour))
            values = [v for v in texts.unique().to_pylist() if v is not None and hashed.matches(v)]
            found = pc.is_in(texts, pa.array(values, pa.string())).to_numpy()
            mask[of_hour] |= found & texts.is_valid().to_numpy()
    return mask


def _hours_of_commit(hours: Sequence[str], rows: Mapping[str, int]) -> list[str]:
    """Return the newest of `hours` for one commit, oldest first. `hours` is newest first. Pure."""
    some = groups_by_size(hours[:_HOURS_A_COMMIT], rows.__getitem__, _ROWS_A_COMMIT)
    return next(some)[::-1]
