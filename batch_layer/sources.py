"""Sources of an hour's records: Kafka, and the archive and the table for records that Kafka does
not give.

The archived bytes come first, then the table's accepted rows, then the dead letters' bytes, decoded
again, then the speed layer's rows and dead letters of the hour. Each offset comes from the first
source that has it, whatever the reason: a log that begins later, a compacted log, or a log that
omits records for an unknown reason.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, reduce
from typing import Any, TypeVar

import pyarrow as pa
from pyiceberg.manifest import DataFile
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from anabranch import records
from anabranch.common.errors import PositionError, Transient
from anabranch.common.remote_errors import one_line
from anabranch.decode.inputs import batch_of, split_records
from anabranch.iceberg.manifests import files_of
from anabranch.iceberg.parquet_writer import Output, Target
from anabranch.iceberg.rewriting import RowReader
from anabranch.iceberg.snapshots import Staged, heads
from anabranch.iceberg.staging import count_deaths, read_snapshot, stage_written
from anabranch.iceberg.table_schemas import rows_columns
from anabranch.job import Job
from anabranch.kafka.large_records import AHEAD, TOO_LARGE
from anabranch.kafka.source import apply_to_records, find_large, no_records, read_without_large
from anabranch.offsets.hours import Cut, HourRange
from anabranch.offsets.position import Position, Ranges, Topic, size, trim
from anabranch.protocol import dead_letters
from anabranch.protocol.publish import new_id
from anabranch.protocol.state import State, check_log_end
from anabranch.protocol.topic_change import gone_from_kafka
from anabranch.records import inside
from anabranch.records.erased import to_schema
from anabranch.records.staged import (
    MOST_VALUE_BYTES,
    Certain,
    Tables,
    TaskSpec,
    read_facts,
    stage_certain,
    stage_records,
    task_spec,
)
from anabranch.subjects.schemas import open_schemas
from batch_layer.archive import LostFiles, as_kafka_records, read_archive
from batch_layer.duplicates import PLACE_COLUMNS
from batch_layer.offset_counts import DRIFTS, OffsetMasks, ReadCounts, count_read
from batch_layer.passes import MOST_HASHED, SMALL, cached, in_one_task, write_tasks

T = TypeVar("T")

# The largest value of a record (bytes) that this process reads.
_LARGEST = 64 << 20

# The source of a record. No column of a stream can have this name.
_SOURCE = "read-from"

SOURCES = KAFKA, ARCHIVE, ACCEPTED, DEAD_LETTERS, SPEED = (
    "kafka",
    "archive",
    "accepted",
    "dead_letters",
    "speed",
)


@dataclass(frozen=True)
class StagedHour:
    """An hour that workers read, decoded and wrote in one pass: staged rows, with duplicates, and
    files of dead letters. `is_hashed`: whether the reports have hashes of keys. `in_kafka`: the
    part of the cut in Kafka's log."""

    rows: Staged
    certain: Certain
    target: Target
    is_hashed: bool
    in_kafka: Ranges

    @cached_property
    def outputs(self) -> dict[str, Output]:
        """The files of rows by path."""
        return {output.path: output for report in self.certain.reports for output in report.rows}

    @property
    def facts(self) -> pa.Table:
        """The places of all rows, and the hashes of their keys (`anabranch.records.staged`)."""
        facts = (read_facts(output.facts) for output in self.outputs.values())
        return pa.concat_tables([read_facts(None), *facts], promote_options="default")

    @cached_property
    def letters(self) -> list[pa.Table]:
        """The places of dead letters."""
        outputs = (output for report in self.certain.reports for output in report.letters)
        return [read_facts(output.facts) for output in outputs]

    def masks(self, ranges: Ranges) -> OffsetMasks:
        """Return the offsets that were read."""
        rows = (output for report in self.certain.reports for output in report.rows)
        return OffsetMasks.of(
            itertools.chain((read_facts(output.facts) for output in rows), self.letters), ranges
        )

    def counts(self, ranges: Ranges) -> ReadCounts:
        good, dead = self.certain.written.rows, self.certain.letters.rows
        sources = {KAFKA: good + dead} if good + dead else {}
        return ReadCounts(self.masks(ranges).distinct, good, dead, sources)


