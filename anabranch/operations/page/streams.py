"""The page's table of streams: one row with one state for each stream, in sections of groups and
families, and one line for a service that does not answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime

from anabranch.common.arrays import grouped
from anabranch.common.output import name_text
from anabranch.job import groups_of
from anabranch.operations.finding import Issue
from anabranch.operations.reports import status
from anabranch.operations.reports.reading import Readings, TimedValue
from anabranch.operations.reports.status import StreamStatus
from anabranch.protocol.ledger_row import percent
from anabranch.protocol.watermarks import complete_through_all

_NAMED = 3  # hours or fields listed in a note
_SERVICES = {"s3": "S3", "kafka": "Kafka"}


@dataclass(frozen=True)
class Condition:
    """A stream's state: a word, a symbol that is legible without colour, and whether it needs
    attention. `why` explains it, and `command` is what to run next; empty if there is nothing."""

    word: str
    mark: str
    is_wrong: bool
    why: str = ""
    command: str = ""


@dataclass(frozen=True)
class StreamLine:
    """A row of the table; unknown values are None. `dead`: the share of dead letters, empty without
    records; `duplicates`: those of the newest accepted hour. `why_old`: why there is no newer
    reading; `service`: the service that did not answer; `drift`: a note, or empty."""

    name: str
    condition: Condition
    freshness: int | None = None
    lag: int | None = None
    duplicates: int | None = None
    last_publish: datetime | None = None
    complete_through: str | None = None
    refused: Sequence[str] = ()
    as_of: datetime | None = None
    why_old: str | None = None
    service: str | None = None
    drift: str = ""
    dead: str = ""

    @property
    def command(self) -> str:
        """Return the next command; empty if there is none."""
        return self.condition.command or "".join(self.drift.split("`")[1:2])


# The word and the symbol of each fault that is a stream's state; another is a note.
_WORDS = {
    Issue.TOPIC_MISSING: ("no topic", "✕"),
    Issue.TOPIC_RECREATED: ("log cut off", "✕"),
    Issue.UNEXPLAINED: ("differs", "≠"),
    Issue.LATE: ("late", "!"),
    Issue.REFUSED: ("refused", "✕"),
    Issue.DEAD_LETTERS: ("dead letters", "!"),
    Issue.BACKLOG: ("waiting", "…"),
    Issue.MAINTENANCE: ("maintenance", "!"),
    Issue.OVERDUE: ("overdue", "!"),
}
_BEFORE_RETENTION = (Issue.TOPIC_MISSING, Issue.TOPIC_RECREATED, Issue.UNEXPLAINED, Issue.LATE)


def classify_stream(view: StreamStatus, as_of: datetime) -> Condition:
    """Return a stream's most important condition: what must not wait, by the run-books, before what
    may wait until the morning. Pure."""
    name = view.stream
    fault = next((one for one in status.faults(view) if one.check in _WORDS), None)
    near = status.retention_reason(view, as_of) if not view.is_new else None
    if near is not None and (fault is None or fault.check not in _BEFORE_RETENTION):
        return Condition("retention near", "!", True, near, f"anabranch doctor {name}")
    if fault is not None:
        why = f"{fault.subject}: expected {fault.expected}, found {fault.found}"
        word, mark = _WORDS[fault.check]
        word = "recreated" if view.topic_recreated and word == "log cut off" else word
        return Condition(word, mark, True, why, fault.remedy)
    if view.is_new:
        why = f"no job has published yet, and {view.lag.offsets:,} offsets wait"
        return Condition("new", "○", view.late is not None, why, f"anabranch speed {name}")
    # Last: an hour's account keeps its loss for good, and would hide every later fault.
    if view.lost:
        why = f"retention deleted {sum(view.lost.values())} offsets of {_named(list(view.lost))}"
        command = f"anabranch explain {name} {max(view.lost)}"
        return Condition("lost offsets", "!", True, why, command)
    return Condition("in order", "✓", False)


def conflicts_note(view: StreamStatus) -> str:
    """Return the hour with most duplicates of other content; empty without one. Pure."""
    if not view.conflicts:
        return ""
    hour = max(view.conflicts, key=lambda h: view.conflicts[h])
    return (
        f"{view.conflicts[hour]:,} duplicates of {hour} have other content: "
        f"`anabranch explain {view.stream} {hour} --rows`"
    )


def drift_note(view: StreamStatus) -> str:
    """Return the newest accepted hour's unknown fields as text; empty without any. Pure."""
    if view.unknown is None or not view.unknown.fields:
        return ""
    names = [name_text(field.name) for field in view.unknown.fields]
    return f"the schema does not know {_named(names)}: `anabranch check {view.stream} --drift`"


def _named(names: Sequence[str]) -> str:
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + more


