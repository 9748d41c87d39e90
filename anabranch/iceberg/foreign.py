"""Commits of other programs on our branches: accepted if the rows stay the same, refused if they
changed. A platform compacts files, rewrites manifests and expires snapshots of all its tables. Its
commits leave a head without our properties, after the newest publish of the branch
(`snapshots.last_publish`). The next publish carries that publish's properties forward if the branch
still has its rows.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from pyiceberg.table.snapshots import Operation

from anabranch.common.errors import Terminal
from anabranch.common.remote_errors import lake_errors
from anabranch.iceberg import hour_files, snapshots

if TYPE_CHECKING:
    from pyiceberg.table import Table
    from pyiceberg.table.snapshots import Snapshot

LOG = logging.getLogger(__name__)

# Accepted heads by table and branch, so that each is checked once.
_ACCEPTED: dict[tuple[object, str], int] = {}


def check_foreign_commits(table: Table) -> None:
    """Raise Terminal if another program changed rows of a branch since its newest publish. Reads
    manifests only if there is a commit of another program. Raises Transient."""
    for branch in snapshots.BRANCHES:
        if branch not in table.metadata.refs:
            continue
        commits = foreign_commits(table, branch)
        base = snapshots.last_publish(table, branch)
        key = (table.metadata.table_uuid, branch)
        if not commits or base is None or _ACCEPTED.get(key) == commits[0].snapshot_id:
            continue
        if (changed := _changed(table, commits, base)) is not None:
            name = ".".join(table.name())
            raise Terminal(
                f"table {name}: expected branch {branch} to have the rows of its newest publish, "
                f"found snapshot {commits[0].snapshot_id} of another program, {changed}; nothing "
                "is published. Only Anabranch changes rows of this table: roll it back "
                f"({_remedy(name, branch, base)}) and restart"
            )
        _ACCEPTED[key] = commits[0].snapshot_id
        LOG.warning(
            "table %s: branch %s has commits of another program (%s, the newest %d); its rows are "
            "the same, continuing",
            ".".join(table.name()),
            branch,
            ", ".join(sorted({operation_of(s) for s in commits})),
            commits[0].snapshot_id,
        )


def foreign_commits(table: Table, branch: str) -> list[Snapshot]:
    """Return the unexpired snapshots after a branch's newest publish, newest first. Pure."""
    return [
        s for s in snapshots.ancestors_to_last_publish(table, branch) if not snapshots.is_publish(s)
    ]


def operation_of(snapshot: Snapshot) -> str:
    return snapshot.summary.operation.value if snapshot.summary is not None else "no operation"


def _changed(table: Table, commits: list[Snapshot], base: Snapshot) -> str | None:
    """Return a description of the change of rows between a publish and the commits after it; None
    if the rows are the same."""
    for snapshot in commits:
        if snapshot.summary is None or snapshot.summary.operation is not Operation.REPLACE:
            touched = [
                snapshots.count(snapshot, f"{how}-data-files") for how in ("added", "deleted")
            ]
            # An operation other than `replace` may have any effect on rows. Counts by hour do not
            # show a deleted row and an inserted one of the same hour.
            if any(touched) or snapshots.count(snapshot, "added-delete-files"):
                return (
                    f"whose operation is {operation_of(snapshot)} ({touched[0]} files added, "
                    f"{touched[1]} removed)"
                )
    head = commits[0]
    with lake_errors(f"count the rows of {'.'.join(table.name())}"):
        before, after = (_rows_by_hour(table, s) for s in (base, head))
    # By hour: a compaction that loses rows of one hour would otherwise be accepted, and the next
    # publish would carry its loss forward.
    differing = sorted(
        h for h in before.keys() | after.keys() if before.get(h, 0) != after.get(h, 0)
    )
    if differing:
        hour = differing[0]
        return (
            f"which changed the rows of {len(differing)} hours (hour {hour}: expected "
            f"{before.get(hour, 0)} rows, found {after.get(hour, 0)})"
        )
    return None


def _rows_by_hour(table: Table, snapshot: Snapshot) -> dict[str, int]:
    files = hour_files.files_at(table, snapshot)
    return {hour: sum(f.record_count for f in of_hour.values()) for hour, of_hour in files.items()}


def _remedy(name: str, branch: str, base: Snapshot) -> str:
    if branch == "main":
        return f"CALL CATALOG.system.set_current_snapshot('{name}', {base.snapshot_id})"
    return (
        f"ALTER TABLE CATALOG.{name} CREATE OR REPLACE BRANCH {branch} AS OF VERSION "
        f"{base.snapshot_id}"
    )
