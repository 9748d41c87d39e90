"""An analyst's SQL over real PyIceberg tables, on local files and on the real S3 server."""

import logging
from collections.abc import Iterator
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyiceberg.catalog.sql import SqlCatalog
from pyiceberg.partitioning import PartitionField, PartitionSpec
from pyiceberg.schema import Schema
from pyiceberg.table import Table
from pyiceberg.transforms import HourTransform, IdentityTransform
from pyiceberg.types import (
    DateType,
    DecimalType,
    DoubleType,
    IntegerType,
    ListType,
    LongType,
    NestedField,
    StringType,
    StructType,
    TimestamptzType,
)
from queries import run_query, sources
from shared_services import BUCKET

from anabranch.common.errors import ConfigurationError, FileGone, Terminal
from anabranch.common.logs import Progress
from anabranch.dev.services import ACCESS_KEY, SECRET_KEY
from serving_layer.query import open_query

START = datetime(2026, 11, 21, tzinfo=UTC)
NAME = "games.game_events"


def _catalog(folder: Path, warehouse: str, **properties: str) -> SqlCatalog:
    uri = f"sqlite:///{folder}/catalog.db"
    lake = SqlCatalog("lake", uri=uri, warehouse=warehouse, **properties)
    lake.create_namespace("games")
    return lake


@pytest.fixture
def catalog(tmp_path: Path) -> Iterator[SqlCatalog]:
    lake = _catalog(tmp_path, f"file://{tmp_path}/warehouse")
    yield lake
    lake.close()


def _table(catalog: SqlCatalog, name: str = NAME) -> Table:
    schema = Schema(
        NestedField(1, "event_id", LongType(), required=True),
        NestedField(2, "event_date", DateType()),
        NestedField(3, "ingest_hour", TimestamptzType()),
        NestedField(4, "level", IntegerType()),
        NestedField(5, "price", DecimalType(10, 2)),
        NestedField(6, "tags", ListType(7, StringType(), element_required=False)),
        NestedField(8, "device", StructType(NestedField(9, "os", StringType(), required=False))),
    )
    spec = PartitionSpec(
        PartitionField(2, 1000, IdentityTransform(), "event_date"),
        PartitionField(3, 1001, HourTransform(), "ingest_hour_hour"),
    )
    return catalog.create_table(name, schema, partition_spec=spec)


def _append(table: Table, ids: range) -> None:
    """One event an hour of each id, on two dates, without the columns that came later."""
    values = {
        "event_id": lambda i: i,
        "event_date": lambda i: date(2026, 11, 20 + i % 2),
        "ingest_hour": lambda i: START + timedelta(hours=i),
        "level": lambda i: i * 10,
        "price": lambda i: Decimal("1.25"),
        "tags": lambda i: ["a", None],
        "device": lambda i: {"os": "linux"},
        "platform": lambda i: "pc",
    }
    schema = table.schema().as_arrow()
    columns = [pa.array([values[field.name](i) for i in ids], field.type) for field in schema]
    table.append(pa.table(columns, schema=schema))


def test_rows_are_found_under_the_plain_and_the_catalog_name(catalog: SqlCatalog) -> None:
    table = _table(catalog)
    _append(table, range(4))
    for name in (NAME, f"lake.{NAME}", "GAMES.Game_Events"):
        result = run_query(
            f"SELECT event_id, ingest_hour FROM {name} ORDER BY event_id DESC LIMIT 1",
            {NAME: table},
        )
        assert result.to_pylist() == [{"event_id": 3, "ingest_hour": START + timedelta(hours=3)}]
        assert result.schema.field("ingest_hour").type == pa.timestamp("us", "UTC")


class _Lacking(dict[str, Table]):
    """Tables of which one that a stream's file names is not there, as before `anabranch apply`."""

    def __init__(self, name: str, **tables: Table) -> None:
        super().__init__(tables, **{name: next(iter(tables.values()))})
        self._name = name

    def __getitem__(self, name: str) -> Table:
        if name == self._name:
            raise Terminal(f"table {name}: expected it to exist, found none; run `anabranch apply`")
        return super().__getitem__(name)


