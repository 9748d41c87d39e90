"""Avro: all that encoders write is read, other bytes get a verdict; in batches and one by one."""

import io
import json
import math
import random
import struct
from dataclasses import replace
from datetime import date, timedelta
from decimal import Decimal
from types import SimpleNamespace
from typing import Any

import fastavro
import format_cases
import pytest
from budget import budget
from cases import changed, codes, decoded, expect, spec_of
from format_cases import of, record
from kafka_batches import AT, COLUMNS, EPOCH, START, micros
from wire import encode, plain, varint, wired, written

from anabranch.config.columns import columns_ddl
from anabranch.config.schema import parse_schema
from anabranch.decode import Decoded, DecodeSpec, UnlistedSchema, WriterSchema, avro
from anabranch.decode.avro_names import Incompatible, parse
from anabranch.decode.inputs import ID_PLACES

LIST = {"type": "array", "items": "int"}
MICROS = of("timestamp-micros")
DATE = of("date", "int")
DDL = columns_ddl(COLUMNS)
EVENT = record(
    ("id", "string"), ("at", ["null", MICROS]), ("level", ["int", "null"]),
    ("total", ["null", "long"]), ("amount", ["null", "double"]), ("ok", ["null", "boolean"]),
    ("day", ["null", DATE]), ("name", ["null", "string"]),
)  # fmt: skip
# The same, and an array, so that its values are read one by one.
ONE_BY_ONE = {**EVENT, "fields": [*EVENT["fields"], {"name": "x", "type": LIST}]}


def spec(schemas: dict[int, Any], columns: Any = DDL, **given: Any) -> DecodeSpec:
    read, known = spec_of(columns, "avro", **given), {}
    for id, schema in schemas.items():
        known[id] = schema
        if isinstance(schema, dict | list):
            try:
                known[id] = WriterSchema(json.dumps(schema))
                avro.plan(json.dumps(schema), read.columns)
            except Incompatible as why:
                known[id] = WriterSchema(error=("incompatible_schema", str(why)))
    return replace(read, schemas=known)


def encoded(value: dict[str, Any], schema: Any = EVENT, id: int = 7) -> bytes:
    return wired(id, written(schema, value))


def good(i: int) -> dict[str, Any]:
    return {
        "id": f"a{i}", "at": micros(AT) + i, "level": i - 3, "total": 10**12 * i,
        "amount": i / 7 + 1, "ok": i % 2 == 0, "day": 20_000 + i,
        "name": None if i % 3 == 0 else "é😀" * i,
    }  # fmt: skip


def expected(value: dict[str, Any]) -> dict[str, Any]:
    at, day = value["at"], value["day"]
    return {name: value[name] for name in good(0)} | {
        "at": None if at is None else EPOCH + timedelta(microseconds=at),
        "day": None if day is None else date(1970, 1, 1) + timedelta(days=day),
    }


def rows(result: Decoded) -> list[dict[str, Any]]:
    return result.rows.select([column.name for column in COLUMNS]).to_pylist()


def test_cases_of_two_versions_of_a_schema() -> None:
    ids = SimpleNamespace(v1=1, v2=2, incompatible=3, without_time=4, recursive=5, foreign=7)
    foreign, missing = (WriterSchema(error=e) for e in (format_cases.FOREIGN, format_cases.MISSING))
    schemas = {
        1: format_cases.V1, 2: format_cases.V2,
        3: record(("event_id", "int"), ("event_time", "long")), 4: record(("event_id", "string")),
        5: record(("event_id", "string"), ("next", ["null", "shop.Event"])), 7: foreign,
        **dict.fromkeys((0, 2**31 - 1, 2**32 - 2**24), missing), 0xFFFFFFFF: missing,
    }  # fmt: skip
    cases = format_cases.avro_cases(ids, START)
    result = expect(spec(schemas, format_cases.DDL, event_time=format_cases.EVENT_TIME), cases)
    read = dict(zip(cases, result.rows.to_pylist(), strict=True))
    new = read["second version"]
    assert (new["day"], new["color"], new["raw"]) == (date(2024, 10, 4), "GREEN", b"\1\xff")
    assert (new["tags"], dict(new["scores"]), new["price"]) == (["x", None], {"k": 0.5}, 5)
    # Nanoseconds round down, before 1970 too.
    assert new["nested"] == {"at": EPOCH - timedelta(microseconds=2), "n": 3, "more": None}
    assert math.isnan(read["not a number"]["amount"])
    assert str(read["largest decimal"]["price"]) == "99999999.99"


