"""Comparison of the records that Kafka acknowledged with those that the tables serve, one by one.
Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

from anabranch.dev.producers.events import Ack

Place = tuple[int, int]


class ServedRecord(NamedTuple):
    """A row or dead letter of a serving table. `sha256`: the hash of the value of its record, None
    for a null value."""

    partition: int
    offset: int
    sha256: str | None


@dataclass(frozen=True)
class Reconciliation:
    """The account of every (partition, offset). The last four fields list the errors."""

    acknowledged: int
    rows: int
    dead: int
    duplicate: int
    lost: tuple[Place, ...]
    twice: tuple[Place, ...]
    foreign: tuple[Place, ...]
    changed: tuple[Place, ...]

    @property
    def is_exact(self) -> bool:
        return not (self.lost or self.twice or self.foreign or self.changed)

    def sentences(self) -> list[str]:
        """Return the account as lines, with a sample of each error."""
        lines = [
            f"acknowledged by Kafka            {self.acknowledged:>9,}",
            f"rows in main                     {self.rows:>9,}",
            f"dead letters                     {self.dead:>9,}",
            f"duplicates, the original in main {self.duplicate:>9,}",
        ]
        for name, places in (
            ("lost", self.lost),
            ("twice", self.twice),
            ("never acknowledged", self.foreign),
            ("different content", self.changed),
        ):
            sample = ", ".join(f"{partition}:{offset}" for partition, offset in places[:5])
            lines.append(
                f"{name:<32} {len(places):>9,}"
                + (f"  (partition:offset {sample} …)" if sample else "")
            )
        return lines


def compare(
    acks: Iterable[Ack],
    rows: Iterable[ServedRecord],
    dead_letters: Iterable[ServedRecord],
    by_batch: Callable[[int, int], bool],
) -> Reconciliation:
    """Compare acknowledged records with rows and dead letters.

    Each record must be served once, with its own content: a malformed one as a dead letter, any
    other as a row. Only a record that the batch layer serves (`by_batch`: partition, offset) may be
    missing, and only if a row has the same bytes.
    """
    acknowledged = {(ack.partition, ack.offset): ack for ack in acks}
    good, dead = list(rows), list(dead_letters)
    times = Counter((s.partition, s.offset) for s in (*good, *dead))
    contents = {s.sha256 for s in good}
    missing = sorted(acknowledged.keys() - times.keys())
    duplicate = {at for at in missing if by_batch(*at) and acknowledged[at].sha256 in contents}
    changed = {
        (s.partition, s.offset)
        for served, malformed in ((good, False), (dead, True))
        for s in served
        if (ack := acknowledged.get((s.partition, s.offset))) is not None
        and (ack.sha256 != s.sha256 or (ack.kind == "malformed") != malformed)
    }
    return Reconciliation(
        acknowledged=len(acknowledged),
        rows=len(good),
        dead=len(dead),
        duplicate=len(duplicate),
        lost=tuple(at for at in missing if at not in duplicate),
        twice=tuple(sorted(at for at, count in times.items() if count > 1)),
        foreign=tuple(sorted(times.keys() - acknowledged.keys())),
        changed=tuple(sorted(changed)),
    )
