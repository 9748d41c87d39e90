"""Sources of an hour's records: Kafka, and for records that Kafka does not give, the table.

The table's accepted rows come first, then the dead letters' bytes, decoded again, then the speed layer's rows and dead
letters of the hour. Each offset comes from the first source that has it, for any reason: a log that begins later, a
compacted log, or a log that omits records for an unknown reason.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import reduce
from typing import TYPE_CHECKING

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from anabranch import records
from anabranch.common.errors import PositionError
from anabranch.iceberg.snapshots import heads
from anabranch.iceberg.staging import read_snapshot
from anabranch.job import Job
from anabranch.kafka.source import no_records, using
from anabranch.offsets.hours import Cut
from anabranch.offsets.partition_sql import inside
from anabranch.offsets.position import Position, Ranges, Topic, size
from anabranch.protocol import dead_letters
from anabranch.protocol.state import State
from anabranch.protocol.topic_change import gone_from_kafka
from anabranch.records.formats import open_format
from batch_layer.cached import cached
from batch_layer.offset_counts import DRIFTS, within_log
from batch_layer.unknown_fields import MOST_BYTES, SAMPLES

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

AT = ["kafka_partition", "kafka_offset"]
SOURCES = KAFKA, ACCEPTED, DEAD_LETTERS, SPEED = ("kafka", "accepted", "dead_letters", "speed")


@dataclass(frozen=True)
class HourRecords:
    """An hour's records. `decoded`: the columns of `records.decode`, and `source`. `in_kafka`: the part of the cut in
    Kafka's log. `accepted`: once filled, the accepted revision's offsets, if any."""

    decoded: DataFrame
    in_kafka: Ranges
    accepted: DataFrame | None = None


class HourReader:
    """Reads hours of one stream."""

    def __init__(self, job: Job, spark: SparkSession) -> None:
        self._job, self._spark = job, spark
        self._stream = job.stream
        self._catalog = job.environment.catalog.name
        self._format = open_format(job.environment, job.stream)

    def use(self, spark: SparkSession) -> None:
        """Go on with another session of the same Spark."""
        self._spark = spark

    def read(self, hour: str, cut: Cut, state: State) -> HourRecords:
        """Read and decode every record of the cut that Kafka has, once, and cache them.

        Raises PositionError for a topic that was recreated and not adopted.
        """
        # Keep sample values from about 1 in `one_in` records with unknown fields.
        one_in = max(1, size(cut.ranges) // SAMPLES)
        gone = gone_from_kafka(state.timeline, state.position.topic_id, hour, cut) is not None
        ranges: Ranges = {} if gone else within_log(cut.ranges, self._job.kafka.log_starts(self.require_topic(cut)))
        kafka, topic = self._job.environment.kafka, self._stream.topic

        def decode(raw: DataFrame) -> DataFrame:
            return cached(self._decode(raw.withColumn("ingest_hour", F.lit(hour)), KAFKA, one_in))

        decoded = (
            using(self._spark, kafka, self._job.kafka, topic, ranges, decode)
            if ranges
            else decode(no_records(self._spark))
        )
        # Read the log starts again: retention may have deleted records during the read.
        ranges = {} if gone else within_log(cut.ranges, self._job.kafka.log_starts(self.require_topic(cut)))
        return HourRecords(decoded, ranges)

    def fill(self, read: HourRecords, hour: str, cut: Cut, state: State) -> HourRecords:
        """Add every other record of the cut that the table has, from the first source that has it.

        An offset that Kafka does not give is no gap if the table has its record.
        """
        # Dead letters named by a publish belong to the table even before their own table has them.
        dead_letters.roll_forward(self._job.lake, self._stream.dead_letters_table, state)
        letters = heads(self._job.lake.load(self._stream.dead_letters_table))
        batch = (state.heads["batch"], letters["batch"])
        accepted = self._of_branch(batch, hour, (ACCEPTED, DEAD_LETTERS)) if state.is_accepted(hour) else []
        stored = [*accepted, *self._of_branch((state.heads["speed"], letters["speed"]), hour, (SPEED, SPEED))]
        if hour in state.retained_hours:
            # Rows of the speed layer that only `main` still has.
            stored += self._of_branch((state.heads["main"], letters["main"]), hour, (SPEED, SPEED))
        ranked = [frame.where(inside(cut.ranges)).withColumn("_rank", F.lit(i)) for i, frame in enumerate(stored)]
        # Compare positions first, two narrow columns: usually the table has nothing that Kafka lacks.
        places = reduce(DataFrame.unionByName, (frame.select(*AT, "_rank") for frame in ranked))
        found = places.join(read.decoded.select(*AT), AT, "left_anti").groupBy(*AT).agg(F.min("_rank").alias("_rank"))
        found = cached(found)
        offsets = reduce(DataFrame.union, (frame.select(*AT) for frame in accepted)) if accepted else None
        if found.isEmpty():
            return replace(read, accepted=offsets)
        filled = reduce(DataFrame.unionByName, ranked).join(found, [*AT, "_rank"], "left_semi").drop("_rank")
        return replace(read, decoded=cached(read.decoded.unionByName(filled)), accepted=offsets)

    def require_topic(self, cut: Cut) -> Topic:
        """The topic of the cut. Raises PositionError for another one, or none."""
        topic = self._job.kafka.describe(self._stream.topic, Position(cut.topic_id, dict(cut.ends)))
        if topic is None or topic.id != cut.topic_id:
            raise PositionError(
                f"topic {self._stream.topic}: expected id {cut.topic_id}, found {topic.id if topic else 'no topic'}: "
                "Kafka no longer has this hour; the speed layer's rows stay served; to continue with the topic as it "
                "is, run `anabranch adopt`"
            )
        return topic

    def repairable(self) -> dict[str, int]:
        """By hour, how many dead letters of `main` decode now."""
        letters = self._job.lake.load(self._stream.dead_letters_table)
        rows = (
            self._decode(self._bytes(heads(letters)["main"]), DEAD_LETTERS)
            .where("NOT is_dead")
            .groupBy("ingest_hour")
            .count()
            .collect()
        )
        return {row["ingest_hour"]: row["count"] for row in sorted(rows, key=lambda row: str(row["ingest_hour"]))}

    def _of_branch(self, snapshots: tuple[int, int], hour: str, sources: tuple[str, str]) -> list[DataFrame]:
        """Rows, then dead letters, of an hour in a branch's snapshots of the two tables."""
        rows = read_snapshot(self._spark, self._catalog, self._stream.table, snapshots[0])
        return [
            self._as_decoded(rows.where(F.col("ingest_hour") == hour), sources[0]),
            self._decode(self._bytes(snapshots[1]).where(F.col("ingest_hour") == hour), sources[1]),
        ]

    def _bytes(self, snapshot_id: int) -> DataFrame:
        """Dead letters as raw Kafka records."""
        letters = read_snapshot(self._spark, self._catalog, self._stream.dead_letters_table, snapshot_id)
        return letters.selectExpr(
            "kafka_partition AS partition",
            "kafka_offset AS offset",
            "kafka_timestamp AS timestamp",
            "ingest_hour",
            "key",
            "value",
            "headers",
        )

    def _decode(self, raw: DataFrame, source: str, one_in: int = 1) -> DataFrame:
        decoded = records.decode(raw, self._stream, self._format, with_unknown=True).withColumn("source", F.lit(source))
        # Drop a good record's bytes, except samples of records with unknown fields. Sample by a hash: transaction
        # markers may take every other offset.
        kept = {name: F.when(F.col("is_dead"), F.col(name)) for name in records.BYTES}
        sample = f"{DRIFTS} AND pmod(xxhash64(kafka_partition, kafka_offset), {one_in}) = 0"
        sample += f" AND octet_length(kafka_value) <= {MOST_BYTES}"
        kept["kafka_value"] = F.when(F.expr(f"is_dead OR ({sample})"), F.col("kafka_value"))
        return decoded.withColumns(kept)

    def _as_decoded(self, rows: DataFrame, source: str) -> DataFrame:
        """Rows of the table in the columns of `records.decode`. They were checked when they were accepted."""
        return records.as_decoded(rows, self._stream).withColumn("source", F.lit(source))
