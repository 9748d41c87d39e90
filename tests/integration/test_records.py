"""Records as frames: bytes in, verdict out; the same verdict in every session."""

from collections.abc import Iterator
from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any

import hostile
import pytest
from budget import full
from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql import functions as F
from sessions import with_settings

from anabranch import records
from anabranch.config import Stream
from anabranch.config.columns import parse_columns
from anabranch.decode import ERROR_TEXT_LENGTH
from anabranch.records import dead, good
from anabranch.subjects.schemas import Schemas

HOUR = "2026-11-21T03"
START = datetime(2026, 11, 21, 3, tzinfo=UTC)
SOURCE = (
    "key binary, value binary, topic string, partition int, offset bigint, timestamp timestamp, "
    "timestampType int"
)


def make_stream(ddl: str, key: str, event_time: dict[str, Any] | None = None) -> Stream:
    return Stream.model_validate(
        {
            "name": "events", "topic": "events", "table": "lake.events", "schema": ddl,
            "columns": parse_columns(ddl), "key": key, "event_time": event_time,
        }
    )  # fmt: skip


EVENTS = make_stream(hostile.DDL, "id", hostile.EVENT_TIME)
CASES = hostile.cases(START)
AT = '"at":"2026-11-21T03:10:00Z"'


def event(extra: str = "", at: str = AT) -> bytes:
    return ('{"id":"a",' + at + ("," + extra if extra else "") + "}").encode()


def kafka(spark: SparkSession, values: list[bytes | None], hour: str = HOUR) -> DataFrame:
    rows = [
        (b"k", None if v is None else bytearray(v), "events", 0, i, START, 0)
        for i, v in enumerate(values)
    ]
    frame = spark.createDataFrame(rows, SOURCE).withColumn("ingest_hour", F.lit(hour))
    none = "CAST(NULL AS ARRAY<STRUCT<key: STRING, value: BINARY>>)"
    return frame.withColumn("headers", F.expr(none))


def decode(frame: DataFrame, stream: Stream) -> DataFrame:
    return records.decode(frame, stream, Schemas(stream, None))


def judged(spark: SparkSession, values: list[bytes | None], stream: Stream = EVENTS) -> list[Row]:
    decoded = decode(kafka(spark, values), stream).orderBy("kafka_offset")
    # Python's datetime has no room for every timestamp, nor has a local time zone west of UTC for
    # year 1.
    return decoded.drop(*(c.name for c in stream.columns if "timestamp" in c.type)).collect()


@pytest.fixture(params=[True, full(False)], ids=["ansi", "no-ansi"])
def session(spark: SparkSession, request: pytest.FixtureRequest) -> Iterator[SparkSession]:
    """The shared session with settings that must not matter."""
    settings = {
        "spark.sql.ansi.enabled": str(request.param).lower(),
        "spark.sql.session.timeZone": "UTC" if request.param else "America/St_Johns",
        "spark.sql.legacy.timeParserPolicy": "CORRECTED" if request.param else "LEGACY",
    }
    with with_settings(spark, settings) as session:
        yield session


def test_verdict_by_bytes(session: SparkSession) -> None:
    """Every case at once, under two sets of session settings: each has its verdict."""
    rows = judged(session, [value for value, _, _ in CASES.values()])
    codes = {name: row.error_code for name, row in zip(CASES, rows, strict=True)}
    expected = {name: code for name, (_, code, _) in CASES.items()}
    assert {name: code for name, code in codes.items() if code != expected[name]} == {}
    for (name, (_, code, words)), row in zip(CASES.items(), rows, strict=True):
        assert (row.error_text is None) == (code is None), name
        assert words in (row.error_text or ""), (name, row.error_text)
        assert len(row.error_text or "") <= ERROR_TEXT_LENGTH
    assert set(codes.values()) - {None} == {
        "missing_required", "event_time_out_of_bounds", "null_value", "empty_value", "invalid_utf8",
        "malformed_json", "too_deep", "not_an_object", "wrong_type", "unreadable_timestamp",
        "lone_surrogate",
    }  # fmt: skip


def test_columns_and_values(session: SparkSession) -> None:
    value = (
        b'{"id":"a\\u00e9\xc3\xa9","at":"2026-11-21 03:10:00.123456789","level":-7,"total":9007199254740993,'
        b'"amount":1e2,"ok":false,"price":1.5,"day":"2024-02-29","small":0.5,"raw":"aGk=","tags":["x",null],'
        b'"scores":{"k":1.5},"nested":{"at":"2026-11-21T05:00:00+02:00","n":3,"days":["2026-01-01"]}}'
    )
    decoded = decode(kafka(session, [value]), EVENTS)
    stamps = {"at": F.unix_micros("at"), "nested_at": F.unix_micros("nested.at")}
    shown = decoded.withColumns(stamps)
    row = shown.withColumn("kafka_timestamp", F.unix_micros("kafka_timestamp")).collect()[0]
    micros = int(START.timestamp()) * 1_000_000
    assert row.error_code is None and row.error_text is None
    assert row.at == micros + 600_123_456
    assert (row.id, row.level, row.total, row.amount, row.ok) == (
        "aéé", -7, 9007199254740993, 100.0, False,
    )  # fmt: skip
    assert (row.price, row.day, row.small, bytes(row.raw)) == (
        Decimal("1.50"), date(2024, 2, 29), 0.5, b"hi",
    )  # fmt: skip
    assert (row.tags, row.scores, row.nested.n, row.nested.days) == (
        ["x", None], {"k": 1.5}, 3, [date(2026, 1, 1)],
    )  # fmt: skip
    assert row.nested_at == micros
    assert (row.kafka_partition, row.kafka_offset, row.kafka_timestamp) == (0, 0, micros)
    assert (row.ingest_hour, row.event_date, bytes(row.kafka_key), bytes(row.kafka_value)) == (
        HOUR, START.date(), b"k", value,
    )  # fmt: skip
    assert row.kafka_headers is None


