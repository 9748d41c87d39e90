"""Formats through real Kafka, a real schema registry and both layers: each record a row or a dead
letter, as its bytes say, with the same verdict twice."""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from math import nan
from struct import pack
from typing import Any

import pytest
from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql import functions as F
from registry import SchemaRegistry
from sessions import with_settings
from wire import encode, varint, wired
from world import World, past_hour

from anabranch import config
from anabranch.config.columns import parse_columns
from anabranch.kafka.schema_registry import SchemaRegistryClient
from anabranch.offsets.hours import start_of
from anabranch.records import decode
from anabranch.records.formats import Format, avro, csv, json_schema, raw

Make = Callable[..., World]
# The record's value, its verdict's code (None: it is good), and what the verdict's text must name.
Case = tuple[bytes | None, str | None, str]

START = datetime(2026, 11, 21, 3, tzinfo=UTC)
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
SOURCE = (
    "key binary, value binary, topic string, partition int, offset bigint, timestamp timestamp, "
    "timestampType int"
)
ALL_FORMATS = ("missing_required", "event_time_out_of_bounds")
"""The error codes of all formats."""
EVENT_TIME = {"column": "event_time", "past": "30 days", "future": "1 hour"}
DDL = (
    "event_id STRING NOT NULL, event_time TIMESTAMP NOT NULL, player STRING, level BIGINT, amount "
    "DOUBLE, price DECIMAL(10,2), day DATE, color STRING, raw BINARY, tags ARRAY<STRING>, scores "
    "MAP<STRING, DOUBLE>, nested STRUCT<at: TIMESTAMP, n: INT, more: STRING>"
)


def of(logical: str, kind: str = "long", **more: Any) -> dict[str, Any]:
    return {"type": kind, "logicalType": logical, **more}


def record(*fields: tuple[str, Any], name: str = "Event") -> dict[str, Any]:
    return {
        "type": "record",
        "name": name,
        "namespace": "shop",
        "fields": [{"name": n, "type": t} for n, t in fields],
    }


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


def micros(moment: datetime) -> int:
    return (moment - EPOCH) // timedelta(microseconds=1)


def v1(event_id: str, at: datetime, **more: Any) -> dict[str, Any]:
    fields = {
        "event_id": event_id,
        "event_time": micros(at) // 1000,
        "level": {"int": 7},
        "amount": 1.5,
    }
    return {**fields, "price": "\u0030\u0039", "gone": ["x"], **more}


def v2(event_id: str | None, at: datetime, **more: Any) -> dict[str, Any]:
    fields = {
        "player": None, "amount": {"double": 2.5}, "level": 2**40, "day": 20_000, "color": "GREEN",
        "raw": "\u0001\u00ff", "event_id": None if event_id is None else {"string": event_id},
        "tags": [{"string": "x"}, None],
        "scores": {"k": 0.5}, "price": "\0\0\0\0\0\0\0\0\u0005", "event_time": micros(at) + 123,
        "nested": {"shop.Nested": {"n": 3, "at": -1_500}},
    }  # fmt: skip
    return {**fields, **more}


class Ids:
    """The ids of what is registered for one test, under subjects of its own."""

    def __init__(self, registry: SchemaRegistry) -> None:
        self.subject = f"s{uuid.uuid4().hex[:12]}-value"
        self.v1 = registry.register(self.subject, V1)
        self.v2 = registry.register(self.subject, V2)
        self.incompatible = registry.register(
            self.subject, record(("event_id", "int"), ("event_time", "long"))
        )
        self.without_time = registry.register(self.subject, record(("event_id", "string")))
        self.recursive = registry.register(
            self.subject, record(("event_id", "string"), ("next", ["null", "shop.Event"]))
        )
        schema = {
            "$schema": "http://json-schema.org/draft-07/schema#",
            "type": "object",
            "title": self.subject,
        }
        self.json = registry.register(f"{self.subject}-json", schema, "JSON")
        self.foreign = registry.register(
            f"{self.subject}-other", record(("event_id", "string"), name=self.subject[:13])
        )


