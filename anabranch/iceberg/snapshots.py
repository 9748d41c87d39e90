"""Read a loaded table: branches and their state, staged rows, an hour's files, and the snapshots to
expire."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from pyiceberg.manifest import DataFile, ManifestEntryStatus
from pyiceberg.table.refs import SnapshotRef, SnapshotRefType
from pyiceberg.table.snapshots import Snapshot, ancestors_of

from anabranch.common.errors import ConfigurationError, Terminal
from anabranch.common.remote_errors import lake_errors
from anabranch.iceberg import side_files, state_properties
from anabranch.iceberg.manifests import hour_of_file, list_manifests, read_entries
from anabranch.iceberg.side_files import SideFileGone
from anabranch.iceberg.state_properties import StateGone

if TYPE_CHECKING:
    from pyiceberg.table import Table
    from pyiceberg.table.snapshots import Snapshot

    from anabranch.iceberg.commits import Commit

BRANCHES = ("main", "speed", "batch")
STAGING = "staging"
"""The branch beside which attempts are staged. It has no readers and no publishes: if a catalog's
client repeats a stage that had landed, Iceberg treats it as a rollback and moves this branch, not
`main`."""

PREFIX = "anabranch."
PUBLISH_ID = "anabranch.publish"
WAP_ID = "wap.id"


@dataclass(frozen=True)
class Staged:
    """Rows in storage that no reader sees: one snapshot with `wap_id`, and the files that it
    added."""

    wap_id: str
    snapshot_id: int
    parent_id: int | None
    files: tuple[DataFile, ...]

    @property
    def rows(self) -> int:
        return sum(f.record_count for f in self.files)


def heads(table: Table) -> dict[str, int]:
    """The three branches' heads. Raises Terminal when one is missing."""
    refs = table.metadata.refs
    if missing := [b for b in BRANCHES if b not in refs]:
        raise Terminal(
            f"table {'.'.join(table.name())}: expected branch {missing[0]}, found none; run `anabranch apply`"
        )
    return {b: refs[b].snapshot_id for b in BRANCHES}


def head(table: Table, branch: str) -> Snapshot:
    snapshot = table.metadata.snapshot_by_id(heads(table)[branch])
    if snapshot is None:
        raise Terminal(
            f"table {'.'.join(table.name())}: expected the snapshot that branch {branch} points to, found none; "
            "another writer has damaged its metadata: roll back to an earlier metadata file of the table"
        )
    return snapshot


PUBLISHED = "published-"
"""With a branch's name: the tag of its newest publish, which moves with each. It keeps the publish from expiring where
another program's snapshots came after it, and `expire_snapshots` kept the newest of those alone."""

READING = "reading-"
"""The prefix of the tags for long reads (`anabranch.iceberg.reading_tags`)."""

STAGED = "staged-"
"""With an attempt's id: the branch whose head is its staged snapshot, so that other programs do not
expire it."""

UNNAMED = (PUBLISHED, READING, STAGED)
"""Prefixes of refs that are not for readers."""


def last_publish(table: Table, branch: str) -> Snapshot | None:
    """The newest publish of a branch: Iceberg's own procedures leave a head that is not a publish.
    If the snapshots between are expired, it is the tagged one; `foreign.check_foreign_commits`
    compares.
    """
    newest = ancestors_to_last_publish(table, branch)[-1]
    if is_publish(newest):
        return newest
    tag = table.metadata.refs.get(PUBLISHED + branch)
    return table.metadata.snapshot_by_id(tag.snapshot_id) if tag is not None else None


def ancestors_to_last_publish(table: Table, branch: str) -> list[Snapshot]:
    """From a branch's head to its newest publish, both included."""
    way = [head(table, branch)]
    while not is_publish(way[-1]) and (parent := way[-1].parent_snapshot_id) is not None:
        snapshot = table.metadata.snapshot_by_id(parent)
        if snapshot is None:
            break
        way.append(snapshot)
    return way


def is_publish(snapshot: Snapshot) -> bool:
    """Whether a snapshot was made by us. Pure."""
    return snapshot.summary is not None and snapshot.summary.get(PUBLISH_ID) is not None


def count(snapshot: Snapshot, what: str) -> int:
    """A count of a snapshot's summary; 0 where it has none. Pure."""
    return int((snapshot.summary[what] if snapshot.summary is not None else None) or 0)


def total(snapshot: Snapshot | None, what: str) -> int:
    """The total records, or data files, of a snapshot's summary. Pure."""
    return count(snapshot, f"total-{what}") if snapshot is not None else 0


