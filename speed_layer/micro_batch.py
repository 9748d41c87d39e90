"""Micro-batches: stage, check, publish. The table holds the position; no checkpoint is used.

The stream stages the next micro-batch while the previous one is still being published. Its hours
are then a guess from the last decision. The final decision is made after the previous publish, as
for any other micro-batch.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime
from functools import cached_property
from typing import TypeVar

from py4j.protocol import Py4JError
from pyiceberg.table import Table
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession

from anabranch import records
from anabranch.common.counters import S3_REQUESTS, TALLY, Tally, count_into
from anabranch.common.errors import AnabranchError, MissingRight, Transient
from anabranch.common.fail_points import Step, reach
from anabranch.common.logs import fields, note
from anabranch.iceberg.file_io import count_written
from anabranch.iceberg.manifests import hour_of_file
from anabranch.iceberg.parquet_writer import spark_columns
from anabranch.iceberg.snapshots import Staged
from anabranch.iceberg.staging import NAMED_WITHIN, Written, by_own_spec, stage, stage_written
from anabranch.iceberg.table_schemas import rows_columns
from anabranch.job import Job
from anabranch.kafka.large_records import AHEAD, LogRecord, Stretch
from anabranch.kafka.source import (
    find_large,
    is_out_of_memory,
    is_unreadable,
    read_around,
    read_without_large,
)
from anabranch.offsets.position import Offsets, Ranges, clip, ranges_to_keys, size
from anabranch.protocol import dead_letters, merge
from anabranch.protocol.apply import require_columns
from anabranch.protocol.erasure import HourFilter, load_filter
from anabranch.protocol.measured import PUBLISH, READABLE, STAGE, Meter
from anabranch.protocol.merge import Merged
from anabranch.protocol.publish import Again, Decision, Landed, Publish, new_id
from anabranch.protocol.publish_queue import YieldToQueue
from anabranch.protocol.publisher import Publisher
from anabranch.protocol.sealing import BoundaryResolver, ResolvedState
from anabranch.protocol.state import State
from anabranch.records.erased import find_erased, fit_to_table, without
from anabranch.records.staged import Certain, Tables, TaskSpec, stage_certain, task_spec
from anabranch.subjects.schemas import Schemas, open_schemas, unlisted_ids
from speed_layer.compaction import Compaction
from speed_layer.plan import (
    Next,
    Plan,
    Skip,
    StagedBatch,
    erasure_marks,
    plan_ahead,
    plan_boundary_publish,
    plan_micro_batch,
    plan_publish,
    plan_skip,
    plan_skip_lost,
    plan_write,
    readable_after,
)
from speed_layer.reading_note import DeadShare, ReadingNote

LOG = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(frozen=True)
class PreparedBatch:
    """A micro-batch that workers can stage by the last decision: its offsets by hour, how to read
    and write it, and the id and time of its staged files."""

    decided: ResolvedState
    plan: Plan
    spec: TaskSpec
    tables: Tables
    attempt: str
    began: datetime


class MicroBatches:
    """The publisher of a stream's micro-batches to `speed` and `main`: each offset once, also
    beside other publishers.

    For use by one thread. One micro-batch may be publishing in the background (`submit`). `tally`:
    the stream's own counters, in a process of many streams; the caller's thread counts into it
    (`anabranch.common.counters.counting`).
    """

    def __init__(self, job: Job, stop: threading.Event | None = None, tally: Tally = TALLY) -> None:
        self._environment, self._stream, self._kafka = job.environment, job.stream, job.kafka
        stream, lake = job.stream, job.lake
        self._lake = lake
        self._clock = BoundaryResolver(stream, lake, job.kafka)
        self._publisher = Publisher(lake, stream)
        self._queue = YieldToQueue(lake, stream.table, stop)
        self._meter = Meter("speed", tally)
        # The last decision.
        self._decided: ResolvedState | None = None
        self._compaction = Compaction(lake, stream, tally)
        self._dead_share = DeadShare(lake, stream)
        self._note = ReadingNote(f"{job.environment.catalog.warehouse} {stream.table}")
        # Where the process before this one died, how many did in a row, and the ranges near records
        # that are too large to be read.
        self._suspects: Ranges = {}
        self._deaths = 0
        self._near_large: list[Ranges] | None = None
        self._is_reading = False
        self._executor = ThreadPoolExecutor(1, "publisher", count_into, (tally,))
        self._publishing: Future[int] | None = None
        self._lacks_commit_right = False
        self.has_read_around = False
        """Whether the last publish read around records at which Spark's reader throws."""
        # A Spark session has one staging id at a time.
        self._staging = threading.Lock()

    @cached_property
    def _schemas(self) -> Schemas:
        return open_schemas(self._environment, self._stream)

    def recover(self) -> State:
        """Complete what an earlier publisher left unfinished: the merge, dead letters, ledger rows.
        Return the resulting state. Raises ConfigurationError if the format needs a registry and the
        environment has none."""
        _ = self._schemas
        # Recover before the first decision: decisions and dead letters of a crashed publish wait on
        # the branches, and rows on `speed` may be missing on `main`.
        state = self._publisher.recover()
        # A guess from a decision before the restart would use hours and a position of that time.
        self._decided = None
        self._clock.start_from(state)
        self._compaction.begin()
        return state

    def finish(self) -> None:
        """Run the compaction that is due, at the end of a job that ends by itself."""
        self._compaction.finish()

    def close(self) -> None:
        self._executor.shutdown()
        if not self._is_reading:
            self._note.remove()
        self._compaction.close()

    def submit(
        self, read: Callable[[], DataFrame], ranges: Ranges, read_until: datetime | None = None
    ) -> int:
        """Stage the records of `ranges`, loaded by `read` from Kafka, and publish them in a
        background thread.

        The next call stages while that publish runs. Returns the number of offsets published since
        the last call. Raises like `publish`, for this micro-batch or the previous one; this
        micro-batch is then not published. The caller must `wait` after its last call.
        """
        began = time.monotonic()
        with fields(offsets=ranges_to_keys(ranges)):
            staged = self._stage_ahead(read, ranges)
        try:
            # Decision 20: publish nothing after a publish that failed. Its offsets are not in the
            # table, and the position would move past them.
            published = self.wait()
        except BaseException:
            with suppress(AnabranchError):
                self._discard(staged)
            raise
        if staged is None:
            return published + self.publish(read, ranges, read_until=read_until)
        self._publishing = self._executor.submit(
            self.publish, read, ranges, staged, began, read_until
        )
        return published

    def wait(self) -> int:
        """Wait for the publish. Return the offsets published since. Raises like `publish`."""
        publishing, self._publishing = self._publishing, None
        return publishing.result() if publishing is not None else 0

    @property
    def is_publishing(self) -> bool:
        """Whether a submitted micro-batch is still being published."""
        return self._publishing is not None and not self._publishing.done()

    @property
    def has_failed(self) -> bool:
        """Whether the publish failed; the next call raises its error."""
        work = self._publishing
        return work is not None and work.done() and work.exception() is not None

    def publish(
        self,
        read: Callable[[], DataFrame],
        ranges: Ranges,
        staged: StagedBatch | None = None,
        began: float | None = None,
        read_until: datetime | None = None,
    ) -> int:
        """Publish the records of `ranges`, loaded by `read` from Kafka. Return the number of
        offsets published.

        `read_until`: the log ended at the end of `ranges` at this time or later, if known.
        Published offsets are skipped and overlaps trimmed. Offsets of undecided hours get a publish
        of their own. Rows in `staged` are staged again only when necessary. Raises Transient if the
        range lies ahead of the position (restart from the table) or if Kafka or the lake does not
        answer, PositionError for a recreated topic, Terminal if the table's schema has changed.
        """
        published, whole = 0, False
        self.has_read_around = False
        while not whole:
            with fields(offsets=ranges_to_keys(ranges)):
                part, whole = self._publish_next(
                    read, ranges, staged, began or time.monotonic(), read_until
                )
            published, staged, began = published + part, None, None
        return published

    def decide(self, ranges: Ranges) -> Offsets:
        """Decide again, so that `prepare` has a current decision. Publish the boundaries of hours
        that ended before `ranges`, if any. Return the table's position. Raises like `publish`."""
        needed = {p: e for p, (_, e) in ranges.items()}
        while True:
            decided = self._decided = self._clock.decide(needed=needed)
            require_columns(decided.state.table, self._stream)
            plan = plan_micro_batch(decided, ranges, None, self._lake.clock.now())
            if plan.next is Next.RESTART:
                raise self._restart(decided, ranges)
            if plan.next is not Next.DECIDE:
                return decided.position.offsets
            self._publish_boundaries(decided)

    def prepare(self, ranges: Ranges) -> PreparedBatch | None:
        """Plan how workers stage `ranges`, by the last decision, without Kafka or the lake. None if
        a new one is needed (`needs_decision`), or Spark has to read the records (`publish`)."""
        decided, plan = self._decided, self._plan_ahead(ranges)
        if decided is None or plan is None or self._is_near_large(ranges):
            return None
        # Only Spark filters erased records.
        is_whole = not erasure_marks(decided.state, decided.position.topic_id, plan.by_hour)
        prepared = self._prepare(decided, plan) if is_whole else None
        if prepared is not None:
            reach(Step.SPEED_DECIDED)
        return prepared

    def needs_decision(self, ranges: Ranges) -> bool:
        """Return whether `ranges` need a new decision: an hour has ended, a partition is new."""
        return self._plan_ahead(ranges) is None

    def _plan_ahead(self, ranges: Ranges) -> Plan | None:
        if self._decided is not None:
            return plan_ahead(self._decided, ranges, self._lake.clock.now())
        return None

    def publish_prepared(
        self,
        read: Callable[[], DataFrame],
        ranges: Ranges,
        prepared: PreparedBatch,
        certain: Certain,
        began: float,
        read_until: datetime | None = None,
    ) -> int:
        """Publish `ranges`, whose records workers have staged. `read` loads them again if the
        staged rows are no longer valid. Returns and raises like `publish`."""
        self._is_reading = False
        with fields(offsets=ranges_to_keys(ranges)):
            staged = self._complete(prepared, certain)
            _count(staged)
            staged = replace(staged, seconds=time.monotonic() - began)
        return self.publish(read, ranges, staged, began, read_until)

    def _publish_next(
        self,
        read: Callable[[], DataFrame],
        ranges: Ranges,
        staged: StagedBatch | None,
        began: float,
        read_until: datetime | None,
    ) -> tuple[int, bool]:
        """Publish the part of `ranges` in decided hours. Return the number of offsets, and whether
        that was all of `ranges`.

        1. Decide: load the state after Kafka's answers, and compare `ranges` and the staged rows
           with it. Offsets of undecided hours get a publish of boundaries first.
        2. Stage, unless the staged rows are still valid; then decide again.
        3. Publish rows, position and the names of the dead letters in one commit.
        4. Finish: merge hours that `main` retained, publish the dead letters, commit the offsets
           for lag monitors. The next publish repeats what a crash prevented.
        """
        if staged is not None:
            note(attempt=staged.attempt)
        needed = {p: e for p, (_, e) in ranges.items()}
        ready = time.monotonic()

        def decide() -> Decision[tuple[ResolvedState, Plan]] | Again:
            nonlocal staged, ready
            # Step 1: decide from the table as it is now.
            decided = self._decided = self._clock.decide(needed=needed)
            state = decided.state
            require_columns(state.table, self._stream)
            # Read the clock after the heads. Decision 21: an age by an earlier clock may name files
            # that orphan removal deleted before the heads were loaded: their rows would be lost.
            plan = plan_micro_batch(decided, ranges, staged, self._lake.clock.now())
            # Other offsets or hours than the staged ones are due: the staged rows would be
            # published twice, or in the wrong hour.
            if plan.next in (Next.DONE, Next.RESTART, Next.DECIDE):
                self._discard(staged)
                staged = None
            if plan.next is Next.DONE:
                return Decision(state, None, (decided, plan))
            if plan.next is Next.RESTART:
                raise self._restart(decided, ranges)
            if plan.next is Next.DECIDE:
                return Decision(state, plan_boundary_publish(decided, new_id()), (decided, plan))
            # Decision 8: a publisher at the head of the queue goes first. Staged rows stay valid
            # meanwhile.
            if self._queue.wait_if_first(state.table.properties):
                return Again.AGAIN
            # Step 2: stage, unless the staged rows are still valid.
            if staged is None or plan.next is Next.STAGE:
                reach(Step.SPEED_DECIDED)
                if staged is not None:
                    LOG.warning(
                        "stream %s: staging again: the decision changed, or the staged rows are "
                        "gone or older than %s",
                        self._stream.name,
                        NAMED_WITHIN,
                    )
                self._discard(staged)
                staged = self._stage_readable(read, plan, decided)
                ready = time.monotonic()
                return Again.AGAIN
            if plan.next is Next.MERGE:
                merge.merge(self._lake, self._stream)
                return Again.AGAIN
            # Step 3: publish. One commit, so no crash leaves rows without their position.
            hours = {f.file_path: hour_of_file(state.table, f) for f in staged.rows.files}
            measured = self._measured(state, staged, hours, time.monotonic() - ready)
            publish = plan_publish(decided, plan, staged, hours, read_until, measured)
            return Decision(state, publish, (decided, plan))

        # Without turns of its own: decision 8. The layer publishes between two turns of other
        # publishers.
        ended = self._publisher.run(decide, f"stream {self._stream.name}", take_turns=False)
        (decided, plan), landed = ended.result, ended.landed
        if landed is None:
            LOG.info(
                "stream %s: skipped published offsets=%s", self._stream.name, ranges_to_keys(ranges)
            )
            return 0, True
        if staged is None:
            self._log_boundaries(decided)
            return 0, False
        # Step 4: finish. The position has moved with the rows, so a failure from here on does not
        # publish them again.
        self._meter.landed(landed.seconds)
        merged = merge.merge(self._lake, self._stream) if decided.state.retained_hours else landed
        self._finish_publish(landed.publish, staged, merged)
        LOG.info(
            "stream %s: published %d offsets as %d rows and %d dead letters of hour %s in %.2f s",
            self._stream.name,
            size(plan.todo),
            staged.rows.rows,
            staged.dead.rows if staged.dead else 0,
            ", ".join(plan.by_hour),
            time.monotonic() - began,
        )
        letters = staged.dead.files if staged.dead is not None else ()
        self._dead_share.published(max(plan.by_hour), staged.rows.rows, letters)
        self._compaction.published(len(staged.rows.files))
        return size(plan.todo), plan.whole

    def _restart(self, decided: ResolvedState, ranges: Ranges) -> Transient:
        return Transient(
            f"stream {self._stream.name}: expected offsets from the position "
            f"{decided.position.to_json()} on, found {ranges_to_keys(ranges)}; the position moved "
            "back, or a partition is new; restarting from the table"
        )

    def _publish_boundaries(self, decided: ResolvedState) -> None:
        publish = plan_boundary_publish(decided, new_id())
        if self._publisher.land(decided.state, publish, decided.now) is not None:
            self._log_boundaries(decided)

    def _log_boundaries(self, decided: ResolvedState) -> None:
        ended = max(decided.timeline.boundaries, default=decided.timeline.open)
        LOG.info("stream %s: hour boundaries set up to %s; continuing", self._stream.name, ended)

    def skip(self, skip: Skip) -> bool:
        """Move the position past hours that batch serves; False if the table changed."""
        decided = self._clock.decide()
        publish = plan_skip(decided, skip, new_id())
        if publish is None:
            return False
        return self._move(decided, publish, skip.why)

    def skip_lost(self, log_starts: dict[int, int]) -> None:
        """Move the position to the log's starts, record the lost ranges and log an error; nothing
        if the table changed meanwhile. Undecided hours get their boundaries published first."""
        decided = self._clock.decide()
        planned = plan_skip_lost(decided, log_starts, new_id())
        if planned is None:
            self._publish_boundaries(decided)
            return
        publish, lost = planned
        LOG.error(
            "stream %s: retention deleted offsets before they were read, recorded as a gap "
            "count=%d ranges=%s",
            self._stream.name,
            size(lost),
            ranges_to_keys(lost),
        )
        self._move(decided, publish, "retention deleted these offsets")

    def _move(self, decided: ResolvedState, publish: Publish, why: str) -> bool:
        # Not retried: the caller plans again from the table. If an override meanwhile gave a
        # skipped hour to the speed layer, its offsets would never be read.
        if self._publisher.land(decided.state, publish, decided.now) is None:
            return False
        reach(Step.SPEED_SKIPPED)
        assert publish.position is not None
        LOG.info(
            "stream %s: position moved position=%s reason=%s",
            self._stream.name,
            publish.position.to_json(),
            why,
        )
        return True

    def _stage_ahead(self, read: Callable[[], DataFrame], ranges: Ranges) -> StagedBatch | None:
        """Stage the records loaded by `read`, by the last decision. Return None if a new decision
        is needed first, or if Spark cannot read one of the records."""
        decided, plan = self._decided, self._plan_ahead(ranges)
        if decided is None or plan is None or self._is_near_large(ranges):
            return None
        # Fail fast if the catalog is down: Spark would retry for minutes without an error.
        self._lake.load(self._stream.table)
        reach(Step.SPEED_DECIDED)
        try:
            return self._stage(read(), plan, decided)
        except (PySparkException, Py4JError) as error:
            if not is_unreadable(error):
                raise
            return None

    def _stage_readable(
        self, read: Callable[[], DataFrame], plan: Plan, decided: ResolvedState
    ) -> StagedBatch:
        """Stage the records of `read`; if Spark cannot read one, the records around it."""
        if self._is_near_large(plan.todo):
            return self._stage_without_large(read, plan, decided)
        try:
            return self._stage(read(), plan, decided)
        except (PySparkException, Py4JError) as error:
            if is_out_of_memory(error):
                # Of an executor.
                self._deaths += 1
                return self._stage_without_large(read, plan, decided)
            if not is_unreadable(error):
                raise
            self.has_read_around = True
            session, topic = read().sparkSession, self._stream.topic
            around = read_around(session, self._environment.kafka, self._kafka, topic, plan.todo)
            return self._stage(around, plan, decided)

    def find_large(self, spark: SparkSession, position: Offsets) -> None:
        """Look for records that are too large to be read, where the process before this one died.
        Without effect after the first call. Raises Transient."""
        if self._near_large is not None:
            return
        noted, found = self._note.before, list[Stretch]()
        topic = self._kafka.describe(self._stream.topic) if noted.ranges else None
        if topic is not None:
            self._suspects = noted.suspects(position, self._kafka.stable_ends(topic))
        if self._suspects:
            self._deaths = noted.deaths + 1
            found = find_large(spark, self._kafka, self._stream.topic, self._suspects, self._deaths)
        self._near_large = [{one.partition: (one.start, one.end)} for one in found]

    def _is_near_large(self, ranges: Ranges) -> bool:
        return any(
            max(start - AHEAD, ranges[p][0]) < min(end, ranges[p][1])
            for one in self._near_large or ()
            for p, (start, end) in one.items()
            if p in ranges
        )

    def note_reading(self, ranges: Ranges) -> None:
        """Note that the records of `ranges` are read now, for the next start."""
        self._is_reading = True
        self._note.write(ranges, self._deaths if clip(ranges, self._suspects) else 0)

    def _stage_without_large(
        self, read: Callable[[], DataFrame], plan: Plan, decided: ResolvedState
    ) -> StagedBatch:
        """Stage a plan's records. Those that are too large to be read become dead letters."""
        session, stream = read().sparkSession, self._stream
        self.has_read_around = True
        around, large = read_without_large(
            session, self._environment.kafka, self._kafka, stream.topic, plan.todo, self._deaths
        )

        def hour_of(record: LogRecord) -> str:
            return next(
                hour
                for hour, ranges in plan.by_hour.items()
                if record.partition in ranges
                and ranges[record.partition][0] <= record.offset < ranges[record.partition][1]
            )

        dead = records.too_large(session, stream, large, hour_of) if large else None
        return self._stage(around, plan, decided, dead)

    def _measured(
        self, state: State, staged: StagedBatch, hours: Mapping[str, str], publishing: float
    ) -> dict[str, str]:
        """Return the measurements that this publish writes to `main`."""
        seconds = [(STAGE, staged.seconds), (PUBLISH, publishing)]
        if (waited := readable_after(state, staged, hours, self._lake.clock.now())) is not None:
            seconds.append((READABLE, waited))
        return self._meter.to_properties(state.branch_properties["main"], seconds)

    def _stage(
        self, frame: DataFrame, plan: Plan, decided: ResolvedState, dead: DataFrame | None = None
    ) -> StagedBatch:
        """Stage a plan's rows and dead letters, for the topic and columns of the decision. `dead`:
        dead letters beside those of `frame`."""
        began = time.monotonic()
        self.note_reading(plan.todo)
        staged = self._with_listed_ids(lambda: self._stage_all(frame, plan, decided, dead))
        self._is_reading = False
        _count(staged)
        return replace(staged, seconds=time.monotonic() - began)

    def _with_listed_ids(self, stage: Callable[[], T]) -> T:
        """Call `stage`. If a record has a schema id that the decoder was not given, ask the
        registry for its schema and call it again."""
        self._schemas.forget_missing()
        while True:
            try:
                return stage()
            except (PySparkException, Py4JError) as error:
                # Without a new schema the same error would follow without end.
                if not self._schemas.learn(unlisted_ids(error)):
                    raise

    def _stage_all(
        self, frame: DataFrame, plan: Plan, decided: ResolvedState, dead_too: DataFrame | None
    ) -> StagedBatch:
        topic_id = decided.position.topic_id
        # Trim only if needed: changing bounds in the query plan would recompile it for each
        # micro-batch.
        frame = records.trim(frame, plan.todo) if plan.trimmed else frame
        # A task writes one file. Limit the tasks to one per core, whatever the number of
        # partitions.
        at_once = frame.sparkSession.sparkContext.defaultParallelism
        frame = frame.coalesce(at_once) if len(plan.todo) > at_once else frame
        left_out = load_filter(
            self._environment,
            self._stream,
            self._publisher.ledger,
            decided.state,
            topic_id,
            plan.by_hour,
        )
        by_workers = not left_out and dead_too is None
        if by_workers and (staged := self._stage_certain(frame, plan, decided)) is not None:
            return staged
        return self._stage_judged(frame, plan, decided, left_out, dead_too)

    def _stage_judged(
        self,
        frame: DataFrame,
        plan: Plan,
        decided: ResolvedState,
        left_out: Sequence[HourFilter],
        dead_too: DataFrame | None,
    ) -> StagedBatch:
        """Stage rows and dead letters of all records, decoded once, without erased ones."""
        topic_id = decided.position.topic_id
        # Decision 51: the publish compares these marks with the branches. Without them, rows that
        # were staged before an erasure's request would bring erased records back.
        marks = erasure_marks(decided.state, topic_id, plan.by_hour)
        decoded = self._decode(frame, plan)
        if dead_too is not None:
            decoded = decoded.unionByName(dead_too.drop(records.UNKNOWN))
        left = decoded = decoded.cache()
        try:
            if left_out:
                left = without(decoded, find_erased(decoded, left_out)).cache()
            rows = self._stage_rows(left, plan, decided)
            count = left.count()
            dead = self._stage_dead(left, plan, topic_id) if count > rows.rows else None
            if left_out:
                LOG.info(
                    "stream %s: left out erased records count=%d",
                    self._stream.name,
                    decoded.count() - count,
                )
        finally:
            left.unpersist()
            decoded.unpersist()
        reach(Step.SPEED_STAGED)
        return StagedBatch(topic_id, plan.by_hour, rows, dead, erasures=marks)

    def _stage_rows(self, decoded: DataFrame, plan: Plan, decided: ResolvedState) -> Staged:
        """Stage the good records with Spark's writer, in the columns of the decision's table."""
        stream, catalog = self._stream, self._environment.catalog.name
        fitted = fit_to_table(
            records.good(decoded, stream), catalog, decided.state.table, rows_columns(stream)
        )
        # The number of other partitions is not known.
        dates = None if spark_columns(decided.state.table, catalog) else stream.most_event_dates
        write = plan_write(dates, len(plan.by_hour))
        write |= by_own_spec(decided.state.table)
        with self._staging:
            rows = stage(fitted, self._lake, catalog, stream.table, new_id(), write)
        note(attempt=rows.wap_id)
        reach(Step.SPEED_ROWS_STAGED)
        return rows

    def _stage_certain(
        self, frame: DataFrame, plan: Plan, decided: ResolvedState
    ) -> StagedBatch | None:
        """Stage the records in workers. Return None if Spark has to write the rows."""
        if (prepared := self._prepare(decided, plan)) is None:
            return None
        certain = stage_certain(
            frame, prepared.spec, prepared.tables, prepared.attempt, prepared.began
        )
        if self.learn_schemas(certain):
            # No snapshot refers to the files of the first attempt.
            return self._stage_certain(frame, plan, decided)
        return self._complete(prepared, certain)

    def _prepare(self, decided: ResolvedState, plan: Plan) -> PreparedBatch | None:
        """Return how workers stage a micro-batch; None if Spark writes its rows."""
        tables = Tables(decided.state.table, self._letters)
        spec = task_spec(
            self._stream,
            tables,
            rows_columns(self._stream).schema,
            self._schemas.known,
            plan.hours,
            decided.position.topic_id,
            self._environment.masking_secret,
        )
        if spec is None:
            return None
        return PreparedBatch(decided, plan, spec, tables, new_id(), self._lake.clock.now())

    @cached_property
    def _letters(self) -> Table:
        """The dead letters table, as it was when the job started. Files with its columns stay
        readable whatever another program does to them: columns have ids."""
        return self._lake.load(self._stream.dead_letters_table)

    def learn_schemas(self, certain: Certain) -> bool:
        """Ask the registry for the schemas that workers did not have. Return True if there are any:
        then the records must be staged again.

        Raises Transient if the registry does not answer, ConfigurationError if it refuses.
        """
        return self._schemas.learn(certain.unknown_ids)

    def _complete(self, prepared: PreparedBatch, certain: Certain) -> StagedBatch:
        """Stage the dead letters that workers wrote. Raises Transient."""
        plan, dead = prepared.plan, None
        note(attempt=prepared.attempt)
        reach(Step.SPEED_ROWS_STAGED)
        if certain.letters.files:
            name = self._stream.dead_letters_table
            # Decision 42: publishes name dead letters for any time, so their snapshot gets a branch
            # in the commit that adds it. Without it, another program's expiry would delete them.
            dead = stage_written(self._lake, name, certain.letters, protected=True)
        reach(Step.SPEED_STAGED)
        topic_id = prepared.decided.position.topic_id
        return StagedBatch(topic_id, plan.by_hour, certain.written, dead)

    def _stage_dead(self, decoded: DataFrame, plan: Plan, topic_id: str) -> Staged:
        stream, catalog = self._stream, self._environment.catalog.name
        letters, write = records.dead(decoded, topic_id, "speed"), plan_write(1, len(plan.by_hour))
        with self._staging:
            return stage(
                letters,
                self._lake,
                catalog,
                stream.dead_letters_table,
                new_id(),
                write,
                protected=True,
            )

    def _decode(self, frame: DataFrame, plan: Plan) -> DataFrame:
        secret, hours = self._environment.masking_secret, plan.hours
        return records.decode(frame, self._stream, self._schemas, secret=secret, hours=hours)

    def _finish_publish(
        self, publish: Publish, staged: StagedBatch, ended: Landed | Merged
    ) -> None:
        """Run the steps after a publish, or after the merge that follows it. The next publish
        repeats steps that a crash prevented."""
        # Each of these steps waits on a branch or follows from the position, so a crash between
        # them loses nothing.
        self._queue.published()
        reach(Step.SPEED_PUBLISHED)
        if staged.dead is not None:
            self._publisher.publish_dead_letters(ended.state)
        reach(Step.SPEED_DEAD_LETTERS)
        assert publish.position is not None
        self._commit_lag(publish.position.offsets)
        reach(Step.SPEED_OFFSETS_COMMITTED)

    def _commit_lag(self, offsets: Offsets) -> None:
        """Commit offsets for lag monitors alone; a failure does not end the job."""
        if self._lacks_commit_right:
            return
        try:
            self._kafka.commit_lag(f"anabranch-{self._stream.name}", self._stream.topic, offsets)
        except MissingRight as error:
            self._lacks_commit_right = True
            LOG.warning(
                "stream %s: offsets for lag monitors not committed until a restart with the right "
                "to do so; records and tables do not need them: %s",
                self._stream.name,
                error,
            )
        except AnabranchError as error:
            LOG.debug(
                "stream %s: offsets for lag monitors not committed: %s", self._stream.name, error
            )

    def _discard(self, staged: StagedBatch | None) -> None:
        if staged is None:
            return
        # Decision 21: do not delete files of workers, because a publish whose answer was lost may
        # name them and still land; `main` would name deleted files. Orphan removal deletes those
        # without a snapshot.
        if isinstance(staged.rows, Staged):
            self._lake.discard(self._stream.table, staged.rows)
        if staged.dead is not None:
            dead_letters.discard(self._lake, self._stream, staged.dead)


def _count(staged: StagedBatch) -> None:
    """Count the bytes of all files that tasks wrote, and the requests of workers: one per file."""
    written = [*staged.rows.files, *(staged.dead.files if staged.dead else ())]
    count_written((f.file_path, f.file_size_in_bytes) for f in written)
    if isinstance(staged.rows, Written):
        requests = sum(f.file_path.startswith("s3") for f in written)
        TALLY.count(S3_REQUESTS, "PutObject", requests)
