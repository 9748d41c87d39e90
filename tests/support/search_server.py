"""An OpenSearch node: jars from Maven Central, started by a small main, with plain HTTP."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import requests
from maven import cached, retrieve
from servers import serving

from anabranch.dev.services.processes import HOST, free_port
from anabranch.spark.java import require_java

VERSION = "2.19.1"
_IVY = f"""<ivy-module version="2.0">
  <info organisation="anabranch" module="tests-search"/>
  <configurations><conf name="default"/></configurations>
  <dependencies defaultconf="default->default">
    <dependency org="org.opensearch" name="opensearch" rev="{VERSION}"/>
    <dependency org="org.opensearch.plugin" name="transport-netty4-client" rev="{VERSION}"/>
    <dependency org="org.apache.logging.log4j" name="log4j-core" rev="2.21.0" transitive="false"/>
  </dependencies>
</ivy-module>
"""


def ensure_jars() -> Path:
    """Return the folder of the jars, which are downloaded once (45 MB)."""
    return cached(
        f"opensearch-{VERSION}",
        1800,
        lambda part: retrieve(_IVY, part, "[artifact]-[revision].[ext]"),
    )


@contextmanager
def running_search(folder: Path) -> Iterator[str]:
    """Run a node within a `with`, and provide its URL. No request may have more than 64 KB."""
    url = f"http://{HOST}:{(port := free_port())}"
    command = [
        str(require_java()), "-Xmx400m", "-XX:TieredStopAtLevel=1", "-cp", f"{ensure_jars()}/*",
    ]  # fmt: skip
    command += [str(Path(__file__).with_name("Search.java")), str(folder), str(port)]

    def answers() -> bool:
        return requests.get(f"{url}/_cluster/health", timeout=5).status_code == 200

    with serving(command, folder / "search.log", answers, 120):
        yield url
