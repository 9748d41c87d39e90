"""Schemas with references as decoders read them, and what of Protobuf is a column."""

import ast
import base64
import json
import re
import sys
from pathlib import Path
from typing import Any

import confluent_kafka
import pytest
from google.protobuf.descriptor_pb2 import FileDescriptorProto, FileDescriptorSet
from lakes import new_stream
from protos import HEAD

from anabranch.common.errors import ConfigurationError, Refused
from anabranch.config import Stream, SubjectSchema
from anabranch.config.columns import columns_ddl, parse_columns
from anabranch.decode import protobuf
from anabranch.decode.avro_names import Incompatible, parse
from anabranch.kafka.schema_registry import References, SubjectVersion
from anabranch.subjects.columns import NotAColumn, avro_fields, protobuf_fields
from anabranch.subjects.plan import plan_columns
from anabranch.subjects.schemas import compiled, whole_schema


def version(text: str, kind: str = "PROTOBUF", references: References = ()) -> SubjectVersion:
    return SubjectVersion("orders-value", 1, kind, text, references)


def record(name: str, *fields: tuple[str, Any], **more: Any) -> str:
    schema = {"type": "record", "name": name, "fields": [{"name": n, "type": t} for n, t in fields]}
    return json.dumps(schema | more)


def test_schemas_are_read_with_those_that_they_refer_to() -> None:
    money = record("Money", ("amount", "long"), namespace="shop.common")
    line = record("Line", ("price", "shop.common.Money"), namespace="shop")
    main = record("Order", ("line", "Line"), ("total", "shop.common.Money"), namespace="shop")
    references = (("shop.common.Money", money), ("shop.Line", line))
    text = whole_schema(version(main, "AVRO", references))
    expected = [("line", "struct<price:struct<amount:bigint>>"), ("total", "struct<amount:bigint>")]
    assert avro_fields(text) == expected
    with pytest.raises(Incompatible, match=r"found the name shop\.Line without its definition"):
        parse(main)
    order = compiled(ORDER, (("shop/money.proto", COMMON),))
    assert protobuf.message_of(order, (0,)).full_name == "shop.Order"
    assert protobuf_fields(order, None) == [("id", "string"), ("total", "struct<units:bigint>")]


COMMON = 'syntax = "proto3"; package shop; message Money { int64 units = 1; }'
ORDER = HEAD + 'import "shop/money.proto"; message Order { string id = 1; Money total = 2; }'


KNOWN = (
    HEAD
    + """
import "confluent/meta.proto"; import "confluent/type/decimal.proto"; import "google/type/date.proto";
option (confluent.file_meta).doc = "orders";
message Order {
  string id = 1 [(confluent.field_meta) = {params: [{key: "a", value: "b"}], tags: ["PII"]}];
  confluent.type.Decimal total = 2; google.type.Date day = 3;
}
"""
)


def test_files_that_clients_import_without_a_reference_are_known() -> None:
    text = compiled(KNOWN, ())
    parts = "struct<value:binary,precision:bigint,scale:int>"
    assert protobuf_fields(text, None) == [("id", "string"), ("total", parts), ("day", "date")]
    expected = "id STRING NOT NULL, total DECIMAL(12,2), day DATE"
    assert planned(stream("total DECIMAL(12,2)"), KNOWN) == expected
    ours = {file.name: file for file in FileDescriptorSet.FromString(base64.b64decode(text)).file}
    # As Confluent's Python client has them. Its module imports others that are not installed.
    client = Path(confluent_kafka.__file__).parent / "schema_registry"
    for name in ("confluent/meta", "confluent/type/decimal"):
        text = (client / f"{name}_pb2.py").read_text()
        [literal] = re.findall(r"AddSerializedFile\(\s*(b'.*')\s*\)", text)
        theirs = FileDescriptorProto.FromString(ast.literal_eval(literal))
        assert parts_of(ours[f"{name}.proto"]) == parts_of(theirs)


def parts_of(file: FileDescriptorProto) -> list[str]:
    parts = (*file.message_type, *file.extension)
    return [re.sub(r" *json_name: .*\n", "", str(part)) for part in parts]


@pytest.mark.parametrize(
    ("text", "references", "message"),
    [
        ("message", (), "one that protoc refuses: __schema__.proto:"),
        (ORDER, (), "shop/money.proto: File not found"),
        (COMMON, (("../money.proto", COMMON),), "an import within a folder, found ../money.proto"),
        (COMMON, (("/tmp/money.proto", COMMON),), "an import within a folder, found /tmp/money"),
    ],
)
def test_what_protoc_refuses_cannot_be(text: str, references: References, message: str) -> None:
    with pytest.raises(Incompatible) as refused:
        compiled(text, references)
    assert message in str(refused.value)


def test_without_protoc_the_package_to_install_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "grpc_tools", None)
    with pytest.raises(ConfigurationError, match=r"pip install 'anabranch\[protobuf\]'"):
        compiled(COMMON + "// not cached", ())


