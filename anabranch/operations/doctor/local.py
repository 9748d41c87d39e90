"""Check this machine: Java, the jars, the Python version of Spark's workers, and free disk
space."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import tarfile
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from shlex import quote

from anabranch.common.errors import ConfigurationError
from anabranch.config import Environment
from anabranch.operations.finding import Finding, Issue, error, warning
from anabranch.spark import jars
from anabranch.spark.java import OLDEST, require_java, require_temporary, require_user
from anabranch.spark.settings import (
    difference,
    exposed_keys,
    installed,
    packed_archive,
    packed_versions,
    runs_here,
    session_settings,
)

_NAMED = 3  # jars named in a finding
# Bytes: below the first, the next checkpoint may fail; below the second, the next shuffle.
_MIN_FREE, _LOW_FREE = 64 << 20, 512 << 20


@dataclass(frozen=True)
class LocalFacts:
    """Facts about this machine. `no_java`: why Java cannot be run. `refused`: why a job ends before
    its start, by kind. `worker_python`: the version of
    the workers' Python (PYSPARK_PYTHON), or why it cannot be run; None if workers use this Python.
    `packed`: how the archive of packages for executors differs from this installation, and its
    file. `exposed`: the settings with secrets that executors receive unencrypted. `temporary`: the
    folder with the least free space (`free` bytes) among those that jobs on this machine write
    to."""

    no_java: str | None
    refused: Mapping[Issue, str]
    folder: str
    is_empty: bool
    jars: tuple[str, ...]
    worker_python: str | None
    packed: tuple[str, str] | None
    exposed: tuple[str, ...]
    temporary: str
    free: int


def read(environment: Environment) -> LocalFacts:
    try:
        require_java()
        no_java = None
    except (ConfigurationError, OSError, subprocess.SubprocessError) as failed:
        no_java = str(failed)
    options = environment.spark.conf.get("spark.driver.extraJavaOptions", "")
    refused: dict[Issue, str] = {}
    for issue, require in (
        (Issue.USER, require_user),
        (Issue.TEMPORARY, partial(require_temporary, options)),
    ):
        try:
            require()
        except ConfigurationError as failed:
            refused[issue] = str(failed)
    folder, wrong = jars.cached()
    free, temporary = _least_free_space(environment)
    worker_python = _worker_python(environment)
    return LocalFacts(
        no_java=no_java,
        refused=refused,
        folder=str(folder),
        is_empty=not folder.exists(),
        jars=tuple(wrong),
        worker_python=worker_python,
        packed=_packed(environment),
        exposed=_exposed(environment),
        temporary=temporary,
        free=free,
    )


def _least_free_space(environment: Environment) -> tuple[int, str]:
    spills = os.environ.get("SPARK_LOCAL_DIRS") or environment.spark.conf.get("spark.local.dir", "")
    folders = [
        folder for name in spills.split(",") if (folder := name.strip()) and Path(folder).is_dir()
    ]
    return min(
        (shutil.disk_usage(folder).free, folder) for folder in (tempfile.gettempdir(), *folders)
    )


def _worker_python(environment: Environment) -> str | None:
    command = os.environ.get("PYSPARK_PYTHON")
    # On a cluster, PYSPARK_PYTHON is a path on other machines.
    if command is None or not runs_here(environment.spark.master):
        return None
    ask = [command, "-c", "import platform; print(platform.python_version())"]
    try:
        return subprocess.run(
            ask, capture_output=True, text=True, timeout=20, check=True
        ).stdout.strip()
    except (OSError, subprocess.SubprocessError) as failed:
        return f"PYSPARK_PYTHON={command} cannot be run ({failed})"


def _packed(environment: Environment) -> tuple[str, str] | None:
    file = packed_archive(environment.spark.conf)
    if file is None or runs_here(environment.spark.master):
        return None
    try:
        differs = difference(installed(), packed_versions(file))
    except (OSError, ValueError, tarfile.TarError) as failed:
        differs = f"cannot be read ({failed})"
    return (differs, str(file)) if differs is not None else None


def _exposed(environment: Environment) -> tuple[str, ...]:
    try:
        return exposed_keys(environment.spark.master, session_settings(environment))
    except ConfigurationError:
        # The catalog's address is invalid, which the catalog's check reports.
        return ()


def findings(facts: LocalFacts) -> Iterator[Finding]:
    if facts.no_java is not None:
        remedy = f"sudo apt-get install openjdk-{OLDEST}-jre-headless"
        yield error(Issue.JAVA, "this machine", f"Java {OLDEST} or newer", facts.no_java, remedy)
    for issue, found in facts.refused.items():
        found, _, remedy = found.partition("; ")
        yield error(issue, "this machine", "a machine on which jobs start", found, remedy)
    if facts.jars and all(" is missing " in sentence for sentence in facts.jars):
        found = "none" if facts.is_empty else f"{len(facts.jars)} missing"
        expected = (
            f"the pinned jars in {facts.folder}; without them the first job downloads 200 MB, for "
            "minutes"
        )
        yield warning(Issue.JARS, "this machine", expected, found, "anabranch jars")
    elif facts.jars:
        more = f" and {len(facts.jars) - _NAMED} more" if len(facts.jars) > _NAMED else ""
        yield error(
            Issue.JARS_DIFFER,
            "this machine",
            f"the jars of conf/jvm/jars.sha256 in {facts.folder}",
            "; ".join(facts.jars[:_NAMED]) + more,
            f"rm -r {facts.folder} && anabranch jars",
        )
    ours = platform.python_version_tuple()[:2]
    if facts.worker_python is not None and tuple(facts.worker_python.split(".")[:2]) != ours:
        expected = f"Python {'.'.join(ours)} for Spark's workers too"
        yield error(
            Issue.PYTHON, "this machine", expected, facts.worker_python, "unset PYSPARK_PYTHON"
        )
    if facts.packed is not None:
        differs, file = facts.packed
        expected = f"the packages of this installation in {file}, or no job starts"
        remedy = f"anabranch pack --to {quote(str(Path(file).parent))}"
        yield error(Issue.PACKED, "this machine", expected, differs, remedy)
    if facts.exposed:
        expected = (
            "an encrypted connection to executors, which receive secrets of the configuration"
        )
        remedy = (
            "spark.authenticate: true and spark.network.crypto.enabled: true in spark.conf of "
            "anabranch.yaml"
        )
        found = f"none enabled in spark.conf; executors receive {', '.join(facts.exposed)}"
        yield warning(Issue.UNENCRYPTED, "this machine", expected, found, remedy)
    if facts.free < _LOW_FREE:
        severe = error if facts.free < _MIN_FREE else warning
        expected = f"{_LOW_FREE >> 20} MB or more for checkpoints and shuffles in {facts.temporary}"
        remedy = f"du -xhd1 {quote(facts.temporary)}"
        yield severe(Issue.DISK, "this machine", expected, f"{facts.free >> 20} MB", remedy)
