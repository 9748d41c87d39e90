"""The calendar of a stream's hours: one month with a row for each day, and links to months that
need attention. It is built from the stream's status alone, which lists only hours that are not
accepted, so it stays small over years."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from anabranch.common.errors import ConfigurationError
from anabranch.offsets.hours import end_of, hour_of, start_of
from anabranch.operations.reports.status import StreamStatus, unexplained_words
from anabranch.protocol.ledger_row import Layer

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
