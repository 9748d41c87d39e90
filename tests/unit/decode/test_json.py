"""JSON: a row or a verdict for each value, in any batch."""

import json
import math
import sys
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from typing import Any

import hostile
import pytest
import worst
from budget import budget
from cases import codes, decoded, expect, spec_of
from hypothesis import example, given, settings
from hypothesis import strategies as st
from kafka_batches import AT, HOUR, MICROSECOND, START, micros, new_batch

from anabranch.decode import Decoder, WriterSchema
from anabranch.decode.json import MOST_LEARNED
from anabranch.records.hashes import in_duckdb

NESTED = (
    "id STRING, price DECIMAL(10,2), tags ARRAY<STRING>, scores MAP<STRING, DOUBLE>, items "
    "ARRAY<STRUCT<n: INT, cost: DECIMAL(6,3), at: TIMESTAMP>>, raw BINARY, small FLOAT"
)


@pytest.mark.parametrize("lists_unknown", [False, True])
def test_hostile_values(lists_unknown: bool) -> None:
    spec = spec_of(hostile.DDL, event_time=hostile.EVENT_TIME, lists_unknown=lists_unknown)
    expect(spec, hostile.cases(START))


def test_the_worst_of_a_megabyte() -> None:
    expect(spec_of(worst.JSON_DDL, lists_unknown=True), worst.json_cases())
    expect(spec_of(worst.ARRAYS_DDL), worst.arrays_cases())


def rows(ddl: str, *values: object, **given: Any) -> list[dict[str, Any]]:
    result = decoded(spec_of(ddl, **given), values)
    assert not result.errors
    return result.rows.to_pylist()


def verdict(ddl: str, value: object) -> tuple[str, str]:
    return decoded(spec_of(ddl), [value]).errors[0]


def test_columns_and_kafkas_own() -> None:
    ddl = "id STRING NOT NULL, at TIMESTAMP, level INT, total BIGINT, amount DOUBLE, ok BOOLEAN, day DATE"
    value = (
        b'{\n "id": "\\u00e9\\"}{", "at":"2026-11-21T03:10:00.123456+01:00","level":-7,'
        b'"total":9007199254740993,"amount":1e2,"ok":true,"day":"2024-02-29"}'
    )
    [row] = rows(ddl, value)
    assert row == {
        "id": 'é"}{', "at": datetime(2026, 11, 21, 2, 10, 0, 123456, tzinfo=UTC), "level": -7,
        "total": 9007199254740993, "amount": 100.0, "ok": True, "day": date(2024, 2, 29),
        "kafka_partition": 3, "kafka_offset": 100, "kafka_timestamp": START, "ingest_hour": HOUR,
        "event_date": START.date(),
    }  # fmt: skip


def test_nested_values() -> None:
    value = (
        b'{"price":12.505,"tags":["x",null,5],"scores":{"a":1,"b":null},"raw":"aGk=","small":0.5,'
        b'"items":[{"n":1,"cost":"2.0005","at":"2026-11-21T05:00:00+0200","other":1},null,{}]}'
    )
    [row] = rows(NESTED, value)
    assert row["price"] == Decimal("12.51"), "half up, as SQL rounds"
    assert row["tags"] == ["x", None, "5"]
    assert dict(row["scores"]) == {"a": 1.0, "b": None}
    assert (row["raw"], row["small"]) == (b"hi", 0.5)
    nothing = {"n": None, "cost": None, "at": None}
    assert row["items"] == [{"n": 1, "cost": Decimal("2.001"), "at": START}, None, nothing]


