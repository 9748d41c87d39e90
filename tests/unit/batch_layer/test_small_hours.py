"""A small hour, of which the driver has the places and hashes: its counts, and the difference of
the layers."""

from __future__ import annotations

import random
from collections import Counter

import pyarrow as pa

from batch_layer.balance import Counted
from batch_layer.offset_counts import count_places
from serving_layer.layer_diff.duckdb import compare_hashes

Rows = dict[tuple[int, int], int]
PLACE = [("kafka_partition", pa.int32()), ("kafka_offset", pa.int64())]
HASHES = pa.schema([*PLACE, ("hash", pa.int64())])


def table(rows: list[tuple[int, ...]], schema: pa.Schema = HASHES) -> pa.Table:
    return pa.Table.from_pylist([dict(zip(schema.names, row, strict=True)) for row in rows], schema)


def hashes(rows: Rows) -> pa.Table:
    return table([(*place, hash) for place, hash in rows.items()])


def test_each_place_has_the_kind_that_the_layers_give_it() -> None:
    dice = random.Random(3)
    places = [(p, o) for p in range(3) for o in range(60)]
    speed: Rows = {place: dice.randrange(2) for place in places if dice.random() < 0.8}
    batch: Rows = {place: dice.randrange(2) for place in places if dice.random() < 0.8}
    removed = [place for place in places if dice.random() < 0.3]
    unread = {0: (40, 60), 2: (0, 5), 7: (0, 9)}

    def kind(place: tuple[int, int]) -> str | None:
        p, o = place
        if place in speed and place in batch:
            return "same" if speed[place] == batch[place] else "changed"
        if place in speed:
            return "duplicate" if place in removed else "extra"
        if place in batch:
            return "unread" if p in unread and unread[p][0] <= o < unread[p][1] else "missing"
        return None

    expected = Counter(map(kind, places))
    assert all(expected[k] for k in ("same", "changed", "duplicate", "extra", "unread", "missing"))
    found = compare_hashes(hashes(speed), hashes(batch), table(removed, pa.schema(PLACE)), unread)
    assert (found.speed_rows, found.batch_rows) == (len(speed), len(batch))
    assert (found.diff.missing, found.diff.unread) == (
        expected["missing"] + expected["unread"],
        expected["unread"],
    )
    assert (found.diff.extra, found.diff.changed, found.diff.duplicate) == tuple(
        expected[k] for k in ("extra", "changed", "duplicate")
    )
    first = sorted(place for place in places if kind(place) == "changed")[:5]
    assert found.diff.sample == tuple(
        {"kind": "changed", "partition": p, "offset": o} for p, o in first
    )


def test_without_a_row_of_the_speed_layer_all_are_missing() -> None:
    nothing = table([], pa.schema(PLACE))
    found = compare_hashes(hashes({}), hashes({(0, 1): 5, (1, 1): 5}), nothing, {1: (0, 9)})
    diff = found.diff
    assert (found.speed_rows, diff.missing, diff.unread, diff.extra) == (0, 2, 1, 0)
    assert [(s["kind"], s["partition"]) for s in diff.sample or ()] == [
        ("missing", 0),
        ("unread", 1),
    ]


def test_offsets_that_occur_twice_or_lie_outside_are_counted_as_such() -> None:
    places = table([(0, 4), (0, 4), (0, 6), (1, 9), (0, 7), (3, 1)], pa.schema(PLACE))
    ranges = {0: (4, 7), 1: (0, 9), 2: (0, 5)}
    expected = Counted({0: 2}, rows=6, outside=3)
    assert count_places([places], 6, ranges) == expected
    assert count_places([places[:1], places[1:4], places[4:]], 6, ranges) == expected
    assert count_places([], 0, ranges) == Counted()
