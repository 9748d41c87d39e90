"""The batch job: `spark-submit batch_layer/job.py --stream NAME [--hour H [--restate] [--accept] | --replay]`.

Seals every hour that has ended, and rebuilds each that is not accepted, oldest first. With --replay, restates each
accepted hour with dead letters that decode now. A refused hour does not block the next one. The exit code is 1 when any
hour was refused.
"""

from __future__ import annotations

import importlib
import logging
import signal
import sys
import threading
import traceback
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

if __name__ == "__main__":
    # Exit code 1 means refused, and Python ends with 1 on a failed import.
    try:
        importlib.import_module("batch_layer.job").start()
    except ImportError:
        traceback.print_exc()
        sys.exit(70)

from anabranch.common.errors import AnabranchError, Unexpected
from anabranch.common.logs import of_process
from anabranch.common.output import print_json, print_table
from anabranch.common.progress import Progress
from anabranch.common.retry import Retry
from anabranch.job import Job, main, open_job, parser
from anabranch.offsets.hours import hours_between, shift, span_of
from anabranch.operations.notifications import webhook
from anabranch.operations.notifications.lineage.parents import parse_run
from anabranch.operations.notifications.lineage.reporting import LineageReporter, report_lineage
from anabranch.protocol.acts import act_now
from anabranch.protocol.owner import take_over
from anabranch.protocol.sealing import require_ended, require_sealed, seal
from anabranch.spark.session import close_session, open_session, stop_on_signal
from batch_layer import todo
from batch_layer.plan import empty_hours
from batch_layer.rebuild import Rebuilder, RebuildRequest, Result
from serving_layer.views.fill import try_fill

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

LOG = logging.getLogger(__name__)


def rebuild_hours(
    job: Job,
    rebuilder: Rebuilder,
    hours: Collection[str] | None,
    order: RebuildRequest,
    stop: threading.Event | None = None,
    reporter: LineageReporter | None = None,
) -> list[Result]:
    """Seal, then rebuild the named `hours`, or all that wait; retry each step for up to `batch.retry_for`.

    A refused hour that waits is rebuilt once an input of its refusal has changed, and once a day. At the end, accepted
    hours are restated whose dead letters were lost or whose look-back was incomplete; their results do not affect
    named hours. An hour that fails unexpectedly does not block others: Unexpected is raised at the end. Finally the
    stream's views are filled, where possible. `reporter` reports each hour at once. Raises NotYet, before sealing, for
    an hour that has not ended, and Transient when the time is over or `stop` is set.
    """
    name, retry, reporter = f"stream {job.stream.name}", _retry(job, stop), reporter or LineageReporter(job)
    named = sorted(hours) if hours is not None else None
    if named is not None:
        retry.call(name, lambda: require_ended(job.stream, job.lake, named))
    sealed = retry.call(name, lambda: seal(rebuilder.publisher, job.kafka))
    for h in named or ():
        require_sealed(sealed.state, job.stream, h)
    retry.call(name, lambda: take_over(job.lake, job.stream, job.kafka, sealed.state.position))
    state = retry.call(name, lambda: rebuilder.publisher.recover(sealed.state))

    is_notified = True

    def rebuild(h: str, order: RebuildRequest) -> Result:
        nonlocal is_notified
        with _reported(reporter, h, stop):
            result = retry.call(f"{name}: hour {h}", lambda: rebuilder.rebuild(h, order))
        # Wait for an unreachable receiver once in a run, and once more at its end.
        is_notified = is_notified and webhook.notify(job)
        return result

    broken: list[Unexpected] = []
    results: list[Result] = []

    def attempt(h: str, again: RebuildRequest) -> None:
        try:
            results.append(rebuild(h, again))
        except Unexpected as error:
            LOG.error("%s: hour %s: %s", name, h, error)
            broken.append(error)

    if named is not None:
        with Progress(LOG, name, "hours", len(named)) as progress, rebuilder.show_on(progress):
            for h in named:
                attempt(h, order)
                progress.step()
        if broken:
            raise _all_of(broken)
    else:
        waiting = retry.call(name, lambda: todo.waiting(job, state))
        if empty := empty_hours(state, waiting):
            results += retry.call(name, lambda: rebuilder.accept_empty(empty))
            state = retry.call(name, rebuilder.load)
        results += retry.call(name, lambda: todo.unchanged_refusals(job, state, waiting))
        decided = {result.hour for result in results}
        remaining = [h for h in waiting if h not in decided]
        sizes = tuple(state.timeline.sealed[h].offsets for h in remaining)
        with Progress(LOG, name, "hours", sizes=sizes, contents="offsets") as progress, rebuilder.show_on(progress):
            for h in remaining:
                attempt(h, order)
                progress.step()
    state = retry.call(name, rebuilder.load)
    if lost := retry.call(name, lambda: todo.with_lost_dead_letters(job, state)):
        for h, again in lost.items():
            attempt(h, again)
        state = retry.call(name, rebuilder.load)
    for h, again in retry.call(name, lambda: todo.to_recheck(job, state)).items():
        attempt(h, again)
    try_fill(job.lake, job.stream)
    if broken and named is None:
        raise _all_of(broken)
    return sorted(results, key=lambda result: result.hour)


