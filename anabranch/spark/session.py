"""The Spark session of a job and its JVM: opening, stopping on a signal, translating errors. Only
the `job.py` files open a session, and commands whose process is Spark's driver: `anabranch import`
and `batch`."""

from __future__ import annotations

import logging
import os
import shlex
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from pyspark import SparkConf, SparkContext
from pyspark.sql import SparkSession

from anabranch.common.errors import (
    AnabranchError,
    ConfigurationError,
    JvmGone,
    Transient,
    Unexplained,
)
from anabranch.common.process import in_own_thread, is_submitted
from anabranch.common.remote_errors import explain, one_line
from anabranch.config import S3, Environment
from anabranch.spark.settings import exposed_keys, kafka_properties, runs_here, session_settings
from anabranch.spark.submit import require_spark, submit_command, with_master
from anabranch.spark.workers import SETTINGS, require_workers

LOG = logging.getLogger(__name__)

# py4j logs the whole traceback of a micro-batch's error; the job logs it in one line.
logging.getLogger("py4j.clientserver").setLevel(logging.CRITICAL)


def open_session(
    environment: Environment, name: str, settings: Mapping[str, str] | None = None
) -> SparkSession:
    """Return a session that reaches the lake, with a job's own `settings`. The master is
    spark-submit's, which our commands set, else the configured one.

    Raises ConfigurationError if our jars are not on the class path or Java does not trust the S3
    server. A failed start raises the error of `explain`, Transient in place of Unexplained.
    """
    builder = SparkSession.builder.appName(name)
    # A SparkConf has spark-submit's settings only once the JVM has started.
    SparkContext._ensure_initialized()
    master = SparkConf().get("spark.master", environment.spark.master)
    assert master is not None
    builder = builder.master(master)
    if runs_here(master):
        # Our tasks import packages of the Python that runs this.
        os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    for key, value in (session_settings(environment) | dict(settings or {})).items():
        builder = builder.config(key, value)
    try:
        spark = builder.getOrCreate()
    except Exception as error:
        explained = explain("start Spark", error)
        # An unreachable master causes various errors. No work has started, so a retry is safe.
        raise (
            Transient(str(explained)) if isinstance(explained, Unexplained) else explained
        ) from error
    spark.sparkContext.setLogLevel("ERROR")
    if not runs_here(master) and (
        exposed := exposed_keys(master, dict(spark.sparkContext.getConf().getAll()))
    ):
        LOG.warning(
            "executors: secrets reach them unencrypted: set spark.authenticate and "
            "spark.network.crypto.enabled, or replace the keys by a role of the executors; "
            "docs/how-to/deploy/jobs.md keys=%s",
            ",".join(exposed),
        )
    jvm: Any = spark.sparkContext._jvm
    # Some S3 servers other than AWS do not support the SDK's newer checksums.
    jvm.java.lang.System.setProperty("aws.requestChecksumCalculation", "WHEN_REQUIRED")
    jvm.java.lang.System.setProperty("aws.responseChecksumValidation", "WHEN_REQUIRED")
    for key, value in kafka_properties(environment).items():
        jvm.java.lang.System.setProperty(key, value)
    try:
        jvm.java.lang.Thread.currentThread().getContextClassLoader().loadClass(
            "org.apache.iceberg.spark.SparkCatalog"
        )
    except Exception:
        spark.stop()
        raise ConfigurationError(
            "spark: expected the Iceberg and Kafka jars on Spark's class path, found none; run "
            "the job by `anabranch`, or let spark-submit find them: anabranch jars --spark-submit"
        ) from None
    try:
        require_trust(spark, environment.s3)
    except ConfigurationError:
        spark.stop()
        raise
    return spark


def new_session(spark: SparkSession, environment: Environment) -> SparkSession:
    """Return a new session in the same Spark application, with the environment's catalog. Iceberg
    takes a write's staging id from the session, so streams that stage in parallel each need one."""
    session = spark.newSession()
    prefix = f"spark.sql.catalog.{environment.catalog.name}"
    for key, value in session_settings(environment).items():
        if key == prefix or key.startswith(f"{prefix}."):
            session.conf.set(key, value)
    session.conf.set("spark.sql.session.timeZone", "UTC")
    return session


class LazySpark:
    """A job's session, opened at its first use: small hours need no Spark, whose start takes longer
    than their work (decision 68). Threads may share it."""

    def __init__(self, open: Callable[[], SparkSession]) -> None:
        self._open, self._lock = open, threading.Lock()
        self.opened: SparkSession | None = None

    @classmethod
    def of(cls, spark: SparkSession) -> LazySpark:
        """Return a session that is open already."""
        lazy = cls(lambda: spark)
        lazy.opened = spark
        return lazy

    def __call__(self) -> SparkSession:
        with self._lock:
            if self.opened is None:
                self.opened = self._open()
            return self.opened

    def new(self) -> LazySpark:
        """Return another session of the same Spark."""
        return LazySpark(lambda: self().newSession())

    @contextmanager
    def explained(self, doing: str) -> Iterator[None]:
        """Translate any exception while `doing`, as `explained`."""
        try:
            yield
        except AnabranchError:
            raise
        except Exception as error:
            LOG.debug("%s failed", doing, exc_info=True)
            raise explain_spark(self.opened, doing, error) from error


