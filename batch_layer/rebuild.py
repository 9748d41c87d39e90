"""Rebuilding an hour: read its cut again, prove the account, and publish it; or refuse, and change nothing.

1. Read exactly the cut's offset ranges and decode them as the speed layer does.
2. Drop duplicates and stage rows and dead letters.
3. Close the balance over the staged files.
4. Run the quality gate on the staged rows.
5. Compare with the speed layer.
6. Publish to `batch` and `main`, then the ledger and the dead letters.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from py4j.protocol import Py4JJavaError
from pyspark.errors import PySparkException
from pyspark.sql import functions as F

from anabranch import dead_letters, hours, ledger, records
from anabranch.errors import PositionError, Refused, Transient
from anabranch.fail_points import Step, reach
from anabranch.hours import Cut
from anabranch.kafka_frames import no_records, read_ranges
from anabranch.position import Ranges, Topic
from anabranch.publish import Publish, new_id, run
from anabranch.sealing import require_sealed
from anabranch.session import Job
from anabranch.snapshots import Staged, files_of
from anabranch.staging import read_staged, stage
from anabranch.state import Accepted, State, load_state
from anabranch.tables import require_columns
from batch_layer.balance import Balance, Counted, classify_gaps
from batch_layer.counting import count, count_aborted, held
from batch_layer.duplicates import drop_duplicates
from batch_layer.plan import (
    EMPTY,
    Verdict,
    plan_acceptance,
    plan_acceptance_of_empty,
    plan_empty,
    plan_publish,
    plan_waiting,
    revision_now,
)
from batch_layer.quality import run_suite
from serving_layer import difference, merger
from serving_layer.recovery import recover

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from anabranch.config import Stream

LOG = logging.getLogger(__name__)

ROWS_PER_FILE = 2_000_000
_ATTEMPTS = 3


@dataclass(frozen=True)
class Result:
    """What became of an hour. `said` are the columns of its ledger row."""

    hour: str
    decision: str
    revision: int
    reason: str | None = None
    said: Mapping[str, Any] = field(default_factory=dict)

    @property
    def refused(self) -> bool:
        return self.decision == "refused"


class _Moved(Exception):
    """What `main` serves in the look-back changed after duplicates were dropped against it: drop them again."""


@dataclass(frozen=True)
class _Staged:
    """An attempt's staged rows and dead letters, and the look-back's files that duplicates were dropped against."""

    rows: Staged
    dead: Staged | None
    lookback: frozenset[str]


@dataclass(frozen=True)
class _Frames:
    """An hour's records in Spark: all decoded, and of the good ones those kept and those that repeat another."""

    decoded: DataFrame
    kept: DataFrame
    duplicates: DataFrame