def test_schema_is_the_streams(spark: SparkSession) -> None:
    """Exact types, in the table's order, and `good` is nothing but the table's columns."""
    rows = good(decode(kafka(spark, [event()]), EVENTS), EVENTS)
    fields = [(f.name, f.dataType.simpleString()) for f in rows.schema]
    expected = [(c.name, c.type) for c in EVENTS.columns]
    expected += [("kafka_partition", "int"), ("kafka_offset", "bigint")]
    expected += [("kafka_timestamp", "timestamp")]
    assert fields == [*expected, ("ingest_hour", "string"), ("event_date", "date")]


def test_event_date_is_utc_in_every_session(session: SparkSession) -> None:
    moments = ["2026-11-20T23:59:59.999999Z", "2026-11-21T00:00:00Z"]
    rows = judged(session, [event(at=f'"at":"{m}"') for m in moments])
    assert [r.event_date for r in rows] == [date(2026, 11, 20), date(2026, 11, 21)]


@pytest.mark.parametrize("micros", [1_790_000_000_000_000_000, 2**63 - 1, -(2**62)])
def test_a_timestamp_outside_the_calendar_is_unknown(spark: SparkSession, micros: int) -> None:
    stream = make_stream("id STRING, at TIMESTAMP", "id")
    odd = kafka(spark, [b"{}"]).withColumn("timestamp", F.expr(f"timestamp_micros({micros}L)"))
    [row] = decode(odd, stream).collect()
    assert (row.error_code, row.kafka_timestamp, row.event_date) == (None, None, START.date())


def test_column_names_that_are_words_of_sql(spark: SparkSession) -> None:
    ddl = "`order` STRING NOT NULL, `select` INT, m INT, corrupt STRING, value STRING, text DATE"
    whole = b'{"order":"a","select":1,"m":2,"corrupt":"c","value":"v"}'
    rows = judged(spark, [whole, b'{"order":"a","m":"x"}'], make_stream(ddl, "order"))
    wrong = ("wrong_type", "m: expected int, found x")
    assert [(r.error_code, r.error_text) for r in rows] == [(None, None), wrong]
    assert (rows[0].order, rows[0].select, rows[0].m, rows[0].corrupt) == ("a", 1, 2, "c")


def test_columns_that_are_named_as_kafkas_own(spark: SparkSession) -> None:
    """A dead letter keeps the record's key and value, not the columns of these names."""
    stream = make_stream("key STRING NOT NULL, value INT, headers STRING, partition INT", "key")
    whole = b'{"key":"a","value":1,"headers":"h","partition":7}'
    decoded = decode(kafka(spark, [whole, b'{"value":2}']), stream)
    columns = ("key", "value", "headers", "partition", "kafka_partition")
    [row] = good(decoded, stream).select(*columns).collect()
    assert tuple(row) == ("a", 1, "h", 7, 0)
    [letter] = dead(decoded, "t", "speed").collect()
    assert (bytes(letter.key), bytes(letter.value), letter.headers) == (b"k", b'{"value":2}', None)


def test_good_and_dead_split_every_record(spark: SparkSession) -> None:
    values = [value for value, _, _ in CASES.values() if value is None or len(value) < 10_000]
    decoded = decode(kafka(spark, values), EVENTS)
    kept = {r.kafka_offset for r in good(decoded, EVENTS).select("kafka_offset").collect()}
    letters = dead(decoded, "topic-1", "batch").orderBy("kafka_offset").collect()
    assert kept and letters
    assert sorted([*kept, *(r.kafka_offset for r in letters)]) == list(range(len(values)))
    assert letters[0].asDict().keys() == {
        "topic_id", "kafka_partition", "kafka_offset", "kafka_timestamp", "ingest_hour", "key",
        "value", "headers", "error_code", "error_text", "layer",
    }  # fmt: skip
    for row in letters:
        value = values[row.kafka_offset]
        assert (row.topic_id, row.layer, bytes(row.key)) == ("topic-1", "batch", b"k")
        assert (None if row.value is None else bytes(row.value)) == value


def test_headers_are_kept(spark: SparkSession) -> None:
    frame = kafka(spark, [b"x"]).withColumn(
        "headers", F.expr("array(named_struct('key', 'trace', 'value', cast('1' as binary)))")
    )
    row = dead(decode(frame, EVENTS), "t", "speed").collect()[0]
    assert [(h.key, bytes(h.value)) for h in row.headers] == [("trace", b"1")]
