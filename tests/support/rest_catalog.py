"""The server of Iceberg's REST compatibility kit, with its tables in an SQLite file."""

import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from maven import cached, retrieve
from servers import answering, serving

from anabranch.dev.services.processes import HOST, free_port
from anabranch.spark.jars import differences, ensure_jars
from anabranch.spark.java import require_java, spark_home

VERSION = "1.11.0"  # the newest whose server is on every mirror; the clients are 1.12
_SUMS = Path(__file__).with_name("rest_catalog.sha256")
_JETTY = "12.1.14"
_DEPENDENCIES = f"""
<dependency org="org.apache.iceberg" name="iceberg-open-api" rev="{VERSION}" transitive="false">
  <artifact name="iceberg-open-api" type="jar" ext="jar" m:classifier="test-fixtures"/>
</dependency>
<dependency org="org.apache.iceberg" name="iceberg-core" rev="{VERSION}">
  <artifact name="iceberg-core" type="jar" ext="jar"/>
  <artifact name="iceberg-core" type="jar" ext="jar" m:classifier="tests"/>
</dependency>
<dependency org="org.apache.iceberg" name="iceberg-aws" rev="{VERSION}" transitive="false"/>
<dependency org="org.apache.iceberg" name="iceberg-aws-bundle" rev="{VERSION}" transitive="false"/>
<dependency org="dev.failsafe" name="failsafe" rev="3.3.2" transitive="false"/>
<dependency org="org.eclipse.jetty.ee10" name="jetty-ee10-servlet" rev="{_JETTY}"/>
<dependency org="org.eclipse.jetty.compression" name="jetty-compression-server" rev="{_JETTY}"/>
<dependency org="org.eclipse.jetty.compression" name="jetty-compression-gzip" rev="{_JETTY}"/>"""
_READY_SECONDS = 120.0


def ensure_server() -> Path:
    """Return the folder of the server's jars, loaded once and compared by rest_catalog.sha256."""

    def fill(part: Path) -> None:
        retrieve(_DEPENDENCIES, part, "[artifact]-[revision](-[classifier]).[ext]")
        wrong = differences(_expected(), sums_of(part))
        assert not wrong, f"the jars of {part} are not those of {_SUMS.name}: {'; '.join(wrong)}"

    return cached(f"iceberg-rest-{VERSION}", 900, fill)


def _expected() -> dict[str, str]:
    lines = [line.split("  ") for line in _SUMS.read_text().splitlines()]
    return {name: digest for digest, name in lines}


def sums_of(folder: Path) -> dict[str, str]:
    """Return `{"avro-1.12.1.jar": sha256}` of a folder, as rest_catalog.sha256 has it."""
    jars = sorted(folder.glob("*.jar"))
    return {jar.name: hashlib.sha256(jar.read_bytes()).hexdigest() for jar in jars}


@dataclass
class RestCatalog:
    """A running server. `url`: the value for `catalog.uri`."""

    url: str
    pid: int


@contextmanager
def running_rest_catalog(
    folder: Path, warehouse: str, s3_endpoint: str | None = None
) -> Iterator[RestCatalog]:
    """Run a new catalog within a `with`. Without an endpoint its warehouse is a local folder."""
    ours = ensure_jars().spark
    mine = sorted(ensure_server().glob("*.jar"))
    mine += [jar for jar in ours if jar.name.startswith("sqlite-jdbc")]
    mine += sorted((spark_home() / "jars").glob("hadoop-client-*.jar"))
    port = free_port()
    properties = {
        "REST_PORT": str(port),
        "CATALOG__IMPL": "org.apache.iceberg.jdbc.JdbcCatalog",
        "URI": f"jdbc:sqlite:{folder}/rest.db",
        "JDBC_SCHEMA__VERSION": "V1",
        "WAREHOUSE": warehouse,
    }
    if s3_endpoint is not None:
        properties |= {"IO__IMPL": "org.apache.iceberg.aws.s3.S3FileIO"}
        properties |= {"S3_ENDPOINT": s3_endpoint, "S3_PATH__STYLE__ACCESS": "true"}
        properties |= {"CLIENT_REGION": "us-east-1"}
    command = [str(require_java()), "-Xmx256m", "-XX:TieredStopAtLevel=1"]
    command += ["-cp", os.pathsep.join(map(str, mine)), "org.apache.iceberg.rest.RESTCatalogServer"]
    url = f"http://{HOST}:{port}"

    environment = {f"CATALOG_{key}": value for key, value in properties.items()}
    log, answers = folder / "rest.log", answering(f"{url}/v1/config")
    with serving(command, log, answers, _READY_SECONDS, environment) as process:
        yield RestCatalog(url, process.pid)
