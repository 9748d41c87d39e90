"""Import of a Delta table: files and values of a version as delta-rs reads it, or a refusal."""

import json
import shutil
import sys
from collections.abc import Callable, Iterable
from dataclasses import replace
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable, write_deltalake
from lakes import FIRST, StreamLake, new_lake, new_stream
from test_importing import LAST, NOW, OLDEST, ids, job_of, stream_that_reads

from anabranch.common.errors import ConfigurationError, Refused
from anabranch.iceberg.delta_source import plan_log
from anabranch.iceberg.other_tables import open_parquet
from anabranch.lifecycle.importing import run
from anabranch.offsets.hours import shift, start_of
from anabranch.protocol import ledger
from anabranch.protocol.publisher import Publisher

Actions = list[dict[str, Any]]
Change = Callable[[Actions], None]
WORDS = ["x y/é%#?:=", "x", None]


def rows_of(rows: Iterable[tuple[str, int, str]]) -> pa.Table:
    """Rows: id, n, hour."""
    rows = list(rows)
    times = [start_of(hour) + timedelta(minutes=1) for *_, hour in rows]
    return pa.table({
        "id": [id for id, *_ in rows],
        "n": pa.array([n for _, n, _ in rows], pa.int64()),
        "timestamp": pa.array(times, pa.timestamp("us", "UTC")),
    })  # fmt: skip


@pytest.fixture
def lake(tmp_path: Path) -> StreamLake:
    """A stream, and a Delta table in `source` whose version 0 has a row of each of two hours."""
    lake = stream_that_reads(tmp_path)
    write_deltalake(source(lake), rows_of([("a", 1, OLDEST), ("b", 2, LAST)]))
    return lake


def source(lake: StreamLake) -> str:
    return str(lake.folder / "source")


def import_in(lake: StreamLake, first: str = OLDEST, **order: Any) -> run.Imported:
    job = job_of(lake.folder)
    request = run.ImportRequest(source(lake), first, **order)
    return run.run(job, Publisher(job.lake, job.stream), request)


def planned(lake: StreamLake, **order: Any) -> run.ImportPlan:
    return run.plan(job_of(lake.folder), run.ImportRequest(source(lake), OLDEST, **order))


def refuse(found: str, lake: StreamLake, **order: Any) -> None:
    """The import is refused with these words."""
    with pytest.raises(Refused, match=found):
        planned(lake, **order)


def change_log(folder: str, version: int, change: Change) -> None:
    """Change the actions of a commit, as another writer would have written them."""
    path = Path(folder) / f"_delta_log/{version:020}.json"
    actions = [json.loads(line) for line in path.read_text().splitlines()]
    change(actions)
    path.write_text("\n".join(map(json.dumps, actions)))


def set_protocol(*features: str, **configuration: str) -> Change:
    said = {f"delta.{k.replace('_', '.')}": v for k, v in configuration.items()}

    def change(actions: Actions) -> None:
        for action in actions:
            if "protocol" in action:
                both = {"readerFeatures": list(features), "writerFeatures": list(features)}
                action["protocol"] = {"minReaderVersion": 3, "minWriterVersion": 7, **both}
            if "metaData" in action:
                action["metaData"]["configuration"] = said

    return change


def set_add(**values: Any) -> Change:
    def change(actions: Actions) -> None:
        for action in actions:
            if "add" in action:
                action["add"].update(values)

    return change


def test_the_values_of_partitions_are_those_that_delta_reads(tmp_path: Path) -> None:
    """The files do not have them; the log has them as text, and paths as URIs."""
    ddl = (
        "id STRING NOT NULL, n INT, word STRING, day DATE, amount DECIMAL(10,2), at TIMESTAMP, "
        "yes BOOLEAN"
    )
    lake = new_lake(tmp_path, ddl=ddl)
    lake.serve([(FIRST, 0, 0)], {0: 1}, read_until=NOW)
    rows = rows_of((id, n, OLDEST) for n, id in enumerate("abc"))
    at = datetime(2020, 1, 2, 3, 4, 5, 678, tzinfo=UTC)
    values = {
        "word": pa.array(WORDS), "day": pa.array([date(1969, 12, 31), None, date(2024, 2, 29)]),
        "amount": pa.array([Decimal("1.50"), Decimal("0.00"), None], pa.decimal128(10, 2)),
        "at": pa.array([at, None, at], pa.timestamp("us", "UTC")), "yes": [True, False, None],
    }  # fmt: skip
    for name, column in values.items():
        cells = [column] if isinstance(column, pa.Array) else pa.chunked_array([column])
        rows = rows.append_column(name, cells)
    write_deltalake(source(lake), rows, partition_by=["n", *values])
    file = next((tmp_path / "source").rglob("*.parquet"))
    assert pq.read_schema(file).names == ["id", "timestamp"]
    stream = new_stream(schema=ddl)
    job = replace(job_of(tmp_path), stream=stream)
    done = run.run(job, Publisher(job.lake, job.stream), run.ImportRequest(source(lake), OLDEST))
    assert (done.good, done.plan.files) == (3, 3)
    names = [column.name for column in stream.columns]
    of_oldest = lake.table().scan(row_filter=f"ingest_hour = '{OLDEST}'").to_arrow()
    found = of_oldest.select(names).to_pylist()
    by_delta = DeltaTable(source(lake)).to_pyarrow_table().select(names).to_pylist()
    assert sorted(found, key=lambda r: r["id"]) == sorted(by_delta, key=lambda r: r["id"])
    assert {row["word"] for row in found} == {*WORDS}


