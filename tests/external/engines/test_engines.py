"""`main` by its plain name in other engines, each in an environment of its own: `make test-engines`.

The table has nested and decimal columns, an accepted hour, files from before an evolution of its
schema, and a snapshot of another branch that is newer than that of `main`.
"""

import copy
import importlib.metadata
import json
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import engine_readers
import pytest
from engine_readers import plain
from programs import output_of
from pyiceberg.catalog import load_catalog
from pyspark.sql import SparkSession
from rest_catalog import running_rest_catalog
from trino_server import running_trino
from world import World, event, past_hour

from anabranch.iceberg.catalog_settings import catalog_properties
from anabranch.offsets.hours import start_of

# Packages that `uv run --with` adds to the project's environment for each engine; empty for engines
# that it already contains.
ENGINES = {
    "PyIceberg": (),
    "Polars": (),
    "Daft": ("daft==0.7.26",),
    "DuckDB": (
        "duckdb==1.5.5",
        "duckdb-extension-avro==1.5.5",
        "duckdb-extension-httpfs==1.5.5",
        "duckdb-extension-iceberg==1.5.5",
    ),
    "ClickHouse": ("chdb==4.4.0",),
}
ROOT = Path(__file__).resolve().parents[3]
# `make test-suite WHAT=engines` runs this file by uv, whose environment has none.
UV = os.environ.get("UV", str(Path(sys.executable).parent / "uv"))
CATALOGS = ("sql", "rest")

EARLIER = (
    "event_id STRING NOT NULL, event_time TIMESTAMP NOT NULL, level INT, price DECIMAL(6,2), "
    "place STRUCT<x: INT>, scores ARRAY<INT>, bonus MAP<STRING, INT>, items ARRAY<STRUCT<n: INT>>"
)
LATER = (
    "event_id STRING NOT NULL, event_time TIMESTAMP NOT NULL, level BIGINT, price DECIMAL(9,2), "
    "place STRUCT<x: INT, name: STRING>, scores ARRAY<INT>, bonus MAP<STRING, INT>, items "
    "ARRAY<STRUCT<n: INT>>, colour STRING"
)
FIELDS: dict[str, Any] = {
    "level": 1, "price": 12.25, "place": {"x": 2, "name": "here"}, "scores": [1, 2],
    "bonus": {"k": 3}, "items": [{"n": 4}], "colour": "red",
}  # fmt: skip


@dataclass(frozen=True)
class Served:
    """A table in both catalogs. `expected`: the rows of now, then those of each snapshot."""

    one: World
    catalogs: dict[str, dict[str, str]]
    snapshots: list[int]
    expected: list[list[dict[str, Any]]]

    @property
    def table(self) -> str:
        return self.one.job.stream.table

    def answers(self) -> list[Any]:
        """Return the answers of `engine_readers` when every read is correct."""
        return [[len(rows), rows] for rows in self.expected]


def send(one: World, prefix: str, hour: str | None = None) -> None:
    at = start_of(hour) if hour else datetime.now(UTC)
    one.send([(i % 2, at, event(f"{prefix}{i}", at, **FIELDS)) for i in range(5)])


