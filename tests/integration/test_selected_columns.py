"""Selected columns: their values, whatever the record and the session; and a stream that masks, in
both layers."""

from __future__ import annotations

import base64
import hashlib
import hmac
import io
import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.errors import AnalysisException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from world import World, event, past_hour, spread

from anabranch import config, records
from anabranch.common.errors import AnabranchError, ConfigurationError
from anabranch.config.columns import parse_columns
from anabranch.config.select import FUNCTIONS, parse_select
from anabranch.offsets.hours import start_of
from anabranch.records.schemas import Schemas

SECRET = "0123456789abcdef"
START = datetime(2026, 11, 21, 3, tzinfo=UTC)
SOURCE = (
    "key BINARY, value BINARY, partition INT, offset BIGINT, timestamp TIMESTAMP, "
    "headers ARRAY<STRUCT<key: STRING, value: BINARY>>"
)
DDL = (
    "id STRING NOT NULL, s STRING, i INT, l BIGINT, d DOUBLE, m DECIMAL(38,10), t TIMESTAMP, day "
    "DATE, f BOOLEAN, b BINARY, tags ARRAY<STRING>, geo STRUCT<country: STRING>, amounts "
    "MAP<STRING, INT>"
)
# One call of each function, or more, over values that throw in ANSI mode, or overflow, or are no
# number.
CALLS = """
lower(s); upper(s); initcap(s); trim(s); ltrim(s); rtrim(s); btrim(s, 'a'); length(s); char_length(b);
character_length(s); octet_length(b); bit_length(s); substring(s, i, i); substring(b, 2); substr(s, -3); left(s, i);
right(s, i); concat(s, i, l); concat_ws('-', tags, s); translate(s, 'ab', 'x');
reverse(s); instr(s, s); locate('a', s, i); position('a', s); startswith(s, 'a'); endswith(s, s); contains(s, '');
ascii(s); md5(s); sha(b); sha1(s); sha2(s, i); sha2(s, 256); crc32(s); xxhash64(s, i, d, t, tags); hash(d, m, geo);
base64(b); hex(s); hex(l); unhex(s); coalesce(s, CAST(i AS STRING)); nullif(i, l); nvl(s, ''); nvl2(i, s, '');
ifnull(s, ''); if(f, i, l); isnull(s); isnotnull(d); isnan(d); nanvl(d, 1.5e0); greatest(i, l, d); least(m, i);
abs(i); abs(l); sign(d); signum(i); floor(d); ceil(m); ceiling(d); round(d, 2); round(m, 3); bround(d, 1); sqrt(i);
cbrt(d); exp(l); ln(i); log10(d); log2(l); pow(d, l); power(i, i); mod(l, i); pmod(i, l); degrees(d); radians(l);
array_size(tags); array_contains(tags, s); array_join(tags, '-', 'x'); map_contains_key(amounts, s); get(tags, i);
unix_seconds(t); unix_millis(t); unix_micros(t); unix_date(day); date_trunc('DAY', t); date_trunc(s, t); year(t);
quarter(day); month(t); day(t); dayofmonth(day); dayofweek(t); weekday(day);
dayofyear(t); weekofyear(day); hour(t); minute(t); second(t); datediff(day, t);
last_day(day); i + i; l * l; i - l; i / 0; i % 0; l DIV 0; m * m; m / 3; d / 0; -l; CAST(s AS INT); CAST(s AS
DOUBLE); CAST(s AS DATE); year(CAST(s AS DATE)); last_day(CAST(s AS DATE)); weekofyear(CAST(s AS DATE));
unix_date(CAST(s AS DATE)); CAST(CAST(s AS DATE) AS STRING); reverse(CAST(kafka_key AS STRING));
left(CAST(b AS STRING), 1); CAST(s AS BOOLEAN); CAST(l AS INT); CAST(d AS BIGINT); CAST(m AS DECIMAL(5,2)); CAST(t AS
STRING); CAST(t AS DATE); tags[3]; tags[i]; geo.country; s || i; s > i; i = s; s IN ('a', 'b'); i BETWEEN l AND d;
CASE WHEN f THEN s ELSE i END; CAST(kafka_key AS STRING); kafka_topic; kafka_offset + i; CAST(kafka_timestamp AS
STRING)
"""
EXTREMES: list[dict[str, Any] | None] = [
    {},
    {"s": "", "i": 0, "l": 0, "d": 0.0, "m": 0, "tags": [], "f": False, "b": ""},
    {
        "s": "İ\u0000ß@x@y",
        "i": -(2**31),
        "l": -(2**63),
        "d": -1.7976931348623157e308,
        "t": "0001-01-01T00:00:00Z",
        "day": "0001-01-01",
        "m": "-9999999999999999999999999999.9999999999",
        "tags": [None, "a"],
        "f": True,
        "b": "AP8=",
    },
    {
        "s": "12:30:00",
        "i": 2**31 - 1,
        "l": 2**63 - 1,
        "d": 1.7976931348623157e308,
        "t": "9999-12-31T23:59:59.999999Z",
        "day": "9999-12-31",
        "m": "9999999999999999999999999999.9999999999",
        "tags": ["a"] * 50,
        "geo": {"country": "é"},
    },
    {"s": "-5877641-06-23", "b": "w7w=", "tags": ["é", "x"], "amounts": {"-5877641-06-23": 1}},
    {"s": "+5881580-07-11", "b": "ww==", "i": 2, "d": 1e300, "l": 2**31},
    {"s": "1e2147483647", "b": "8J+Y", "i": 3},
    {"s": "STRIẞE ΟΔΟΣ I ǅ i\u0131", "i": 4},
    {
        "s": "2026-02-30",
        "i": -1,
        "l": 1,
        "d": 5e-324,
        "t": "2026-03-29T01:30:00Z",
        "day": "2026-02-28",
        "b": "////",
    },
    {"s": "7", "i": 7, "l": -7, "d": -0.0, "m": "0.0000000001", "t": "1969-12-31T23:59:59.999999Z"},
    None,
]


