"""The shortcuts of the JSON decoder change no verdict and no value: both decoders read the same
values. And whatever workers read without Spark, of JSON and of Avro, Spark reads as the same
row."""

from __future__ import annotations

import io
import json as plain_json
import random
import uuid
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from decimal import Decimal

import fastavro
import hostile
import pyarrow as pa
import pytest
from budget import budget
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from reference_json import ReferenceJsonFormat
from registry import SchemaRegistry
from wire import wired

from anabranch import config, records
from anabranch.config import Stream
from anabranch.config.columns import RESCUED, parse_columns
from anabranch.kafka.schema_registry import SchemaRegistryClient
from anabranch.records.fast_avro import AvroRows, plan_fields
from anabranch.records.fast_json import CertainRows
from anabranch.records.formats import Format
from anabranch.records.formats.avro import AvroFormat
from anabranch.records.formats.json import JsonFormat
from speed_layer.fast_staging import warm_up_decoder

START = datetime(2026, 11, 21, 3, tzinfo=UTC)
SOURCE = "key binary, value binary, partition int, offset bigint, timestamp timestamp"
FLAT = (
    "id STRING NOT NULL, at TIMESTAMP NOT NULL, level INT, total BIGINT, amount DOUBLE, ok "
    "BOOLEAN, day DATE, small FLOAT, raw BINARY, name STRING, note STRING"
)
# A hundred thousand values of each would take minutes; another seed is another day's.
VALUES = budget(1_000, 4_000)

_TEXTS = (
    "",
    "a",
    ":",
    "a:b",
    "::",
    "http://x:80/y",
    "}",
    "{",
    "{}",
    "]}",
    "é",
    "\u2028",
    "\u0085",
    "😀",
    "\ufffd",
    "\x7f",
    "null",
    "m",
    "#",
    '"',
    "\\",
    "\n",
    "\t",
    "\ud800",
    "12",
    "2026-11-21T03:10:00Z",
    " x ",
    "a" * 300,
    "\x00",
)
_TIMES = (
    "2026-11-21T03:10:00Z",
    "2026-11-21 03:10:00",
    "2026-11-21T03:10:00.123456+01:00",
    "2026-11-21",
    "noon",
    "2026-1-02T03:04:05Z",
    "2026-11-21T03:10:00.1234567Z",
    "2026-13-21T03:00:00Z",
    "0001-01-01T00:00:00+01:00",
    "2026-11-21T03:10:00 UTC",
    "",
)
_OTHERS = (
    "null",
    "true",
    "5",
    "-0",
    "1.50",
    "1e3",
    "1e999",
    "01",
    "NaN",
    '"5"',
    "[]",
    "[[1,[2]]]",
    "{}",
    '{"a":1}',
    '{"a":1,"a":2}',
    '["a:b"]',
    "[" * 97 + "]" * 97,
    "[" * 99 + "]" * 99,
    "[" * 101 + "]" * 101,
    "2147483648",
    '"!!"',
    '"QUJD"',
    "[1",
    '"x',
)
_AFTER = (
    b"",
    b"",
    b"",
    b"",
    b" ",
    b"\n",
    b"\r\n",
    b"\x85",
    b"\xc2\x85",
    b"}",
    b"{}",
    b"]}",
    b",",
    b" x",
    b',{"#":1}',
    b'],"m":[{}',
)


def _value(dice: random.Random, names: list[str]) -> bytes:
    """An object that is ordinary more often than not, with a few things that are not."""
    mean = dice.random() < 0.6
    members = []
    for name in names:
        if dice.random() < (0.1 if mean else 0.0):
            continue
        members.append((name, _field(dice, name, mean)))
    if mean:
        for _ in range(dice.choice((0, 0, 1, 2))):
            name = dice.choice([*names, "x", "m", "#", "a:b", "}", "corrupt", ""])
            members.insert(dice.randrange(len(members) + 1), (name, _field(dice, name, mean)))
    blank = dice.choice(("", "", "", " ", "\n\t")) if mean else ""
    colon = f"{blank}:{blank}"
    body = ",".join(f"{_quoted(dice, name)}{colon}{value}" for name, value in members)
    raw = ("{" + blank + body + blank + "}").encode("utf-8", "surrogatepass")
    if mean and dice.random() < 0.3:
        raw = (
            dice.choice((b"", b"", b" ", b"\n", b"\xef\xbb\xbf", b"[", b"x"))
            + raw
            + dice.choice(_AFTER)
        )
    if mean and dice.random() < 0.15 and raw:
        at = dice.randrange(len(raw))
        raw = dice.choice(
            (
                raw[:at],
                raw[:at] + bytes([dice.randrange(256)]) + raw[at + 1 :],
                raw[:at] + raw[at + 1 :],
            )
        )
    return raw


