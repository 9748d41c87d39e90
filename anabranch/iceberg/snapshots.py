"""Reads of a loaded table's metadata: branches and their state, publishes, and staged rows."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime

from pyiceberg.manifest import DataFile, ManifestEntryStatus
from pyiceberg.table import Table
from pyiceberg.table.refs import SnapshotRef, SnapshotRefType
from pyiceberg.table.snapshots import Snapshot, ancestors_of

from anabranch.common.errors import Terminal
from anabranch.common.remote_errors import lake_errors
from anabranch.iceberg import state_properties
from anabranch.iceberg.commits import Commit
from anabranch.iceberg.state_properties import StateGone

BRANCHES = ("main", "speed", "batch")
STAGING = "staging"
"""The branch whose head is the parent of staged snapshots. It has no readers and no publishes. If a
catalog's client repeats a stage that had landed, Iceberg treats it as a rollback and moves this
branch instead of `main`."""

PROVEN = "proven"
"""The branch for readers of accepted hours alone: each publish of `batch` moves it to its
snapshot."""

PREFIX = "anabranch."
PUBLISH_ID = "anabranch.publish"
MERGED = "anabranch.merged"
"""A property of `main`: the publishes of `speed` and `batch` that it was merged from."""
CONTENT = "anabranch.content"
"""A property of `speed` and `batch`: the newest publish that changed the branch's rows."""
WAP_ID = "wap.id"


@dataclass(frozen=True)
class Staged:
    """Rows in storage that no reader sees: one snapshot with `wap_id`, and its added files."""

    wap_id: str
    snapshot_id: int
    parent_id: int | None
    files: tuple[DataFile, ...]

    @property
    def rows(self) -> int:
        return sum(f.record_count for f in self.files)


def heads(table: Table) -> dict[str, int]:
    """Return the snapshot ids of the three branches' heads. Raises Terminal if one is missing."""
    refs = table.metadata.refs
    if missing := [b for b in BRANCHES if b not in refs]:
        raise Terminal(
            f"table {'.'.join(table.name())}: expected branch {missing[0]}, found none; run "
            "`anabranch apply`"
        )
    return {b: refs[b].snapshot_id for b in BRANCHES}


def head(table: Table, branch: str) -> Snapshot:
    snapshot = table.metadata.snapshot_by_id(heads(table)[branch])
    if snapshot is None:
        raise Terminal(
            f"table {'.'.join(table.name())}: expected the snapshot that branch {branch} points "
            "to, found none; another writer has damaged its metadata: roll back to an earlier "
            "metadata file of the table"
        )
    return snapshot


PUBLISHED = "published-"
"""The prefix, before a branch's name, of the tag of its newest publish; each publish moves it. It
keeps the publish if another program adds snapshots and its `expire_snapshots` keeps only the newest
ones."""

READING = "reading-"
"""The prefix of the tags for long reads (`anabranch.iceberg.staging`)."""

STAGED = "staged-"
"""The prefix, before an attempt's id, of the branch of its staged snapshot, so that other programs
do not expire it."""

UNNAMED = (PUBLISHED, READING, STAGED)
"""Prefixes of refs that are not for readers."""


def last_publish(table: Table, branch: str) -> Snapshot | None:
    """Return the newest publish of a branch, whose head may be a commit of Iceberg's procedures. If
    the snapshots between are expired, it is the tagged publish; `foreign.check_foreign_commits`
    compares its rows.
    """
    newest = ancestors_to_last_publish(table, branch)[-1]
    if is_publish(newest):
        return newest
    return _tagged_publish(table, branch)


def _tagged_publish(table: Table, branch: str) -> Snapshot | None:
    return table.metadata.snapshot_by_name(PUBLISHED + branch)


