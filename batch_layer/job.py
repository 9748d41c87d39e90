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
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if __name__ == "__main__":
    # What cannot be imported below is no refusal, which Python's own exit code 1 would say.
    try:
        importlib.import_module("batch_layer.job").start()
    except ImportError:
        traceback.print_exc()
        sys.exit(70)

from anabranch.errors import Unexpected
from anabranch.job import Job, main, open_job, parser
from anabranch.logs import of_process
from anabranch.output import print_json, print_table
from anabranch.protocol.sealing import require_sealed, seal
from anabranch.retry import Retry
from anabranch.spark.session import open_session, stop_on_signal
from batch_layer.plan import empty_hours, progress
from batch_layer.rebuild import Rebuilder, RebuildRequest, Result

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

LOG = logging.getLogger(__name__)


def rebuild_hours(
    job: Job, rebuilder: Rebuilder, hour: str | None, order: RebuildRequest, stop: threading.Event | None = None
) -> list[Result]:
    """Seal, then rebuild one hour or all that wait; each step is tried again for as long as `batch.retry_for` says.

    Of those that wait, a refused hour is rebuilt once something that its refusal rests on has changed, and once a day.
    Either way, accepted hours whose dead letters were lost, or whose look-back was not read yet, are restated at the
    end; of what becomes of these the result of one hour does not depend. An hour that breaks the job holds back no
    other: Unexpected is raised at the end. Raises NotYet for an hour that has not ended, Transient when the time is
    over or `stop` is set.
    """
    name, retry = f"stream {job.stream.name}", _retry(job, stop)
    sealed = retry.call(name, lambda: seal(job.stream, job.lake, job.kafka))
    if hour is not None:
        require_sealed(sealed.state, job.stream, hour)
    state = retry.call(name, lambda: rebuilder.recover(sealed))

    def rebuild(h: str, order: RebuildRequest) -> Result:
        return retry.call(f"{name}: hour {h}", lambda: rebuilder.rebuild(h, order))

    broken: list[Unexpected] = []
    results: list[Result] = []

    def attempt(h: str, again: RebuildRequest) -> None:
        try:
            results.append(rebuild(h, again))
        except Unexpected as error:
            LOG.error("%s: hour %s: %s", name, h, error)
            broken.append(error)

    if hour is not None:
        results.append(rebuild(hour, order))
    else:
        waiting = retry.call(name, lambda: rebuilder.waiting(state))
        if empty := empty_hours(state, waiting):
            results += retry.call(name, lambda: rebuilder.accept_empty(empty))
            state = retry.call(name, rebuilder.load)
        results += retry.call(name, lambda: rebuilder.standing(state, waiting))
        decided = {result.hour for result in results}
        todo, begun = [h for h in waiting if h not in decided], time.monotonic()
        sizes = [state.timeline.sealed[h].offsets for h in todo]
        for done, h in enumerate(todo):
            if done:
                LOG.info("%s: %s", name, progress(sizes, done, time.monotonic() - begun))
            attempt(h, order)
    state = retry.call(name, rebuilder.load)
    if lost := retry.call(name, lambda: rebuilder.lost(state)):
        for h, again in lost.items():
            attempt(h, again)
        state = retry.call(name, rebuilder.load)
    for h, again in retry.call(name, lambda: rebuilder.again(state)).items():
        attempt(h, again)
    if broken and hour is None:
        more = f" (and {len(broken) - 1} more hours, in the lines above)" if len(broken) > 1 else ""
        raise Unexpected(f"{broken[0]}{more}") from broken[0]
    return sorted(results, key=lambda result: result.hour)


def replay(job: Job, rebuilder: Rebuilder, hour: str | None, stop: threading.Event | None = None) -> list[Result]:
    """Restate the accepted hours, or just `hour`, of whose dead letters some would be rows by the stream as it is now.

    Each step is tried again as in `rebuild_hours`. Raises Transient when the time is over or `stop` is set.
    """
    name, retry = f"stream {job.stream.name}", _retry(job, stop)
    retry.call(name, rebuilder.recover)
    repairable = {h: n for h, n in retry.call(name, rebuilder.repairable).items() if hour in (None, h)}

    def restate(h: str) -> Result:
        order = RebuildRequest(restate=True, why=f"dead letters replayed: {repairable[h]} can be read by now")
        return retry.call(f"{name}: hour {h}", lambda: rebuilder.rebuild(h, order))

    return [restate(h) for h in repairable]


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


def exit_code(results: Sequence[Result], hour: str | None) -> int:
    """1 when an hour was refused. What was restated beside one that was asked for is no verdict on that one. Pure."""
    return 1 if any(r.refused for r in results if hour in (None, r.hour)) else 0


def _view(stream: str, results: Sequence[Result]) -> dict[str, Any]:
    rows = [
        {"hour": r.hour, "state": r.decision, "revision": r.revision, "reason": r.reason}
        | r.account.as_dict()
        | ({"served": r.served} if r.served is not None else {})
        for r in results
    ]
    return {"stream": stream, "hours": rows}


def run(arguments: Sequence[str]) -> int:
    """The entry of spark-submit. Returns the exit code."""
    options = parser("Build the authoritative rows of a stream's hours.")
    options.add_argument("--hour", default=None, help="one hour, such as 2026-11-21T03; default: all that wait")
    options.add_argument("--restate", action="store_true", help="publish a new revision of an accepted hour")
    options.add_argument("--accept", action="store_true", help="publish it in spite of gaps or the quality gate")
    options.add_argument("--why", default=None, help="the reason, for the ledger")
    options.add_argument("--replay", action="store_true", help="restate hours of whose dead letters some can be read")
    parsed = options.parse_args(list(arguments))
    job = open_job(parsed.stream, parsed.conf)
    of_process(stream=parsed.stream, layer="batch")
    spark = open_session(job.environment, f"anabranch batch {job.stream.name}")
    try:
        with _stopped_by_signal(spark, job.stream.name) as stop:
            rebuilder = Rebuilder(job, spark)
            if parsed.replay:
                results = replay(job, rebuilder, parsed.hour, stop)
            else:
                order = RebuildRequest(parsed.restate, parsed.accept, parsed.why)
                results = rebuild_hours(job, rebuilder, parsed.hour, order, stop)
    finally:
        job.kafka.close()
        spark.stop()
    if parsed.output == "json":
        print_json(_view(job.stream.name, results))
    elif results:
        names = ("good", "dead", "duplicate", "gap")
        rows = [(r.hour, r.decision, r.revision, *(getattr(r.account, n) for n in names), r.reason) for r in results]
        print_table(("hour", "state", "revision", *names, "reason"), rows)
    else:
        waits = "holds dead letters that could be read by now" if parsed.replay else "waits to be rebuilt"
        print(f"{job.stream.name}: no hour {waits}")
    return exit_code(results, parsed.hour)


def start() -> None:
    """Run the job and end the process with its exit code."""
    main(run, sys.argv[1:])
