"""Rebuilds without files that storage has lost.

An hour whose records Kafka or the archive has needs none of the table's old files: they are read to
find duplicates, to compare the layers, and for records that Kafka lacks. So a rebuild that meets a
missing file looks for all lost files around its hour, and reads the others.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable

from pyiceberg.manifest import DataFile
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from anabranch.iceberg.files import LostFile, find_lost_files
from anabranch.iceberg.manifests import files_at
from anabranch.iceberg.snapshots import Staged
from anabranch.iceberg.staging import read_snapshot, read_staged
from anabranch.job import Job
from anabranch.protocol.publish import new_id
from anabranch.protocol.state import State

LOG = logging.getLogger(__name__)


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
