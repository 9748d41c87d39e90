"""Debezium's envelope in JSON: a change's row, `after` or, of a delete, `before`, and fields of the
change itself.

Source: https://debezium.io/documentation/reference/stable/connectors/postgresql.html#postgresql-events.

- A value may be the change itself, or have it in `payload` beside its schema.
- A column whose path begins with ROW is a field of the row, any other a field of the change. A
  change without a row (`op: t`) has null in the row's columns.
- A value whose schema writes a time or a decimal otherwise than its column is refused.
- A tombstone (a null value, after a delete) has the fields of the record's key, an object in JSON,
  as has a delete or update without a row. A row may be a text of JSON (MongoDB).
"""

from __future__ import annotations

from codecs import BOM_UTF8
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

import msgspec
import pyarrow as pa
from msgspec import Raw

from anabranch.config.columns import ROW, Column, Notation
from anabranch.decode.avro_names import CONNECT_TIMES
from anabranch.decode.field_tree import REFUSED
from anabranch.decode.json import JsonReader
from anabranch.decode.notations import words
from anabranch.decode.values import Errors, Reading, found

_NULL, _OF_ROWS = Raw(b"null"), (Raw(b'"d"'), Raw(b'"u"'))


class _Change(msgspec.Struct, gc=False):
    op: Raw = _NULL
    before: Raw = _NULL
    after: Raw = _NULL
    payload: Raw = _NULL
    schema: Raw = _NULL


class _Schema(msgspec.Struct, gc=False):
    field: str | None = None
    name: str | None = None
    parameters: dict[str, str] | None = None
    fields: list[_Schema] = []


_SCHEMA = msgspec.json.Decoder(_Schema)
_MOST_SCHEMAS = 64
_CHANGE = msgspec.json.Decoder(_Change)
_OBJECT = msgspec.json.Decoder(dict[str, Raw])


class DebeziumReader:
    """A reader of one stream's changes, used by one process; parameters as of JsonReader."""

    def __init__(
        self, columns: Sequence[Column], names_unknown: bool = False, rescues: bool = False
    ) -> None:
        self._names = [column.name for column in columns]
        of_row = [replace(c, path=c.path[1:]) for c in columns if c.path[0] == ROW]
        of_change = [column for column in columns if column.path[0] != ROW]
        self._written = [c for c in of_row if c.notation != Notation() and len(c.field) == 1]
        # The last schema and its verdict, and those of others.
        self._schema, self._refused = _NULL, list[tuple[int, str]]()
        self._schemas: dict[bytes, list[tuple[int, str]]] = {}
        # A reader, and the places of its columns.
        self._row = JsonReader(of_row, names_unknown, rescues), self._places(of_row)
        self._change = JsonReader(of_change), self._places(of_change)

    def _places(self, columns: Sequence[Column]) -> list[int]:
        return [self._names.index(column.name) for column in columns]

    def read(self, batch: pa.RecordBatch) -> Reading:
        """Read `value` and `key` of a batch. Bytes of any kind give a reading."""
        errors, value = Errors(), batch.column("value")
        changes: list[bytes] = []
        rows: list[bytes | None] = []
        for i, one in enumerate(value.to_pylist()):
            change, row, is_change, schema = _parts(one, partial(_key_of, batch, i))
            changes.append(change)
            rows.append(row)
            if self._written and schema != self._schema:
                self._schema, self._refused = schema.copy(), self._contradictions(bytes(schema))
            for place, text in self._refused:
                errors.add(i, place, "incompatible_schema", text)
            if not is_change:
                text = found("Debezium's change, with op", change.decode(errors="replace"))
                errors.add(i, Errors.WHOLE, "not_a_change", text)
        of_row, of_change = (
            reader.read(pa.record_batch({"value": pa.array(values, pa.binary())}))
            for (reader, _), values in ((self._row, rows), (self._change, changes))
        )
        # A change's own errors precede those of its row.
        whole = Errors()
        whole.take(of_change.errors, self._change[1])
        whole.take(errors, range(len(self._names)))
        whole.take(of_row.errors, self._row[1], "null_value")
        return Reading(
            of_row.columns | of_change.columns,
            whole,
            lambda name, i: (of_row if name in of_row.columns else of_change).shown(name, i),
            of_row.unknown,
            of_row.rescued,
        )

    def _contradictions(self, schema: bytes) -> list[tuple[int, str]]:
        """Return the columns that read values of a schema as other ones: place and error."""
        if schema not in self._schemas:
            if len(self._schemas) == _MOST_SCHEMAS:
                self._schemas.clear()
            fields = _fields_beside(schema)
            self._schemas[schema] = [
                (self._names.index(column.name), f"{column.name}: {found(expected, other)}")
                for column in self._written
                if (other := _otherwise(column, fields.get(column.field[0])))
                for expected in (words(column.type, column.notation),)
            ]
        return self._schemas[schema]


def _fields_beside(schema: bytes) -> dict[str, Any]:
    """Return the fields of a row by name, of a change's schema."""
    with suppress(*REFUSED):
        rows = _SCHEMA.decode(schema)
        parts = (part for row in rows.fields if row.field == "after" for part in row.fields)
        return {part.field or "": part for part in parts}
    return {}


def _otherwise(column: Column, of: _Schema | None) -> str:
    """Return how a field's schema writes its values, if not as the column reads them."""
    if of is None:
        return ""
    unit = CONNECT_TIMES.get(of.name or "")
    if column.notation.unit and unit and unit != column.notation.unit:
        return str(of.name)
    scale = (of.parameters or {}).get("scale")
    is_decimal = column.notation.decimal == "base64" and column.type.startswith("decimal")
    if is_decimal and scale is not None and not column.type.endswith(f",{scale})"):
        return f"a decimal with {scale} digits after the point"
    return ""


def row_of(value: bytes) -> bytes:
    """Return a change's row; empty if it has none. Pure."""
    return _parts(value, lambda: None)[1] or b""


def _parts(
    value: bytes | None, key: Callable[[], bytes | None]
) -> tuple[bytes, bytes | None, bool, Raw]:
    """Return a value's change and row, None if it has none, whether it is a change, and the schema
    beside it."""
    schema = _NULL
    if value is None:
        return b"{}", _fields_of(key()), True, schema
    value = value.removeprefix(BOM_UTF8)
    try:
        change = _CHANGE.decode(value)
        if change.op == _NULL and change.payload != _NULL:
            value, schema = bytes(change.payload), change.schema
            change = _CHANGE.decode(value)
    except REFUSED:
        return value, None, True, schema
    row = change.after if change.after != _NULL else change.before
    if row == _NULL:
        row_of_key = _fields_of(key()) if change.op in _OF_ROWS else None
        return value, row_of_key, change.op != _NULL, schema
    sent = bytes(row)
    with suppress(*REFUSED):
        sent = msgspec.json.decode(sent, type=str).encode()
    return value, sent, change.op != _NULL, schema


def _key_of(batch: pa.RecordBatch, i: int) -> bytes | None:
    key: bytes | None = batch.column("key")[i].as_py()
    return key


def _fields_of(key: bytes | None) -> bytes | None:
    """Return the object in a key, perhaps in `payload` beside its schema; None if it has none."""
    try:
        fields = _OBJECT.decode(key or b"null")
    except RecursionError:
        return key  # Its reader refuses such nesting.
    except REFUSED:
        return None
    return bytes(fields["payload"]) if fields.keys() == {"schema", "payload"} else key
