"""A branch's manifests by ingest hour, the plan of their merges, and the data files and row counts
of hours. Every data file belongs to one ingest hour, and the manifest list has the first and
last hour of each manifest. So a manifest of one hour is removed with that hour without reading
it, and a reader of an hour opens only its manifests. Micro-batches leave many small manifests.
They are merged by size, so each entry is rewritten only a few times.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from math import isqrt

from pyiceberg.io import FileIO
from pyiceberg.manifest import DataFile, ManifestContent, ManifestEntry, ManifestFile
from pyiceberg.partitioning import PartitionSpec
from pyiceberg.table import Table
from pyiceberg.table.snapshots import Snapshot
from pyiceberg.utils.concurrent import ExecutorFactory

from anabranch.common.errors import Terminal
from anabranch.common.remote_errors import lake_errors
from anabranch.iceberg.snapshots import BRANCHES, head
from anabranch.offsets.hours import start_of

HOUR = "ingest_hour"

# The number of manifests of one size that are merged into one of the next size.
_FAN_IN = 8
# Manifests of this size, at least 8**3 = 512 files, are not merged again within their hour.
_FULL = 3
# The bounds of `_most_across`; the upper one is half a second of work.
_LEAST_ACROSS, _MOST_ACROSS = 128, 4096
# The maximum manifests read for one merge; a table with more takes several publishes.
_MOST_INPUTS = 64
# A manifest of one of the newest hours contains only that hour.
_RECENT_HOURS = 24

# Bounds of a manifest whose hours are not known.
_FIRST, _LAST = "", "\U0010ffff"


@dataclass(frozen=True)
class HourManifest:
    """A manifest with live data files, and the hours `first` to `last` (included) it may have."""

    manifest: ManifestFile
    first: str
    last: str

    @property
    def files(self) -> int:
        return (self.manifest.added_files_count or 0) + (self.manifest.existing_files_count or 0)

    @property
    def rows(self) -> int:
        return (self.manifest.added_rows_count or 0) + (self.manifest.existing_rows_count or 0)

    @property
    def hour(self) -> str | None:
        """Its only hour; None if it may contain several."""
        return self.first if self.first == self.last else None

    def may_hold(self, hour: str) -> bool:
        return self.first <= hour <= self.last

    def is_within(self, hours: Sequence[str]) -> bool:
        """Return whether every hour that it may contain is in `hours` (sorted)."""
        if self.first == _FIRST:
            return False
        begin, end = bisect_left(hours, self.first), bisect_right(hours, self.last)
        return end - begin == (start_of(self.last) - start_of(self.first)) // timedelta(hours=1) + 1


@dataclass(frozen=True)
class Slot:
    """A manifest, or a new one's files, for `plan_merges`. `touched`: its hour gets files now."""

    key: str
    spec_id: int
    first: str
    last: str
    files: int
    touched: bool = False


def hour_index(spec: PartitionSpec) -> int | None:
    """Return the index of the ingest hour in a file's partition; None if it has none."""
    names = [f.name for f in spec.fields]
    return names.index(HOUR) if HOUR in names else None


def own_spec_id(table: Table) -> int:
    """Return the id of the partition spec that `apply` made, the oldest one by the ingest hour if
    there is any. Another program may have set another default, which our writers do not follow:
    files of any spec are legal. Pure."""
    specs = table.specs()
    return min(specs, key=lambda id: (hour_index(specs[id]) is None, id))


def hour_of_file(table: Table, data_file: DataFile) -> str:
    """Return the ingest hour of a data file's partition. Raises ValueError if it has none."""
    index = hour_index(table.specs()[data_file.spec_id])
    if index is None:
        raise Terminal(
            f"table {'.'.join(table.name())}: expected every file to have a partition by {HOUR}, "
            f"found {data_file.file_path} of partition spec {data_file.spec_id}, which another "
            "program wrote; roll the branch back to its snapshot before it"
        )
    return str(data_file.partition[index])


def with_hours(table: Table, manifest: ManifestFile) -> HourManifest:
    """Return a manifest with its first and last hour of the manifest list."""
    index = hour_index(table.specs()[manifest.partition_spec_id])
    summaries = manifest.partitions
    if index is None or not summaries or len(summaries) <= index:
        return HourManifest(manifest, _FIRST, _LAST)
    summary = summaries[index]
    if summary.contains_null or summary.lower_bound is None or summary.upper_bound is None:
        return HourManifest(manifest, _FIRST, _LAST)
    return HourManifest(manifest, summary.lower_bound.decode(), summary.upper_bound.decode())


def list_manifests(
    table: Table, snapshot: Snapshot
) -> tuple[list[HourManifest], list[ManifestFile]]:
    """Return a snapshot's manifests with live data files, and its manifests of delete files, which
    only other programs write. Reads the manifest list once. Raises OSError."""
    data, others = [], []
    for manifest in snapshot.manifests(table.io):
        if manifest.content != ManifestContent.DATA:
            others.append(manifest)
        elif manifest.has_added_files() or manifest.has_existing_files():
            data.append(with_hours(table, manifest))
    return data, others


