"""The data files and row counts of ingest hours, on a branch or in a snapshot."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pyiceberg.manifest import DataFile

from anabranch.common.remote_errors import lake_errors
from anabranch.iceberg.manifests import hour_of_file, list_manifests, read_entries
from anabranch.iceberg.snapshots import BRANCHES, head

if TYPE_CHECKING:
    from pyiceberg.table import Table
    from pyiceberg.table.snapshots import Snapshot


def oldest_timestamps(table: Table, files: Iterable[DataFile], column: str) -> list[int]:
    """Return the minimum of a timestamp column in each file that has bounds of it, in milliseconds.
    Pure."""
    id = table.schema().find_field(column).field_id
    bounds = [(file.lower_bounds or {}).get(id) for file in files]
    return [
        int.from_bytes(least, "little", signed=True) // 1000
        for least in bounds
        if least is not None
    ]


def files_of(table: Table, branch: str, hour: str) -> tuple[DataFile, ...]:
    """Return the data files of one ingest hour on one branch. Opens only manifests that may contain
    the hour."""
    return tuple(files_by_hour(table, branch, (hour,)).get(hour, {}).values())


def files_by_hour(
    table: Table, branch: str, hours: Collection[str] | None = None
) -> dict[str, dict[str, DataFile]]:
    """Return a branch's data files as hour -> path -> file; of all hours for None."""
    return files_at(table, head(table, branch), hours)


def files_at(
    table: Table, snapshot: Snapshot, hours: Collection[str] | None = None
) -> dict[str, dict[str, DataFile]]:
    """Return a snapshot's data files, as `files_by_hour`."""
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


def files_by_branch(
    table: Table, hours: Collection[str] | None = None
) -> dict[str, dict[str, dict[str, DataFile]]]:
    """Return the data files of each branch, as `files_by_hour`."""
    return {branch: files_by_hour(table, branch, hours) for branch in BRANCHES}


def hours_on_branches(table: Table) -> set[str]:
    """Return the hours with files on any branch."""
    return {hour for branch in BRANCHES for hour in content_by_hour(table, branch)}


def paths_by_hour(table: Table, files: Iterable[DataFile]) -> dict[str, set[str]]:
    paths: dict[str, set[str]] = {}
    for file in files:
        paths.setdefault(hour_of_file(table, file), set()).add(file.file_path)
    return paths


@dataclass(frozen=True)
class HourContent:
    """The number of files and rows of an hour on a branch."""

    files: int
    rows: int


def hours_apart(table: Table, one: str, other: str) -> set[str]:
    """Return the hours whose files may differ between two branches: the hours of manifests that
    only one of them has."""
    with lake_errors(f"read the manifests of {'.'.join(table.name())}"):
        here, there = (
            {m.manifest.manifest_path: m for m in list_manifests(table, head(table, b))[0]}
            for b in (one, other)
        )
        both = here.keys() & there.keys()
        alone = [m for path, m in (here | there).items() if path not in both]
        hours = {m.hour for m in alone if m.hour is not None}
        for entries in read_entries(table.io, [m.manifest for m in alone if m.hour is None]):
            hours |= {hour_of_file(table, e.data_file) for e in entries}
    return hours


def content_by_hour(
    table: Table, branch: str, hours: Collection[str] | None = None
) -> dict[str, HourContent]:
    """Return the content of a branch by hour, of all hours for None. Opens only manifests with
    several hours, which only old hours have."""
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
