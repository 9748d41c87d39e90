"""Pieces of records that workers decode: each is a row or left, and rows of compared blocks equal
Spark's."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from datetime import UTC, date, datetime
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from anabranch.common.errors import Unexpected
from anabranch.config.columns import Column
from anabranch.records import packed
from anabranch.records.fast_json import CertainRows, Read
from anabranch.records.packed import (
    BLOCK,
    COMPARED,
    LEFT,
    REPORT,
    ROW,
    ROWS,
    PackSpec,
    Reports,
    is_compared,
    tables,
)

HOUR = "2026-11-21T03"
AT = datetime(2026, 11, 21, 3, 10, tzinfo=UTC)
# The headers {h: v, h: null} as Spark writes them for workers.
HEADERS = b'[{"key":"68","value":"76"},{"key":"68"}]'

Values = list[bytes | None]
Change = Callable[[dict[str, Any]], None]


def _spec(takes_unknown: bool = False, one_in: int = 1) -> PackSpec:
    columns = (
        Column(name="id", type="string", nullable=False),
        Column(name="level", type="int", nullable=True),
        Column(name="share", type="double", nullable=True),
    )
    return PackSpec(
        columns, None, takes_unknown, ("kafka_partition", "kafka_offset", "id"), HOUR, one_in
    )


def _of_spark(value: bytes | None, offset: int) -> dict[str, Any]:
    """Return the row that Spark decodes from a record."""
    row: dict[str, Any] = {
        "id": None,
        "level": None,
        "share": None,
        "is_dead": True,
        "unknown_fields": None,
    }
    try:
        read = json.loads(value or b"")
    except ValueError:
        read = None
    if isinstance(read, dict) and isinstance(read.get("id"), str) and read["id"].isascii():
        row |= {name: read.get(name) for name in ("id", "level", "share")}
        row |= {
            "is_dead": False,
            "unknown_fields": [n for n in read if n not in ("id", "level", "share")],
        }
    return row | {
        "kafka_partition": 3, "kafka_offset": offset, "kafka_timestamp": AT, "ingest_hour": HOUR,
        "event_date": date(2026, 11, 21),
    }  # fmt: skip


def _batch(values: Values, first: int = 0) -> pa.RecordBatch:
    n = len(values)
    return pa.record_batch(
        {
            "key": pa.array([b"k"] * n, pa.binary()),
            "value": pa.array(values, pa.binary()),
            "partition": pa.array([3] * n, pa.int32()),
            "offset": pa.array(range(first, first + n), pa.int64()),
            "timestamp": pa.array([AT] * n, pa.timestamp("us", "UTC")),
            "headers": pa.array([HEADERS] * n, pa.binary()),
        }
    )


_KINDS = pa.schema(
    [
        ("id", pa.string()),
        ("level", pa.int32()),
        ("share", pa.float64()),
        ("kafka_partition", pa.int32()),
        ("kafka_offset", pa.int64()),
        ("kafka_timestamp", pa.timestamp("us", "Etc/UTC")),
        ("ingest_hour", pa.string()),
        ("event_date", pa.date32()),
        ("is_dead", pa.bool_()),
        ("unknown_fields", pa.list_(pa.string())),
    ]
)


def _compared(
    spec: PackSpec, found: dict[str, list[pa.Table]], change: Change = lambda row: None
) -> Reports:
    """Compare what workers decoded with what Spark decodes of the same records, changed."""
    batches = []
    for records in found[COMPARED]:
        places = zip(records["value"].to_pylist(), records["offset"].to_pylist(), strict=True)
        decoded = [_of_spark(value, offset) for value, offset in places]
        for row in decoded:
            change(row)
        of_spark = pa.RecordBatch.from_pylist(decoded, schema=_KINDS)
        batches.append(of_spark.append_column(ROW, records.column(ROW).combine_chunks()))
    [report] = packed._compare_task(spec)(batches)
    return Reports.of(report["data"].to_pylist())


def _run(
    spec: PackSpec, batches: Iterable[pa.RecordBatch]
) -> tuple[dict[str, list[pa.Table]], Reports]:
    found: dict[str, list[pa.Table]] = {ROWS: [], LEFT: [], COMPARED: [], "keys": []}
    reports = []
    for piece in packed._pack_task(spec)(batches):
        [kind] = piece["kind"].to_pylist()
        if kind == REPORT:
            reports += piece["data"].to_pylist()
            continue
        found[kind] += tables([piece.select(["data"])])
        if kind == ROWS:
            found["keys"] += tables([piece.select(["keys"])])
    return found, Reports.of(reports)


def _values(kind: list[pa.Table], column: str) -> list[object]:
    return [value for table in kind for value in table[column].to_pylist()]


def test_each_record_is_a_row_or_left_as_kafka_holds_it() -> None:
    values: Values = [json.dumps({"id": f"a{i}", "level": i}).encode() for i in range(200)]
    odd: dict[int, bytes | None] = {10: b"[", 60: None, 110: b'{"id":"\\ud83d"}', 160: b'{"id":1}'}
    for place, value in odd.items():
        values[place] = value
    found, report = _run(_spec(), [_batch(values)])
    certain = [i for i in range(200) if i not in odd]
    assert _values(found[ROWS], "kafka_offset") == _values(found[ROWS], "level") == certain
    assert _values(found["keys"], "id") == [f"a{i}" for i in certain]
    assert found["keys"][0].column_names == ["kafka_partition", "kafka_offset", "id"]
    assert _values(found[LEFT], "offset") == list(odd)
    assert _values(found[LEFT], "value") == list(odd.values())
    assert (
        _values(found[LEFT], "headers")
        == [[{"key": "h", "value": b"v"}, {"key": "h", "value": None}]] * 4
    )
    assert _values(found[LEFT], ROW) == [None] * 4
    assert _values(found[COMPARED], "value") == [values[i] for i in certain]
    rows = pa.concat_tables(found[COMPARED])[ROW].combine_chunks()
    assert rows.field("level").to_pylist() == certain
    for kind in (LEFT, COMPARED):
        names = ["key", "value", "partition", "offset", "timestamp", "ingest_hour", "headers", ROW]
        assert found[kind][0].column_names == names
    assert report == Reports({3: 196}, {3: 4}, [(3, 0, 199)], compared=196)


def test_records_without_headers_have_none() -> None:
    values: Values = [b"{"] * 3
    texts = [None, b"[]", b'[{"key":"C3BC","value":null},{"key":"","value":""}]']
    batch = _batch(values).set_column(5, "headers", pa.array(texts, pa.binary()))
    found, _ = _run(_spec(), [batch])
    some = [{"key": "ü", "value": None}, {"key": "", "value": b""}]
    assert _values(found[LEFT], "headers") == [None, [], some]


def test_blocks_are_chosen_by_the_hours_name_and_one_in_so_many() -> None:
    """The order in which records are read does not matter."""
    hours = [f"2026-11-21T{h:02}" for h in range(6)]
    offsets = np.arange(0, 1_000 * BLOCK, BLOCK // 2)
    partitions = np.zeros(len(offsets), np.int32)
    chosen = {}
    for hour in hours:
        of_hour = offsets[is_compared(hour, partitions, offsets, 50)]
        chosen[hour] = {int(offset) // BLOCK for offset in of_hour}
        # Both halves of each block.
        assert len(of_hour) == 2 * len(chosen[hour])
        backwards = is_compared(hour, partitions, offsets[::-1], 50)
        assert {int(offset) // BLOCK for offset in offsets[::-1][backwards]} == chosen[hour]
    assert all(5 <= len(blocks) <= 45 for blocks in chosen.values())
    assert len({frozenset(blocks) for blocks in chosen.values()}) == 6
    assert is_compared(hours[0], partitions, offsets, 1).all()
    assert not is_compared(hours[0], partitions[:0], offsets[:0], 50).size


def test_records_of_compared_blocks_are_kept_with_their_rows() -> None:
    values: Values = [json.dumps({"id": f"a{i}"}).encode() for i in range(20 * BLOCK)]
    spec = _spec(one_in=4)
    found, report = _run(
        spec, [_batch(values[at : at + 10_000], at) for at in range(0, len(values), 10_000)]
    )
    offsets = np.arange(len(values))
    expected = offsets[is_compared(HOUR, np.full(len(values), 3), offsets, 4)].tolist()
    assert 0 < len(expected) < len(values)
    assert _values(found[COMPARED], "offset") == expected
    assert report.compared == len(expected)
    assert _compared(spec, found) == Reports(compared=len(expected))


def test_unknown_fields_are_certain_only_where_the_stream_ignores_them() -> None:
    values: Values = [b'{"id":"a"}'] * 100
    values[50] = b'{"id":"b","other":1}'
    # The first batch teaches the field.
    batches = [_batch(values), _batch(values, 100)]
    ignored, report = _run(_spec(takes_unknown=True), batches)
    assert "b" in _values(ignored[ROWS], "id")
    assert report.compared == report.rows[3] > 150
    assert _compared(_spec(takes_unknown=True), ignored) == Reports(compared=report.compared)
    found, _ = _run(_spec(), batches)
    assert 50 in _values(found[LEFT], "offset")
    assert set(_values(found[ROWS], "id")) == {"a"}


def test_large_batches_become_pieces_of_about_a_megabyte() -> None:
    values: Values = [json.dumps({"id": "x" * 900, "level": i}).encode() for i in range(6_000)]
    found, report = _run(_spec(), [_batch(values)])
    assert len(found[ROWS]) > 3
    assert max(table.nbytes for table in found[ROWS]) < 2 * 2**20
    assert _values(found[ROWS], "level") == list(range(6_000))
    assert report.compared == 6_000


def _put(name: str, value: object) -> Change:
    def change(row: dict[str, Any]) -> None:
        if row["kafka_offset"] == 17:
            row[name] = value

    return change


@pytest.mark.parametrize(
    ("change", "column"),
    [
        (_put("level", 36), "level"),
        (_put("level", None), "level"),
        (_put("share", -0.0), "share"),
        (_put("share", 5e-324), "share"),
        (_put("id", "A17"), "id"),
        (_put("event_date", None), "event_date"),
        (_put("kafka_timestamp", AT.replace(microsecond=1)), "kafka_timestamp"),
        (_put("kafka_offset", 16), "kafka_offset"),
        (_put("is_dead", True), "verdict"),
        (_put("unknown_fields", ["x"]), "verdict"),
    ],
)
def test_a_record_that_spark_decodes_otherwise_is_reported_by_place_and_column(
    change: Change, column: str
) -> None:
    values: Values = [
        json.dumps({"id": f"a{i}", "level": i, "share": 0.0}).encode() for i in range(40)
    ]
    values[3] = b"{"
    found, _ = _run(_spec(), [_batch(values[:10]), _batch(values[10:], 10)])
    assert _compared(_spec(), found) == Reports(compared=39)
    report = _compared(_spec(), found, change)
    assert (report.compared, report.differing) == (39, 1)
    assert report.sample == [{"partition": 3, "offset": 17, "columns": [column]}]


def test_many_that_differ_are_counted_and_the_first_of_each_task_reported() -> None:
    values: Values = [b'{"id":"a","level":1}'] * 30

    def change(row: dict[str, Any]) -> None:
        row["level"] = 2

    found, _ = _run(_spec(), [_batch(values[:3]), _batch(values[3:], 3)])
    report = _compared(_spec(), found, change)
    assert (report.compared, report.differing) == (30, 30)
    assert [s["offset"] for s in report.sample] == [0, 1, 2, 3, 4]


def test_a_reader_that_gives_other_rows_than_it_takes_fails_the_task(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    read = CertainRows.read

    def repeated(self: CertainRows, batch: pa.RecordBatch) -> Read:
        found = read(self, batch)
        return Read(found.rows.take([0, 0, *range(2, len(found.rows))]), found.left)

    monkeypatch.setattr(CertainRows, "read", repeated)
    with pytest.raises(
        Unexpected, match="expected a row for each of 5 records that are not left, found 5 rows, or"
    ):
        _run(_spec(), [_batch([b'{"id":"a"}'] * 5)])


@pytest.mark.parametrize(
    ("runs", "is_it"),
    [
        ([(0, 5, 9), (1, 0, 0), (0, 10, 19)], True),
        ([(0, 5, 9), (0, 9, 19)], False),
        ([(0, 4, 9)], False),
        ([(0, 5, 20)], False),
        ([(2, 0, 0)], False),
        ([], True),
    ],
)
def test_offsets_are_each_there_once_if_runs_are_apart_and_inside(
    runs: list[Any], is_it: bool
) -> None:
    assert Reports(runs=runs).is_each_once({0: (5, 20), 1: (0, 1)}) is is_it


def test_runs_end_where_offsets_do_not_ascend_or_the_partition_changes() -> None:
    report = Reports()
    report.add_places(np.array([0, 0, 0, 1, 1]), np.array([3, 5, 9, 2, 3]))
    report.add_places(np.array([1, 1, 1]), np.array([4, 4, 6]))
    assert report.runs == [(0, 3, 9), (1, 2, 4), (1, 4, 6)]
