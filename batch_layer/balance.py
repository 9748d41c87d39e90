"""The balance: an hour's closing account, `offsets = good + dead + duplicate + gaps` in every partition. Pure.

Each term is a count of distinct offsets inside the cut: good and dead from the staged files themselves, duplicates from
what the rule names, gaps from what nobody holds. None is derived from the others, so what is missing or there
twice shows. Only of what Kafka no longer holds, a restatement takes over what the accepted revision accounted for.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from anabranch.hours import Cut
from anabranch.position import Offsets
from anabranch.protocol.ledger_row import Account, HourAccount

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
    def partitions(self) -> dict[int, Account]:
        """The account of each partition of the cut."""
        return {
            p: Account(
                offsets=end - start,
                good=self.good.distinct.get(p, 0),
                dead=self.dead.distinct.get(p, 0),
                duplicate=self.duplicate.get(p, 0),
                gaps={name: offsets[p] for name, offsets in sorted(self.gaps.items()) if offsets.get(p)},
            )
            for p, (start, end) in sorted(self.cut.ranges.items())
        }

    @property
    def counts(self) -> HourAccount:
        """Of all partitions together."""
        by_class = {name: sum(offsets.values()) for name, offsets in sorted(self.gaps.items()) if sum(offsets.values())}
        return HourAccount(
            offsets=self.cut.offsets,
            good=sum(self.good.distinct.values()),
            dead=sum(self.dead.distinct.values()),
            duplicate=sum(self.duplicate.values()),
            gap=sum(by_class.values()),
            gaps=by_class,
        )

    def problems(self) -> list[str]:
        """Why the account does not close, partition by partition."""
        problems = []
        for p, account in self.partitions.items():
            if account.offsets != account.total:
                start, end = self.cut.ranges[p]
                problems.append(
                    f"partition {p}: expected {account.offsets} offsets in [{start}, {end}), found {account.total}: "
                    f"{account.good} good, {account.dead} dead, {account.duplicate} duplicate, {account.gap} in gaps"
                )
        for name, counted in (("rows", self.good), ("dead letters", self.dead)):
            if counted.outside:
                problems.append(f"{name}: expected none outside the cut, found {counted.outside}")
            if counted.rows - counted.outside != sum(counted.distinct.values()):
                twice = counted.rows - counted.outside - sum(counted.distinct.values())
                problems.append(f"{name}: expected each offset once, found {twice} more")
        return problems

    def disallowed(self, allowed_gaps: tuple[str, ...]) -> list[str]:
        """The gaps of classes that the stream does not allow."""
        return [
            f"gaps: expected only {', '.join(allowed_gaps) or 'none'}, found {sum(offsets.values())} {name}"
            for name, offsets in sorted(self.gaps.items())
            if sum(offsets.values()) and name not in allowed_gaps
        ]


def classify_gaps(missing: Mapping[int, int], aborted: Mapping[int, int], compacted: bool) -> Gaps:
    """Give every offset that Kafka should hold and does not give a class, by partition.

    `aborted` are those that an uncommitted reading does find. What is left was compacted away in a compacted topic,
    else it is a control record (KIP-98), which no reader is given.
    """
    rest = {p: n - aborted.get(p, 0) for p, n in missing.items()}
    return _without_zeros({"aborted": dict(aborted), "compacted" if compacted else "control": rest})


def classify_lost(
    lost: Mapping[int, int], before: Mapping[int, Account], stored: Mapping[int, int], gaps_in_kafka: Gaps
) -> tuple[Offsets, Gaps]:
    """Duplicates and gaps among `lost`, the offsets by partition that Kafka no longer holds, nor anybody else.

    They are `retention` gaps, unless an accepted revision has accounted for them: `before` is its account, `stored` how
    many of its rows and dead letters are still there, `gaps_in_kafka` the gaps among what Kafka does hold. Where they
    are all there, an offset that is not one of them was a duplicate or in a gap.
    """
    duplicate: Offsets = {}
    gaps: Gaps = {"retention": {}}
    for p, left in lost.items():
        account = before.get(p)
        if account is not None and stored.get(p, 0) == account.good + account.dead:
            for name, count in account.gaps.items():
                taken = min(left, max(0, count - gaps_in_kafka.get(name, {}).get(p, 0)))
                gaps.setdefault(name, {})[p] = taken
                left -= taken
            duplicate[p] = min(left, account.duplicate)
            left -= duplicate[p]
        gaps["retention"][p] = gaps["retention"].get(p, 0) + left
    return duplicate, _without_zeros(gaps)


def together(one: Gaps, other: Gaps) -> Gaps:
    """Both, added up."""
    return {name: plus(one.get(name, {}), other.get(name, {})) for name in sorted({*one, *other})}


def plus(one: Mapping[int, int], other: Mapping[int, int]) -> Offsets:
    """Both, added up by partition."""
    return {p: one.get(p, 0) + other.get(p, 0) for p in sorted({*one, *other})}


def _without_zeros(gaps: Gaps) -> Gaps:
    return {name: {p: n for p, n in counts.items() if n} for name, counts in gaps.items() if any(counts.values())}
