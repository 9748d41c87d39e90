"""The batch job: `spark-submit batch_layer/job.py --stream NAME [--hour H] [--restate]`.

Seals every hour that has ended and rebuilds each that is not accepted, oldest first. A refused hour does not hold back
the next; the exit code is 1 when any was refused.
"""

from __future__ import annotations

import logging
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from anabranch.jvm import open_session, stop_on_signal
from anabranch.output import print_json, print_table
from anabranch.retry import Retry
from anabranch.sealing import require_sealed, seal
from anabranch.session import Job, main, open_job, parser
from batch_layer.rebuild import Rebuilder, Result

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

LOG = logging.getLogger(__name__)


def rebuild_hours(
    job: Job, rebuilder: Rebuilder, hour: str | None, restate: bool, stop: threading.Event | None = None
) -> list[Result]:
    """Seal, then rebuild one hour or all that wait; each step is tried again for as long as `batch.retry_for` says.

    Raises NotYet for an hour that has not ended, Transient when the time is over or `stop` is set.
    """
    name = f"stream {job.stream.name}"
    retry = Retry(job.stream.batch.retry_for, "batch.retry_for", stop or threading.Event())
    retry.call(name, lambda: seal(job.environment, job.stream, job.lake, job.kafka))
    if hour is not None:
        retry.call(name, lambda: require_sealed(job.lake, job.stream, hour))
    retry.call(name, rebuilder.recover)

    def rebuild(h: str) -> Result:
        return retry.call(f"{name}: hour {h}", lambda: rebuilder.rebuild(h, restate))

    if hour is not None:
        return [rebuild(hour)]
    waiting = retry.call(name, rebuilder.waiting)
    results = retry.call(name, lambda: rebuilder.accept_empty(rebuilder.empty(waiting)))
    done = {result.hour for result in results}
    results += [rebuild(h) for h in waiting if h not in done]
    return sorted(results, key=lambda result: result.hour)


@contextmanager
def _stopped_by_signal(spark: SparkSession, stream: str) -> Iterator[threading.Event]:
    """An event that SIGTERM or Ctrl-C sets; Spark's work is cancelled with it, so that the job ends within seconds."""
    stop, ended = threading.Event(), threading.Event()

    def told() -> None:
        if not stop.is_set():
            LOG.info("stream %s: told to stop; what is not published yet will not be", stream)
        stop.set()

    def cancel() -> None:
        stop.wait()
        while not ended.wait(0.5):
            spark.sparkContext.cancelAllJobs()

    # Not in the handler: it may come in the middle of another call to the JVM.
    threading.Thread(target=cancel, name="cancel", daemon=True).start()
    stop_on_signal(spark, told, (signal.SIGTERM, signal.SIGINT))
    try:
        yield stop
    finally:
        ended.set()
        stop.set()


def _view(stream: str, results: Sequence[Result]) -> dict[str, Any]:
    rows = [
        {"hour": r.hour, "state": r.decision, "revision": r.revision, "reason": r.reason, **r.said} for r in results
    ]
    return {"stream": stream, "hours": rows}


def run(arguments: Sequence[str]) -> int:
    """The entry of spark-submit. Returns the exit code."""
    options = parser("Build the authoritative rows of a stream's hours.")
    options.add_argument("--hour", default=None, help="one hour, such as 2026-11-21T03; default: all that wait")
    options.add_argument("--restate", action="store_true", help="publish a new revision of an accepted hour")
    parsed = options.parse_args(list(arguments))
    job = open_job(parsed.stream, parsed.conf)
    spark = open_session(job.environment, f"anabranch batch {job.stream.name}")
    try:
        with _stopped_by_signal(spark, job.stream.name) as stop:
            results = rebuild_hours(job, Rebuilder(job, spark), parsed.hour, parsed.restate, stop)
    finally:
        job.kafka.close()
        spark.stop()
    if parsed.output == "json":
        print_json(_view(job.stream.name, results))
    elif results:
        names = ("good", "dead", "duplicate", "gap")
        rows = [(r.hour, r.decision, r.revision, *(r.said.get(n, "") for n in names), r.reason or "") for r in results]
        print_table(("hour", "state", "revision", *names, "reason"), rows)
    else:
        print(f"{job.stream.name}: no hour waits to be rebuilt")
    return 1 if any(r.refused for r in results) else 0


if __name__ == "__main__":
    main(run, sys.argv[1:])
