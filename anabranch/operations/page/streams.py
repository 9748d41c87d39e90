"""The page's table of streams: one row with one state for each stream."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

from anabranch.common.output import text as text_of
from anabranch.operations.reports import status
from anabranch.operations.reports.reading import Readings, TimedValue
from anabranch.operations.reports.status import StreamStatus, unexplained_words
from anabranch.protocol.shares import percent
from anabranch.protocol.watermarks import complete_through_all

_NAMED = 3  # hours or fields listed in a note


@dataclass(frozen=True)
class Condition:
    """A stream's state: a word, a symbol that is legible without colour, and whether it needs
    attention."""

    word: str
    mark: str
    is_wrong: bool
    note: str = ""


@dataclass(frozen=True)
class StreamLine:
    """A row of the table; unknown values are None. `why_old`: why there is no newer reading;
    `drift`: a note, or empty; `dead`: the share of dead letters, empty without records."""

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
    drift: str = ""
    dead: str = ""


def classify_stream(view: StreamStatus, as_of: datetime) -> Condition:
    """Return a stream's most important condition. Pure."""
    if view.topic_recreated:
        note = f"the topic was recreated: `anabranch adopt {view.stream}`"
        return Condition("recreated", "✕", True, note)
    if view.unexplained:
        hour, left = next(iter(view.unexplained.items()))
        note = (
            f"nothing explains {unexplained_words(left)} in {hour}: `anabranch explain "
            f"{view.stream} {hour} --rows`"
        )
        return Condition("differs", "≠", True, note)
    if view.refused:
        return Condition(
            "refused", "✕", True, f"`anabranch explain {view.stream} {view.refused[0]}`"
        )
    if view.refused_restatements:
        note = f"`anabranch explain {view.stream} {view.refused_restatements[0]}`"
        return Condition("restatement refused", "✕", True, note)
    if view.too_many_dead:
        hour = view.too_many_dead[-1]
        note = f"{view.dead_shares[hour].words} of {hour}: `anabranch dead-letters {view.stream}`"
        return Condition("dead letters", "!", True, note)
    if view.late:
        return Condition("late", "!", True, f"{view.late}: `anabranch doctor {view.stream}`")
    if view.lost:
        note = f"retention deleted {sum(view.lost.values())} offsets of {_named(list(view.lost))}"
        return Condition("lost offsets", "!", True, note)
    if (near := status.retention_reason(view, as_of)) is not None:
        return Condition("retention near", "!", True, f"{near}: `anabranch doctor {view.stream}`")
    if len(view.backlog) > status.MAY_WAIT or len(view.to_seal) > status.MAY_WAIT:
        note = (
            f"{len(view.to_seal)} hours to seal, {len(view.backlog)} to rebuild: `anabranch batch "
            f"{view.stream}`"
        )
        return Condition("waiting", "…", True, note)
    return Condition("in order", "✓", False)


def conflicts_note(view: StreamStatus) -> str:
    """Return the hour with most duplicates of other content as text; empty if there is none.
    Pure."""
    if not view.conflicts:
        return ""
    hour = max(view.conflicts, key=lambda h: view.conflicts[h])
    return (
        f"{view.conflicts[hour]:,} duplicates of {hour} have other content: "
        f"`anabranch explain {view.stream} {hour} --rows`"
    )


def drift_note(view: StreamStatus) -> str:
    """Return the unknown fields of the newest accepted hour as text; empty if there are none.
    Pure."""
    if view.unknown is None or not view.unknown.fields:
        return ""
    names = [text_of(field.name) for field in view.unknown.fields]
    return f"the schema does not know {_named(names)}: `anabranch drift {view.stream}`"


def _named(names: Sequence[str]) -> str:
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + more


def stream_line(name: str, reading: TimedValue[Readings], why_old: str | None) -> StreamLine:
    """Return the row of a stream, from its newest reading, and why it is old. Pure."""
    if reading.value is None or reading.as_of is None:
        failed = reading.failure is not None
        away = Condition("away", "✕", True, f"`anabranch doctor {name}`")
        unknown = away if failed else Condition("not read yet", "…", False)
        return StreamLine(name, unknown, None, None, None, None, None, (), None, why_old)
    view, share = reading.value.status, reading.value.status.running_dead_share
    condition = classify_stream(view, reading.as_of)
    if why_old is not None:
        condition = Condition(
            "away", "✕", True, f"{condition.word} at the last reading: `anabranch doctor {name}`"
        )
    return StreamLine(
        name=name,
        condition=condition,
        freshness=round(status.freshness_seconds(view, reading.as_of)),
        lag=view.lag.offsets,
        last_publish=max((at for at in view.last_publish.values() if at is not None), default=None),
        newest_accepted=view.newest_accepted,
        complete_through=view.complete_through,
        refused=view.refused,
        as_of=reading.as_of,
        why_old=why_old,
        drift="; ".join(filter(None, (conflicts_note(view), drift_note(view)))),
        dead=percent(share.share) if share is not None else "",
    )


@dataclass(frozen=True)
class GroupLine:
    """A row of the table of groups. `complete_through`: the last hour that is complete in every
    stream; None if a stream has none or was not read. `behind`: the streams with the oldest such
    hour, if others are ahead. `unknown`: the streams without a reading."""

    name: str
    streams: int
    complete_through: str | None
    behind: Sequence[str]
    unknown: Sequence[str]


def group_lines(
    groups: Mapping[str, Sequence[str]], lines: Sequence[StreamLine]
) -> list[GroupLine]:
    """Return the rows of the groups, from each group's streams and the rows of all streams. An old
    reading counts, because a complete hour stays complete. Pure."""
    made = []
    for group, names in groups.items():
        members = [line for line in lines if line.name in names]
        unknown = [line.name for line in members if line.as_of is None]
        through = (
            complete_through_all([line.complete_through for line in members])
            if not unknown
            else None
        )
        hours = {
            line.name: line.complete_through or "" for line in members if line.name not in unknown
        }
        oldest, newest = min(hours.values(), default=""), max(hours.values(), default="")
        behind = [name for name, hour in hours.items() if hour == oldest < newest]
        made.append(GroupLine(group, len(members), through, behind, unknown))
    return made


def summary_words(lines: Sequence[StreamLine]) -> str:
    """Return a summary of all streams as one sentence, which a screen reader announces when it
    changes. Pure."""
    wrong = [line for line in lines if line.condition.is_wrong]
    old = [line for line in lines if line.why_old is not None]
    text = (
        f"{len(lines)} streams, {len(wrong)} to look at"
        if len(lines) != 1
        else f"1 stream, {len(wrong)} to look at"
    )
    if wrong:
        text += ": " + ", ".join(f"{line.name} {line.condition.word}" for line in wrong[:_NAMED])
        text += f" and {len(wrong) - _NAMED} more" if len(wrong) > _NAMED else ""
    return text + (f"; {len(old)} without a new reading" if old else "")
