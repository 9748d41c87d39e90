"""Commits of other programs to a stream's table, without a JVM."""

from collections.abc import Iterable
from datetime import UTC, datetime

from lakes import Row, StreamLake
from pyiceberg.manifest import DataFile
from pyiceberg.table import update
from pyiceberg.table.refs import SnapshotRefType

from anabranch.iceberg import commits, manifests, prepare, snapshot_writer, snapshots


def commit(lake: StreamLake, *updates: update.TableUpdate, name: str | None = None) -> None:
    table = lake.lake.load(name or lake.name)
    whole = (update.AssertTableUUID(uuid=table.metadata.table_uuid),)
    lake.lake.catalog.commit_table(table, whole, updates)


def rewrite(
    lake: StreamLake, branch: str, rows: Iterable[Row] | None = None, **change: bool
) -> int:
    """Another program replaces a branch's files by one per hour; returns the snapshot."""
    new = write_alone(lake, lake.rows(branch) if rows is None else list(rows))
    table = lake.table()
    by_hour = manifests.files_by_hour(table, branch).values()
    old = [f for of_hour in by_hour for f in of_hour.values()]
    writer = snapshot_writer.SnapshotWriter(table, int(datetime.now(UTC).timestamp() * 1000) + 1)
    made = writer.write(commits.Change(branch, new, tuple(old), **{"rewrites": True, **change}), {})
    moved = prepare.set_ref(branch, made.snapshot_id, SnapshotRefType.BRANCH)
    commit(lake, update.AddSnapshotUpdate(snapshot=made), moved)
    return made.snapshot_id


def write_alone(lake: StreamLake, rows: list[Row]) -> tuple[DataFile, ...]:
    """Files that nothing refers to, of these rows."""
    staged = lake.stage(rows)
    commit(lake, update.RemoveSnapshotsUpdate(snapshot_ids=[staged.snapshot_id]))  # type: ignore[call-arg]
    return staged.files


def expire_all(lake: StreamLake, name: str | None = None) -> list[str]:
    """Expire as `expire_snapshots(retain_last => 1, older_than => now)` does. Return the files that
    the procedure deletes as its last step, found once its commit has landed."""
    table = lake.lake.load(name or lake.name)
    named = {ref.snapshot_id for ref in table.metadata.refs.values()}
    old = [s for s in table.metadata.snapshots if s.snapshot_id not in named]
    of_old = set(snapshots.reachable(table, old))
    commit(lake, update.RemoveSnapshotsUpdate(snapshot_ids=[s.snapshot_id for s in old]), name=name)  # type: ignore[call-arg]
    after = lake.lake.load(name or lake.name)
    return sorted(of_old - set(snapshots.reachable(after, after.metadata.snapshots)))
