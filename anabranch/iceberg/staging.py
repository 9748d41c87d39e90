"""Stage: Spark writes rows as files and one snapshot that readers do not see (Iceberg's
write-audit-publish). And tags for snapshots that a long read needs.

Each publish expires all but the newest hundred snapshots, even while another process reads them.
Spark reloads a snapshot whenever it plans a query, so the head that a rebuild started from must
stay until the rebuild ends. A tag keeps it. The tag has a maximum age, so tags of killed processes
expire.
"""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

from anabranch.common.errors import AnabranchError, JvmGone, Terminal, Transient
from anabranch.iceberg.clock import is_within
from anabranch.iceberg.commits import Commit, Tag
from anabranch.iceberg.lake import Lake
from anabranch.iceberg.manifests import own_spec_id
from anabranch.iceberg.snapshots import (
    READING,
    STAGING,
    WAP_ID,
    Staged,
    find_staged,
    staged_ref,
    staged_snapshot,
)

if TYPE_CHECKING:
    from pyiceberg.manifest import DataFile
    from pyiceberg.table import Table
    from pyspark.sql import DataFrame, SparkSession

    from anabranch.iceberg.lake import Lake

LOG = logging.getLogger(__name__)

MOST_OPEN_FILES = 64
"""The maximum open files of a staging task; each needs about a megabyte."""

# Until its snapshot exists, a written file is unreferenced: orphan removal, which keeps files
# younger than a day, may delete it. A staged snapshot that no publish names expires after a day.
WITHIN = timedelta(hours=12)
# Files without a snapshot are published only while younger than this, by a commit sent within
# `lake.PREPARED_WITHIN` of its decision. Together this is less than an hour, the minimum age of
# files that other programs' orphan removal deletes.
NAMED_WITHIN = timedelta(minutes=30)


@dataclass(frozen=True)
class Written:
    """Rows in unreferenced files, of one attempt of each task. `id`: the id of the staging.
    `began`: the clock's time before the first file was opened.
    """

    id: str
    began: datetime
    files: tuple[DataFile, ...]

    @property
    def rows(self) -> int:
        return sum(f.record_count for f in self.files)


def is_young(began: datetime, now: datetime) -> bool:
    """Return whether files that were opened at `began` or later are so young that no orphan
    removal, ours or another program's, can delete them before they are published. Pure.

    Read `now` after loading the heads that the publish requires: our orphan removal moves one of
    them before it deletes, which refuses the publish. With an earlier `now`, it could move the head
    and delete the files before the heads are loaded.
    """
    return is_within(NAMED_WITHIN, began, now)


def is_staged(table: Table, wap_id: str, now: datetime) -> bool:
    """Return whether an attempt's snapshot is there, and so are the dead letters staged after it.
    Pure.

    The commit that names both requires the snapshot, but not that of the dead letters, which is in
    another table: a process that was suspended for a day would publish the hour without them.
    """
    found = staged_snapshot(table, wap_id)
    return found is not None and is_within(
        WITHIN, datetime.fromtimestamp(found.timestamp_ms / 1000, UTC), now
    )


def stage(
    frame: DataFrame,
    lake: Lake,
    catalog: str,
    table_name: str,
    wap_id: str,
    options: Mapping[str, str] | None = None,
    *,
    protected: bool = False,
) -> Staged:
    """Write `frame` (the table's columns, by name) under `wap_id`; no reader sees the rows.

    `wap_id` must be new: exactly one snapshot has it. Nullability is not checked: the decoder
    guarantees it. `protected`: the same commit makes a branch of the snapshot,
    `snapshots.staged_ref`, so that other programs do not expire it. Raises Transient if the
    snapshot is missing after a successful write (it was expired meanwhile), or if staging took
    longer than WITHIN (the process was suspended).
    """
    # The JVM takes the snapshot's timestamp from the same machine's clock.
    first = lake.clock.now()
    session = frame.sparkSession
    began = time.monotonic()
    setting = "spark.wap.branch" if protected else "spark.wap.id"
    # Decision 42: publishes name dead letters for any time, so their snapshot gets a branch in the
    # commit that adds it. Rows can be staged again.
    session.conf.set(setting, staged_ref(wap_id) if protected else wap_id)
    try:
        # Decision 5: not `main`. If Iceberg's client repeats a stage that had landed, it moves the
        # target branch to it: the rows would be visible unchecked, and twice after their publish.
        target = (
            f"{catalog}.{table_name}" if protected else f"{catalog}.{table_name}.branch_{STAGING}"
        )
        writer = frame.writeTo(target).option("check-nullability", "false")
        if protected:
            writer = writer.option(f"snapshot-property.{WAP_ID}", wap_id)
        for key, value in (options or {}).items():
            writer = writer.option(key, value)
        writer.append()
    finally:
        # The next stage of the session would otherwise write under the same id, and one publish
        # would name two stages.
        session.conf.unset(setting)
    # Read the files from the table, not from the writer: only they are in the snapshot that the
    # publish requires.
    staged = find_staged(lake.load(table_name), wap_id)
    if staged is None:
        raise Transient(
            f"stage {wap_id} in {table_name}: expected its snapshot, found none; try again"
        )
    _require_young(lake, table_name, staged, first)
    LOG.debug(
        "staged %s: %d rows in %d files, %.2f s",
        wap_id,
        staged.rows,
        len(staged.files),
        time.monotonic() - began,
    )
    return staged


