"""The calendar of a stream's hours, and an hour's page: the output of `explain --rows`, `history`
and `dead-letters` in one place.

The calendar is one month with a row for each day, and links to months that need attention. It is
built from the stream's status alone, which lists only hours that are not accepted, so it stays
small over years.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

from anabranch.common.errors import ConfigurationError, Refused
from anabranch.common.output import text
from anabranch.job import Job
from anabranch.offsets.hours import end_of, hour_of, start_of
from anabranch.operations.reports import dead_letters
from anabranch.operations.reports.dead_letters import Compared, DeadLetters
from anabranch.operations.reports.explain import HourFacts, explain, explain_sentences
from anabranch.operations.reports.status import StreamStatus, unexplained_words
from anabranch.protocol.decisions import DecisionFacts, decisions
from anabranch.protocol.ledger_row import Layer, QualityResult, accounted
from serving_layer.layer_diff import Sample

# Letter of each state; the states are those of `anabranch explain`.
LETTERS = {
    "accepted": "A",
    "expired": "X",
    "refused": "R",
    "sealed": "S",
    "ended": "E",
    "open": "O",
}
HELD = "⚑"
MARKS: dict[Layer, str] = {"batch": "■", "speed": "△"}
_MONTH = "%Y-%m"


@dataclass(frozen=True)
class Cell:
    """An hour of the calendar. `label`: its letter, mark and colour in words. `is_held`: an
    operator keeps it beyond its time."""

    hour: str
    state: str
    letter: str
    layer: Layer
    mark: str
    attention: bool
    label: str
    is_held: bool = False


@dataclass(frozen=True)
class Day:
    """The 24 hours of a day; None for hours that the stream does not have."""

    date: str
    weekday: str
    cells: Sequence[Cell | None]


@dataclass(frozen=True)
class Month:
    """A month of the calendar, and the neighbouring months if the stream has any. `years`: all
    months by year, each with how many of its hours are not accepted or need attention for another
    reason."""

    month: str
    days: Sequence[Day]
    earlier: str | None
    later: str | None
    years: Sequence[tuple[str, Sequence[tuple[str, int]]]]


def month_of(text: str) -> str:
    """Return `text`, a month such as `2026-11`. Raises ConfigurationError for any other text."""
    try:
        month = datetime.strptime(text, _MONTH).strftime(_MONTH)
    except ValueError:
        month = None
    if month != text:
        raise ConfigurationError(f"month: expected a month such as 2026-11, found {text!r}")
    return month


def calendar_month(view: StreamStatus, month: str | None, as_of: datetime) -> Month:
    """Return a month of a stream's hours, by default the newest. Pure."""
    # After an adoption the open hour may be in the future.
    first, last = view.first_hour, max(view.open_hour, hour_of(as_of))
    month = min(max(month or last[:7], first[:7]), last[:7])
    waiting = dict.fromkeys(view.backlog, "sealed") | dict.fromkeys(view.refused, "refused")
    begin = datetime.strptime(month, _MONTH).replace(tzinfo=UTC)
    day, days = begin, []
    while day.strftime(_MONTH) == month and hour_of(day)[:10] <= last[:10]:
        if hour_of(day)[:10] >= first[:10]:
            days.append(_day(view, waiting, day, last, as_of))
        day += timedelta(days=1)
    before, after = (
        (begin - timedelta(days=1)).strftime(_MONTH),
        (begin + timedelta(days=31)).strftime(_MONTH),
    )
    return Month(
        month=month,
        days=days,
        earlier=before if before >= first[:7] else None,
        later=after if after <= last[:7] else None,
        years=_years(view, last),
    )


def _day(
    view: StreamStatus, waiting: Mapping[str, str], day: datetime, last: str, as_of: datetime
) -> Day:
    named = [hour_of(day + timedelta(hours=h)) for h in range(24)]
    cells = [
        _cell(view, waiting, h, as_of) if view.first_hour <= h <= last else None for h in named
    ]
    return Day(day.strftime("%Y-%m-%d"), day.strftime("%a"), cells)


def _cell(view: StreamStatus, waiting: Mapping[str, str], hour: str, as_of: datetime) -> Cell:
    state = _state(view, waiting, hour, as_of)
    # Batch serves accepted hours that the status does not list.
    layer = view.hours.get(hour, "batch" if state in ("accepted", "expired") else "speed")
    notes = [f"{hour}: {state}" + (f", served by {layer}" if state != "expired" else "")]
    if (left := view.unexplained.get(hour)) is not None:
        notes.append(f"nothing explains {unexplained_words(left)}")
    if (lost := view.lost.get(hour)) is not None:
        notes.append(f"{lost} offsets lost to retention")
    attention, hold = len(notes) > 1, next((hold for hold in view.holds if hour in hold), None)
    if hold is not None:
        notes.append(hold.reason)
    mark = MARKS[layer] if state != "expired" else ""
    return Cell(
        hour, state, LETTERS[state], layer, mark, attention, "; ".join(notes), hold is not None
    )