def find_snapshot(table: Table, as_of: str) -> int:
    """The id of the snapshot that `as_of` names: a tag, a branch, an id, or a time (ISO 8601;
    without an offset UTC), which selects the snapshot of `main` at that time. Raises
    ConfigurationError for none, and for a time whose snapshot is no longer known."""
    if (ref := table.metadata.refs.get(as_of)) is not None:
        return ref.snapshot_id
    if as_of.isdecimal() and table.metadata.snapshot_by_id(int(as_of)) is not None:
        return int(as_of)
    if (when := _moment(as_of)) is not None:
        return _main_at(table, when)
    known = ", ".join(sorted(n for n in table.metadata.refs if n != STAGING and not n.startswith(UNNAMED))) or "none"
    raise ConfigurationError(
        f"table {'.'.join(table.name())}: expected a tag, a branch, a snapshot's id or a time, found {as_of!r} (known: "
        f"{known}; tags expire)"
    )


def is_tag(refs: Mapping[str, SnapshotRef], name: str) -> bool:
    """Whether a ref is a tag for readers, and not one that moves with each publish. Pure."""
    return refs[name].snapshot_ref_type == SnapshotRefType.TAG and not name.startswith(UNNAMED)


def _moment(text: str) -> datetime | None:
    try:
        when = datetime.fromisoformat(text)
    except ValueError:
        return None
    # Digits alone are the id of a missing snapshot, not a date.
    return None if text.isdecimal() else when.replace(tzinfo=when.tzinfo or UTC)


def _main_at(table: Table, when: datetime) -> int:
    """The snapshot of `main` at a moment: the newest of the gapless snapshots that is not later.
    Tagged snapshots do not count, since the time of the publish after them is not recorded.
    """
    name, metadata = ".".join(table.name()), table.metadata
    ref = metadata.refs.get("main")
    oldest = None
    for snapshot in ancestors_of(metadata.snapshot_by_id(ref.snapshot_id), metadata) if ref is not None else ():
        if made_at(snapshot) <= when:
            return snapshot.snapshot_id
        oldest = snapshot
    since = f"its publishes only since {made_at(oldest).isoformat()}" if oldest is not None else "none of its publishes"
    made = {n: made_at(s) for n, r in metadata.refs.items() if (s := metadata.snapshot_by_id(r.snapshot_id))}
    tags = {n: made[n] for n in made if is_tag(metadata.refs, n)}
    before = max((n for n in tags if tags[n] <= when), key=tags.__getitem__, default=None)
    after = min((n for n in tags if tags[n] > when), key=tags.__getitem__, default=None)
    near = [f"{n} ({tags[n].isoformat()})" for n in (before, after) if n is not None]
    remedy = f"name a tag beside it: {', '.join(near)}" if near else "no tag of that time is left"
    raise ConfigurationError(f"table {name}: expected main's snapshot at {when.isoformat()}, found {since}; {remedy}")


def made_at(snapshot: Snapshot) -> datetime:
    """The timestamp of a snapshot."""
    return datetime.fromtimestamp(snapshot.timestamp_ms / 1000, UTC)


def branch_properties(table: Table, branch: str) -> dict[str, str]:
    """Our properties of a branch (`anabranch.*`), without the id of its last publish."""
    snapshot = last_publish(table, branch)
    return _whole(table, snapshot) if snapshot is not None else {}


def snapshot_properties(table: Table, snapshot_id: int) -> dict[str, str]:
    """The properties of a branch when the snapshot was its head, as far back as its snapshots are
    kept."""
    for snapshot in ancestors_of(table.metadata.snapshot_by_id(snapshot_id), table.metadata):
        if is_publish(snapshot):
            return _whole(table, snapshot)
    return {}


def _whole(table: Table, snapshot: Snapshot) -> dict[str, str]:
    try:
        return state_properties.load_all(table, _own_properties(snapshot))
    except (StateGone, SideFileGone) as error:
        raise Terminal(f"{error}; {_what_is_left(table, error.remedy)}") from error