def frame_of(spark: SparkSession, values: list[bytes | None]) -> DataFrame:
    headers = [
        ("trace-id", b"old"),
        ("trace-id", "neu é".encode()),
        ("bad", b"\xff"),
        ("none", None),
    ]
    rows = [
        (b"\xff" if n % 2 else b"key", v, 0, n, START, headers if n else None)
        for n, v in enumerate(values)
    ]
    return spark.createDataFrame(rows, SOURCE).withColumn("ingest_hour", F.lit("2026-11-21T03"))


def stream_of(select: list[Any]) -> config.Stream:
    fields = parse_columns(DDL)
    selected = parse_select(select, fields)
    return config.Stream(
        **{
            "name": "events",
            "topic": "some-topic",
            "table": "games.events",
            "schema": DDL,
            "key": "id",
        },
        select=selected,
        fields=fields,
        columns=tuple(s.column for s in selected),
    )


def as_bytes(value: dict[str, Any] | None, n: int) -> bytes | None:
    if value is None:
        return None
    # A decimal is written as a number.
    return re.sub(r'"m": "(.*?)"', r'"m": \1', json.dumps({"id": f"id-{n}"} | value)).encode()


def decoded(
    spark: SparkSession, stream: config.Stream, values: list[bytes | None]
) -> list[dict[str, Any]]:
    rows = records.decode(
        frame_of(spark, values), stream, Schemas(stream, None), secret=SECRET.encode()
    )
    found = rows.orderBy("kafka_offset").toArrow()
    times = {
        f.name: pa.timestamp("us", "UTC") for f in found.schema if pa.types.is_timestamp(f.type)
    }
    return found.cast(
        pa.schema([f.with_type(times.get(f.name, f.type)) for f in found.schema])
    ).to_pylist()


@contextmanager
def locale_of_java(spark: SparkSession, tag: str) -> Iterator[None]:
    """Java's default locale and time zone, of another machine."""
    jvm: Any = spark.sparkContext._jvm
    zones = jvm.java.util.TimeZone
    locale, zone = jvm.java.util.Locale.getDefault(), zones.getDefault()
    jvm.java.util.Locale.setDefault(jvm.java.util.Locale.forLanguageTag(tag))
    zones.setDefault(zones.getTimeZone("Asia/Kolkata"))
    try:
        yield
    finally:
        jvm.java.util.Locale.setDefault(locale)
        zones.setDefault(zone)


