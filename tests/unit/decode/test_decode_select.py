"""Columns of `select`: their values, and records for which an expression has none."""

import hashlib
import hmac
import json
import re
from datetime import UTC, date, datetime
from functools import cache
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import yaml
from cases import codes
from hypothesis import given, settings
from hypothesis import strategies as st
from kafka_batches import START, micros, new_batch

from anabranch.common.errors import ConfigurationError
from anabranch.config import EventTime, Stream
from anabranch.config.columns import parse_columns
from anabranch.config.select import parse_select
from anabranch.decode import Decoded, Decoder, decode_spec
from anabranch.decode.inputs import headers_of
from anabranch.decode.select import Selection

SECRET = b"0123456789abcdef"
DDL = (
    "id STRING NOT NULL, s STRING, i INT, l BIGINT, d DOUBLE, m DECIMAL(38,10), t TIMESTAMP, day "
    "DATE, f BOOLEAN, b BINARY, tags ARRAY<STRING>, ms ARRAY<DECIMAL(5,2)>, geo STRUCT<country: STRING>"
)
_SENT = [(b"trace-id", b"old"), (b"trace-id", "neu é".encode()), (b"bad", b"\xff")]
_HEXED = [{"key": name.hex(), "value": value.hex()} for name, value in _SENT]
HEADERS = json.dumps([*_HEXED, {"key": b"none".hex()}]).encode()


def stream_of(select: list[Any], **more: Any) -> Stream:
    fields = parse_columns(DDL)
    selected = parse_select(select, fields)
    known = {"name": "events", "topic": "some-topic", "table": "games.events", "schema": DDL, "key": "none"}  # fmt: skip
    columns = tuple(one.column for one in selected)
    return Stream(**known | more, select=selected, fields=fields, columns=columns)


def decoder(stream: Stream) -> Decoder:
    return Decoder(decode_spec(stream, secret=SECRET))


def decoded(stream: Stream, values: list[dict[str, Any]], key: bytes | None = b"key") -> Decoded:
    return decoder(stream).decode(batch_of(values, key))


def batch_of(values: list[dict[str, Any]], key: bytes | None = b"key") -> pa.RecordBatch:
    sent = [json.dumps({"id": f"id-{i}"} | value).encode() for i, value in enumerate(values)]
    return batch_of_bytes(sent, key, HEADERS)


def batch_of_bytes(
    values: list[bytes], key: bytes | None = None, headers: bytes | None = None
) -> pa.RecordBatch:
    """Records of partition 3; the first one has no headers."""
    n = len(values)
    keys = pa.array([key] * n, pa.binary())
    batch = new_batch(values, [micros(START)] * n).append_column("key", keys)
    return batch.append_column("headers", pa.array([None, *[headers] * (n - 1)], pa.binary()))


def one(expression: str, kind: str, values: list[dict[str, Any]]) -> tuple[list[Any], list[int]]:
    """The values of an expression, and the indexes of its dead letters."""
    found = decoded(stream_of([{"x": {"sql": expression, "type": kind}}]), values)
    assert {code for code, _ in found.errors.values()} <= {"select_failed"}
    return found.rows.column("x").to_pylist(), sorted(found.errors)


