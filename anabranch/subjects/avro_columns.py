"""The columns of an Avro schema. Pure; source: Avro's specification
(https://avro.apache.org/docs/1.12.0/specification/).

| Avro | column |
|---|---|
| boolean, int, long, float, double | BOOLEAN, INT, BIGINT, FLOAT, DOUBLE |
| string, enum, uuid on a string | STRING |
| bytes, fixed, uuid or duration on a fixed | BINARY |
| date | DATE |
| (local-)timestamp-millis, -micros, -nanos | TIMESTAMP |
| decimal(p,s) on bytes or fixed | DECIMAL(p,s); of more than 38 digits DECIMAL(38,s) |
| time-millis; time-micros | INT; BIGINT |
| array, map, record | ARRAY, MAP with STRING keys, STRUCT |
| a union of one of these and null | the same; all columns but those of the key may be null |
| int and long; float and double | BIGINT; DOUBLE |
| another union | STRUCT<member0: …, member1: …>, one field for each type that is not null |

Other logical types are read as the underlying type. Null alone, records without fields and types
that contain themselves are refused.
"""

from __future__ import annotations

from collections.abc import Mapping

from anabranch.config.columns import MOST_DIGITS
from anabranch.decode.avro_names import Incompatible, Node, parse
from anabranch.subjects.field import NOTHING, NotAColumn, NotReadable, fields_of, struct_type

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


def avro_fields(text: str, given: Mapping[str, str | None] = NOTHING) -> list[tuple[str, str]]:
    """Return the name and type of each field of a record's schema, in the schema's order; `given`
    is as in `fields_of`. Raises NotAColumn."""
    try:
        root = parse(text)
    except Incompatible as error:
        raise NotReadable("", "an Avro schema that can be read", str(error)) from None
    if root.kind != "record":
        raise NotReadable("", "a record", root.describe())
    return fields_of(root.fields, given, _type)


def _type(node: Node, path: str) -> str:
    if node.kind == "union":
        branches = [branch for branch in node.branches if branch.kind != "null"]
        if (wider := _WIDER.get(frozenset(b.describe() for b in branches))) is not None:
            return wider
        if len(branches) > 1:
            members = [(f"member{i}", b) for i, b in enumerate(branches)]
            return struct_type(path, [(n, _type(b, f"{path}.{n}")) for n, b in members])
        if branches:
            return _type(branches[0], path)
    if node.kind == "array":
        return f"array<{_type(node.inner, f'{path}[]')}>"
    if node.kind == "map":
        return f"map<string,{_type(node.inner, f'{path}{{}}')}>"
    if node.kind == "record":
        return struct_type(
            path, [(name, _type(inner, f"{path}.{name}")) for name, inner in node.fields.items()]
        )
    if node.logical == "decimal":
        precision, scale = node.attributes["precision"], node.attributes["scale"]
        if scale > MOST_DIGITS:
            expected = f"a decimal of at most {MOST_DIGITS} digits after the point"
            raise NotAColumn(path, expected, f"decimal({precision},{scale})")
        return f"decimal({min(precision, MOST_DIGITS)},{scale})"
    if (node.kind, node.logical) == ("int", "date"):
        return "date"
    if node.kind == "long" and node.logical.removeprefix("local-").startswith("timestamp-"):
        return "timestamp"
    if node.kind not in _PLAIN:
        raise NotAColumn(path, "a type with values", node.describe())
    return _PLAIN[node.kind]
