"""Runs of maintenance: each is a property of the stream's table, `anabranch.maintained.<id>`.

A run is recorded when it ends, whether or not its steps succeeded, in a commit that moves no head.
So two runs that end at once do not overwrite each other, and no publish is refused because of one.
The table keeps the newest runs and the newest complete one. A run that was killed or cannot reach
the lake at its end is not recorded.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from datetime import datetime
from typing import TYPE_CHECKING

from anabranch.common.json_values import parse
from anabranch.iceberg.commits import Commit
from anabranch.iceberg.lake import Lake

if TYPE_CHECKING:
    from pyiceberg.table import Table

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
        times = {"began": self.began.isoformat(), "ended": self.ended.isoformat()}
        return json.dumps(asdict(self) | {"failed": failed} | times, separators=(",", ":"))


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
    """Return keys and runs, newest first. Skips values that do not parse: edited by hand, or of a
    later version."""
    runs = []
    for key, text in properties.items():
        if key.startswith(_PREFIX):
            try:
                runs.append((key, parse(MaintenanceRun, text)))
            except ValueError:
                continue
    return sorted(runs, key=lambda pair: pair[1].ended, reverse=True)
