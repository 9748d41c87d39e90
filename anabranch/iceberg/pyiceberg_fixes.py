"""Replacements for slow and wrong parts of PyIceberg 0.12.0, installed when `lake` is imported.
Each is removed once a release is as fast, or right."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from copy import deepcopy
from functools import lru_cache, wraps
from io import BytesIO
from threading import Lock
from types import SimpleNamespace
from typing import Any, TypeVar
from uuid import UUID

import pyiceberg.avro.file
import pyiceberg.io.pyarrow
import pyiceberg.manifest
from pyiceberg.avro.file import MAGIC, AvroFile, AvroFileHeader, AvroOutputFile, D
from pyiceberg.avro.reader import Reader
from pyiceberg.avro.resolver import construct_writer, resolve_reader, resolve_writer
from pyiceberg.io import OutputFile
from pyiceberg.manifest import data_file_with_partition, manifest_entry_schema_with_data_file
from pyiceberg.partitioning import PartitionSpec
from pyiceberg.schema import Schema
from pyiceberg.serializers import ToOutputFile
from pyiceberg.table.metadata import TableMetadata, TableMetadataCommonFields, TableMetadataUtil
from pyiceberg.table.refs import SnapshotRef
from pyiceberg.table.snapshots import MetadataLogEntry, Snapshot, SnapshotLogEntry, Summary
from pyiceberg.table.sorting import SortOrder
from pyiceberg.typedef import EMPTY_DICT
from pyiceberg.types import StructType
from pyiceberg.utils.schema_conversion import AvroSchemaConversion

from anabranch.common.errors import FileGone
from anabranch.common.remote_errors import one_line

T = TypeVar("T")
Function = TypeVar("Function", bound=Callable[..., Any])

PARTS = (
    Schema,
    PartitionSpec,
    SortOrder,
    Snapshot,
    SnapshotRef,
    SnapshotLogEntry,
    MetadataLogEntry,
)
"""The parts of a table's metadata. PyIceberg declares them frozen and never changes one in
place."""
LISTS_OF_PARTS = (
    "schemas",
    "partition_specs",
    "sort_orders",
    "snapshots",
    "snapshot_log",
    "metadata_log",
    "refs",
    "properties",
)
"""The fields of a table's metadata that contain only parts or texts."""
_MOST_TABLES = 1 << 10
_MOST_SCHEMAS = 256


def share_parts() -> None:
    """Make deep copies of a table's metadata share its parts with the original.

    PyIceberg copies all metadata for each update of a transaction and for each commit: every field
    of every schema and every property of every snapshot.
    """
    for part in PARTS:
        part.__deepcopy__ = _itself  # type: ignore[method-assign,assignment]
    TableMetadataCommonFields.__deepcopy__ = _copy  # type: ignore[method-assign,assignment]


def _itself(part: T, memo: object = None) -> T:
    return part


def _copy(
    metadata: TableMetadataCommonFields, memo: dict[int, Any] | None = None
) -> TableMetadataCommonFields:
    copied = metadata.model_copy()
    values = vars(copied)
    for name, value in values.items():
        if isinstance(value, (list, dict)):
            values[name] = value.copy() if name in LISTS_OF_PARTS else deepcopy(value, memo)
    return copied


def share_metadata() -> None:
    """Cache the parsed metadata of each table, by the text of the newest file that this process
    read or wrote.

    The file is still read each time. PyIceberg would parse it for each load of a table, and again
    for each commit.
    """
    TableMetadataUtil.parse_raw = _PARSED.of  # type: ignore[method-assign,assignment]
    ToOutputFile.table_metadata = _write_metadata  # type: ignore[method-assign]


def read_summaries_directly() -> None:
    """Make snapshot summaries look up properties in their dict. Pydantic's look-up of a private
    attribute takes ten times as long."""
    Summary.__getitem__ = _property_of  # type: ignore[method-assign]
    Summary.additional_properties = property(_properties_of)  # type: ignore[assignment,method-assign]


def _properties_of(summary: Summary) -> dict[str, str]:
    private = summary.__pydantic_private__
    assert private is not None
    properties: dict[str, str] = private["_additional_properties"]
    return properties