def test_only_the_files_of_a_version_count(lake: StreamLake) -> None:
    for n in range(3):
        write_deltalake(source(lake), rows_of([(f"c{n}", n, LAST)]), mode="append")
    DeltaTable(source(lake)).optimize.compact()
    write_deltalake(source(lake), rows_of([("d", 4, LAST)]), mode="append")
    assert len([*Path(source(lake)).glob("*.parquet")]) == 6
    plan = planned(lake)
    assert (plan.version, plan.files, plan.rows) == (5, 2, 6)
    assert plan.notes[0].endswith("source, version 5")
    expected = [(1, 2), (4, 5), (1, 5)]
    assert [(p.files, p.rows) for p in (planned(lake, version=v) for v in (0, 3, 4))] == expected
    import_in(lake, version=3)
    wanted = {OLDEST: ["a"], LAST: ["b", "c0", "c1", "c2"], FIRST: ["0-0", "0-1"]}
    assert ids(lake, "main") == wanted


def test_a_version_is_read_from_a_checkpoint_alone(lake: StreamLake) -> None:
    write_deltalake(source(lake), rows_of([("c", 3, LAST)]), mode="append")
    DeltaTable(source(lake)).create_checkpoint()
    write_deltalake(source(lake), rows_of([("d", 4, LAST)]), mode="append")
    for version in (0, 1):
        Path(source(lake), f"_delta_log/{version:020}.json").unlink()
    assert [(planned(lake, version=v).rows) for v in (1, 2, None)] == [3, 4, 4]
    refuse(
        r"expected version 0 in the log of the Delta table, found 1 to 2; name one", lake, version=0
    )


def test_a_checkpoint_with_sidecars_is_read(lake: StreamLake) -> None:
    """The form that tables of Databricks have (v2): actions in files beside the checkpoint."""
    log = Path(source(lake), "_delta_log")
    change_log(source(lake), 0, set_protocol("v2Checkpoint"))
    DeltaTable(source(lake)).create_checkpoint()
    (log / "_sidecars").mkdir()
    classic = next(log.glob("*.checkpoint.parquet"))
    adds = pq.read_table(classic)
    sidecar = log / "_sidecars/3a0d65cd-4056-49b8-937b-95f9e3ee90e5.parquet"
    pq.write_table(adds.filter(pa.compute.is_valid(adds["add"])).select(["add"]), sidecar)
    actions = [json.loads(line) for line in (log / f"{0:020}.json").read_text().splitlines()]
    kept = [action for action in actions if {"protocol", "metaData"} & {*action}]
    said = {"path": sidecar.name, "sizeInBytes": sidecar.stat().st_size, "modificationTime": 0}
    lines = [{"checkpointMetadata": {"version": 0}}, *kept, {"sidecar": said}]
    name = f"{0:020}.checkpoint.80a083e8-7026-4e79-81be-64bd76c43a11.json"
    (log / name).write_text("\n".join(map(json.dumps, lines)))
    for path in (classic, log / f"{0:020}.json", log / "_last_checkpoint"):
        path.unlink()
    assert (planned(lake).version, planned(lake).rows) == (0, 2)


def test_a_later_run_goes_on_with_the_version_of_the_first(lake: StreamLake) -> None:
    import_in(lake, LAST)
    rows = rows_of([("a", 1, OLDEST), ("c", 3, OLDEST), ("b", 2, LAST)])
    write_deltalake(source(lake), rows, mode="overwrite")
    assert planned(lake).version == 0
    import_in(lake)
    assert ids(lake, "main") == {OLDEST: ["a"], LAST: ["b"], FIRST: ["0-0", "0-1"]}
    rows = ledger.newest(lake.ledger.history())
    shown = [row.imported["version"] for row in rows.values() if row.imported is not None]
    assert shown == [0, 0, 0]
    found = f"hour {OLDEST}: expected the 1 rows that it was imported with .*, found 2"
    with pytest.raises(Refused, match=found):
        import_in(lake, version=1)


