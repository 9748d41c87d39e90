"""Import: hours before the stream's first come from files once; the account closes."""

import gc
import gzip
import json
import weakref
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from brokers import Broker
from conf_folders import said
from killed import kill_at
from lakes import DDL, FIRST, StreamLake, content, new_environment, new_lake, new_stream
from pydantic import SecretStr
from pyiceberg.io.pyarrow import PyArrowFileIO

from anabranch.common.errors import Refused, Terminal, Transient
from anabranch.common.fail_points import Step
from anabranch.config.environment import ErasureKeys
from anabranch.iceberg.lake import Lake
from anabranch.iceberg.other_tables import ParquetPart
from anabranch.iceberg.parquet_writer import FileWriter, Output
from anabranch.iceberg.snapshots import heads
from anabranch.job import Job
from anabranch.lifecycle.erasure import run as erasing
from anabranch.lifecycle.importing import run, tasks
from anabranch.lifecycle.importing.sources import (
    HOUR,
    Numbers,
    SourceReader,
    find_duplicates,
    find_known,
    find_repeated_places,
    first_number,
    may_become,
)
from anabranch.lifecycle.importing.tasks import HERE, Sums
from anabranch.lifecycle.retention import expire_rows
from anabranch.offsets.hours import (
    Adoption,
    Cut,
    Timeline,
    hour_of,
    hours_between,
    shift,
    start_of,
    to_number,
)
from anabranch.operations.audit import audit
from anabranch.operations.reports.explain import explain, explain_sentences
from anabranch.protocol import ledger
from anabranch.protocol.acts import serve_hour
from anabranch.protocol.imported import first_offset, require_of_kafka
from anabranch.protocol.ledger_row import HourAccount
from anabranch.protocol.publisher import Publisher
from anabranch.protocol.watermarks import complete_through
from serving_layer.changes import Token, poll
from serving_layer.egress.hour import cut_of, open_hour, places

LAST = shift(FIRST, -1)
OLDEST = shift(FIRST, -3)
NOW = datetime(2026, 11, 21, 5, tzinfo=UTC)


def write(
    path: Path, rows: Sequence[tuple[str | None, int, str, int]], **types: pa.DataType
) -> None:
    """A Parquet file of rows: id, n, hour, minute."""
    path.parent.mkdir(parents=True, exist_ok=True)
    times = [start_of(hour) + timedelta(minutes=minute) for *_, hour, minute in rows]
    columns = {
        "id": pa.array([id for id, *_ in rows], types.get("id", pa.string())),
        "n": pa.array([n for _, n, *_ in rows], types.get("n", pa.int64())),
        "timestamp": pa.array(times, pa.timestamp("us", "UTC")),
    }
    pq.write_table(pa.table(columns), path)


def to_json_lines(path: Path) -> None:
    """Replace a Parquet file by one of JSON lines with the same rows."""
    rows = pq.read_table(path).to_pylist()
    lines = "\n".join(json.dumps(row, default=datetime.isoformat) for row in rows)
    path.with_suffix(".json").write_text(lines)
    path.unlink()


def stream_that_reads(folder: Path) -> StreamLake:
    """A stream whose first hour is FIRST, of which it has read two records."""
    lake = new_lake(folder)
    lake.serve([(FIRST, 0, 0), (FIRST, 0, 1)], {0: 2}, read_until=NOW)
    return lake


def job_of(folder: Path) -> Job:
    environment = new_environment(folder)
    return Job(environment, new_stream(), Lake(environment), Broker(log={0: [0, 0]}).adapter)


def import_in(folder: Path, hours: tuple[str, str | None] = (OLDEST, None)) -> run.Imported:
    return imported(job_of(folder), f"{folder}/source", *hours)


def imported(job: Job, source: str, first: str = OLDEST, last: str | None = None) -> run.Imported:
    request = run.ImportRequest(source, first, last)
    return run.run(job, Publisher(job.lake, job.stream), request)


def refuse(found: str, folder: Path, hours: tuple[str, str | None] = (OLDEST, None)) -> None:
    """The import is refused with these words."""
    with pytest.raises(Refused, match=found):
        import_in(folder, hours)


@pytest.fixture
def lake(tmp_path: Path) -> StreamLake:
    """Three hours to import: two rows; a row that repeats one of these and its own; nothing."""
    lake = stream_that_reads(tmp_path)
    a = [("a", 1, OLDEST, 5), ("b", 2, OLDEST, 6), ("c", 3, shift(OLDEST, 1), 0)]
    write(tmp_path / "source/a.parquet", a)
    write(tmp_path / "source/part/b.parquet", [("b", 4, shift(OLDEST, 1), 1), ("0-1", 9, FIRST, 0)])
    write(tmp_path / "source/_temporary/0.parquet", [("no", 0, OLDEST, 0)])
    return lake


def ids(lake: StreamLake, branch: str) -> dict[str, list[str]]:
    rows = content(lake.lake, lake.name, branch).to_pylist()
    found: dict[str, list[str]] = {}
    for row in sorted(rows, key=lambda r: (r["ingest_hour"], r["kafka_offset"])):
        found.setdefault(row["ingest_hour"], []).append(row["id"])
    return found


IMPORTED = {OLDEST: ["a", "b"], shift(OLDEST, 1): ["c"]}


def test_hours_before_the_first_are_accepted_once_with_an_account_of_their_own(
    lake: StreamLake,
) -> None:
    done = import_in(lake.folder)
    assert (done.hours, done.rows, done.good) == (tuple(hours_between(OLDEST, FIRST)), 4, 3)
    assert done.duplicate == 1
    assert (done.plan.before, done.plan.after) == (0, 1)
    assert ids(lake, "main") == IMPORTED | {FIRST: ["0-0", "0-1"]}
    assert ids(lake, "batch") == IMPORTED and ids(lake, "speed") == {FIRST: ["0-0", "0-1"]}
    row = ledger.newest(lake.ledger.history())[shift(OLDEST, 1)]
    assert (row.decision, row.offsets, row.good, row.duplicate) == ("accepted", 2, 1, 1)
    assert row.served == "batch"
    first = first_offset(shift(OLDEST, 1))
    assert row.cut == Cut("import", {-1: (first, first + 2)}) and row.imported is not None
    assert (row.imported["files"], row.imported["rows"]) == (2, 2)
    assert len(row.imported["checksum"]) == 16
    assert row.act is not None and row.act.name == "import"
    state = lake.state()
    assert (state.timeline.first, state.timeline.first_of_kafka) == (OLDEST, FIRST)
    assert state.position.offsets == {0: 2}
    assert complete_through(state) == LAST
    with lake.unmoved():
        again = import_in(lake.folder)
    assert (again.hours, again.plan.known) == ((), (OLDEST, shift(OLDEST, 1)))


