"""PyIceberg's private names that we need: no other module uses one. Each has no public counterpart in the pinned
version; `tests/unit/iceberg/test_private_api.py` names what an upgrade breaks."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import pyiceberg.avro.file
from pyiceberg.avro.file import AvroFileHeader
from pyiceberg.avro.reader import Reader
from pyiceberg.avro.resolver import resolve_reader
from pyiceberg.io.pyarrow import PyArrowFileIO, _dataframe_to_data_files, _import_retry_strategy
from pyiceberg.schema import Schema
from pyiceberg.typedef import EMPTY_DICT
from pyiceberg.utils.schema_conversion import AvroSchemaConversion

if TYPE_CHECKING:
    import pyarrow as pa
    from pyarrow.fs import FileSystem
    from pyiceberg.io import FileIO
    from pyiceberg.manifest import DataFile
    from pyiceberg.table import Transaction
    from pyiceberg.table.metadata import TableMetadata
    from pyiceberg.table.update import TableRequirement, TableUpdate


_MOST_READERS = 256
_Key = tuple[int, int, frozenset[tuple[int, object]], frozenset[tuple[int, object]]]
# With the schemas that a key names by their ids, so that no other objects have these.
_readers: dict[_Key, tuple[Schema, Schema, Reader]] = {}


@lru_cache(maxsize=_MOST_READERS)
def _schema_of(text: str) -> Schema:
    return AvroSchemaConversion().avro_to_iceberg(json.loads(text))


def _reader_of(
    file_schema: Schema,
    read_schema: Schema,
    read_types: Mapping[int, Any] = EMPTY_DICT,
    read_enums: Mapping[int, Any] = EMPTY_DICT,
) -> Reader:
    key = (id(file_schema), id(read_schema), frozenset(read_types.items()), frozenset(read_enums.items()))
    if (known := _readers.get(key)) is None:
        if len(_readers) >= _MOST_READERS:
            _readers.clear()
        known = _readers[key] = (
            file_schema, read_schema, resolve_reader(file_schema, read_schema, dict(read_types), dict(read_enums)),
        )  # fmt: skip
    return known[2]


def _get_schema(header: AvroFileHeader) -> Schema:
    text = header.meta.get("avro.schema")
    return _schema_of(text) if text is not None else _get_schema_once(header)


def _construct_reader(file_schema: Schema, read_types: Mapping[int, Any] = EMPTY_DICT) -> Reader:
    return _reader_of(file_schema, file_schema, read_types)


# PyIceberg builds schema and reader of a manifest or a manifest list again for each file, which takes longer than to
# read it. Neither has any state, and a table's files have few schemas.
_get_schema_once = AvroFileHeader.get_schema
for _owner, _name, _ours in (
    (AvroFileHeader, "get_schema", _get_schema),
    (pyiceberg.avro.file, "resolve_reader", _reader_of),
    (pyiceberg.avro.file, "construct_reader", _construct_reader),
):
    setattr(_owner, _name, _ours)


def write_data_files(metadata: TableMetadata, rows: pa.Table, io: FileIO) -> Iterable[DataFile]:
    """Write rows into files of their partitions; the public `Table.append` commits them too. Raises OSError."""
    return _dataframe_to_data_files(metadata, rows, io)


def updates_of(tx: Transaction) -> tuple[TableUpdate, ...]:
    """The updates of an open transaction; the public `commit_transaction` sends them with its own requirements."""
    return tuple(tx._updates)


def requirements_of(tx: Transaction) -> tuple[TableRequirement, ...]:
    """The requirements of an open transaction."""
    return tuple(tx._requirements)


def open_file_system(io: PyArrowFileIO, scheme: str, netloc: str | None) -> FileSystem:
    """A new file system for a scheme and a bucket or host, with all properties of `io`."""
    return io._initialize_fs(scheme, netloc)


def retry_strategy(name: str) -> Any:
    """A retry strategy of PyArrow by its class's name, as `s3.retry-strategy-impl` has it; None if there is none."""
    return _import_retry_strategy(name)