def test_files_of_another_table_are_read_where_they_are(lake: StreamLake) -> None:
    """A shallow clone has the paths of its source, as URIs."""
    elsewhere = lake.folder / "else where"
    shutil.move(source(lake), elsewhere)
    shutil.copytree(elsewhere / "_delta_log", f"{source(lake)}/_delta_log")
    [file] = elsewhere.glob("*.parquet")
    for prefix in ("file:", "file://"):
        change_log(source(lake), 0, set_add(path=f"{prefix}{lake.folder}/else%20where/{file.name}"))
        assert (planned(lake).files, planned(lake).rows) == (1, 2)
    file.unlink()
    refuse(r"version 0: expected the file file:.*/else where/part-.* found none: VACUUM", lake)
    change_log(source(lake), 0, set_add(path=f"abfss://a@b/{file.name}"))
    refuse("expected files on S3 or local, found abfss://a@b/part-", lake)


def test_a_version_that_vacuum_has_made_incomplete_is_refused(lake: StreamLake) -> None:
    write_deltalake(source(lake), rows_of([("d", 4, LAST)]), mode="overwrite")
    DeltaTable(source(lake)).vacuum(0, dry_run=False, enforce_retention_duration=False)
    found = r"version 0: expected the file part-\S*\.parquet, .* found none: VACUUM"
    refuse(found, lake, version=0)
    assert planned(lake).rows == 1
    [file] = Path(source(lake)).glob("*.parquet")
    file.write_bytes(file.read_bytes() + b"x")
    refuse(r"version \d: expected \d+ bytes of .*, as its log says, found \d+", lake)


def test_a_file_with_other_rows_or_types_than_the_log_says_is_refused(lake: StreamLake) -> None:
    change_log(source(lake), 0, set_add(stats='{"numRecords": 3}'))
    refuse("expected 3 rows, as its table's log says, found 2", lake)

    shutil.rmtree(source(lake))
    rows = rows_of([("a", 1, OLDEST)])
    write_deltalake(source(lake), rows.set_column(1, "n", pa.array([1.0])))

    def say_long(actions: Actions) -> None:
        for metadata in (action["metaData"] for action in actions if "metaData" in action):
            metadata["schemaString"] = metadata["schemaString"].replace('"double"', '"long"')

    change_log(source(lake), 0, say_long)
    found = r"column n: expected int32, as the table has it, found double"
    with pytest.raises(Refused, match=found):
        import_in(lake)


def test_columns_that_a_file_does_not_have_are_null(lake: StreamLake) -> None:
    rows = rows_of([("c", 3, LAST)]).drop_columns("n").append_column("more", pa.array(["x"]))
    write_deltalake(source(lake), rows, mode="append", schema_mode="merge")
    import_in(lake)
    found = lake.table().scan(row_filter=f"ingest_hour = '{LAST}'").to_arrow().to_pylist()
    assert {row["id"]: row["n"] for row in found} == {"b": 2, "c": None}


IN_A_FILE = {"storageType": "u", "pathOrInlineDv": "ab^-aqEH.-t@S}K{vb[*k^", "offset": 4}
INLINE = {
    "storageType": "i",
    "pathOrInlineDv": "wi5b=000010000siXQKl0rr91000f55c8Xg0@@D72lkbi5=-{L",
}


@pytest.mark.parametrize("vector", [IN_A_FILE, INLINE], ids=["file", "inline"])
def test_deletion_vectors_are_refused(lake: StreamLake, vector: dict[str, Any]) -> None:
    change_log(source(lake), 0, set_protocol("deletionVectors", enableDeletionVectors="true"))
    assert planned(lake).rows == 2
    vector = {**vector, "sizeInBytes": 40, "cardinality": 6}
    change_log(source(lake), 0, set_add(deletionVector=vector))
    refuse(r"without deletion vectors, found .*; run REORG TABLE … APPLY \(PURGE\) on it", lake)


def test_column_mapping_is_refused(lake: StreamLake) -> None:
    change_log(source(lake), 0, set_protocol("columnMapping", columnMapping_mode="none"))
    assert planned(lake).rows == 2

    def map_columns(actions: Actions) -> None:
        set_protocol("columnMapping", columnMapping_mode="name")(actions)
        for action in actions:
            if "metaData" in action:
                schema = json.loads(action["metaData"]["schemaString"])
                for number, field in enumerate(schema["fields"], 1):
                    physical = {"id": number, "physicalName": field["name"]}
                    named = {f"delta.columnMapping.{k}": v for k, v in physical.items()}
                    field["metadata"] = named
                action["metaData"]["schemaString"] = json.dumps(schema)

    change_log(source(lake), 0, map_columns)
    refuse(r"without column mapping, found delta\.columnMapping\.mode name", lake)


