"""Conversion of a file's column types to a table's types, and reading of any writer's Parquet
files."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from anabranch.common.errors import Refused

if TYPE_CHECKING:
    from pyiceberg.io import FileIO


def open_parquet(io: FileIO, path: str) -> pq.ParquetFile:
    """Open a Parquet file. Reads INT96, in which Spark writes timestamps by default, as
    microseconds: nanoseconds overflow after the year 2262. Raises Refused for an incomplete
    file."""
    try:
        return pq.ParquetFile(io.new_input(path).open(), coerce_int96_timestamp_unit="us")
    except pa.ArrowInvalid as error:
        raise Refused(
            f"read {path}: expected a complete Parquet file, found {error}; remove it, or write "
            "it again"
        ) from error


def may_become(kind: pa.DataType, wanted: pa.DataType) -> bool:
    """Return whether values of a file's type keep their meaning in a table's type. An integer type
    may be wider than the table's: `to_type` checks each value."""
    t = pa.types
    if t.is_dictionary(kind):
        return may_become(kind.value_type, wanted)
    if t.is_struct(kind) and t.is_struct(wanted):
        # A field that an old file lacks is null.
        there = [field for field in wanted if kind.get_field_index(field.name) >= 0]
        return all(may_become(kind.field(field.name).type, field.type) for field in there)
    if t.is_map(kind) and t.is_map(wanted):
        pairs = ((kind.key_type, wanted.key_type), (kind.item_type, wanted.item_type))
        return all(may_become(*pair) for pair in pairs)
    if _is_list(kind) and _is_list(wanted):
        return may_become(kind.value_type, wanted.value_type)
    same = (
        t.is_integer,
        t.is_boolean,
        t.is_date,
        t.is_timestamp,
        t.is_decimal,
        lambda k: t.is_string(k) or t.is_large_string(k),
        lambda k: t.is_binary(k) or t.is_large_binary(k) or t.is_fixed_size_binary(k),
    )
    if t.is_floating(kind) and t.is_floating(wanted):
        return bool(kind.bit_width <= wanted.bit_width)
    if t.is_integer(kind) and t.is_decimal(wanted):
        return True
    return t.is_null(kind) or any(is_one(kind) and is_one(wanted) for is_one in same)


def _is_list(kind: pa.DataType) -> bool:
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind))


def to_type(found: pa.Array, wanted: pa.DataType) -> pa.Array:
    """Cast values to a table's type. Raises ArrowInvalid for a value that does not fit."""
    if pa.types.is_dictionary(found.type):
        found = found.dictionary_decode()
    return found if found.type == wanted else pc.cast(found, wanted)