@dataclass(frozen=True)
class Stored:
    """Records of an hour that the archive or the table has and Kafka does not give. `accepted`: the
    accepted revision's offsets, if any. `places`: partition, offset and rank of the first of
    `ranked` that has the record."""

    accepted: DataFrame | None
    ranked: list[DataFrame]
    places: DataFrame


@dataclass(frozen=True)
class HourRecords:
    """An hour's records in Spark: `decoded`, in the columns of `records.decode`, and their source.
    `in_kafka`: the part of the cut in Kafka's log. `accepted`: after `fill`, the accepted
    revision's offsets, if any. `to_archive`: the records that Kafka gave, with all bytes, if the
    stream has an archive."""

    decoded: DataFrame
    in_kafka: Ranges
    accepted: DataFrame | None = None
    to_archive: DataFrame | None = None

    def counts(self, ranges: Ranges) -> ReadCounts:
        source = F.col(f"`{_SOURCE}`").alias("source")
        places = self.decoded.select(
            *PLACE_COLUMNS, source, "is_dead", "error_code", records.UNKNOWN
        )
        return count_read(places, ranges, SOURCES)


class HourReader:
    def __init__(self, job: Job, open_spark: Callable[[], SparkSession], lost: LostFiles) -> None:
        self._job, self._open_spark, self._lost = job, open_spark, lost
        self._stream = job.stream
        self._catalog = job.environment.catalog.name
        self._schemas = open_schemas(job.environment, job.stream)
        self._secret = job.environment.masking_secret
        self.out_of_memory = Counter[str]()
        """How often executors died or memory was exhausted in this process, by hour."""

    @property
    def _spark(self) -> SparkSession:
        return self._open_spark()

    def stage(self, hour: str, cut: Cut, state: State, order: Sequence[str]) -> StagedHour | None:
        """Read every record of the cut that Kafka has, once; workers decode and write them, sorted
        by `order`, or this process those of a small hour. Return None if the hour's records are
        needed in Spark. Raises like `read`."""
        stream, lake = self._stream, self._job.lake
        gone = gone_from_kafka(state.timeline, state.position.topic_id, hour, cut) is not None
        # The archive needs each record's bytes beside its row. The driver reads too large records,
        # and those near them.
        if gone or stream.archive is not None or self._deaths(hour, state):
            return None
        tables = Tables(state.table, lake.load(stream.dead_letters_table))
        self._schemas.forget_missing()
        spec = self._task_spec(hour, cut, tables, order)
        if not (ranges := self._ranges_in_kafka(hour, cut)) or spec is None:
            return None
        of_speed = files_of(state.table, "speed", hour)
        while True:
            certain = self._stage_ranges(hour, ranges, spec, tables, of_speed)
            # Decision 65: with the schemas that workers lacked, the records are staged again.
            if not self._schemas.learn(certain.unknown_ids):
                break
            spec = replace(spec, decode=replace(spec.decode, schemas=dict(self._schemas.known)))
        # Ask again: retention may have deleted records during the read.
        ranges = self._ranges_in_kafka(hour, cut)
        rows = stage_written(lake, stream.table, certain.written)
        return StagedHour(rows, certain, spec.target, bool(spec.key), ranges)

    def _stage_ranges(
        self,
        hour: str,
        ranges: Ranges,
        spec: TaskSpec,
        tables: Tables,
        of_speed: Sequence[DataFile],
    ) -> Certain:
        """Read, decode and write the records of ranges, in Spark's tasks or in this process."""
        attempt, began, target = new_id(), self._job.lake.clock.now(), self._stream.files.target
        # Decision 68: the start of Spark takes longer than a small hour, unless its records are so
        # large that several tasks would write them.
        if size(ranges) <= SMALL and write_tasks(size(ranges), of_speed, 2, target) == 1:
            batches = map(batch_of, self._read_here(ranges))
            try:
                return stage_records(batches, spec, tables, attempt, began)
            except MemoryError as error:
                # Decision 66: the next attempt looks for records that are too large.
                self.out_of_memory[hour] += 1
                raise Transient(
                    f"hour {hour}: expected its records to fit the memory of this process, found "
                    f"{one_line(error)}; nothing is published, run it again"
                ) from error
        at_once = self._spark.sparkContext.defaultParallelism
        tasks = write_tasks(size(ranges), of_speed, at_once, target)

        def use(raw: DataFrame) -> Certain:
            return stage_certain(raw.coalesce(tasks), spec, tables, attempt, began)

        return self._read_kafka(ranges, use, tasks)

    def _read_here(self, ranges: Ranges) -> Iterator[Sequence[Any]]:
        """Yield the records of ranges in parts, as kafka-python has them. Raises MemoryError for a
        record that only a bomb has, as a JVM of 2 GB does."""
        for _, found in self._job.kafka.read_records(self._stream.topic, ranges):
            for part in split_records(found):
                if (largest := max(len(r.value or b"") for r in part)) > _LARGEST:
                    raise MemoryError(f"a record of {largest} bytes")
                yield part

    def _task_spec(
        self, hour: str, cut: Cut, tables: Tables, order: Sequence[str]
    ) -> TaskSpec | None:
        return task_spec(
            self._stream,
            tables,
            rows_columns(self._stream).schema,
            self._schemas.known,
            [HourRange(hour, None)],
            cut.topic_id,
            self._secret,
            layer="batch",
            order=order,
            key=self._stream.key if cut.offsets <= MOST_HASHED else (),
        )

    def read(self, hour: str, cut: Cut, state: State) -> HourRecords:
        """Read and decode every record of the cut in Kafka, once, and cache them. Raises
        PositionError for a recreated topic, or a log that lost the cut's end, unless adopted."""
        gone = gone_from_kafka(state.timeline, state.position.topic_id, hour, cut) is not None
        ranges: Ranges = {} if gone else self._ranges_in_kafka(hour, cut)
        around, large = self._find_large(hour, ranges, state)

        def decode(raw: DataFrame) -> tuple[DataFrame, DataFrame | None]:
            raw = raw.withColumn("ingest_hour", F.lit(hour))
            if self._stream.archive is None:
                return cached(self._decode(raw, KAFKA)), None
            to_archive = cached(self._decoded(raw))
            return self._with_source(to_archive, KAFKA), to_archive

        if around is None and ranges:
            decoded, to_archive = self._read_kafka(ranges, decode)
        else:
            decoded, to_archive = decode(no_records(self._spark) if around is None else around)
        # Ask again: retention may have deleted records during the read.
        ranges = {} if gone else self._ranges_in_kafka(hour, cut)
        if large is not None:
            decoded = cached(decoded.unionByName(self._with_source(large, KAFKA)))
        return HourRecords(in_one_task(decoded, cut.offsets), ranges, to_archive=to_archive)

    def _ranges_in_kafka(self, hour: str, cut: Cut) -> Ranges:
        """Return the part of the cut in Kafka's log. Raises PositionError like `read`."""
        topic, kafka = self.require_topic(cut), self._job.kafka
        # A log that lost its end has other records at these offsets from now on: they would be
        # published as this hour's.
        end = Position(cut.topic_id, dict(cut.ends))
        check_log_end(
            end, kafka.stable_ends(topic, end.offsets), topic.name, f"the end of hour {hour}"
        )
        return trim(cut.ranges, kafka.log_starts(topic))

    def _read_kafka(self, ranges: Ranges, use: Callable[[DataFrame], T], tasks: int = 0) -> T:
        kafka, topic = self._job.environment.kafka, self._stream.topic
        return apply_to_records(self._spark, kafka, self._job.kafka, topic, ranges, use, tasks)

    def _deaths(self, hour: str, state: State) -> int:
        return count_deaths(state.table, hour) + self.out_of_memory[hour]

    def _find_large(
        self, hour: str, ranges: Ranges, state: State
    ) -> tuple[DataFrame | None, DataFrame | None]:
        """If earlier rebuilds of the hour died at records that are too large to be read, return the
        other records, and these as dead ones."""
        deaths = self._deaths(hour, state)
        if not deaths or not ranges:
            return None, None
        spark, kafka, topic = self._spark, self._job.environment.kafka, self._stream.topic
        described = self._job.kafka.describe(topic)
        ends = self._job.kafka.stable_ends(described) if described is not None else {}
        ahead = {p: (s, max(e, min(e + AHEAD, ends.get(p, 0)))) for p, (s, e) in ranges.items()}
        if not find_large(spark, self._job.kafka, topic, ahead, deaths):
            return None, None
        around, large = read_without_large(spark, kafka, self._job.kafka, topic, ranges, deaths)
        if not large:
            return around, None
        return around, records.too_large(spark, self._stream, large, lambda _: hour)

    def may_have_stored(self, held: OffsetMasks, hour: str, state: State) -> bool:
        """Return whether the table has a record of the hour whose place is not among `held`, for a
        stream without an archive. Reads the places in the files of the hour; True for an hour that
        was accepted before, whose offsets `find_stored` returns."""
        if state.is_accepted(hour):
            return True
        # As in `find_stored`.
        dead_letters.roll_forward(self._job.lake, self._stream.dead_letters_table, state)
        letters = self._job.lake.load(self._stream.dead_letters_table)
        branches = ("speed", "main") if hour in state.retained_hours else ("speed",)
        return held.lacks(
            pa.table(batch)
            for table, branch in itertools.product((state.table, letters), branches)
            for batch in RowReader.of(table).read(
                self._lost.without(files_of(table, branch, hour)), PLACE_COLUMNS
            )
        )

    def find_stored(self, read: DataFrame, hour: str, cut: Cut, state: State) -> Stored:
        """Find every record of the cut that the archive or the table has and whose place is not in
        `read`. An offset that Kafka does not give is no gap if one of them has its record."""
        # Dead letters named by a publish belong to the table even before their own table has them.
        dead_letters.roll_forward(self._job.lake, self._stream.dead_letters_table, state)
        letters = heads(self._job.lake.load(self._stream.dead_letters_table))
        batch = (state.heads["batch"], letters["batch"])
        accepted = (
            self._rows_and_letters(batch, hour, (ACCEPTED, DEAD_LETTERS))
            if state.is_accepted(hour)
            else []
        )
        stored = [
            *accepted,
            *self._rows_and_letters((state.heads["speed"], letters["speed"]), hour, (SPEED, SPEED)),
        ]
        if self._stream.archive is not None:
            # Bytes first: rows lack fields that were added to the schema since.
            stored.insert(
                0,
                self._decode(read_archive(self._job, self._spark, self._lost, hour, cut), ARCHIVE),
            )
        if hour in state.retained_hours:
            # Rows of the speed layer that only `main` still has.
            stored += self._rows_and_letters(
                (state.heads["main"], letters["main"]), hour, (SPEED, SPEED)
            )
        ranked = [
            frame.where(inside(cut.ranges)).withColumn("_rank", F.lit(i))
            for i, frame in enumerate(stored)
        ]
        # Compare positions first, two narrow columns: usually the table has nothing that Kafka
        # lacks.
        places = reduce(
            DataFrame.unionByName, (frame.select(*PLACE_COLUMNS, "_rank") for frame in ranked)
        )
        found = (
            # Kafka first: a record that Kafka has and the table has too would be a row twice.
            places.join(read.select(*PLACE_COLUMNS), PLACE_COLUMNS, "left_anti")
            .groupBy(*PLACE_COLUMNS)
            # One source for each offset: the branches have most records twice.
            .agg(F.min("_rank").alias("_rank"))
        )
        offsets = (
            reduce(DataFrame.union, (frame.select(*PLACE_COLUMNS) for frame in accepted))
            if accepted
            else None
        )
        return Stored(offsets, ranked, cached(found))

    def fill(self, read: HourRecords, hour: str, cut: Cut, state: State) -> HourRecords:
        """Add the records of archive or table (`find_stored`), each of its first source."""
        stored = self.find_stored(read.decoded, hour, cut, state)
        read = replace(read, accepted=stored.accepted)
        if stored.places.isEmpty():
            return read
        filled = (
            reduce(DataFrame.unionByName, stored.ranked)
            .join(stored.places, [*PLACE_COLUMNS, "_rank"], "left_semi")
            .drop("_rank")
        )
        all_records = cached(read.decoded.unionByName(filled))
        return replace(read, decoded=in_one_task(all_records, cut.offsets))

    def require_topic(self, cut: Cut) -> Topic:
        """Return the topic of the cut. Raises PositionError if it is gone or has another id."""
        topic = self._job.kafka.describe(self._stream.topic, Position(cut.topic_id, dict(cut.ends)))
        if topic is None or topic.id != cut.topic_id:
            raise PositionError(
                f"topic {self._stream.topic}: expected id {cut.topic_id}, found "
                f"{topic.id if topic else 'no topic'}: Kafka no longer has this hour; the speed "
                "layer's rows stay served; to continue with the topic as it is, run `anabranch "
                "adopt`"
            )
        return topic

    def repairable(self) -> dict[str, int]:
        """Return the number of dead letters of `main` that decode now, by hour."""
        letters = self._job.lake.load(self._stream.dead_letters_table)
        of_main = read_snapshot(
            self._spark, self._catalog, self._stream.dead_letters_table, heads(letters)["main"]
        )
        rows = (
            self._decode(
                as_kafka_records(of_main.where(F.col("error_code") != TOO_LARGE)), DEAD_LETTERS
            )
            .where("NOT is_dead")
            .groupBy("ingest_hour")
            .count()
            .collect()
        )
        return {
            row["ingest_hour"]: row["count"]
            for row in sorted(rows, key=lambda row: str(row["ingest_hour"]))
        }

    def _rows_and_letters(
        self, snapshots: tuple[int, int], hour: str, sources: tuple[str, str]
    ) -> list[DataFrame]:
        """Return an hour's rows and dead letters in a branch's snapshots of the two tables."""
        # A snapshot from before a column was added is read without it.
        columns = self._spark.table(f"{self._catalog}.{self._stream.table}").schema
        spark, stream, read = self._spark, self._stream, self._lost.read
        rows = to_schema(read(spark, stream.table, snapshots[0], [hour]), columns)
        letters = read(spark, stream.dead_letters_table, snapshots[1], [hour])
        is_large = F.col("error_code") == TOO_LARGE
        return [
            # These rows were checked when they were accepted.
            records.as_decoded(rows, stream).withColumn(_SOURCE, F.lit(sources[0])),
            self._decode(as_kafka_records(letters.where(~is_large)), sources[1]),
            # Without its bytes, the record would be decoded as another one.
            self._with_source(records.as_dead(letters.where(is_large), stream), sources[1]),
        ]

    def _decode(self, raw: DataFrame, source: str) -> DataFrame:
        return self._with_source(self._decoded(raw), source)

    def _decoded(self, raw: DataFrame) -> DataFrame:
        self._schemas.learn_from(raw)
        return records.decode(
            raw, self._stream, self._schemas, with_unknown=True, secret=self._secret
        )

    def _with_source(self, decoded: DataFrame, source: str) -> DataFrame:
        """Return decoded records with their source, and without bytes that nothing needs."""
        decoded = decoded.withColumn(_SOURCE, F.lit(source))
        # Drop a good record's bytes, except the values of records with unknown fields, for samples.
        kept = {name: F.when(F.col("is_dead"), F.col(name)) for name in records.BYTES}
        sample = f"{DRIFTS} AND octet_length(kafka_value) <= {MOST_VALUE_BYTES}"
        kept["kafka_value"] = F.when(F.expr(f"is_dead OR ({sample})"), F.col("kafka_value"))
        return decoded.withColumns(kept)