@pytest.mark.parametrize(
    ("expression", "kind", "values", "expected"),
    [
        ("i * 2", "INT", [{"i": 2}, {}], [4, None]),
        ("i + l", "INT", [{"i": 1, "l": 2}], [3]),
        ("m * 2", "DECIMAL(38,10)", [{"m": "1.5"}], [3]),
        ("upper(s) || '-' || geo.country", "STRING", [{"s": "a", "geo": {"country": "é"}}], ["A-é"]),
        ("[lower(x) for x in tags]", "ARRAY<STRING>", [{"tags": ["A", None]}, {}], [["a", None], None]),
        ("len(tags)", "INT", [{"tags": []}], [0]),
        (
            "strptime(s, '%d/%b/%Y:%H:%M:%S %z')", "TIMESTAMP",
            [{"s": "10/Oct/2000:13:55:36 -0700"}], [datetime(2000, 10, 10, 20, 55, 36, tzinfo=UTC)],
        ),
        ("strptime(s, '%Y-%m-%d')", "TIMESTAMP", [{"s": "2026-11-21"}], [datetime(2026, 11, 21, tzinfo=UTC)]),
        ("make_timestamp_ms(l)", "TIMESTAMP", [{"l": 1795867200123}], [datetime(2026, 11, 28, 12, 0, 0, 123000, tzinfo=UTC)]),
        ("regexp_extract(s, '(\\d+)', 1)", "STRING", [{"s": "a12b"}], ["12"]),
        ("s ->> '$.a.b'", "STRING", [{"s": '{"a":{"b":"c"}}'}, {"s": "{}"}], ["c", None]),
        ("day + 1", "DATE", [{"day": "2026-12-31"}], [date(2027, 1, 1)]),
        ("t::DATE", "DATE", [{"t": "2026-11-21T23:59:59.9-01:00"}], [date(2026, 11, 22)]),
        ("kafka_topic || kafka_partition || kafka_offset", "STRING", [{}, {}], ["some-topic3100", "some-topic3101"]),
        ("decode(kafka_key)", "STRING", [{}], ["key"]),
        ("kafka_timestamp", "TIMESTAMP", [{}], [START]),
        ("b", "BINARY", [{"b": "AP8="}], [b"\0\xff"]),
        ("{'n': i}", "STRUCT<n: INT>", [{"i": 1}], [{"n": 1}]),
        ("map {s: i}", "MAP<STRING, INT>", [{"s": "a", "i": 1}], [[("a", 1)]]),
    ],
)  # fmt: skip
def test_the_value_of_an_expression(
    expression: str, kind: str, values: list[dict[str, Any]], expected: list[Any]
) -> None:
    assert one(expression, kind, values) == (expected, [])


@pytest.mark.parametrize(
    ("expression", "kind", "values", "good", "dead"),
    [
        ("s::INT", "INT", [{"s": "1"}, {"s": "x"}, {}], [1, None, None], [1]),
        ("i + l", "INT", [{"i": 1, "l": 2**40}, {"i": 1, "l": 1}], [None, 2], [0]),
        ("l * l", "BIGINT", [{"l": 2}, {"l": 2**62}], [4, None], [1]),
        ("i / 0", "DOUBLE", [{"i": 1}, {}], [None, None], [0]),
        ("d * 1e300", "DOUBLE", [{"d": 1e300}, {"d": 1}], [None, 1e300], [0]),
        ("sqrt(d)", "DOUBLE", [{"d": -1}, {"d": 4}], [None, 2], [0]),
        ("strptime(s, '%Y')", "TIMESTAMP", [{"s": "no"}, {}], [None, None], [0]),
        ("'infinity'::TIMESTAMP", "TIMESTAMP", [{}], [None], [0]),
        ("t + INTERVAL 2 YEAR", "TIMESTAMP", [{"t": "9998-06-01T00:00:00Z"}], [None], [0]),
        ("day + i", "DATE", [{"day": "9999-12-31", "i": 1}], [None], [0]),
        ("day + i", "DATE", [{"day": "2026-01-01", "i": 2**31 - 1}], [None], [0]),
        ("decode(b)", "STRING", [{"b": "/w=="}, {"b": "YQ=="}], [None, "a"], [0]),
        ("json_extract_string(s, '$.a')", "STRING", [{"s": "{"}], [None], [0]),
        ("error(s)", "STRING", [{"s": "x"}], [None], [0]),
    ],
)  # fmt: skip
def test_an_expression_that_fails_is_a_dead_letter_and_others_are_rows(
    expression: str, kind: str, values: list[dict[str, Any]], good: list[Any], dead: list[int]
) -> None:
    if expression.startswith("error"):
        with pytest.raises(ValueError):
            one(expression, kind, values)
        return
    assert one(expression, kind, values) == (good, dead)


