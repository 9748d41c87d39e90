"""Holds: hours that an operator keeps beyond their time, until the hold is released.

Each branch records all holds with the moment of the last change; the newest record counts, so a
branch that is set back loses none.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

from anabranch.common.errors import ConfigurationError
from anabranch.offsets.hours import hour_of, is_hour, shift, span_of

if TYPE_CHECKING:
    from anabranch.protocol.acts import Act

HOLDS = "anabranch.holds"


@dataclass(frozen=True)
class Hold:
    """The hours `first` to `last`, both included, and by whom, when and why they are held."""

    first: str
    last: str
    by: str
    at: datetime
    why: str

    def __contains__(self, hour: str) -> bool:
        return self.first <= hour <= self.last

    @property
    def reason(self) -> str:
        """Why its hours stay, in words."""
        return f"kept by {self.by} since {self.at:%F %T} UTC: {self.why}"

    def as_dict(self) -> dict[str, Any]:
        return vars(self) | {"at": self.at.isoformat()}


@dataclass(frozen=True)
class Holds:
    """All holds of a stream, and when they changed last; None: never."""

    holds: tuple[Hold, ...] = ()
    changed: datetime | None = None

    def of(self, hour: str) -> Hold | None:
        """The first hold of an hour; None for an hour that is not held."""
        return next((hold for hold in self.holds if hour in hold), None)

    def plus(self, hold: Hold) -> Holds:
        """With one more. Pure."""
        return Holds((*self.holds, hold), hold.at)

    def without(self, first: str, last: str, at: datetime) -> Holds:
        """Without the hours `first` to `last`; the rest of each hold on either side of them stays.
        Pure."""
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
        changed = self.changed.isoformat() if self.changed is not None else None
        return json.dumps({"changed": changed, "holds": [hold.as_dict() for hold in self.holds]})

    @staticmethod
    def from_properties(properties: Mapping[str, str]) -> Holds:
        if HOLDS not in properties:
            return Holds()
        data = json.loads(properties[HOLDS])
        holds = (Hold(**(one | {"at": datetime.fromisoformat(one["at"])})) for one in data["holds"])
        return Holds(
            tuple(holds), datetime.fromisoformat(data["changed"]) if data["changed"] else None
        )

    @staticmethod
    def of_branches(branches: Iterable[Mapping[str, str]]) -> Holds:
        """The holds by the newest record of any branch."""
        never = datetime.min.replace(tzinfo=UTC)
        return max(map(Holds.from_properties, branches), key=lambda holds: holds.changed or never)


def new_hold(first: str, last: str, act: Act) -> Hold:
    """A hold by an operator's act, which has a reason."""
    return Hold(first, last, f"{act.user}@{act.host}", act.at, act.why or "")


def parse_hours(text: str) -> tuple[str, str]:
    """The first and the last of `2026-11-21T03`, `2026-11-21T03..2026-11-21T07`, or of a day (UTC)
    such as 2026-11-21. Raises ConfigurationError."""
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
    """Each hold in words. Pure."""
    return [
        f"{h.first if h.first == h.last else f'{h.first}..{h.last}'}: {h.reason}" for h in holds
    ]
