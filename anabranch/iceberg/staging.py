"""Stage: Spark writes rows as files and one snapshot that no branch points to (Iceberg's
write-audit-publish)."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import TYPE_CHECKING

from anabranch.common.errors import Terminal, Transient
from anabranch.iceberg.snapshots import STAGING, WAP_ID, Staged, find_staged, staged_ref

if TYPE_CHECKING:
    from pyiceberg.manifest import DataFile
    from pyspark.sql import DataFrame, SparkSession

    from anabranch.iceberg.lake import Lake

LOG = logging.getLogger(__name__)

MOST_OPEN_FILES = 64
"""The most files that a staging task opens at once; each needs about a megabyte."""

# Until its snapshot exists, a written file is unreferenced: orphan removal, which keeps files
# younger than a day, may delete it.
WITHIN = timedelta(hours=12)
# Files that no snapshot names are published only while they are younger than this, and their commit
# is asked for within `lake.PREPARED_WITHIN` of its decision: together less than an hour, the least
# age by which other programs' orphan removal takes files.
NAMED_WITHIN = timedelta(minutes=30)


@dataclass(frozen=True)
class Written:
    """Rows in unreferenced files of the attempt `id`: the files of one attempt of each task.
    `began`: the clock's time before the first file was begun.
    """

    id: str
    began: datetime
    files: tuple[DataFile, ...]

    @property
    def rows(self) -> int:
        return sum(f.record_count for f in self.files)


def is_young(written: Written, now: datetime) -> bool:
    """Whether orphan removal, ours or another program's, spares the files for long enough that a
    publish may name them. Pure.

    `now` is read after the heads that the publish requires were loaded. From then on orphan removal
    moves one of them before it deletes; a clock that was read before may be of a time when the
    files were young and the head another.
    """
    return abs(now - written.began) <= NAMED_WITHIN


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
    """Write `frame` (columns of the table, by name) under `wap_id`; no reader sees the rows.

    `wap_id` must be new: exactly one snapshot carries it. The decoder guarantees nullability; it is
    not checked again. `protected`: the same commit makes a branch of the snapshot,
    `snapshots.staged_ref`, so that other programs do not expire it. Raises Transient when the
    snapshot is not there after a successful write (it was expired meanwhile), and when that took
    longer than WITHIN, as of a process that slept.
    """
    # The JVM stamps the snapshot by the same machine's clock.
    first = lake.clock.now()
    session = frame.sparkSession
    began = time.monotonic()
    setting = "spark.wap.branch" if protected else "spark.wap.id"
    session.conf.set(setting, staged_ref(wap_id) if protected else wap_id)
    try:
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
        session.conf.unset(setting)
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


def stage_files(
    lake: Lake, table_name: str, wap_id: str, write: Callable[[], Sequence[DataFile]]
) -> Staged:
    """Stage the files that `write` writes, as `stage` does; for files that no snapshot refers to
    yet."""
    first = lake.clock.now()
    staged = lake.stage(table_name, wap_id, write())
    _require_young(lake, table_name, staged, first)
    return staged


def _require_young(lake: Lake, table_name: str, staged: Staged, first: datetime) -> None:
    """Raises Transient if the files, begun at `first` or later, may be deleted as orphans by
    now."""
    if (took := lake.clock.now() - first) > WITHIN:
        lake.discard(table_name, staged)
        raise Transient(
            f"stage {staged.wap_id} in {table_name}: expected it within {WITHIN}, found that it "
            f"took {took}: its files may be deleted as orphans by now; try again"
        )


def read_snapshot(
    session: SparkSession, catalog: str, table_name: str, snapshot_id: int
) -> DataFrame:
    """The table's rows as of a snapshot, such as a branch's head that a decision rests on."""
    return session.sql(f"SELECT * FROM {catalog}.{table_name} VERSION AS OF {snapshot_id}")


def read_staged(session: SparkSession, catalog: str, table_name: str, staged: Staged) -> DataFrame:
    """Only the staged rows, as in the files."""
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
