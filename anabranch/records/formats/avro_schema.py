"""Avro schemas: the values that a writer's schema gives to a stream's columns. Pure; source: Avro's
specification (https://avro.apache.org/docs/1.12.0/specification/#schema-resolution).

Each writer's schema gets a reader's schema with only those of its fields that the stream has, by
exact name. So Avro resolves promotions, unions and left-out fields, and fields that cannot become a
column are known before any value is read:

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
| DECIMAL(p,s) | bytes or fixed with decimal of at most s digits after the point, p - s before it |
| ARRAY, MAP, STRUCT | array, map, record; missing fields of a record are null |

Each may also be a union of these with null. Other logical types are read as the underlying type.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from pyspark.sql import types as T

from anabranch.records.fast_avro import unit_of
from anabranch.subjects.avro_names import Incompatible, Node, parse

# The reader's type for a column's type, and the writer's types that Avro promotes to it.
_PLAIN: dict[type[T.DataType], tuple[str, tuple[str, ...]]] = {
    T.StringType: ("string", ("string", "bytes")),
    T.BinaryType: ("bytes", ("bytes", "string")),
    T.BooleanType: ("boolean", ("boolean",)),
    T.IntegerType: ("int", ("int",)),
    T.LongType: ("long", ("int", "long")),
    T.FloatType: ("float", ("int", "long", "float")),
    T.DoubleType: ("double", ("int", "long", "float", "double")),
}
_YEAR_1, _YEAR_10000 = -62_135_596_800, 253_402_300_800  # in seconds
_SECONDS_A_DAY = 86_400
_LARGEST_PRECISION = 38

Sql = Callable[[str], str]


@dataclass(frozen=True)
class Value:
    """How a value is read: the reader's schema, and the conversion of Spark's value to the column's
    type. `broken` returns SQL that is true (else false or null) where `convert` gives null for a
    value; "" if it never does."""

    reader: Any
    convert: Sql = lambda read: read
    broken: Sql = lambda read: ""

    def same_as(self, other: Value) -> bool:
        """Return whether both read and convert alike."""
        mine, others = ((v.reader, v.convert("x"), v.broken("x")) for v in (self, other))
        return mine == others


@dataclass(frozen=True)
class Projection:
    """A writer's schema and the reader's schema made for it, as JSON text; `values` has the columns
    that the writer's schema provides."""

    writer: str
    reader: str
    values: Mapping[str, Value]


def project(types: Mapping[str, T.DataType], required: Collection[str], text: str) -> Projection:
    """Return the projection of the writer's schema `text` on the columns.

    Both schemas are framed in a record of `value` and `frame_end`, 16 bytes. A caller appends 16
    bytes to a payload; if it reads the same bytes back, the value ends where the payload does.
    Raises Incompatible.
    """
    writer = parse(text)
    if writer.kind != "record":
        raise Incompatible(f"expected a record, found {writer.kind}")
    if missing := [name for name in required if name not in writer.fields]:
        raise Incompatible(f"{missing[0]}: expected a field for the NOT NULL column, found none")
    resolver = _Resolver()
    values = {
        name: resolver.value(kind, writer.fields[name], name)
        for name, kind in types.items()
        if name in writer.fields
    }
    if not values:
        raise Incompatible(f"expected a field of {', '.join(types)}, found none")
    reader = resolver.record({name: value.reader for name, value in values.items()})
    return Projection(_framed(json.loads(text)), _framed(reader), values)


def _framed(schema: Any) -> str:
    end = {"type": "fixed", "name": "anabranch_end", "size": 16}
    fields = [{"name": "value", "type": schema}, {"name": "frame_end", "type": end}]
    return json.dumps({"type": "record", "name": "anabranch_framed", "fields": fields})


