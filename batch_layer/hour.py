"""One hour, from Kafka to staged and checked: read its cut, decode, drop duplicates, stage, and prove the account.

Nothing here publishes. Duplicates are dropped against what `main` will serve in the look-back, so hours that are
rebuilt together see each other's staged rows in place of those that `main` still serves.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import reduce
from typing import TYPE_CHECKING, Any

from pyspark.sql import functions as F

from anabranch import hours, records
from anabranch.errors import PositionError
from anabranch.fail_points import Step, reach
from anabranch.hours import Cut
from anabranch.kafka_frames import no_records, read_ranges
from anabranch.position import Ranges, Topic
from anabranch.publish import new_id
from anabranch.session import Job
from anabranch.snapshots import Staged
from anabranch.staging import read_staged, stage
from anabranch.state import State
from batch_layer.balance import Balance, Counted, classify_gaps
from batch_layer.counting import count, count_aborted, held
from batch_layer.duplicates import drop_duplicates
from batch_layer.quality import run_suite
from serving_layer import difference

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from anabranch.config import Stream

ROWS_PER_FILE = 2_000_000
_AT = ["kafka_partition", "kafka_offset"]


@dataclass(frozen=True)
class Built:
    """An hour's staged rows and dead letters, what is known of them, and why they may not be published, if so."""

    hour: str
    cut: Cut
    before: int
    rows: Staged
    dead: Staged | None
    said: Mapping[str, Any] = field(default_factory=dict)
    problems: tuple[str, ...] = ()


Together = Mapping[str, Built]


@dataclass(frozen=True)
class _Frames:
    """An hour's records in Spark: all decoded, and of the good ones those kept and those that repeat another."""

    decoded: DataFrame
    kept: DataFrame
    duplicates: DataFrame


