"""Avro without Spark: what Avro's encoders write is read completely, and any other bytes are
left."""

from __future__ import annotations

import io
import json
import math
import random
import struct
from datetime import date, timedelta
from typing import Any

import fastavro
import numpy as np
import pyarrow as pa
import pytest
from kafka_batches import AT, COLUMNS, EPOCH, HOUR, micros, near, new_batch
from wire import varint, wired

from anabranch.config.columns import Column
from anabranch.records import fast_avro
from anabranch.records.fast_avro import MOST_UNKNOWN_IDS, AvroRows, plan_fields
from anabranch.records.fast_json import LONGEST, Read

MICROS = {"type": "long", "logicalType": "timestamp-micros"}
DATE = {"type": "int", "logicalType": "date"}
KINDS = {
    "id": "string",
    "at": ["null", MICROS],
    "level": ["int", "null"],
    "total": ["null", "long"],
    "amount": ["null", "double"],
    "ok": ["null", "boolean"],
    "day": ["null", DATE],
    "name": ["null", "string"],
}


def record(kinds: dict[str, Any], name: str = "event") -> str:
    return json.dumps(
        {
            "type": "record",
            "name": name,
            "fields": [{"name": n, "type": k} for n, k in kinds.items()],
        }
    )


EVENT = record(KINDS)


def plain(schema: Any) -> Any:
    """The schema without logical types: values as the numbers that are written."""
    if isinstance(schema, dict):
        return {key: plain(value) for key, value in schema.items() if key != "logicalType"}
    return [plain(branch) for branch in schema] if isinstance(schema, list) else schema


def encode(value: dict[str, Any], text: str = EVENT, id: int = 7) -> bytes:
    out = io.BytesIO()
    fastavro.schemaless_writer(out, fastavro.parse_schema(plain(json.loads(text))), value)
    return wired(id, out.getvalue())


def good(i: int) -> dict[str, Any]:
    return {
        "id": f"a{i}",
        "at": micros(AT) + i,
        "level": i - 3,
        "total": 10**12 * i,
        "amount": i / 7 + 1,
        "ok": i % 2 == 0,
        "day": 20_000 + i,
        "name": None if i % 3 == 0 else "é😀" * i,
    }


def rows_of(
    schemas: dict[int, str] | None = None, columns: tuple[Column, ...] = COLUMNS, **given_: Any
) -> AvroRows:
    planned = {id: plan_fields(text, columns) for id, text in (schemas or {7: EVENT}).items()}
    return AvroRows(
        columns, given_.get("event_time"), {id: of for id, of in planned.items() if of is not None}
    )


def read(values: list[bytes | None], **given_: Any) -> Read:
    return rows_of(**given_).read(new_batch(values))


def expected(value: dict[str, Any]) -> dict[str, Any]:
    at, day = value["at"], value["day"]
    return value | {
        "at": None if at is None else EPOCH + timedelta(microseconds=at),
        "day": None if day is None else date(1970, 1, 1) + timedelta(days=day),
    }


def is_left(value: bytes | None, **given_: Any) -> bool:
    """Whether a value is left, and those beside it are read."""
    result = read([encode(good(1)), value, encode(good(2))], **given_)
    assert result.rows["id"].to_pylist()[:: max(1, len(result.rows) - 1)] == ["a1", "a2"]
    return result.left.to_pylist() == [1]


def test_what_an_encoder_writes_is_read_in_order() -> None:
    values = [good(i) for i in range(200)]
    result = read([encode(value) for value in values])
    names = [column.name for column in COLUMNS]
    assert result.left.to_pylist() == []
    assert result.rows.select(names).to_pylist() == [expected(value) for value in values]
    assert result.rows["kafka_offset"].to_pylist() == list(range(100, 300))
    assert set(result.rows["ingest_hour"].to_pylist()) == {HOUR}
    assert result.rows["event_date"].to_pylist() == [AT.date()] * 200


def test_an_empty_batch_has_no_rows() -> None:
    for values in ([], [None]):
        result = read(list(values))
        assert (len(result.rows), len(result.left)) == (0, len(values))
        assert result.rows.schema == read([encode(good(1))]).rows.schema


def test_random_values_are_read_as_fastavro_reads_them() -> None:
    dice = random.Random(3)
    numbers = (0, 1, -1, 63, 64, -64, -65, 2**31 - 1, -(2**31), 2**62, -(2**63), 2**63 - 1)
    values = [
        {
            "id": "".join(dice.choices("aé\0😀\n", k=dice.randrange(300))),
            "at": dice.choice((None, micros(AT))),
            "level": dice.choice((None, *numbers[:9])),
            "total": dice.choice((None, *numbers)),
            "amount": dice.choice((None, 1.5, -1e308, 5e-324, math.inf)),
            "ok": dice.choice((None, True, False)),
            "day": dice.choice((None, 0, -719_162, 2_932_896)),
            "name": dice.choice((None, "", "x" * 200)),
        }
        for _ in range(1_000)
    ]
    result = read([encode(value) for value in values])
    assert result.left.to_pylist() == []
    assert result.rows.select([c.name for c in COLUMNS]).to_pylist() == [
        expected(value) for value in values
    ]


