"""Workers write an hour in one pass: sorted files, dead letters, and a report of each task. Files are
written again without some rows, and staged in one snapshot."""

import json
import pickle
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from urllib.parse import urlparse

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from lakes import FIRST, StreamLake, at_next_commit
from pyiceberg.manifest import DataFile
from pyiceberg.table import CommitTableResponse

from anabranch.common.errors import Transient, Unexpected
from anabranch.config.columns import parse_columns
from anabranch.decode import DecodeSpec
from anabranch.iceberg.parquet_writer import FileWriter, Output, data_file_of, target_of, write_all
from anabranch.iceberg.rewriting import RowReader
from anabranch.iceberg.snapshots import find_staged
from anabranch.iceberg.staging import Written, stage_written
from anabranch.offsets.hours import Cut, HourRange
from anabranch.protocol.state import Accepted
from anabranch.records import staged
from anabranch.records.hashes import hash_keys, have_same_keys
from anabranch.records.staged import (
    MOST_BYTES,
    CertainTask,
    Tables,
    TaskReport,
    TaskSpec,
    UnknownNames,
    _certain_task,
    certain_from,
    facts_of,
    read_facts,
    rewrite_file,
)

AT = datetime(2026, 11, 21, 0, 30, tzinfo=UTC)
ORDER = ("event_date", "n", "kafka_partition", "kafka_offset")


def _rows(count: int, partition: int = 0, days: int = 1) -> pa.Table:
    """Rows in the order of their offsets; `n` falls, and is null in each seventh."""
    return pa.table(
        {
            "id": [f"{partition}-{i}" for i in range(count)],
            "n": pa.array([None if i % 7 == 3 else count - i for i in range(count)], pa.int32()),
            "kafka_partition": pa.array([partition] * count, pa.int32()),
            "kafka_offset": pa.array(range(count), pa.int64()),
            "kafka_timestamp": pa.array([AT] * count, pa.timestamp("us", "UTC")),
            "ingest_hour": [FIRST] * count,
            "event_date": pa.array([AT.date() - timedelta(i % days) for i in range(count)]),
        }
    )


def _spec(lake: StreamLake, most: int = MOST_BYTES) -> TaskSpec:
    target, letters = (target_of(table) for table in (lake.table(), lake.letters()))
    assert target is not None and letters is not None
    columns = parse_columns("id STRING NOT NULL, n INT")
    decode = DecodeSpec(columns, None, "json", lists_unknown=True)
    hours = (HourRange(FIRST, None),)
    spec = TaskSpec(decode, hours, target, letters, "t", "batch", ORDER, ("id",), most)
    copy: TaskSpec = pickle.loads(pickle.dumps(spec))
    return copy


def _write(lake: StreamLake, pieces: list[pa.Table], most: int = MOST_BYTES) -> list[Output]:
    task = CertainTask(_spec(lake, most))
    for piece in pieces:
        task._write(piece)
    return TaskReport.of(task.end().as_bytes()).rows


def _records(values: list[bytes], partition: int = 0, first: int = 0) -> pa.RecordBatch:
    n = len(values)
    return pa.record_batch(
        {
            "key": pa.nulls(n, pa.binary()),
            "value": pa.array(values, pa.binary()),
            "partition": pa.array([partition] * n, pa.int32()),
            "offset": pa.array(range(first, first + n), pa.int64()),
            "timestamp": pa.array([AT] * n, pa.timestamp("us", "UTC")),
            "headers": pa.nulls(n, pa.binary()),
        }
    )


def _run(lake: StreamLake, batches: list[pa.RecordBatch]) -> TaskReport:
    [report] = _certain_task(_spec(lake))(batches)
    return TaskReport.of(report.column("report")[0].as_py())


def _places(outputs: list[Output]) -> list[tuple[int, int]]:
    """The places that the report has, which are those in the files."""
    found = []
    for output in outputs:
        assert output.facts is not None
        noted = _of_rows(read_facts(output.facts))
        assert noted == _of_rows(_read(output))
        found += noted
    return sorted(found)


def _of_rows(rows: pa.Table) -> list[tuple[int, int]]:
    places = (rows[name].to_pylist() for name in ("kafka_partition", "kafka_offset"))
    return list(zip(*places, strict=True))


