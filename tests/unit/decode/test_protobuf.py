"""Protobuf: what the library writes is read completely, and any other bytes have a verdict."""

import base64
import math
import random
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from budget import budget
from cases import changed, codes, decoded, spec_of
from google.protobuf import json_format
from google.protobuf.message import DecodeError
from hypothesis import given, settings
from hypothesis import strategies as st
from lakes import new_stream
from protos import HEAD, descriptors, indexed, type_of

from anabranch.common.errors import ConfigurationError
from anabranch.config import Stream
from anabranch.decode import (
    Decoded,
    DecodeSpec,
    UnlistedSchema,
    WriterSchema,
    decode_spec,
    protobuf,
    values,
)
from anabranch.decode.avro_names import Incompatible
from anabranch.decode.inputs import DESCRIPTOR
from anabranch.subjects.columns import protobuf_fields
from anabranch.subjects.schemas import Schemas, read_descriptors

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
EVERY = (
    HEAD
    + """
import "google/protobuf/wrappers.proto";
message Every {
  string id = 1; bool ok = 2; bytes raw = 3; float ratio = 4; double amount = 5;
  int32 i32 = 6; sint32 s32 = 7; sfixed32 f32 = 8; uint32 u32 = 9; fixed32 x32 = 10;
  int64 i64 = 11; sint64 s64 = 12; sfixed64 f64 = 13; uint64 u64 = 14; fixed64 x64 = 15;
  Colour colour = 16; google.protobuf.Timestamp at = 17; google.protobuf.Int64Value wrapped = 18;
  optional int32 maybe = 19; optional string note = 20;
  oneof choice { string text = 21; int64 number = 22; }
  repeated int32 numbers = 23; repeated string words = 24; repeated Inner inners = 25;
  map<string, int64> counts = 26; map<int32, Inner> by_number = 27; Inner inner = 28;
  repeated Colour colours = 29; map<bool, google.protobuf.Timestamp> times = 30;
  message Inner { int32 n = 1; optional string s = 2; Deeper deeper = 3; repeated Deeper more = 4; }
  message Deeper { bytes b = 1; Colour c = 2; }
}
enum Colour { RED = 0; GREEN = 1; BLUE = -5; }
"""
)
INNER = "STRUCT<n: INT, s: STRING, deeper: STRUCT<b: BINARY, c: STRING>, more: ARRAY<STRUCT<b: BINARY, c: STRING>>>"
DDL = (
    "id STRING, ok BOOLEAN, raw BINARY, ratio FLOAT, amount DOUBLE, i32 INT, s32 INT, f32 INT, u32 BIGINT, "
    "x32 BIGINT, i64 BIGINT, s64 BIGINT, f64 BIGINT, u64 DECIMAL(20,0), x64 DECIMAL(20,0), colour STRING, "
    "at TIMESTAMP, wrapped BIGINT, maybe INT, note STRING, text STRING, number BIGINT, numbers ARRAY<INT>, "
    f"words ARRAY<STRING>, inners ARRAY<{INNER}>, counts MAP<STRING, BIGINT>, by_number MAP<INT, {INNER}>, "
    f"inner {INNER}, colours ARRAY<STRING>, times MAP<BOOLEAN, TIMESTAMP>"
)
Every = type_of(EVERY, "shop.Every")


def spec(text: str = EVERY, ddl: str = DDL, message: str = "shop.Every", **more: Any) -> DecodeSpec:
    """The columns of plain messages of a type."""
    schemas = {DESCRIPTOR: WriterSchema(descriptors(text))}
    return spec_of(ddl, "protobuf", schemas=schemas, message=message, **more)


def spec_by_id(*texts: str, ddl: str, message: str | None = None, **more: Any) -> DecodeSpec:
    """The columns of messages in the wire format, with the schema ids 1, 2, …"""
    schemas = {id: WriterSchema(descriptors(text)) for id, text in enumerate(texts, 1)}
    return spec_of(ddl, "protobuf", schemas=schemas, message=message, **more)


def one(text: str, ddl: str, name: str, message: Any, **more: Any) -> Decoded:
    value = message if isinstance(message, bytes) else message.SerializeToString()
    return decoded(spec(text, ddl, name, **more), [value])


def row(result: Decoded, ddl: str = DDL) -> dict[str, Any]:
    [found] = result.rows.select([column.name for column in spec_of(ddl).columns]).to_pylist()
    return dict(found)


