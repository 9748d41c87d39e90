"""Parse an Avro schema into a tree with resolved names; refuse schemas with which reading is
unbounded. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

MAX_DEPTH = 100
MAX_SIZE = 10_000

_PRIMITIVES = ("null", "boolean", "int", "long", "float", "double", "bytes", "string")
_NAMED = ("record", "error", "enum", "fixed")


class Incompatible(Exception):
    """A writer's schema that cannot be read as the stream's columns; the message says why."""


CONNECT_TIMES = {
    "io.debezium.time.Date": "days",
    "io.debezium.time.Timestamp": "millis",
    "io.debezium.time.MicroTimestamp": "micros",
    "io.debezium.time.NanoTimestamp": "nanos",
    "org.apache.kafka.connect.data.Date": "days",
    "org.apache.kafka.connect.data.Timestamp": "millis",
}
"""Names that Kafka Connect, most often Debezium, gives to numbers that are times, with the unit."""

MEMBER = "member_"
"""Before the name of a union's type, the field of a STRUCT with one for each."""


@dataclass(frozen=True)
class Node:
    """A type: `kind` is Avro's name for it, `name` the full name of a record, enum or fixed."""

    kind: str
    name: str = ""
    logical: str = ""
    fields: Mapping[str, Node] = field(default_factory=dict)
    branches: tuple[Node, ...] = ()
    items: Node | None = None
    attributes: Mapping[str, Any] = field(default_factory=dict)
    size: int = 1
    """The number of types in it, each counted as often as it occurs."""
    is_empty: bool = False
    """Whether its values take no bytes."""

    @property
    def inner(self) -> Node:
        """The type of an array's items or a map's values."""
        assert self.items is not None
        return self.items

    def describe(self) -> str:
        """Return the type in words, for a message."""
        if self.kind == "union":
            return f"a union of {', '.join(b.describe() for b in self.branches) or 'nothing'}"
        return f"{self.kind} ({self.logical})" if self.logical else self.kind


def parse(text: str) -> Node:
    """Parse a schema into a tree. Raises Incompatible for text that is not an Avro schema, and for
    schemas with which a few bytes could take unbounded work: a type that contains itself, arrays of
    items that take no bytes, more than 100 levels or 10,000 types. `text` is a schema, or as of
    `with_references`."""
    parser = _Parser()
    try:
        schema = json.loads(text)
        if isinstance(schema, dict) and schema.keys() == {"references", "schema"}:
            for reference in schema["references"]:
                parser.node(json.loads(reference), "", 0)
            schema = json.loads(schema["schema"])
        return parser.node(schema, "", 0)
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise Incompatible(
            f"expected an Avro schema, found one that is not ({type(error).__name__}: {error})"
        ) from None


def names_of(members: Sequence[Node]) -> list[str]:
    """Return the name of each type of a union. By its number a member would be another one's in the
    next version."""
    names = [one.name.rpartition(".")[2] or one.kind for one in members]
    if _repeat(names):
        names = [(one.name or one.kind).replace(".", "_") for one in members]
    # Avro has no union with a type twice, but some parsers do.
    return [f"{name}_{i}" for i, name in enumerate(names)] if _repeat(names) else names


def _repeat(names: Sequence[str]) -> bool:
    return len({name.lower() for name in names}) < len(names)


def record_of(root: Node) -> tuple[Node, list[str]]:
    """Return the record of a schema's values; of a union of several types, one with a field for
    each that is not null, by its name, and these names in their order. Raises Incompatible for any
    other type."""
    others = [branch for branch in root.branches if branch.kind != "null"]
    if len(others) > 1:
        names = names_of(others)
        return Node("record", fields=dict(zip(names, others, strict=True))), names
    record = others[0] if others else root
    if record.kind != "record":
        raise Incompatible(f"expected a record, found {root.describe()}")
    return record, []


def with_references(text: str, references: Iterable[str]) -> str:
    """Return a text for `parse` of a schema and of those whose types it names, in that order."""
    return json.dumps({"references": list(references), "schema": text})