def explain_spark(spark: SparkSession | None, doing: str, error: BaseException) -> AnabranchError:
    """Translate an error while `doing` to an AnabranchError: JvmGone if Spark's JVM or context
    ended, which a retry cannot restore, else the result of `explain`. Without `spark`, none ran."""
    if isinstance(error, AnabranchError):
        return error
    if spark is None:
        return explain(doing, error)
    jvm: Any = spark.sparkContext._jvm
    try:
        jvm.java.lang.System.nanoTime()
    except Exception:
        return JvmGone(
            f"{doing}: expected Spark's JVM to answer, found it gone; nothing is lost, start it "
            "again"
        )
    context: Any = spark.sparkContext._jsc
    if context is None or context.sc().isStopped():
        return JvmGone(
            f"{doing}: expected Spark's context to run, found it stopped ({one_line(error)}); "
            "nothing is lost, start it again"
        )
    return explain(doing, error)


def close_session(spark: SparkSession) -> None:
    """Stop a session. A failure is logged at debug level, so that it hides no earlier error."""
    try:
        spark.stop()
    except Exception:
        LOG.debug("stopping Spark failed", exc_info=True)


def require_trust(spark: SparkSession, s3: S3) -> None:
    """Raise ConfigurationError if Java does not trust a server that Python trusts by `s3.ca`: else
    the error may come hours later. An unreachable server passes."""
    if s3.ca is None or not (s3.endpoint or "").startswith("https://"):
        return
    jvm: Any = spark.sparkContext._jvm
    try:
        connection = jvm.java.net.URL(s3.endpoint).openConnection()
        connection.setConnectTimeout(3000)
        connection.setReadTimeout(3000)
        connection.connect()
    except Exception as error:
        LOG.debug("Java asked %s", s3.endpoint, exc_info=True)
        if "PKIX" in str(error):
            raise ConfigurationError(
                f"s3.endpoint {s3.endpoint}: expected Java to trust its certificate, as Python "
                f"does by s3.ca, found {one_line(error)}; add the authority to Java's trust store "
                "(docs/how-to/deploy/services.md)"
            ) from error
    else:
        connection.disconnect()


def explained(spark: SparkSession, doing: str) -> AbstractContextManager[None]:
    """Translate any exception while `doing` to an AnabranchError: no job ends with a traceback."""
    return LazySpark.of(spark).explained(doing)


class _Handler:
    """A Java signal handler that calls Python: under spark-submit, the JVM receives the signal."""

    def __init__(self, stop: Callable[[], None]) -> None:
        self._stop = stop

    def handle(self, _: Any) -> None:
        self._stop()

    class Java:
        implements = ("sun.misc.SignalHandler",)


def stop_on_signal(
    spark: SparkSession | None, stop: Callable[[], None], signals: Iterable[signal.Signals]
) -> None:
    """Call `stop` when a signal reaches this process or the JVM of `spark`, instead of ending them.
    A thread other than the main one can only set this for the JVM."""
    request = in_own_thread(stop)
    # Spark's context replaces Python's handler of Ctrl-C in the thread that opens it.
    if threading.current_thread() is threading.main_thread():
        for number in signals:
            signal.signal(number, lambda *_: request())
    if spark is None:
        return
    from pyspark.java_gateway import ensure_callback_server_started

    gateway: Any = spark.sparkContext._gateway
    ensure_callback_server_started(gateway)  # type: ignore[no-untyped-call]
    handler = _Handler(request)
    for number in signals:
        gateway.jvm.sun.misc.Signal.handle(
            gateway.jvm.sun.misc.Signal(number.name.removeprefix("SIG")), handler
        )


# What spark-submit runs when PySpark starts it.
_SHELL = "pyspark-shell"


def open_here(
    environment: Environment,
    name: str,
    settings: Mapping[str, str],
    master: str | None,
    java: str = "",
) -> SparkSession:
    """Open a session whose driver is this process, with Python workers. `master` replaces the
    configured one. `java`: options of its JVM, if none runs yet: under spark-submit, it does.
    Raises ConfigurationError, Transient."""
    environment = with_master(environment, master)
    if not is_submitted():
        command, process = submit_command(environment, "batch_layer", (), java)
        os.environ.update(process | {"PYSPARK_SUBMIT_ARGS": shlex.join([*command[1:-1], _SHELL])})
    spark = open_session(environment, name, settings)
    try:
        require_workers(spark)
    except BaseException:
        close_session(spark)
        raise
    return spark


@contextmanager
def session_here(
    environment: Environment, name: str, master: str | None = None
) -> Iterator[SparkSession]:
    """Open a session whose driver is this process, with Python workers, closed at the end. Raises
    ConfigurationError, Transient."""
    require_spark(environment)
    spark = open_here(environment, name, SETTINGS, master)
    try:
        with explained(spark, name):
            yield spark
    finally:
        close_session(spark)
