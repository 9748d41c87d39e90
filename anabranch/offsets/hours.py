"""Ingest hours and cuts: which offsets belong to which hour, decided once. Pure: clocks and offsets
come in.

An hour is written `2026-11-21T03` (UTC). `Timeline` is what the table remembers of the hours; every
function that changes it returns a new one.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from functools import cached_property, lru_cache
from itertools import pairwise, takewhile
from typing import Any

from anabranch.common.errors import ConfigurationError
from anabranch.offsets.hour_ends import millis
from anabranch.offsets.position import (
    Offsets,
    Position,
    Ranges,
    Stamped,
    from_keys,
    ranges_between,
    ranges_from_keys,
    ranges_to_keys,
    to_keys,
)

_FORMAT = "%Y-%m-%dT%H"
# How many hours one commit decides at most, and how many ends (an hour and a partition) they have
# together.
_HOURS_AT_ONCE = 240
_ENDS_AT_ONCE = 24_000
# Of how many logs that were left the end is remembered; of an older one `adopt` asks where to
# begin.
REMEMBERED_LOGS = 16


def hour_of(when: datetime) -> str:
    """The hour that holds a moment (aware)."""
    return when.astimezone(UTC).strftime(_FORMAT)


@lru_cache(maxsize=10_000)
def start_of(hour: str) -> datetime:
    """The moment an hour begins. Raises ConfigurationError for anything but `2026-11-21T03`."""
    try:
        start = datetime.strptime(hour, _FORMAT).replace(tzinfo=UTC)
    except ValueError:
        start = None
    # strptime takes other spellings too, which would name no hour of ours.
    if start is None or hour_of(start) != hour:
        raise ConfigurationError(f"hour: expected a UTC hour such as 2026-11-21T03, found {hour!r}")
    return start


def is_hour(text: str) -> bool:
    """Whether a text is an hour such as `2026-11-21T03`."""
    try:
        start_of(text)
    except ConfigurationError:
        return False
    return True


def end_of(hour: str) -> datetime:
    return start_of(hour) + timedelta(hours=1)


@lru_cache(maxsize=20_000)
def shift(hour: str, by: int) -> str:
    return hour_of(start_of(hour) + timedelta(hours=by))


def hours_between(first: str, last: str) -> list[str]:
    """All hours from `first` up to, not including, `last`."""
    count = int((start_of(last) - start_of(first)).total_seconds() // 3600)
    return [shift(first, i) for i in range(max(0, count))]


def span_of(text: str) -> tuple[str, str]:
    """The first and the last of `2026-11-21T03..2026-11-22T02`, both included, or twice the one
    hour that it is. Raises ConfigurationError."""
    first, dots, last = text.partition("..")
    last = last if dots else first
    if start_of(first) > start_of(last):
        raise ConfigurationError(f"hours: expected the earlier hour first, found {text}")
    return first, last


def spans_of(hours: Iterable[str]) -> list[tuple[str, str]]:
    """Hours as spans of hours that follow each other, first and last included."""
    ordered = sorted(hours)
    ends = [a for a, b in pairwise(ordered) if shift(a, 1) != b]
    begins = [b for a, b in pairwise(ordered) if shift(a, 1) != b]
    return list(zip([*ordered[:1], *begins], [*ends, *ordered[-1:]], strict=True))


@dataclass(frozen=True)
class Cut:
    """An hour's exact input: per partition `[start, end)` of one topic id. Never changes once
    sealed."""

    topic_id: str
    ranges: Ranges

    @property
    def ends(self) -> Offsets:
        return {p: e for p, (_, e) in self.ranges.items()}

    @property
    def starts(self) -> Offsets:
        return {p: s for p, (s, _) in self.ranges.items()}

    @property
    def offsets(self) -> int:
        return sum(e - s for s, e in self.ranges.values())

    def as_dict(self) -> dict[str, Any]:
        return {"topic_id": self.topic_id, "ranges": ranges_to_keys(self.ranges)}

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> Cut:
        return Cut(data["topic_id"], ranges_from_keys(data["ranges"]))


@dataclass(frozen=True)
class Adoption:
    """`hour` was the last of the log that had `topic_id`; the hours after it begin at `begins`: in
    the log of another topic id, or in the same log where it lost its end.

    `ended` is where the sealed hours of a log that was left end, and so where the stream goes on
    should it come back; `read_ms` is when that log was published from last, in milliseconds since
    the epoch. Both are known of the newest adoption that left the log, and of as many logs as
    REMEMBERED_LOGS says. `begins_ms` is when what lies before `begins` was published from last,
    where the log that begins there was read before. `replaced` are the partitions in which that log
    had lost its end, with the end that it had: offsets from `begins` up to there name two records.
    """

    hour: str
    topic_id: str
    begins: Offsets
    ended: Offsets = field(default_factory=dict)
    read_ms: int = 0
    begins_ms: int = 0
    replaced: Offsets = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        data: dict[str, Any] = {
            "hour": self.hour,
            "topic_id": self.topic_id,
            "begins": to_keys(self.begins),
        }
        data |= {"ended": to_keys(self.ended), "read_ms": self.read_ms} if self.ended else {}
        data |= {"begins_ms": self.begins_ms} if self.begins_ms else {}
        return data | ({"replaced": to_keys(self.replaced)} if self.replaced else {})

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> Adoption:
        ended, read_ms, begins_ms = (
            from_keys(data.get("ended", {})),
            data.get("read_ms", 0),
            data.get("begins_ms", 0),
        )
        replaced = from_keys(data.get("replaced", {}))
        return Adoption(
            data["hour"],
            data["topic_id"],
            from_keys(data["begins"]),
            ended,
            read_ms,
            begins_ms,
            replaced,
        )


IMPORTED = "import"
"""The topic id of hours that were imported, which Kafka never had: they are of a log of their
own."""


@dataclass(frozen=True)
class Timeline:
    """The decisions about the hours.

    `open` is the oldest hour not sealed and begins at `start`. `boundaries` holds, for hours that
    have ended but are not sealed, the ends that the speed layer has already used. `sealed` holds
    the cuts of sealed hours until the batch layer has accepted them. `skipped` names the hours that
    the speed layer jumped over, wholly or in part; of those before `covered_from` it has the rows
    of the `kept` ones alone. `adoptions` come oldest first.
    """

    first: str
    open: str
    start: Offsets
    boundaries: dict[str, Offsets] = field(default_factory=dict)
    sealed: dict[str, Cut] = field(default_factory=dict)
    skipped: tuple[str, ...] = ()
    covered_from: str = ""
    kept: tuple[str, ...] = ()
    adoptions: tuple[Adoption, ...] = ()

    @property
    def since(self) -> str:
        """The first hour whose offsets are of the log that the position belongs to; others cannot
        be compared."""
        return shift(self.adoptions[-1].hour, 1) if self.adoptions else self.first

    @property
    def imported_through(self) -> str:
        """The last imported hour; an empty text where none was imported. All hours of Kafka come
        later."""
        first = self.adoptions[0] if self.adoptions else None
        return first.hour if first is not None and first.topic_id == IMPORTED else ""

    @property
    def first_of_kafka(self) -> str:
        """The first hour that has records of Kafka."""
        return shift(self.imported_through, 1) if self.imported_through else self.first

    def left_at(self, topic_id: str) -> Adoption | None:
        """The adoption that left the log of a topic id, where its end is remembered: the stream
        goes on from there."""
        return next(
            (a for a in reversed(self.adoptions) if a.topic_id == topic_id and a.ended), None
        )

    def replaced_before(self, hour: str, topic_id: str) -> list[tuple[Offsets, Offsets]]:
        """By adoption, oldest first, which offsets of a log were lost and given to other records
        before an hour: where they begin and end, by partition."""
        following = [*(a.topic_id for a in self.adoptions[1:]), topic_id]
        pairs = zip(self.adoptions, following, strict=False)
        return [
            (a.begins, a.replaced)
            for a, after in pairs
            if a.hour < hour and after == topic_id and a.replaced
        ]

    def is_skipped(self, hour: str) -> bool:
        """Whether the speed layer's rows do not account for the whole hour: jumped over, or dropped
        since."""
        return hour in self.skipped or (hour < self.covered_from and hour not in self.kept)

    def to_json(self) -> str:
        return self._json

    # Every publish says it, and it seldom changes: with a long backlog it is megabytes.
    @cached_property
    def _json(self) -> str:
        return json.dumps(
            {
                "first": self.first,
                "open": self.open,
                "start": to_keys(self.start),
                "boundaries": {h: to_keys(b) for h, b in sorted(self.boundaries.items())},
                "sealed": {h: c.as_dict() for h, c in sorted(self.sealed.items())},
                "skipped": list(self.skipped),
                "covered_from": self.covered_from,
                "kept": list(self.kept),
                "adoptions": [adoption.as_dict() for adoption in self.adoptions],
            },
            separators=(",", ":"),
        )

    @staticmethod
    def from_json(text: str) -> Timeline:
        return _timeline_of(text)


# Of the three branches of every stream of a process.
@lru_cache(maxsize=1 << 10)
def _timeline_of(text: str) -> Timeline:
    data = json.loads(text)
    return Timeline(
        data["first"],
        data["open"],
        from_keys(data["start"]),
        {h: from_keys(b) for h, b in data["boundaries"].items()},
        {h: Cut.from_dict(c) for h, c in data["sealed"].items()},
        tuple(data["skipped"]),
        data.get("covered_from", ""),
        tuple(data.get("kept", ())),
        tuple(map(Adoption.from_dict, data.get("adoptions", ()))),
    )


def plan_remembered(adoptions: Iterable[Adoption]) -> tuple[Adoption, ...]:
    """The same adoptions, in which only the newest of each log still has the log's end, of
    REMEMBERED_LOGS logs."""
    kept: list[Adoption] = []
    known: set[str] = set()
    for adoption in reversed(tuple(adoptions)):
        is_newest = (
            adoption.ended and adoption.topic_id not in known and len(known) < REMEMBERED_LOGS
        )
        known |= {adoption.topic_id} if is_newest else set()
        kept.insert(0, adoption if is_newest else replace(adoption, ended={}, read_ms=0))
    return tuple(kept)


@dataclass(frozen=True)
class HourRange:
    """An hour and where it ends, per partition; `ends` is None for the hour that is still
    running."""

    hour: str
    ends: Offsets | None


def plan_boundary(record: Stamped | None, stable_end: int, floor: int, now: datetime) -> int:
    """Where one partition's hour ends, asked after the hour has ended on the clock.

    `record` is the earliest decided record stamped at the hour's end or later. A record stamped
    later than the clock says nothing about now, and without a record there is nothing to say: then
    all that is decided (`stable_end`) belongs to the hour. Never below `floor`, what is already
    published for the hour.
    """
    boundary = stable_end
    if record is not None and record.timestamp_ms <= millis(now):
        boundary = min(record.offset, stable_end)
    return max(boundary, floor)


def is_untouched(timeline: Timeline, position: Position) -> bool:
    """Nothing is published, cut or sealed yet."""
    decided = timeline.open != timeline.first or timeline.boundaries or timeline.sealed
    return not decided and all(o == timeline.start.get(p, 0) for p, o in position.offsets.items())


def plan_first_hour(
    timeline: Timeline, position: Position, earliest: Stamped | None, now: datetime
) -> Timeline:
    """Begin at the hour of the oldest record that waits (`cuts.plan_oldest`), while nothing is
    published or decided.

    So a topic that already holds hours of records is cut into those hours, not squeezed into one.
    """
    if (
        earliest is None
        or earliest.timestamp_ms > millis(now)
        or not is_untouched(timeline, position)
    ):
        return timeline
    hour = hour_of(datetime.fromtimestamp(earliest.timestamp_ms / 1000, UTC))
    return replace(timeline, first=hour, open=hour) if hour < timeline.open else timeline


def _ended(timeline: Timeline, until: datetime) -> list[str]:
    """The unsealed hours that ended by `until`, or whose end a process with a clock ahead has used
    already."""
    used = [shift(max(timeline.boundaries), 1)] if timeline.boundaries else []
    running = max([hour_of(until), *used])
    return hours_between(timeline.open, running)


def undecided(timeline: Timeline, partitions: Iterable[int], until: datetime) -> list[str]:
    """The unsealed hours that have ended and whose end is not yet known for every partition, oldest
    first."""
    wanted = set(partitions) | set(timeline.start)
    return [
        h for h in _ended(timeline, until) if not wanted <= timeline.boundaries.get(h, {}).keys()
    ]


def at_once(partitions: int) -> int:
    """How many hours one commit decides at most, so that a year of them is many commits of bounded
    size."""
    return max(1, min(_HOURS_AT_ONCE, _ENDS_AT_ONCE // max(1, partitions)))


def decided_ends(timeline: Timeline, partitions: Iterable[int], until: datetime) -> list[HourRange]:
    """The unsealed hours that ended by `until`, oldest first, up to the first whose end is not
    known everywhere."""
    wanted = set(partitions) | set(timeline.start)
    known = ((h, timeline.boundaries.get(h, {})) for h in _ended(timeline, until))
    return [
        HourRange(h, ends) for h, ends in takewhile(lambda entry: wanted <= set(entry[1]), known)
    ]


def plan_wanted(
    timeline: Timeline, position: Offsets, until: datetime, needed: Offsets | None, at_most: int
) -> list[str]:
    """The hours to be decided next, oldest first, `at_most` so many.

    Empty while what a process is about to publish (up to `needed`) lies inside the hours that are
    decided: so a backlog of many hours is decided as it is read, not all at once.
    """
    waiting = undecided(timeline, position, until)
    if waiting and needed is not None:
        before = decided_ends(timeline, position, until)
        ends = (before[-1].ends if before else None) or timeline.start
        if all(e <= ends.get(p, 0) for p, e in needed.items()):
            return []
    return waiting[:at_most]


def plan_boundaries(
    timeline: Timeline,
    position: Offsets,
    answers: Mapping[str, Mapping[int, Stamped | None]],
    stable_ends: Offsets,
    until: datetime,
    now: datetime,
) -> Timeline:
    """Fill in the ends of hours that ended by `until`, from Kafka's answers by hour, keeping every
    end already used.

    Ends never fall from one hour to the next, and never below the position in the oldest hour that
    has none yet.
    """
    if not answers:
        return timeline
    partitions = sorted(set(stable_ends) | set(timeline.start) | set(position))
    boundaries = dict(timeline.boundaries)
    floor = {p: timeline.start.get(p, 0) for p in partitions}
    for hour in _ended(timeline, until):
        known = boundaries.get(hour, {})
        if hour in answers:
            ends = {}
            for p in partitions:
                if p in known:
                    ends[p] = known[p]
                    continue
                # Published offsets belong to the first hour without an end, so that end is not
                # below them.
                low = max(floor[p], position.get(p, 0))
                ends[p] = plan_boundary(answers[hour].get(p), stable_ends.get(p, 0), low, now)
            boundaries[hour] = ends
        floor = {p: max(floor[p], boundaries.get(hour, {}).get(p, 0)) for p in partitions}
    return replace(timeline, boundaries=boundaries)


def plan_seal(
    timeline: Timeline, topic_id: str, until: datetime, at_most: int | None = None
) -> tuple[Timeline, list[str]]:
    """Seal the hours that have ended by `until` and whose ends are decided, oldest first and
    `at_most` of them; returns those sealed."""
    sealed, boundaries = dict(timeline.sealed), dict(timeline.boundaries)
    start, hour, done = dict(timeline.start), timeline.open, list[str]()
    while end_of(hour) <= until and hour in boundaries and (at_most is None or len(done) < at_most):
        # An hour may know its end for old partitions alone, when many are decided step by step.
        if not set(start) <= set(boundaries[hour]):
            break
        ends = boundaries.pop(hour)
        sealed[hour] = Cut(topic_id, ranges_between(start, ends))
        start |= ends
        done.append(hour)
        hour = shift(hour, 1)
    return replace(timeline, open=hour, start=start, boundaries=boundaries, sealed=sealed), done


def hour_ranges(
    timeline: Timeline, cuts: Mapping[str, Cut], position: Offsets, now: datetime
) -> list[HourRange]:
    """Which hour the offsets from the position on belong to: `cuts` of sealed hours, then the ended
    hours whose ends are decided, then, when all are, the running one.

    Without the running one, nothing behind the last hour's ends may be published yet.
    """
    ranges = [
        HourRange(hour, cut.ends)
        for hour, cut in sorted(cuts.items())
        if hour >= timeline.since and any(e > position.get(p, 0) for p, e in cut.ends.items())
    ]
    ended, decided = _ended(timeline, now), decided_ends(timeline, position, now)
    ranges += decided
    if len(decided) < len(ended):
        return ranges
    return [*ranges, HourRange(shift(ended[-1], 1) if ended else timeline.open, None)]
