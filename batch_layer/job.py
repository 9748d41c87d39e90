"""The batch job: `spark-submit batch_layer/job.py --stream NAME [--hour H [--backlog N] [--restate]
[--accept] | --replay]`.

Seals every hour that has ended, and rebuilds each that is not accepted, oldest first. With
--replay, restates each accepted hour with dead letters that decode now. A refused hour does not
block the next one. Several --stream, --group NAME or --all select many streams, which share one
Spark; each has its own outcome. Spark is opened once an hour needs it (decision 68), with Java's
compilers by the number of waiting offsets. The exit code is 1 if any hour was refused, and
`combined_exit_code` for many streams. The job prints the results itself, by stream and hour:
spark-submit runs it without the command line.

Of many streams, each has a thread; its outcome (done, refused or failed) does not affect the
others. `Turns` decides whose hour is next.
"""

from __future__ import annotations

import importlib
import logging
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

if __name__ == "__main__":
    # Exit code 1 means refused, but Python exits with 1 if an import fails.
    try:
        importlib.import_module("anabranch.common.process").run_job("batch_layer.job")
    except ImportError:
        traceback.print_exc()
        sys.exit(70)

import pyarrow as pa
from pyspark.sql import SparkSession

from anabranch.common.counters import TALLY, Tally, counting
from anabranch.common.errors import AnabranchError, ConfigurationError, combined_exit_code
from anabranch.common.logs import Progress, fields, of_process
from anabranch.common.output import print_json, print_table
from anabranch.common.process import is_submitted
from anabranch.common.remote_errors import classify_unexpected
from anabranch.iceberg.file_io import remembering_files
from anabranch.job import Job, main, open_job, open_jobs, parser
from anabranch.kafka.client import KafkaAdapter
from anabranch.lineage import parse_run
from anabranch.lineage.reporting import report_lineage
from anabranch.offsets.hours import hours_between, shift, span_of
from anabranch.offsets.position import ranges_between, size
from anabranch.protocol.ledger_row import act_now
from anabranch.protocol.state import load_state
from anabranch.spark.java import FIRST_COMPILER
from anabranch.spark.session import LazySpark, close_session, open_here, stop_on_signal
from anabranch.spark.workers import SETTINGS
from anabranch.subjects.follow import take_up
from batch_layer.plan import waiting_hours
from batch_layer.rebuild import Rebuilder, RebuildRequest, Result
from batch_layer.stream_run import StreamRun, StreamTurns, Turns

LOG = logging.getLogger(__name__)

Span = tuple[str, str] | None
_SIGNALS = (signal.SIGTERM, signal.SIGINT)


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


def _run(text: str) -> str:
    parse_run(text)
    return text