@contextmanager
def settings(spark: SparkSession, **values: str) -> Iterator[None]:
    names = {
        "ansi": "spark.sql.ansi.enabled", "zone": "spark.sql.session.timeZone",
        "factory": "spark.sql.codegen.factoryMode", "whole": "spark.sql.codegen.wholeStage",
    }  # fmt: skip
    before = {name: spark.conf.get(names[name]) for name in values}
    for name, value in values.items():
        spark.conf.set(names[name], value)
    try:
        yield
    finally:
        for name, value in before.items():
            spark.conf.set(names[name], value)


def kinds_of(spark: SparkSession, texts: list[str]) -> dict[str, str]:
    """The type of each expression, as Spark finds it with ANSI mode off."""
    fields = parse_columns(DDL)
    with settings(spark, ansi="false", zone="UTC"):
        empty = spark.createDataFrame([], SOURCE).selectExpr(
            *(f"CAST(NULL AS {c.type}) AS `_row_{c.name}`" for c in fields),
            *(f"CAST(NULL AS {c.type}) AS `_at_{c.name}`" for c in fields),
            "key AS kafka_key",
            "'' AS kafka_topic",
            "offset AS kafka_offset",
            "timestamp AS kafka_timestamp",
        )
        of = {
            text: parse_select([{"x": {"sql": text, "type": "INT"}}], fields)[0].sql
            for text in texts
        }
        return {
            text: empty.selectExpr(f"{sql} AS x").schema["x"].dataType.simpleString()
            for text, sql in of.items()
        }


@pytest.mark.full
def test_no_expression_throws_and_none_depends_on_the_session(spark: SparkSession) -> None:
    texts = [text.strip() for text in CALLS.split(";")]
    called = {name for text in texts for name in re.findall(r"(\w+)\(", text.lower())}
    assert called >= FUNCTIONS
    kinds = kinds_of(spark, texts)
    stream = stream_of(
        ["id", *({f"c{n}": {"sql": text, "type": kinds[text]}} for n, text in enumerate(texts))]
    )  # fmt: skip
    values = [as_bytes(value, n) for n, value in enumerate(EXTREMES)]
    with settings(spark, ansi="false", zone="UTC"):
        expected = decoded(spark, stream, values)
    # The hazard: most of these values differ from null.
    assert sum(value is not None for value in expected[3].values()) > len(texts) / 2
    assert [row["is_dead"] for row in expected] == [False] * (len(values) - 1) + [True]
    # Interpreted, too: Spark generates code for one way alone.
    with (
        settings(spark, ansi="true", zone="Asia/Kolkata", factory="NO_CODEGEN", whole="false"),
        locale_of_java(spark, "tr"),
    ):
        found = decoded(spark, stream, values)
    differ = [
        (texts[int(k[1:])], row[k], other[k])
        for row, other in zip(expected, found, strict=True)
        for k in row
        if k.startswith("c") and row[k] != other[k]
    ]
    assert differ == []


