"""The decision whether Python workers read certain records, or Spark reads all records.

On a local master, tasks run with the driver's own Python. On any other master, a job probes the
executors once: tasks report the versions of Python, of the packages and of our code. Workers are
used only if all reports equal the driver's versions.
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping

from pyspark.errors import PythonException
from pyspark.sql import SparkSession

from anabranch.common.remote_errors import full_text, one_line
from anabranch.spark.executor_python import difference, installed
from anabranch.spark.settings import runs_here
from anabranch.spark.worker_daemon import MODULES

LOG = logging.getLogger(__name__)

SETTINGS = {
    "spark.python.daemon.module": "anabranch.spark.worker_daemon",
    # Limits of a worker's batch.
    "spark.sql.execution.arrow.maxRecordsPerBatch": "10000",
    "spark.sql.execution.arrow.maxBytesPerBatch": str(16 * 2**20),
}
"""Settings of a session in which Python workers read records."""

_EXCLUDES = "spark.excludeOnFailure.enabled"
_REMEDY = "docs/how-to/deploy/jobs.md lists how packages reach executors"

_WORKER_FAILURES = (
    "api.python.PythonException",
    "PythonWorkerFactory",
    "Python worker exited unexpectedly",
)

Versions = Mapping[str, str]
"""Versions by part: Python, each package, and the digest of our code. An executor's report also has
its `host`; a report of a failed import has `host` and `missing`, the error."""

# By Spark application id. A process runs one application at a time.
_decided: dict[str, bool] = {}
_deciding = threading.Lock()


def reason_for_spark(expected: Versions, reports: Iterable[Versions]) -> str | None:
    """Return why Spark must read all records, from executors' reports; None if Python workers can
    read certain records. Pure."""
    for report in reports:
        host = report["host"]
        if "missing" in report:
            return f"executor on {host}: expected our packages, found {report['missing']}"
        if (differs := difference(expected, report)) is not None:
            return f"executor on {host}: {differs}"
    return None


def is_worker_failure(error: BaseException) -> bool:
    """Return whether a Spark job failed because a Python worker did not start, ended, or raised an
    error. Pure."""
    return isinstance(error, PythonException) or any(
        part in full_text(error) for part in _WORKER_FAILURES
    )


def can_use_workers(spark: SparkSession) -> bool:
    """Return whether Python workers can read certain records in this session. The first call on a
    cluster runs a Spark job and logs its result; later calls return the same result."""
    context = spark.sparkContext
    if runs_here(context.master):
        return True
    with _deciding:
        if context.applicationId not in _decided:
            _decided[context.applicationId] = _decide(spark)
        return _decided[context.applicationId]


def _decide(spark: SparkSession) -> bool:
    reports: list[dict[str, str]] = []
    reason: str | None
    if spark.sparkContext.getConf().get(_EXCLUDES, "false") == "true":
        reason = f"{_EXCLUDES} is true, so a failed probe would exclude executors"
    else:
        try:
            reports = _probe(spark)
            reason = reason_for_spark(installed(), reports)
        except Exception as error:
            LOG.debug("probe of the executors failed", exc_info=True)
            reason = f"Python on executors failed: {one_line(error)}"
    if reason is None:
        hosts = sorted({report["host"] for report in reports})
        LOG.info("executors: Python workers read certain records hosts=%s", ",".join(hosts))
    else:
        LOG.info("executors: Spark reads all records, more slowly: %s; %s", reason, _REMEDY)
    return reason is None


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
    """Return a probe's task. Spark sends a nested function by value, so it also runs on executors
    without our code."""
    modules = MODULES

    def run(_: Iterable[int]) -> Iterator[str]:
        import importlib
        import json
        import socket

        host = socket.gethostname()
        try:
            for module in modules:
                importlib.import_module(module)
            from anabranch.spark.executor_python import installed
        except ImportError as error:
            yield json.dumps({"host": host, "missing": str(error)})
        else:
            yield json.dumps({"host": host, **installed()})

    return run