class Rebuilder:
    """Rebuilds hours of one stream, one at a time."""

    def __init__(self, job: Job, spark: SparkSession) -> None:
        self._job, self._spark = job, spark
        self._stream: Stream = job.stream
        self._catalog = job.environment.catalog.name
        self._confirmed: frozenset[str] = frozenset()

    def recover(self) -> None:
        """Finish what an earlier publisher left half done: the merge, dead letters, ledger rows."""
        self._confirmed |= recover(self._job.lake, self._stream)

    def waiting(self) -> list[str]:
        """The sealed hours that are not accepted, oldest first."""
        return plan_waiting(load_state(self._job.lake, self._stream.table))

    def empty(self, candidates: Sequence[str]) -> list[str]:
        """Those of `candidates` whose cut holds no offset."""
        return plan_empty(load_state(self._job.lake, self._stream.table), candidates)

    def accept_empty(self, candidates: Sequence[str]) -> list[Result]:
        """Accept hours without records, all in one commit."""

        def decide() -> tuple[State, Publish | None]:
            state = load_state(self._job.lake, self._stream.table)
            return state, plan_acceptance_of_empty(state, candidates, new_id(), datetime.now(UTC), self._confirmed)

        published = run(self._job.lake, self._stream.table, decide, f"accept empty hours of {self._stream.name}", True)
        if published is None:
            return []
        reach(Step.BATCH_EMPTY_ACCEPTED)
        self._confirmed |= ledger.record(self._job.lake, self._stream.hours_table, published.decisions)
        return [Result(str(row["hour"]), "accepted", 1, said=EMPTY) for row in published.decisions]

    def rebuild(self, hour: str, restate: bool = False) -> Result:
        """Rebuild one sealed hour. An accepted hour is left alone unless `restate`.

        A refusal is a result and is in the ledger; nothing else has changed. Raises Transient, PositionError.
        """
        state = require_sealed(self._job.lake, self._stream, hour)
        require_columns(state.table, self._stream)
        before = self._revision(state, hour)
        if state.is_accepted(hour) and not restate:
            return Result(hour, "unchanged", before, "already accepted; --restate publishes a new revision")
        cut = state.cuts.get(hour) or self._cut_of_ledger(hour)
        if cut.offsets == 0:
            return next(iter(self.accept_empty([hour])), Result(hour, "unchanged", before, "it holds no records"))
        LOG.info("stream %s: rebuilding hour %s: %d offsets", self._stream.name, hour, cut.offsets)
        why = ""
        for attempt in range(1, _ATTEMPTS + 1):
            try:
                return self._rebuild(hour, cut, before)
            except _Moved:
                why = "the look-back changed meanwhile"
            except (PySparkException, Py4JJavaError) as error:
                # A lost executor takes its part of the decoded hour with it; nothing is published, so begin again.
                why = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
            LOG.warning("stream %s: hour %s: attempt %d of %d: %s", self._stream.name, hour, attempt, _ATTEMPTS, why)
        raise Transient(f"hour {hour}: expected to rebuild it in {_ATTEMPTS} attempts, found: {why}; try again")

    def _rebuild(self, hour: str, cut: Cut, before: int) -> Result:
        # Step 1: read and decode.
        topic = self._require_topic(cut)
        ranges = held(cut.ranges, self._job.kafka.log_starts(topic))
        state = load_state(self._job.lake, self._stream.table)
        frames = self._frames(hour, ranges, state)
        reach(Step.BATCH_DECODED)
        # Step 2: stage.
        staged = self._stage(frames, hour, cut, state)
        try:
            # Steps 3 to 5: check.
            said, problems = self._check(frames, staged, hour, cut, state)
            if problems:
                self._discard(staged)
                return self._refuse(hour, cut, before, "; ".join(problems), said)
            # Step 6: publish.
            return self._publish(hour, cut, before, staged, said)
        except _Moved:
            self._discard(staged)
            raise

    def _require_topic(self, cut: Cut) -> Topic:
        topic = self._job.kafka.describe(self._stream.topic)
        if topic is None or topic.id != cut.topic_id:
            raise PositionError(
                f"topic {self._stream.topic}: expected id {cut.topic_id}, found {topic.id if topic else 'no topic'}: "
                "Kafka no longer holds this hour; the speed layer's rows stay served"
            )
        return topic

    def _frames(self, hour: str, ranges: Ranges, state: State) -> _Frames:
        stream = self._stream
        raw = (
            read_ranges(self._spark, self._job.environment.kafka, stream.topic, ranges)
            if ranges
            else no_records(self._spark)
        )
        # Read and decoded once; what follows looks at the result many times, without the long plan that made it.
        decoded = records.decode(raw.withColumn("ingest_hour", F.lit(hour)), stream).localCheckpoint()
        good = records.good(decoded, stream)
        kept = drop_duplicates(good, stream.key, self._served(hour, state))
        at = ["kafka_partition", "kafka_offset"]
        duplicates = good.select(*at).join(kept.select(*at), at, "left_anti").localCheckpoint()
        return _Frames(decoded, kept, duplicates)

    def _lookback(self, hour: str) -> list[str]:
        return [hours.shift(hour, -i) for i in range(self._stream.batch.lookback_hours, 0, -1)]

    def _served(self, hour: str, state: State) -> DataFrame | None:
        lookback = self._lookback(hour)
        if not lookback:
            return None
        return self._at(state.heads["main"]).where(F.col("ingest_hour").isin(lookback)).select(*self._stream.key)

    def _at(self, snapshot_id: int) -> DataFrame:
        return self._spark.sql(f"SELECT * FROM {self._catalog}.{self._stream.table} VERSION AS OF {snapshot_id}")

    def _lookback_files(self, state: State, hour: str) -> frozenset[str]:
        return frozenset(f.file_path for h in self._lookback(hour) for f in files_of(state.table, "main", h))

    def _stage(self, frames: _Frames, hour: str, cut: Cut, state: State) -> _Staged:
        stream, lake = self._stream, self._job.lake
        lookback = self._lookback_files(state, hour)
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
        return _Staged(staged, dead, lookback)

    def _check(
        self, frames: _Frames, staged: _Staged, hour: str, cut: Cut, state: State
    ) -> tuple[dict[str, Any], list[str]]:
        rows = read_staged(self._spark, self._catalog, self._stream.table, staged.rows)
        balance = self._balance(frames, rows, staged, cut)
        problems = [f"the balance does not close: {p}" for p in balance.problems(self._stream.batch.allow_gaps)]
        reach(Step.BATCH_BALANCED)
        quality = run_suite(rows, self._stream.expectations)
        problems += [f"quality: {failed.message}" for failed in quality.failed]
        speed = self._at(state.heads["speed"]).where(F.col("ingest_hour") == hour)
        differing = difference.compare(speed.select(*rows.columns), rows, frames.duplicates)
        reach(Step.BATCH_CHECKED)
        said = balance.counts | {
            "speed_rows": differing.speed_rows,
            "diff": differing.as_dict(),
            "quality": quality.as_dict(),
        }
        return said, problems

    def _balance(self, frames: _Frames, rows: DataFrame, staged: _Staged, cut: Cut) -> Balance:
        kafka, stream = self._job.kafka, self._stream
        good = count(rows, cut.ranges)
        dead = Counted()
        if staged.dead is not None:
            letters = read_staged(self._spark, self._catalog, stream.dead_letters_table, staged.dead)
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

    def _refuse(self, hour: str, cut: Cut, before: int, reason: str, said: Mapping[str, Any]) -> Result:
        reach(Step.BATCH_REFUSED)
        state = load_state(self._job.lake, self._stream.table)
        row = ledger.decision(
            hour, "refused", before + 1, cut, datetime.now(UTC), reason=reason, served=state.serving_layer(hour), **said
        )
        ledger.record(self._job.lake, self._stream.hours_table, [row])
        LOG.error("stream %s: hour %s refused: %s", self._stream.name, hour, reason)
        return Result(hour, "refused", before + 1, reason, said)

    def _publish(self, hour: str, cut: Cut, before: int, staged: _Staged, said: Mapping[str, Any]) -> Result:
        lake, stream = self._job.lake, self._stream
        overtaken: list[int] = []

        def decide() -> tuple[State, Publish | None]:
            state = load_state(lake, stream.table)
            lookback = self._lookback_files(state, hour)
            verdict = plan_acceptance(state, hour, cut, before, staged.rows.wap_id, lookback, staged.lookback)
            if verdict is Verdict.OVERTAKEN:
                overtaken.append(revision_now(state, hour, before))
                return state, None
            if verdict is Verdict.GONE:
                raise Transient(f"hour {hour}: expected its staged snapshot, found it gone; try again")
            if verdict is Verdict.MERGE:
                merger.merge(lake, stream)
                return decide()
            if verdict is Verdict.MOVED:
                raise _Moved
            now = datetime.now(UTC)
            return state, plan_publish(
                state,
                hour,
                Accepted(before + 1, cut),
                staged.rows,
                batch=files_of(state.table, "batch", hour),
                main=files_of(state.table, "main", hour),
                letters=dead_letters.waiting_batch(staged.dead, hour, before + 1, now),
                now=now,
                confirmed=self._confirmed,
                said=said,
            )

        published = run(lake, stream.table, decide, f"hour {hour} of {stream.name}", take_turns=True)
        if published is None:
            self._discard(staged)
            reason = f"another run was first: revision {overtaken[-1]} is accepted"
            return Result(hour, "unchanged", overtaken[-1], reason)
        reach(Step.BATCH_PUBLISHED)
        self._confirmed |= ledger.record(lake, stream.hours_table, published.decisions)
        reach(Step.BATCH_RECORDED)
        self._confirmed |= dead_letters.roll_forward(lake, stream.dead_letters_table, load_state(lake, stream.table))
        reach(Step.BATCH_DEAD_LETTERS)
        LOG.info(
            "stream %s: hour %s accepted as revision %d: %d rows, %d dead, %d duplicate, %d in gaps", stream.name, hour,
            before + 1, said["good"], said["dead"], said["duplicate"], said["gap"],
        )  # fmt: skip
        return Result(hour, "accepted", before + 1, said=said)

    def _revision(self, state: State, hour: str) -> int:
        """The accepted revision, 0 for none; of an hour long past, as the ledger has it."""
        if hour in state.accepted or not state.is_accepted(hour):
            return revision_now(state, hour, 0)
        rows = ledger.history(self._job.lake, self._stream.hours_table)
        return max((r["revision"] for r in rows if r["hour"] == hour and r["decision"] == "accepted"), default=1)

    def _cut_of_ledger(self, hour: str) -> Cut:
        rows = [r for r in ledger.history(self._job.lake, self._stream.hours_table) if r["hour"] == hour and r["cut"]]
        if not rows:
            raise Refused(f"hour {hour}: expected its cut in the table or the ledger, found it in neither")
        return Cut.from_dict({"topic_id": rows[-1]["topic_id"], "ranges": rows[-1]["cut"]})

    def _discard(self, staged: _Staged) -> None:
        self._job.lake.discard(self._stream.table, staged.rows)
        if staged.dead is not None:
            self._job.lake.discard(self._stream.dead_letters_table, staged.dead)