NO_DECIMALS = (
    '"1.234,56"', '"12."', '".5"', '"+1"', '" 1"', '"1_0"', '"\u0661"', '"NaN"', "99999999.995",
)  # fmt: skip


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (b'{"items":[{"n":1},{"n":"x"}]}', "items[1].n: expected int, found str"),
        (b'{"items":[{"cost":"1,5"}]}', "items[0].cost: expected decimal(6,3), found 1,5"),
        (b'{"items":[{"n":1},{"at":"noon"},{"cost":"1,5"}]}', "items[1].at: expected timestamp, found noon"),
        (b'{"items":[{"at":"noon"}]}', "items[0].at: expected timestamp, found noon"),
        (b'{"items":[{"n":2147483648}]}', "items[0].n: expected int, found a number out of range"),
        (b'{"items":5}', "items: expected array<struct<n:int,cost:decimal(6,3),at:timestamp>>, found 5"),
        (b'{"scores":{"a":"1"}}', "scores[...]: expected float, found str"),
        (b'{"price":"12,50"}', "price: expected decimal(10,2), found 12,50"),
        *((b'{"price":%s}' % sent.encode(), "price") for sent in NO_DECIMALS),
        (b'{"raw":"aGk"}', "raw"),
        (b'{"small":3.5e38}', "small"),
    ],
)  # fmt: skip
def test_the_reason_names_the_place_in_a_value(value: bytes, text: str) -> None:
    code, words = verdict(NESTED, value)
    assert (code, words[: len(text)]) == ("wrong_type", text)


@pytest.mark.parametrize(
    ("sent", "text"),
    [
        (b"12345678901234567.89", "12345678901234567.89"),
        (b"1e400", "1e400"),
        (b"-0", "-0"),
        (b"true", "true"),
        (b'{"price": 1.50, "e":1e400}', '{"price": 1.50, "e":1e400}'),
        (b'[1, "a"]', '[1, "a"]'),
        (b'"null"', "null"),
        (b'""', ""),
        (b'"\\u00e9"', "é"),
        (b"null", None),
    ],
)
def test_a_string_has_any_other_value_as_it_was_sent(sent: bytes, text: str | None) -> None:
    beside = [b'{"s":"a"}', b'{"s":%s}' % sent, b'{"s":"b"}', b'{"s":5}']
    assert [row["s"] for row in rows("s STRING", *beside)] == ["a", text, "b", "5"]
    assert rows("s ARRAY<STRING>", b'{"s":[%s]}' % sent)[0]["s"] == [text]


def test_a_repeated_name_counts_once_at_every_level() -> None:
    ddl = "id STRING, m MAP<STRING, STRING>, s STRUCT<a: INT>"
    value = b'{"m":{"x":"1"},"id":"a","m":{"c":"red","c":"blue"},"s":{"a":1,"a":2}}'
    assert [(dict(r["m"]), r["s"]) for r in rows(ddl, value)] == [({"c": "blue"}, {"a": 2})]


@pytest.mark.parametrize("value", [b'{"n": 1}', b'{"n": "x"}', b"[1]", b" ", b"{"])
@pytest.mark.parametrize("form", ["json", "json_schema"])
def test_a_byte_order_mark_changes_nothing(value: bytes, form: str) -> None:
    head, schemas = (b"", {}) if form == "json" else (b"\0\0\0\0\1", {1: WriterSchema("{}")})
    spec = spec_of("n INT", form, schemas=schemas)
    plain, marked = (decoded(spec, [head + mark + value]) for mark in (b"", b"\xef\xbb\xbf"))
    assert marked.errors == plain.errors and marked.rows.equals(plain.rows)


@pytest.mark.parametrize("number", ["NaN", "-Infinity", "Infinity", "nan", "-inf"])
def test_numbers_that_json_does_not_have_are_named(number: str) -> None:
    code, text = verdict("n DOUBLE", b'{"a": "NaN", "n": [1, %s]}' % number.encode())
    assert code == "malformed_json" and f"has no such numbers, found {number} (" in text
    assert "NaN" not in verdict("n DOUBLE", b'{"a": "NaN", "n": x}')[1]


