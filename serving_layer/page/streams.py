"""The table of streams: a line of each, and the word for how it stands."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from anabranch.hours import hour_of
from anabranch.job import Job
from serving_layer.page.reading import Reading
from serving_layer.views import status
from serving_layer.views.status import HourSummary, StreamStatus, unexplained_words

_DAY = timedelta(hours=24)
# Hours that may wait for their seal or their rebuild before an operator should look (deploy/prometheus/alerts.yml).
_MAY_WAIT = 2
_NAMED = 3  # hours that a note names


@dataclass(frozen=True)
class StreamView:
    """What the page knows of a stream: its status, and the hours of the last day."""

    status: StreamStatus
    day: Sequence[HourSummary]


def read_stream(job: Job, late_after: timedelta, now: datetime) -> StreamView:
    """Ask the views. Raises Transient when Kafka or the lake does not answer."""
    return StreamView(status.status(job, late_after), status.hours(job, hour_of(now - _DAY)))


@dataclass(frozen=True)
class Condition:
    """How a stream stands: a word, a mark that tells it without colour, and whether an operator should look."""

    word: str
    mark: str
    is_wrong: bool
    note: str = ""


@dataclass(frozen=True)
class StreamLine:
    """A line of the table. What is not known is None; `why_old` is why nothing newer is."""

    name: str
    condition: Condition
    freshness: int | None
    lag: int | None
    last_publish: datetime | None
    newest_accepted: str | None
    complete_through: str | None
    refused: Sequence[str]
    as_of: datetime | None
    why_old: str | None


def classify_stream(view: StreamStatus) -> Condition:
    """How a stream stands, by what matters most. Pure."""
    if view.topic_recreated:
        note = f"the topic was made anew: `anabranch adopt {view.stream}`"
        return Condition("recreated", "✕", True, note)
    if view.unexplained:
        hour, left = next(iter(view.unexplained.items()))
        note = f"nothing explains {unexplained_words(left)} in {hour}: `anabranch diff {view.stream} {hour}`"
        return Condition("differs", "≠", True, note)
    if view.refused:
        return Condition("refused", "✕", True)
    if view.late:
        return Condition("late", "!", True, view.late)
    if view.lost:
        note = f"retention took {sum(view.lost.values())} offsets of {_named(list(view.lost))}"
        return Condition("lost offsets", "!", True, note)
    if len(view.backlog) > _MAY_WAIT or len(view.to_seal) > _MAY_WAIT:
        note = f"{len(view.to_seal)} hours to seal, {len(view.backlog)} to rebuild: `anabranch batch {view.stream}`"
        return Condition("waiting", "…", True, note)
    return Condition("in order", "✓", False)


def _named(hours: Sequence[str]) -> str:
    more = f" and {len(hours) - _NAMED} more" if len(hours) > _NAMED else ""
    return ", ".join(hours[:_NAMED]) + more


def freshness_seconds(view: StreamStatus, as_of: datetime) -> int:
    """For how long the position has stood still while offsets wait; 0 when none does. Pure."""
    return round((as_of - view.position_since).total_seconds()) if view.lag.offsets else 0


def stream_line(
    name: str, reading: Reading[StreamView], now: datetime, deadline: timedelta, every: timedelta
) -> StreamLine:
    """The line of a stream, by the newest reading of it. Pure."""
    why_old = reading.why_old(now, deadline, every)
    if reading.value is None or reading.as_of is None:
        failed = reading.failure is not None
        unknown = Condition("away", "✕", True) if failed else Condition("not read yet", "…", False)
        return StreamLine(name, unknown, None, None, None, None, None, (), None, why_old)
    view = reading.value.status
    condition = classify_stream(view)
    if why_old is not None:
        condition = Condition("away", "✕", True, f"{condition.word} when it was read last")
    return StreamLine(
        name=name,
        condition=condition,
        freshness=max(0, freshness_seconds(view, reading.as_of)),
        lag=view.lag.offsets,
        last_publish=max((at for at in view.last_publish.values() if at is not None), default=None),
        newest_accepted=view.newest_accepted,
        complete_through=view.complete_through,
        refused=view.refused,
        as_of=reading.as_of,
        why_old=why_old,
    )


def summary_words(lines: Sequence[StreamLine]) -> str:
    """All streams in a sentence, which a screen reader is told when it changes. Pure."""
    wrong = [line for line in lines if line.condition.is_wrong]
    old = [line for line in lines if line.why_old is not None]
    text = f"{len(lines)} streams, {len(wrong)} to look at" if len(lines) != 1 else f"1 stream, {len(wrong)} to look at"
    if wrong:
        text += ": " + ", ".join(f"{line.name} {line.condition.word}" for line in wrong[:_NAMED])
        text += f" and {len(wrong) - _NAMED} more" if len(wrong) > _NAMED else ""
    return text + (f"; {len(old)} not read anew" if old else "")
