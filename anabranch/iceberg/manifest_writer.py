"""A writer of manifests, manifest lists and snapshots with PyIceberg's public writers."""

from __future__ import annotations

import uuid
from collections.abc import Collection, Iterable, Sequence
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
from pyiceberg.table.snapshots import Snapshot, Summary

if TYPE_CHECKING:
    from pyiceberg.table import Table


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
        """Write a manifest of `kept` entries of other manifests and of new files (`fresh`). Raises
        OSError."""
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
