"""Partition fields beside those of time: files by Iceberg's transforms, few for a reader."""

import pickle
from collections import Counter
from collections.abc import Sequence
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from lakes import FIRST, StreamLake, new_lake, new_stream
from pyiceberg.io.pyarrow import schema_to_pyarrow
from pyiceberg.table import Table
from pyiceberg.types import LongType

from anabranch.common.errors import ConfigurationError
from anabranch.config.sections import parse_partition
from anabranch.iceberg import admin, table_schemas
from anabranch.iceberg.files import own_files
from anabranch.iceberg.parquet_writer import (
    OF_TIME,
    FileWriter,
    Output,
    data_file_of,
    fields_of,
    partitioning_of,
    target_of,
    write_all,
)
from anabranch.offsets.hours import shift
from anabranch.protocol import apply
from serving_layer.query.datasets import connected, plan_files

DDL = (
    "id STRING NOT NULL, region STRING, level INT, total BIGINT, day DATE, at TIMESTAMP, ok BOOLEAN"
)
DAY = date(2026, 11, 21)
ODD = st.sampled_from(["", "a/b", "é" * 200, "null", "\x00", "a=b", "x" * 3000])


def table_by(lake: StreamLake, *fields: str, **properties: str) -> Table:
    stream = new_stream(schema=DDL)
    schema, all_properties = table_schemas.rows_schema(stream), admin.TABLE_PROPERTIES | properties
    admin.create(lake.lake, "games.by", schema, (*OF_TIME, *fields), all_properties)
    return lake.lake.load("games.by")


def rows_of(table: Table, values: Sequence[dict[str, Any]]) -> pa.Table:
    of_kafka = {"kafka_partition": 0, "ingest_hour": FIRST, "event_date": DAY}
    rows = [{"id": f"e-{i}", "kafka_offset": i} | of_kafka | v for i, v in enumerate(values)]
    schema = schema_to_pyarrow(table.schema(), include_field_ids=False)
    return pa.Table.from_pylist(rows, schema=schema)


@pytest.fixture(scope="module")
def by_everything(tmp_path_factory: pytest.TempPathFactory) -> Table:
    lake = new_lake(tmp_path_factory.mktemp("lake"))
    buckets = ("bucket(16, id)", "bucket(3, level)", "bucket(5, total)", "bucket(7, day)")
    others = ("bucket(9, at)", "truncate(4, region)", "region", "ok", "day", "level")
    return table_by(lake, *buckets, *others)


VALUES = st.fixed_dictionaries(
    {
        "id": st.text(max_size=5), "region": st.none() | st.text(max_size=6) | ODD,
        "level": st.none() | st.integers(-(2**31), 2**31 - 1),
        "total": st.none() | st.integers(-(2**63), 2**63 - 1), "day": st.none() | st.dates(),
        "at": st.none() | st.datetimes(datetime(1900, 1, 1), datetime(2200, 1, 1), timezones=st.just(UTC)),
        "ok": st.none() | st.booleans(), "ingest_hour": st.sampled_from([FIRST, shift(FIRST, 1)]),
        "event_date": st.dates(DAY - timedelta(days=1), DAY),
    }
)  # fmt: skip


@given(values=st.lists(VALUES, max_size=12))
def test_rows_are_placed_as_by_iceberg(by_everything: Table, values: list[dict[str, Any]]) -> None:
    table = by_everything
    rows = rows_of(table, values)
    partitions = pickle.loads(pickle.dumps(partitioning_of(table)))
    found = {}
    for values_of, chosen in partitions.split(rows):
        for i in range(len(rows)) if chosen is None else chosen.tolist():
            assert i not in found
            found[i] = values_of
        path = partitions.path(values_of, "a.parquet")
        folders = path.removeprefix(f"{table.location()}/data/").split("/")
        assert len(folders) == len(partitions.spec.fields) + 1
        assert max(map(len, folders)) < 100
    schema = table.schema()
    for i, row in enumerate(rows.to_pylist()):
        for field, value in zip(table.spec().fields, found[i], strict=True):
            source = schema.find_field(field.source_id)
            expected = field.transform.transform(source.field_type)(row[source.name])
            if isinstance(expected, date):
                expected = (expected - date(1970, 1, 1)).days
            assert value == expected and type(value) is type(expected), field.name


@pytest.mark.parametrize(
    "properties",
    [
        {},
        {"write.object-storage.enabled": "true"},
        {"write.object-storage.enabled": "true", "write.object-storage.partitioned-paths": "false"},
    ],
    ids=["folders", "objects", "flat"],
)
def test_files_are_found_as_the_tables_own(tmp_path: Path, properties: dict[str, str]) -> None:
    lake = new_lake(tmp_path)
    table = table_by(lake, "bucket(4, id)", "region", **properties)
    rows = rows_of(table, [{"region": r} for r in (None, "", "a/b", "é" * 300, "x.parquet/y")] * 5)
    outputs = written(table, rows)
    files = [data_file_of(table, output) for output in outputs]
    assert sum(f.record_count for f in files) == 25 and len(files) > 5
    own = own_files(lake.lake, table)
    assert all(own.has(output.path) for output in outputs)
    with_hash = [o.path for o in outputs if "/data/event_date=" not in o.path]
    assert len(with_hash) == (len(outputs) if properties else 0)


