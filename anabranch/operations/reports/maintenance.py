"""Report of maintenance: past runs, pending work, and the size of a stream's tables; and counts of
the content of `main`: dead letters of the newest hours by reason, and the jobs' measurements.
Repeated reads cache the reasons of immutable files."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import pyarrow.parquet as pq
from pyiceberg.manifest import DataFile
from pyiceberg.table import Table
from pyiceberg.table.snapshots import Snapshot

from anabranch.common.errors import AnabranchError
from anabranch.common.remote_errors import lake_errors
from anabranch.iceberg.expiry import expired_tags, plan_expiry, plan_plain_expiry
from anabranch.iceberg.ledger_files import SNAPSHOTS_KEPT
from anabranch.iceberg.manifests import (
    content_by_hour,
    files_by_hour,
)
from anabranch.iceberg.snapshots import BRANCHES, head, is_tag, total
from anabranch.job import Job
from anabranch.offsets.hours import hour_of, hours_between, shift
from anabranch.protocol.dead_letters import is_done
from anabranch.protocol.ledger_row import Layer
from anabranch.protocol.measured import (
    MEASURED,
    MaintenanceRun,
    Measured,
    Size,
    newest_complete,
    read_measured,
    read_runs,
)
from anabranch.protocol.state import State

HOURS_SHOWN = 24
"""Maximum number of hours listed: those with the most files."""


@dataclass(frozen=True)
class TableGrowth:
    """The size of a table's metadata file, the files and rows of `main`, and how many snapshots and
    tags the next maintenance expires. `manifests`: the distinct manifests of all branches."""

    metadata_bytes: int
    snapshots: int
    tags: int
    manifests: int
    files: int
    rows: int
    expirable: int


@dataclass(frozen=True)
class Maintenance:
    """The recorded runs, newest first, and the current state. `rows`: those of `main`, by the layer
    that serves them. `speed_files`: the number of speed files in `main` by hour, for the
    `HOURS_SHOWN` hours with the most. `letters_wait_since`: the time of the oldest publish of rows
    whose dead letters are not published yet. `unread`: the error of each table that could not be
    read."""

    runs: Sequence[MaintenanceRun] = ()
    tables: Mapping[str, TableGrowth] = field(default_factory=dict)
    rows: Mapping[Layer, int] = field(default_factory=dict)
    speed_files: Mapping[str, int] = field(default_factory=dict)
    letters_wait_since: datetime | None = None
    unread: Mapping[str, str] = field(default_factory=dict)

    @property
    def last(self) -> MaintenanceRun | None:
        return self.runs[0] if self.runs else None

    @property
    def complete(self) -> MaintenanceRun | None:
        """The newest run that completed all steps."""
        return newest_complete(self.runs)

    @property
    def spared(self) -> Mapping[str, Size]:
        """Unreferenced files by table that the last run kept because they were too young."""
        if self.last is not None:
            return {name: table.spared for name, table in self.last.tables.items()}
        return {}

    def as_dict(self) -> dict[str, Any]:
        return {
            "last": self.last,
            "complete": self.complete,
            "waits": {
                "speed_files": self.speed_files,
                "spared": self.spared,
                "letters_wait_since": self.letters_wait_since,
            },
            "tables": self.tables,
            "unread": self.unread,
        }


def read_maintenance(job: Job, state: State, now: datetime) -> Maintenance:
    """Read the tables' metadata and manifest lists. Raises Terminal or Transient for the table of
    rows; other unreadable ones, as a view's before `apply`, are in `unread`."""
    lake, stream = job.lake, job.stream
    pending = state.dead_letters
    tables, unread = {stream.table: _of_branches(state.table, now)}, {}
    for name in (*stream.branched_tables, *stream.plain_tables):
        try:
            table = lake.load(name)
            if name in stream.plain_tables:
                tables[name] = _of_plain(table)
                continue
            is_of_letters = name == stream.dead_letters_table
            tables[name] = _of_branches(table, now, state.waiting_letters if is_of_letters else ())
            if is_of_letters:
                # The table of rows names published sets until its next publish.
                pending = tuple(item for item in pending if not is_done(table, item))
        except AnabranchError as error:
            unread[name] = str(error)
    speed = content_by_hour(state.table, "main", speed_hours(state, running_hour(state, now)))
    most = sorted(speed, key=lambda hour: (-speed[hour].files, hour))[:HOURS_SHOWN]
    speed_rows = sum(content.rows for content in speed.values())
    batch_rows = total(head(state.table, "main"), "records") - speed_rows
    since = min((datetime.fromisoformat(str(item["at"])) for item in pending), default=None)
    return Maintenance(
        runs=read_runs(state.table.properties),
        tables=tables,
        rows={"speed": speed_rows, "batch": batch_rows},
        speed_files={hour: speed[hour].files for hour in sorted(most)},
        letters_wait_since=since.replace(tzinfo=since.tzinfo or UTC) if since is not None else None,
        unread=unread,
    )


