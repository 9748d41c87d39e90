"""The world of the model: a Kafka log, a table, and storage, each a value; a change gives a new one.

The table does what Iceberg promises and no more: a commit lands whole when the heads that it names are still the
heads, and is refused otherwise. It is read by the product's own `read_state`, from PyIceberg's own objects.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from functools import cached_property
from itertools import count

from pyiceberg.partitioning import UNPARTITIONED_PARTITION_SPEC
from pyiceberg.schema import Schema
from pyiceberg.table import Table
from pyiceberg.table.metadata import new_table_metadata
from pyiceberg.table.refs import SnapshotRef, SnapshotRefType
from pyiceberg.table.snapshots import Operation, Snapshot, Summary
from pyiceberg.table.sorting import UNSORTED_SORT_ORDER

from anabranch import turns
from anabranch.commits import Commit
from anabranch.hours import Timeline, hour_of
from anabranch.position import Position, Ranges, Stamped, Topic
from anabranch.snapshots import BRANCHES, PUBLISH_ID, WAP_ID, Staged, carried
from anabranch.state import DECISIONS, POSITION, TIMELINE, State, read_state

BEGIN = datetime(2026, 11, 21, 0, 30, tzinfo=UTC)
MINUTE = timedelta(minutes=1)
TOPIC = "events"
Offset = tuple[int, int]
Properties = frozenset[tuple[str, str]]


def millis(when: datetime) -> int:
    return int(when.timestamp() * 1000)


class Violation(AssertionError):
    """A promise of the table that a step broke."""


@dataclass(frozen=True)
class Kafka:
    """The topic's log by partition (each record its timestamp), and a clock that reads it."""

    log: tuple[tuple[int, ...], ...]
    now: datetime

    def append(self, partition: int, minutes: int) -> Kafka:
        """One record, stamped `minutes` from now; to a partition that is not there yet, with that partition."""
        log = [*self.log, *(() for _ in range(len(self.log), partition + 1))]
        log[partition] = (*log[partition], millis(self.now + minutes * MINUTE))
        return replace(self, log=tuple(log))

    @property
    def offsets(self) -> list[Offset]:
        return [(p, o) for p, stamps in enumerate(self.log) for o in range(len(stamps))]

    # What the product asks of its Kafka adapter.

    def describe(self, topic: str, expected: Position | None = None) -> Topic | None:
        return Topic(topic, "t", tuple(range(len(self.log))))

    def stable_ends(self, topic: Topic, reached: dict[int, int] | None = None) -> dict[int, int]:
        return {p: len(stamps) for p, stamps in enumerate(self.log)}

    def first_from(self, topic: Topic, when: datetime) -> dict[int, Stamped | None]:
        return {
            p: next((Stamped(o, stamp) for o, stamp in enumerate(stamps) if stamp >= millis(when)), None)
            for p, stamps in enumerate(self.log)
        }

    def stamps_from(
        self, topic: Topic, starts: Mapping[int, int], ends: Mapping[int, int], count: int
    ) -> dict[int, tuple[Stamped, ...]]:
        return {
            p: tuple(Stamped(o, ts) for o, ts in enumerate(self.log[p]) if start <= o < ends[p])[:count]
            for p, start in starts.items()
        }


@dataclass(frozen=True)
class File:
    """A data file: an hour's rows, by partition one range of offsets. Stands where PyIceberg's DataFile would.

    `seen` are the rows of other hours that its own were compared with for duplicates.
    """

    file_path: str
    hour: str
    ranges: tuple[tuple[int, tuple[int, int]], ...]
    seen: frozenset[Offset] = frozenset()

    @property
    def rows(self) -> list[Offset]:
        return [(p, o) for p, (s, e) in self.ranges for o in range(s, e)]

    @property
    def record_count(self) -> int:
        return len(self.rows)

    def __repr__(self) -> str:
        return f"{self.file_path}{dict(self.ranges)}"


def new_files(wap_id: str, by_hour: Mapping[str, Ranges]) -> tuple[File, ...]:
    """An attempt's files, one for each hour."""
    return tuple(File(f"{wap_id}/{h[-3:]}", h, tuple(sorted(r.items()))) for h, r in sorted(by_hour.items()))


def rolled_up(path: str, files: tuple[File, ...]) -> File:
    """One file that holds the rows of files of one hour."""
    pieces = tuple(sorted(piece for f in files for piece in f.ranges))
    return File(path, files[0].hour, pieces)


@dataclass(frozen=True)
class Version:
    """A snapshot and the files that it holds, each as often as it was added."""

    id: int
    parent: int | None
    said: tuple[tuple[str, str], ...]
    files: tuple[File, ...]
    added: tuple[File, ...] = ()


@dataclass(frozen=True)
class Ref:
    name: str
    id: int
    max_age_ms: int | None = None


_EMPTY = new_table_metadata(Schema(), UNPARTITIONED_PARTITION_SPEC, UNSORTED_SORT_ORDER, "memory:", {})
_IDS: dict[tuple[object, ...], int] = {}


