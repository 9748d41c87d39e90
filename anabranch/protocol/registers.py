"""Holds, expired hours and erasures, as each branch records them. A branch that is rolled back or
recreated loses no hold, and restores no expired hour.

A hold keeps hours beyond their retention, until an operator releases it. Each branch records all
holds with the time of the last change; the newest record counts.

Retention has removed the rows of an expired hour from every branch, because the stream's file keeps
rows for a limited time.

An erasure covers the records that Kafka had accepted when it was requested, which are before
`ends`. So both layers decide alike about a record, whenever they read it. The ledger has keyed
hashes of the values, and the places (partition and offset) of erased dead letters.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from functools import partial

from anabranch.common.errors import ConfigurationError
from anabranch.common.json_values import JsonFields, dump, parse, read_property
from anabranch.offsets.hours import hour_of, hours_between, is_hour, shift, span_of, spans_of
from anabranch.offsets.position import Offsets, Ranges, clip
from anabranch.protocol.ledger_row import Act

HOLDS = "anabranch.holds"


@dataclass(frozen=True)
class Hold(JsonFields):
    """A hold of the hours `first` to `last`, both included, with operator, time and reason."""

    first: str
    last: str
    by: str
    at: datetime
    why: str

    def __contains__(self, hour: str) -> bool:
        return self.first <= hour <= self.last

    @property
    def reason(self) -> str:
        """The reason why its hours are kept, for messages."""
        return f"kept by {self.by} since {self.at:%F %T} UTC: {self.why}"


@dataclass(frozen=True)
class Holds:
    """All holds of a stream, and the time (UTC) of their last change; None without one."""

    holds: tuple[Hold, ...] = ()
    changed: datetime | None = None

    def of(self, hour: str) -> Hold | None:
        """Return the first hold of an hour; None if it is not held."""
        return next((hold for hold in self.holds if hour in hold), None)

    def plus(self, hold: Hold) -> Holds:
        return Holds((*self.holds, hold), hold.at)

    def without(self, first: str, last: str, at: datetime) -> Holds:
        """Return the holds without `first` to `last`; a hold's rest on both sides stays. Pure."""
        left: list[Hold] = []
        for hold in self.holds:
            if hold.last < first or last < hold.first:
                left.append(hold)
                continue
            if hold.first < first:
                left.append(Hold(hold.first, shift(first, -1), hold.by, hold.at, hold.why))
            if last < hold.last:
                left.append(Hold(shift(last, 1), hold.last, hold.by, hold.at, hold.why))
        return Holds(tuple(left), at)

    def to_json(self) -> str:
        return dump(self)

    @staticmethod
    def from_properties(properties: Mapping[str, str]) -> Holds:
        return read_property(properties, HOLDS, partial(parse, Holds))

    @staticmethod
    def of_branches(branches: Iterable[Mapping[str, str]]) -> Holds:
        """Return the newest record of the holds on any branch."""
        never = datetime.min.replace(tzinfo=UTC)
        # Decision 50: a branch that is set back has an older record, by which held hours would
        # expire.
        return max(map(Holds.from_properties, branches), key=lambda holds: holds.changed or never)


def new_hold(first: str, last: str, act: Act) -> Hold:
    """Return a hold from an operator's act, which has a reason."""
    return Hold(first, last, f"{act.user}@{act.host}", act.at, act.why or "")


def parse_hours(text: str) -> tuple[str, str]:
    """Return the first and the last hour of `2026-11-21T03`, `2026-11-21T03..2026-11-21T07`, or a
    day (UTC) such as 2026-11-21. Raises ConfigurationError."""
    try:
        day = datetime.strptime(text, "%Y-%m-%d").replace(tzinfo=UTC)
    except ValueError:
        if not all(map(is_hour, text.split("..", 1))):
            raise ConfigurationError(
                "HOURS: expected an hour such as 2026-11-21T03, hours such as "
                f"2026-11-21T03..2026-11-21T07, or a day such as 2026-11-21, found {text!r}"
            ) from None
        return span_of(text)
    return hour_of(day), hour_of(day + timedelta(hours=23))


def span_words(holds: Sequence[Hold]) -> list[str]:
    """Format each hold: its hours and the reason. Pure."""
    return [
        f"{h.first if h.first == h.last else f'{h.first}..{h.last}'}: {h.reason}" for h in holds
    ]


EXPIRED = "anabranch.expired"


