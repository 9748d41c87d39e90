"""A subject's schema as columns: every type of Avro and JSON Schema, or a path of none."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from anabranch.iceberg.schema_evolution import type_words
from anabranch.iceberg.table_schemas import iceberg_type
from anabranch.subjects.columns import NotAColumn, avro_fields, json_schema_fields

FIXED = {"type": "fixed", "name": "F", "size": 16}
SELECT = {"name": "select", "type": "string"}
POINT = {"type": "record", "name": "P", "fields": [{"name": "x", "type": "int"}, SELECT]}


def avro(kind: Any) -> list[tuple[str, str]]:
    record = {"type": "record", "name": "E", "namespace": "n", "fields": [{"name": "f", "type": kind}]}  # fmt: skip
    return avro_fields(json.dumps(record))


def logical(kind: str, name: str, **more: Any) -> dict[str, Any]:
    return {"type": kind, "logicalType": name, **more}


@pytest.mark.parametrize(
    ("kind", "column"),
    [
        ("boolean", "boolean"),
        ("int", "int"),
        ("long", "bigint"),
        ("float", "float"),
        ("double", "double"),
        ("string", "string"),
        ("bytes", "binary"),
        (FIXED, "binary"),
        ({"type": "enum", "name": "C", "symbols": ["A"]}, "string"),
        (logical("string", "uuid"), "string"),
        (FIXED | {"logicalType": "uuid"}, "binary"),
        (logical("int", "date"), "date"),
        (logical("int", "time-millis"), "int"),
        (logical("long", "time-micros"), "bigint"),
        (logical("long", "timestamp-millis"), "timestamp"),
        (logical("long", "timestamp-micros"), "timestamp"),
        (logical("long", "timestamp-nanos"), "timestamp"),
        (logical("long", "local-timestamp-micros"), "timestamp"),
        (logical("long", "timestamp-weeks"), "bigint"),
        (logical("bytes", "decimal", precision=12, scale=2), "decimal(12,2)"),
        (FIXED | logical("fixed", "decimal", precision=38), "decimal(38,0)"),
        (logical("bytes", "decimal", precision=2, scale=9), "binary"),
        ({"type": "array", "items": ["null", "int"]}, "array<int>"),
        ({"type": "map", "values": POINT}, "map<string,struct<x:int,select:string>>"),
        (["null", "string"], "string"),
        (["long", "null"], "bigint"),
        (["double"], "double"),
        (["int", "null", "long"], "bigint"),
        (["double", "float"], "double"),
        (["null", "int", "string"], "struct<member_int:int,member_string:string>"),
        (["null", POINT, FIXED], "struct<member_P:struct<x:int,select:string>,member_F:binary>"),
        ({"type": "array", "items": ["int", "string"]}, "array<struct<member_int:int,member_string:string>>"),
        (["null", logical("long", "timestamp-millis"), "int"], "struct<member_long:timestamp,member_int:int>"),
        (
            [POINT, {**POINT, "name": "o.p"}],
            "struct<member_n_P:struct<x:int,select:string>,member_o_p:struct<x:int,select:string>>",
        ),
        ([FIXED, "string", "F"], "struct<member_n_F_0:binary,member_string_1:string,member_n_F_2:binary>"),
        # Kafka Connect's decimals have 64 digits, whatever their columns have.
        (logical("bytes", "decimal", precision=64, scale=2), "decimal(38,2)"),
    ],
)  # fmt: skip
def test_avro_types(kind: Any, column: str) -> None:
    assert avro(kind) == [("f", column)]
    assert type_words(iceberg_type(column, [0]), in_order=True) == column  # a type that a table has


NO_COLUMN_OF_AVRO: list[Any] = [
    "null",
    ["null"],
    {"type": "map", "values": ["null"]},
    ["string", {"type": "array", "items": ["null"]}],
    logical("bytes", "decimal", precision=64, scale=39),
    {"type": "record", "name": "R", "fields": []},
    {"type": "record", "name": "R", "fields": [{"name": "r", "type": ["null", "R"]}]},
    POINT | {"fields": [{"name": "a", "type": "int"}, {"name": "A", "type": "int"}]},
    POINT | {"fields": [{"name": "deep", "type": ["null"]}]},
    "Unknown",
]


@pytest.mark.parametrize("name", ["Avro", "JSON Schema"])
def test_what_is_no_column_is_refused_by_path(name: str, recorded: Callable[[Any], None]) -> None:
    said = []
    for schema in NO_COLUMN_OF_AVRO if name == "Avro" else NO_COLUMN_OF_JSON:
        with pytest.raises(NotAColumn) as refused:
            avro(schema) if name == "Avro" else of_json(schema, **DEFINED)
        said.append(str(refused.value))
    recorded(said)


def test_avro_fields_keep_their_order_and_some_are_left_out() -> None:
    fields = [{"name": name, "type": "int"} for name in ("b", "a")]
    fields += [{"name": "odd", "type": ["int", "string"]}]  # type: ignore[dict-item]
    text = json.dumps({"type": "record", "name": "E", "fields": fields})
    assert avro_fields(text, {"odd": None, "b": "bigint"}) == [("b", "bigint"), ("a", "int")]
    with pytest.raises(NotAColumn, match="expected a record, found string"):
        avro_fields('"string"')


def of_json(schema: Any, **more: Any) -> list[tuple[str, str]]:
    return json_schema_fields(json.dumps({"type": "object", "properties": {"f": schema}, **more}))


DEFINED = {
    "$defs": {
        "P": {"type": "object", "properties": {"x": {"type": "integer"}}},
        "Q": {"$ref": "#/$defs/P"},
    },
    "definitions": {
        "a/b": {"type": "string"},
        "Loop": {"properties": {"next": {"$ref": "#/definitions/Loop"}}},
    },
}


@pytest.mark.parametrize(
    ("schema", "column"),
    yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text("utf-8"))["json_schema_types"],
)
def test_json_schema_types(schema: Any, column: str) -> None:
    assert of_json(schema, **DEFINED) == [("f", column)]


NO_COLUMN_OF_JSON: list[Any] = [
    {"type": ["integer", "string"]},
    {},
    True,
    {"type": "null"},
    {"type": "array"},
    {"type": "array", "items": [{"type": "string"}]},
    {"type": "array", "items": {"type": "object"}},
    {"type": "object", "properties": {"x": {}}},
    {"type": "object", "additionalProperties": {"enum": ["a", 1]}},
    {"oneOf": [{"type": "string"}, {"type": "integer"}]},
    {"$ref": "other.json#/a"},
    {"$ref": "#/$defs/Z"},
    {"$ref": "#/definitions/Loop"},
    {"type": "object", "properties": {"a b": {"type": "string"}}},
]


def test_a_json_schema_of_no_object_or_of_endless_types_is_refused_at_once() -> None:
    for text in ('{"type": "string"}', "{}", "[]", "no", "[" * 100_000):
        with pytest.raises(NotAColumn):
            json_schema_fields(text)

    def level(number: int) -> dict[str, Any]:
        of = {"$ref": f"#/$defs/{number}"}
        return {"type": "object", "properties": {"a": of, "b": of}}

    defs = {str(i): level(i + 1) for i in range(60)} | {"60": {"type": "string"}}
    with pytest.raises(NotAColumn, match="expected a schema of at most 10000 types, found more"):
        of_json({"$ref": "#/$defs/0"}, **{"$defs": defs})
    deep: dict[str, Any] = {"type": "string"}
    for _ in range(200):
        deep = {"type": "array", "items": deep}
    with pytest.raises(NotAColumn, match="expected at most 100 levels, found more"):
        of_json(deep)