@pytest.mark.parametrize("seed", range(4))
def test_changed_bytes_are_read_only_if_an_encoder_would_write_them(seed: int) -> None:
    dice, schema = random.Random(seed), fastavro.parse_schema(plain(json.loads(EVENT)))
    values = []
    for i in range(2_000):
        value = bytearray(encode(good(i % 40)))
        for _ in range(dice.randrange(1, 4)):
            place = dice.randrange(5, len(value) or 6) if len(value) > 5 else 0
            match dice.randrange(3):
                case 0:
                    value[place : place + 1] = bytes(
                        [dice.choice((0, 1, 2, 3, 0x7F, 0x80, 0x81, 0xFF))]
                    )
                case 1:
                    del value[place]
                case _:
                    value.insert(place, dice.choice((0, 2, 0x80, 0xFF)))
        values.append(bytes(value))
    result = read(list(values))
    taken = [offset - 100 for offset in result.rows["kafka_offset"].to_pylist()]
    assert sorted([*taken, *result.left.to_pylist()]) == list(range(2_000))
    assert 50 < len(taken) < 1_950
    names = [column.name for column in COLUMNS]
    for place, row in zip(taken, result.rows.select(names).to_pylist(), strict=True):
        found = fastavro.schemaless_reader(io.BytesIO(values[place][5:]), schema, schema)
        assert encode(found) == values[place]
        assert row == expected(found)


def raw(*parts: bytes, kinds: dict[str, Any] | None = None) -> tuple[bytes, dict[int, str]]:
    return wired(7, b"".join(parts)), {7: record(kinds or {"id": "string", "level": "int"})}


TEXT = varint(1) + b"a"


@pytest.mark.parametrize(
    ("value", "kinds"),
    [
        (TEXT + varint(5) + b"\0", {"id": "string", "level": "int"}),
        (TEXT, {"id": "string", "level": "int"}),
        (TEXT + b"\x8a\0", {"id": "string", "level": "int"}),
        (TEXT + varint(2**31), {"id": "string", "level": "int"}),
        (TEXT + varint(2**31), {"id": "string", "other": "int"}),
        (TEXT + b"\xff" * 9 + b"\2", {"id": "string", "total": "long"}),
        (TEXT + b"\xff" * 10 + b"\1", {"id": "string", "total": "long"}),
        (TEXT + b"\xff" * 10, {"id": "string", "total": "long"}),
        (b"\2\xff", {"id": "string"}),
        (b"\2\xff", {"id": "bytes"}),
        (varint(-1) + b"a", {"id": "string"}),
        (varint(2**40) + b"a", {"id": "string"}),
        (varint(2**62) + b"a", {"id": "string"}),
        (TEXT + b"\2", {"id": "string", "ok": "boolean"}),
        (TEXT + struct.pack("<d", math.nan), {"id": "string", "amount": "double"}),
        (TEXT + struct.pack("<d", -0.0), {"id": "string", "amount": "double"}),
        (TEXT + struct.pack("<f", math.nan), {"id": "string", "amount": "float"}),
        (TEXT + b"\0" * 7, {"id": "string", "amount": "double"}),
        (TEXT + varint(2), {"id": "string", "level": ["null", "int"]}),
        (TEXT + varint(-1), {"id": "string", "level": ["null", "int"]}),
        (
            TEXT + varint(2),
            {"id": "string", "name": {"type": "enum", "name": "e", "symbols": ["A", "B"]}},
        ),
        (
            TEXT + varint(-1),
            {"id": "string", "other": {"type": "enum", "name": "e", "symbols": ["A", "B"]}},
        ),
        (TEXT + varint(2_932_897), {"id": "string", "day": DATE}),
        (TEXT + varint(253_402_300_800_000_000), {"id": "string", "at": MICROS}),
        (
            TEXT + varint(253_402_300_800_000),
            {"id": "string", "at": MICROS | {"logicalType": "timestamp-millis"}},
        ),
        (varint(0), {"id": ["null", "string"]}),
    ],
)
def test_odd_bytes_are_left(value: bytes, kinds: dict[str, Any]) -> None:
    text = record(kinds)
    schemas = {7: EVENT, 8: text}
    assert plan_fields(text, COLUMNS) is not None
    assert is_left(wired(8, value), schemas=schemas)


def test_what_is_no_wire_format_is_left() -> None:
    for value in (
        None,
        b"",
        b"\0",
        b"\0\0\0\0\7",
        encode(good(1))[:-1],
        b"\1" + encode(good(1))[1:],
        b"{}",
    ):
        assert is_left(value), value
    assert is_left(encode(good(1) | {"name": "x" * LONGEST}))
    assert not is_left(encode(good(1)))


