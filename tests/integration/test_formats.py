"""Formats through real services and both layers: each record a row or a dead letter, twice."""

import uuid
from collections.abc import Mapping
from datetime import datetime, timedelta
from decimal import Decimal
from typing import Any

import hostile
import pytest
from commands import call
from format_cases import (
    CSV_DDL,
    DDL,
    EPOCH,
    EVENT_TIME,
    RAW_DDL,
    V1,
    V2,
    Case,
    avro_cases,
    csv_cases,
    json_schema_cases,
    record,
)
from registry import SchemaRegistry
from wire import wired
from world import Make, World, past_hour

from anabranch.offsets.hours import start_of

ANY_SHARE = {"max_dead": "100 %"}


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
        draft = "http://json-schema.org/draft-07/schema#"
        schema = {"$schema": draft, "type": "object", "title": self.subject}
        self.json = registry.register(f"{self.subject}-json", schema, "JSON")
        self.foreign = registry.register(
            f"{self.subject}-other", record(("event_id", "string"), name=self.subject[:13])
        )


def through_both_layers(one: World, cases: Mapping[str, Case], start: datetime) -> None:
    """Each case is in one of the two tables, with its verdict, and alike by either layer."""
    one.topic(1, **{"max.message.bytes": "4000000"})
    if one.job.stream.lacks_columns:
        call(one, "apply", one.name)
        one.reopen()
    sent = one.send(
        [(0, start + timedelta(seconds=i), value) for i, (value, _, _) in enumerate(cases.values())]
    )
    one.apply()
    expected = {r.offset: code for r, (_, code, _) in zip(sent, cases.values(), strict=True)}
    names = {r.offset: name for r, name in zip(sent, cases, strict=True)}

    def rows_and_verdicts() -> tuple[dict[int, dict[str, Any]], dict[int, str | None]]:
        rows = {r["kafka_offset"]: r for r in one.rows()}
        dead = {d["kafka_offset"]: d["error_code"] for d in one.dead()}
        assert len(rows) == len(one.rows()) and len(dead) == len(one.dead())
        assert not rows.keys() & dead.keys()
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
    assert {d["layer"] for d in one.dead()} == {"batch"}
    # As text, since NaN does not equal itself.
    assert repr(by_batch) == repr(by_speed)


def test_avro_through_both_layers(world: Make, registry: SchemaRegistry) -> None:
    ids, start = Ids(registry), start_of(past_hour(1))
    form = {"type": "avro", "subject": ids.subject}
    one = world(registry.url, schema=DDL, format=form, event_time=EVENT_TIME, quality=ANY_SHARE)
    through_both_layers(one, avro_cases(ids, start), start)


MONEY = 'syntax = "proto3"; package {}; message Money {{ int64 units = 1; }}'
ORDER = (
    'syntax = "proto3"; package {0}; import "google/protobuf/timestamp.proto"; import "{0}/money.proto"; '
    "message Other {{ string x = 1; }} enum State {{ NEW = 0; PAID = 1; }} "
    "message Order {{ string event_id = 1; google.protobuf.Timestamp event_time = 2; State state = 3; "
    "Money total = 4; repeated string tags = 5; map<string, int32> counts = 6; uint64 large = 7; {1} }}"
)  # fmt: skip


def order(event_id: str, at: datetime, *more: bytes) -> bytes:
    """An Order with the indexes of its type, by hand."""
    text, seconds = event_id.encode(), int(at.timestamp())
    stamp = b"\x08" + b"".join(
        bytes([seconds >> 7 * i & 127 | (128 if i < 4 else 0)]) for i in range(5)
    )
    head = b"\x02\x02\x0a" + bytes([len(text)]) + text
    return head + b"\x12" + bytes([len(stamp)]) + stamp + b"".join(more)


