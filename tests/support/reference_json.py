"""A JSON decoder without shortcuts. The product's decoder must give the same verdict for any bytes.

It is the project's first decoder, and is not changed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from anabranch.records.checks import Check, error, expected_found
from anabranch.records.formats import Reading
from anabranch.records.formats.json_sql import (
    MAX_DEPTH,
    MAX_DIGITS,
    TEXT,
    as_read,
    converted,
    ddl,
    has_huge_number,
    unreadable,
)
from pyspark.sql.types import (
    ArrayType,
    DataType,
    DateType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

# Deep enough to distinguish "too deep" from "malformed", without a large use of memory.
_REPORTED_DEPTH = 10_000

# Regular expressions of Java; none contains a quote, so that r'...' is their SQL.
_OTHER_THAN_OBJECT = r"^\s*+(\[|\x22|-?\d|true\b|false\b|null\b)"
_NOT_TEXT = r"^(-?\d++(\.\d++)?+([eE][+-]?\d++)?+|true|false|[\[{][\s\S]*)$"
# The escape of a UTF-16 surrogate without its partner, after an even number of backslashes.
_LONE_SURROGATE = (
    r"(?<!\\)(?:\\\\)*+(?:\\u[dD][89abAB][0-9a-fA-F]{2}(?!\\u[dD][c-fC-F])"
    r"|(?<!\\u[dD][89abAB][0-9a-fA-F]{2})\\u[dD][c-fC-F])"
)


class ReferenceJsonFormat:
    """The format of values that are JSON objects. Each value is parsed between marks, its names are
    listed and its bytes are checked."""

    def read(self, records: DataFrame, types: Mapping[str, DataType]) -> Reading:
        """Read records as `Format.read` does. Only broken values are parsed again, to find the
        reason."""
        shape = StructType([StructField(name, as_read(kind)) for name, kind in types.items()])
        hashed = records.selectExpr("*", "CAST(xxhash64(value) AS STRING) AS _hash")
        parsed = hashed.selectExpr("*", f"{parse(shape, unless=has_huge_number(types))} AS _parsed")
        rows = parsed.selectExpr(
            "*",
            f"{intact('_parsed')} AS _intact",
            f"json_object_keys({TEXT}) AS _names",
            *(f"{converted(raw(name), kind)} AS `_row_{name}`" for name, kind in types.items()),
        )
        known = ", ".join(f"'{name}'" for name in types)
        unknown = f"filter(_names, name -> name NOT IN ({known}))"
        return Reading(rows, tuple(_checks(types)), raw, unknown)


def _checks(types: Mapping[str, DataType]) -> Iterator[Check]:
    yield Check(
        "value IS NULL", error("null_value", "'expected a JSON object, found a null value'")
    )
    yield Check(
        f"NOT is_valid_utf8({TEXT})",
        error("invalid_utf8", "'expected UTF-8, found bytes that are not'"),
    )
    if huge := has_huge_number(types):
        message = (
            f"'expected a DECIMAL of at most {MAX_DIGITS} digits, and 3 of an exponent, found one "
            "with more'"
        )
        yield Check(f"_parsed IS NULL AND {huge}", error("wrong_type", message))
    yield Check("NOT _intact", _judge_broken(types))
    yield Check(
        "get(_parsed.m, 1) IS NULL", error("not_an_object", "'expected a JSON object, found null'")
    )
    lone = "'expected Unicode text, found the escape of a surrogate without its partner'"
    yield Check(
        rf"contains({TEXT}, r'\u') AND {TEXT} RLIKE r'{_LONE_SURROGATE}'",
        error("lone_surrogate", lone),
    )
    repeated = "concat('expected each field once, found ', array_join(_names, ', '))"
    yield Check("size(array_distinct(_names)) < size(_names)", error("duplicate_key", repeated))
    for name, kind in types.items():
        yield from _judge_column(name, kind)


def _judge_broken(types: Mapping[str, DataType]) -> str:
    """Return the SQL of the reason why a value is not intact. It parses the value twice again,
    which costs time only for bad records."""
    deep = parse(StructType([]), _REPORTED_DEPTH)
    texts = parse(StructType([StructField(name, StringType()) for name in types]))
    culprits = []
    for name, kind in types.items():
        text = f"get(b.texts.m, 1).`{name}`"
        message = expected_found(f"{name}: expected {kind.simpleString()}", text)
        culprits.append(f"IF({text} IS NOT NULL AND {raw(name)} IS NULL, {message}, NULL)")
    # If the parser gives up a whole record for one field (a setting of Spark), the field is
    # unknown.
    unknown = "'expected the types of the schema, found another'"
    culprit = (
        f"IF(get(_parsed.m, 1) IS NULL, {unknown}, coalesce({', '.join(culprits)}, {unknown}))"
    )
    malformed = (
        "'expected one JSON object, found text that is not JSON, is cut off, or goes on after the "
        "object'"
    )
    too_deep = f"'expected at most {MAX_DEPTH} levels of nesting, found more'"
    empty = error("empty_value", "'expected a JSON object, found no text'")
    not_an_object = error("not_an_object", expected_found("expected a JSON object", TEXT))
    verdict = (
        rf"CASE WHEN NOT {TEXT} RLIKE r'\S' THEN {empty} "
        f"WHEN {TEXT} RLIKE r'{_OTHER_THAN_OBJECT}' THEN {not_an_object} "
        f"WHEN NOT {intact('b.deep')} THEN {error('malformed_json', malformed)} "
        f"WHEN NOT {intact('b.texts')} THEN {error('too_deep', too_deep)} "
        f"ELSE {error('wrong_type', culprit)} END"
    )
    # A lambda over one element names an expression and evaluates it once.
    return (
        f"get(transform(array(named_struct('deep', {deep}, 'texts', {texts})), b -> {verdict}), 0)"
    )


def _judge_column(name: str, kind: DataType) -> Iterator[Check]:
    read = raw(name)
    text = expected_found(f"{name}: expected {kind.simpleString()}", f"CAST({read} AS STRING)")
    if isinstance(kind, (TimestampType, DateType)):
        unread = f"{read} IS NOT NULL AND `_row_{name}` IS NULL"
        yield Check(f"{unread} AND {read} RLIKE r'{_NOT_TEXT}'", error("wrong_type", text))
        yield Check(unread, error("unreadable_timestamp", text))
    elif unread := unreadable(read, kind):
        yield Check(unread, error("wrong_type", text))


def parse(shape: StructType, depth: int = MAX_DEPTH, unless: str | None = None) -> str:
    """Return the SQL that parses `{"m": [{"#": <hash>}, <value>, {"#": <hash>}]}` with the value's
    own hash.

    Spark's parser stops at the end of the first object, and ignores the rest. No value can contain
    its own hash, so a value that closes the wrapper early, or adds to it, is detected: `m` does not
    have these three elements.
    """
    mark = "'{\"#\":', _hash, '}'"
    element = StructType([*shape.fields, StructField("#", StringType())])
    schema = StructType(
        [StructField("m", ArrayType(element)), StructField("corrupt", StringType())]
    )
    options = {
        "mode": "PERMISSIVE",
        "columnNameOfCorruptRecord": "corrupt",
        "allowNonNumericNumbers": "false",
        "allowSingleQuotes": "false",
        "timeZone": "UTC",
        "maxNestingDepth": str(depth + 2),  # the wrapper adds two levels
    }
    pairs = ", ".join(f"'{key}', '{value}'" for key, value in options.items())
    wrapped = f"concat('{{\"m\":[', {mark}, ',', {TEXT}, ',', {mark}, ']}}')"
    guarded = f"IF({unless}, NULL, {wrapped})" if unless is not None else wrapped
    return f"from_json({guarded}, '{ddl(schema)}', map({pairs}))"


def intact(parsed: str) -> str:
    """Return the SQL of whether the value is one JSON value of the expected shape, without a rest.
    Never null."""
    return (
        f"coalesce({parsed}.corrupt IS NULL AND size({parsed}.m) = 3 "
        f"AND get({parsed}.m, 0).`#` = _hash AND get({parsed}.m, 2).`#` = _hash, false)"
    )


def raw(name: str) -> str:
    return f"get(_parsed.m, 1).`{name}`"