def newest_publish(table: Table, branch: str) -> Snapshot | None:
    """Return the publish whose properties are the state of a branch: its last publish.

    For `main`, it is the tagged publish if another program rolled the branch back to an older one:
    a rollback removes only rows, which the next merge restores, and no decisions. If the state of
    the tagged publish is gone, it is the publish to which the branch was rolled back.
    """
    last = last_publish(table, branch)
    tagged = _tagged_publish(table, branch) if branch == "main" else None
    if (
        last is None
        or tagged is None
        or (tagged.sequence_number or 0) <= (last.sequence_number or 0)
    ):
        return last
    # Decision 52: a rollback of `main` reverts rows, but no decisions: overrides and acceptances of
    # empty hours would be lost with it.
    return tagged if _is_readable(table, tagged) else last


def ancestors_to_last_publish(table: Table, branch: str) -> list[Snapshot]:
    """Return the snapshots from a branch's head to its newest publish, both included. They end
    earlier if an ancestor is expired. Pure."""
    line = [head(table, branch)]
    while not is_publish(line[-1]) and (parent := line[-1].parent_snapshot_id) is not None:
        snapshot = table.metadata.snapshot_by_id(parent)
        if snapshot is None:
            break
        line.append(snapshot)
    return line


def is_publish(snapshot: Snapshot) -> bool:
    """Return whether a snapshot is a publish: it has a commit's id. Pure."""
    return snapshot.summary is not None and snapshot.summary.get(PUBLISH_ID) is not None


def count(snapshot: Snapshot, what: str) -> int:
    """Return a count of a snapshot's summary; 0 if it has none. Pure."""
    return int((snapshot.summary[what] if snapshot.summary is not None else None) or 0)


def total(snapshot: Snapshot | None, what: str) -> int:
    """Return the total `records` or `data-files` in a snapshot's summary. Pure."""
    return count(snapshot, f"total-{what}") if snapshot is not None else 0


def is_tag(refs: Mapping[str, SnapshotRef], name: str) -> bool:
    """Return whether a ref is a tag for readers, not one of `UNNAMED`. Pure."""
    return refs[name].snapshot_ref_type == SnapshotRefType.TAG and not name.startswith(UNNAMED)


def made_at(snapshot: Snapshot) -> datetime:
    """Return the timestamp of a snapshot (UTC). Pure."""
    return datetime.fromtimestamp(snapshot.timestamp_ms / 1000, UTC)


def branch_properties(table: Table, branch: str) -> dict[str, str]:
    """Return our properties of a branch (`anabranch.*`), without the id of its newest publish. If
    `main` was rolled back, they state that no publish was merged into it. Raises Terminal."""
    snapshot = newest_publish(table, branch)
    if snapshot is None:
        return {}
    is_rolled_back = snapshot is not last_publish(table, branch)
    # Decision 52: merged from nothing, so that the next publisher merges `main` again. Else the
    # rows of the rollback would count as complete.
    return _load_state(table, snapshot) | ({MERGED: "{}"} if is_rolled_back else {})


def is_recreated(properties: Mapping[str, str]) -> bool:
    """Return whether the branch was created from `main` and never published since. Pure."""
    return MERGED in properties and CONTENT not in properties


def snapshot_properties(table: Table, snapshot_id: int) -> dict[str, str]:
    """Return the properties of a branch when the snapshot was its head; empty if the publish of
    that time is expired. Raises Terminal."""
    for snapshot in ancestors_of(table.metadata.snapshot_by_id(snapshot_id), table.metadata):
        if is_publish(snapshot):
            return _load_state(table, snapshot)
    return {}


def _load_state(table: Table, snapshot: Snapshot) -> dict[str, str]:
    try:
        return state_properties.load_all(table, _own_properties(snapshot))
    except StateGone as error:
        raise Terminal(f"{error}; {_recovery_steps(table, error.remedy)}") from error


def _is_readable(table: Table, snapshot: Snapshot | None) -> bool:
    """Return whether the state of a snapshot is complete."""
    try:
        if snapshot is not None:
            state_properties.load_all(table, _own_properties(snapshot))
    except StateGone:
        return False
    return snapshot is not None