def _field(dice: random.Random, name: str, mean: bool) -> str:
    if mean and dice.random() < 0.12:
        return dice.choice(_OTHERS)
    right = {
        "at": lambda: _quoted(
            dice, dice.choice(_TIMES if mean and dice.random() < 0.2 else _TIMES[:3])
        ),
        "day": lambda: '"2026-11-21"',
        "level": lambda: str(dice.randrange(-5, 99)),
        "total": lambda: str(dice.randrange(2**40)),
        "amount": lambda: repr(dice.random()),
        "small": lambda: "0.5",
        "ok": lambda: dice.choice(("true", "false")),
        "raw": lambda: '"QUJD"',
        "price": lambda: dice.choice(("1.50", '"2.345"', "1e2", "1e-99999999")),
        "tags": lambda: '["a","b:c"]',
        "scores": lambda: '{"a":1.5}',
        "nested": lambda: '{"at":"2026-11-21T03:10:00Z","n":1,"days":["2026-11-21"]}',
    }.get(name)
    return (
        right() if right is not None else _quoted(dice, dice.choice(_TEXTS if mean else _TEXTS[:7]))
    )


def _quoted(dice: random.Random, text: str) -> str:
    return plain_json.dumps(text, ensure_ascii=dice.random() < 0.3)


def _stream(ddl: str, unknown: str = "count") -> Stream:
    columns = (*parse_columns(ddl), *((RESCUED,) if unknown == "rescue" else ()))
    return Stream.model_validate(
        {
            "name": "e",
            "topic": "e",
            "table": "l.e",
            "schema": ddl,
            "columns": columns,
            "key": "id",
            "unknown": unknown,
            "event_time": hostile.EVENT_TIME if "at TIMESTAMP NOT NULL" in ddl else None,
        }
    )


def _frame(spark: SparkSession, values: list[bytes | None]) -> DataFrame:
    rows = [(b"k", None if v is None else bytearray(v), 0, i, START) for i, v in enumerate(values)]
    return spark.createDataFrame(rows, SOURCE).withColumn("ingest_hour", F.lit("2026-11-21T03"))


def _decoded(frame: DataFrame, stream: Stream, form: Format, name: str) -> DataFrame:
    decoded = records.decode(frame, stream, form, with_unknown=True)
    # Doubles and maps cannot be compared directly. Readable parts of a dead letter are not used.
    row = F.to_json(
        F.struct(
            *(F.col(c.name).cast("string").alias(c.name) for c in stream.columns), "event_date"
        )
    )
    unknown = F.sort_array(F.coalesce(records.UNKNOWN, F.array().cast("array<string>")))
    of_row = F.when(~F.col("is_dead"), F.struct(row, unknown))
    seen = F.struct("is_dead", "error_code", "error_text", of_row)
    return decoded.select("kafka_offset", seen.alias(name), "kafka_value")


def _differences(spark: SparkSession, values: list[bytes | None], stream: Stream) -> Iterator[str]:
    frame = _frame(spark, values).cache()
    ours = _decoded(frame, stream, JsonFormat(), "ours")
    reference = _decoded(frame, stream, ReferenceJsonFormat(), "reference").drop("kafka_value")
    both = ours.join(reference, "kafka_offset").cache()
    assert both.count() == len(values)
    for row in both.where("NOT ours <=> reference").limit(10).collect():
        yield f"{bytes(row.kafka_value or b'')[:400]!r}: expected {row.reference}, found {row.ours}"