@pytest.mark.parametrize("sql", ["s::JSON ->> '$.a'", "unhex(s)::VARCHAR", "s::BIT::VARCHAR"])
@pytest.mark.parametrize("character", ["é", "語", "😀"])
def test_an_error_whose_text_duckdb_cuts_within_a_character(sql: str, character: str) -> None:
    sent = [{"s": f"{'x' * n}{character * 200}"} for n in range(4)]
    assert one(sql, "STRING", [*sent, {}]) == ([None] * 5, [0, 1, 2, 3])
    assert [one(sql, "STRING", [value])[1] for value in sent] == [[0]] * 4


def test_a_struct_has_its_own_fields_whatever_its_name() -> None:
    """The hazard: `records.n` read the record's own `n`, not the struct's."""
    fields = parse_columns("records STRUCT<n: INT>, n INT")
    selected = parse_select([{"x": {"sql": "records.n - n", "type": "INT"}}], fields)
    batch, n = batch_of([{}]), pa.array([1], pa.int32())
    read = {"records": pa.StructArray.from_arrays([pa.array([5], pa.int32())], ["n"]), "n": n}
    columns, bad = Selection(selected, "t", None).columns(batch, batch.column("timestamp"), read)
    assert (columns["x"].to_pylist(), bad) == ([4], {})


def test_a_dead_letter_names_the_column_its_expression_and_the_fields() -> None:
    select = ["id", {"n": {"sql": "s::INT + i", "type": "INT"}}]
    [(code, text)] = decoded(stream_of(select), [{"s": "12,50", "i": 1}]).errors.values()
    assert code == "select_failed"
    stated = '{"sql": "s::INT + i", "type": "INT"}'
    assert text == f"n: expected a INT of {stated}, found s = 12,50, i = 1"


FAR = [
    {}, {"t": "2026-11-21T00:00:00Z", "d": 1, "day": "2026-11-21"}, {"t": "9999-12-31T23:30:00Z"},
    {"t": "0001-01-01T00:30:00Z"}, {"d": 1e308}, {"day": "9999-12-31"}, {"day": "0001-01-01"},
]  # fmt: skip


@pytest.mark.parametrize(
    ("expression", "kind", "dead"),
    [
        ("[NULL, t + INTERVAL 1 HOUR]", "ARRAY<TIMESTAMP>", [2]),
        ("[t - INTERVAL 1 HOUR]", "ARRAY<TIMESTAMP>", [3]),
        ("{'a': [{'t': t + INTERVAL 1 HOUR}]}", "STRUCT<a: ARRAY<STRUCT<t: TIMESTAMP>>>", [2]),
        ("map {id: t + INTERVAL 1 HOUR}", "MAP<STRING, TIMESTAMP>", [2]),
        ("map {coalesce(t, kafka_timestamp) - INTERVAL 1 HOUR: 1}", "MAP<TIMESTAMP, INT>", [3]),
        ("[d, d * 10]", "ARRAY<DOUBLE>", [4]),
        ("[(d * 1e31)::FLOAT]", "ARRAY<FLOAT>", [4]),
        ("[day + 1]", "ARRAY<DATE>", [5]),
        ("CASE WHEN day IS NULL THEN [] ELSE [[day - 1], []] END", "ARRAY<ARRAY<DATE>>", [6]),
    ],
)
def test_an_unreadable_nested_value_is_dead(expression: str, kind: str, dead: list[int]) -> None:
    read, bad = one(expression, kind, FAR)
    assert bad == dead
    assert [i for i, value in enumerate(read) if value is None] == dead


@pytest.mark.parametrize("field", [b'"m":"\xff"', b'"ms":["\xff"]', b'"m":"\\ud800","ms":["\xff"]'])
def test_fields_that_are_no_text_beside_an_expression_that_fails(field: bytes) -> None:
    sent = [b'{"id":"a","s":"x",%s}' % field, b'{"id":"b","s":"1","m":2,"ms":[]}']
    failing = {"sql": "s::INT + m::INT + len(ms)::INT", "type": "INT"}
    found = decoder(stream_of([{"x": failing}])).decode(batch_of_bytes(sent))
    assert codes(found) == {0: "invalid_utf8"}
    assert found.good["x"].to_pylist() == [3]


def test_an_earlier_error_of_the_record_stays() -> None:
    found = decoded(stream_of([{"n": {"sql": "s::INT", "type": "INT"}}]), [{"s": "x", "i": "no"}])
    assert [code for code, _ in found.errors.values()] == ["wrong_type"]


