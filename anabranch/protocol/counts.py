"""An hour's account in numbers, for reports. The fields are the keys of the JSON, in this order."""

from __future__ import annotations

from dataclasses import dataclass

from anabranch.offsets.hours import Cut
from anabranch.offsets.position import Ranges
from anabranch.protocol.ledger_row import HourAccount


@dataclass(frozen=True)
class Counts:
    """An hour's account in numbers; None if the ledger has no value. JSON has `erased` and
    `conflicts`, the duplicates with other content, only if they are not 0."""

    offsets: int | None
    good: int | None
    dead: int | None
    duplicate: int | None
    gap: int | None
    erased: int | None = None
    conflicts: int | None = None

    @staticmethod
    def of(account: HourAccount) -> Counts:
        return Counts(
            account.offsets,
            account.good,
            account.dead,
            account.duplicate,
            account.gap,
            account.erased,
            account.conflicts,
        )

    def as_dict(self) -> dict[str, int | None]:
        rare = {"erased": self.erased, "conflicts": self.conflicts}
        return {name: getattr(self, name) for name in COUNTS} | {
            name: number for name, number in rare.items() if number
        }

    @property
    def cells(self) -> list[object]:
        return [getattr(self, name) for name in COUNTS]


TERMS = ("good", "dead", "duplicate", "gap")
COUNTS = ("offsets", *TERMS)


def accounted(account: HourAccount | Counts) -> int | None:
    """Return the number of offsets that the terms and erased records account for; None if a term is
    not recorded. Pure."""
    terms = [getattr(account, name) for name in TERMS]
    return sum(terms) + (account.erased or 0) if None not in terms else None


def ranges_of(cut: Cut | None) -> Ranges | None:
    """Return a cut's ranges, ordered by partition."""
    return dict(sorted(cut.ranges.items())) if cut is not None else None