class HourBuilder:
    """Builds hours of one stream."""

    def __init__(self, job: Job, spark: SparkSession) -> None:
        self._job, self._spark = job, spark
        self._stream: Stream = job.stream
        self._catalog = job.environment.catalog.name

    def build(self, hour: str, cut: Cut, before: int, state: State) -> Built:
        """Stage and check an hour over its revision `before`. Raises PositionError for a recreated topic."""
        # Step 1: read and decode.
        frames = self._frames(hour, cut, state, {})
        reach(Step.BATCH_DECODED)
        # Steps 2 to 5: stage and check.
        return self._checked(frames, self._stage(frames, hour, cut, before), state)

    def decide_again(self, hour: str, cut: Cut, before: int, state: State, together: Together) -> Built | None:
        """An accepted hour once more, after hours of its look-back were rebuilt; None when it keeps the same rows."""
        frames = self._frames(hour, cut, state, together)
        batch = self._at(state.heads["batch"]).where(F.col("ingest_hour") == hour).select(*_AT)
        kept = frames.kept.select(*_AT)
        if kept.exceptAll(batch).isEmpty() and batch.exceptAll(kept).isEmpty():
            return None
        return self._checked(frames, self._stage(frames, hour, cut, before), state)

    def changes_events(self, built: Built, state: State) -> bool:
        """Whether the hour will hold other events, by the stream's key, than `main` serves of it."""
        key = self._stream.key
        new = read_staged(self._spark, self._catalog, self._stream.table, built.rows).select(*key)
        old = self._at(state.heads["main"]).where(F.col("ingest_hour") == built.hour).select(*key)
        return not (new.subtract(old).isEmpty() and old.subtract(new).isEmpty())

    def lookback(self, hour: str) -> list[str]:
        """The hours before it that duplicates are looked for in, oldest first."""
        return [hours.shift(hour, -i) for i in range(self._stream.batch.lookback_hours, 0, -1)]

    def _require_topic(self, cut: Cut) -> Topic:
        topic = self._job.kafka.describe(self._stream.topic)
        if topic is None or topic.id != cut.topic_id:
            raise PositionError(
                f"topic {self._stream.topic}: expected id {cut.topic_id}, found {topic.id if topic else 'no topic'}: "
                "Kafka no longer holds this hour; the speed layer's rows stay served"
            )
        return topic

    def _frames(self, hour: str, cut: Cut, state: State, together: Together) -> _Frames:
        stream = self._stream
        ranges: Ranges = held(cut.ranges, self._job.kafka.log_starts(self._require_topic(cut)))
        raw = (
            read_ranges(self._spark, self._job.environment.kafka, stream.topic, ranges)
            if ranges
            else no_records(self._spark)
        )
        # Read and decoded once; what follows looks at the result many times, without the long plan that made it.
        decoded = records.decode(raw.withColumn("ingest_hour", F.lit(hour)), stream).localCheckpoint()
        good = records.good(decoded, stream)
        kept = drop_duplicates(good, stream.key, self._served(hour, state, together))
        duplicates = good.select(*_AT).join(kept.select(*_AT), _AT, "left_anti").localCheckpoint()
        return _Frames(decoded, kept, duplicates)

    def _served(self, hour: str, state: State, together: Together) -> DataFrame | None:
        lookback = self.lookback(hour)
        if not lookback:
            return None
        staged = [together[h] for h in lookback if h in together and state.overrides.get(h, "batch") == "batch"]
        as_it_is = [h for h in lookback if h not in {b.hour for b in staged}]
        main = self._at(state.heads["main"]).where(F.col("ingest_hour").isin(as_it_is)).select(*self._stream.key)
        frames = [read_staged(self._spark, self._catalog, self._stream.table, b.rows) for b in staged]
        return reduce(lambda one, other: one.unionByName(other), (f.select(*self._stream.key) for f in frames), main)

    def _at(self, snapshot_id: int) -> DataFrame:
        return self._spark.sql(f"SELECT * FROM {self._catalog}.{self._stream.table} VERSION AS OF {snapshot_id}")

    def _stage(self, frames: _Frames, hour: str, cut: Cut, before: int) -> Built:
        stream, lake = self._stream, self._job.lake
        order = [
            "event_date",
            *([stream.event_time.column] if stream.event_time else []),
            "kafka_partition",
            "kafka_offset",
        ]
        files = max(1, math.ceil(cut.offsets / ROWS_PER_FILE))
        # Ranges of time, sorted: few files, each of which a query on time can leave out.
        rows = frames.kept.repartitionByRange(files, *order) if files > 1 else frames.kept.coalesce(1)
        write = {"distribution-mode": "none", "fanout-enabled": "true"}
        staged = stage(rows.sortWithinPartitions(*order), lake, self._catalog, stream.table, new_id(), write)
        reach(Step.BATCH_ROWS_STAGED)
        letters = records.dead(frames.decoded, cut.topic_id, "batch")
        dead = None
        if not letters.isEmpty():
            one = letters.coalesce(1).sortWithinPartitions("kafka_partition", "kafka_offset")
            dead = stage(one, lake, self._catalog, stream.dead_letters_table, new_id(), write)
        reach(Step.BATCH_STAGED)
        return Built(hour, cut, before, staged, dead)

    def _checked(self, frames: _Frames, built: Built, state: State) -> Built:
        rows = read_staged(self._spark, self._catalog, self._stream.table, built.rows)
        balance = self._balance(frames, rows, built)
        problems = [f"the balance does not close: {p}" for p in balance.problems(self._stream.batch.allow_gaps)]
        reach(Step.BATCH_BALANCED)
        quality = run_suite(rows, self._stream.expectations)
        problems += [f"quality: {failed.message}" for failed in quality.failed]
        speed = self._at(state.heads["speed"]).where(F.col("ingest_hour") == built.hour)
        differing = difference.compare(speed.select(*rows.columns), rows, frames.duplicates)
        reach(Step.BATCH_CHECKED)
        said = balance.counts | {
            "speed_rows": differing.speed_rows,
            "diff": differing.as_dict(),
            "quality": quality.as_dict(),
        }
        return replace(built, said=said, problems=tuple(problems))

    def _balance(self, frames: _Frames, rows: DataFrame, built: Built) -> Balance:
        kafka, stream, cut = self._job.kafka, self._stream, built.cut
        good = count(rows, cut.ranges)
        dead = Counted()
        if built.dead is not None:
            letters = read_staged(self._spark, self._catalog, stream.dead_letters_table, built.dead)
            dead = count(letters, cut.ranges)
        duplicate = count(frames.duplicates, cut.ranges).distinct
        given = count(frames.decoded, cut.ranges).distinct
        missing = {p: e - s - given.get(p, 0) for p, (s, e) in cut.ranges.items()}
        aborted, lost, compacted = {}, {}, False
        if any(missing.values()):
            # Asked after the read: retention may have gone on while it ran.
            starts = kafka.log_starts(self._require_topic(cut))
            gone = {p: (s, min(starts.get(p, 0), e)) for p, (s, e) in cut.ranges.items() if starts.get(p, 0) > s}
            below = count(frames.decoded, gone).distinct
            lost = {p: e - s - below.get(p, 0) for p, (s, e) in gone.items()}
            if still := held(cut.ranges, starts):
                uncommitted = read_ranges(
                    self._spark, self._job.environment.kafka, stream.topic, still, uncommitted=True
                )
                aborted = count_aborted(frames.decoded, uncommitted)
            compacted = kafka.is_compacted(stream.topic)
        self._require_topic(cut)
        return Balance(cut, good, dead, duplicate, classify_gaps(missing, aborted, lost, compacted))