def _what_is_left(table: Table, remedy: str) -> str:
    """The parts of a table's state that can still be read, and the steps to recover the rest, in
    words. Raises Transient."""

    def is_read(snapshot: Snapshot | None) -> bool:
        try:
            if snapshot is not None:
                state_properties.load_all(table, _own_properties(snapshot))
        except (StateGone, SideFileGone):
            return False
        return snapshot is not None

    lost = [b for b in BRANCHES if not is_read(last_publish(table, b))]
    if not lost:
        return "the branches themselves are complete: name a newer snapshot"
    others = " and ".join(b for b in lost if b != "main")
    steps = [f"drop branch {others}", "run `anabranch apply STREAM`, which recreates it from main"] if others else []
    if "main" in lost:
        of_main = (s for s in main_snapshots(table) if is_publish(s) and is_read(s))
        newest = max(of_main, key=made_at, default=None)
        if newest is None:
            return (
                f"lost are {', '.join(lost)}, and every snapshot of main: {remedy}; without it the "
                f"rows stay readable, and the stream has to start again in another table: {_DOCUMENTED}"
            )
        set_back = f"roll main back to snapshot {newest.snapshot_id} of "
        f"{made_at(newest).isoformat()}, which is complete"
        steps = [set_back, *(steps or ["run `anabranch merge STREAM`"])]
    return f"lost are {', '.join(lost)}: {remedy}, or stop the jobs, then {', then '.join(steps)}: {_DOCUMENTED}"


_DOCUMENTED = 'docs/failures.md, "The state of a branch is gone"'


def _own_properties(snapshot: Snapshot) -> dict[str, str]:
    """Our properties in a snapshot's summary, without the id of its publish."""
    properties = snapshot.summary.additional_properties if snapshot.summary is not None else {}
    return {k: v for k, v in properties.items() if k.startswith(PREFIX) and k != PUBLISH_ID}


def published_since(table: Table, branch: str, key: str) -> datetime:
    """When the branch's value of `key` was first published, as far back as its snapshots are
    kept."""
    value = branch_properties(table, branch).get(key)
    since = snapshot = ancestors_to_last_publish(table, branch)[-1]
    while snapshot.parent_snapshot_id is not None:
        parent = table.metadata.snapshot_by_id(snapshot.parent_snapshot_id)
        if parent is None:
            break
        snapshot = parent
        try:
            before = state_properties.look_up(table, _own_properties(snapshot), key)
        except (StateGone, SideFileGone):
            break
        if before is not None:
            if before != value:
                break
            since = snapshot
    return made_at(since)


def staged_snapshot(table: Table, wap_id: str) -> Snapshot | None:
    """The snapshot of an attempt, or None when it is gone. Raises Terminal when two carry the same id. Pure."""
    staged = [s for s in table.snapshots() if s.summary is not None and s.summary.get(WAP_ID) == wap_id]
    if len(staged) > 1:
        raise Terminal(
            f"table {'.'.join(table.name())}: expected one staged snapshot {wap_id}, found {len(staged)}; nothing is "
            "published: restart the job, which stages again"
        )
    return staged[0] if staged else None


def staged_ref(wap_id: str) -> str:
    """The branch of a staged snapshot. Pure."""
    return STAGED + wap_id


def staged_refs(table: Table, expired: Collection[int]) -> tuple[str, ...]:
    """The branches of staged snapshots that expire. Pure."""
    refs = table.metadata.refs.items()
    return tuple(name for name, ref in refs if name.startswith(STAGED) and ref.snapshot_id in expired)


def has_landed(table: Table, commit_id: str) -> bool:
    """Whether a snapshot of the table carries the commit's id. Pure."""
    return any(s.summary is not None and s.summary.get(PUBLISH_ID) == commit_id for s in table.snapshots())


def main_snapshots(table: Table) -> list[Snapshot]:
    """The snapshots of `main` in the table: the ancestors of its head, and tagged ones."""
    of_main = {s.snapshot_id: s for s in ancestors_of(head(table, "main"), table.metadata)}
    for name, ref in table.metadata.refs.items():
        tagged = table.metadata.snapshot_by_id(ref.snapshot_id)
        if name.startswith("main-") and ref.snapshot_ref_type == SnapshotRefType.TAG and tagged is not None:
            of_main[tagged.snapshot_id] = tagged
    return list(of_main.values())


def snapshots_by_commit(table: Table) -> dict[str, int]:
    """By a commit's id, the snapshot that it made on `main`, else on another branch; without those expired. Pure."""
    of_main = ancestors_of(head(table, "main"), table.metadata)
    # Those of main come last, and so they count.
    return {
        id: s.snapshot_id
        for s in (*table.snapshots(), *of_main)
        if s.summary is not None and (id := s.summary.get(PUBLISH_ID)) is not None
    }


