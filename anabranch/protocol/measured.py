"""Measurements of the jobs: totals by layer, in a snapshot property of `main` that every publish
carries over.

A publish records its durations in its own commit. So the totals count each landed publish once,
outlive the process, and do not depend on snapshots that expire. They start at zero with the table,
or with a `main` that was recreated.

Runs of maintenance: each is a property of the stream's table, `anabranch.maintained.<id>`.

A run is recorded when it ends, whether or not its steps succeeded, in a commit that moves no head.
So two runs that end at once do not overwrite each other, and no publish is refused because of one.
The table keeps the newest runs and the newest complete one. A run that was killed or cannot reach
the lake at its end is not recorded.
"""

from __future__ import annotations

import json
import math
import threading
import time
import uuid
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any

import psutil
from pyiceberg.table import Table

from anabranch.common.counters import CPU, TALLY, Counts, Tally
from anabranch.common.json_values import dump, parse, read_stored
from anabranch.iceberg.commits import Commit
from anabranch.iceberg.lake import Lake
from anabranch.protocol.ledger_row import Layer

MEASURED = "anabranch.measured"

BOUNDS = (0.1, 0.25, 0.5, 1, 2, 3, 5, 10, 20, 30, 60, 120, 300, 900, 1800, 3600, 7200, math.inf)
"""The upper bounds of the histogram's buckets, in seconds."""

READABLE = "readable"
"""The time from Kafka's acknowledgement of a micro-batch's oldest record to the commit that made it
readable."""
STAGE = "stage"
"""The time to stage a micro-batch; for the batch layer, to read, stage and check an hour."""
PUBLISH = "publish"
"""The time from staged rows to their commit: turns of other publishers, and refusals."""
COMMIT = "commit"
"""The time of the commit itself; the next publish of the same process records it."""


@dataclass(frozen=True)
class Durations:
    """A histogram of durations: their sum in seconds, and counts by the smallest bound that each is
    within, not cumulative."""

    sum: float = 0.0
    counts: Mapping[float, int] = field(default_factory=dict)

    @property
    def count(self) -> int:
        return sum(self.counts.values())

    def plus(self, seconds: float) -> Durations:
        bound = next(b for b in BOUNDS if seconds <= b)
        return Durations(
            self.sum + seconds, dict(self.counts) | {bound: self.counts.get(bound, 0) + 1}
        )

    def as_json(self) -> list[Any]:
        return [round(self.sum, 3), {_name(b): n for b, n in sorted(self.counts.items())}]

    @staticmethod
    def from_json(data: list[Any]) -> Durations:
        total, counts = data
        return Durations(total, {float(bound): n for bound, n in counts.items()})


def _name(bound: float) -> str:
    return f"{bound:g}"


@dataclass(frozen=True)
class Measured:
    """A layer's measurements: durations by name, counts by name and label (`counters`)."""

    durations: Mapping[str, Durations] = field(default_factory=dict)
    counts: Counts = field(default_factory=dict)

    def plus(self, seconds: Iterable[tuple[str, float]], counts: Counts) -> Measured:
        durations = dict(self.durations)
        for name, value in seconds:
            durations[name] = durations.get(name, Durations()).plus(value)
        return Measured(durations, Counter(self.counts) + Counter(counts))

    def as_json(self) -> dict[str, Any]:
        counts: dict[str, dict[str, int]] = {}
        for (name, label), n in sorted(self.counts.items()):
            counts.setdefault(name, {})[label] = n
        return {
            "seconds": {name: d.as_json() for name, d in sorted(self.durations.items())},
            "counts": counts,
        }

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> Measured:
        return Measured(
            {name: Durations.from_json(d) for name, d in data["seconds"].items()},
            {
                (name, label): n
                for name, labels in data["counts"].items()
                for label, n in labels.items()
            },
        )


def read_measured(text: str | None) -> dict[Layer, Measured]:
    """Return a property's measurements by layer; absent without any. Pure. Raises Terminal."""

    def read(text: str) -> dict[Layer, Measured]:
        by_layer = parse(dict[Layer, dict[str, dict[str, Any]]], text)
        return {layer: Measured.from_json(data) for layer, data in by_layer.items()}

    return read_stored("measurements", text or "{}", read)


class Meter:
    """A meter of a job: it adds the measurements since the last landed publish to each publish. For
    one thread.

    With the process's own tally they include the CPU time of the job's processes, from their start
    on. In a process with many streams, each stream has a tally of its own: its share of the CPU
    time is unknown.
    """

    def __init__(self, layer: Layer, tally: Tally = TALLY) -> None:
        self._layer, self._tally = layer, tally
        self._published = self._pending = tally.totals()
        self._commit: float | None = None

    def to_properties(
        self, main: Mapping[str, str], seconds: Iterable[tuple[str, float]]
    ) -> dict[str, str]:
        """Return the properties of a publish on `main`: the totals so far, with these durations and
        everything not published yet."""
        if self._tally is TALLY:
            count_cpu()
        self._pending = self._tally.totals()
        totals = read_measured(main.get(MEASURED))
        last = [(COMMIT, self._commit)] if self._commit is not None else []
        totals[self._layer] = totals.get(self._layer, Measured()).plus(
            [*last, *((name, max(0.0, value)) for name, value in seconds)],
            self._pending - self._published,
        )
        said = {layer: measured.as_json() for layer, measured in sorted(totals.items())}
        return {MEASURED: json.dumps(said, separators=(",", ":"))}

    def landed(self, commit_seconds: float) -> None:
        """Record that the last measurements have landed, and the seconds of their commit."""
        self._published, self._commit = self._pending, commit_seconds


