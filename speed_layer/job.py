"""The speed job: `spark-submit speed_layer/job.py --stream NAME [--available-now]`. With several
names, `--group NAME` or `--all`, one process runs many streams (`speed_layer.group`).

A Structured Streaming query that publishes each micro-batch with its position in one commit. It
starts from the table's position with a new checkpoint in a temporary folder, so there is no
checkpoint to keep, migrate or lose.
"""

from __future__ import annotations

import argparse
import importlib
import json
import logging
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    # Exit code 1 means refused, but Python exits with 1 if an import fails.
    try:
        importlib.import_module("anabranch.common.process").run_job("speed_layer.job")
    except ImportError:
        traceback.print_exc()
        sys.exit(70)

from pyspark.errors import StreamingQueryException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery
from pyspark.version import __version__ as SPARK_VERSION

from anabranch.common.errors import AnabranchError, ConfigurationError, Transient
from anabranch.common.health import NoteProgress, health_file
from anabranch.common.logs import of_process
from anabranch.common.retry import Retry
from anabranch.common.temporary import clear_abandoned, temporary_folder
from anabranch.config import Environment
from anabranch.job import FollowedJob, Job, StreamFolder, main, open_job, parser
from anabranch.kafka.security import token_digest
from anabranch.kafka.source import read_stream
from anabranch.offsets.position import Offsets, from_keys, ranges_between, to_keys
from anabranch.records.staged import warm_up
from anabranch.spark import workers
from anabranch.spark.session import (
    close_session,
    explain_spark,
    explained,
    open_session,
    stop_on_signal,
)
from speed_layer.group import GROUP_SETTINGS, GroupJob
from speed_layer.micro_batch import MicroBatches
from speed_layer.plan import reaches_log_end
from speed_layer.starting import StreamStart

LOG = logging.getLogger(__name__)

# The checkpoint is in a temporary folder and is never read again. Spark's default writer starts
# processes for the permissions and links of both files of a micro-batch, which takes longer than
# deciding on it.
_CHECKPOINT = {
    "spark.sql.streaming.checkpointFileManagerClass": ".".join(
        (
            "org.apache.spark.sql.execution.streaming",
            *(() if SPARK_VERSION.startswith("4.0.") else ("checkpointing",)),
            "FileSystemBasedCheckpointFileManager",
        )
    )
}

# Trigger interval for the health file of many streams: the default of `speed.trigger`.
_GROUP_TRIGGER = timedelta(seconds=2)
_WARM_UP_SECONDS = 10.0