@pytest.mark.parametrize("schema", [EVENT, ONE_BY_ONE], ids=["over a batch", "one by one"])
def test_random_values_are_read_as_they_were_written(schema: Any) -> None:
    dice = random.Random(3)
    numbers = (0, 1, -1, 63, 64, -64, -65, 2**31 - 1, -(2**31), 2**62, -(2**63), 2**63 - 1)
    values = [
        {
            "id": "".join(dice.choices("aé\0😀\n", k=dice.randrange(300))),
            "at": dice.choice((None, micros(AT))),
            "level": dice.choice((None, *numbers[:9])),
            "total": dice.choice((None, *numbers)),
            "amount": dice.choice((None, 1.5, -1e308, 5e-324, math.inf, -0.0)),
            "ok": dice.choice((None, True, False)),
            "day": dice.choice((None, 0, -719_162, 2_932_896)),
            "name": dice.choice((None, "", "x" * 200)),
            "x": [1, 2],
        }
        for _ in range(500)
    ]
    result = decoded(spec({7: schema}), [encoded(value, schema) for value in values])
    assert not result.errors
    assert rows(result) == [expected(value) for value in values]


@pytest.mark.parametrize("seed", range(budget(2, 8)))
def test_changed_bytes_are_read_as_fastavro_reads_them_or_refused(seed: int) -> None:
    """fastavro takes negative indexes, and any byte as true, which no encoder writes."""
    dice, parsed = random.Random(seed), fastavro.parse_schema(plain(EVENT))
    values = [changed(encoded(good(i % 40)), dice, 5) for i in range(1_500)]
    result = decoded(spec({7: EVENT}), values)
    number = 0
    for i, (value, row) in enumerate(zip(values, rows(result), strict=True)):
        stream = io.BytesIO(value[5:])
        try:
            read = fastavro.schemaless_reader(stream, parsed, parsed)
        except Exception:
            read = None
        is_whole = read is not None and stream.tell() == len(value) - 5
        if i not in result.errors:
            number += 1
            assert is_whole, value
            assert row == expected(read) or math.isnan(row["amount"] or 0)
        elif is_whole and encoded(read) == value:
            assert result.errors[i][0] == "unreadable_timestamp", value
    assert 50 < number < 1_450


TEXT = varint(1) + b"a"


