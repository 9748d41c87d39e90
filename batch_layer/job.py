"""The batch job: `spark-submit batch_layer/job.py --stream NAME [--hour H [--restate] [--accept] | --replay]`.

Seals every hour that has ended and rebuilds each that is not accepted, oldest first; with --replay, restates each
accepted hour of whose dead letters some would be rows by now. A refused hour does not hold back the next; the exit code
is 1 when any was refused.
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
    # What cannot be imported below is no refusal, which Python's own exit code 1 would say.
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
from anabranch.operations.notifications.lineage.reporting import Teller, telling
from anabranch.protocol.owner import take_over
from anabranch.protocol.sealing import require_ended, require_sealed, seal
from anabranch.spark.session import close_session, open_session, stop_on_signal
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
    teller: Teller | None = None,
) -> list[Result]:
    """Seal, then rebuild the `hours` that are named, or all that wait; each step is tried again for as long as
    `batch.retry_for` says.

    Of those that wait, a refused hour is rebuilt once something that its refusal rests on has changed, and once a day.
    Either way, accepted hours whose dead letters were lost, or whose look-back was not read yet, are restated at the
    end; of what becomes of these the result of hours that are named does not depend. An hour that breaks the job holds
    back no other: Unexpected is raised at the end. At last the stream's views are filled, as far as that goes. `teller`
    tells of each hour at once. Raises NotYet, having sealed nothing, for an hour that has not ended, Transient when the
    time is over or `stop` is set.
    """
    name, retry, teller = f"stream {job.stream.name}", _retry(job, stop), teller or Teller(job)
    named = sorted(hours) if hours is not None else None
    if named is not None:
        retry.call(name, lambda: require_ended(job.stream, job.lake, named))
    sealed = retry.call(name, lambda: seal(rebuilder.publisher, job.kafka))
    for h in named or ():
        require_sealed(sealed.state, job.stream, h)
    retry.call(name, lambda: take_over(job.lake, job.stream, job.kafka, sealed.state.position))
    state = retry.call(name, lambda: rebuilder.publisher.recover(sealed.state))

    is_told = True

    def rebuild(h: str, order: RebuildRequest) -> Result:
        nonlocal is_told
        with _told(teller, h, stop):
            result = retry.call(f"{name}: hour {h}", lambda: rebuilder.rebuild(h, order))
        # A receiver that is away is waited for once in a run, and once more at its end.
        is_told = is_told and webhook.tell(job)
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
        with Progress(LOG, name, "hours", len(named)) as progress, rebuilder.beside(progress):
            for h in named:
                attempt(h, order)
                progress.step()
        if broken:
            raise _all_of(broken)
    else:
        waiting = retry.call(name, lambda: rebuilder.waiting(state))
        if empty := empty_hours(state, waiting):
            results += retry.call(name, lambda: rebuilder.accept_empty(empty))
            state = retry.call(name, rebuilder.load)
        results += retry.call(name, lambda: rebuilder.standing(state, waiting))
        decided = {result.hour for result in results}
        todo = [h for h in waiting if h not in decided]
        sizes = tuple(state.timeline.sealed[h].offsets for h in todo)
        with Progress(LOG, name, "hours", sizes=sizes, contents="offsets") as progress, rebuilder.beside(progress):
            for h in todo:
                attempt(h, order)
                progress.step()
    state = retry.call(name, rebuilder.load)
    if lost := retry.call(name, lambda: rebuilder.lost(state)):
        for h, again in lost.items():
            attempt(h, again)
        state = retry.call(name, rebuilder.load)
    for h, again in retry.call(name, lambda: rebuilder.again(state)).items():
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
def _told(teller: Teller, hour: str, stop: threading.Event | None) -> Iterator[None]:
    """What becomes of an hour inside is told: what the ledger has learned, or the error that it ended with."""
    began = datetime.now(UTC)
    try:
        yield
        teller.tell()
    except AnabranchError as error:
        if stop is None or not stop.is_set():
            teller.failed(hour, began, error)
        raise


def replay(
    job: Job,
    rebuilder: Rebuilder,
    hours: Collection[str] | None,
    stop: threading.Event | None = None,
    teller: Teller | None = None,
) -> list[Result]:
    """Restate the accepted hours, or those of `hours`, of whose dead letters some would be rows by the stream as it is.

    Each step is tried again, and each hour told, as in `rebuild_hours`. Raises Transient when the time is over or
    `stop` is set.
    """
    name, retry, teller = f"stream {job.stream.name}", _retry(job, stop), teller or Teller(job)
    retry.call(name, rebuilder.publisher.recover)
    repairable = {h: n for h, n in retry.call(name, rebuilder.repairable).items() if hours is None or h in hours}

    def restate(h: str) -> Result:
        order = RebuildRequest(restate=True, why=f"dead letters replayed: {repairable[h]} can be read by now")
        with _told(teller, h, stop):
            return retry.call(f"{name}: hour {h}", lambda: rebuilder.rebuild(h, order))

    results = []
    progress = Progress(LOG, f"{name}: replay", "hours", len(repairable))
    with progress, rebuilder.beside(progress):
        for h in repairable:
            results.append(restate(h))
            progress.step()
    try_fill(job.lake, job.stream)
    return results


def _retry(job: Job, stop: threading.Event | None) -> Retry:
    return Retry(job.stream.batch.retry_for, "batch.retry_for", stop or threading.Event())


@contextmanager
def _stopped_by_signal(spark: SparkSession, stream: str) -> Iterator[threading.Event]:
    """An event that SIGTERM or Ctrl-C sets; Spark's work is cancelled with it, so that the job ends within seconds."""
    stop, ended = threading.Event(), threading.Event()

    def request_stop() -> None:
        if not stop.is_set():
            LOG.info("stream %s: stop requested; unpublished work is discarded", stream)
        stop.set()

    def cancel() -> None:
        stop.wait()
        while not ended.wait(0.5):
            spark.sparkContext.cancelAllJobs()

    # Not in the handler: it may come in the middle of another call to the JVM.
    threading.Thread(target=cancel, name="cancel", daemon=True).start()
    stop_on_signal(spark, request_stop, (signal.SIGTERM, signal.SIGINT))
    try:
        yield stop
    finally:
        ended.set()
        stop.set()


