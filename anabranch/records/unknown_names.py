"""The names of unknown fields in a task's records: how many records have each, and where.

Names and values are arbitrary input of producers, so everything kept of them is bounded.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from anabranch.config.sections import UNKNOWN_NAME_LENGTH

MOST_OF_RECORD, MOST_OF_TASK = 200, 10_000
"""Maximum number of names read from one record, and counted by one task."""
MOST_BYTES = 65_536
"""Maximum bytes of a value that is kept as a sample."""

_SAMPLED = 200  # The names of a task whose values are kept.

Place = tuple[int, int]


@dataclass
class FoundName:
    """A name's number of records, first and last place (partition, offset), and the values of the
    first and the last record whose value is kept, by place."""

    records: int
    first: Place
    last: Place
    values: dict[Place, bytes] = field(default_factory=dict)

    def add(self, other: FoundName) -> None:
        self.records += other.records
        self.first, self.last = min(self.first, other.first), max(self.last, other.last)
        known = self.values | other.values
        self.values = {place: known[place] for place in {*_ends(known)}}


@dataclass
class UnknownNames:
    """The names, and the number of records with unknown fields that are rows, or would be rows
    without them. Exact for each name among the first MOST_OF_RECORD of its records and the first
    MOST_OF_TASK of a task."""

    records: int = 0
    names: dict[str, FoundName] = field(default_factory=dict)
    _sampled: set[str] = field(default_factory=set)

    def add(self, names: Sequence[str], place: Place, value: bytes | None) -> None:
        """Count the names of a record. Its value, if it is given and small, is kept as a sample."""
        self.records += 1
        kept = {place: value} if value is not None and len(value) <= MOST_BYTES else {}
        for name in {name[:UNKNOWN_NAME_LENGTH] for name in names[:MOST_OF_RECORD]}:
            is_sampled = len(self.names) < _SAMPLED or name in self._sampled
            if is_sampled:
                self._sampled.add(name)
            if name in self.names or len(self.names) < MOST_OF_TASK:
                self._add(name, FoundName(1, place, place, kept if is_sampled else {}))

    @staticmethod
    def sum(several: Iterable[UnknownNames]) -> UnknownNames:
        total = UnknownNames()
        for one in several:
            total.records += one.records
            for name, found in one.names.items():
                total._add(name, found)
        return total

    def _add(self, name: str, found: FoundName) -> None:
        if (known := self.names.get(name)) is not None:
            known.add(found)
        else:
            self.names[name] = found


def _ends(values: dict[Place, bytes]) -> list[Place]:
    return [min(values), max(values)] if values else []