@pytest.mark.parametrize(
    ("value", "fields", "code"),
    [
        (TEXT + varint(5) + b"\0", [("level", "int")], "malformed_avro"),
        (TEXT, [("level", "int")], "malformed_avro"),
        (TEXT + b"\x8a\0", [("level", "int")], None),
        (TEXT + varint(2**31), [("level", "int")], "malformed_avro"),
        (TEXT + varint(2**31), [("other", "int")], "malformed_avro"),
        (TEXT + b"\xff" * 9 + b"\1", [("total", "long")], None),
        (TEXT + b"\xff" * 9 + b"\2", [("total", "long")], "malformed_avro"),
        (TEXT + b"\xff" * 10 + b"\1", [("total", "long")], "malformed_avro"),
        (TEXT + b"\xff" * 10, [("total", "long")], "malformed_avro"),
        (TEXT + b"\2\xff", [("name", "string")], "invalid_utf8"),
        (TEXT + b"\2\xff", [("name", "bytes")], "invalid_utf8"),
        (TEXT + b"\2\xff", [("other", "string")], None),
        (TEXT + varint(-1) + b"a", [("name", "string")], "malformed_avro"),
        (TEXT + varint(2**40) + b"a", [("name", "string")], "malformed_avro"),
        (TEXT + varint(2**62) + b"a", [("name", "string")], "malformed_avro"),
        (TEXT + b"\2", [("ok", "boolean")], "malformed_avro"),
        (TEXT + struct.pack("<d", -0.0), [("amount", "double")], None),
        (TEXT + b"\0" * 7, [("amount", "double")], "malformed_avro"),
        (TEXT + varint(2), [("level", ["null", "int"])], "malformed_avro"),
        (TEXT + varint(-1), [("level", ["null", "int"])], "malformed_avro"),
        (TEXT + varint(2), [("name", {"type": "enum", "name": "e", "symbols": ["A", "B"]})], "malformed_avro"),
        (TEXT + varint(-1), [("other", {"type": "enum", "name": "e", "symbols": ["A", "B"]})], "malformed_avro"),
        (TEXT + varint(2_932_897), [("day", DATE)], "unreadable_timestamp"),
        (TEXT + varint(253_402_300_800_000_000), [("at", MICROS)], "unreadable_timestamp"),
        (TEXT + varint(253_402_300_800_000), [("at", of("timestamp-millis"))], "unreadable_timestamp"),
        (TEXT + varint(2) + b"\2\4" + b"\0", [("x", LIST)], None),
        (TEXT + varint(-2) + varint(2) + b"\2\4" + b"\0", [("x", LIST)], None),
        (TEXT + varint(3) + b"\2\4" + b"\0", [("x", LIST)], "malformed_avro"),
        (TEXT + varint(2**40) + b"\2\4" + b"\0", [("x", LIST)], "malformed_avro"),
        (TEXT + varint(1) + b"\2k\2" + b"\0", [("x", {"type": "map", "values": "int"})], None),
    ],
)  # fmt: skip
@pytest.mark.parametrize("is_one_by_one", [False, True])
def test_odd_bytes(value: bytes, fields: Any, code: str | None, is_one_by_one: bool) -> None:
    schema = record(("id", "string"), *fields, *([("more", LIST)] if is_one_by_one else []))
    odd = wired(8, value + (b"\0" if is_one_by_one else b""))
    result = decoded(spec({7: EVENT, 8: schema}), [encoded(good(1)), odd, encoded(good(2))])
    assert result.rows["id"].to_pylist()[::2] == ["a1", "a2"]
    assert codes(result) == ({1: code} if code else {})
    if code is None:
        assert rows(result)[1]["id"] == "a"


def test_records_of_several_schemas_keep_their_order() -> None:
    older = record(("name", "string"), ("id", "string"))
    others = [encoded({"name": f"n{i}", "id": f"a{i}"}, older, id=4) for i in range(50)]
    values = [encoded(good(i)) if i % 3 else other for i, other in enumerate(others)]
    result = decoded(spec({7: EVENT, 4: older}), values)
    assert not result.errors
    assert result.rows["id"].to_pylist() == [f"a{i}" for i in range(50)]
    assert result.rows["kafka_offset"].to_pylist() == list(range(100, 150))


def test_ids_that_are_not_listed_are_reported() -> None:
    values = [encoded(good(1)), encoded(good(2), id=8), None, b"\0\0\0\0", encoded(good(3), id=9)]
    with pytest.raises(UnlistedSchema) as failure:
        decoded(spec({7: EVENT}), values)
    assert failure.value.ids == [8, 9]


