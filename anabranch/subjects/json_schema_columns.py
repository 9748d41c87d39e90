"""The columns of a JSON Schema. Pure; source: JSON Schema, drafts 4 to 2020-12
(https://json-schema.org/draft/2020-12/json-schema-core).

| JSON Schema | column |
|---|---|
| boolean, integer, number | BOOLEAN, BIGINT, DOUBLE |
| string; with format date-time; with format date | STRING; TIMESTAMP; DATE |
| enum or const of texts, of whole numbers, of booleans | STRING, BIGINT, BOOLEAN |
| array with one schema for its items | ARRAY |
| object with properties | STRUCT |
| object without properties, with a schema as additionalProperties | MAP with STRING keys |
| a type array, an anyOf or a oneOf of one of these and null | the same; all columns but the key's
  may be null |
| allOf of one schema, a $ref within the schema | their content |

Anything else is refused: other combinations, objects and arrays of anything, a schema that contains
itself, a $ref to another document, and a schema of more than 100 levels or, with each $ref
followed, 10,000 types.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any
from urllib.parse import unquote

from anabranch.decode.avro_names import MAX_DEPTH, MAX_SIZE
from anabranch.subjects.field import NOTHING, NotAColumn, fields_of, struct_type

_PLAIN = {"boolean": "boolean", "integer": "bigint", "number": "double", "string": "string"}
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
    """Reader of a schema. `seen` are the references that led to a place; none may recur. The number
    of types is bounded, because a few references, each used twice by the previous one, expand
    exponentially."""

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
        if not isinstance(kind, str) or kind not in _PLAIN:
            raise NotAColumn(path, "one type, alone or with null", _short_json(schema))
        return _PLAIN[kind]

    def resolved(
        self, schema: Any, path: str, seen: tuple[str, ...]
    ) -> tuple[Mapping[str, Any], tuple[str, ...]]:
        """Follow references, and combinations of one schema and null. Return the schema and the
        references seen."""
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
