"""The columns of a subject's schema: Avro, JSON Schema, Protobuf. Pure.

docs/reference/formats.md, "Columns of a subject", has the table of types, and what is refused.
Sources: Avro's specification (https://avro.apache.org/docs/1.12.0/specification/), JSON Schema of
drafts 4 to 2020-12 (https://json-schema.org/draft/2020-12/json-schema-core).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any, TypeVar
from urllib.parse import unquote

from google.protobuf.descriptor import FieldDescriptor as F

from anabranch.config.columns import MOST_DIGITS
from anabranch.decode.avro_columns import unit_of
from anabranch.decode.avro_names import (
    MAX_DEPTH,
    MAX_SIZE,
    MEMBER,
    Incompatible,
    Node,
    names_of,
    parse,
    record_of,
)
from anabranch.decode.protobuf import (
    DATE,
    DOCUMENTS,
    INT32,
    INT64,
    TIMESTAMP,
    UINT64,
    WRAPPERS,
    describe,
    message_of,
)

T = TypeVar("T")

NOTHING: Mapping[str, str | None] = MappingProxyType({})

Left = list["NotAColumn"] | None
"""The errors of parts of nested records that are left out, or None: such a part is an error."""


class NotAColumn(Exception):
    """A field of a subject's schema that has no column type; the message begins with its path.
    `field`: the field of the record that it is or is in; empty if it is the whole record."""

    def __init__(self, path: str, expected: str, found: str) -> None:
        where = f"{path}: " if path else ""
        super().__init__(f"{where}expected {expected}, found {found}")
        self.field = path


class NotAName(NotAColumn):
    """A field with a name that no column can have."""


class NotReadable(NotAColumn):
    """A schema whose records cannot be read, whichever fields become columns."""


def fields_of(
    fields: Mapping[str, T], given: Mapping[str, str | None], read: Callable[[T, str], str]
) -> list[tuple[str, str]]:
    """Return the name and type of each field. `given` has types by name that replace those of the
    schema; None leaves a field out. Raises NotAColumn."""
    found = []
    for name, field in fields.items():
        if (kind := given.get(name, "")) is not None:
            try:
                found.append((str(name), kind or read(field, str(name))))
            except NotAColumn as error:
                error.field = str(name)
                raise
    return found


def _parts(
    fields: Mapping[str, T], path: str, read: Callable[[T, str], str], left: Left
) -> list[tuple[str, str]]:
    """Return the name and type of each field of a nested record; `left` takes the errors of those
    that have no type, if it is a list."""
    found = []
    for name, field in fields.items():
        try:
            found.append((name, read(field, f"{path}.{name}")))
        except NotAColumn as error:
            if left is None:
                raise
            left.append(error)
    return found


def struct_type(path: str, fields: Collection[tuple[str, str]]) -> str:
    """Return the type of a nested record. Raises NotAColumn for one without fields."""
    if not fields:
        raise NotAColumn(path, "a record with fields", "one without any")
    require_names(path, [name for name, _ in fields])
    return f"struct<{','.join(f'{name}:{kind}' for name, kind in fields)}>"


def require_names(path: str, names: Collection[str]) -> None:
    """Raise NotAColumn for a name of no column, and for names that differ only by case: NotAName
    for one of the record itself."""
    seen: dict[str, str] = {}
    refused = NotAColumn if path else NotAName
    for name in names:
        at = f"{path}.{name}" if path else name
        if not name.isascii() or not name.isidentifier():
            raise refused(
                at, "a name of letters, digits and underscores, no digit first", repr(name)
            )
        if (other := seen.setdefault(name.lower(), name)) != name:
            raise refused(at, "names that differ by more than case", f"{other} and {name}")


_PLAIN = {
    "boolean": "boolean",
    "int": "int",
    "long": "bigint",
    "float": "float",
    "double": "double",
    "string": "string",
    "enum": "string",
    "bytes": "binary",
    "fixed": "binary",
}
_WIDER = {frozenset(("int", "long")): "bigint", frozenset(("float", "double")): "double"}


def avro_fields(
    text: str, given: Mapping[str, str | None] = NOTHING, left: Left = None
) -> list[tuple[str, str]]:
    """Return the name and type of each field of a record's schema, in the schema's order; `given`
    is as in `fields_of`. Raises NotAColumn."""
    try:
        root, _ = record_of(parse(text))
    except Incompatible as error:
        raise NotReadable("", "an Avro schema that can be read", str(error)) from None
    return fields_of(root.fields, given, partial(_avro_type, left=left))


def _avro_type(node: Node, path: str, left: Left) -> str:
    if node.kind == "union":
        branches = [branch for branch in node.branches if branch.kind != "null"]
        if (wider := _WIDER.get(frozenset(b.describe() for b in branches))) is not None:
            return wider
        if len(branches) > 1:
            names = [MEMBER + name for name in names_of(branches)]
            members = zip(names, branches, strict=True)
            return struct_type(path, [(n, _avro_type(b, f"{path}.{n}", left)) for n, b in members])
        if branches:
            return _avro_type(branches[0], path, left)
    if node.kind == "array":
        return f"array<{_avro_type(node.inner, f'{path}[]', left)}>"
    if node.kind == "map":
        return f"map<string,{_avro_type(node.inner, f'{path}{{}}', left)}>"
    if node.kind == "record":
        return struct_type(path, _parts(node.fields, path, partial(_avro_type, left=left), left))
    if node.logical == "decimal":
        precision, scale = node.attributes["precision"], node.attributes["scale"]
        if scale > MOST_DIGITS:
            expected = f"a decimal of at most {MOST_DIGITS} digits after the point"
            raise NotAColumn(path, expected, f"decimal({precision},{scale})")
        return f"decimal({min(precision, MOST_DIGITS)},{scale})"
    if (node.kind, node.logical) == ("int", "date"):
        return "date"
    if node.kind == "long" and unit_of(node.logical):
        return "timestamp"
    if node.kind not in _PLAIN:
        raise NotAColumn(path, "a type with values", node.describe())
    return _PLAIN[node.kind]


_JSON_PLAIN = {"boolean": "boolean", "integer": "bigint", "number": "double", "string": "string"}
_TEXTS = {"date-time": "timestamp", "date": "date"}
_VALUES = {bool: "boolean", int: "bigint", float: "double", str: "string"}
_LONGEST = 80


def json_schema_fields(
    text: str, given: Mapping[str, str | None] = NOTHING
) -> list[tuple[str, str]]:
    """Return the name and type of each property of an object's schema, in the schema's order;
    `given` is as in `fields_of`. Raises NotAColumn."""
    try:
        root = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise NotAColumn("", "a JSON Schema", f"text that is no JSON ({error})") from None
    reader = _Reader(root)
    schema = reader.resolved(root, "", ())[0]
    properties = schema.get("properties")
    if schema.get("type", "object") != "object" or not isinstance(properties, Mapping):
        raise NotAColumn("", "an object with properties", _short_json(schema))
    return fields_of(properties, given, lambda part, path: reader.type(part, path, ()))


class _Reader:
    """Reader of a schema. `seen`: the references that led to a place; none may recur. Types are
    bounded: a few references, each used twice by the previous, expand exponentially."""

    def __init__(self, root: Any) -> None:
        self._root = root
        self._types = self._depth = 0

    def type(self, schema: Any, path: str, seen: tuple[str, ...]) -> str:
        self._types, self._depth = self._types + 1, self._depth + 1
        if self._types > MAX_SIZE:
            raise NotAColumn(path, f"a schema of at most {MAX_SIZE} types", "more")
        if self._depth > MAX_DEPTH:
            raise NotAColumn(path, f"at most {MAX_DEPTH} levels", "more")
        kind = self._type(schema, path, seen)
        self._depth -= 1
        return kind

    def _type(self, schema: Any, path: str, seen: tuple[str, ...]) -> str:
        schema, seen = self.resolved(schema, path, seen)
        kind = schema.get("type")
        if isinstance(kind, list):
            others = [one for one in kind if one != "null"]
            kind = others[0] if len(others) == 1 else kind
        if "enum" in schema or "const" in schema:
            return _type_of_values(schema.get("enum", [schema.get("const")]), path, schema)
        if kind is None and "properties" in schema:
            kind = "object"
        if kind == "array":
            return f"array<{self._items(schema, path, seen)}>"
        if kind == "object":
            return self._object(schema, path, seen)
        if kind == "string":
            return _TEXTS.get(str(schema.get("format")), "string")
        if not isinstance(kind, str) or kind not in _JSON_PLAIN:
            raise NotAColumn(path, "one type, alone or with null", _short_json(schema))
        return _JSON_PLAIN[kind]

    def resolved(
        self, schema: Any, path: str, seen: tuple[str, ...]
    ) -> tuple[Mapping[str, Any], tuple[str, ...]]:
        """Follow references and single combinations. Return the schema and the references seen."""
        while True:
            if not isinstance(schema, Mapping):
                raise NotAColumn(path, "a schema with a type", json.dumps(schema)[:_LONGEST])
            if "$ref" in schema:
                reference = str(schema["$ref"])
                if reference in seen:
                    raise NotAColumn(
                        path, "a schema that does not contain itself", f"$ref {reference}"
                    )
                seen = (*seen, reference)
                schema = self._follow(reference, path)
                continue
            combined = next((key for key in ("allOf", "anyOf", "oneOf") if key in schema), None)
            if combined is None:
                return schema, seen
            parts = schema[combined] if isinstance(schema[combined], list) else []
            others = [
                part
                for part in parts
                if not (isinstance(part, Mapping) and part.get("type") == "null")
            ]
            if len(others) != 1 or "properties" in schema:
                raise NotAColumn(
                    path, f"{combined} of one schema, alone or with null", _short_json(schema)
                )
            schema = others[0]

    def _follow(self, reference: str, path: str) -> Any:
        found = self._root
        if not reference.startswith("#"):
            raise NotAColumn(
                path, "a $ref within the schema, such as #/$defs/NAME", f"$ref {reference}"
            )
        for part in filter(None, reference[1:].split("/")):
            name = unquote(part).replace("~1", "/").replace("~0", "~")
            if not isinstance(found, Mapping) or name not in found:
                raise NotAColumn(
                    path,
                    "a $ref to a part of the schema",
                    f"$ref {reference}, which it does not have",
                )
            found = found[name]
        return found

    def _items(self, schema: Mapping[str, Any], path: str, seen: tuple[str, ...]) -> str:
        items = schema.get("items")
        if "prefixItems" in schema or not isinstance(items, Mapping):
            raise NotAColumn(path, "an array with one schema for all items", _short_json(schema))
        return self.type(items, f"{path}[]", seen)

    def _object(self, schema: Mapping[str, Any], path: str, seen: tuple[str, ...]) -> str:
        properties, values = schema.get("properties"), schema.get("additionalProperties")
        if isinstance(properties, Mapping) and properties:
            fields = [
                (str(name), self.type(part, f"{path}.{name}", seen))
                for name, part in properties.items()
            ]
            return struct_type(path, fields)
        if not isinstance(values, Mapping) or not values:
            raise NotAColumn(
                path,
                "an object with properties, or with one schema for all of them as "
                "additionalProperties",
                _short_json(schema),
            )
        return f"map<string,{self.type(values, f'{path}{{}}', seen)}>"


def _type_of_values(values: Any, path: str, schema: Mapping[str, Any]) -> str:
    listed = values if isinstance(values, list) else []
    kinds = {_VALUES.get(type(value)) for value in listed if value is not None}
    if kinds == {"bigint", "double"}:
        return "double"
    if len(kinds) != 1 or None in kinds:
        raise NotAColumn(path, "values of one plain type", _short_json(schema))
    return str(kinds.pop())


def _short_json(schema: Mapping[str, Any]) -> str:
    text = json.dumps(
        {
            key: value
            for key, value in schema.items()
            if key not in ("description", "title", "$defs")
        }
    )
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…"


_TYPES = {
    **dict.fromkeys(INT32, "int"),
    **dict.fromkeys(INT64, "bigint"),
    **dict.fromkeys(UINT64, "decimal(20,0)"),
    **{F.TYPE_BOOL: "boolean", F.TYPE_FLOAT: "float", F.TYPE_DOUBLE: "double"},
    **{F.TYPE_STRING: "string", F.TYPE_ENUM: "string", F.TYPE_BYTES: "binary"},
}
_LONGEST_TYPE = 1_000_000


def protobuf_fields(
    text: str,
    message: str | None,
    given: Mapping[str, str | None] = NOTHING,
    left: Left = None,
) -> list[tuple[str, str]]:
    """Return name and type of each field of a message, by default the last file's first, in order;
    `text`, `given` as in `message_of` and `fields_of`. Raises NotAColumn."""
    try:
        root = message_of(text, message or (0,))
    except Incompatible as error:
        raise NotReadable("", "a Protobuf message", str(error)) from None
    fields = {field.name: field for field in root.fields}
    read = partial(_part_type, seen=(root.full_name,), left=left)
    return fields_of(fields, given, read)


def _part_type(field: F, path: str, seen: tuple[str, ...], left: Left) -> str:
    inner = field.message_type
    if inner is not None and inner.GetOptions().map_entry:
        key = _TYPES[inner.fields_by_name["key"].type]
        if key.startswith("decimal"):
            raise NotAColumn(path, "a map with keys other than uint64", describe(field))
        return f"map<{key},{_part_type(inner.fields_by_name['value'], f'{path}{{}}', seen, left)}>"
    if field.is_repeated:
        return f"array<{_part_value(field, f'{path}[]', seen, left)}>"
    return _part_value(field, path, seen, left)


def _part_value(field: F, path: str, seen: tuple[str, ...], left: Left) -> str:
    inner = field.message_type
    if inner is None:
        return _TYPES[field.type]
    if inner.full_name == TIMESTAMP:
        return "timestamp"
    if inner.full_name == DATE:
        return "date"
    if inner.full_name in DOCUMENTS:
        return "string"
    if inner.full_name in WRAPPERS:
        return _TYPES[inner.fields_by_name["value"].type]
    if inner.full_name in seen or len(seen) > MAX_DEPTH:
        raise NotAColumn(path, "no message that contains itself", inner.full_name)
    names = (*seen, inner.full_name)
    fields = {part.name: part for part in inner.fields}
    kind = struct_type(path, _parts(fields, path, partial(_part_type, seen=names, left=left), left))
    # A few messages, each used twice by the previous one, expand exponentially.
    if len(kind) > _LONGEST_TYPE:
        raise NotAColumn(path, f"a type of at most {_LONGEST_TYPE} characters", "a longer one")
    return kind
