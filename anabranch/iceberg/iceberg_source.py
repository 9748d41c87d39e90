"""Another Iceberg table as a source of rows: its newest metadata file, read without a
catalog."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pyarrow as pa
from pyiceberg.expressions import AlwaysTrue
from pyiceberg.io.pyarrow import ArrowScan, schema_to_pyarrow
from pyiceberg.table import FileScanTask, StaticTable

from anabranch.common.errors import Refused
from anabranch.common.remote_errors import lake_errors
from anabranch.iceberg.file_io import for_tasks

if TYPE_CHECKING:
    from pyiceberg.io import FileIO
    from pyiceberg.table import Table
    from pyiceberg.table.metadata import TableMetadata

_METADATA = re.compile(r"metadata/v?(\d+)(?:-[^/]*)?\.(?:gz\.)?metadata\.json")


def find_metadata(names: Iterable[str], location: str) -> str | None:
    """Return the newest metadata file among the files of a folder; None if it is not an Iceberg
    table. Raises Refused if two files have the newest version: one of them was never committed."""
    versions = [
        (int(match[1]), name) for name in names if (match := _METADATA.fullmatch(name)) is not None
    ]
    newest = max((version for version, _ in versions), default=None)
    found = sorted(name for version, name in versions if version == newest)
    if len(found) > 1:
        raise Refused(
            f"read {location}: expected one newest metadata file, found {' and '.join(found)}: "
            "one of them was never committed; name the one that the catalog has: "
            "…/NAME.metadata.json"
        )
    return found[0] if found else None


@dataclass(frozen=True)
class IcebergPart:
    """One data file of a table, read in the table's current columns without deleted rows (delete
    files)."""

    metadata: TableMetadata
    io: FileIO
    task: FileScanTask

    @property
    def path(self) -> str:
        return self.task.file.file_path

    @property
    def schema_arrow(self) -> pa.Schema:
        return schema_to_pyarrow(self.metadata.schema(), include_field_ids=False)

    def iter_batches(self, batch_size: int, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
        """Yield the rows with some columns. Raises Transient."""
        with lake_errors(f"read {self.task.file.file_path}"):
            projected = self.metadata.schema().select(*columns)
            scan = ArrowScan(self.metadata, self.io, projected, AlwaysTrue())
            for batch in scan.to_record_batches([self.task]):
                yield from (
                    batch.slice(begin, batch_size) for begin in range(0, batch.num_rows, batch_size)
                )


def open_parts(io: FileIO, metadata: str) -> tuple[int, list[IcebergPart]]:
    """Return the parts of the table of a metadata file, as `parts_of`. Raises Transient."""
    with lake_errors(f"read {metadata}"):
        return parts_of(StaticTable.from_metadata(metadata, dict(io.properties)), metadata)


def parts_of(table: Table, name: str) -> tuple[int, list[IcebergPart]]:
    """Return the id of a table's current snapshot and its data files, ordered by path. Raises
    Refused for a table without rows, or with equality deletes, which PyIceberg does not read;
    Transient."""
    with lake_errors(f"read {name}"):
        snapshot = table.current_snapshot()
        tasks = sorted(table.scan().plan_files(), key=lambda task: task.file.file_path)
        if snapshot is None or not tasks:
            raise Refused(
                f"read {name}: expected a table with rows, found one without a snapshot or without "
                "files; check its location"
            )
        summary = snapshot.summary
        if summary is not None and summary.get("total-equality-deletes") not in (None, "0"):
            raise Refused(
                f"read {name}: expected a table without equality deletes, found some, as Flink "
                "writes them; run Spark's rewrite_data_files with delete-file-threshold 1 on it "
                "first"
            )
    io = for_tasks(table.io)
    return snapshot.snapshot_id, [IcebergPart(table.metadata, io, task) for task in tasks]
