"""A stream's columns: Spark DDL as values, and as Iceberg's schemas."""

from collections.abc import Callable
from datetime import date
from typing import Any

import pyarrow as pa
import pytest
from lakes import DDL, FIRST, StreamLake, new_stream
from pyiceberg.table import Transaction
from pyiceberg.table.sorting import NullOrder
from pyiceberg.transforms import IdentityTransform
from pyiceberg.types import IntegerType

from anabranch.config import Files
from anabranch.config.columns import Column, parse_columns
from anabranch.iceberg.parquet_writer import FileWriter, data_file_of, target_of
from anabranch.iceberg.table_schemas import (
    DESIGN,
    PhysicalDesign,
    apply_design,
    dead_letters_schema,
    iceberg_type,
    plan_design,
    rows_design,
    rows_schema,
    sort_order_id,
)
from serving_layer.query.datasets import file_guarantee


def test_types(recorded: Callable[[Any], None]) -> None:
    types = (
        "STRING", "VARCHAR(20)", "INT", "INTEGER", "SMALLINT", "TINYINT", "BIGINT", "LONG", "FLOAT",
        "DOUBLE", "BOOLEAN", "DATE", "TIMESTAMP", "BINARY", "DECIMAL(10, 2)", "DECIMAL(5)",
        "DECIMAL", "ARRAY<STRING>", "MAP<STRING, INT>", "STRUCT<a: INT, b: ARRAY<DATE>>",
        "array<struct<a: decimal(4, 1)>>",
    )  # fmt: skip
    columns = {ddl: parse_columns(f"c {ddl}") for ddl in types}
    assert all(found == (Column("c", found[0].type, True),) for found in columns.values())
    recorded({ddl: found[0].type for ddl, found in columns.items()})


def test_columns_keep_their_order_case_and_nullability() -> None:
    columns = parse_columns("a STRING NOT NULL, b STRING, c STRING NULL, d INT NOT NULL")
    assert [c.nullable for c in columns] == [False, True, True, False]
    assert [c.name for c in parse_columns("b INT, A INT, `c_1` INT")] == ["b", "A", "c_1"]
    with pytest.raises(ValueError, match="expected Spark DDL, found 'a STRING b INT'"):
        parse_columns("a STRING b INT")


def test_iceberg_types(recorded: Callable[[Any], None]) -> None:
    types = (
        "string", "int", "bigint", "timestamp", "binary", "decimal(10,2)", "array<int>",
        "map<string,bigint>", "struct<a:int,b:array<string>>",
    )  # fmt: skip
    recorded({spark: repr(iceberg_type(spark, [0])) for spark in types})


def test_every_type_that_configuration_accepts_has_one_in_iceberg() -> None:
    types = (
        "STRING", "INT", "BIGINT", "SMALLINT", "TINYINT", "FLOAT", "DOUBLE", "BOOLEAN", "DATE",
        "TIMESTAMP", "BINARY", "DECIMAL(9,2)", "DECIMAL", "ARRAY<DOUBLE>", "MAP<STRING,DATE>",
        "STRUCT<a:ARRAY<STRUCT<b:TIMESTAMP>>,c:BINARY>",
    )  # fmt: skip
    ddl = ", ".join(f"c{i} {kind}" for i, kind in enumerate(types))
    stream = new_stream(schema=ddl, key="c0")
    schema = rows_schema(stream)
    assert len(schema.fields) == 16 + 5
    ids = list(schema._lazy_id_to_field)
    assert len(ids) == len(set(ids))


def test_rows_and_dead_letters_carry_where_they_came_from() -> None:
    fields = rows_schema(new_stream()).fields
    assert [(f.name, f.required) for f in fields] == [
        ("id", True), ("n", False), ("kafka_partition", True), ("kafka_offset", True),
        ("kafka_timestamp", False), ("ingest_hour", True), ("event_date", True),
    ]  # fmt: skip
    required = {f.name for f in dead_letters_schema().fields if f.required}
    assert required == {
        "topic_id", "kafka_partition", "kafka_offset", "ingest_hour", "error_code", "layer",
    }  # fmt: skip
    expected = {"key", "value", "headers", "kafka_timestamp"}
    assert expected < {f.name for f in dead_letters_schema().fields}


