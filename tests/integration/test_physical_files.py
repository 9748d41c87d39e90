"""A stream's physical design: what a look-up opens with it and without, of the same rows."""

import random
from datetime import timedelta
from pathlib import Path

import duckdb
import pyarrow.parquet as pq
import pytest
from pyiceberg.manifest import DataFile
from queries import sources
from world import Make, World, event, past_hour

from anabranch.iceberg.manifests import files_of
from anabranch.offsets.hours import start_of
from serving_layer.query import open_query
from serving_layer.query.datasets import Opened, opened

DESIGN = {"target": "1 MB", "sort": "player", "bloom": ["event_id"]}
PLAYERS, RECORDS, PARTITIONS = 500, 16_000, 4
FILES = 3


def looked_up(one: World, condition: str) -> tuple[int, Opened]:
    """How many rows `main` has by a condition, and what was opened for that."""
    name = one.job.stream.table
    sql = f"SELECT event_id FROM {name} WHERE {condition}"
    with open_query(sql, sources({name: one.state.table})) as answer:
        rows = answer.rows.read_all().num_rows
        [scan] = opened(answer.files)
    return rows, scan


def copies(one: World, files: tuple[DataFile, ...], folder: Path) -> list[Path]:
    """Data files as local ones."""
    paths = [folder / f"{i}.parquet" for i in range(len(files))]
    for path, file in zip(paths, files, strict=True):
        with one.state.table.io.new_input(file.file_path).open() as source:
            path.write_bytes(source.read())
    return paths


@pytest.mark.full
def test_a_look_up_opens_fewer_files_of_the_same_rows(world: Make, tmp_path: Path) -> None:
    hour, chance = past_hour(1), random.Random(5)
    plain = world(files={"target": "1 MB"})
    designed = world(topic=plain.name, files=DESIGN)
    plain.topic(PARTITIONS)
    at = [start_of(hour) + timedelta(milliseconds=100 * i) for i in range(RECORDS)]
    # As a producer by key does it: all records of a player are in one partition.
    players = [chance.randrange(PLAYERS) for _ in at]
    plain.send(
        [
            (p % PARTITIONS, t, event(f"e-{i}", t, player=f"p{p:03}", level=i % 90, amount=i / 7))
            for i, (p, t) in enumerate(zip(players, at, strict=True))
        ]
    )
    for one in (plain, designed):
        one.apply()
        assert [r.decision for r in one.batch(hour)] == ["accepted"]

    assert plain.contents() == designed.contents() == plain.acknowledged()
    before, after = (files_of(one.state.table, "main", hour) for one in (plain, designed))
    assert (len(before), len(after)) == (FILES, FILES)
    opened_with_it = 0
    for p in (37, 250, 462):
        expected = players.count(p)
        rows, scan = looked_up(plain, f"player = 'p{p:03}'")
        assert rows == expected and scan.files == scan.all_files == FILES
        rows, scan = looked_up(designed, f"player = 'p{p:03}'")
        # A player at the border of two files is in both.
        assert rows == expected and scan.files in (1, 2) and scan.all_files == FILES
        opened_with_it += scan.files
    assert opened_with_it <= 4

    table = designed.state.table
    assert {f.sort_order_id for f in after} == {table.sort_order().order_id} == {1}
    assert {f.sort_order_id for f in before} <= {None, 0}
    ids = {f.name: f.field_id for f in table.schema().fields}
    for f in after:
        assert f.lower_bounds.keys() == f.upper_bounds.keys()
        bounded = ("player", "event_time", "kafka_partition", "kafka_offset", "ingest_hour")
        assert f.lower_bounds.keys() >= {ids[name] for name in bounded}
        assert f.value_counts.keys() == set(ids.values())
    paths = copies(designed, after, tmp_path)
    for path in paths:
        order = [(r["player"], r["event_time"]) for r in pq.read_table(path).to_pylist()]
        assert order == sorted(order), path
    names = [str(path) for path in paths]
    footers = f"SELECT path_in_schema, bloom_filter_length FROM parquet_metadata({names})"
    filters = duckdb.sql(f"{footers} WHERE bloom_filter_offset IS NOT NULL").fetchall()
    # The smallest that there is, and not a megabyte.
    assert [name for name, _ in filters] == ["event_id"] * FILES
    assert all(2**16 < length < 2**16 + 100 for _, length in filters)
    for event_id, most in (("e-17", 1), ("nothing", 0)):
        probe = (
            f"SELECT bloom_filter_excludes FROM parquet_bloom_probe({names}, 'event_id', "
            f"'{event_id}')"
        )
        assert sum(not excludes for (excludes,) in duckdb.sql(probe).fetchall()) == most, event_id
    by_spark = designed.spark.table(f"lake.{designed.job.stream.table}")
    assert [by_spark.where(f"event_id = '{id}'").count() for id in ("e-17", "e-x")] == [1, 0]


@pytest.mark.full
def test_the_speed_layer_writes_to_a_designed_table_and_claims_no_order(world: Make) -> None:
    """The hazard: Spark says of the speed layer's files that they are in the table's order."""
    hour = past_hour(1)
    # FLOAT is left to Spark; what PyArrow writes: tests/unit/iceberg/test_table_schemas.py.
    schema = "event_id STRING NOT NULL, player STRING, event_time TIMESTAMP NOT NULL, amount FLOAT"
    design = {"sort": "player", "bloom": ["event_id"]}
    one = world(schema=schema, files=design, speed={"roll_up": False}, create=2)
    bounds = {"past": "30 days", "future": "1 hour"}
    for times in ({"column": "event_time"} | bounds, {"column": "event_time"}):
        at = start_of(hour) + timedelta(minutes=len(times))
        one.send(
            [(i % 2, at, event(f"{len(times)}-{i}", at, player=f"p{9 - i}")) for i in range(10)]
        )
        # Without bounds its dates are many: a file open at a time, of rows that Iceberg's writer
        # has sorted.
        one.reconfigure(event_time=times)
        one.speed()
    files = files_of(one.state.table, "speed", hour)
    assert len(files) >= 2 and {f.sort_order_id for f in files} <= {None, 0}
    assert one.contents() == one.acknowledged()
    assert [r.decision for r in one.batch(hour)] == ["accepted"]
    assert one.contents() == one.acknowledged()
    assert {f.sort_order_id for f in files_of(one.state.table, "main", hour)} == {1}
