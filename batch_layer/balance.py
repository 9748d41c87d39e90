"""The balance: an hour's closing account, `offsets = good + dead + duplicate + gaps` in every partition. Pure.

Each term is a count of distinct offsets inside the cut: good and dead from the staged files themselves, duplicates from
what the rule names, gaps from what Kafka did not give. None is derived from the others, so what is missing or there
twice shows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from anabranch.hours import Cut
from anabranch.position import Offsets

Gaps = dict[str, Offsets]


@dataclass(frozen=True)
class Counted:
    """What staged files hold: distinct offsets inside the cut by partition, all rows, rows outside the cut."""

    distinct: Offsets = field(default_factory=dict)
    rows: int = 0
    outside: int = 0


@dataclass(frozen=True)
class Balance:
    """An hour's account. `problems` is empty when it closes."""

    cut: Cut
    good: Counted
    dead: Counted
    duplicate: Offsets
    gaps: Gaps

    @property
    def counts(self) -> dict[str, Any]:
        by_class = {name: sum(found.values()) for name, found in sorted(self.gaps.items()) if sum(found.values())}
        return {
            "offsets": self.cut.offsets,
            "good": sum(self.good.distinct.values()),
            "dead": sum(self.dead.distinct.values()),
            "duplicate": sum(self.duplicate.values()),
            "gap": sum(by_class.values()),
            "gaps": by_class,
        }

    def problems(self, allowed_gaps: tuple[str, ...]) -> list[str]:
        """Why the account does not close, partition by partition, or holds what the stream does not allow."""
        found = []
        for p, (start, end) in sorted(self.cut.ranges.items()):
            good, dead = self.good.distinct.get(p, 0), self.dead.distinct.get(p, 0)
            duplicate = self.duplicate.get(p, 0)
            gap = sum(offsets.get(p, 0) for offsets in self.gaps.values())
            if end - start != good + dead + duplicate + gap:
                total = good + dead + duplicate + gap
                found.append(
                    f"partition {p}: expected {end - start} offsets in [{start}, {end}), found {total}: "
                    f"{good} good, {dead} dead, {duplicate} duplicate, {gap} in gaps"
                )
        for name, counted in (("rows", self.good), ("dead letters", self.dead)):
            if counted.outside:
                found.append(f"{name}: expected none outside the cut, found {counted.outside}")
            if counted.rows - counted.outside != sum(counted.distinct.values()):
                twice = counted.rows - counted.outside - sum(counted.distinct.values())
                found.append(f"{name}: expected each offset once, found {twice} more")
        for name, offsets in sorted(self.gaps.items()):
            if sum(offsets.values()) and name not in allowed_gaps:
                found.append(
                    f"gaps: expected only {', '.join(allowed_gaps) or 'none'}, found {sum(offsets.values())} {name}"
                )
        return found


def classify_gaps(
    missing: Mapping[int, int], aborted: Mapping[int, int], lost: Mapping[int, int], compacted: bool
) -> Gaps:
    """Give every missing offset a class, by partition.

    `aborted` are those that an uncommitted reading does find, `lost` those before the log's start. What neither
    explains was compacted away in a compacted topic, else it is a control record (KIP-98), which no
    reader is given.
    """
    rest = {p: n - aborted.get(p, 0) - lost.get(p, 0) for p, n in missing.items()}
    gaps = {"aborted": dict(aborted), "retention": dict(lost), "compacted" if compacted else "control": rest}
    return {name: {p: n for p, n in found.items() if n} for name, found in gaps.items() if any(found.values())}
