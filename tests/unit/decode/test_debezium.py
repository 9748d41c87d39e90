"""Debezium's changes, in JSON and Avro: the row, of a delete the one before, and other fields."""

import json
from collections.abc import Sequence
from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest
from cases import as_sent, codes
from format_cases import of, record
from kafka_batches import new_batch
from wire import wired, written

from anabranch.config.schema import parse_schema
from anabranch.config.stream import Stream
from anabranch.decode import Decoded, Decoder, WriterSchema, avro, decode_spec

SCHEMA = {
    "id": "BIGINT NOT NULL",
    "total": {"type": "DECIMAL(10,2)", "decimal": "base64"},
    "made": {"type": "TIMESTAMP", "from": "row.made-at", "unit": "micros"},
    "day": {"type": "DATE", "unit": "days"},
    "op": {"type": "STRING", "from": "op"},
    "lsn": {"type": "BIGINT", "from": "source.lsn"},
    "at": {"type": "TIMESTAMP", "from": "source.ts_ms", "unit": "millis"},
}
MADE, AT = datetime(2026, 11, 28, 10, 0, 0, 1, UTC), datetime(2026, 11, 28, 10, 0, 0, 1_000, UTC)
ROW = {"id": 5, "total": "AeJA", "made-at": 1795860000000001, "day": 20785}
READ = {"id": 5, "total": Decimal("1234.56"), "made": MADE, "day": date(2026, 11, 28)}
SOURCE = {"version": "3.6.3.Final", "table": "orders", "lsn": 42, "ts_ms": 1795860000001}
OF_SOURCE = {"lsn": 42, "at": AT}


def stream(form: str, schema: dict[str, Any] = SCHEMA, **more: Any) -> Stream:
    file = {"name": "s", "topic": "s", "table": "a.b", "key": ["id"], "schema": "", **more}
    columns = {"columns": parse_schema(schema), "format": {"type": form, "envelope": "debezium"}}
    return Stream.model_validate({**file, **columns})


def change(op: str, before: object, after: object, source: object = SOURCE) -> dict[str, Any]:
    return {"before": before, "after": after, "source": source, "op": op, "ts_ms": 1}


CREATED = change("c", None, ROW)
OF_CREATED = {**READ, "op": "c", **OF_SOURCE}


def decoded(
    values: Sequence[object], keys: Sequence[bytes | None] = (), of: Stream | None = None
) -> Decoded:
    key = pa.array([*keys, *[None] * (len(values) - len(keys))], pa.binary())
    batch = new_batch([*map(as_sent, values)]).append_column("key", key)
    return Decoder(decode_spec(of or stream("json"), lists_unknown=True)).decode(batch)


def rows(result: Decoded) -> list[dict[str, Any]]:
    return result.rows.select(list(SCHEMA)).to_pylist()


@pytest.mark.parametrize("has_schema", [False, True])
def test_changes(has_schema: bool) -> None:
    sent = [CREATED, change("u", {**ROW, "id": 4}, ROW), change("d", ROW, None)]
    sent.append({"op": "r", "after": ROW})
    values = [{"schema": {"type": "struct"}, "payload": one} if has_schema else one for one in sent]
    result = decoded(values)
    assert not result.errors and not result.unknown
    of_read = {**READ, "op": "r", "lsn": None, "at": None}
    assert rows(result) == [*({**READ, "op": op, **OF_SOURCE} for op in "cud"), of_read]


