"""Preparation of a commit: its manifests, and its updates for the catalog. Nothing is visible
yet."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime

from pyiceberg.manifest import DataFile
from pyiceberg.table import Table
from pyiceberg.table.refs import SnapshotRefType
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
    staged_ref,
    staged_refs,
    summary_of,
    unused_properties,
)


@dataclass(frozen=True)
class Prepared:
    """A commit's updates for the catalog, and the paths of its files, which are unreferenced if it
    is refused."""

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
    """Prepare a commit that adds files in one snapshot with `wap_id`, whose parent is the staging
    branch's head; `protected`: with a branch of its own. Raises Terminal without the staging
    branch, Transient."""
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