def reachable(table: Table, snapshots: Iterable[Snapshot]) -> Iterator[str]:
    """The files of snapshots, each before the files that it refers to: manifest lists, side files,
    manifests, live data files. Raises OSError, ValueError when one cannot be read."""
    seen: set[str] = set()
    for snapshot in snapshots:
        yield snapshot.manifest_list
        if (name := state_properties.side_file_of(_own_properties(snapshot))) is not None:
            yield side_files.path_of(table, name)
        for manifest in snapshot.manifests(table.io):
            if manifest.manifest_path in seen:
                continue
            seen.add(manifest.manifest_path)
            yield manifest.manifest_path
            yield from (e.data_file.file_path for e in manifest.fetch_manifest_entry(table.io))


def carried(table: Table, branch: str, properties: Mapping[str, str], commit_id: str) -> dict[str, str]:
    """All properties of a commit's snapshot of a branch: those of the branch, the commit's own, and
    its id."""
    return branch_properties(table, branch) | dict(properties) | {PUBLISH_ID: commit_id}


def summary_of(table: Table, branch: str, properties: Mapping[str, str]) -> tuple[dict[str, str], dict[str, str]]:
    """The part of the `carried` properties in the summary of a branch's next snapshot, and the
    table properties with the rest. Raises Terminal, Transient."""
    return state_properties.plan_summary(properties, branch_properties(table, branch))


def is_unguarded(table: Table) -> bool:
    """Whether other programs' maintenance may destroy a branch's state: it is in a side file, or no tag keeps the
    newest publish, as in versions before both. Pure."""
    published = (s for b in BRANCHES if (s := last_publish(table, b)) is not None)
    has_side_file = any(state_properties.side_file_of(_own_properties(s)) is not None for s in published)
    return has_side_file or any(PUBLISHED + b not in table.metadata.refs for b in BRANCHES)


def unused_properties(
    table: Table, commit: Commit, needed: Mapping[str, str], summaries: Iterable[Mapping[str, str]]
) -> tuple[str, ...]:
    """The table properties of the state that no snapshot refers to once the commit has landed, whose snapshots have
    `summaries` and come with the properties `needed`. None for a commit that does not require all branches' heads:
    another publish, of a snapshot that refers to one of them, may land before it. Pure."""
    if not (commit.changes and commit.heads.keys() >= set(BRANCHES)):
        return ()
    expired = set(commit.expire)
    remembered = (_own_properties(s) for s in table.snapshots() if s.snapshot_id not in expired)
    return state_properties.plan_unused(table.metadata.properties, needed, (*remembered, *summaries))


def find_staged(table: Table, wap_id: str) -> Staged | None:
    """The staged rows of an attempt, or None when they are gone. Raises Terminal when two carry the same id."""
    snapshot = staged_snapshot(table, wap_id)
    if snapshot is None:
        return None
    with lake_errors(f"read the manifests of what is staged in {'.'.join(table.name())}"):
        files = tuple(
            entry.data_file
            for manifest in snapshot.manifests(table.io)
            if manifest.added_snapshot_id == snapshot.snapshot_id
            for entry in manifest.fetch_manifest_entry(table.io)
            if entry.status == ManifestEntryStatus.ADDED
        )
    return Staged(wap_id, snapshot.snapshot_id, snapshot.parent_snapshot_id, files)


