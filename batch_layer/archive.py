"""Reading and writing the archive of a stream's records in the batch layer
(`anabranch.protocol.archive`), and rebuilds without files that storage has lost.

An hour whose records Kafka or the archive has needs none of the table's old files: they are read to
find duplicates, to compare the layers, and for records that Kafka lacks. So a rebuild that meets a
missing file looks for all lost files around its hour, and reads the others.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable

from pyiceberg.manifest import DataFile
from pyiceberg.table import Table
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from anabranch.common.errors import Transient
from anabranch.common.fail_points import Step, reach
from anabranch.config import Stream
from anabranch.iceberg.commits import Commit
from anabranch.iceberg.files import LostFile, find_lost_files
from anabranch.iceberg.lake import Lake
from anabranch.iceberg.manifests import files_at, files_by_hour
from anabranch.iceberg.snapshots import Staged, heads
from anabranch.iceberg.staging import read_snapshot, read_staged, stage
from anabranch.job import Job
from anabranch.offsets.hours import Cut
from anabranch.protocol import archive
from anabranch.protocol.publish import new_id
from anabranch.protocol.state import State, load_state
from batch_layer.duplicates import PLACE_COLUMNS


class LostFiles:
    """The lost files that a run has met, and reads of the tables without them."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._found: dict[str, LostFile] = {}
        self._staged: list[tuple[str, Staged]] = []

    def find(self, state: State, hours: Collection[str]) -> list[LostFile]:
        """Look for lost files of the stream's tables in `hours`; return those that were not known.
        Raises Transient, Terminal."""
        job = self._job
        names = [job.stream.dead_letters_table]
        names += [job.stream.archive_table] if job.stream.archive is not None else []
        tables = [state.table, *map(job.lake.load, names)]
        lost = [one for table in tables for one in find_lost_files(table, hours)]
        new = [one for one in lost if one.path not in self._found]
        for one in new:
            LOG.error(
                "stream %s: a file is gone from storage, the rebuild goes on without it hour=%s "
                "rows=%d file=%s branches=%s",
                job.stream.name,
                one.hour,
                one.rows,
                one.path,
                ",".join(one.branches),
            )
        self._found |= {one.path: one for one in new}
        return new

    def of_hour(self, hour: str, branch: str | None = None) -> list[LostFile]:
        """Return the lost files of an hour, in all tables, or in `branch` of the stream's table."""
        return [
            one
            for one in self._found.values()
            if one.hour == hour
            and (branch is None or (one.table == self._job.stream.table and branch in one.branches))
        ]

    def without(self, files: Iterable[DataFile]) -> list[DataFile]:
        """Return the files that storage has."""
        return [file for file in files if file.file_path not in self._found]

    def read(
        self, spark: SparkSession, table_name: str, snapshot_id: int, hours: Collection[str]
    ) -> DataFrame:
        """Return the rows of `hours` in a snapshot, from the files that storage has."""
        catalog = self._job.environment.catalog.name
        rows = read_snapshot(spark, catalog, table_name, snapshot_id).where(
            F.col("ingest_hour").isin([*hours])
        )
        if not any(self.of_hour(hour) for hour in hours):
            return rows
        table = self._job.lake.load(table_name)
        snapshot = table.metadata.snapshot_by_id(snapshot_id)
        assert snapshot is not None, "a rebuild keeps the snapshots that it reads"
        files = [f for of in files_at(table, snapshot, hours).values() for f in of.values()]
        kept = self.without(files)
        if len(kept) == len(files):
            return rows
        if not kept:
            return rows.limit(0)
        # Iceberg's readers cannot leave out a file: a staged snapshot names the others again.
        staged = self._job.lake.stage(table_name, new_id(), kept)
        self._staged.append((table_name, staged))
        return read_staged(spark, catalog, table_name, staged)

    def release(self) -> None:
        """Expire the snapshots that `read` staged. Their files stay: branches name them."""
        while self._staged:
            self._job.lake.discard(*self._staged.pop())


LOG = logging.getLogger(__name__)

_ATTEMPTS = 5


def read_archive(job: Job, spark: SparkSession, lost: LostFiles, hour: str, cut: Cut) -> DataFrame:
    """Return an hour's archived records, in the columns of Spark's Kafka source, `ingest_hour`."""
    name = job.stream.archive_table
    rows = lost.read(spark, name, heads(job.lake.load(name))["main"], [hour])
    return as_kafka_records(rows.where(F.col("topic_id") == cut.topic_id))


