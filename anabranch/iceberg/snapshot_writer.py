"""The writer of the manifests and the manifest list of a branch's next snapshot, with PyIceberg's
own writers.

PyIceberg's transaction writes one manifest for each append and reads every manifest of a branch to
replace a file. Here manifests are kept by ingest hour (`anabranch.iceberg.manifests`): swapping an
hour omits its manifests, small manifests are merged, and branches with equal changes share new
manifests (decision 14).
"""

from __future__ import annotations

import logging
import uuid
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pyiceberg.manifest import (
    DataFile,
    ManifestEntry,
    ManifestEntryStatus,
    ManifestFile,
    write_manifest,
    write_manifest_list,
)
from pyiceberg.table import Table, TableProperties
from pyiceberg.table.snapshots import Operation, Snapshot, Summary

from anabranch.common.arrays import grouped
from anabranch.iceberg.commits import Change
from anabranch.iceberg.manifests import (
    HourManifest,
    Slot,
    hour_of_file,
    list_manifests,
    plan_merges,
    read_entries,
    with_hours,
)


class ManifestWriter:
    """A writer of one commit's snapshots, one after the other: `begin_snapshot`, then its
    manifests, then `write_snapshot`. `written`: the paths of all files written so far."""

    def __init__(self, table: Table, timestamp_ms: int) -> None:
        self._table, self._timestamp_ms = table, timestamp_ms
        self._commit = uuid.uuid4()
        self._provider = table.location_provider()
        properties = table.metadata.properties
        self._codec: Any = properties.get(
            TableProperties.WRITE_AVRO_COMPRESSION, TableProperties.WRITE_AVRO_COMPRESSION_DEFAULT
        )
        self._sequence = table.metadata.next_sequence_number() - 1
        self._snapshot_id = 0
        self.written: list[str] = []

    def begin_snapshot(self) -> None:
        """Assign an id and a sequence number to the next snapshot."""
        self._snapshot_id, self._sequence = (
            self._table.metadata.new_snapshot_id(),
            self._sequence + 1,
        )

    def write_manifest(
        self, spec_id: int, kept: Iterable[ManifestEntry], fresh: Iterable[DataFile] = ()
    ) -> ManifestFile:
        """Write a manifest of other manifests' `kept` entries and `fresh` files. Raises OSError."""
        metadata, path = (
            self._table.metadata,
            self._new_path(f"{self._commit}-m{len(self.written)}.avro"),
        )
        writer = write_manifest(
            format_version=metadata.format_version,
            spec=metadata.specs()[spec_id],
            schema=metadata.schema(),
            output_file=self._table.io.new_output(path),
            snapshot_id=self._snapshot_id,
            avro_compression=self._codec,
        )
        with writer:
            for data_file in fresh:
                writer.add(
                    ManifestEntry.from_args(status=ManifestEntryStatus.ADDED, data_file=data_file)
                )
            for entry in kept:
                writer.existing(entry)
        return _numbered(writer.to_manifest_file(), self._sequence)

    def write_snapshot(
        self, parent: Snapshot | None, manifests: Sequence[ManifestFile], summary: Summary
    ) -> Snapshot:
        """Write the manifest list of a snapshot; return the snapshot. Raises OSError."""
        metadata, parent_id = (
            self._table.metadata,
            parent.snapshot_id if parent is not None else None,
        )
        path = self._new_path(f"snap-{self._snapshot_id}-0-{self._commit}.avro")
        with write_manifest_list(
            format_version=metadata.format_version,
            output_file=self._table.io.new_output(path),
            snapshot_id=self._snapshot_id,
            parent_snapshot_id=parent_id,
            sequence_number=self._sequence,
            avro_compression=self._codec,
        ) as writer:
            writer.add_manifests(list(manifests))
        return Snapshot(
            snapshot_id=self._snapshot_id,
            parent_snapshot_id=parent_id,
            sequence_number=self._sequence,
            timestamp_ms=self._timestamp_ms,
            manifest_list=path,
            summary=summary,
            schema_id=metadata.current_schema_id,
        )

    def _new_path(self, name: str) -> str:
        path = str(self._provider.new_metadata_location(name))
        self.written.append(path)
        return path