@pytest.fixture(scope="module")
def served(
    environment: dict[str, Any], spark: SparkSession, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("served")
    one = World(folder / "conf", copy.deepcopy(environment), spark, schema=EARLIER)
    one.create()
    snapshots: list[int] = []
    expected: list[list[dict[str, Any]]] = []

    def remember() -> None:
        snapshots.append(one.state.heads["main"])
        expected.append(plain(one.rows()))

    # Step 1: rows of the speed layer, of two hours.
    send(one, "a", past_hour(2))
    send(one, "b", past_hour(1))
    one.speed()
    remember()
    # Step 2: the batch layer's in the place of the first hour's.
    assert [r.decision for r in one.batch(past_hour(2))] == ["accepted"]
    remember()
    # Step 3: another schema, rows of it, and the second hour swapped.
    one.evolve(schema=LATER)
    send(one, "c")
    one.speed()
    assert [r.decision for r in one.batch(past_hour(1))] == ["accepted"]
    now = plain(one.rows())
    assert [len(rows) for rows in (now, *expected)] == [15, 10, 10]
    assert {row["colour"] for row in now} == {None, "red"} and now[0]["price"] == "12.25"
    # The hazard: the newest snapshot of all is none of `main`.
    table = one.lake.load(one.job.stream.table)
    table.manage_snapshots().create_branch(one.state.heads["main"], "side").commit()
    table.overwrite(table.scan(limit=0).to_arrow(), branch="side")
    assert plain(one.rows("side")) == [] and plain(one.rows()) == now
    s3, warehouse = one.job.environment.s3, one.job.environment.catalog.warehouse
    assert s3.endpoint is not None
    with running_rest_catalog(folder, warehouse, s3.endpoint) as rest:
        properties = catalog_properties(one.job.environment).items()
        sql = {key: value for key, value in properties if key != "py-io-impl"}
        of_s3 = {key: value for key, value in sql.items() if key.startswith("s3.")}
        of_rest = of_s3 | {"type": "rest", "uri": rest.url}
        catalog = load_catalog("lake", **of_rest)
        catalog.create_namespace(one.job.stream.table.partition(".")[0])
        location = one.lake.load(one.job.stream.table).metadata_location
        catalog.register_table(one.job.stream.table, location)
        yield Served(one, {"sql": sql, "rest": of_rest}, snapshots, [now, *expected])
    one.kafka.close()


@pytest.mark.parametrize("catalog", CATALOGS)
@pytest.mark.parametrize("engine", ENGINES)
def test_rows_of_main_by_name_and_by_snapshot(served: Served, engine: str, catalog: str) -> None:
    s3 = served.one.job.environment.s3
    assert s3.access_key is not None and s3.secret_key is not None
    warehouse = served.one.job.environment.catalog.warehouse
    task = {
        "catalog": served.catalogs[catalog], "table": served.table, "snapshots": served.snapshots,
        "rest": served.catalogs[catalog]["uri"] if catalog == "rest" else None,
        "endpoint": s3.endpoint, "bucket": warehouse.removeprefix("s3://").partition("/")[0],
        "key": s3.access_key.get_secret_value(), "secret": s3.secret_key.get_secret_value(),
    }  # fmt: skip
    packages = [f"--with={package}" for package in ENGINES[engine]]
    command = [UV, "run", "--no-sync", *packages, "python", engine_readers.__file__, engine]
    printed = output_of(*command, input=json.dumps(task))
    assert json.loads(printed.splitlines()[-1]) == served.answers()


@pytest.mark.parametrize("catalog", CATALOGS)
def test_rows_in_spark(served: Served, catalog: str) -> None:
    spark = served.one.spark
    name = served.one.job.environment.catalog.name
    if catalog == "rest":
        prefix = f"spark.sql.catalog.{name}"
        own = [(k, v) for k, v in spark.conf.getAll.items() if k.startswith(f"{prefix}.")]
        settings = {key: value for key, value in own if ".jdbc" not in key}
        changed = {"type": "rest", "uri": served.catalogs["rest"]["uri"]}
        settings |= {f"{prefix}.{key}": value for key, value in changed.items()}
        settings[prefix] = str(spark.conf.get(prefix))
        name = "by_rest"
        for key, value in settings.items():
            spark.conf.set(key.replace(prefix, f"spark.sql.catalog.{name}"), str(value))
    found = []
    for version in (None, *served.snapshots):
        clause = f" VERSION AS OF {version}" if version else ""
        source = f"FROM {name}.{served.table}{clause}"
        [[count]] = spark.sql(f"SELECT count(*) {source}").collect()
        rows = [row.asDict(recursive=True) for row in spark.sql(f"SELECT * {source}").collect()]
        found.append([count, plain(rows)])
    assert found == served.answers()


def test_rows_in_trino(served: Served, tmp_path: Path) -> None:
    columns = "event_id, level, price, place, scores, bonus, items"
    with running_trino(tmp_path, served.one.job.environment) as trino:
        schema, _, table = served.table.partition(".")
        name = f'{served.one.job.environment.catalog.name}."{schema}"."{table}"'
        for version, expected in zip((None, *served.snapshots), served.expected, strict=True):
            source = f"FROM {name}" + (f" FOR VERSION AS OF {version}" if version else "")
            assert trino.ask(f"SELECT count(*) {source}") == [[len(expected)]]
            # The snapshots are read by the schema that they were written with.
            names = f"{columns}, colour" if version is None else columns
            answer = trino.ask(f"SELECT {names} {source}")
            rows = [dict(zip(names.split(", "), row, strict=True)) for row in answer]
            assert plain([_named(row, version is None) for row in rows]) == expected


def _named(row: dict[str, Any], is_later: bool) -> dict[str, Any]:
    """Trino's protocol gives a ROW as a list of its fields."""
    names = ("x", "name") if is_later else ("x",)
    place = dict(zip(names, row["place"], strict=True)) if row["place"] else None
    return row | {"place": place, "items": [{"n": item[0]} for item in row["items"]]}


def test_the_page_lists_the_versions_that_are_tried() -> None:
    page = (ROOT / "docs" / "how-to" / "query.md").read_text("utf-8")
    pinned = [package.split("==") for packages in ENGINES.values() for package in packages]
    own = [[name, importlib.metadata.version(name)] for name in ("pyiceberg", "polars", "pyspark")]
    for name, version in [*pinned, *own]:
        assert version in page, f"docs/how-to/query.md: expected {name} {version}, found it missing"
