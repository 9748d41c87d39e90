"""The Spark session of a test run, which tests can use with other settings."""

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml
from pyspark.sql import SparkSession

from anabranch import config
from anabranch.spark import workers
from anabranch.spark.jars import ensure_jars, jvm_folder
from anabranch.spark.java import FIRST_COMPILER
from anabranch.spark.settings import session_settings


@contextmanager
def running_spark(environment: Mapping[str, Any], folder: Path) -> Iterator[SparkSession]:
    """Run a session with the catalog and the S3 server of `environment`, and the settings of the
    speed job. It tries a task four times. Its local files are below `folder`."""
    conf = folder / "conf"
    conf.mkdir()
    (conf / "anabranch.yaml").write_text(yaml.safe_dump(dict(environment)))
    settings = session_settings(config.load_environment(conf))
    log4j = f"-Dlog4j2.configurationFile=file:{jvm_folder() / 'log4j2-spark.properties'}"
    before = os.environ.get("SPARK_LOCAL_IP")
    os.environ |= {"PYSPARK_PYTHON": sys.executable, "SPARK_LOCAL_IP": "127.0.0.1"}
    builder = SparkSession.builder.master("local[2,4]").appName("tests")
    # The serial collector: the heap is small, and other processes need the cores that other
    # collectors would use.
    checksums = "-Daws.requestChecksumCalculation=WHEN_REQUIRED"
    options = f"{log4j} {FIRST_COMPILER} -XX:+UseSerialGC {checksums}"
    launch = {
        "spark.driver.extraClassPath": ":".join(str(jar) for jar in ensure_jars().spark),
        "spark.driver.extraJavaOptions": options,
        "spark.jars": "",
        "spark.sql.shuffle.partitions": "2",
        # A hundred by default. Tests of different streams compile the same code, and reuse it.
        "spark.sql.codegen.cache.maxEntries": "5000",
        "spark.local.dir": str(folder / "spark"),
        "spark.sql.warehouse.dir": str(folder / "warehouse"),
    }
    session = builder.config(map=settings | workers.SETTINGS | launch).getOrCreate()
    # The JVM has it now. Tests of the variables that a job sets also run in this process.
    os.environ.pop("SPARK_LOCAL_IP")
    if before is not None:
        os.environ["SPARK_LOCAL_IP"] = before
    session.sparkContext.setLogLevel("OFF")
    try:
        yield session
    finally:
        gateway: Any = session.sparkContext._gateway
        session.stop()
        # The JVM ends with its standard input. Wait for it, so that no process is left.
        gateway.shutdown()
        gateway.proc.stdin.close()
        gateway.proc.wait(30)


@contextmanager
def with_settings(spark: SparkSession, settings: Mapping[str, str]) -> Iterator[SparkSession]:
    """Change settings of the session within a `with`, and restore them at its end."""
    before = {key: spark.conf.get(key, None) for key in settings}
    for key, value in settings.items():
        spark.conf.set(key, value)
    try:
        yield spark
    finally:
        for key, old in before.items():
            if old is None:
                spark.conf.unset(key)
            else:
                spark.conf.set(key, old)