@pytest.mark.parametrize("absent", ["games.flights", "other.game_events"])
def test_a_missing_table_fails_only_its_own_sql(catalog: SqlCatalog, absent: str) -> None:
    table = _table(catalog)
    _append(table, range(4))
    tables = _Lacking(absent, **{NAME: table})
    assert run_query(f"SELECT count(*) AS n FROM {NAME}", tables).to_pylist() == [{"n": 4}]
    assert run_query("SELECT 1 AS n", tables).to_pylist() == [{"n": 1}]
    for sql in (f"SELECT * FROM {absent}", f"SELECT * FROM lake.{absent}, {NAME}"):
        with pytest.raises(Terminal, match="run `anabranch apply`"):
            run_query(sql, tables)
    with pytest.raises(ConfigurationError, match="known tables"):
        run_query("SELECT * FROM games.nothing", tables)


def test_nested_values_come_back_as_they_are(catalog: SqlCatalog) -> None:
    table = _table(catalog)
    _append(table, range(1))
    sql = f"SELECT tags, device, price FROM {NAME} WHERE device.os = 'linux'"
    result = run_query(sql, {NAME: table})
    assert result.to_pylist() == [
        {"tags": ["a", None], "device": {"os": "linux"}, "price": Decimal("1.25")}
    ]


def test_a_table_without_rows_has_its_columns(catalog: SqlCatalog) -> None:
    table = _table(catalog)
    result = run_query(f"SELECT * FROM {NAME}", {NAME: table})
    assert result.num_rows == 0
    assert result.column_names == [field.name for field in table.schema().fields]
    assert run_query(f"SELECT count(*) n FROM {NAME}", {NAME: table}).to_pylist() == [{"n": 0}]


def test_old_files_read_null_in_a_new_column_and_widen(catalog: SqlCatalog) -> None:
    table = _table(catalog)
    _append(table, range(2))
    with table.update_schema() as update:
        update.add_column("platform", StringType())
        update.update_column("level", LongType())
        update.update_column("price", DecimalType(18, 2))
        update.add_column(("device", "model"), DoubleType())
    _append(table, range(2, 3))
    result = run_query(
        f"SELECT event_id, platform, level, device FROM {NAME} ORDER BY event_id", {NAME: table}
    )
    assert result.schema.field("level").type == pa.int64()
    assert result.to_pylist() == [
        {"event_id": 0, "platform": None, "level": 0, "device": {"os": "linux", "model": None}},
        {"event_id": 1, "platform": None, "level": 10, "device": {"os": "linux", "model": None}},
        {"event_id": 2, "platform": "pc", "level": 20, "device": {"os": "linux", "model": None}},
    ]
    filtered = f"SELECT event_id FROM {NAME} WHERE level > 5 AND price < 2 AND platform IS NULL"
    assert run_query(filtered, {NAME: table}).to_pylist() == [{"event_id": 1}]


def test_a_renamed_column_keeps_its_old_values(catalog: SqlCatalog) -> None:
    table = _table(catalog)
    _append(table, range(2))
    with table.update_schema() as update:
        update.rename_column("level", "rank")
    with table.update_schema() as update:
        update.add_column("level", StringType())
    result = run_query(f"SELECT rank, level FROM {NAME} ORDER BY rank", {NAME: table})
    assert result.to_pylist() == [{"rank": 0, "level": None}, {"rank": 10, "level": None}]


@pytest.mark.parametrize(
    ("where", "event_ids"),
    [
        ("ingest_hour >= '2026-11-21 02:00+00' AND ingest_hour < '2026-11-21 03:00+00'", [2]),
        (
            "date_trunc('hour', ingest_hour) = '2026-11-21 02:00+00' AND ingest_hour > "
            "'2026-11-21 01:30+00'",
            [2],
        ),
        ("event_date = DATE '2026-11-20' AND ingest_hour >= '2026-11-21 01:00+00'", [2]),
    ],
)
def test_a_filter_opens_no_file_of_another_partition(
    catalog: SqlCatalog, where: str, event_ids: list[int]
) -> None:
    table = _table(catalog)
    _append(table, range(3))
    for task in table.scan().plan_files():
        path = Path(task.file.file_path.removeprefix("file://"))
        if "ingest_hour_hour=2026-11-21-02" not in str(path):
            path.unlink()
    result = run_query(f"SELECT event_id FROM {NAME} WHERE {where}", {NAME: table})
    assert result.column("event_id").to_pylist() == event_ids
    with pytest.raises(FileGone, match="run it again"):
        run_query(f"SELECT event_id FROM {NAME}", {NAME: table})
    progress = Progress(logging.getLogger(), "query", "files")
    query = open_query(f"SELECT event_id FROM {NAME}", sources({NAME: table}), progress=progress)
    with pytest.raises(FileGone, match="run it again"), query as answer:
        answer.rows.read_all()


