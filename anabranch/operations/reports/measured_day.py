"""The speed layer's measurements over time, from retained snapshots of `main`: about the newest
hundred, and one an hour for a week (tagged when hours are sealed)."""

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

# Of publishes within this time, use the last.
_APART = timedelta(minutes=10)


@dataclass(frozen=True)
class Mark:
    """The totals measured up to a moment, since the table began."""

    at: datetime
    measured: Measured


@dataclass(frozen=True)
class MeasuredSpan:
    """The measurements between two moments."""

    since: datetime
    until: datetime
    readable: Durations
    stage: Durations
    publish: Durations
    commit: Durations


def measured_spans(table: Table, since: datetime) -> list[MeasuredSpan]:
    """The speed layer's measurements from about `since` on, oldest first. Reads only the loaded
    table."""
    return plan_spans(_marks(table, since), since)


def _marks(table: Table, since: datetime) -> list[Mark]:
    snapshots = sorted(main_snapshots(table), key=lambda s: s.timestamp_ms)
    before = [s for s in snapshots if made_at(s) <= since][-1:]
    kept = before + [s for s in snapshots if made_at(s) > since]
    last_of = {_tenth(s.timestamp_ms): s for s in kept}
    # Keep the first mark, where counting begins, even if another one follows closely.
    chosen = dict.fromkeys([*(s.snapshot_id for s in kept[:1]), *(s.snapshot_id for s in last_of.values())])
    marks = []
    for snapshot in (s for s in kept if s.snapshot_id in chosen):
        said = snapshot.summary.get(MEASURED) if snapshot.summary is not None else None
        marks.append(Mark(made_at(snapshot), read_measured(unpack(said) if said else None).get("speed", Measured())))
    return marks


def _tenth(timestamp_ms: int) -> int:
    return timestamp_ms // (_APART // timedelta(milliseconds=1))


def plan_spans(marks: Sequence[Mark], since: datetime) -> list[MeasuredSpan]:
    """The spans between consecutive marks, which are in order of time; a mark before `since` starts
    the first span. Pure."""
    spans = []
    for before, after in pairwise(marks):
        parts = (_came(before, after, name) for name in (READABLE, STAGE, PUBLISH, COMMIT))
        spans.append(MeasuredSpan(max(before.at, since), after.at, *parts))
    return spans


def _came(before: Mark, after: Mark, name: str) -> Durations:
    return after.measured.durations.get(name, Durations()).since(before.measured.durations.get(name, Durations()))


def together(durations: Iterable[Durations]) -> Durations:
    """The sum of all durations. Pure."""
    total, counts = 0.0, dict[float, int]()
    for one in durations:
        total += one.sum
        for bound, n in one.counts.items():
            counts[bound] = counts.get(bound, 0) + n
    return Durations(total, counts)
