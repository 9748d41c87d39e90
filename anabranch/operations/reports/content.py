"""Counts of the content of `main`: rows by serving layer, files of the running hour, dead letters
of the newest hours by reason, and the jobs' measurements. Repeated reads cache immutable files:
manifests and dead letters."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import TYPE_CHECKING

import pyarrow.parquet as pq

from anabranch.common.remote_errors import lake_errors
from anabranch.iceberg.manifests import (
    content_by_hour,
    files_by_hour,
    hour_of_file,
    list_manifests,
    read_entries,
)
from anabranch.iceberg.snapshots import head, total
from anabranch.job import Job
from anabranch.offsets.hours import hour_of, shift
from anabranch.operations.reports.maintenance import speed_hours
from anabranch.protocol.ledger_row import Layer
from anabranch.protocol.measured import MEASURED, Measured, read_measured
from anabranch.protocol.state import State

if TYPE_CHECKING:
    from pyiceberg.manifest import DataFile
    from pyiceberg.table import Table

NEWEST_HOURS = 3
"""Number of newest hours, including the running one, whose dead letters are counted by reason."""
# Maximum number of new dead-letter files that one read opens; later reads count the rest.
_OPENED = 64


@dataclass(frozen=True)
class RunningHour:
    """Files and bytes in `main` of the hour that receives records."""

    files: int = 0
    bytes: int = 0


@dataclass(frozen=True)
class MainContent:
    """Rows of `main` by serving layer, the running hour, dead letters of the newest hours by hour
    and reason (without hours that are not fully counted yet), and measurements by layer."""

    rows: Mapping[Layer, int] = field(default_factory=dict)
    running: RunningHour = RunningHour()
    dead_letters: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    measured: Mapping[Layer, Measured] = field(default_factory=dict)


class ContentReader:
    """Reader of a stream's content. Not thread-safe."""

    def __init__(self, job: Job) -> None:
        self._job = job
        # Keyed by manifest path and hour.
        self._running: dict[tuple[str, str], RunningHour] = {}
        self._reasons: dict[str, Counter[str]] = {}

    def read(self, state: State, now: datetime) -> MainContent:
        """Return the content at a state. Raises Transient when the lake is unreachable."""
        job = self._job
        running = max(state.timeline.open, hour_of(now))
        return MainContent(
            rows=_rows_by_layer(state, running),
            running=self._running_hour(state.table, running),
            dead_letters=self._dead_letters(job.lake.load(job.stream.dead_letters_table), running),
            measured=read_measured(state.branch_properties["main"].get(MEASURED)),
        )

    def _running_hour(self, table: Table, hour: str) -> RunningHour:
        with lake_errors(f"read the manifests of {'.'.join(table.name())}"):
            manifests, _ = list_manifests(table, head(table, "main"))
            wanted = {
                (m.manifest.manifest_path, hour): m.manifest for m in manifests if m.may_hold(hour)
            }
            known = {key: part for key, part in self._running.items() if key in wanted}
            new = [key for key in wanted if key not in known]
            for key, entries in zip(
                new, read_entries(table.io, [wanted[key] for key in new]), strict=True
            ):
                files = [e.data_file for e in entries if hour_of_file(table, e.data_file) == hour]
                known[key] = RunningHour(len(files), sum(f.file_size_in_bytes for f in files))
        self._running, parts = known, known.values()
        return RunningHour(sum(p.files for p in parts), sum(p.bytes for p in parts))

    def _dead_letters(self, table: Table, running: str) -> dict[str, dict[str, int]]:
        hours = [shift(running, -back) for back in range(NEWEST_HOURS)]
        by_hour = files_by_hour(table, "main", hours)
        files = [file for hour in hours for file in by_hour.get(hour, {}).values()]
        known = {
            f.file_path: self._reasons[f.file_path] for f in files if f.file_path in self._reasons
        }
        for file in [f for f in files if f.file_path not in known][:_OPENED]:
            known[file.file_path] = _reasons(table, file)
        self._reasons = known
        return {
            hour: dict(sum((known[path] for path in paths), Counter[str]()))
            for hour, paths in sorted(by_hour.items())
            if paths.keys() <= known.keys()
        }


def _reasons(table: Table, file: DataFile) -> Counter[str]:
    with lake_errors(f"read {file.file_path}"), table.io.new_input(file.file_path).open() as stream:
        codes = pq.read_table(stream, columns=["error_code"])["error_code"].value_counts()
    return Counter({pair["values"]: pair["counts"] for pair in codes.to_pylist()})


def _rows_by_layer(state: State, running: str) -> dict[Layer, int]:
    by_speed = content_by_hour(state.table, "main", speed_hours(state, running)).values()
    speed = sum(content.rows for content in by_speed)
    return {"speed": speed, "batch": total(head(state.table, "main"), "records") - speed}
