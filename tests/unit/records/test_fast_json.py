"""Reading without Spark: ordinary records completely and in order, each odd one left, each record
exactly once."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Sequence
from datetime import UTC, date, datetime, timedelta
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kafka_batches import AT, COLUMNS, HOUR, MICROSECOND, START, micros, near, new_batch

from anabranch.config import EventTime
from anabranch.config.columns import RESCUED, WORKER_TYPES, Column, can_workers_read
from anabranch.records import fast_json
from anabranch.records.fast_json import LONGEST, MOST_DIGITS, CertainRows, Read

# How many records the reader may give up beside each that it cannot read.
FEW = 16


def read(
    values: Sequence[bytes | None],
    of: Iterable[Column] = COLUMNS,
    event_time: EventTime | None = None,
    **columns: Sequence[Any],
) -> Read:
    return CertainRows(tuple(of), event_time).read(new_batch(values, **columns))


def left(values: Sequence[bytes | None], **given_: Any) -> list[int]:
    """The places of those that are left; of the others there is a row each, in order."""
    result = read(values, **given_)
    places = result.left.to_pylist()
    rows = [offset - 100 for offset in result.rows["kafka_offset"].to_pylist()]
    assert rows == [place for place in range(len(values)) if place not in places]
    return places


def is_left(value: bytes | None, **given_: Any) -> bool:
    """Whether one value is left, and nothing of those beside it is read as anything but itself."""
    beside = [good(i) for i in range(4)]
    places = left([*beside[:2], value, *beside[2:]], **given_)
    alone = left([value], **given_)
    assert (2 in places) == bool(alone), "read or left, wherever it stands"
    # A batch of so few is halved no more.
    assert len(places) in (0, 1, 5)
    return bool(alone)


def good(number: int, **fields: Any) -> bytes:
    return json.dumps({"id": f"e{number}", "level": number, **fields}).encode()


def test_ordinary_values_are_rows_in_their_order_with_the_columns_of_kafka() -> None:
    values = [
        b'{"id":"a","at":"2026-11-21T03:10:00.123456+01:00","level":-7,"total":9007199254740993,"amount":0.1,'
        b'"ok":true,"day":"2026-02-28","name":"\xc3\xa9 \\"quoted\\" \\\\ \\n } {"}',
        b' {"id":"b"}'.strip(),
        b'{\n  "name" : null,\r\n\t"id": "c", "ok":false, "amount":1e3, "at": "1969-12-31 23:59:59Z"\n}',
    ]
    rows = read(values, partitions=[3, 3, 4]).rows
    assert rows.to_pylist() == [
        {
            "id": "a",
            "at": datetime(2026, 11, 21, 2, 10, 0, 123456, tzinfo=UTC),
            "level": -7,
            "total": 9007199254740993,
            "amount": 0.1,
            "ok": True,
            "day": date(2026, 2, 28),
            "name": 'é "quoted" \\ \n } {',
            "kafka_partition": 3,
            "kafka_offset": 100,
            "kafka_timestamp": AT,
            "ingest_hour": HOUR,
            "event_date": date(2026, 11, 21),
        },
        {
            **dict.fromkeys(("at", "level", "total", "amount", "ok", "day", "name")),
            "id": "b",
            "kafka_partition": 3,
            "kafka_offset": 101,
            "kafka_timestamp": AT,
            "ingest_hour": HOUR,
            "event_date": date(2026, 11, 21),
        },
        {
            **dict.fromkeys(("level", "total", "day", "name")),
            "id": "c",
            "ok": False,
            "amount": 1000.0,
            "at": datetime(1969, 12, 31, 23, 59, 59, tzinfo=UTC),
            "kafka_partition": 4,
            "kafka_offset": 102,
            "kafka_timestamp": AT,
            "ingest_hour": HOUR,
            "event_date": date(2026, 11, 21),
        },
    ]
    kinds = {name: str(rows.schema.field(name).type) for name in rows.column_names}
    assert kinds == {
        "id": "string",
        "at": "timestamp[us, tz=UTC]",
        "level": "int32",
        "total": "int64",
        "amount": "double",
        "ok": "bool",
        "day": "date32[day]",
        "name": "string",
        "kafka_partition": "int32",
        "kafka_offset": "int64",
        "kafka_timestamp": "timestamp[us, tz=UTC]",
        "ingest_hour": "string",
        "event_date": "date32[day]",
    }


def test_the_event_date_is_of_the_event_time_and_without_one_of_kafkas() -> None:
    values = [
        b'{"id":"a","at":"2026-11-20T23:59:59.999999Z"}',
        b'{"id":"b","at":"2026-11-21T00:59:59+01:00"}',
        b'{"id":"c"}',
        b'{"id":"d","at":"1969-12-31T23:59:59.999999Z"}',
    ]
    dated = read(values, event_time=near(None, None)).rows
    assert dated["event_date"].to_pylist() == [
        date(2026, 11, 20), date(2026, 11, 20), date(2026, 11, 21), date(1969, 12, 31),
    ]  # fmt: skip


def test_a_batch_of_two_ingest_hours_is_held_to_the_bounds_of_each() -> None:
    values = [
        b'{"id":"%d","at":"2026-11-21T0%d:30:00Z"}' % (i, hour)
        for i, hour in enumerate((3, 4, 3, 4))
    ]
    hours = [HOUR, "2026-11-21T04", "2026-11-21T04", HOUR]
    result = read(values, event_time=near(0, 0), hours=hours)
    assert result.left.to_pylist() == [2, 3]
    assert result.rows["ingest_hour"].to_pylist() == hours[:2]


def test_an_empty_batch_has_neither_rows_nor_anything_left() -> None:
    result = read([], event_time=near(1, 1))
    assert (len(result.rows), len(result.left)) == (0, 0)
    assert result.rows.schema == read([good(1)]).rows.schema
    nothing_read = read([None, b"", b"x"])
    assert (len(nothing_read.rows), nothing_read.left.to_pylist()) == (0, [0, 1, 2])
    assert nothing_read.rows.schema == result.rows.schema


def test_a_batch_that_is_a_part_of_another_is_read_as_that_part() -> None:
    rows = CertainRows(COLUMNS, None)
    result = rows.read(new_batch([good(i) if i % 5 else b"{" for i in range(40)]).slice(11, 9))
    assert result.left.to_pylist() == [4]
    assert result.rows["kafka_offset"].to_pylist() == [o for o in range(111, 120) if o != 115]
    assert result.rows["level"].to_pylist() == [o - 100 for o in range(111, 120) if o != 115]


ODD_VALUES = {
    "nothing": None,
    "empty": b"",
    "no object": b"5",
    "an array of objects": b'[{"id":"a"}]',
    "no brace in front": b'"id":"a"}',
    "no brace behind": b'{"id":"a"',
    "a blank in front": b' {"id":"a"}',
    "a blank behind": b'{"id":"a"} ',
    "a byte order mark": b'\xef\xbb\xbf{"id":"a"}',
    "a brace alone": b"{",
    "two objects": b'{"id":"a"}{"id":"b"}',
    "two objects and a new line": b'{"id":"a"}\n{"id":"b"}',
    "two objects and a comma": b'{"id":"a"},{"id":"b"}',
    "a brace too many": b'{"id":"a"}}',
    "a text left open": b'{"id":"a}',
    "a comma too many": b'{"id":"a",}',
    "an object left open": b'{"id":"a","name":{}',
    "a NUL in a text": b'{"id":"a\x00b"}',
    "a NUL between": b'{"id":"a"\x00}',
    "a NUL behind, and a brace": b'{"id":"a"}\x00}',
    "a NUL and an object": b'{"id":"a"}\x00{"id":"b"}',
    "a NUL in a name": b'{"id":"a","x\x00":1}',
    "a control character in a text": b'{"id":"a\tb"}',
    "a new line in a text": b'{"id":"a\nb"}',
    "half a character escaped": b'{"id":"\\ud83d"}',
    "a whole character in two escapes": b'{"id":"\\ud83d\\ude00"}',
    "half a character escaped in other letters": b'{"id":"\\uDE00"}',
    "twice, once by an escape": b'{"id":"a","i\\u0064":"b"}',
    "a strange escape": b'{"id":"\\x"}',
    "invalid UTF-8": b'{"id":"\xff"}',
    "an overlong NUL": b'{"id":"\xc0\x80"}',
    "a surrogate in UTF-8": b'{"id":"\xed\xa0\x80"}',
    "a text cut in a character": b'{"id":"\xc3"}',
    "single quotes": b"{'id':'a'}",
    "a comment": b'{"id":"a"/* */}',
    "NaN": b'{"id":"a","amount":NaN}',
    "Infinity": b'{"id":"a","amount":Infinity}',
    "-Infinity": b'{"id":"a","amount":-Infinity}',
    "a number beyond doubles": b'{"id":"a","amount":1e999}',
    "NaN for an integer": b'{"id":"a","level":NaN}',
    "-0": b'{"id":"a","amount":-0}',
    "-0.0": b'{"id":"a","amount":-0.0}',
    "-1e-400": b'{"id":"a","amount":-1e-400}',
    "an integer with a point": b'{"id":"a","level":1.0}',
    "an integer with an exponent": b'{"id":"a","total":1e3}',
    "an integer too large": b'{"id":"a","level":2147483648}',
    "a long too large": b'{"id":"a","total":9223372036854775808}',
    "a zero in front": b'{"id":"a","level":01}',
    "a number for a text": b'{"id":5}',
    "a text for a number": b'{"id":"a","level":"5"}',
    "a text for a boolean": b'{"id":"a","ok":"true"}',
    "a field twice": b'{"id":"a","level":1,"level":1}',
    "a field twice, null first": b'{"id":null,"id":"a"}',
    "a field twice, null last": b'{"id":"a","id":null}',
    "an object": b'{"id":"a","name":{"a":1}}',
    "an empty object": b'{"id":"a","level":{}}',
    "a list": b'{"id":"a","level":[1]}',
    "an empty list": b'{"id":"a","name":[]}',
    "null where none may be": b'{"id":null}',
    "a field missing that has to be": b'{"level":1}',
    "no field at all": b"{}",
    "a zone without a colon": b'{"id":"a","at":"2026-11-21T03:10:00+0100"}',
    "no zone, and no such day": b'{"id":"a","at":"2026-02-30T03:10:00"}',
    "a zone that Java does not know": b'{"id":"a","at":"2026-11-21T03:10:00+18:01"}',
    "a time with seven decimals": b'{"id":"a","at":"2026-11-21T03:10:00.1234567Z"}',
    "a 24th hour": b'{"id":"a","at":"2026-11-21T24:00:00Z"}',
    "a 60th second": b'{"id":"a","at":"2026-11-21T23:59:60Z"}',
    "a day that is not in its year": b'{"id":"a","at":"2026-02-29T03:10:00Z"}',
    "a day that is not in its month": b'{"id":"a","day":"2026-04-31"}',
    "the year 0": b'{"id":"a","day":"0000-12-31"}',
    "a year of five digits": b'{"id":"a","day":"10000-01-01"}',
    "a day with its time": b'{"id":"a","day":"2026-11-21T03:10:00Z"}',
    "a zone that leads out of the year 1": b'{"id":"a","at":"0001-01-01T00:30:00+01:00"}',
    "a zone that leads out of the year 9999": b'{"id":"a","at":"9999-12-31T23:30:00-01:00"}',
    "a name that is longer than Spark reads": b'{"id":"a","%s":1}' % (b"k" * 50_001),
    "a name of as many bytes": b'{"id":"a","%s":1}' % ("é" * 25_001).encode(),
}  # fmt: skip


@pytest.mark.parametrize("value", ODD_VALUES.values(), ids=ODD_VALUES.keys())
def test_uncertain_records_are_left(value: bytes | None) -> None:
    assert is_left(value)


ORDINARY_VALUES = {
    "an empty text": b'{"id":""}',
    "braces in texts": b'{"id":"}{\\"}"}',
    "a backslash and a u": b'{"id":"\\\\","name":"u0041"}',
    "no character of ASCII": '{"id":"😀é\u2028\ufffd"}'.encode(),
    "short escapes": b'{"id":"\\"\\\\\\/\\b\\f\\n\\r\\t"}',
    "the largest integer": b'{"id":"a","level":2147483647,"total":9223372036854775807}',
    "the smallest integer": b'{"id":"a","level":-2147483648,"total":-9223372036854775808}',
    "an integer for a double": b'{"id":"a","amount":5}',
    "the largest double": b'{"id":"a","amount":1.7976931348623157e308}',
    "null where it may be": b'{"id":"a","level":null,"at":null,"amount":null,"day":null}',
    "a day that is in its year": b'{"id":"a","at":"2024-02-29T03:10:00Z","day":"2024-02-29"}',
    "the first day": b'{"id":"a","at":"0001-01-01T00:00:00Z","day":"0001-01-01"}',
    "the last day": b'{"id":"a","at":"9999-12-31T23:59:59.999999Z","day":"9999-12-31"}',
    "the widest zone": b'{"id":"a","at":"2026-11-21T03:10:00-17:59"}',
}


@pytest.mark.parametrize("value", ORDINARY_VALUES.values(), ids=ORDINARY_VALUES.keys())
def test_ordinary_records_are_not_left(value: bytes) -> None:
    assert not is_left(value)


# As many objects as lines, none of them of its own line.
SPREAD_OUT = {
    "two beside a blank": [b'{"id":"a"}{"id":"b"}', b" "],
    "two beside nothing": [b'{"id":"a"}{"id":"b"}', b""],
    "two on two lines beside a blank": [b'{"id":"a"}\n{"id":"b"}', b"\t"],
    "an object on two lines": [b'{"id":"a"}{', b'"id":"b"}'],
    "an object on two lines, its braces at their ends": [
        b'{"id":"a"}{"id":"b"}',
        b'{"id":"c"',
        b'}{"id":"d"}',
    ],
    "a text on two lines": [b'{"id":"a"}{"id":"}', b'{"}'],
    "a text on two lines, escaped": [b'{"id":"a"}{"id":"\\', b'{"}'],
    "a name on two lines": [b'{"id":"a"}{"}', b'{":1}'],
    "an object in an object": [b'{"id":"a"}{"id":"b","name":{}', b"{}}"],
    "a list over the end": [b'{"id":"a"}{"id":"b","name":[{}', b"{}]}"],
}


@pytest.mark.parametrize("values", SPREAD_OUT.values(), ids=SPREAD_OUT.keys())
def test_as_many_objects_as_lines_are_no_rows_unless_each_is_a_lines_own(
    values: list[bytes],
) -> None:
    assert left(values) == list(range(len(values)))
    # Beside others that are ordinary they are left alike, and none of those is read as another.
    many = [good(i) for i in range(200)]
    places = left([*many[:90], *values, *many[90:]])
    assert set(range(90, 90 + len(values))) <= set(places)
    assert len(places) <= 3 * FEW


@pytest.mark.parametrize(
    ("value", "name", "is_read_as"),
    [
        (b'{"id":"\\u00e9\\u0000"}', "id", "é\0"),
        (b'{"id":"a","n\\u0061me":"b"}', "name", "b"),
        (
            b'{"id":"a","at":"2026-11-21 03:10:00.5"}',
            "at",
            datetime(2026, 11, 21, 3, 10, 0, 500_000, tzinfo=UTC),
        ),
    ],
    ids=["an escape by number", "one in a name", "a time without a zone"],
)
def test_other_spellings_are_read_too(value: bytes, name: str, is_read_as: object) -> None:
    assert read([value]).rows[name].to_pylist() == [is_read_as]


def test_a_value_may_have_a_million_bytes() -> None:
    head, tail = b'{"id":"', b'"}'
    longest = head + b"x" * (LONGEST - len(head + tail)) + tail
    assert (len(longest), is_left(longest)) == (1_000_000, False)
    assert is_left(longest[:-2] + b"x" + tail)


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999"])
def test_an_invalid_number_is_left_in_an_unknown_field(number: str) -> None:
    values = [b'{"id":"a","x":1}', b'{"id":"b","x":%s}' % number.encode(), b'{"id":"c","x":2}']
    assert left([values[0], values[2]]) == [], "the field is learned"
    # Its neighbours too, where PyArrow does not name the line.
    assert left(values) in ([1], [0, 1, 2])
    assert left(values[1:2]) == [0]


@pytest.mark.parametrize("name", ["amount", "x"], ids=["known", "not known"])
def test_a_number_may_have_a_thousand_digits(name: str) -> None:
    def value(number: str) -> bytes:
        return f'{{"id":"a","{name}":{number}}}'.encode()

    for sign, digits in (("", MOST_DIGITS - 2), ("-", MOST_DIGITS - 3)):
        assert left([value(f"{sign}0.{'1' * digits}")] * 3) == []
        assert left([value(f"{sign}0.{'1' * (digits + 1)}")]) == [0]
    assert left([value(f"0.{'1' * (MOST_DIGITS - 8)}e-0001")]) == []
    for exponent in ("e-0001", "E+0001", "e0000001"):
        assert left([value(f"0.{'1' * (MOST_DIGITS - 1 - len(exponent))}{exponent}")]) == [0]
    assert left([value("0.5"), value(f"0.{'1' * MOST_DIGITS}"), value("0.5")]) == [0, 1, 2]


@pytest.mark.parametrize("place", range(12))
def test_a_number_of_too_many_digits_is_found_wherever_it_begins(place: int) -> None:
    def value(digits: int) -> bytes:
        return b'{"id":"%s","amount":0.%s}' % (b"x" * place, b"1" * (digits - 2))

    assert left([value(MOST_DIGITS)]) == []
    assert left([value(MOST_DIGITS + 1)]) == [0]
    # Beside text that is all digits in every tenth place.
    hidden = b'{"id":"%s","amount":0.5}' % (b"x" * place + b"1xxxxxxxxx" * 200)
    assert left([hidden]) == []


def test_many_short_numbers_and_nulls_are_no_long_ones() -> None:
    """The hazard: a stream of many columns is read by Spark, each micro-batch, after it was read
    here in vain."""
    many = (COLUMNS[0], *(Column(f"column_{i}", "double", True) for i in range(200)))
    for number in (None, 0.123456789012345, -1.5e-300):
        assert not is_left(
            good(1, **{f"column_{i}": number for i in range(200)}).replace(b'"level": 1, ', b""),
            of=many,
        )


def test_a_long_text_hides_no_long_number() -> None:
    number, text = b"1" * 1_001, b"x" * 5_000
    assert not is_left(b'{"id":"%s","amount":0.5}' % text)
    assert is_left(b'{"id":"%s","amount":0.%s}' % (text, number))
    assert is_left(b'{"id":"%s","x":0.%s}' % (text, number))
    # Nor is a text of digits distinguished from a number.
    assert is_left(b'{"id":"%s"}' % number)


@pytest.mark.parametrize(
    "value",
    [
        b'{"id":"a","x":1,"x":2}',
        b'{"id":"a","x":1,"x":1}',
        b'{"id":"a","x":null,"x":2}',
        b'{"id":"a","x":"","x":2}',
        b'{"id":"a","x":{}}',
        b'{"id":"a","x":{"id":"b"}}',
        b'{"id":"a","x":[]}',
        b'{"id":"a","x":[1]}',
        b'{"id":"a","x":1,"y":{}}',
        b'{"id":"a","x":"1"}',
        b'{"id":"a","x":true}',
        b'{"id":"a","x":nul}',
    ],
)
def test_an_odd_unknown_field_leaves_its_record_whether_learned_or_not(value: bytes) -> None:
    rows = CertainRows(COLUMNS, None)
    if value.count(b"x") == 1 and value in (b'{"id":"a","x":"1"}', b'{"id":"a","x":true}'):
        # Of another type than it was learned with; of that type it would be ordinary.
        assert rows.read(new_batch([value])).left.to_pylist() == []
        rows = CertainRows(COLUMNS, None)
    else:
        assert rows.read(new_batch([value])).left.to_pylist() == [0]
    learned = CertainRows(COLUMNS, None)
    assert learned.read(new_batch([b'{"id":"a","x":1}', b'{"id":"b"}'])).left.to_pylist() == []
    assert learned.read(new_batch([value])).left.to_pylist() == [0]
    assert (
        learned.read(new_batch([b'{"id":"c","x":2.5}', b'{"id":"d","x":null}'])).left.to_pylist()
        == []
    )


def test_unknown_fields_are_learned_and_left_out() -> None:
    rows = CertainRows(COLUMNS, None)
    values = [
        b'{"id":"%d","a":1,"b":"t","c":true,"d":2.5,"level":%d,"":"no name"}' % (i, i)
        for i in range(50)
    ]
    first = rows.read(new_batch(values))
    assert (first.left.to_pylist(), first.rows["level"].to_pylist()) == ([], list(range(50)))
    assert not {"a", "b", "c", "d", ""} & set(first.rows.column_names)
    # Any of them may be absent or null then, and others may join.
    again = rows.read(
        new_batch([b'{"id":"x","b":null,"e":1}', b'{"id":"y"}', b'{"id":"z","a":5,"e":2}'])
    )
    assert (again.left.to_pylist(), again.rows["id"].to_pylist()) == ([], ["x", "y", "z"])


@pytest.mark.parametrize("every", [1, 3, 700])
def test_an_unknown_field_is_learned_wherever_it_is_first_seen(every: int) -> None:
    """The hazard: a field that the first record lacks has all of a batch left to Spark, and the
    next fifty with it."""
    values = [
        good(i) if i == 0 or i % every else good(i, x=i, **({"y": "t"} if i % 2 else {}))
        for i in range(9_000)
    ]
    assert left(values) == []
    # The type of null is unknown: the record's few neighbours are left with it, until another shows
    # the type.
    assert len(left([good(0, x=None), *values[1:]])) <= FEW
    assert len(left([*values[:5_000], good(5_000, z=None), *values[5_001:]])) <= FEW


@pytest.mark.parametrize("rescues", [True, False])
def test_with_rescue_or_refuse_each_record_with_an_unknown_field_is_left(rescues: bool) -> None:
    rows = (
        CertainRows((*COLUMNS, RESCUED), None)
        if rescues
        else CertainRows(COLUMNS, None, takes_unknown=False)
    )
    odd: dict[int, dict[str, object]] = {
        170: {"x": 1},
        180: {"x": None},
        900: {"y": "t"},
        901: {"rescued": "t"},
    }
    for _ in range(2):
        result = rows.read(new_batch([good(i, **odd.get(i, {})) for i in range(1_000)]))
        assert odd.keys() <= set(result.left.to_pylist())
        assert len(result.left) < 500
        if rescues:
            assert set(result.rows["rescued"].to_pylist()) == {None}


def test_more_than_64_unknown_fields_are_not_learned() -> None:
    def with_fields(first: int, end: int) -> list[bytes]:
        return [good(i, **{f"x{n}": n for n in range(first, end)}) for i in range(3)]

    assert left(with_fields(0, 64)) == []
    assert left(with_fields(0, 65)) == [0, 1, 2]
    rows = CertainRows(COLUMNS, None)
    assert rows.read(new_batch(with_fields(0, 60))).left.to_pylist() == []
    assert rows.read(new_batch(with_fields(60, 65))).left.to_pylist() == [0, 1, 2], (
        "65 in two steps"
    )
    assert rows.read(new_batch(with_fields(58, 64))).left.to_pylist() == []
    assert rows.read(new_batch([good(1)])).left.to_pylist() == []


@pytest.mark.parametrize("past, future", [(3_600_000_000, 60_000_000), (0, 0)])
def test_a_time_out_of_its_bounds_by_a_microsecond_is_left(past: int, future: int) -> None:
    first, last = (
        START - timedelta(microseconds=past),
        START + timedelta(hours=1, microseconds=future),
    )

    def at(moment: datetime) -> bytes:
        return good(1, at=moment.isoformat(timespec="microseconds"))

    values = [at(m) for m in (first - MICROSECOND, first, last, last + MICROSECOND)]
    assert left(values, event_time=near(past, future)) == [0, 3]
    assert left(values, event_time=near(past, None)) == [0]
    assert left(values, event_time=near(None, future)) == [3]
    assert left(values, event_time=near(None, None)) == []
    assert left(values) == []


def test_a_null_event_time_is_left_in_a_not_null_column() -> None:
    values = [b'{"id":"a","at":null}', b'{"id":"b"}', b'{"id":"c","at":"2026-11-21T03:10:00Z"}']
    assert left(values, event_time=near(0, 0)) == []
    required = [Column(c.name, c.type, c.nullable and c.name != "at") for c in COLUMNS]
    assert left(values, of=required, event_time=near(0, 0)) == [0, 1]


def test_a_record_whose_kafka_timestamp_is_out_of_range_is_left() -> None:
    first, last = micros(datetime(1, 1, 1, tzinfo=UTC)), micros(datetime.max.replace(tzinfo=UTC))
    assert first is not None and last is not None
    stamps = [None, -1, 0, first, first - 1, last, last + 1, -(2**63), 2**63 - 1]
    assert left([good(i) for i in range(9)], stamps=stamps) == [0, 4, 6, 7, 8]
    dated = [good(i, at="2026-11-21T03:10:00Z") for i in range(9)]
    assert left(dated, stamps=stamps, event_time=near(0, 0)) == [0, 4, 6, 7, 8]


@pytest.mark.parametrize("place", [0, 1, 4_999, 9_998, 9_999])
@pytest.mark.parametrize(
    "value", [b'{"id":"a","level":"5"}', b'{"id":"a"}{"id":"b"}', b'{"id":"a","x":{}}']
)
def test_one_bad_value_among_ten_thousand_costs_only_a_few_beside_it(
    place: int, value: bytes
) -> None:
    values = [good(i) for i in range(10_000)]
    values[place] = value
    places = left(values)
    assert place in places
    assert len(places) <= FEW


@pytest.mark.parametrize(
    "value",
    [
        None,
        b"{}{}",
        b'{"id":"\xff"}',
        b'{"id":"\\ud83d\\ude00"}',
        b'{"level":1}',
        b'{"id":"a","day":"2026-02-30"}',
    ],
    ids=["null", "two", "UTF-8", "escape", "NOT NULL", "day"],
)
def test_a_record_left_by_a_check_or_its_value_does_not_affect_its_neighbours(
    value: bytes | None,
) -> None:
    values = [good(i) for i in range(1_000)]
    values[::50] = [value] * 20
    places = left(values)
    if value == b"{}{}":
        assert set(range(0, 1_000, 50)) <= set(places)
    else:
        assert places == list(range(0, 1_000, 50))


def test_with_one_bad_value_in_three_everything_is_left_or_read() -> None:
    for bad in (
        b'{"id":1}',
        b"{x}",
        b'{"id":"a","x":[]}',
        b'{"id":"a"}{"id":"b"}',
        b'{"id":"a","amount":NaN}',
    ):
        values = [good(i) if i % 3 else bad for i in range(10_000)]
        places = left(values)
        assert set(range(0, 10_000, 3)) <= set(places)
    assert left([b"{x}"] * 5_000) == list(range(5_000))


@pytest.mark.parametrize(
    "odd",
    [b"{x}", b'{"id":"a","level":1.5}', b'{"id":"a","x":{}}'],
    ids=["row named", "type", "field"],
)
def test_a_batch_is_read_only_so_often(odd: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """The hazard: each of ten thousand odd values has two more readings fail, and a micro-batch
    takes minutes."""
    tried: list[int] = []
    table = CertainRows._table

    def counted(self: CertainRows, lines: pa.Array) -> tuple[pa.Table | None, int | None]:
        tried.append(len(lines))
        return table(self, lines)

    monkeypatch.setattr(CertainRows, "_table", counted)
    assert left([odd] * 10_000) == list(range(10_000))
    may_read = fast_json._MOST_READINGS * (10_000 + fast_json._A_READING)
    assert len(tried) <= may_read // fast_json._A_READING + 1
    # Few rows are read at once behind the first that fails.
    assert max(tried[1:]) <= fast_json._AT_ONCE or tried[1] == 10_000


def test_with_one_odd_value_in_a_hundred_only_these_are_left() -> None:
    odd = [b"{x}" if i % 100 == 50 else b'{"id":"a"}' for i in range(10_000)]
    assert left(odd) == list(range(50, 10_000, 100))


TEXTS = st.text(st.characters(exclude_categories=("Cs",)), max_size=6)
MEMBERS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**40), 2**70),
    st.floats(),
    TEXTS,
    st.just([]),
    st.just({"a": 1}),
    st.sampled_from(["2026-11-21T03:10:00Z", "2026-02-30", "2026-11-21"]),
)
OBJECTS = st.dictionaries(
    st.sampled_from(["id", "at", "level", "amount", "ok", "day", "name", "x", "y"]), MEMBERS
)
PLAIN = st.integers(0, 99).map(good)


def _text(value: dict[str, Any], is_ascii: bool) -> bytes:
    return json.dumps(value, ensure_ascii=is_ascii).encode()


VALUES = st.one_of(
    PLAIN, PLAIN, PLAIN, st.builds(_text, OBJECTS, st.booleans()), st.none(), st.binary(max_size=9),
    st.tuples(PLAIN, PLAIN).map(b"".join), st.tuples(PLAIN, PLAIN).map(b"\n".join),
    st.tuples(PLAIN, st.integers(1, 12)).map(lambda cut: cut[0][: cut[1]] + b"}"),
    st.tuples(PLAIN, st.integers(1, 12)).map(lambda cut: b"{" + cut[0][cut[1] :]),
)  # fmt: skip


@settings(deadline=None)
@given(st.lists(VALUES, max_size=60), st.lists(VALUES, max_size=60))
def test_every_record_is_a_row_or_left_exactly_once(
    first: list[bytes | None], then: list[bytes | None]
) -> None:
    rows = CertainRows(COLUMNS, near(86_400_000_000, 0))
    for values in (first, then):
        result = rows.read(new_batch(values))
        places = [offset - 100 for offset in result.rows["kafka_offset"].to_pylist()]
        assert sorted([*places, *result.left.to_pylist()]) == list(range(len(values)))
        assert places == sorted(places) and result.left.to_pylist() == sorted(
            result.left.to_pylist()
        )
        for place, row in zip(places, result.rows.to_pylist(), strict=True):
            value = json.loads(values[place] or b"")
            assert (row["id"], row["level"], row["amount"]) == tuple(
                value.get(n) for n in ("id", "level", "amount")
            )


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_many_records_with_odd_ones_among_them_are_each_a_row_or_left(seed: int) -> None:
    dice = random.Random(seed)
    odd = list(ODD_VALUES.values())
    values = [dice.choice(odd) if dice.random() < 0.004 else good(i) for i in range(3_000)]
    places = left(values)
    strange = [i for i, value in enumerate(values) if value != good(i)]
    assert strange and set(strange) <= set(places)
    assert len(places) <= FEW * len(strange)


def test_only_streams_of_flat_columns_of_known_types_can_be_read() -> None:
    assert set(fast_json._TYPES) == WORKER_TYPES
    assert can_workers_read(COLUMNS)
    for other in (
        "float",
        "binary",
        "decimal(9,2)",
        "array<string>",
        "struct<a:int>",
        "timestamp_ntz",
        "smallint",
    ):
        assert not can_workers_read([*COLUMNS, Column("other", other, True)])