def every(message: Any, ddl: str = DDL) -> Decoded:
    return one(EVERY, ddl, "shop.Every", message)


def integers(bits: int, signed: bool = True) -> st.SearchStrategy[int]:
    low = -(2 ** (bits - 1)) if signed else 0
    return st.integers(low, low + 2**bits - 1)


COLOURS = st.sampled_from(["RED", "GREEN", "BLUE"])
BYTES = st.binary(max_size=4).map(lambda b: base64.b64encode(b).decode())
DEEPER = st.fixed_dictionaries({}, optional={"b": BYTES, "c": COLOURS})
IN_INNER = {"s": st.text(max_size=4), "deeper": DEEPER, "more": st.lists(DEEPER, max_size=2)}
INNERS = st.fixed_dictionaries({}, optional={"n": integers(32), **IN_INNER})
TIMES = st.datetimes(datetime(1, 1, 1), datetime(9999, 12, 31)).map(
    lambda at: at.isoformat(timespec="microseconds") + "Z"
)
MESSAGES = st.fixed_dictionaries(
    {},
    optional={
        "id": st.text(max_size=5), "ok": st.booleans(), "raw": BYTES,
        "ratio": st.floats(width=32, allow_nan=False, allow_infinity=False), "amount": st.floats(allow_nan=False, allow_infinity=False),
        **{name: integers(32) for name in ("i32", "s32", "f32", "maybe")},
        **{name: integers(64) for name in ("i64", "s64", "f64", "wrapped")},
        "u32": integers(32, False), "x32": integers(32, False), "u64": integers(64, False), "x64": integers(64, False),
        "colour": COLOURS, "at": TIMES, "note": st.text(max_size=3), "numbers": st.lists(integers(32), max_size=3),
        "words": st.lists(st.text(max_size=3), max_size=3), "inners": st.lists(INNERS, max_size=2),
        "counts": st.dictionaries(st.text(max_size=3), integers(64), max_size=3),
        "by_number": st.dictionaries(integers(32).map(str), INNERS, max_size=2), "inner": INNERS,
        "colours": st.lists(COLOURS, max_size=3), "times": st.dictionaries(st.sampled_from(["true", "false"]), TIMES),
    },
)  # fmt: skip
CHOICES = (
    st.just({})
    | st.fixed_dictionaries({"text": st.text(max_size=3)})
    | st.fixed_dictionaries({"number": integers(64)})
)


def is_same(expected: Any, value: Any) -> bool:
    """Return whether a column's value is that of the library's JSON."""
    match value:
        case None:
            return expected is None
        case bool() | str():
            return bool(expected == value)
        case datetime():
            return datetime.fromisoformat(expected) == value
        case bytes():
            return base64.b64decode(expected) == value
        case float():
            if float(expected) == value or abs(value) > values.LARGEST_FLOAT:
                return float(expected) == value
            # The text of a float is the shortest that is read as it.
            return bool(np.float32(expected) == np.float32(value) == value)
        case int() | Decimal():
            return int(expected) == value
        case []:
            return expected in ([], {})
        case [(_, _), *_]:
            named = [(str(k).lower() if isinstance(k, bool) else str(k), v) for k, v in value]
            is_like = all(k in expected and is_same(expected[k], v) for k, v in named)
            return dict(named).keys() == expected.keys() and is_like
        case list():
            return len(expected) == len(value) and all(map(is_same, expected, value))
    if {k for k, v in value.items() if v is not None} != expected.keys():
        return False
    return all(is_same(expected.get(k), v) for k, v in value.items())


@settings(max_examples=budget(150, 1_000))
@given(MESSAGES, CHOICES)
def test_messages_are_read_as_the_librarys_json_has_them(value: Any, choice: Any) -> None:
    message = json_format.ParseDict({**value, **choice}, Every())
    result = every(message)
    assert not result.errors
    read = row(result, DDL)
    expected = json_format.MessageToDict(
        message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
    )
    assert is_same(expected, read), (expected, read)