def test_a_record_that_try_does_not_catch_is_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    query = Selection._query

    def out_of_memory(self: Selection, records: pa.Table, sql: list[str]) -> list[pa.Array] | None:
        return None if 7 in records.column("i").to_pylist() else query(self, records, sql)

    monkeypatch.setattr(Selection, "_query", out_of_memory)
    values = [{"i": i} for i in (1, 7, 2, 3, 7)]
    assert one("i + 1", "INT", values) == ([2, None, 3, 4, None], [1, 4])


def test_masked_columns_and_those_of_kafka() -> None:
    texts = {"mail": "s", "number": "i", "low": "lower(s)"}
    hashes = texts | {"flag": "f", "date": "day", "bytes": "b"}
    stream = stream_of(
        [
            "id", {"name": "s"}, *({name: {"hash": of}} for name, of in hashes.items()),
            {"start": {"truncate": "s", "to": 2}}, {"hour": {"truncate": "t", "to": "hour"}},
            {"key": {"kafka": "key"}}, {"text": {"kafka": "key", "type": "STRING"}},
            {"topic": {"kafka": "topic"}}, {"headers": {"kafka": "headers"}},
            {"trace": {"header": "trace-id"}}, {"no": {"header": "none"}},
        ]
    )  # fmt: skip
    given: list[dict[str, Any]] = [
        {"s": "Ann@Example.org", "i": 7, "t": "2026-11-21T03:59:59.9Z", "f": True},
        {"s": "é😀x", "i": -1, "day": "2026-11-21", "b": "AP8="}, {}, {"s": ""},
    ]  # fmt: skip

    def hashed(text: bytes | str | None) -> str | None:
        data = text.encode() if isinstance(text, str) else text
        return hmac.new(SECRET, data, hashlib.sha256).hexdigest() if data is not None else None

    rows = decoded(stream, given).good.to_pylist()
    for row, value in zip(rows, given, strict=True):
        text, number = value.get("s"), value.get("i")
        assert row["name"] == text and row["start"] == (text[:2] if text is not None else None)
        assert row["mail"] == hashed(text)
        assert row["number"] == hashed(None if number is None else str(number))
        assert row["low"] == hashed(text.lower() if text is not None else None)
        assert row["topic"] == "some-topic"
    assert [row["flag"] for row in rows] == [hashed("true"), None, None, None]
    assert (rows[1]["date"], rows[1]["bytes"]) == (hashed("2026-11-21"), hashed(b"\0\xff"))
    assert [row["hour"] for row in rows] == [START, None, None, None]
    of_record = [*((name.decode(), value) for name, value in _SENT), ("none", None)]
    headers = [{"key": name, "value": value} for name, value in of_record]
    assert [row["headers"] for row in rows[:2]] == [None, headers]
    assert [(r["trace"], r["no"]) for r in rows[:2]] == [(None, None), ("neu é", None)]


def test_keys_and_headers_that_are_no_text_are_dead_letters() -> None:
    # A number's bytes are text or not by chance: as null they would be lost.
    key, number = {"kafka": "key"}, b"\0\0\0\xff"
    text = stream_of(["id", {"bytes": key}, {"text": key | {"type": "STRING"}}])
    header = stream_of(["id", {"bad": {"header": "bad"}}])
    letter = ("invalid_utf8", "text: expected UTF-8, found bytes that are not")
    assert dict(decoded(text, [{}], key=number).errors) == {0: letter}
    assert decoded(text, [{}], key=None).good.column("text").to_pylist() == [None]
    found = decoded(header, [{}, {}])
    assert found.good.column("bad").to_pylist() == [None]
    assert found.errors[1] == ("invalid_utf8", letter[1].replace("text", "bad"))


def test_headers_in_expressions() -> None:
    names = ("none", "bad")
    texts = [{n: {"sql": f"decode(Kafka_Headers['{n}'])", "type": "STRING"}} for n in names]
    found = decoded(stream_of(["id", *texts]), [{}, {}])
    assert found.errors.keys() == {1} and found.errors[1][1].startswith("bad: expected a STRING of")
    trace = {"sql": "decode(kafka_headers['trace-id'])", "type": "STRING"}
    found = decoded(stream_of(["id", {"trace": trace}]), [{}, {}])
    assert found.good.column("trace").to_pylist() == [None, "neu é"]


