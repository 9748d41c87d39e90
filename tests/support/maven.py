"""Downloads for tests: from Maven Central, with the Ivy of the pyspark wheel, and into the cache."""

from collections.abc import Callable
from pathlib import Path

from programs import output_of

from anabranch.common.temporary import locked
from anabranch.spark.jars import cache_folder
from anabranch.spark.java import require_java, spark_home


def cached(name: str, within: float, fill: Callable[[Path], None]) -> Path:
    """Return a folder of the cache that `fill` fills once; others wait `within` seconds."""
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
    command = [require_java(), "-jar", ivy, "-cache", cache_folder() / "ivy"]
    command += ["-ivy", into / "ivy.xml", "-retrieve", f"{into}/{pattern}"]
    output_of(*command, seconds=600)
