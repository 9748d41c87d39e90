"""The world of the model: a Kafka log, a table, and storage, each a value; a change gives a new
one.

The table does what Iceberg promises and no more: a commit lands whole when the heads that it names
are still the heads, and is refused otherwise. It is read by the product's own `read_state`, from
PyIceberg's own objects.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import cache, cached_property
from itertools import count
from typing import Any, NamedTuple

from pyiceberg.partitioning import UNPARTITIONED_PARTITION_SPEC
from pyiceberg.schema import Schema
from pyiceberg.table import Table
from pyiceberg.table.metadata import new_table_metadata
from pyiceberg.table.refs import SnapshotRef, SnapshotRefType
from pyiceberg.table.snapshots import Operation, Snapshot, Summary
from pyiceberg.table.sorting import UNSORTED_SORT_ORDER
from values import replace

from anabranch.iceberg import prepare
from anabranch.iceberg.commits import Commit
from anabranch.iceberg.files import Stored, plan_orphans
from anabranch.iceberg.owner import OWNER, Owner
from anabranch.iceberg.snapshots import (
    BRANCHES,
    CONTENT,
    PROVEN,
    PUBLISH_ID,
    PUBLISHED,
    WAP_ID,
    Staged,
    carried,
    staged_ref,
    staged_refs,
    summary_of,
)
from anabranch.iceberg.staging import Written
from anabranch.offsets.hours import Timeline, hour_of
from anabranch.offsets.position import Position, Ranges, Stamped, Topic
from anabranch.protocol import dead_letters, ledger, publish_queue
from anabranch.protocol.ledger_row import LedgerRow
from anabranch.protocol.state import DEAD_LETTERS, DECISIONS, POSITION, TIMELINE, State, read_state

BEGIN = datetime(2026, 11, 21, 0, 30, tzinfo=UTC)
H0 = hour_of(BEGIN)
MINUTE = timedelta(minutes=1)
FIRST_HOURS = timedelta(hours=6)
TOPIC = "events"
COMMITS = "model.commits"
"""A property of a table whose commits are counted."""
APART = "model.apart"
"""A property of a table whose branches say in table properties all that is not new with each
publish."""
Row = tuple[int, int, int]
"""A record: its partition, its offset, and its number, since offsets may begin again."""
Properties = frozenset[tuple[str, str]]


def millis(when: datetime) -> int:
    return int(when.timestamp() * 1000)


class Violation(AssertionError):
    """A promise of the table that a step broke."""


class Record(NamedTuple):
    """A record of the log: its timestamp, and which of all records that Kafka accepted it is."""

    stamp: int
    number: int


@dataclass(frozen=True)
class Kafka:
    """The topic's log by partition, from `starts` on what can still be read of it, and a clock that
    reads it.

    `malformed` records are none that the stream's rules can read. `silent` are the records, by
    number, that no reader is given, each with the class that the log's batches show: a control
    record, or what compaction took. `past` are the records of logs that ended, with their topic's
    id: of a recreated topic, or behind the place where a log lost its end. `others` are the logs of
    other topics, which the stream's file may name, by topic id, with their starts.
    """

    log: tuple[tuple[Record, ...], ...]
    now: datetime
    id: str = "t"
    starts: tuple[int, ...] = ()
    accepted: int = 0
    malformed: frozenset[int] = frozenset()
    past: tuple[tuple[Row, str], ...] = ()
    others: tuple[tuple[str, tuple[tuple[Record, ...], ...], tuple[int, ...]], ...] = ()
    silent: frozenset[tuple[int, str]] = frozenset()
    # The records, by number, that have a value which is to be erased.
    personal: frozenset[int] = frozenset()

    def append_personal(self, partition: int, minutes: int, malformed: bool = False) -> Kafka:
        """The same with a value that is to be erased; no reader finds it in a malformed one."""
        after = self.append(partition, minutes, malformed)
        return replace(after, personal=self.personal | {self.accepted})

    def append(self, partition: int, minutes: int, malformed: bool = False) -> Kafka:
        """One record, stamped `minutes` from now; to a partition that it may be the first of."""
        log = [*self.log, *(() for _ in range(len(self.log), partition + 1))]
        record = Record(millis(self.now + minutes * MINUTE), self.accepted)
        log[partition] = (*log[partition], record)
        known = self.malformed | {self.accepted} if malformed else self.malformed
        return replace(self, log=tuple(log), accepted=self.accepted + 1, malformed=known)

    def expire(self, partition: int, start: int) -> Kafka:
        """Retention took what lies before an offset."""
        starts = {p: self.start(p) for p in range(len(self.log))}
        starts[partition] = max(start, starts[partition])
        return replace(self, starts=tuple(starts[p] for p in sorted(starts)))

    def end_transaction(self, partition: int) -> Kafka:
        """The control record that ends a transaction: in the log, and given to no reader."""
        return replace(self.append(partition, 0), silent=self.silent | {(self.accepted, "control")})

    def compact(self, partition: int, offset: int) -> Kafka:
        """The log cleaner took one record out of the middle of the log, if it was there."""
        is_there = self.start(partition) <= offset < len(self.log[partition])
        if not is_there or self.shown(partition, offset) is not None:
            return self
        gone = (self.log[partition][offset].number, "compacted")
        return replace(self, silent=self.silent | {gone})

    def look(self, partition: int, offsets: Iterable[int]) -> Mapping[str, Mapping[int, int]]:
        """Return how many offsets that were not given are of each class by the log's batches."""
        shown = Counter(name for o in offsets if (name := self.shown(partition, o)) is not None)
        return {name: {partition: n} for name, n in shown.items()}

    def shown(self, partition: int, offset: int) -> str | None:
        """Return the class of an offset by the log's batches; None of what readers are given."""
        return self._classes.get(self.log[partition][offset].number)

    @cached_property
    def _classes(self) -> Mapping[int, str]:
        return dict(self.silent)

    @cached_property
    def compacted(self) -> frozenset[Row]:
        """The records that the log cleaner took, which no reader is given."""
        return frozenset(row for row in self.rows if self._classes.get(row[2]) == "compacted")

    def readable(self) -> Kafka:
        """The same records under rules that can read all of them."""
        return replace(self, malformed=frozenset())

    def recreated(self) -> Kafka:
        """The topic deleted and made again, empty."""
        past = (*self.past, *((row, self.id) for row in self._rows(self.log)))
        id = chr(ord(self.id) + 1)
        return replace(self, log=((),) * len(self.log), id=id, starts=(), past=past)

    def switched(self, id: str) -> Kafka:
        """The topic that the stream's file names from now on; its log is empty the first time."""
        own = (self.id, self.log, self.starts)
        known = {other: (log, starts) for other, log, starts in (*self.others, own)}
        log, starts = known.pop(id, (((),) * len(self.log), ()))
        others = tuple((other, *rest) for other, rest in sorted(known.items()))
        return replace(self, log=log, id=id, starts=starts, others=others)

    def without_end(self, partition: int, end: int) -> Kafka:
        """The same topic after a partition lost all that lay behind an offset."""
        log = tuple(of[:end] if p == partition else of for p, of in enumerate(self.log))
        left = set(self._rows(log))
        past = (*self.past, *((row, self.id) for row in self._rows(self.log) if row not in left))
        return replace(self, log=log, past=past)

    def is_read_at(self, position: Position) -> bool:
        """Whether a position is one of this log, by all visible evidence."""
        is_in_log = all(o <= len(self.log[p]) for p, o in position.offsets.items())
        return position.topic_id == self.id and is_in_log

    def start(self, partition: int) -> int:
        return self.starts[partition] if partition < len(self.starts) else 0

    @cached_property
    def rows(self) -> tuple[Row, ...]:
        """Every record that Kafka ever accepted."""
        return (*(row for row, _ in (*self.past, *self.elsewhere)), *self.present)

    @cached_property
    def present(self) -> tuple[Row, ...]:
        """Every record of the log that the stream's file names."""
        return tuple(self._rows(self.log))

    @cached_property
    def elsewhere(self) -> tuple[tuple[Row, str], ...]:
        """The records of the other topics, with the topic's id."""
        return tuple((row, id) for id, log, _ in self.others for row in self._rows(log))

    @cached_property
    def taken(self) -> frozenset[Row]:
        """The records of the stream that cannot be read any more."""
        rows, classes = self._rows(self.log), self._classes
        gone = (row for row in rows if row[1] < self.start(row[0]) or row[2] in classes)
        return frozenset((*gone, *(row for row, _ in (*self.past, *self.elsewhere))))

    def _rows(self, log: tuple[tuple[Record, ...], ...]) -> list[Row]:
        """The records of a log, without control records."""
        rows = [(p, o, r.number) for p, records in enumerate(log) for o, r in enumerate(records)]
        return [row for row in rows if self._classes.get(row[2]) != "control"]

    def holds(self, ranges: Ranges) -> bool:
        """Whether all of some ranges can be read."""
        ends = {p: len(records) for p, records in enumerate(self.log)}
        return all(
            s >= e or (s >= self.start(p) and e <= ends.get(p, 0)) for p, (s, e) in ranges.items()
        )

    def read(self, ranges: Ranges) -> tuple[Row, ...]:
        """The records of some ranges that a reader is given."""
        places = ((p, o) for p, (s, e) in sorted(ranges.items()) for o in range(s, e))
        return tuple((p, o, self.log[p][o].number) for p, o in places if self.shown(p, o) is None)

    # The product asks this of its Kafka adapter.

    def describe(self, topic: str, expected: Position | None = None) -> Topic | None:
        return Topic(topic, self.id, tuple(range(len(self.log))))

    def log_starts(self, topic: Topic) -> dict[int, int]:
        return {p: self.start(p) for p in range(len(self.log))}

    def stable_ends(self, topic: Topic, reached: Mapping[int, int] | None = None) -> dict[int, int]:
        return {p: len(records) for p, records in enumerate(self.log)}

    def first_from(self, topic: Topic, when: datetime) -> dict[int, Stamped | None]:
        ends = self.stable_ends(topic)
        most, starts = max(ends.values(), default=0), dict.fromkeys(ends, 0)
        by_partition = self.stamps_from(topic, starts, ends, most)
        later = {
            p: (s for s in of if s.timestamp_ms >= millis(when)) for p, of in by_partition.items()
        }
        return {p: next(stamps, None) for p, stamps in later.items()}

    def first_later(
        self, topic: Topic, records: Mapping[int, Stamped]
    ) -> dict[int, Stamped | None]:
        found: dict[int, Stamped | None] = {}
        for p, record in records.items():
            held = [Stamped(o, r.stamp) for o, r in enumerate(self.log[p]) if o >= self.start(p)]
            found[p] = next((s for s in held if s.timestamp_ms > record.timestamp_ms), None)
        return found

    def stamps_from(
        self, topic: Topic, starts: Mapping[int, int], ends: Mapping[int, int], count: int
    ) -> dict[int, tuple[Stamped, ...]]:
        stamps = {}
        for p, start in starts.items():
            low = max(start, self.start(p))
            log = [(o, r) for o, r in enumerate(self.log[p]) if low <= o < ends[p]]
            given = [Stamped(o, r.stamp) for o, r in log if self.shown(p, o) is None]
            stamps[p] = tuple(given[:count])
        return stamps


