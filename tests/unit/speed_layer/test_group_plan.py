"""The next reads of a group's speed layer, and their time."""

from datetime import timedelta

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from anabranch.config import Speed
from anabranch.offsets.position import Offsets
from speed_layer import group_staging, plan


@pytest.mark.parametrize(
    ("position", "ends", "limit", "waiting"),
    [
        pytest.param({0: 5, 1: 7}, {0: 5, 1: 7}, 100, None, id="nothing"),
        pytest.param({0: 5, 1: 7}, {0: 9, 1: 7}, 4, plan.Waiting({0: (5, 9)}, True), id="the limit"),
        pytest.param(
            {0: 0, 1: 0, 2: 0}, {0: 3000, 1: 1000, 2: 1}, 400,
            plan.Waiting({0: (0, 299), 1: (0, 99), 2: (0, 1)}, False), id="more, in proportion",
        ),
        pytest.param({0: 0}, {0: 1, 1: 9}, 100, plan.Waiting({0: (0, 1)}, True), id="a new partition"),
    ],
)  # fmt: skip
def test_what_waits_is_read_up_to_the_limit(
    position: Offsets, ends: Offsets, limit: int, waiting: plan.Waiting | None
) -> None:
    assert plan.plan_waiting(position, ends, limit) == waiting


@pytest.mark.parametrize(("last", "due"), [(None, True), (8.5, False), (8.0, True)])
def test_a_micro_batch_is_due_by_its_trigger(last: float | None, due: bool) -> None:
    assert plan.is_due(last, Speed(trigger=timedelta(seconds=2)), 10.0) is due


def test_a_changed_log_is_noticed_and_a_topic_is_read_once() -> None:
    assert plan.is_behind({0: 5, 1: 1}, {0: 4, 1: 9})
    assert not plan.is_behind({0: 5}, {0: 5, 1: 0})
    assert plan.partitions_changed({0: 1}, None)
    assert plan.partitions_changed({0: 1}, (0, 1))
    assert not plan.partitions_changed({0: 1, 1: 4}, (0, 1))
    assert plan.unique_topics({"a": "x", "b": "y", "c": "x"}) == ["a", "b"]


@given(st.lists(st.sampled_from("abc"), max_size=30))
def test_a_batch_is_split_by_topic_in_order(topics: list[str]) -> None:
    offsets = pa.array(range(len(topics)), pa.int64())
    batch = pa.RecordBatch.from_pydict({"topic": pa.array(topics, pa.string()), "offset": offsets})
    pieces = list(group_staging.runs_of(batch))
    assert all(set(piece.column("topic").to_pylist()) == {topic} for topic, piece in pieces)
    offsets = [offset for _, piece in pieces for offset in piece.column("offset").to_pylist()]
    assert offsets == list(range(len(topics)))
