"""A writer's Avro schema against a stream's columns: what becomes a column, and what is refused,
without a JVM."""

from __future__ import annotations

import json
from typing import Any

import pytest
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    BooleanType,
    DataType,
    DateType,
    DecimalType,
    DoubleType,
    FloatType,
    IntegerType,
    LongType,
    MapType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from anabranch.records.formats.avro_schema import project
from anabranch.subjects.avro_names import Incompatible, parse

ENUM = {"type": "enum", "name": "Color", "namespace": "a.b", "symbols": ["RED"]}
FIXED = {"type": "fixed", "name": "F", "size": 4}


def logical(kind: str, name: str, **more: int) -> dict[str, Any]:
    return {"type": kind, "logicalType": name, **more}


def record(*fields: tuple[str, Any], **more: Any) -> dict[str, Any]:
    return {
        "type": "record",
        "name": "E",
        "fields": [{"name": n, "type": t} for n, t in fields],
        **more,
    }


def reader_of(kind: DataType, written: Any) -> Any:
    """The schema that a column `c` is read by."""
    projection = project({"c": kind}, [], json.dumps(record(("c", written), ("other", "long"))))
    [framed, end] = json.loads(projection.reader)["fields"]
    assert end["type"]["size"] == 16
    [only] = framed["type"]["fields"]
    assert only["name"] == "c" and only["type"][0] == "null"
    return only["type"][1]


@pytest.mark.parametrize(
    ("kind", "written", "reader"),
    [
        (StringType(), "string", "string"),
        (StringType(), "bytes", "string"),
        (StringType(), logical("string", "uuid"), "string"),
        (StringType(), ENUM, {"type": "enum", "name": "a.b.Color", "symbols": ["RED"]}),
        (BinaryType(), "bytes", "bytes"),
        (BinaryType(), "string", "bytes"),
        (BinaryType(), FIXED, {"type": "fixed", "name": "F", "size": 4}),
        (BooleanType(), "boolean", "boolean"),
        (IntegerType(), "int", "int"),
        (IntegerType(), {"type": "int"}, "int"),
        (IntegerType(), logical("int", "time-millis"), "int"),
        (LongType(), "int", "long"),
        (LongType(), "long", "long"),
        (LongType(), ["null", "int", "long"], "long"),
        (FloatType(), "long", "float"),
        (DoubleType(), "float", "double"),
        (DoubleType(), ["double", "null"], "double"),
        (DateType(), logical("int", "date"), "int"),
        (TimestampType(), logical("long", "timestamp-millis"), "long"),
        (TimestampType(), logical("long", "local-timestamp-micros"), "long"),
        (TimestampType(), ["null", logical("long", "timestamp-nanos")], "long"),
        (
            DecimalType(10, 2),
            logical("bytes", "decimal", precision=9, scale=1),
            logical("bytes", "decimal", precision=38, scale=1),
        ),
        (
            DecimalType(10, 2),
            {**FIXED, **logical("fixed", "decimal", precision=4, scale=2)},
            {**FIXED, **logical("fixed", "decimal", precision=9, scale=2)},
        ),
        (
            DecimalType(10, 2),
            {**FIXED, "size": 2000, **logical("fixed", "decimal", precision=4, scale=2)},
            {**FIXED, "size": 2000, **logical("fixed", "decimal", precision=38, scale=2)},
        ),
        (
            ArrayType(LongType()),
            {"type": "array", "items": "int"},
            {"type": "array", "items": ["null", "long"]},
        ),
        (
            MapType(StringType(), StringType()),
            {"type": "map", "values": "string"},
            {"type": "map", "values": ["null", "string"]},
        ),
    ],
)
def test_types_of_proposed_columns(kind: DataType, written: Any, reader: Any) -> None:
    assert reader_of(kind, written) == reader