@pytest.mark.parametrize("every", [1, 3, 700])
def test_unknown_fields_are_listed_wherever_they_are_first_seen(every: int) -> None:
    unknown = {"x": 1, "y": None}
    sent = [{"id": f"e{i}"} | (unknown if i % every == 0 else {}) for i in range(2_000)]
    result = decoded(spec_of("id STRING", lists_unknown=True), sent)
    assert not result.errors
    assert result.rows["id"].to_pylist() == [f"e{i}" for i in range(2_000)]
    assert result.unknown == {i: ["x", "y"] for i in range(0, 2_000, every)}
    assert not decoded(spec_of("id STRING"), sent).unknown


def test_more_unknown_fields_than_are_learned_are_listed_too() -> None:
    names = [f"x{i:03}" for i in range(MOST_LEARNED + 10)]
    sent = [{"id": "a", **dict.fromkeys(names[: i + 1], 1)} for i in range(len(names))]
    result = decoded(spec_of("id STRING", lists_unknown=True), [*sent, sent[0]])
    assert result.unknown == {i: names[: i + 1] for i in range(len(names))} | {
        len(names): names[:1]
    }
    assert result.rows["id"].to_pylist() == ["a"] * (len(names) + 1)


def test_rescued_fields_are_kept_as_they_were_sent() -> None:
    spec = spec_of("id STRING", rescued="rescued")
    values = [b'{"b":{"x":1.50},"id":"a","a\\"":1e400}', b'{"id":"b"}', b'{"id":5,"c":null}']
    result = decoded(spec, values)
    expected = ['{"a\\"":1e400,"b":{"x":1.50}}', None, '{"c":null}']
    assert result.rows["rescued"].to_pylist() == expected
    assert result.rows["id"].to_pylist() == ["a", "b", "5"]


def test_refused_fields_are_a_verdict_after_all_others() -> None:
    spec = spec_of("id STRING NOT NULL", refuses_unknown=True)
    values = [b'{"id":"a","y":1,"x":2}', b'{"x":1}', b'{"id":"a"}']
    others = ("unknown_field", "expected no fields beside those of the schema, found x, y")
    lacks = ("missing_required", "id: expected string NOT NULL, found null or no such field")
    assert decoded(spec, values).errors == {0: others, 1: lacks}


def test_the_verdict_is_of_the_first_column() -> None:
    ddl = "a TIMESTAMP, b INT, c STRING NOT NULL"
    assert verdict(ddl, b'{"a":"noon","b":"x"}')[0] == "unreadable_timestamp"
    assert verdict(ddl, b'{"a":"2026-11-21T03:00:00Z","b":"x"}')[0] == "wrong_type"
    assert verdict(ddl, b'{"a":"2026-11-21T03:00:00Z","b":5}')[0] == "missing_required"


def test_what_can_be_read_of_a_dead_letter_is_there() -> None:
    """The hazard: an erasure looks for a person in a record whose amount is wrong."""
    spec = spec_of("id STRING, at TIMESTAMP, n INT")
    result = decoded(spec, [b'{"id":"p","at":"noon","n":7}', b'{"id":"q","n":"x"}'])
    read = result.rows.select(["id", "at", "n"]).to_pylist()
    assert read == [{"id": "p", "at": None, "n": 7}, {"id": "q", "at": None, "n": None}]


NOTATIONS = {
    "2026-11-21T03:04:05Z": 0, "2026-11-21T03:04:05.5Z": 500_000, "2026-11-21T03:04:05": 0,
    "2026-11-21 03:04:05.123456": 123_456, "2026-11-21 03:04:05.123456789Z": 123_456,
    "2026-11-21T05:04:05+02:00": 0, "2026-11-21T05:04:05+0200": 0, "2026-11-21 05:04:05+02": 0,
    "2026-11-20T22:34:05-04:30": 0,
}  # fmt: skip


def test_notations_of_times() -> None:
    values = [{"at": text} for text in NOTATIONS]
    at = datetime(2026, 11, 21, 3, 4, 5, tzinfo=UTC)
    expected = [at + micro * MICROSECOND for micro in NOTATIONS.values()]
    assert [row["at"] for row in rows("at TIMESTAMP", *values)] == expected
    # One alone, which no other makes slow or fast.
    assert [rows("at TIMESTAMP", value)[0]["at"] for value in values] == expected