@pytest.mark.parametrize(
    ("name", "of", "words"),
    [
        ("total", {"name": "org.apache.kafka.connect.data.Decimal", "parameters": {"scale": "4"}},
         "total: expected decimal(10,2) in Base64, found a decimal with 4 digits after the point"),
        ("made-at", {"name": "io.debezium.time.Timestamp"},
         "made: expected timestamp in micros since 1970, found io.debezium.time.Timestamp"),
        ("day", {"name": "io.debezium.time.MicroTimestamp"}, "day: expected date in days since 1970"),
        ("total", {"name": "org.apache.kafka.connect.data.Decimal", "parameters": {"scale": "2"}}, ""),
        ("day", {"name": "io.debezium.time.Date"}, ""),
        ("id", {"name": "io.debezium.time.Timestamp"}, ""),
        ("made-at", {"name": 5}, ""),
    ],
)  # fmt: skip
def test_values_that_a_schema_writes_otherwise(name: str, of: dict[str, Any], words: str) -> None:
    """The hazard: another precision in the database, whose values would be other ones."""
    fields = [{"field": "id"}, {"type": "int64", **of, "field": name}]
    schema = {"fields": [{"field": part, "fields": fields} for part in ("before", "after")]}
    result = decoded([{"schema": schema, "payload": CREATED}] * 2)
    assert codes(result) == (dict.fromkeys(range(2), "incompatible_schema") if words else {})
    assert all(text.startswith(words) for _, text in result.errors.values())


def test_each_value_is_judged_by_the_schema_beside_it() -> None:
    def beside(**of: Any) -> dict[str, Any]:
        total = {"field": "total", "parameters": {"scale": of["scale"]}}
        fields = [{"field": "made-at", "name": f"io.debezium.time.{of['made']}"}, total]
        return {"schema": {"fields": [{"field": "after", "fields": fields}]}, "payload": CREATED}

    right, wrong = (beside(made=made, scale="12") for made in ("MicroTimestamp", "Timestamp"))
    of_none, empty = {**wrong, "schema": None}, {**right, "payload": {"op": "c", "after": {}}}
    other = beside(made="MicroTimestamp", scale="2")
    sent = [right, wrong, CREATED, wrong, right, None, wrong, of_none, other, empty]
    # Columns of the change before those of the row.
    columns: dict[str, Any] = dict(reversed(SCHEMA.items()))
    columns["total"] = {"type": "DECIMAL(20,12)", "decimal": "base64"}
    result = decoded(sent, [b'{"id":7}'] * len(sent), stream("json", columns))
    wanted = dict.fromkeys((1, 3, 6, 8), "incompatible_schema")
    assert codes(result) == wanted | {9: "missing_required"}


def test_fields_of_the_row_are_counted_and_kept() -> None:
    sent = [change("c", None, {**ROW, "new": 1}), CREATED]
    assert decoded(sent, of=stream("json", unknown="count")).unknown == {0: ["new"]}


def test_a_tombstone_is_a_row_of_its_key() -> None:
    keys = [
        b'{"id":7}', b'{"schema":{"type":"struct"},"payload":{"id":7}}', b"7", b"\xff", None,
        b'{"id":"x"}', b'{"other":7}',
    ]  # fmt: skip
    result = decoded([None] * len(keys), keys)
    nothing = dict.fromkeys(SCHEMA)
    assert rows(result) == [nothing | {"id": 7}] * 2 + [nothing] * 5
    assert codes(result) == dict.fromkeys((2, 3, 4, 6), "missing_required") | {5: "wrong_type"}


@pytest.mark.parametrize(
    ("value", "code", "words"),
    [
        (ROW, "not_a_change", "expected Debezium's change, with op, found {"),
        ({"schema": None, "payload": ROW}, "not_a_change", "with op, found {"),
        ({"payload": 5}, "not_an_object", "found 5"),
        (b"{", "malformed_json", "not JSON"),
        (b"[]", "not_an_object", "found []"),
        (b'{"op":"c","after":{"x":"\xff"}}', "invalid_utf8", ""),
        (b'{"op":"c","after":5}', "not_an_object", "found 5"),
        (change("c", None, {**ROW, "day": "x"}), "unreadable_timestamp", "day: expected date in days"),
        (change("c", None, ROW, {"lsn": "x"}), "wrong_type", "lsn: expected bigint, found x"),
        (change("c", None, {**ROW, "id": None}), "missing_required", "id"),
        (change("t", None, None), "missing_required", "id"),
        (change("c", None, {**ROW, "day": "x"}, {"lsn": "x"}), "unreadable_timestamp", "day"),
    ],
)  # fmt: skip
def test_other_values(value: object, code: str, words: str) -> None:
    result = decoded([CREATED, value, CREATED])
    assert rows(result)[::2] == [OF_CREATED] * 2
    assert [(i, found) for i, (found, _) in result.errors.items()] == [(1, code)]
    assert words in result.errors[1][1]