@dataclass(frozen=True)
class File:
    """A data file: an hour's rows, or its dead letters. Stands where PyIceberg's DataFile would.

    `seen` are the rows of other hours that its own were compared with for duplicates. `written`:
    how old the world was.
    """

    file_path: str
    hour: str
    rows: tuple[Row, ...]
    seen: frozenset[Row] = frozenset()
    written: timedelta = timedelta(0)

    @property
    def record_count(self) -> int:
        return len(self.rows)

    def __repr__(self) -> str:
        return f"{self.file_path}{[row[:2] for row in self.rows]}"


Files = tuple[File, ...]
# A file of the table's that something always refers to.
_METADATA = File("metadata", "", ())


def new_files(wap_id: str, by_hour: Mapping[str, Iterable[Row]]) -> tuple[File, ...]:
    """An attempt's files, one for each hour that has any rows."""
    sorted_rows = {h: tuple(sorted(rows)) for h, rows in sorted(by_hour.items())}
    return tuple(File(f"{wap_id}/{h[-3:]}", h, rows) for h, rows in sorted_rows.items() if rows)


def in_order(files: Iterable[File]) -> Files:
    return tuple(sorted(files, key=lambda f: f.file_path))


def rolled_up(path: str, files: tuple[File, ...], written: timedelta = timedelta(0)) -> File:
    """One file that contains the rows of files of one hour."""
    rows = tuple(sorted(row for f in files for row in f.rows))
    return File(path, files[0].hour, rows, written=written)


