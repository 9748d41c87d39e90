"""Write the manifests and the manifest list of a branch's next snapshot, with PyIceberg's own
writers.

PyIceberg's transaction writes one manifest for each append and reads every manifest of a branch to
replace a file. Here manifests are kept by ingest hour (`anabranch.iceberg.manifests`): an hour is
swapped by leaving its manifests out, small ones are merged, and branches that change alike share
what is written (decision 14).
"""

from __future__ import annotations

import logging
import uuid
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pyiceberg.manifest import (
    DataFile,
    ManifestEntry,
    ManifestEntryStatus,
    ManifestFile,
    write_manifest,
    write_manifest_list,
)
from pyiceberg.table import TableProperties
from pyiceberg.table.snapshots import Operation, Snapshot, Summary

from anabranch.iceberg.manifests import (
    HourManifest,
    Slot,
    hour_of_file,
    list_manifests,
    plan_merges,
    read_entries,
    with_hours,
)

if TYPE_CHECKING:
    from pyiceberg.table import Table

    from anabranch.iceberg.commits import Change

LOG = logging.getLogger(__name__)

_MANIFEST_FIELDS = (
    "manifest_path", "manifest_length", "partition_spec_id", "content", "sequence_number", "min_sequence_number",
    "added_snapshot_id", "added_files_count", "existing_files_count", "deleted_files_count", "added_rows_count",
    "existing_rows_count", "deleted_rows_count", "partitions", "key_metadata",
)  # fmt: skip


@dataclass
class _Content:
    """The next content of a branch: existing manifests, new files, and removed entries."""

    manifests: list[HourManifest]
    others: list[ManifestFile]
    removed_files: int = 0
    removed_rows: int = 0


