"""JSON: one object a record, its fields are the stream's columns. `json_sql` reads the types."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from pyspark.sql import DataFrame
from pyspark.sql.types import DataType, DateType, StringType, StructField, StructType, TimestampType

from anabranch.records.checks import Check, error, expected_found, opaque
from anabranch.records.formats import Reading
from anabranch.records.formats.json_sql import (
    MAX_DEPTH,
    MAX_DIGITS,
    TEXT,
    as_read,
    colons,
    converted,
    has_huge_number,
    intact,
    is_ordinary,
    is_plain,
    other_colons,
    parse,
    raw,
    unreadable,
    value,
)

# A number that Spark's VARIANT would store as a DOUBLE, or text that looks like one. Possessive, as
# all of these are.
_LOOSE_NUMBER = r"[:,\[]\s*+-?+(?:\d++(?:\.\d++)?+[eE]|[\d.]{39})"
# Enough to distinguish "too deep" from "malformed", with little memory.
_DEPTH_TO_CHECK = 10_000

# Regular expressions of Java; none contains a quote, so that r'...' is their SQL.
_OTHER_THAN_OBJECT = r"^\s*+(\[|\x22|-?\d|true\b|false\b|null\b)"
_NOT_TEXT = r"^(-?\d++(\.\d++)?+([eE][+-]?\d++)?+|true|false|[\[{][\s\S]*)$"
# The escape of a UTF-16 surrogate without its partner, after an even number of backslashes.
_LONE_SURROGATE = (
    r"(?<!\\)(?:\\\\)*+(?:\\u[dD][89abAB][0-9a-fA-F]{2}(?!\\u[dD][c-fC-F])"
    r"|(?<!\\u[dD][89abAB][0-9a-fA-F]{2})\\u[dD][c-fC-F])"
)


class JsonFormat:
    def read(self, records: DataFrame, types: Mapping[str, DataType]) -> Reading:
        """Read as `Format.read`. Each value is parsed once; only a broken one again, to find the
        error. The names of its fields are listed only if they may differ from the stream's or
        repeat."""
        shape = StructType([StructField(name, as_read(kind)) for name, kind in types.items()])
        times = [name for name, kind in types.items() if isinstance(kind, TimestampType)]
        frame = records.selectExpr("*", f"{is_plain()} AS _plain")
        frame = frame.selectExpr(
            "*",
            f"IF(_plain, {colons(TEXT)}, NULL) AS _colons",
            "IF(_plain, NULL, CAST(xxhash64(value) AS STRING)) AS _hash",
        )
        frame = frame.selectExpr("*", f"{parse(shape, unless=has_huge_number(types))} AS _parsed")
        frame = frame.selectExpr(
            "*", f"{intact('_parsed')} AS _intact", f"{value('_parsed')} AS _value"
        )
        frame = frame.selectExpr("*", f"{opaque(other_colons(types))} AS _others")
        frame = frame.selectExpr("*", f"{opaque(is_ordinary(shape, times))} AS _ordinary")
        rows = frame.selectExpr(
            "*",
            f"IF(_ordinary, NULL, json_object_keys({TEXT})) AS _names",
            *(f"{converted(raw(name), kind)} AS `_row_{name}`" for name, kind in types.items()),
        )
        return Reading(rows, tuple(_checks(types)), raw, _unknown(types), _rescued(types))


def _unknown(types: Mapping[str, DataType]) -> str:
    """Return SQL for the fields without a column in the stream. An ordinary value has none; for
    others the names are already listed."""
    known = ", ".join(f"'{name}'" for name in types)
    return f"array_except(_names, array({known}))"


def _rescued(types: Mapping[str, DataType]) -> str:
    """Return SQL for the fields without a column as a JSON object. It is the whole value if that
    object might differ: for numbers that VARIANT changes, or nested objects that repeat a field."""
    known = ", ".join(f"'{name}'" for name in types)
    fields = f"CAST(try_parse_json({TEXT}) AS map<string,variant>)"
    others = f"to_json(map_filter({fields}, (name, field) -> name NOT IN ({known})))"
    return f"IF({TEXT} RLIKE r'{_LOOSE_NUMBER}', {TEXT}, coalesce({others}, {TEXT}))"


def _checks(types: Mapping[str, DataType]) -> Iterator[Check]:
    yield Check(
        "value IS NULL", error("null_value", "'expected a JSON object, found a null value'")
    )
    yield Check(
        f"NOT _plain AND NOT is_valid_utf8({TEXT})",
        error("invalid_utf8", "'expected UTF-8, found bytes that are not'"),
    )
    if huge := has_huge_number(types):
        digits = (
            f"'expected a DECIMAL of at most {MAX_DIGITS} digits, and 3 of an exponent, found one "
            "with more'"
        )
        yield Check(f"_parsed IS NULL AND {huge}", error("wrong_type", digits))
    yield Check("NOT _intact", _judge_broken(types))
    yield Check("_value IS NULL", error("not_an_object", "'expected a JSON object, found null'"))
    lone = "'expected Unicode text, found the escape of a surrogate without its partner'"
    yield Check(
        rf"NOT _plain AND contains({TEXT}, r'\u') AND {TEXT} RLIKE r'{_LONE_SURROGATE}'",
        error("lone_surrogate", lone),
    )
    repeated = "concat('expected each field once, found ', array_join(_names, ', '))"
    yield Check("size(array_distinct(_names)) < size(_names)", error("duplicate_key", repeated))
    for name, kind in types.items():
        yield from _judge_column(name, kind)


def _judge_broken(types: Mapping[str, DataType]) -> str:
    """Return SQL for why a value is not intact. It parses the value twice more, for bad records
    only."""
    deep = parse(StructType([]), _DEPTH_TO_CHECK)
    texts = parse(StructType([StructField(name, StringType()) for name in types]))
    culprits = []
    for name, kind in types.items():
        text = f"{value('b.texts')}.`{name}`"
        wrong = expected_found(f"{name}: expected {kind.simpleString()}", text)
        culprits.append(f"IF({text} IS NOT NULL AND {raw(name)} IS NULL, {wrong}, NULL)")
    # If a Spark setting makes the parser give up the record for one field, that field is unknown.
    unknown = "'expected the types of the schema, found another'"
    culprit = f"IF(_value IS NULL, {unknown}, coalesce({', '.join(culprits)}, {unknown}))"
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
    # A lambda over one element evaluates an expression once and names it.
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