class _Parser:
    def __init__(self) -> None:
        self._known: dict[str, Node] = {}
        self._open: set[str] = set()

    def node(self, schema: Any, namespace: str, depth: int) -> Node:
        node = self._node(schema, namespace, depth)
        if node.size > MAX_SIZE:
            raise Incompatible(f"expected at most {MAX_SIZE} types, found more")
        return node

    def _node(self, schema: Any, namespace: str, depth: int) -> Node:
        if depth > MAX_DEPTH:
            raise Incompatible(f"expected at most {MAX_DEPTH} levels, found more")
        if isinstance(schema, list):
            branches = tuple(self.node(branch, namespace, depth + 1) for branch in schema)
            return Node("union", branches=branches, size=_size(branches))
        if isinstance(schema, str):
            known = schema in _PRIMITIVES
            if known:
                return Node(schema, is_empty=schema == "null")
            return self._by_name(schema, namespace)
        kind = schema["type"]
        if not isinstance(kind, str) or kind not in (*_PRIMITIVES, *_NAMED, "array", "map"):
            return self.node(kind, namespace, depth + 1)
        if kind in _NAMED:
            return self._named(kind, schema, namespace, depth)
        if kind in ("array", "map"):
            inner = self.node(
                schema["items" if kind == "array" else "values"], namespace, depth + 1
            )
            if kind == "array" and inner.is_empty:
                raise Incompatible(
                    "expected arrays of items that take bytes, found an array of "
                    f"{inner.describe()}"
                )
            return Node(kind, items=inner, size=_size((inner,)))
        return Node(
            kind, logical=_logical(schema), attributes=_digits(schema), is_empty=kind == "null"
        )

    def _named(self, kind: str, schema: Mapping[str, Any], namespace: str, depth: int) -> Node:
        name = _full_name(schema["name"], schema.get("namespace", namespace))
        if name in self._known or name in self._open:
            raise ValueError(f"{name} is defined twice")
        if kind == "enum":
            node = Node(
                kind, name, attributes={"symbols": [str(symbol) for symbol in schema["symbols"]]}
            )
        elif kind == "fixed":
            if not isinstance(schema["size"], int) or schema["size"] < 0:
                raise ValueError(f"{name} has the size {schema['size']!r}")
            attributes = {"size": schema["size"], **_digits(schema)}
            node = Node(
                kind,
                name,
                _logical(schema),
                attributes=attributes,
                is_empty=attributes["size"] == 0,
            )
        else:
            self._open.add(name)
            inner = name.rpartition(".")[0]
            fields = {f["name"]: self.node(f["type"], inner, depth + 1) for f in schema["fields"]}
            self._open.remove(name)
            empty = all(f.is_empty for f in fields.values())
            node = Node("record", name, fields=fields, size=_size(fields.values()), is_empty=empty)
        self._known[name] = node
        return node

    def _by_name(self, name: str, namespace: str) -> Node:
        full = _full_name(name, namespace)
        # As in Avro's own parser: a name without a namespace is also found from within one.
        for candidate in (full, name):
            if candidate in self._open:
                raise Incompatible(f"expected no type that contains itself, found {candidate}")
            if candidate in self._known:
                return self._known[candidate]
        raise Incompatible(
            f"expected a schema that stands alone, found the name {full} without its definition"
        )


def _size(parts: Iterable[Node]) -> int:
    return 1 + sum(part.size for part in parts)


def _full_name(name: str, namespace: str | None) -> str:
    return name if "." in name or not namespace else f"{namespace}.{name}"


def _logical(schema: Mapping[str, Any]) -> str:
    """Return the logical type; empty for a decimal with invalid digits, which Avro ignores."""
    logical = schema.get("logicalType")
    if logical is None and (unit := CONNECT_TIMES.get(str(schema.get("connect.name")))):
        logical = "date" if unit == "days" else f"timestamp-{unit}"
    digits = _digits(schema)
    if logical == "decimal" and not (
        schema["type"] in ("bytes", "fixed")
        and 0 <= digits["scale"] <= digits["precision"]
        and digits["precision"] > 0
    ):
        return ""
    return logical if isinstance(logical, str) else ""


def _digits(schema: Mapping[str, Any]) -> dict[str, int]:
    given = {key: schema.get(key, 0) for key in ("precision", "scale")}
    return {key: value if isinstance(value, int) else -1 for key, value in given.items()}
