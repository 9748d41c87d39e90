"""Expired hours: retention has removed their rows from every branch, because the stream's file
keeps rows for a limited time.

Each branch records them, so that a branch that is rolled back or recreated restores none of them.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from functools import partial

from anabranch.common.json_values import parse, read_property, to_json
from anabranch.offsets.hours import hours_between, shift, spans_of

EXPIRED = "anabranch.expired"


@dataclass(frozen=True)
class Expired:
    """All hours before `before`, except the spans `kept` (first and last included, in order). `at`:
    the time (UTC) of the last expiry; older snapshots may have rows of expired hours."""

    before: str = ""
    kept: tuple[tuple[str, str], ...] = ()
    at: datetime | None = None

    def __contains__(self, hour: str) -> bool:
        if hour >= self.before:
            return False
        at = bisect_right(self.kept, (hour, "\U0010ffff")) - 1
        return at < 0 or self.kept[at][1] < hour

    def first_kept(self, first: str) -> str:
        """Return the oldest hour that has not expired, of a stream that begins with `first`.
        Pure."""
        return self.kept[0][0] if self.kept else max(self.before, first)

    def count(self, first: str) -> int:
        """Return the number of expired hours of a stream that begins with `first`. Pure."""
        if self.before <= first:
            return 0
        kept = sum(len(hours_between(one, shift(last, 1))) for one, last in self.kept)
        return len(hours_between(first, self.before)) - kept

    def plus(self, hours: Collection[str], first: str, at: datetime) -> Expired:
        """Return the expired hours with `hours` added, of a stream that begins with `first`.
        Pure."""
        known = self.before or first
        before = max(known, shift(max(hours), 1))
        kept = {hour for one, last in self.kept for hour in hours_between(one, shift(last, 1))}
        kept |= set(hours_between(known, before))
        return Expired(before, tuple(spans_of(kept - set(hours))), at)

    def to_json(self) -> str:
        return json.dumps(to_json(self), separators=(",", ":"))

    @staticmethod
    def from_properties(properties: Mapping[str, str]) -> Expired:
        return read_property(properties, EXPIRED, partial(parse, Expired))

    @staticmethod
    def of_branches(branches: Iterable[Mapping[str, str]]) -> Expired:
        """Return the most expired hours that a branch records. A branch that was rolled back has an
        older value, and the number of expired hours only grows."""
        return max(map(Expired.from_properties, branches), key=Expired._extent)

    def _extent(self) -> tuple[str, int, float]:
        kept = sum(len(hours_between(first, last)) + 1 for first, last in self.kept)
        return self.before, -kept, self.at.timestamp() if self.at is not None else 0.0
