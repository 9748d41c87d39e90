"""Fields by name or path, and values in a stated notation: right, or a verdict with a reason."""

import base64
from collections.abc import Mapping, Sequence
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from fractions import Fraction
from math import floor
from typing import Any

import pytest
from budget import budget
from cases import decoded, spec_of
from hypothesis import example, given, settings
from hypothesis import strategies as st
from kafka_batches import EPOCH, MICROSECOND

from anabranch.decode import Decoded
from anabranch.decode.values import FIRST_MICROS, LAST_MICROS

PER_SECOND = {"seconds": 1, "millis": 1_000, "micros": 1_000_000, "nanos": 1_000_000_000}


def read(schema: Mapping[str, Any], values: Sequence[object], **given: Any) -> Decoded:
    return decoded(spec_of(schema, **given), values)


def rows(schema: Mapping[str, Any], *values: object, **given: Any) -> list[dict[str, Any]]:
    result = read(schema, values, **given)
    assert not result.errors
    return result.rows.select(list(schema)).to_pylist()


def verdict(schema: Mapping[str, Any], value: object) -> tuple[str, str]:
    return read(schema, [value]).errors[0]


def timestamp(unit: str) -> dict[str, Any]:
    return {"at": {"type": "TIMESTAMP", "unit": unit}}


NUMBERS = st.one_of(
    st.integers(-(10**19), 10**19).map(str),
    st.integers(-62_200_000_000, 253_500_000_000).map(str),
    st.decimals(-(10**12), 10**12, places=9).map(lambda number: f"{number:f}"),
    st.decimals(-(10**15), 10**15, places=3).map(lambda number: f"{number:f}"),
    st.floats(-1e13, 1e13).map(repr),
    st.tuples(st.integers(-(10**17), 10**17), st.integers(-30, 12)).map(lambda n: f"{n[0]}e{n[1]}"),
)


@settings(max_examples=budget(100, 2_000))
@given(st.sampled_from(list(PER_SECOND)), st.lists(st.tuples(NUMBERS, st.booleans()), max_size=8))
@example("millis", [("1795867200.123", True), ("1795867200.123", False)])
@example("nanos", [("-1", False), ("9223372036854775807", False), ("9223372036854775808", True)])
@example("seconds", [("1e999", False), ("-0.0", True), ("253402300799.9999999", False)])
def test_numbers_are_times_to_the_microsecond(unit: str, given: list[tuple[str, bool]]) -> None:
    """Numbers or text, whole or with a fraction, in one batch and alone."""
    texts = [f'"{n}"' if quoted else n for n, quoted in given]
    values = [b'{"at":%s}' % text.encode() for text in texts]
    result = read(timestamp(unit), values)
    alone = [read(timestamp(unit), [value]) for value in values]
    for i, ((number, _), row) in enumerate(zip(given, result.rows.to_pylist(), strict=True)):
        micros = floor(Fraction(number) * 1_000_000 / PER_SECOND[unit])
        if FIRST_MICROS <= micros <= LAST_MICROS:
            assert row["at"] == EPOCH + micros * MICROSECOND and i not in result.errors
        else:
            text = f"at: expected timestamp in {unit} since 1970, found {number}"
            assert result.errors[i] == ("unreadable_timestamp", text)
        assert alone[i].rows["at"].to_pylist() == [row["at"]]
        assert alone[i].errors.get(0) == result.errors.get(i)


NO_NUMBERS = (
    "noon", "", " 1", "1_0", "01", "0x1", "NaN", "\u0661", "2026-11-21T03:10:00Z",
)  # fmt: skip


@pytest.mark.parametrize(
    ("sent", "code"),
    [
        *((f'"{text}"'.encode(), "unreadable_timestamp") for text in NO_NUMBERS),
        *((other, "wrong_type") for other in (b"true", b"[1]", b'{"a":1}')),
    ],
)
@pytest.mark.parametrize("beside", [b'{"at":1}', b'{"at":1.5}', b'{"at":"1"}', b'{"at":null}'])
def test_other_values_are_no_numbers_of_a_unit(sent: bytes, code: str, beside: bytes) -> None:
    result = read(timestamp("millis"), [beside, b'{"at":%s}' % sent, beside])
    found = sent.decode().strip('"')
    text = f"at: expected timestamp in millis since 1970, found {found}"
    assert result.errors == {1: (code, text)}


def test_days_since_1970() -> None:
    schema = {"day": {"type": "DATE", "unit": "days"}}
    days = [0, -1, "20000", 2_932_896, -719_162, None]
    found = [row["day"] for row in rows(schema, *({"day": day} for day in days))]
    began = date(1970, 1, 1)
    assert found == [None if day is None else began + timedelta(int(day)) for day in days]
    no_days = (b"1.0", b'"1.0"', b'"2026-11-21"')
    for wrong in (b"2932897", b"-719163", b"99999999999999999999", *no_days):
        text = "day: expected date in days since 1970, found " + wrong.decode().strip('"')
        assert verdict(schema, b'{"day":%s}' % wrong) == ("unreadable_timestamp", text)