@pytest.mark.parametrize(
    ("ddl", "written", "message"),
    [
        ("c INT", "long", "c: expected a type readable as int, found long"),
        ("c BIGINT", "double", "found double"),
        ("c STRING", "int", "found int"),
        ("c STRING", "null", "found null"),
        ("c BOOLEAN", "int", "found int"),
        ("c DATE", "int", "found int"),
        ("c TIMESTAMP", "long", "found long"),
        ("c TIMESTAMP", of("time-micros"), "found long (time-micros)"),
        ("c STRING", ["null", "string", "int"], "found int"),
        ("c STRING", ["null"], "found a union of null"),
        ("c STRUCT<member_int: INT, member_string: INT>", ["int", "string"], "c.member_string: expected a type readable as int"),
        ("c DECIMAL(10,2)", of("decimal", "bytes", precision=10, scale=3), "found bytes (decimal)"),
        ("c DECIMAL(10,2)", of("decimal", "bytes", precision=2, scale=3), "found bytes"),
        ("c DECIMAL(10,2)", of("decimal", "bytes", precision=9, scale=0), "found bytes (decimal)"),
        ("c DECIMAL(38,2)", of("decimal", "bytes", precision=64, scale=3), "found bytes (decimal)"),
        ("c DECIMAL(10,2)", "double", "found double"),
        ("c BINARY", of("decimal", "bytes", precision=4, scale=0), "found bytes (decimal)"),
        ("c ARRAY<INT>", {"type": "array", "items": "string"}, "c[]: expected a type readable as int"),
        ("c ARRAY<INT>", {"type": "map", "values": "int"}, "c: expected a type readable as array<int>, found map"),
        ("c MAP<INT, INT>", {"type": "map", "values": "int"}, "c: expected a type readable as map<int,int>, found map"),
        ("c MAP<STRING, DATE>", {"type": "map", "values": "int"}, "c{}: expected a type readable as date"),
        ("c STRUCT<n: INT>", record(("n", "long"), name="In"), "c.n: expected a type readable as int"),
        ("c STRUCT<n: INT>", record(("m", "long"), name="In"), "c: expected a field of n, found none"),
        ("c STRUCT<n: INT>", [record(("n", "int"), name="A"), record(("m", "int"), name="B")], "c: expected a field of n"),
        ("c STRING, d STRING NOT NULL", "string", "d: expected a field for the NOT NULL column, found none"),
        ("d STRING", "string", "expected a field of d, found none"),
    ],
)  # fmt: skip
def test_types_that_cannot_become_columns(ddl: str, written: Any, message: str) -> None:
    error = spec({1: record(("c", written))}, ddl).schemas[1].error
    assert error is not None and error[0] == "incompatible_schema"
    assert message in error[1]


def test_a_decimal_of_more_digits_than_a_column_is_read_if_its_value_fits() -> None:
    """Kafka Connect writes decimal(64,s), whatever the source's column has."""
    schema = record(("c", of("decimal", "bytes", precision=64, scale=2)))
    values = [0, 119, -(10**38) + 1, 10**38, -(10**60)]
    texts = [n.to_bytes(32, "big", signed=True).decode("latin-1") for n in values]
    payloads = [wired(7, encode(schema, {"c": text})) for text in texts]
    result = decoded(spec({7: schema}, "c DECIMAL(38,2)"), list(payloads))
    assert codes(result) == {3: "wrong_type", 4: "wrong_type"}
    assert "c: expected decimal(38,2), found 1" in result.errors[3][1]
    shown = [str(n) for n in result.rows["c"].to_pylist()]
    assert shown == ["0.00", "1.19", "-" + "9" * 36 + ".99", "None", "None"]


@pytest.mark.parametrize("size", [32, 33, 100, 1_000_000])
def test_a_decimal_of_many_bytes_is_refused_without_its_digits(size: int) -> None:
    """The hazard: a record of a megabyte that takes a minute, and then fails the worker."""
    schema = record(("c", of("decimal", "bytes", precision=64, scale=2)))
    texts = (varint(size) + first + b"\0" * (size - 2) + b"w" for first in (b"\0", b"\x7f"))
    values = [wired(7, text) for text in texts]
    result = decoded(spec({7: schema}, "c DECIMAL(38,2)"), list(values))
    assert str(result.rows["c"][0]) == "1.19"
    assert codes(result) == {1: "wrong_type"}


