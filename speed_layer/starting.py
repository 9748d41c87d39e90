"""The start of a stream: recover from the table, then catch up hour by hour to the position at
which the stream starts reading."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from functools import partial

from pyspark.sql import SparkSession

from anabranch.common.errors import NotYet, PositionError, Transient
from anabranch.common.fail_points import Step, reach
from anabranch.common.health import NoteProgress
from anabranch.iceberg.owner import owner_of
from anabranch.job import Job
from anabranch.kafka.source import read_ranges
from anabranch.offsets.position import Offsets, to_keys
from anabranch.protocol.apply import apply, is_created, require_columns
from anabranch.protocol.sealing import check_clock
from anabranch.protocol.state import check_log_end, check_topic, load_state
from speed_layer.micro_batch import MicroBatches
from speed_layer.plan import Skip, chunks, plan_catch_up

LOG = logging.getLogger(__name__)


class StreamStart:
    """The start of one stream: find its position, and publish the sealed hours that it still has to
    read. `count` is called with the number of offsets of each publish, `note_progress` after each
    skip. `available_now`: do not wait for a topic that does not exist."""

    def __init__(
        self,
        job: Job,
        spark: SparkSession,
        batches: MicroBatches,
        stop: threading.Event,
        count: Callable[[int], None],
        available_now: bool,
        note_progress: NoteProgress = lambda *_: None,
    ) -> None:
        self._job, self._spark, self._batches, self._stop = job, spark, batches, stop
        self._count, self._note_progress = count, note_progress
        self._available_now = available_now

    def run(self) -> Offsets:
        """Create the tables of a new topic if its family requests it; recover, compare clocks,
        catch up. Return the start position.

        Raises Transient if a stop is requested or a service does not answer, PositionError if the
        topic and the table contradict each other or retention deleted unread offsets, Terminal for
        a table that needs `apply`.
        """
        job = self._job
        if job.creates_tables and not is_created(job.lake, job.stream):
            for change in apply(job.environment, job.stream, job.lake, job.kafka):
                LOG.info("stream %s: %s", job.stream.name, change)
        # Before the position is read: a merge or a ledger row of a crashed publish is completed
        # first.
        state = self._batches.recover()
        self._batches.find_large(self._spark, state.position.offsets)
        reach(Step.SPEED_RECOVERED)
        require_columns(state.table, self._job.stream)
        check_clock(self._job.lake, state)
        return self._catch_up()

    def _catch_up(self) -> Offsets:
        """Skip or read whole sealed hours until the stream continues. Return its position."""
        name, job = self._job.stream.name, self._job
        while not self._stop.is_set():
            state = load_state(job.lake, job.stream.table)
            topic = job.kafka.describe(job.stream.topic, state.position)
            if state.position.topic_id == "" and topic is None:
                missing = NotYet if self._available_now else Transient
                raise missing(
                    f"topic {job.stream.topic}: expected it to exist, found none yet; create it, "
                    "or correct `topic:` in the stream's file"
                )
            position = check_topic(
                state.position, topic, job.stream.topic, owner_of(state.table).cluster_id
            )
            assert topic is not None
            step = plan_catch_up(state, position.offsets)
            if isinstance(step, Skip):
                if self._batches.skip(step):
                    self._note_progress()
                continue
            # Read after the position was loaded. Retention may delete offsets that were not read:
            # without this check their loss would not be recorded.
            starts = job.kafka.log_starts(topic)
            check_log_end(
                position, job.kafka.stable_ends(topic, position.offsets), job.stream.topic
            )
            if any(s > position.offsets[p] for p, s in starts.items()):
                if job.stream.speed.lost_offsets == "stop":
                    lost = {
                        p: [position.offsets[p], s]
                        for p, s in starts.items()
                        if s > position.offsets[p]
                    }
                    raise PositionError(
                        f"stream {name}: expected all offsets from the position "
                        f"{to_keys(position.offsets)} on, found that retention deleted {lost}; to "
                        "record the gap, set speed.lost_offsets: continue"
                    )
                self._batches.skip_lost(starts)
                continue
            if step is None:
                return position.offsets
            LOG.info(
                "stream %s: reading an hour that batch does not serve, by its cut hour=%s",
                name,
                step.hour,
            )
            for piece in chunks(step.ranges, job.stream.speed.max_offsets_per_trigger):
                read = partial(
                    read_ranges, self._spark, job.environment.kafka, job.stream.topic, piece
                )
                self._count(self._batches.publish(read, piece))
        raise Transient(f"stream {name}: stopped on request; no data is lost, run it again")