def test_protobuf_of_a_subject_through_both_layers(world: Make, registry: SchemaRegistry) -> None:
    """Two versions of a file that refers to another subject; the columns are the subject's."""
    package, start = f"p{uuid.uuid4().hex[:12]}", start_of(past_hour(1))
    references = {f"{package}/money.proto": f"{package}-money"}
    registry.register(f"{package}-money", MONEY.format(package), "PROTOBUF")
    subject = f"{package}-value"
    old, new = (
        registry.register(subject, ORDER.format(package, field), "PROTOBUF", references)
        for field in ("", "optional string note = 8;")
    )
    at = start + timedelta(minutes=10)
    total, paid = b"\x22\x02\x08\x07", b"\x18\x01"
    cases: dict[str, Case] = {
        "first version": (wired(old, order("a", at, total, paid)), None, ""),
        "second version": (wired(new, order("b", at, total, b"\x42\x01x")), None, ""),
        "lists": (wired(new, order("c", at, b"\x2a\x01x\x32\x05\x0a\x01k\x10\x05")), None, ""),
        "largest": (wired(new, order("d", at, b"\x38" + b"\xff" * 9 + b"\x01")), None, ""),
        "null value": (None, "null_value", ""),
        "no indexes": (wired(old, b""), "malformed_protobuf", ""),
        "another message": (wired(old, b"\0\x0a\x01x"), "incompatible_schema", ""),
        "truncated": (wired(old, order("e", at)[:-1]), "malformed_protobuf", ""),
        "no UTF-8": (wired(old, order("e", at, b"\x2a\x01\xff")), "invalid_utf8", ""),
        "unknown state": (wired(old, order("e", at, b"\x18\x07")), "wrong_type", ""),
        "unknown id": (wired(2**31 - 1, order("e", at)), "unknown_schema", ""),
        "long ago": (wired(old, order("e", EPOCH)), "event_time_out_of_bounds", ""),
    }
    form = {"type": "protobuf", "subject": subject, "message": f"{package}.Order"}
    one = world(
        registry.url, schema="registry", format=form, event_time=EVENT_TIME, quality=ANY_SHARE
    )
    through_both_layers(one, cases, start)
    rows = {row["event_id"]: row for row in one.rows()}
    assert rows["a"]["total"] == {"units": 7} and rows["a"]["state"] == "PAID"
    assert (rows["b"]["note"], rows["a"]["note"], rows["b"]["event_time"]) == ("x", None, at)
    assert rows["c"]["tags"] == ["x"] and dict(rows["c"]["counts"]) == {"k": 5}
    assert rows["d"]["large"] == 2**64 - 1


@pytest.mark.full
def test_json_through_both_layers(world: Make) -> None:
    start = start_of(past_hour(1))
    one = world(schema=hostile.DDL, key="id", event_time=hostile.EVENT_TIME, quality=ANY_SHARE)
    through_both_layers(one, hostile.cases(start), start)


@pytest.mark.full
def test_json_schema_through_both_layers(world: Make, registry: SchemaRegistry) -> None:
    ids, start = Ids(registry), start_of(past_hour(1))
    form = {"type": "json_schema", "subject": f"{ids.subject}-json"}
    one = world(registry.url, schema=DDL, format=form, quality=ANY_SHARE)
    through_both_layers(one, json_schema_cases(ids, start), start)


@pytest.mark.full
def test_csv_through_both_layers(world: Make) -> None:
    start = start_of(past_hour(1))
    one = world(schema=CSV_DDL, format={"type": "csv", "delimiter": ";"}, quality=ANY_SHARE)
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