def oldest_timestamps(table: Table, files: Iterable[DataFile], column: str) -> list[int]:
    """The least value of a timestamp column in each file with bounds of it, in milliseconds.
    Pure."""
    id = table.schema().find_field(column).field_id
    bounds = [(file.lower_bounds or {}).get(id) for file in files]
    return [int.from_bytes(least, "little", signed=True) // 1000 for least in bounds if least is not None]


def files_of(table: Table, branch: str, hour: str) -> tuple[DataFile, ...]:
    """The data files of one ingest hour on one branch. Opens only the manifests that may contain
    the hour."""
    return tuple(files_by_hour(table, branch, (hour,)).get(hour, {}).values())


def files_by_hour(
    table: Table, branch: str, hours: Collection[str] | None = None
) -> dict[str, dict[str, DataFile]]:  # fmt: skip
    """The data files of a branch, all or those of `hours`: hour -> path -> file."""
    return files_at(table, head(table, branch), hours)


def files_at(
    table: Table, snapshot: Snapshot, hours: Collection[str] | None = None
) -> dict[str, dict[str, DataFile]]:  # fmt: skip
    """The same of a snapshot."""
    files: dict[str, dict[str, DataFile]] = {}
    with lake_errors(f"read the manifests of {'.'.join(table.name())}"):
        listed, _ = list_manifests(table, snapshot)
        wanted = [m.manifest for m in listed if hours is None or any(m.may_hold(h) for h in hours)]
        for entries in read_entries(table.io, wanted):
            for entry in entries:
                hour = hour_of_file(table, entry.data_file)
                if hours is None or hour in hours:
                    files.setdefault(hour, {})[entry.data_file.file_path] = entry.data_file
    return files


@dataclass(frozen=True)
class HourContent:
    """The number of files and rows of an hour on a branch."""

    files: int
    rows: int


def hours_apart(table: Table, one: str, other: str) -> set[str]:
    """The hours whose files may differ between two branches: those of manifests that only one of
    them has."""
    with lake_errors(f"read the manifests of {'.'.join(table.name())}"):
        here, there = (
            {m.manifest.manifest_path: m for m in list_manifests(table, head(table, b))[0]} for b in (one, other)
        )
        both = here.keys() & there.keys()
        alone = [m for path, m in (here | there).items() if path not in both]
        hours = {m.hour for m in alone if m.hour is not None}
        for entries in read_entries(table.io, [m.manifest for m in alone if m.hour is None]):
            hours |= {hour_of_file(table, e.data_file) for e in entries}
    return hours


def content_by_hour(table: Table, branch: str, hours: Collection[str] | None = None) -> dict[str, HourContent]:
    """The content of each hour on a branch, or of `hours`. Opens only manifests of several hours,
    which are old ones."""
    counted: dict[str, list[tuple[int, int]]] = {}
    with lake_errors(f"read the manifests of {'.'.join(table.name())}"):
        listed, _ = list_manifests(table, head(table, branch))
        wanted = [m for m in listed if hours is None or any(m.may_hold(h) for h in hours)]
        for manifest in wanted:
            if manifest.hour is not None:
                counted.setdefault(manifest.hour, []).append((manifest.files, manifest.rows))
        for entries in read_entries(table.io, [m.manifest for m in wanted if m.hour is None]):
            for entry in entries:
                hour = hour_of_file(table, entry.data_file)
                counted.setdefault(hour, []).append((1, entry.data_file.record_count))
    return {
        h: HourContent(sum(files for files, _ in counts), sum(rows for _, rows in counts))
        for h, counts in sorted(counted.items())
        if hours is None or h in hours
    }


def plan_expiry(
    table: Table, publishing: str | None, now: datetime, keep: int = 100, *, waiting: Collection[str] = ()
) -> tuple[int, ...]:
    """The snapshots that the next commit removes: staged ones that are published or abandoned, and
    all but the newest. A snapshot staged under an id of `waiting` is never abandoned: a publish
    refers to it. Heads, their ancestors down to the newest publish, tags, and the parents of
    waiting staged snapshots stay. Files are never deleted here.
    """
    snapshots = table.snapshots()
    published = {s.summary.get(PUBLISH_ID) for s in snapshots if s.summary is not None} | {publishing}
    kept = {ref.snapshot_id for name, ref in table.metadata.refs.items() if not name.startswith(STAGED)}
    kept |= {s.snapshot_id for b in BRANCHES for s in ancestors_to_last_publish(table, b)}
    day_ago = now.timestamp() * 1000 - 86_400_000
    removed, line = [], []
    for s in snapshots:
        wap_id = s.summary.get(WAP_ID) if s.summary is not None else None
        if wap_id is None:
            line.append(s)
        elif wap_id in published or (s.timestamp_ms < day_ago and wap_id not in waiting):
            removed.append(s.snapshot_id)
        elif s.parent_snapshot_id is not None:
            kept.add(s.parent_snapshot_id)
    line.sort(key=lambda s: s.sequence_number or 0, reverse=True)
    removed += [s.snapshot_id for s in line[keep:]]
    return tuple(id for id in removed if id not in kept)


def plan_plain_expiry(table: Table, keep: int = 200) -> tuple[int, ...]:
    """The same for a table without our branches and stages: all but the newest snapshots and those
    with a ref."""
    line = sorted(table.snapshots(), key=lambda s: s.sequence_number or 0, reverse=True)
    kept = {ref.snapshot_id for ref in table.metadata.refs.values()}
    return tuple(s.snapshot_id for s in line[keep:] if s.snapshot_id not in kept)


def expired_tags(table: Table, now: datetime) -> tuple[str, ...]:
    """Tags whose age has ended."""
    ended = []
    for name, ref in table.metadata.refs.items():
        if ref.snapshot_ref_type != SnapshotRefType.TAG or ref.max_ref_age_ms is None:
            continue
        snapshot = table.metadata.snapshot_by_id(ref.snapshot_id)
        if snapshot is None or snapshot.timestamp_ms + ref.max_ref_age_ms < now.timestamp() * 1000:
            ended.append(name)
    return tuple(ended)