def new_version(
    branch: str, parent: int | None, said: Mapping[str, str], files: tuple[File, ...], added: tuple[File, ...]
) -> Version:
    """The same snapshot over the same parent has the same id, so that two ways to it meet; no id comes back later."""
    content = (parent, tuple(sorted(said.items())), tuple(sorted(files, key=lambda f: f.file_path)), added)
    return Version(_IDS.setdefault((branch, *content), len(_IDS) + 1), *content)


class Lake:
    """One version of the table's metadata: snapshots in the order of their sequence numbers, refs, and properties.

    Made by `Lake.of` only: equal versions are one object, so that what is read from them is read once.
    """

    _known: dict[tuple[tuple[Version, ...], frozenset[Ref], Properties], Lake] = {}  # noqa: RUF012

    def __init__(self, versions: tuple[Version, ...], refs: frozenset[Ref], properties: Properties) -> None:
        self.versions, self.refs, self.properties = versions, refs, properties
        self._by_id = {v.id: v for v in versions}
        self.heads = {r.name: r.id for r in refs}

    @classmethod
    def of(cls, versions: tuple[Version, ...], refs: Iterable[Ref], properties: Properties = frozenset()) -> Lake:
        key = (versions, frozenset(refs), properties)
        if key not in cls._known:
            cls._known[key] = Lake(*key)
        return cls._known[key]

    @classmethod
    def forget(cls) -> None:
        cls._known.clear()

    @cached_property
    def table(self) -> Table:
        snapshots = [
            Snapshot(
                snapshot_id=v.id,
                parent_snapshot_id=v.parent,
                sequence_number=number,
                timestamp_ms=millis(BEGIN),
                manifest_list="",
                summary=Summary(Operation.APPEND, **dict(v.said)),
            )
            for number, v in enumerate(self.versions, 1)
        ]
        refs = {
            r.name: SnapshotRef(
                snapshot_id=r.id,
                snapshot_ref_type=SnapshotRefType.BRANCH if r.name in BRANCHES else SnapshotRefType.TAG,
                max_ref_age_ms=r.max_age_ms,
            )
            for r in self.refs
        }
        metadata = _EMPTY.model_copy(update={"snapshots": snapshots, "refs": refs, "properties": dict(self.properties)})
        return Table(("model",), metadata, "", None, None)  # type: ignore[arg-type]

    @cached_property
    def state(self) -> State:
        return read_state(self.table)

    def way(self, id: int | None) -> list[Version]:
        """A version and those that it was made from, newest first."""
        found = []
        while id in self._by_id:
            found.append(self._by_id[id])
            id = found[-1].parent
        return found

    @cached_property
    def line(self) -> turns.Line:
        """Who has the right of way, and who waits for it."""
        return turns.read_line(self.table.properties)

    def files(self, branch: str) -> tuple[File, ...]:
        return self._by_id[self.heads[branch]].files

    def rows(self, branch: str) -> list[Offset]:
        return sorted(row for f in self.files(branch) for row in f.rows)

    def files_of(self, branch: str, hour: str) -> tuple[File, ...]:
        return tuple(f for f in self.files(branch) if f.hour == hour)

    def files_by_hour(self, branch: str) -> dict[str, dict[str, File]]:
        found: dict[str, dict[str, File]] = {}
        for f in self.files(branch):
            found.setdefault(f.hour, {})[f.file_path] = f
        return found

    def find_staged(self, wap_id: str) -> Staged | None:
        for v in self.versions:
            if dict(v.said).get(WAP_ID) == wap_id:
                return Staged(wap_id, v.id, v.parent, v.added)  # type: ignore[arg-type]
        return None

    @cached_property
    def ids(self) -> frozenset[str]:
        """The ids of attempts that the version knows of: those of its snapshots and of the files that they hold."""
        said = {id for v in self.versions for key, id in v.said if key in (PUBLISH_ID, WAP_ID)}
        return frozenset(said | {f.file_path.split("/")[0] for f in self.held})

    @cached_property
    def ids_of_publishes(self) -> frozenset[str]:
        return frozenset(id for v in self.versions for key, id in v.said if key == PUBLISH_ID)

    def new_id(self, name: str) -> str:
        """An id that is not in use. Not counted on for ever, so that two ways to the same table meet."""
        return next(id for i in count(1) if (id := f"{name}-{i}") not in self.ids)

    @cached_property
    def held(self) -> frozenset[File]:
        """The files that any snapshot holds."""
        return frozenset(f for v in self.versions for f in (*v.files, *v.added))

    def commit(self, loaded: Lake, commit: Commit) -> Lake | None:
        """What becomes of this version by a commit that was prepared over `loaded`; None when it is refused."""
        if any(self.heads.get(ref) != id for ref, id in commit.heads.items()):
            return None
        versions = [v for v in self.versions if v.id not in commit.expire]
        refs = {r.name: r for r in self.refs if r.name not in commit.drop_tags}
        for change in commit.changes:
            head = loaded._by_id[loaded.heads[change.branch]]
            said = carried(loaded.table, change.branch, change.properties, commit.id)
            said.pop(DECISIONS, None)  # they wait for the ledger, which the model leaves out
            gone = {*change.clear, *change.copy}
            kept = tuple(f for f in head.files if f not in change.remove and f.hour not in gone)
            copied = tuple(f for h, branch in change.copy.items() for f in loaded.files_of(branch, h))
            made = new_version(change.branch, head.id, said, (*kept, *copied, *change.add), change.add)
            versions.append(made)
            refs[change.branch] = Ref(change.branch, made.id)
        refs |= {t.name: Ref(t.name, t.snapshot_id, t.max_age_ms) for t in commit.tags}
        properties = {**dict(self.properties), **commit.set_properties}
        left = frozenset((k, v) for k, v in properties.items() if k not in commit.remove_properties)
        return Lake.of(tuple(versions), refs.values(), left)


