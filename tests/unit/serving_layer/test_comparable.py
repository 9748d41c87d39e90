"""The shape in which rows of two layers are compared, from the files of a table that evolved; no
JVM is needed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
from lakes import new_lake, new_stream
from pyiceberg.io.pyarrow import schema_to_pyarrow
from pyiceberg.manifest import DataFile
from pyiceberg.table import Table
from pyspark.sql.pandas.types import from_arrow_schema

from anabranch.config.columns import parse_columns
from anabranch.iceberg import admin
from anabranch.iceberg.schema_evolution import evolve
from anabranch.iceberg.table_schemas import rows_columns, rows_schema
from serving_layer.layer_diff.spark import common_schema

BEFORE = (
    "id STRING NOT NULL, n INT, f FLOAT, s STRUCT<a: INT>, items ARRAY<STRUCT<a: FLOAT>>, m "
    "MAP<STRING, INT>"
)
AFTER = (
    "id STRING NOT NULL, n BIGINT, f DOUBLE, s STRUCT<a: BIGINT, b: STRING>, items "
    "ARRAY<STRUCT<a: DOUBLE, b: INT>>, m MAP<STRING, BIGINT>, colour STRING, home STRUCT<city: "
    "STRING>, g DOUBLE"
)
OWN = "kafka_partition:int,kafka_offset:bigint,kafka_timestamp:timestamp,ingest_hour:string,event_date:date>"


def columns(ddl: str) -> Any:
    return rows_columns(new_stream(schema=ddl, columns=parse_columns(ddl)))


def written(table: Table, **values: Any) -> Table:
    """The table with one more file."""
    own = {
        "id": "x",
        "kafka_partition": 0,
        "kafka_offset": 1,
        "ingest_hour": "2026-11-21T00",
        "event_date": 1,
    }
    table.append(pa.Table.from_pylist([own | values], schema=schema_to_pyarrow(table.schema())))
    return table.refresh()


def files(table: Table) -> list[DataFile]:
    return [task.file for task in table.scan().plan_files()]


def shape(table: Table, data_files: list[DataFile]) -> str:
    schemas = list(table.schemas().values())
    return common_schema(
        from_arrow_schema(table.schema().as_arrow()), schemas, table.schema(), data_files
    ).simpleString()


def test_a_column_is_compared_where_every_file_of_the_hour_has_it(tmp_path: Path) -> None:
    lake = new_lake(tmp_path).lake
    admin.create(
        lake,
        "games.other",
        rows_schema(new_stream(schema=BEFORE, columns=parse_columns(BEFORE))),
        (),
        {},
    )
    old = {"n": 1, "f": 0.5, "s": {"a": 1}, "items": [{"a": 1.0}], "m": {"k": 1}}
    first = files(written(lake.load("games.other"), **old))
    evolve(lake, "games.other", columns(AFTER))
    new = old | {"colour": "red", "home": {"city": "Ulm"}, "g": 1.0}
    new |= {"s": {"a": 1, "b": "b"}, "items": [{"a": 1.0, "b": 1}]}
    table = written(lake.load("games.other"), **new)
    later = [f for f in files(table) if f.file_path != first[0].file_path]
    assert len(later) == 1

    always = "struct<id:string,n:bigint,f:float,"
    full = (
        f"{always}s:struct<a:bigint,b:string>,items:array<struct<a:float,b:int>>,m:map<string,bigint>,"
        f"colour:string,home:struct<city:string>,g:double,{OWN}"
    )
    assert shape(table, later) == full
    # An hour that the speed layer has no row of lacks nothing.
    assert shape(table, []) == full
    without = f"{always}s:struct<a:bigint>,items:array<struct<a:float>>,m:map<string,bigint>,{OWN}"
    assert shape(table, first) == without
    # The hour in which the column was added.
    assert shape(table, [*first, *later]) == without


def test_a_table_that_never_evolved_is_compared_whole_and_exactly(tmp_path: Path) -> None:
    lake = new_lake(tmp_path).lake
    admin.create(
        lake,
        "games.other",
        rows_schema(new_stream(schema=AFTER, columns=parse_columns(AFTER))),
        (),
        {},
    )
    table = written(lake.load("games.other"), n=1)
    assert shape(table, files(table)) == from_arrow_schema(table.schema().as_arrow()).simpleString()