@dataclass(frozen=True)
class Version:
    """A snapshot and its files, each as often as it was added."""

    id: int
    parent: int | None
    summary: tuple[tuple[str, str], ...]
    files: tuple[File, ...]
    added: tuple[File, ...] = ()
    made_ms: int = 0


@dataclass(frozen=True)
class Ref:
    name: str
    id: int
    max_age_ms: int | None = None


_EMPTY = new_table_metadata(
    Schema(), UNPARTITIONED_PARTITION_SPEC, UNSORTED_SORT_ORDER, "memory:", {}
)
_IDS: dict[tuple[object, ...], int] = {}


def new_version(
    branch: str,
    parent: int | None,
    said: Mapping[str, str],
    files: Files,
    added: Files,
    at: int = 0,
) -> Version:
    """The same snapshot over the same parent has one id, as two ways meet; none comes back."""
    content = (parent, tuple(sorted(said.items())), in_order(files), added, at)
    return Version(_IDS.setdefault((branch, *content), len(_IDS) + 1), *content)


class Lake:
    """One version of the table's metadata: snapshots in the order of their sequence numbers, refs,
    and properties.

    Made by `Lake.of` only: equal versions are one object, so that what is read from them is read
    once.
    """

    _all: dict[tuple[tuple[Version, ...], frozenset[Ref], Properties], Lake] = {}  # noqa: RUF012

    def __init__(
        self, versions: tuple[Version, ...], refs: frozenset[Ref], properties: Properties
    ) -> None:
        self.versions, self.refs, self.properties = versions, refs, properties
        self.known = {v.id: v for v in versions}
        self.heads = {r.name: r.id for r in refs}

    @classmethod
    def of(
        cls,
        versions: tuple[Version, ...],
        refs: Iterable[Ref],
        properties: Properties = frozenset(),
    ) -> Lake:
        key = (versions, frozenset(refs), properties)
        if key not in cls._all:
            cls._all[key] = Lake(*key)
        return cls._all[key]

    @classmethod
    def forget(cls) -> None:
        cls._all.clear()

    @cached_property
    def table(self) -> Table:
        remembered = [
            Snapshot(
                snapshot_id=v.id, parent_snapshot_id=v.parent, sequence_number=number,
                timestamp_ms=v.made_ms or millis(BEGIN), manifest_list="",
                summary=Summary(Operation.APPEND, **dict(v.summary)),
            )
            for number, v in enumerate(self.versions, 1)
        ]  # fmt: skip
        refs = {}
        for r in self.refs:
            kind = SnapshotRefType.BRANCH if r.name in BRANCHES else SnapshotRefType.TAG
            refs[r.name] = SnapshotRef(
                snapshot_id=r.id, snapshot_ref_type=kind, max_ref_age_ms=r.max_age_ms
            )
        said = {"snapshots": remembered, "refs": refs, "properties": dict(self.properties)}
        metadata = _EMPTY.model_copy(update=said)
        return Table(("model",), metadata, "", None, None)  # type: ignore[arg-type]

    @cached_property
    def state(self) -> State:
        return read_state(self.table)

    def is_tag_of_a_head(self, ref: Ref) -> bool:
        """Whether a ref is the tag of a branch's newest publish, which the branch names too."""
        branch = ref.name.removeprefix(PUBLISHED)
        return branch != ref.name and ref.id == self.heads.get(branch)

    def way(self, id: int | None) -> list[Version]:
        """A version and those that it was made from, newest first."""
        versions = []
        while id in self.known:
            versions.append(self.known[id])
            id = versions[-1].parent
        return versions

    @cached_property
    def line(self) -> publish_queue.Queue:
        """The queue of who has the right of way, and who waits for it."""
        return publish_queue.read_queue(self.table.properties)

    def files(self, branch: str) -> tuple[File, ...]:
        return self.known[self.heads[branch]].files

    def rows(self, branch: str) -> list[Row]:
        return sorted(row for f in self.files(branch) for row in f.rows)

    def files_of(self, branch: str, hour: str) -> tuple[File, ...]:
        return tuple(f for f in self.files(branch) if f.hour == hour)

    def files_by_hour(self, branch: str) -> dict[str, dict[str, File]]:
        by_hour: dict[str, dict[str, File]] = {}
        for f in self.files(branch):
            by_hour.setdefault(f.hour, {})[f.file_path] = f
        return by_hour

    def find_staged(self, wap_id: str) -> Staged | None:
        for v in self.versions:
            if dict(v.summary).get(WAP_ID) == wap_id:
                return Staged(wap_id, v.id, v.parent, v.added)  # type: ignore[arg-type]
        return None

    @cached_property
    def ids(self) -> frozenset[str]:
        """The ids of attempts in the version: those of its snapshots and of their files."""
        ids = {id for v in self.versions for key, id in v.summary if key in (PUBLISH_ID, WAP_ID)}
        return frozenset(ids | {f.file_path.split("/")[0] for f in self.held})

    @cached_property
    def ids_of_publishes(self) -> frozenset[str]:
        return frozenset(id for v in self.versions for key, id in v.summary if key == PUBLISH_ID)

    def new_id(self, name: str, used: frozenset[str] = frozenset()) -> str:
        """An id that is not in use. Not counted on for ever, so that two ways to the same table
        meet; but where ids are remembered beside the table."""
        if self.accounts:
            return f"{name}-{self.commits}"
        return next(id for i in count(1) if (id := f"{name}-{i}") not in self.ids | used)

    @cached_property
    def held(self) -> frozenset[File]:
        """The files of all snapshots."""
        return frozenset(f for v in self.versions for f in (*v.files, *v.added))

    def without_unnamed(self) -> Lake:
        """This version without the snapshots that no branch or tag names, as others expire."""
        named = {ref.id for ref in self.refs}
        kept = tuple(v for v in self.versions if v.id in named)
        return Lake.of(kept, self.refs, self.properties) if len(kept) < len(self.versions) else self

    @cached_property
    def accounts(self) -> bool:
        """Whether decisions and dead letters are followed."""
        return COMMITS in dict(self.properties)

    @cached_property
    def apart(self) -> bool:
        """Whether what branches say for long is in table properties, however short it is."""
        return APART in dict(self.properties)

    @property
    def commits(self) -> int:
        return int(dict(self.properties)[COMMITS])

    @cached_property
    def updated_ms(self) -> int:
        """The time when it was last changed, where snapshots are stamped; else 0."""
        stamps = [v.made_ms for v in self.versions]
        return max(stamps) if all(stamps) else 0

    def stamp(self, made_ms: int) -> int:
        """Return a snapshot's stamp by a clock that says `made_ms`, as `prepare` does; else 0."""
        return max(made_ms, self.updated_ms) if self.updated_ms else 0

    def has_staged(self, commit: Commit) -> bool:
        """Whether a commit's staged snapshots are there: none that is gone gets a ref."""
        return all(id in self.known for id in commit.staged.values())

    def commit(self, loaded: Lake, commit: Commit, made_ms: int) -> Lake | None:
        """Return what this version becomes by a commit prepared over `loaded`; None: refused."""
        if any(self.heads.get(ref) != id for ref, id in commit.heads.items()):
            return None
        if not self.has_staged(commit):
            return None
        versions = [v for v in self.versions if v.id not in commit.expire]
        unstaged = {*staged_refs(self.table, commit.expire), *map(staged_ref, commit.staged)}
        dropped = {*commit.drop_tags, *unstaged}
        refs = {r.name: r for r in self.refs if r.name not in dropped}
        needed: dict[str, str] = {}
        summaries: list[dict[str, str]] = []
        for change in commit.changes:
            head = loaded.known[loaded.heads[change.branch]]
            summary = carried(loaded.table, change.branch, change.properties, commit.id)
            if not self.accounts:
                summary.pop(DECISIONS, None)  # they wait for the ledger
                summary.pop(DEAD_LETTERS, None)
            gone = {*change.clear, *change.copy}
            kept = tuple(f for f in head.files if f not in change.remove and f.hour not in gone)
            copies = change.copy.items()
            copied = tuple(f for h, branch in copies for f in loaded.files_of(branch, h))
            files = (*kept, *copied, *change.add)
            is_proven = change.branch == "batch" and CONTENT in summary
            if self.apart:
                summary, of_branch = summary_of(loaded.table, change.branch, summary)
                needed |= of_branch
                summaries.append(summary)
            at = loaded.stamp(made_ms)
            made = new_version(change.branch, head.id, summary, files, change.add, at)
            versions.append(made)
            moved = (change.branch, PUBLISHED + change.branch, *((PROVEN,) if is_proven else ()))
            refs |= {name: Ref(name, made.id) for name in moved}
        refs |= {t.name: Ref(t.name, t.snapshot_id, t.max_age_ms) for t in commit.tags}
        # As `prepare` does, over what was loaded.
        there = loaded.table.properties
        new = {k: v for k, v in needed.items() if there.get(k) != v}
        properties = {**dict(self.properties), **new, **commit.set_properties}
        gone = set(commit.remove_properties)
        if self.apart:
            gone |= {*prepare.unused_properties(loaded.table, commit, needed, summaries)}
        if self.accounts:
            properties[COMMITS] = str(self.commits + 1)
        left = frozenset((k, v) for k, v in properties.items() if k not in gone)
        return Lake.of(tuple(versions), refs.values(), left)