class _Resolver:
    """Builder of one reader's schema: a named type is defined at its first occurrence, then
    referred to by name."""

    def __init__(self) -> None:
        self._defined: set[str] = set()
        self._records = 0

    def record(self, readers: Mapping[str, Any]) -> Any:
        """Return a record with a generated name: Avro resolves records by their fields."""
        self._records += 1
        fields = [{"name": name, "type": ["null", reader]} for name, reader in readers.items()]
        return {"type": "record", "name": f"anabranch_r{self._records}", "fields": fields}

    def value(self, kind: T.DataType, node: Node, path: str) -> Value:
        """Return how a column of `kind` is read from `node`. Raises Incompatible, naming `path`."""
        if node.kind == "union":
            branches = [self.value(kind, b, path) for b in node.branches if b.kind != "null"]
            if branches and all(branches[0].same_as(other) for other in branches[1:]):
                return branches[0]
        elif isinstance(kind, T.ArrayType) and node.kind == "array":
            return self._array(kind, node, path)
        elif isinstance(kind, T.MapType) and node.kind == "map":
            return self._map(kind, node, path)
        elif isinstance(kind, T.StructType) and node.kind == "record":
            return self._struct(kind, node, path)
        elif isinstance(kind, T.DecimalType) and node.logical == "decimal":
            return self._decimal(kind, node, path)
        elif isinstance(kind, T.DateType) and (node.kind, node.logical) == ("int", "date"):
            return _date()
        elif isinstance(kind, T.TimestampType) and node.kind == "long" and unit_of(node.logical):
            return _timestamp(unit_of(node.logical))
        elif isinstance(kind, T.StringType) and node.kind == "enum":
            return Value(self._named(node, {"type": "enum", "symbols": node.attributes["symbols"]}))
        elif isinstance(kind, T.BinaryType) and node.kind == "fixed" and node.logical != "decimal":
            return Value(self._named(node, {"type": "fixed", "size": node.attributes["size"]}))
        elif (
            type(kind) in _PLAIN
            and node.kind in _PLAIN[type(kind)][1]
            and node.logical != "decimal"
        ):
            reader = _PLAIN[type(kind)][0]
            return (
                Value(reader, broken=_not_utf8) if isinstance(kind, T.StringType) else Value(reader)
            )
        raise Incompatible(
            f"{path}: expected a type readable as {kind.simpleString()}, found {node.describe()}"
        )

    def _named(self, node: Node, definition: dict[str, Any]) -> Any:
        if node.name in self._defined:
            return node.name
        self._defined.add(node.name)
        return {"name": node.name, **definition}

    def _decimal(self, kind: T.DecimalType, node: Node, path: str) -> Value:
        """Read with the largest possible precision: bytes may have more digits than the writer's
        schema says, and Spark would silently cut them off for a smaller precision."""
        precision, scale = node.attributes["precision"], node.attributes["scale"]
        if scale > kind.scale or precision - scale > kind.precision - kind.scale:
            raise Incompatible(
                f"{path}: expected a type readable as {kind.simpleString()}, found "
                f"decimal({precision},{scale})"
            )
        logical = {"logicalType": "decimal", "precision": _LARGEST_PRECISION, "scale": scale}
        reader: Any = {"type": "bytes", **logical}
        if node.kind == "fixed":
            size = node.attributes["size"]
            # 16 bytes have the largest precision.
            largest = 2 ** (8 * min(size, 16) - 1) - 1
            logical["precision"] = min(_LARGEST_PRECISION, len(str(largest)) - 1)
            reader = self._named(node, {"type": "fixed", "size": size, **logical})
        cast = f"AS {kind.simpleString()})"
        return Value(
            reader,
            lambda read: f"try_cast({read} {cast}",
            lambda read: f"({read} IS NOT NULL AND try_cast({read} {cast} IS NULL)",
        )

    def _array(self, kind: T.ArrayType, node: Node, path: str) -> Value:
        inner = self.value(kind.elementType, node.inner, f"{path}[]")
        item = _variable(path)
        return Value(
            {"type": "array", "items": ["null", inner.reader]},
            lambda read: _mapped("transform", read, item, inner.convert(item)),
            lambda read: _any(read, item, inner.broken(item)),
        )

    def _map(self, kind: T.MapType, node: Node, path: str) -> Value:
        inner = self.value(kind.valueType, node.inner, f"{path}{{}}")
        item = _variable(path)

        def broken(read: str) -> str:
            parts = (
                _any(f"map_keys({read})", item, _not_utf8(item)),
                _any(f"map_values({read})", item, inner.broken(item)),
            )
            return "(" + " OR ".join(part for part in parts if part) + ")"

        return Value(
            {"type": "map", "values": ["null", inner.reader]},
            lambda read: _mapped(
                "transform_values", read, f"(k, {item})", inner.convert(item), item
            ),
            broken,
        )

    def _struct(self, kind: T.StructType, node: Node, path: str) -> Value:
        present = {
            f.name: self.value(f.dataType, node.fields[f.name], f"{path}.{f.name}")
            for f in kind.fields
            if f.name in node.fields
        }
        if not present:
            raise Incompatible(f"{path}: expected a field of {', '.join(kind.names)}, found none")

        def convert(read: str) -> str:
            fields = [
                present[f.name].convert(f"{read}.`{f.name}`")
                if f.name in present
                else f"CAST(NULL AS {f.dataType.simpleString()})"
                for f in kind.fields
            ]
            named = ", ".join(
                f"'{f.name}', {value}" for f, value in zip(kind.fields, fields, strict=True)
            )
            return f"IF({read} IS NULL, NULL, named_struct({named}))"

        def broken(read: str) -> str:
            parts = [value.broken(f"{read}.`{name}`") for name, value in present.items()]
            any_broken = " OR ".join(f"coalesce({part}, false)" for part in parts if part)
            return f"({any_broken})" if any_broken else ""

        return Value(
            self.record({name: value.reader for name, value in present.items()}), convert, broken
        )


def _variable(path: str) -> str:
    """Return the name of a lambda's variable, different at each level of nesting."""
    return f"x{path.count('[]') + path.count('{}')}"


def _mapped(
    function: str, read: str, arguments: str, converted: str, item: str | None = None
) -> str:
    return (
        read
        if converted == (item or arguments)
        else f"{function}({read}, {arguments} -> {converted})"
    )


def _any(items: str, item: str, broken: str) -> str:
    return f"exists({items}, {item} -> coalesce({broken}, false))" if broken else ""


def _not_utf8(read: str) -> str:
    return f"NOT is_valid_utf8({read})"


def _date() -> Value:
    first, last = _YEAR_1 // _SECONDS_A_DAY, _YEAR_10000 // _SECONDS_A_DAY - 1
    return Value(
        "int",
        lambda read: f"IF({_inside(read, first, last)}, date_from_unix_date({read}), NULL)",
        lambda read: f"NOT {_inside(read, first, last)}",
    )


def _inside(read: str, first: int, last: int) -> str:
    # Not BETWEEN: Spark plans an extra column for it.
    return f"({read} >= {first}L AND {read} <= {last}L)"


def _timestamp(unit: int) -> Value:
    """Read only years 1 to 9999, as everywhere; a long of nanoseconds has no other years."""
    if unit > 1_000_000:
        return Value(
            "long",
            lambda read: f"timestamp_micros(({read} div 1000) - IF({read} % 1000 < 0, 1, 0))",
        )
    first, last = _YEAR_1 * unit, _YEAR_10000 * unit - 1
    return Value(
        "long",
        lambda read: (
            f"IF({_inside(read, first, last)}, timestamp_micros({read} * {1_000_000 // unit}), "
            "NULL)"
        ),
        lambda read: f"NOT {_inside(read, first, last)}",
    )
