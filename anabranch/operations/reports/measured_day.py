"""What the speed layer measured over time, from the snapshots of `main` that the table remembers: the newest hundred or
so, and one an hour for a week, which are tagged when hours are sealed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from itertools import pairwise
from typing import TYPE_CHECKING

from anabranch.iceberg.snapshots import made_at, main_snapshots
from anabranch.iceberg.state_properties import unpack
from anabranch.protocol.measured import COMMIT, MEASURED, PUBLISH, READABLE, STAGE, Durations, Measured, read_measured

if TYPE_CHECKING:
    from pyiceberg.table import Table

# Of what was published closer together, the last is looked at.
_APART = timedelta(minutes=10)


@dataclass(frozen=True)
class Mark:
    """What was measured up to a moment, since the table began."""

    at: datetime
    measured: Measured


@dataclass(frozen=True)
class MeasuredSpan:
    """What was measured from one moment to the next."""

    since: datetime
    until: datetime
    readable: Durations
    stage: Durations
    publish: Durations
    commit: Durations


def measured_spans(table: Table, since: datetime) -> list[MeasuredSpan]:
    """What the speed layer measured from about `since` on, oldest first. Reads nothing but the loaded table."""
    return plan_spans(_marks(table, since), since)


def _marks(table: Table, since: datetime) -> list[Mark]:
    snapshots = sorted(main_snapshots(table), key=lambda s: s.timestamp_ms)
    before = [s for s in snapshots if made_at(s) <= since][-1:]
    kept = before + [s for s in snapshots if made_at(s) > since]
    last_of = {_tenth(s.timestamp_ms): s for s in kept}
    # The first is where counting begins, however soon another one follows.
    chosen = dict.fromkeys([*(s.snapshot_id for s in kept[:1]), *(s.snapshot_id for s in last_of.values())])
    marks = []
    for snapshot in (s for s in kept if s.snapshot_id in chosen):
        said = snapshot.summary.get(MEASURED) if snapshot.summary is not None else None
        marks.append(Mark(made_at(snapshot), read_measured(unpack(said) if said else None).get("speed", Measured())))
    return marks


def _tenth(timestamp_ms: int) -> int:
    return timestamp_ms // (_APART // timedelta(milliseconds=1))


def plan_spans(marks: Sequence[Mark], since: datetime) -> list[MeasuredSpan]:
    """What came between one mark and the next, of marks in order of time; one from before `since` says where the first
    span begins. Pure."""
    spans = []
    for before, after in pairwise(marks):
        parts = (_came(before, after, name) for name in (READABLE, STAGE, PUBLISH, COMMIT))
        spans.append(MeasuredSpan(max(before.at, since), after.at, *parts))
    return spans


def _came(before: Mark, after: Mark, name: str) -> Durations:
    return after.measured.durations.get(name, Durations()).since(before.measured.durations.get(name, Durations()))


def together(durations: Iterable[Durations]) -> Durations:
    """All of them in one. Pure."""
    total, counts = 0.0, dict[float, int]()
    for one in durations:
        total += one.sum
        for bound, n in one.counts.items():
            counts[bound] = counts.get(bound, 0) + n
    return Durations(total, counts)
