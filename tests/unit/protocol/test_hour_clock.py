"""The clock of the hours: Kafka's answer and the loaded state may be from different times, without
wrong cuts."""

from datetime import UTC, datetime
from pathlib import Path

import pytest
from brokers import Broker
from lakes import StreamLake, new_lake

from anabranch.common.errors import PositionError
from anabranch.iceberg.commits import Change
from anabranch.offsets.hours import Timeline, hour_of, shift
from anabranch.offsets.position import Position
from anabranch.protocol.publish import Publish, new_id
from anabranch.protocol.sealing import BoundaryResolver

NOW_HOUR = hour_of(datetime.now(UTC))


@pytest.fixture
def lake(tmp_path: Path) -> StreamLake:
    """A stream that began two hours ago; no hour is sealed."""
    before = shift(NOW_HOUR, -2)
    return new_lake(tmp_path, timeline=Timeline(before, before, {0: 0}))


def clock(lake: StreamLake, broker: Broker) -> BoundaryResolver:
    return BoundaryResolver(lake.stream, lake.again(), broker.adapter)


def bind(lake: StreamLake, position: Position) -> None:
    """Another publisher moves the position."""
    publish = Publish(new_id(), (Change("speed"),), lake.state().timeline, position)
    lake.land(publish)


def test_a_partition_added_before_the_load_is_no_contradiction(lake: StreamLake) -> None:
    """The hazard: the topic as it was described has fewer partitions than the position that is
    loaded after it."""
    broker = Broker()

    def grow() -> None:
        broker.log[1] = []
        bind(lake, Position("t", {0: 0, 1: 0}))

    broker.after_describe.append(grow)
    decided = clock(lake, broker).decide()
    assert broker.after_describe == [], "the hazard did not happen"
    assert decided.position == Position("t", {0: 0, 1: 0})
    assert all(set(ends) == {0, 1} for ends in decided.timeline.boundaries.values())


def test_a_topic_that_was_adopted_since_the_last_load_is_no_contradiction(lake: StreamLake) -> None:
    broker = Broker()
    one = clock(lake, broker)
    one.decide()
    broker.id = "other"
    bind(lake, Position("other", {0: 0}))
    assert one.decide().position.topic_id == "other"


def test_a_recreated_topic_is_a_contradiction(lake: StreamLake) -> None:
    with pytest.raises(PositionError, match=r"deleted and made again.*anabranch adopt"):
        clock(lake, Broker(id="other")).decide()


def test_a_missing_topic_is_a_contradiction(lake: StreamLake) -> None:
    with pytest.raises(PositionError, match="expected it to exist, found none"):
        clock(lake, Broker(id=None)).decide()


def test_a_log_below_the_position_stops_before_a_cut_there(lake: StreamLake) -> None:
    """The hazard: the hour would be sealed up to a position that Kafka no longer reaches."""
    bind(lake, Position("t", {0: 5}))
    broker = Broker(log={0: [0] * 3})
    found = r"lost published records: {'0': \[3, 5\]}.*anabranch adopt"
    with pytest.raises(PositionError, match=found):
        clock(lake, broker).decide()
    broker.log[0] += [0] * 2
    assert clock(lake, broker).decide().timeline.boundaries[shift(NOW_HOUR, -1)] == {0: 5}