STEPS = [step for step in Step if step.label.startswith("import.")]


@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.label)
@pytest.mark.parametrize("number", [pytest.param(1, marks=pytest.mark.full), 2])
def test_a_killed_import_is_continued(lake: StreamLake, step: Step, number: int) -> None:
    kill_at(f"{step.label}:{number}", import_hour_by_hour, lake.folder)
    published = number - (step in (Step.IMPORT_WRITTEN, Step.IMPORT_DECIDED))
    assert lake.state().timeline.first == shift(FIRST, -published)
    import_in(lake.folder)
    assert ids(lake, "main") == IMPORTED | {FIRST: ["0-0", "0-1"]}
    assert ids(lake, "batch") == IMPORTED
    rows = [row for row in lake.ledger.history() if row.decision == "accepted"]
    assert sorted(row.hour for row in rows) == hours_between(OLDEST, FIRST)


def import_hour_by_hour(folder: Path) -> None:
    run._HOURS_A_COMMIT = 1
    import_in(folder)


def test_no_facts_of_a_commit_stay(lake: StreamLake, monkeypatch: pytest.MonkeyPatch) -> None:
    """Facts of a commit may be half a gigabyte, and too few objects to start a collection."""
    made, read = list[weakref.ref[pa.Table]](), run.read_facts

    def noted(*given: Any) -> pa.Table:
        made.append(weakref.ref(facts := read(*given)))
        return facts

    monkeypatch.setattr(run, "read_facts", noted)
    gc.collect()
    gc.disable()
    try:
        import_in(lake.folder)
        assert [facts() for facts in made] == [None] * len(made) and made
    finally:
        gc.enable()


def test_readers_of_the_ledger_take_an_imported_hour_as_accepted(lake: StreamLake) -> None:
    import_in(lake.folder)
    job = job_of(lake.folder)
    report = audit(job, None, with_kafka=True)
    assert report.agrees, report.disagreements
    assert [hour.kafka for hour in report.hours] == ["the hour was imported"] * 3
    facts = explain(job, OLDEST, NOW)
    assert (facts.state, facts.counts.good, facts.topic_id) == ("accepted", 2, "import")
    assert facts.gone is not None and "imported" in facts.gone
    assert facts.rebuild is None
    said = " ".join(text for pair in explain_sentences(facts) for text in pair)
    assert "it was imported, with 2 source rows as its offsets" in said
    assert "2 read from files (`anabranch import`)" in said
    assert said.count("stay served") == 1 and "the batch layer's rows stay served" in said
    found = f"hour {OLDEST}: expected an hour of Kafka's records, found that it was imported"
    with pytest.raises(Refused, match=found):
        require_of_kafka(lake.state(), OLDEST)
    require_of_kafka(lake.state(), FIRST)
    with pytest.raises(Refused, match="it was imported: the speed layer has never read it"):
        serve_hour(lake.publisher, OLDEST, "speed", "a try")


def test_consumers_of_changes_get_each_imported_row_as_a_record_of_its_own(
    lake: StreamLake,
) -> None:
    job = job_of(lake.folder)
    assert list(poll(job, Token("events"))) == []
    import_in(lake.folder)
    changes = list(poll(job, Token("events")))
    assert [(change.hour, change.revision, change.rows) for change in changes] == [
        (OLDEST, 1, 2), (shift(OLDEST, 1), 1, 1), (LAST, 1, 0),
    ]  # fmt: skip
    # The hazard: an index keeps one document of two rows with one identity.
    found = list[bytes]()
    for change in changes:
        hour = open_hour(job, change)
        cut, identity = cut_of(job, hour)
        with hour.batches("target") as batches:
            for partition, offset, row in places(batches.rows(), cut):
                assert row is not None or change.hour == shift(OLDEST, 1)
                found.append(identity.key_of(partition, offset))
    assert len(found) == len(set(found)) == 4


def test_a_batch_branch_set_back_is_imported_again(lake: StreamLake) -> None:
    before = heads(lake.table())["batch"]
    import_in(lake.folder)
    lake.set_back("batch", before)
    state = lake.publisher.recover()
    assert state.timeline.first == FIRST and not state.is_accepted(OLDEST)
    assert ids(lake, "main") == IMPORTED | {FIRST: ["0-0", "0-1"]}
    import_in(lake.folder)
    assert ids(lake, "batch") == IMPORTED
    assert ids(lake, "main") == IMPORTED | {FIRST: ["0-0", "0-1"]}
    assert lake.state().timeline.first == OLDEST


def test_another_publish_repeats_nothing(lake: StreamLake, monkeypatch: pytest.MonkeyPatch) -> None:
    publish, seen = run._Import._publish, list[str]()

    def first_another(self: Any, publisher: Publisher, written: Any) -> bool:
        if not seen:
            seen.append("another")
            import_in(lake.folder)
        return publish(self, publisher, written)

    monkeypatch.setattr(run._Import, "_publish", first_another)
    import_in(lake.folder)
    assert ids(lake, "main") == IMPORTED | {FIRST: ["0-0", "0-1"]}


def test_rows_that_the_first_hours_of_kafka_have_are_left_out(lake: StreamLake) -> None:
    write(lake.folder / "source/c.parquet", [("0-1", 7, LAST, 59), ("d", 8, LAST, 59)])
    done = import_in(lake.folder)
    assert (done.good, done.duplicate) == (4, 2)
    assert ids(lake, "main")[LAST] == ["d"]


def with_places(path: Path, rows: Sequence[tuple[str | None, str, int, int]]) -> None:
    """A Parquet file of rows: id, hour, partition and offset."""
    write(path, [(id, 0, hour, 0) for id, hour, *_ in rows])
    partitions = pa.array([p for *_, p, _ in rows], pa.int32())
    places = {"partition": partitions, "offset": [o for *_, o in rows]}
    written = pq.read_table(path)
    for name, values in places.items():
        written = written.append_column(name, [values])
    pq.write_table(written, path)


