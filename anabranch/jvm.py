"""The JVM behind a job's Spark session: opening it, and being told to stop.

Used by the `job.py` files only; nothing else builds a session.
"""

from __future__ import annotations

import logging
import signal
from collections.abc import Callable, Iterable
from typing import Any

from pyspark import SparkConf
from pyspark.sql import SparkSession

from anabranch.config import Environment
from anabranch.errors import ConfigurationError
from anabranch.spark import session_settings

LOG = logging.getLogger(__name__)


def open_session(environment: Environment, name: str) -> SparkSession:
    """A session that reaches the lake. Raises ConfigurationError when our jars are not on its class path.

    The master comes from spark-submit; without one, from configuration.
    """
    builder = SparkSession.builder.appName(name)
    conf = SparkConf()
    if not conf.contains("spark.master"):
        builder = builder.master(environment.spark.master)
    for key, value in session_settings(environment).items():
        builder = builder.config(key, value)
    spark = builder.getOrCreate()
    spark.sparkContext.setLogLevel("ERROR")
    jvm: Any = spark.sparkContext._jvm
    # Servers that are not AWS do not all know the SDK's newer checksums.
    jvm.java.lang.System.setProperty("aws.requestChecksumCalculation", "WHEN_REQUIRED")
    jvm.java.lang.System.setProperty("aws.responseChecksumValidation", "WHEN_REQUIRED")
    try:
        jvm.java.lang.Thread.currentThread().getContextClassLoader().loadClass("org.apache.iceberg.spark.SparkCatalog")
    except Exception:
        spark.stop()
        raise ConfigurationError(
            "spark: expected the Iceberg and Kafka jars on Spark's class path, found none; run the job by `anabranch`, "
            "or let spark-submit find them: python -m anabranch.dev.jars --spark-submit"
        ) from None
    return spark


class _Handler:
    """A Java signal handler that calls Python: the JVM of spark-submit is who gets the signal."""

    def __init__(self, stop: Callable[[], None]) -> None:
        self._stop = stop

    def handle(self, _: Any) -> None:
        self._stop()

    class Java:
        implements = ("sun.misc.SignalHandler",)


def stop_on_signal(spark: SparkSession, stop: Callable[[], None], signals: Iterable[signal.Signals]) -> None:
    """Call `stop` once a signal reaches this process or its JVM, in place of ending either."""
    from pyspark.java_gateway import ensure_callback_server_started

    gateway: Any = spark.sparkContext._gateway
    ensure_callback_server_started(gateway)  # type: ignore[no-untyped-call]
    handler = _Handler(stop)
    for number in signals:
        signal.signal(number, lambda *_: stop())
        gateway.jvm.sun.misc.Signal.handle(gateway.jvm.sun.misc.Signal(number.name.removeprefix("SIG")), handler)
