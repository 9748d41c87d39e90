"""The columns that a table's files have, given the schemas of their writers. Pure, and without
Spark."""

from __future__ import annotations

from collections.abc import Sequence

from pyiceberg.manifest import DataFile
from pyiceberg.schema import Schema
from pyiceberg.types import FloatType


def common_fields(schemas: Sequence[Schema], files: Sequence[DataFile]) -> set[int]:
    """Return the ids of the fields that all of `files` contain. Fields in all of the table's
    `schemas` are in every file. A field that was added later is left out if a file lacks it: the
    rows of that file are null only for that reason."""
    by_id = [_fields(schema) for schema in schemas]
    known = set.intersection(*by_id)
    return known | {
        id
        for fields in by_id
        for id in fields
        if all(id in f.column_sizes or id in f.value_counts for f in files)
    }


def former_floats(schemas: Sequence[Schema]) -> set[int]:
    """Return the ids of the fields that were FLOAT in one of the table's schemas."""
    return {
        id
        for schema in schemas
        for id in _fields(schema)
        if isinstance(schema.find_field(id).field_type, FloatType)
    }


def _fields(schema: Schema) -> set[int]:
    return {schema.find_field(name).field_id for name in schema.column_names}
