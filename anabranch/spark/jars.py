"""The jars: conf/jvm/ivy.xml pins them, conf/jvm/jars.sha256 has their checksums, one cache keeps
them.

The pyspark wheel has no Kafka, Iceberg or S3 jar, but it ships Ivy, so resolving needs only Java
and the wheel. The cache (`~/.cache/anabranch`, or ANABRANCH_CACHE) has one folder for each content
of the two files, so checkouts with different versions do not share a folder. Its subfolders are the
configurations of ivy.xml: the jobs' is that of the installed Spark. A folder that exists is
complete: it is renamed into place once every jar has its expected checksum.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from anabranch.common.errors import ConfigurationError, Terminal, Transient
from anabranch.common.retry import attempts, doubling
from anabranch.common.temporary import locked
from anabranch.common.version import shipped
from anabranch.spark.java import configure, require_java, spark_home

_ALL = ("spark", "spark40", "broker", "s3")


def _of_jobs() -> str:
    """Return the conf of the installed Spark."""
    try:
        return "spark40" if version("pyspark").startswith("4.0.") else "spark"
    except PackageNotFoundError:
        return "spark"  # `spark_home` names what is missing.


# The confs that both jobs need. The development services use the others.
JOBS = (_of_jobs(),)
CONFS = (*JOBS, "broker", "s3")
ATTEMPTS = 4
_FIRST_PAUSE = 2.0
_WRITE_SUMS = "run `anabranch jars --write-sums` to rewrite the file, and review the change"
# Resolving takes minutes on a slow network; a waiting process waits for all attempts.
_LOCK_SECONDS = 3600.0
_IVY_EVENT = re.compile(r"^\s*(found|\[SUCCESSFUL \])\s+(\S+)")

Progress = Callable[[str], None]


@dataclass(frozen=True)
class Jars:
    """The class paths of three JVMs, each in a fixed order. `spark`: of the installed Spark."""

    folder: Path
    spark: tuple[Path, ...]
    broker: tuple[Path, ...]
    s3: tuple[Path, ...]


def jvm_folder() -> Path:
    """Return conf/jvm of the checkout that runs this code, else the wheel's copy."""
    return shipped("conf/jvm/ivy.xml", "_conf/jvm/ivy.xml").parent


def cache_folder() -> Path:
    """Return the cache's folder: ANABRANCH_CACHE, else ~/.cache/anabranch. Raises
    ConfigurationError for a user without a home folder."""
    try:
        return Path(
            os.environ.get("ANABRANCH_CACHE") or Path.home() / ".cache" / "anabranch"
        ).absolute()
    except RuntimeError as error:
        raise ConfigurationError(
            f"cache: expected a home folder of user id {os.getuid()}, found none; set "
            "ANABRANCH_CACHE or HOME to a folder"
        ) from error


def read_sums(file: Path) -> dict[str, str]:
    """Return `{"spark/kafka-clients-3.9.1.jar": sha256}` from lines in sha256sum's format. Raises
    Terminal for any other line."""
    sums: dict[str, str] = {}
    for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), start=1):
        if not line.strip() or line.startswith("#"):
            continue
        digest, _, name = line.partition("  ")
        if not re.fullmatch(r"[0-9a-f]{64}", digest) or not re.fullmatch(
            rf"({'|'.join(_ALL)})/[^/\s]+\.jar", name
        ):
            raise Terminal(
                f"{file}, line {number}: expected 'sha256  conf/artifact-revision.jar', found "
                f"{line!r}; {_WRITE_SUMS}"
            )
        if name in sums:
            raise Terminal(
                f"{file}, line {number}: expected each jar once, found {name} again; {_WRITE_SUMS}"
            )
        sums[name] = digest
    return sums


def sums_of(folder: Path, confs: Sequence[str] = CONFS) -> dict[str, str]:
    """Return the checksums of a resolved folder's jars of `confs`, in the form of `read_sums`."""
    sums = {}
    for name in sorted(_select_confs(_names(folder), confs)):
        with (folder / name).open("rb") as jar:
            sums[name] = hashlib.file_digest(jar, "sha256").hexdigest()
    return sums


def differences(expected: Mapping[str, str], actual: Mapping[str, str]) -> list[str]:
    """Return a sentence for each jar that is missing, extra or different. Pure."""
    sentences = []
    for name in sorted(expected.keys() | actual.keys()):
        want, have = expected.get(name), actual.get(name)
        if have is None:
            sentences.append(f"{name} is missing (expected sha256 {want})")
        elif want is None:
            sentences.append(f"{name} is not listed (found sha256 {have})")
        elif want != have:
            sentences.append(f"{name}: expected sha256 {want}, found {have}")
    return sentences


