"""The jobs' cost, from retained publishes of `main`: about the newest hundred, and one an hour for
a week (tagged when hours are sealed)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING

from anabranch.common.counters import COMMITS, CPU, S3_BYTES, S3_REQUESTS, Counts
from anabranch.iceberg.snapshots import is_publish, made_at, main_snapshots
from anabranch.iceberg.state_properties import unpack
from anabranch.protocol.ledger_row import Layer
from anabranch.protocol.measured import (
    MEASURED,
    Measured,
    read_measured,
)

if TYPE_CHECKING:
    from pyiceberg.table import Table
    from pyiceberg.table.snapshots import Snapshot


@dataclass(frozen=True)
class Cost:
    """The resources that a stream's jobs used from `since` to `until`: S3 requests by operation,
    bytes, commits, and CPU seconds.

    Only what publishes recorded: Spark's own requests and reads are not included, nor CPU seconds
    of streams that share a process. `bytes_written` includes rows, dead letters and metadata.
    """

    since: datetime
    until: datetime
    s3_requests: Mapping[str, int]
    bytes_read: int
    bytes_written: int
    commits: int
    cpu_seconds: float


def read_cost(table: Table, since: datetime) -> Cost | None:
    """Return the cost from about `since` on, or from the oldest retained snapshot; None if no
    publish recorded any. Reads only the loaded table."""
    publishes = _publishes(table)
    said = [s for s in publishes if s.summary is not None and s.summary.get(MEASURED)]
    if not said:
        return None
    first = [s for s in publishes if made_at(s) <= since][-1:] or publishes[:1]
    return plan_cost(
        made_at(first[0]), _totals(first[0]), made_at(publishes[-1]), _totals(said[-1])
    )


def _publishes(table: Table) -> list[Snapshot]:
    """Return the retained publishes of `main`, oldest first. Snapshots of other programs have no
    totals."""
    return sorted(filter(is_publish, main_snapshots(table)), key=made_at)


def plan_cost(since: datetime, before: Counts, until: datetime, after: Counts) -> Cost:
    """Return the difference between two totals of both layers; the later total alone if counting
    restarted in between. Pure."""
    if any(after.get(key, 0) < n for key, n in before.items()):
        before = {}
    came = {key: n - before.get(key, 0) for key, n in after.items() if n != before.get(key, 0)}
    requests = {label: n for (name, label), n in sorted(came.items()) if name == S3_REQUESTS}
    bytes_ = {label: n for (name, label), n in came.items() if name == S3_BYTES}
    cpu = came.get((CPU, ""), 0) / 1000
    commits = came.get((COMMITS, ""), 0)
    return Cost(
        since, until, requests, bytes_.get("read", 0), bytes_.get("written", 0), commits, cpu
    )


def _measured(snapshot: Snapshot) -> Mapping[Layer, Measured]:
    said = snapshot.summary.get(MEASURED) if snapshot.summary is not None else None
    return read_measured(unpack(said) if said else None)


def _totals(snapshot: Snapshot) -> Counts:
    return sum(
        (Counter(measured.counts) for measured in _measured(snapshot).values()),
        Counter[tuple[str, str]](),
    )
