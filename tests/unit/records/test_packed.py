"""Pieces of records that workers decode: each is a row or left, and those of compared blocks are there twice."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from datetime import UTC, datetime

import pyarrow as pa
import pytest

from anabranch.config.columns import Column
from anabranch.records import packed
from anabranch.records.packed import BLOCK, COMPARED, LEFT, ROWS, PackSpec, is_compared, tables

HOUR = "2026-11-21T03"
AT = datetime(2026, 11, 21, 3, 10, tzinfo=UTC)


def _spec(one_in: int, takes_unknown: bool = False) -> PackSpec:
    columns = (Column(name="id", type="string", nullable=False), Column(name="level", type="int", nullable=True))
    return PackSpec(columns, None, takes_unknown, ("kafka_partition", "kafka_offset", "id"), HOUR, one_in)


def _batch(values: list[bytes | None], first: int = 0) -> pa.RecordBatch:
    n = len(values)
    headers = pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))
    return pa.record_batch(
        {
            "key": pa.array([b"k"] * n, pa.binary()), "value": pa.array(values, pa.binary()),
            "partition": pa.array([3] * n, pa.int32()), "offset": pa.array(range(first, first + n), pa.int64()),
            "timestamp": pa.array([AT] * n, pa.timestamp("us", "UTC")), "ingest_hour": pa.array([HOUR] * n),
            "headers": pa.array([[{"key": "h", "value": b"v"}]] * n, headers),
        }
    )  # fmt: skip


def _run(spec: PackSpec, batches: Iterable[pa.RecordBatch]) -> dict[str, list[pa.Table]]:
    found: dict[str, list[pa.Table]] = {ROWS: [], LEFT: [], COMPARED: [], "keys": []}
    for piece in packed._pack_task(spec)(batches):
        [kind], [records] = piece["kind"].to_pylist(), piece["records"].to_pylist()
        [table] = tables([piece.select(["data"])])
        assert len(table) == records
        found[kind].append(table)
        if kind == ROWS:
            found["keys"] += tables([piece.select(["keys"])])
    return found


def _values(kind: list[pa.Table], column: str) -> list[object]:
    return [value for table in kind for value in table[column].to_pylist()]


def test_each_record_is_a_row_or_left_as_kafka_holds_it() -> None:
    values: list[bytes | None] = [json.dumps({"id": f"a{i}", "level": i}).encode() for i in range(200)]
    odd: dict[int, bytes | None] = {10: b"[", 60: None, 110: b'{"id":"\\ud83d"}', 160: b'{"id":1}'}
    for place, value in odd.items():
        values[place] = value
    found = _run(_spec(10**9), [_batch(values)])
    certain = [i for i in range(200) if i not in odd]
    assert _values(found[ROWS], "kafka_offset") == _values(found[ROWS], "level") == certain
    assert _values(found["keys"], "id") == [f"a{i}" for i in certain]
    assert found["keys"][0].column_names == ["kafka_partition", "kafka_offset", "id"]
    assert _values(found[LEFT], "offset") == list(odd)
    assert _values(found[LEFT], "value") == list(odd.values())
    assert _values(found[LEFT], "headers") == [[{"key": "h", "value": b"v"}]] * 4
    assert found[COMPARED] == []


def test_unknown_fields_are_certain_only_where_the_stream_ignores_them() -> None:
    values: list[bytes | None] = [b'{"id":"a"}'] * 100
    values[50] = b'{"id":"b","other":1}'
    batch = _batch(values)
    # The first batch teaches the field.
    assert "b" in _values(_run(_spec(1, takes_unknown=True), [batch, batch])[ROWS], "id")
    found = _run(_spec(1), [batch, batch])
    assert 50 in _values(found[LEFT], "offset")
    assert set(_values(found[ROWS], "id")) == {"a"}


def test_large_batches_become_pieces_of_about_a_megabyte() -> None:
    values = [json.dumps({"id": "x" * 900, "level": i}).encode() for i in range(6_000)]
    found = _run(_spec(1), [_batch(values)])
    assert len(found[ROWS]) > 3
    assert max(table.nbytes for table in found[ROWS]) < 2 * 2**20
    assert _values(found[ROWS], "level") == list(range(6_000))
    assert _values(found[COMPARED], "offset") == list(range(6_000))


@pytest.mark.parametrize("one_in", [1, 2, 5])
def test_compared_are_the_certain_records_of_the_chosen_blocks_however_they_are_batched(one_in: int) -> None:
    values: list[bytes | None] = [b'{"id":"a"}'] * (20 * BLOCK)
    values[5] = values[BLOCK + 1] = b"{"
    chosen = {b for b in range(20) if is_compared(HOUR, 3, b, one_in)}
    expected = [o for o in range(len(values)) if o // BLOCK in chosen and values[o] != b"{"]
    assert expected
    for size in (700, len(values)):
        parts = [_batch(values[i : i + size], i) for i in range(0, len(values), size)]
        assert _values(_run(_spec(one_in), parts)[COMPARED], "offset") == expected


def test_another_hour_compares_other_blocks_and_one_in_so_many() -> None:
    chosen = Counter(h for h in range(24) for b in range(1_000) if is_compared(f"2026-11-21T{h:02}", 0, b, 50))
    assert all(5 <= n <= 45 for n in chosen.values()) and len(chosen) == 24
    of_hour = [{b for b in range(1_000) if is_compared(h, 0, b, 50)} for h in ("2026-11-21T03", "2026-11-21T04")]
    assert of_hour[0] != of_hour[1]
