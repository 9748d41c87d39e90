"""The difference between the two layers for one hour: row by row on (partition, offset), by a hash
of the content, in a common schema, since the table's schema may have evolved.

A file has its writer's columns. So both layers are compared in the columns that every file of the
hour has, in the table's current types. A DOUBLE that once was FLOAT is compared as FLOAT, the
precision of the old rows. `KIND` defines the kind of a row, for the batch job and for `anabranch
explain --rows`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pyiceberg.manifest import DataFile
from pyiceberg.schema import Schema
from pyiceberg.types import FloatType

from anabranch.protocol.ledger_row import Diff

AT = ("kafka_partition", "kafka_offset")


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


SAMPLE = 5

# Columns: `speed` and `batch` (hash of the content, null without a row), `removed` (batch dropped
# the record as a duplicate) and `unread` (the speed layer's rows do not account for the offset).
KIND = """CASE
    WHEN speed IS NULL AND unread THEN 'unread'
    WHEN speed IS NULL THEN 'missing'
    WHEN batch IS NULL AND coalesce(removed, false) THEN 'duplicate'
    WHEN batch IS NULL THEN 'extra'
    WHEN speed <> batch THEN 'changed'
    ELSE 'same'
END"""
# The kinds in samples, in their order: unexplained kinds first.
SHOWN = ("changed", "extra", "missing", "unread")

# Classes of gaps: offsets that Kafka once had and the batch layer could no longer read.
_GONE = ("compacted", "retention")


@dataclass(frozen=True)
class Difference:
    """The number of speed's rows and, if these have each place once, of batch's rows; and their
    difference."""

    speed_rows: int
    batch_rows: int
    diff: Diff


def to_difference(counts: Mapping[str, int], sample: Sequence[dict[str, Any]]) -> Difference:
    """Return the difference, from the number of rows of each `KIND`. Pure."""
    of = {
        kind: counts.get(kind, 0)
        for kind in ("missing", "unread", "extra", "changed", "duplicate", "same")
    }
    speed_rows = of["extra"] + of["changed"] + of["duplicate"] + of["same"]
    diff = Diff(
        missing=of["missing"] + of["unread"],
        extra=of["extra"],
        changed=of["changed"],
        duplicate=of["duplicate"],
        unread=of["unread"],
        sample=tuple(sample),
    )
    return Difference(speed_rows, of["missing"] + of["unread"] + of["changed"] + of["same"], diff)


def unexplained_counts(diff: Diff | None, gaps: Mapping[str, int] | None) -> dict[str, int]:
    """Return the unexplained counts of a ledger's `diff`, by kind; empty if all are explained.
    Pure. Duplicates that batch removed are not a difference. Missing rows are explained by offsets
    that the speed layer had not read at the time. Extra rows are explained by offsets that Kafka no
    longer had for the batch layer. Changed content is never explained."""
    if diff is None:
        return {}
    gone = sum((gaps or {}).get(name, 0) for name in _GONE)
    left = {
        "missing": diff.missing - diff.unread,
        "extra": diff.extra - gone,
        "changed": diff.changed,
    }
    return {kind: n for kind, n in left.items() if n > 0}