def test_values_of_masked_and_kafkas_columns_are_those_that_python_makes(
    spark: SparkSession,
) -> None:
    stream = stream_of(
        [
            "id",
            {"name": "s"},
            {"mail": {"hash": "s"}},
            {"number": {"hash": "i"}},
            {"low": {"hash": "lower(s)"}},
            {"start": {"truncate": "s", "to": 2}},
            {"hour": {"truncate": "t", "to": "hour"}},
            {"key": {"kafka": "key"}},
            {"text": {"kafka": "key", "type": "STRING"}},
            {"topic": {"kafka": "topic"}},
            {"headers": {"kafka": "headers"}},
            {"trace": {"header": "trace-id"}},
            {"bad": {"header": "bad"}},
            {"no": {"header": "none"}},
        ]
    )
    given: list[dict[str, Any]] = [
        {"s": "Ann@Example.org", "i": 7, "t": "2026-11-21T03:59:59.9Z"},
        {"s": "é😀x", "i": -1},
        {},
        {"s": ""},
    ]
    values = [as_bytes(value, n) for n, value in enumerate(given)]
    rows = decoded(spark, stream, [*values, b"{"])

    def hashed(text: object) -> str | None:
        return (
            hmac.new(SECRET.encode(), str(text).encode(), hashlib.sha256).hexdigest()
            if text is not None
            else None
        )

    for row, value in zip(rows, given, strict=False):
        text = value.get("s")
        assert row["name"] == text and row["start"] == (text[:2] if text is not None else None)
        assert (row["mail"], row["number"]) == (hashed(text), hashed(value.get("i")))
        assert row["low"] == hashed(text.lower() if text is not None else None)
        assert row["topic"] == "some-topic"
    assert rows[0]["hour"] == datetime(2026, 11, 21, 3, tzinfo=UTC) and rows[1]["hour"] is None
    assert [(bytes(r["key"]), r["text"]) for r in rows[:2]] == [(b"key", "key"), (b"\xff", None)]
    assert rows[0]["headers"] is None and len(rows[1]["headers"]) == 4
    assert [(r["trace"], r["bad"], r["no"]) for r in rows[:2]] == [
        (None, None, None),
        ("neu é", None, None),
    ]
    # A dead letter has its bytes in clear.
    assert rows[-1]["is_dead"] and bytes(rows[-1]["kafka_value"]) == b"{"


def test_a_long_secret_is_that_of_rfc_2104(spark: SparkSession) -> None:
    secret = b"a secret longer than a block of SHA-256" * 3
    stream = stream_of([{"id": {"hash": "id"}}])
    frame = frame_of(spark, [b'{"id":"x"}'])
    rows = records.decode(frame, stream, Schemas(stream, None), secret=secret)
    assert [r.id for r in rows.collect()] == [hmac.new(secret, b"x", hashlib.sha256).hexdigest()]


@pytest.mark.parametrize(
    ("item", "found"),
    [
        (
            {"sql": "i", "type": "BIGINT"},
            "select.x: expected an expression of type BIGINT, found INT",
        ),
        (
            {"sql": "geo.nothing", "type": "STRING"},
            "select.x: expected an expression that Spark can analyze",
        ),
        (
            {"sql": "upper(b)", "type": "STRING"},
            "select.x: expected an expression that Spark can analyze",
        ),
        (
            {"sql": "hour(s)", "type": "INT"},
            "select.x: expected no conversion of a text or date to TIMESTAMP",
        ),
        (
            {"sql": "t > '12:30'", "type": "BOOLEAN"},
            "select.x: expected no conversion of a text or date",
        ),
        ({"hash": "s"}, "select.x.hash: expected masking.secret"),
        (
            {"sql": "concat_ws(s, tags)", "type": "STRING"},
            "select.x: expected a text in quotes as separator",
        ),
        (
            {"sql": "array_join(tags, '-', s)", "type": "STRING"},
            "select.x: expected a text in quotes as separator",
        ),
        ({"sql": "day + i", "type": "DATE"}, "select.x: expected no arithmetic of dates"),
        (
            {"sql": "day - day IS NULL", "type": "BOOLEAN"},
            "select.x: expected no arithmetic of dates",
        ),
        ({"sql": "t - t > t - t", "type": "BOOLEAN"}, "select.x: expected no arithmetic of dates"),
        (
            {"sql": "round(d, 100000)", "type": "DOUBLE"},
            "select.x: expected a number of 1 or 2 digits",
        ),
        (
            {"sql": "CAST(s AS DECIMAL(9,2))", "type": "DECIMAL(9,2)"},
            "select.x: expected no conversion of a text to DECIMAL",
        ),
        ({"hash": "concat(s, b)"}, "select.x: expected bytes converted to text by CAST"),
        (
            {"truncate": "concat_ws(s, tags)", "to": 3},
            "select.x: expected a text in quotes as separator",
        ),
    ],
)
def test_a_wrong_expression_is_named(spark: SparkSession, item: dict[str, Any], found: str) -> None:
    with pytest.raises(ConfigurationError, match=re.escape(found)):
        stream = stream_of(["id", {"x": item}])
        records.decode(frame_of(spark, [b"{}"]), stream, Schemas(stream, None))


