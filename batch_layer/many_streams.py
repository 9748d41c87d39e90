"""Many streams in one batch job: each has a thread and its own outcome, all share one Spark.

The outcome of a stream (done, refused or failed) does not affect the others. `Turns` decides whose
hour is next.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, replace

import pyarrow as pa

from anabranch.common.counters import TALLY, Tally, counting
from anabranch.common.errors import AnabranchError, ConfigurationError
from anabranch.common.logs import fields
from anabranch.common.progress import Progress
from anabranch.common.remote_errors import classify_unexpected
from anabranch.iceberg.file_io import remembering_files
from anabranch.job import Job
from anabranch.lineage.reporting import report_lineage
from anabranch.spark.session import LazySpark
from anabranch.subjects.follow import take_up
from batch_layer.rebuild import Rebuilder, Result
from batch_layer.stream_run import StreamRun, StreamTurns, Turns

LOG = logging.getLogger(__name__)

Parents = tuple[str | None, str | None]
"""The scheduler's run, and the outermost run that contains it."""

SHARED = {"spark.scheduler.mode": "FAIR"}
"""Spark settings for sharing its cores among the jobs of many streams."""


@dataclass(frozen=True)
class StreamOutcome:
    """The outcome of a stream's run: the results of its hours, and the error that ended it."""

    stream: str
    results: tuple[Result, ...] = ()
    error: AnabranchError | None = None


def run_stream(
    job: Job,
    spark: LazySpark,
    work: Callable[[StreamRun], object],
    stop: threading.Event,
    parents: Parents = (None, None),
    turns: Turns | None = None,
) -> StreamOutcome:
    """Take up the stream's subject if its columns come from one, then do the work. Raises nothing:
    the outcome has the error. Closes the job's connection to Kafka."""
    name, run = job.stream.name, None
    # In a job of one stream, its counts are those of the process.
    tally = Tally() if turns is not None else TALLY
    try:
        stream = take_up(job.environment, job.stream.without_columns(), job.lake)
        job = replace(job, stream=stream)
        with counting(tally), remembering_files(), report_lineage(job):
            rebuilder = Rebuilder(job, spark, *parents, tally)
            stream_turns = StreamTurns(turns, rebuilder.use) if turns is not None else None
            run = StreamRun(job, rebuilder, stop, stream_turns)
            work(run)
        error = None
    except AnabranchError as raised:
        error = raised
    except Exception as raised:
        error = classify_unexpected(f"stream {name}: run the batch job", raised)
        if not isinstance(error, ConfigurationError):
            LOG.exception("stream %s: failed", name)
    finally:
        job.kafka.close()
    results = sorted(run.results, key=lambda result: result.hour) if run is not None else []
    return StreamOutcome(name, tuple(results), error)


def run_streams(
    jobs: Sequence[Job],
    spark: LazySpark,
    work: Callable[[StreamRun], object],
    stop: threading.Event,
    parents: Parents = (None, None),
    at_once: int | None = None,
) -> list[StreamOutcome]:
    """Do the work of many streams, `at_once` small hours at a time (default: one per core)."""
    turns = Turns(at_once or pa.cpu_count(), spark.new)

    def run(job: Job) -> StreamOutcome:
        with fields(stream=job.stream.name):
            outcome = run_stream(job, spark, work, stop, parents, turns)
            if outcome.error is not None:
                LOG.error("stream %s: ended with an error: %s", outcome.stream, outcome.error)
            return outcome

    outcomes = []
    progress = Progress(LOG, "batch", "streams", len(jobs))
    with ThreadPoolExecutor(len(jobs), "stream") as threads:
        for done in as_completed([threads.submit(run, job) for job in jobs]):
            outcomes.append(done.result())
            progress.step()
    return outcomes
