"""The decisions of a group's speed layer, as pure functions: what a stream reads next, and when."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from anabranch.config import Speed
from anabranch.offsets.position import Offsets, Ranges


@dataclass(frozen=True)
class Waiting:
    """A stream's unread offsets in Kafka. `whole`: the ranges end at the log's end."""

    ranges: Ranges
    whole: bool


def plan_waiting(position: Offsets, ends: Offsets, at_most: int) -> Waiting | None:
    """Return the next micro-batch's offsets, at most `at_most` but at least one per partition with
    unread offsets; None if there are none. Pure. Partitions share the limit in proportion to their
    unread offsets, as in Spark's source."""
    waiting = {p: end - position[p] for p, end in ends.items() if end > position.get(p, end)}
    if not waiting:
        return None
    total = sum(waiting.values())
    if total > at_most:
        waiting = {p: max(1, count * at_most // total) for p, count in waiting.items()}
    ranges = {p: (position[p], position[p] + count) for p, count in waiting.items()}
    return Waiting(ranges, total == sum(waiting.values()))


def is_due(last: float | None, speed: Speed, now: float) -> bool:
    """Return True if a stream's next micro-batch is due; its last one began at `last`. Pure."""
    return last is None or now - last >= speed.trigger.total_seconds()


def is_behind(position: Offsets, ends: Offsets) -> bool:
    """Return True if a log ends before the position: a recreated topic, or a broker that lags
    behind. Pure."""
    return any(end < position.get(p, 0) for p, end in ends.items())


def partitions_changed(position: Offsets, partitions: tuple[int, ...] | None) -> bool:
    """Return True if a topic is gone (None), or has other partitions than the position. Pure."""
    return partitions is None or set(partitions) != set(position)


def unique_topics(topics: Mapping[str, str]) -> list[str]:
    """Return the first stream of each topic, from topics by stream: one read cannot contain two
    ranges of a topic. Pure."""
    first: dict[str, str] = {}
    for name, topic in topics.items():
        first.setdefault(topic, name)
    return list(first.values())
