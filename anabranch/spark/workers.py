"""Python workers, which decode records: their settings, and whether executors can run them.

On a local master, tasks run with the driver's own Python. On any other master, a job probes the
executors once: tasks report the versions of Python, of the packages and of our code. All must equal
the driver's versions, so that every record is decoded alike.
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping

from pyspark.sql import SparkSession

from anabranch.common.errors import ConfigurationError
from anabranch.common.remote_errors import one_line
from anabranch.decode.inputs import BATCH_BYTES, BATCH_RECORDS
from anabranch.spark.settings import difference, installed, runs_here
from anabranch.spark.worker_daemon import MODULES

LOG = logging.getLogger(__name__)

SETTINGS = {
    "spark.python.daemon.module": "anabranch.spark.worker_daemon",
    "spark.sql.execution.arrow.maxRecordsPerBatch": str(BATCH_RECORDS),
    "spark.sql.execution.arrow.maxBytesPerBatch": str(BATCH_BYTES),
}
"""Settings of a session in which Python workers decode records."""

_EXCLUDES = "spark.excludeOnFailure.enabled"
_REMEDY = (
    "run `anabranch pack`, which builds an archive for executors; docs/how-to/deploy/jobs.md has "
    "the other ways"
)

Versions = Mapping[str, str]
"""Versions by part: Python, each package, and the digest of our code. An executor's report also has
its `host`; a report of a failed import has `host` and `missing`, the error."""

# Spark application ids. A process runs one application at a time.
_probed: set[str] = set()
_probing = threading.Lock()


def reason_against(expected: Versions, reports: Iterable[Versions]) -> str | None:
    """Return why executors cannot decode records, from their reports; None if they can. Pure."""
    for report in reports:
        host = report["host"]
        if "missing" in report:
            return f"executor on {host}: expected our packages, found {report['missing']}"
        if (differs := difference(expected, report)) is not None:
            return f"executor on {host}: {differs}"
    return None


def require_workers(spark: SparkSession) -> None:
    """Check that the session's executors can decode records. The first call on a cluster runs a
    Spark job. Raises ConfigurationError, with the executor and what it lacks."""
    context = spark.sparkContext
    if runs_here(context.master):
        return
    with _probing:
        if context.applicationId in _probed:
            return
        if context.getConf().get(_EXCLUDES, "false") == "true":
            raise ConfigurationError(
                f"{_EXCLUDES}: expected false, because a failed probe would exclude executors, "
                "found true"
            )
        try:
            reports = _probe(spark)
        except Exception as error:
            LOG.debug("probe of the executors failed", exc_info=True)
            raise ConfigurationError(
                f"executors: expected Python workers to start, found: {one_line(error)}; {_REMEDY}"
            ) from error
        if (reason := reason_against(installed(), reports)) is not None:
            raise ConfigurationError(f"{reason}; {_REMEDY}")
        hosts = sorted({report["host"] for report in reports})
        LOG.info("executors: Python workers decode records hosts=%s", ",".join(hosts))
        _probed.add(context.applicationId)


def _probe(spark: SparkSession) -> list[dict[str, str]]:
    """Return the reports of two tasks for each core that Spark has now. Raises Spark's errors."""
    context = spark.sparkContext
    tasks = 2 * context.defaultParallelism
    # Spark would log each failed attempt as an error. The caller logs the reason once.
    context.setLogLevel("OFF")
    try:
        return [
            json.loads(report)
            for report in context.parallelize(range(tasks), tasks).mapPartitions(_task()).collect()
        ]
    finally:
        context.setLogLevel("ERROR")


def _task() -> Callable[[Iterable[int]], Iterator[str]]:
    """Return a probe's task; nested, so that Spark sends it by value, without our code."""
    modules = MODULES

    def run(_: Iterable[int]) -> Iterator[str]:
        import importlib
        import json
        import socket

        host = socket.gethostname()
        try:
            for module in modules:
                importlib.import_module(module)
            from anabranch.spark.settings import installed
        except ImportError as error:
            yield json.dumps({"host": host, "missing": str(error)})
        else:
            yield json.dumps({"host": host, **installed()})

    return run