_EVERY_SECONDS = 10.0
"""Minimum time between two readings: one takes some milliseconds, a publish may come each
second."""

_alone = threading.Lock()
_counted, _at = 0, float("-inf")


def count_cpu() -> None:
    """Add the CPU time since the previous call, at first since the processes began, to the
    process's tally; nothing within ten seconds: a later call counts that time."""
    global _counted, _at
    with _alone:
        if time.monotonic() - _at < _EVERY_SECONDS:
            return
        now = cpu_ms()
        TALLY.count(CPU, n=max(0, now - _counted))
        _counted, _at = max(now, _counted), time.monotonic()


def cpu_ms() -> int:
    """Return the CPU time of the job's processes since they began, in milliseconds, including
    workers that have ended. Executors on other machines are not included."""
    own = psutil.Process()
    parent = own.parent()
    # spark-submit starts the driver's Python from the JVM; PySpark starts the JVM from Python.
    root = parent if parent is not None and parent.name() == "java" else own
    return round(1000 * sum(map(_seconds, [root, *root.children(recursive=True)])))


def _seconds(process: psutil.Process) -> float:
    """Return the CPU seconds of a process and its ended children; 0 if it has ended."""
    try:
        used = process.cpu_times()
    except psutil.NoSuchProcess:
        return 0.0
    return used.user + used.system + used.children_user + used.children_system


MAINTAINED = "anabranch.maintained"

KEPT = 8
"""The number of runs to keep; one more if none of them is complete."""

_PREFIX = f"{MAINTAINED}."
_LONGEST_REASON = 400


@dataclass(frozen=True)
class Size:
    """The number of some files and their total bytes."""

    files: int = 0
    bytes: int = 0

    @staticmethod
    def of(sizes: Collection[int]) -> Size:
        """Return the size of files with these bytes each."""
        return Size(len(sizes), sum(sizes))

    def __add__(self, other: Size) -> Size:
        return Size(self.files + other.files, self.bytes + other.bytes)


@dataclass(frozen=True)
class MaintainedTable:
    """The changes of a run to a table: the number of snapshots and tags that it expired, the number
    of files saved by merging, the orphan files that it deleted, and those too new to delete."""

    expired: int = 0
    merged: int = 0
    orphans: Size = Size()
    spared: Size = Size()

    def __add__(self, other: MaintainedTable) -> MaintainedTable:
        return MaintainedTable(
            self.expired + other.expired,
            self.merged + other.merged,
            self.orphans + other.orphans,
            self.spared + other.spared,
        )


@dataclass(frozen=True)
class MaintenanceRun:
    """A run of maintenance: the number of hours that it removed from the speed branch, its changes
    by table, and the reason of failure by step."""

    began: datetime
    ended: datetime
    speed_hours: int = 0
    tables: Mapping[str, MaintainedTable] = field(default_factory=dict)
    failed: Mapping[str, str] = field(default_factory=dict)

    @property
    def is_complete(self) -> bool:
        """Whether every step succeeded."""
        return not self.failed

    @property
    def whole(self) -> MaintainedTable:
        """The sum of its changes to all tables."""
        return sum(self.tables.values(), MaintainedTable())

    def to_json(self) -> str:
        """Return the value of the table property: some hundred bytes."""
        failed = {step: reason[:_LONGEST_REASON] for step, reason in self.failed.items()}
        return dump(replace(self, failed=failed))


def read_runs(properties: Mapping[str, str]) -> tuple[MaintenanceRun, ...]:
    """Return the runs recorded in a table's properties, newest first. Pure."""
    return tuple(run for _, run in _by_key(properties))


def newest_complete(runs: Iterable[MaintenanceRun]) -> MaintenanceRun | None:
    """Return the newest complete run; `runs` are ordered, newest first. Pure."""
    return next((run for run in runs if run.is_complete), None)


def plan_record(properties: Mapping[str, str], id: str, run: MaintenanceRun) -> Commit:
    """Return the commit that records a run and removes the runs that are not kept. Pure.

    The commit sets each key that it removes: PyIceberg fails to remove a key that another process
    has already removed.
    """
    key = _PREFIX + id
    runs = [(key, run), *_by_key(properties)]
    runs.sort(key=lambda pair: pair[1].ended, reverse=True)
    kept = {k for k, _ in [*runs[:KEPT], *[pair for pair in runs if pair[1].is_complete][:1]]}
    gone = [k for k in properties if k.startswith(_PREFIX) and k not in kept]
    added = {key: run.to_json()} if key in kept else {}
    return Commit(
        uuid.uuid4().hex,
        {},
        (),
        set_properties=dict.fromkeys(gone, "") | added,
        remove_properties=(*gone,),
    )


def record_run(lake: Lake, table_name: str, run: MaintenanceRun) -> None:
    """Record a finished run in the table's properties. Raises Transient."""
    id = uuid.uuid4().hex

    def plan(table: Table) -> Commit | None:
        # The previous attempt may have landed with its answer lost.
        return None if _PREFIX + id in table.properties else plan_record(table.properties, id, run)

    lake.commit_until_landed(table_name, f"record the maintenance of {table_name}", plan)


def _by_key(properties: Mapping[str, str]) -> list[tuple[str, MaintenanceRun]]:
    """Return keys and runs, newest first, without values that do not parse (edited, newer)."""
    runs = []
    for key, text in properties.items():
        if key.startswith(_PREFIX):
            try:
                runs.append((key, parse(MaintenanceRun, text)))
            except ValueError:
                continue
    return sorted(runs, key=lambda pair: pair[1].ended, reverse=True)
