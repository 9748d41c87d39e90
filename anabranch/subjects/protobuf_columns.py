"""The columns of a Protobuf message: numbers, texts and bytes as their own types, uint64 as
DECIMAL(20,0), an enum as STRING, a Timestamp as TIMESTAMP, a Date as DATE, a wrapper as its value,
and repeated, map and message as ARRAY, MAP and STRUCT. Pure.

Messages without fields and messages that contain themselves are refused.
"""

from __future__ import annotations

from collections.abc import Mapping

from google.protobuf.descriptor import FieldDescriptor as F

from anabranch.decode.avro_names import MAX_DEPTH, Incompatible
from anabranch.decode.protobuf import (
    DATE,
    INT32,
    INT64,
    TIMESTAMP,
    UINT64,
    WRAPPERS,
    describe,
    message_of,
)
from anabranch.subjects.field import NOTHING, NotAColumn, NotReadable, fields_of, struct_type

_TYPES = {
    **dict.fromkeys(INT32, "int"),
    **dict.fromkeys(INT64, "bigint"),
    **dict.fromkeys(UINT64, "decimal(20,0)"),
    **{F.TYPE_BOOL: "boolean", F.TYPE_FLOAT: "float", F.TYPE_DOUBLE: "double"},
    **{F.TYPE_STRING: "string", F.TYPE_ENUM: "string", F.TYPE_BYTES: "binary"},
}
_LONGEST = 1_000_000


def protobuf_fields(
    text: str, message: str | None, given: Mapping[str, str | None] = NOTHING
) -> list[tuple[str, str]]:
    """Return the name and type of each field of a message, by default the first of the last file,
    in the file's order; `text` and `given` are as in `message_of` and `fields_of`. Raises
    NotAColumn."""
    try:
        root = message_of(text, message or (0,))
    except Incompatible as error:
        raise NotReadable("", "a Protobuf message", str(error)) from None
    fields = {field.name: field for field in root.fields}
    return fields_of(fields, given, lambda field, path: _type(field, path, (root.full_name,)))


def _type(field: F, path: str, seen: tuple[str, ...]) -> str:
    inner = field.message_type
    if inner is not None and inner.GetOptions().map_entry:
        key = _TYPES[inner.fields_by_name["key"].type]
        if key.startswith("decimal"):
            raise NotAColumn(path, "a map with keys other than uint64", describe(field))
        return f"map<{key},{_type(inner.fields_by_name['value'], f'{path}{{}}', seen)}>"
    if field.is_repeated:
        return f"array<{_value(field, f'{path}[]', seen)}>"
    return _value(field, path, seen)


def _value(field: F, path: str, seen: tuple[str, ...]) -> str:
    inner = field.message_type
    if inner is None:
        return _TYPES[field.type]
    if inner.full_name == TIMESTAMP:
        return "timestamp"
    if inner.full_name == DATE:
        return "date"
    if inner.full_name in WRAPPERS:
        return _TYPES[inner.fields_by_name["value"].type]
    if inner.full_name in seen or len(seen) > MAX_DEPTH:
        raise NotAColumn(path, "no message that contains itself", inner.full_name)
    names = (*seen, inner.full_name)
    parts = [(part.name, _type(part, f"{path}.{part.name}", names)) for part in inner.fields]
    kind = struct_type(path, parts)
    # A few messages, each used twice by the previous one, expand exponentially.
    if len(kind) > _LONGEST:
        raise NotAColumn(path, f"a type of at most {_LONGEST} characters", "a longer one")
    return kind