@pytest.mark.parametrize("ddl", [FLAT, hostile.DDL], ids=["flat", "nested"])
@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.full)])
def test_every_value_is_read_as_without_shortcuts(spark: SparkSession, ddl: str, seed: int) -> None:
    dice, stream = random.Random(seed), _stream(ddl)
    names = [c.name for c in stream.columns if not c.rescues]
    values: list[bytes | None] = [_value(dice, names) for _ in range(VALUES)]
    assert not list(_differences(spark, values, stream))
    if ddl == FLAT:
        # Enough of each way through the decoder, or nothing was compared.
        reading = JsonFormat().read(_frame(spark, values), records.types_of(stream.columns)).frame
        counts = reading.selectExpr(
            "count_if(_plain AND _names IS NULL) AS ordinary",
            "count_if(_plain AND _names IS NOT NULL) AS listed",
            "count_if(NOT _plain) AS marked",
            "count_if(NOT _intact) AS broken",
        ).first()
        assert counts is not None
        assert min(counts) > VALUES / 40, counts


def test_every_hostile_value_is_read_as_without_shortcuts(spark: SparkSession) -> None:
    values = [value for value, _, _ in hostile.cases(START).values()]
    assert not list(_differences(spark, values, _stream(hostile.DDL)))
    assert not list(_differences(spark, values, _stream(FLAT)))


LOOKS_ORDINARY: list[bytes | None] = [
    b'{"id":"a","id":"b"}',
    b'{"id":"a","x":1,"x":2}',
    b'{"id":null,"id":"b"}',
    b'{"id":"b","id":null}',
    b'{"id" :"a","id" :"b"}',
    b'{"id":"a:b","id":"c"}',
    b'{"id":"c","id":"a:b"}',
    b'{"id":"a:b:c","x":1,"x":2}',
    b'{"id":{"a":1,"b":2},"id":3}',
    b'{"id":[":",":"],"x":1,"x":2}',
    b'{"id":"' + b":" * 2_500 + b'","x":1,"x":2}',
    b'{"id":"a","level":1,"level":1}',
    b'{"id":"a","x":"}","x":1}',
    b'{"x":1,"x":2}',
    b'{"":1,"":2,"id":"a"}',
    b'{"id":"a"}{"id":"b"}',
    b'{"id":"a"],"m":[{"id":"b"}',
    b'{"id":"a","x":[1}',
    b'{"id":"a","x":"}',
    b'{"id":"a}',
    b'{"id":"a","x":' + b"[" * 99 + b"]" * 99 + b"}",
    b'{"id":"a","x":' + b"[" * 100 + b"]" * 100 + b"}",
    b'{"id":"a","x":' + b"[" * 98 + b"]" * 98 + b"}",
    b"{}",
    b"{",
    b"}",
    b"",
    b"{\xff}",
    b'{"id":"\xff"}',
    b'{"id":"\xed\xa0\x80"}',
    b'{"id":"a","x\xff":1}',
    b'{"id":"a","x":"\xc0\x80"}',
    None,
]


@pytest.mark.parametrize(
    "ddl",
    [
        "id STRING, level INT",
        "id STRING NOT NULL, at TIMESTAMP, level INT, x STRING",
        "id STRING, x INT, tags ARRAY<STRING>",
        "id STRING, price DECIMAL(10,2)",
    ],
)
def test_values_that_only_look_ordinary(spark: SparkSession, ddl: str) -> None:
    assert not list(_differences(spark, LOOKS_ORDINARY, _stream(ddl)))


CERTAIN_TIMES = "id STRING, at TIMESTAMP, level INT, total BIGINT, amount DOUBLE, name STRING"
CERTAIN = (
    "id STRING NOT NULL, at TIMESTAMP NOT NULL, level INT, total BIGINT, amount DOUBLE, ok "
    "BOOLEAN, day DATE, name STRING"
)
STAMPS = (
    START,
    START,
    START,
    None,
    datetime(1969, 12, 31, 23, 59, 59, 999999, tzinfo=UTC),
    datetime(9999, 1, 1, tzinfo=UTC),
)


Rows = CertainRows | AvroRows


