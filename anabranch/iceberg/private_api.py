"""PyIceberg's private names that we need; no other module uses one. The pinned version has no
public alternative. `tests/unit/iceberg/test_private_api.py` names those that an upgrade breaks."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from pyiceberg.io.pyarrow import PyArrowFileIO, _dataframe_to_data_files, _import_retry_strategy

if TYPE_CHECKING:
    import pyarrow as pa
    from pyarrow.fs import FileSystem
    from pyiceberg.io import FileIO
    from pyiceberg.manifest import DataFile
    from pyiceberg.table import Table, Transaction
    from pyiceberg.table.metadata import TableMetadata
    from pyiceberg.table.update import TableRequirement, TableUpdate


def write_data_files(metadata: TableMetadata, rows: pa.Table, io: FileIO) -> Iterable[DataFile]:
    """Write rows into files of their partitions, without a commit. Raises OSError."""
    return _dataframe_to_data_files(metadata, rows, io)


def updates_of(tx: Transaction) -> tuple[TableUpdate, ...]:
    """Return the updates of an open transaction, which its own commit would send differently."""
    return tuple(tx._updates)


def requirements_of(tx: Transaction) -> tuple[TableRequirement, ...]:
    """Return the requirements of an open transaction."""
    return tuple(tx._requirements)


def table_of(tx: Transaction) -> Table:
    """Return the table that a transaction changes or creates."""
    return tx._table


def open_file_system(io: PyArrowFileIO, scheme: str, netloc: str | None) -> FileSystem:
    """Return a new file system for a scheme and a bucket or host, with all properties of `io`."""
    return io._initialize_fs(scheme, netloc)


def retry_strategy(name: str) -> Any:
    """Return PyArrow's retry strategy of a class name (`s3.retry-strategy-impl`), if any."""
    return _import_retry_strategy(name)