def avro_cases(spark: SparkSession, ids: Ids, start: datetime) -> dict[str, Case]:
    """Every case by name, for records of the ingest hour that begins at `start`; made for `DDL` and
    `EVENT_TIME`."""
    at = start + timedelta(minutes=10)
    old, new = encode(spark, V1, v1("old", at)), encode(spark, V2, v2("new", at))

    def second(event_id: str | None, **more: Any) -> bytes:
        return wired(ids.v2, encode(spark, V2, v2(event_id, more.pop("at", at), **more)))

    def first(**more: Any) -> bytes:
        return wired(ids.v1, encode(spark, V1, v1(uuid.uuid4().hex, at, **more)))

    latin = wired(ids.v1, old).replace(b"\x06old", b"\x06o\xe9d")
    huge = varint(2**31 - 20) + b"xx"
    return {
        "first version": (wired(ids.v1, old), None, ""),
        "second version": (wired(ids.v2, new), None, ""),
        "second version, nulls": (
            second("nulls", amount=None, nested=None, tags=[], scores={}),
            None,
            "",
        ),
        "not a number": (second("nan").replace(pack("<d", 2.5), pack("<d", nan)), None, ""),
        "null value": (None, "null_value", ""),
        "empty": (b"", "not_wire_format", ""),
        "four bytes": (b"\0\0\0\1", "not_wire_format", ""),
        "JSON": (b'{"event_id":"a"}', "not_wire_format", "7B22657665"),
        "magic byte 1": (b"\1" + wired(ids.v1, old)[1:], "not_wire_format", ""),
        "unknown id": (wired(2**31 - 1, old), "unknown_schema", "schema id 2147483647: "),
        "negative id": (b"\0\xff\xff\xff\xff" + old, "unknown_schema", "schema id 4294967295: "),
        "id 0": (wired(0, old), "unknown_schema", "schema id 0: "),
        "another subject": (wired(ids.foreign, b""), "wrong_subject", f"schema id {ids.foreign}: "),
        "incompatible types": (
            wired(ids.incompatible, b"\2\2"),
            "incompatible_schema",
            "event_id: expected a type readable as",
        ),
        "no field for NOT NULL": (
            wired(ids.without_time, b"\2a"),
            "incompatible_schema",
            "event_time: expected a field",
        ),
        "recursive schema": (
            wired(ids.recursive, b"\2a\0"),
            "incompatible_schema",
            "contains itself",
        ),
        "no payload": (wired(ids.v1, b""), "malformed_avro", f"schema id {ids.v1}: "),
        "truncated": (wired(ids.v1, old[:-1]), "malformed_avro", ""),
        "truncated in a text": (wired(ids.v1, old[:2]), "malformed_avro", ""),
        "trailing byte": (wired(ids.v1, old + b"\0"), "malformed_avro", ""),
        "16 trailing bytes": (wired(ids.v1, old + bytes(16)), "malformed_avro", ""),
        "twice": (wired(ids.v1, old + old), "malformed_avro", ""),
        "the other version's bytes": (wired(ids.v2, old), "malformed_avro", ""),
        "two gigabytes announced": (wired(ids.v1, huge), "malformed_avro", ""),
        "two billion items announced": (
            wired(ids.v1, old[:-3] + varint(2**31 - 30) + b"\2x"),
            "malformed_avro",
            "",
        ),
        "negative length": (wired(ids.v1, varint(-5) + b"xxxx"), "malformed_avro", ""),
        "unknown branch of a union": (wired(ids.v2, varint(9) + new[1:]), "malformed_avro", ""),
        "random bytes": (wired(ids.v1, bytes(range(256))), "malformed_avro", ""),
        "latin-1 in a text": (latin, "invalid_utf8", "event_id"),
        "decimal of nine bytes": (
            first(price="\u0001" + "\0" * 7 + "\5"),
            "wrong_type",
            "price: expected decimal(10,2)",
        ),
        "decimal of forty bytes": (first(price="\u007f" * 40), "malformed_avro", ""),
        "largest decimal": (first(price="\2\u0054\u000b\u00e3\u00ff"), None, ""),
        "a decimal more": (first(price="\2\u0054\u000b\u00e4\0"), "wrong_type", "price"),
        "day of year 10000": (
            second("x", day=2_932_897),
            "unreadable_timestamp",
            "day: expected date, found 2932897",
        ),
        "last day": (second("last-day", day=2_932_896), None, ""),
        "largest time": (
            second("x", event_time=2**63 - 1),
            "unreadable_timestamp",
            "event_time: expected timestamp",
        ),
        "smallest time": (second("x", event_time=-(2**63)), "unreadable_timestamp", "event_time"),
        "smallest nested time": (
            second("nested", nested={"shop.Nested": {"n": 1, "at": -(2**63)}}),
            None,
            "",
        ),
        "null in NOT NULL": (second(None), "missing_required", "event_id"),
        "31 days ago": (
            second("x", at=at - timedelta(days=31)),
            "event_time_out_of_bounds",
            f"{at:T%H:%M}:00Z",
        ),
        "2 hours ahead": (
            second("x", at=at + timedelta(hours=2)),
            "event_time_out_of_bounds",
            "event_time",
        ),
    }


