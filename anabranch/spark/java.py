"""The Java that runs Spark, the broker and the S3 server: its location and version; and the Spark
of this environment: the pyspark wheel, and the configuration with which its plain `spark-submit`
runs our jobs."""

from __future__ import annotations

import importlib.util
import mmap
import os
import pwd
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from anabranch.common.errors import ConfigurationError, Terminal

OLDEST = 17
_REMEDY = (
    f"install a Java runtime {OLDEST} or newer (Debian, Ubuntu: apt-get install "
    "openjdk-17-jre-headless; macOS: brew install openjdk@17), or set JAVA_HOME to one"
)
FIRST_COMPILER = "-XX:TieredStopAtLevel=1 -XX:ReservedCodeCacheSize=240m"
"""Options of a JVM that runs for minutes: its second compiler (C2) takes more CPU time than it
saves. The first compiler's default code cache is 48 MB. Spark fills it, and the JVM compiles
evicted code again."""
_TEMPORARY = re.compile(r"-Djava\.io\.tmpdir=(\S+)")
_VERSION = re.compile(r'version "(?:1\.)?(\d+)')


def parse_major(output: str) -> int | None:
    """Return the major version in the output of `java -version`: 17 for 17.0.15, 8 for 1.8.0_402;
    None if it has none."""
    match = _VERSION.search(output)
    return int(match.group(1)) if match else None


def java_executable() -> Path:
    """Return `$JAVA_HOME/bin/java`, else the `java` on the PATH, as spark-submit chooses it. Raises
    ConfigurationError, with the remedy, if there is none."""
    if home := os.environ.get("JAVA_HOME"):
        executable = Path(home) / "bin" / "java"
        if not executable.is_file():
            raise ConfigurationError(
                f"JAVA_HOME {home}: expected {executable}, found none; {_REMEDY}"
            )
        return executable
    if on_path := shutil.which("java"):
        return Path(on_path)
    raise ConfigurationError(
        f"Java: expected JAVA_HOME or a java on the PATH, found neither; {_REMEDY}"
    )


def require_java() -> Path:
    """Return the Java executable that spark-submit chooses. Raises ConfigurationError, with the
    remedy, if there is none or it is older than 17."""
    executable = java_executable()
    answer = subprocess.run(
        [executable, "-version"], capture_output=True, text=True, timeout=60, check=False
    )
    major = parse_major(answer.stderr + answer.stdout)
    if major is None:
        raise ConfigurationError(
            f"{executable} -version: expected a version, found {answer.stderr.strip()!r}; {_REMEDY}"
        )
    if major < OLDEST:
        raise ConfigurationError(
            f"{executable}: expected Java {OLDEST} or newer, found {major}; {_REMEDY}"
        )
    return executable


def require_user() -> None:
    """Raise ConfigurationError if the process's user id has no name. Hadoop's login then fails, and
    Java with exit code 1, which means a refusal."""
    id, group = os.getuid(), os.getgid()
    try:
        pwd.getpwuid(id)
    except KeyError:
        raise ConfigurationError(
            f"user id {id}: expected a name in /etc/passwd, which Java needs, found none; add an "
            f"entry: echo 'anabranch:x:{id}:{group}::/tmp:/bin/sh' >> /etc/passwd (or nss_wrapper)"
        ) from None


def require_temporary(options: str) -> None:
    """Raise ConfigurationError if Java cannot write and execute files in its temporary folder: it
    unpacks native libraries there (zstd, snappy, SQLite). `options` are those of the driver."""
    variables = (os.environ.get(name, "") for name in ("JAVA_TOOL_OPTIONS", "JDK_JAVA_OPTIONS"))
    folder = ["/tmp", *_TEMPORARY.findall(" ".join((*variables, options)))][-1]
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.truncate(mmap.PAGESIZE)
            mmap.mmap(file.fileno(), mmap.PAGESIZE, prot=mmap.PROT_READ | mmap.PROT_EXEC).close()
    except OSError as error:
        raise ConfigurationError(
            f"Java's temporary folder {folder}: expected to write and execute files there, found "
            f"{error} (is it mounted noexec?); set spark.driver.extraJavaOptions to "
            "-Djava.io.tmpdir=FOLDER in spark.conf of anabranch.yaml"
        ) from error


_MARK = "# Added by anabranch:"


def spark_home() -> Path:
    """Return the pyspark package, a complete SPARK_HOME. Raises Terminal without pyspark."""
    spec = importlib.util.find_spec("pyspark")
    if spec is None or not spec.submodule_search_locations:
        raise Terminal(
            "pyspark: expected it to be installed, found that it is not; run `make setup` in the "
            "checkout, or install the package again"
        )
    return Path(spec.submodule_search_locations[0])


def configure(jars: Sequence[Path]) -> tuple[Path, ...]:
    """Configure `.venv/bin/spark-submit` to find `jars` and this environment's Python; return the
    files written.

    Without it, the wheel's script uses the first `python3` on the PATH, which has pyspark only in
    an activated environment. Both files belong to this environment alone. Idempotent.
    """
    defaults = spark_home() / "conf" / "spark-defaults.conf"
    defaults.parent.mkdir(exist_ok=True)
    listed = ",".join(str(jar) for jar in jars)
    defaults.write_text(f"{_MARK} 'anabranch jars'.\nspark.jars {listed}\n", encoding="utf-8")
    finder = Path(sys.executable).parent / "find-spark-home"
    if not finder.exists():
        return (defaults,)
    script = finder.read_text(encoding="utf-8")
    if _MARK not in script:
        shebang, _, rest = script.partition("\n")
        ours = (
            'export PYSPARK_PYTHON="${PYSPARK_PYTHON:-$(cd "$(dirname "$0")"; '
            f'pwd)/{Path(sys.executable).name}}}"'
        )
        # Replaced, not written in place: an installer may have hard-linked it to a shared cache.
        part = finder.with_name(finder.name + ".part")
        part.write_text(
            f"{shebang}\n{_MARK} the Python beside this script.\n{ours}\n{rest}", encoding="utf-8"
        )
        part.chmod(finder.stat().st_mode)
        part.replace(finder)
    return (defaults, finder)