@pytest.mark.parametrize(
    "text",
    [
        "2026-02-29T03:10:00Z", "2026-11-21T24:00:00Z", "2026-11-21T23:59:60Z", "2026-11-21T03:10Z",
        "20261121T031000Z", "2026-11-21t03:10:00z", "2026-11-21T03:10:00,5Z", "2026-W47-6T03:10:00Z",
        "2026-11-21T03:10:00.1234567890Z", "2026-11-21T03:10:00 Europe/Paris", "0000-01-01T00:00:00Z",
        "0001-01-01T00:30:00+01:00", "9999-12-31T23:30:00-01:00", "2026-11-21T03:10:00Z\n", "noon", "",
    ],
)  # fmt: skip
def test_other_texts_are_no_times(text: str) -> None:
    assert verdict("at TIMESTAMP", {"at": text})[0] == "unreadable_timestamp"


def test_dates() -> None:
    good = ["2024-02-29", "0001-01-01", "9999-12-31", "2026-04-30"]
    found = rows("day DATE", *({"day": d} for d in good))
    assert [r["day"].isoformat() for r in found] == good
    for text in ("2026-04-31", "0000-12-31", "10000-01-01", "2026-11-21T03:10:00Z", "2026-1-1"):
        expected = ("unreadable_timestamp", f"day: expected date, found {text}")
        assert verdict("day DATE", {"day": text}) == expected


@pytest.mark.parametrize(("past", "future"), [(3_600_000_000, 60_000_000), (0, 0)])
def test_bounds_of_the_event_time_are_exact(past: int, future: int) -> None:
    before, after = (timedelta(microseconds=bound) for bound in (past, future))
    bounds = {"column": "at", "past": before, "future": after}
    first, last = START - before, START + timedelta(hours=1) + after
    moments = (first - MICROSECOND, first, last, last + MICROSECOND)
    values = [{"at": m.isoformat(timespec="microseconds")} for m in moments]
    result = decoded(spec_of("at TIMESTAMP", event_time=bounds), values)
    assert codes(result) == dict.fromkeys((0, 3), "event_time_out_of_bounds")
    found = "at: expected a time near the ingest hour, found 2026-11-2"
    assert result.errors[0][1].startswith(found)
    assert not decoded(spec_of("at TIMESTAMP", event_time={"column": "at"}), values).errors
    assert not decoded(spec_of("at TIMESTAMP", event_time=bounds), [b"{}", b'{"at":null}']).errors


def test_each_record_is_held_to_the_bounds_of_its_own_hour() -> None:
    values: list[bytes | None] = [b'{"at":"2026-11-21T0%d:30:00Z"}' % hour for hour in (3, 4, 3, 4)]
    hours = [HOUR, "2026-11-21T04", "2026-11-21T04", HOUR]
    bounds = {"column": "at", "past": "0 seconds", "future": "0 seconds"}
    result = decoded(spec_of("at TIMESTAMP", event_time=bounds), values, hours=hours)
    assert sorted(result.errors) == [2, 3]


def test_the_event_date_is_of_the_event_time_else_of_kafka_else_of_the_hour() -> None:
    values: list[bytes | None] = [b'{"at":"2026-11-20T23:59:59.999999Z"}', b"{}", b"{}", b"{}"]
    stamps = [micros(AT), micros(AT), None, 2**62]
    result = decoded(spec_of("at TIMESTAMP", event_time={"column": "at"}), values, stamps=stamps)
    assert not result.errors
    assert result.rows["event_date"].to_pylist() == [date(2026, 11, 20), *[START.date()] * 3]
    assert result.rows["kafka_timestamp"].to_pylist() == [AT, AT, None, None]