def test_times_of_a_form() -> None:
    schema = {
        "at": {"type": "TIMESTAMP", "format": "%d/%b/%Y:%H:%M:%S %z"},
        "day": {"type": "DATE", "format": "%d.%m.%Y"},
        "from_day": {"type": "TIMESTAMP", "format": "%d.%m.%Y"},
    }
    value = {"at": "28/Nov/2026:10:00:00 +0100", "day": "29.2.2024", "from_day": "29.02.2024"}
    at, day = datetime(2026, 11, 28, 9, tzinfo=UTC), datetime(2024, 2, 29, tzinfo=UTC)
    assert rows(schema, value) == [{"at": at, "day": day.date(), "from_day": day}]
    for sent in ("2026-11-28T10:00:00Z", "29/Feb/2026:10:00:00 +0100", ""):
        expected = "at: expected timestamp of the form %d/%b/%Y:%H:%M:%S %z"
        wanted = ("unreadable_timestamp", f"{expected}, found {sent}")
        assert verdict(schema, {"at": sent}) == wanted
    assert verdict(schema, b'{"day":5}')[0] == "wrong_type"


@settings(max_examples=budget(50, 1_000))
@given(
    st.sampled_from([".", ","]),
    st.decimals(-(10**9), 10**9, places=2),
    st.integers(-(2**63), 2**63 - 1),
    st.floats(allow_nan=False, allow_infinity=False),
    st.booleans(),
)
def test_numbers_in_text_with_a_decimal_sign(
    sign: str, amount: Decimal, whole: int, real: float, is_text: bool
) -> None:
    kinds = {"amount": "DECIMAL(12,2)", "whole": "BIGINT", "real": "DOUBLE"}
    schema = {name: {"type": kind, "decimal": sign} for name, kind in kinds.items()}
    sent = {"amount": f"{amount:f}", "whole": str(whole), "real": repr(real)}
    texts = [(n, f'"{t.replace(".", sign)}"' if is_text else t) for n, t in sent.items()]
    parts = [f'"{name}":{text}' for name, text in texts]
    result = read(schema, [("{" + ",".join(parts) + "}").encode()])
    assert not result.errors
    expected = [{"amount": amount, "whole": whole, "real": real}]
    assert result.rows.select(list(kinds)).to_pylist() == expected


@pytest.mark.parametrize(
    ("kind", "sign", "sent", "words"),
    [
        ("DECIMAL(12,2)", ",", b'"1.234,56"', "decimal(12,2) with the decimal sign ,"),
        ("DECIMAL(12,2)", ",", b'"12.50"', "decimal(12,2) with the decimal sign ,"),
        ("DECIMAL(12,2)", ",", b'"1,2,3"', "decimal(12,2) with the decimal sign ,"),
        ("DOUBLE", ".", b'"12,5"', "double with the decimal sign ."),
        ("DOUBLE", ".", b'"1e999"', "double with the decimal sign ."),
        ("DOUBLE", ".", b"true", "double with the decimal sign ."),
        ("BIGINT", ".", b'"5.0"', "bigint with the decimal sign ."),
        ("INT", ".", b'"2147483648"', "int with the decimal sign ."),
        ("INT", ".", b"2147483648", "int with the decimal sign ."),
        ("DECIMAL(12,2)", "base64", b"12.5", "decimal(12,2) in Base64"),
        ("DECIMAL(12,2)", "base64", b'"12,5"', "decimal(12,2) in Base64"),
        ("DECIMAL(12,2)", "base64", b'""', "decimal(12,2) in Base64"),
        ("DECIMAL(12,2)", "base64", b'"AOjUpRAA"', "decimal(12,2) in Base64"),
    ],
)  # fmt: skip
def test_other_numbers_are_refused(kind: str, sign: str, sent: bytes, words: str) -> None:
    code, text = verdict({"n": {"type": kind, "decimal": sign}}, b'{"n":%s}' % sent)
    found = sent.decode().strip('"')
    assert (code, text) == ("wrong_type", f"n: expected {words}, found {found}")


@settings(max_examples=budget(50, 1_000))
@given(st.integers(-(10**38) + 1, 10**38 - 1), st.integers(0, 3))
@example(0, 0)
@example(12_345, 0)
def test_decimals_of_kafka_connect(unscaled: int, padding: int) -> None:
    size = unscaled.bit_length() // 8 + 1 + padding
    sent = base64.b64encode(unscaled.to_bytes(size, "big", signed=True)).decode()
    schema = {"n": {"type": "DECIMAL(38,2)", "decimal": "base64"}}
    assert rows(schema, {"n": sent}) == [{"n": Decimal(f"{unscaled}E-2")}]


