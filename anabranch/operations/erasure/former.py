"""Files with erased records that no branch has any more, in hours of which no branch has one: former snapshots and tags
have them, since the hour has expired or was built again without the records."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import partial
from typing import TYPE_CHECKING

from anabranch.common.remote_errors import lake_errors
from anabranch.iceberg.hour_files import files_by_hour
from anabranch.iceberg.manifests import hour_of_file, list_manifests, read_entries
from anabranch.iceberg.snapshots import BRANCHES, heads
from anabranch.operations.erasure.search import Covered, Values, find_letters, find_places
from anabranch.protocol import erasure
from anabranch.protocol.erased import Erasure
from anabranch.protocol.state import State

if TYPE_CHECKING:
    from pyiceberg.manifest import DataFile
    from pyiceberg.table import Table

    from anabranch.job import Job


def find_former(job: Job, state: State, one: Erasure, values: Values, known: Collection[str]) -> dict[str, set[str]]:
    """By hour, the paths of such files of rows, dead letters and archived records, but for the `known` hours. Raises
    Transient."""
    lake, stream, found = job.lake, job.stream, dict[str, set[str]]()

    def of_rows(table: Table, files: Sequence[DataFile]) -> Collection[str]:
        def covered(f: DataFile) -> Covered:
            hour = hour_of_file(table, f)
            return partial(one.offsets, hour, erasure.log_of(state, hour))

        return find_places(table, files, values, covered)

    def of_bytes(table: Table, files: Sequence[DataFile]) -> Collection[str]:
        def covered(f: DataFile, topic_id: str) -> Covered:
            return partial(one.offsets, hour_of_file(table, f), topic_id)

        return find_letters(table, files, values.texts, covered)

    for name in (stream.table, stream.dead_letters_table, stream.archive_table):
        if not lake.exists(name):
            continue
        table = lake.load(name)
        files = {f.file_path: f for f in list_former(table, known)}
        search = of_rows if name == stream.table else of_bytes
        for path in search(table, list(files.values())):
            found.setdefault(hour_of_file(table, files[path]), set()).add(path)
    return found


def list_former(table: Table, known: Collection[str]) -> list[DataFile]:
    """The files that snapshots have and no branch, but for those of the `known` hours. Raises Transient."""
    with lake_errors(f"read the manifests of {'.'.join(table.name())}"):
        current = {
            m.manifest.manifest_path
            for id in heads(table).values()
            if (head := table.snapshot_by_id(id)) is not None
            for m in list_manifests(table, head)[0]
        }
        listed = (m for snapshot in table.snapshots() for m in list_manifests(table, snapshot)[0])
        others = {m.manifest.manifest_path: m.manifest for m in listed if m.hour not in known}
        entries = read_entries(table.io, [manifest for path, manifest in others.items() if path not in current])
        files = {e.data_file.file_path: e.data_file for of_manifest in entries for e in of_manifest}
    files = {path: f for path, f in files.items() if hour_of_file(table, f) not in known}
    hours = {hour_of_file(table, f) for f in files.values()}
    live = erasure.by_path({branch: files_by_hour(table, branch, hours) for branch in BRANCHES}) if hours else {}
    return [f for path, f in sorted(files.items()) if path not in live]