def test_times_of_one_file_may_be_kafkas_and_those_of_another_not(tmp_path: Path) -> None:
    """The hazard: Kafka received a row hours after its own time, and has it in that hour."""
    ddl = f"{DDL}, own TIMESTAMP"
    lake = new_lake(tmp_path, ddl=ddl)
    lake.serve([(FIRST, 0, 0), (shift(FIRST, 6), 0, 9)], {0: 10}, read_until=NOW)
    write(tmp_path / "source/a.parquet", [("a", 1, OLDEST, 5)])
    path = tmp_path / "source/b.parquet"
    write(path, [("0-9", 9, FIRST, 1), ("b", 2, OLDEST, 6)])
    pq.write_table(pq.read_table(path).rename_columns(["id", "n", "own"]), path)
    stream = new_stream(schema=ddl, event_time={"column": "own"}, batch={"lookback_hours": 1})
    done = imported(replace(job_of(tmp_path), stream=stream), f"{tmp_path}/source")
    assert (done.good, ids(lake, "main").get(LAST)) == (2, None)
    times = lake.table().scan(row_filter=f"ingest_hour = '{OLDEST}'").to_arrow().to_pylist()
    has_kafkas = {row["id"]: row["kafka_timestamp"] is not None for row in times}
    assert has_kafkas == {"a": True, "b": False}


@pytest.mark.parametrize("form", ["parquet", "json"])
def test_files_with_partitions_and_offsets_meet_kafka_exactly(tmp_path: Path, form: str) -> None:
    lake = new_lake(tmp_path, timeline=Timeline(FIRST, FIRST, {0: 5}))
    # Nothing has to be fresh: offsets decide.
    lake.serve([(FIRST, 0, 5), (FIRST, 0, 6)], {0: 7})
    # Two records of the stream's first hour were gone; a micro-batch came twice; a key is null.
    places = [
        ("a", OLDEST, 0, 1), ("b", LAST, 0, 2), ("c", FIRST, 0, 3), ("d", FIRST, 0, 4),
        ("e", FIRST, 0, 5),
    ]  # fmt: skip
    with_places(tmp_path / "source/a.parquet", places)
    with_places(tmp_path / "source/b.parquet", places[1:4])
    if form == "json":
        to_json_lines(tmp_path / "source/b.parquet")
    # Kafka had compacted an offset that the stream read.
    account = HourAccount(gap=3, gaps={"control": 1, "compacted": 2})
    lake.ledger.record([ledger.decision(FIRST, "refused", 1, None, NOW, account=account)])
    job = replace(job_of(tmp_path), kafka=Broker(log={0: [0] * 7}).adapter)
    done = imported(job, f"{tmp_path}/source")
    assert ids(lake, "main") == {OLDEST: ["a"], LAST: ["b", "c", "d"], FIRST: ["0-5", "0-6"]}
    assert (done.good, done.duplicate, done.plan.after) == (4, 3, 1)
    expected = "the seam to Kafka is exact in 2 files, which have Kafka's partitions and offsets"
    assert done.plan.notes[-2] == expected
    assert done.plan.notes[-1].startswith("2 offsets of the stream were compacted or deleted in")


def test_records_without_a_key_are_imported_once_by_their_places(tmp_path: Path) -> None:
    lake = new_lake(tmp_path, timeline=Timeline(FIRST, FIRST, {0: 5}), ddl="id STRING, n INT")
    lake.serve([(FIRST, 0, 5)], {0: 6}, read_until=NOW)
    for name in ("a", "b"):
        with_places(tmp_path / f"source/{name}.parquet", [(None, LAST, 0, 1), (None, LAST, 0, 2)])
    done = imported(replace(job_of(tmp_path), stream=lake.stream), f"{tmp_path}/source", LAST)
    assert (done.good, done.duplicate) == (2, 2)


def test_places_do_not_count_in_a_stream_that_adopted_another_log(tmp_path: Path) -> None:
    adopted = Adoption(LAST, "another", {0: 5})
    lake = new_lake(tmp_path, timeline=Timeline(FIRST, FIRST, {0: 5}, adoptions=(adopted,)))
    lake.serve([(FIRST, 0, 5)], {0: 6}, read_until=NOW)
    with_places(tmp_path / "source/a.parquet", [("a", OLDEST, 0, 99)])
    assert "by id in 1 files" in import_in(tmp_path).plan.notes[-1]
    assert [a.topic_id for a in lake.state().timeline.adoptions] == ["import", "another"]


def test_places_of_another_log_are_refused(lake: StreamLake) -> None:
    expected = "expected offsets of the log that the stream reads, found"
    older = f"1 rows of c.parquet that are older than hour {FIRST}"
    for hour, offset, found in ((FIRST, 9, "offset 9 of partition 0"), (OLDEST, 1, older)):
        with_places(lake.folder / "source/c.parquet", [("e", hour, 0, offset)])
        refuse(f"{expected} {found}", lake.folder)


def test_a_record_is_found_in_any_hour_of_kafka(tmp_path: Path) -> None:
    """A producer stamped it hours before its neighbours, and its hour is theirs."""
    lake = new_lake(tmp_path)
    staged = lake.stage([(FIRST, 0, 0), (shift(FIRST, 9), 0, 1)])
    lake.land(lake.speed(staged, {0: 2}, read_until=NOW))
    write(tmp_path / "source/a.parquet", [("a", 1, OLDEST, 5), ("0-1", 9, FIRST, 1)])
    assert import_in(tmp_path).good == 1
    assert ids(lake, "main").get(LAST) is None


def test_a_time_of_the_stream_itself_is_not_kafkas(tmp_path: Path) -> None:
    """Even if it has the name of Kafka's."""
    ddl = f"{DDL}, timestamp TIMESTAMP"
    lake = new_lake(tmp_path, ddl=ddl)
    lake.serve([(FIRST, 0, 0), (shift(FIRST, 6), 0, 1)], {0: 2}, read_until=NOW)
    path = tmp_path / "source/a.parquet"
    write(path, [("a", 1, OLDEST, 5), ("0-1", 9, FIRST, 1)])
    stream = new_stream(schema=ddl, event_time={"column": "timestamp"})
    assert imported(replace(job_of(tmp_path), stream=stream), f"{tmp_path}/source").good == 1
    [row] = lake.table().scan(row_filter="kafka_partition = -1").to_arrow().to_pylist()
    assert row["kafka_timestamp"] is None