def test_records_are_read_together_as_each_alone() -> None:
    """Columns are read over a batch, unless a value of it cannot be."""
    messages = [
        Every(id="a", at={"seconds": 5, "nanos": 1_999}, colour=1, numbers=[1, 2], words=["x", ""]),
        Every(), Every(colour=7), Every(at={"nanos": -1}, colours=[0]), Every(at={"seconds": 2**62}),
        Every(wrapped={"value": 5}, at={"seconds": -62_135_596_800}, i64=-1, maybe=3, inner={"n": 1}),
    ]  # fmt: skip
    sent = [message.SerializeToString() for message in messages]
    sent[2:2] = [b"\xff", b"\xa0\x06\x01"]
    for some in (sent, [*sent[:2], sent[-1]]):
        together = decoded(spec(lists_unknown=True), some)
        for i, value in enumerate(some):
            alone = decoded(spec(lists_unknown=True), [value])
            assert alone.errors.get(0) == together.errors.get(i)
            assert alone.unknown.get(0) == together.unknown.get(i)
            for name in (column.name for column in spec_of(DDL).columns):
                assert alone.rows[name][0].as_py() == together.rows[name][i].as_py(), name
    # With a null value, in the wire format, and with another type between them.
    wired_values = [None, *(indexed(1, value) for value in sent), indexed(1, b"\x12\x00", 1)]
    result = decoded(spec_by_id(EVERY, ddl=DDL), wired_values)
    plain = decoded(spec(), [None, *sent])
    assert result.rows.slice(0, len(sent) + 1)["id"] == plain.rows["id"]
    found = [result.errors[i][0] for i in range(1, len(sent) + 1) if i in result.errors]
    assert found == [plain.errors[i][0] for i in range(1, len(sent) + 1) if i in plain.errors]
    assert result.errors[len(sent) + 1][0] == "incompatible_schema"


def test_presence_decides_about_null() -> None:
    read = row(every(b""))
    empty = {name for name, value in read.items() if value is None}
    assert empty == {"at", "wrapped", "maybe", "note", "text", "number", "inner"}
    assert (read["id"], read["i64"], read["colour"], read["numbers"]) == ("", 0, "RED", [])
    message = Every(maybe=0, note="", number=0)
    message.inner.SetInParent()
    message.wrapped.SetInParent()
    message.at.SetInParent()
    read = row(every(message))
    assert (read["maybe"], read["note"], read["number"], read["text"]) == (0, "", 0, None)
    assert read["inner"] == {"n": 0, "s": None, "deeper": None, "more": []}
    assert (read["wrapped"], read["at"]) == (0, EPOCH)


def test_fields_can_have_the_names_of_methods() -> None:
    """The hazard: a library's method in place of the field, or the other way."""
    names = ("Clear", "HasField", "ListFields", "DESCRIPTOR", "FromString", "from", "class")
    fields = " ".join(f"optional int32 {name} = {i};" for i, name in enumerate(names, 1))
    text, ddl = HEAD + f"message Odd {{ {fields} }}", ", ".join(f"`{name}` INT" for name in names)
    Odd = type_of(text, "shop.Odd")
    value = b"".join(bytes([8 * i, i]) for i in range(1, len(names)))
    read = row(one(text, ddl, "shop.Odd", value, lists_unknown=True), ddl)
    assert Odd and read == {name: i if i < len(names) else None for i, name in enumerate(names, 1)}


def test_floats_that_are_no_numbers_are_read() -> None:
    read = row(every(Every(ratio=math.inf, amount=math.nan)))
    assert read["ratio"] == math.inf and math.isnan(read["amount"])


@pytest.mark.parametrize("seed", range(budget(2, 8)))
def test_changed_bytes_are_read_as_the_library_reads_them_or_refused(seed: int) -> None:
    dice = random.Random(seed)
    whole = Every(
        id="a1", at={"seconds": 10}, inners=[{"n": 1, "deeper": {"b": b"x"}}], counts={"k": 1}, words=["é"],
        colours=[1, 0], numbers=[1, 2, 300], by_number={1: {"s": "x"}}, u64=2**63, text="x", wrapped={"value": 5},
    ).SerializeToString()  # fmt: skip
    sent = [changed(whole, dice) for _ in range(1_000)]
    result = decoded(spec(), sent)
    ids, good = result.rows["id"].to_pylist(), 0
    for i, value in enumerate(sent):
        try:
            message = Every.FromString(value)
        except DecodeError:
            assert result.errors[i][0] in ("malformed_protobuf", "invalid_utf8"), value
            continue
        if i in result.errors:
            assert result.errors[i][0] in ("wrong_type", "unreadable_timestamp"), value
        else:
            good += 1
            assert ids[i] == message.id
    assert 50 < good < 950


