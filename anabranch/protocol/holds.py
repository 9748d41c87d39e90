"""Holds: hours that an operator keeps beyond their retention, until the hold is released.

Each branch records all holds with the time of the last change; the newest record counts, so a
branch that is rolled back loses none.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import TYPE_CHECKING

from anabranch.common.errors import ConfigurationError
from anabranch.common.json_values import JsonFields, parse, read_property, to_json
from anabranch.offsets.hours import hour_of, is_hour, shift, span_of

if TYPE_CHECKING:
    from anabranch.protocol.acts import Act

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
    """All holds of a stream, and the time (UTC) of their last change; None if they never
    changed."""

    holds: tuple[Hold, ...] = ()
    changed: datetime | None = None

    def of(self, hour: str) -> Hold | None:
        """Return the first hold of an hour; None if it is not held."""
        return next((hold for hold in self.holds if hour in hold), None)

    def plus(self, hold: Hold) -> Holds:
        return Holds((*self.holds, hold), hold.at)

    def without(self, first: str, last: str, at: datetime) -> Holds:
        """Return the holds without the hours `first` to `last`; the rest of each hold, before and
        after them, stays. Pure."""
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
        return json.dumps(to_json(self))

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
