"""A schema registry with Confluent's REST API: Apicurio, with in-memory storage."""

from __future__ import annotations

import hashlib
import json
import signal
import subprocess
import tarfile
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import requests
from maven import retrieve
from servers import serving

from anabranch.common.temporary import locked
from anabranch.dev.services.processes import HOST, free_port
from anabranch.spark.jars import cache_folder
from anabranch.spark.java import require_java

if TYPE_CHECKING:
    from world import Make, World

VERSION = "2.6.13.Final"  # later ones need Java 21
_SHA256 = "3cda1b34aa020fb4ac4dd6a66018d757e81e437f97e20a1f92d366b70091c6ba"
_IVY = f"""<ivy-module version="2.0" xmlns:m="http://ant.apache.org/ivy/maven">
  <info organisation="anabranch" module="tests"/>
  <dependencies>
    <dependency org="io.apicurio" name="apicurio-registry-app" rev="{VERSION}" transitive="false">
      <artifact name="apicurio-registry-app" type="tar.gz" ext="tar.gz" m:classifier="all"/>
    </dependency>
  </dependencies>
</ivy-module>
"""
_READY_SECONDS = 120.0


def ensure_registry() -> Path:
    """Return the registry's jar, which is next to its libraries; downloaded once into the cache."""
    folder = cache_folder() / "bin" / f"apicurio-registry-{VERSION}"
    jar = folder / f"apicurio-registry-app-{VERSION}-runner.jar"
    folder.parent.mkdir(parents=True, exist_ok=True)
    with locked(folder.parent / "apicurio-registry.lock", 900, lambda: None):
        if jar.exists():
            return jar
        with tempfile.TemporaryDirectory(dir=folder.parent) as part:
            retrieve(_IVY, Path(part), "[artifact].[ext]")
            archive = Path(part) / "apicurio-registry-app.tar.gz"
            digest = hashlib.sha256(archive.read_bytes()).hexdigest()
            assert digest == _SHA256, (
                f"apicurio-registry-app {VERSION}: expected sha256 {_SHA256}, found {digest}"
            )
            with tarfile.open(archive) as content:
                content.extractall(Path(part) / "app", filter="data")
            (Path(part) / "app").rename(folder)
    return jar


_API = "/apis/ccompat/v7"


@dataclass
class SchemaRegistry:
    """A running registry. `url`: the value for `registry.url`."""

    port: int
    process: subprocess.Popen[bytes]

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.port}{_API}"

    def register(
        self,
        subject: str,
        schema: Any,
        kind: str = "AVRO",
        references: dict[str, str] | None = None,
    ) -> int:
        """Register a version of a subject that refers to `references`; return the schema's id."""
        body = {
            "schema": schema if isinstance(schema, str) else json.dumps(schema),
            "schemaType": kind,
            "references": [
                {"name": name, "subject": of, "version": 1}
                for name, of in (references or {}).items()
            ],
        }
        answer = requests.post(f"{self.url}/subjects/{subject}/versions", json=body, timeout=30)
        assert answer.status_code == 200, answer.text
        return int(answer.json()["id"])

    def pause(self) -> None:
        """Suspend the registry: it still listens, but does not answer."""
        self.process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        self.process.send_signal(signal.SIGCONT)


@contextmanager
def running_registry(folder: Path) -> Iterator[SchemaRegistry]:
    """Run a new, empty registry within a `with`."""
    jar, port = ensure_registry(), free_port()
    command = [
        str(require_java()), "-Xmx192m", "-XX:TieredStopAtLevel=1", "-Dquarkus.log.level=WARN",
    ]  # fmt: skip
    command += [f"-Dquarkus.http.host={HOST}", f"-Dquarkus.http.port={port}", "-jar", str(jar)]

    def answers() -> bool:
        return requests.get(f"http://{HOST}:{port}{_API}/subjects", timeout=5).status_code == 200

    with serving(command, folder / "registry.log", answers, _READY_SECONDS) as process:
        server = SchemaRegistry(port, process)
        try:
            yield server
        finally:
            server.resume()


def new_avro_stream(make: Make, registry: SchemaRegistry) -> tuple[World, str]:
    """Create a stream of Avro with one column `id`; return it and its subject, still empty."""
    subject = f"avro-{uuid.uuid4().hex}-value"
    one = make(
        registry.url, schema="id STRING NOT NULL", event_time=None, key="id",
        format={"type": "avro", "subject": subject},
    )  # fmt: skip
    one.create()
    return one, subject