class SpeedJob:
    """A run of one stream, until a stop or, if asked, all records of its start are published. It
    also ends, between micro-batches, once `has_new_columns`: it reads with those of its start."""

    def __init__(
        self,
        job: Job,
        spark: SparkSession,
        available_now: bool,
        note_progress: NoteProgress = lambda *_: None,
        has_new_columns: Callable[[], bool] = lambda: False,
    ) -> None:
        self._job, self._spark, self._available_now = job, spark, available_now
        self._note_progress, self._has_new_columns = note_progress, has_new_columns
        self._stop = threading.Event()
        self._batches = MicroBatches(job, self._stop)
        self._start = StreamStart(
            job, spark, self._batches, self._stop, self._count, available_now, note_progress
        )
        # A micro-batch holds this lock, so that the query stops only between two.
        self._running = threading.Lock()
        self._failure: Exception | None = None
        self._published = self._idle = 0
        self._token = ""

    def stop(self) -> None:
        """Stop after the current micro-batch."""
        if not self._stop.is_set():
            LOG.info("stream %s: stopping after the current micro-batch", self._job.stream.name)
        self._stop.set()

    def run(self) -> None:
        """Start from the table, and restart after transient failures, for ever.

        1. Start: recover what an earlier publisher left unfinished, and catch up to the position at
           which the stream reads (`StreamStart.run`).
        2. Read: start a query at that position, with a new checkpoint.
        3. Publish: submit each micro-batch with the range of its offsets. The next one is staged
           meanwhile.
        4. Stop: end the query between two micro-batches, and wait for the running publish.
        5. After a failure, continue with step 1; nothing of the failed query is used again.

        A publish or an idle trigger resets the retries. Raises terminal errors, and Transient when
        the time is over. Returns when a stop is requested.
        """
        retry = Retry(None, self._stop)
        try:
            retry.call(
                f"stream {self._job.stream.name}", self._try, lambda: self._published + self._idle
            )
        except Transient:
            if not self._stop.is_set():
                raise
        finally:
            self._stop.set()
            self._batches.close()

    def _try(self) -> None:
        with explained(self._spark, f"run stream {self._job.stream.name}"):
            if self._has_new_columns():
                return
            # Step 1: start. The position is the table's, never Spark's: a checkpoint may be older
            # than the table, and its offsets would be published twice, or newer, and they would be
            # lost.
            position = self._start.run()
            # Step 2: read, with a new checkpoint folder for each attempt.
            clear_abandoned(datetime.now(UTC))
            with temporary_folder("checkpoint") as checkpoint:
                self._stream(position, checkpoint)
            if not (self._stop.is_set() or self._has_new_columns()):
                self._batches.finish()

    def _count(self, published: int) -> None:
        self._published += published
        if published:
            self._note_progress()

    def _stream(self, position: Offsets, checkpoint: Path) -> None:
        if self._stop.is_set():
            return
        stream = self._job.stream
        self._failure = None
        starts = {"offsets": dict(position)}
        # The next micro-batch reaches a log end that was read after this time.
        clock = self._job.lake.clock
        log_end_read = {"after": clock.elapsed()}
        LOG.info("stream %s: reading from the table's position %s", stream.name, to_keys(position))
        self._token = token_digest(self._job.environment.kafka)
        limit = stream.speed.max_offsets_per_trigger
        frame = read_stream(self._spark, self._job.environment.kafka, stream.topic, position, limit)

        def publish_batch(batch: DataFrame, batch_id: int) -> None:
            # The thread that stops the query holds the lock and waits for this function, so do not
            # block here.
            while not self._running.acquire(timeout=0.1):
                if self._stop.is_set():
                    return
            try:
                # If the query went on after a failed micro-batch, the next range would include the
                # failed one's offsets, but not its records: they would be lost.
                if self._stop.is_set() or self._failure is not None:
                    return
                try:
                    ends = _batch_end(checkpoint, batch_id, stream.topic)
                    ranges = ranges_between(starts["offsets"], ends)
                    read_until = (
                        clock.time_of(log_end_read["after"])
                        if reaches_log_end(ranges, limit)
                        else None
                    )
                    # Step 3: publish. The range begins where the previous one ended, so no offset
                    # is between two micro-batches; a publish compares it with the position.
                    self._count(self._batches.submit(lambda: batch, ranges, read_until))
                    starts["offsets"] = ends
                    if not self._available_now:
                        # Read the clock after the submit: Spark asks for the log's end later than
                        # this. An earlier promise is true, a later one would claim records that the
                        # micro-batch does not have (decision 23).
                        log_end_read["after"] = clock.elapsed()
                except Exception as error:
                    self._failure = error
                    raise
            finally:
                self._running.release()

        writer = frame.writeStream.foreachBatch(publish_batch).option(
            "checkpointLocation", str(checkpoint)
        )
        seconds = stream.speed.trigger.total_seconds()
        writer = (
            writer.trigger(availableNow=True)
            if self._available_now
            else writer.trigger(processingTime=f"{seconds} seconds")
        )
        query = writer.start()
        try:
            while query.isActive and not self._is_ending:
                # Check often, so that a publish after an idle period gets a recent time for any
                # trigger interval.
                query.awaitTermination(0.25)  # type: ignore[arg-type]  # it takes fractions of a second
                # With availableNow, Spark reads the log end once, when the query starts.
                now, status = clock.elapsed(), query.status
                if not self._available_now and not status["isTriggerActive"]:
                    log_end_read["after"] = now
                # True if the last trigger had no data to read; before the first trigger the message
                # differs.
                is_idle = (
                    status["message"] == "Waiting for next trigger"
                    and not status["isDataAvailable"]
                )
                if is_idle and not (self._batches.is_publishing or self._batches.has_failed):
                    self._idle += 1
                    self._note_progress()
            if query.isActive:
                # Step 4: stop. A query that is stopped inside a micro-batch interrupts its staging.
                with self._running:
                    query.stop()
            query.awaitTermination(30)
        except StreamingQueryException as error:
            raise self._cause(error) from error
        finally:
            # Wait for the publish on every exit. Else the next attempt would load a position that
            # this publish is about to move, and stage its offsets again.
            _stop_quietly(query)
            self._wait()
        # Step 5: the failure ends this attempt, and the next one starts from the table.
        if self._failure is not None:
            raise self._cause(self._failure)

    @property
    def _is_ending(self) -> bool:
        return self._stop.is_set() or self._batches.has_failed or self._has_new_columns()

    def _wait(self) -> None:
        try:
            self._count(self._batches.wait())
        except Exception as error:
            self._failure = self._failure or error

    def _cause(self, error: Exception) -> Exception:
        """Return the failure as ours: Spark's, Kafka's and S3's are transient by default."""
        failure = self._failure or error
        if not isinstance(failure, AnabranchError):
            LOG.debug("micro-batch failed", exc_info=failure)
            failure = explain_spark(self._spark, "publish a micro-batch", failure)
        token = token_digest(self._job.environment.kafka)
        if token not in ("", self._token) and isinstance(failure, ConfigurationError):
            # The query has the former token until it ends; the next attempt has the new one.
            return Transient(f"{failure}; the file of the token is newer (transient, try again)")
        return failure


