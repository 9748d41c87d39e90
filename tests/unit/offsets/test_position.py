"""Positions: whatever ranges arrive and overlap, each offset is published once, none skipped."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from anabranch.offsets import position as positions

PARTITIONS = st.integers(0, 2)
# An inverted range can come of a position that moved on; it holds nothing.
RANGE = st.tuples(st.integers(0, 12), st.integers(0, 12))
RANGES = st.dictionaries(PARTITIONS, RANGE, max_size=3)


def offsets_of(ranges: positions.Ranges) -> list[tuple[int, int]]:
    return sorted((p, o) for p, (s, e) in ranges.items() for o in range(s, e))


@given(st.lists(RANGES, max_size=30))
def test_any_sequence_publishes_each_offset_once(sequence: list[positions.Ranges]) -> None:
    position = positions.Position("t", {0: 0})
    published: list[tuple[int, int]] = []
    for ranges in sequence:
        relation = positions.classify(ranges, position.offsets)
        if relation is positions.RangeRelation.AHEAD:
            assert any(s < e and s > position.offsets.get(p, 0) for p, (s, e) in ranges.items())
            continue
        todo = positions.trim(ranges, position.offsets)
        new = [offset for offset in offsets_of(ranges) if offset not in published]
        assert offsets_of(todo) == new
        assert (relation is positions.RangeRelation.PUBLISHED) == (not new)
        found = relation is positions.RangeRelation.OVERLAPPING
        assert found == (bool(new) and len(new) < len(offsets_of(ranges)))
        published += offsets_of(todo)
        position = positions.advance(position, todo)
    assert sorted(published) == offsets_of({p: (0, o) for p, o in position.offsets.items()})


@given(RANGES, RANGES)
def test_clip_is_the_intersection_and_has_no_empty_part(
    ranges: positions.Ranges, within: positions.Ranges
) -> None:
    clipped = positions.clip(ranges, within)
    assert offsets_of(clipped) == sorted(set(offsets_of(ranges)) & set(offsets_of(within)))
    assert all(s < e for s, e in clipped.values())
    assert positions.size(clipped) == len(offsets_of(clipped))


@given(RANGES, st.dictionaries(PARTITIONS, st.integers(0, 12)))
def test_a_position_never_moves_back(ranges: positions.Ranges, offsets: dict[int, int]) -> None:
    after = positions.advance(positions.Position("t", offsets), ranges)
    assert after.topic_id == "t"
    assert all(after.offsets[p] >= o for p, o in offsets.items())
    assert all(after.offsets[p] >= e for p, (_, e) in ranges.items())


@pytest.mark.parametrize(
    ("ranges", "expected"),
    [
        ({0: (5, 8), 1: (2, 4)}, positions.RangeRelation.ADJACENT),
        ({0: (5, 8), 1: (2, 2)}, positions.RangeRelation.ADJACENT),
        ({0: (5, 8), 7: (0, 1)}, positions.RangeRelation.ADJACENT),
        ({0: (3, 8), 1: (2, 4)}, positions.RangeRelation.OVERLAPPING),
        ({0: (3, 5), 1: (2, 4)}, positions.RangeRelation.OVERLAPPING),
        ({0: (3, 5), 1: (0, 2)}, positions.RangeRelation.PUBLISHED),
        ({}, positions.RangeRelation.PUBLISHED),
        ({0: (6, 8), 1: (2, 4)}, positions.RangeRelation.AHEAD),
        ({0: (3, 5), 1: (3, 4)}, positions.RangeRelation.AHEAD),
        ({7: (1, 2)}, positions.RangeRelation.AHEAD),
    ],
)
def test_a_micro_batch_and_the_position(
    ranges: positions.Ranges, expected: positions.RangeRelation
) -> None:
    assert positions.classify(ranges, {0: 5, 1: 2}) is expected


def test_a_partition_that_is_new_begins_at_0_and_moves_no_other() -> None:
    position = positions.Position("t", {0: 7}).with_partitions((0, 1, 2))
    assert position == positions.Position("t", {0: 7, 1: 0, 2: 0})
    assert positions.ranges_between({0: 7}, {0: 9, 1: 4}) == {0: (7, 9), 1: (0, 4)}


@given(st.dictionaries(st.integers(0, 50), st.integers(0, 2**62)), RANGES)
def test_json_gives_back_the_same_value(offsets: dict[int, int], ranges: positions.Ranges) -> None:
    position = positions.Position("AbC-_", offsets)
    assert positions.Position.from_json(position.to_json()) == position
    assert positions.ranges_from_keys(positions.ranges_to_keys(ranges)) == ranges


@pytest.mark.parametrize(
    ("topic", "expected", "contradicted"),
    [
        (None, None, True),
        (None, positions.Position("t", {0: 1}), True),
        (positions.Topic("n", "t", (0,)), None, False),
        (positions.Topic("n", "t", (0, 1)), positions.Position("t", {0: 1}), False),
        (positions.Topic("n", "t", (0,)), positions.Position("", {}), False),
        (positions.Topic("n", "t", (0,)), positions.Position("t", {0: 1, 1: 1}), True),
        (positions.Topic("n", "other", (0,)), positions.Position("t", {0: 1}), True),
    ],
)
def test_an_answer_that_contradicts_a_position(
    topic: positions.Topic | None, expected: positions.Position | None, contradicted: bool
) -> None:
    assert positions.is_contradicted(topic, expected) is contradicted


@given(
    st.dictionaries(PARTITIONS, st.tuples(st.integers(0, 50), st.integers(0, 50)), max_size=3),
    st.integers(1, 100),
)
def test_the_newest_offsets_are_spread_evenly(logs: positions.Ranges, count: int) -> None:
    starts = {p: start for p, (start, _) in logs.items()}
    have = {p: length for p, (_, length) in logs.items()}
    ranges = positions.plan_newest(starts, {p: starts[p] + have[p] for p in logs}, count)
    taken = {p: end - start for p, (start, end) in ranges.items()}
    assert sum(taken.values()) == min(count, sum(have.values()))
    assert all(n > 0 and ranges[p][1] == starts[p] + have[p] for p, n in taken.items())
    # A partition with fewer than another gave all that it has, or one less by rounding.
    for p in have:
        assert taken.get(p, 0) == have[p] or taken.get(p, 0) >= max(taken.values(), default=0) - 1
