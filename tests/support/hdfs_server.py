"""HDFS: Hadoop's MiniDFSCluster from Maven Central, a NameNode and a DataNode in one JVM."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import requests
from maven import cached, retrieve
from servers import serving

from anabranch.dev.services.processes import HOST, free_port
from anabranch.spark.home import spark_home
from anabranch.spark.java import require_java

VERSION = "3.4.2"
# The cluster, and classes that Java's library no longer has. Spark's folder has the other
# dependencies, in this version.
_IVY = f"""<ivy-module version="2.0">
  <info organisation="anabranch" module="tests-hdfs"/>
  <configurations><conf name="default"/></configurations>
  <dependencies defaultconf="default->default">
    <dependency org="org.apache.hadoop" name="hadoop-client-minicluster" rev="{VERSION}" transitive="false"/>
    <dependency org="javax.xml.bind" name="jaxb-api" rev="2.3.1" transitive="false"/>
    <dependency org="javax.activation" name="javax.activation-api" rev="1.2.0" transitive="false"/>
    <dependency org="org.bouncycastle" name="bcpkix-jdk18on" rev="1.78.1"/>
  </dependencies>
</ivy-module>
"""
_OF_SPARK = (
    "hadoop-client-*.jar",
    "slf4j-api-*.jar",
    "jcl-over-slf4j-*.jar",
    "log4j-*.jar",
    "javax.servlet-api-*.jar",
)


def ensure_jars() -> Path:
    """Return the folder of the jars, which are downloaded once (40 MB)."""
    return cached(
        f"hadoop-{VERSION}",
        1800,
        lambda part: retrieve(_IVY, part, "[artifact]-[revision].[ext]"),
    )


def class_path() -> list[Path]:
    """Return Hadoop's jars, and their dependencies in Spark's folder."""
    return [
        *ensure_jars().glob("*.jar"),
        *(j for name in _OF_SPARK for j in (spark_home() / "jars").glob(name)),
    ]


@contextmanager
def running_hdfs(folder: Path) -> Iterator[str]:
    """Run HDFS within a `with`, and provide the URL of the NameNode."""
    url = f"http://{HOST}:{(port := free_port())}"
    jars = ":".join(map(str, class_path()))
    command = [str(require_java()), "-Xmx400m", "-XX:TieredStopAtLevel=1", "-cp", jars]
    command += [str(Path(__file__).with_name("Hdfs.java")), str(folder), str(port)]

    def answers() -> bool:
        return requests.get(f"{url}/webhdfs/v1/?op=LISTSTATUS", timeout=30).status_code == 200

    with serving(command, folder / "hdfs.log", answers, 120):
        yield url