def test_kinds_that_become_a_column() -> None:
    kinds = {
        "id": {"type": "enum", "name": "e", "symbols": ["A", "B"]},
        "total": "int",
        "amount": "float",
        "name": "bytes",
        "at": {"type": "long", "logicalType": "timestamp-nanos"},
    }
    at = 1_000 * micros(AT) + 999
    values = [
        encode(
            {"id": "B", "total": -5, "amount": 0.5, "name": "é".encode(), "at": at}, record(kinds)
        ),
        encode({"id": "A", "total": 5, "amount": 1e30, "name": b"", "at": -1}, record(kinds)),
    ]
    rows = read(list(values), schemas={7: record(kinds)}).rows
    names = ["id", "total", "amount", "name", "at", "level"]
    assert [list(row.values()) for row in rows.select(names).to_pylist()] == [
        ["B", -5, 0.5, "é", AT, None],
        ["A", 5, float(np.float32(1e30)), "", EPOCH - timedelta(microseconds=1), None],
    ]
    millis = record(
        {"id": "string", "at": MICROS | {"logicalType": "local-timestamp-millis"}, "amount": "long"}
    )
    value = encode({"id": "x", "at": -1, "amount": 2**53 + 1}, millis)
    [row] = read([value], schemas={7: millis}).rows.to_pylist()
    assert (row["at"], row["amount"]) == (EPOCH - timedelta(milliseconds=1), 2.0**53)


def test_fields_without_a_column_are_read_over() -> None:
    others = {
        "a": "null",
        "b": "boolean",
        "c": "float",
        "d": "double",
        "e": ["string", "null"],
        "f": "bytes",
        "g": {"type": "fixed", "name": "g", "size": 3},
        "h": "long",
    }
    text = record({**others, "id": "string"})
    value = {
        "a": None,
        "b": True,
        "c": 1.0,
        "d": 2.0,
        "e": None,
        "f": b"x",
        "g": b"abc",
        "h": 2**40,
        "id": "a",
    }
    [row] = read([encode(value, text)], schemas={7: text}).rows.to_pylist()
    assert row["id"] == "a"


@pytest.mark.parametrize(
    "kind",
    [
        {"type": "array", "items": "int"},
        {"type": "map", "values": "int"},
        ["null", "int", "string"],
        ["int"],
        {"type": "record", "name": "inner", "fields": [{"name": "x", "type": "int"}]},
    ],
)
def test_a_schema_with_other_kinds_is_not_read(kind: Any) -> None:
    assert plan_fields(record({"id": "string", "other": kind}), COLUMNS) is None
    assert plan_fields(record({"id": "string", "level": "long"}), COLUMNS) is None
    assert plan_fields(record({"id": "string", "at": "long"}), COLUMNS) is None
    assert plan_fields("no schema", COLUMNS) is None


def test_records_of_several_schemas_keep_their_order() -> None:
    older = record({"name": "string", "id": "string"})
    values = [
        encode(good(i)) if i % 3 else encode({"name": f"n{i}", "id": f"a{i}"}, older, id=4)
        for i in range(50)
    ]
    result = read(list(values), schemas={7: EVENT, 4: older})
    assert result.rows["id"].to_pylist() == [f"a{i}" for i in range(50)]
    assert result.rows["kafka_offset"].to_pylist() == list(range(100, 150))


def test_ids_that_are_not_known_are_reported() -> None:
    rows = rows_of()
    result = rows.read(
        new_batch([encode(good(1)), encode(good(2), id=8), b"\1\0\0\0\x09xx", b"\0\xff\0\0\0xx"])
    )
    assert (result.left.to_pylist(), rows.unknown_ids) == ([1, 2, 3], {8})
    rows.read(new_batch([encode(good(1), id=i) for i in range(100, 200)]))
    assert len(rows.unknown_ids) == MOST_UNKNOWN_IDS


def test_the_event_time_and_columns_that_are_not_null_decide() -> None:
    day = 24 * 3_600 * 1_000_000
    late = good(1) | {"at": micros(AT) - 2 * day}
    assert is_left(encode(late), event_time=near(day, None))
    assert not is_left(encode(late | {"at": None}), event_time=near(day, None))
    columns = (*COLUMNS[:2], Column("level", "int", False), *COLUMNS[3:])
    assert is_left(encode(good(1) | {"level": None}), columns=columns)
    assert is_left(
        wired(8, varint(1) + b"a"), columns=columns, schemas={7: EVENT, 8: record({"id": "string"})}
    )


def test_a_batch_is_read_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    values = [encode(good(i)) if i % 5 else encode(good(i))[:-1] for i in range(300)]
    whole = read(list(values))
    monkeypatch.setattr(fast_avro, "_AT_ONCE", 100)
    pieces = rows_of().read(new_batch(list(values)))
    assert pieces.rows.combine_chunks() == whole.rows.combine_chunks()
    assert pieces.left == whole.left
    # A slice of a batch has its values behind others.
    batch = new_batch(list(values))
    assert rows_of().read(batch.slice(7, 50)).rows["id"].to_pylist() == [
        f"a{i}" for i in range(7, 57) if i % 5
    ]


def test_a_time_without_a_calendar_is_left() -> None:
    stamps = [None, micros(AT)]
    batch = new_batch([encode(good(1)), encode(good(2))], stamps)
    assert rows_of().read(batch).left == pa.array([0])