def _certain(rows: Rows, batch: pa.RecordBatch, size: int) -> tuple[pa.Table, int]:
    """The rows read without Spark, with this many records at once, and the number of records
    left."""
    read = [rows.read(batch.slice(start, size)) for start in range(0, len(batch), size)]
    return pa.concat_tables([r.rows for r in read]), sum(len(r.left) for r in read)


def _require_as_spark_reads(
    spark: SparkSession,
    values: list[bytes | None],
    stream: Stream,
    form: Format | None = None,
    new_rows: Callable[[], Rows] | None = None,
) -> int:
    """Every row that is read without Spark is Spark's, bit by bit; returns how many there are, most
    at once or few."""
    new_rows = new_rows or (
        lambda: CertainRows(stream.columns, stream.event_time, stream.unknown != "refuse")
    )
    stamps = [STAMPS[i % len(STAMPS)] for i in range(len(values))]
    rows = [
        (b"k", None if v is None else bytearray(v), 3, i, at)
        for i, (v, at) in enumerate(zip(values, stamps, strict=True))
    ]
    frame = (
        spark.createDataFrame(rows, SOURCE)
        .withColumn("ingest_hour", F.lit("2026-11-21T03"))
        .coalesce(1)
    )
    decoded = records.decode(frame, stream, form or JsonFormat())
    good = records.good(decoded, stream).orderBy("kafka_offset").toArrow()
    places = {offset: i for i, offset in enumerate(good["kafka_offset"].to_pylist())}
    micros = [
        None if at is None else (at - datetime(1970, 1, 1, tzinfo=UTC)) // timedelta(microseconds=1)
        for at in stamps
    ]
    batch = pa.record_batch(
        {
            "value": pa.array(values, pa.binary()),
            "partition": pa.array([3] * len(values), pa.int32()),
            "offset": pa.array(range(len(values)), pa.int64()),
            "timestamp": pa.array(micros, pa.int64()).cast(pa.timestamp("us", "UTC")),
            "ingest_hour": pa.array(["2026-11-21T03"] * len(values)),
        }
    )
    most = 0
    for size in (1, 7, 200, len(values)):
        read, left = _certain(new_rows(), batch, size)
        offsets = read["kafka_offset"].to_pylist()
        assert len(offsets) + left == len(values)
        assert offsets == sorted(set(offsets))
        assert not [values[o] for o in offsets if o not in places], "Spark finds them dead"
        theirs = good.take(pa.array([places[o] for o in offsets], pa.int64())).select(
            read.column_names
        )
        for name in read.column_names:
            mine, their = (_whole(t[name]) for t in (read, theirs.cast(read.schema)))
            if mine.type == pa.float64():
                mine, their = mine.view(pa.int64()), their.view(pa.int64())
            assert mine.to_pylist() == their.to_pylist(), name
        most = max(most, len(offsets))
    return most


def _whole(column: pa.ChunkedArray) -> pa.Array:
    return pa.concat_arrays([pa.array([], column.type), *column.chunks])