def test_a_part_of_a_batch_and_none() -> None:
    spec = spec_of("id STRING, level INT")
    values = [b'{"id":"e%d","level":%d}' % (i, i) if i % 5 else b"{" for i in range(40)]
    result = Decoder(spec).decode(new_batch(values).slice(11, 9))
    assert sorted(result.errors) == [4]
    assert result.good["level"].to_pylist() == [o for o in range(11, 20) if o != 15]
    deep = b'{"x":' + b"[" * 110 + b"]" * 110 + b"}"
    of_end = Decoder(spec).decode(new_batch([*values, deep, b"{}"]).slice(36))
    assert codes(of_end) == {4: "too_deep"}
    empty = Decoder(spec).decode(new_batch([]))
    assert (len(empty.rows), empty.rows.schema) == (0, result.rows.schema)


def test_a_thousand_columns() -> None:
    ddl = ", ".join(f"c{i} {('STRING', 'INT', 'DOUBLE')[i % 3]}" for i in range(1_000))
    [row] = rows(ddl, {f"c{i}": ("x", i, i / 2)[i % 3] for i in range(1_000)})
    assert (row["c0"], row["c1"], row["c998"]) == ("x", 1, 499.0)


def test_names_that_python_and_sql_reserve() -> None:
    ddl = "class STRING, `select` INT, None DOUBLE, __init__ STRING"
    [row] = rows(ddl, b'{"class":"a","select":1,"None":2,"__init__":"b"}')
    assert list(row.values())[:4] == ["a", 1, 2.0, "b"]


def test_a_text_of_twenty_megabytes() -> None:
    [row] = rows("body STRING", b'{"body":"%s"}' % (b"x" * 20_000_001))
    assert len(row["body"]) == 20_000_001


SCALARS = st.one_of(
    st.none(), st.booleans(), st.integers(-(2**63), 2**63 - 1), st.floats(allow_nan=False, allow_infinity=False),
    st.text(st.characters(exclude_categories=["Cs"])),
)  # fmt: skip
VALUES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3)
    ),
    max_leaves=6,
)


@settings(max_examples=budget(40, 400))
@given(
    st.lists(
        st.fixed_dictionaries({}, optional=dict.fromkeys(("s", "n", "x", "b", "z"), VALUES)),
        max_size=6,
    )
)
@example([{"x": 2**53 + 1}])
def test_any_objects_are_read_as_pythons_json_reads_them(objects: list[dict[str, Any]]) -> None:
    """A value of the column's type is the row's; any other is the record's verdict."""
    ddl = "s STRING, n BIGINT, x DOUBLE, b BOOLEAN"
    result = decoded(spec_of(ddl, lists_unknown=True), objects)
    fits = {
        "n": lambda v: type(v) is int,
        "x": lambda v: type(v) in (int, float) and math.isfinite(v),
        "b": lambda v: type(v) is bool,
    }
    for i, (one, row) in enumerate(zip(objects, result.rows.to_pylist(), strict=True)):
        wrong = [n for n, fit in fits.items() if one.get(n) is not None and not fit(one[n])]
        assert (i in result.errors) == bool(wrong), one
        assert result.unknown.get(i, []) == (["z"] if "z" in one else [])
        for name in fits:
            expected = None if name in wrong else one.get(name)
            # DOUBLE has the number nearest to an integer above 2^53.
            is_double = name == "x" and expected is not None
            assert row[name] == (float(expected) if is_double else expected)
        sent = one.get("s")
        assert row["s"] == (sent if isinstance(sent, str | None) else json.dumps(sent))


COSTS = st.sampled_from(["1", "-0.5", '"2.50"', "2.0005", "1e2", '"1,5"', "1000", "true", "null"])
TIMES = st.sampled_from(['"2026-11-21T05:00:00Z"', '"noon"', "null"])
FLOATS = st.sampled_from(["0.1", "3.5e38", "-2", "null"])
OBJECTS = {"cost": COSTS, "at": TIMES, "fs": FLOATS.map(lambda one: f'{{"a":{one},"b":1.5}}')}


def as_json(fields: dict[str, str]) -> str:
    return "{" + ",".join(f'"{name}":{value}' for name, value in fields.items()) + "}"