def length(number: int) -> bytes:
    return bytes([number & 127 | 128]) + length(number >> 7) if number > 127 else bytes([number])


def nested(levels: int) -> bytes:
    value = b""
    for _ in range(levels):
        value = b"\x0a" + length(len(value)) + value
    return value


NODE = HEAD + "message Node { Node next = 1; string id = 2; }"


@pytest.mark.parametrize(
    ("value", "code", "words"),
    [
        (None, "null_value", "expected a message, found a null value"),
        (b"\x12\x01\xff", "invalid_utf8", "expected UTF-8"),
        (b"\x12\x05a", "malformed_protobuf", "invalid or truncated bytes"),
        (b"\x12\xff\xff\xff\xff\x07", "malformed_protobuf", ""),
        (b"\x12\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01a", "malformed_protobuf", ""),
        (b"\x80" * 20, "malformed_protobuf", ""),
        (b"\x0b" * 500, "malformed_protobuf", ""),
        (b"\x13" * 100_000, "malformed_protobuf", ""),
        (b"\x07", "malformed_protobuf", ""),
        (b"\x00\x01", "malformed_protobuf", ""),
        (nested(90), None, ""),
        (nested(150), "too_deep", "at most 100 levels"),
        (nested(5_000), "too_deep", "at most 100 levels"),
        (b"\x10\x05", "wrong_type", "id: expected string, found a value of another type"),
        (b"\x12\x01a\x12\x01b", None, ""),
    ],
)  # fmt: skip
def test_odd_bytes(value: bytes | None, code: str | None, words: str) -> None:
    result = decoded(spec(NODE, "id STRING", "shop.Node"), [b"\x12\x01a", value, b"\x12\x01c"])
    assert result.rows["id"].to_pylist()[::2] == ["a", "c"]
    assert codes(result) == ({1: code} if code else {})
    assert code is None or words in result.errors[1][1]


def part_of(name: str, value: bytes) -> bytes:
    """Return a message of which one field is this message."""
    number = Every.DESCRIPTOR.fields_by_name[name].number
    return length(number << 3 | 2) + length(len(value)) + value


@pytest.mark.parametrize(
    ("ddl", "message", "code", "words"),
    [
        ("u64 BIGINT", Every(u64=2**63), "wrong_type", "u64: expected bigint, found 9223372036854775808"),
        ("u64 BIGINT", Every(u64=2**63 - 1), None, ""),
        ("u64 DECIMAL(5,2)", Every(u64=1000), "wrong_type", "u64: expected decimal(5,2), found 1000"),
        ("at TIMESTAMP", Every(at={"seconds": 253_402_300_800}), "unreadable_timestamp", "at: expected timestamp"),
        ("at TIMESTAMP", Every(at={"nanos": 10**9}), "unreadable_timestamp", "0 seconds and 1000000000 nanoseconds"),
        ("at TIMESTAMP", Every(at={"nanos": -1}), "unreadable_timestamp", "at: expected timestamp"),
        ("times MAP<BOOLEAN, TIMESTAMP>", Every(times={True: {"nanos": -1}}), "unreadable_timestamp", "times.True: expected timestamp"),
        ("raw STRING", Every(raw=b"\xff"), "invalid_utf8", "raw: expected UTF-8"),
        ("colour STRING", Every(colour=7), "wrong_type", "colour: expected string, found 7"),
        ("colour INT", Every(colour=7), None, ""),
        ("colours ARRAY<STRING>", Every(colours=[1, 7]), "wrong_type", "colours[1]: expected a value of enum Colour, found 7"),
        ("inner STRUCT<deeper: STRUCT<c: STRING>>", Every(inner={"deeper": {"c": 7}}), "wrong_type", "inner.deeper.c: expected a value of enum Colour, found 7"),
        ("by_number MAP<INT, STRUCT<n: INT>>", b"\xda\x01\x06\x08\x01\x12\x02\x0a\x00", "wrong_type", "by_number.1.n: expected int32, found a value of another type"),
        ("inner STRUCT<n: INT>", b"\xe2\x01\x02\x0a\x00", "wrong_type", "inner.n: expected int32, found a value of another type"),
        ("at TIMESTAMP", part_of("at", b"\x0a\x01x"), "wrong_type", "at.seconds: expected int64, found a value of another type"),
        ("at TIMESTAMP", part_of("at", b"\x08\x05\x12\x00"), "wrong_type", "at.nanos: expected int32, found a value of another type"),
        ("at TIMESTAMP", part_of("at", b"\x18\x05"), None, ""),
        ("times MAP<BOOLEAN, TIMESTAMP>", part_of("times", b"\x12\x02\x0a\x00"), "wrong_type", "times.False.seconds: expected int64"),
        ("wrapped BIGINT", part_of("wrapped", b"\x0a\x01x"), "wrong_type", "wrapped.value: expected int64, found a value of another type"),
        ("maybe INT NOT NULL", Every(), "missing_required", "maybe"),
        ("i32 INT NOT NULL", Every(), None, ""),
    ],
)  # fmt: skip
def test_values_that_do_not_fit(ddl: str, message: Any, code: str | None, words: str) -> None:
    result = every(message, ddl)
    assert codes(result) == ({0: code} if code else {})
    assert code is None or words in result.errors[0][1]


