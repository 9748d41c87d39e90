"""What maintenance did, what waits for it, and what of a stream's tables grows."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from anabranch.common.errors import AnabranchError
from anabranch.common.output import print_table
from anabranch.common.remote_errors import lake_errors
from anabranch.iceberg.ledger_files import SNAPSHOTS_KEPT
from anabranch.iceberg.manifests import list_manifests
from anabranch.iceberg.snapshots import (
    BRANCHES,
    content_by_hour,
    expired_tags,
    head,
    is_tag,
    plan_expiry,
    plan_plain_expiry,
    total,
)
from anabranch.job import Job
from anabranch.offsets.hours import hour_of, hours_between, shift
from anabranch.protocol.maintained import MaintenanceRun, Size, newest_complete, read_runs
from anabranch.protocol.state import State, load_state

if TYPE_CHECKING:
    from pyiceberg.table import Table

HOURS_SHOWN = 24
"""At most this many hours, those with the most files, are listed."""


@dataclass(frozen=True)
class TableGrowth:
    """How large a table's own account of itself is, what of `main` it accounts for, and how many of its snapshots and
    tags the next maintenance expires. `manifests`: those that a branch names, each once."""

    metadata_bytes: int
    snapshots: int
    tags: int
    manifests: int
    files: int
    rows: int
    expirable: int


@dataclass(frozen=True)
class Maintenance:
    """The runs that are remembered, newest first, and what is there now.

    `speed_files`: by hour that `main` serves from the speed layer, its files there, until they are rolled up or the
    batch layer serves the hour; of the `HOURS_SHOWN` hours that have the most. `oldest_dead_letter`: the first hour of
    which `main` has any. `letters_wait_since`: when the oldest publish of rows was, whose dead letters did not follow
    it yet. `unread`: by table beside that of the rows, why nothing is known of it.
    """

    runs: Sequence[MaintenanceRun] = ()
    tables: Mapping[str, TableGrowth] = field(default_factory=dict)
    speed_files: Mapping[str, int] = field(default_factory=dict)
    oldest_dead_letter: str | None = None
    letters_wait_since: datetime | None = None
    unread: Mapping[str, str] = field(default_factory=dict)

    @property
    def last(self) -> MaintenanceRun | None:
        """The newest run."""
        return self.runs[0] if self.runs else None

    @property
    def complete(self) -> MaintenanceRun | None:
        """The newest run that did all its steps."""
        return newest_complete(self.runs)

    @property
    def spared(self) -> Mapping[str, Size]:
        """By table, what nothing referred to when the last run looked, and what was not of age yet."""
        return {name: table.spared for name, table in self.last.tables.items()} if self.last is not None else {}

    def as_dict(self) -> dict[str, Any]:
        return {
            "last": self.last,
            "complete": self.complete,
            "waits": {
                "speed_files": self.speed_files,
                "spared": self.spared,
                "oldest_dead_letter": self.oldest_dead_letter,
                "letters_wait_since": self.letters_wait_since,
            },
            "tables": self.tables,
            "unread": self.unread,
        }


def read_maintenance(job: Job, now: datetime) -> Maintenance:
    """Read the tables' metadata and their manifest lists. Raises Terminal, Transient when the rows' table cannot be
    read; another one, such as of a view that `apply` has not seen yet, is left out."""
    lake, stream = job.lake, job.stream
    state = load_state(lake, stream.table)
    waiting = {str(item["id"]): str(item["at"]) for item in state.dead_letters}
    tables, unread = {stream.table: _of_branches(state.table, now)}, {}
    oldest = None
    for name in (stream.dead_letters_table, *stream.plain_tables, *map(stream.partials_table, stream.views)):
        try:
            table = lake.load(name)
            if name in stream.plain_tables:
                tables[name] = _of_plain(table)
                continue
            tables[name] = _of_branches(table, now, waiting if name == stream.dead_letters_table else ())
            if name == stream.dead_letters_table:
                oldest = _oldest_hour(table)
        except AnabranchError as error:
            unread[name] = str(error)
    since = min(map(datetime.fromisoformat, waiting.values()), default=None)
    return Maintenance(
        runs=read_runs(state.table.properties),
        tables=tables,
        speed_files=_speed_files(state, now),
        oldest_dead_letter=oldest,
        letters_wait_since=since.replace(tzinfo=since.tzinfo or UTC) if since is not None else None,
        unread=unread,
    )


def _oldest_hour(table: Table) -> str | None:
    with lake_errors(f"read the manifests of {'.'.join(table.name())}"):
        return min((m.first for m in list_manifests(table, head(table, "main"))[0] if m.first), default=None)


def _of_branches(table: Table, now: datetime, waiting: Collection[str] = ()) -> TableGrowth:
    with lake_errors(f"read the manifest lists of {'.'.join(table.name())}"):
        named = {m.manifest_path for branch in BRANCHES for m in head(table, branch).manifests(table.io)}
    expirable = len(plan_expiry(table, None, now, waiting=waiting)) + len(expired_tags(table, now))
    main = head(table, "main")
    return _growth(table, len(named), total(main, "data-files"), total(main, "records"), expirable)


def _of_plain(table: Table) -> TableGrowth:
    main = table.current_snapshot()
    if main is None:
        return _growth(table, 0, 0, 0, 0)
    with lake_errors(f"read the manifest list of {'.'.join(table.name())}"):
        manifests = len(main.manifests(table.io))
    expirable = len(plan_plain_expiry(table, SNAPSHOTS_KEPT))
    return _growth(table, manifests, total(main, "data-files"), total(main, "records"), expirable)


def _growth(table: Table, manifests: int, files: int, rows: int, expirable: int) -> TableGrowth:
    with lake_errors(f"ask for the size of {table.metadata_location}"):
        metadata_bytes = len(table.io.new_input(table.metadata_location))
    tags = sum(is_tag(table.metadata.refs, name) for name in table.metadata.refs)
    return TableGrowth(metadata_bytes, len(table.snapshots()), tags, manifests, files, rows, expirable)


def _speed_files(state: State, now: datetime) -> dict[str, int]:
    served = speed_hours(state, max(state.timeline.open, hour_of(now)))
    files = {hour: content.files for hour, content in content_by_hour(state.table, "main", served).items()}
    most = sorted(files, key=lambda hour: (-files[hour], hour))[:HOURS_SHOWN]
    return {hour: files[hour] for hour in sorted(most)}


def speed_hours(state: State, running: str) -> list[str]:
    """The hours up to the running one that `main` serves from the speed layer. Pure."""
    hours = {*state.timeline.sealed, *state.overrides, *hours_between(state.timeline.open, shift(running, 1))}
    return sorted(hour for hour in hours if state.served_by(hour) == "speed")


def last_run_words(view: Maintenance) -> str:
    """The last run's end in a sentence, for the page and the command. Pure."""
    last, complete = view.last, view.complete
    if last is None:
        return "no run is known"
    if last.is_complete:
        return f"all steps were done at {last.ended.isoformat(timespec='seconds')}"
    steps = "; ".join(f"{step}: {reason}" for step, reason in last.failed.items())
    before = f"all were done last at {complete.ended.isoformat(timespec='seconds')}" if complete is not None else ""
    never = before or "no run that is remembered did all"
    return f"steps failed at {last.ended.isoformat(timespec='seconds')}: {steps}; {never}"


COLUMNS = ("table", "metadata bytes", "snapshots", "to expire", "tags", "manifests", "files", "rows", "unreferenced")


def print_maintenance(view: Maintenance) -> None:
    """As people read it: what the last run was, and what grows and waits by table."""
    print(f"last run: {last_run_words(view)}")
    rows = [
        [
            name,
            t.metadata_bytes,
            t.snapshots,
            t.expirable,
            t.tags,
            t.manifests,
            t.files,
            t.rows,
            size.files if (size := view.spared.get(name)) is not None else None,
        ]
        for name, t in view.tables.items()
    ]
    print_table(COLUMNS, rows)
    for name, why in view.unread.items():
        print(f"not known of {name}: {why}")
    if view.speed_files:
        hour, files = max(view.speed_files.items(), key=lambda pair: pair[1])
        print(f"files of the speed layer in main: {sum(view.speed_files.values())}, most in {hour}: {files}")
    if view.letters_wait_since is not None:
        print(f"dead letters wait for their publish since {view.letters_wait_since.isoformat(timespec='seconds')}")
