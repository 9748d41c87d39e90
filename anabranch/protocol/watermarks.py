"""Watermarks: the hour through which `main` is complete, and the time through which it is fresh.
Both follow from the state after a publish, which writes them to the properties of the table and of
its snapshot on `main`. Readers with any engine find them without a client library. Pure.

Completeness of event time: whether all ingest hours that can contain events of a day, by the
stream's bounds, are accepted.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from anabranch.common.errors import ConfigurationError
from anabranch.common.json_values import read_property
from anabranch.config import EventTime, Stream
from anabranch.offsets.hours import end_of, hour_of, hours_between, shift, start_of
from anabranch.offsets.position import Offsets
from anabranch.protocol.state import State

COMPLETE_THROUGH = "anabranch.complete-through"
FRESH_THROUGH = "anabranch.fresh-through"


@dataclass(frozen=True)
class Watermarks:
    """The watermarks of `main`; None if there is none yet.

    `complete_through`: the last hour such that it and all earlier hours are accepted.
    `fresh_through`: a time such that `main` has all records that Kafka had acknowledged by then and
    returns with `read_committed`, so no records after the start of an open transaction. At the end
    of an hour it is a time of Kafka's timestamps, by which hours are cut; within the running hour,
    of the speed layer's clock.
    """

    complete_through: str | None = None
    fresh_through: datetime | None = None

    def to_properties(self) -> dict[str, str]:
        """Return the properties for snapshot and table, without None. The time is written as
        `2026-11-21T03:12:45.123Z`, rounded down."""
        said = {}
        if self.complete_through is not None:
            said[COMPLETE_THROUGH] = self.complete_through
        if self.fresh_through is not None:
            moment = self.fresh_through.astimezone(UTC).isoformat(timespec="milliseconds")
            said[FRESH_THROUGH] = moment.replace("+00:00", "Z")
        return said

    @staticmethod
    def from_properties(properties: Mapping[str, str]) -> Watermarks:
        moment = None
        if properties.get(FRESH_THROUGH):
            moment = read_property(properties, FRESH_THROUGH, datetime.fromisoformat)
        return Watermarks(properties.get(COMPLETE_THROUGH) or None, moment)


def plan_watermarks(
    state: State, before: Watermarks, is_merged: bool, read_until: datetime | None = None
) -> Watermarks:
    """Return the watermarks of `main` after a publish that results in `state`; `before`: the
    watermarks before it.

    `fresh_through` is the latest of its value before, the end of the last hour up to which `main`
    has all records, and `read_until`, the latest known time at which the log ended at the position.
    The end of hours and `read_until` count only if `main` is merged. An hour that lacks records
    which the speed layer jumped over, and that is not accepted, holds both back.
    """
    candidates = [before.fresh_through]
    # Decision 23: a `main` that is not merged may lack rows of its layers, so it promises nothing
    # new.
    if is_merged:
        by_speed = _served_by_speed(state)
        lacking = _first_lacking(state, by_speed)
        last = _last_complete(state, by_speed, lacking)
        candidates.append(end_of(last) if last is not None else None)
        # Decision 23: `read_until` says nothing about an hour that the speed layer jumped over.
        candidates.append(read_until if lacking is None else None)
    return Watermarks(
        complete_through(state), max((m for m in candidates if m is not None), default=None)
    )


def complete_through(state: State) -> str | None:
    """Return the last hour such that it and all earlier ones, from the stream's first, are
    accepted; None if there is none."""
    timeline = state.timeline
    hour = max(timeline.first, min(state.settled_before, timeline.open))
    waiting = min((h for h in timeline.sealed if h not in state.accepted), default=timeline.open)
    while hour < waiting and state.is_accepted(hour):
        hour = shift(hour, 1)
    # Decision 23: a refused or waiting hour holds the promise back, also if later hours are
    # accepted.
    hour = min(hour, waiting)
    return shift(hour, -1) if hour > timeline.first else None


def complete_through_all(hours: Collection[str | None]) -> str | None:
    """Return the last hour that is complete in each of several streams; None if one of them has
    none, or if there are no streams. Hours are cut by Kafka's timestamps, so the hour is the same
    cut in all of them. Pure."""
    known = [hour for hour in hours if hour is not None]
    return min(known) if known and len(known) == len(hours) else None


def waiting_since(
    stamps: Collection[int], fresh_through: datetime | None, now: datetime
) -> datetime | None:
    """Return the time (UTC) at which Kafka received the oldest of some records, from their
    timestamps in milliseconds: never after `now`, whatever the producers wrote, and never before
    `fresh_through`. None if there are no records. Pure."""
    if not stamps:
        return None
    # A negative timestamp means a record without one.
    oldest = datetime.fromtimestamp(min(max(0, min(stamps)) / 1000, now.timestamp()), UTC)
    return max(oldest, fresh_through) if fresh_through is not None else oldest


def _last_complete(state: State, by_speed: Sequence[str], lacking: str | None) -> str | None:
    """Return the last hour such that `main` contains it and all earlier hours completely, by the
    decided ends; None if there is none."""
    timeline, cuts = state.timeline, state.cuts
    ended = sorted(timeline.boundaries)
    frontier = shift(ended[-1], 1) if ended else timeline.open
    wanted = {*timeline.start, *state.position.offsets}

    def is_behind(hour: str) -> bool:
        cut = cuts.get(hour)
        ends: Offsets = cut.ends if cut is not None else timeline.boundaries.get(hour, {})
        lacks = cut is None and not wanted <= ends.keys()
        return lacks or any(state.position.offsets.get(p, 0) < end for p, end in ends.items())

    # Ends never decrease from one hour of a log to the next.
    hours = [*(h for h in by_speed if h >= timeline.since), *ended]
    at = bisect_left(hours, True, key=is_behind)
    missing = [h for h in (hours[at] if at < len(hours) else None, lacking) if h is not None]
    last = shift(min([frontier, *missing]), -1)
    # An adoption cuts its hour early: records received later in that hour belong to the next one.
    while any(a.hour == last for a in timeline.adoptions):
        last = shift(last, -1)
    return last if last >= timeline.first else None


def _served_by_speed(state: State) -> list[str]:
    """Return the sealed hours that are served from the speed layer, oldest first."""
    sealed = {*state.timeline.sealed, *state.overrides}
    return sorted(h for h in sealed if state.is_sealed(h) and state.served_by(h) == "speed")


def _first_lacking(state: State, by_speed: Sequence[str]) -> str | None:
    """Return the oldest hour served from the speed layer that `main` lacks records of, whatever the
    position: jumped over, dropped since, or retained by a merge until the speed layer covers it."""
    timeline = state.timeline
    lacking = set(state.retained_hours)
    if timeline.skipped or timeline.covered_from:
        skipped, kept = set(timeline.skipped), set(timeline.kept)
        lacking |= {h for h in skipped if h >= timeline.open}
        lacking |= {
            h for h in by_speed if h in skipped or (h < timeline.covered_from and h not in kept)
        }
    return min(lacking, default=None)


_MOMENT = timedelta(microseconds=1)


@dataclass(frozen=True)
class EventTimeCompleteness:
    """The ingest hours `first` to `last`, both included, that can contain events of a time; `last`
    is None if the stream has no bound for late events. `accepted`: the number of accepted hours.
    `waiting`: sealed hours that are not accepted. `open`: the first hour that is not sealed yet.
    `complete_at`: the end of the last hour, the earliest time at which all events can have
    arrived."""

    stream: str
    event_time: str
    first: str
    last: str | None
    complete: bool
    accepted: int
    waiting: Sequence[str]
    open: str | None
    complete_at: datetime | None


def parse_event_time(text: str) -> tuple[datetime, datetime]:
    """Return the span `[start, end)` of a day (UTC) such as 2026-11-20, or of an hour such as
    2026-11-20T13. Raises ConfigurationError."""
    if "T" in text:
        return start_of(text), end_of(text)
    try:
        day = datetime.strptime(text, "%Y-%m-%d").replace(tzinfo=UTC)
    except ValueError as error:
        raise ConfigurationError(
            "--event-time: expected a UTC day such as 2026-11-20, or an hour such as "
            f"2026-11-20T13, found {text!r}"
        ) from error
    return day, day + timedelta(days=1)


def plan_hours(bounds: EventTime, start: datetime, end: datetime) -> tuple[str | None, str | None]:
    """Return the first and the last ingest hour that can contain an event of `[start, end)`; None
    without a bound. Pure.

    An hour accepts events from `past` before its start to `future` after its end, both included.
    """
    first = last = None
    if bounds.future is not None:
        earliest = start - bounds.future - timedelta(hours=1)
        first = hour_of(earliest + timedelta(hours=1) - _MOMENT)
    if bounds.past is not None:
        last = hour_of(end - _MOMENT + bounds.past)
    return first, last


def plan_open_spans(
    bounds: EventTime, state: State
) -> list[tuple[datetime, datetime | None]] | None:
    """Return the spans of event time that hours without acceptance can contain events of: disjoint,
    ordered, both ends included. The end of an unbounded span is None; the result is None if the
    stream has no bound for late events. Pure.

    A time outside all of them is complete. This is the inverse of `plan_hours`.
    """
    if bounds.past is None:
        return None
    timeline = state.timeline
    spans: list[tuple[datetime, datetime | None]] = []
    for hour in state.unaccepted:
        begin = start_of(hour) - bounds.past
        end = end_of(hour) + bounds.future if bounds.future is not None else None
        if spans and (spans[-1][1] is None or begin <= spans[-1][1]):
            begin, _ = spans.pop()
        spans.append((begin, end))
    begin = start_of(timeline.open) - bounds.past
    while spans and (spans[-1][1] is None or begin <= spans[-1][1]):
        begin = min(begin, spans.pop()[0])
    return [*spans, (begin, None)]


def completeness(stream: Stream, state: State, text: str) -> EventTimeCompleteness:
    """Return whether every ingest hour that can contain events of a day or an hour is accepted.
    Raises ConfigurationError for a stream without an event time and for a text that is no time.
    Pure.
    """
    if stream.event_time is None:
        raise ConfigurationError(
            f"stream {stream.name}: expected `event_time:` in its file, the bound for late "
            "events, found none"
        )
    try:
        earliest, last = plan_hours(stream.event_time, *parse_event_time(text))
        behind = shift(last, 1) if last is not None else None
    except OverflowError as error:
        raise ConfigurationError(
            "--event-time: expected a time whose ingest hours are in the years 1 to 9999, found "
            f"{text}"
        ) from error
    timeline = state.timeline
    # The stream has no hours before its first.
    first = max(earliest or timeline.first, timeline.first)
    ended = hours_between(first, min(behind or timeline.open, timeline.open))
    waiting = [h for h in state.unaccepted if ended and first <= h <= ended[-1]]
    is_open = behind is None or behind > max(first, timeline.open)
    return EventTimeCompleteness(
        stream=stream.name,
        event_time=text,
        first=first,
        last=last,
        complete=not waiting and not is_open,
        accepted=len(ended) - len(waiting),
        waiting=waiting,
        open=max(first, timeline.open) if is_open else None,
        complete_at=start_of(behind) if behind is not None else None,
    )
