"""Records of each format with their verdicts: what producers send, and what goes wrong with it."""

import json
import uuid
from datetime import UTC, datetime, timedelta
from math import nan
from struct import pack
from typing import Any

from wire import encode, varint, wired

# The record's value, its verdict's code (None: it is good), and what the verdict's text must name.
Case = tuple[bytes | None, str | None, str]

START = datetime(2026, 11, 21, 3, tzinfo=UTC)
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
EVENT_TIME = {"column": "event_time", "past": "30 days", "future": "1 hour"}
DDL = (
    "event_id STRING NOT NULL, event_time TIMESTAMP NOT NULL, player STRING, level BIGINT, amount "
    "DOUBLE, price DECIMAL(10,2), day DATE, color STRING, raw BINARY, tags ARRAY<STRING>, scores "
    "MAP<STRING, DOUBLE>, nested STRUCT<at: TIMESTAMP, n: INT, more: STRING>"
)

# Errors of writers' schemas.
FOREIGN = ("wrong_subject", "expected a schema of subject s, found another")
MISSING = ("unknown_schema", "expected it in the schema registry, found none")


def of(logical: str, kind: str = "long", **more: Any) -> dict[str, Any]:
    return {"type": kind, "logicalType": logical, **more}


def record(*fields: tuple[str, Any], name: str = "Event") -> dict[str, Any]:
    made = [{"name": name, "type": kind} for name, kind in fields]
    return {"type": "record", "name": name, "namespace": "shop", "fields": made}


# A stream's life: fields are added, types widen, units change.
V1 = record(
    ("event_id", "string"),
    ("event_time", of("timestamp-millis")),
    ("level", ["null", "int"]),
    ("amount", "float"),
    ("price", of("decimal", "bytes", precision=9, scale=2)),
    ("gone", {"type": "array", "items": "string"}),
)
V2 = record(
    ("player", ["null", "string"]),
    ("amount", ["double", "null"]),
    ("level", "long"),
    ("event_id", ["null", "string"]),
    ("day", of("date", "int")),
    ("color", {"type": "enum", "name": "Color", "symbols": ["RED", "GREEN"]}),
    ("raw", {"type": "fixed", "name": "Two", "size": 2}),
    ("tags", {"type": "array", "items": ["null", "string"]}),
    ("scores", {"type": "map", "values": "float"}),
    ("price", of("decimal", "fixed", name="P", size=9, precision=8)),
    ("nested", ["null", record(("n", "int"), ("at", of("timestamp-nanos")), name="Nested")]),
    ("event_time", of("timestamp-micros")),
)


def unreadable(words: str) -> tuple[str, str]:
    """The verdict of a time, and its words."""
    return "unreadable_timestamp", words


def micros(moment: datetime) -> int:
    return (moment - EPOCH) // timedelta(microseconds=1)


