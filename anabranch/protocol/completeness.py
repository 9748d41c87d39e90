"""Completeness of event time: whether all ingest hours that can contain events of a day, by the
stream's bounds, are accepted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from anabranch.common.errors import ConfigurationError
from anabranch.config import EventTime, Stream
from anabranch.offsets.hours import end_of, hour_of, hours_between, shift, start_of
from anabranch.protocol.state import State

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