@dataclass(frozen=True)
class Expired:
    """All hours before `before`, except the spans `kept` (first and last included, in order). `at`:
    the time (UTC) of the last expiry; older snapshots may have rows of expired hours."""

    before: str = ""
    kept: tuple[tuple[str, str], ...] = ()
    at: datetime | None = None

    def __contains__(self, hour: str) -> bool:
        if hour >= self.before:
            return False
        at = bisect_right(self.kept, (hour, "\U0010ffff")) - 1
        return at < 0 or self.kept[at][1] < hour

    def first_kept(self, first: str) -> str:
        """Return the oldest unexpired hour of a stream that begins with `first`. Pure."""
        return self.kept[0][0] if self.kept else max(self.before, first)

    def count(self, first: str) -> int:
        """Return the number of expired hours of a stream that begins with `first`. Pure."""
        if self.before <= first:
            return 0
        kept = sum(len(hours_between(one, shift(last, 1))) for one, last in self.kept)
        return len(hours_between(first, self.before)) - kept

    def plus(self, hours: Collection[str], first: str, at: datetime) -> Expired:
        """Return the expired hours with `hours`, of a stream that begins with `first`. Pure."""
        known = self.before or first
        before = max(known, shift(max(hours), 1))
        kept = {hour for one, last in self.kept for hour in hours_between(one, shift(last, 1))}
        kept |= set(hours_between(known, before))
        return Expired(before, tuple(spans_of(kept - set(hours))), at)

    def to_json(self) -> str:
        return dump(self)

    @staticmethod
    def from_properties(properties: Mapping[str, str]) -> Expired:
        return read_property(properties, EXPIRED, partial(parse, Expired))

    @staticmethod
    def of_branches(branches: Iterable[Mapping[str, str]]) -> Expired:
        """Return the most expired hours that a branch records. A branch that was rolled back has an
        older value, and the number of expired hours only grows."""
        return max(map(Expired.from_properties, branches), key=Expired._extent)

    def _extent(self) -> tuple[str, int, float]:
        kept = sum(len(hours_between(first, last)) + 1 for first, last in self.kept)
        return self.before, -kept, self.at.timestamp() if self.at is not None else 0.0


ERASURES = "anabranch.erasures"
_EVERYTHING = 2**62
_NEVER = datetime.min.replace(tzinfo=UTC)


@dataclass(frozen=True)
class Erasure:
    """The erasure of records by values of `column`, requested `at`, to be complete by `until`.

    It covers the records of hours before `since`, and records before `ends` in the log of
    `topic_id`. `rows`: the number of the ledger's rows about it, the oldest about the hour
    `first`. `places`: by hour, the number of places of dead letters in these rows. `is_lost`: the
    ledger lost some of them. `changed`: when records were last removed from a
    branch. `done`: when none was left. Times are UTC.
    """

    id: str
    column: str
    at: datetime
    until: datetime
    since: str
    topic_id: str
    ends: Offsets
    rows: int = 0
    first: str | None = None
    places: Mapping[str, int] = field(default_factory=dict)
    is_lost: bool = False
    changed: datetime | None = None
    done: datetime | None = None

    @property
    def mark(self) -> str:
        """The mark of rows that were staged with the erasure; it changes when places are added."""
        # Decision 51: rows that were staged before places were added have another mark, and are
        # staged again.
        return f"{self.id}:{sum(self.places.values())}"

    def covered(self, hour: str, topic_id: str, ranges: Ranges) -> Ranges:
        """Return the part of an hour's `ranges` in a log that the erasure covers."""
        return clip(ranges, {p: self.offsets(hour, topic_id, p) for p in ranges})

    def offsets(self, hour: str, topic_id: str, partition: int) -> tuple[int, int]:
        """Return the range `[start, end)` of a partition that the erasure covers in an hour of a
        log. A log that was left may have had partitions that the position's log does not have."""
        if hour < self.since:
            return 0, _EVERYTHING
        return 0, self.ends.get(partition, 0) if topic_id == self.topic_id else 0


@dataclass(frozen=True)
class Erasures:
    """All erasures of a stream whose records a layer may read again, ordered by id."""

    all: tuple[Erasure, ...] = ()

    def of(self, id: str) -> Erasure | None:
        return next((one for one in self.all if one.id == id), None)

    def __getitem__(self, id: str) -> Erasure:
        """Return the erasure with this id. Raises KeyError."""
        return {one.id: one for one in self.all}[id]

    def covering(self, hour: str, topic_id: str, ranges: Ranges) -> tuple[Erasure, ...]:
        """Return the erasures that cover a part of an hour's `ranges` in a log."""
        return tuple(one for one in self.all if one.covered(hour, topic_id, ranges))

    def marks(self, hour: str, topic_id: str, ranges: Ranges) -> frozenset[str]:
        """Return the marks with which rows of an hour's `ranges` must be staged."""
        return frozenset(one.mark for one in self.covering(hour, topic_id, ranges))

    def plus(self, erasure: Erasure) -> Erasures:
        """Return the erasures with this one, in place of its earlier state. Pure."""
        others = (one for one in self.all if one.id != erasure.id)
        return Erasures(tuple(sorted((*others, erasure), key=lambda one: one.id)))

    @property
    def changed(self) -> datetime | None:
        """The time (UTC) when records were last removed from a branch; None if never."""
        return max((one.changed for one in self.all if one.changed is not None), default=None)

    def to_json(self) -> str:
        return dump(self.all, tuple[Erasure, ...])

    @staticmethod
    def from_properties(properties: Mapping[str, str]) -> Erasures:
        return Erasures(
            read_property(properties, ERASURES, partial(parse, tuple[Erasure, ...]), "[]")
        )

    @staticmethod
    def of_branches(branches: Iterable[Mapping[str, str]]) -> Erasures:
        """Return each erasure's most advanced state: a rolled-back branch has an older one."""
        found = Erasures()
        for one in (one for branch in branches for one in Erasures.from_properties(branch).all):
            known = found.of(one.id)
            if known is None or _extent(one) > _extent(known):
                found = found.plus(one)
        return found


def _extent(erasure: Erasure) -> tuple[int, bool, datetime]:
    return sum(erasure.places.values()), erasure.done is not None, erasure.changed or _NEVER