@dataclass(frozen=True, eq=False)
class Request:
    """A commit over the version that its publisher had loaded. What becomes of it may come late."""

    loaded: Lake
    commit: Commit
    made_ms: int = 0

    @cached_property
    def _key(self) -> tuple[object, ...]:
        commit = self.commit
        changes = [
            (c.branch, c.add, c.remove, *sorted(c.properties.items())) for c in commit.changes
        ]
        heads, of = tuple(sorted(commit.heads.items())), (commit.id, commit.tags, commit.expire)
        return (id(self.loaded), *of, tuple(changes), heads, self.made_ms)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Request) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)

    def __repr__(self) -> str:
        return self.commit.id


@dataclass(frozen=True)
class World:
    """All that is not in an actor's memory. `bad` hours fail the quality gate until they are fixed.

    With `late`, a lost answer says nothing of the request: it is `under_way`, and lands at any
    later step, or never. `wrong_answers` is the number of wrong answers: a refusal for a publish
    that landed, as a client gives that repeats a request whose answer was lost.

    Actors may request a turn as often as `turns`; `abandoned` are those whose actor was killed.

    With `accounts` there are the dead letters' table and the ledger, whose rows are in the order of
    its sequence.

    Only with `orphans` does storage keep the files that no snapshot holds, and is no id ever used
    again: that is what maintenance lives on, and it makes many more worlds out of few. As often as
    `retries` says a task is tried again and leaves what it wrote before.
    """

    kafka: Kafka
    lake: Lake
    storage: frozenset[File] = frozenset()
    orphans: bool = False
    attempts: int = 0
    bad: frozenset[str] = frozenset()
    answers_to_lose: int = 0
    crashes: int = 0
    restored: int = 0
    late: bool = False
    under_way: tuple[Request, ...] = ()
    discarded: frozenset[str] = frozenset()
    turns: int = 0
    abandoned: frozenset[str] = frozenset()
    # How much time passed that Kafka's clock does not show: what files grow old by.
    age: timedelta = timedelta(0)
    wrong_answers: int = 0
    retries: int = 0
    letters: Any = None
    ledger: tuple[str, ...] = ()

    def new_id(self, name: str, used: frozenset[str] = frozenset()) -> str:
        """An id for an attempt's staged files; none of `used`, which its own process knows."""
        return f"{name}-{self.attempts}" if self._counts else self.lake.new_id(name, used)

    @property
    def _counts(self) -> bool:
        return self.orphans or self.late or self.lake.accounts

    def stage(self, wap_id: str, files: tuple[File, ...], made_ms: int = 0) -> World:
        """Files, and one snapshot that no branch points to; as Spark makes it, over `main`."""
        world = replace(self, attempts=self.attempts + 1) if self._counts else self
        files = self._aged(files)
        staged = self._staged(self.lake, wap_id, files, made_ms)
        return world._with((*self.lake.versions, staged), frozenset(files))

    def stage_letters(self, wap_id: str, files: tuple[File, ...], made_ms: int = 0) -> World:
        """The same in the dead letters' table."""
        files = self._aged(files)
        staged = self._staged(self.letters, wap_id, files, made_ms)
        refs = (*self.letters.refs, *self.protecting(wap_id, staged))
        lake = Lake.of((*self.letters.versions, staged), refs, self.letters.properties)
        return self._over(self.lake, frozenset(files), lake)

    def _staged(self, lake: Lake, wap_id: str, files: tuple[File, ...], made_ms: int) -> Version:
        """A staged snapshot. After its first hours its stamp shows its age: more ways meet."""
        now, known = self.kafka.now + self.age, {WAP_ID: wap_id}
        stamp = lake.stamp(made_ms) or (millis(now) if now - BEGIN > FIRST_HOURS else 0)
        return new_version("staged", lake.heads["main"], known, (), files, stamp)

    def protecting(self, wap_id: str, staged: Version) -> tuple[Ref, ...]:
        """The branch that staged dead letters have from the start."""
        return (Ref(staged_ref(wap_id), staged.id),)

    def write(self, files: tuple[File, ...]) -> World:
        """Files of no snapshot; in storage only with `orphans`, and else from their commit on."""
        left = replace(self, storage=self.storage | set(files)) if self.orphans else self
        return replace(left, attempts=self.attempts + 1) if self._counts else left

    def _aged(self, files: tuple[File, ...]) -> tuple[File, ...]:
        return tuple(replace(f, written=self.age) for f in files) if self.age else files

    def leave(self, written: Written) -> World:
        """Forget files of one's own: they are left to orphan removal."""
        return self

    def discard(self, staged: Staged | None) -> World:
        """Forget a staged snapshot of one's own, if it is there."""
        if staged is None:
            return self
        # With the dead letters that were staged beside it, and that its publish names.
        gone = self.discarded | {staged.wap_id} if self.late else self.discarded
        world = replace(self, discarded=gone)
        return world._with(tuple(v for v in self.lake.versions if v.id != staged.snapshot_id))

    def commit(self, loaded: Lake, commit: Commit, made_ms: int = 0) -> World | None:
        """The world once a commit landed, or None when it is refused."""
        lake = self.lake.commit(loaded, commit, made_ms)
        if lake is None:
            return None
        adds = () if self.orphans else (f for c in commit.changes for f in c.add)
        return self._over(lake, frozenset(adds))  # type: ignore[arg-type]

    def commit_letters(self, loaded: Lake, commit: Commit, made_ms: int = 0) -> World | None:
        """The same for a commit of the dead letters' table."""
        letters = self.letters.commit(loaded, commit, made_ms)
        return None if letters is None else self._over(self.lake, letters=letters)

    def discard_letters(self, staged: Staged | None) -> World:
        """Forget staged dead letters of one's own, unless a publish of rows names them."""
        if staged is None or dead_letters.is_named(self.lake.state, staged):
            return self
        versions = tuple(v for v in self.letters.versions if v.id != staged.snapshot_id)
        refs = (ref for ref in self.letters.refs if ref.id != staged.snapshot_id)
        return self._over(self.lake, letters=Lake.of(versions, refs, self.letters.properties))

    def record(self, decisions: Iterable[LedgerRow]) -> World:
        """The world with decisions in the ledger: one append, by what its actor read."""
        wanted = {row.decision_id: row for row in decisions}
        known = {row.decision_id for row in map(ledger_row, self.ledger)}
        missing = ledger.plan_missing(wanted, known)
        rows = [json.dumps(row.as_waiting(), sort_keys=True) for row in missing]
        return replace(self, ledger=(*self.ledger, *rows))

    def recorded(self, hour: str) -> list[LedgerRow]:
        """The ledger's rows of an hour, oldest first."""
        return [row for row in map(ledger_row, self.ledger) if row.hour == hour]

    def restore(self, branch: str, id: int) -> World:
        """The world once another program set a branch to a version, with no commit of ours."""
        refs = [r for r in self.lake.refs if r.name != branch]
        lake = Lake.of(self.lake.versions, [*refs, Ref(branch, id)], self.lake.properties)
        return replace(self, lake=lake, restored=self.restored + 1)

    def _with(self, versions: tuple[Version, ...], files: frozenset[File] = frozenset()) -> World:
        return self._over(Lake.of(versions, self.lake.refs, self.lake.properties), files)

    def _over(
        self, lake: Lake, files: frozenset[File] = frozenset(), letters: Lake | None = None
    ) -> World:
        letters = letters or self.letters
        world = replace(self, lake=lake, letters=letters, storage=self.storage | files)
        return world if self.orphans else replace(world, storage=world.storage - world.unreferenced)

    def orphans_before(self, age: timedelta) -> frozenset[File]:
        """The files that orphan removal deletes: unreferenced, and older than this age."""
        files = {f.file_path: f for f in self.storage}
        listed = [Stored(f.file_path, 1, BEGIN + f.written) for f in (*files.values(), _METADATA)]
        referenced = {_METADATA.file_path, *files} - {f.file_path for f in self.unreferenced}
        orphans, *_ = plan_orphans(listed, referenced, BEGIN + age)
        return frozenset(files[orphan.path] for orphan in orphans)

    @property
    def unreferenced(self) -> frozenset[File]:
        """The files that nothing refers to."""
        if self.letters is None:
            return self.storage - self.lake.held
        named = dead_letters.named_files(self.lake.state)
        unnamed = self.storage - self.lake.held - self.letters.held
        return frozenset(f for f in unnamed if f.file_path not in named)


