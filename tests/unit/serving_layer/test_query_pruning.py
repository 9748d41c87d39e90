"""Files that a condition passes over hold no row of it: the answer is the rows' own."""

import logging
import math
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.dataset as ds
import pytest
from budget import budget
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pyiceberg import types
from pyiceberg.catalog.sql import SqlCatalog
from pyiceberg.partitioning import PartitionField, PartitionSpec
from pyiceberg.schema import Schema
from pyiceberg.table import Table
from pyiceberg.transforms import HourTransform, IdentityTransform
from queries import sources

from anabranch.common import errors, logs
from serving_layer.query import Answer, Derived, open_query

NAME = "games.events"
DAY = datetime(2026, 11, 21)
SCHEMA = Schema(
    types.NestedField(1, "id", types.LongType(), required=True),
    types.NestedField(2, "event_date", types.DateType(), required=True),
    types.NestedField(3, "ingest_hour", types.StringType(), required=True), types.NestedField(4, "n", types.LongType()),
    types.NestedField(5, "x", types.DoubleType()), types.NestedField(6, "s", types.StringType()),
    types.NestedField(7, "t", types.TimestamptzType()), types.NestedField(8, "local", types.TimestampType()),
    types.NestedField(9, "d", types.DateType()), types.NestedField(10, "price", types.DecimalType(10, 2)),
    types.NestedField(11, "flag", types.BooleanType()), types.NestedField(12, "made", types.TimestamptzType()),
)  # fmt: skip
SPEC = PartitionSpec(
    PartitionField(2, 1000, IdentityTransform(), "event_date"),
    PartitionField(3, 1001, IdentityTransform(), "ingest_hour"),
    PartitionField(12, 1002, HourTransform(), "made_hour"),
)


@dataclass(frozen=True)
class Beside:
    """The table, and its rows in DuckDB's own storage, of which nothing is passed over."""

    table: Table
    rows: duckdb.DuckDBPyConnection


def _row(id: int, file: int, i: int) -> dict[str, Any]:
    """Values near other files' ends: nulls, NaN, infinities, long texts, all-null columns."""
    at = DAY + timedelta(hours=file)
    return {
        "id": id, "event_date": date(2026, 11, 20 + file % 3), "ingest_hour": f"2026-11-21T0{file}",
        "n": [file * 10 + i, None, -i][i % 3] if file != 3 else None,
        "x": [file + i / 2, math.nan, None, -0.0, math.inf][(i + file) % 5] if file != 4 else float(i),
        "s": ["a" * 20 + chr(97 + file), f"p{file}{i}", None, "", "\U0010ffff" * 17, "é"][i % (3 + file % 4)],
        "t": (at + timedelta(minutes=i)).replace(tzinfo=UTC) if i % 4 else None,
        "local": at + timedelta(seconds=i), "d": date(2026, 11, 19 + i % 4),
        "price": Decimal(file * 100 + i) / 100 if i % 5 else None,
        "flag": [True, False, None][i % 3], "made": at.replace(tzinfo=UTC),
    }  # fmt: skip


@pytest.fixture(scope="module")
def beside(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Beside]:
    folder = tmp_path_factory.mktemp("lake")
    uri, warehouse = f"sqlite:///{folder}/catalog.db", f"file://{folder}/warehouse"
    catalog = SqlCatalog("lake", uri=uri, warehouse=warehouse)
    catalog.create_namespace("games")
    table = catalog.create_table(NAME, SCHEMA, partition_spec=SPEC)
    rows = [[_row(file * 100 + i, file, i) for i in range(7)] for file in range(6)]
    arrow = table.schema().as_arrow()
    for of_file in rows:
        table.append(pa.Table.from_pylist(of_file, schema=arrow))
    every = pa.Table.from_pylist([row for of_file in rows for row in of_file], schema=arrow)
    connection = duckdb.connect(":memory:")
    connection.execute("SET TimeZone = 'UTC'")
    connection.register("given", every)
    connection.execute("CREATE SCHEMA games; CREATE TABLE games.events AS FROM given")
    yield Beside(table, connection)
    connection.close()
    catalog.close()


def _ids(beside: Beside, where: str) -> tuple[list[int], Answer]:
    progress = logs.Progress(logging.getLogger(), "query", "files")
    sql = f"SELECT id FROM {NAME} WHERE {where} ORDER BY id"
    with open_query(sql, sources({NAME: beside.table}), progress=progress) as answer:
        found: list[int] = answer.rows.read_all()["id"].to_pylist()
    # How far it is was followed to its end, whatever files that were.
    assert (progress._done, progress._total or 0) == (_files(answer),) * 2
    return found, answer