@dataclass(frozen=True, eq=False)
class Request:
    """A commit that its publisher asked for over the version that it had loaded. What becomes of it may come late."""

    loaded: Lake
    commit: Commit

    @cached_property
    def _key(self) -> tuple[object, ...]:
        said = self.commit
        changes = tuple((c.branch, c.add, c.remove, tuple(sorted(c.properties.items()))) for c in said.changes)
        return (id(self.loaded), said.id, changes, tuple(sorted(said.heads.items())), said.tags, said.expire)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Request) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)

    def __repr__(self) -> str:
        return self.commit.id


@dataclass(frozen=True)
class World:
    """All that is not in an actor's memory. `bad` hours fail the quality gate until they are mended.

    With `late`, a lost answer says nothing of the request: it is `under_way`, and lands at any later step, or never.

    So often may somebody ask for a turn as `turns` says; `abandoned` are those whose asker was killed.

    Only with `orphans` does storage keep the files that no snapshot holds, and is no id ever used again: that is what
    maintenance lives on, and it makes many more worlds out of few.
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
    # How often maintenance came, each time so late that whatever was written before may be an orphan.
    ages: int = 0

    def new_id(self, name: str) -> str:
        """An id for an attempt's staged files."""
        return f"{name}-{self.attempts}" if self.orphans or self.late else self.lake.new_id(name)

    def stage(self, wap_id: str, files: tuple[File, ...]) -> World:
        """Files, and one snapshot that no branch points to; as Spark makes it, over `main`."""
        staged = new_version("staged", self.lake.heads["main"], {WAP_ID: wap_id}, (), files)
        world = replace(self, attempts=self.attempts + 1) if self.orphans or self.late else self
        return world._with((*self.lake.versions, staged), frozenset(files))

    def write(self, file: File) -> World:
        """A file that no snapshot knows of."""
        left = replace(self, storage=self.storage | {file})
        return replace(left, attempts=self.attempts + 1) if self.orphans else left

    def discard(self, staged: Staged | None) -> World:
        """Forget a staged snapshot of one's own, if it is there."""
        if staged is None:
            return self
        # With the dead letters that were staged beside it, and that its publish names.
        gone = self.discarded | {staged.wap_id} if self.late else self.discarded
        world = replace(self, discarded=gone)
        return world._with(tuple(v for v in self.lake.versions if v.id != staged.snapshot_id))

    def commit(self, loaded: Lake, commit: Commit) -> World | None:
        """The world once a commit landed, or None when it is refused."""
        lake = self.lake.commit(loaded, commit)
        return None if lake is None else self._over(lake)

    def restore(self, branch: str, id: int) -> World:
        """The world once somebody set a branch to a version, with no commit of ours."""
        refs = [r for r in self.lake.refs if r.name != branch]
        lake = Lake.of(self.lake.versions, [*refs, Ref(branch, id)], self.lake.properties)
        return replace(self, lake=lake, restored=self.restored + 1)

    def _with(self, versions: tuple[Version, ...], files: frozenset[File] = frozenset()) -> World:
        return self._over(Lake.of(versions, self.lake.refs, self.lake.properties), files)

    def _over(self, lake: Lake, files: frozenset[File] = frozenset()) -> World:
        storage = self.storage | files
        return replace(self, lake=lake, storage=storage if self.orphans else storage & lake.held)


def new_world(partitions: int = 1, **values: object) -> World:
    """As `apply` leaves it: an empty log, three branches at one snapshot without rows, position 0."""
    offsets = dict.fromkeys(range(partitions), 0)
    timeline = Timeline(hour_of(BEGIN), hour_of(BEGIN), offsets)
    said = {POSITION: Position("t", offsets).to_json(), TIMELINE: timeline.to_json(), PUBLISH_ID: "apply"}
    first = new_version("main", None, said, (), ())
    kafka = Kafka(((),) * partitions, BEGIN)
    return World(kafka, Lake.of((first,), [Ref(b, first.id) for b in BRANCHES]), **values)  # type: ignore[arg-type]
