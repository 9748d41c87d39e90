"""Erasures: which records were erased by the values of a column, as far as each branch records it.

An erasure is of the records that Kafka had accepted when it was requested: those before `ends`. So
both layers judge a record alike, whenever they read it. The ledger has keyed hashes of the values,
and the places of erased dead letters.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from anabranch.offsets.position import Offsets, Ranges, clip, from_keys, to_keys

ERASURES = "anabranch.erasures"
_EVERYTHING = 2**62
_NEVER = datetime.min.replace(tzinfo=UTC)


@dataclass(frozen=True)
class Erasure:
    """The erasure of rows by values of `column`, requested `at`, of which nothing is to be left by
    `until`.

    It is of the records of hours before `since`, and of later ones before `ends` in the log of
    `topic_id`. `places`: how often places of dead letters were added. `changed`: when records last
    left a branch. `done`: when none was left.
    """

    id: str
    column: str
    at: datetime
    until: datetime
    since: str
    topic_id: str
    ends: Offsets
    places: int = 0
    changed: datetime | None = None
    done: datetime | None = None

    @property
    def mark(self) -> str:
        """What rows are staged by: it changes when places are added."""
        return f"{self.id}:{self.places}"

    def covered(self, hour: str, topic_id: str, ranges: Ranges) -> Ranges:
        """The part of an hour's `ranges` in a log that the erasure is of."""
        return clip(ranges, {p: self.offsets(hour, topic_id, p) for p in ranges})

    def offsets(self, hour: str, topic_id: str, partition: int) -> tuple[int, int]:
        """The offsets of a partition that the erasure is of, in an hour of a log. A log that was
        left may have had partitions that the position's does not have."""
        if hour < self.since:
            return 0, _EVERYTHING
        return 0, self.ends.get(partition, 0) if topic_id == self.topic_id else 0

    def as_dict(self) -> dict[str, Any]:
        times = {
            name: t.isoformat()
            for name in ("at", "until", "changed", "done")
            if (t := getattr(self, name))
        }
        return {
            "id": self.id,
            "column": self.column,
            **times,
            "since": self.since,
            "topic_id": self.topic_id,
            "ends": to_keys(self.ends),
            "places": self.places,
        }

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> Erasure:
        times = {
            n: datetime.fromisoformat(data[n])
            for n in ("at", "until", "changed", "done")
            if n in data
        }
        return Erasure(**{**data, **times, "ends": from_keys(data["ends"])})


@dataclass(frozen=True)
class Erasures:
    """All erasures of a stream whose records a layer may read again, in the order of their ids."""

    all: tuple[Erasure, ...] = ()

    def of(self, id: str) -> Erasure | None:
        """The erasure with an id; None where there is none."""
        return next((one for one in self.all if one.id == id), None)

    def __getitem__(self, id: str) -> Erasure:
        """The erasure with an id. Raises KeyError."""
        return {one.id: one for one in self.all}[id]

    def covering(self, hour: str, topic_id: str, ranges: Ranges) -> tuple[Erasure, ...]:
        """The erasures of records in an hour's `ranges` of a log."""
        return tuple(one for one in self.all if one.covered(hour, topic_id, ranges))

    def marks(self, hour: str, topic_id: str, ranges: Ranges) -> frozenset[str]:
        """What the rows of an hour's `ranges` are to be staged by."""
        return frozenset(one.mark for one in self.covering(hour, topic_id, ranges))

    def plus(self, erasure: Erasure) -> Erasures:
        """With an erasure, in place of an earlier state of it. Pure."""
        others = (one for one in self.all if one.id != erasure.id)
        return Erasures(tuple(sorted((*others, erasure), key=lambda one: one.id)))

    @property
    def changed(self) -> datetime | None:
        """When records last left a branch; None: never."""
        return max((one.changed for one in self.all if one.changed is not None), default=None)

    def to_json(self) -> str:
        return json.dumps([one.as_dict() for one in self.all], separators=(",", ":"))

    @staticmethod
    def from_properties(properties: Mapping[str, str]) -> Erasures:
        return Erasures(tuple(map(Erasure.from_dict, json.loads(properties.get(ERASURES, "[]")))))

    @staticmethod
    def of_branches(branches: Iterable[Mapping[str, str]]) -> Erasures:
        """What the branches record together: of each erasure the furthest state. One that was set
        back has an older one."""
        found = Erasures()
        for one in (one for branch in branches for one in Erasures.from_properties(branch).all):
            known = found.of(one.id)
            if known is None or _extent(one) > _extent(known):
                found = found.plus(one)
        return found


def _extent(erasure: Erasure) -> tuple[int, bool, datetime]:
    return erasure.places, erasure.done is not None, erasure.changed or _NEVER
