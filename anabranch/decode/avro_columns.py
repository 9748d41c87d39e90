"""Avro values of simple types as Arrow columns, field by field, each over all values of a batch.

Only values that are encoded as Avro's encoders do are taken: each number in its shortest form, and
no byte after the last field. `anabranch.decode.avro` reads the others one by one; it would read the
same from every value that is taken here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from anabranch.config.columns import Column, Notation
from anabranch.decode.avro_names import Node
from anabranch.decode.notations import FIRST_DAY, LAST_DAY, PER_SECOND, has_unit, micros_of
from anabranch.decode.values import MICROS, arrow_type, texts

if TYPE_CHECKING:
    import numpy.typing as npt

    Integers = npt.NDArray[np.int64]
    Mask = npt.NDArray[np.bool_]

# Bytes after the last value: a number has at most ten, and no value is read further once it is
# beyond its end.
_MARGIN = 16
# Kinds of fields that can be read as a column.
_KINDS: dict[pa.DataType, tuple[str, ...]] = {
    pa.string(): ("string", "bytes", "enum"),
    pa.int32(): ("int",),
    pa.int64(): ("int", "long"),
    pa.float64(): ("int", "long", "float", "double"),
    pa.bool_(): ("boolean",),
    MICROS: ("long",),
    pa.date32(): ("int",),
}
_SIZES = {"null": 0, "boolean": 1, "float": 4, "double": 8}
_NUMBERS, _TEXTS = ("int", "long", "enum"), ("string", "bytes")


@dataclass(frozen=True)
class Field:
    """A field of a writer's schema: its kind, the index of null if it is a union with null, the
    size of a `fixed`, the symbols of an enum.

    `column` is the stream's column, of type `type`; "" for a field without a column. `unit` is the
    number of a timestamp's units a second.
    """

    kind: str
    null: int | None = None
    size: int = 0
    symbols: tuple[str, ...] = ()
    column: str = ""
    type: pa.DataType | None = None
    unit: int = 0


Fields = tuple[Field, ...]


def plan_fields(writer: Node, columns: Sequence[Column]) -> Fields | None:
    """Return how values of a writer's schema are read as columns; None if not over a batch. The
    schema must be one that `avro.plan` accepts. Pure."""
    by_field = {column.field: column for column in columns}
    if len(by_field) < len(columns) or any(len(path) > 1 for path in by_field):
        return None
    fields = [_plan_field(node, by_field.get((name,))) for name, node in writer.fields.items()]
    known = tuple(field for field in fields if field is not None)
    return known if len(known) == len(fields) else None


def _plan_field(node: Node, column: Column | None) -> Field | None:
    null = None
    if node.kind == "union":
        is_null = [branch.kind == "null" for branch in node.branches]
        if sorted(is_null) != [False, True]:
            return None
        null = is_null.index(True)
        node = node.branches[1 - null]
    if node.kind not in (*_NUMBERS, *_TEXTS, *_SIZES, "fixed"):
        return None
    size, symbols = node.attributes.get("size", 0), tuple(node.attributes.get("symbols", ()))
    if column is None:
        return Field(node.kind, null, size, symbols)
    kind, unit = arrow_type(column.type), unit_of(node.logical)
    if has_unit(kind, column.notation):
        unit = PER_SECOND.get(column.notation.unit, 0)
        is_read = node.kind in ("int", "long")
    else:
        is_read = (
            node.kind in _KINDS.get(kind, ())
            and node.logical != "decimal"
            and not (kind == MICROS and (not unit or column.notation.pattern))
            and not (pa.types.is_date(kind) and node.logical != "date")
        )
    return Field(node.kind, null, size, symbols, column.name, kind, unit) if is_read else None


def is_of_unit(node: Node, notation: Notation) -> bool:
    """Return whether a type is a number in which a time may have the notation's unit: without a
    logical type, or with the one of the unit."""
    logical = {"days": ("", "date")}.get(
        notation.unit, ("", f"timestamp-{notation.unit}", f"local-timestamp-{notation.unit}")
    )
    return node.kind in ("int", "long", "double") and node.logical in logical


def unit_of(logical: str) -> int:
    """Return the units a second of a timestamp's logical type, else 0. Pure."""
    is_timestamp = "timestamp-" in logical
    if is_timestamp:
        return PER_SECOND.get(logical.removeprefix("local-").removeprefix("timestamp-"), 0)
    return 0