def test_other_types_of_columns() -> None:
    ddl = "colour INT, i32 BIGINT, i64 DOUBLE, u32 DECIMAL(12,2), ratio DOUBLE, id BINARY, raw STRING, s32 FLOAT"
    message = Every(colour=-5, i32=1, i64=2**60 + 1, u32=7, ratio=0.1, id="é", raw=b"x", s32=3)
    assert row(every(message, ddl), ddl) == {
        "colour": -5, "i32": 1, "i64": float(2**60), "u32": Decimal("7.00"), "ratio": pytest.approx(0.1),
        "id": "é".encode(), "raw": "x", "s32": 3.0,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("ddl", "message"),
    [
        ("u32 INT", "u32: expected a type readable as int, found uint32"),
        ("i64 INT", "u32: expected".replace("u32", "i64")),
        ("amount FLOAT", "found double"),
        ("id INT", "found string"),
        ("colour BOOLEAN", "found shop.Colour"),
        ("at STRING", "found google.protobuf.Timestamp"),
        ("at STRUCT<day: INT>", "at: expected a type readable as struct<day:int>, found google.protobuf.Timestamp"),
        ("i64 TIMESTAMP", "found int64"),
        ("numbers INT", "numbers: expected a type readable as int, found repeated int32"),
        ("numbers ARRAY<STRING>", "numbers[]: expected a type readable as string"),
        ("counts MAP<INT, BIGINT>", "counts{}: expected a type readable as int, found string"),
        ("by_number MAP<DOUBLE, STRUCT<n: INT>>", "by_number: expected a type readable as map<double,"),
        ("counts ARRAY<BIGINT>", "counts: expected a type readable as array<bigint>, found map of int64"),
        ("inner STRUCT<deeper: STRUCT<b: INT>>", "inner.deeper.b: expected a type readable as int, found bytes"),
        ("wrapped STRING", "wrapped: expected a type readable as string, found int64"),
        ("nothing STRING", "expected a field of nothing, found none"),
        ("id STRING, nothing STRING NOT NULL", "nothing: expected a field for the NOT NULL column"),
    ],
)  # fmt: skip
def test_types_that_cannot_become_columns(ddl: str, message: str) -> None:
    result = every(b"", ddl)
    assert result.errors[0][0] == "incompatible_schema" and message in result.errors[0][1]


PROTO2 = """syntax = "proto2"; package old;
message Old {
  required string id = 1; optional Level level = 2 [default = HIGH]; repeated Level levels = 3;
  optional group Extra = 4 { optional int32 n = 1; } map<string, Level> by_name = 5; optional In inner = 6;
  message In { optional Level level = 1; }
}
enum Level { option allow_alias = true; NONE = 0; LOW = 1; HIGH = 2; TOP = 2; }
"""
OLD_DDL = "id STRING, level STRING, levels ARRAY<STRING>, extra STRUCT<n: INT>, by_name MAP<STRING, STRING>, inner STRUCT<level: STRING>"  # fmt: skip


def test_proto2_is_read_with_its_rules() -> None:
    Old = type_of(PROTO2, "old.Old")
    message = Old(id="a", levels=[1, 2], extra={"n": 5}, by_name={"x": 1})
    assert row(one(PROTO2, OLD_DDL, "old.Old", message), OLD_DDL) == {
        "id": "a", "level": None, "levels": ["LOW", "HIGH"], "extra": {"n": 5}, "by_name": [("x", "LOW")], "inner": None,
    }  # fmt: skip
    # A required field that is missing is a null like any other: NOT NULL decides.
    assert row(one(PROTO2, OLD_DDL, "old.Old", b""), OLD_DDL)["id"] is None
    assert one(PROTO2, "id STRING NOT NULL", "old.Old", b"").errors[0][0] == "missing_required"