@pytest.mark.parametrize("levels", [150, 990, 5_000])
def test_more_levels_than_python_reads_are_a_dead_letter(levels: int) -> None:
    deep = b"[" * levels + b"]" * levels
    key = b'{"id":%s}' % deep
    wrong = [
        b'{"op":"c","after":%s}' % deep, b'{"op":"c","source":%s}' % deep,
        b'{"payload":{"op":"d","before":{"x":%s}}}' % deep, b'{"op":"d"}', None,
    ]  # fmt: skip
    result = decoded([*wrong, CREATED], [None, None, None, key, key])
    assert codes(result) == dict.fromkeys(range(5), "too_deep")
    assert rows(result)[5] == OF_CREATED


def test_a_byte_order_mark_is_ignored() -> None:
    assert rows(decoded([b"\xef\xbb\xbf" + json.dumps(CREATED).encode()])) == [OF_CREATED]


def test_a_change_without_a_row_is_one_of_nulls() -> None:
    schema = {**SCHEMA, "id": "BIGINT"}
    result = decoded([change("t", None, None), change("m", None, None)], of=stream("json", schema))
    nothing = dict.fromkeys(READ)
    assert rows(result) == [{**nothing, "op": op, **OF_SOURCE} for op in "tm"]
    assert not result.errors


def test_a_partial_update_has_the_fields_of_its_key() -> None:
    # MongoDB's without the whole document.
    result = decoded([change("u", None, None)], [b'{"id":7}'])
    nothing = dict.fromkeys(READ)
    assert rows(result) == [{**nothing, "id": 7, "op": "u", **OF_SOURCE}]


VALUE = record(
    ("id", "long"), ("total", ["null", of("decimal", "bytes", precision=10, scale=2)]),
    ("made-at", "long"), ("day", of("date", "int")), name="Value",
)  # fmt: skip
ENVELOPE = record(
    ("before", ["null", VALUE]), ("after", ["null", "shop.Value"]), ("op", "string"),
    ("source", record(("lsn", ["null", "long"]), ("ts_ms", "long"), name="Source")),
    name="Envelope",
)  # fmt: skip


def test_changes_in_avro() -> None:
    of_avro = stream("avro", {**SCHEMA, "total": "DECIMAL(10,2)", "day": "DATE"})
    text = json.dumps(ENVELOPE)
    avro.plan(text, of_avro.read_columns)
    row = {**ROW, "total": (123456).to_bytes(3, "big")}
    source, before = {"lsn": 42, "ts_ms": SOURCE["ts_ms"]}, {**row, "id": 4}
    rest = (("u", before, {**row, "total": None}), ("t", None, None))
    sent = (("c", None, row), ("u", before, row), ("d", row, None), *rest)
    values = [wired(7, written(ENVELOPE, change(*one, source=source))) for one in sent]
    spec = decode_spec(of_avro, {7: WriterSchema(text)})
    result = Decoder(spec).decode(new_batch([*values, None]))
    assert rows(result)[:4] == [
        *({**READ, "op": op, **OF_SOURCE} for op in "cud"),
        {**READ, "total": None, "op": "u", **OF_SOURCE},
    ]
    assert codes(result) == {4: "missing_required", 5: "null_value"}


def test_other_records_of_avro_are_no_changes() -> None:
    found = "expected a change of Debezium with op, and before"
    with pytest.raises(avro.Incompatible, match=found):
        avro.plan(json.dumps(VALUE), stream("avro").read_columns)
