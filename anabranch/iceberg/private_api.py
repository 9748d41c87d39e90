"""PyIceberg's private names that we need: no other module uses one. Each has no public counterpart
in the pinned version; `tests/unit/iceberg/test_private_api.py` names what an upgrade breaks."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from pyiceberg.io.pyarrow import PyArrowFileIO, _dataframe_to_data_files, _import_retry_strategy

if TYPE_CHECKING:
    import pyarrow as pa
    from pyarrow.fs import FileSystem
    from pyiceberg.catalog.sql import SqlCatalog
    from pyiceberg.io import FileIO
    from pyiceberg.manifest import DataFile
    from pyiceberg.table import Table, Transaction
    from pyiceberg.table.metadata import TableMetadata
    from pyiceberg.table.update import TableRequirement, TableUpdate


def write_data_files(metadata: TableMetadata, rows: pa.Table, io: FileIO) -> Iterable[DataFile]:
    """Write rows into files of their partitions; the public `Table.append` commits them too. Raises
    OSError."""
    return _dataframe_to_data_files(metadata, rows, io)


def updates_of(tx: Transaction) -> tuple[TableUpdate, ...]:
    """The updates of an open transaction; the public `commit_transaction` sends them with its own
    requirements."""
    return tuple(tx._updates)


def requirements_of(tx: Transaction) -> tuple[TableRequirement, ...]:
    """The requirements of an open transaction."""
    return tuple(tx._requirements)


def open_file_system(io: PyArrowFileIO, scheme: str, netloc: str | None) -> FileSystem:
    """A new file system for a scheme and a bucket or host, with all properties of `io`."""
    return io._initialize_fs(scheme, netloc)


def retry_strategy(name: str) -> Any:
    """A retry strategy of PyArrow by its class's name, as `s3.retry-strategy-impl` has it; None if
    there is none."""
    return _import_retry_strategy(name)


def has_types(catalog: SqlCatalog) -> bool:
    """Whether a SQL catalog's rows say what they are: tables or views."""
    return catalog._schema_version == "v1"


def open_row(catalog: SqlCatalog, row: Any) -> Table:
    """The table of a SQL catalog's row, by its metadata file. Raises as the public `load_table`."""
    return catalog._convert_orm_to_iceberg(row)