def _all_of(broken: Sequence[Unexpected]) -> Unexpected:
    if len(broken) == 1:
        return broken[0]
    more = Unexpected(f"{broken[0]} (and {len(broken) - 1} more hours, in the lines above)")
    more.__cause__ = broken[0]
    return more


@contextmanager
def _reported(reporter: LineageReporter, hour: str, stop: threading.Event | None) -> Iterator[None]:
    """Report what happens to an hour inside: the ledger's new rows, or the error that it ended with."""
    began = datetime.now(UTC)
    try:
        yield
        reporter.report()
    except AnabranchError as error:
        if stop is None or not stop.is_set():
            reporter.failed(hour, began, error)
        raise


def replay(
    job: Job,
    rebuilder: Rebuilder,
    hours: Collection[str] | None,
    stop: threading.Event | None = None,
    reporter: LineageReporter | None = None,
    why: str | None = None,
) -> list[Result]:
    """Restate the accepted hours, or those in `hours`, with dead letters that decode now.

    Each step is retried, and each hour reported, as in `rebuild_hours`. Raises Transient when the time is over or
    `stop` is set.
    """
    name, retry, reporter = f"stream {job.stream.name}", _retry(job, stop), reporter or LineageReporter(job)
    retry.call(name, rebuilder.publisher.recover)
    act = act_now("replay", why)
    repairable = {h: n for h, n in retry.call(name, rebuilder.repairable).items() if hours is None or h in hours}

    def restate(h: str) -> Result:
        decode = f"dead letters replayed: {repairable[h]} decode now"
        order = RebuildRequest(restate=True, why=f"{decode}; {why}" if why else decode, act=act)
        with _reported(reporter, h, stop):
            return retry.call(f"{name}: hour {h}", lambda: rebuilder.rebuild(h, order))

    results = []
    progress = Progress(LOG, f"{name}: replay", "hours", len(repairable))
    with progress, rebuilder.show_on(progress):
        for h in repairable:
            results.append(restate(h))
            progress.step()
    try_fill(job.lake, job.stream)
    return results


def _retry(job: Job, stop: threading.Event | None) -> Retry:
    return Retry(job.stream.batch.retry_for, "batch.retry_for", stop or threading.Event())


