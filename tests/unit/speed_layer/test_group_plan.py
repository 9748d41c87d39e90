"""The next reads of a group's speed layer, and their time."""

from __future__ import annotations

from datetime import timedelta

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from anabranch.config import Speed
from anabranch.offsets.hours import HourRange
from speed_layer.group_plan import (
    Waiting,
    is_behind,
    is_due,
    partitions_changed,
    plan_waiting,
    unique_topics,
)
from speed_layer.group_staging import hours_of, runs_of
from speed_layer.plan import assign


def test_nothing_waits_where_the_log_ends_at_the_position() -> None:
    assert plan_waiting({0: 5, 1: 7}, {0: 5, 1: 7}, 100) is None


def test_all_that_waits_is_read_at_once_up_to_the_limit() -> None:
    assert plan_waiting({0: 5, 1: 7}, {0: 9, 1: 7}, 4) == Waiting({0: (5, 9)}, True)


def test_more_than_the_limit_is_shared_in_proportion() -> None:
    waiting = plan_waiting({0: 0, 1: 0, 2: 0}, {0: 3000, 1: 1000, 2: 1}, 400)
    assert waiting == Waiting({0: (0, 299), 1: (0, 99), 2: (0, 1)}, False)


def test_a_partition_that_the_position_lacks_is_not_read() -> None:
    assert plan_waiting({0: 0}, {0: 1, 1: 9}, 100) == Waiting({0: (0, 1)}, True)


@pytest.mark.parametrize(("last", "due"), [(None, True), (8.5, False), (8.0, True)])
def test_a_micro_batch_is_due_by_its_trigger(last: float | None, due: bool) -> None:
    assert is_due(last, Speed(trigger=timedelta(seconds=2)), 10.0) is due


def test_a_log_that_ends_before_the_position_and_a_topic_with_other_partitions_are_noticed() -> (
    None
):
    assert is_behind({0: 5, 1: 1}, {0: 4, 1: 9})
    assert not is_behind({0: 5}, {0: 5, 1: 0})
    assert partitions_changed({0: 1}, None)
    assert partitions_changed({0: 1}, (0, 1))
    assert not partitions_changed({0: 1, 1: 4}, (0, 1))


def test_the_first_of_two_streams_of_one_topic_is_read() -> None:
    assert unique_topics({"a": "x", "b": "y", "c": "x"}) == ["a", "b"]


@st.composite
def _hours(draw: st.DrawFn) -> list[HourRange]:
    """Hours with ends that do not decrease, for partitions 0 and 1; the last one open, or
    closed."""
    ends = [{0: 0, 1: 0}]
    for _ in range(draw(st.integers(0, 4))):
        ends.append({p: e + draw(st.integers(0, 5)) for p, e in ends[-1].items()})
    closed = [HourRange(f"2026-11-25T0{i}", e) for i, e in enumerate(ends)]
    return [*closed, HourRange("2026-11-25T09", None)] if draw(st.booleans()) else closed


@given(_hours(), st.integers(0, 1))
def test_a_worker_assigns_the_hours_that_the_plan_assigns(
    hours: list[HourRange], partition: int
) -> None:
    last = hours[-1].ends
    end = 25 if last is None else last[partition]
    planned = {
        offset: hour
        for hour, ranges in assign({partition: (0, end)}, hours).items()
        for offset in range(*ranges.get(partition, (0, 0)))
    }
    assigned = hours_of(partition, pa.array(range(end), pa.int64()), hours).to_pylist()
    assert dict(enumerate(assigned)) == planned


def test_an_offset_behind_the_last_hour_is_refused() -> None:
    hours = [HourRange("2026-11-25T00", {0: 3})]
    with pytest.raises(
        ValueError, match="partition 0, offset 3: expected an offset of the hours 2026-11-25T00"
    ):
        hours_of(0, pa.array([2, 3], pa.int64()), hours)


@pytest.mark.parametrize("second", [{0: 50}, {1: 7}])
def test_ends_that_decrease_are_refused(second: dict[int, int]) -> None:
    """The hazard: offset 60 gets the last hour, although the first one has it."""
    hours = [HourRange("2026-11-25T00", {0: 100}), HourRange("2026-11-25T01", second)]
    hours.append(HourRange("2026-11-25T02", None))
    with pytest.raises(
        ValueError, match="2026-11-25T01: expected an end of at least 100 for partition 0, found"
    ):
        hours_of(0, pa.array([60], pa.int64()), hours)


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 2)), max_size=30))
def test_a_batch_is_split_by_topic_and_partition_in_order(rows: list[tuple[str, int]]) -> None:
    batch = pa.RecordBatch.from_pydict(
        {
            "topic": pa.array([topic for topic, _ in rows], pa.string()),
            "partition": pa.array([partition for _, partition in rows], pa.int32()),
            "offset": pa.array(range(len(rows)), pa.int64()),
        }
    )
    pieces = list(runs_of(batch))
    assert all(set(piece.column("topic").to_pylist()) == {topic} for topic, _, piece in pieces)
    assert all(
        set(piece.column("partition").to_pylist()) == {partition} for _, partition, piece in pieces
    )
    assert [
        offset for _, _, piece in pieces for offset in piece.column("offset").to_pylist()
    ] == list(range(len(rows)))
