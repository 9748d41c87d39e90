"""Read Avro records that are certain to be good as Arrow columns, field by field, each over all
records of a batch.

As in `anabranch.records.fast_json`: `anabranch.records.decode` gives the same row and the verdict
"good" for every record that `AvroRows.read` takes; the others are left to it. Certain are values in
Confluent's wire format whose writer's schema has only fields of simple types, and that are encoded
as Avro's encoders do: each number in its shortest form, and no byte after the last field.
Decision 59 explains why its rows are correct.

It runs in Spark's Python workers, and does not import Spark.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from anabranch.records.checks import FIRST_MICROS, LAST_MICROS
from anabranch.records.fast_json import (
    LONGEST,
    Read,
    in_the_calendar,
    is_utf8,
    type_of,
    with_places,
)
from anabranch.subjects.avro_names import Incompatible, Node, parse

if TYPE_CHECKING:
    import numpy.typing as npt

    from anabranch.config import EventTime
    from anabranch.config.columns import Column

    Integers = npt.NDArray[np.int64]
    Mask = npt.NDArray[np.bool_]

MOST_UNKNOWN_IDS = 16
"""Maximum number of unknown schema ids that a task reports."""

_WIRE = 5  # a zero byte and an id of four bytes
_LARGEST_ID = 2**31 - 1
# Bytes after the last value: a number has at most ten, and no value is read further once it is
# beyond its end.
_MARGIN = 16
# Bytes of values that are copied and read at once.
_AT_ONCE = 4 * 2**20
_FIRST_DAY, _LAST_DAY = FIRST_MICROS // 86_400_000_000, LAST_MICROS // 86_400_000_000
_PER_SECOND = {"millis": 1_000, "micros": 1_000_000, "nanos": 1_000_000_000}
# Kinds of fields that can be read as a column, by the column's Spark type.
_KINDS_BY_TYPE: dict[str, tuple[str, ...]] = {
    "string": ("string", "bytes", "enum"),
    "int": ("int",),
    "bigint": ("int", "long"),
    "double": ("int", "long", "float", "double"),
    "boolean": ("boolean",),
    "timestamp": ("long",),
    "date": ("int",),
}
_SIZES = {"null": 0, "boolean": 1, "float": 4, "double": 8}
_NUMBERS, _TEXTS = ("int", "long", "enum"), ("string", "bytes")


@dataclass(frozen=True)
class Field:
    """A field of a writer's schema: its kind, the index of null if it is a union with null, the
    size of a `fixed`, the symbols of an enum.

    `column` is the stream's column of Spark type `type`; "" for a field without a column. `unit` is
    the number of a timestamp's units a second.
    """

    kind: str
    null: int | None = None
    size: int = 0
    symbols: tuple[str, ...] = ()
    column: str = ""
    type: str = ""
    unit: int = 0


Fields = tuple[Field, ...]


def plan_fields(text: str, columns: Sequence[Column]) -> Fields | None:
    """Return how values of a writer's schema are read as these columns; None if only `decode` can
    read them. The schema must be one that `avro_schema.project` accepts. Pure."""
    try:
        writer = parse(text)
    except Incompatible:
        return None
    kinds = {column.name: column.type for column in columns}
    fields = [_plan_field(node, name, kinds.get(name, "")) for name, node in writer.fields.items()]
    known = tuple(field for field in fields if field is not None)
    return known if len(known) == len(fields) else None


def _plan_field(node: Node, name: str, type: str) -> Field | None:
    null = None
    if node.kind == "union":
        is_null = [branch.kind == "null" for branch in node.branches]
        if sorted(is_null) != [False, True]:
            return None
        null = is_null.index(True)
        node = node.branches[1 - null]
    if node.kind not in (*_NUMBERS, *_TEXTS, *_SIZES, "fixed"):
        return None
    field = Field(
        node.kind, null, node.attributes.get("size", 0), tuple(node.attributes.get("symbols", ()))
    )
    if not type:
        return field
    unit = unit_of(node.logical)
    is_read = node.kind in _KINDS_BY_TYPE.get(type, ()) and node.logical != "decimal"
    if (
        not is_read
        or (type == "timestamp" and not unit)
        or (type == "date" and node.logical != "date")
    ):
        return None
    return Field(node.kind, null, field.size, field.symbols, name, type, unit)


def unit_of(logical: str) -> int:
    """Return the units a second of a timestamp's logical type, else 0. Pure."""
    is_timestamp = "timestamp-" in logical
    return (
        _PER_SECOND.get(logical.removeprefix("local-").removeprefix("timestamp-"), 0)
        if is_timestamp
        else 0
    )