class AvroValues:
    """Payloads of one schema, each with its read position. `is_sure` marks those that are taken."""

    def __init__(self, value: pa.Array) -> None:
        self._data, bounds = bytes_of(value, _MARGIN)
        self._starts, self._ends = bounds[:-1], bounds[1:]
        self._at = self._starts.copy()
        self.is_sure = np.ones(len(value), bool)

    def read(self, fields: Fields) -> dict[str, pa.Array]:
        """Read all fields; return the arrays by column. Values that are not sure are arbitrary."""
        found = [(field, *self._field(field)) for field in fields]
        self.is_sure &= self._at == self._ends
        return {
            field.column: self._column(field, rows, at, size)
            for field, rows, at, size in found
            if field.column
        }

    def _field(self, field: Field) -> tuple[Integers, Integers, Integers]:
        """Read a field. Return the values that have it, and its numbers, or positions and sizes."""
        rows = np.flatnonzero(self.is_sure)
        if field.null is not None:
            branch = self._number(rows)
            self._keep(rows, (branch == 0) | (branch == 1))
            rows = rows[branch == 1 - field.null]
        size = np.full(len(rows), _SIZES.get(field.kind, field.size))
        if field.kind in _NUMBERS or field.kind in _TEXTS:
            size = self._number(rows)
        if field.kind in _NUMBERS:
            # Java reads an int with more bits as another number, or not at all; so fields without a
            # column are checked too.
            first, end = {"int": (-(2**31), 2**31), "enum": (0, len(field.symbols))}.get(
                field.kind, (None, None)
            )
            if first is not None:
                self._keep(rows, (size >= first) & (size < end))
            return rows, size, size
        starts = self._at[rows]
        fits = (size >= 0) & (size <= self._ends[rows] - starts)
        self._keep(rows, fits)
        self._at[rows] += np.where(fits, size, 0)
        return rows, starts, size

    def _number(self, rows: Integers) -> Integers:
        """Read an int or long of each value, and mark values that do not use its shortest form."""
        found, is_read = np.zeros(len(rows), np.uint64), np.ones(len(rows), bool)
        reading = np.arange(len(rows))
        for number in range(10):
            byte = self._data[self._at[rows[reading]]]
            self._at[rows[reading]] += 1
            found[reading] |= (byte & 0x7F).astype(np.uint64) << np.uint64(7 * number)
            # A last byte of zero adds nothing, and only one bit of a tenth byte counts.
            is_odd = ((byte == 0) & (number > 0)) | ((byte > 1) & (number == 9))
            is_read[reading[is_odd]] = False
            reading = reading[(byte > 0x7F) & ~is_odd]
            if not len(reading):
                break
        self._keep(rows, is_read & (self._at[rows] <= self._ends[rows]))
        half, sign = (found >> np.uint64(1)).view(np.int64), (found & np.uint64(1)).view(np.int64)
        return half ^ -sign

    def _keep(self, rows: Integers, is_sure: Mask) -> None:
        """Mark the other `rows` as not sure. They are read no further, and their positions stay
        within their values."""
        left = rows[~is_sure]
        self.is_sure[left] = False
        self._at[left] = np.minimum(self._at[left], self._ends[left])

    def _column(self, field: Field, rows: Integers, found: Integers, size: Integers) -> pa.Array:
        """Return a field's column, null without it. Values that do not convert are not sure."""
        sure = self.is_sure[rows]
        rows, found, size = rows[sure], found[sure], size[sure]
        if field.kind in _TEXTS:
            return self._texts(rows, found, size)
        values, may_be = self._convert(field, found)
        self.is_sure[rows[~may_be]] = False
        all_values, is_null = np.zeros(len(self._at), values.dtype), np.ones(len(self._at), bool)
        all_values[rows[may_be]], is_null[rows[may_be]] = values[may_be], False
        spread = pa.array(all_values, mask=is_null)
        return pa.array(field.symbols, pa.string()).take(spread) if field.kind == "enum" else spread

    def _convert(self, field: Field, found: Integers) -> tuple[npt.NDArray[Any], Mask]:
        """Convert numbers, or bytes at positions; also return which results are certain."""
        every = np.ones(len(found), bool)
        if field.kind == "boolean":
            byte = self._data[found]
            return byte == 1, byte <= 1
        if field.kind in ("float", "double"):
            width = _SIZES[field.kind]
            number = (
                self._data[found[:, None] + np.arange(width)]
                .view(f"<f{width}")[:, 0]
                .astype(np.float64)
            )
            return number, every
        if field.type == MICROS:
            return micros_of(found, field.unit)
        if field.type == pa.date32():
            return found.astype(np.int32), (found >= FIRST_DAY) & (found <= LAST_DAY)
        if field.type == pa.float64():
            return found.astype(np.float64), every
        return found.astype(np.int32) if field.type == pa.int32() else found, every

    def _texts(self, rows: Integers, starts: Integers, size: Integers) -> pa.Array:
        # An array of twice the length: each text, and the bytes between it and the next one.
        bounds = np.repeat(self._starts, 2)
        bounds[2 * rows], bounds[2 * rows + 1] = starts, starts + size
        buffers = [None, pa.py_buffer(bounds.astype(np.int32)), pa.py_buffer(self._data)]
        both = pa.Array.from_buffers(pa.binary(), max(len(bounds) - 1, 0), buffers)
        is_null = np.ones(len(self._at), bool)
        is_null[rows] = False
        text = both.take(pa.array(2 * np.arange(len(self._at)), mask=is_null))
        read, bad = texts(text)
        self.is_sure[bad] = False
        return read


def bytes_of(value: pa.Array, margin: int = 0) -> tuple[npt.NDArray[np.uint8], Integers]:
    """Return the concatenated bytes of all values, and the offsets between them; with a margin, a
    copy followed by that many zero bytes."""
    _, offsets, data = value.buffers()
    bounds = np.frombuffer(offsets, np.int32)[value.offset : value.offset + len(value) + 1].astype(
        np.int64
    )
    bounds = bounds if len(bounds) else np.zeros(1, np.int64)
    whole = (
        np.frombuffer(data, np.uint8) if data is not None and data.size else np.zeros(0, np.uint8)
    )
    if not margin:
        return whole, bounds
    return np.concatenate(
        [whole[bounds[0] : bounds[-1]], np.zeros(margin, np.uint8)]
    ), bounds - bounds[0]