def run(arguments: Sequence[str]) -> int:
    """Run the job with spark-submit's arguments. Return the exit code."""
    options = parser("Build the authoritative rows of streams' hours.")
    options.add_argument(
        "--hour",
        default=None,
        help="an hour such as 2026-11-21T03, or A..B; default: all waiting hours",
    )
    options.add_argument(
        "--restate", action="store_true", help="publish a new revision of accepted hours"
    )
    options.add_argument(
        "--accept", action="store_true", help="publish despite gaps or a failed quality gate"
    )
    options.add_argument(
        "--backlog",
        type=int,
        default=0,
        help="with --hour: the most earlier hours that wait to rebuild first, oldest first",
    )
    options.add_argument("--why", default=None, help="the reason, for the ledger")
    options.add_argument(
        "--replay", action="store_true", help="rebuild hours with dead letters that decode now"
    )
    options.add_argument(
        "--at-once",
        type=int,
        default=None,
        help="number of small hours rebuilt at a time; default: one per core",
    )
    options.add_argument(
        "--parent-run", type=_run, default=None, help="scheduler's run: NAMESPACE/JOB/ID"
    )
    options.add_argument(
        "--root-run",
        type=_run,
        default=None,
        help="outermost run that contains it: NAMESPACE/JOB/ID",
    )
    options.add_argument("--master", default=None, help="Spark's master; default: as configured")
    parsed = options.parse_args(list(arguments))
    span = span_of(parsed.hour) if parsed.hour is not None else None
    hours = frozenset(hours_between(span[0], shift(span[1], 1))) if span is not None else None
    act = (
        act_now("restate" if parsed.restate else "accept", parsed.why)
        if parsed.restate or parsed.accept
        else None
    )
    request = RebuildRequest(parsed.restate, parsed.accept, parsed.why, act)
    parents = (parsed.parent_run, parsed.root_run)

    def work(stream: StreamRun) -> None:
        if parsed.replay:
            stream.replay(hours, parsed.why)
        else:
            stream.rebuild(hours, request, parsed.backlog)

    # Hours that are not accepted need no replay: a rebuild decodes their records again.
    replayed = (
        "accepted before has dead letters that decode now; `anabranch batch` reads the others"
    )
    nothing = replayed if parsed.replay else "to rebuild"
    if parsed.stream is not None and len(parsed.stream) == 1:
        [name] = parsed.stream
        job = open_job(name, parsed.conf)
        of_process(stream=name, layer="batch")
        with _spark([job], name, f"stream {name}", SETTINGS, span, parsed.master) as (spark, stop):
            outcome = run_stream(job, spark, work, stop, parents)
        if outcome.error is not None:
            raise outcome.error
        print_outcome(outcome, parsed.output, nothing)
        return exit_code(outcome.results, hours)
    of_process(layer="batch")
    _, jobs, broken = open_jobs(parsed.conf, parsed.stream, parsed.group, parsed.all)
    outcomes = [StreamOutcome(name, error=error) for name, error in broken.items()]
    for name, error in broken.items():
        LOG.error("stream %s: %s", name, error)
    if jobs:
        what = f"{len(jobs)} streams"
        with _spark(jobs, what, what, SETTINGS | SHARED, span, parsed.master) as (spark, stop):
            outcomes += run_streams(jobs, spark, work, stop, parents, parsed.at_once)
    print_outcomes(outcomes, hours, parsed.output, nothing)
    return combined_exit_code(exit_code_of(outcome, hours) for outcome in outcomes)


@contextmanager
def _spark(
    jobs: Sequence[Job],
    what: str,
    component: str,
    settings: Mapping[str, str],
    span: Span,
    master: str | None,
) -> Iterator[tuple[LazySpark, threading.Event]]:
    """Yield a session of the application `anabranch batch WHAT`, closed at the end, and an event
    that SIGTERM or Ctrl-C sets. The signal also cancels Spark's jobs, so that the job ends within
    seconds. Log lines of the signal name the `component`. `master` replaces the configured one.
    Opening raises ConfigurationError if executors cannot decode records."""
    stop, ended = threading.Event(), threading.Event()

    def request_stop() -> None:
        if not stop.is_set():
            LOG.info("%s: stop requested; unpublished work is discarded", component)
        stop.set()

    def open_spark() -> SparkSession:
        environment = jobs[0].environment
        with KafkaAdapter(environment.kafka) as kafka:
            java = java_options(jobs, kafka, span)
        opened = open_here(environment, f"anabranch batch {what}", settings, master, java)
        stop_on_signal(opened, request_stop, _SIGNALS)
        return opened

    spark = LazySpark(open_spark)

    def cancel() -> None:
        stop.wait()
        while not ended.wait(0.5):
            if spark.opened is not None:
                spark.opened.sparkContext.cancelAllJobs()

    # Not in the signal handler, which may interrupt another call to the JVM.
    threading.Thread(target=cancel, name="cancel", daemon=True).start()
    stop_on_signal(None, request_stop, _SIGNALS)
    try:
        if is_submitted():
            spark()
        yield spark, stop
    finally:
        ended.set()
        stop.set()
        if spark.opened is not None:
            close_session(spark.opened)


def start() -> None:
    """Run the job and end the process with its exit code."""
    main(run, sys.argv[1:])


# Above these numbers of offsets the second compiler saves more time than it takes
# (decision 61).
_MOST_BY_SPARK = 500_000
_MOST_BY_WORKERS = 2_000_000