class AvroRows:
    """A reader of one stream's values, used by one process. `schemas` has the fields by schema
    id."""

    def __init__(
        self, columns: Sequence[Column], event_time: EventTime | None, schemas: Mapping[int, Fields]
    ) -> None:
        self._columns, self._event_time, self._schemas = tuple(columns), event_time, schemas
        self.unknown_ids: set[int] = set()
        """Schema ids missing in `schemas`, whose records were left: at most MOST_UNKNOWN_IDS."""

    def read(self, batch: pa.RecordBatch) -> Read:
        """Read a batch as `fast_json.CertainRows.read` does."""
        found, left, start = [], [], 0
        for piece in _pieces(batch):
            rows, places = self._read(piece)
            is_left = np.ones(len(piece), bool)
            is_left[places] = False
            found.append(rows)
            left.append(np.flatnonzero(is_left) + start)
            start += len(piece)
        return Read(pa.concat_tables(found), pa.array(np.concatenate(left), pa.int64()))

    def _read(self, batch: pa.RecordBatch) -> tuple[pa.Table, Integers]:
        """Return the certain rows of a piece, in order, and their indexes in it."""
        ids = self._ids(batch)
        known = np.unique(ids[ids >= 0]).tolist()
        parts = [
            self._rows_of_schema(batch, np.flatnonzero(ids == id), self._schemas[id])
            for id in known
        ]
        if not parts:
            return self._rows_of_schema(batch, np.array([], np.int64), ())
        rows, places = (
            pa.concat_tables([rows for rows, _ in parts]),
            np.concatenate([part for _, part in parts]),
        )
        if len(parts) > 1:
            order = np.argsort(places)
            rows, places = rows.take(pa.array(order)), places[order]
        return rows, places

    def _ids(self, batch: pa.RecordBatch) -> Integers:
        """Return the schema id of each record that may be certain; -1 for others."""
        value, ids = batch.column("value"), np.full(len(batch), -1, np.int64)
        length = pc.binary_length(value)
        may_be = pc.and_(pc.greater_equal(length, _WIRE), pc.less_equal(length, LONGEST))
        # Without a time in the calendar, a record takes its date and bounds from elsewhere.
        may_be = pc.fill_null(pc.and_(may_be, in_the_calendar(batch.column("timestamp"))), False)
        places = np.flatnonzero(may_be.to_numpy(zero_copy_only=False))
        data, bounds = _bytes_of(value)
        head = data[bounds[:-1][places][:, None] + np.arange(_WIRE)].astype(np.int64)
        found = head[:, 1:] @ np.array([2**24, 2**16, 2**8, 1])
        is_wire = (head[:, 0] == 0) & (found <= _LARGEST_ID)
        for id in np.unique(found[is_wire]).tolist():
            if id not in self._schemas:
                is_wire &= found != id
                if len(self.unknown_ids) < MOST_UNKNOWN_IDS:
                    self.unknown_ids.add(id)
        ids[places[is_wire]] = found[is_wire]
        return ids

    def _rows_of_schema(
        self, batch: pa.RecordBatch, places: Integers, fields: Fields
    ) -> tuple[pa.Table, Integers]:
        """Return the certain rows among the records at `places`, whose values have one schema, and
        their places."""
        records = batch if len(places) == len(batch) else batch.take(pa.array(places, pa.int64()))
        values = _Values(records.column("value"))
        read = values.read(fields)
        certain, rows = pa.array(values.is_sure), {}
        for column in self._columns:
            target = type_of(column)
            converted = (
                read[column.name].cast(target)
                if column.name in read
                else pa.nulls(len(records), target)
            )
            if not column.nullable and converted.null_count:
                certain = pc.and_(certain, converted.is_valid())
            rows[column.name] = converted
        table, certain = with_places(rows, certain, records, self._event_time)
        return table.filter(certain), places[certain.to_numpy(zero_copy_only=False)]


