"""An OpenSearch node: jars from Maven Central, started by a small main, with plain HTTP."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from maven import cached, retrieve
from servers import answering, serving

from anabranch.dev.services.processes import HOST, free_port
from anabranch.spark.java import require_java

VERSION = "2.19.1"
_DEPENDENCIES = f"""
<dependency org="org.opensearch" name="opensearch" rev="{VERSION}"/>
<dependency org="org.opensearch.plugin" name="transport-netty4-client" rev="{VERSION}"/>
<dependency org="org.apache.logging.log4j" name="log4j-core" rev="2.21.0" transitive="false"/>"""


def ensure_jars() -> Path:
    """Return the folder of the jars, which are downloaded once (45 MB)."""

    def fill(part: Path) -> None:
        retrieve(_DEPENDENCIES, part, "[artifact]-[revision].[ext]")

    return cached(f"opensearch-{VERSION}", 1800, fill)


@contextmanager
def running_search(folder: Path) -> Iterator[str]:
    """Run a node within a `with`, and provide its URL. No request may have more than 64 KB."""
    url = f"http://{HOST}:{(port := free_port())}"
    command = [str(require_java()), "-Xmx400m", "-XX:TieredStopAtLevel=1"]
    command += [
        "-cp",
        f"{ensure_jars()}/*",
        str(Path(__file__).with_name("Search.java")),
        str(folder),
        str(port),
    ]

    with serving(command, folder / "search.log", answering(f"{url}/_cluster/health"), 120):
        yield url