def test_rows_of_no_record_of_kafka_are_refused(tmp_path: Path) -> None:
    lake = new_lake(tmp_path, ddl="id STRING, n INT")
    lake.serve([(FIRST, 0, 0)], {0: 1}, read_until=NOW)
    path = tmp_path / "source/a.parquet"
    write(path, [(None, 1, FIRST, 1), ("", 1, FIRST, 1), ("a", 1, FIRST, 2)])
    job = replace(job_of(tmp_path), stream=lake.stream)
    request = run.ImportRequest(f"{tmp_path}/source", OLDEST)
    with pytest.raises(Refused, match=r"expected a key .id. in each row .* 2 rows without one"):
        run.plan(job, request)
    # Records that are not decoded.
    renamed(path, ["key", "value", "timestamp"])
    with pytest.raises(Refused, match="found none of them but key, value, timestamp; write"):
        run.plan(job, request)


def test_rows_that_kafka_had_deleted_are_found_by_the_key(lake: StreamLake) -> None:
    c = [("late", 9, FIRST, 1), ("0-0", 9, FIRST, 1), ("later", 9, shift(FIRST, 1), 1)]
    write(lake.folder / "source/c.parquet", c)
    done = import_in(lake.folder)
    assert ids(lake, "main")[LAST] == ["late", "later"]
    assert (done.good, done.plan.after) == (5, 2)
    note = "2 of their rows are of hours with Kafka's records but not in the table"
    assert note in done.plan.notes[-1]
    # Now the table has them; the same command changes nothing.
    assert import_in(lake.folder).hours == ()


def test_rows_are_not_judged_by_the_key_before_the_table_has_them(tmp_path: Path) -> None:
    lake = new_lake(tmp_path)
    lake.serve([(FIRST, 0, 0)], {0: 1})
    write(tmp_path / "source/c.parquet", [("late", 9, FIRST, 1)])
    with pytest.raises(Transient, match="expected a table that has Kafka's records up to"):
        import_in(tmp_path)


def test_the_log_of_a_file_sink_decides_which_files_count(lake: StreamLake) -> None:
    source = lake.folder / "source"
    size = (source / "a.parquet").stat().st_size
    entry = {"path": f"file://{source}/a.parquet", "size": size, "action": "add"}
    (source / "_spark_metadata").mkdir()
    (source / "_spark_metadata/0").write_text(f"v1\n{json.dumps(entry)}")
    (source / "_spark_metadata/1").write_text("v1\n{")
    refuse("_spark_metadata/1: .* found other lines; restore it, or import by --tak", lake.folder)
    (source / "_spark_metadata/1").unlink()
    done = import_in(lake.folder)
    assert ids(lake, "main") == IMPORTED | {FIRST: ["0-0", "0-1"]}
    assert done.plan.notes[0].endswith(
        "1 files of its log, through micro-batch 0; 1 files that the log does not list do not count"
    )


def test_values_of_folders_count_beside_json_lines(lake: StreamLake) -> None:
    line = {"id": "d", "timestamp": f"{LAST}:30:00Z"}
    (lake.folder / "source/n=7").mkdir()
    (lake.folder / "source/n=7/a.json").write_text(json.dumps(line))
    import_in(lake.folder)
    [row] = lake.table().scan(row_filter="id = 'd'").to_arrow().to_pylist()
    assert (row["n"], row["ingest_hour"]) == (7, LAST)


def test_a_line_of_json_that_does_not_fit_is_named(lake: StreamLake) -> None:
    path, at = lake.folder / "source/c.json", {"timestamp": f"{LAST}:30:00Z"}
    expected = "expected a column kafka_timestamp or timestamp"
    for lines, found in (
        (({"id": "d", "n": 1, **at}, {"id": "d", "n": "1", **at}), "line 2: .*found n: expected int, found 1;"),
        (({"id": "d", "n": 1},), expected),
        (({"ID": "a", "Id": "b", **at},), "line 1: expected one field id, found ID, Id; correct"),
        (({"key": "a", "value": "b", **at},), "line 1: expected a field of id, n, found key, value, timestamp; "),
    ):  # fmt: skip
        path.write_text("\n".join(map(json.dumps, lines)))
        refuse(rf"source/c\.json: {found}", lake.folder)
    path.rename(path.with_suffix(".txt"))
    refuse(r"expected a name that ends like its format .*, found c\.txt", lake.folder)
    assert set(ids(lake, "main")) == {FIRST}


def test_another_iceberg_table_is_imported_by_its_location(lake: StreamLake) -> None:
    catalog = lake.lake.catalog
    catalog.create_namespace("old")
    rows = pq.read_table(lake.folder / "source/a.parquet")
    rows = rows.rename_columns(["former", "n", "timestamp"])
    table = catalog.create_table("old.events", rows.schema)
    table.append(rows)
    table.append(rows.slice(0, 1))
    # Files that a later snapshot has replaced, and rows that it has deleted, do not count.
    table.delete("former = 'b'")
    table.overwrite(rows.slice(0, 1), "former = 'a'")
    with table.update_schema() as update:
        update.rename_column("former", "id")
    job = job_of(lake.folder)
    done = imported(job, table.location())
    assert ids(lake, "main") == {OLDEST: ["a"], shift(OLDEST, 1): ["c"], FIRST: ["0-0", "0-1"]}
    assert done.plan.notes[0].endswith(f"snapshot {table.refresh().current_snapshot().snapshot_id}")
    metadata = Path(urlparse(table.metadata_location).path)
    again = imported(job, table.metadata_location)
    assert again.hours == () and again.plan.known == (OLDEST, shift(OLDEST, 1))
    number, _, _ = metadata.name.partition("-")
    metadata.with_name(f"{number}-other.metadata.json").write_bytes(metadata.read_bytes())
    found = r"expected one newest metadata file, found .* and .*other\.metadata\.json"
    with pytest.raises(Refused, match=found):
        run.plan(job, run.ImportRequest(table.location(), OLDEST))