class _Values:
    """Values of one schema, each with its own read position. `is_sure` marks values that may still
    be certain."""

    def __init__(self, value: pa.Array) -> None:
        self._data, bounds = _bytes_of(value, _MARGIN)
        self._starts, self._ends = bounds[:-1], bounds[1:]
        self._at = np.minimum(self._starts + _WIRE, self._ends)
        self.is_sure = np.ones(len(value), bool)

    def read(self, fields: Fields) -> dict[str, pa.Array]:
        """Read all fields and return the arrays by column. Entries of values that are not sure are
        arbitrary."""
        found = [(field, *self._field(field)) for field in fields]
        self.is_sure &= self._at == self._ends
        return {
            field.column: self._column(field, rows, at, size)
            for field, rows, at, size in found
            if field.column
        }

    def _field(self, field: Field) -> tuple[Integers, Integers, Integers]:
        """Read a field. Return the values that have it, and its numbers, or the positions and sizes
        of its bytes."""
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
        """Return a field's column, null for values without it. Mark values that cannot be converted
        as not sure."""
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
            # There are many NaN and two zeros: Spark decides which of them a row has.
            return number, ~np.isnan(number) & ~((number == 0) & np.signbit(number))
        if field.type == "timestamp":
            if field.unit > 1_000_000:
                return found // (field.unit // 1_000_000), every
            factor = 1_000_000 // field.unit
            is_in = (found >= FIRST_MICROS // factor) & (found <= LAST_MICROS // factor)
            return np.where(is_in, found, 0) * factor, is_in
        if field.type == "date":
            return found.astype(np.int32), (found >= _FIRST_DAY) & (found <= _LAST_DAY)
        if field.type == "double":
            return found.astype(np.float64), every
        return found.astype(np.int32) if field.type == "int" else found, every

    def _texts(self, rows: Integers, starts: Integers, size: Integers) -> pa.Array:
        # An array of twice the length: each text, and the bytes between it and the next one.
        bounds = np.repeat(self._starts, 2)
        bounds[2 * rows], bounds[2 * rows + 1] = starts, starts + size
        buffers = [None, pa.py_buffer(bounds.astype(np.int32)), pa.py_buffer(self._data)]
        both = pa.Array.from_buffers(pa.binary(), max(len(bounds) - 1, 0), buffers)
        is_null = np.ones(len(self._at), bool)
        is_null[rows] = False
        text = both.take(pa.array(2 * np.arange(len(self._at)), mask=is_null))
        try:
            return text.cast(pa.string())
        except pa.ArrowInvalid:
            is_text = np.array(
                [v.is_valid and is_utf8(v.as_buffer().to_pybytes()) for v in text], bool
            )
            self.is_sure &= is_text | is_null
            return pc.if_else(pa.array(is_text), text, None).cast(pa.string())


def _pieces(batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    """Yield a batch in pieces of a few megabytes, at least one piece."""
    _, bounds = _bytes_of(batch.column("value"))
    start = 0
    while start < len(batch):
        end = max(
            start + 1, int(np.searchsorted(bounds, bounds[start] + _AT_ONCE, side="right")) - 1
        )
        yield batch.slice(start, end - start)
        start = end
    if not len(batch):
        yield batch


def _bytes_of(value: pa.Array, margin: int = 0) -> tuple[npt.NDArray[np.uint8], Integers]:
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
