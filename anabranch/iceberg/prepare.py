"""Preparation of a commit: its manifests, and its updates for the catalog. Nothing is visible
yet.

The outcome of a commit whose answer was lost, by the current table: it landed, never will, or
still may.

A request without an answer may still be executed at any later time: by a catalog behind a gateway
that timed out, or by a client's retry. Only once a head that it requires has moved can it no longer
land.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from enum import Enum

from pyiceberg.manifest import DataFile
from pyiceberg.table import Table
from pyiceberg.table.refs import SnapshotRefType
from pyiceberg.table.snapshots import ancestors_of
from pyiceberg.table.update import (
    AddSnapshotUpdate,
    RemovePropertiesUpdate,
    RemoveSnapshotRefUpdate,
    RemoveSnapshotsUpdate,
    SetPropertiesUpdate,
    SetSnapshotRefUpdate,
    TableUpdate,
)

from anabranch.common.errors import Terminal
from anabranch.common.remote_errors import lake_errors
from anabranch.iceberg.commits import Change, Commit
from anabranch.iceberg.snapshot_writer import SnapshotWriter, delete_quietly
from anabranch.iceberg.snapshots import (
    CONTENT,
    PROVEN,
    PUBLISHED,
    STAGING,
    WAP_ID,
    carried,
    has_landed,
    newest_publish,
    staged_ref,
    staged_refs,
    summary_of,
    unused_properties,
)


@dataclass(frozen=True)
class Prepared:
    """A commit's updates for the catalog, and its files, which a refusal leaves unreferenced."""

    updates: tuple[TableUpdate, ...]
    written: tuple[str, ...]


def prepare(table: Table, commit: Commit, now: datetime) -> Prepared:
    """Write the commit's manifests and build its updates. Their timestamp is `now`, or just after
    the table's last update if that is later. Nothing is visible yet. Raises Transient."""
    updates: list[TableUpdate] = []
    state, summaries = dict[str, str](), []
    with _writing(table, f"commit {commit.id}", now) as writer:
        # `main` first: its snapshot adds the shared manifests, since readers may follow main.
        for change in sorted(commit.changes, key=lambda c: c.branch != "main"):
            properties = carried(table, change.branch, change.properties, commit.id)
            summary, needed = summary_of(table, change.branch, properties)
            state |= needed
            summaries.append(summary)
            snapshot = writer.write(change, summary)
            updates.append(AddSnapshotUpdate(snapshot=snapshot))
            # Decision 38: the tag moves in the same commit. No expiry removes a tagged snapshot, so
            # a compaction and expiry by another program do not remove the newest state.
            updates.append(set_ref(change.branch, snapshot.snapshot_id, SnapshotRefType.BRANCH))
            updates.append(
                set_ref(PUBLISHED + change.branch, snapshot.snapshot_id, SnapshotRefType.TAG)
            )
            # Decision 68: in the same commit, and not to a branch made from `main`, which may have
            # rows of hours that are not accepted.
            if change.branch == "batch" and CONTENT in properties:
                updates.append(set_ref(PROVEN, snapshot.snapshot_id, SnapshotRefType.BRANCH))
    # Decision 35: in the commit of the snapshots that refer to them. A snapshot without its
    # properties has no position and no accepted hours.
    held = table.metadata.properties
    if put := {k: v for k, v in state.items() if held.get(k) != v} | dict(commit.set_properties):
        updates.append(SetPropertiesUpdate(updates=put))
    if gone := [*commit.remove_properties, *unused_properties(table, commit, state, summaries)]:
        updates.append(RemovePropertiesUpdate(removals=gone))
    # Iceberg has no requirement that a snapshot exists, but every catalog refuses a ref to a
    # missing one.
    for wap_id, snapshot_id in commit.staged.items():
        updates.append(set_ref(staged_ref(wap_id), snapshot_id, SnapshotRefType.BRANCH))
    dropped = {staged_ref(wap_id) for wap_id in commit.staged} | {
        *staged_refs(table, commit.expire)
    }
    updates += [RemoveSnapshotRefUpdate(ref_name=name) for name in sorted(dropped)]
    updates += [RemoveSnapshotRefUpdate(ref_name=name) for name in commit.drop_tags]
    if commit.expire:
        updates.append(RemoveSnapshotsUpdate(snapshot_ids=list(commit.expire)))
    updates += [
        set_ref(t.name, t.snapshot_id, SnapshotRefType.TAG, t.max_age_ms) for t in commit.tags
    ]
    return Prepared(tuple(updates), tuple(writer.written))