@pytest.mark.parametrize(
    ("value", "code", "path"),
    [
        (b"\x0a\x01\xff", "invalid_utf8", "id: expected UTF-8"),
        (b"\x10\x07", "wrong_type", "level: expected old.Level"),
        (b"\x18\x01\x18\x07", "wrong_type", "levels: expected repeated old.Level"),
        (b"\x2a\x05\x0a\x01x\x10\x07", "wrong_type", "by_name: expected map of old.Level"),
        (b"\x32\x02\x08\x07", "wrong_type", "inner.level: expected old.Level"),
    ],
)
def test_what_the_library_reads_as_nothing_is_no_row(value: bytes, code: str, path: str) -> None:
    """The hazard: a value of an enum that a reader does not know is null, or missing in a list."""
    result = one(PROTO2, OLD_DDL, "old.Old", value)
    assert result.errors[0][0] == code and result.errors[0][1].startswith(path)


TWO = (
    HEAD
    + "message Other { string x = 1; message In { string id = 1; } } message Order { string id = 1; int32 n = 2; }"
)
THIRD = HEAD + "message Order { int64 n = 4; string id = 3; }"


def test_the_wire_format_names_schema_and_message() -> None:
    Order, In = type_of(TWO, "shop.Order"), type_of(TWO, "shop.Other.In")
    Newer = type_of(THIRD, "shop.Order")
    sent = [
        indexed(1, Order(id="a", n=1), 1),
        indexed(2, Newer(id="b", n=2)),
        indexed(1, In(id="c"), 0, 0),
        indexed(2, Newer(id="d", n=2**40), 0),
        indexed(2, b"\x02\x00" + Newer(id="e").SerializeToString())[:5] + b"\x02\x00" + Newer(id="e").SerializeToString(),
    ]  # fmt: skip
    result = decoded(spec_by_id(TWO, THIRD, ddl="id STRING, n BIGINT"), sent)
    assert not result.errors
    assert result.rows["id"].to_pylist() == ["a", "b", "c", "d", "e"]
    assert result.rows["n"].to_pylist() == [1, 2, None, 2**40, 0]
    result = decoded(spec_by_id(TWO, THIRD, ddl="id STRING, n BIGINT", message="shop.Order"), sent)
    found = "schema id 1: expected message shop.Order, found shop.Other.In"
    assert dict(result.errors) == {2: ("incompatible_schema", found)}


@pytest.mark.parametrize(
    ("value", "code", "words"),
    [
        (None, "null_value", "PROTOBUF wire format"),
        (b"\0\0\0\1", "not_wire_format", ""),
        (b"\0\0\0\0\1", "malformed_protobuf", "schema id 1: expected the indexes of a message, found no bytes"),
        (b"\0\0\0\0\1\1", "malformed_protobuf", "found 01"),
        (b"\0\0\0\0\1\2", "malformed_protobuf", ""),
        (b"\0\0\0\0\1\2\1", "malformed_protobuf", ""),
        (b"\0\0\0\0\1\xfe\xff\xff\xff\x0f", "malformed_protobuf", ""),
        (b"\0\0\0\0\1" + b"\xff" * 12, "malformed_protobuf", ""),
        (b"\0\0\0\0\1\2\x0e", "incompatible_schema", "expected the message at indexes [7], found none"),
        (b"\0\0\0\0\1\4\2\2", "incompatible_schema", "expected the message at indexes [1, 1], found none"),
        (b"\0\0\0\0\1\0", "incompatible_schema", "expected a field of id, found none"),
        (b"\0\0\0\0\1\2\2", None, ""),
    ],
)  # fmt: skip
def test_odd_wire_formats(value: bytes | None, code: str | None, words: str) -> None:
    good = indexed(1, b"\x0a\x01a", 1)
    result = decoded(spec_by_id(TWO, ddl="id STRING"), [good, value, good])
    assert codes(result) == ({1: code} if code else {})
    assert code is None or words in result.errors[1][1]
    with pytest.raises(UnlistedSchema):
        decoded(spec_by_id(TWO, ddl="id STRING"), [indexed(9, b"", 1)])


