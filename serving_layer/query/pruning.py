"""Pruning: guarantees about the rows of a file or a manifest, before it is opened. Pure. A
guarantee is a PyArrow expression. DuckDB passes pushed-down conditions to PyArrow, which skips
files without a possible matching row, and treats a condition as met only where the guarantee
implies it. So DuckDB and PyArrow define the meaning of a condition (nulls, NaN, time zones, LIKE,
NOT, OR), and no SQL is translated here. A guarantee that is too weak opens a file too many; a
guarantee is never too strong."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import reduce
from itertools import product
from operator import and_
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from pyiceberg import types as iceberg
from pyiceberg.conversions import from_bytes
from pyiceberg.manifest import DataFile, ManifestFile
from pyiceberg.partitioning import PartitionField, PartitionSpec
from pyiceberg.schema import Schema
from pyiceberg.transforms import BucketTransform

# Maximum number of columns whose nulls are a separate case; each doubles the number of cases.
_CASES_OF = 4
# Maximum number of values of a condition that are compared with a file's bucket.
_VALUES = 16
_TEXT, _NUMBER = re.compile(r'"([^"]*)"'), re.compile(r"(?<![\w.])-?\d{1,19}(?![\w.])")
_MICROS = {"hour": 3_600_000_000, "day": 86_400_000_000}
_FLOATS = (iceberg.FloatType, iceberg.DoubleType)
# Types whose bounds Iceberg, Parquet, PyArrow and DuckDB compare in the same way.
_EXACT = (
    iceberg.IntegerType,
    iceberg.LongType,
    iceberg.DateType,
    iceberg.DecimalType,
    iceberg.StringType,
    iceberg.TimestampType,
    iceberg.TimestamptzType,
)
_ORDERED = (*_EXACT, *_FLOATS)


def file_guarantee(
    schema: Schema, columns: pa.Schema, spec: PartitionSpec, file: DataFile
) -> pc.Expression | None:
    """Return the guarantee that a data file's partition and bounds give about its rows; None
    without one. `columns`: the columns of the table's schema that may be compared; others are left
    out."""
    partition = zip(spec.fields, (file.partition[i] for i in range(len(spec.fields))), strict=True)
    known = [_value_guarantee(schema, columns, field, value) for field, value in partition]
    return all_of([*known, bounds_guarantee(schema, columns, [file])])


def bounds_guarantee(
    schema: Schema, columns: pa.Schema, files: Sequence[DataFile]
) -> pc.Expression | None:
    """Return the guarantee that the bounds of data files give about the rows of all of them; None
    without one. `columns`: as for `file_guarantee`."""
    compared = (field for field in schema.fields if field.name in columns.names)
    return all_of([_column_guarantee(columns, field, files) for field in compared])


def manifest_guarantee(
    schema: Schema, columns: pa.Schema, spec: PartitionSpec, manifest: ManifestFile
) -> pc.Expression | None:
    """Return the guarantee that the manifest list gives about the rows of a manifest's files, for
    `columns`; None without one."""
    known = []
    for field, summary in zip(spec.fields, manifest.partitions or (), strict=False):
        if summary.lower_bound is None or summary.upper_bound is None:
            continue
        kind = field.transform.result_type(schema.find_type(field.source_id))
        if not isinstance(kind, _EXACT):
            continue
        low, high = from_bytes(kind, summary.lower_bound), from_bytes(kind, summary.upper_bound)
        known.append(
            _range_guarantee(schema, columns, field, low, high, nulls=bool(summary.contains_null))
        )
    return all_of(known)


def null_cases(columns: pa.Schema, condition: pc.Expression) -> list[pc.Expression | None]:
    """Return the cases to combine with a guarantee, one of which is true for every row: which of
    the nullable columns that the condition looks up in a list (IN) are null. PyArrow cannot
    simplify a list lookup if a value may be null."""
    text = str(condition)
    listed = [pc.field(c.name) for c in columns if c.nullable and f"is_in({c.name}, " in text][
        :_CASES_OF
    ]
    return [
        all_of(case)
        for case in product(*((column.is_valid(), column.is_null()) for column in listed))
    ]


def bucket_cases(
    schema: Schema, columns: pa.Schema, spec: PartitionSpec, file: DataFile, condition: str
) -> list[pc.Expression | None]:
    """Return cases, one of which is true for every row of a file in a bucket: a column of the
    bucket is between those values in the condition's text that belong to other buckets, or null.
    Values that are missed only open a file too many."""
    for i, field in enumerate(spec.fields):
        name = schema.find_column_name(field.source_id)
        if not isinstance(field.transform, BucketTransform) or name not in columns.names:
            continue
        kind, values = schema.find_type(field.source_id), set[Any]()
        if isinstance(kind, iceberg.StringType):
            values = set(_TEXT.findall(condition))
        elif isinstance(kind, iceberg.IntegerType | iceberg.LongType):
            values = {n for n in map(int, _NUMBER.findall(condition)) if kind.min <= n <= kind.max}
        bucket_of = field.transform.transform(kind)
        apart = sorted(v for v in values if bucket_of(v) != file.partition[i])[:_VALUES]
        column = pc.field(name)
        scalars = [pa.scalar(value, columns.field(name).type) for value in apart]
        above = [None, *(column > scalar for scalar in scalars)]
        below = [*(column < scalar for scalar in scalars), None]
        between = (_between(column, *of, nulls=False) for of in zip(above, below, strict=True))
        return [*between, column.is_null()] if apart else [None]
    return [None]


def _value_guarantee(
    schema: Schema, columns: pa.Schema, field: PartitionField, value: Any
) -> pc.Expression | None:
    name = schema.find_column_name(field.source_id)
    if value is None or name is None or name not in columns.names:
        return None
    if str(field.transform) == "identity" and isinstance(schema.find_type(name), _EXACT):
        return pc.field(name) == pa.scalar(value, columns.field(name).type)
    return _range_guarantee(schema, columns, field, value, value, nulls=False)


def _range_guarantee(
    schema: Schema, columns: pa.Schema, field: PartitionField, low: Any, high: Any, nulls: bool
) -> pc.Expression | None:
    """Return the guarantee that a partition value from `low` to `high`, both included, gives about
    its source column."""
    name = schema.find_column_name(field.source_id)
    if name is None or name not in columns.names:
        return None
    column, kind, transform = pc.field(name), columns.field(name).type, str(field.transform)
    if transform == "identity" and isinstance(schema.find_type(name), _EXACT):
        return _between(
            column, column >= pa.scalar(low, kind), column <= pa.scalar(high, kind), nulls
        )
    if transform in _MICROS and pa.types.is_timestamp(kind):
        start, end = (pa.scalar(value * _MICROS[transform], kind) for value in (low, high + 1))
        return _between(column, column >= start, column < end, nulls)
    return None


def _column_guarantee(
    columns: pa.Schema, field: iceberg.NestedField, files: Sequence[DataFile]
) -> pc.Expression | None:
    kind, id = field.field_type, field.field_id
    if not isinstance(kind, _ORDERED):
        return None
    # Bounds ignore NaN, which DuckDB orders last and PyArrow does not order.
    if isinstance(kind, _FLOATS) and any((f.nan_value_counts or {}).get(id) != 0 for f in files):
        return None
    column, arrow = pc.field(field.name), columns.field(field.name).type
    nulls = [(f.null_value_counts or {}).get(id) for f in files]
    if all(n is not None and n == f.record_count for n, f in zip(nulls, files, strict=True)):
        return column.is_null()

    def bound(of: Callable[[DataFile], Mapping[int, bytes] | None], pick: Any) -> Any:
        found = [(of(f) or {}).get(id) for f in files]
        known = [from_bytes(kind, one) for one in found if one is not None]
        return pa.scalar(pick(known), arrow) if len(known) == len(files) else None

    low, high = bound(lambda f: f.lower_bounds, min), bound(lambda f: f.upper_bounds, max)
    from_low = column >= low if low is not None else None
    to_high = column <= high if high is not None else None
    return _between(column, from_low, to_high, any(n != 0 for n in nulls))


def _between(
    column: pc.Expression, low: pc.Expression | None, high: pc.Expression | None, nulls: bool
) -> pc.Expression | None:
    """Return the bounds in the form that PyArrow simplifies."""
    bounds = [bound for bound in (low, high) if bound is not None]
    if nulls:
        return all_of([bound | column.is_null() for bound in bounds])
    return all_of([*bounds, column.is_valid()])


def all_of(known: Iterable[pc.Expression | None]) -> pc.Expression | None:
    """Return the conjunction of all guarantees; None without any."""
    parts = [part for part in known if part is not None]
    return reduce(and_, parts) if parts else None
