"""What PyIceberg 0.12.0 does slowly, corrected when the lake is imported. Each goes when a release has it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any, TypeVar

from pyiceberg.avro import file as avro_file
from pyiceberg.avro.file import AvroFileHeader
from pyiceberg.avro.reader import Reader
from pyiceberg.avro.resolver import resolve_reader
from pyiceberg.partitioning import PartitionSpec
from pyiceberg.schema import Schema
from pyiceberg.table.refs import SnapshotRef
from pyiceberg.table.snapshots import MetadataLogEntry, Snapshot, SnapshotLogEntry
from pyiceberg.table.sorting import SortOrder
from pyiceberg.utils.schema_conversion import AvroSchemaConversion

T = TypeVar("T")

PARTS = (Schema, PartitionSpec, SortOrder, Snapshot, SnapshotRef, SnapshotLogEntry, MetadataLogEntry)
"""The parts of a table's metadata. PyIceberg declares them frozen, and nothing changes one in place."""

# A table has few schemas of manifests: one for each partition spec and each writer.
_SCHEMAS = 64


def share_parts() -> None:
    """Have a deep copy of a table's metadata share its parts with the original.

    PyIceberg copies all of the metadata once for each update of a transaction and once for each commit: every field of
    every schema and every property of every snapshot.
    """
    for part in PARTS:
        part.__deepcopy__ = _itself  # type: ignore[method-assign,assignment]


def _itself(part: T, memo: object = None) -> T:
    return part


def share_avro_readers() -> None:
    """Have the manifests and manifest lists of one Avro schema share its Iceberg schema and their reader, which hold
    nothing of a file.

    PyIceberg makes both for each file that it opens, which takes longer than to read a small one.
    """
    get_schema = AvroFileHeader.get_schema
    readers: dict[tuple[object, ...], tuple[Schema, Schema, Reader]] = {}

    def shared_schema(self: AvroFileHeader) -> Schema:
        text = self.meta.get("avro.schema")
        return get_schema(self) if text is None else _iceberg_schema(text)

    def shared_reader(
        file_schema: Schema,
        read_schema: Schema,
        read_types: Mapping[int, Callable[..., Any]],
        read_enums: Mapping[int, Callable[..., Any]],
    ) -> Reader:
        # The ids are of living schemas: the values hold them.
        key = (id(file_schema), id(read_schema), tuple(read_types.items()), tuple(read_enums.items()))
        if key not in readers:
            if len(readers) >= _SCHEMAS:
                readers.clear()
            made = resolve_reader(file_schema, read_schema, dict(read_types), dict(read_enums))
            readers[key] = (file_schema, read_schema, made)
            return made
        return readers[key][2]

    AvroFileHeader.get_schema = shared_schema  # type: ignore[method-assign]
    avro_file.resolve_reader = shared_reader  # type: ignore[attr-defined,assignment]


@lru_cache(_SCHEMAS)
def _iceberg_schema(text: str) -> Schema:
    return AvroSchemaConversion().avro_to_iceberg(json.loads(text))