def test_a_hundred_streams_derive_columns_once_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """The hazard: a cache for eight streams parsed the types of each of fifty for each publish."""
    streams = [
        new_stream(name=f"app_{n}", topic=f"app-{n}", table=f"many.app_{n}") for n in range(100)
    ]
    first = [rows_schema(stream) for stream in streams]
    monkeypatch.setattr("anabranch.iceberg.table_schemas.iceberg_type", None)
    assert [rows_schema(stream) for stream in streams] == first


# Physical design by the stream's file: what apply says of it in the table, and what it takes back.

DESIGNED = PhysicalDesign(("id",), ("id",), ("id", "ingest_hour"))
BLOOM = "write.parquet.bloom-filter-enabled.column.id"


def set_by_hand(lake: StreamLake, values: dict[str, str], *sort: str) -> None:
    table = lake.table()
    tx = Transaction(table)
    tx.set_properties(values)
    with tx.update_sort_order() as order:
        for column in sort:
            order.asc(column, IdentityTransform(), NullOrder.NULLS_FIRST)
    lake.lake.catalog.commit_table(table, (), tuple(tx._updates))


def test_without_a_design_a_table_stays_as_it_is(lake: StreamLake) -> None:
    """The hazard: an operator's own settings, taken for what an older file of the stream had."""
    before = lake.table().metadata_location
    assert apply_design(lake.lake, lake.name, PhysicalDesign()) == []
    assert lake.table().metadata_location == before
    set_by_hand(lake, {BLOOM: "true", "write.metadata.metrics.default": "full"}, "n")
    before = lake.table().metadata_location
    assert apply_design(lake.lake, lake.name, PhysicalDesign()) == []
    assert lake.table().metadata_location == before


def test_a_design_becomes_iceberg_properties_in_one_commit(lake: StreamLake) -> None:
    number, before = len(lake.table().metadata.metadata_log), lake.table().properties
    [sentence] = apply_design(lake.lake, lake.name, DESIGNED)
    have = "sort order id; Bloom filters of id; bounds of id, ingest_hour"
    assert sentence == f"from now on batch files of games.events have {have}"
    table = lake.table()
    assert len(table.metadata.metadata_log) == number + 1
    set_now = {k: v for k, v in table.properties.items() if k not in before}
    assert {k: v for k, v in set_now.items() if k.startswith("write.")} == {
        BLOOM: "true",
        "write.parquet.bloom-filter-adaptive-enabled": "true",
        "write.parquet.row-group-size-bytes": "33554432",
        "write.metadata.metrics.column.id": "truncate(64)",
        "write.metadata.metrics.column.ingest_hour": "truncate(64)",
    }
    [field] = table.sort_order().fields
    assert (field.source_id, str(field.transform)) == (1, "identity")
    assert field.null_order == NullOrder.NULLS_FIRST
    assert apply_design(lake.lake, lake.name, DESIGNED) == []


def test_only_settings_that_the_file_no_longer_has_are_removed(lake: StreamLake) -> None:
    set_by_hand(lake, {"write.metadata.metrics.column.n": "full"})
    before = lake.table().properties
    apply_design(lake.lake, lake.name, DESIGNED)
    expected = ["from now on batch files of games.events have sort order n"]
    assert apply_design(lake.lake, lake.name, PhysicalDesign(("n",))) == expected
    assert BLOOM not in lake.table().properties
    assert sort_order_id(lake.table(), ("n",)) == 2
    expected = ["from now on batch files of games.events have no physical design"]
    assert apply_design(lake.lake, lake.name, PhysicalDesign()) == expected
    # Of a column that a design named, what an operator had set before it is not known any more.
    found = lake.table().properties
    assert found == {k: v for k, v in before.items() if not k.endswith("column.n")}
    assert lake.table().sort_order().is_unsorted
    # The first order again, by the id that it had.
    apply_design(lake.lake, lake.name, DESIGNED)
    assert sort_order_id(lake.table(), ("id",)) == 1


