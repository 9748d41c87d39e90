"""The balance: an hour's closing account, `offsets = good + dead + duplicate + gaps + erased` in
every partition.

Each term counts distinct offsets inside the cut: good and dead from the staged files, duplicates
from the rule, gaps from offsets that neither Kafka nor the table has. No term is derived from the
others, so missing or repeated offsets show. A restatement uses the accepted revision's account only
for records that Kafka has deleted. The log's record batches show the class of a gap; without an
explanation the account does not close.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from anabranch.offsets.hours import Cut
from anabranch.offsets.position import Offsets, Ranges
from anabranch.protocol.ledger_row import Account, HourAccount

Gaps = dict[str, Offsets]
EXPLAINED = ("control", "aborted", "compacted", "retention")
GONE = ("compacted", "retention")
"""Classes of offsets that once had records."""
UNEXPLAINED = "unexplained"
"""Offsets without an explanation. No stream allows them, and no operator can accept them."""


@dataclass(frozen=True)
class Counted:
    """Content of staged files: distinct offsets of the cut, all rows, rows outside it."""

    distinct: Offsets = field(default_factory=dict)
    rows: int = 0
    outside: int = 0


@dataclass(frozen=True)
class Balance:
    """An hour's account; it closes without `problems`. `conflicts`: duplicates of other content."""

    cut: Cut
    good: Counted
    dead: Counted
    duplicate: Offsets
    gaps: Gaps
    unexplained_at: Mapping[int, tuple[tuple[int, int], ...]] = field(default_factory=dict)
    erased: Offsets = field(default_factory=dict)
    conflicts: Offsets = field(default_factory=dict)

    @property
    def partitions(self) -> dict[int, Account]:
        return {
            p: Account(
                offsets=end - start,
                good=self.good.distinct.get(p, 0),
                dead=self.dead.distinct.get(p, 0),
                duplicate=self.duplicate.get(p, 0),
                gaps={
                    name: offsets[p]
                    for name, offsets in sorted(self.gaps.items())
                    if offsets.get(p)
                },
                erased=self.erased.get(p) or None,
                conflicts=self.conflicts.get(p) or None,
            )
            for p, (start, end) in sorted(self.cut.ranges.items())
        }

    @property
    def counts(self) -> HourAccount:
        by_class = {
            name: sum(offsets.values())
            for name, offsets in sorted(self.gaps.items())
            if sum(offsets.values())
        }
        return HourAccount(
            offsets=self.cut.offsets,
            good=sum(self.good.distinct.values()),
            dead=sum(self.dead.distinct.values()),
            duplicate=sum(self.duplicate.values()),
            gap=sum(by_class.values()),
            erased=sum(self.erased.values()) or None,
            conflicts=sum(self.conflicts.values()),
            gaps=by_class,
        )

    def problems(self) -> list[str]:
        """Return the reasons why the account does not close, partition by partition."""
        problems = []
        for p, account in self.partitions.items():
            # Each term is counted by itself, so an offset that no term has, or two have, shows here
            # instead of being lost or doubled in `main`.
            if account.offsets != account.total:
                start, end = self.cut.ranges[p]
                problems.append(
                    f"partition {p}: expected {account.offsets} offsets in [{start}, {end}), "
                    f"found {account.total}: {account.good} good, {account.dead} dead, "
                    f"{account.duplicate} duplicate, {account.gap} in gaps"
                    + (f", {account.erased} erased" if account.erased else "")
                )
            if (account.conflicts or 0) > account.duplicate:
                problems.append(
                    f"partition {p}: expected duplicates with other content among "
                    f"{account.duplicate} duplicates, found {account.conflicts}"
                )
        # Decision 41: a problem, not an objection: no operator can accept an hour without a record
        # that the log contains.
        for p, count in sorted(self.gaps.get(UNEXPLAINED, {}).items()):
            at = ", ".join(
                str(s) if e == s + 1 else f"{s} to {e - 1}"
                for s, e in self.unexplained_at.get(p, ())
            )
            problems.append(
                f"partition {p}: expected Kafka's log to explain every offset that was not read, "
                f"found {count} "
                + (
                    f"whose record the log contains, from offset {at} on"
                    if at
                    else "without an explanation"
                )
            )
        for name, counted in (("rows", self.good), ("dead letters", self.dead)):
            # A row outside the cut belongs to another hour, which has it too.
            if counted.outside:
                problems.append(f"{name}: expected none outside the cut, found {counted.outside}")
            # Distinct offsets alone would hide a row that was staged twice.
            if counted.rows - counted.outside != sum(counted.distinct.values()):
                twice = counted.rows - counted.outside - sum(counted.distinct.values())
                problems.append(f"{name}: expected each offset once, found {twice} more")
        return problems

    def disallowed(self, allowed_gaps: tuple[str, ...]) -> list[str]:
        """Return an objection for each class of gaps that the stream does not allow."""
        return [
            (
                f"gaps: expected only {', '.join(allowed_gaps) or 'none'}, found "
                f"{sum(offsets.values())} {name}"
            )
            for name, offsets in sorted(self.gaps.items())
            if sum(offsets.values()) and name not in (*allowed_gaps, UNEXPLAINED)
        ]


