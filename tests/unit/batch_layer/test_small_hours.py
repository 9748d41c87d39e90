"""An hour of which the driver has the places: its counts."""

from __future__ import annotations

import pyarrow as pa

from batch_layer.balance import Counted
from batch_layer.offset_counts import count_places

PLACE = [("kafka_partition", pa.int32()), ("kafka_offset", pa.int64())]


def table(rows: list[tuple[int, int]]) -> pa.Table:
    schema = pa.schema(PLACE)
    return pa.Table.from_pylist([dict(zip(schema.names, row, strict=True)) for row in rows], schema)


def test_offsets_that_occur_twice_or_lie_outside_are_counted_as_such() -> None:
    places = table([(0, 4), (0, 4), (0, 6), (1, 9), (0, 7), (3, 1)])
    ranges = {0: (4, 7), 1: (0, 9), 2: (0, 5)}
    expected = Counted({0: 2}, rows=6, outside=3)
    assert count_places([places], 6, ranges) == expected
    assert count_places([places[:1], places[1:4], places[4:]], 6, ranges) == expected
    assert count_places([], 0, ranges) == Counted()