ORDER = "confluent.type.Order"
DECIMALS = (
    'syntax = "proto3"; package confluent.type; message Decimal { bytes value = 1; uint32 precision = 2; '
    "int32 scale = 3; } message Order { Decimal total = 1; }"
)  # fmt: skip


@pytest.mark.parametrize(
    ("value", "scale", "total"),
    [
        (b"\x77", 2, "1.19"),
        (b"\xff", 2, "-0.01"),
        (b"\x00\x01\x86\xa5", 5, "1.00"),
        (b"\x01", -3, "1000.00"),
        (b"", 0, "0.00"),
        (b"\x01", -30, None),
        (b"\x7f" * 100_000, 2, None),
        (b"\x01", 2**31 - 1, None),
        (b"\x01", -(2**31), None),
    ],
)
def test_decimals_of_confluent(value: bytes, scale: int, total: str | None) -> None:
    message = type_of(DECIMALS, ORDER)(total={"value": value, "scale": scale})
    result = one(DECIMALS, "total DECIMAL(12,2)", ORDER, message)
    assert [code for code, _ in result.errors.values()] == ([] if total else ["wrong_type"])
    assert result.rows["total"][0].as_py() == (None if total is None else Decimal(total))


def test_a_decimal_with_a_scale_of_another_type_is_no_whole_number() -> None:
    of_total = b"\x0a\x01\x77\x1a\x01\x02"
    sent = b"\x0a" + bytes([len(of_total)]) + of_total
    result = one(DECIMALS, "total DECIMAL(12,2)", ORDER, sent)
    wrong = "total.scale: expected int32, found a value of another type"
    assert [*result.errors.values()] == [("wrong_type", wrong)]


@pytest.mark.parametrize(
    ("day", "expected"),
    [((2024, 2, 29), date(2024, 2, 29)), ((2023, 2, 29), None), ((2024, 0, 0), None), ((0, 1, 1), None), ((10_000, 1, 1), None)],
)  # fmt: skip
def test_dates_of_google(day: tuple[int, int, int], expected: date | None) -> None:
    text = (
        'syntax = "proto3"; package google.type; message Date { int32 year = 1; int32 month = 2; int32 day = 3; } '
        "message Order { Date on = 1; }"
    )  # fmt: skip
    on = dict(zip(("year", "month", "day"), day, strict=True))
    message = type_of(text, "google.type.Order")(on=on)
    result = one(text, "`on` DATE", "google.type.Order", message)
    assert [*codes(result).values()] == ([] if expected else ["unreadable_timestamp"])
    assert result.rows["on"][0].as_py() == expected


def test_fields_without_a_column_are_listed() -> None:
    Order = type_of(THIRD, "shop.Order")
    sent = [
        Order(id="a").SerializeToString(), Order(id="b", n=5).SerializeToString() + b"\x50\x01\x4a\x00\x50\x01", b"\xff",
    ]  # fmt: skip
    given: dict[str, Any] = {"text": THIRD, "ddl": "id STRING", "message": "shop.Order"}
    listed = decoded(spec(**given, lists_unknown=True), sent)
    assert listed.unknown == {1: ["#9", "#10", "n"]} and list(listed.errors) == [2]
    refused = decoded(spec(**given, refuses_unknown=True), sent)
    expected = ("unknown_field", "expected no fields beside those of the schema, found #9, #10, n")
    assert refused.errors[1] == expected
    assert not decoded(spec(**given), sent).unknown


def test_documents_are_their_json() -> None:
    text = (
        'syntax = "proto3"; package shop; import "google/protobuf/struct.proto"; message Order { '
        "google.protobuf.Struct o = 1; google.protobuf.Value v = 2; repeated google.protobuf.ListValue l = 3; }"
    )
    ddl = "o STRING, v STRING, l ARRAY<STRING>"
    fields = protobuf_fields(descriptors(text), None)
    assert fields == [("o", "string"), ("v", "string"), ("l", "array<string>")]
    order = type_of(text, "shop.Order")
    some = {"z": {"a": [1, 1.5, "é", None]}, "b": True, "n": 2**53}
    whole = json_format.ParseDict({"o": some, "v": 5, "l": [["x"]]}, order())
    nan = order(v={"number_value": math.nan})
    sent = [whole, order(), nan, b"\x0a\x06\x0a\x04\x12\x02\x0a\x00"]
    values = [one if isinstance(one, bytes) else one.SerializeToString() for one in sent]
    result = decoded(spec(text, ddl, "shop.Order"), values)
    assert result.rows.select(["o", "v", "l"]).to_pylist()[:2] == [
        {"o": '{"b": true, "n": 9007199254740992.0, "z": {"a": [1.0, 1.5, "é", null]}}', "v": "5.0", "l": ['["x"]']},
        {"o": None, "v": None, "l": []},
    ]  # fmt: skip
    assert codes(result) == {2: "wrong_type", 3: "wrong_type"}


