"""Erased values in the bytes of records: found in every format, and not within longer words."""

import base64
import io
import json
import random
import unicodedata
from pathlib import Path
from typing import Any, Literal

import fastavro
import pytest
from answering_registry import answering_registry
from lakes import new_stream
from protos import HEAD, descriptors, indexed, type_of

from anabranch.common.errors import Transient
from anabranch.config import Catalog, Environment, Kafka, Registry
from anabranch.lifecycle.erasure.search import Payloads
from anabranch.lifecycle.erasure.words import Words, normal_forms

UUID = "3f2b8c1e-9d4a-4e6b-8a51-0c7d2e9f1b34"
CYRILLIC = "Анна"


def is_found(value: str, *payloads: bytes) -> bool:
    return any(map(Words([value, "another value"]).are_in, payloads))


@pytest.mark.parametrize(
    ("value", "payload", "expected"),
    [
        ("anna", b'{"id": "anna"}', True),
        ("anna", b"anna", True),
        ("anna", b"annabel", False),
        ("anna", b"joanna", False),
        ("anna", b"anna_1", False),
        ("anna", b"x-anna-y", True),
        ("anna", b"ann", False),
        ("anna", b"joanna annabel anna", True),
        ("Ren", '{"name": "René"}'.encode(), False),
        ("Ren", '{"name": "Ren\u0065\u0301"}'.encode(), False),
        ("Rene", '{"name": "Rene\u0301"}'.encode(), False),
        (CYRILLIC, f"{CYRILLIC}бель".encode(), False),
        (CYRILLIC, f'{{"name":"{CYRILLIC}"}}'.encode(), True),
        (CYRILLIC, b"\xff" + CYRILLIC.encode() + b"\xfe", True),
        ("a b", b"1,a b,2", True),
        ("a b", b"1,aa b,2", False),
        ("@anna", b"mail @anna now", True),
        ("@anna", b"mail me@anna now", False),
        ("--", b"1,--,2", True),
        ("--", b"a--b", False),
        ("\U0001f600", "so \U0001f600.".encode(), True),
        # A shorter value whose length is the byte of a quote, a comma or a line end.
        ("customer-12345678", b'{"id": "customer-123456789"}', False),
        ("annab", b"\nannabel", False),
    ],
)
def test_bytes_have_a_value_as_a_whole_word(value: str, payload: bytes, expected: bool) -> None:
    assert is_found(value, b"other", payload, b"last") == expected


@pytest.mark.parametrize(
    ("payload", "value"),
    [
        (b'{"id": "\\u00e9va"}', "éva"),
        (b'{"id": "\\u00E9va"}', "éva"),
        (b'{"id": "a\\/b"}', "a/b"),
        (b'{"id": "x\\u003d1"}', "x=1"),
        (b'{"id": "\\ud83d\\ude00"}', "\U0001f600"),
        (b'{"id": "a\\"b"}', 'a"b'),
        (b'{"id": "a\\\\u0062"}', "a\\u0062"),
        (b'{"of": "{\\"id\\": \\"\\\\u00e9va\\"}"}', "éva"),
        (b"\nanna", "anna"),
        (b'{"id": "line\\nanna"}', "anna"),
        (b"a\\b", "a\\b"),
        (b"anna \\", "anna"),
        (b"\\udc00 anna", "anna"),
        (b'1,"O""Neil",x', 'O"Neil'),
        (b"<name>J&#252;rgen &amp; Co</name>", "Jürgen & Co"),
        (b'"""O"" Neil"', '"O" Neil'),
    ],
)
def test_bytes_may_escape_a_value(payload: bytes, value: str) -> None:
    """Escapes of JSON: PHP's of slashes, .NET's upper case, Gson's of HTML; CSV's quotes."""
    assert not is_found(value, b"eva", b"\\")
    assert is_found(value, payload)


@pytest.mark.parametrize("value", ["anna", "José", CYRILLIC])
@pytest.mark.parametrize("form", ["NFC", "NFD"])
@pytest.mark.parametrize(
    "encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-16-le", "utf-16-be", "utf-32", "cp1252"]
)
def test_a_value_in_the_encodings(value: str, form: Literal["NFC", "NFD"], encoding: str) -> None:
    def encoded(value: str) -> bytes:
        written = json.dumps({"of": "Zoë", "id": value}, ensure_ascii=False)
        return unicodedata.normalize(form, written).encode(encoding, "ignore")

    if encoding == "cp1252" and (form == "NFD" or value == CYRILLIC):
        return  # It has no such characters.
    words = Words(normal_forms([value]))
    assert words.are_in(encoded(value))
    assert not words.are_in(encoded(f"{value}bel"))


