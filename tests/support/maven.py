"""Downloads for tests: from Maven Central, with the Ivy of the pyspark wheel, and into the cache."""

import hashlib
import shutil
from collections.abc import Callable
from pathlib import Path

from programs import output_of

from anabranch.common.temporary import locked
from anabranch.spark.jars import cache_folder
from anabranch.spark.java import require_java, spark_home

_IVY = """<ivy-module version="2.0" xmlns:m="http://ant.apache.org/ivy/maven">
  <info organisation="anabranch" module="{module}"/>
  <configurations><conf name="default"/></configurations>
  <dependencies defaultconf="default->default">{dependencies}</dependencies>
</ivy-module>"""


def cached(name: str, within: float, fill: Callable[[Path], object]) -> Path:
    """Return a file or folder of the cache that `fill` makes once; others wait `within` seconds."""
    made = cache_folder() / "bin" / name
    made.parent.mkdir(parents=True, exist_ok=True)
    with locked(made.parent / f"{name}.lock", within, lambda: None):
        if not made.exists():
            part = made.with_name(f"{name}.part")
            fill(part)
            part.rename(made)
    return made


def require_sha256(file: Path, expected: str) -> None:
    with file.open("rb") as content:
        found = hashlib.file_digest(content, "sha256").hexdigest()
    assert found == expected, f"{file.name}: expected sha256 {expected}, found {found}"


def retrieve_archive(dependencies: str, sha256: str, into: Path, *options: str) -> None:
    """Download one archive into a new folder, and unpack it there with `options` of tar."""
    shutil.rmtree(into, ignore_errors=True)
    retrieve(dependencies, into, "[artifact].[ext]")
    [archive] = into.glob("*.tar.gz")
    require_sha256(archive, sha256)
    output_of("tar", "xzf", archive, "-C", into, *options, seconds=600)
    archive.unlink()


def retrieve(dependencies: str, into: Path, pattern: str) -> None:
    """Download dependencies, as an ivy.xml lists them, into a folder, named by Ivy's pattern."""
    into.mkdir(parents=True, exist_ok=True)
    ivy_xml = _IVY.format(module=into.name, dependencies=dependencies)
    (into / "ivy.xml").write_text(ivy_xml)
    ivy = sorted((spark_home() / "jars").glob("ivy-*.jar"))[-1]
    command = [require_java(), "-jar", ivy, "-cache", cache_folder() / "ivy"]
    command += ["-ivy", into / "ivy.xml", "-retrieve", f"{into}/{pattern}"]
    output_of(*command, seconds=600)