def test_a_megabyte_that_is_one_number_is_refused_at_once() -> None:
    schema = {"n": {"type": "DECIMAL(38,2)", "decimal": "base64"}}
    assert verdict(schema, (b'{"n":"%s"}' % base64.b64encode(b"\x7f" * 750_000)))[0] == "wrong_type"
    assert verdict(timestamp("seconds"), b'{"at":%s}' % (b"9" * 1_000))[0] == "unreadable_timestamp"


def test_notations_of_values_in_values() -> None:
    kind = "ARRAY<STRUCT<at: TIMESTAMP, n: BIGINT, more: MAP<STRING, DOUBLE>>>"
    schema = {"logs": {"type": kind, "unit": "nanos", "decimal": "."}}
    log = {"at": "1544712660000000000", "n": "5", "more": {"a": "1.5", "b": 2}}
    [row] = rows(schema, {"logs": [log, {"at": 1_000, "n": 6}, None, {"at": None}]})
    at = datetime(2018, 12, 13, 14, 51, tzinfo=UTC)
    assert row["logs"] == [
        {"at": at, "n": 5, "more": [("a", 1.5), ("b", 2.0)]},
        {"at": EPOCH + MICROSECOND, "n": 6, "more": None},
        None,
        {"at": None, "n": None, "more": None},
    ]
    expected = ("wrong_type", "logs[1].at: expected timestamp in nanos since 1970, found noon")
    assert verdict(schema, b'{"logs":[{},{"at":"noon"}]}') == expected
    wanted = ("wrong_type", "logs[0].n: expected bigint with the decimal sign ., found 5.5")
    assert verdict(schema, b'{"logs":[{"n":"5.5"}]}') == wanted


PATHS: dict[str, Any] = {
    "id": {"type": "STRING", "from": "@id"},
    "op": {"type": "STRING", "from": "payload.op"},
    "n": {"type": "INT", "from": "payload.after.n-1"},
    "flat": {"type": "STRING", "from": ["payload.op"]},
    "at": {"type": "TIMESTAMP", "from": "payload.after.ts", "unit": "millis"},
}


def test_fields_by_name_and_path() -> None:
    value = {
        "@id": "a",
        "payload": {"op": "c", "after": {"n-1": 5, "ts": 1_000, "other": 1}},
        "payload.op": "d",
        "id": "not this",
    }
    nothing = dict.fromkeys(PATHS)
    expected = {"id": "a", "op": "c", "n": 5, "flat": "d", "at": EPOCH + timedelta(seconds=1)}
    others = [{"payload": {"after": None}}, {"payload": None}, {}, {"payload": {}}]
    assert rows(PATHS, value, *others) == [expected, *[nothing] * 4]
    [again, beside] = rows(PATHS, value, {"@id": 5})
    assert (again, beside) == (expected, nothing | {"id": "5"})
    result = read(PATHS, [value], lists_unknown=True, rescued="rescued")
    assert result.unknown == {0: ["id", "payload.after.other"]}
    left = '{"id":"not this","payload":{"after":{"other":1}}}'
    assert result.rows["rescued"].to_pylist() == [left]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (b'{"payload":5}', "op at payload: expected an object, found 5"),
        (b'{"payload":"x"}', 'op at payload: expected an object, found "x"'),
        (b'{"payload":{"after":[1]}}', "n at payload.after: expected an object, found [1]"),
        (b'{"payload":{"after":{"n-1":"x"}}}', "n: expected int, found x"),
        (b'{"payload":{"after":{"ts":true}}}', "at: expected timestamp in millis since 1970, found true"),
    ],
)  # fmt: skip
def test_a_path_leads_through_objects(value: bytes, text: str) -> None:
    assert verdict(PATHS, value) == ("wrong_type", text)


def test_several_columns_of_one_field() -> None:
    schema = {
        "at": {"type": "TIMESTAMP", "from": "ts", "unit": "millis"},
        "ts": "BIGINT",
        "whole": {"type": "STRING", "from": "a"},
        "b": {"type": "INT", "from": "a.b"},
    }
    found = rows(schema, {"ts": 1_000, "a": {"b": 5}}, {"a": {"b": None}}, {})
    at = EPOCH + timedelta(seconds=1)
    assert found[0] == {"at": at, "ts": 1_000, "whole": '{"b": 5}', "b": 5}
    assert [(row["whole"], row["b"]) for row in found[1:]] == [('{"b": null}', None), (None, None)]
    assert verdict(schema, b'{"ts":1.5}') == ("wrong_type", "ts: expected bigint, found 1.5")
    assert verdict(schema, b'{"a":5}') == ("wrong_type", "b at a: expected an object, found 5")