@pytest.mark.parametrize(
    ("kind", "written", "message"),
    [
        (IntegerType(), "long", "c: expected a type readable as int, found long"),
        (IntegerType(), "string", "found string"),
        (LongType(), "double", "found double"),
        (StringType(), "int", "found int"),
        (StringType(), FIXED, "found fixed"),
        (StringType(), "null", "found null"),
        (BooleanType(), "int", "found int"),
        (DateType(), "int", "found int"),
        (TimestampType(), "long", "found long"),
        (TimestampType(), logical("long", "time-micros"), "found long (time-micros)"),
        (TimestampType(), "string", "found string"),
        (
            TimestampType(),
            [logical("long", "timestamp-millis"), logical("long", "timestamp-micros")],
            "found a union of long (timestamp-millis), long (timestamp-micros)",
        ),
        (StringType(), ["null", "string", "int"], "found int"),
        (StringType(), ["null"], "found a union of null"),
        (
            DecimalType(10, 2),
            logical("bytes", "decimal", precision=10, scale=3),
            "found decimal(10,3)",
        ),
        (
            DecimalType(10, 2),
            logical("bytes", "decimal", precision=10, scale=1),
            "found decimal(10,1)",
        ),
        (DecimalType(10, 2), logical("bytes", "decimal", precision=2, scale=3), "found bytes"),
        (DecimalType(10, 2), "double", "found double"),
        (BinaryType(), logical("bytes", "decimal", precision=4), "found bytes (decimal)"),
        (
            ArrayType(IntegerType()),
            {"type": "array", "items": "string"},
            "c[]: expected a type readable as int",
        ),
        (ArrayType(IntegerType()), {"type": "map", "values": "int"}, "found map"),
        (
            MapType(StringType(), DateType()),
            {"type": "map", "values": "int"},
            "c{}: expected a type readable as date",
        ),
        (
            StructType([StructField("n", IntegerType())]),
            record(("n", "long")),
            "c.n: expected a type readable as int",
        ),
        (
            StructType([StructField("n", IntegerType())]),
            record(("m", "long")),
            "c: expected a field of n, found none",
        ),
    ],
)
def test_names_that_cannot_become_columns(kind: DataType, written: Any, message: str) -> None:
    with pytest.raises(Incompatible) as error:
        reader_of(
            kind,
            written
            if not isinstance(written, dict) or written.get("name") != "E"
            else {**written, "name": "In"},
        )
    assert message in str(error.value)


def test_a_missing_field_is_null_unless_the_column_is_required() -> None:
    types: dict[str, DataType] = {"a": StringType(), "b": StringType()}
    writer = json.dumps(record(("a", "string")))
    assert set(project(types, ["a"], writer).values) == {"a"}
    with pytest.raises(
        Incompatible, match="b: expected a field for the NOT NULL column, found none"
    ):
        project(types, ["b"], writer)
    with pytest.raises(Incompatible, match="expected a field of a, b, found none"):
        project(types, [], json.dumps(record(("c", "string"))))


def test_a_named_type_is_defined_once_and_named_from_there_on() -> None:
    types: dict[str, DataType] = {"a": StringType(), "b": StringType()}
    projection = project(types, [], json.dumps(record(("a", ENUM), ("b", ["null", "a.b.Color"]))))
    fields = json.loads(projection.reader)["fields"][0]["type"]["fields"]
    assert fields[0]["type"][1]["name"] == fields[1]["type"][1] == "a.b.Color"


def test_names_follow_their_namespace() -> None:
    inner = record(("x", "int"))
    inner["name"] = "In"
    node = parse(json.dumps(record(("a", inner), ("b", "In"), ("c", "n.s.In"), namespace="n.s")))
    assert [f.name for f in node.fields.values()] == ["n.s.In"] * 3


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ("{", "expected an Avro schema, found one that is not"),
        ('{"type": "record", "name": "E"}', "expected an Avro schema"),
        ('{"name": "E"}', "expected an Avro schema"),
        ("5", "expected an Avro schema"),
        (json.dumps(record(("a", "Nowhere"))), "found the name Nowhere without its definition"),
        (
            json.dumps(record(("next", ["null", "E"]))),
            "expected no type that contains itself, found E",
        ),
        (
            json.dumps(record(("a", {"type": "array", "items": "null"}))),
            "expected arrays of items that take bytes",
        ),
        (
            json.dumps(record(("a", {"type": "array", "items": {**record(), "name": "Z"}}))),
            "items that take bytes",
        ),
        ("[" * 5000, "expected an Avro schema"),
        ('{"type":' * 150 + '"int"' + "}" * 150, "expected at most 100 levels"),
    ],
)
def test_invalid_schemas_and_schemas_of_endless_work(schema: str, message: str) -> None:
    with pytest.raises(Incompatible, match=message):
        parse(schema)


def test_a_schema_that_doubles_at_each_level_is_refused() -> None:
    """The hazard: a payload of no bytes that is 2^50 records."""
    schema: Any = "null"
    for level in range(50):
        schema = {
            "type": "record",
            "name": f"R{level}",
            "fields": [
                {"name": "a", "type": schema},
                {"name": "b", "type": f"R{level - 1}" if level else "null"},
            ],
        }
    with pytest.raises(Incompatible, match="expected at most 10000 types, found more"):
        parse(json.dumps(schema))


def test_invalid_records_are_refused() -> None:
    with pytest.raises(Incompatible, match="expected a record, found string"):
        project({"c": StringType()}, [], '"string"')
