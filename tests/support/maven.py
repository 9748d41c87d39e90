"""Downloads for tests: from Maven Central, with the Ivy of the pyspark wheel, and into the cache."""

import subprocess
from collections.abc import Callable
from pathlib import Path

from anabranch.common.temporary import locked
from anabranch.spark.jars import cache_folder
from anabranch.spark.java import require_java, spark_home


def cached(name: str, within: float, fill: Callable[[Path], None]) -> Path:
    """Return a folder of the cache, which `fill` fills once; other processes wait for it `within`
    these seconds."""
    folder = cache_folder() / "bin" / name
    folder.parent.mkdir(parents=True, exist_ok=True)
    with locked(folder.parent / f"{name}.lock", within, lambda: None):
        if not folder.exists():
            part = folder.with_name(folder.name + ".part")
            fill(part)
            part.rename(folder)
    return folder


def retrieve(ivy_xml: str, into: Path, pattern: str) -> None:
    """Download the dependencies of an ivy.xml into a folder, named by Ivy's pattern."""
    into.mkdir(parents=True, exist_ok=True)
    (into / "ivy.xml").write_text(ivy_xml)
    ivy = sorted((spark_home() / "jars").glob("ivy-*.jar"))[-1]
    command = [str(require_java()), "-jar", str(ivy), "-cache", str(cache_folder() / "ivy")]
    command += ["-ivy", str(into / "ivy.xml"), "-retrieve", f"{into}/{pattern}"]
    resolved = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert resolved.returncode == 0, resolved.stdout[-2000:]