@cache
def ledger_row(text: str) -> LedgerRow:
    """A row as `ledger.history` gives it."""
    return LedgerRow.from_waiting(json.loads(text))


def new_world(
    partitions: int = 1,
    accounts: bool = False,
    stamped: bool = False,
    apart: bool = False,
    **values: object,
) -> World:
    """Return the world as `apply` leaves it: an empty log, three branches at one snapshot without
    rows, position 0.

    With `accounts`, the ledger and the dead letters' table too. Without `stamped` all snapshots are
    made at one moment, so that more ways to a table meet.
    """
    offsets = dict.fromkeys(range(partitions), 0)
    timeline = Timeline(hour_of(BEGIN), hour_of(BEGIN), offsets)
    at, begun = Position("t", offsets).to_json(), timeline.to_json()
    summary = {POSITION: at, TIMELINE: begun, PUBLISH_ID: "apply"}
    made_ms = millis(BEGIN) if stamped else 0
    said = {OWNER: Owner(TOPIC, TOPIC, "cluster").to_json()}
    said |= ({COMMITS: "0"} if accounts else {}) | ({APART: ""} if apart else {})
    properties = frozenset(said.items())

    def table(entries: Mapping[str, str]) -> Lake:
        first = new_version("main", None, entries, (), (), made_ms)
        names = [p + b for b in BRANCHES for p in ("", PUBLISHED)]
        return Lake.of((first,), [Ref(name, first.id) for name in (*names, PROVEN)], properties)

    letters = table({PUBLISH_ID: "apply"}) if accounts else None
    return World(Kafka(((),) * partitions, BEGIN), table(summary), letters=letters, **values)  # type: ignore[arg-type]
