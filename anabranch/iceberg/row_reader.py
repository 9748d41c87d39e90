"""Rows of a table's data files in its current columns, read in a task or in the driver."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
from pyiceberg.expressions import AlwaysTrue
from pyiceberg.io import FileIO
from pyiceberg.io.pyarrow import ArrowScan
from pyiceberg.manifest import DataFile
from pyiceberg.table import FileScanTask
from pyiceberg.table.metadata import TableMetadata

from anabranch.iceberg.file_io import for_tasks

if TYPE_CHECKING:
    from pyiceberg.table import Table

# PyArrow reads some batches of so many rows ahead, and some files, since small ones take requests.
_ROWS, _AHEAD, _FILES_AHEAD = 16_384, 2, 4
_PARQUET = ds.ParquetFileFormat()


@dataclass(frozen=True)
class RowReader:
    """Reads rows of a table's files, with its columns (`schema`). `metadata`: the table's, if a
    column was renamed, so that columns are found by their ids. Picklable."""

    io: FileIO
    schema: pa.Schema
    metadata: TableMetadata | None

    @staticmethod
    def of(table: Table) -> RowReader:
        metadata = None
        if not is_readable_by_name(table):
            history = dict[str, Any](snapshots=[], snapshot_log=[], metadata_log=[], refs={})
            metadata = table.metadata.model_copy(update=history)
        return RowReader(for_tasks(table.io), table.schema().as_arrow(), metadata)

    def read(
        self,
        files: Sequence[DataFile],
        columns: Sequence[str] | None = None,
        condition: pc.Expression | None = None,
    ) -> pa.RecordBatchReader:
        """Return the rows of files, some at a time."""
        options = {"columns": columns and [*columns], "filter": condition, "batch_size": _ROWS}
        if self.metadata is not None:
            rows = ds.dataset(read_by_id(self.metadata, self.io, files))
            return rows.scanner(**options).to_reader()
        scanner = dataset_of(self.io, self.schema, files).scanner(
            **options, batch_readahead=_AHEAD, fragment_readahead=_FILES_AHEAD
        )
        return scanner.to_reader()


def read_by_id(metadata: TableMetadata, io: FileIO, files: Iterable[DataFile]) -> pa.Table:
    """Return the rows of files in memory. PyIceberg reads by field id, which is correct for a
    renamed column too."""
    scan = ArrowScan(metadata, io, metadata.schema(), AlwaysTrue())
    return scan.to_table([FileScanTask(file) for file in files])


def is_readable_by_name(table: Table) -> bool:
    """Return whether every column, nested ones too, has kept one name and one field id in all of
    the table's schemas."""
    pairs = {
        (schema.find_field(column).field_id, column)
        for schema in table.schemas().values()
        for column in schema.column_names
    }
    return (
        len({field_id for field_id, _ in pairs})
        == len(pairs)
        == len({column for _, column in pairs})
    )


def dataset_of(io: Any, schema: pa.Schema, files: Iterable[DataFile]) -> ds.FileSystemDataset:
    """Return a dataset of only these files, on any storage, with columns by name: a column that a
    file lacks is null, and types widen."""
    fragments = []
    for file in files:
        scheme, netloc, path = io.parse_location(file.file_path, io.properties)
        file_system = io.fs_by_scheme(scheme, netloc)
        # With its size given, opening a file takes one request less.
        fragments.append(
            _PARQUET.make_fragment(path, file_system, file_size=file.file_size_in_bytes)
        )
    return ds.FileSystemDataset(fragments, schema, _PARQUET)