def test_an_order_that_an_operator_set_since_is_left() -> None:
    said = {DESIGN: '{"sort": ["id"], "properties": []}'}
    assert plan_design(said, ("id",), PhysicalDesign()).sort == ()
    for of_operator in (("n",), None):
        assert plan_design(said, of_operator, PhysicalDesign()).sort is None


def test_files_claim_the_tables_order_only_if_sorted_by_it(lake: StreamLake) -> None:
    """The hazard: rows sorted by a file that was not applied, named as sorted by the table."""
    assert sort_order_id(lake.table(), ()) == sort_order_id(lake.table(), ("id",)) == 0
    apply_design(lake.lake, lake.name, PhysicalDesign(("id", "n")))
    table = lake.table()
    assert sort_order_id(table, ("id", "n")) == 1
    others: list[tuple[str, ...]] = [(), ("id",), ("n", "id"), ("id", "n", "event_date")]
    assert [sort_order_id(table, columns) for columns in others] == [0] * 4


def test_our_own_columns_have_bounds_in_a_wide_table() -> None:
    ours = ("kafka_partition", "kafka_offset", "kafka_timestamp", "ingest_hour", "event_date")
    assert rows_design(new_stream()) == PhysicalDesign()
    assert rows_design(new_stream(files=Files(sort="n"))).bounded == ()
    wide = ", ".join([DDL, *(f"c{i} INT" for i in range(100))])
    assert rows_design(new_stream(schema=wide)).bounded == ours
    # Also where the manifests hold bounds of others as Iceberg does by itself.
    bounds = "write.metadata.metrics.column.n"
    assert rows_design(new_stream(files=Files(sort=("n",)))).properties[bounds]


def test_the_speed_layers_files_have_bounds_and_claim_no_order(lake: StreamLake) -> None:
    # As an operator of a table with many columns may set it.
    set_by_hand(lake, {"write.metadata.metrics.default": "counts"})
    apply_design(lake.lake, lake.name, PhysicalDesign(("id",), ("id",), ("id", "kafka_offset")))
    table = lake.table()
    rows = pa.table(
        {
            "id": pa.array(["z" * 100, "a"]),
            "n": pa.array([7, None], pa.int32()),
            "kafka_partition": pa.array([0, 0], pa.int32()),
            "kafka_offset": pa.array([1, 2], pa.int64()),
            "kafka_timestamp": pa.array([None, None], pa.timestamp("us", "UTC")),
            "ingest_hour": [FIRST, FIRST],
            "event_date": [date(2026, 11, 21)] * 2,
        }
    )
    target = target_of(table)
    assert target is not None
    writer = FileWriter(target)
    assert writer.write(rows) is None
    [output] = writer.close()
    file = data_file_of(table, output)
    ids = {f.name: f.field_id for f in table.schema().fields}
    assert file.sort_order_id in (None, 0)
    assert file.lower_bounds.keys() == file.upper_bounds.keys() == {ids["id"], ids["kafka_offset"]}
    assert (file.lower_bounds[ids["id"]], file.upper_bounds[ids["id"]]) == (b"a", b"z" * 63 + b"{")
    # Counts stay, for every column: they show the columns of a file.
    assert file.value_counts.keys() == file.null_value_counts.keys() == set(ids.values())
    assert file.null_value_counts[ids["n"]] == 1
    # No bound means that anything may be there.
    assert isinstance(table.schema().find_type("n"), IntegerType)
    columns = table.schema().as_arrow()
    n_alone = pa.schema([columns.field("n")])
    assert file_guarantee(table.schema(), n_alone, table.spec(), file) is None