def test_the_masking_secret_is_in_no_plan_no_event_log_and_no_error(
    spark: SparkSession, tmp_path: Path
) -> None:
    jvm: Any = spark.sparkContext._jvm
    context: Any = spark.sparkContext._jsc
    context = context.sc()
    conf = (
        context.getConf()
        .set("spark.eventLog.compress", "false")
        .set("spark.eventLog.rolling.enabled", "false")
    )
    none = getattr(getattr(jvm.scala, "None$"), "MODULE$")
    log = jvm.org.apache.spark.scheduler.EventLoggingListener(
        "masking", none, jvm.java.net.URI(f"file://{tmp_path}"), conf, context.hadoopConfiguration()
    )
    log.start()
    context.addSparkListener(log)
    plans = io.StringIO()
    try:
        stream = stream_of(["id", {"mail": {"hash": "s"}}, {"also": {"hash": "concat(s, id)"}}])
        frame = frame_of(spark, [as_bytes({"s": "Ann"}, 0)])
        rows = records.decode(frame, stream, Schemas(stream, None), secret=SECRET.encode())
        rows = records.good(rows.localCheckpoint(), stream).union(records.good(rows, stream))
        assert [row.mail for row in rows.collect()] == [
            hmac.new(SECRET.encode(), b"Ann", "sha256").hexdigest()
        ] * 2
        with pytest.raises(AnalysisException) as error:
            rows.selectExpr("no_such_column")
        with redirect_stdout(plans):
            for mode in ("extended", "formatted", "codegen", "cost"):
                rows.explain(mode=mode)
        context.listenerBus().waitUntilEmpty()
    finally:
        context.removeSparkListener(log)
        log.stop()
    texts = {
        "plans": plans.getvalue(),
        "events": (tmp_path / "masking").read_text(),
        "error": str(error.value),
    }
    # The hazard: the plans have the expression of the hash, and so would have a literal key.
    assert "sha2(" in texts["plans"] and "sha2(" in texts["events"]
    keys = [bytes(b ^ pad for b in SECRET.encode().ljust(64, b"\0")) for pad in (0, 0x36, 0x5C)]
    for key in (SECRET.encode(), *keys):
        forms = {
            key.hex(),
            key.decode("latin1"),
            base64.b64encode(key).decode().rstrip("="),
            str([*key])[1:-1],
        }
        signed = [b - 256 if b > 127 else b for b in key]
        forms |= {str(signed)[1:-1], ",".join(map(str, signed))}
        found = [
            (name, form)
            for name, text in texts.items()
            for form in forms
            if form.lower() in text.lower()
        ]
        assert found == []


def test_a_stream_masks_in_both_layers_alike(world: Callable[..., World]) -> None:
    one = world()
    one.set_environment(masking={"secret": SECRET})
    select = [
        "event_id",
        "event_time",
        {"who": {"hash": "player"}},
        {"first": {"truncate": "player", "to": 1}},
        {"double_level": {"sql": "level * 2", "type": "INT"}},
        {"topic": {"kafka": "topic"}},
        {"key": {"kafka": "key", "type": "STRING"}},
    ]
    one.configure(select=select)
    one.reopen()
    hour = past_hour(1)
    one.topic()
    one.send(spread(hour, 8, "masked"))
    one.send([(0, datetime.now(UTC), event("now", datetime.now(UTC), player="p1", level=4))])
    one.apply()
    one.speed()
    by_speed = {r["event_id"]: r for r in one.rows()}
    accept(one, hour)
    columns = ("who", "first", "double_level", "topic", "key")
    assert len(by_speed) == 9 and {r["event_id"]: [r[c] for c in columns] for r in one.rows()} == {
        name: [r[c] for c in columns] for name, r in by_speed.items()
    }
    hashed = hmac.new(SECRET.encode(), b"p1", hashlib.sha256).hexdigest()
    assert [by_speed["now"][c] for c in columns] == [hashed, "p", 8, one.name, "k"]
    assert "player" not in by_speed["now"]

    # Columns are added to the selected ones, as to any; a selected one is not dropped.
    one.configure(select=[*select, {"day": {"truncate": "event_time", "to": "day"}}])
    one.reopen()
    with pytest.raises(AnabranchError, match="anabranch apply"):
        one.speed()
    one.apply()
    one.send([(1, datetime.now(UTC), event("later", datetime.now(UTC)))])
    one.speed()
    days = {r["event_id"]: r["day"] for r in one.rows()}
    assert days.pop("later").hour == 0 and {*days.values()} == {None}
    [result] = one.batch(hour, restate=True)
    assert result.decision == "accepted" and sum(r["day"] is not None for r in one.rows()) == 9
    one.configure(select=select[:-1])
    one.reopen()
    with pytest.raises(AnabranchError, match=r"key|day"):
        one.apply()