def _files(answer: Answer) -> int:
    return sum(len(scan.files) for planned in answer.files for scan in planned.scans)


_TIMES = [
    "'2026-11-21 01:00'", "TIMESTAMPTZ '2026-11-21 03:02+00'", "TIMESTAMPTZ '2026-11-21 04:00+02'",
    "TIMESTAMP '2026-11-21 02:00:01'", "DATE '2026-11-21'", "'2026-11-21 02:00:00.000001'",
]  # fmt: skip
_DATES = ["DATE '2026-11-20'", "'2026-11-21'", "TIMESTAMP '2026-11-21 12:00'", "DATE '2026-12-01'"]
_TEXTS = ["'p11'", "''", f"'{'a' * 20}c'", f"'{'a' * 16}'", "'\U0010ffff'", "'é'", "'z'"]
_LITERALS = {
    "n": ["0", "-2", "11", "32.5", "40", "CAST(21 AS BIGINT)", "1e1"],
    "x": ["0", "0.5", "4", "'nan'::DOUBLE", "'inf'::DOUBLE", "-1e300", "-0.0"],
    "s": _TEXTS, "t": _TIMES, "local": _TIMES, "made": _TIMES, "d": _DATES, "event_date": _DATES,
    "price": ["1", "1.01", "2.005", "3.06::DOUBLE", "400"],
    "ingest_hour": ["'2026-11-21T02'", "'2026-11-21T03'", "'2026-11-21'", "'2027'"],
    "flag": ["true", "false"], "id": ["203", "0"],
}  # fmt: skip
_OTHERS = [
    "t::DATE = '2026-11-21'", "date_trunc('hour', t) = '2026-11-21 02:00+00'", "n + 1 > 20",
    "-n < 3", "flag", "coalesce(n, 20) > 15", "lower(s) = 'p11'", "year(event_date) = 2026",
    "n > x", "t > local", "isnan(x)", "n IN (SELECT id / 10 FROM games.events)",
    "x > (SELECT min(x) FROM games.events)", "starts_with(s, 'p')",
]  # fmt: skip
_PATTERNS = ["'p1%'", "'%1'", "'a_a%'", "''", "'2026-11-21T0_'", "'é%'"]


@st.composite
def _comparisons(draw: st.DrawFn) -> str:
    column = draw(st.sampled_from(sorted(_LITERALS)))
    literal = st.sampled_from(_LITERALS[column])
    form = draw(st.integers(0, 9))
    if form <= 3:
        operator = draw(st.sampled_from(["=", "<>", "<", "<=", ">", ">="]))
        sides = [column, draw(literal)]
        return f" {operator} ".join(sides if form < 3 else sides[::-1])
    if form == 4:
        among = ", ".join(draw(st.lists(literal, min_size=1)))
        return f"{column} {draw(st.sampled_from(['IN', 'NOT IN']))} ({among})"
    if form == 5:
        negated, low, high = draw(st.sampled_from(["", "NOT "])), draw(literal), draw(literal)
        return f"{column} {negated}BETWEEN {low} AND {high}"
    if form == 6:
        return f"{column} IS {draw(st.sampled_from(['', 'NOT ']))}NULL"
    if form == 7:
        return f"{column} IS {draw(st.sampled_from(['', 'NOT ']))}DISTINCT FROM {draw(literal)}"
    if form == 8:
        text = draw(st.sampled_from(["s", "ingest_hour"]))
        operator = draw(st.sampled_from(["LIKE", "NOT LIKE", "ILIKE"]))
        return f"{text} {operator} {draw(st.sampled_from(_PATTERNS))}"
    return draw(st.sampled_from(_OTHERS))


_CONDITIONS = st.recursive(
    _comparisons(),
    lambda inner: st.one_of(
        st.builds("({} AND {})".format, inner, inner),
        st.builds("({} OR {})".format, inner, inner),
        st.builds("NOT ({})".format, inner),
    ),
    max_leaves=4,
)