UNIONS: list[tuple[Any, str, list[tuple[Any, Any]]]] = [
    (["null", "string", "long"], "c STRUCT<member_string: STRING, member_long: BIGINT>",
     [({"string": "x"}, {"member_string": "x", "member_long": None}), ({"long": 7}, {"member_string": None, "member_long": 7}), (None, None)]),
    (["null", record(("n", "int"), name="A"), record(("m", "string"), name="B")],
     "c STRUCT<member_A: STRUCT<n: INT>, member_B: STRUCT<m: STRING>>",
     [({"shop.A": {"n": 1}}, {"member_A": {"n": 1}, "member_B": None}),
      ({"shop.B": {"m": "x"}}, {"member_A": None, "member_B": {"m": "x"}})]),
    ([record(("n", "int"), name="A"), record(("n", "long"), ("m", "int"), name="B")], "c STRUCT<n: BIGINT>",
     [({"shop.A": {"n": 1}}, {"n": 1}), ({"shop.B": {"n": 2, "m": 3}}, {"n": 2})]),
    (["string", {"type": "enum", "name": "e", "symbols": ["A"]}], "c STRING", [({"string": "x"}, "x"), ({"shop.e": "A"}, "A")]),
    ({"type": "array", "items": ["null", "string", "long"]}, "c ARRAY<STRUCT<member_string: STRING, member_long: BIGINT>>",
     [([{"long": 7}, None, {"string": ""}], [{"member_string": None, "member_long": 7}, None, {"member_string": "", "member_long": None}])]),
]  # fmt: skip


@pytest.mark.parametrize(("written", "ddl", "values"), UNIONS)
def test_a_value_of_a_union_is_read(written: Any, ddl: str, values: list[tuple[Any, Any]]) -> None:
    schema = record(("c", written))
    payloads = [wired(7, encode(schema, {"c": value})) for value, _ in values]
    result = decoded(spec({7: schema}, ddl), payloads)
    assert not result.errors
    assert result.rows["c"].to_pylist() == [read for _, read in values]


def test_a_union_of_records_has_a_column_of_each() -> None:
    of_a, of_b = record(("n", "int"), name="A"), record(("m", "string"), name="B")
    union = ["null", of_a, of_b, "string"]
    turned = [of_b, record(("k", "int"), name="C"), of_a]
    sent = [{"shop.A": {"n": 1}}, {"shop.B": {"m": "x"}}, {"string": "y"}, None]
    payloads = [wired(7, encode(union, value)) for value in sent]
    ddl = "A STRUCT<n: INT>, B STRUCT<m: STRING>"
    nothing = dict.fromkeys(("A", "B", "string"))
    result = decoded(spec({7: union}, f"{ddl}, string STRING"), payloads)
    assert not result.errors
    assert result.rows.select([*nothing]).to_pylist() == [
        nothing | {"A": {"n": 1}}, nothing | {"B": {"m": "x"}}, nothing | {"string": "y"}, nothing,
    ]  # fmt: skip
    # The order of another version is another one. A row without its value would be one of nulls.
    payloads += [wired(8, encode(turned, one)) for one in (sent[0], sent[1], {"shop.C": {"k": 1}})]
    result = decoded(spec({7: union, 8: turned}, ddl), payloads)
    assert result.rows["A"].to_pylist()[3:] == [None, {"n": 1}, None, None]
    why = "A: expected struct<n:int>, found a value of type"
    assert result.errors == {2: ("wrong_type", f"{why} string"), 6: ("wrong_type", f"{why} C")}
    of_other = [of_a, {**of_a, "namespace": "o"}]
    ddl = "shop_A STRUCT<n: INT>, o_A STRUCT<n: INT>"
    result = decoded(spec({7: of_other}, ddl), [wired(7, b"\2\6")])
    assert result.rows["o_A"].to_pylist() == [{"n": 3}]
    # One record is the value itself.
    alone = ["null", record(("n", "int"))]
    payloads = [wired(7, b"\2\6"), wired(7, b"\0")]
    assert decoded(spec({7: alone}, "n INT"), payloads).rows["n"].to_pylist() == [3, None]


