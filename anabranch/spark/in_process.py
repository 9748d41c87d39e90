"""A Spark session whose driver is the process of a command, as `anabranch import` needs it."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator
from contextlib import contextmanager

from pyspark.sql import SparkSession

from anabranch.config import Environment
from anabranch.spark.java import require_java, require_temporary, require_user
from anabranch.spark.session import close_session, explained, open_session
from anabranch.spark.submit import submit_command, with_master
from anabranch.spark.workers import SETTINGS, require_workers

# What spark-submit runs when PySpark starts it.
_SHELL = "pyspark-shell"


@contextmanager
def session_here(
    environment: Environment, name: str, master: str | None = None
) -> Iterator[SparkSession]:
    """Open a session whose driver is this process, with Python workers, closed at the end. Raises
    ConfigurationError, Transient."""
    if master is not None:
        environment = with_master(environment, master)
    require_java()
    require_user()
    require_temporary(environment.spark.conf.get("spark.driver.extraJavaOptions", ""))
    command, process = submit_command(environment, "batch_layer", ())
    os.environ.update(process | {"PYSPARK_SUBMIT_ARGS": shlex.join([*command[1:-1], _SHELL])})
    spark = open_session(environment, name, SETTINGS)
    try:
        require_workers(spark)
        with explained(spark, name):
            yield spark
    finally:
        close_session(spark)
