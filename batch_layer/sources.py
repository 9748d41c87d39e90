"""Sources of an hour's records: Kafka, and the archive and the table for records that Kafka does
not give.

The archived bytes come first, then the table's accepted rows, then the dead letters' bytes, decoded
again, then the speed layer's rows and dead letters of the hour. Each offset comes from the first
source that has it, whatever the reason: a log that begins later, a compacted log, or a log that
omits records for an unknown reason.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import TypeVar

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from anabranch import records
from anabranch.common.errors import PositionError
from anabranch.config import Stream
from anabranch.iceberg.reading_tags import count_deaths
from anabranch.iceberg.snapshots import heads
from anabranch.iceberg.staging import read_snapshot
from anabranch.job import Job
from anabranch.kafka.large_records import AHEAD, TOO_LARGE
from anabranch.kafka.source import apply_to_records, find_large, no_records, read_without_large
from anabranch.offsets.hours import Cut
from anabranch.offsets.partition_sql import inside
from anabranch.offsets.position import Position, Ranges, Topic, size, trim
from anabranch.protocol import dead_letters
from anabranch.protocol.state import State, check_log_end
from anabranch.protocol.topic_change import gone_from_kafka
from anabranch.records.packed import PackSpec, pack_spec, packed
from anabranch.records.reshape import to_schema
from anabranch.subjects.schemas import open_schemas
from batch_layer.archive import as_kafka_records, read_archive
from batch_layer.balance import plus
from batch_layer.cached import cached
from batch_layer.duplicates import key_hash, names_event, without_empty_texts
from batch_layer.lost_files import LostFiles
from batch_layer.offset_counts import DRIFTS, ReadCounts, count_read
from batch_layer.packed_rows import PLACE_COLUMNS, PackedRows, read_packed
from batch_layer.sizes import in_one_task
from batch_layer.unknown_fields import MOST_BYTES, SAMPLES

LOG = logging.getLogger(__name__)

T = TypeVar("T")

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
class HourRecords:
    """An hour's records. `decoded`: records that Spark decoded, in the columns of `records.decode`,
    and their source. `certain`: records that workers decoded, if any; without `has_decoded` there
    are no others. `in_kafka`: the part of the cut in Kafka's log. `accepted`: after `fill`, the
    accepted revision's offsets, if any. `to_archive`: the records that Kafka gave, with all bytes,
    if the stream has an archive."""

    decoded: DataFrame
    in_kafka: Ranges
    accepted: DataFrame | None = None
    certain: PackedRows | None = None
    has_decoded: bool = True
    to_archive: DataFrame | None = None

    @property
    def places(self) -> DataFrame:
        """`PLACE_COLUMNS`, `source` and verdict of all records, with the names of unknown
        fields."""
        decoded = self._decoded_places
        if self.certain is None:
            return decoded
        kinds = {field.name: field.dataType.simpleString() for field in decoded.schema.fields}
        constant = {"source": f"'{KAFKA}'", "is_dead": "false"}
        certain = self.certain.rows(PLACE_COLUMNS).selectExpr(
            *PLACE_COLUMNS,
            *(
                f"{constant.get(n, f'CAST(NULL AS {kinds[n]})')} AS {n}"
                for n in decoded.columns
                if n not in PLACE_COLUMNS
            ),
        )
        return decoded.unionByName(certain)

    @property
    def _decoded_places(self) -> DataFrame:
        source = F.col(f"`{_SOURCE}`").alias("source")
        return self.decoded.select(*PLACE_COLUMNS, source, "is_dead", "error_code", records.UNKNOWN)

    @property
    def partitions(self) -> int:
        """The number of tasks that read the records."""
        return (
            self.decoded if self.certain is None else self.certain.pieces
        ).rdd.getNumPartitions()

    def good(self, stream: Stream, columns: Sequence[str] | None = None) -> DataFrame:
        """Return the good records, in the columns of the table or in `columns`."""
        rows = records.good(self.decoded, stream)
        names = list(columns or rows.columns)
        if self.certain is None:
            return rows.select(*names)
        certain = self.certain.rows(names)
        return rows.select(*names).unionByName(certain) if self.has_decoded else certain

    def read_few(self, stream: Stream, served: DataFrame | None) -> pa.Table:
        """Read few records by one task into the driver's memory: the place, `source`, verdict,
        whether it `drifts`, and for a good record whose key names an event the key's `hash`
        (`duplicates.key_hash`)."""
        key, decoded = stream.key, without_empty_texts(self.decoded, stream.key)
        served = without_empty_texts(served, key) if served is not None else None
        is_named = names_event(key)
        hashed = key_hash(decoded, key, served) if key else F.lit(None).cast("bigint")
        source = F.col(f"`{_SOURCE}`")
        facts = decoded.select(
            *PLACE_COLUMNS,
            source.alias("source"),
            "is_dead",
            F.expr(f"coalesce({DRIFTS}, false)").alias("drifts"),
            F.when(~F.col("is_dead") & is_named, hashed).alias("hash"),
        )
        if self.certain is not None:
            certain = without_empty_texts(self.certain.rows([*PLACE_COLUMNS, *key]), key).select(
                *PLACE_COLUMNS,
                F.lit(KAFKA).alias("source"),
                F.lit(False).alias("is_dead"),
                F.lit(False).alias("drifts"),
                F.when(is_named, hashed).alias("hash"),
            )
            facts = facts.unionByName(certain) if self.has_decoded else certain
        return facts.coalesce(1).toArrow()

    def counts(self, ranges: Ranges) -> ReadCounts:
        """Count the records. The workers' tasks have counted theirs."""
        certain = self.certain
        if certain is None or not certain.reports.is_each_once(ranges):
            return count_read(self.places, ranges, SOURCES)
        others = (
            count_read(self._decoded_places, ranges, SOURCES) if self.has_decoded else ReadCounts()
        )
        sources = others.sources | {KAFKA: others.sources.get(KAFKA, 0) + certain.count}
        return replace(
            others,
            held=plus(others.held, certain.reports.rows),
            good=others.good + certain.count,
            sources={source: number for source, number in sorted(sources.items()) if number},
        )