def _recovery_steps(table: Table, remedy: str) -> str:
    """Return sentences with the lost parts of a table's state and the steps of a recovery."""
    lost = [b for b in BRANCHES if not _is_readable(table, last_publish(table, b))]
    if not lost:
        return "the branches themselves are complete: name a newer snapshot"
    others = " and ".join(b for b in lost if b != "main")
    steps = (
        [f"drop branch {others}", "run `anabranch apply STREAM`, which recreates it from main"]
        if others
        else []
    )
    if "main" in lost:
        of_main = (s for s in main_snapshots(table) if is_publish(s) and _is_readable(table, s))
        newest = max(of_main, key=made_at, default=None)
        if newest is None:
            return (
                f"the state of {', '.join(lost)} and of every snapshot of main is lost: {remedy}; "
                "without it the rows stay readable, but the stream has to start again in another "
                f"table: {_DOCUMENTED}"
            )
        set_back = (
            f"roll main back to snapshot {newest.snapshot_id} of {made_at(newest).isoformat()}, "
            "which is complete"
        )
        steps = [set_back, *(steps or ["run `anabranch merge STREAM`"])]
    return (
        f"the state of {', '.join(lost)} is lost: {remedy}, or stop the jobs, then "
        f"{', then '.join(steps)}: {_DOCUMENTED}"
    )


_DOCUMENTED = 'docs/runbooks.md, "The state of a branch is gone"'


def _own_properties(snapshot: Snapshot) -> dict[str, str]:
    """Return our properties in a snapshot's summary, without the id of its publish. Pure."""
    properties = snapshot.summary.additional_properties if snapshot.summary is not None else {}
    return {k: v for k, v in properties.items() if k.startswith(PREFIX) and k != PUBLISH_ID}


def published_since(table: Table, branch: str, key: str) -> datetime:
    """Return the time of the first kept publish with the branch's `key`. Raises Terminal."""
    value = branch_properties(table, branch).get(key)
    since = snapshot = ancestors_to_last_publish(table, branch)[-1]
    while snapshot.parent_snapshot_id is not None:
        parent = table.metadata.snapshot_by_id(snapshot.parent_snapshot_id)
        if parent is None:
            break
        snapshot = parent
        try:
            before = state_properties.look_up(table, _own_properties(snapshot), key)
        except StateGone:
            break
        if before is not None:
            if before != value:
                break
            since = snapshot
    return made_at(since)


def staged_snapshot(table: Table, wap_id: str) -> Snapshot | None:
    """Return an attempt's snapshot, None if it is gone. Raises Terminal for two of the id. Pure."""
    staged = [
        s for s in table.snapshots() if s.summary is not None and s.summary.get(WAP_ID) == wap_id
    ]
    if len(staged) > 1:
        raise Terminal(
            f"table {'.'.join(table.name())}: expected one staged snapshot {wap_id}, found "
            f"{len(staged)}; nothing is published: restart the job, which stages again"
        )
    return staged[0] if staged else None


def staged_ref(wap_id: str) -> str:
    """Return the name of a staged snapshot's branch. Pure."""
    return STAGED + wap_id


def staged_refs(table: Table, expired: Collection[int]) -> tuple[str, ...]:
    """Return the names of the branches of staged snapshots in `expired`. Pure."""
    refs = table.metadata.refs.items()
    return tuple(
        name for name, ref in refs if name.startswith(STAGED) and ref.snapshot_id in expired
    )


def has_landed(table: Table, commit_id: str) -> bool:
    return any(
        s.summary is not None and s.summary.get(PUBLISH_ID) == commit_id for s in table.snapshots()
    )


