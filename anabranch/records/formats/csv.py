"""CSV: a record is one line of RFC 4180 without a header; its fields are the stream's columns, by
position.

- A field in double quotes may contain the delimiter, line breaks, and quotes written twice; an
  unquoted field contains no quote. Blanks belong to a field. One line break at the end is ignored.
- An empty field without quotes is null; `""` is empty text.
- STRING takes a field unchanged. Other types take the same as in JSON (`json_sql`): numbers in
  JSON's notation, with at most 1,000 digits and three of an exponent, `true` and `false`, Base64,
  ISO 8601.

Spark's own CSV parser accepts invalid CSV (text after a closing quote, an open quote) and does not
distinguish `""` from nothing, so SQL expressions split the line. Their possessive quantifiers
neither backtrack nor recurse.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from pyspark.sql import DataFrame
from pyspark.sql import types as T

from anabranch.records.checks import Check, error, expected_found
from anabranch.records.formats import Reading
from anabranch.records.formats.json_sql import TEXT, converted

# Regular expressions of Java; none contains a quote, so that r'...' is their SQL.
_QUOTED = r"\x22[^\x22]*+(?:\x22\x22[^\x22]*+)*+\x22"
_INTEGER = r"^-?(0|[1-9]\d{0,18})\z"
_NUMBER = r"^-?(0|[1-9]\d{0,999})(\.\d{1,1000})?([eE][+-]?\d{1,3})?\z"
_BASE64 = r"^(?:[A-Za-z0-9+/]{4})*+(?:[A-Za-z0-9+/]{2}==|[A-Za-z0-9+/]{3}=)?\z"


class CsvFormat:
    def __init__(self, delimiter: str) -> None:
        self._delimiter = rf"\x{{{ord(delimiter):x}}}"
        self._delimiter_text = f"decode(X'{delimiter.encode().hex()}', 'UTF-8')"

    def read(self, records: DataFrame, types: Mapping[str, T.DataType]) -> Reading:
        """Read as `Format.read`."""
        field = rf"(?:{_QUOTED}|[^\x22\r\n{self._delimiter}]*+)"
        line = rf"^(?!\x{{feff}}){field}(?:{self._delimiter}{field})*+(?:\r?\n)?\z"
        # A delimiter before the first field too: an empty match would not advance.
        fields = (
            f"regexp_extract_all(concat({self._delimiter_text}, {TEXT}), "
            f"r'{self._delimiter}({field})', 1)"
        )
        split = records.selectExpr(
            "*", f"IF(is_valid_utf8({TEXT}) AND {TEXT} RLIKE r'{line}', {fields}, NULL) AS _fields"
        )
        texts = split.selectExpr(
            "*", *(f"{_unquoted(f'get(_fields, {i})')} AS `_text_{n}`" for i, n in enumerate(types))
        )
        rows = texts.selectExpr(
            "*", *(f"{_typed(f'`_text_{n}`', kind)} AS `_row_{n}`" for n, kind in types.items())
        )
        return Reading(rows, tuple(_checks(types)), lambda name: f"`_text_{name}`")


def _unquoted(field: str) -> str:
    inner = f"replace(substring({field}, 2, length({field}) - 2), r'\"\"', r'\"')"
    return (
        f"CASE WHEN {field} = '' THEN NULL WHEN startswith({field}, r'\"') THEN {inner} ELSE "
        f"{field} END"
    )


def _typed(text: str, kind: T.DataType) -> str:
    """Return SQL that converts a field's text to its type, null if it cannot be read."""
    cast = f"try_cast({text} AS {kind.simpleString()})"
    if isinstance(kind, (T.IntegerType, T.LongType)):
        return f"IF({text} RLIKE r'{_INTEGER}', {cast}, NULL)"
    if isinstance(kind, (T.FloatType, T.DoubleType)):
        return f"IF({text} RLIKE r'{_NUMBER}' AND abs({cast}) < double('Infinity'), {cast}, NULL)"
    if isinstance(kind, T.DecimalType):
        return f"IF({text} RLIKE r'{_NUMBER}', {cast}, NULL)"
    if isinstance(kind, T.BooleanType):
        return f"CASE {text} WHEN 'true' THEN true WHEN 'false' THEN false END"
    if isinstance(kind, T.BinaryType):
        return f"IF({text} RLIKE r'{_BASE64}', unbase64({text}), NULL)"
    return converted(text, kind)


def _checks(types: Mapping[str, T.DataType]) -> Iterator[Check]:
    yield Check(
        "value IS NULL", error("null_value", "'expected a line of CSV, found a null value'")
    )
    yield Check(
        f"NOT is_valid_utf8({TEXT})",
        error("invalid_utf8", "'expected UTF-8, found bytes that are not'"),
    )
    yield Check(
        rf"{TEXT} RLIKE r'^(?:\r?\n)?\z'",
        error("empty_value", "'expected a line of CSV, found no text'"),
    )
    malformed = (
        "'expected one line of CSV, found a quote that is open or out of place, or a second line'"
    )
    yield Check("_fields IS NULL", error("malformed_csv", malformed))
    count = f"concat('expected {len(types)} fields, found ', size(_fields))"
    yield Check(f"size(_fields) != {len(types)}", error("wrong_field_count", count))
    for name, kind in types.items():
        if not isinstance(kind, T.StringType):
            code = (
                "unreadable_timestamp"
                if isinstance(kind, (T.TimestampType, T.DateType))
                else "wrong_type"
            )
            text = expected_found(f"{name}: expected {kind.simpleString()}", f"`_text_{name}`")
            yield Check(f"`_text_{name}` IS NOT NULL AND `_row_{name}` IS NULL", error(code, text))