def read_entries(io: FileIO, manifests: Sequence[ManifestFile]) -> Iterator[list[ManifestEntry]]:
    """Return the live entries of each manifest, in order, read in parallel. Raises OSError."""
    if len(manifests) == 1:
        return iter([manifests[0].fetch_manifest_entry(io)])
    return ExecutorFactory.get_or_create().map(lambda m: m.fetch_manifest_entry(io), manifests)


def plan_merges(slots: Iterable[Slot]) -> list[tuple[Slot, ...]]:
    """Return groups of slots, each to become one manifest. Pure.

    1. Of the newest hour, and of recent hours with new files: eight or more of one size.
    2. Of the recent hour with the most slots among those without new files: all that are not full.
    3. Of older hours together: new files with the manifest whose hours include theirs; else the
       oldest of eight or more of one size, or of four or more large ones.

    So an hour has some tens of manifests while micro-batches come, and few afterwards. Older hours
    share manifests of about the square root of their number of files (`_most_across`). An entry is
    rewritten once for each size, and again when the table has four times the files.
    """
    slots = list(slots)
    hours = sorted({s.last for s in slots})
    recent = set(hours[-_RECENT_HOURS:])
    by_hour: dict[tuple[int, str], list[Slot]] = defaultdict(list)
    old: dict[int, list[Slot]] = defaultdict(list)
    for slot in slots:
        if slot.last not in recent:
            old[slot.spec_id].append(slot)
        elif slot.first == slot.last and _size(slot.files) < _FULL:
            by_hour[slot.spec_id, slot.last].append(slot)
    running = hours[-1:]
    groups = [
        _of_one_size(of_hour)
        for (_, hour), of_hour in by_hour.items()
        if [hour] == running or any(s.touched for s in of_hour)
    ]
    at_rest = [
        of_hour
        for (_, hour), of_hour in by_hour.items()
        if [hour] != running and len(of_hour) > 1 and not any(s.touched for s in of_hour)
    ]
    if at_rest:
        groups.append(_up_to(max(at_rest, key=len)))
    groups += [group for of_spec in old.values() for group in _across(of_spec)]
    return [group for group in groups if len(group) > 1]


def _size(files: int) -> int:
    """Return 0 for 1 to 7 files, 1 for 8 to 63, and so on."""
    return max(0, (files.bit_length() - 1) // 3)


def _most_across(files: int) -> int:
    """Return the maximum files of a manifest across hours, for this number of files of older hours.

    A reader of one hour reads the list of manifests and the entries of one manifest. By the square
    root both grow alike. A power of two, so that branches of almost the same files merge alike.
    """
    return min(max(1 << isqrt(files).bit_length(), _LEAST_ACROSS), _MOST_ACROSS)


def _of_one_size(slots: list[Slot], full: int = _FULL) -> tuple[Slot, ...]:
    """Return eight or more slots of one size below `full`. Slots of the next size are added if the
    merged slots are their eighth. Empty if there are no eight."""
    chosen: list[Slot] = []
    for size in range(full):
        here = [s for s in slots if _size(s.files) == size]
        total = sum(s.files for s in chosen)
        if chosen and _size(total) < size:
            break
        if len(here) + bool(chosen and _size(total) == size) >= _FAN_IN:
            chosen += here[: _MOST_INPUTS - len(chosen)]
    return tuple(chosen)


def _across(slots: list[Slot]) -> list[tuple[Slot, ...]]:
    slots = sorted(slots, key=lambda s: (s.last, s.first))
    most = _most_across(sum(s.files for s in slots))
    # Alone, the new files of a restated hour would later be merged with those of recent hours, and
    # every reader of the hours between would open that manifest.
    joined: dict[Slot, list[Slot]] = defaultdict(list)
    for new in slots:
        homes = (s for s in slots if not s.touched and s.first <= new.first and new.last <= s.last)
        if new.touched and (home := next(homes, None)) is not None:
            joined[home].append(new)
    if joined:
        return [_up_to([home, *new], 2 * most) for home, new in joined.items()]
    small = [s for s in slots if s.files <= most // 2]
    full = min(_size(most), _FULL)
    if chosen := _of_one_size(small, full):
        return [_up_to(sorted(chosen, key=slots.index), most)]
    large = [s for s in small if _size(s.files) >= full]
    return [_up_to(large, most)] if len(large) >= _FAN_IN // 2 else []


def _up_to(slots: list[Slot], most: int = _MOST_ACROSS) -> tuple[Slot, ...]:
    """Return the first slots that together make a manifest of at most `most` files."""
    chosen: list[Slot] = []
    total = 0
    for slot in slots[:_MOST_INPUTS]:
        if chosen and total + slot.files > most:
            break
        chosen.append(slot)
        total += slot.files
    return tuple(chosen)


def oldest_timestamps(table: Table, files: Iterable[DataFile], column: str) -> list[int]:
    """Return the minimum of a timestamp column, in milliseconds, in each file with bounds. Pure."""
    id = table.schema().find_field(column).field_id
    bounds = [(file.lower_bounds or {}).get(id) for file in files]
    return [
        int.from_bytes(least, "little", signed=True) // 1000
        for least in bounds
        if least is not None
    ]


def files_of(table: Table, branch: str, hour: str) -> tuple[DataFile, ...]:
    """Return a branch's data files of an hour. Opens only manifests that may contain the hour."""
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
    """Return the hours whose files may differ between two branches, by their manifests."""
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
