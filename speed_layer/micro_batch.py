"""One micro-batch: stage, check, publish. The table says where the stream stands; no checkpoint is believed."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from py4j.protocol import Py4JError
from pyspark.errors import PySparkException
from pyspark.sql import Observation
from pyspark.sql import functions as F

from anabranch import records
from anabranch.config import Environment, Stream
from anabranch.errors import PositionError, Transient, Unexpected
from anabranch.fail_points import Step, reach
from anabranch.kafka.client import KafkaAdapter
from anabranch.kafka.source import is_unreadable, read_around
from anabranch.logs import fields, note
from anabranch.position import Position, Ranges, ranges_to_keys, size
from anabranch.protocol import dead_letters
from anabranch.protocol.apply import require_columns, rows_columns
from anabranch.protocol.publish import Again, Decision, Landed, Publish, land, new_id, run
from anabranch.protocol.sealing import BoundaryResolver, ResolvedState
from anabranch.protocol.state import State
from anabranch.protocol.turns import Holding
from anabranch.records.formats import open_format
from anabranch.table.lake import Lake
from anabranch.table.manifests import hour_of_file
from anabranch.table.staging import stage
from serving_layer import merge
from serving_layer.diff.spark import fitted
from serving_layer.merge import Merged, recover
from speed_layer.plan import (
    Next,
    Plan,
    Skip,
    StagedBatch,
    plan_ends,
    plan_micro_batch,
    plan_publish,
    plan_skip,
    plan_skip_lost,
    plan_write,
)
from speed_layer.rollup import Rollup

if TYPE_CHECKING:
    from pyiceberg.table import Table
    from pyspark.sql import DataFrame

LOG = logging.getLogger(__name__)


class MicroBatches:
    """Publishes a stream's micro-batches to `speed` and `main`, each offset once, beside any other publisher."""

    def __init__(
        self,
        environment: Environment,
        stream: Stream,
        lake: Lake,
        kafka: KafkaAdapter,
        stop: threading.Event | None = None,
    ) -> None:
        self._environment, self._stream, self._lake, self._kafka = environment, stream, lake, kafka
        self._clock = BoundaryResolver(stream, lake, kafka)
        self._format = open_format(environment, stream)
        self._confirmed: frozenset[str] = frozenset()
        self._turns = Holding(lake, stream.table, stop)
        self._table: Table | None = None
        self._rollup = Rollup(lake, stream)

    def recover(self) -> State:
        """Finish what an earlier publisher left half done: the merge, dead letters, ledger rows; returns the state that
        it ended with."""
        recovered = recover(self._lake, self._stream)
        self._confirmed |= recovered.confirmed
        self._clock.start_from(recovered.state)
        self._rollup.begin()
        return recovered.state

    def finish(self) -> None:
        """At the end of a job that ends by itself: roll up what is due."""
        self._rollup.finish()

    def close(self) -> None:
        """Stop what runs beside the micro-batches."""
        self._rollup.close()

    def publish(self, frame: Callable[[], DataFrame], ranges: Ranges) -> int:
        """Publish the records of `ranges`, which `frame` reads from Kafka; returns how many offsets it published.

        What is published already is skipped, what overlaps is trimmed, and what belongs to hours that are not decided
        yet follows in a publish of its own. Raises Transient when the range lies ahead of the position (start again
        from the table) or Kafka or the lake does not answer, PositionError for a recreated topic, Terminal when the
        table was evolved meanwhile.
        """
        published, whole = 0, False
        while not whole:
            with fields(offsets=ranges_to_keys(ranges)):
                part, whole = self._publish_next(frame, ranges)
            published += part
        return published

    def _publish_next(self, frame: Callable[[], DataFrame], ranges: Ranges) -> tuple[int, bool]:
        """Publish what of `ranges` belongs to hours that are decided; how many offsets, and whether that was all."""
        began = time.monotonic()
        needed = {p: e for p, (_, e) in ranges.items()}
        decided: ResolvedState | None = None
        plan: Plan | None = None
        staged: StagedBatch | None = None

        def decide() -> Decision:
            nonlocal decided, plan, staged
            # Step 1: decide from the table as it is now.
            decided = self._clock.decide(needed=needed)
            state = decided.state
            require_columns(state.table, self._stream)
            self._table = state.table
            plan = plan_micro_batch(decided, ranges, staged)
            if plan.next in (Next.LEAVE, Next.RESTART, Next.DECIDE):
                self._discard(staged)
                staged = None
            if plan.next is Next.LEAVE:
                return state, None
            if plan.next is Next.RESTART:
                raise Transient(
                    f"stream {self._stream.name}: expected offsets from the position {decided.position.to_json()} on, "
                    f"found {ranges_to_keys(ranges)}: the position was moved back, or a partition is new; starting "
                    "again from the table"
                )
            if plan.next is Next.DECIDE:
                return state, plan_ends(decided, new_id(), self._confirmed)
            reach(Step.SPEED_DECIDED)
            # A publisher with a turn goes first, also before rows that are staged: they stay the right ones meanwhile.
            if self._turns.holds(state.table.properties):
                return Again.AGAIN
            # Step 2: stage, unless the rows that are staged are still the right ones.
            if staged is None or plan.next is Next.STAGE:
                self._discard(staged)
                staged = self._stage_readable(frame, plan, decided.position.topic_id)
                return Again.AGAIN
            if plan.next is Next.MERGE:
                merge.merge(self._lake, self._stream)
                return Again.AGAIN
            # Step 3: publish.
            return state, plan_publish(decided, plan, staged, _hours_of(state, staged), new_id(), self._confirmed)

        landed = run(self._lake, self._stream.table, decide, f"stream {self._stream.name}")
        assert decided is not None
        assert plan is not None
        if landed is None:
            LOG.info("stream %s: offsets %s are already published; skipped", self._stream.name, ranges_to_keys(ranges))
            return 0, True
        if staged is None:
            self._say_ends(decided)
            return 0, False
        ended = merge.merge(self._lake, self._stream) if decided.state.retained_hours else landed
        self._after(landed.publish, staged, ended)
        LOG.info(
            "stream %s: published %d offsets as %d rows and %d dead letters of hour %s in %.2f s",
            self._stream.name, size(plan.todo), staged.rows.rows if staged.rows else 0,
            staged.dead.rows if staged.dead else 0, ", ".join(plan.by_hour), time.monotonic() - began,
        )  # fmt: skip
        self._rollup.published(len(staged.rows.files) if staged.rows else 0)
        return size(plan.todo), plan.whole

    def _publish_ends(self, decided: ResolvedState) -> bool:
        publish = plan_ends(decided, new_id(), self._confirmed)
        if land(self._lake, decided.state, publish, decided.now) is None:
            return False
        self._say_ends(decided)
        return True

    def _say_ends(self, decided: ResolvedState) -> None:
        ended = max(decided.timeline.boundaries, default=decided.timeline.open)
        LOG.info("stream %s: hours are cut up to %s; cutting on", self._stream.name, ended)

    def skip(self, skip: Skip) -> bool:
        """Move the position behind hours that the batch layer serves; False when the table moved meanwhile."""
        decided = self._clock.decide()
        publish = plan_skip(decided, skip, new_id(), self._confirmed)
        if publish is None:
            return False
        return self._move(decided, publish, skip.why)

    def skip_lost(self, log_starts: dict[int, int]) -> bool:
        """Move the position to the log's start, recording the range that retention took. Loud on purpose."""
        decided = self._clock.decide()
        planned = plan_skip_lost(decided, log_starts, new_id(), self._confirmed)
        if planned is None:
            return self._publish_ends(decided)
        publish, lost = planned
        LOG.error(
            "stream %s: retention took %d offsets before they were read: %s; recorded as a gap", self._stream.name,
            size(lost), ranges_to_keys(lost),
        )  # fmt: skip
        return self._move(decided, publish, "retention took them")

    def _move(self, decided: ResolvedState, publish: Publish, why: str) -> bool:
        if land(self._lake, decided.state, publish, decided.now) is None:
            return False
        reach(Step.SPEED_SKIPPED)
        assert publish.position is not None
        LOG.info("stream %s: position moved to %s: %s", self._stream.name, publish.position.to_json(), why)
        return True

    def _stage_readable(self, frame: Callable[[], DataFrame], plan: Plan, topic_id: str) -> StagedBatch:
        """Stage what `frame` reads; where Spark's reader cannot pass a record, what is read around it."""
        try:
            return self._stage(frame(), plan, topic_id)
        except (PySparkException, Py4JError) as error:
            if not is_unreadable(error):
                raise
            session, topic = frame().sparkSession, self._stream.topic
            around = read_around(session, self._environment.kafka, self._kafka, topic, plan.todo)
            return self._stage(around, plan, topic_id)

    def _stage(self, frame: DataFrame, plan: Plan, topic_id: str) -> StagedBatch:
        stream, catalog = self._stream, self._environment.catalog.name
        # The usual micro-batch is not trimmed: changing bounds in the plan would have it compiled anew each time.
        frame = records.trim(frame, plan.todo) if plan.trimmed else frame
        # A file for each task: as many as run at once, however many partitions there are.
        at_once = frame.sparkSession.sparkContext.defaultParallelism
        frame = frame.coalesce(at_once) if len(plan.todo) > at_once else frame
        # Counted before anything else, where a row is not copied for it. A task that is tried again may count twice,
        # which only costs a needless look for dead letters.
        counts = Observation()
        counted = frame.observe(counts, F.count(F.lit(1)).alias("records"))
        good = records.good(self._decode(counted, plan, with_errors=False), stream)
        if self._table is not None:
            good = fitted(good, catalog, self._table, rows_columns(stream))
        write = plan_write(stream.most_event_dates, len(plan.by_hour))
        rows = stage(good, self._lake, catalog, stream.table, new_id(), write)
        note(attempt=rows.wap_id)
        reach(Step.SPEED_ROWS_STAGED)
        seen: dict[str, Any] = counts.get
        dead = None
        if seen["records"] > rows.rows:
            letters = records.dead(self._decode(frame, plan, with_errors=True), topic_id, "speed")
            dead = stage(
                letters, self._lake, catalog, stream.dead_letters_table, new_id(), plan_write(1, len(plan.by_hour))
            )
        reach(Step.SPEED_STAGED)
        self._check_topic_unchanged(topic_id)
        return StagedBatch(plan.by_hour, rows, dead)

    def _decode(self, frame: DataFrame, plan: Plan, with_errors: bool) -> DataFrame:
        return records.decode(records.assign_hours(frame, plan.hours), self._stream, self._format, with_errors)

    def _check_topic_unchanged(self, topic_id: str) -> None:
        topic = self._kafka.describe(self._stream.topic, Position(topic_id, {}))
        if topic is None or topic.id != topic_id:
            raise PositionError(
                f"topic {self._stream.topic}: expected id {topic_id} after the read, found "
                f"{topic.id if topic else 'no topic'}: nothing of this micro-batch is published; run `anabranch adopt`"
            )

    def _after(self, publish: Publish, staged: StagedBatch, ended: Landed | Merged) -> None:
        """What follows a publish, or the merge after it, and may be lost with the process: the next one does it
        again."""
        self._turns.published()
        self._confirmed = frozenset()
        reach(Step.SPEED_PUBLISHED)
        if staged.dead is not None:
            self._confirmed = dead_letters.roll_forward(self._lake, self._stream.dead_letters_table, ended.state)
        reach(Step.SPEED_DEAD_LETTERS)
        assert publish.position is not None
        try:
            self._kafka.commit_lag(f"anabranch-{self._stream.name}", self._stream.topic, publish.position.offsets)
        except (Transient, Unexpected) as error:
            LOG.debug("stream %s: lag monitors not told: %s", self._stream.name, error)
        reach(Step.SPEED_OFFSETS_COMMITTED)

    def _discard(self, staged: StagedBatch | None) -> None:
        if staged is None:
            return
        if staged.rows is not None:
            self._lake.discard(self._stream.table, staged.rows)
        if staged.dead is not None:
            dead_letters.discard(self._lake, self._stream, staged.dead)


def _hours_of(state: State, staged: StagedBatch) -> dict[str, str]:
    files = staged.rows.files if staged.rows else ()
    return {f.file_path: hour_of_file(state.table, f) for f in files}
