"""A stream's columns and its table's: what apply adds, what it refuses, and what a job says that finds them apart."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from lakes import new_lake, new_stream
from pyiceberg.table import Table

from anabranch.config import Stream
from anabranch.errors import Refused, Terminal
from anabranch.lake import Lake
from anabranch.schema import parse_columns
from anabranch.tables import _evolve, require_columns, rows_schema

NESTED = "id STRING NOT NULL, n INT, x STRUCT<at: TIMESTAMP, deep: STRUCT<m: MAP<STRING, ARRAY<INT>>>>, tags ARRAY<INT>"


def stream_of(ddl: str) -> Stream:
    return new_stream(schema=ddl, columns=parse_columns(ddl))


def table_of(folder: Path, ddl: str) -> tuple[Lake, Table]:
    lake: Any = new_lake(folder).lake
    lake.create("games.other", rows_schema(stream_of(ddl)), (), {})
    return lake, lake.load("games.other")


@pytest.mark.parametrize("ddl", ["id STRING NOT NULL, n INT", NESTED])
def test_a_table_that_apply_made_is_the_streams_and_stays_as_it_is(tmp_path: Path, ddl: str) -> None:
    _, table = table_of(tmp_path, ddl)
    require_columns(table, stream_of(ddl))
    assert _evolve(table, rows_schema(stream_of(ddl))) == []


def test_a_job_whose_column_the_table_lacks_says_what_to_run(tmp_path: Path) -> None:
    lake, table = table_of(tmp_path, NESTED)
    wanted = stream_of(f"{NESTED}, colour STRING")
    with pytest.raises(Terminal, match="expected column colour string, found none; run `anabranch apply events`"):
        require_columns(table, wanted)
    assert _evolve(table, rows_schema(wanted)) == ["added column colour to games.other"]
    require_columns(lake.load("games.other"), wanted)


@pytest.mark.parametrize(
    "ddl", [NESTED.replace("n INT", "n BIGINT"), NESTED.replace("ARRAY<INT>>>>", "ARRAY<BIGINT>>>>")]
)
def test_another_type_is_refused(tmp_path: Path, ddl: str) -> None:
    _, table = table_of(tmp_path, NESTED)
    with pytest.raises(Terminal, match="run `anabranch apply"):
        require_columns(table, stream_of(ddl))
    with pytest.raises(Refused, match="expected it unchanged"):
        _evolve(table, rows_schema(stream_of(ddl)))