def _property_of(summary: Summary, key: str) -> Any:
    return summary.operation if key.lower() == "operation" else _properties_of(summary).get(key)


def share_readers() -> None:
    """Cache the Iceberg schema and the reader of each Avro schema of manifests and manifest lists.
    Both are stateless.

    PyIceberg builds both again for each file, which takes longer than reading the file.
    """
    for owner, name, ours in (
        (AvroFileHeader, "get_schema", _get_schema),
        (pyiceberg.avro.file, "resolve_reader", _reader_of),
        (pyiceberg.avro.file, "construct_reader", _construct_reader),
    ):
        setattr(owner, name, ours)


def share_writers() -> None:
    """Cache the Avro schema and the writer of each schema of manifests. Both are stateless."""
    for owner, name, ours in (
        # By equality, not by `_once`: each manifest creates a new partition type, which is small.
        (
            pyiceberg.manifest,
            "data_file_with_partition",
            lru_cache(_MOST_SCHEMAS)(data_file_with_partition),
        ),
        (
            pyiceberg.manifest,
            "manifest_entry_schema_with_data_file",
            _once(manifest_entry_schema_with_data_file),
        ),
        (pyiceberg.avro.file, "construct_writer", _once(construct_writer)),
        (pyiceberg.avro.file, "resolve_writer", _once(resolve_writer)),
        (AvroSchemaConversion, "iceberg_to_avro", _iceberg_to_avro),
    ):
        setattr(owner, name, ours)


def write_one_block() -> None:
    """Make manifests of one Avro block. PyIceberg compresses each entry as a block of its own,
    which takes ten times the bytes, and half as much time again to read."""
    AvroOutputFile.write_block = _keep_block  # type: ignore[method-assign,assignment]
    AvroOutputFile.__exit__ = _write_kept_block  # type: ignore[method-assign]


def bound_texts() -> None:
    """Make upper bounds of texts step over surrogates, which no text may contain: PyIceberg fails
    on a text whose last character within the bound is U+D7FF."""
    pyiceberg.io.pyarrow.truncate_upper_bound_text_string = _upper_bound  # type: ignore[attr-defined]


def name_damaged_files() -> None:
    """Make reading a manifest, or a list of them, that is not whole raise FileGone with its name.
    PyIceberg's decoder reads past the end of a file that was cut short, and raises any error."""
    pyiceberg.manifest.AvroFile = _WholeFile  # type: ignore[attr-defined]


class _WholeFile(AvroFile[D]):
    """An Avro file that begins with Avro's magic bytes and ends with its sync marker."""

    def __enter__(self) -> _WholeFile[D]:
        with self.input_file.open() as stream:
            data = stream.read()
        # The bytes that are checked are those that are decoded, without a second request.
        read: Any = SimpleNamespace(location=self.input_file.location, open=lambda: BytesIO(data))
        self.input_file = read
        if not data.startswith(MAGIC):
            raise _damaged(read.location, f"a file that begins with {data[:8]!r}")
        try:
            super().__enter__()
        except Exception as error:
            raise _damaged(read.location, one_line(error)) from error
        if not data.endswith(self.header.sync):
            raise _damaged(read.location, "a file that was cut short")
        return self

    def __next__(self) -> D:
        try:
            return super().__next__()
        except StopIteration:
            raise
        except Exception as error:
            raise _damaged(self.input_file.location, one_line(error)) from error


def _damaged(location: str, found: str) -> FileGone:
    return FileGone(
        f"{location}: expected a whole manifest, or list of them, found {found}; restore it from a "
        'version of the bucket or a backup: docs/runbooks.md, "A manifest is gone"'
    )


def _upper_bound(value: str, trunc_length: int | None) -> str | None:
    result = value[:trunc_length]
    if result == value:
        return result
    for i in range(len(result) - 1, -1, -1):
        code = ord(result[i]) + 1
        code = 0xE000 if code == 0xD800 else code
        if code <= sys.maxunicode:
            return f"{result[:i]}{chr(code)}{result[i + 1 :]}"
    return None