def test_extensions_are_fields_without_a_column() -> None:
    text = (
        'syntax = "proto2"; package old; message Old { optional int32 n = 1; extensions 100 to 200; } '
        "extend Old { optional string n2 = 100; repeated int32 n = 101; }"
    )
    sent: list[bytes | None] = [b"\xa2\x06\x01x", b"\x08\x05\xa8\x06\x05", b"\x08\x05"]
    listed = decoded(spec(text, "n INT", "old.Old", lists_unknown=True), sent)
    assert listed.unknown == {0: ["old.n2"], 1: ["old.n"]}
    assert listed.rows["n"].to_pylist() == [None, 5, 5]


def test_descriptors_that_are_none_are_refused() -> None:
    for text in ("", "AAAA", base64.b64encode(b"\xff").decode()):
        with pytest.raises(Incompatible, match="expected a set of file descriptors"):
            protobuf.message_of(text, (0,))
    with pytest.raises(Incompatible, match=r"expected a message shop\.Nothing, found none"):
        protobuf.message_of(descriptors(THIRD), "shop.Nothing")


def test_files_may_come_before_those_that_they_import() -> None:
    from google.protobuf.descriptor_pb2 import FileDescriptorSet

    given = FileDescriptorSet.FromString(base64.b64decode(descriptors(EVERY)))
    turned = FileDescriptorSet(file=reversed(given.file))
    text = base64.b64encode(turned.SerializeToString()).decode()
    assert protobuf.message_of(text, "shop.Every").fields_by_name["at"].message_type.fields
    alone = FileDescriptorSet(file=given.file[-1:])
    with pytest.raises(Incompatible, match="with its imports, found none of 'google/protobuf/"):
        protobuf.message_of(base64.b64encode(alone.SerializeToString()).decode(), (0,))


def test_time_is_cut_to_microseconds_before_1970_too() -> None:
    at = row(every(Every(at={"seconds": -2, "nanos": 999_999_999})))["at"]
    assert at == EPOCH - timedelta(seconds=1, microseconds=1)


# Descriptor files: those as which a stream's columns can be read, or the reason.

ORDERS = HEAD + "message Order { string id = 1; int64 n = 2; }"


def stream_of(file: Path, ddl: str = "id STRING NOT NULL, n BIGINT", **more: Any) -> Stream:
    form = {"type": "protobuf", "descriptor": file, "message": "shop.Order"} | more
    return new_stream(format=form, schema=ddl, key="id")


def test_plain_messages_are_read_by_the_file(tmp_path: Path) -> None:
    file = tmp_path / "shop.desc"
    file.write_bytes(base64.b64decode(descriptors(ORDERS)))
    of = stream_of(file)
    value = type_of(ORDERS, "shop.Order")(id="a", n=7).SerializeToString()
    result = decoded(decode_spec(of, Schemas(of, None).known), [value])
    assert not result.errors
    assert result.rows.select(["id", "n"]).to_pylist() == [{"id": "a", "n": 7}]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"ddl": "id INT"}, "id: expected a type readable as int, found string"),
        ({"message": "shop.Nothing"}, "expected a message shop.Nothing, found none"),
        ({"file": "none.desc"}, "No such file"),
        ({"file": "other.desc"}, "expected a set of file descriptors, found none"),
    ],
)
def test_an_unusable_file_ends_the_job(tmp_path: Path, given: dict[str, Any], message: str) -> None:
    (tmp_path / "shop.desc").write_bytes(base64.b64decode(descriptors(ORDERS)))
    (tmp_path / "other.desc").write_bytes(b"{}")
    of = stream_of(tmp_path / given.pop("file", "shop.desc"), **given)
    for use in (lambda: read_descriptors(of), lambda: Schemas(of, None)):
        with pytest.raises(ConfigurationError, match=rf"format\.descriptor .*{message}"):
            use()