def as_kafka_records(rows: DataFrame) -> DataFrame:
    """Return archived records or dead letters in the columns of Spark's source, `ingest_hour`."""
    return rows.selectExpr(
        "kafka_partition AS partition",
        "kafka_offset AS offset",
        "kafka_timestamp AS timestamp",
        "ingest_hour",
        "key",
        "value",
        "headers",
    )


def write_archive(
    job: Job,
    spark: SparkSession,
    lost: LostFiles,
    decoded: DataFrame,
    hour: str,
    cut: Cut,
    state: State,
) -> None:
    """Archive the records of an hour that its archive lacks. `decoded`: records that Kafka gave,
    with their bytes, without the records that the erasures of `state` remove; read more than once.

    Each record is in the archive once, also after a retry or beside another job. Nothing is
    archived if the hour has expired or a new erasure concerns it: the hour is then read again.
    Raises Transient.
    """
    records = decoded.selectExpr(
        f"'{cut.topic_id}' AS topic_id",
        *PLACE_COLUMNS,
        "kafka_timestamp",
        "ingest_hour",
        *(f"kafka_{name} AS {name}" for name in ("key", "value", "headers")),
    )
    for _ in range(_ATTEMPTS):
        if _write(job, spark, lost, records, hour, cut, state):
            return
    raise Transient(
        f"archive hour {hour} of {job.stream.name}: expected unchanged files in one of "
        f"{_ATTEMPTS} attempts, found changes in each; run it again"
    )


def _write(
    job: Job,
    spark: SparkSession,
    lost: LostFiles,
    records: DataFrame,
    hour: str,
    cut: Cut,
    state: State,
) -> bool:
    """Try to archive the records. Return True if nothing is left to archive."""
    lake, stream, catalog = job.lake, job.stream, job.environment.catalog.name
    # List the files before the records are compared with them: a file that is added later is in
    # `has`, but not in `had`, and the commit is refused. Else its records would be archived twice.
    had = _paths(lake.load(stream.archive_table), hour)
    if had:
        there = read_archive(job, spark, lost, hour, cut).selectExpr(
            "partition AS kafka_partition", "offset AS kafka_offset"
        )
        records = records.join(there, PLACE_COLUMNS, "left_anti")
    if records.isEmpty():
        return True
    # Whole tasks of the read, without a shuffle.
    files = records.coalesce(spark.sparkContext.defaultParallelism).sortWithinPartitions(
        *PLACE_COLUMNS
    )
    options = {
        "use-table-distribution-and-ordering": "false",
        "target-file-size-bytes": str(stream.files.target),
    }
    staged = stage(files, lake, catalog, stream.archive_table, new_id(), options)
    reach(Step.ARCHIVE_STAGED)
    if land_archive(lake, stream, staged, had, hour, cut, state):
        reach(Step.ARCHIVE_PUBLISHED)
        LOG.info(
            "stream %s: archived hour=%s records=%d files=%d",
            stream.name,
            hour,
            staged.rows,
            len(staged.files),
        )
        return True
    lake.discard(stream.archive_table, staged)
    return not archive.is_current(state, load_state(lake, stream.table), hour, cut)


def land_archive(
    lake: Lake,
    stream: Stream,
    staged: Staged,
    had: Collection[str],
    hour: str,
    cut: Cut,
    state: State,
) -> bool:
    """Commit staged records to the archive. Return False if its files of the hour are no longer
    `had`, or if the hour was erased from or expired since `state`. Raises Transient."""

    def plan(table: Table) -> Commit | None:
        # Load the rows' state after the archive's: an erasure since then moves the archive's head.
        is_current = archive.is_current(state, load_state(lake, stream.table), hour, cut)
        return archive.plan_archive(
            table, staged, had, _paths(table, hour), is_current, lake.clock.now()
        )

    what = f"archive hour {hour} of {stream.name}"
    return lake.commit_until_landed(stream.archive_table, what, plan) is not None


def _paths(table: Table, hour: str) -> frozenset[str]:
    return frozenset(files_by_hour(table, "main", {hour}).get(hour, ()))
