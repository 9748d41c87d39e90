"""Reading and writing the archive of a stream's records in the batch layer
(`anabranch.protocol.archive`)."""

from __future__ import annotations

import logging
from collections.abc import Collection

from pyiceberg.table import Table
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from anabranch.common.errors import Transient
from anabranch.common.fail_points import Step, reach
from anabranch.config import Stream
from anabranch.iceberg.commits import Commit
from anabranch.iceberg.lake import Lake
from anabranch.iceberg.manifests import files_by_hour
from anabranch.iceberg.snapshots import Staged, heads
from anabranch.iceberg.staging import stage
from anabranch.job import Job
from anabranch.offsets.hours import Cut
from anabranch.protocol import archive
from anabranch.protocol.publish import new_id
from anabranch.protocol.state import State, load_state
from batch_layer.duplicates import PLACE_COLUMNS
from batch_layer.lost_files import LostFiles

LOG = logging.getLogger(__name__)

_ATTEMPTS = 5


def read_archive(job: Job, spark: SparkSession, lost: LostFiles, hour: str, cut: Cut) -> DataFrame:
    """Return the archived records of an hour, in the columns of Spark's Kafka source and
    `ingest_hour`."""
    name = job.stream.archive_table
    rows = lost.read(spark, name, heads(job.lake.load(name))["main"], [hour])
    return as_kafka_records(rows.where(F.col("topic_id") == cut.topic_id))


def as_kafka_records(rows: DataFrame) -> DataFrame:
    """Return archived records or dead letters in the columns of Spark's Kafka source and
    `ingest_hour`."""
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