ITEMS = st.fixed_dictionaries({}, optional=OBJECTS).map(as_json) | st.just("null")
LISTS = st.lists(ITEMS, max_size=3).map(lambda items: f"[{','.join(items)}]") | st.just("null")


@settings(max_examples=budget(60, 1_000))
@given(
    st.lists(
        st.fixed_dictionaries(
            {}, optional={"one": ITEMS, "items": LISTS, "lists": LISTS.map(lambda one: f"[{one}]")}
        ),
        max_size=5,
    )
)
def test_parts_of_nested_values_are_read_as_columns(objects: list[dict[str, str]]) -> None:
    """Nested values are built from columns of their parts. So a part is what it is in a column of
    its own, a value with an unreadable part is null, and no record changes another."""
    of_item = "STRUCT<cost: DECIMAL(6,3), at: TIMESTAMP, fs: MAP<STRING, FLOAT>>"
    ddl = f"one {of_item}, items ARRAY<{of_item}>, lists ARRAY<ARRAY<{of_item}>>"

    def part(item: dict[str, Any] | None) -> dict[str, Any] | None:
        """Raises ValueError if the record has an error."""
        if item is None:
            return None
        fs = item.get("fs") or {}
        flat = {"cost": item.get("cost"), "at": item.get("at"), "a": fs.get("a"), "b": fs.get("b")}
        sent = as_json({name: json.dumps(value) for name, value in flat.items()})
        spec = spec_of("cost DECIMAL(6,3), at TIMESTAMP, a FLOAT, b FLOAT")
        result = decoded(spec, [sent.encode()])
        if result.errors:
            raise ValueError
        [row] = result.rows.to_pylist()
        maps = [(name, row[name]) for name in fs] if "fs" in item else None
        return {"cost": row["cost"], "at": row["at"], "fs": maps}

    def parts(value: Any) -> Any:
        return [parts(one) for one in value] if isinstance(value, list) else part(value)

    result = decoded(spec_of(ddl), [as_json(one).encode() for one in objects])
    for i, (one, row) in enumerate(zip(objects, result.rows.to_pylist(), strict=True)):
        sent, wrong = {name: json.loads(value) for name, value in one.items()}, []
        for name in ("one", "items", "lists"):
            try:
                assert row[name] == parts(sent.get(name))
            except ValueError:
                assert row[name] is None
                wrong.append(name)
        assert (i in result.errors) == bool(wrong)
        alone = decoded(spec_of(ddl), [as_json(one).encode()]).errors.get(0)
        assert result.errors.get(i) == alone


@settings(max_examples=budget(60, 1_000))
@given(st.lists(st.binary(max_size=40), max_size=8), st.integers(0, 2))
def test_no_bytes_make_it_fail(values: list[bytes], brackets: int) -> None:
    start, end = b"{" * brackets, b"}" * brackets
    result = decoded(spec_of(NESTED, lists_unknown=True), [start + value + end for value in values])
    assert len(result.rows) == len(values)
    alone = [decoded(spec_of(NESTED), [start + value + end]).errors.get(0) for value in values]
    assert [result.errors.get(i) for i in range(len(values))] == alone


@pytest.mark.parametrize("text", [b'"\xff"', b'"\\ud800"', b'"\\udc00"', b'"\xed\xa0\x80"'])
def test_texts_that_are_no_text_beside_values_of_any_type(text: bytes) -> None:
    """Once a record has taught that a column has other values, its texts are not looked at."""
    beside = b'{"id":"a","s":{"a":1},"n":1.5}'
    ddl = "id STRING, s STRING, n DECIMAL(5,2)"
    result = decoded(spec_of(ddl), [beside, b'{"id":"p","s":%s,"n":%s}' % (text, text), beside])
    assert [code for code, _ in result.errors.values()] in (["invalid_utf8"], ["lone_surrogate"])
    assert result.rows["id"].to_pylist()[::2] == ["a", "a"]
    assert result.good["s"].to_pylist() == ['{"a":1}'] * 2