def by_own_spec(table: Table) -> dict[str, str]:
    """Return Spark's write options for `apply`'s partition spec, if it is not the default."""
    own = own_spec_id(table)
    return {"output-spec-id": str(own)} if own != table.spec().spec_id else {}


def stage_written(
    lake: Lake, table_name: str, written: Written, *, protected: bool = False
) -> Staged:
    """Stage files under their id. Raises Transient if they were begun longer than WITHIN ago."""
    staged = lake.stage(table_name, written.id, written.files, protected=protected)
    _require_young(lake, table_name, staged, written.began)
    return staged


def _require_young(lake: Lake, table_name: str, staged: Staged, first: datetime) -> None:
    """Raise Transient, and discard the staged snapshot, if orphan removal may have deleted files
    that were opened at `first` or later."""
    now = lake.clock.now()
    if not is_within(WITHIN, first, now):
        lake.discard(table_name, staged)
        raise Transient(
            f"stage {staged.wap_id} in {table_name}: expected it to take at most {WITHIN}, found "
            f"{now - first}: orphan removal may have deleted its files; try again"
        )


def read_snapshot(
    session: SparkSession, catalog: str, table_name: str, snapshot_id: int
) -> DataFrame:
    """Return the table's rows as of a snapshot."""
    return session.sql(f"SELECT * FROM {catalog}.{table_name} VERSION AS OF {snapshot_id}")


def read_staged(session: SparkSession, catalog: str, table_name: str, staged: Staged) -> DataFrame:
    """Return the staged rows, as in the files. Raises Terminal for a snapshot without parent."""
    if staged.parent_id is None:
        raise Terminal(
            f"staged snapshot {staged.wap_id} of {table_name}: expected a parent, found none; "
            "start the job again, which stages again"
        )
    return (
        session.read.format("iceberg")
        .option("start-snapshot-id", str(staged.parent_id))
        .option("end-snapshot-id", str(staged.snapshot_id))
        .load(f"{catalog}.{table_name}")
    )


@contextmanager
def held_snapshots(
    lake: Lake, table_name: str, snapshots: Iterable[int], what: str = ""
) -> Iterator[None]:
    """Keep commits from expiring these snapshots inside the context, for at most half a day. Moves
    no head, so it causes no publish to be refused. Raises Transient if a snapshot is already
    expired, or if other commits come first for a quarter of a minute.

    If the process or its JVM dies meanwhile, the tags stay, and `count_deaths` finds them by
    `what`.
    """
    name = f"{READING}{what}-{uuid.uuid4().hex}" if what else f"{READING}{uuid.uuid4().hex}"
    tags = {f"{name}-{i}": snapshot for i, snapshot in enumerate(dict.fromkeys(snapshots))}
    # Decision 39: the speed layer expires all but the newest hundred snapshots, 100 s with a
    # trigger of 2 s; a rebuild reads for longer.
    _hold(lake, table_name, tags)
    try:
        yield
    except JvmGone:
        raise
    except BaseException:
        _release(lake, table_name, tags)
        raise
    _release(lake, table_name, tags)


def count_deaths(table: Table, what: str) -> int:
    """Return how many reads of `what` have not ended: their processes died, or read. Pure."""
    begin = f"{READING}{what}-"
    tags = [name for name in table.metadata.refs if name.startswith(begin)]
    return len({name.rpartition("-")[0] for name in tags})


def _hold(lake: Lake, table_name: str, tags: dict[str, int]) -> None:
    age = int(WITHIN.total_seconds() * 1000)
    made = tuple(Tag(name, snapshot, age) for name, snapshot in tags.items())

    def plan(table: Table) -> Commit | None:
        if gone := [s for s in tags.values() if table.metadata.snapshot_by_id(s) is None]:
            raise Transient(
                f"read {table_name}: expected snapshot {gone[0]}, found it expired meanwhile; try "
                "again"
            )
        # The answer of the previous attempt may have been lost.
        if tags.keys() <= table.metadata.refs.keys():
            return None
        return Commit(uuid.uuid4().hex, {}, (), tags=made)

    lake.commit_until_landed(table_name, "keep snapshots for a read", plan)


def _release(lake: Lake, table_name: str, tags: dict[str, int]) -> None:
    def plan(table: Table) -> Commit | None:
        left = tuple(name for name in tags if name in table.metadata.refs)
        return Commit(uuid.uuid4().hex, {}, (), drop_tags=left) if left else None

    try:
        lake.commit_until_landed(table_name, "remove the tags of a read", plan)
    except AnabranchError as error:
        LOG.debug("tags of %s stay until their age ends: %s", table_name, error)
