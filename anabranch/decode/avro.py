"""Avro: values in the writer's schema of their id, as the stream's columns, by exact name or path.

Source: Avro's specification (https://avro.apache.org/docs/1.12.0/specification/).

| column | from |
|---|---|
| STRING | string, bytes that are UTF-8, enum |
| BINARY | bytes, string, fixed |
| INT; BIGINT | int; int, long |
| FLOAT; DOUBLE | int, long, float; and double |
| BOOLEAN | boolean |
| DATE | int with date |
| TIMESTAMP | long with (local-)timestamp-millis, -micros or -nanos; the last three digits of nanos
  are dropped |
| DECIMAL(p,s) | bytes or fixed with decimal of at most s digits after the point, p - s before it;
  p - s does not count for decimals of more than 38 digits, of which many writers have no others |
| ARRAY, MAP, STRUCT | array, map, record; missing fields of a record are null |
| STRUCT<member_NAME: …> | a union, its types without null by name; of a whole value, these are
  columns, NAME |

A column with a unit takes int, long, double (as its shortest decimal) and string, one with a
pattern string, a number with a decimal sign string too (`anabranch.decode.notations`). A logical
type that contradicts the unit is incompatible. Each may also be a union of these, and null. Other
logical types are read as the underlying type. Values of simple types are read over a batch
(`avro_columns`), the others, and whatever that leaves, one by one.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import date, timedelta
from functools import lru_cache
from typing import Any

import numpy as np
import pyarrow as pa

from anabranch.config.columns import MOST_DIGITS, ROW, Column, Notation
from anabranch.decode import notations, values
from anabranch.decode.avro_columns import AvroValues, is_of_unit, plan_fields, unit_of
from anabranch.decode.avro_names import MEMBER, Incompatible, Node, names_of, parse, record_of
from anabranch.decode.inputs import WriterSchema, split
from anabranch.decode.notations import words
from anabranch.decode.values import (
    FIRST_MICROS,
    LAST_MICROS,
    MICROS,
    Errors,
    Reading,
    Unreadable,
    found,
    spread,
    verdict,
    within,
)

_EPOCH = date(1970, 1, 1)

# The writer's types that a column's type takes, beside those with a rule of their own.
_PLAIN: dict[pa.DataType, tuple[str, ...]] = {
    pa.string(): ("string", "bytes", "enum"),
    pa.binary(): ("bytes", "string", "fixed"),
    pa.bool_(): ("boolean",),
    pa.int32(): ("int",),
    pa.int64(): ("int", "long"),
    pa.float32(): ("int", "long", "float"),
    pa.float64(): ("int", "long", "float", "double"),
}

# Reads a value at a position; returns it, and the position after it.
_Read = Callable[[bytes, int], tuple[Any, int]]
_Convert = Callable[[Any], Any]


class Malformed(Exception):
    """Bytes that are not a value of their schema."""


class Plan:
    """How the values of one writer's schema are read. Raises Incompatible."""

    def __init__(self, text: str, columns: Sequence[Column]) -> None:
        root = parse(text)
        writer, self._members = record_of(root)
        self._has_rows = any(column.field[0] == ROW for column in columns)
        if self._has_rows:
            writer = _with_row(writer)
        nodes = [(column, _node_of(writer, column)) for column in columns]
        if missing := sorted(c.name for c, node in nodes if node is None and not c.nullable):
            raise Incompatible(
                f"{missing[0]}: expected a field for the NOT NULL column, found none"
            )
        self._columns = [
            (c, _converter(values.arrow_type(c.type), node, c.name, c.notation))
            for c, node in nodes
            if node is not None
        ]
        if not self._columns:
            fields = ", ".join(".".join(column.field) for column in columns)
            raise Incompatible(f"expected a field of {fields}, found none")
        is_plain = root.kind == "record" and not self._has_rows
        self.over_batch = plan_fields(writer, columns) if is_plain else None
        self._value = value_reader(root)

    def read(self, payload: bytes) -> tuple[dict[str, Any], dict[str, Unreadable]]:
        """Return a value's columns, and the errors of those of another type. Raises Malformed."""
        fields, read, bad = self._value(payload), dict[str, Any](), dict[str, Unreadable]()
        if isinstance(fields, tuple):
            fields = {(member := self._members[fields[0]]): fields[1]}
            if all(column.field[0] != member for column, _ in self._columns):
                # As a row its value would be lost.
                first, _ = self._columns[0]
                why = Unreadable(first.type, f"a value of type {member}")
                return read, {first.name: why}
        if self._has_rows and fields is not None:
            fields[ROW] = fields["before"] if fields["after"] is None else fields["after"]
        for column, convert in self._columns:
            value = fields
            for name in column.field:
                value = None if value is None else value.get(name)
            try:
                read[column.name] = None if value is None else convert(value)
            except Unreadable as error:
                bad[column.name] = error
        return read, bad


