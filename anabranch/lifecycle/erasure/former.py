"""Files with erased records that only former snapshots have."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

from anabranch.common.remote_errors import lake_errors
from anabranch.iceberg.hour_files import files_by_branch, paths_by_hour
from anabranch.iceberg.manifests import hour_of_file, list_manifests, read_entries
from anabranch.iceberg.snapshots import heads
from anabranch.lifecycle.erasure.payloads import Payloads
from anabranch.lifecycle.erasure.search import Values, find_letters, find_places
from anabranch.protocol.erased import Erasure
from anabranch.protocol.erasure import by_path
from anabranch.protocol.state import State

if TYPE_CHECKING:
    from pyiceberg.manifest import DataFile
    from pyiceberg.table import Table

    from anabranch.job import Job


def find_former(
    job: Job, state: State, one: Erasure, values: Values, known: Collection[str]
) -> dict[str, set[str]]:
    """Return the paths of files with erased records that only former snapshots and tags reference,
    since their hour has expired or was rebuilt without the records: files of rows, dead letters and
    archived records by hour, except for hours in `known`. Raises Transient."""
    lake, stream = job.lake, job.stream
    rows, payloads = list_former(state.table, known), Payloads(job.environment, stream)
    with_values: Collection[str] = find_places(state, one, values, rows)
    found = paths_by_hour(state.table, [f for f in rows if f.file_path in with_values])
    for table in (
        lake.load(name)
        for name in (stream.dead_letters_table, stream.archive_table)
        if lake.exists(name)
    ):
        records = list_former(table, known)
        with_values = find_letters(payloads, table, one, values, records)
        for hour, paths in paths_by_hour(
            table, [f for f in records if f.file_path in with_values]
        ).items():
            found.setdefault(hour, set()).update(paths)
    return found


def list_former(table: Table, known: Collection[str]) -> list[DataFile]:
    """Return the files that snapshots have and no branch has, except for hours in `known`. Raises
    Transient."""
    with lake_errors(f"read the manifests of {'.'.join(table.name())}"):
        current = {
            m.manifest.manifest_path
            for id in heads(table).values()
            if (head := table.snapshot_by_id(id)) is not None
            for m in list_manifests(table, head)[0]
        }
        listed = (m for snapshot in table.snapshots() for m in list_manifests(table, snapshot)[0])
        others = {m.manifest.manifest_path: m.manifest for m in listed if m.hour not in known}
        entries = read_entries(
            table.io, [manifest for path, manifest in others.items() if path not in current]
        )
        files = {e.data_file.file_path: e.data_file for of_manifest in entries for e in of_manifest}
    files = {path: f for path, f in files.items() if hour_of_file(table, f) not in known}
    hours = {hour_of_file(table, f) for f in files.values()}
    live = by_path(files_by_branch(table, hours)) if hours else {}
    return [f for path, f in sorted(files.items()) if path not in live]
