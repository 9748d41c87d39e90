"""An archive for executors (`spark.archives`) with our code and the packages that its workers
import.

The archive contains no Python. Its `bin/python` runs the executor's own Python of the same minor
version, with the archive's packages first on the path. It works in any folder. Compiled packages
need executors of this machine's platform.
"""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
import tarfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib.metadata import (
    Distribution,
    PackageNotFoundError,
    distribution,
    packages_distributions,
)
from pathlib import Path

from anabranch.common.errors import Terminal
from anabranch.common.version import VERSION
from anabranch.spark.settings import ARCHIVE, CODE, VERSIONS, installed
from anabranch.spark.worker_daemon import MODULES

# Parts of PySpark that executors have in Spark itself.
_OF_SPARK = tuple(
    f"pyspark/{name}/" for name in ("jars", "bin", "sbin", "examples", "data", "licenses", "python")
)
_IMPORTED = (
    "import json, sys, pyspark.daemon, pyspark.worker\n"
    f"import {', '.join(MODULES)}\n"
    "from anabranch.spark.settings import installed\n"
    "installed()\n"
    "print(json.dumps(sorted({name.partition('.')[0] for name in sys.modules})))"
)
_PYTHON = """#!/bin/sh
# The machine's Python {version} with the packages beside this file. ANABRANCH_PYTHON names
# another one.
here=$(cd "$(dirname "$0")/.." && pwd)
PYTHONPATH="$here/lib${{PYTHONPATH:+:$PYTHONPATH}}"
export PYTHONPATH
exec "${{ANABRANCH_PYTHON:-python{version}}}" "$@"
"""


@dataclass(frozen=True)
class Packed:
    file: Path
    conf: dict[str, str]


def python_version() -> str:
    """Return the Python version that executors need, as `major.minor`."""
    return f"{sys.version_info.major}.{sys.version_info.minor}"


def pack(folder: Path) -> Packed:
    """Write the archive to `folder`, replacing another. Raises Terminal and OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder.resolve() / f"{ARCHIVE}-{VERSION}-python{python_version()}.tar.gz"
    new = file.with_suffix(f".{os.getpid()}")
    try:
        with tarfile.open(new, "w:gz", compresslevel=3) as archive:
            _add_text(archive, VERSIONS, json.dumps(installed()))
            _add_text(archive, "bin/python", _PYTHON.format(version=python_version()))
            for source, name in sorted(_files(), key=lambda entry: entry[1]):
                archive.add(source, f"lib/{name}", recursive=False)
        new.replace(file)
    finally:
        new.unlink(missing_ok=True)
    return Packed(
        file,
        {"spark.archives": f"{file}#{ARCHIVE}", "spark.pyspark.python": f"./{ARCHIVE}/bin/python"},
    )


def _files() -> Iterator[tuple[Path, str]]:
    root = Path(__file__).parents[1]
    for package in CODE:
        for path in (root / package).rglob("*"):
            if path.is_file() and "__pycache__" not in path.parts:
                yield path, path.relative_to(root).as_posix()
    for found in needed():
        for file in found.files or ():
            name, path = file.as_posix(), Path(str(file.locate()))
            if (
                name.startswith((*_OF_SPARK, ".."))
                or "__pycache__" in file.parts
                or not path.is_file()
            ):
                continue
            yield path, name


def needed() -> list[Distribution]:
    """Return the distributions that workers import, and their requirements. Raises Terminal."""
    command = [sys.executable, "-c", _IMPORTED]
    run = subprocess.run(command, capture_output=True, text=True, timeout=120)
    if run.returncode:
        raise Terminal(
            f"pack: expected our modules to be importable by {sys.executable}, found: "
            f"{run.stderr.strip()[-500:]}"
        )
    by_module = packages_distributions()
    roots = {name for module in json.loads(run.stdout) for name in by_module.get(module, ())}
    return _with_requirements(roots - {"anabranch"})


def _with_requirements(names: Iterable[str]) -> list[Distribution]:
    found: dict[str, Distribution] = {}
    waiting = list(names)
    while waiting:
        name = waiting.pop().lower().replace("_", "-")
        if name in found:
            continue
        try:
            one = distribution(name)
        except PackageNotFoundError:
            continue  # for another platform or Python
        found[name] = one
        waiting += [_name_of(text) for text in one.requires or () if "extra ==" not in text]
    return [one for _, one in sorted(found.items())]


def _name_of(requirement: str) -> str:
    """Return the name in a requirement such as `click<9,>=7; python_version > "3"`. Pure."""
    return re.split(r"[^\w.-]", requirement, maxsplit=1)[0]


def _add_text(archive: tarfile.TarFile, name: str, text: str) -> None:
    content = text.encode()
    entry = tarfile.TarInfo(name)
    entry.size, entry.mode = len(content), 0o755
    archive.addfile(entry, io.BytesIO(content))