def test_headers_without_a_value_and_none_at_all() -> None:
    texts = pa.array([None, b"[]", b'[{"key":"61","value":null}]'], pa.binary())
    assert headers_of(texts).to_pylist() == [None, [], [{"key": "a", "value": None}]]


def test_the_event_time_may_be_computed() -> None:
    at = {"sql": "strptime(s, '%d/%b/%Y %z')", "type": "TIMESTAMP"}
    stream = stream_of(["id", {"at": at}], event_time=EventTime(column="at", past="1 day"))
    found = decoded(stream, [{"s": "21/Nov/2026 +0000"}, {"s": "21/Nov/2025 +0000"}, {}])
    assert found.rows.column("event_date").to_pylist()[0] == date(2026, 11, 21)
    assert codes(found) == {1: "event_time_out_of_bounds"}


def test_a_hash_needs_its_secret_which_is_in_no_text() -> None:
    stream = stream_of([{"mail": {"hash": "s"}}])
    with pytest.raises(ConfigurationError, match=r"expected masking\.secret"):
        decode_spec(stream)
    assert SECRET.decode() not in repr(decode_spec(stream, secret=SECRET))


@cache
def computing() -> Decoder:
    computed = {
        "n": ("i + l", "INT"), "c": ("s::INT", "INT"), "e": ("s::INT + i", "BIGINT"),
        "t": ("list_sort(tags)", "ARRAY<STRING>"),
    }  # fmt: skip
    select = [{name: {"sql": sql, "type": kind}} for name, (sql, kind) in computed.items()]
    return decoder(stream_of(select))


@settings(max_examples=60)
@given(
    st.lists(
        st.fixed_dictionaries(
            {"i": st.integers(-(2**31), 2**31 - 1), "l": st.integers(-(2**63), 2**63 - 1)},
            optional={"s": st.text(max_size=20), "tags": st.lists(st.text(max_size=3), max_size=4)},
        ),
        min_size=1,
        max_size=40,
    )
)
def test_each_record_has_the_value_that_it_has_alone(values: list[dict[str, Any]]) -> None:
    """A verdict does not depend on the other records of the batch."""
    together = computing().decode(batch_of(values))
    for i, value in enumerate(values):
        alone = computing().decode(batch_of([value]))
        assert together.errors.get(i) == alone.errors.get(0)
        for name in ("n", "c", "e", "t"):
            assert together.rows.column(name)[i] == alone.rows.column(name)[0]
        total = value["i"] + value["l"]
        fits = -(2**31) <= total < 2**31
        assert together.rows.column("n")[i].as_py() == (total if fits else None)


def test_the_access_log_of_the_docs() -> None:
    page = Path(__file__).parents[3] / "docs/how-to/select-columns.md"
    [text] = re.findall(r"```yaml\n(format: raw\n.*?)```", page.read_text(), re.DOTALL)
    values = yaml.safe_load(text)
    fields = parse_columns(values["schema"])
    selected = parse_select(values["select"], fields)
    columns = {"select": selected, "fields": fields, "columns": tuple(s.column for s in selected)}
    named = {"name": "logs", "topic": "logs", "table": "web.logs"}
    stream = Stream.model_validate(named | values | columns)
    line = b'127.0.0.1 - frank [21/Nov/2026:03:55:36 +0000] "GET /a_b.gif HTTP/1.0" 200 2326'
    found = Decoder(decode_spec(stream)).decode(batch_of_bytes([line, b"no log"]))
    [row] = found.good.select(["ip", "ts", "status", "event_date"]).to_pylist()
    at = datetime(2026, 11, 21, 3, 55, 36, tzinfo=UTC)
    assert row == {"ip": "127.0.0.1", "ts": at, "status": 200, "event_date": date(2026, 11, 21)}
    assert found.errors[1][0] == "select_failed" and found.errors[1][1].startswith("ts: ")
