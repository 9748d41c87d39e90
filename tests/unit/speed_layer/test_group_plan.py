"""The next reads of a group's speed layer, and their time."""

from datetime import timedelta

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from anabranch.config import Speed
from speed_layer import plan
from speed_layer.group_staging import runs_of


def test_nothing_waits_where_the_log_ends_at_the_position() -> None:
    assert plan.plan_waiting({0: 5, 1: 7}, {0: 5, 1: 7}, 100) is None


def test_all_that_waits_is_read_at_once_up_to_the_limit() -> None:
    assert plan.plan_waiting({0: 5, 1: 7}, {0: 9, 1: 7}, 4) == plan.Waiting({0: (5, 9)}, True)


def test_more_than_the_limit_is_shared_in_proportion() -> None:
    waiting = plan.plan_waiting({0: 0, 1: 0, 2: 0}, {0: 3000, 1: 1000, 2: 1}, 400)
    assert waiting == plan.Waiting({0: (0, 299), 1: (0, 99), 2: (0, 1)}, False)


def test_a_partition_that_the_position_lacks_is_not_read() -> None:
    assert plan.plan_waiting({0: 0}, {0: 1, 1: 9}, 100) == plan.Waiting({0: (0, 1)}, True)


@pytest.mark.parametrize(("last", "due"), [(None, True), (8.5, False), (8.0, True)])
def test_a_micro_batch_is_due_by_its_trigger(last: float | None, due: bool) -> None:
    assert plan.is_due(last, Speed(trigger=timedelta(seconds=2)), 10.0) is due


def test_a_log_before_the_position_and_new_partitions_are_noticed() -> None:
    assert plan.is_behind({0: 5, 1: 1}, {0: 4, 1: 9})
    assert not plan.is_behind({0: 5}, {0: 5, 1: 0})
    assert plan.partitions_changed({0: 1}, None)
    assert plan.partitions_changed({0: 1}, (0, 1))
    assert not plan.partitions_changed({0: 1, 1: 4}, (0, 1))


def test_the_first_of_two_streams_of_one_topic_is_read() -> None:
    assert plan.unique_topics({"a": "x", "b": "y", "c": "x"}) == ["a", "b"]


@given(st.lists(st.sampled_from("abc"), max_size=30))
def test_a_batch_is_split_by_topic_in_order(topics: list[str]) -> None:
    offsets = pa.array(range(len(topics)), pa.int64())
    batch = pa.RecordBatch.from_pydict({"topic": pa.array(topics, pa.string()), "offset": offsets})
    pieces = list(runs_of(batch))
    assert all(set(piece.column("topic").to_pylist()) == {topic} for topic, piece in pieces)
    offsets = [offset for _, piece in pieces for offset in piece.column("offset").to_pylist()]
    assert offsets == list(range(len(topics)))