def test_times_of_two_units_in_a_union_are_read_by_their_own() -> None:
    schema = record(("c", [of("timestamp-millis"), of("timestamp-micros", name="m")]))
    payloads = [wired(7, varint(0) + varint(1_000)), wired(7, varint(1) + varint(1_000_000))]
    result = decoded(spec({7: schema}, "c TIMESTAMP"), payloads)
    assert result.rows["c"].to_pylist() == [EPOCH + timedelta(seconds=1)] * 2


def test_times_of_debezium_are_read_by_their_own_names() -> None:
    """The hazard: another precision in the database, whose numbers would be times of 1970."""
    names = [f"io.debezium.time.{name}" for name in ("Timestamp", "MicroTimestamp")]
    kinds = [{"type": "long", "connect.name": name} for name in names]
    schemas = {i: record(("c", ["null", kind])) for i, kind in enumerate(kinds, 1)}
    sent = [wired(i, varint(1) + varint(1_000_000)) for i in schemas]
    result = decoded(spec(schemas, "c TIMESTAMP"), sent)
    moments = [EPOCH + timedelta(seconds=1_000), EPOCH + timedelta(seconds=1)]
    assert result.rows["c"].to_pylist() == moments
    result = decoded(spec(schemas, "c BIGINT"), sent)
    assert result.rows["c"].to_pylist() == [1_000_000] * 2
    columns = parse_schema({"c": {"type": "TIMESTAMP", "unit": "micros"}})
    found = r"in micros since 1970, found long \(timestamp-millis\)"
    with pytest.raises(Incompatible, match=found):
        avro.plan(json.dumps(schemas[1]), columns)
    avro.plan(json.dumps(schemas[2]), columns)


def test_a_value_of_a_type_without_a_member_is_no_row() -> None:
    """The hazard: a row whose value is silently null, since the union has got one more type."""
    schema = record(("c", ["null", "string", "long"]))
    payloads = [wired(7, encode(schema, {"c": one})) for one in ({"string": "x"}, {"long": 7})]
    result = decoded(spec({7: schema}, "c STRUCT<member_string: STRING>"), payloads)
    assert result.rows["c"].to_pylist()[0] == {"member_string": "x"}
    assert codes(result) == {1: "wrong_type"}
    assert "found long, the type of a member_long" in result.errors[1][1]


def test_a_member_is_the_same_in_a_version_with_more_of_them() -> None:
    of_a, of_b = record(("n", "int"), name="A"), record(("n", "int"), name="B")
    schemas = {7: record(("c", [of_a, of_b])), 8: record(("c", ["null", of_b, "string", of_a]))}
    sent = [wired(7, varint(0) + varint(5)), wired(8, varint(3) + varint(5))]
    ddl = "c STRUCT<member_A: STRUCT<n: INT>, member_B: STRUCT<n: INT>>"
    result = decoded(spec(schemas, ddl), sent)
    assert result.rows["c"].to_pylist() == [{"member_A": {"n": 5}, "member_B": None}] * 2


BARE = record(("note", ["null", "string"]), ("id", "string"), ("n", "long"))


