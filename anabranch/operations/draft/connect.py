"""Columns of a schema of Kafka Connect, as JSON converters write it beside each value.

Source: org.apache.kafka.connect.json.JsonSchema, and Debezium's semantic types
(https://debezium.io/documentation/reference/stable/connectors/postgresql.html#postgresql-data-types).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from anabranch.config.columns import MOST_DIGITS, Notation
from anabranch.config.plain import NAME
from anabranch.decode.guessed import STRING, Guess, common_notation

_PLAIN = {
    "boolean": "boolean",
    "int8": "int",
    "int16": "int",
    "int32": "int",
    "int64": "bigint",
    "float": "float",
    "double": "double",
    "string": "string",
    "bytes": "binary",
}
_CONNECT, _DEBEZIUM = "org.apache.kafka.connect.data.", "io.debezium.time."
_LOGICAL = {
    f"{_CONNECT}Date": ("date", "days"),
    f"{_DEBEZIUM}Date": ("date", "days"),
    f"{_CONNECT}Timestamp": ("timestamp", "millis"),
    f"{_DEBEZIUM}Timestamp": ("timestamp", "millis"),
    f"{_DEBEZIUM}MicroTimestamp": ("timestamp", "micros"),
    f"{_DEBEZIUM}NanoTimestamp": ("timestamp", "nanos"),
    f"{_DEBEZIUM}ZonedTimestamp": ("timestamp", ""),
}


def time_of(name: object) -> Guess | None:
    """Return the column of a time by its semantic type; None for any other type."""
    if (known := _LOGICAL.get(str(name))) is None:
        return None
    return Guess(known[0], Notation(unit=known[1]))


def column_of(schema: Mapping[str, Any]) -> Guess:
    """Return the column of values of a schema; STRING for what no column reads. Pure."""
    if (time := time_of(schema.get("name"))) is not None:
        return time
    kind = schema.get("type")
    if schema.get("name") == f"{_CONNECT}Decimal":
        return _decimal(schema.get("parameters") or {})
    if kind == "array":
        item = column_of(schema.get("items") or {})
        return Guess(f"array<{item.type}>", item.notation)
    if kind == "map" and (schema.get("keys") or {}).get("type") == "string":
        item = column_of(schema.get("values") or {})
        return Guess(f"map<string,{item.type}>", item.notation)
    if kind == "struct":
        parts = {str(f.get("field")): column_of(f) for f in schema.get("fields") or ()}
        notation = common_notation(parts.values())
        if parts and notation is not None and all(map(NAME.fullmatch, parts)):
            return Guess(f"struct<{','.join(f'{n}:{p.type}' for n, p in parts.items())}>", notation)
    return Guess(_PLAIN[kind]) if kind in _PLAIN else STRING


def _decimal(parameters: Mapping[str, Any]) -> Guess:
    scale, precision = (
        int(text) if re.fullmatch("[0-9]{1,2}", text := str(parameters.get(key, ""))) else 0
        for key in ("scale", "connect.decimal.precision")
    )
    digits = min(precision or MOST_DIGITS, MOST_DIGITS)
    if scale > digits:
        return STRING
    return Guess(f"decimal({digits},{scale})", Notation(decimal="base64"))
