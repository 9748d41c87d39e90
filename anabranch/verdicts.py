"""Verdicts: why a record cannot become a row, in Spark SQL. The first condition that holds gives code and text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import timedelta

from pyspark.sql.types import DataType, DateType, StringType, StructField, StructType, TimestampType

from anabranch.config import EventTime, Stream
from anabranch.json_sql import MAX_DEPTH, TEXT, intact, parse, raw, unreadable

CODES = (
    "null_value",
    "empty_value",
    "invalid_utf8",
    "malformed_json",
    "too_deep",
    "not_an_object",
    "duplicate_key",
    "wrong_type",
    "unreadable_timestamp",
    "missing_required",
    "event_time_out_of_bounds",
    "lone_surrogate",
)

_FOUND_LENGTH = 80
# Far enough to tell "too deep" from "malformed", near enough to cost no memory.
_DEPTH_TO_TELL = 10_000
_HOUR_MICROS = 3_600_000_000

# Regular expressions of Java; none holds a quote, so that r'...' is their SQL.
_OTHER_THAN_OBJECT = r"^\s*(\[|\x22|-?\d|true\b|false\b|null\b)"
_NOT_TEXT = r"^(-?\d+(\.\d+)?([eE][+-]?\d+)?|true|false|[\[{][\s\S]*)$"
# The escape of a UTF-16 surrogate without its partner, after an even number of backslashes.
_LONE_SURROGATE = (
    r"(?<!\\)(?:\\\\)*+(?:\\u[dD][89abAB][0-9a-fA-F]{2}(?!\\u[dD][c-fC-F])"
    r"|(?<!\\u[dD][89abAB][0-9a-fA-F]{2})\\u[dD][c-fC-F])"
)


def judge(stream: Stream, types: Mapping[str, DataType]) -> str:
    """The verdict on a record, null or a struct of code and text: the first condition that holds."""
    null = _error("null_value", "'expected a JSON object, found a null value'")
    not_utf8 = _error("invalid_utf8", "'expected UTF-8, found bytes that are not'")
    checks = [
        ("get(_parsed.m, 1) IS NULL", "not_an_object", "'expected a JSON object, found null'"),
        (
            rf"contains({TEXT}, r'\u') AND {TEXT} RLIKE r'{_LONE_SURROGATE}'",
            "lone_surrogate",
            "'expected Unicode text, found the escape of a surrogate without its partner'",
        ),
        (
            "size(array_distinct(_names)) < size(_names)",
            "duplicate_key",
            "concat('expected each field once, found ', array_join(_names, ', '))",
        ),
        *(check for name, kind in types.items() for check in _judge_column(name, kind)),
        *(
            (
                f"`_row_{c.name}` IS NULL",
                "missing_required",
                f"'{c.name}: expected {c.type} NOT NULL, found null or no such field'",
            )
            for c in stream.columns
            if not c.nullable
        ),
        *(_judge_event_time(stream.event_time) if stream.event_time is not None else ()),
    ]
    cases = " ".join(f"WHEN {test} THEN {_error(code, text)}" for test, code, text in checks)
    return (
        f"CASE WHEN value IS NULL THEN {null} WHEN NOT is_valid_utf8({TEXT}) THEN {not_utf8} "
        f"WHEN NOT _intact THEN {_judge_broken(types)} {cases} END"
    )


def _judge_broken(types: Mapping[str, DataType]) -> str:
    """Why a value is not intact. It is read again, twice, which only bad records cost."""
    deep = parse(StructType([]), _DEPTH_TO_TELL)
    texts = parse(StructType([StructField(name, StringType()) for name in types]))
    culprits = []
    for name, kind in types.items():
        text = f"get(b.texts.m, 1).`{name}`"
        found = _found(f"{name}: expected {kind.simpleString()}", text)
        culprits.append(f"IF({text} IS NOT NULL AND {raw(name)} IS NULL, {found}, NULL)")
    # Where the parser gives up a whole record for one field (a setting of Spark's), there is no telling which.
    unknown = "'expected the types of the schema, found another'"
    culprit = f"IF(get(_parsed.m, 1) IS NULL, {unknown}, coalesce({', '.join(culprits)}, {unknown}))"
    malformed = "'expected one JSON object, found text that is not JSON, is cut off, or goes on after the object'"
    too_deep = f"'expected at most {MAX_DEPTH} levels of nesting, found more'"
    empty = _error("empty_value", "'expected a JSON object, found no text'")
    not_an_object = _error("not_an_object", _found("expected a JSON object", TEXT))
    verdict = (
        rf"CASE WHEN NOT {TEXT} RLIKE r'\S' THEN {empty} "
        f"WHEN {TEXT} RLIKE r'{_OTHER_THAN_OBJECT}' THEN {not_an_object} "
        f"WHEN NOT {intact('b.deep')} THEN {_error('malformed_json', malformed)} "
        f"WHEN NOT {intact('b.texts')} THEN {_error('too_deep', too_deep)} "
        f"ELSE {_error('wrong_type', culprit)} END"
    )
    # A lambda over one element: the way to evaluate an expression once and name it.
    return f"get(transform(array(named_struct('deep', {deep}, 'texts', {texts})), b -> {verdict}), 0)"


def _error(code: str, text: str) -> str:
    return f"struct('{code}' AS code, {text} AS text)"


def _judge_column(name: str, kind: DataType) -> Iterator[tuple[str, str, str]]:
    read = raw(name)
    text = _found(f"{name}: expected {kind.simpleString()}", f"CAST({read} AS STRING)")
    if isinstance(kind, (TimestampType, DateType)):
        unread = f"{read} IS NOT NULL AND `_row_{name}` IS NULL"
        yield f"{unread} AND {read} RLIKE r'{_NOT_TEXT}'", "wrong_type", text
        yield unread, "unreadable_timestamp", text
    elif unread := unreadable(read, kind):
        yield unread, "wrong_type", text


def _judge_event_time(bounds: EventTime) -> Iterator[tuple[str, str, str]]:
    """The bounds are measured from the ingest hour's start and end, so every rebuild gives the same verdict."""
    at = f"unix_micros(`_row_{bounds.column}`)"
    text = _found(f"{bounds.column}: expected a time near the ingest hour", raw(bounds.column))
    if bounds.past is not None:
        yield f"{at} < _hour_start - {_micros(bounds.past)}L", "event_time_out_of_bounds", text
    if bounds.future is not None:
        yield f"{at} > _hour_start + {_HOUR_MICROS + _micros(bounds.future)}L", "event_time_out_of_bounds", text


def _found(expected: str, found: str) -> str:
    return f"concat('{expected}, found ', coalesce(substring({found}, 1, {_FOUND_LENGTH}), 'null'))"


def _micros(delta: timedelta) -> int:
    return delta // timedelta(microseconds=1)