@pytest.mark.parametrize(
    ("value", "code", "words"),
    [
        ("02027806" "6f2d310e", "not_wire_format", "__value_schema_id"),
        ("01" + "ab" * 16 + "00", "not_wire_format", "__value_schema_id"),
        ("0000000000" "02027800", "not_wire_format", "eight bytes (Apicurio)"),
        ("0000000000" "0000000f00066f", "not_wire_format", "eight bytes (Apicurio)"),
        ("00066f2d310e", "unknown_schema", "not in a header"),
    ],
)  # fmt: skip
def test_a_record_of_an_unknown_schema_has_its_reason(value: str, code: str, words: str) -> None:
    missing = WriterSchema(error=("unknown_schema", f"expected it there. {ID_PLACES}"))
    result = decoded(spec({1: BARE, 107_949_361: missing}, "id STRING"), [bytes.fromhex(value)])
    assert result.errors[0][0] == code
    assert words in result.errors[0][1]


def test_fields_without_a_column_are_read_over() -> None:
    fixed = {"type": "fixed", "name": "g", "size": 3}
    others = [("a", "null"), ("b", "boolean"), ("c", "float"), ("d", "double"), ("e", ["string", "null"]), ("f", "bytes"), ("g", fixed), ("h", "long")]  # fmt: skip
    schema = record(*others, ("id", "string"))
    value = {"a": None, "b": True, "c": 1.0, "d": 2.0, "e": None, "f": b"x", "g": b"abc", "h": 2**40, "id": "a"}  # fmt: skip
    assert decoded(spec({7: schema}), [encoded(value, schema)]).rows["id"].to_pylist() == ["a"]


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ("{", "expected an Avro schema, found one that is not"),
        ('{"type": "record", "name": "E"}', "expected an Avro schema"),
        ('{"name": "E"}', "expected an Avro schema"),
        ("5", "expected an Avro schema"),
        (json.dumps(record(("a", "Nowhere"))), "found the name shop.Nowhere without its definition"),
        (json.dumps(record(("next", ["null", "Event"]))), "expected no type that contains itself, found shop.Event"),
        (json.dumps(record(("a", {"type": "array", "items": "null"}))), "expected arrays of items that take bytes"),
        (json.dumps(record(("a", {"type": "array", "items": record(name="Z")}))), "items that take bytes"),
        ("[" * 5000, "expected an Avro schema"),
        ('{"type":' * 150 + '"int"' + "}" * 150, "expected at most 100 levels"),
    ],
)  # fmt: skip
def test_invalid_schemas_and_schemas_of_endless_work(schema: str, message: str) -> None:
    with pytest.raises(Incompatible, match=message):
        parse(schema)


def test_names_follow_their_namespace() -> None:
    inner = {"type": "record", "name": "In", "fields": [{"name": "x", "type": "int"}]}
    node = parse(json.dumps(record(("a", inner), ("b", "In"), ("c", "shop.In"))))
    assert [field.name for field in node.fields.values()] == ["shop.In"] * 3


def test_a_schema_that_doubles_at_each_level_is_refused() -> None:
    """The hazard: a payload of no bytes that is 2^50 records."""
    schema: Any = "null"
    for level in range(50):
        before = f"shop.R{level - 1}" if level else "null"
        schema = record(("a", schema), ("b", before), name=f"R{level}")
    with pytest.raises(Incompatible, match="expected at most 10000 types, found more"):
        parse(json.dumps(schema))


INNER = record(
    ("id", "long"), ("price-1", ["null", of("decimal", "bytes", precision=64, scale=2)]), name="In"
)