def written(table: Table, rows: pa.Table) -> list[Output]:
    target = target_of(table)
    assert target is not None
    writer = FileWriter(target)
    return write_all(writer, rows) + writer.close()


def append_rows(table: Table, rows: pa.Table) -> None:
    outputs = written(table, rows)
    with table.transaction() as tx, tx.update_snapshot().fast_append() as append:
        for output in outputs:
            append.append_data_file(data_file_of(table, output))


def staged_by(lake: StreamLake, *fields: str) -> tuple[Table, pa.Table]:
    """A table of 200 rows in one hour, 40 ids of 5 regions, on its branch `main`."""
    table = table_by(lake, *fields)
    values = [{"id": f"p-{i % 40}", "region": f"r{i % 5}", "level": i - 100} for i in range(200)]
    rows = rows_of(table, values)
    append_rows(table, rows)
    return lake.lake.load("games.by"), rows


def test_readers_open_the_files_of_one_bucket_and_region(tmp_path: Path) -> None:
    table, rows = staged_by(new_lake(tmp_path), "bucket(16, id)", "region")
    expected = [r for r in rows.to_pylist() if r["id"] == "p-7"]
    every = list(table.scan().plan_files())

    scan = table.scan("id = 'p-7' and region = 'r2'")
    assert len(list(scan.plan_files())) == 1 and len(every) > 25
    assert scan.to_arrow().num_rows == len(expected) == 5

    planned = plan_files("games.by", table)
    with connected() as duckdb:
        duckdb.register("here", planned.dataset())
        found = duckdb.sql("SELECT * FROM here WHERE id = 'p-7'").fetchall()
        several = duckdb.sql("SELECT * FROM here WHERE id IN ('p-7', 'p-11')").fetchall()
        other = duckdb.sql("SELECT * FROM here WHERE id <> 'p-7' AND level < 90").fetchall()
    assert len(found) == 5 and len(several) == 10
    assert len(other) == sum(r["id"] != "p-7" and r["level"] < 90 for r in rows.to_pylist())
    one, two, _ = planned.scans
    assert 1 <= len(one.files) < len(two.files) < len(every) / 4


@pytest.mark.parametrize("field", ["level", "bucket(16, level)"])
def test_a_widened_integer_is_found_by_old_and_new_files(tmp_path: Path, field: str) -> None:
    lake = new_lake(tmp_path)
    table, _ = staged_by(lake, field)
    with table.update_schema() as update:
        update.update_column("level", LongType())
    table = lake.lake.load("games.by")
    rows = rows_of(table, [{"level": 7}, {"level": 2**40}])
    append_rows(table, rows)
    table = lake.lake.load("games.by")
    for level, number in ((7, 2), (2**40, 1), (-100, 1)):
        assert table.scan(f"level = {level}").to_arrow().num_rows == number
        planned = plan_files("games.by", table)
        with connected() as duckdb:
            duckdb.register("here", planned.dataset())
            assert len(duckdb.sql(f"SELECT * FROM here WHERE level = {level}").fetchall()) == number


def test_a_tables_fields_are_read_as_they_were_written(tmp_path: Path) -> None:
    fields = ("bucket(16, id)", "truncate(4, region)", "level")
    assert fields_of(table_by(new_lake(tmp_path), *fields)) == (*OF_TIME, *fields)


@pytest.mark.parametrize(
    "value",
    [["bucket(16", "player_id)", "region"], ["bucket(16, player_id)", "region"], "bucket(16,player_id), region"],
    ids=["flow list", "block list", "text"],
)  # fmt: skip
def test_a_list_in_yaml_may_have_commas_in_parentheses(value: object) -> None:
    assert parse_partition(value) == ("bucket(16, player_id)", "region")


def test_fields_and_location_are_not_changed_later(tmp_path: Path) -> None:
    made = new_lake(tmp_path)
    for change, words in (
        ({"partition": ("bucket(4, id)",)}, "partition: expected no fields, with which table"),
        ({"location": f"file://{tmp_path}/other"}, "location: expected games.events in file:"),
    ):
        stream = made.stream.model_copy(update=change)
        with pytest.raises(ConfigurationError, match=words):
            apply._require_layout(stream, made.table())
    here = made.stream.model_copy(update={"location": made.table().location().rsplit("/", 2)[0]})
    apply._require_layout(here, made.table())


def test_a_namespace_is_made_with_the_catalogs_properties(tmp_path: Path) -> None:
    uri = f"sqlite:///{tmp_path}/catalog.db"
    lake = new_lake(tmp_path, uri=uri, properties={"namespace.owner": "games team"}).lake
    assert lake.catalog.load_namespace_properties("games")["owner"] == "games team"
    place = f"file://{tmp_path}/elsewhere/here"
    schema = new_lake(tmp_path / "b").table().schema()
    assert admin.create(lake, "games.placed", schema, ("ingest_hour",), {}, place)
    assert lake.load("games.placed").location() == place


def test_a_group_of_many_partitions_needs_no_more_files_than_partitions(tmp_path: Path) -> None:
    table, rows = staged_by(new_lake(tmp_path), "id")
    assert Counter(t.file.record_count for t in table.scan().plan_files()) == {5: 40}
    assert table.scan().to_arrow().num_rows == len(rows)