class HourReader:
    def __init__(self, job: Job, spark: SparkSession, lost: LostFiles) -> None:
        self._job, self._spark, self._lost = job, spark, lost
        self._stream = job.stream
        self._catalog = job.environment.catalog.name
        self._schemas = open_schemas(job.environment, job.stream)
        self._secret = job.environment.masking_secret
        self._workers_left_most = False
        self._around_large: DataFrame | None = None
        self.out_of_memory = Counter[str]()
        """How often executors died in this process, by hour."""

    def use(self, spark: SparkSession) -> None:
        self._spark = spark

    def read(self, hour: str, cut: Cut, state: State, is_packed: bool = True) -> HourRecords:
        """Read and decode every record of the cut that Kafka has, once, and cache them. Raises
        PositionError if the topic was recreated or its log lost the end of the cut, unless the
        change was adopted."""
        # Keep sample values from about 1 in `one_in` records with unknown fields.
        one_in = max(1, size(cut.ranges) // SAMPLES)
        gone = gone_from_kafka(state.timeline, state.position.topic_id, hour, cut) is not None
        ranges: Ranges = {} if gone else self._ranges_in_kafka(hour, cut)
        to_archive: DataFrame | None = None

        def decode(raw: DataFrame) -> DataFrame:
            if self._stream.archive is None:
                return cached(self._decode(raw, KAFKA, one_in))
            nonlocal to_archive
            to_archive = cached(self._decoded(raw))
            return self._with_source(to_archive, KAFKA, one_in)

        large = self._find_large(hour, ranges, state)
        by_workers = self._by_workers(hour, ranges, one_in) if ranges and is_packed else None
        certain = by_workers[0] if by_workers is not None else None
        has_decoded = certain is None or certain.left_count > 0
        if by_workers is not None:
            # Spark plans no work for limit(0).
            decoded = by_workers[1] if has_decoded else by_workers[1].limit(0)
        elif ranges:
            decoded = self._read_kafka(hour, ranges, decode)
        else:
            decoded = decode(no_records(self._spark).withColumn("ingest_hour", F.lit(hour)))
        # Ask again: retention may have deleted records during the read.
        ranges = {} if gone else self._ranges_in_kafka(hour, cut)
        if large is not None:
            dead = self._with_source(large, KAFKA)
            decoded, has_decoded = cached(decoded.unionByName(dead)), True
        decoded = in_one_task(decoded, cut.offsets)
        return HourRecords(
            decoded, ranges, certain=certain, has_decoded=has_decoded, to_archive=to_archive
        )

    def _ranges_in_kafka(self, hour: str, cut: Cut) -> Ranges:
        """Return the part of the cut that Kafka's log still has. Raises PositionError like
        `read`."""
        topic, kafka = self.require_topic(cut), self._job.kafka
        # A log that lost its end has other records at these offsets from now on: they would be
        # published as this hour's.
        end = Position(cut.topic_id, dict(cut.ends))
        check_log_end(
            end, kafka.stable_ends(topic, end.offsets), topic.name, f"the end of hour {hour}"
        )
        return trim(cut.ranges, kafka.log_starts(topic))

    def _read_kafka(self, hour: str, ranges: Ranges, use: Callable[[DataFrame], T]) -> T:
        def with_hour(raw: DataFrame) -> T:
            return use(raw.withColumn("ingest_hour", F.lit(hour)))

        kafka, topic = self._job.environment.kafka, self._stream.topic
        if self._around_large is not None:
            return with_hour(self._around_large)
        return apply_to_records(self._spark, kafka, self._job.kafka, topic, ranges, with_hour)

    def _find_large(self, hour: str, ranges: Ranges, state: State) -> DataFrame | None:
        """Return the hour's records that are too large to be read, as dead ones, if earlier
        rebuilds of the hour died. The next read leaves them out."""
        self._around_large = None
        deaths = count_deaths(state.table, hour) + self.out_of_memory[hour]
        if not deaths or not ranges:
            return None
        spark, kafka, topic = self._spark, self._job.environment.kafka, self._stream.topic
        described = self._job.kafka.describe(topic)
        ends = self._job.kafka.stable_ends(described) if described is not None else {}
        ahead = {p: (s, max(e, min(e + AHEAD, ends.get(p, 0)))) for p, (s, e) in ranges.items()}
        if not find_large(spark, self._job.kafka, topic, ahead, deaths):
            return None
        self._around_large, large = read_without_large(
            spark, kafka, self._job.kafka, topic, ranges, deaths
        )
        return records.too_large(spark, self._stream, large, lambda _: hour) if large else None

    def _pack_spec(self, hour: str) -> PackSpec | None:
        """Return how workers pack the hour's rows; None if each record's bytes are needed beside
        its row."""
        if self._workers_left_most or self._stream.archive is not None:
            return None
        return pack_spec(self._stream, self._schemas, hour, self._secret)

    def _by_workers(
        self, hour: str, ranges: Ranges, one_in: int
    ) -> tuple[PackedRows, DataFrame] | None:
        """Decode the hour's records, and those again that have no row or unknown fields. Return
        None if rows are not packed."""

        def read(raw: DataFrame) -> PackedRows | None:
            self._schemas.learn_from(raw)
            if (spec := self._pack_spec(hour)) is None:
                return None
            return read_packed(cached(packed(raw, spec), is_lazy=True), self._stream, size(ranges))

        rows = self._read_kafka(hour, ranges, read)
        if rows is None:
            return None
        if rows.left_count > rows.count:
            LOG.info(
                "stream %s: most records have no row or unknown fields, next hours are not packed "
                "hour=%s left=%d of=%d",
                self._stream.name,
                hour,
                rows.left_count,
                rows.left_count + rows.count,
            )
            self._workers_left_most = True
        others = cached(self._decode(rows.left, KAFKA, one_in), is_lazy=True)
        return rows, others

    def fill(self, read: HourRecords, hour: str, cut: Cut, state: State) -> HourRecords:
        """Add every other record of the cut that the archive or the table has, from the first
        source that has it. An offset that Kafka does not give is no gap if one of them has its
        record."""
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
            places.join(read.places.select(*PLACE_COLUMNS), PLACE_COLUMNS, "left_anti")
            .groupBy(*PLACE_COLUMNS)
            # One source for each offset: the branches have most records twice.
            .agg(F.min("_rank").alias("_rank"))
        )
        found = cached(found)
        offsets = (
            reduce(DataFrame.union, (frame.select(*PLACE_COLUMNS) for frame in accepted))
            if accepted
            else None
        )
        if found.isEmpty():
            return replace(read, accepted=offsets)
        filled = (
            reduce(DataFrame.unionByName, ranked)
            .join(found, [*PLACE_COLUMNS, "_rank"], "left_semi")
            .drop("_rank")
        )
        all_records = read.decoded.unionByName(filled) if read.has_decoded else filled
        all_records = in_one_task(cached(all_records), cut.offsets)
        return replace(read, decoded=all_records, accepted=offsets, has_decoded=True)

    def require_topic(self, cut: Cut) -> Topic:
        """Return the topic of the cut. Raises PositionError if the topic is gone or has another
        id."""
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
        """Return the rows and the dead letters of an hour in a branch's snapshots of the two
        tables."""
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

    def _decode(self, raw: DataFrame, source: str, one_in: int = 1) -> DataFrame:
        return self._with_source(self._decoded(raw), source, one_in)

    def _decoded(self, raw: DataFrame) -> DataFrame:
        self._schemas.learn_from(raw)
        return records.decode(
            raw, self._stream, self._schemas, with_unknown=True, secret=self._secret
        )

    def _with_source(self, decoded: DataFrame, source: str, one_in: int = 1) -> DataFrame:
        """Return decoded records with their source, and without bytes that nothing needs."""
        decoded = decoded.withColumn(_SOURCE, F.lit(source))
        # Drop a good record's bytes, except samples of records with unknown fields. Sample by a
        # hash: transaction markers may take every other offset.
        kept = {name: F.when(F.col("is_dead"), F.col(name)) for name in records.BYTES}
        sample = f"{DRIFTS} AND pmod(xxhash64(kafka_partition, kafka_offset), {one_in}) = 0"
        sample += f" AND octet_length(kafka_value) <= {MOST_BYTES}"
        kept["kafka_value"] = F.when(F.expr(f"is_dead OR ({sample})"), F.col("kafka_value"))
        return decoded.withColumns(kept)