def _of_branches(table: Table, now: datetime, waiting: Collection[str] = ()) -> TableGrowth:
    with lake_errors(f"read the manifest lists of {'.'.join(table.name())}"):
        named = {
            m.manifest_path for branch in BRANCHES for m in head(table, branch).manifests(table.io)
        }
    expirable = len(plan_expiry(table, None, now, waiting=waiting)) + len(expired_tags(table, now))
    return _growth(table, head(table, "main"), len(named), expirable)


def _of_plain(table: Table) -> TableGrowth:
    main = table.current_snapshot()
    with lake_errors(f"read the manifest list of {'.'.join(table.name())}"):
        manifests = len(main.manifests(table.io)) if main is not None else 0
    return _growth(table, main, manifests, len(plan_plain_expiry(table, SNAPSHOTS_KEPT)))


def _growth(table: Table, main: Snapshot | None, manifests: int, expirable: int) -> TableGrowth:
    files, rows = total(main, "data-files"), total(main, "records")
    with lake_errors(f"ask for the size of {table.metadata_location}"):
        metadata_bytes = len(table.io.new_input(table.metadata_location))
    tags = sum(is_tag(table.metadata.refs, name) for name in table.metadata.refs)
    return TableGrowth(
        metadata_bytes, len(table.snapshots()), tags, manifests, files, rows, expirable
    )


def running_hour(state: State, now: datetime) -> str:
    """Return the hour that receives records; after an adoption it may be in the future. Pure."""
    return max(state.timeline.open, hour_of(now))


def speed_hours(state: State, running: str) -> list[str]:
    """Return the hours up to the running one that the speed layer serves in `main`. Pure."""
    hours = {
        *state.timeline.sealed,
        *state.overrides,
        *hours_between(state.timeline.open, shift(running, 1)),
    }
    return sorted(hour for hour in hours if state.served_by(hour) == "speed")


def last_run_words(view: Maintenance) -> str:
    """Return the last run's result as a sentence. Pure."""
    last, complete = view.last, view.complete
    if last is None:
        return "no run recorded"
    if last.is_complete:
        return f"all steps completed at {last.ended.isoformat(timespec='seconds')}"
    steps = "; ".join(f"{step}: {reason}" for step, reason in last.failed.items())
    before = "no recorded run was complete"
    if complete is not None:
        before = f"the last complete run ended at {complete.ended.isoformat(timespec='seconds')}"
    return f"steps failed at {last.ended.isoformat(timespec='seconds')}: {steps}; {before}"


NEWEST_HOURS = 3
"""Number of newest hours, including the running one, whose dead letters are counted by reason."""
# Maximum number of new dead-letter files that one read opens; later reads count the rest.
_OPENED = 64


@dataclass(frozen=True)
class MainContent:
    """Dead letters of the newest hours by hour and reason (without hours that are not fully counted
    yet), and measurements by layer."""

    dead_letters: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    measured: Mapping[Layer, Measured] = field(default_factory=dict)


class ContentReader:
    """Reader of a stream's content. Not thread-safe."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._reasons: dict[str, Counter[str]] = {}

    def read(self, state: State, now: datetime) -> MainContent:
        """Return the content at a state. Raises Transient when the lake is unreachable."""
        job = self._job
        letters = job.lake.load(job.stream.dead_letters_table)
        return MainContent(
            dead_letters=self._dead_letters(letters, running_hour(state, now)),
            measured=read_measured(state.branch_properties["main"].get(MEASURED)),
        )

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