def test_an_iceberg_table_with_equality_deletes_is_refused(lake: StreamLake) -> None:
    table = lake.table()
    metadata = json.loads(Path(urlparse(table.metadata_location).path).read_text())
    for snapshot in metadata["snapshots"]:
        snapshot["summary"]["total-equality-deletes"] = "2"
    main_head = metadata["refs"]["main"]["snapshot-id"]
    path = lake.folder / "other/metadata/v1.metadata.json"
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps(metadata | {"current-snapshot-id": main_head}))
    found = "expected a table without equality deletes, found some, as Flink writes them"
    with pytest.raises(Refused, match=found):
        run.plan(job_of(lake.folder), run.ImportRequest(f"{lake.folder}/other", OLDEST))


def test_several_sources_are_one(lake: StreamLake) -> None:
    """Rows of one repeat those of another."""
    write(lake.folder / "more/c.parquet", [("b", 7, OLDEST, 1), ("e", 8, OLDEST, 9)])
    sources = (f"{lake.folder}/source", f"{lake.folder}/more")
    job = job_of(lake.folder)
    request = run.ImportRequest(sources[0], OLDEST, others=sources[1:])
    done = run.run(job, Publisher(job.lake, job.stream), request)
    assert (done.rows, done.good, done.duplicate) == (6, 4, 2)
    assert sorted(ids(lake, "main")[OLDEST]) == ["a", "b", "e"]
    assert run.run(job, Publisher(job.lake, job.stream), request).hours == ()


def test_a_file_that_does_not_fit_is_named_with_its_column(lake: StreamLake) -> None:
    write(lake.folder / "source/c.parquet", [("d", 8, LAST, 59)], n=pa.float64())
    refuse(r"c\.parquet: column n: expected int32, as the table has it, found double", lake.folder)
    write(lake.folder / "source/c.parquet", [("d", 2**40, LAST, 59)])
    refuse(r"c\.parquet: column n: expected int32.*1099511627776", lake.folder)
    write(lake.folder / "source/c.parquet", [(None, 1, LAST, 59)])
    refuse(r"c\.parquet: column id: expected .* in each row, .*found null in 1 rows", lake.folder)
    (lake.folder / "source/c.parquet").write_bytes(b"PAR1 half a file")
    refuse(r"c\.parquet: expected a complete Parquet file", lake.folder)
    assert set(ids(lake, "main")) == {FIRST}


def read(reader: SourceReader, path: Path) -> pa.Table:
    """The rows of NOW's hour in a Parquet file, once they are counted."""
    part, hour = ParquetPart(PyArrowFileIO(), f"file://{path}", {}), to_number(hour_of(NOW))
    assert {*reader.count(part).rows} == {hour}
    return pa.concat_tables(reader.read(part, Numbers({}), reader.schema.names, hour, hour))


def renamed(path: Path, names: Sequence[str]) -> None:
    pq.write_table(pq.read_table(path).rename_columns(names), path)


def test_columns_are_found_in_letters_of_any_case(lake: StreamLake) -> None:
    """The hazard: a column that is taken for a missing one is null for good."""
    renamed(lake.folder / "source/a.parquet", ["ID", "N", "Timestamp"])
    for id, name in (("d", "N=7/c.parquet"), ("e", "d.parquet")):
        path = lake.folder / "source" / name
        write(path, [(id, 0, OLDEST, 8)])
        pq.write_table(pq.ParquetFile(path).read().drop_columns(["n"]), path)
    done = import_in(lake.folder)
    rows = content(lake.lake, lake.name, "main").to_pylist()
    found = {row["id"]: row["n"] for row in rows if row["kafka_partition"] == -1}
    assert found == {"a": 1, "b": 2, "c": 3, "d": 7, "e": None}
    assert "1 of 4 files have no column n: it is null in their rows" in done.plan.notes


def test_fields_of_lines_are_found_in_letters_of_any_case(lake: StreamLake) -> None:
    at = f"{OLDEST}:09:00Z"
    (lake.folder / "source/c.csv").write_text(f"ID,N,Timestamp\nd,7,{at}\n")
    (lake.folder / "source/N=8").mkdir()
    (lake.folder / "source/N=8/d.json").write_text(json.dumps({"Id": "e", "timestamp": at}))
    (lake.folder / "source/e.json").write_text(json.dumps({"ID": "f", "N": 9, "timestamp": at}))
    (lake.folder / "source/f.json").write_text(json.dumps({"id": "g", "timestamp": at}))
    done = import_in(lake.folder)
    rows = content(lake.lake, lake.name, "main").to_pylist()
    found = {row["id"]: row["n"] for row in rows if row["id"] in "defg"}
    assert found == {"d": 7, "e": 8, "f": 9, "g": None}
    assert "1 of 6 files have no column n: it is null in their rows" in done.plan.notes


@pytest.mark.parametrize("name", ["n=7/c.json", "c.csv", "c.json.gz", "c.json"])
def test_files_of_lines_without_any_have_no_rows(lake: StreamLake, name: str) -> None:
    """As Spark writes them for the first of its tasks."""
    path = lake.folder / "source" / name
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(gzip.compress(b"") if name.endswith(".gz") else b"\n" * (name == "c.json"))
    done = import_in(lake.folder)
    assert ids(lake, "main") == IMPORTED | {FIRST: ["0-0", "0-1"]}
    assert done.plan.files == 3 and not any("no column" in note for note in done.plan.notes)


def test_files_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    stream_that_reads(tmp_path)
    path = tmp_path / "source/a.parquet"
    for names in (["ID", "Id", "timestamp"], ["n", "n", "timestamp"]):
        write(path, [("a", 1, OLDEST, 5)])
        renamed(path, names)
        refuse(f"found 2: {names[0]}, {names[1]}; correct the file", tmp_path)
    with_places(path, [("a", OLDEST, 0, 1)])
    placed = pq.read_table(path)
    pq.write_table(placed.append_column("topic", pa.array(["other"])), path)
    refuse("expected rows of topic events, found 1 rows of other topics alone", tmp_path)
    for offset in (1.5, -1.0):
        pq.write_table(placed.set_column(4, "offset", pa.array([offset])), path)
        refuse("column offset: .* found double with 1 that are no whole number", tmp_path)


