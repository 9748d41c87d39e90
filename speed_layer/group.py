"""One speed process for many streams: one Spark session, one read of all their topics, one publish
per table.

The coordinator reads the topics' ends from Kafka, and stages all micro-batches that are due in one
Spark job (`speed_layer.group_staging`). Each stream has its own thread, which starts from the
table, publishes the staged rows, and retries, so that a stream that fails or waits does not delay
another. There is no streaming query and no checkpoint: the ranges to read follow from each table's
position and Kafka's ends alone.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from datetime import datetime
from functools import partial

from pyspark.sql import DataFrame, SparkSession

from anabranch.common.counters import Tally, counting
from anabranch.common.errors import AnabranchError, JvmGone, Transient
from anabranch.common.health import PATIENCE, NoteProgress
from anabranch.common.logs import fields
from anabranch.common.retry import Retry
from anabranch.config import Kafka
from anabranch.job import Job
from anabranch.kafka.client import KafkaAdapter
from anabranch.kafka.source import read_ranges, read_topics
from anabranch.offsets.position import Offsets, Ranges, Topic
from anabranch.records.staged import Certain
from anabranch.spark.session import explain_spark, explained, new_session
from speed_layer.group_staging import stage_group
from speed_layer.micro_batch import MicroBatches, PreparedBatch
from speed_layer.plan import (
    Waiting,
    is_behind,
    is_due,
    partitions_changed,
    plan_waiting,
    unique_topics,
)
from speed_layer.starting import StreamStart

LOG = logging.getLogger(__name__)

# Intervals at which the topics' ends, their partitions and ids, and the streams' files are read.
_POLL_SECONDS = 0.5
_DESCRIBE_SECONDS = 5.0
_FILES_SECONDS = 2.0
# Interval after which a set-aside stream starts again, in case an operator has fixed the error.
_SET_ASIDE_SECONDS = 60.0
# Maximum number of concurrent publishes: more would only share the driver's interpreter. No stream
# waits longer than `_TURN_SECONDS` for the others.
_AT_ONCE, _TURN_SECONDS = 8, 2.0
_DRAIN_SECONDS = 120.0

GROUP_SETTINGS = {
    # One consumer for each partition of all topics. With the default of 64, Spark would close the
    # others and connect again for each read.
    "spark.kafka.consumer.cache.capacity": "2000",
    # The driver runs many queries, and needs each plan once.
    "spark.sql.ui.retainedExecutions": "1",
    "spark.ui.retainedJobs": "10",
    "spark.ui.retainedStages": "10",
}
"""Settings of a session that reads many topics."""

Streams = Callable[[], Mapping[str, Job | AnabranchError]]
"""Reads the group's streams from their files: the same Job until its file changes, or an error."""


class _Turns:
    """A limit on turns, without a guarantee: after `seconds` a thread goes on without one."""

    def __init__(self, at_once: int, seconds: float) -> None:
        self._free, self._seconds = threading.Semaphore(at_once), seconds

    @contextmanager
    def turn(self) -> Iterator[None]:
        taken = self._free.acquire(timeout=self._seconds)
        try:
            yield
        finally:
            if taken:
                self._free.release()


@dataclass(frozen=True)
class Work:
    """The next step of a stream's thread for `ranges`: publish the rows that workers staged;
    without `prepared`, read and publish the records with Spark; with `only_decide`, only decide
    again. `error` is the error with which staging failed."""

    ranges: Ranges
    prepared: PreparedBatch | None = None
    certain: Certain | None = None
    began: float = 0.0
    read_until: datetime | None = None
    only_decide: bool = False
    error: Exception | None = None