def has_missing(ranges: Ranges, held: Mapping[int, int]) -> bool:
    """Return whether fewer offsets than in the ranges were read; the table may have the others."""
    return any(end - start > held.get(p, 0) for p, (start, end) in ranges.items())


def classify_gaps(missing: Mapping[int, int], seen: Mapping[str, Mapping[int, int]]) -> Gaps:
    """Classify every offset that neither Kafka nor the table has, by partition.

    The log shows the class (`seen`): a control record, a record of an aborted transaction, a
    compacted record, or one deleted by retention meanwhile. The rest is `unexplained`; nothing is
    inferred.
    """
    explained = {name: dict(counts) for name, counts in seen.items() if name in EXPLAINED}
    # Nothing is inferred from the topic's settings (decision 41): they do not show the past.
    rest = {
        p: n - sum(counts.get(p, 0) for counts in explained.values()) for p, n in missing.items()
    }
    return _without_zeros(explained | {UNEXPLAINED: rest})


def classify_unheld(
    lost: Mapping[int, int],
    gaps_in_kafka: Gaps,
    before: Mapping[int, Account],
    stored: Mapping[int, int],
    duplicate: Mapping[int, int],
) -> tuple[Offsets, Gaps]:
    """Return duplicates and gaps among the offsets that neither Kafka nor the table has, by
    partition.

    `lost`: offsets before the log's start. `gaps_in_kafka`: offsets after it, by class. `before`:
    the accepted revision's account. `stored`: the number of its rows and dead letters that still
    exist. `duplicate`: duplicates found again. If all rows and dead letters of the accepted
    revision exist, any other offset was a duplicate or in a gap. An offset before the log's start
    then keeps its earlier class; otherwise it is a `retention` gap. After the log's start the log
    was read, so only a compacted record can have been a duplicate.
    """
    repeated: Offsets = {}
    gaps = {name: dict(counts) for name, counts in gaps_in_kafka.items()} | {"retention": {}}
    gaps["retention"] = dict(gaps_in_kafka.get("retention", {}))
    compacted = gaps.setdefault("compacted", {})
    for p in sorted({*lost, *compacted}):
        left, account = lost.get(p, 0), before.get(p)
        # Decision 41: only while all rows and dead letters of the accepted revision exist. Else an
        # offset may be one of its rows, and would be dropped as a duplicate or a gap.
        if account is not None and stored.get(p, 0) == account.good + account.dead:
            for name, count in account.gaps.items():
                taken = min(left, max(0, count - gaps_in_kafka.get(name, {}).get(p, 0)))
                gaps.setdefault(name, {})[p] = gaps.get(name, {}).get(p, 0) + taken
                left -= taken
            spare = max(0, account.duplicate - duplicate.get(p, 0))
            repeated[p] = min(left, spare)
            left -= repeated[p]
            gone = max(
                0, gaps_in_kafka.get("compacted", {}).get(p, 0) - account.gaps.get("compacted", 0)
            )
            again = min(gone, spare - repeated[p])
            repeated[p] += again
            compacted[p] = compacted.get(p, 0) - again
        gaps["retention"][p] = gaps["retention"].get(p, 0) + left
    return {p: n for p, n in repeated.items() if n}, _without_zeros(gaps)


def conflicts_of(
    repeated: Mapping[int, int], before: Mapping[int, Account], conflicts: Mapping[int, int]
) -> Offsets:
    """Return the conflicts among the duplicates that neither Kafka nor the table has, by partition:
    those that the accepted revision counted and that were not found again (`conflicts`)."""
    spare = {p: max(0, (a.conflicts or 0) - conflicts.get(p, 0)) for p, a in before.items()}
    found = {p: min(n, spare.get(p, 0)) for p, n in repeated.items()}
    return {p: n for p, n in found.items() if n}


def classify_erased(
    lost: Mapping[int, int],
    gaps_in_kafka: Gaps,
    before: Mapping[int, Account],
    erased: Mapping[int, int],
) -> tuple[Offsets, Offsets, Gaps]:
    """Return the erased records among the offsets that neither Kafka nor the table has, and `lost`
    and `gaps_in_kafka` without them, by partition.

    The table has no erased record, so those that Kafka has deleted since are among these offsets.
    `before`: the account of the hour. `erased`: the number of erased records that were read again
    and left out.
    """
    left, gaps = dict(lost), {name: dict(counts) for name, counts in gaps_in_kafka.items()}
    compacted, found = gaps.get("compacted", {}), Offsets()
    for p, account in before.items():
        # Erased records that were read again are counted already: their number must not explain
        # other offsets.
        spare = max(0, (account.erased or 0) - erased.get(p, 0))
        gone = max(0, compacted.get(p, 0) - account.gaps.get("compacted", 0))
        deleted = min(left.get(p, 0), spare)
        removed = min(gone, spare - deleted)
        if deleted:
            left[p] -= deleted
        if removed:
            compacted[p] -= removed
        found |= {p: deleted + removed} if deleted + removed else {}
    return found, left, gaps


def plus(one: Mapping[int, int], other: Mapping[int, int]) -> Offsets:
    return {p: one.get(p, 0) + other.get(p, 0) for p in sorted({*one, *other})}


def _without_zeros(gaps: Gaps) -> Gaps:
    return {
        name: {p: n for p, n in counts.items() if n}
        for name, counts in gaps.items()
        if any(counts.values())
    }