def test_a_field_elsewhere_and_a_number_are_key_and_event_time(world: Make) -> None:
    schema = {
        "event_id": {"type": "STRING NOT NULL", "from": "@id"},
        "event_time": {"type": "TIMESTAMP NOT NULL", "from": "payload.ts", "unit": "millis"},
        "total": {"type": "DECIMAL(12,2)", "from": "payload.total", "decimal": ","},
    }
    one = world(schema=schema, key=["event_id", "event_time"], quality=ANY_SHARE)
    start = start_of(past_hour(1))
    millis = int(start.timestamp() * 1000)
    form = '{"@id":"%s","payload":{"ts":%s,"total":"%s"}}'
    values = [
        form % ("a", millis, "1234,56"),
        form % ("a", f"{millis}.5", "0,01"),
        form % ("a", f'"{millis}"', "1234,56"),
        form % ("b", "null", "1,00"),
        form % ("c", millis - 31 * 86_400_000, "1,00"),
        form % ("d", f"{millis // 1000}", "1,00"),
        form % ("e", millis, "1.00"),
    ]
    one.topic(1)
    one.serve([(0, start, value.encode()) for value in values])
    micros = timedelta(microseconds=500)
    rows = [(0, start, Decimal("1234.56")), (1, start + micros, Decimal("0.01"))]

    def found() -> list[tuple[Any, ...]]:
        kept = [(r["kafka_offset"], r["event_time"], r["total"]) for r in one.rows()]
        assert {r["event_date"] for r in one.rows()} == {start.date()}
        return sorted(kept)

    assert found() == [*rows, (2, start, Decimal("1234.56"))]
    dead = {d["kafka_offset"]: d["error_code"] for d in one.dead()}
    far_off = "event_time_out_of_bounds"
    assert dead == {3: "missing_required", 4: far_off, 5: far_off, 6: "wrong_type"}
    [result] = one.batch()
    # The third has the key of the first, in another notation.
    assert (result.decision, result.reason) == ("accepted", None)
    assert found() == rows
    assert {d["kafka_offset"]: d["error_code"] for d in one.dead()} == dead


def test_changes_of_debezium_and_tombstones(world: Make) -> None:
    schema = {
        "event_id": "STRING NOT NULL",
        "total": {"type": "DECIMAL(12,2)", "decimal": "base64"},
        "op": {"type": "STRING", "from": "op"},
        "at": {"type": "TIMESTAMP", "from": "source.ts_ms", "unit": "millis"},
    }
    form = {"type": "json", "envelope": "debezium"}
    one = world(
        schema=schema, format=form, key=["event_id", "at"], event_time={"column": "at"},
        quality=ANY_SHARE,
    )  # fmt: skip
    start = start_of(past_hour(1))
    millis = int(start.timestamp() * 1000)
    row = '{"event_id":"a","total":"AeJA"}'
    source = '"source":{"ts_ms":%d}'
    changes = [
        f'{{"op":"c","before":null,"after":{row},{source % millis}}}',
        f'{{"op":"d","before":{row},"after":null,{source % (millis + 1)}}}',
        f'{{"op":"d","before":{row},"after":null,{source % (millis + 1)}}}',
        row,
    ]
    one.topic(1)
    one.send([(0, start, value.encode()) for value in changes])
    one.send([(0, start, None)], key=b'{"event_id":"a"}')
    one.serve([(0, start, None)], key=b"a")

    def found() -> list[tuple[Any, ...]]:
        return sorted(
            (r["kafka_offset"], r["event_id"], r["total"], r["op"], r["at"]) for r in one.rows()
        )

    total, next_at = Decimal("1234.56"), start + timedelta(milliseconds=1)
    rows = [
        (0, "a", total, "c", start),
        (1, "a", total, "d", next_at),
        (2, "a", total, "d", next_at),
        (4, "a", None, None, None),
    ]
    assert found() == rows
    dead = {3: "not_a_change", 5: "missing_required"}
    assert {d["kafka_offset"]: d["error_code"] for d in one.dead()} == dead
    [result] = one.batch()
    assert (result.decision, result.reason) == ("accepted", None)
    assert found() == [rows[0], rows[1], rows[3]]
    assert {d["kafka_offset"]: d["error_code"] for d in one.dead()} == dead