@pytest.mark.parametrize("form", ["text", "dictionary", "nested"])
def test_text_that_is_not_utf8_is_refused(tmp_path: Path, form: str) -> None:
    """The hazard: an accepted hour that no delivery and no query can read."""
    offsets_, data = pa.array([0, 1, 4, 5], pa.int32()).buffers()[1], pa.py_buffer(b"am\xff\xfez")
    text: Any = pa.Array.from_buffers(pa.string(), 3, [None, offsets_, data])
    if form == "dictionary":
        text = pa.DictionaryArray.from_arrays(pa.array([0, 1, 2], pa.int32()), text)
    if form == "nested":
        text = pa.StructArray.from_arrays([pa.ListArray.from_arrays([0, 1, 2, 3], text)], ["u"])
    kind = pa.struct({"u": pa.list_(pa.string())}) if form == "nested" else pa.string()
    at = pa.array([NOW] * 3, pa.timestamp("us", "UTC"))
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"id": text, "timestamp": at}), path, store_schema=False)
    reader = SourceReader(pa.schema([("id", kind)]))
    with pytest.raises(Refused, match=r"a\.parquet: column id: expected .* found .*UTF8"):
        read(reader, path)


def test_nested_columns_and_fields_that_an_old_file_lacks_are_null(tmp_path: Path) -> None:
    kind = pa.struct({"u": pa.string(), "v": pa.list_(pa.struct({"w": pa.int32()}))})
    reader = SourceReader(pa.schema([("s", kind), ("a", pa.list_(pa.string()))]))
    values = list[Any]()
    for number, own in enumerate([None, pa.array([{"u": "x"}]), pa.array([{"u": 1}])]):
        at = {"timestamp": pa.array([NOW], pa.timestamp("us", "UTC"))}
        path = tmp_path / f"{number}.parquet"
        pq.write_table(pa.table(at | ({} if own is None else {"s": own})), path)
        if number == 2:
            with pytest.raises(Refused, match=r"column s: expected .*, found struct<u: int64>"):
                read(reader, path)
            continue
        values += read(reader, path).select(["s", "a"]).to_pylist()
    assert values == [{"s": None, "a": None}, {"s": {"u": "x", "v": None}, "a": None}]


def test_files_behind_links_count_and_links_to_nothing_are_refused(lake: StreamLake) -> None:
    write(lake.folder / "disk/d.parquet", [("d", 9, OLDEST, 9)])
    (lake.folder / "source/linked").symlink_to(lake.folder / "disk")
    request = run.ImportRequest(f"{lake.folder}/source", OLDEST)
    assert run.plan(job_of(lake.folder), request).hours[OLDEST] == 3
    (lake.folder / "source/linked/e.parquet").symlink_to(lake.folder / "gone")
    with pytest.raises(Refused, match=r"found .*e\.parquet, which is none"):
        run.plan(job_of(lake.folder), request)


def test_unfit_hours_and_files_that_were_added_to_imported_ones_are_refused(
    lake: StreamLake,
) -> None:
    found = f"expected hours before {FIRST}, where the stream begins in Kafka, found {FIRST}"
    refuse(found, lake.folder, (OLDEST, FIRST))
    refuse(f"expected hours up to {LAST}", lake.folder, (OLDEST, shift(LAST, -1)))
    kept = replace(job_of(lake.folder), stream=new_stream(keep={"rows": "2 days"}))
    with pytest.raises(Refused, match="the stream keeps rows for 2 days"):
        run.plan(kept, run.ImportRequest(f"{lake.folder}/source", "2020-01-01T00"))
    import_in(lake.folder)
    write(lake.folder / "source/c.parquet", [("d", 8, OLDEST, 59)])
    refuse(f"hour {OLDEST}: expected the 2 rows that it was imported with .*, found 3", lake.folder)


def test_a_stream_that_has_read_nothing_has_no_first_hour_yet(tmp_path: Path) -> None:
    new_lake(tmp_path)
    refuse("expected a stream that has read records, found none", tmp_path)


def test_a_second_import_of_earlier_hours_goes_on_before_the_first(lake: StreamLake) -> None:
    import_in(lake.folder, (shift(OLDEST, 1), None))
    assert ids(lake, "main") == {shift(OLDEST, 1): ["c", "b"], FIRST: ["0-0", "0-1"]}
    done = import_in(lake.folder)
    # The table has the later one of the two that repeat each other.
    assert (done.hours, done.good, done.duplicate) == ((OLDEST,), 1, 1)
    assert ids(lake, "main") == {OLDEST: ["a"], shift(OLDEST, 1): ["c", "b"], FIRST: ["0-0", "0-1"]}


def test_duplicates_are_found_by_the_key_within_the_look_back() -> None:
    hours = [1, 1, 2, 2, 3, 5, 6, 6]
    keys = [
        ("a", None), ("b", 1), ("a", None), ("x", 1), ("b", 1), ("a", None), (None, None),
        (None, None),
    ]  # fmt: skip
    values = pa.array([v for _, v in keys], pa.int32())
    rows = pa.table({"k": [k for k, _ in keys], "l": values, HOUR: hours})
    later = pa.table({"k": ["x", "a"], "l": pa.array([1, None], pa.int32()), HOUR: [3, 7]})
    # "a" repeats the one before, "b" is two hours behind, "x" is in the table later; nulls differ.
    assert find_duplicates(rows, ("k", "l"), 1, later).tolist() == [0, 0, 1, 1, 0, 0, 0, 0]
    assert find_duplicates(rows, ("k", "l"), 2, later).tolist() == [0, 0, 1, 1, 1, 1, 0, 0]


def test_an_empty_text_is_no_part_of_a_key() -> None:
    rows = pa.table({HOUR: [5, 5, 5, 5], "k": ["", None, "", "a"], "n": [None, None, 1, None]})
    later = pa.table({HOUR: [6], "k": pa.array([""]), "n": pa.array([1], pa.int64())})
    assert find_duplicates(rows, ("k", "n"), 1, later.slice(0, 0)).tolist() == [0, 0, 0, 0]
    assert find_duplicates(rows, ("k", "n"), 1, later).tolist() == [0, 0, 1, 0]
    assert find_known(rows, ("k", "n"), later).tolist() == [0, 0, 1, 0]


