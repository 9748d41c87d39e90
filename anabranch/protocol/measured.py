"""Measurements of the jobs: totals by layer, in a snapshot property of `main` that every publish
carries over.

A publish records its durations in its own commit. So the totals count each landed publish once,
outlive the process, and do not depend on snapshots that expire. They start at zero with the table,
or with a `main` that was recreated.
"""

from __future__ import annotations

import json
import math
import threading
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import psutil

from anabranch.common.counters import CPU, TALLY, Counts, Tally
from anabranch.common.json_values import parse, read_stored
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
    """The measurements of a layer's jobs: durations by name, and counts by name and label
    (`anabranch.common.counters`)."""

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
    """Return the measurements in a value of the property, by layer; layers without any are absent.
    Pure. Raises Terminal."""

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
        """Record that the last measurements have landed, and the duration of their commit in
        seconds."""
        self._published, self._commit = self._pending, commit_seconds


_EVERY_SECONDS = 10.0
"""Minimum time between two readings: one takes some milliseconds, a publish may come each
second."""

_alone = threading.Lock()
_counted, _at = 0, float("-inf")


def count_cpu() -> None:
    """Add the CPU time since the previous call to the process's tally; at the first call, the time
    since the processes began. Do nothing within ten seconds of the previous reading: a later call
    counts that time."""
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
    """Return the CPU time of a process and of its ended children, in seconds; 0 if the process has
    ended."""
    try:
        used = process.cpu_times()
    except psutil.NoSuchProcess:
        return 0.0
    return used.user + used.system + used.children_user + used.children_system