TYPES = (
    HEAD
    + """
import "google/protobuf/wrappers.proto"; import "google/protobuf/duration.proto";
message Every {
  bool a = 1; int32 b = 2; sint32 c = 3; sfixed32 d = 4; uint32 e = 5; fixed32 f = 6; int64 g = 7; sint64 h = 8;
  sfixed64 i = 9; uint64 j = 10; fixed64 k = 11; float l = 12; double m = 13; string n = 14; bytes o = 15; E p = 16;
  google.protobuf.Timestamp q = 17; google.protobuf.UInt64Value r = 18; google.protobuf.Duration s = 19;
  repeated E t = 20; map<string, google.protobuf.Timestamp> u = 21; map<int64, In> v = 22; repeated In w = 23;
  message In { optional int32 x = 1; } oneof one { string y = 24; In z = 25; }
}
enum E { A = 0; }
message Node { string id = 1; Node next = 2; }
message Deep { string id = 1; repeated Node nodes = 2; map<uint64, string> keys = 3; Empty empty = 4; }
message Empty {}
"""
)


def test_types_of_protobuf_as_columns() -> None:
    found = dict(protobuf_fields(compiled(TYPES, ()), None))
    assert found == {
        "a": "boolean", **dict.fromkeys("bcd", "int"), **dict.fromkeys("efghi", "bigint"),
        **dict.fromkeys("jkr", "decimal(20,0)"), "l": "float", "m": "double", "n": "string", "o": "binary",
        "p": "string", "q": "timestamp", "s": "struct<seconds:bigint,nanos:int>", "t": "array<string>",
        "u": "map<string,timestamp>", "v": "map<bigint,struct<x:int>>", "w": "array<struct<x:int>>",
        "y": "string", "z": "struct<x:int>",
    }  # fmt: skip
    assert protobuf_fields(compiled(TYPES, ()), "shop.Empty") == []
    # Each is a type as which the field can be read.
    columns = tuple((name, kind, False) for name, kind in found.items())
    assert protobuf.plan(compiled(TYPES, ()), (0,), columns)


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ("shop.Node", "next: expected no message that contains itself, found shop.Node"),
        ("shop.Deep", "nodes[].next: expected no message that contains itself, found shop.Node"),
        ("shop.Nothing", "expected a message shop.Nothing, found none"),
    ],
)
def test_messages_that_cannot_become_columns(message: str, expected: str) -> None:

    with pytest.raises(NotAColumn) as refused:
        protobuf_fields(compiled(TYPES, ()), message)
    assert expected in str(refused.value)


def test_messages_and_fields_that_cannot_become_columns() -> None:
    given: dict[str, str | None] = {"nodes": None}
    with pytest.raises(NotAColumn, match="keys: expected a map with keys other than uint64"):
        protobuf_fields(compiled(TYPES, ()), "shop.Deep", given)
    with pytest.raises(NotAColumn, match="empty: expected a record with fields"):
        protobuf_fields(compiled(TYPES, ()), "shop.Deep", given | {"keys": None})
    # The hazard: a schema of a few lines whose columns take more than the machine's memory.
    levels = [f"message L{i} {{ L{i + 1} a = 1; L{i + 1} b = 2; }}" for i in range(60)]
    text = HEAD + "\n".join([*levels, "message L60 { string id = 1; }"])
    with pytest.raises(NotAColumn, match="expected a type of at most 1000000 characters"):
        protobuf_fields(compiled(text, ()), "shop.L0")


def stream(columns: str = "", **more: Any) -> Stream:
    declared = {"columns": parse_columns(columns)} if columns else {}
    schema = SubjectSchema.model_validate(declared | more.pop("rules", {}))
    form = {"type": "protobuf", "subject": "orders-value"} | more
    return new_stream(format=form, schema="registry", columns=(), subject_schema=schema)


def planned(of: Stream, text: str, references: References = ()) -> str:
    return columns_ddl(plan_columns(of, version(text, references=references)))


def test_a_stream_has_the_columns_of_its_subjects_message() -> None:
    references = (("shop/money.proto", COMMON),)
    assert planned(stream(), ORDER, references) == "id STRING NOT NULL, total STRUCT<units:BIGINT>"
    node = stream(message="shop.Node", rules={"exclude": ["next"]})
    assert planned(node, TYPES) == "id STRING NOT NULL"
    node = stream("n INT", message="shop.Node", rules={"exclude": ["next"]})
    assert planned(node, TYPES) == "id STRING NOT NULL, n INT"
    declared = stream("next STRUCT<id: STRING>", message="shop.Node")
    assert planned(declared, TYPES) == "id STRING NOT NULL, next STRUCT<id:STRING>"


@pytest.mark.parametrize(
    ("of", "text", "message"),
    [
        (stream(), "message", "expected a schema that can be read, found expected a Protobuf file"),
        (stream(message="shop.Node"), TYPES, "next: expected no message that contains itself"),
        (stream("id BIGINT"), ORDER.replace("Money", "Other"), "protoc refuses"),
        (stream(), COMMON, "key: expected a field id, found units"),
        (
            stream("id BIGINT", message="shop.Node", rules={"exclude": ["next"]}), TYPES,
            "id: expected a type readable as bigint, found string; correct `schema: {columns: ...}`",
        ),
    ],
)  # fmt: skip
def test_what_is_no_column_is_refused_with_the_subject(of: Stream, text: str, message: str) -> None:

    with pytest.raises(Refused, match="subject orders-value version 1: ") as refused:
        planned(of, text)
    assert message in str(refused.value)
