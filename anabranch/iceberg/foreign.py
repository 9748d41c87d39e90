"""Changes of other programs to our tables: commits on our branches, which are accepted if the rows
stay the same, refused if they changed; and features of a table that our writers do not support.

A platform compacts files, rewrites manifests and expires snapshots of all its tables. Its commits
leave a head without our properties, after the newest publish of the branch
(`snapshots.last_publish`). The next publish carries that publish's properties forward if the branch
still has its rows.
"""

from __future__ import annotations

import logging

from pyiceberg.exceptions import ValidationError
from pyiceberg.serializers import FromInputFile
from pyiceberg.table import Table
from pyiceberg.table.snapshots import Operation, Snapshot

from anabranch.common.errors import ConfigurationError, Terminal
from anabranch.common.remote_errors import lake_errors
from anabranch.iceberg import manifests, snapshots
from anabranch.iceberg.snapshots import BRANCHES

LOG = logging.getLogger(__name__)

# Accepted heads by table and branch, so that each is checked once.
_ACCEPTED: dict[tuple[object, str], int] = {}


def check_foreign_commits(table: Table) -> None:
    """Raise Terminal if another program changed rows of a branch since its newest publish. Reads
    manifests only if there is a commit of another program. Raises Transient."""
    for branch in snapshots.BRANCHES:
        if branch not in table.metadata.refs:
            continue
        newer = snapshots.ancestors_to_last_publish(table, branch)
        commits = [one for one in newer if not snapshots.is_publish(one)]
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


def operation_of(snapshot: Snapshot) -> str:
    return snapshot.summary.operation.value if snapshot.summary is not None else "no operation"


def _changed(table: Table, commits: list[Snapshot], base: Snapshot) -> str | None:
    """Return how rows changed between a publish and later commits; None if they are the same."""
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
    files = manifests.files_at(table, snapshot)
    return {hour: sum(f.record_count for f in of_hour.values()) for hour, of_hour in files.items()}


def _remedy(name: str, branch: str, base: Snapshot) -> str:
    if branch == "main":
        return f"CALL CATALOG.system.set_current_snapshot('{name}', {base.snapshot_id})"
    return (
        f"ALTER TABLE CATALOG.{name} CREATE OR REPLACE BRANCH {branch} AS OF VERSION "
        f"{base.snapshot_id}"
    )


VERSION = 2
SUPPORTED = f"format version {VERSION}, Parquet, Iceberg's own location providers, no encryption"
_FORMAT = "write.format.default"
# With a provider of its own, no listing finds a file without a reference.
_NEVER = ("encryption.key-id", "write.location-provider.impl", "write.py-location-provider.impl")


def unsupported_feature(table: Table) -> str | None:
    """Return the feature of a table that prevents us from writing it, as text; None if there is
    none. Version 3 includes deletion vectors and its types. Pure."""
    if table.format_version != VERSION:
        return f"format version {table.format_version}"
    key = _refused_property(table)
    return f"property {key}={table.properties[key]}" if key is not None else None


def _refused_property(table: Table) -> str | None:
    if table.properties.get(_FORMAT, "parquet").lower() != "parquet":
        return _FORMAT
    return next((key for key in _NEVER if key in table.properties), None)


def require_writable(table: Table) -> None:
    """Raise ConfigurationError, with the way back, for a feature that our writers lack."""
    feature = unsupported_feature(table)
    if feature is None:
        return
    name = ".".join(table.name())
    raise ConfigurationError(
        f"table {name}: expected {SUPPORTED}, found {feature}, which another program set; nothing "
        f"is published; {_way_back(table, name)}"
    )


def _way_back(table: Table, name: str) -> str:
    if (key := _refused_property(table)) is not None and table.format_version == VERSION:
        return f"ALTER TABLE CATALOG.{name} UNSET TBLPROPERTIES ('{key}') and run it again"
    former = _last_metadata(table)
    if former is None:
        return (
            "Iceberg does not lower a version: restore catalog and bucket to a time before it, or "
            "give `table:` of the stream's file another name and read the topic again"
        )
    return (
        f"its rows are those of version {VERSION} still: in Spark, DROP TABLE CATALOG.{name} "
        f"without PURGE, then CALL CATALOG.system.register_table('{name}', '{former}')"
    )


def _last_metadata(table: Table) -> str | None:
    """Return the newest metadata file of the supported version with the current branches."""
    heads = {b: table.metadata.refs[b].snapshot_id for b in BRANCHES if b in table.metadata.refs}
    for entry in reversed(table.metadata.metadata_log):
        try:
            before = FromInputFile.table_metadata(table.io.new_input(entry.metadata_file))
        except (OSError, ValueError, ValidationError):
            continue
        if before.format_version == VERSION:
            refs = {b: before.refs[b].snapshot_id for b in BRANCHES if b in before.refs}
            return entry.metadata_file if refs == heads else None
    return None