class SnapshotWriter:
    """Writes the snapshots of one commit, with one timestamp. `written`: the paths of all files
    written so far."""

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
        # Manifests written for one branch, by their contents: another branch may need the same.
        self._made: dict[tuple[object, ...], HourManifest | None] = {}
        self.written: list[str] = []

    def write(self, change: Change, properties: Mapping[str, str]) -> Snapshot:
        """The next snapshot of a branch, over its head in the loaded table. Raises OSError, and
        ValueError when a file to remove is missing."""
        metadata = self._table.metadata
        parent = self._head(change.branch)
        self._snapshot_id, self._sequence = metadata.new_snapshot_id(), self._sequence + 1
        content = self._without(_Content(*list_manifests(self._table, parent)), change)
        for hour, origin in change.copy.items():
            content.manifests += self._of_hour(origin, hour)
        content.manifests = self._with(content.manifests, change.add)
        operation = Operation.APPEND
        if change.rewrites:
            operation = Operation.REPLACE
        elif change.remove or change.clear or change.copy:
            operation = Operation.OVERWRITE
        summary = Summary(operation, **_counts(change, content), **properties)
        return Snapshot(
            snapshot_id=self._snapshot_id,
            parent_snapshot_id=parent.snapshot_id,
            sequence_number=self._sequence,
            timestamp_ms=self._timestamp_ms,
            manifest_list=self._write_list(parent.snapshot_id, content),
            summary=summary,
            schema_id=metadata.current_schema_id,
        )

    def _head(self, branch: str) -> Snapshot:
        metadata = self._table.metadata
        snapshot = metadata.snapshot_by_id(metadata.refs[branch].snapshot_id)
        assert snapshot is not None
        return snapshot

    def _without(self, content: _Content, change: Change) -> _Content:
        """The content of a branch without the removed hours and files."""
        hours = {*change.clear, *change.copy}
        paths: dict[str, set[str]] = defaultdict(set)
        for data_file in change.remove:
            paths[hour_of_file(self._table, data_file)].add(data_file.file_path)
        ordered = sorted(hours)
        kept: list[HourManifest] = []
        to_read: list[HourManifest] = []
        for manifest in content.manifests:
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
            key = ("left", manifest.manifest.manifest_path, frozenset(e.data_file.file_path for e in left))
            made = self._once(key, manifest.manifest.partition_spec_id, left)
            kept += [made] if made is not None else []
        if missing:
            raise ValueError(
                f"table {'.'.join(self._table.name())}: expected to remove {sorted(missing)[0]} from branch "
                f"{change.branch}, found none ({len(missing)} such files)"
            )
        content.manifests = kept
        return content

    def _of_hour(self, branch: str, hour: str) -> list[HourManifest]:
        """The manifests of an hour on another branch; for a manifest with other hours too, a new
        one of this hour."""
        listed = [m for m in list_manifests(self._table, self._head(branch))[0] if m.may_hold(hour)]
        manifests = [m for m in listed if m.hour == hour]
        mixed = [m for m in listed if m.hour != hour]
        for manifest, entries in zip(mixed, self._read(mixed), strict=True):
            of_hour = [e for e in entries if hour_of_file(self._table, e.data_file) == hour]
            key = ("of", manifest.manifest.manifest_path, hour)
            made = self._once(key, manifest.manifest.partition_spec_id, of_hour)
            manifests += [made] if made is not None else []
        return manifests

    def _with(self, manifests: list[HourManifest], files: Iterable[DataFile]) -> list[HourManifest]:
        """The manifests plus those of new files, one for each hour, with small ones merged."""
        new: dict[tuple[int, str], list[DataFile]] = defaultdict(list)
        for data_file in files:
            new[data_file.spec_id, hour_of_file(self._table, data_file)].append(data_file)
        there = {m.manifest.manifest_path: m for m in manifests}
        touched = {hour for _, hour in new}
        slots = [
            Slot(path, m.manifest.partition_spec_id, m.first, m.last, m.files, m.hour in touched)
            for path, m in there.items()
        ]
        added = {f"{spec_id} {hour}": of_hour for (spec_id, hour), of_hour in new.items()}
        slots += [
            Slot(f"{spec_id} {hour}", spec_id, hour, hour, len(of_hour), True)
            for (spec_id, hour), of_hour in new.items()
        ]
        merged: list[HourManifest] = []
        for group in plan_merges(slots):
            inputs = [there.pop(s.key) for s in group if s.key in there]
            fresh = [f for s in group for f in added.pop(s.key, ())]
            merged += self._merge(group[0].spec_id, inputs, fresh)
        for slot in slots:
            if slot.key in added:
                merged += self._merge(slot.spec_id, [], added[slot.key])
        return [*merged, *there.values()]

    def _merge(self, spec_id: int, inputs: Sequence[HourManifest], fresh: Sequence[DataFile]) -> list[HourManifest]:
        key = ("merged", frozenset(m.manifest.manifest_path for m in inputs), frozenset(f.file_path for f in fresh))
        if key not in self._made:
            entries = [entry for of_one in self._read(inputs) for entry in of_one]
            self._once(key, spec_id, entries, fresh)
        made = self._made[key]
        return [made] if made is not None else []

    def _read(self, manifests: Sequence[HourManifest]) -> list[list[ManifestEntry]]:
        return list(read_entries(self._table.io, [m.manifest for m in manifests])) if manifests else []

    def _once(
        self, key: tuple[object, ...], spec_id: int, kept: Sequence[ManifestEntry], fresh: Sequence[DataFile] = ()
    ) -> HourManifest | None:
        """A manifest of kept entries and new files; reuses one that was written for another branch
        of this commit. None without entries."""
        if key not in self._made:
            self._made[key] = self._write_manifest(spec_id, kept, fresh) if kept or fresh else None
        return self._made[key]

    def _write_manifest(self, spec_id: int, kept: Sequence[ManifestEntry], fresh: Sequence[DataFile]) -> HourManifest:
        metadata, path = self._table.metadata, self._new_path(f"{self._commit}-m{len(self.written)}.avro")
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
                writer.add(ManifestEntry.from_args(status=ManifestEntryStatus.ADDED, data_file=data_file))
            for entry in kept:
                writer.existing(entry)
        return with_hours(self._table, _numbered(writer.to_manifest_file(), self._sequence))

    def _write_list(self, parent_id: int, content: _Content) -> str:
        path = self._new_path(f"snap-{self._snapshot_id}-0-{self._commit}.avro")
        with write_manifest_list(
            format_version=self._table.metadata.format_version,
            output_file=self._table.io.new_output(path),
            snapshot_id=self._snapshot_id,
            parent_snapshot_id=parent_id,
            sequence_number=self._sequence,
            avro_compression=self._codec,
        ) as writer:
            writer.add_manifests([*(m.manifest for m in content.manifests), *content.others])
        return path

    def _new_path(self, name: str) -> str:
        path = str(self._provider.new_metadata_location(name))
        self.written.append(path)
        return path


def _numbered(manifest: ManifestFile, sequence: int) -> ManifestFile:
    """The manifest with the sequence number of the snapshot that adds it. The writer of a manifest list would give it
    that of its own snapshot, but the list of another branch, with a later number, may name this manifest too."""
    values = {field: getattr(manifest, field) for field in _MANIFEST_FIELDS}
    least = manifest.min_sequence_number
    values |= {"sequence_number": sequence, "min_sequence_number": least if least >= 0 else sequence}
    return ManifestFile.from_args(**values)


def delete_quietly(table: Table, paths: Iterable[str]) -> None:
    """Delete unreferenced files. Files left by a failure are orphans."""
    for path in paths:
        try:
            table.io.delete(path)
        except Exception as error:
            LOG.debug("delete %s: %s: %s", path, type(error).__name__, error)


def _counts(change: Change, content: _Content) -> dict[str, str]:
    """The summary's counts and totals over the new manifests. The sizes of removed files are
    unknown without reading them, so the summary has none."""
    counts = {
        "added-data-files": len(change.add),
        "added-records": sum(f.record_count for f in change.add),
        "added-files-size": sum(f.file_size_in_bytes for f in change.add),
        "deleted-data-files": content.removed_files,
        "deleted-records": content.removed_rows,
    }
    totals = {
        "total-data-files": sum(m.files for m in content.manifests),
        "total-records": sum(m.rows for m in content.manifests),
        "total-delete-files": 0,
        "total-position-deletes": 0,
        "total-equality-deletes": 0,
    }
    return {k: str(v) for k, v in counts.items() if v} | {k: str(v) for k, v in totals.items()}
