"""Pieces of records that workers decode: each record is a row, or left as Kafka has it."""

from __future__ import annotations

import json
from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from anabranch.common.errors import Unexpected
from anabranch.config.columns import parse_columns
from anabranch.decode import Decoded, Decoder, DecodeSpec
from anabranch.records import packed
from anabranch.records.packed import LEFT, REPORT, ROWS, PackSpec, Reports, tables

HOUR = "2026-11-21T03"
AT = datetime(2026, 11, 21, 3, 10, tzinfo=UTC)
# The headers {h: v, h: null} as Spark writes them for workers.
HEADERS = b'[{"key":"68","value":"76"},{"key":"68"}]'

Values = list[bytes | None]


def _spec(lists_unknown: bool = True) -> PackSpec:
    columns = parse_columns("id STRING NOT NULL, level INT, share DOUBLE")
    decode = DecodeSpec(columns, None, "json", lists_unknown=lists_unknown)
    return PackSpec(decode, ("kafka_partition", "kafka_offset", "id"), HOUR)


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


def _run(
    spec: PackSpec, batches: Iterable[pa.RecordBatch]
) -> tuple[dict[str, list[pa.Table]], Reports]:
    found: dict[str, list[pa.Table]] = {ROWS: [], LEFT: [], "keys": []}
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


def test_each_record_is_a_row_or_left_as_kafka_has_it() -> None:
    values: Values = [json.dumps({"id": f"a{i}", "level": i}).encode() for i in range(200)]
    odd: dict[int, bytes | None] = {
        10: b"[",
        60: None,
        110: b'{"id":"\\ud83d"}',
        160: b'{"level":1}',
    }
    for place, value in odd.items():
        values[place] = value
    found, report = _run(_spec(), [_batch(values)])
    good = [i for i in range(200) if i not in odd]
    assert _values(found[ROWS], "kafka_offset") == _values(found[ROWS], "level") == good
    assert _values(found["keys"], "id") == [f"a{i}" for i in good]
    assert found["keys"][0].column_names == ["kafka_partition", "kafka_offset", "id"]
    assert _values(found[LEFT], "offset") == list(odd)
    assert _values(found[LEFT], "value") == list(odd.values())
    headers = [{"key": "h", "value": b"v"}, {"key": "h", "value": None}]
    assert _values(found[LEFT], "headers") == [headers] * 4
    names = ["key", "value", "partition", "offset", "timestamp", "ingest_hour", "headers"]
    assert found[LEFT][0].column_names == names
    assert report == Reports({3: 196}, {3: 4}, [(3, 0, 199)])


def test_records_without_headers_have_none() -> None:
    values: Values = [b"{"] * 3
    texts = [None, b"[]", b'[{"key":"C3BC","value":null},{"key":"","value":""}]']
    batch = _batch(values).set_column(5, "headers", pa.array(texts, pa.binary()))
    found, _ = _run(_spec(), [batch])
    some = [{"key": "ü", "value": None}, {"key": "", "value": b""}]
    assert _values(found[LEFT], "headers") == [None, [], some]


def test_records_with_unknown_fields_are_left_to_be_counted_unless_the_stream_ignores_them() -> (
    None
):
    values: Values = [b'{"id":"a"}'] * 100
    values[50] = b'{"id":"b","other":1}'
    ignored, report = _run(_spec(lists_unknown=False), [_batch(values)])
    assert (_values(ignored[ROWS], "id")[50], report.rows[3]) == ("b", 100)
    found, _ = _run(_spec(), [_batch(values)])
    assert _values(found[LEFT], "offset") == [50]
    assert set(_values(found[ROWS], "id")) == {"a"}


def test_large_batches_become_pieces_of_about_a_megabyte() -> None:
    values: Values = [json.dumps({"id": "x" * 900, "level": i}).encode() for i in range(6_000)]
    found, report = _run(_spec(), [_batch(values)])
    assert len(found[ROWS]) > 3
    assert max(table.nbytes for table in found[ROWS]) < 2 * 2**20
    assert _values(found[ROWS], "level") == list(range(6_000))
    assert report.rows[3] == 6_000


def test_a_decoder_that_gives_other_rows_than_it_takes_fails_the_task(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    decode = Decoder.decode

    def repeated(self: Decoder, batch: pa.RecordBatch) -> Decoded:
        found = decode(self, batch)
        rows = found.rows.take([0, 0, *range(2, len(found.rows))])
        return Decoded(rows, found.errors, found.unknown)

    monkeypatch.setattr(Decoder, "decode", repeated)
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