def _with_row(writer: Node) -> Node:
    """Return a schema of Debezium's changes with the row, `after` or, of a delete, `before`, as a
    field. Raises Incompatible."""
    fields = writer.fields
    if not {"op", "before", "after"} <= fields.keys() or fields["before"] != fields["after"]:
        found = ", ".join(fields) or "none"
        raise Incompatible(
            "expected a change of Debezium with op, and before and after of one type, found the "
            f"fields {found}"
        )
    return replace(writer, fields={**fields, ROW: fields["after"]})


def _node_of(writer: Node, column: Column) -> Node | None:
    """Return the type of a column's field; None if the schema lacks it. Raises Incompatible for a
    path that leads through anything but records, each perhaps in a union with null."""
    node: Node | None = writer
    for depth, name in enumerate(column.field):
        assert node is not None
        branches = [branch for branch in node.branches if branch.kind != "null"]
        record = branches[0] if len(branches) == 1 else node
        if record.kind != "record":
            path = ".".join(column.field[:depth])
            raise Incompatible(
                f"{column.name}: expected a record at {path}, found {node.describe()}"
            )
        node = record.fields.get(name)
        if node is None:
            return None
    return node


def value_reader(writer: Node) -> Callable[[bytes], Any]:
    """Return a function that reads one value of a writer's schema, as encoded: texts are bytes. It
    raises Malformed."""
    read = _reader(writer)

    def whole(payload: bytes) -> Any:
        try:
            value, end = read(payload, 0)
        except (IndexError, struct.error):
            raise Malformed from None
        if end != len(payload):
            raise Malformed
        return value

    return whole


@lru_cache(maxsize=256)
def plan(text: str, columns: tuple[Column, ...]) -> Plan:
    """Return the plan of a writer's schema for columns. Raises Incompatible."""
    return Plan(text, columns)


class AvroReader:
    """A reader of one stream's values, for one process. `schemas`: the writers' schemas by id."""

    def __init__(self, columns: Sequence[Column], schemas: Mapping[int, WriterSchema]) -> None:
        self._columns = tuple(columns)
        self._kinds = {column.name: values.arrow_type(column.type) for column in columns}
        self._words = {column.name: words(column.type, column.notation) for column in columns}
        self._schemas = schemas

    def read(self, batch: pa.RecordBatch) -> Reading:
        """Read `value` of a batch. Bytes of any kind give a reading. Raises UnlistedSchema."""
        errors = Errors()
        payload, ids = split(batch.column("value"), self._schemas, "AVRO", errors)
        parts: list[tuple[np.ndarray, dict[str, pa.Array]]] = []
        for id in np.unique(ids[ids >= 0]).tolist():
            places = np.flatnonzero(ids == id)
            some = payload if len(places) == len(payload) else payload.take(pa.array(places))
            of_id = plan(self._schemas[id].text, self._columns)
            parts.append((places, self._read(some, id, of_id, places, errors)))
        columns = {
            name: spread([(places, read[name]) for places, read in parts], kind, len(payload))
            for name, kind in self._kinds.items()
        }
        return Reading(columns, errors, lambda name, i: _shown(columns[name][i].as_py()))

    def _read(
        self, payload: pa.Array, id: int, plan: Plan, places: np.ndarray, errors: Errors
    ) -> dict[str, pa.Array]:
        taken, read = np.zeros(len(payload), bool), dict[str, pa.Array]()
        if plan.over_batch is not None:
            over_batch = AvroValues(payload)
            read = over_batch.read(plan.over_batch)
            taken = over_batch.is_sure
        at_once, rest = np.flatnonzero(taken), np.flatnonzero(~taken)
        one_by_one = self._one_by_one(payload, rest, id, plan, places, errors) if len(rest) else {}
        columns = {}
        for name, kind in self._kinds.items():
            columns[name] = read[name].cast(kind) if name in read else pa.nulls(len(payload), kind)
            if name in one_by_one:
                others = (rest, pa.array(one_by_one[name], kind))
                taken_rows = (at_once, columns[name].take(pa.array(at_once)))
                columns[name] = spread([taken_rows, others], kind, len(payload))
        return columns

    def _one_by_one(
        self,
        payload: pa.Array,
        rest: np.ndarray,
        id: int,
        plan: Plan,
        places: np.ndarray,
        errors: Errors,
    ) -> dict[str, list[Any]]:
        columns: dict[str, list[Any]] = {name: [] for name in self._kinds}
        for at in rest.tolist():
            record = int(places[at])
            try:
                read, bad = plan.read(payload[at].as_py())
            except Malformed:
                read, bad = {}, {}
                text = found("one value of that schema", "invalid, truncated or additional bytes")
                errors.add(record, Errors.WHOLE, "malformed_avro", f"schema id {id}: {text}")
            for place, name in enumerate(self._kinds):
                columns[name].append(read.get(name))
                if name in bad:
                    errors.add(record, place, *verdict(name, self._words[name], bad[name]))
        return columns