OBJECTS = st.recursive(
    st.none() | st.integers(-5, 5) | st.just("x"),
    lambda inner: st.dictionaries(st.sampled_from("abc"), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=budget(60, 600))
@given(st.lists(st.dictionaries(st.sampled_from("abc"), OBJECTS, max_size=3), max_size=5))
def test_paths_in_any_objects(objects: list[dict[str, Any]]) -> None:
    paths = ("a", "b.a", "b.b.a", "b.b.b", "c.c", "c")
    schema = {f"c{i}": {"type": "INT", "from": path} for i, path in enumerate(paths)}
    result = read(schema, objects)
    for i, (one, row) in enumerate(zip(objects, result.rows.to_pylist(), strict=True)):
        is_wrong = False
        for name, path in zip(schema, paths, strict=True):
            value: Any = one
            for step in path.split("."):
                if value is not None and not isinstance(value, dict):
                    is_wrong, value = True, None
                value = value.get(step) if value else None
            is_wrong |= value is not None and type(value) is not int
            assert row[name] == (value if type(value) is int else None)
        assert (i in result.errors) == is_wrong


EVERY: dict[str, Any] = {
    "at": {"type": "TIMESTAMP", "unit": "millis"},
    "time": {"type": "TIMESTAMP", "format": "%d/%b/%Y:%H:%M:%S %z"},
    "day": {"type": "DATE", "unit": "days"},
    "total": {"type": "DECIMAL(12,2)", "decimal": ","},
    "raw": {"type": "DECIMAL(12,2)", "decimal": "base64"},
    "real": {"type": "FLOAT", "decimal": "."},
    "n": {"type": "INT", "from": "a.b.n", "decimal": "."},
    "b": {"type": "STRING", "from": "a.b"},
    "many": {"type": "ARRAY<STRUCT<at: TIMESTAMP, n: BIGINT>>", "unit": "micros", "decimal": "."},
}
ANY = st.recursive(
    st.one_of(
        st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(max_size=5),
        st.sampled_from(["1", "1,5", "-1.5", "AeJA", "28/Nov/2026:10:00:00 +0100", "1e5", "x"]),
        st.sampled_from([10**30, -(10**400)]),
    ),
    lambda inner: st.lists(inner, max_size=2)
    | st.dictionaries(st.sampled_from(["a", "b", "n", "at"]), inner, max_size=2),
    max_leaves=5,
)  # fmt: skip


@settings(max_examples=budget(150, 3_000))
@given(st.lists(st.dictionaries(st.sampled_from(["a", *EVERY]), ANY, max_size=5), max_size=6))
def test_any_values_have_the_verdict_that_they_have_alone(objects: list[dict[str, Any]]) -> None:
    result = read(EVERY, objects)
    together = result.rows.select(list(EVERY)).to_pylist()
    for i, one in enumerate(objects):
        alone = read(EVERY, [one])
        assert alone.errors.get(0) == result.errors.get(i)
        assert alone.rows.select(list(EVERY)).to_pylist() == [together[i]]


@pytest.mark.parametrize("digits", [45, 400, 4_300, 5_000, 100_000])
def test_numbers_of_any_length(digits: int) -> None:
    number = b"9" * digits
    for sent in (number, b"-" + number, number + b".5", b'"%s"' % number, b"1e" + number):
        for column in ("at", "day", "total", "raw", "real", "n"):
            place = b'{"a":{"b":{"n":%s}}}' if column == "n" else b'{"' + column.encode() + b'":%s}'
            value = place % sent
            assert read(EVERY, [value]).errors[0][0] in ("wrong_type", "unreadable_timestamp")


def test_times_of_a_form_that_repeat() -> None:
    schema = {"at": {"type": "TIMESTAMP", "format": "%d.%m.%Y"}}
    texts = ["28.11.2026", None, "x", "28.11.2026", "30.02.2026", "01.01.0001"]
    result = read(schema, [{"at": text} for text in texts])
    good, first = datetime(2026, 11, 28, tzinfo=UTC), datetime(1, 1, 1, tzinfo=UTC)
    assert result.rows["at"].to_pylist() == [good, None, None, good, None, first]
    assert sorted(result.errors) == [2, 4]


def test_an_event_time_that_is_a_number() -> None:
    bounds = {"column": "at", "past": "1 hour", "future": "1 hour"}
    schema = {"id": "STRING NOT NULL", **timestamp("millis")}
    good, late = 1_795_230_600_000, 1_795_867_200_123
    result = read(schema, [b'{"id":"a","at":%d}' % at for at in (good, late)], event_time=bounds)
    assert result.rows["event_date"].to_pylist()[0] == date(2026, 11, 21)
    text = "at: expected a time near the ingest hour, found 1795867200123"
    assert result.errors == {1: ("event_time_out_of_bounds", text)}
