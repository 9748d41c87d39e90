"""Ingest hours and cuts: which offsets belong to which hour, decided once. Pure: the caller gives
the time and the offsets.

An hour is written `2026-11-21T03` (UTC). `Timeline` is the table's state of its hours; every
function that changes it returns a new one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from functools import cached_property, lru_cache
from itertools import pairwise, takewhile

from anabranch.common.errors import ConfigurationError
from anabranch.common.json_values import dump, parse
from anabranch.offsets.hour_ends import millis
from anabranch.offsets.position import Offsets, Position, Ranges, Stamped, ranges_between

_FORMAT = "%Y-%m-%dT%H"
# The most hours that one commit decides, and the most ends (hours times partitions).
_HOURS_AT_ONCE = 240
_ENDS_AT_ONCE = 24_000
# The number of earlier logs whose end is remembered; for an older log `adopt` asks where to begin.
REMEMBERED_LOGS = 16


def hour_of(when: datetime) -> str:
    """Return the hour of a time (aware)."""
    return when.astimezone(UTC).strftime(_FORMAT)


@lru_cache(maxsize=10_000)
def start_of(hour: str) -> datetime:
    """Return an hour's begin (UTC). Raises ConfigurationError for another form."""
    try:
        start = datetime.strptime(hour, _FORMAT).replace(tzinfo=UTC)
    except ValueError:
        start = None
    # strptime accepts other spellings too, which are no keys of hours.
    if start is None or hour_of(start) != hour:
        raise ConfigurationError(f"hour: expected a UTC hour such as 2026-11-21T03, found {hour!r}")
    return start


def to_number(hour: str) -> int:
    """Return an hour as hours since 1970."""
    return int(start_of(hour).timestamp()) // 3600


