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
from anabranch.operations.reports.dead_letters import DeadLetters, HourDifference, HourDuplicates
from anabranch.operations.reports.explain import HourFacts, explain, explain_sentences
from anabranch.operations.reports.status import StreamStatus, unexplained_words
from anabranch.protocol.decisions import DecisionFacts, decisions
from anabranch.protocol.ledger_row import Entries, Layer, accounted
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
class MonthLink:
    """A month, and how many of its hours are not accepted or need attention for another reason."""

    month: str
    remarkable: int


@dataclass(frozen=True)
class Month:
    """A month of the calendar, and the neighbouring months if the stream has any."""

    month: str
    days: Sequence[Day]
    earlier: str | None
    later: str | None
    years: Sequence[tuple[str, Sequence[MonthLink]]]


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


def _years(view: StreamStatus, last: str) -> list[tuple[str, list[MonthLink]]]:
    """Return the stream's months by year, newest year first."""
    remarkable = Counter(
        h[:7] for h in {*view.backlog, *view.to_seal, *view.unexplained, *view.lost}
    )
    years: dict[str, list[MonthLink]] = {}
    month = start_of(f"{view.first_hour[:7]}-01T00")
    while (name := month.strftime(_MONTH)) <= last[:7]:
        years.setdefault(name[:4], []).append(MonthLink(name, remarkable[name]))
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
    difference: HourDifference | None
    duplicates: HourDuplicates | None
    comparison_unavailable: str | None


def read_rows(job: Job, hour: str) -> HourRows:
    """Read the dead letters, and compare the layers if the hour is accepted. Raises Transient when
    the lake does not answer."""
    letters = dead_letters.letters(job, (hour, hour), _SAMPLES)
    try:
        difference = dead_letters.difference(job, hour, _SAMPLES)
        return HourRows(letters, difference, dead_letters.duplicates(job, hour, _DUPLICATES), None)
    except Refused as refusal:
        return HourRows(letters, None, None, str(refusal))


@dataclass(frozen=True)
class BalanceLine:
    """A term of the hour's account, in total and by partition."""

    term: str
    total: int
    partitions: Sequence[int]


@dataclass(frozen=True)
class BalanceTable:
    """The hour's account; `closes` is None if the ledger row is incomplete."""

    partitions: Sequence[int]
    lines: Sequence[BalanceLine]
    offsets: int | None
    closes: bool | None


@dataclass(frozen=True)
class ExpectationLine:
    verdict: str
    type: str
    about: str
    severity: str
    observed: str
    message: str


@dataclass(frozen=True)
class SampleLine:
    """A row in which the layers differ. `columns`: (name, value in speed, value in batch)."""

    kind: str
    partition: int
    offset: int
    columns: Sequence[tuple[str, str, str]]


@dataclass(frozen=True)
class HourRecord:
    """The data about an hour from ledger and snapshots."""

    facts: HourFacts
    sentences: Sequence[tuple[str, str]]
    decisions: Sequence[DecisionFacts]
    balance: BalanceTable | None
    expectations: Sequence[ExpectationLine]


def read_record(job: Job, hour: str, now: datetime) -> HourRecord:
    """Read the ledger and the snapshots. Raises Transient when the lake is unreachable."""
    facts = explain(job, hour, now)
    return HourRecord(
        facts=facts,
        sentences=explain_sentences(facts),
        decisions=decisions(job.lake, job.stream, hour),
        balance=balance_of(facts),
        expectations=expectation_lines(facts),
    )


def balance_of(facts: HourFacts) -> BalanceTable | None:
    """Return the account as a table; None without counts. Pure."""
    counts = facts.counts
    if counts.good is None:
        return None
    accounts = dict(sorted((facts.partitions or {}).items()))
    each = list(accounts.values())
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
    total = accounted(counts)
    closes = total == counts.offsets if total is not None and counts.offsets is not None else None
    return BalanceTable(
        tuple(accounts), [BalanceLine(*term) for term in terms], counts.offsets, closes
    )


def expectation_lines(facts: HourFacts) -> list[ExpectationLine]:
    """Return the gate's results, failures first. Pure."""
    quality = facts.quality
    if quality is None:
        return []
    groups: tuple[tuple[str, Entries], ...] = (
        ("failed", quality.failed),
        ("warning", quality.warnings),
        ("not applicable", quality.not_applicable),
        ("met", quality.met),
    )
    return [_expectation(verdict, entry) for verdict, entries in groups for entry in entries]


def _expectation(verdict: str, entry: Mapping[str, Any]) -> ExpectationLine:
    kwargs = entry.get("kwargs") or {}
    return ExpectationLine(
        verdict=verdict,
        type=str(entry.get("type", "")),
        about=", ".join(f"{name} {_short(value)}" for name, value in kwargs.items()),
        severity=str(entry.get("severity", "")),
        observed=_short(entry.get("observed")),
        message=str(entry.get("message") or entry.get("reason") or ""),
    )


def sample_line(sample: Sample) -> SampleLine:
    names = sample.columns or [
        n for n in (sample.speed or sample.batch or {}) if not n.startswith("kafka_")
    ]
    one, other = sample.speed or {}, sample.batch or {}
    columns = [(n, _short(one.get(n)), _short(other.get(n))) for n in names]
    return SampleLine(sample.kind, sample.partition, sample.offset, columns)


def _short(value: object) -> str:
    line = text(value)
    return line if len(line) <= _LONGEST else line[:_LONGEST] + "…"
