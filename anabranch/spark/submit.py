"""The spark-submit of our commands: with our jars and the configured master, without secrets on the
command line."""

from __future__ import annotations

import fcntl
import importlib.util
import os
import stat
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from anabranch.common.errors import ConfigurationError
from anabranch.config import Environment, broken, load_environment, select_streams
from anabranch.config.environment import check_master
from anabranch.spark.jars import JOBS, ensure_jars, jvm_folder
from anabranch.spark.java import require_java, require_temporary, require_user, spark_home
from anabranch.spark.settings import REDACTED, runs_here


def job_file(layer: str) -> Path:
    """Return the installed `speed_layer/job.py` or `batch_layer/job.py`."""
    spec = importlib.util.find_spec(layer)
    assert spec is not None and spec.origin is not None
    return Path(spec.origin).parent / "job.py"


def submit_command(
    environment: Environment, layer: str, arguments: Sequence[str], java: str = ""
) -> tuple[list[str], dict[str, str]]:
    """Return the command line and process environment that run a layer's job with its driver on
    this machine. `java` are options of the driver's Java; configured options take precedence.

    On a local master the jars are on the class path at their place. A cluster gets copies of the
    jars, and nothing else from here. Raises
    ConfigurationError for cluster deploy mode, in which the exit code and signals would be lost.
    """
    master = environment.spark.master
    if environment.spark.conf.get("spark.submit.deployMode", "client") != "client":
        raise ConfigurationError(
            "spark.conf: expected no spark.submit.deployMode, or client, found "
            f"{environment.spark.conf['spark.submit.deployMode']}; "
            "remove it: the driver runs where the command runs"
        )
    jars = ensure_jars(confs=JOBS)
    local = runs_here(master)
    home = os.environ.get("SPARK_HOME") or str(spark_home())
    command = [f"{home}/bin/spark-submit", "--master", master]
    # The empty list overrides spark.jars of spark-defaults.conf, which is for plain spark-submit.
    if local:
        command += ["--driver-class-path", ":".join(map(str, jars.spark)), "--conf", "spark.jars="]
    else:
        command += ["--jars", ",".join(map(str, jars.spark))]
    log4j = jvm_folder() / "log4j2-spark.properties"
    # --driver-java-options overrides spark.driver.extraJavaOptions, so configured options join it.
    # A configured executor Python is a path on their machines; the driver uses the current Python.
    conf = {"spark.pyspark.driver.python": os.environ.get("PYSPARK_DRIVER_PYTHON", sys.executable)}
    conf |= environment.spark.conf
    ours = " ".join(
        [
            f"-Dlog4j2.configurationFile=file:{log4j}",
            "-XX:+UseParallelGC",
            *java.split(),
        ]
    )
    command += [
        "--driver-java-options",
        f"{ours} {conf.pop('spark.driver.extraJavaOptions', '')}".strip(),
    ]
    for key, value in conf.items():
        # Every process of the machine can read a command line; the job sets secrets in its session.
        if not REDACTED.search(key):
            command += ["--conf", f"{key}={value}"]
    python = os.environ.get("PYSPARK_PYTHON", sys.executable)
    process = dict(os.environ) | {
        # A driver in this process names the executors' Python by this variable alone.
        "PYSPARK_PYTHON": environment.spark.conf.get("spark.pyspark.python", python),
        "SPARK_HOME": home,
        **({"SPARK_LOCAL_IP": "127.0.0.1"} if local else {}),
        # spark-submit replaces this process and keeps its id and standard error.
        "ANABRANCH_STDERR": f"/proc/{os.getpid()}/fd/2",
        "AWS_REQUEST_CHECKSUM_CALCULATION": "when_required",
        "AWS_RESPONSE_CHECKSUM_VALIDATION": "when_required",
    }
    return [*command, str(job_file(layer)), *arguments], process


def require_spark(environment: Environment) -> None:
    """Raise ConfigurationError if Java cannot run: spark-submit's exit code 1 means a refusal."""
    require_java()
    require_user()
    require_temporary(environment.spark.conf.get("spark.driver.extraJavaOptions", ""))


def submit(environment: Environment, arguments: Sequence[str]) -> None:
    """Replace this process by spark-submit with the speed job, so that signals and the exit code
    are the job's own. Never returns. Raises like `require_spark`."""
    require_spark(environment)
    command, process = submit_command(environment, "speed_layer", arguments)
    append_standard_error()
    sys.stdout.flush()
    sys.stderr.flush()
    os.execve(command[0], command, process)


def with_master(environment: Environment, master: str | None) -> Environment:
    """Return the environment with another master of Spark; itself for None. Raises
    ConfigurationError."""
    if master is None:
        return environment
    try:
        check_master(master)
    except ValueError as error:
        raise ConfigurationError(f"--master: {error}, found {master!r}") from None
    return environment.model_copy(
        update={"spark": environment.spark.model_copy(update={"master": master})}
    )


def append_standard_error() -> None:
    """Set append mode for standard error if it is a file.

    The job opens the file again for its log (ANABRANCH_STDERR). Without append mode, later output
    of a script to the same file (`script > log 2>&1`) would overwrite the job's lines.
    """
    with suppress(OSError):
        if stat.S_ISREG(os.fstat(2).st_mode):
            fcntl.fcntl(2, fcntl.F_SETFL, fcntl.fcntl(2, fcntl.F_GETFL) | os.O_APPEND)


def job_of(
    streams: Sequence[str],
    group: str | None,
    conf: str | None,
    output: str,
    extra: Sequence[str],
    master: str | None = None,
) -> tuple[Environment, list[str]]:
    """Return the environment and the arguments of the job of `streams`, else of `group`, else of
    all; `master` replaces the configured one.

    Raises ConfigurationError for a selection without streams, and for a single stream with an
    invalid file: with several, the job reports it. The job itself resolves streams of a family.
    """
    selected = select_streams(conf, streams, group, every=not streams and group is None)
    for error in broken(selected).values() if len(streams) == 1 else ():
        raise error
    named = [option for name in streams for option in ("--stream", name)]
    chosen = named or (["--group", group] if group else ["--all"])
    environment = with_master(load_environment(conf), master)
    folder = ["--conf", conf] if conf else []
    return environment, [*chosen, *folder, "--output", output, *extra]