def from_number(number: int) -> str:
    """Return the hour of `to_number`."""
    return hour_of(datetime.fromtimestamp(number * 3600, UTC))


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
    """Return all hours in `[first, last)`."""
    count = int((start_of(last) - start_of(first)).total_seconds() // 3600)
    return [shift(first, i) for i in range(max(0, count))]


def span_of(text: str) -> tuple[str, str]:
    """Return the first and the last hour of `2026-11-21T03..2026-11-22T02`, both included; for a
    single hour, that hour twice. Raises ConfigurationError."""
    first, dots, last = text.partition("..")
    last = last if dots else first
    if start_of(first) > start_of(last):
        raise ConfigurationError(f"hours: expected the earlier hour first, found {text}")
    return first, last


def spans_of(hours: Iterable[str]) -> list[tuple[str, str]]:
    """Return hours as spans of consecutive hours, first and last included."""
    ordered = sorted(hours)
    ends = [a for a, b in pairwise(ordered) if shift(a, 1) != b]
    begins = [b for a, b in pairwise(ordered) if shift(a, 1) != b]
    return list(zip([*ordered[:1], *begins], [*ends, *ordered[-1:]], strict=True))


@dataclass(frozen=True)
class Cut:
    """The exact input of an hour: `[start, end)` by partition, of one topic id. Never changes."""

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


@dataclass(frozen=True)
class Adoption:
    """A change of the log: from the log of `topic_id` to one of another topic id, or to the same
    log after it lost records at its end.

    `hour` is the last hour of the log of `topic_id`; later hours begin at `begins`. Times are in
    milliseconds since the epoch.

    `ended` has the offsets where the sealed hours of the earlier log end: the stream continues
    there if it returns to that log. `read_ms` is the time of the last publish from that log. Only
    the newest adoption that left a log has both, for at most REMEMBERED_LOGS logs. `begins_ms` is
    the time of the last publish of offsets before `begins`, if the new log had been read before.
    `replaced` has the former ends of the partitions where the new log lost records: offsets from
    `begins` up to there name two records.
    """

    hour: str
    topic_id: str
    begins: Offsets
    ended: Offsets = field(default_factory=dict)
    read_ms: int = 0
    begins_ms: int = 0
    replaced: Offsets = field(default_factory=dict)


IMPORTED = "import"
"""The topic id of imported hours, which were never in Kafka: they count as a log of their own."""


@dataclass(frozen=True)
class Timeline:
    """The decisions about the hours.

    `open` is the oldest hour that is not sealed; it begins at `start`. `boundaries` has the ends
    that the speed layer has already used, of hours that have ended but are not sealed. `sealed` has
    the cuts of sealed hours until the batch layer has accepted them. `skipped` has the hours that
    the speed layer jumped over, wholly or in part. Of the hours before `covered_from`, the speed
    layer has only the rows of those in `kept`. `adoptions` are ordered, oldest first.
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
        """The first hour of the position's log; offsets of earlier hours cannot be compared."""
        return shift(self.adoptions[-1].hour, 1) if self.adoptions else self.first

    @property
    def imported_through(self) -> str:
        """The last imported hour; empty if none was imported. All hours of Kafka are later."""
        first = self.adoptions[0] if self.adoptions else None
        return first.hour if first is not None and first.topic_id == IMPORTED else ""

    @property
    def first_of_kafka(self) -> str:
        """The first hour with records of Kafka."""
        return shift(self.imported_through, 1) if self.imported_through else self.first

    def left_at(self, topic_id: str) -> Adoption | None:
        """Return the adoption that left the log of a topic id, if its end is remembered: the stream
        continues from there."""
        return next(
            (a for a in reversed(self.adoptions) if a.topic_id == topic_id and a.ended), None
        )

    def replaced_before(self, hour: str, topic_id: str) -> list[tuple[Offsets, Offsets]]:
        """Return the offsets of a log that were lost and given to other records before an hour:
        start and end by partition, for each adoption, oldest first."""
        following = [*(a.topic_id for a in self.adoptions[1:]), topic_id]
        pairs = zip(self.adoptions, following, strict=False)
        return [
            (a.begins, a.replaced)
            for a, after in pairs
            if a.hour < hour and after == topic_id and a.replaced
        ]

    def is_skipped(self, hour: str) -> bool:
        """Whether the speed layer lacks rows of the hour: jumped over, or dropped since."""
        return hour in self.skipped or (hour < self.covered_from and hour not in self.kept)

    def to_json(self) -> str:
        return self._json

    # Cached: every publish writes it, it seldom changes, and with a long backlog it is megabytes.
    @cached_property
    def _json(self) -> str:
        return dump(self)

    @staticmethod
    def from_json(text: str) -> Timeline:
        return _timeline_of(text)


# Enough for the three branches of every stream of a process.
@lru_cache(maxsize=1 << 10)
def _timeline_of(text: str) -> Timeline:
    return parse(Timeline, text)


def plan_remembered(adoptions: Iterable[Adoption]) -> tuple[Adoption, ...]:
    """Return the adoptions with the ends of at most REMEMBERED_LOGS logs, the latest ones; only the
    newest adoption of a log keeps its end."""
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
    """An hour and its ends by partition; `ends` is None for the running hour."""

    hour: str
    ends: Offsets | None


def plan_boundary(record: Stamped | None, stable_end: int, floor: int, now: datetime) -> int:
    """Return the offset where an hour ends in one partition; for hours that have ended by the
    clock.

    `record` is the first record of the next hour or a later one, below `stable_end`. If there is
    none, or its timestamp is later than the clock and so proves nothing, all offsets up to
    `stable_end` belong to the hour. Never below `floor`, the end of the offsets that are already
    published for the hour.
    """
    boundary = stable_end
    if record is not None and record.timestamp_ms <= millis(now):
        boundary = min(record.offset, stable_end)
    return max(boundary, floor)


def is_untouched(timeline: Timeline, position: Position) -> bool:
    """Whether nothing is published, cut or sealed yet."""
    decided = timeline.open != timeline.first or timeline.boundaries or timeline.sealed
    return not decided and all(o == timeline.start.get(p, 0) for p, o in position.offsets.items())


def plan_first_hour(
    timeline: Timeline, position: Position, earliest: Stamped | None, now: datetime
) -> Timeline:
    """Begin at the hour of the oldest unread record (`hour_ends.plan_oldest`), as long as nothing
    is published or decided.

    A topic that already has hours of records is then cut into those hours, not squeezed into one.
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
    """Return the unsealed hours that ended by `until`, or whose end a fast clock has used."""
    used = [shift(max(timeline.boundaries), 1)] if timeline.boundaries else []
    running = max([hour_of(until), *used])
    return hours_between(timeline.open, running)


def undecided(timeline: Timeline, partitions: Iterable[int], until: datetime) -> list[str]:
    """Return the unsealed hours that ended by `until` and lack an end, oldest first."""
    wanted = set(partitions) | set(timeline.start)
    return [
        h for h in _ended(timeline, until) if not wanted <= timeline.boundaries.get(h, {}).keys()
    ]


def max_hours_at_once(partitions: int) -> int:
    """Return the most hours of one commit: a year becomes many commits of bounded size."""
    return max(1, min(_HOURS_AT_ONCE, _ENDS_AT_ONCE // max(1, partitions)))


def decided_ends(timeline: Timeline, partitions: Iterable[int], until: datetime) -> list[HourRange]:
    """Return the unsealed hours that ended by `until`, oldest first, before the first whose end is
    not known for every partition."""
    wanted = set(partitions) | set(timeline.start)
    known = ((h, timeline.boundaries.get(h, {})) for h in _ended(timeline, until))
    return [
        HourRange(h, ends) for h, ends in takewhile(lambda entry: wanted <= set(entry[1]), known)
    ]


def plan_wanted(
    timeline: Timeline, position: Offsets, until: datetime, needed: Offsets | None, at_most: int
) -> list[str]:
    """Return the hours to decide next, oldest first, at most `at_most` of them.

    Empty while the offsets that a process is about to publish (up to `needed`) are inside decided
    hours, so that a backlog of many hours is decided as it is read, not all at once.
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
    """Fill in the ends of hours that ended by `until` from Kafka's answers by hour; keep every end
    already used.

    Ends never decrease from one hour to the next, and a new end is never below the position.
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
                # Published offsets belong to the first hour without an end, so its end is not
                # below them.
                low = max(floor[p], position.get(p, 0))
                ends[p] = plan_boundary(answers[hour].get(p), stable_ends.get(p, 0), low, now)
            boundaries[hour] = ends
        floor = {p: max(floor[p], boundaries.get(hour, {}).get(p, 0)) for p in partitions}
    return replace(timeline, boundaries=boundaries)


def plan_seal(
    timeline: Timeline, topic_id: str, until: datetime, at_most: int | None = None
) -> tuple[Timeline, list[str]]:
    """Seal the hours that ended by `until` and whose ends are decided, oldest first, at most
    `at_most` of them. Returns the new timeline and the hours sealed."""
    sealed, boundaries = dict(timeline.sealed), dict(timeline.boundaries)
    start, hour, done = dict(timeline.start), timeline.open, list[str]()
    while end_of(hour) <= until and hour in boundaries and (at_most is None or len(done) < at_most):
        # Only the ends of older partitions may be known when many hours are decided step by step.
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
    """Return the hours of the offsets from the position on: the sealed hours in `cuts`, then ended
    hours whose ends are decided, then the running hour if all ended ones are decided.

    Without the running hour, no offset after the last hour's ends may be published yet.
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