def stream_line(name: str, reading: TimedValue[Readings], why_old: str | None) -> StreamLine:
    """Return the row of a stream, from its newest reading, and why it is old. Pure."""
    failure = reading.failure
    service = failure.service if failure is not None else None
    if failure is not None and failure.is_new and reading.value is None:
        condition = Condition("new", "○", False, failure.reason, f"anabranch apply {name}")
        return StreamLine(name, condition)
    away = Condition("away", "✕", True, "", f"anabranch doctor {name}")
    if reading.value is None:
        unread = Condition("not read yet", "…", False)
        return StreamLine(
            name, away if why_old is not None else unread, why_old=why_old, service=service
        )
    view, share = reading.value.status, reading.value.status.running_dead_share
    condition = classify_stream(view, reading.value.at)
    if why_old is not None:
        condition = replace(away, why=f"{condition.word} at the last reading")
    counts = view.newest_counts
    return StreamLine(
        name=name,
        condition=condition,
        freshness=round(status.freshness_seconds(view, reading.value.at)),
        lag=view.lag.offsets,
        duplicates=counts.duplicate if counts is not None else None,
        last_publish=max((at for at in view.last_publish.values() if at is not None), default=None),
        complete_through=view.complete_through,
        refused=view.refused,
        as_of=reading.as_of,
        why_old=why_old,
        service=service,
        drift="; ".join(filter(None, (conflicts_note(view), drift_note(view)))),
        dead=percent(share.share) if share is not None else "",
    )


def outages(lines: Sequence[StreamLine]) -> dict[str, list[StreamLine]]:
    """Return the services that more than one stream lacks, with these streams. Pure."""
    by_service = grouped(
        (line for line in lines if line.why_old is not None), lambda line: line.service
    )
    return {
        _SERVICES.get(name, f"The {name}"): away
        for name, away in by_service.items()
        if name is not None and len(away) > 1
    }


@dataclass(frozen=True)
class Section:
    """The rows of a group, of a family, or of neither (`title` is empty). `complete_through`: the
    last hour that is complete in every stream of a group; None if a stream has none or was not
    read. `behind`: the streams with the oldest such hour, if others are ahead. `unknown`: the
    streams without a reading."""

    title: str
    lines: Sequence[StreamLine]
    complete_through: str | None = None
    behind: Sequence[str] = ()
    unknown: Sequence[str] = ()

    @property
    def wrong(self) -> int:
        return sum(line.condition.is_wrong for line in self.lines)

    @property
    def has_own_cause(self) -> bool:
        """Whether a stream needs attention for another reason than a service that is down."""
        return any(line.condition.is_wrong and line.service is None for line in self.lines)


def sections_of(
    lines: Sequence[StreamLine], groups: Mapping[str, str | None], families: Mapping[str, str]
) -> list[Section]:
    """Return the table's sections: the streams of neither kind, the groups, and the families of the
    others. A stream whose file cannot be read counts for every group's completeness. An old reading
    counts too, because a complete hour stays complete. Pure."""
    members = groups_of(groups)
    rest: list[StreamLine] = []
    of_groups = {group: list[StreamLine]() for group in members}
    of_families: dict[str, list[StreamLine]] = {}
    for line in lines:
        group, family = groups.get(line.name), families.get(line.name)
        if group in of_groups:
            of_groups[group].append(line)
        elif family is not None:
            of_families.setdefault(family, []).append(line)
        else:
            rest.append(line)
    by_name = {line.name: line for line in lines}
    made = [
        _group(group, of_groups[group], [by_name[name] for name in names if name in by_name])
        for group, names in members.items()
    ]
    made += [Section(f"family {name}", of_it) for name, of_it in sorted(of_families.items())]
    return [Section("", rest), *made] if rest or not made else made


def _group(group: str, own: Sequence[StreamLine], counted: Sequence[StreamLine]) -> Section:
    unknown = [line.name for line in counted if line.as_of is None]
    through = None
    if not unknown:
        through = complete_through_all([line.complete_through for line in counted])
    hours = {line.name: line.complete_through or "" for line in counted if line.as_of is not None}
    oldest, newest = min(hours.values(), default=""), max(hours.values(), default="")
    behind = [name for name, hour in hours.items() if hour == oldest < newest]
    return Section(f"group {group}", own, through, behind, unknown)


def summary_words(lines: Sequence[StreamLine]) -> str:
    """Return a sentence about all streams, which a screen reader announces. Pure."""
    wrong = [line for line in lines if line.condition.is_wrong]
    old = [line for line in lines if line.why_old is not None]
    text = f"{len(lines)} stream{'' if len(lines) == 1 else 's'}, {len(wrong)} to look at"
    if wrong:
        text += f": {_named([f'{line.name} {line.condition.word}' for line in wrong])}"
    return text + (f"; {len(old)} without a new reading" if old else "")
