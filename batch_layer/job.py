"""The batch job: `spark-submit batch_layer/job.py --stream NAME [--hour H] [--restate]`.

Seals every hour that has ended and rebuilds each that is not accepted, oldest first. A refused hour does not hold back
the next; the exit code is 1 when any was refused.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from typing import Any

from anabranch.jvm import open_session
from anabranch.output import print_json, print_table
from anabranch.sealing import require_sealed, seal
from anabranch.session import Job, main, open_job, parser
from batch_layer.rebuild import Rebuilder, Result

LOG = logging.getLogger(__name__)


def rebuild_hours(job: Job, rebuilder: Rebuilder, hour: str | None, restate: bool) -> list[Result]:
    """Seal, then rebuild one hour or all that wait. Raises Transient for an hour that has not ended."""
    seal(job.environment, job.stream, job.lake, job.kafka)
    if hour is not None:
        require_sealed(job.lake, job.stream, hour)
    rebuilder.recover()
    if hour is not None:
        return [rebuilder.rebuild(hour, restate)]
    waiting = rebuilder.waiting()
    results = rebuilder.accept_empty(rebuilder.empty(waiting))
    done = {result.hour for result in results}
    results += [rebuilder.rebuild(h) for h in waiting if h not in done]
    return sorted(results, key=lambda result: result.hour)


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
        results = rebuild_hours(job, Rebuilder(job, spark), parsed.hour, parsed.restate)
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