def prepare_stage(
    table: Table, wap_id: str, files: Sequence[DataFile], now: datetime, protected: bool
) -> Prepared:
    """Prepare a commit of files in one snapshot with `wap_id`, on the staging branch's head; with
    its own branch if `protected`. Raises Terminal without the staging branch, Transient."""
    if STAGING not in table.metadata.refs:
        raise Terminal(
            f"table {'.'.join(table.name())}: expected branch {STAGING}, found none; run "
            "`anabranch apply`"
        )
    with _writing(table, wap_id, now) as writer:
        snapshot = writer.write(Change(STAGING, tuple(files)), {WAP_ID: wap_id})
    updates: list[TableUpdate] = [AddSnapshotUpdate(snapshot=snapshot)]
    if protected:
        ref = set_ref(staged_ref(wap_id), snapshot.snapshot_id, SnapshotRefType.BRANCH)
        updates.append(ref)
    return Prepared(tuple(updates), tuple(writer.written))


@contextmanager
def _writing(table: Table, what: str, now: datetime) -> Iterator[SnapshotWriter]:
    """Yield a writer of manifests, which are deleted after an error. Raises Transient."""
    writer = SnapshotWriter(
        table, max(int(now.timestamp() * 1000), table.metadata.last_updated_ms + 1)
    )
    with lake_errors(f"write the manifests of {what} of {'.'.join(table.name())}"):
        try:
            yield writer
        except Exception:
            # Nothing was sent, so no snapshot can refer to them.
            delete_quietly(table, writer.written)
            raise


def set_ref(
    name: str, snapshot_id: int, kind: str, max_age_ms: int | None = None
) -> SetSnapshotRefUpdate:
    return SetSnapshotRefUpdate(
        ref_name=name,
        snapshot_id=snapshot_id,
        type=kind,
        max_ref_age_ms=max_age_ms,
        max_snapshot_age_ms=None,
        min_snapshots_to_keep=None,
    )


class CommitFate(Enum):
    """The outcome of a commit with snapshots, according to a table."""

    LANDED = "a snapshot carries its id"
    NEVER = "a head that it requires has moved, and no snapshot since is its own"
    OPEN = "the heads are those that it requires: it may still land"
    FORGOTTEN = "a head that it requires has moved, and the snapshots since are not all remembered"


def classify_commit(table: Table, commit: Commit) -> CommitFate:
    """Return the outcome of a commit whose answer was lost, by the current table. Pure."""
    # First: a commit that landed has moved the heads itself, and would count as refused below.
    if has_landed(table, commit.id):
        return CommitFate.LANDED
    refs = table.metadata.refs
    if all(
        branch in refs and refs[branch].snapshot_id == id for branch, id in commit.heads.items()
    ):
        return CommitFate.OPEN
    # It lands on all of its branches or on none, so one branch without it decides for all.
    if any(
        _comes_from(table, change.branch, commit.heads[change.branch]) for change in commit.changes
    ):
        return CommitFate.NEVER
    # Snapshots in between are expired, and one of them may be this commit.
    return CommitFate.FORGOTTEN


def plan_fence(table: Table, commit: Commit) -> Commit:
    """Return an empty commit after which an `OPEN` commit cannot land: it requires the same heads
    and moves one of them.

    It repeats the properties of the newest publish on that publish's branch, so they stay the
    newest. Pure except for its random id.
    """

    def age(branch: str) -> int:
        newest = newest_publish(table, branch)
        return (newest.sequence_number or 0) if newest is not None else 0

    return Commit(
        uuid.uuid4().hex, dict(commit.heads), (Change(max(sorted(commit.heads), key=age)),)
    )


def _comes_from(table: Table, branch: str, id: int) -> bool:
    """Return whether a snapshot is, by snapshots that are kept, in a branch's history."""
    head = table.metadata.snapshot_by_name(branch)
    return any(s.snapshot_id == id for s in ancestors_of(head, table.metadata))
