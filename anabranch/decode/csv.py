"""CSV: a record is one line of RFC 4180; its fields are the stream's columns, by position, or by
name if the stream's file has the header. A record that repeats the header is refused.

- A field in double quotes may contain the delimiter, line breaks, and quotes written twice; an
  unquoted field contains no quote. Blanks belong to a field. A byte order mark at the beginning and
  one line break at the end are ignored.
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
from collections.abc import Sequence
from functools import lru_cache, partial
from typing import Any

import pyarrow as pa

from anabranch.config.columns import Column, Notation
from anabranch.decode import notations, values
from anabranch.decode.values import MICROS, Errors, Reading, found

_QUOTED = r'"[^"]*+(?:""[^"]*+)*+"'


class CsvReader:
    """A reader of one stream's values. `header`: the names of the fields in order, by which columns
    find theirs; without it, fields are columns by position."""

    def __init__(
        self, columns: Sequence[Column], delimiter: str, header: Sequence[str] = ()
    ) -> None:
        self._columns, self._delimiter, self._header = columns, delimiter, list(header)
        self._width = len(header or columns)
        self._places = (
            [self._header.index(column.field[0]) for column in columns]
            if header
            else range(len(columns))
        )

    def read(self, batch: pa.RecordBatch) -> Reading:
        """Read `value` of a batch. Bytes of any kind give a reading."""
        errors = Errors()
        rows = [
            self._split(one, errors, i) for i, one in enumerate(batch.column("value").to_pylist())
        ]
        texts = {
            column.name: [row[at] if row else None for row in rows]
            for at, column in zip(self._places, self._columns, strict=True)
        }
        read = {}
        for place, column in enumerate(self._columns):
            name, kind = column.name, values.arrow_type(column.type)
            read[name], bad = _column(texts[name], kind, column.notation)
            is_time = column.type in ("timestamp", "date")
            code = "unreadable_timestamp" if is_time else "wrong_type"
            expected = notations.words(column.type, column.notation)
            for i in bad:
                errors.add(i, place, code, f"{name}: {found(expected, texts[name][i])}")
        return Reading(read, errors, lambda name, i: str(texts[name][i]))

    def _split(self, one: bytes | None, errors: Errors, i: int) -> list[str | None] | None:
        """Return the fields of a line; None for one that cannot be split."""
        refuse = partial(errors.add, i, Errors.WHOLE)
        if one is None:
            return refuse("null_value", found("a line of CSV", "a null value"))
        try:
            line = one.decode().removeprefix("\ufeff")
        except UnicodeDecodeError:
            return refuse("invalid_utf8", found("UTF-8", "bytes that are not"))
        if line in ("", "\n", "\r\n"):
            return refuse("empty_value", found("a line of CSV", "no text"))
        if (values := split(line, self._delimiter)) is None:
            text = "a quote that is open or out of place, or a second line"
            return refuse("malformed_csv", found("one line of CSV", text))
        if len(values) != self._width:
            return refuse("wrong_field_count", found(f"{self._width} fields", str(len(values))))
        if self._header and all((v or "") == n for v, n in zip(values, self._header, strict=True)):
            return refuse("header_line", found("a line of values", "the header"))
        return values


@lru_cache(maxsize=16)
def _patterns(delimiter: str) -> tuple[re.Pattern[str], re.Pattern[str]]:
    mark = re.escape(delimiter)
    field = rf'(?:{_QUOTED}|[^"\r\n{mark}]*+)'
    line = rf"{field}(?:{mark}{field})*+(?:\r?\n)?"
    return re.compile(line), re.compile(f"{mark}({field})")


def split(line: str, delimiter: str) -> list[str | None] | None:
    """Return the fields of a line, None for an empty one; None for text that is no line of CSV."""
    if '"' not in line:
        plain = line[:-1].removesuffix("\r") if line.endswith("\n") else line
        if "\n" in plain or "\r" in plain:
            return None
        return [field or None for field in plain.split(delimiter)]
    whole, fields = _patterns(delimiter)
    if whole.fullmatch(line) is None:
        return None
    return [_unquoted(field) for field in fields.findall(delimiter + line)]


def _unquoted(field: str) -> str | None:
    return field[1:-1].replace('""', '"') if field.startswith('"') else field or None


def _column(
    texts: Sequence[str | None], kind: pa.DataType, notation: Notation
) -> tuple[pa.Array, list[int]]:
    """Return a column, null where its text is unreadable, and the indexes of these."""
    if pa.types.is_string(kind):
        return pa.array(texts, kind), []
    if kind == MICROS or pa.types.is_date(kind):
        return notations.moments(pa.array(texts, pa.string()), kind, notation)
    convert = partial(_converted, kind, notation)
    if notation.decimal in ("", ".") and notations.is_number(kind):
        given = pa.array(texts, pa.string())
        read, bad = values.numbers(given, kind, lambda i: convert(texts[i] or ""))
    else:
        read, bad = values.each(texts, kind, convert)
    return read, list(bad)


def _converted(kind: pa.DataType, notation: Notation, text: str) -> Any:
    """Return a field's text as a value of its type. Raises Unreadable."""
    if pa.types.is_boolean(kind) and text in ("true", "false"):
        return text == "true"
    if pa.types.is_binary(kind) and values.BASE64.fullmatch(text):
        return base64.b64decode(text)
    return notations.number(text, kind, notation)