def counts_of(added: Collection[DataFile], removed_files: int, removed_rows: int) -> dict[str, str]:
    """Return the summary's counts of a snapshot's changes. Pure."""
    counts = {
        "added-data-files": len(added),
        "added-records": sum(f.record_count for f in added),
        "added-files-size": sum(f.file_size_in_bytes for f in added),
        "deleted-data-files": removed_files,
        "deleted-records": removed_rows,
    }
    return {k: str(v) for k, v in counts.items() if v}


def _numbered(manifest: ManifestFile, sequence: int) -> ManifestFile:
    """Set the manifest's sequence number to that of the snapshot that adds it; return it. The
    writer of a manifest list would assign its own snapshot's number, but the list of another
    branch, with a later number, may contain this manifest too."""
    manifest.sequence_number = sequence
    if manifest.min_sequence_number < 0:
        manifest.min_sequence_number = sequence
    return manifest


LOG = logging.getLogger(__name__)


@dataclass
class _Content:
    """The next content of a branch: manifests of data files (`manifests`) and of delete files
    (`others`), and the number of removed files and rows."""

    manifests: list[HourManifest]
    others: list[ManifestFile]
    removed_files: int = 0
    removed_rows: int = 0


class SnapshotWriter(ManifestWriter):
    """A writer of one commit's snapshots, which have one timestamp."""

    def __init__(self, table: Table, timestamp_ms: int) -> None:
        super().__init__(table, timestamp_ms)
        # Manifests by their contents: another branch may need the same one.
        self._made: dict[tuple[object, ...], HourManifest | None] = {}

    def write(self, change: Change, properties: Mapping[str, str]) -> Snapshot:
        """Write the next snapshot of a branch, after its head in the loaded table. Raises OSError,
        and ValueError if a file to remove is missing."""
        parent = self._head(change.branch)
        self.begin_snapshot()
        content = self._remove(_Content(*list_manifests(self._table, parent)), change)
        for hour, origin in change.copy.items():
            content.manifests += self._hour_manifests(origin, hour)
        content.manifests = self._add_files(content.manifests, change.add)
        operation = Operation.APPEND
        if change.rewrites:
            operation = Operation.REPLACE
        elif change.remove or change.clear or change.copy:
            operation = Operation.OVERWRITE
        summary = Summary(operation, **_counts(change, content), **properties)
        return self.write_snapshot(
            parent, [*(m.manifest for m in content.manifests), *content.others], summary
        )

    def _head(self, branch: str) -> Snapshot:
        metadata = self._table.metadata
        snapshot = metadata.snapshot_by_id(metadata.refs[branch].snapshot_id)
        assert snapshot is not None
        return snapshot

    def _remove(self, content: _Content, change: Change) -> _Content:
        """Remove the change's hours and files of a branch. Raises OSError, ValueError (missing)."""
        hours = {*change.clear, *change.copy}
        paths: dict[str, set[str]] = defaultdict(set)
        for data_file in change.remove:
            paths[hour_of_file(self._table, data_file)].add(data_file.file_path)
        ordered = sorted(hours)
        kept: list[HourManifest] = []
        to_read: list[HourManifest] = []
        for manifest in content.manifests:
            # Decision 14: all files of the manifest are of removed hours, so it is omitted unread.
            if manifest.is_within(ordered):
                content.removed_files += manifest.files
                content.removed_rows += manifest.rows
            elif any(manifest.may_hold(h) for h in (*hours, *paths)):
                to_read.append(manifest)
            else:
                kept.append(manifest)
        missing = {path for of_hour in paths.values() for path in of_hour}
        for manifest, entries in zip(to_read, self._read(to_read), strict=True):
            left = []
            for entry in entries:
                path = entry.data_file.file_path
                if path in missing or hour_of_file(self._table, entry.data_file) in hours:
                    missing.discard(path)
                    content.removed_files += 1
                    content.removed_rows += entry.data_file.record_count
                else:
                    left.append(entry)
            if len(left) == len(entries):
                kept.append(manifest)
                continue
            key = (
                "left",
                manifest.manifest.manifest_path,
                frozenset(e.data_file.file_path for e in left),
            )
            made = self._write_once(key, manifest.manifest.partition_spec_id, left)
            kept += [made] if made is not None else []
        # The rows of a file that is not there may be in another file: they would be doubled by the
        # files that this change adds in its place.
        if missing:
            raise ValueError(
                f"table {'.'.join(self._table.name())}: expected to remove {sorted(missing)[0]} "
                f"from branch {change.branch}, found none ({len(missing)} such files)"
            )
        content.manifests = kept
        return content

    def _hour_manifests(self, branch: str, hour: str) -> list[HourManifest]:
        """Return an hour's manifests on another branch; one with other hours too is replaced."""
        listed = [m for m in list_manifests(self._table, self._head(branch))[0] if m.may_hold(hour)]
        manifests = [m for m in listed if m.hour == hour]
        mixed = [m for m in listed if m.hour != hour]
        for manifest, entries in zip(mixed, self._read(mixed), strict=True):
            of_hour = [e for e in entries if hour_of_file(self._table, e.data_file) == hour]
            key = ("of", manifest.manifest.manifest_path, hour)
            made = self._write_once(key, manifest.manifest.partition_spec_id, of_hour)
            manifests += [made] if made is not None else []
        return manifests

    def _add_files(
        self, manifests: list[HourManifest], files: Iterable[DataFile]
    ) -> list[HourManifest]:
        """Add a manifest of new files for each hour, and merge small manifests."""
        new = grouped(files, lambda file: (file.spec_id, hour_of_file(self._table, file)))
        existing = {m.manifest.manifest_path: m for m in manifests}
        touched = {hour for _, hour in new}
        slots = [
            Slot(path, m.manifest.partition_spec_id, m.first, m.last, m.files, m.hour in touched)
            for path, m in existing.items()
        ]
        added = {f"{spec_id} {hour}": of_hour for (spec_id, hour), of_hour in new.items()}
        slots += [
            Slot(f"{spec_id} {hour}", spec_id, hour, hour, len(of_hour), True)
            for (spec_id, hour), of_hour in new.items()
        ]
        merged: list[HourManifest] = []
        for group in plan_merges(slots):
            inputs = [existing.pop(s.key) for s in group if s.key in existing]
            fresh = [f for s in group for f in added.pop(s.key, ())]
            merged += self._merge(group[0].spec_id, inputs, fresh)
        for slot in slots:
            if slot.key in added:
                merged += self._merge(slot.spec_id, [], added[slot.key])
        return [*merged, *existing.values()]

    def _merge(
        self, spec_id: int, inputs: Sequence[HourManifest], fresh: Sequence[DataFile]
    ) -> list[HourManifest]:
        key = (
            "merged",
            frozenset(m.manifest.manifest_path for m in inputs),
            frozenset(f.file_path for f in fresh),
        )
        if key not in self._made:
            entries = [entry for of_one in self._read(inputs) for entry in of_one]
            self._write_once(key, spec_id, entries, fresh)
        made = self._made[key]
        return [made] if made is not None else []

    def _read(self, manifests: Sequence[HourManifest]) -> list[list[ManifestEntry]]:
        return (
            list(read_entries(self._table.io, [m.manifest for m in manifests])) if manifests else []
        )

    def _write_once(
        self,
        key: tuple[object, ...],
        spec_id: int,
        kept: Sequence[ManifestEntry],
        fresh: Sequence[DataFile] = (),
    ) -> HourManifest | None:
        """Return a manifest of kept entries and new files: the one that this commit wrote for
        another branch, or a new one. None without entries."""
        if key not in self._made:
            self._made[key] = (
                with_hours(self._table, self.write_manifest(spec_id, kept, fresh))
                if kept or fresh
                else None
            )
        return self._made[key]


def delete_quietly(table: Table, paths: Iterable[str]) -> None:
    """Delete unreferenced files. A failure is logged at debug level: the file is an orphan."""
    for path in paths:
        try:
            table.io.delete(path)
        except Exception as error:
            LOG.debug("delete %s: %s: %s", path, type(error).__name__, error)


def _counts(change: Change, content: _Content) -> dict[str, str]:
    """Return the summary's counts, and its totals over the new manifests. It has no sizes of
    removed files: they would need a read of the removed manifests."""
    totals = {
        "total-data-files": sum(m.files for m in content.manifests),
        "total-records": sum(m.rows for m in content.manifests),
        "total-delete-files": 0,
        "total-position-deletes": 0,
        "total-equality-deletes": 0,
    }
    return counts_of(change.add, content.removed_files, content.removed_rows) | {
        k: str(v) for k, v in totals.items()
    }