def exit_code(results: Sequence[Result], hours: Collection[str] | None) -> int:
    """1 when an hour was refused. What was restated beside those that were named is no verdict on them. Pure."""
    return 1 if any(r.refused for r in results if hours is None or r.hour in hours) else 0


def _view(stream: str, results: Sequence[Result]) -> dict[str, Any]:
    rows = [
        {"hour": r.hour, "state": r.decision, "revision": r.revision, "reason": r.reason}
        | r.account.as_dict()
        | ({"served": r.served} if r.served is not None else {})
        for r in results
    ]
    return {"stream": stream, "hours": rows}


def _named(text: str) -> frozenset[str]:
    first, last = span_of(text)
    return frozenset(hours_between(first, shift(last, 1)))


def _run(text: str) -> str:
    parse_run(text)
    return text


def run(arguments: Sequence[str]) -> int:
    """The entry of spark-submit. Returns the exit code."""
    options = parser("Build the authoritative rows of a stream's hours.")
    options.add_argument(
        "--hour", default=None, help="one hour, such as 2026-11-21T03, or A..B; default: all that wait"
    )
    options.add_argument("--restate", action="store_true", help="publish a new revision of an accepted hour")
    options.add_argument("--accept", action="store_true", help="publish it in spite of gaps or the quality gate")
    options.add_argument("--why", default=None, help="the reason, for the ledger")
    options.add_argument("--replay", action="store_true", help="restate hours of whose dead letters some can be read")
    options.add_argument("--parent-run", type=_run, default=None, help="the scheduler's run: NAMESPACE/JOB/ID")
    options.add_argument("--root-run", type=_run, default=None, help="the outermost run that that one is part of")
    parsed = options.parse_args(list(arguments))
    hours = _named(parsed.hour) if parsed.hour is not None else None
    job = open_job(parsed.stream, parsed.conf)
    of_process(stream=parsed.stream, layer="batch")
    spark = open_session(job.environment, f"anabranch batch {job.stream.name}")
    try:
        parents = (parsed.parent_run, parsed.root_run)
        with _stopped_by_signal(spark, job.stream.name) as stop, telling(job, *parents) as teller:
            rebuilder = Rebuilder(job, spark, *parents)
            if parsed.replay:
                results = replay(job, rebuilder, hours, stop, teller)
            else:
                order = RebuildRequest(parsed.restate, parsed.accept, parsed.why)
                results = rebuild_hours(job, rebuilder, hours, order, stop, teller)
    finally:
        webhook.tell(job)
        job.kafka.close()
        close_session(spark)
    if parsed.output == "json":
        print_json(_view(job.stream.name, results))
    elif results:
        names = ("good", "dead", "duplicate", "gap")
        rows = [(r.hour, r.decision, r.revision, *(getattr(r.account, n) for n in names), r.reason) for r in results]
        print_table(("hour", "state", "revision", *names, "reason"), rows)
    else:
        waits = "holds dead letters that could be read by now" if parsed.replay else "waits to be rebuilt"
        print(f"{job.stream.name}: no hour {waits}")
    return exit_code(results, hours)


def start() -> None:
    """Run the job and end the process with its exit code."""
    main(run, sys.argv[1:])