def varint(number: int) -> bytes:
    rest = number >> 7
    return bytes([number & 0x7F | 0x80]) + varint(rest) if rest else bytes([number])


@pytest.mark.parametrize("signed", [False, True], ids=("Protobuf", "Avro"))
def test_a_text_behind_its_length_is_found_whatever_is_next_to_it(signed: bool) -> None:
    """The hazard: for a UUID, the byte of its length is a letter or a sign."""
    for length in (*range(2, 300), 5000, 9000):
        text = ("é" if length > 2 else "") + UUID * (length // 36 + 1)
        value = text.encode()[:length].decode()
        size = varint(length * (1 + signed))
        for before, after in ((b"\0", b"a7"), (b"\x12", b"H" + UUID.encode()), (b"x\x02", b"")):
            assert is_found(value, before + size + value.encode() + after), length
            shorter = before + varint((length + 1) * (1 + signed)) + value.encode() + b"x"
            is_shorter = is_found(value, shorter)
            assert not is_shorter, length
    # Without a byte that no text has.
    assert is_found(UUID, varint(36 * (1 + signed)) + UUID.encode())


def test_many_values_are_found_as_each_of_them_is() -> None:
    """All values have the same first word, or are parts of each other."""
    dice = random.Random(7)
    letters = ["a", "b", "é", " ", "-", "\\", '"', "_", "1", "\u0301", "\U0001f600"]

    def text(most: int) -> str:
        return "".join(dice.choice(letters) for _ in range(dice.randint(1, most)))

    for _ in range(300):
        values = {text(6) for _ in range(8)} | {f"a {text(3)}" for _ in range(4)}
        payload = text(30).encode() + bytes(dice.choices(range(256), k=dice.randint(0, 3)))
        each = any(Words([value]).are_in(payload) for value in values)
        assert Words(values).are_in(payload) == each, (values, payload)


SCHEMA: dict[str, Any] = {
    "type": "record",
    "name": "r",
    "fields": [
        {"name": "anna", "type": ["null", "string"]},
        {"name": "n", "type": "long"},
        {"name": "list", "type": {"type": "array", "items": "bytes"}},
        {"name": "map", "type": {"type": "map", "values": "int"}},
        {"name": "kind", "type": {"type": "enum", "name": "k", "symbols": ["one", "two"]}},
        {"name": "last", "type": "double"},
    ],
}  # fmt: skip
EMPTY = {"anna": None, "n": 0, "list": [], "map": {}, "kind": "one", "last": 0.0}


def avro(**fields: Any) -> bytes:
    out = io.BytesIO()
    fastavro.schemaless_writer(out, fastavro.parse_schema(SCHEMA), EMPTY | fields)
    return b"\0\0\0\0\x07" + out.getvalue()


@pytest.mark.parametrize(
    ("value", "fields", "expected"),
    [
        (UUID, {"anna": UUID}, True),
        ("hello", {"anna": "hello, in a text whose length is 'H'"}, True),
        ("anna", {"anna": "Hanna, in a text whose length is 'H'"}, False),
        ("anna", {"anna": "it is anna", "n": 40}, True),
        ("anna", {"anna": '{"of": "\\u0061nna"}'}, True),
        ("4711", {"n": 4711}, True),
        ("-4711", {"n": -4711}, True),
        ("471", {"n": 4711}, False),
        ("4711", {"map": {"a": 4711}}, True),
        ("key", {"map": {"key": 1}}, True),
        ("anna", {"list": [b"x", b"anna", b"HH"]}, True),
        ("two", {"kind": "two"}, True),
        ("anna", {"anna": "Ren"}, False),
        ("7", {"n": -28}, False),
    ],
)
def test_avro_is_decoded(value: str, fields: dict[str, Any], expected: bool) -> None:
    payload = avro(**fields)
    with answering_registry() as registry:
        registry.answers["/schemas/ids/7"] = (200, json.dumps({"schema": json.dumps(SCHEMA)}))
        payloads = payloads_of(registry.url)
        row = {"key": None, "value": payload, "headers": None}
        assert is_found(value, *payloads.of(row)) == expected
        as_header = {"key": b"k", "value": None, "headers": [{"key": "h", "value": payload}]}
        assert is_found(value, *payloads.of(as_header)) == expected
        assert payloads.of({"key": payload, "value": b"x", "headers": None})[1] == b"x"
        assert len(registry.paths) == 1


@pytest.mark.parametrize("answer", [None, {"schema": '{"type": "int"}'}, {"schema": "no schema"}])
def test_avro_that_does_not_decode_is_searched_as_it_is(answer: dict[str, str] | None) -> None:
    with answering_registry() as registry:
        if answer is not None:
            registry.answers["/schemas/ids/7"] = (200, json.dumps(answer))
        payloads = payloads_of(registry.url)
        for part in (avro(anna=UUID), avro(anna=UUID)[:-3], b"\0\0"):
            assert payloads.of({"key": None, "value": part, "headers": None}) == [part]
    assert is_found(UUID, avro(anna=UUID)[:-3])


PROTO = (
    HEAD
    + """
message Other { string id = 1; }
message Event {
  optional string id = 1; int32 n = 2; repeated Other list = 3; map<string, sint32> map = 4;
  Kind kind = 5; bytes raw = 6; repeated fixed64 numbers = 7;
  enum Kind { ONE = 0; TWO = 1; }
}
message Newer { string id = 1; uint64 n = 9; string text = 10; Event event = 11; fixed64 last = 12; }
"""
)


@pytest.mark.parametrize(
    ("value", "type", "fields", "expected"),
    [
        (UUID, "Event", {"id": UUID}, True),
        ("hello", "Event", {"id": "hello, in a text whose length is 'H'," + "." * 36}, True),
        ("anna", "Event", {"id": "Hanna, in a text whose length is 'H'," + "." * 36}, False),
        ("4711", "Event", {"n": 4711}, True),
        ("0", "Event", {}, True),
        ("471", "Event", {"n": 4711}, False),
        ("7", "Event", {"n": 55}, False),
        ("anna", "Event", {"list": [{"id": "x"}, {"id": "it is anna"}]}, True),
        ("key", "Event", {"map": {"key": 1}}, True),
        ("-4711", "Event", {"map": {"key": -4711}}, True),
        ("TWO", "Event", {"kind": "TWO"}, True),
        ("4711", "Event", {"numbers": [1, 4711]}, True),
        ("anna", "Event", {"raw": b"anna"}, True),
        # Fields that the type does not have.
        ("4711", "Newer", {"n": 4711}, True),
        (UUID, "Newer", {"text": UUID}, True),
        (UUID, "Newer", {"event": {"id": UUID}}, True),
        ("anna", "Newer", {"last": int.from_bytes(b" anna, .", "little")}, True),
        ("anna", "Newer", {"text": "annabel"}, False),
    ],
)
def test_protobuf_is_decoded(
    tmp_path: Path, value: str, type: str, fields: dict[str, Any], expected: bool
) -> None:
    message = type_of(PROTO, f"shop.{type}")(**fields)
    schema = {"schema": PROTO.replace("message Newer", "message Else"), "schemaType": "PROTOBUF"}
    file = tmp_path / "descriptors"
    file.write_bytes(base64.b64decode(descriptors(PROTO)))
    with answering_registry() as registry:
        registry.answers["/schemas/ids/7"] = (200, json.dumps(schema))
        wired = payloads_of(registry.url, "protobuf")
        row = {"key": indexed(7, message, 1), "value": None, "headers": None}
        assert is_found(value, *wired.of(row)) == expected
        by_file = {"type": "protobuf", "descriptor": file, "message": "shop.Event"}
        plain = payloads_of(registry.url, by_file)
        row = {"key": None, "value": message.SerializeToString(), "headers": None}
        assert is_found(value, *plain.of(row)) == expected
        for part in (b'{"id": "anna"}', b"anna", b"\x0a\x04anna\xff"):
            assert is_found("anna", *plain.of({"key": None, "value": part, "headers": None}))


def test_a_registry_that_does_not_answer_ends_the_search() -> None:
    with answering_registry() as registry:
        registry.answers["/schemas/ids/7"] = (503, "")
        with pytest.raises(Transient, match="503"):
            payloads_of(registry.url).of({"key": None, "value": avro(), "headers": None})


def payloads_of(url: str, format: Any = "avro") -> Payloads:
    settings = Environment(
        kafka=Kafka(bootstrap_servers="127.0.0.1:1"),
        catalog=Catalog(name="lake", warehouse="file:///lake", uri="sqlite:////lake.db"),
        registry=Registry(url=url),
    )
    return Payloads(settings, new_stream(format=format))