@pytest.mark.parametrize(
    ("feature", "found"),
    [("variantType", "found variantType"), ("aNewOne", "Feature 'aNewOne' is not supported")],
)
def test_unsupported_features_are_refused(lake: StreamLake, feature: str, found: str) -> None:
    change_log(source(lake), 0, set_protocol(feature))
    refuse(found, lake)


def test_a_log_with_a_hole_and_a_source_without_one_are_refused(lake: StreamLake) -> None:
    for n in range(2):
        write_deltalake(source(lake), rows_of([(f"c{n}", n, LAST)]), mode="append")
    Path(source(lake), f"_delta_log/{1:020}.json").unlink()
    refuse("version 2: expected a log from which the version can be read, found", lake)
    shutil.rmtree(Path(source(lake), "_delta_log"))
    found = "expected a Delta table, of which --version 1 is one, found a folder without"
    refuse(found, lake, version=1)


def test_partitions_by_binary_values_and_tables_without_rows_are_refused(lake: StreamLake) -> None:
    DeltaTable(source(lake)).delete()
    refuse("version 1: expected a version with rows, found no files", lake)
    shutil.rmtree(source(lake))
    rows = rows_of([("a", 1, OLDEST)]).append_column("key", pa.array([b"\x00"]))
    write_deltalake(source(lake), rows, partition_by=["key"])
    refuse("version 0: expected no partition column of BINARY, found key", lake)


def test_the_missing_extra_is_named(lake: StreamLake, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "deltalake", None)
    found = r"found no deltalake; run `pip install 'anabranch\[delta\]'`"
    with pytest.raises(ConfigurationError, match=found):
        planned(lake)


def test_the_log_of_a_version_is_its_newest_whole_checkpoint_and_the_commits_behind_it() -> None:
    def commits(*versions: int) -> list[str]:
        return [f"{version:020}.json" for version in versions]

    def parts(version: int, *numbers: int) -> list[str]:
        return [f"{version:020}.checkpoint.{n:010}.{2:010}.parquet" for n in numbers]

    others = ["_last_checkpoint", f"{3:020}.crc", f"{1:020}.{2:020}.compacted.json"]
    others.append("_sidecars/a.parquet")
    names = [*commits(1, 2, 3, 4, 5), *others, *parts(2, 1, 2), *parts(4, 1)]
    # That of version 4 was not written to its end.
    assert plan_log(names, None, "s3://a") == (5, [*parts(2, 1, 2), *commits(2, 3, 4, 5)])
    assert plan_log(names, 2, "s3://a") == (2, [*parts(2, 1, 2), *commits(2)])
    assert plan_log(names, 1, "s3://a") == (1, commits(1))
    v2 = f"{3:020}.checkpoint.80a083e8-7026-4e79-81be-64bd76c43a11.json"
    assert plan_log([*names, v2], 4, "s3://a") == (4, [v2, "_sidecars/a.parquet", *commits(3, 4)])
    found = "expected version 6 in the log of the Delta table, found 1 to 5"
    with pytest.raises(Refused, match=found):
        plan_log(names, 6, "s3://a")
    found = "expected a version in the log of the Delta table, found none"
    with pytest.raises(Refused, match=found):
        plan_log(others, None, "s3://a")


def test_timestamps_of_int96_are_read_to_the_end_of_the_calendar(lake: StreamLake) -> None:
    path = lake.folder / "old.parquet"
    last = datetime(9999, 12, 31, 23, 59, 59, 999999, tzinfo=UTC)
    times = pa.array([last], pa.timestamp("us", "UTC"))
    pq.write_table(pa.table({"t": times}), path, use_deprecated_int96_timestamps=True)
    read = open_parquet(lake.table().io, str(path)).read()["t"]
    assert read.cast(pa.timestamp("us", "UTC")).to_pylist() == times.to_pylist()


def test_hours_of_a_table_are_imported_with_an_account(lake: StreamLake) -> None:
    done = import_in(lake)
    assert (done.rows, done.good, done.hours) == (2, 2, (OLDEST, shift(OLDEST, 1), LAST))
    row = ledger.newest(lake.ledger.history())[OLDEST]
    assert row.imported is not None and (row.imported["files"], row.imported["rows"]) == (1, 1)
    assert import_in(lake).hours == ()
