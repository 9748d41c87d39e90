"""Read a table with one engine in a separate process: `python engine_readers.py ENGINE <task.json
>answer.json`.

The task names the table, its catalog as PyIceberg's properties, the snapshots to read, and S3's
keys. The answer lists the engine's count and rows, of `main` by the table's name, then of each
snapshot. Imports nothing of this project: the engine's environment may have other versions of its
dependencies.
"""

import importlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

Rows = list[dict[str, Any]]
COLUMNS = ("event_id", "level", "price", "place", "scores", "bonus", "items", "colour")


def read_by_pyiceberg(table: Any, snapshot: int | None, task: dict[str, Any]) -> tuple[int, Rows]:
    scan = table.scan(snapshot_id=snapshot)
    return scan.count(), scan.to_arrow().to_pylist()


def read_by_daft(table: Any, snapshot: int | None, task: dict[str, Any]) -> tuple[int, Rows]:
    import daft

    frame = daft.read_iceberg(table, snapshot_id=snapshot)
    return frame.count_rows(), frame.to_pylist()


def read_by_polars(table: Any, snapshot: int | None, task: dict[str, Any]) -> tuple[int, Rows]:
    import polars

    # Polars takes only the keys from PyIceberg's properties.
    storage = {"aws_endpoint_url": task["endpoint"], "aws_allow_http": "true"}
    storage |= {"aws_access_key_id": task["key"], "aws_secret_access_key": task["secret"]}
    storage |= {"aws_region": "us-east-1"}
    frame = polars.scan_iceberg(table, snapshot_id=snapshot, storage_options=storage)
    return frame.select(polars.len()).collect().item(), frame.collect().to_dicts()


def read_by_duckdb(table: Any, snapshot: int | None, task: dict[str, Any]) -> tuple[int, Rows]:
    """Read by the metadata file, or by name in a REST catalog; extensions are from packages."""
    import duckdb

    connection = duckdb.connect()
    for name in ("avro", "httpfs", "iceberg"):
        package = importlib.import_module(f"duckdb_extension_{name}")
        [file] = Path(package.__path__[0]).rglob(f"{name}.duckdb_extension")
        connection.execute(f"LOAD '{file}'")
    keys = f"KEY_ID '{task['key']}', SECRET '{task['secret']}', REGION 'us-east-1'"
    at = f"ENDPOINT '{task['endpoint'].removeprefix('http://')}', URL_STYLE 'path', USE_SSL false"
    connection.execute(f"CREATE SECRET (TYPE s3, {keys}, {at})")
    if task["rest"]:
        by = f"ENDPOINT '{task['rest']}', AUTHORIZATION_TYPE 'none'"
        connection.execute(f"ATTACH '' AS lake (TYPE iceberg, {by})")
        schema, _, name = task["table"].partition(".")
        source = f'lake."{schema}"."{name}"' + (f" AT (VERSION => {snapshot})" if snapshot else "")
    else:
        of_snapshot = f", snapshot_from_id => {snapshot}" if snapshot else ""
        source = f"iceberg_scan('{table.metadata_location}'{of_snapshot})"
    counted = connection.execute(f"SELECT count(*) FROM {source}").fetchone()
    assert counted is not None
    return counted[0], connection.execute(f"SELECT * FROM {source}").to_arrow_table().to_pylist()


def read_by_clickhouse(table: Any, snapshot: int | None, task: dict[str, Any]) -> tuple[int, Rows]:
    """Read by the table's folder, or by its name in a REST catalog."""
    import chdb

    key, secret = task["key"], task["secret"]
    if task["rest"]:
        session = chdb.session.Session()
        session.query("SET allow_database_iceberg = 1")
        storage = f"{task['endpoint']}/{task['bucket']}"
        engine = f"DataLakeCatalog('{task['rest']}/v1', '{key}', '{secret}')"
        how = (
            f"catalog_type = 'rest', warehouse = '{task['bucket']}', storage_endpoint = '{storage}'"
        )
        session.query(f"CREATE DATABASE lake ENGINE = {engine} SETTINGS {how}")
        source, ask = f"lake.`{task['table']}`", session.query
    else:
        folder = table.location().replace("s3://", f"{task['endpoint']}/")
        source, ask = f"icebergS3('{folder}', '{key}', '{secret}')", chdb.query
    settings = f" SETTINGS iceberg_snapshot_id = {snapshot}" if snapshot else ""
    [counted] = _lines(ask(f"SELECT count() AS n FROM {source}{settings}", "JSONEachRow"))
    return int(counted["n"]), _lines(ask(f"SELECT * FROM {source}{settings}", "JSONEachRow"))


def _lines(answer: Any) -> Rows:
    return [json.loads(line) for line in str(answer).splitlines() if line]


Reader = Callable[[Any, int | None, dict[str, Any]], tuple[int, Rows]]
READERS: dict[str, Reader] = {
    "PyIceberg": read_by_pyiceberg, "Daft": read_by_daft, "Polars": read_by_polars,
    "DuckDB": read_by_duckdb, "ClickHouse": read_by_clickhouse,
}  # fmt: skip


def plain(rows: Rows) -> Rows:
    """Return the rows, sorted and normalized for all engines: decimals are texts, maps dicts."""
    made = [{name: row.get(name) for name in COLUMNS} for row in rows]
    for row in made:
        row["price"] = None if row["price"] is None else f"{float(row['price']):.2f}"
        bonus = row["bonus"]
        if bonus and isinstance(bonus, list) and "key" in bonus[0]:
            bonus = [(e["key"], e["value"]) for e in bonus]
        row["bonus"] = None if bonus is None else dict(bonus)
    return sorted(made, key=lambda row: str(row["event_id"]))


def main(engine: str) -> None:
    from pyiceberg.catalog import load_catalog

    task = json.load(sys.stdin)
    table = load_catalog("lake", **task["catalog"]).load_table(task["table"])
    found = [READERS[engine](table, snapshot, task) for snapshot in (None, *task["snapshots"])]
    answers = [[count, plain(rows)] for count, rows in found]
    print("\n" + json.dumps(answers))


if __name__ == "__main__":
    main(sys.argv[1])
