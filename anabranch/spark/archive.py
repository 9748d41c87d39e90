"""Java's class data sharing (CDS) archive: the jobs' JVMs map its classes instead of reading,
verifying and linking them from 150 jars at each start.

`anabranch jars --archive` makes it from `conf/jvm/classes.gz`, the classes that both jobs load. A
listed class that no longer exists is skipped; a class that is not listed is loaded from its jar.
The archive belongs to one Java and one class path; a JVM with others ignores it. `make class-list`
writes the list.

https://docs.oracle.com/en/java/javase/17/vm/class-data-sharing.html
"""

from __future__ import annotations

import gzip
import hashlib
import os
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

from anabranch.common.errors import Terminal
from anabranch.common.file_lock import locked
from anabranch.common.temporary import temporary_folder
from anabranch.spark.home import is_ours
from anabranch.spark.home import spark_home as installed_spark_home
from anabranch.spark.jars import Jars, Progress, cache_folder, jvm_folder
from anabranch.spark.java import java_executable

_LOCK_SECONDS = 600.0
# The layout of archived classes depends on the garbage collector.
COLLECTOR = "-XX:+UseParallelGC"
# Java would print messages about the archive into the jobs' output.
_QUIET = "-Xlog:cds*=off"


def spark_home() -> Path:
    """Return SPARK_HOME, else the folder of the installed pyspark. Raises Terminal without one."""
    return Path(os.environ["SPARK_HOME"]) if "SPARK_HOME" in os.environ else installed_spark_home()


def class_path(jars: Jars) -> list[str]:
    """Return spark-submit's options that put the jars on a local master's class path, at their
    place."""
    return ["--driver-class-path", ":".join(map(str, jars.spark))]


def archive_options(jars: Jars) -> tuple[list[str], Mapping[str, str]]:
    """Return the Java options and the spark-submit environment with which a job on a local master
    uses the archive. Both are empty without an archive, or if Spark has configuration files: Java
    does not support their folder in an archive's class path."""
    file = _archive_path(jars)
    if file is None or not file.exists():
        return [], {}
    return [f"-XX:SharedArchiveFile={file}", _QUIET], _environment(file)


def make_archive(jars: Jars, progress: Progress) -> Path:
    """Make the archive unless it exists (a minute, 250 MB); return its path. Raises Terminal."""
    file = _archive_path(jars)
    if file is None:
        raise Terminal(
            "archive of classes: expected Spark without configuration files (SPARK_CONF_DIR, "
            f"HADOOP_CONF_DIR, YARN_CONF_DIR, {spark_home() / 'conf'}), found some: jobs start "
            "without an archive; unset or remove them if they are not needed, then run `anabranch "
            "jars --archive`"
        )
    _empty_folder(file).mkdir(parents=True, exist_ok=True)
    with locked(
        file.with_suffix(".lock"),
        _LOCK_SECONDS,
        lambda: progress("another process makes the archive"),
    ):
        if not file.exists():
            progress("making the archive of Java's classes (once; a minute, 250 MB)")
            with temporary_folder("archive") as folder:
                _make(jars, file, folder / "classes")
    progress(f"the archive of Java's classes is {file}")
    return file


def _make(jars: Jars, file: Path, classes: Path) -> None:
    with gzip.open(jvm_folder() / "classes.gz") as packed, classes.open("wb") as plain:
        shutil.copyfileobj(packed, plain)
    part = file.with_suffix(".part")
    part.unlink(missing_ok=True)
    options = [
        "-Xshare:dump",
        f"-XX:SharedClassListFile={classes}",
        f"-XX:SharedArchiveFile={part}",
        COLLECTOR,
        _QUIET,
    ]
    # spark-submit gives the dump a job's class path; Java ends before it would run nothing.py.
    command = [
        str(spark_home() / "bin" / "spark-submit"),
        "--master",
        "local[1]",
        *class_path(jars),
    ]
    command += ["--driver-java-options", " ".join(options), "--driver-memory", "1g", "nothing.py"]
    done = subprocess.run(
        command,
        env=dict(os.environ) | _environment(file),
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0 or not part.exists():
        raise Terminal(
            f"archive of classes: expected Java to write {part}, found exit code "
            f"{done.returncode}: {(done.stderr or done.stdout).strip()[-500:]}; jobs start "
            "without it: fix the cause, then run `anabranch jars --archive`"
        )
    part.rename(file)


def _archive_path(jars: Jars) -> Path | None:
    """Return the path of this Java's archive of these jars; None if Spark has configuration
    files."""
    home = spark_home()
    if any(name in os.environ for name in ("SPARK_CONF_DIR", "HADOOP_CONF_DIR", "YARN_CONF_DIR")):
        return None
    if not all(is_ours(file) for file in (home / "conf").glob("*")):
        return None
    java = java_executable().resolve()
    status = java.stat()
    of = (
        jars.folder,
        home,
        java,
        status.st_size,
        status.st_mtime_ns,
        (jvm_folder() / "classes.gz").stat().st_size,
    )
    key = hashlib.sha256("\n".join(map(str, of)).encode()).hexdigest()[:16]
    return cache_folder() / "archives" / f"{key}.jsa"


def _empty_folder(file: Path) -> Path:
    return file.with_suffix(".conf")


def _environment(file: Path) -> dict[str, str]:
    return {"SPARK_CONF_DIR": str(_empty_folder(file)), "SPARK_HOME": str(spark_home())}
