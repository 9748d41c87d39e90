"""A stream's columns: Spark DDL as values, and as Iceberg's schemas."""

import pytest
from lakes import new_stream
from pyiceberg.types import (
    BinaryType,
    DecimalType,
    IcebergType,
    IntegerType,
    ListType,
    LongType,
    MapType,
    NestedField,
    StringType,
    StructType,
    TimestamptzType,
)

from anabranch.config.columns import Column, parse_columns
from anabranch.iceberg.table_schemas import dead_letters_schema, iceberg_type, rows_schema


@pytest.mark.parametrize(
    ("ddl", "expected"),
    [
        ("STRING", "string"),
        ("VARCHAR(20)", "string"),
        ("INT", "int"),
        ("INTEGER", "int"),
        ("SMALLINT", "int"),
        ("TINYINT", "int"),
        ("BIGINT", "bigint"),
        ("LONG", "bigint"),
        ("FLOAT", "float"),
        ("DOUBLE", "double"),
        ("BOOLEAN", "boolean"),
        ("DATE", "date"),
        ("TIMESTAMP", "timestamp"),
        ("BINARY", "binary"),
        ("DECIMAL(10, 2)", "decimal(10,2)"),
        ("DECIMAL(5)", "decimal(5,0)"),
        ("DECIMAL", "decimal(10,0)"),
        ("ARRAY<STRING>", "array<string>"),
        ("MAP<STRING, INT>", "map<string,int>"),
        ("STRUCT<a: INT, b: ARRAY<DATE>>", "struct<a:int,b:array<date>>"),
        ("array<struct<a: decimal(4, 1)>>", "array<struct<a:decimal(4,1)>>"),
    ],
)
def test_types(ddl: str, expected: str) -> None:
    assert parse_columns(f"c {ddl}") == (Column("c", expected, True),)


def test_not_null_is_required_and_all_else_is_nullable() -> None:
    assert [
        c.nullable
        for c in parse_columns("a STRING NOT NULL, b STRING, c STRING NULL, d INT NOT NULL")
    ] == [False, True, True, False]


def test_columns_keep_their_order_and_case() -> None:
    assert [c.name for c in parse_columns("b INT, A INT, `c_1` INT")] == ["b", "A", "c_1"]


@pytest.mark.parametrize(
    ("ddl", "message"),
    [
        (None, "expected columns such as 'id STRING NOT NULL, at TIMESTAMP', found None"),
        ("", "found ''"),
        (7, "found 7"),
        ("a", "expected 'name TYPE'"),
        ("a STRING b INT", "expected"),
        ("a INTERVAL", "expected"),
        ("a VARIANT", "expected one of the types array, bigint, "),
        ("`a b` INT", "expected a column name of letters, digits and underscores, found 'a b'"),
        ("a INT, A STRING", "expected each column once, found 'a' twice"),
        ("a INT, PRIMARY KEY (a)", "expected 'name TYPE'"),
    ],
)
def test_an_invalid_column_is_reported_with_expected_and_found(ddl: object, message: str) -> None:
    with pytest.raises(ValueError, match="expected") as error:
        parse_columns(ddl)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("spark", "expected"),
    [
        ("string", StringType()),
        ("int", IntegerType()),
        ("bigint", LongType()),
        ("timestamp", TimestamptzType()),
        ("binary", BinaryType()),
        ("decimal(10,2)", DecimalType(10, 2)),
        ("array<int>", ListType(1, IntegerType(), element_required=False)),
        ("map<string,bigint>", MapType(1, StringType(), 2, LongType(), value_required=False)),
        (
            "struct<a:int,b:array<string>>",
            StructType(
                NestedField(1, "a", IntegerType()),
                NestedField(2, "b", ListType(3, StringType(), element_required=False)),
            ),
        ),
    ],
)
def test_iceberg_types(spark: str, expected: IcebergType) -> None:
    assert iceberg_type(spark, [0]) == expected


def test_every_type_that_configuration_accepts_has_one_in_iceberg() -> None:
    types = (
        "STRING", "INT", "BIGINT", "SMALLINT", "TINYINT", "FLOAT", "DOUBLE", "BOOLEAN", "DATE",
        "TIMESTAMP", "BINARY", "DECIMAL(9,2)", "DECIMAL", "ARRAY<DOUBLE>", "MAP<STRING,DATE>",
        "STRUCT<a:ARRAY<STRUCT<b:TIMESTAMP>>,c:BINARY>",
    )  # fmt: skip
    ddl = ", ".join(f"c{i} {kind}" for i, kind in enumerate(types))
    stream = new_stream(schema=ddl, columns=parse_columns(ddl), key="c0")
    schema = rows_schema(stream)
    assert len(schema.fields) == 16 + 5
    ids = list(schema._lazy_id_to_field)
    assert len(ids) == len(set(ids))


def test_rows_carry_where_they_came_from() -> None:
    fields = rows_schema(new_stream()).fields
    assert [(f.name, f.required) for f in fields] == [
        ("id", True), ("n", False), ("kafka_partition", True), ("kafka_offset", True),
        ("kafka_timestamp", False), ("ingest_hour", True), ("event_date", True),
    ]  # fmt: skip


def test_dead_letters_keep_the_records_bytes_position_and_reason() -> None:
    required = {f.name for f in dead_letters_schema().fields if f.required}
    assert required == {
        "topic_id", "kafka_partition", "kafka_offset", "ingest_hour", "error_code", "layer",
    }  # fmt: skip
    assert {"key", "value", "headers", "kafka_timestamp"} < {
        f.name for f in dead_letters_schema().fields
    }


def test_a_hundred_streams_derive_columns_once_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """The hazard: a cache for eight streams parsed the types of each of fifty for each publish."""
    streams = [
        new_stream(name=f"app_{n}", topic=f"app-{n}", table=f"many.app_{n}") for n in range(100)
    ]
    first = [rows_schema(stream) for stream in streams]
    monkeypatch.setattr("anabranch.iceberg.table_schemas.iceberg_type", None)
    assert [rows_schema(stream) for stream in streams] == first
