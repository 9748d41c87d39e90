"""Positions and offset ranges: pure arithmetic on half-open ranges by partition."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from anabranch.common.json_values import parse

Offsets = dict[int, int]
Ranges = dict[int, tuple[int, int]]


@dataclass(frozen=True)
class Position:
    """The id of a topic and the next offset to read in each partition."""

    topic_id: str
    offsets: Offsets

    def to_json(self) -> str:
        return json.dumps(
            {"topic_id": self.topic_id, "partitions": to_keys(self.offsets)}, sort_keys=True
        )

    @staticmethod
    def from_json(text: str) -> Position:
        """Raises ValueError for any text but that of `to_json`."""
        stored = parse(_Stored, text)
        return Position(stored.topic_id, stored.partitions)

    def with_partitions(self, partitions: tuple[int, ...]) -> Position:
        """Return the position with these partitions too; new ones begin at offset 0."""
        return Position(self.topic_id, dict.fromkeys(partitions, 0) | self.offsets)


@dataclass(frozen=True)
class _Stored:
    topic_id: str
    partitions: dict[int, int]


@dataclass(frozen=True)
class Topic:
    """A topic as the broker describes it. `id` changes when the topic is deleted and recreated
    (KIP-516).

    `records` (the number of offsets in its log) and `cluster_id` are read only if the id is not the
    expected one; they do not identify the topic and are not compared.
    """

    name: str
    id: str
    partitions: tuple[int, ...]
    records: int | None = field(default=None, compare=False)
    cluster_id: str = field(default="", compare=False)


def is_contradicted(topic: Topic | None, expected: Position | None) -> bool:
    """Whether an answer contradicts a position: no topic, another id, fewer partitions. Pure."""
    if topic is None or expected is None:
        return topic is None
    return expected.topic_id not in ("", topic.id) or not set(expected.offsets) <= set(
        topic.partitions
    )


@dataclass(frozen=True)
class Stamped:
    """An offset and the Kafka timestamp of its record, in milliseconds since the epoch."""

    offset: int
    timestamp_ms: int


def plan_newest(starts: Mapping[int, int], ends: Mapping[int, int], count: int) -> Ranges:
    """Return the ranges of the newest `count` offsets, spread evenly over the partitions as far as
    they have records; none is empty. Pure."""
    have = {p: end - starts.get(p, 0) for p, end in ends.items() if end > starts.get(p, 0)}
    ranges: Ranges = {}
    left = count
    # The smallest first: what a partition lacks is shared by those after it.
    for number, p in enumerate(sorted(have, key=lambda p: (have[p], p))):
        taken = min(have[p], left // (len(have) - number))
        left -= taken
        if taken:
            ranges[p] = (ends[p] - taken, ends[p])
    return ranges


class RangeRelation(Enum):
    """The relation of a micro-batch's offset ranges to the position."""

    ADJACENT = "adjacent"
    OVERLAPPING = "overlapping"
    PUBLISHED = "already published"
    AHEAD = "ahead"


def to_keys(offsets: Mapping[int, int]) -> dict[str, int]:
    """Return the offsets with string keys: JSON has no integer keys."""
    return {str(p): offsets[p] for p in sorted(offsets)}


def from_keys(data: Mapping[str, int]) -> Offsets:
    return {int(p): int(o) for p, o in data.items()}


def ranges_to_keys(ranges: Ranges) -> dict[str, list[int]]:
    return {str(p): list(ranges[p]) for p in sorted(ranges)}


def ranges_from_keys(data: Mapping[str, list[int]]) -> Ranges:
    return {int(p): (int(s), int(e)) for p, (s, e) in data.items()}


def ranges_between(start: Mapping[int, int], end: Mapping[int, int]) -> Ranges:
    """Return `[start, end)` for each partition of `end`; one missing in `start` begins at 0."""
    return {p: (start.get(p, 0), e) for p, e in end.items()}


def size(ranges: Ranges) -> int:
    """Return the number of offsets in the ranges; an inverted range has none."""
    return sum(max(0, e - s) for s, e in ranges.values())


def clip(ranges: Ranges, within: Ranges) -> Ranges:
    """Return the part of `ranges` inside `within`, without empty partitions."""
    clipped = {}
    for p, (s, e) in ranges.items():
        low, high = within.get(p, (0, 0))
        if max(s, low) < min(e, high):
            clipped[p] = (max(s, low), min(e, high))
    return clipped


def classify(ranges: Ranges, position: Offsets) -> RangeRelation:
    """Return the relation of a micro-batch's ranges to the position. A gap counts first: AHEAD."""
    live = {p: (s, e) for p, (s, e) in ranges.items() if s < e}
    if any(s > position.get(p, 0) for p, (s, _) in live.items()):
        return RangeRelation.AHEAD
    if all(e <= position.get(p, 0) for p, (_, e) in live.items()):
        return RangeRelation.PUBLISHED
    if any(s < position.get(p, 0) for p, (s, _) in live.items()):
        return RangeRelation.OVERLAPPING
    return RangeRelation.ADJACENT


def trim(ranges: Ranges, position: Offsets) -> Ranges:
    """Return the part of `ranges` that is not published yet. Precondition: not AHEAD."""
    trimmed = {p: (max(s, position.get(p, 0)), e) for p, (s, e) in ranges.items()}
    return {p: (s, e) for p, (s, e) in trimmed.items() if s < e}


def advance(position: Position, ranges: Ranges) -> Position:
    """Return the position after a publish of `ranges`; it never moves back."""
    ends = {p: max(e, position.offsets.get(p, 0)) for p, (_, e) in ranges.items()}
    return Position(position.topic_id, position.offsets | ends)