def json_schema_cases(ids: Ids, start: datetime) -> dict[str, Case]:
    def event(event_id: str, **more: Any) -> bytes:
        return json.dumps({"event_id": event_id, "event_time": start.isoformat(), **more}).encode()

    return {
        "plain": (wired(ids.json, event("a", level=1)), None, ""),
        "null value": (None, "null_value", ""),
        "no header": (event("b"), "not_wire_format", "7B22657665"),
        "unknown id": (wired(2**31 - 1, event("b")), "unknown_schema", "schema id 2147483647"),
        "an Avro schema": (wired(ids.v1, event("b")), "wrong_subject", f"schema id {ids.v1}"),
        "no payload": (wired(ids.json, b""), "empty_value", ""),
        "truncated": (wired(ids.json, event("b")[:-1]), "malformed_json", ""),
        "trailing garbage": (wired(ids.json, event("b") + b"x"), "malformed_json", ""),
        "wrong type": (
            wired(ids.json, event("b", level="x")),
            "wrong_type",
            "level: expected bigint, found x",
        ),
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

    def only(place: int, text: str) -> bytes:
        return line(rest=";".join(text if i == place else "" for i in range(8)))

    return {
        "plain": (
            line("a", rest="7;1.5;true;2.345;2024-02-29;aGk=;0.5;9007199254740993"),
            None,
            "",
        ),
        "quoted": (line('"b;""quoted""\n line"', rest='"7";;;;;"";;'), None, ""),
        "line break at the end": (line("c") + b"\r\n", None, ""),
        "blanks are text": (line(" d "), None, ""),
        "1 MB of quotes": (line('"' + '""' * 500_000 + '"'), None, ""),
        "null value": (None, "null_value", ""),
        "empty": (b"", "empty_value", ""),
        "only a line break": (b"\n", "empty_value", ""),
        "latin-1": ("é;".encode("latin-1"), "invalid_utf8", ""),
        "byte order mark": (b"\xef\xbb\xbf" + line(), "malformed_csv", ""),
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
        "no such day": (
            only(4, "2026-02-30"),
            "unreadable_timestamp",
            "day: expected date, found 2026-02-30",
        ),
        "not Base64": (only(5, "!!"), "wrong_type", "raw"),
        "Base64 cut off": (only(5, "aGk"), "wrong_type", "raw"),
        "no time": (
            line(at="noon"),
            "unreadable_timestamp",
            "event_time: expected timestamp, found noon",
        ),
        "year 1": (line(at="0001-01-01T00:00:00Z"), "event_time_out_of_bounds", "event_time"),
        "null in NOT NULL": (line(""), "missing_required", "event_id"),
        "empty text in NOT NULL": (line('""'), None, ""),
    }


RAW_DDL = "key STRING, value BINARY NOT NULL"


@pytest.fixture(params=[True, pytest.param(False, marks=pytest.mark.full)], ids=["ansi", "no-ansi"])
def session(spark: SparkSession, request: pytest.FixtureRequest) -> Iterator[SparkSession]:
    """The shared session with settings that must not matter."""
    settings = {
        "spark.sql.ansi.enabled": str(request.param).lower(),
        "spark.sql.session.timeZone": "UTC" if request.param else "America/St_Johns",
        "spark.sql.avro.datetimeRebaseModeInRead": "CORRECTED" if request.param else "LEGACY",
    }
    with with_settings(spark, settings) as session:
        yield session


def make_stream(
    ddl: str, form: Any, event_time: Any = EVENT_TIME, key: str = "event_id"
) -> config.Stream:
    columns = parse_columns(ddl)
    definition = {
        "name": "events",
        "topic": "events",
        "table": "lake.events",
        "schema": ddl,
        "columns": columns,
    }
    return config.Stream.model_validate(
        {**definition, "key": key, "format": form, "event_time": event_time}
    )


def kafka(spark: SparkSession, values: list[bytes | None], key: bytes | None = b"k") -> DataFrame:
    rows = [
        (key, None if v is None else bytearray(v), "events", 0, i, START, 0)
        for i, v in enumerate(values)
    ]
    return spark.createDataFrame(rows, SOURCE).withColumn("ingest_hour", F.lit("2026-11-21T03"))


def expect(
    spark: SparkSession, stream: config.Stream, form: Format, cases: Mapping[str, Case]
) -> None:
    """Decode every case at once: nothing throws, and each has its verdict."""
    decoded = decode(kafka(spark, [value for value, _, _ in cases.values()]), stream, form)
    rows: list[Row] = (
        decoded.select("kafka_offset", "error_code", "error_text").orderBy("kafka_offset").collect()
    )
    verdicts = {
        name: (row.error_code, row.error_text) for name, row in zip(cases, rows, strict=True)
    }
    assert {
        name: verdict for name, verdict in verdicts.items() if verdict[0] != cases[name][1]
    } == {}
    assert {
        name: verdict
        for name, verdict in verdicts.items()
        if cases[name][2] not in (verdict[1] or "")
    } == {}


def test_avro_by_bytes(session: SparkSession, registry: SchemaRegistry) -> None:
    ids = Ids(registry)
    cases = avro_cases(session, ids, START)
    stream = make_stream(DDL, {"type": "avro", "subject": ids.subject})
    expect(
        session,
        stream,
        avro.AvroFormat(stream, SchemaRegistryClient(config.Registry(url=registry.url))),
        cases,
    )
    assert {code for _, code, _ in cases.values()} - {None} == {
        *ALL_FORMATS,
        "null_value",
        "not_wire_format",
        "unknown_schema",
        "wrong_subject",
        "incompatible_schema",
        "malformed_avro",
        "invalid_utf8",
        "wrong_type",
        "unreadable_timestamp",
    }


def test_avro_values(session: SparkSession, registry: SchemaRegistry) -> None:
    ids = Ids(registry)
    stream = make_stream(DDL, "avro")
    form = avro.AvroFormat(stream, SchemaRegistryClient(config.Registry(url=registry.url)))
    cases = avro_cases(session, ids, START)
    frame = kafka(
        session, [cases[n][0] for n in ("first version", "second version", "largest decimal")]
    )
    decoded = decode(frame, stream, form)
    assert [(f.name, f.dataType.simpleString()) for f in decoded.schema][:12] == [
        (c.name, c.type) for c in stream.columns
    ]
    shown = decoded.withColumns(
        {"event_time": F.unix_micros("event_time"), "nested_at": F.unix_micros("nested.at")}
    )
    old, new, largest = shown.drop("kafka_timestamp").orderBy("kafka_offset").collect()
    at = micros(START + timedelta(minutes=10))
    assert (old.event_id, old.event_time, old.level, old.amount, old.price) == (
        "old",
        at,
        7,
        1.5,
        Decimal("123.45"),
    )
    assert (old.player, old.day, old.color, old.raw, old.tags, old.scores, old.nested) == (
        None,
    ) * 7
    assert old.event_date == START.date()
    assert (new.event_id, new.event_time, new.level, new.amount, new.price) == (
        "new",
        at + 123,
        2**40,
        2.5,
        Decimal(5),
    )
    assert (new.day, new.color, bytes(new.raw)) == (date(2024, 10, 4), "GREEN", b"\1\xff")
    assert (new.tags, new.scores) == (["x", None], {"k": 0.5})
    # Nanoseconds round down, before 1970 too.
    assert (new.nested.n, new.nested_at, new.nested.more) == (3, -2, None)
    assert largest.price == Decimal("99999999.99")


def test_avro_without_any_readable_id(spark: SparkSession, registry: SchemaRegistry) -> None:
    stream = make_stream(DDL, "avro")
    form = avro.AvroFormat(stream, SchemaRegistryClient(config.Registry(url=registry.url)))
    cases: dict[str, Case] = {
        "null": (None, "null_value", ""),
        "no id": (b"x", "not_wire_format", ""),
    }
    expect(spark, stream, form, cases)
    expect(spark, stream, form, {"unknown": (wired(2**31 - 1, b""), "unknown_schema", "")})
    assert decode(kafka(spark, []), stream, form).count() == 0


def test_a_schema_with_text_that_sql_would_misread(
    spark: SparkSession, registry: SchemaRegistry
) -> None:
    schema = record(("event_id", "string"), name=f"E{uuid.uuid4().hex[:12]}")
    schema |= {"doc": 'it\'s \\ a "doc" of ${env:PATH}, ${spark.master} é 😀'}
    subject = "it's ${env:PATH}"
    schema_id = registry.register(f"s{uuid.uuid4().hex[:12]}", schema)
    value = wired(schema_id, encode(spark, schema, {"event_id": "a"}))
    stream = make_stream("event_id STRING NOT NULL", "avro", None)
    client = SchemaRegistryClient(config.Registry(url=registry.url))
    expect(spark, stream, avro.AvroFormat(stream, client), {"doc": (value, None, "")})
    stream = make_stream("event_id STRING NOT NULL", {"type": "avro", "subject": subject}, None)
    message = 'subject it"s $ {env:PATH}, found another'
    expect(
        spark,
        stream,
        avro.AvroFormat(stream, client),
        {"subject": (value, "wrong_subject", message)},
    )


def test_avro_values_are_read_once(spark: SparkSession, registry: SchemaRegistry) -> None:
    ids = Ids(registry)
    stream = make_stream(DDL, "avro")
    form = avro.AvroFormat(stream, SchemaRegistryClient(config.Registry(url=registry.url)))
    cases = avro_cases(spark, ids, START)
    frame = decode(
        kafka(spark, [cases[n][0] for n in ("first version", "second version")]), stream, form
    )
    spark.conf.set("spark.sql.debug.maxToStringFields", 10_000)
    plan = frame.where("error_code IS NULL")._jdf.queryExecution().optimizedPlan().toString()
    spark.conf.unset("spark.sql.debug.maxToStringFields")
    assert plan.count("from_avro(") == 2, "one for each schema id"


def test_json_schema_by_bytes(session: SparkSession, registry: SchemaRegistry) -> None:
    ids = Ids(registry)
    stream = make_stream(DDL, {"type": "json_schema", "subject": f"{ids.subject}-json"})
    form = json_schema.JsonSchemaFormat(
        stream, SchemaRegistryClient(config.Registry(url=registry.url))
    )
    expect(session, stream, form, json_schema_cases(ids, START))
    anybody = make_stream(DDL, "json_schema")
    form = json_schema.JsonSchemaFormat(
        anybody, SchemaRegistryClient(config.Registry(url=registry.url))
    )
    expect(
        session,
        anybody,
        form,
        {"Avro": (wired(ids.v1, b"{}"), "incompatible_schema", "expected type JSON, found AVRO")},
    )


def test_csv_by_bytes(session: SparkSession) -> None:
    cases = csv_cases(START)
    stream = make_stream(CSV_DDL, {"type": "csv", "delimiter": ";"})
    expect(session, stream, csv.CsvFormat(";"), cases)
    assert {code for _, code, _ in cases.values()} - {None} == {
        *ALL_FORMATS,
        "null_value",
        "empty_value",
        "invalid_utf8",
        "malformed_csv",
        "wrong_field_count",
        "wrong_type",
        "unreadable_timestamp",
    }


def test_csv_values(spark: SparkSession) -> None:
    cases = csv_cases(START)
    stream = make_stream(CSV_DDL, {"type": "csv", "delimiter": ";"})
    values = [
        cases[n][0]
        for n in ("plain", "quoted", "blanks are text", "empty text in NOT NULL", "1 MB of quotes")
    ]
    rows = (
        decode(kafka(spark, values), stream, csv.CsvFormat(";"))
        .drop("event_time", "kafka_timestamp")
        .collect()
    )
    plain, quoted, blanks, empty, long = sorted(rows, key=lambda row: row.kafka_offset)
    assert (plain.event_id, plain.level, plain.amount, plain.ok) == ("a", 7, 1.5, True)
    assert (plain.price, plain.day, bytes(plain.raw)) == (Decimal("2.35"), date(2024, 2, 29), b"hi")
    assert (plain.small, plain.total) == (0.5, 9007199254740993)
    assert (quoted.event_id, quoted.level, bytes(quoted.raw), quoted.total) == (
        'b;"quoted"\n line',
        7,
        b"",
        None,
    )
    assert (blanks.event_id, empty.event_id, long.event_id) == (" d ", "", '"' * 500_000)


@pytest.mark.parametrize("delimiter", [",", "\t", "|", "\\", "'", ".", "]", "^", "é", "😀"])
def test_any_delimiter(spark: SparkSession, delimiter: str) -> None:
    stream = make_stream(
        "event_id STRING, a STRING, b INT", {"type": "csv", "delimiter": delimiter}, None
    )
    values = [
        delimiter.join(fields).encode() for fields in (("x", f'"{delimiter}"', "1"), ("", "", ""))
    ]
    rows = (
        decode(kafka(spark, [*values]), stream, csv.CsvFormat(delimiter))
        .orderBy("kafka_offset")
        .collect()
    )
    assert [(r.event_id, r.a, r.b, r.error_text) for r in rows] == [
        ("x", delimiter, 1, None),
        (None, None, None, None),
    ]


def test_raw_by_bytes(spark: SparkSession) -> None:
    stream = make_stream(RAW_DDL, "raw", None, "value")
    cases: dict[str, Case] = {
        "any bytes": (bytes(range(256)), None, ""),
        "no bytes": (b"", None, ""),
        "null": (None, "missing_required", "value"),
    }
    expect(spark, stream, raw.RawFormat(), cases)
    stream = make_stream("key STRING, value STRING", "raw", None, "value")
    expect(
        spark,
        stream,
        raw.RawFormat(),
        {"bytes": (b"\xff", "invalid_utf8", "value"), "null": (None, None, "")},
    )
    [row] = decode(kafka(spark, [b"\xc3\xa9"], b"\xff"), stream, raw.RawFormat()).collect()
    assert (row.value, row.error_code, row.error_text) == (
        "é",
        "invalid_utf8",
        "key: expected UTF-8, found bytes that are not",
    )


def through_both_layers(one: World, cases: Mapping[str, Case], start: datetime) -> None:
    """Each case is in exactly one of the two tables, with its verdict, by either layer; both
    publish the same rows."""
    one.topic(1, **{"max.message.bytes": "4000000"})
    sent = one.send(
        [(0, start + timedelta(seconds=i), value) for i, (value, _, _) in enumerate(cases.values())]
    )
    one.apply()
    expected = {r.offset: code for r, (_, code, _) in zip(sent, cases.values(), strict=True)}
    names = {r.offset: name for r, name in zip(sent, cases, strict=True)}

    def rows_and_verdicts() -> tuple[dict[int, dict[str, Any]], dict[int, str | None]]:
        rows = {r["kafka_offset"]: r for r in one.rows()}
        dead = {d["kafka_offset"]: d["error_code"] for d in one.dead()}
        assert (
            len(rows) == len(one.rows())
            and len(dead) == len(one.dead())
            and not rows.keys() & dead.keys()
        )
        kept = {d["kafka_offset"]: d["value"] for d in one.dead()}
        assert all(kept[r.offset] == r.value for r in sent if r.offset in kept)
        return rows, dict.fromkeys(rows) | dead

    one.speed()
    by_speed, verdicts_by_speed = rows_and_verdicts()
    assert {names[o]: v for o, v in verdicts_by_speed.items() if v != expected[o]} == {}
    assert verdicts_by_speed.keys() == expected.keys()
    [result] = one.batch()
    assert (result.decision, result.reason) == ("accepted", None)
    by_batch, verdicts_by_batch = rows_and_verdicts()
    assert verdicts_by_batch == verdicts_by_speed
    # As text, since NaN does not equal itself.
    assert {o: repr(row) for o, row in by_batch.items()} == {
        o: repr(row) for o, row in by_speed.items()
    }


def test_avro_through_both_layers(
    world: Make, spark: SparkSession, registry: SchemaRegistry
) -> None:
    ids, start = Ids(registry), start_of(past_hour(1))
    form = {"type": "avro", "subject": ids.subject}
    one = world(registry.url, schema=DDL, format=form, event_time=EVENT_TIME)
    through_both_layers(one, avro_cases(spark, ids, start), start)


@pytest.mark.full
def test_json_schema_through_both_layers(world: Make, registry: SchemaRegistry) -> None:
    ids, start = Ids(registry), start_of(past_hour(1))
    form = {"type": "json_schema", "subject": f"{ids.subject}-json"}
    through_both_layers(
        world(registry.url, schema=DDL, format=form), json_schema_cases(ids, start), start
    )


@pytest.mark.full
def test_csv_through_both_layers(world: Make) -> None:
    start = start_of(past_hour(1))
    one = world(schema=CSV_DDL, format={"type": "csv", "delimiter": ";"})
    # Values of a megabyte are tested with the decoders, above.
    small = {name: case for name, case in csv_cases(start).items() if len(case[0] or b"") < 1_000}
    through_both_layers(one, small, start)


@pytest.mark.full
def test_raw_through_both_layers(world: Make) -> None:
    start = start_of(past_hour(1))
    one = world(schema=RAW_DDL, format="raw", key=["key", "value"], event_time=None)
    cases: dict[str, Case] = {
        "any bytes": (bytes(range(256)), None, ""),
        "text": (b"x", None, ""),
        "no bytes": (b"", None, ""),
        "null": (None, "missing_required", ""),
    }
    through_both_layers(one, cases, start)
    assert {r["key"] for r in one.rows()} == {"k"}