def java_options(jobs: Iterable[Job], kafka: KafkaAdapter, span: tuple[str, str] | None) -> str:
    """Return options of the driver's Java for the offsets that the jobs' streams have to read;
    empty if one does not answer. The job itself reports errors. `kafka` is not shared with other
    threads, which may use the jobs' own clients meanwhile."""
    shares = accumulate(share_of(job, kafka, span) for job in jobs)
    try:
        return FIRST_COMPILER if all(share <= 1 for share in shares) else ""
    except AnabranchError:
        return ""


def share_of(job: Job, kafka: KafkaAdapter, span: tuple[str, str] | None) -> float:
    """Return the most offsets that a job has to read, in the hours of `span` or in all waiting ones
    including the open hour, as a share of the number from which the second compiler pays. Raises
    Transient if Kafka or the lake is unreachable, Refused for an accepted hour that the ledger does
    not have."""
    state = load_state(job.lake, job.stream.table)
    chosen = waiting_hours(state) if span is None else hours_between(span[0], shift(span[1], 1))
    cuts = job.ledger.remembering(state, chosen).cuts
    offsets = sum(cuts[h].offsets for h in chosen if h in cuts)
    if span is None or span[1] >= state.timeline.open:
        topic = kafka.describe(job.stream.topic)
        ends = kafka.stable_ends(topic) if topic is not None else {}
        offsets += size(ranges_between(state.timeline.start, ends))
    return offsets / (_MOST_BY_WORKERS if job.stream.archive is None else _MOST_BY_SPARK)


_COUNTS = ("good", "dead", "duplicate", "gap")
_COLUMNS = ("state", "revision", *_COUNTS, "reason")


def exit_code(results: Sequence[Result], hours: Collection[str] | None) -> int:
    """Return 1 if an hour was refused, else 0; hours beyond the named ones do not count. Pure."""
    return 1 if any(r.refused for r in results if hours is None or r.hour in hours) else 0


def exit_code_of(outcome: StreamOutcome, hours: Collection[str] | None) -> int:
    return (
        outcome.error.exit_code if outcome.error is not None else exit_code(outcome.results, hours)
    )


def print_outcome(outcome: StreamOutcome, output: str, nothing: str) -> None:
    """Print the hours of one stream's job. `nothing`: the end of the line "no hour ..."."""
    if output == "json":
        print_json(_view(outcome))
    elif outcome.results:
        print_table(("hour", *_COLUMNS), [(r.hour, *_cells(r)) for r in outcome.results])
    else:
        print(f"{outcome.stream}: no hour {nothing}")


def print_outcomes(
    outcomes: Sequence[StreamOutcome], hours: Collection[str] | None, output: str, nothing: str
) -> None:
    ordered = sorted(outcomes, key=lambda outcome: outcome.stream)
    if output == "json":
        views = [
            _view(o)
            | {
                "exit_code": exit_code_of(o, hours),
                "error": str(o.error) if o.error is not None else None,
            }
            for o in ordered
        ]
        print_json({"streams": views})
        return
    rows: list[tuple[object, ...]] = []
    for outcome in ordered:
        rows += [(outcome.stream, r.hour, *_cells(r)) for r in outcome.results]
        if outcome.error is not None:
            rows.append(
                (outcome.stream, "", "failed", *("" for _ in _COLUMNS[1:-1]), str(outcome.error))
            )
        elif not outcome.results:
            rows.append((outcome.stream, "", f"no hour {nothing}", *("" for _ in _COLUMNS[1:])))
    print_table(("stream", "hour", *_COLUMNS), rows)


def _view(outcome: StreamOutcome) -> dict[str, Any]:
    rows = [
        {"hour": r.hour, "state": r.decision, "revision": r.revision, "reason": r.reason}
        | r.account.as_dict()
        | ({"served": r.served} if r.served is not None else {})
        for r in outcome.results
    ]
    return {"stream": outcome.stream, "hours": rows}


def _cells(result: Result) -> tuple[object, ...]:
    return (
        result.decision,
        result.revision,
        *(getattr(result.account, name) for name in _COUNTS),
        result.reason,
    )