def test_only_the_tables_that_the_sql_mentions_are_loaded(catalog: SqlCatalog) -> None:
    class Loading(dict[str, Table]):
        def __getitem__(self, name: str) -> Table:
            loaded.append(name)
            return super().__getitem__(name)

    loaded: list[str] = []
    tables = Loading({NAME: _table(catalog), f"{NAME}_hours": _table(catalog, f"{NAME}_hours")})
    run_query(f"SELECT count(*) FROM {NAME}", tables)
    assert loaded == [NAME]
    run_query(f"SELECT * FROM {NAME} JOIN {NAME}_hours USING (event_id)", tables)
    assert sorted(loaded[1:]) == [NAME, f"{NAME}_hours"]


def test_each_column_of_a_result_has_its_own_name(catalog: SqlCatalog) -> None:
    result = run_query("SELECT 1 AS a, 2 AS a, 3 AS a_1, 4 AS a", {})
    assert result.to_pylist() == [{"a": 1, "a_1": 2, "a_1_1": 3, "a_2": 4}]


@pytest.mark.parametrize(
    ("sql", "message"),
    [
        ("SELEC 1", "syntax error"),
        ("", "expected one statement, found 0"),
        ("SELECT 1; SELECT 2", "expected one statement, found 2"),
        ("SELECT nothing FROM games.game_events", 'column "nothing" not found'),
        ("SELECT * FROM games.nothing", "known tables: games.game_events"),
        ("SELECT 'x'::INT", "Could not convert"),
        (
            "DELETE FROM games.game_events",
            "expected a statement that reads, such as SELECT, found DELETE",
        ),
        ("CREATE TABLE games.x (a INT)", "found CREATE"),
        ("INSERT INTO games.game_events SELECT * FROM games.game_events", "found INSERT"),
        ("COPY (SELECT 1) TO '{file}'", "found COPY"),
        ("ATTACH '{file}' AS other", "found ATTACH"),
        ("SET enable_external_access = true", "found SET"),
        ("INSTALL httpfs", "found LOAD"),
        ("SELECT * FROM read_csv('{file}')", "disabled by configuration"),
        ("SELECT * FROM '{file}'", "disabled by configuration"),
        ("SELECT * FROM read_text('{file}')", "disabled by configuration"),
        ("SELECT * FROM glob('{file}')", "disabled by configuration"),
        ("SELECT * FROM read_parquet('http://127.0.0.1:1/x.parquet')", "disabled|extension"),
        ("SELECT * FROM statement", "does not exist"),
    ],
)
def test_sql_that_is_wrong_or_reaches_too_far_is_refused(
    catalog: SqlCatalog, tmp_path: Path, sql: str, message: str
) -> None:
    file = tmp_path / "secret.csv"
    file.write_text("a\n1\n", "utf-8")
    with pytest.raises(ConfigurationError, match=message):
        run_query(sql.format(file=file), {NAME: _table(catalog)})
    assert file.read_text("utf-8") == "a\n1\n"


@pytest.mark.parametrize(
    "sql",
    [
        "EXPLAIN SELECT * FROM games.game_events",
        "DESCRIBE games.game_events",
        "SUMMARIZE games.game_events",
        "PIVOT games.game_events ON event_date USING count(*)",
        "WITH t AS (FROM games.game_events) SELECT count(*) FROM t",
    ],
)
def test_every_way_of_reading_is_welcome(catalog: SqlCatalog, sql: str) -> None:
    table = _table(catalog)
    _append(table, range(2))
    assert run_query(sql, {NAME: table}).num_rows > 0


def test_the_s3_server_is_read_with_the_tables_own_credentials(
    services: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    keys = {"s3.access-key-id": ACCESS_KEY, "s3.secret-access-key": SECRET_KEY}
    place = {"s3.endpoint": services.s3, "s3.region": "us-east-1"}
    catalog = _catalog(tmp_path, f"s3://{BUCKET}/{tmp_path.name}/warehouse", **keys, **place)
    table = _table(catalog)
    _append(table, range(4))
    sql = (
        f"SELECT event_date, sum(level) s FROM {NAME} WHERE ingest_hour > '2026-11-21' GROUP BY "
        "ALL ORDER BY ALL"
    )
    assert run_query(sql, {NAME: table}).to_pylist() == [
        {"event_date": date(2026, 11, 20), "s": 20},
        {"event_date": date(2026, 11, 21), "s": 40},
    ]
    catalog.close()