def _shown(value: Any) -> str:
    return value.strftime("%Y-%m-%dT%H:%M:%SZ") if hasattr(value, "hour") else str(value)


def _reader(node: Node) -> _Read:
    kind = node.kind
    if kind in ("record", "error"):
        fields = [(name, _reader(field)) for name, field in node.fields.items()]

        def record(data: bytes, at: int) -> tuple[Any, int]:
            read = {}
            for name, field in fields:
                read[name], at = field(data, at)
            return read, at

        return record
    if kind == "union":
        branches = [_reader(branch) for branch in node.branches]
        # Of several types that are not null, the converter needs the one of the value.
        numbers = {
            i: number
            for number, i in enumerate(i for i, b in enumerate(node.branches) if b.kind != "null")
        }

        def union(data: bytes, at: int) -> tuple[Any, int]:
            branch, at = read_long(data, at)
            if not 0 <= branch < len(branches):
                raise Malformed
            value, at = branches[branch](data, at)
            is_one_of_several = len(numbers) > 1 and branch in numbers
            return ((numbers[branch], value) if is_one_of_several else value), at

        return union
    if kind in ("array", "map"):
        return _blocks(_reader(node.inner), is_map=kind == "map")
    if kind == "enum":
        symbols = node.attributes["symbols"]

        def enum(data: bytes, at: int) -> tuple[Any, int]:
            number, at = read_long(data, at)
            if not 0 <= number < len(symbols):
                raise Malformed
            return symbols[number], at

        return enum
    if kind == "fixed":
        size = node.attributes["size"]
        return lambda data, at: _take(data, at, size)
    return _PRIMITIVES[kind]


def _blocks(item: _Read, is_map: bool) -> _Read:
    def blocks(data: bytes, at: int) -> tuple[Any, int]:
        found: list[Any] = []
        while True:
            count, at = read_long(data, at)
            if count == 0:
                return (dict(found) if is_map else found), at
            if count < 0:
                # A block that is preceded by its size in bytes.
                count, (_, at) = -count, read_long(data, at)
            # Each item takes a byte at least.
            if count > len(data) - at:
                raise Malformed
            for _ in range(count):
                if is_map:
                    key, at = _sized(data, at)
                value, at = item(data, at)
                found.append((key, value) if is_map else value)

    return blocks


def read_long(data: bytes, at: int) -> tuple[int, int]:
    number = shift = 0
    while True:
        byte = data[at]
        at += 1
        number |= (byte & 0x7F) << shift
        if byte < 0x80:
            break
        shift += 7
        if shift > 63:
            raise Malformed
    if number >= 2**64:
        raise Malformed
    return (number >> 1) ^ -(number & 1), at


def _int(data: bytes, at: int) -> tuple[int, int]:
    number, at = read_long(data, at)
    if not -(2**31) <= number < 2**31:
        raise Malformed
    return number, at


def _take(data: bytes, at: int, size: int) -> tuple[bytes, int]:
    if not 0 <= size <= len(data) - at:
        raise Malformed
    return data[at : at + size], at + size


def _sized(data: bytes, at: int) -> tuple[bytes, int]:
    size, at = read_long(data, at)
    return _take(data, at, size)


def _boolean(data: bytes, at: int) -> tuple[bool, int]:
    if data[at] > 1:
        raise Malformed
    return data[at] == 1, at + 1


_PRIMITIVES: dict[str, _Read] = {
    "null": lambda data, at: (None, at),
    "boolean": _boolean,
    "int": _int,
    "long": read_long,
    "float": lambda data, at: (struct.unpack_from("<f", data, at)[0], at + 4),
    "double": lambda data, at: (struct.unpack_from("<d", data, at)[0], at + 8),
    "bytes": _sized,
    "string": _sized,
}


