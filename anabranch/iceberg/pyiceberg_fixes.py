"""What PyIceberg 0.12.0 does slowly, corrected when the lake is imported. Each goes when a release has it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, TypeVar

import pyiceberg.avro.file
from pyiceberg.avro.file import AvroFileHeader
from pyiceberg.avro.reader import Reader
from pyiceberg.avro.resolver import resolve_reader
from pyiceberg.partitioning import PartitionSpec
from pyiceberg.schema import Schema
from pyiceberg.table.refs import SnapshotRef
from pyiceberg.table.snapshots import MetadataLogEntry, Snapshot, SnapshotLogEntry
from pyiceberg.table.sorting import SortOrder
from pyiceberg.typedef import EMPTY_DICT
from pyiceberg.utils.schema_conversion import AvroSchemaConversion

T = TypeVar("T")

PARTS = (Schema, PartitionSpec, SortOrder, Snapshot, SnapshotRef, SnapshotLogEntry, MetadataLogEntry)
"""The parts of a table's metadata. PyIceberg declares them frozen, and nothing changes one in place."""


def share_parts() -> None:
    """Have a deep copy of a table's metadata share its parts with the original.

    PyIceberg copies all of the metadata once for each update of a transaction and once for each commit: every field of
    every schema and every property of every snapshot.
    """
    for part in PARTS:
        part.__deepcopy__ = _itself  # type: ignore[method-assign,assignment]


def _itself(part: T, memo: object = None) -> T:
    return part


def share_readers() -> None:
    """Have the manifests and manifest lists of one Avro schema share its Iceberg schema and their reader, neither of
    which has any state.

    PyIceberg builds both again for each file, which takes longer than to read it.
    """
    for owner, name, ours in (
        (AvroFileHeader, "get_schema", _get_schema),
        (pyiceberg.avro.file, "resolve_reader", _reader_of),
        (pyiceberg.avro.file, "construct_reader", _construct_reader),
    ):
        setattr(owner, name, ours)


_get_schema_once = AvroFileHeader.get_schema
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