def _batch_end(checkpoint: Path, batch_id: int, topic: str) -> Offsets:
    """Return a micro-batch's end offsets. Spark writes them before it calls the function."""
    lines = (checkpoint / "offsets" / str(batch_id)).read_text(encoding="utf-8").splitlines()
    offsets: dict[str, Any] = json.loads(lines[-1])
    return from_keys(offsets[topic])


def _stop_quietly(query: StreamingQuery) -> None:
    try:
        query.stop()
    except Exception:
        LOG.debug("stopping the query failed", exc_info=True)


def _warm_up(spark: SparkSession) -> None:
    try:
        warm_up(spark)
    except Exception:
        # The first micro-batch reports any fault of the workers.
        LOG.debug("starting the Python workers failed", exc_info=True)


def run(arguments: Sequence[str]) -> int:
    """Run the job with spark-submit's arguments. Return the exit code."""
    options = parser("Publish streams' records within seconds.")
    options.add_argument(
        "--available-now", action="store_true", help="publish the records present, then exit"
    )
    options.add_argument(
        "--health",
        type=Path,
        default=None,
        help="write progress to this file, for `anabranch health`",
    )
    parsed = options.parse_args(list(arguments))
    if parsed.stream is None or len(parsed.stream) > 1:
        return _run_group(parsed)
    [name] = parsed.stream
    job = open_job(name, parsed.conf)
    of_process(stream=name, layer="speed")
    trigger = job.stream.speed.trigger
    with (
        health_file(parsed.health, trigger) as note_progress,
        _session(job.environment, name) as spark,
    ):
        runs = SpeedRuns(FollowedJob(job), spark, parsed.available_now, note_progress)
        stop_on_signal(spark, runs.stop, (signal.SIGTERM, signal.SIGINT))
        with closing(job.kafka):
            runs.run()
            LOG.info("stream %s: done", name)
            return 0


class SpeedRuns:
    """Runs of one stream: a new `SpeedJob` each time that its columns change."""

    def __init__(
        self,
        followed: FollowedJob,
        spark: SparkSession,
        available_now: bool,
        note_progress: NoteProgress,
    ) -> None:
        self._followed, self._spark = followed, spark
        self._available_now, self._note_progress = available_now, note_progress
        self._stop = threading.Event()
        self._speed: SpeedJob | None = None

    def stop(self) -> None:
        self._stop.set()
        if self._speed is not None:
            self._speed.stop()

    def run(self) -> None:
        """Run until a stop, or until a run ends by itself. Raises like `SpeedJob.run`."""
        while not self._stop.is_set():
            job = self._followed.current()

            def has_new_columns(job: Job = job) -> bool:
                return self._followed.current() is not job

            speed = SpeedJob(
                job, self._spark, self._available_now, self._note_progress, has_new_columns
            )
            self._speed = speed
            if self._stop.is_set():
                speed.stop()
            speed.run()
            if not has_new_columns():
                return
            LOG.info("stream %s: columns changed, restarting", job.stream.name)


def _run_group(parsed: argparse.Namespace) -> int:
    """Run many streams. Return the first exit code, by name, of one set aside; else 0."""
    folder = StreamFolder(parsed.conf, parsed.stream or (), parsed.group, takes_up=True)
    what = f"group {parsed.group}" if parsed.group else "streams"
    of_process(layer="speed", **({"group": parsed.group} if parsed.group else {}))
    with (
        health_file(parsed.health, _GROUP_TRIGGER) as note_progress,
        _session(folder.environment, what, GROUP_SETTINGS) as spark,
    ):
        group = GroupJob(
            spark, folder.environment.kafka, folder.jobs, parsed.available_now, note_progress
        )
        stop_on_signal(spark, group.stop, (signal.SIGTERM, signal.SIGINT))
        group.run()
        for name, error in sorted(group.failures.items()):
            LOG.error("stream %s: still set aside at the end: %s", name, error)
        LOG.info("%s: done streams_set_aside=%d", what, len(group.failures))
        return next((error.exit_code for _, error in sorted(group.failures.items())), 0)


@contextmanager
def _session(
    environment: Environment, what: str, settings: Mapping[str, str] | None = None
) -> Iterator[SparkSession]:
    """Open a session; start its workers in the background. Raises ConfigurationError."""
    own = workers.SETTINGS | _CHECKPOINT | dict(settings or {})
    spark = open_session(environment, f"anabranch speed {what}", own)
    warming = threading.Thread(target=_warm_up, args=(spark,), name="warm-up", daemon=True)
    try:
        workers.require_workers(spark)
        warming.start()
        yield spark
    finally:
        # A job that has nothing to read ends first: Spark, stopped under a task, logs an error.
        if warming.ident is not None:
            warming.join(_WARM_UP_SECONDS)
        close_session(spark)


def start() -> None:
    """Run the job and end the process with its exit code."""
    main(run, sys.argv[1:])