@settings(
    max_examples=budget(40, 120), derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
@given(where=_CONDITIONS)
def test_a_condition_has_the_answer_of_all_rows(beside: Beside, where: str) -> None:
    try:
        sql = f"SELECT id FROM {NAME} WHERE {where} ORDER BY id"
        expected = beside.rows.sql(sql).to_arrow_table()
    except duckdb.Error:
        return  # such as a text that is no time
    assert _ids(beside, where)[0] == expected["id"].to_pylist()


@pytest.mark.parametrize(
    ("where", "files"),
    [
        ("true", 6),
        ("ingest_hour = '2026-11-21T02'", 1),
        ("ingest_hour IN ('2026-11-21T02', '2026-11-21T04')", 2),
        ("ingest_hour >= '2026-11-21T01' AND ingest_hour < '2026-11-21T03'", 2),
        ("event_date = '2026-11-21'", 2),
        ("t >= '2026-11-21 01:00+00' AND t < '2026-11-21 02:00+00'", 1),
        ("date_trunc('hour', t) = '2026-11-21 02:00+00'", 1),
        ("date_trunc('hour', made) = '2026-11-21 02:00+00'", 1),
        ("n = 57", 0),
        ("n = 56", 1),
        ("n = 56 OR price = 2.01", 2),
        ("id IN (203, 204, 301)", 2),
        ("price > 4.00", 2),
        ("n IN (56, 57)", 1),
        ("n IN (57, 1000) OR n IS NULL", 6),
        ("n NOT IN (56, 57)", 5),
        ("s IN ('p23', 'zz') AND d IN ('2026-11-20', '2026-11-21')", 4),
        ("n IN (56, 1000) AND price IN (2.01, 5.01)", 1),
        ("year(event_date) = 2025", 0),
        ("t::DATE = '2020-11-21'", 6),
        ("n IS NOT NULL", 5),
        ("s LIKE 'p1%'", 6),
        # Bounds pass over NaN, which is greater than any number.
        ("x = 100", 6),
        ("x > 100", 6),
    ],
)
def test_a_condition_opens_few_files(beside: Beside, where: str, files: int) -> None:
    assert _files(_ids(beside, where)[1]) == files


def test_only_the_columns_that_the_sql_needs_are_read(beside: Beside) -> None:
    sql = f"SELECT sum(n) FROM {NAME} WHERE price > 1"
    with open_query(sql, sources({NAME: beside.table})) as answer:
        answer.rows.read_all()
    [scan] = answer.files[0].scans
    assert scan.columns == ("n",) and scan.condition == "(price > 1.00)"


def test_manifests_that_cannot_contain_a_row_are_not_opened(beside: Beside) -> None:
    """The hazard: an hour's question that reads the manifests of ten years."""
    [planned] = _ids(beside, "true")[1].files
    assert len(planned.manifests) == 6
    for manifest in planned.manifests:
        if manifest.first != "2026-11-21T02":
            path = Path(manifest.manifest.manifest_path.removeprefix("file://"))
            path.rename(path.with_suffix(".away"))
    try:
        assert _ids(beside, "ingest_hour = '2026-11-21T02'")[0] == [*range(200, 207)]
        assert _ids(beside, "made = '2026-11-21 02:00+00'")[0] == [*range(200, 207)]
        with pytest.raises(errors.FileGone, match=r"expected the manifests of games\.events"):
            _ids(beside, "true")
    finally:
        for path in Path(beside.table.location().removeprefix("file://")).rglob("*.away"):
            path.rename(path.with_suffix(".avro"))


@pytest.mark.parametrize("before", range(3))
@pytest.mark.parametrize("rows", ["range(1)", "range(3)"])
def test_an_error_whose_text_duckdb_cuts_within_a_character(before: int, rows: str) -> None:
    text = f"repeat('x', {before}) || repeat('語', 200 + i::INT)"
    sql = f"SELECT ({text})::JSON ->> '$.a' FROM {rows} t(i)"
    with pytest.raises(errors.ConfigurationError, match=r"^query: "), open_query(sql, {}) as answer:
        answer.rows.read_all()


@pytest.mark.parametrize(
    "sql",
    [
        "SELECT count(*) FROM query_table('games.' || 'eve' || 'nts')",
        "FROM query('SELECT n FROM games.eve' || 'nts')",
    ],
)
def test_a_name_that_a_statement_composes_is_refused(sql: str) -> None:
    """The hazard: no name in the statement is the table's: it is not opened, it has no rows."""
    rows = Derived("FROM temp.main.rows", {}, {"rows": ds.dataset(pa.table({"n": [1, 2]}))})
    found = "one that the statement composes; write it out"
    refused = pytest.raises(errors.ConfigurationError, match=found)
    with refused, open_query(sql, {"games.events": lambda: rows}) as answer:
        answer.rows.read_all()
