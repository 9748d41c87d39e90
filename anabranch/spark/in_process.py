"""A Spark session whose driver is the process of a command: `anabranch import` and `batch`."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from pyspark.sql import SparkSession

from anabranch.common.process import is_submitted
from anabranch.config import Environment
from anabranch.spark.session import close_session, explained, open_session
from anabranch.spark.submit import require_spark, submit_command, with_master
from anabranch.spark.workers import SETTINGS, require_workers

# What spark-submit runs when PySpark starts it.
_SHELL = "pyspark-shell"


def open_here(
    environment: Environment, name: str, settings: Mapping[str, str], java: str = ""
) -> SparkSession:
    """Open a session whose driver is this process, with Python workers. `java`: options of its JVM,
    if none runs yet: under spark-submit, it does. Raises ConfigurationError, Transient."""
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
    if master is not None:
        environment = with_master(environment, master)
    require_spark(environment)
    spark = open_here(environment, name, SETTINGS)
    try:
        with explained(spark, name):
            yield spark
    finally:
        close_session(spark)