def _state(view: StreamStatus, waiting: Mapping[str, str], hour: str, as_of: datetime) -> str:
    if hour >= view.open_hour:
        return "ended" if end_of(hour) <= as_of else "open"
    return waiting.get(hour) or ("expired" if hour in view.expired else "accepted")


def _years(view: StreamStatus, last: str) -> list[tuple[str, list[tuple[str, int]]]]:
    """Return the stream's months by year, newest year first."""
    remarkable = Counter(
        h[:7] for h in {*view.backlog, *view.to_seal, *view.unexplained, *view.lost}
    )
    years: dict[str, list[tuple[str, int]]] = {}
    month = start_of(f"{view.first_hour[:7]}-01T00")
    while (name := month.strftime(_MONTH)) <= last[:7]:
        years.setdefault(name[:4], []).append((name, remarkable[name]))
        month = (month + timedelta(days=31)).replace(day=1)
    return sorted(years.items(), reverse=True)


_SAMPLES = 3  # samples of each kind of difference and each reason of a dead letter
_DUPLICATES = 20
_LONGEST = 300  # maximum characters of a value


@dataclass(frozen=True)
class HourRows:
    """The data about an hour from its data files. `comparison_unavailable`: why differences and
    duplicates cannot be shown; None if they are."""

    letters: DeadLetters
    compared: Compared | None
    comparison_unavailable: str | None


def read_rows(job: Job, hour: str) -> HourRows:
    """Read the dead letters, and compare the layers if the hour is accepted. Raises Transient when
    the lake does not answer."""
    letters = dead_letters.letters(job, (hour, hour), _SAMPLES)
    try:
        return HourRows(letters, dead_letters.compare(job, hour, _SAMPLES, _DUPLICATES), None)
    except Refused as refusal:
        return HourRows(letters, None, str(refusal))


@dataclass(frozen=True)
class HourRecord:
    """The data about an hour from ledger and snapshots. `balance`: each term of its account, in
    total and by partition; empty without counts. `closes`: None if the ledger row is incomplete.
    `expectations`: the gate's results with their verdict, failures first."""

    facts: HourFacts
    sentences: Sequence[tuple[str, str]]
    decisions: Sequence[DecisionFacts]
    balance: Sequence[tuple[str, int, Sequence[int]]]
    closes: bool | None
    expectations: Sequence[tuple[str, Mapping[str, Any]]]


def read_record(job: Job, hour: str, now: datetime) -> HourRecord:
    """Read the ledger and the snapshots. Raises Transient when the lake is unreachable."""
    facts = explain(job, hour, now)
    total, offsets = accounted(facts.counts), facts.counts.offsets
    quality = facts.quality or QualityResult(True)
    groups = {
        "failed": quality.failed,
        "warning": quality.warnings,
        "not applicable": quality.not_applicable,
        "met": quality.met,
    }
    return HourRecord(
        facts=facts,
        sentences=explain_sentences(facts),
        decisions=decisions(job.lake, job.stream, hour),
        balance=balance_of(facts),
        closes=None if total is None or offsets is None else total == offsets,
        expectations=[(verdict, entry) for verdict, of in groups.items() for entry in of],
    )


def balance_of(facts: HourFacts) -> list[tuple[str, int, list[int]]]:
    """Return the terms of the account, in total and by partition; none without counts. Pure."""
    counts = facts.counts
    if counts.good is None:
        return []
    each = [account for _, account in sorted((facts.partitions or {}).items())]
    terms = [
        ("good", counts.good, [a.good for a in each]),
        ("dead", counts.dead or 0, [a.dead for a in each]),
    ]
    duplicate, conflicts = counts.duplicate or 0, counts.conflicts or 0
    others = [a.conflicts or 0 for a in each]
    equal = [a.duplicate - n for a, n in zip(each, others, strict=True)]
    terms.append(("duplicate", duplicate - conflicts, equal))
    if conflicts:
        terms.append(("duplicate, other content", conflicts, others))
    terms += [
        (f"gap: {name}", n, [a.gaps.get(name, 0) for a in each]) for name, n in facts.gaps.items()
    ]
    if not facts.gaps:
        terms.append(("gap", counts.gap or 0, [a.gap for a in each]))
    if counts.erased:
        terms.append(("erased", counts.erased, [a.erased or 0 for a in each]))
    return terms


def sample_columns(sample: Sample) -> list[tuple[str, str, str]]:
    """Return the columns of a row in which the layers differ, with their values in speed and in
    batch."""
    names = sample.columns or [
        n for n in (sample.speed or sample.batch or {}) if not n.startswith("kafka_")
    ]
    one, other = sample.speed or {}, sample.batch or {}
    return [(n, short(one.get(n)), short(other.get(n))) for n in names]


def short(value: object) -> str:
    line = text(value)
    return line if len(line) <= _LONGEST else line[:_LONGEST] + "…"