def v1(event_id: str, at: datetime, **more: Any) -> dict[str, Any]:
    fields = {"event_id": event_id, "event_time": micros(at) // 1000, "level": {"int": 7}}
    return {**fields, "amount": 1.5, "price": "\u0030\u0039", "gone": ["x"], **more}


def v2(event_id: str | None, at: datetime, **more: Any) -> dict[str, Any]:
    fields = {
        "player": None,
        "amount": {"double": 2.5},
        "level": 2**40,
        "day": 20_000,
        "color": "GREEN",
        "raw": "\u0001\u00ff",
        "event_id": None if event_id is None else {"string": event_id},
        "tags": [{"string": "x"}, None],
        "scores": {"k": 0.5},
        "price": "\0\0\0\0\0\0\0\0\u0005",
        "event_time": micros(at) + 123,
        "nested": {"shop.Nested": {"n": 3, "at": -1_500}},
    }
    return {**fields, **more}


def avro_cases(ids: Any, start: datetime) -> dict[str, Case]:
    """Every case for records of the ingest hour that begins at `start`, by `DDL`, `EVENT_TIME`."""
    at = start + timedelta(minutes=10)
    old, new = encode(V1, v1("old", at)), encode(V2, v2("new", at))

    def second(event_id: str | None, **more: Any) -> bytes:
        return wired(ids.v2, encode(V2, v2(event_id, more.pop("at", at), **more)))

    def first(**more: Any) -> bytes:
        return wired(ids.v1, encode(V1, v1(uuid.uuid4().hex, at, **more)))

    def unfit(schema_id: int, payload: bytes, words: str) -> Case:
        return wired(schema_id, payload), "incompatible_schema", words

    latin = wired(ids.v1, old).replace(b"\x06old", b"\x06o\xe9d")
    huge = varint(2**31 - 20) + b"xx"
    items = old[:-3] + varint(2**31 - 30) + b"\2x"
    nothing: dict[str, Any] = {"amount": None, "nested": None, "tags": [], "scores": {}}
    smallest = {"shop.Nested": {"n": 1, "at": -(2**63)}}
    price, nine_bytes = "price: expected decimal(10,2)", "\u0001" + "\0" * 7 + "\5"
    far_off = "event_time_out_of_bounds"
    no_date, no_time = "day: expected date, found", "event_time: expected timestamp"
    no_type = "event_id: expected a type readable as"
    return {
        "first version": (wired(ids.v1, old), None, ""),
        "second version": (wired(ids.v2, new), None, ""),
        "second version, nulls": (second("nulls", **nothing), None, ""),
        "not a number": (second("nan").replace(pack("<d", 2.5), pack("<d", nan)), None, ""),
        "null value": (None, "null_value", ""),
        "empty": (b"", "not_wire_format", ""),
        "four bytes": (b"\0\0\0\1", "not_wire_format", ""),
        "JSON": (b'{"event_id":"a"}', "not_wire_format", "7B22657665"),
        "magic byte 1": (b"\1" + wired(ids.v1, old)[1:], "not_wire_format", ""),
        "unknown id": (wired(2**31 - 1, old), "unknown_schema", "schema id 2147483647: "),
        "negative id": (b"\0\xff\xff\xff\xff" + old, "unknown_schema", "schema id 4294967295: "),
        "id 0": (wired(0, old), "not_wire_format", "0000000000"),
        "another subject": (wired(ids.foreign, b""), "wrong_subject", f"schema id {ids.foreign}: "),
        "incompatible types": unfit(ids.incompatible, b"\2\2", no_type),
        "no field for NOT NULL": unfit(ids.without_time, b"\2a", "event_time: expected a field"),
        "recursive schema": unfit(ids.recursive, b"\2a\0", "contains itself"),
        "no payload": (wired(ids.v1, b""), "malformed_avro", f"schema id {ids.v1}: "),
        "truncated": (wired(ids.v1, old[:-1]), "malformed_avro", ""),
        "truncated in a text": (wired(ids.v1, old[:2]), "malformed_avro", ""),
        "trailing byte": (wired(ids.v1, old + b"\0"), "malformed_avro", ""),
        "16 trailing bytes": (wired(ids.v1, old + bytes(16)), "malformed_avro", ""),
        "twice": (wired(ids.v1, old + old), "malformed_avro", ""),
        "the other version's bytes": (wired(ids.v2, old), "malformed_avro", ""),
        "two gigabytes announced": (wired(ids.v1, huge), "malformed_avro", ""),
        "two billion items announced": (wired(ids.v1, items), "malformed_avro", ""),
        "negative length": (wired(ids.v1, varint(-5) + b"xxxx"), "malformed_avro", ""),
        "unknown branch of a union": (wired(ids.v2, varint(9) + new[1:]), "malformed_avro", ""),
        "random bytes": (wired(ids.v1, bytes(range(256))), "malformed_avro", ""),
        "latin-1 in a text": (latin, "invalid_utf8", "event_id"),
        "decimal of nine bytes": (first(price=nine_bytes), "wrong_type", price),
        "decimal of forty bytes": (first(price="\u007f" * 40), "wrong_type", "price"),
        "largest decimal": (first(price="\2\u0054\u000b\u00e3\u00ff"), None, ""),
        "a decimal more": (first(price="\2\u0054\u000b\u00e4\0"), "wrong_type", "price"),
        "day of year 10000": (second("x", day=2_932_897), *unreadable(f"{no_date} 2932897")),
        "last day": (second("last-day", day=2_932_896), None, ""),
        "largest time": (second("x", event_time=2**63 - 1), *unreadable(no_time)),
        "smallest time": (second("x", event_time=-(2**63)), "unreadable_timestamp", "event_time"),
        "smallest nested time": (second("nested", nested=smallest), None, ""),
        "null in NOT NULL": (second(None), "missing_required", "event_id"),
        "31 days ago": (second("x", at=at - timedelta(days=31)), far_off, f"{at:T%H:%M}:00Z"),
        "2 hours ahead": (second("x", at=at + timedelta(hours=2)), far_off, "event_time"),
    }


def json_schema_cases(ids: Any, start: datetime) -> dict[str, Case]:
    def event(event_id: str, **more: Any) -> bytes:
        return json.dumps({"event_id": event_id, "event_time": start.isoformat(), **more}).encode()

    level = "level: expected bigint, found x"
    return {
        "plain": (wired(ids.json, event("a", level=1)), None, ""),
        "null value": (None, "null_value", ""),
        "no header": (event("b"), "not_wire_format", "7B22657665"),
        "unknown id": (wired(2**31 - 1, event("b")), "unknown_schema", "schema id 2147483647"),
        "an Avro schema": (wired(ids.v1, event("b")), "wrong_subject", f"schema id {ids.v1}"),
        "no payload": (wired(ids.json, b""), "empty_value", ""),
        "truncated": (wired(ids.json, event("b")[:-1]), "malformed_json", ""),
        "trailing garbage": (wired(ids.json, event("b") + b"x"), "malformed_json", ""),
        "wrong type": (wired(ids.json, event("b", level="x")), "wrong_type", level),
        "field missing": (wired(ids.json, b"{}"), "missing_required", "event_id"),
    }


CSV_DDL = (
    "event_id STRING NOT NULL, event_time TIMESTAMP NOT NULL, level INT, amount DOUBLE, ok "
    "BOOLEAN, price DECIMAL(10,2), day DATE, raw BINARY, small FLOAT, total BIGINT"
)


def csv_cases(start: datetime) -> dict[str, Case]:
    time = (start + timedelta(minutes=10)).isoformat().replace("+00:00", "Z")

    def line(event_id: str = "a", at: str = time, rest: str = ";;;;;;;") -> bytes:
        return f"{event_id};{at};{rest}".encode()

    values = "7;1.5;true;2.345;2024-02-29;aGk=;0.5;9007199254740993"

    def only(place: int, text: str) -> bytes:
        return line(rest=";".join(text if i == place else "" for i in range(8)))

    return {
        "plain": (line("a", rest=values), None, ""),
        "quoted": (line('"b;""quoted""\n line"', rest='"7";;;;;"";;'), None, ""),
        "line break at the end": (line("c") + b"\r\n", None, ""),
        "blanks are text": (line(" d "), None, ""),
        "1 MB of quotes": (line('"' + '""' * 500_000 + '"'), None, ""),
        "null value": (None, "null_value", ""),
        "empty": (b"", "empty_value", ""),
        "only a line break": (b"\n", "empty_value", ""),
        "latin-1": ("é;".encode("latin-1"), "invalid_utf8", ""),
        "byte order mark": (b"\xef\xbb\xbf" + line('"m"'), None, ""),
        "quote left open": (line('"a'), "malformed_csv", ""),
        "text after a quote": (line('"a"b'), "malformed_csv", ""),
        "quote inside": (line('a"b'), "malformed_csv", ""),
        "two lines": (line() + b"\n" + line(), "malformed_csv", ""),
        "1 MB of open quotes": (b'"' + b'""' * 500_000, "malformed_csv", ""),
        "too few fields": (
            f"a;{time}".encode(),
            "wrong_field_count",
            "expected 10 fields, found 2",
        ),
        "too many fields": (line() + b";", "wrong_field_count", "found 11"),
        "1 MB of delimiters": (b";" * 1_000_000, "wrong_field_count", "found 1000001"),
        "other delimiter": (line().replace(b";", b","), "wrong_field_count", "found 1"),
        "text for INT": (only(0, "x"), "wrong_type", "level: expected int, found x"),
        "blank before an INT": (only(0, " 7"), "wrong_type", "level"),
        "line break behind an INT": (only(0, '"7\n"'), "wrong_type", "level"),
        "plus": (only(0, "+7"), "wrong_type", "level"),
        "leading zero": (only(0, "07"), "wrong_type", "level"),
        "fraction for INT": (only(0, "7.0"), "wrong_type", "level"),
        "out of INT's range": (only(0, "2147483648"), "wrong_type", "level"),
        "out of BIGINT's range": (only(7, "9223372036854775808"), "wrong_type", "total"),
        "Arabic digits": (only(0, "\u0667"), "wrong_type", "level"),
        "1e999": (only(1, "1e999"), "wrong_type", "amount"),
        "1e39 for FLOAT": (only(6, "1e39"), "wrong_type", "small"),
        "NaN": (only(1, "NaN"), "wrong_type", "amount"),
        "Java's suffix": (only(1, "1.5d"), "wrong_type", "amount"),
        "quoted empty text for a number": (only(1, '""'), "wrong_type", "amount"),
        "True": (only(2, "True"), "wrong_type", "ok"),
        "too large for DECIMAL": (only(3, "123456789.01"), "wrong_type", "price"),
        "exponent without end": (only(3, "1e-999999999"), "wrong_type", "price"),
        "1 MB of digits": (only(3, "1" * 1_000_000), "wrong_type", "price"),
        "no such day": (only(4, "2026-02-30"), *unreadable("day: expected date, found 2026-02-30")),
        "not Base64": (only(5, "!!"), "wrong_type", "raw"),
        "Base64 cut off": (only(5, "aGk"), "wrong_type", "raw"),
        "no time": (line(at="noon"), *unreadable("event_time: expected timestamp, found noon")),
        "year 1": (line(at="0001-01-01T00:00:00Z"), "event_time_out_of_bounds", "event_time"),
        "null in NOT NULL": (line(""), "missing_required", "event_id"),
        "empty text in NOT NULL": (line('""'), None, ""),
    }


RAW_DDL = "key STRING, value BINARY NOT NULL"
