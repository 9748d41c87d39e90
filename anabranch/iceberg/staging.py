"""Stage: Spark writes rows as files and one snapshot that readers do not see (Iceberg's
write-audit-publish)."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

from anabranch.common.errors import Terminal, Transient
from anabranch.iceberg.clock import is_within
from anabranch.iceberg.manifests import own_spec_id
from anabranch.iceberg.snapshots import (
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
    """Return Spark's write options for the partition spec of `apply`, if another program has set
    another default."""
    own = own_spec_id(table)
    return {"output-spec-id": str(own)} if own != table.spec().spec_id else {}


def stage_written(
    lake: Lake, table_name: str, written: Written, *, protected: bool = False
) -> Staged:
    """Stage files under their id. `protected` as in `stage`. Raises Transient if they were begun
    longer than WITHIN ago."""
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
    """Return only the staged rows, as in the files. Raises Terminal for a snapshot without a
    parent."""
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
