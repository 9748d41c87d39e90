"""An hour of which the driver has the places: its counts, its duplicates."""

from __future__ import annotations

from collections.abc import Callable

import pyarrow as pa

from anabranch.records.key_hashes import HASH, hash_keys
from batch_layer.balance import Counted
from batch_layer.duplicates import find_few_duplicates
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


def test_of_a_row_that_was_written_twice_no_place_is_a_duplicate() -> None:
    rows = table([(0, 1), (0, 1), (1, 1), (0, 2)]).append_column("id", pa.array([*"aaab"]))
    facts = rows.append_column("hash", hash_keys(rows, ["id"]))

    def served(*ids: str) -> Callable[[object], pa.Table]:
        keys = pa.table({"id": pa.array(ids, pa.string())})
        return lambda _: keys.append_column(HASH, hash_keys(keys, ["id"]))

    def dropped(find: Callable[[object], pa.Table]) -> list[tuple[int, int]]:
        found = find_few_duplicates(facts, ["id"], lambda _: rows, find)
        assert found is not None
        return sorted(zip(*found.table.to_pydict().values(), strict=True))

    assert dropped(served()) == [(1, 1)]
    assert dropped(served("a", "c")) == [(0, 1), (1, 1)]
