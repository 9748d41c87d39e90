"""The files that workers write from pieces: sorted, without the dropped rows, and staged in one
snapshot."""

from __future__ import annotations

import pickle
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from urllib.parse import urlparse

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from lakes import FIRST, StreamLake, new_lake
from pyiceberg.manifest import DataFile
from pyiceberg.table import CommitTableResponse

from anabranch.common.errors import Transient
from anabranch.iceberg.commits import Outcome
from anabranch.iceberg.parquet_writer import Output, data_file_of, target_of
from anabranch.iceberg.snapshots import find_staged
from anabranch.iceberg.staging import stage_files
from anabranch.offsets.hours import Cut
from anabranch.protocol.state import Accepted
from anabranch.records.packed import as_bytes
from anabranch.records.packed_files import MOST_BYTES, WriteSpec, _write_task, dropped_places

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
            "event_date": pa.array(
                [date(2026, 11, 21) - timedelta(days=i % days) for i in range(count)], pa.date32()
            ),
        }
    )


def _write(
    lake: StreamLake,
    pieces: list[pa.Table],
    dropped: pa.Table | None = None,
    most: int = MOST_BYTES,
) -> list[Output]:
    target = target_of(lake.table())
    assert target is not None
    spec = WriteSpec(target, ORDER, dropped_places(dropped) if dropped is not None else {}, most)
    batches = [
        pa.record_batch({"data": pa.array([as_bytes(piece)], pa.binary())}) for piece in pieces
    ]
    [report] = _write_task(pickle.loads(pickle.dumps(spec)))(batches)
    return [Output(**row) for row in report.to_pylist()]


def _read(output: Output) -> pa.Table:
    return pq.ParquetFile(Path(urlparse(output.path).path)).read()


def test_rows_are_sorted_within_a_file_for_each_date_nulls_first(tmp_path: Path) -> None:
    lake = new_lake(tmp_path)
    pieces = [_rows(100, 0, 3), _rows(100, 1, 3)]
    outputs = _write(lake, pieces)
    assert len(outputs) == 3
    found = []
    for output in outputs:
        values = _read(output).to_pylist()
        keys = [
            (r["n"] is not None, r["n"] or 0, r["kafka_partition"], r["kafka_offset"])
            for r in values
        ]
        assert keys == sorted(keys)
        assert len({r["event_date"] for r in values}) == 1
        found += values
    columns = sorted(found[0])
    sent = [{c: row[c] for c in columns} for row in pa.concat_tables(pieces).to_pylist()]
    assert sorted(found, key=lambda r: r["id"]) == sorted(sent, key=lambda r: r["id"])


def test_dropped_rows_are_left_out_by_partition_and_offset(tmp_path: Path) -> None:
    lake = new_lake(tmp_path)
    places = pa.table(
        {"kafka_partition": pa.array([1, 1, 2], pa.int32()), "kafka_offset": pa.array([3, 99, 5])}
    )
    [output] = _write(lake, [_rows(10, 0), _rows(10, 1)], places)
    left = {(0, i) for i in range(10)} | {(1, i) for i in range(10) if i != 3}
    read = _read(output)
    assert (
        set(zip(read["kafka_partition"].to_pylist(), read["kafka_offset"].to_pylist(), strict=True))
        == left
    )
    assert len(read) == 19


def test_rows_that_take_too_much_memory_go_to_files_of_their_own(tmp_path: Path) -> None:
    lake = new_lake(tmp_path)
    pieces = [_rows(1_000, p) for p in range(6)]
    outputs = _write(lake, pieces, most=int(2.5 * pieces[0].nbytes))
    assert [len(_read(o)) for o in outputs] == [3_000, 3_000]
    for output in outputs:
        numbers = [(n is not None, n or 0) for n in _read(output)["n"].to_pylist()]
        assert numbers == sorted(numbers)


def test_without_rows_there_is_no_file(tmp_path: Path) -> None:
    lake = new_lake(tmp_path)
    everything = _rows(3).select(["kafka_partition", "kafka_offset"])
    assert _write(lake, []) == _write(lake, [_rows(3)], everything) == []


def test_files_are_staged_where_no_reader_sees_them_and_published_as_any(tmp_path: Path) -> None:
    lake = new_lake(tmp_path)

    def write() -> list[DataFile]:
        return [data_file_of(lake.table(), output) for output in _write(lake, [_rows(5)])]

    staged = stage_files(lake.lake, lake.name, "attempt", write)
    assert (staged.wap_id, staged.rows, len(staged.files)) == ("attempt", 5, 1)
    assert find_staged(lake.table(), "attempt") == staged
    assert lake.rows("main") == []
    assert (
        lake.publish(lake.accept(staged, FIRST, Accepted(1, Cut("t", {0: (0, 5)}))))
        is Outcome.LANDED
    )
    assert lake.rows("main") == [(FIRST, 0, i) for i in range(5)]


def test_a_stage_that_another_commit_overtakes_is_sent_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lake, refused = new_lake(tmp_path), list[bool]()
    catalog = lake.lake.catalog
    send = catalog.commit_table

    def overtaken(*arguments: object) -> object:
        if not refused:
            refused.append(True)
            lake.move("speed")
        return send(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(catalog, "commit_table", overtaken)
    files = [data_file_of(lake.table(), output) for output in _write(lake, [_rows(5)])]
    before = lake.metadata_files()
    staged = lake.lake.stage(lake.name, "attempt", files)
    assert refused
    assert staged.rows == 5
    # Of the refused attempt no manifest is left: those of the publish in between, and one manifest
    # with its list.
    assert len(lake.metadata_files() - before) <= 4


@pytest.mark.parametrize("unreadable", [True, False])
@pytest.mark.parametrize("landed", [True, False])
def test_a_stage_whose_answer_is_lost_is_what_the_table_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, landed: bool, unreadable: bool
) -> None:
    lake = new_lake(tmp_path)
    catalog = lake.lake.catalog
    send = catalog.commit_table

    def lost(*arguments: object) -> object:
        if landed:
            send(*arguments)  # type: ignore[arg-type]
        if unreadable:
            CommitTableResponse.model_validate_json('{"metadata-location": "s3://')
        raise ConnectionError("the answer is lost")

    files = [data_file_of(lake.table(), output) for output in _write(lake, [_rows(5)])]
    with monkeypatch.context() as changed:
        changed.setattr(catalog, "commit_table", lost)
        if landed:
            assert lake.lake.stage(lake.name, "attempt", files).rows == 5
        else:
            before = lake.metadata_files()
            with pytest.raises(Transient, match="expected its snapshot, found none"):
                lake.lake.stage(lake.name, "attempt", files)
            # It may still land, and a reader of its snapshot needs its manifests.
            assert len(lake.metadata_files() - before) == 2
    assert (find_staged(lake.table(), "attempt") is not None) == landed