def _once(function: Function) -> Function:
    """Cache a function's results by its arguments; schemas by identity, which is fast."""
    # A value also refers to the arguments, so that no other schema gets the id of a key.
    known: dict[object, tuple[object, Any]] = {}

    @wraps(function)
    def ours(*given: Any, **named: Any) -> Any:
        key = (*map(_key, given), *((name, _key(value)) for name, value in named.items()))
        if (found := known.get(key)) is None:
            if len(known) >= _MOST_SCHEMAS:
                known.clear()
            found = known[key] = (given, named), function(*given, **named)
        return found[1]

    return ours  # type: ignore[return-value]


def _key(value: object) -> object:
    return id(value) if isinstance(value, (Schema, StructType)) else value


class _Parsed:
    """A thread-safe cache of each table's newest metadata that was read or written, by its text."""

    def __init__(self) -> None:
        self._known: dict[str, TableMetadata] = {}
        self._newest: dict[UUID, str] = {}
        self._lock = Lock()

    def of(self, text: str) -> TableMetadata:
        found = self._known.get(text)
        if found is None:
            found = _parse(text)
        self.keep(text, found)
        return found

    def keep(self, text: str, metadata: TableMetadata) -> None:
        with self._lock:
            if (before := self._newest.pop(metadata.table_uuid, None)) is not None:
                del self._known[before]
            # Inserted last: the first entry is evicted.
            self._newest[metadata.table_uuid] = text
            self._known[text] = metadata
            if len(self._newest) > _MOST_TABLES:
                del self._known[self._newest.pop(next(iter(self._newest)))]


_parse = TableMetadataUtil.parse_raw
_write = ToOutputFile.table_metadata
_PARSED = _Parsed()


class _Noted:
    """A wrapper of metadata that keeps the text that is written."""

    text = ""

    def __init__(self, metadata: TableMetadata) -> None:
        self.metadata = metadata

    def model_dump_json(self, **how: Any) -> str:
        self.text = self.metadata.model_dump_json(**how)
        return self.text


def _write_metadata(
    metadata: TableMetadata, output_file: OutputFile, overwrite: bool = False
) -> None:
    noted: Any = _Noted(metadata)
    _write(noted, output_file, overwrite)
    _PARSED.keep(noted.text, metadata)


_get_schema_once = AvroFileHeader.get_schema


@lru_cache(maxsize=_MOST_SCHEMAS)
def _schema_of(text: str) -> Schema:
    return AvroSchemaConversion().avro_to_iceberg(json.loads(text))


def _get_schema(header: AvroFileHeader) -> Schema:
    text = header.meta.get("avro.schema")
    return _schema_of(text) if text is not None else _get_schema_once(header)


@_once
def _resolved(
    file_schema: Schema,
    read_schema: Schema,
    read_types: frozenset[tuple[int, Any]],
    read_enums: frozenset[tuple[int, Any]],
) -> Reader:
    return resolve_reader(file_schema, read_schema, dict(read_types), dict(read_enums))


def _reader_of(
    file_schema: Schema,
    read_schema: Schema,
    read_types: Mapping[int, Any] = EMPTY_DICT,
    read_enums: Mapping[int, Any] = EMPTY_DICT,
) -> Reader:
    return _resolved(
        file_schema, read_schema, frozenset(read_types.items()), frozenset(read_enums.items())
    )


def _construct_reader(file_schema: Schema, read_types: Mapping[int, Any] = EMPTY_DICT) -> Reader:
    return _reader_of(file_schema, file_schema, read_types)


_write_block = AvroOutputFile.write_block


def _keep_block(file: AvroOutputFile[Any], objects: list[Any]) -> None:
    vars(file).setdefault("kept", []).extend(objects)


def _write_kept_block(
    file: AvroOutputFile[Any], kind: type[BaseException] | None, *_: object
) -> None:
    try:
        if kind is None and (kept := vars(file).pop("kept", None)):
            _write_block(file, kept)
    finally:
        file.output_stream.close()


_convert = AvroSchemaConversion.iceberg_to_avro


@_once
def _as_avro(schema: Schema, schema_name: str | None) -> Any:
    return _convert(AvroSchemaConversion(), schema, schema_name)


def _iceberg_to_avro(
    _: AvroSchemaConversion, schema: Schema, schema_name: str | None = None
) -> Any:
    return _as_avro(schema, schema_name)