def test_each_record_is_a_row_or_a_dead_letter_and_in_the_report(lake: StreamLake) -> None:
    values = [json.dumps({"id": f"a{i}", "n": 50 - i}).encode() for i in range(50)]
    values[7], values[9] = b"[", b'{"n": 1}'
    report = _run(lake, [_records(values[:20]), _records(values[20:], first=20)])
    assert report.seen == 50
    assert _places(report.letters) == [(0, 7), (0, 9)]
    assert _places(report.rows) == [(0, i) for i in range(50) if i not in (7, 9)]
    [output] = report.rows
    assert output.facts is not None
    found = read_facts(output.facts)["hash"].to_pylist()
    assert found == hash_keys(_read(output), ["id"]).to_pylist()
    certain = certain_from([report], Tables(lake.table(), lake.letters()), "attempt", AT)
    assert (certain.written.rows, certain.letters.rows) == (48, 2)
    lost = replace(report, rows=[])
    with pytest.raises(Unexpected, match="each of 50 records to be a row or a dead letter"):
        certain_from([lost], Tables(lake.table(), lake.letters()), "attempt", AT)


def test_names_of_unknown_fields_are_counted_with_their_first_and_last_record(
    lake: StreamLake, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = [b'{"id":"a"}', b'{"id":"b","x":1}', b'{"x":2}', b'{"id":"c","x":3,"y":4}']
    reports = [_run(lake, [_records(other, p), _records(other, p, 8)]) for p in (1, 0)]
    total = UnknownNames.sum(report.unknown for report in reports)
    # A record without a row for another reason lacks no column.
    assert total.records == 8
    x = total.names["x"]
    assert (x.records, x.first, x.last) == (8, (0, 1), (1, 11))
    assert x.values == {(0, 1): other[1], (1, 11): other[3]}
    assert (total.names["y"].records, total.names["y"].first) == (4, (0, 3))
    monkeypatch.setattr(staged, "MOST_OF_TASK", 1)
    few = _run(lake, [_records(other)]).unknown
    assert (few.records, {name: one.records for name, one in few.names.items()}) == (2, {"x": 2})


def test_places_are_packed_in_the_order_of_the_file(lake: StreamLake) -> None:
    files = FileWriter(_spec(lake).target, facts_of)
    rows = pa.concat_tables([_rows(3, 7), _rows(5, 2), _rows(4, 3)])
    for some in (rows[:7], rows[7:]):
        assert files.write(some) is None
    [output] = files.close()
    places = [(7, i) for i in range(3)] + [(2, i) for i in range(5)] + [(3, i) for i in range(4)]
    assert _places([output]) == sorted(places)
    assert TaskReport.of(TaskReport([output], seen=3).as_bytes()) == TaskReport([output], seen=3)
    assert len(read_facts(None)) == 0


def _read(output: Output) -> pa.Table:
    return pq.ParquetFile(Path(urlparse(output.path).path)).read()


def test_rows_are_sorted_within_a_file_for_each_date_nulls_first(lake: StreamLake) -> None:
    pieces = [_rows(100, 0, 3), _rows(100, 1, 3)]
    outputs = _write(lake, pieces)
    assert len(outputs) == 3
    found = []
    for output in outputs:
        values = _read(output).to_pylist()
        places = [(r["n"], r["kafka_partition"], r["kafka_offset"]) for r in values]
        keys = [(n is not None, n or 0, partition, offset) for n, partition, offset in places]
        assert keys == sorted(keys)
        assert len({r["event_date"] for r in values}) == 1
        found += values
    columns = sorted(found[0])
    sent = [{c: row[c] for c in columns} for row in pa.concat_tables(pieces).to_pylist()]
    assert sorted(found, key=lambda r: r["id"]) == sorted(sent, key=lambda r: r["id"])


def test_dropped_rows_are_left_out_by_partition_and_offset(lake: StreamLake) -> None:
    outputs = _write(lake, [_rows(10, 0), _rows(10, 1)])
    dropped = {1: np.array([3, 99]), 2: np.array([5])}
    [path] = [output.path for output in outputs]
    [output] = rewrite_file(path, dropped, _spec(lake).target)
    assert _places([output])
    left = {(0, i) for i in range(10)} | {(1, i) for i in range(10) if i != 3}
    read = _of_rows(_read(output))
    assert {*read} == left and len(read) == 19


def test_rows_that_take_too_much_memory_go_to_files_of_their_own(lake: StreamLake) -> None:
    pieces = [_rows(1_000, p) for p in range(6)]
    outputs = _write(lake, pieces, most=int(2.5 * pieces[0].nbytes))
    assert [len(_read(o)) for o in outputs] == [3_000, 3_000]
    for output in outputs:
        numbers = [(n is not None, n or 0) for n in _read(output)["n"].to_pylist()]
        assert numbers == sorted(numbers)


def test_without_rows_there_is_no_file(lake: StreamLake) -> None:
    [output] = _write(lake, [_rows(3)])
    again = rewrite_file(output.path, {0: np.arange(3)}, _spec(lake).target)
    assert _write(lake, []) == again == []


def test_files_are_staged_where_no_reader_sees_them_and_published_as_any(lake: StreamLake) -> None:
    files = tuple(data_file_of(lake.table(), output) for output in _write(lake, [_rows(5)]))
    staged = stage_written(lake.lake, lake.name, Written("attempt", lake.lake.clock.now(), files))
    assert (staged.wap_id, staged.rows, len(staged.files)) == ("attempt", 5, 1)
    assert find_staged(lake.table(), "attempt") == staged
    assert lake.rows("main") == []
    lake.land(lake.accept(staged, FIRST, Accepted(1, Cut("t", {0: (0, 5)}))))
    assert lake.rows("main") == [(FIRST, 0, i) for i in range(5)]


def test_an_overtaken_stage_is_sent_again(lake: StreamLake) -> None:
    refused = list[bool]()
    files = [data_file_of(lake.table(), output) for output in _write(lake, [_rows(5)])]
    before = lake.metadata_files()
    at_next_commit(lake.lake, lambda: refused.append(lake.move("speed") is None))
    staged = lake.lake.stage(lake.name, "attempt", files)
    assert refused
    assert staged.rows == 5
    # The refused attempt left no manifest; that between has one, this one and its list.
    assert len(lake.metadata_files() - before) <= 4


@pytest.mark.parametrize("unreadable", [True, False])
@pytest.mark.parametrize("landed", [True, False])
def test_a_stage_whose_answer_is_lost_is_what_the_table_says(
    lake: StreamLake, monkeypatch: pytest.MonkeyPatch, landed: bool, unreadable: bool
) -> None:
    catalog = lake.lake.catalog
    send = catalog.commit_table

    def lost(*arguments: object) -> object:
        if landed:
            send(*arguments)  # type: ignore[arg-type]
        if unreadable:
            CommitTableResponse.model_validate_json('{"metadata-location": "s3://')
        raise ConnectionError("the answer is lost")

    files = [data_file_of(lake.table(), output) for output in _write(lake, [_rows(5)])]
    monkeypatch.setattr(catalog, "commit_table", lost)
    if landed:
        assert lake.lake.stage(lake.name, "attempt", files).rows == 5
    else:
        before = lake.metadata_files()
        with pytest.raises(Transient, match="expected its snapshot, found none"):
            lake.lake.stage(lake.name, "attempt", files)
        # It may still land, and a reader of its snapshot needs its manifests.
        assert len(lake.metadata_files() - before) == 2
    assert (find_staged(lake.table(), "attempt") is not None) == landed


@pytest.mark.parametrize(
    ("others", "expected"),
    [
        # Twice is one event, and an empty key is none.
        (["b", "a", "a", ""], True),
        (["a"], False),
        (["a", "b", "c"], False),
        ([], False),
    ],
)
def test_files_that_name_the_same_events(
    lake: StreamLake, others: list[str], expected: bool
) -> None:
    table = lake.table()

    def files(ids: list[str]) -> list[DataFile]:
        rows = _rows(len(ids))
        rows = rows.set_column(0, "id", pa.array(ids, pa.string()))
        writer = FileWriter(target_of(table))  # type: ignore[arg-type]
        return [data_file_of(table, o) for o in [*write_all(writer, rows), *writer.close()]]

    both, reader = (files(["a", "b"]), files(others)), RowReader.of(table)
    assert [have_same_keys(reader, *of, ["id"]) for of in (both, both[::-1])] == [expected] * 2
