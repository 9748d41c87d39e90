"""Erasures of records by values of a column, as the branches record them.

An erasure covers the records that Kafka had accepted when it was requested, which are before
`ends`. So both layers decide alike about a record, whenever they read it. The ledger has keyed
hashes of the values, and the places (partition and offset) of erased dead letters.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial

from anabranch.common.json_values import parse, read_property, to_json
from anabranch.offsets.position import Offsets, Ranges, clip

ERASURES = "anabranch.erasures"
_EVERYTHING = 2**62
_NEVER = datetime.min.replace(tzinfo=UTC)


@dataclass(frozen=True)
class Erasure:
    """The erasure of records by values of `column`, requested `at`, to be complete by `until`.

    It covers the records of hours before `since`, and records before `ends` in the log of
    `topic_id`. `rows`: the number of the ledger's rows about it, the oldest about the hour
    `first`. `places`: by hour, the number of places of dead letters in these rows. `is_lost`: the
    ledger lost some of them. `changed`: when records were last removed from a
    branch. `done`: when none was left. Times are UTC.
    """

    id: str
    column: str
    at: datetime
    until: datetime
    since: str
    topic_id: str
    ends: Offsets
    rows: int = 0
    first: str | None = None
    places: Mapping[str, int] = field(default_factory=dict)
    is_lost: bool = False
    changed: datetime | None = None
    done: datetime | None = None

    @property
    def mark(self) -> str:
        """The mark of rows that were staged with the erasure; it changes when places are added."""
        # Decision 51: rows that were staged before places were added have another mark, and are
        # staged again.
        return f"{self.id}:{sum(self.places.values())}"

    def covered(self, hour: str, topic_id: str, ranges: Ranges) -> Ranges:
        """Return the part of an hour's `ranges` in a log that the erasure covers."""
        return clip(ranges, {p: self.offsets(hour, topic_id, p) for p in ranges})

    def offsets(self, hour: str, topic_id: str, partition: int) -> tuple[int, int]:
        """Return the range `[start, end)` of a partition that the erasure covers in an hour of a
        log. A log that was left may have had partitions that the position's log does not have."""
        if hour < self.since:
            return 0, _EVERYTHING
        return 0, self.ends.get(partition, 0) if topic_id == self.topic_id else 0


@dataclass(frozen=True)
class Erasures:
    """All erasures of a stream whose records a layer may read again, ordered by id."""

    all: tuple[Erasure, ...] = ()

    def of(self, id: str) -> Erasure | None:
        return next((one for one in self.all if one.id == id), None)

    def __getitem__(self, id: str) -> Erasure:
        """Return the erasure with this id. Raises KeyError."""
        return {one.id: one for one in self.all}[id]

    def covering(self, hour: str, topic_id: str, ranges: Ranges) -> tuple[Erasure, ...]:
        """Return the erasures that cover a part of an hour's `ranges` in a log."""
        return tuple(one for one in self.all if one.covered(hour, topic_id, ranges))

    def marks(self, hour: str, topic_id: str, ranges: Ranges) -> frozenset[str]:
        """Return the marks with which rows of an hour's `ranges` must be staged."""
        return frozenset(one.mark for one in self.covering(hour, topic_id, ranges))

    def plus(self, erasure: Erasure) -> Erasures:
        """Return the erasures with this one, in place of its earlier state. Pure."""
        others = (one for one in self.all if one.id != erasure.id)
        return Erasures(tuple(sorted((*others, erasure), key=lambda one: one.id)))

    @property
    def changed(self) -> datetime | None:
        """The time (UTC) when records were last removed from a branch; None if never."""
        return max((one.changed for one in self.all if one.changed is not None), default=None)

    def to_json(self) -> str:
        return json.dumps(to_json(self.all), separators=(",", ":"))

    @staticmethod
    def from_properties(properties: Mapping[str, str]) -> Erasures:
        return Erasures(
            read_property(properties, ERASURES, partial(parse, tuple[Erasure, ...]), "[]")
        )

    @staticmethod
    def of_branches(branches: Iterable[Mapping[str, str]]) -> Erasures:
        """Return the most advanced state of each erasure on any branch. A branch that was rolled
        back has an older one."""
        found = Erasures()
        for one in (one for branch in branches for one in Erasures.from_properties(branch).all):
            known = found.of(one.id)
            if known is None or _extent(one) > _extent(known):
                found = found.plus(one)
        return found


def _extent(erasure: Erasure) -> tuple[int, bool, datetime]:
    return sum(erasure.places.values()), erasure.done is not None, erasure.changed or _NEVER