class Member:
    """One stream of a group, with its own thread."""

    def __init__(self, job: Job, spark: SparkSession, turns: _Turns, available_now: bool) -> None:
        self.job, self.name = job, job.stream.name
        self.position: Offsets = {}
        self.target: Offsets | None = None
        """End offsets at which the stream ends, with `available_now`."""
        self.last: float | None = None
        """Start of its last micro-batch, by the monotonic clock."""
        self.has_decided_again = False
        """Whether its next micro-batch has caused a new decision already. If workers still cannot
        stage it, Spark reads it."""
        self.reads_alone = False
        """Whether the stream reads its topic alone: its last read alone failed, or met records that
        would fail the group's read."""
        self.failure: AnabranchError | None = None
        """The reason why it is set aside; None while it runs, starts or retries."""
        self._tried: AnabranchError | None = None
        self._moved = time.monotonic()
        self.spark = new_session(spark, job.environment)
        self._turns, self._available_now = turns, available_now
        self._stop = threading.Event()
        self._ready = threading.Event()
        self._inbox: queue.SimpleQueue[Work | None] = queue.SimpleQueue()
        self.progress = 0
        """Grows with each publish, and while no records wait: a failure after an idle time starts a
        new retry period."""
        self._reader = _new_reader()
        self._tally = Tally()
        self.batches = MicroBatches(job, self._stop, self._tally)
        """The coordinator may use it only while the stream is ready."""
        self._start = StreamStart(
            job, self.spark, self.batches, self._stop, self.note_progress, available_now
        )
        self._thread = threading.Thread(target=self._run, name=f"stream-{self.name}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    @property
    def is_ready(self) -> bool:
        return self._ready.is_set()

    def note_progress(self, number: int = 1) -> None:
        """Record that offsets were published, or that no records wait."""
        self.progress += number
        if number:
            self._moved = time.monotonic()

    @property
    def stall(self) -> str | None:
        """The reason for a delay, if records wait longer than a publish may take; else None."""
        speed = self.job.stream.speed
        limit = (PATIENCE + 2 * speed.trigger).total_seconds()
        if (quiet := time.monotonic() - self._moved) <= limit:
            return None
        why = (
            f"its last error: {self._tried}"
            if self._tried is not None
            else "its current step has not ended"
        )
        return f"expected a publish within {limit:.0f} s, found none for {quiet:.0f} s; {why}"

    @property
    def has_ended(self) -> bool:
        return not self._thread.is_alive()

    def hand(self, work: Work) -> None:
        self._ready.clear()
        self._inbox.put(work)

    def finish(self) -> None:
        """End a ready stream after the compaction that is due."""
        self._ready.clear()
        self._inbox.put(None)

    def stop(self) -> None:
        """Stop after the current publish; `has_ended` is true then."""
        self._stop.set()
        self._inbox.put(None)

    def join(self, seconds: float) -> None:
        self._thread.join(seconds)

    def read(self, ranges: Ranges) -> DataFrame:
        kafka, topic = self.job.environment.kafka, self.job.stream.topic
        return read_ranges(self.spark, kafka, topic, ranges, group=self._reader)

    def _run(self) -> None:
        with fields(stream=self.name), counting(self._tally):
            try:
                while not self._stop.is_set() and not self._run_until_failure():
                    self._stop.wait(_SET_ASIDE_SECONDS)
            finally:
                self.batches.close()
                self.job.kafka.close()

    def _run_until_failure(self) -> bool:
        """Start and publish. Return True after a stop, False after an error that retries did not
        resolve: it is set aside. With `available_now`, True after such an error too."""
        retry = Retry(None, self._stop)
        try:
            retry.call(f"stream {self.name}", self._try_noting_errors, lambda: self.progress)
        except AnabranchError as error:
            if self._stop.is_set() and isinstance(error, Transient):
                return True
            if self.failure is None or str(self.failure) != str(error):
                LOG.error(
                    "stream %s: set aside, next start in %.0f s; the other streams continue: %s",
                    self.name,
                    _SET_ASIDE_SECONDS,
                    error,
                )
            self.failure = error
            return self._available_now
        return True

    def _try_noting_errors(self) -> None:
        try:
            self._try()
        except AnabranchError as error:
            self._tried = error
            raise

    def _try(self) -> None:
        self._ready.clear()
        # The topic may have been recreated: see GroupJob.
        self._reader = _new_reader()
        with explained(self.spark, f"run stream {self.name}"):
            # Without a turn for a stream that was set aside: its start may wait for seconds until
            # it is certain that nothing has changed.
            with self._turns.turn() if self.failure is None else nullcontext():
                position = self._start.run()
                # Work from before the restart has ranges and staged rows of another position.
                self._drop_work()
                self._continue_from(self.batches.decide({p: (o, o) for p, o in position.items()}))
            while (work := self._inbox.get()) is not None:
                self._do(work)
            if not self._stop.is_set():
                self.batches.finish()

    def _drop_work(self) -> None:
        """Drop the work from before a restart; a request to stop stays, also one meanwhile."""
        while not self._stop.is_set() and not self._inbox.empty():
            self._inbox.get_nowait()
        if self._stop.is_set():
            self._inbox.put(None)

    def _do(self, work: Work) -> None:
        if work.error is not None:
            raise work.error
        with self._turns.turn():
            if work.only_decide:
                # Its records still wait, so keep the time since which they do.
                self._continue_from(self.batches.decide(work.ranges))
                return
            if work.certain is not None and self.batches.learn_schemas(work.certain):
                # Workers read the same records again, with the schemas that they did not know.
                self.last = None
                self._continue_from(self.position)
                return
            self.reads_alone = work.prepared is None
            read = partial(self.read, work.ranges)
            if work.prepared is not None and work.certain is not None:
                published = self.batches.publish_prepared(
                    read, work.ranges, work.prepared, work.certain, work.began, work.read_until
                )
            else:
                published = self.batches.publish(read, work.ranges, read_until=work.read_until)
            self._tried = None
            self.note_progress(published)
            self.reads_alone = self.batches.has_read_around
            self._continue_from(self.position | {p: end for p, (_, end) in work.ranges.items()})

    def _continue_from(self, position: Offsets) -> None:
        self.position, self.failure = position, None
        self._ready.set()


class GroupJob:
    """A run of a group's streams, until a stop is requested or all records present at its start are
    published. Streams are added, removed and changed as `streams` returns them. `failures` has the
    streams that are set aside."""

    def __init__(
        self,
        spark: SparkSession,
        kafka: Kafka,
        streams: Streams,
        available_now: bool = False,
        note_progress: NoteProgress = lambda *_: None,
    ) -> None:
        self._spark, self._kafka_settings, self._streams = spark, kafka, streams
        self._available_now, self._note_progress = available_now, note_progress
        self._kafka = KafkaAdapter(kafka)
        self._turns = _Turns(_AT_ONCE, _TURN_SECONDS)
        self._members: dict[str, Member] = {}
        self._leaving: dict[str, Member] = {}
        self._without_job: dict[str, AnabranchError] = {}
        self._described: dict[str, Topic | None] = {}
        self._described_at = self._read_files_at = float("-inf")
        # Executors cache consumers by this name. A recreated topic needs a new name, because a
        # cached consumer may have fetched records of the old topic.
        self._reader = _new_reader()
        self._topic_ids: dict[str, str] = {}
        self._stop = threading.Event()

    def stop(self) -> None:
        """Stop after the current publishes."""
        if not self._stop.is_set():
            LOG.info("group: stopping after the current publishes streams=%d", len(self._members))
        self._stop.set()

    @property
    def failures(self) -> dict[str, AnabranchError]:
        """Errors by stream: why it is set aside, its file is wrong, or its columns unknown."""
        failed = {
            name: member.failure
            for name, member in self._members.items()
            if member.failure is not None
        }
        return {**self._without_job, **failed}

    @property
    def set_aside(self) -> dict[str, str]:
        """Reasons by stream why it makes no progress: its failure, or no publish though records
        wait. Includes streams that are stopping because their file changed."""
        stalls = {name: member.stall for name, member in (self._leaving | self._members).items()}
        stalled = {name: stall for name, stall in stalls.items() if stall is not None}
        return stalled | {name: str(error) for name, error in self.failures.items()}

    def run(self) -> None:
        """Run until a stop, or with `available_now` until all streams have ended. Raises JvmGone.
        Other errors concern one stream, and are in `failures`.

        1. Start streams whose files are new or changed, and stop the others.
        2. Ask Kafka for the ends of the topics of all ready streams, and plan which offsets each
           has to publish.
        3. Stage all micro-batches that are due in one Spark job.
        4. Pass each stream its staged rows. Its own thread publishes them, and is ready again then.
        5. At the end, stop all streams, and wait for their publishes.
        """
        try:
            while not self._stop.is_set():
                # Step 1: follow the files.
                self._follow_files()
                if self._available_now and all(
                    member.has_ended for member in self._members.values()
                ):
                    break
                self._raise_if_jvm_gone()
                # Steps 2 to 4.
                if self._publish_due():
                    self._note_progress(self.set_aside)
                self._stop.wait(_POLL_SECONDS)
        finally:
            # Step 5: wait for the publishes, also after an error.
            self._drain()
        self._raise_if_jvm_gone()

    def _raise_if_jvm_gone(self) -> None:
        for member in self._members.values():
            if isinstance(member.failure, JvmGone):
                raise member.failure

    def _follow_files(self) -> None:
        """Start streams of new or changed files; stop those of gone or changed files."""
        now = time.monotonic()
        if now - self._read_files_at < _FILES_SECONDS:
            return
        if self._available_now and self._members:
            return
        self._read_files_at = now
        found = self._streams()
        self._without_job = {
            name: one for name, one in found.items() if isinstance(one, AnabranchError)
        }
        for name, member in list(self._members.items()):
            current = found.get(name)
            # A file that is wrong for the moment changes nothing.
            if current is member.job or isinstance(current, AnabranchError):
                continue
            LOG.info("stream %s: %s", name, _why_stopped(member.job, current))
            member.stop()
            self._leaving[name] = self._members.pop(name)
        self._leaving = {
            name: member for name, member in self._leaving.items() if not member.has_ended
        }
        for name, job in found.items():
            # Two threads never publish to one table.
            if isinstance(job, Job) and name not in self._members and name not in self._leaving:
                member = self._members[name] = Member(
                    job, self._spark, self._turns, self._available_now
                )
                member.start()

    def _publish_due(self) -> bool:
        """Pass work to every stream whose micro-batch is due. Return whether Kafka answered."""
        # Step 2: ask Kafka. Only for ready streams: the position of another one is about to move.
        ready = {name: member for name, member in self._members.items() if member.is_ready}
        now = time.monotonic()
        try:
            ends = self._kafka.stable_ends_of(
                {member.job.stream.topic: tuple(member.position) for member in ready.values()}
            )
            self._describe(now)
        except Transient as error:
            LOG.warning("group: topics not read: %s", error)
            return False
        except AnabranchError as error:
            # The error needs an operator, such as credentials that the brokers refuse. It concerns
            # each stream.
            for member in ready.values():
                member.hand(Work({}, error=error))
            return False
        due: dict[str, Waiting] = {}
        for name, member in ready.items():
            if (waiting := self._waiting(member, ends[member.job.stream.topic], now)) is not None:
                due[name] = waiting
        self._publish(due, now)
        return True

    def _waiting(
        self, member: Member, ends: Offsets | AnabranchError, now: float
    ) -> Waiting | None:
        """Return the offsets that a ready stream publishes now; None if nothing is due, or if its
        own thread checks its topic first."""
        stream = member.job.stream
        topic = self._described.get(stream.topic)
        changed = stream.topic in self._described and partitions_changed(
            member.position, topic.partitions if topic is not None else None
        )
        # An end below the position, or other partitions: the log lost its end or the topic was
        # recreated. The stream's own decision finds which; a read from here would skip new records.
        if isinstance(ends, AnabranchError) or is_behind(member.position, ends) or changed:
            member.hand(Work({p: (o, o) for p, o in member.position.items()}, only_decide=True))
            return None
        waiting = plan_waiting(member.position, ends, stream.speed.max_offsets_per_trigger)
        if waiting is None:
            member.note_progress()
        if self._available_now:
            member.target = member.target or ends
            if all(member.position.get(p, 0) >= end for p, end in member.target.items()):
                member.finish()
                return None
            return waiting
        return waiting if is_due(member.last, stream.speed, now) else None

    def _describe(self, now: float) -> None:
        """Look for topics gone or recreated, and new partitions; also of idle streams."""
        if now - self._described_at >= _DESCRIBE_SECONDS:
            topics = sorted({member.job.stream.topic for member in self._members.values()})
            self._described = self._kafka.describe_all(topics) if topics else {}
            self._described_at = now

    def _publish(self, due: Mapping[str, Waiting], asked_at: float) -> None:
        """Stage the due micro-batches that workers can read in one Spark job, and pass each stream
        its work.

        If several streams read the same topic, only the one that waited longest is staged. A stream
        with `reads_alone` reads its topic itself, because it would fail or delay each read of the
        group.
        """
        prepared: dict[str, PreparedBatch] = {}
        in_turn = sorted(due, key=lambda name: self._members[name].last or float("-inf"))
        first = set(unique_topics({name: self._members[name].job.stream.topic for name in in_turn}))
        for name, waiting in due.items():
            member = self._members[name]
            # Decision 44: two streams of one topic are staged in turn, since one read cannot have
            # two ranges of a topic.
            if name not in first:
                continue
            member.last = asked_at
            if member.reads_alone:
                self._hand_alone(member, waiting, asked_at)
                continue
            try:
                batch = member.batches.prepare(waiting.ranges)
                is_decided = (
                    batch is not None
                    or member.has_decided_again
                    or not member.batches.needs_decision(waiting.ranges)
                )
            except Exception as error:
                member.hand(Work(waiting.ranges, error=error))
                continue
            member.has_decided_again = not is_decided
            if batch is not None:
                prepared[name] = batch
            elif is_decided:
                self._hand_alone(member, waiting, asked_at)
            else:
                member.last = None
                member.hand(Work(waiting.ranges, only_decide=True))
        if prepared:
            self._stage(prepared, due, asked_at)

    def _stage(
        self, prepared: Mapping[str, PreparedBatch], due: Mapping[str, Waiting], asked_at: float
    ) -> None:
        # Step 3: stage.
        by_topic = {self._members[name].job.stream.topic: name for name in prepared}
        began = time.monotonic()
        for name in prepared:
            self._members[name].batches.note_reading(due[name].ranges)
        try:
            staged = stage_group(
                self._read(
                    {topic: due[name].ranges for topic, name in by_topic.items()},
                    prepared,
                    by_topic,
                ),
                {topic: prepared[name] for topic, name in by_topic.items()},
            )
        except Exception as error:
            failure = explain_spark(self._spark, "stage a group's micro-batches", error)
            if isinstance(failure, JvmGone):
                raise failure from error
            LOG.warning(
                "group: one read of %d topics failed, reading each alone: %s",
                len(prepared),
                failure,
            )
            for name in prepared:
                self._hand_alone(self._members[name], due[name], asked_at)
            return
        # Step 4: pass each stream its rows.
        for topic, name in by_topic.items():
            member, result, ranges = self._members[name], staged[topic], due[name].ranges
            if isinstance(result, Exception):
                # Decision 44: only this stream restarts from its table; the other streams' files
                # are complete.
                member.hand(Work(ranges, error=result))
            else:
                member.hand(
                    Work(
                        ranges,
                        prepared[name],
                        result,
                        began,
                        self._read_until(member, due[name], asked_at),
                    )
                )

    def _read(
        self,
        ranges: Mapping[str, Ranges],
        prepared: Mapping[str, PreparedBatch],
        by_topic: Mapping[str, str],
    ) -> DataFrame:
        ids = {topic: prepared[name].decided.position.topic_id for topic, name in by_topic.items()}
        # Decision 44: cached consumers may have fetched records of the deleted topic, which would
        # be published as records of the new one.
        if any(self._topic_ids.get(topic, id) != id for topic, id in ids.items()):
            self._reader = _new_reader()
        self._topic_ids |= ids
        frame = read_topics(self._spark, self._kafka_settings, ranges, self._reader)
        at_once = self._spark.sparkContext.defaultParallelism
        # Spark has a task for each partition, and most partitions of a group have few records.
        return frame.coalesce(at_once) if sum(map(len, ranges.values())) > at_once else frame

    def _hand_alone(self, member: Member, waiting: Waiting, asked_at: float) -> None:
        """Let a stream read and publish its waiting offsets with Spark."""
        member.hand(Work(waiting.ranges, read_until=self._read_until(member, waiting, asked_at)))

    def _read_until(self, member: Member, waiting: Waiting, asked_at: float) -> datetime | None:
        """Return the time (UTC) at which the log ended with these ranges; None for more records."""
        clock = member.job.lake.clock
        if waiting.whole:
            return clock.time_of(clock.elapsed() - (time.monotonic() - asked_at))
        return None

    def _drain(self) -> None:
        """Stop all streams at once, and wait for their publishes."""
        running = [*self._members.values(), *self._leaving.values()]
        for member in running:
            member.stop()
        deadline = time.monotonic() + _DRAIN_SECONDS
        for member in running:
            member.join(max(0.0, deadline - time.monotonic()))
            if not member.has_ended:
                LOG.warning(
                    "stream %s: still publishing %.0f s after the stop; ending anyway",
                    member.name,
                    _DRAIN_SECONDS,
                )
        self._kafka.close()


def _why_stopped(job: Job, current: Job | None) -> str:
    if current is None:
        return "file removed, stopping"
    have, new = job.stream, current.stream
    is_columns = have.subject_schema is not None and have.columns != new.columns
    return "columns changed, restarting" if is_columns else "file changed, restarting"


def _new_reader() -> str:
    return f"anabranch-{uuid.uuid4().hex}"