def verify(folder: Path, sums: Path, confs: Sequence[str] = CONFS) -> None:
    """Raise Terminal, naming each jar, unless `folder`'s jars of `confs` are exactly those that
    `sums` lists, byte for byte."""
    wrong = differences(_select_confs(read_sums(sums), confs), sums_of(folder, confs))
    if wrong:
        raise Terminal(
            f"jars in {folder}: expected those of {sums}, found others: {'; '.join(wrong)}. If "
            "ivy.xml was changed on purpose, run `anabranch jars --write-sums` and review the "
            f"change. If not, the download was altered: delete the cache {folder.parent.parent} "
            "and run `anabranch jars` again"
        )


def ensure_jars(progress: Progress = lambda _: None, confs: Sequence[str] = CONFS) -> Jars:
    """Return the cache's jars; download missing jars of `confs` first (200 MB, minutes; reported to
    `progress`).

    Processes may call it at once: one resolves, the others wait. Raises ConfigurationError if Java
    is missing, Terminal if a jar differs from jars.sha256, and Transient if the download failed
    four times.
    """
    conf = jvm_folder()
    root = cache_folder() / "jars"
    folder = root / _key(conf)
    expected = read_sums(conf / "jars.sha256")
    if _missing(folder, expected, confs):
        java = require_java()
        root.mkdir(parents=True, exist_ok=True)
        with locked(
            root / f"{folder.name}.lock",
            _LOCK_SECONDS,
            lambda: progress("another process resolves the jars"),
        ):
            # Checked again: the process that held the lock may have resolved them.
            if missing := _missing(folder, expected, confs):
                _resolve(java, conf, folder, missing, progress)
    return Jars(folder, *(tuple(sorted((folder / name).glob("*.jar"))) for name in CONFS))


def cached() -> tuple[Path, list[str]]:
    """Return the folder of the jobs' jars, and a sentence for each jar that is missing, extra or
    different. Downloads nothing and needs no Java. Reads every jar, in a quarter of a second."""
    conf = jvm_folder()
    folder = cache_folder() / "jars" / _key(conf)
    return folder, differences(
        _select_confs(read_sums(conf / "jars.sha256"), JOBS), sums_of(folder, JOBS)
    )


def _resolve(
    java: Path, conf: Path, folder: Path, confs: Sequence[str], progress: Progress
) -> None:
    """Retrieve into a temporary folder (step 1), verify it (2), rename its folders (3)."""
    attempt = folder.with_name(folder.name + ".part")
    for leftover in (attempt, *(folder / name for name in confs)):
        if leftover.exists():
            progress(f"{leftover} is incomplete and is resolved again")
            shutil.rmtree(leftover)
    sums = conf / "jars.sha256"
    total = len(_select_confs(read_sums(sums), confs))
    # Step 1
    _retrieve(java, conf / "ivy.xml", folder.parent.parent / "ivy", attempt, total, progress, confs)
    # Step 2: a folder that fails stays for inspection; the next run removes it.
    verify(attempt, sums, confs)
    # Step 3
    folder.mkdir(exist_ok=True)
    for name in confs:
        (attempt / name).rename(folder / name)
    attempt.rmdir()
    progress(f"{total} jars resolved and verified")


def _retrieve(
    java: Path,
    ivy_xml: Path,
    ivy_cache: Path,
    into: Path,
    total: int,
    progress: Progress,
    confs: Sequence[str] = CONFS,
) -> None:
    """Run Ivy until it succeeds, at most ATTEMPTS times. Ivy's own cache keeps downloaded files for
    the next attempt. Raises Terminal without Ivy, Transient after the last attempt."""
    ivy_jars = sorted((spark_home() / "jars").glob("ivy-*.jar"))
    if not ivy_jars:
        raise Terminal(
            f"jars: expected an ivy-*.jar in {spark_home() / 'jars'}, found none; install pyspark "
            "again"
        )
    # By default, Java waits without limit for a silent server.
    timeouts = [
        "-Dsun.net.client.defaultConnectTimeout=20000",
        "-Dsun.net.client.defaultReadTimeout=60000",
    ]
    command = [
        str(java),
        "-Xmx256m",
        *timeouts,
        "-jar",
        str(ivy_jars[-1]),
        "-cache",
        str(ivy_cache),
    ]
    command += ["-ivy", str(ivy_xml), "-confs", *confs]
    command += ["-retrieve", f"{into}/[conf]/[artifact]-[revision].[ext]"]
    for number in attempts(doubling(_FIRST_PAUSE), at_most=ATTEMPTS):
        progress(f"resolving {total} jars (once; 200 MB, some minutes on a slow network)")
        tail = _run_ivy(command, total, progress)
        if tail is None:
            return
        if number < ATTEMPTS:
            pause = _FIRST_PAUSE * 2 ** (number - 1)
            progress(
                f"download failed: {tail[-1] if tail else 'no message'}; next try in {pause:.0f} s"
            )
    raise Transient(
        f"jars of {ivy_xml}: expected to download them in {ATTEMPTS} attempts, found that the "
        "last one failed too; check the network, then run `anabranch jars` again: downloaded "
        "files are kept. Ivy's last lines:\n  " + "\n  ".join(tail or [])
    )