def test_a_row_is_known_by_its_maps_in_any_order() -> None:
    """The hazard: a takeover without a key imports a row that Kafka has too, since the old program
    wrote the entries of its map in another order."""
    kinds = pa.map_(pa.string(), pa.map_(pa.string(), pa.int64()))
    inner = pa.struct([("m", pa.map_(pa.string(), pa.int64())), ("n", pa.int64())])

    def rows(maps: list[Any], lists: list[Any]) -> pa.Table:
        nested = pa.struct([("a b", pa.list_(inner))])
        return pa.table({"i0": pa.array(maps, kinds), "s": pa.array(lists, nested)})

    own = rows(
        [[("x", [("p", 1), ("q", 2)]), ("y", [])], None, [("x", None)], [("x", [("p", 1)])]],
        [{"a b": [{"m": [("k", 1), ("l", 2)], "n": 1}]}, {"a b": None}, None, None],
    )
    table = rows(
        [[("y", []), ("x", [("q", 2), ("p", 1)])], None, [("x", None)], [("x", [("p", 2)])]],
        [{"a b": [{"m": [("l", 2), ("k", 1)], "n": 1}]}, {"a b": None}, {"a b": None}, None],
    )
    assert find_known(own, ("i0", "s"), table).tolist() == [1, 1, 0, 0]


def test_rows_are_numbered_within_their_hour_across_batches_and_parts() -> None:
    numbers, seen = Numbers({7: 2}), Counter[int]()
    seven, nine = 7 << 32, 9 << 32
    assert numbers.assign(np.array([7, 9, 7, 9]), seen).tolist() == [
        seven + 2, nine, seven + 3, nine + 1,
    ]  # fmt: skip
    assert numbers.assign(np.array([9, 7]), seen).tolist() == [nine + 2, seven + 4]
    late = Numbers({}, np.array([nine, nine + 2]), first_number(7) + 5)
    assert late.assign(np.array([9, 9, 9, 7]), Counter()).tolist() == [
        seven + 5, nine + 1, seven + 6, seven,
    ]  # fmt: skip


def test_rows_at_the_place_of_another_repeat_it() -> None:
    partitions, offsets = np.array([0, 1, 0, 0, 0, 1]), np.array([7, 7, 7, 7, 7, 8])
    assert find_repeated_places(partitions, offsets).tolist() == [0, 0, 1, 1, 1, 0]
    assert find_repeated_places(partitions[:0], offsets[:0]).tolist() == []


def test_checksums_are_of_rows_in_any_order() -> None:
    hour = 7 << 32
    rows = pa.table(
        {
            "kafka_offset": [hour, hour + 1, hour + 2],
            "a": ["x", None, "yz"],
            "b": [1.0, float("nan"), None],
            "c": [[1.0], None, [2.0, -0.0]],
            "d": pa.array([[("k", 1)], [], None], pa.map_(pa.string(), pa.int32())),
        }
    )

    def sums(*tables: pa.Table) -> int:
        found = Sums()
        for table in tables:
            found.add(table)
        return found.by_hour[7]

    assert sums(rows) == sums(rows.slice(1), rows.slice(0, 1)) == sums(rows.take([2, 0, 1]))
    others = [
        rows.set_column(1, "a", [["xy", None, "z"]]),
        rows.set_column(1, "a", [["x", "", "yz"]]),
        rows.set_column(3, "c", [[[1.0], None, [2.0, 0.0]]]),
        rows.slice(1),
    ]
    assert len({sums(rows), *map(sums, others)}) == 5


@pytest.mark.parametrize(
    ("found", "of_table", "fits"),
    [
        (pa.int64(), pa.int32(), True), (pa.float32(), pa.float64(), True), (pa.null(), pa.int32(), True),
        (pa.dictionary(pa.int32(), pa.string()), pa.string(), True), (pa.string_view(), pa.string(), True),
        (pa.timestamp("ns"), pa.timestamp("us", "UTC"), True), (pa.int32(), pa.decimal128(12, 2), True),
        (pa.float64(), pa.int32(), False), (pa.float64(), pa.float32(), False), (pa.string(), pa.int32(), False),
        (pa.int32(), pa.string(), False), (pa.int64(), pa.timestamp("us", "UTC"), False),
        (pa.binary(), pa.string(), False), (pa.struct({"X": pa.int32()}), pa.struct({"x": pa.int32()}), False),
    ],
)  # fmt: skip
def test_types_that_become_others(found: pa.DataType, of_table: pa.DataType, fits: bool) -> None:
    assert may_become(found, of_table) == fits


def erasing_job(lake: StreamLake) -> Job:
    """A job with a key of erasures."""
    job = job_of(lake.folder)
    keys = ErasureKeys(key=(SecretStr("a secret of a test"),))
    return replace(job, environment=job.environment.model_copy(update={"erasure": keys}))


def test_rows_read_otherwise_stay_out(lake: StreamLake, monkeypatch: pytest.MonkeyPatch) -> None:
    """The number of rows is right: the account alone would close."""
    real = tasks.write_all

    def spoiled(files: FileWriter, rows: pa.Table) -> list[Output]:
        at = rows.schema.get_field_index("n")
        other = pc.add(rows["n"], pa.scalar(1, rows["n"].type))
        return real(files, rows.set_column(at, rows.schema.field(at), other))

    monkeypatch.setattr(tasks, "write_all", spoiled)
    found = r"expected to read the rows that were written to"
    with lake.unmoved(), pytest.raises(Terminal, match=found):
        import_in(lake.folder)


def test_erased_persons_are_left_out_and_imported_ones_are_erased(lake: StreamLake) -> None:
    job = erasing_job(lake)
    publisher = Publisher(job.lake, job.stream)
    erasing.erase(job, publisher, erasing.ErasureRequest("id", frozenset({"a"}), "case 1"))
    done = run.run(job, publisher, run.ImportRequest(f"{lake.folder}/source", OLDEST))
    assert (done.good, done.duplicate, done.erased) == (2, 1, 1)
    later = erasing.erase(job, publisher, erasing.ErasureRequest("id", frozenset({"c"}), "case 2"))
    assert later.removed.rows == 1 and later.erasure.done is not None
    assert ids(lake, "main") == {OLDEST: ["b"], FIRST: ["0-0", "0-1"]}
    assert ids(lake, "batch") == {OLDEST: ["b"]}
    found = [ledger.newest(lake.ledger.history())[hour] for hour in sorted(IMPORTED)]
    accounts = [(row.offsets, row.good, row.duplicate, row.erased) for row in found]
    assert accounts == [(2, 1, 0, 1), (2, 0, 1, 1)]
    assert audit(job, None, with_kafka=False).agrees