@pytest.mark.parametrize(
    ("ddl", "unknown"),
    [
        (CERTAIN, "count"), (CERTAIN.replace("TIMESTAMP NOT NULL", "TIMESTAMP"), "count"),
        ("id STRING, level INT", "count"), (CERTAIN, "rescue"), (CERTAIN, "refuse"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("seed", [1, *(pytest.param(s, marks=pytest.mark.full) for s in (2, 3))])
def test_a_certain_record_equals_sparks_row(
    spark: SparkSession, ddl: str, unknown: str, seed: int
) -> None:
    dice, stream = random.Random(seed), _stream(ddl, unknown)
    names = [c.name for c in stream.columns if not c.rescues]
    values: list[bytes | None] = [_value(dice, names) for _ in range(VALUES)]
    assert _require_as_spark_reads(spark, values, stream) > VALUES / (
        5 if unknown == "count" else 8
    )


ODD_OTHERS = [
    b'{"id":"a",%s}' % others
    for others in (
        b'"x":1.50,"y":null,"z":{"b":[1,{"c":-0.0}],"a":"\\u0000\\u2028<"}',
        b'"x":1e2',
        b'"x":[1e999]',
        b'"x": -1E-400',
        b'"x":12345678901234567890123456789012345678',
        b'"x":%s' % (b"9" * 39),
        b'"x":0.%s1' % (b"0" * 60),
        b'"":1,"a b":2,"a.b":3,"ID":4,"\xc3\xa9":5,"\\u0041":6',
        b'"x":{"y":1,"y":2}',
        b'"x":"3e5,7e7"',
        b'"x":"[1e5]"',
        b'"x":%s%s' % (b"[" * 90, b"]" * 90),
        b'"rescued":1',
        b'"x":"it\'s","y\'z":true',
        b'"x":1,"level":"no number"',
        b'"x":%s' % b",".join([b"1"] + [b'"k%d":%d' % (i, i) for i in range(300)]),
    )
]


def test_rescued_fields_are_unknown_ones_and_change_no_verdict(spark: SparkSession) -> None:
    dice, streams = (
        random.Random(5),
        {mode: _stream(CERTAIN_TIMES, mode) for mode in ("count", "rescue", "refuse")},
    )
    names = [c.name for c in streams["count"].columns]
    values = [*ODD_OTHERS, *(_value(dice, names) for _ in range(VALUES))]
    frame = _frame(spark, list(values))
    found = {}
    for mode, stream in streams.items():
        decoded = records.decode(frame, stream, JsonFormat(), with_unknown=True)
        found[mode] = {row["kafka_offset"]: row.asDict(recursive=True) for row in decoded.collect()}
    rescued = 0
    for offset, counted in found["count"].items():
        kept, judged = (found[mode][offset] for mode in ("rescue", "refuse"))
        others = kept.pop("rescued")
        if counted["is_dead"] or not counted["unknown_fields"]:
            assert counted["is_dead"] or others is None
            assert judged["error_code"] == counted["error_code"]
            continue
        rescued += 1
        assert repr(kept) == repr(counted)
        whole, reported = (
            plain_json.loads(text, parse_float=Decimal) for text in (values[offset], others)
        )
        left_out = {name: value for name, value in whole.items() if name not in names}
        assert (
            {name: value for name, value in reported.items() if name not in names} == left_out != {}
        )
        assert (judged["error_code"], judged["is_dead"]) == ("unknown_field", True)
        assert reported == left_out or values[offset].decode() == others
    assert rescued > VALUES / 40


@pytest.mark.parametrize("ddl", [CERTAIN, "id STRING, level INT", "id STRING, x INT"])
def test_a_hostile_value_is_certain_only_if_spark_reads_it(spark: SparkSession, ddl: str) -> None:
    values = [value for value, _, _ in hostile.cases(START).values()]
    _require_as_spark_reads(spark, [*values, *LOOKS_ORDINARY], _stream(ddl))


def test_each_limit_of_sparks_parser_at_its_boundary(spark: SparkSession) -> None:
    """Names of 50,000 UTF-16 units, numbers of 1,000 digits, a nesting of 1,000; and of ours,
    values of 1,000,000."""
    fields = [
        f'"{c * n}":1'
        for c, most in (("k", 50_000), ("é", 50_000), ("😀", 25_000))
        for n in (most, most + 1)
    ]
    fields += [f'"{"k" * n}":1' for n in (49_999, 300_000)]
    fields += [f'"{escaped * 9_000}":1' for escaped in ("\\u0041", "\\\\")]
    numbers = [
        start + "1" * (n - len(start))
        for n in (999, 1_000, 1_001)
        for start in ("0.", "-0.", "1.", "1e-", "")
    ]
    fields += [f'"{name}":{n}' for n in numbers for name in ("x", "amount", "level")]
    fields += ['"y":' + "[" * n + "1" + "]" * n for n in (997, 998, 999, 1_000)]
    fields += ['"y":' + '{"a":' * n + "1" + "}" * n for n in (998, 999, 1_000)]
    fields += [f'"{name}":"{"s" * n}"' for name in ("z", "name") for n in (900_000, 1_100_000)]
    values = [f'{{"id":"a","at":"2026-11-21T03:10:00Z",{field}}}'.encode() for field in fields]
    assert _require_as_spark_reads(spark, list(values), _stream(CERTAIN)) > 15


@pytest.mark.parametrize("ddl", [CERTAIN, hostile.DDL])
def test_the_decoder_is_warmed_up_by_one_discarded_dead_letter(
    spark: SparkSession, ddl: str
) -> None:
    assert warm_up_decoder(spark, _stream(ddl), JsonFormat()) == 1


def test_numbers_and_times_of_every_form(spark: SparkSession) -> None:
    numbers = [
        "0",
        "-0",
        "0.0",
        "-0.0",
        "1",
        "-1",
        "1.5",
        "1e5",
        "1E+5",
        "1e-400",
        "4.9e-324",
        "2.4e-324",
        "1.7976931348623157e308",
        "1.7976931348623159e308",
        "9007199254740993",
        "123456789012345678901234567890",
        "0.1",
        "1e22",
        "1e23",
        "2.2250738585072011e-308",
        "5e-324",
        "1" * 999,
        "1" * 1000,
        "1" * 1001,
        "0." + "1" * 998,
        "0." + "1" * 1200,
        "1e0001",
        "-9223372036854775808",
        "2147483647",
        "-2147483648",
        "1.0",
    ]
    values = [
        f'{{"id":"a","at":"2026-11-21T03:10:00Z","{name}":{n}}}'.encode()
        for n in numbers
        for name in ("amount", "total", "level")
    ]
    days = [
        "2026-02-28",
        "2026-02-29",
        "2024-02-29",
        "2026-04-31",
        "2026-00-10",
        "2026-13-01",
        "0001-01-01",
        "0000-01-01",
        "1582-10-10",
        "9999-12-31",
        "1969-12-31",
        "2026-12-32",
        "26-1-1",
        "1900-02-29",
    ]
    times = [
        "00:00:00",
        "23:59:59",
        "24:00:00",
        "23:60:00",
        "23:59:60",
        "03:10:00.1",
        "03:10:00.12",
        "03:10:00.123",
        "03:10:00.1234",
        "03:10:00.12345",
        "03:10:00.123456",
        "03:10:00.1234567",
        "03:10:00.",
        "3:10:00",
    ]
    zones = [
        "Z",
        "",
        "z",
        "+00:00",
        "-00:00",
        "+01:00",
        "-17:59",
        "+18:00",
        "+18:01",
        "+24:00",
        "+01:60",
        "+0100",
        "+01",
        " Z",
    ]
    moments = [f"{d}T{t}{z}" for d in days for t in times[:3] for z in ("Z", "+01:00")]
    moments += [f"2026-11-21{sep}{t}{z}" for t in times for z in zones for sep in "T t"]
    values += [f'{{"id":"a","at":"{m}"}}'.encode() for m in moments]
    values += [f'{{"id":"a","at":"2026-11-21T03:10:00Z","day":"{d}"}}'.encode() for d in days]
    assert _require_as_spark_reads(spark, list(values), _stream(CERTAIN)) > 60
    unbounded = _stream(CERTAIN.replace("TIMESTAMP NOT NULL", "TIMESTAMP"))
    assert _require_as_spark_reads(spark, list(values), unbounded) > 90


AT = {"type": "long", "logicalType": "timestamp-micros"}
# By column: what a writer's schema may have for it, as a kind and values of that kind. Without
# logical types, so that numbers are written that they do not allow.
_INTS, _LONGS = (
    (0, 1, -1, 63, -65, 2**31 - 1, -(2**31)),
    (0, -1, 2**40, 2**63 - 1, -(2**63), 253_402_300_800_000),
)
_DOUBLES = (0.0, -0.0, 1.5, 1e308, 5e-324, float("inf"), float("nan"))
_MOMENTS = (1_795_230_600_000_000, 253_402_300_800_000_000, -62_135_596_800_000_001, 0, 2**63 - 1)
_AVRO: dict[str, tuple[tuple[object, tuple[object, ...]], ...]] = {
    "id": (("string", _TEXTS[:20]), ("bytes", (b"a", b"\xff", "\u00e9".encode(), b"\0"))),
    "at": (
        (AT, _MOMENTS),
        (AT | {"logicalType": "timestamp-millis"}, (1_795_230_600_000, *_LONGS)),
        (AT | {"logicalType": "local-timestamp-nanos"}, (1_795_230_600_000_000_999, *_LONGS)),
    ),
    "level": (("int", _INTS),),
    "total": (("long", _LONGS), ("int", _INTS)),
    "amount": (
        ("double", _DOUBLES),
        ("float", (*_DOUBLES[:3], 0.1, float("nan"))),
        ("long", (2**53 + 1, *_LONGS)),
        ("int", _INTS),
    ),
    "ok": (("boolean", (True, False)),),
    "day": (({"type": "int", "logicalType": "date"}, (0, 20_000, -719_163, 2_932_897, *_INTS)),),
    "name": (
        ("string", _TEXTS[:20]),
        ({"type": "enum", "name": "e", "symbols": ["A", "B"]}, ("A", "B")),
    ),
    "other": (
        ("int", _INTS),
        ("string", ("", "x")),
        ("double", (1.0,)),
        ({"type": "fixed", "name": "f", "size": 2}, (b"ab",)),
    ),
}


def _avro_schema(dice: random.Random) -> tuple[dict[str, object], dict[str, tuple[object, ...]]]:
    """A writer's schema, and by field the values that it may have."""
    fields, values = [], {}
    for name in dice.sample(list(_AVRO), len(_AVRO)):
        kind, known = dice.choice(_AVRO[name])
        union = dice.choice((kind, ["null", kind], [kind, "null"])) if name != "id" else kind
        fields.append({"name": name, "type": union})
        values[name] = (*known, None) if isinstance(union, list) else known
    return {"type": "record", "name": "event", "fields": fields}, values


def _plain(schema: object) -> object:
    if isinstance(schema, dict):
        return {key: _plain(value) for key, value in schema.items() if key != "logicalType"}
    return [_plain(branch) for branch in schema] if isinstance(schema, list) else schema


def _broken(dice: random.Random, payload: bytes) -> bytes:
    """A payload with a few bytes that are others, too many, or missing."""
    changed = bytearray(payload)
    for _ in range(dice.randrange(1, 4)):
        at = dice.randrange(len(changed) + 1)
        changed[at : at + dice.randrange(2)] = dice.choice(
            (b"", b"\0", b"\1", b"\2", b"\x7f", b"\x80", b"\x80\0", b"\xff")
        )
    return bytes(changed)


@pytest.mark.parametrize("ddl", [CERTAIN, CERTAIN_TIMES])
@pytest.mark.parametrize("seed", [1, *(pytest.param(s, marks=pytest.mark.full) for s in (2, 3))])
def test_a_certain_avro_record_equals_sparks_row(
    spark: SparkSession, registry: SchemaRegistry, ddl: str, seed: int
) -> None:
    dice, stream = random.Random(seed), _stream(ddl)
    client = SchemaRegistryClient(config.Registry(url=registry.url))
    form = AvroFormat(stream, client)
    schemas, values = {}, list[bytes | None]([None, b"", b"\0", b"\0\0\0\0\1"])
    for _ in range(4):
        schema, known = _avro_schema(dice)
        id = registry.register(f"certain-{uuid.uuid4().hex}-value", schema)
        fields = plan_fields(plain_json.dumps(schema), stream.columns)
        assert fields is not None
        assert form.fields(id, stream.columns, spark._jvm) == fields
        schemas[id] = fields
        written = fastavro.parse_schema(_plain(schema))
        for number in range(VALUES // 4):
            out = io.BytesIO()
            # Most are ordinary, so that most of an odd value's columns are.
            fastavro.schemaless_writer(
                out,
                written,
                {
                    name: dice.choice(of if dice.random() < 0.15 else of[:1])
                    for name, of in known.items()
                },
            )
            payload = out.getvalue()
            values.append(wired(id, _broken(dice, payload) if number % 3 == 0 else payload))
    taken = _require_as_spark_reads(
        spark, values, stream, form, lambda: AvroRows(stream.columns, stream.event_time, schemas)
    )
    assert taken > VALUES / 5
    assert taken < len(values) * 0.9