def _run_ivy(command: list[str], total: int, progress: Progress) -> list[str] | None:
    """Run Ivy; return None if it succeeded, else at most eight output lines with the reason."""
    lines: list[str] = []
    resolved = downloaded = 0
    reported_at = time.monotonic()
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        assert process.stdout is not None
        try:
            for line in process.stdout:
                lines.append(line.rstrip())
                if event := _IVY_EVENT.match(line):
                    resolved += event.group(1) == "found"
                    downloaded += event.group(1) != "found" and "!" in event.group(2)
                    if time.monotonic() - reported_at >= 2:
                        reported_at = time.monotonic()
                        progress(f"{resolved} of about {total} jars found, {downloaded} downloaded")
        except BaseException:
            process.kill()
            raise
    if process.returncode == 0:
        return None
    reasons = [
        line.strip()
        for line in lines
        if re.search(r"FAILED|[Ee]rror|[Ee]xception|not found|failed", line)
    ]
    return (reasons or [line.strip() for line in lines])[-8:]


def _key(conf: Path) -> str:
    content = b"".join((conf / name).read_bytes() for name in ("ivy.xml", "jars.sha256"))
    return hashlib.sha256(content).hexdigest()[:16]


def _names(folder: Path) -> dict[str, str]:
    """Return the names of a folder's non-empty jars, as `read_sums` without checksums."""
    found = (jar for jar in folder.glob("*/*.jar") if jar.stat().st_size > 0)
    return {f"{jar.parent.name}/{jar.name}": "" for jar in found}


def _select_confs(sums: Mapping[str, str], confs: Sequence[str]) -> dict[str, str]:
    return {name: digest for name, digest in sums.items() if name.partition("/")[0] in confs}


def _missing(folder: Path, expected: Mapping[str, str], confs: Sequence[str]) -> list[str]:
    """Return the confs whose jars in the folder are not exactly the listed ones, by name."""
    found = _names(folder)
    return [
        conf
        for conf in confs
        if _select_confs(found, [conf]).keys() != _select_confs(expected, [conf]).keys()
    ]


def _write_sums(progress: Progress) -> Path:
    """Resolve ivy.xml and write the jars' checksums, for a developer who changes a version."""
    conf = jvm_folder()
    root = cache_folder() / "jars"
    root.mkdir(parents=True, exist_ok=True)
    with locked(root / "write-sums.lock", _LOCK_SECONDS):
        folder = root / "write-sums.part"
        if folder.exists():
            shutil.rmtree(folder)
        known = len(read_sums(conf / "jars.sha256"))
        ivy = root.parent / "ivy"
        _retrieve(require_java(), conf / "ivy.xml", ivy, folder, known, progress, _ALL)
        file = conf / "jars.sha256"
        head = [
            line for line in file.read_text(encoding="utf-8").splitlines() if line.startswith("#")
        ]
        body = [f"{digest}  {name}" for name, digest in sums_of(folder, _ALL).items()]
        file.write_text("\n".join(head + body) + "\n", encoding="utf-8")
        shutil.rmtree(folder)
    return file


def resolve(
    let_submit_find: bool,
    write_sums: bool,
    progress: Progress,
    confs: Sequence[str] = CONFS,
) -> Jars:
    """Run `anabranch jars`. Raises ConfigurationError, Terminal, Transient."""
    if write_sums:
        progress(f"wrote {_write_sums(progress)}")
    jars = ensure_jars(progress=progress, confs=confs)
    if let_submit_find:
        for file in configure(jars.spark):
            progress(f"wrote {file}")
    return jars