def test_a_row_that_repeats_an_erased_one_is_imported(lake: StreamLake) -> None:
    """The first of two rows with a key is erased: the second repeats nothing, as in a rebuild."""
    c = [("d", 5, OLDEST, 7), ("d", 6, OLDEST, 8), ("d", 7, shift(OLDEST, 1), 2)]
    write(lake.folder / "source/c.parquet", c)
    job = erasing_job(lake)
    publisher = Publisher(job.lake, job.stream)
    erasing.erase(job, publisher, erasing.ErasureRequest("n", frozenset({"5"}), "case 1"))
    done = run.run(job, publisher, run.ImportRequest(f"{lake.folder}/source", OLDEST))
    assert (done.good, done.duplicate, done.erased) == (4, 2, 1)
    assert ids(lake, "main")[OLDEST] == ["a", "b", "d"]


def test_times_outside_of_the_calendar_are_refused(lake: StreamLake) -> None:
    """Microseconds that were written as milliseconds are years from 50000 on. Nanoseconds overflow:
    those of 2027-04-15 would be a time of the year 901."""
    path = lake.folder / "source/c.parquet"
    write(path, [("d", 5, FIRST, 7)])
    years = [((y - 1970) * 31_556_952_000_000, "us") for y in (52_000, -2)]
    for number, unit in (*years, (1_807_747_200_000_000_000, "ms")):
        time = pa.array([number], pa.timestamp(unit, "UTC"))
        pq.write_table(pq.read_table(path).set_column(2, "timestamp", time), path)
        refuse(r"c\.parquet: column timestamp: expected times of the years 1 to 9999", lake.folder)
    # A time to come is no error.
    last = pa.array([datetime(9999, 12, 31, 23, 59, tzinfo=UTC)], pa.timestamp("us", "UTC"))
    pq.write_table(pq.read_table(path).set_column(2, "timestamp", last), path)
    with pytest.raises(Transient, match="expected a table that has Kafka's records up to"):
        import_in(lake.folder)


@pytest.mark.parametrize("kind", [pa.timestamp("us", "UTC"), pa.date32()], ids=str)
@pytest.mark.parametrize("nested", [False, True])
def test_other_times_out_of_range_fail(tmp_path: Path, kind: pa.DataType, nested: bool) -> None:
    """No reader in Python has such values, and an accepted hour is never imported again."""
    for days, fits in ((-719_162, True), (-719_163, False), (2_932_896, True), (2_932_897, False)):
        n = days if kind == pa.date32() else days * 86_400_000_000
        at = pa.array([None, n], pa.int32() if kind == pa.date32() else pa.int64()).cast(kind)
        if nested:
            by_name = pa.MapArray.from_arrays([0, 1, 2], pa.array(["a", "b"]), at)
            listed = pa.ListArray.from_arrays([0, 1, 2], at)
            at = pa.StructArray.from_arrays([listed, by_name], ["all", "by_name"])
        time = pa.array([NOW, NOW], pa.timestamp("us", "UTC"))
        path = tmp_path / "a.parquet"
        pq.write_table(pa.table({"at": at, "timestamp": time}), path)
        reader = SourceReader(pa.schema([("at", at.type)]))
        if fits:
            assert read(reader, path)["at"].to_pylist() == at.to_pylist()
            continue
        with pytest.raises(OverflowError):
            at.to_pylist()
        found = r"a\.parquet: column at: expected .* found values outside of the years"
        with pytest.raises(Refused, match=found):
            read(reader, path)


def test_imported_hours_expire_as_all_hours(lake: StreamLake) -> None:
    import_in(lake.folder)
    job = replace(job_of(lake.folder), stream=new_stream(keep={"rows": "2 days"}))
    publisher = Publisher(job.lake, job.stream)
    publisher.recover()
    later = start_of(FIRST) + timedelta(days=2, hours=-1)
    expired = expire_rows(job, publisher, later, dry_run=False)
    assert expired.hours == (OLDEST, shift(OLDEST, 1))
    assert ids(lake, "main") == {FIRST: ["0-0", "0-1"]}
    assert complete_through(lake.state()) == LAST
    refuse("expected a stream without expired hours", lake.folder, (shift(OLDEST, -1), None))


def test_the_command(lake: StreamLake, monkeypatch: pytest.MonkeyPatch) -> None:
    @contextmanager
    def no_session(*_: object) -> Iterator[None]:
        yield

    job, before = job_of(lake.folder), heads(lake.table())
    planned_hours = run.plan(job, run.ImportRequest(f"{lake.folder}/source", OLDEST)).hours
    assert dict(planned_hours) == {LAST: 0, shift(OLDEST, 1): 2, OLDEST: 2}
    monkeypatch.setattr("anabranch.job.open_job", lambda stream, conf: job_of(lake.folder))
    monkeypatch.setattr("anabranch.spark.session.session_here", no_session)
    monkeypatch.setattr("anabranch.lifecycle.importing.tasks.on_spark", lambda _: HERE)
    given = ["import", "events", "--from", f"{lake.folder}/source", "--hours", f"{OLDEST}.."]
    planned = said(*given, "--dry-run")
    assert "would import 4 rows of 2 files into 3 hours" in planned
    assert f"hours {OLDEST} to {LAST} would be final, 1 of them without rows" in planned
    assert "1 rows are of hours that have Kafka's records, and are not imported" in planned
    assert heads(lake.table()) == before
    assert (
        "imported 3 of 4 rows into 3 hours; left out 1 that repeat another by id, and 0 that were "
        "erased" in said(*given, "--why", "history")
    )
    again = json.loads(said(*given, "--output", "json"))
    assert (again["imported"], again["known"]) == ([], [OLDEST, shift(OLDEST, 1)])
    [row] = [row for row in lake.ledger.acts() if row.hour == OLDEST]
    assert row.act is not None and (row.act.name, row.act.why) == ("import", "history")