def accept(one: World, hour: str) -> None:
    """Rebuild the hour, in which the layers must have equal rows."""
    [result] = [r for r in one.batch() if r.hour == hour]
    assert result.decision == "accepted"
    row = next(r for r in one.job.ledger.history([hour]) if r.decision == "accepted")
    assert row.diff is not None and (row.diff.missing, row.diff.extra, row.diff.changed) == (
        0,
        0,
        0,
    )


@pytest.mark.full
def test_both_layers_make_equal_rows_of_hostile_records(
    spark: SparkSession, world: Callable[..., World]
) -> None:
    texts = [text.strip() for text in CALLS.split(";")]
    kinds = kinds_of(spark, texts)
    one = world()
    one.set_environment(masking={"secret": SECRET})
    select = [
        "id",
        *(c.name for c in parse_columns(DDL)[1:] if c.name != "f"),
        {"f": {"hash": "s"}},
    ]
    select += [{f"c{n}": {"sql": text, "type": kinds[text]}} for n, text in enumerate(texts)]
    select += [{"t_hour": {"truncate": "t", "to": "hour"}}, {"headers": {"kafka": "headers"}}]
    one.configure(schema=DDL, select=select, key="id", event_time=None)
    one.reopen()
    hour = past_hour(1)
    one.topic()
    values = [as_bytes(value, n) for n, value in enumerate(EXTREMES)]
    values += [
        b"\xff",
        b"{",
        b'{"id":"cut \xc3"}',
        b'{"id":"deep","geo":' + b"[" * 2000,
        b'{"id":null}',
    ]
    one.send(
        [(n % 2, start_of(hour) + timedelta(minutes=n), value) for n, value in enumerate(values)],
        key=b"\xf0\x9f",
    )
    one.apply()
    one.speed()
    accept(one, hour)

    def rows(branch: str) -> list[str]:
        return sorted(repr([*row.items()]) for row in one.rows(branch))

    # The hazard: both layers have rows of their own, and dead letters.
    table = one.lake.load(one.job.stream.table)
    heads = {branch: table.metadata.refs[branch].snapshot_id for branch in ("speed", "batch")}
    files = {
        b: {t.file.file_path for t in table.scan(snapshot_id=id_).plan_files()}
        for b, id_ in heads.items()
    }
    assert files["speed"] and not files["speed"] & files["batch"]
    assert len(rows("speed")) >= len(EXTREMES) - 1 and rows("batch") == rows("speed")
    dead = {
        b: {r["kafka_offset"] * 2 + r["kafka_partition"]: r for r in one.dead(b)}
        for b in ("speed", "batch")
    }
    kept = (
        "kafka_partition",
        "kafka_offset",
        "key",
        "value",
        "headers",
        "error_code",
        "error_text",
    )
    bytes_of = {b: {n: [r[name] for name in kept] for n, r in of.items()} for b, of in dead.items()}
    assert bytes_of["speed"] == bytes_of["batch"]
    assert {r["value"] for r in dead["batch"].values()} >= {None, b"\xff", b"{"}