@contextmanager
def _stopped_by_signal(spark: SparkSession, stream: str) -> Iterator[threading.Event]:
    """An event that SIGTERM or Ctrl-C sets. It also cancels Spark's jobs, so that the job ends within seconds."""
    stop, ended = threading.Event(), threading.Event()

    def request_stop() -> None:
        if not stop.is_set():
            LOG.info("stream %s: stop requested; unpublished work is discarded", stream)
        stop.set()

    def cancel() -> None:
        stop.wait()
        while not ended.wait(0.5):
            spark.sparkContext.cancelAllJobs()

    # Not in the signal handler, which may interrupt another call to the JVM.
    threading.Thread(target=cancel, name="cancel", daemon=True).start()
    stop_on_signal(spark, request_stop, (signal.SIGTERM, signal.SIGINT))
    try:
        yield stop
    finally:
        ended.set()
        stop.set()


def exit_code(results: Sequence[Result], hours: Collection[str] | None) -> int:
    """1 when an hour was refused. Hours restated beside the named ones do not count. Pure."""
    return 1 if any(r.refused for r in results if hours is None or r.hour in hours) else 0


def _view(stream: str, results: Sequence[Result]) -> dict[str, Any]:
    rows = [
        {"hour": r.hour, "state": r.decision, "revision": r.revision, "reason": r.reason}
        | r.account.as_dict()
        | ({"served": r.served} if r.served is not None else {})
        for r in results
    ]
    return {"stream": stream, "hours": rows}


def _parse_hours(text: str) -> frozenset[str]:
    first, last = span_of(text)
    return frozenset(hours_between(first, shift(last, 1)))


def _run(text: str) -> str:
    parse_run(text)
    return text


def run(arguments: Sequence[str]) -> int:
    """The entry of spark-submit. Returns the exit code."""
    options = parser("Build the authoritative rows of a stream's hours.")
    options.add_argument(
        "--hour", default=None, help="an hour such as 2026-11-21T03, or A..B; default: all waiting hours"
    )
    options.add_argument("--restate", action="store_true", help="publish a new revision of accepted hours")
    options.add_argument("--accept", action="store_true", help="publish despite gaps or a failed quality gate")
    options.add_argument("--why", default=None, help="the reason, for the ledger")
    options.add_argument("--replay", action="store_true", help="rebuild hours with dead letters that decode now")
    options.add_argument("--parent-run", type=_run, default=None, help="scheduler's run: NAMESPACE/JOB/ID")
    options.add_argument("--root-run", type=_run, default=None, help="outermost run that contains it: NAMESPACE/JOB/ID")
    parsed = options.parse_args(list(arguments))
    hours = _parse_hours(parsed.hour) if parsed.hour is not None else None
    job = open_job(parsed.stream, parsed.conf)
    of_process(stream=parsed.stream, layer="batch")
    spark = open_session(job.environment, f"anabranch batch {job.stream.name}")
    try:
        parents = (parsed.parent_run, parsed.root_run)
        with _stopped_by_signal(spark, job.stream.name) as stop, report_lineage(job, *parents) as reporter:
            rebuilder = Rebuilder(job, spark, *parents)
            if parsed.replay:
                results = replay(job, rebuilder, hours, stop, reporter, parsed.why)
            else:
                act = act_now("restate" if parsed.restate else "accept", parsed.why)
                wanted = parsed.restate or parsed.accept
                order = RebuildRequest(parsed.restate, parsed.accept, parsed.why, act if wanted else None)
                results = rebuild_hours(job, rebuilder, hours, order, stop, reporter)
    finally:
        webhook.notify(job)
        job.kafka.close()
        close_session(spark)
    if parsed.output == "json":
        print_json(_view(job.stream.name, results))
    elif results:
        names = ("good", "dead", "duplicate", "gap")
        rows = [(r.hour, r.decision, r.revision, *(getattr(r.account, n) for n in names), r.reason) for r in results]
        print_table(("hour", "state", "revision", *names, "reason"), rows)
    else:
        print(f"{job.stream.name}: no hour " + ("has dead letters that decode now" if parsed.replay else "to rebuild"))
    return exit_code(results, hours)


def start() -> None:
    """Run the job and end the process with its exit code."""
    main(run, sys.argv[1:])