def _converter(kind: pa.DataType, node: Node, path: str, notation: Notation) -> _Convert:
    """Return how a writer's type becomes the column. Raises Incompatible, naming `path`."""
    if node.kind == "union":
        branches = [b for b in node.branches if b.kind != "null"]
        names = [MEMBER + name for name in names_of(branches)]
        if pa.types.is_struct(kind) and len(branches) > 1 and {*names} & {*kind.names}:
            members = [
                _member(kind, name, branch, path, notation)
                for name, branch in zip(names, branches, strict=True)
            ]
            return lambda found: members[found[0]](found[1])
        converters = [_converter(kind, b, path, notation) for b in branches]
        if len(converters) == 1:
            return converters[0]
        if converters:
            return lambda found: converters[found[0]](found[1])
    elif pa.types.is_list(kind) and node.kind == "array":
        item = _converter(kind.value_type, node.inner, f"{path}[]", notation)
        return lambda found: [within(f"[{i}]", item, one) for i, one in enumerate(found)]
    elif (
        pa.types.is_map(kind) and node.kind == "map" and kind.key_type in (pa.string(), pa.binary())
    ):
        item = _converter(kind.item_type, node.inner, f"{path}{{}}", notation)
        return lambda found: {
            text_of(key): within(f".{text_of(key)}", item, one) for key, one in found.items()
        }
    elif pa.types.is_struct(kind) and node.kind == "record":
        fields = {
            f.name: _converter(f.type, node.fields[f.name], f"{path}.{f.name}", notation)
            for f in kind
            if f.name in node.fields
        }
        if not fields:
            raise Incompatible(
                f"{path}: expected a field of {', '.join(f.name for f in kind)}, found none"
            )
        return lambda found: {
            n: within(f".{n}", convert, found[n]) for n, convert in fields.items()
        }
    elif notations.has_unit(kind, notation):
        if is_of_unit(node, notation):
            return lambda found: notations.moment(str(found), kind, notation)
        if node.kind == "string":
            return lambda found: notations.moment(text_of(found), kind, notation)
    elif notation.pattern and (kind == MICROS or pa.types.is_date(kind)):
        if node.kind == "string":
            return lambda found: notations.moment(text_of(found), kind, notation)
    elif notation.decimal and notations.is_number(kind) and node.kind == "string":
        return lambda found: notations.number(text_of(found), kind, notation)
    elif pa.types.is_decimal(kind) and node.logical == "decimal":
        precision, scale = node.attributes["precision"], node.attributes["scale"]
        fits = precision - scale <= kind.precision - kind.scale or precision > MOST_DIGITS
        if scale <= kind.scale and fits:
            return lambda found: values.unscaled(found, scale, kind)
    elif pa.types.is_date(kind) and (node.kind, node.logical) == ("int", "date"):
        return _date
    elif kind == MICROS and node.kind == "long" and unit_of(node.logical):
        unit = unit_of(node.logical)
        return lambda found: _moment(found, unit)
    elif node.kind in _PLAIN.get(kind, ()) and node.logical != "decimal":
        if pa.types.is_string(kind) and node.kind != "enum":
            return text_of
        return float if pa.types.is_floating(kind) else same
    expected = words(values.name_of(kind), notation)
    raise Incompatible(f"{path}: expected a type readable as {expected}, found {node.describe()}")


def _member(kind: pa.StructType, name: str, node: Node, path: str, notation: Notation) -> _Convert:
    """Return how a value of a union's type becomes a STRUCT of the union's members."""
    if name in kind.names:
        convert = _converter(kind.field(name).type, node, f"{path}.{name}", notation)
        return lambda found: {name: within(f".{name}", convert, found)}

    def refuse(_: Any) -> Any:
        # As a row without this member, its value would be lost.
        raise Unreadable(values.name_of(kind), f"{node.describe()}, the type of a {name}")

    return refuse


def same(value: Any) -> Any:
    return value


def text_of(value: bytes) -> str:
    try:
        return value.decode()
    except UnicodeDecodeError:
        raise Unreadable("UTF-8", "bytes that are not") from None


def _date(days: int) -> date:
    if notations.FIRST_DAY <= days <= notations.LAST_DAY:
        return _EPOCH + timedelta(days)
    raise Unreadable("date", str(days))


def _moment(number: int, unit: int) -> int:
    micros = number // (unit // 1_000_000) if unit > 1_000_000 else number * (1_000_000 // unit)
    if FIRST_MICROS <= micros <= LAST_MICROS:
        return micros
    raise Unreadable("timestamp", str(number))