@pytest.mark.parametrize("more", [[], [("more", LIST)]], ids=["over a batch", "one by one"])
def test_notations(more: list[Any]) -> None:
    schema = record(
        ("_ts", "long"), ("seconds", ["null", "int"]), ("days", "long"), ("stated", of("timestamp-millis")), *more
    )  # fmt: skip
    columns = {
        "at": {"type": "TIMESTAMP", "from": "_ts", "unit": "nanos"},
        "since": {"type": "TIMESTAMP", "from": "seconds", "unit": "seconds"},
        "day": {"type": "DATE", "from": "days", "unit": "days"},
        "stated": {"type": "TIMESTAMP", "unit": "millis"},
        "missing": "STRING",
    }
    value = {"_ts": -1, "seconds": 86_400, "days": 20_785, "stated": 1_500, "more": []}
    values = [value, {**value, "seconds": None}, {**value, "days": 2**40}]
    result = decoded(spec({7: schema}, columns), [encoded(one, schema) for one in values])
    rows = result.rows.select(list(columns)).to_pylist()
    day = timedelta(days=1)
    assert rows[0] == {
        "at": EPOCH - timedelta(microseconds=1), "since": EPOCH + day, "day": date(2026, 11, 28),
        "stated": EPOCH + timedelta(seconds=1.5), "missing": None,
    }  # fmt: skip
    assert rows[1]["since"] is None
    text = f"day: expected date in days since 1970, found {2**40}"
    assert result.errors == {2: ("unreadable_timestamp", text)}


def test_texts_and_paths() -> None:
    schema = record(
        ("time", ["null", "string", "double"]), ("n", "string"), ("day", "string"), ("real", "double"),
        ("payload", ["null", record(("after", ["null", INNER]), name="Payload")]),
    )  # fmt: skip
    columns = {
        "time": {"type": "TIMESTAMP", "unit": "seconds"},
        "real": {"type": "TIMESTAMP", "unit": "millis"},
        "n": {"type": "DOUBLE", "decimal": ","},
        "day": {"type": "DATE", "format": "%d/%m/%Y"},
        "id": {"type": "BIGINT", "from": "payload.after.id"},
        "price": {"type": "DECIMAL(10,2)", "from": "payload.after.price-1"},
        "gone": {"type": "STRING", "from": "payload.before"},
    }
    value = {
        "time": "1.5", "n": "1,5", "day": "28/11/2026", "real": 1795867200.123,
        "payload": {"after": {"id": 5, "price-1": b"\x0c"}},
    }  # fmt: skip
    others = [
        {"payload": None}, {"payload": {"after": None}}, {"time": 1.5}, {"time": "x"}, {"n": "1.5"},
    ]  # fmt: skip
    sent = [encoded(value | one, schema) for one in ({}, *others)]
    result = decoded(spec({7: schema}, columns), sent)
    rows = result.rows.select(list(columns)).to_pylist()
    at = EPOCH + timedelta(seconds=1.5)
    assert rows[0] == {
        "time": at, "real": EPOCH + timedelta(microseconds=1795867200123), "n": 1.5,
        "day": date(2026, 11, 28), "id": 5, "price": Decimal("0.12"), "gone": None,
    }  # fmt: skip
    assert [(row["id"], row["price"]) for row in rows[1:3]] == [(None, None)] * 2
    assert rows[3]["time"] == at
    assert result.errors == {
        4: ("unreadable_timestamp", "time: expected timestamp in seconds since 1970, found x"),
        5: ("wrong_type", "n: expected double with the decimal sign ,, found 1.5"),
    }


@pytest.mark.parametrize(
    ("written", "column", "message"),
    [
        (of("timestamp-millis"), {"type": "TIMESTAMP", "unit": "micros"}, "readable as timestamp in micros since 1970, found long (timestamp-millis)"),
        ("boolean", {"type": "TIMESTAMP", "unit": "micros"}, "found boolean"),
        ("long", {"type": "TIMESTAMP", "format": "%d/%m/%Y"}, "readable as timestamp of the form %d/%m/%Y, found long"),
        ("bytes", {"type": "DOUBLE", "decimal": "."}, "readable as double with the decimal sign ., found bytes"),
        ("long", {"type": "INT", "from": "c.d"}, "d: expected a record at c, found long"),
    ],
)  # fmt: skip
def test_types_that_contradict_a_notation(written: Any, column: Any, message: str) -> None:
    name = "d" if "from" in column else "c"
    error = spec({7: record(("c", written))}, {name: column}).schemas[7].error
    assert error is not None and message in error[1]
