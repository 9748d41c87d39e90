"""Shares of an hour's records that a stream allows, such as dead letters (`quality.max_dead`)."""

from __future__ import annotations

from dataclasses import dataclass

from anabranch.protocol.ledger_row import HourAccount

LEAST = 20
"""Fewer records of an hour than these are never too many, unless the stream allows none."""


@dataclass(frozen=True)
class HourShare:
    """Dead letters among an hour's records."""

    dead: int
    records: int

    @staticmethod
    def of(account: HourAccount) -> HourShare | None:
        """Return the share in an hour's account; None without records, or without counts."""
        terms = (account.good, account.dead, account.duplicate)
        dead = account.dead or 0
        return HourShare(dead, sum(n or 0 for n in terms)) if any(terms) else None

    @property
    def share(self) -> float:
        return self.dead / self.records if self.records else 0.0

    @property
    def words(self) -> str:
        return f"{self.dead:,} of {self.records:,} records ({percent(self.share)})"


def is_too_many(count: int, records: int, most: float, least: int = LEAST) -> bool:
    """Return True if `count` of an hour's records are more than the share `most`. Pure."""
    # Decision 64: one bad record in a quiet night must not refuse an hour; 0 % allows none at all.
    return count > most * records and (count >= least or not most)


def objection(what: str, count: int, records: int, most: float, least: int = LEAST) -> str | None:
    """Return an objection to an hour, or a sample, with too many records of a kind; None if there
    is none. Fewer than `least` are never too many, unless the stream allows none. Pure."""
    if not is_too_many(count, records, most, least):
        return None
    return (
        f"{what}: expected at most {percent(most)} of {records:,} records, found {count:,} "
        f"({percent(count / records)})"
    )


def percent(share: float) -> str:
    """Return a share as text, such as `5 %` or `0.3 %`; never 0 % or 100 % for a part. Pure."""
    value = 100 * share
    if 0 < value < 0.1:
        return "less than 0.1 %"
    if 99.9 < value < 100:
        return "more than 99.9 %"
    return f"{value:.1f}".removesuffix(".0") + " %"
