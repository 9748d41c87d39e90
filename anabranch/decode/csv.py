"""CSV: a record is one line of RFC 4180 without a header; its fields are the stream's columns, by
position.

- A field in double quotes may contain the delimiter, line breaks, and quotes written twice; an
  unquoted field contains no quote. Blanks belong to a field. One line break at the end is ignored.
- An empty field without quotes is null; `""` is empty text.
- STRING takes a field unchanged; `anabranch.decode.values` has the other types' texts. BOOLEAN is
  `true` or `false`.

Python's csv module accepts invalid lines (text after a closing quote, a quote within a field) and
does not distinguish `""` from nothing; regular expressions split the line. Their quantifiers are
possessive: no line is scanned repeatedly.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import pyarrow as pa

from anabranch.decode import values
from anabranch.decode.reading import Errors, Reading, found
from anabranch.decode.values import MICROS

_QUOTED = r'"[^"]*+(?:""[^"]*+)*+"'


class CsvReader:
    def __init__(self, columns: Mapping[str, str], delimiter: str) -> None:
        mark = re.escape(delimiter)
        field = rf'(?:{_QUOTED}|[^"\r\n{mark}]*+)'
        self._types, self._delimiter = dict(columns), delimiter
        self._line = re.compile(rf"(?!\ufeff){field}(?:{mark}{field})*+(?:\r?\n)?")
        self._fields = re.compile(f"{mark}({field})")

    def read(self, batch: pa.RecordBatch) -> Reading:
        """Read `value` of a batch. Bytes of any kind give a reading."""
        errors = Errors()
        rows = [
            self._split(one, errors, i) for i, one in enumerate(batch.column("value").to_pylist())
        ]
        texts = {
            name: [row[place] if row else None for row in rows]
            for place, name in enumerate(self._types)
        }
        columns = {}
        for place, (name, type) in enumerate(self._types.items()):
            columns[name], bad = _column(texts[name], values.arrow_type(type))
            code = "unreadable_timestamp" if type in ("timestamp", "date") else "wrong_type"
            for i in bad:
                errors.add(i, place, code, f"{name}: {found(type, texts[name][i])}")
        return Reading(columns, errors, lambda name, i: str(texts[name][i]))

    def _split(self, one: bytes | None, errors: Errors, i: int) -> list[str | None] | None:
        """Return the fields of a line; None for one that cannot be split."""
        refuse = partial(errors.add, i, Errors.WHOLE)
        if one is None:
            return refuse("null_value", found("a line of CSV", "a null value"))
        try:
            line = one.decode()
        except UnicodeDecodeError:
            return refuse("invalid_utf8", found("UTF-8", "bytes that are not"))
        if line in ("", "\n", "\r\n"):
            return refuse("empty_value", found("a line of CSV", "no text"))
        if self._line.fullmatch(line) is None:
            text = "a quote that is open or out of place, or a second line"
            return refuse("malformed_csv", found("one line of CSV", text))
        fields = self._fields.findall(self._delimiter + line)
        if len(fields) != len(self._types):
            return refuse(
                "wrong_field_count", found(f"{len(self._types)} fields", str(len(fields)))
            )
        return [_unquoted(field) for field in fields]


def _unquoted(field: str) -> str | None:
    return field[1:-1].replace('""', '"') if field.startswith('"') else field or None


def _column(texts: Sequence[str | None], kind: pa.DataType) -> tuple[pa.Array, list[int]]:
    """Return a column, null where its text is unreadable, and the indexes of these."""
    if pa.types.is_string(kind):
        return pa.array(texts, kind), []
    if kind == MICROS or pa.types.is_date(kind):
        return values.moments(pa.array(texts, pa.string()), kind)
    read, bad = values.each(texts, kind, partial(_converted, kind))
    return read, list(bad)


def _converted(kind: pa.DataType, text: str) -> Any:
    """Return a field's text as a value of its type. Raises Unreadable."""
    if pa.types.is_boolean(kind) and text in ("true", "false"):
        return text == "true"
    if pa.types.is_binary(kind) and values.BASE64.fullmatch(text):
        return base64.b64decode(text)
    return values.number(text, kind)