@pytest.mark.parametrize("second", ["STRUCT<a: INT, z: STRING>", "STRING", "MAP<STRING, INT>"])
@pytest.mark.parametrize("lists_unknown", [False, True])
def test_no_bytes_in_a_field_of_several_columns_fail(second: str, lists_unknown: bool) -> None:
    spec = spec_of({"x": {"type": "INT", "from": "s.a"}, "s": second}, lists_unknown=lists_unknown)
    limit = sys.getrecursionlimit()
    deep = [b"[" * n + b"]" * n for n in range(limit - 40, limit)]
    texts = [b'"\xff"', b'"\\ud800"']
    for inside in (b"%s", b'{"a":%s}', b'{"z":%s}', b'{"a":{"b":%s}}'):
        sent = [b'{"s":%s}' % (inside % one) for one in [*texts, *deep]]
        result = Decoder(spec).decode(new_batch(sent))
        codes = [result.errors[i][0] for i in range(len(sent))]
        assert codes == ["invalid_utf8", "lone_surrogate", *["too_deep"] * len(deep)]


@pytest.mark.parametrize("kind", ["DATE", "TIMESTAMP"])
def test_names_in_a_map_that_are_no_times(kind: str) -> None:
    day = "2026-11-21" if kind == "DATE" else "2026-11-21T00:00:00Z"
    sent = [{"m": {day: 1}}, {"m": {day: 1, "x": 2}}, {"list": [{}, {"": 1}]}, {"m": None}]
    ddl = f"m MAP<{kind}, INT>, list ARRAY<MAP<{kind}, INT>>"
    result = decoded(spec_of(ddl), sent)
    places = {1: ("m.x", "x"), 2: ("list[1].", "")}
    texts = {i: f"{at}: expected {kind.lower()}, found {x}" for i, (at, x) in places.items()}
    assert result.errors == {i: ("wrong_type", text) for i, text in texts.items()}
    (known, unknown) = result.good["m"].to_pylist()
    assert [(str(name)[:10], n) for name, n in known] == [("2026-11-21", 1)] and unknown is None


@pytest.mark.parametrize("kind", ["FLOAT", "DOUBLE"])
def test_names_in_a_map_that_are_no_numbers(kind: str) -> None:
    good, wrong = ["1.5", "-25e-2", "0"], ["nan", "Infinity", "-inf", "1e999", "+1", " 1", "", "x"]
    wrong += ["1e300"] if kind == "FLOAT" else []
    sent = [{"m": dict.fromkeys(good, 1)}, *({"m": {"1.5": 1, name: 2}} for name in wrong), {}]
    result = decoded(spec_of(f"m MAP<{kind}, INT>"), sent)
    texts = [f"m.{name}: expected {kind.lower()}, found {name}" for name in wrong]
    assert result.errors == {i: ("wrong_type", text) for i, text in enumerate(texts, 1)}
    assert result.good["m"].to_pylist() == [[(1.5, 1), (-0.25, 1), (0.0, 1)], None]


@pytest.mark.parametrize(
    ("kind", "one", "other"),
    [
        ("TIMESTAMP", "2026-11-21T00:00:00Z", "2026-11-21T01:00:00+01:00"),
        ("FLOAT", "16777216", "16777217"),
        ("DOUBLE", "1", "1.0"),
        ("DOUBLE", "0", "-0"),
    ],
)
def test_two_names_of_one_key_in_a_map(kind: str, one: str, other: str) -> None:
    sent = [{"m": {one: 1}}, {"m": {one: 1, other: 2}}, {"m": {other: 2}}, {"m": None}, {"m": {}}]
    result = decoded(spec_of(f"m MAP<{kind}, INT>"), sent)
    text = f"m.{other}: expected each key once, found {other}"
    assert result.errors == {1: ("wrong_type", text)}
    # DuckDB, which compares the layers, reads no map with a key twice.
    assert len(in_duckdb("SELECT hash(m) FROM rows", rows=result.good.select(["m"]))) == 4