def main_snapshots(table: Table) -> list[Snapshot]:
    """Return the snapshots of `main`: its head's ancestors, and those with tags `main-*`. Pure."""
    of_main = {s.snapshot_id: s for s in ancestors_of(head(table, "main"), table.metadata)}
    for name, ref in table.metadata.refs.items():
        tagged = table.metadata.snapshot_by_id(ref.snapshot_id)
        if (
            name.startswith("main-")
            and ref.snapshot_ref_type == SnapshotRefType.TAG
            and tagged is not None
        ):
            of_main[tagged.snapshot_id] = tagged
    return list(of_main.values())


def snapshots_by_commit(table: Table) -> dict[str, int]:
    """Return the unexpired snapshot of each commit by commit id: the one on `main`, else one on
    another branch. Pure."""
    of_main = ancestors_of(head(table, "main"), table.metadata)
    # Last, so that main's snapshots take precedence.
    return {
        id: s.snapshot_id
        for s in (*table.snapshots(), *of_main)
        if s.summary is not None and (id := s.summary.get(PUBLISH_ID)) is not None
    }


def reachable(table: Table, snapshots: Iterable[Snapshot]) -> Iterator[str]:
    """Yield the files of snapshots, each before the files that it refers to: manifest lists,
    manifests, live data files. Raises OSError, ValueError if one cannot be read."""
    seen: set[str] = set()
    for snapshot in snapshots:
        yield snapshot.manifest_list
        for manifest in snapshot.manifests(table.io):
            if manifest.manifest_path in seen:
                continue
            seen.add(manifest.manifest_path)
            yield manifest.manifest_path
            yield from (e.data_file.file_path for e in manifest.fetch_manifest_entry(table.io))


def carried(
    table: Table, branch: str, properties: Mapping[str, str], commit_id: str
) -> dict[str, str]:
    """Return all properties of a commit's snapshot of a branch: the branch's, overridden by the
    commit's own, and its id. Raises Terminal."""
    return branch_properties(table, branch) | dict(properties) | {PUBLISH_ID: commit_id}


def summary_of(
    table: Table, branch: str, properties: Mapping[str, str]
) -> tuple[dict[str, str], dict[str, str]]:
    """Return the part of the `carried` properties for the summary of a branch's next snapshot, and
    the table properties with the rest. Raises Terminal."""
    return state_properties.plan_summary(properties, branch_properties(table, branch))


def unused_properties(
    table: Table, commit: Commit, needed: Mapping[str, str], summaries: Iterable[Mapping[str, str]]
) -> tuple[str, ...]:
    """Return the state's table properties that no snapshot refers to once the commit has landed.
    `summaries`, `needed`: the summaries and state properties of its snapshots. Empty if the commit
    does not require all branches' heads: another publish that refers to one of the properties may
    land first. Pure."""
    # Decision 35: without all heads, a publish that relies on a property (and so does not set it
    # again) may land first, and its state would be gone.
    if not (commit.changes and commit.heads.keys() >= set(BRANCHES)):
        return ()
    expired = set(commit.expire)
    remembered = (_own_properties(s) for s in table.snapshots() if s.snapshot_id not in expired)
    return state_properties.plan_unused(
        table.metadata.properties, needed, (*remembered, *summaries)
    )


def find_staged(table: Table, wap_id: str) -> Staged | None:
    """Return an attempt's staged rows, if any. Raises Terminal for two of the id, Transient."""
    snapshot = staged_snapshot(table, wap_id)
    if snapshot is None:
        return None
    with lake_errors(f"read the manifests of {wap_id}, staged in {'.'.join(table.name())}"):
        files = tuple(
            entry.data_file
            for manifest in snapshot.manifests(table.io)
            if manifest.added_snapshot_id == snapshot.snapshot_id
            for entry in manifest.fetch_manifest_entry(table.io)
            if entry.status == ManifestEntryStatus.ADDED
        )
    return Staged(wap_id, snapshot.snapshot_id, snapshot.parent_snapshot_id, files)
