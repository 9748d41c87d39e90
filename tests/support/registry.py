"""A schema registry with Confluent's REST API: Apicurio, with in-memory storage."""

from __future__ import annotations

import json
import signal
import subprocess
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import requests
from maven import cached, retrieve_archive
from servers import answering, serving

from anabranch.dev.services.processes import HOST, free_port
from anabranch.spark.java import require_java

if TYPE_CHECKING:
    from world import Make, World

VERSION = "2.6.13.Final"  # later ones need Java 21
_SHA256 = "3cda1b34aa020fb4ac4dd6a66018d757e81e437f97e20a1f92d366b70091c6ba"
_ARCHIVE = f"""
<dependency org="io.apicurio" name="apicurio-registry-app" rev="{VERSION}" transitive="false">
  <artifact name="apicurio-registry-app" type="tar.gz" ext="tar.gz" m:classifier="all"/>
</dependency>"""
_READY_SECONDS = 120.0


def ensure_registry() -> Path:
    """Return the registry's jar, which is next to its libraries; downloaded once into the cache."""
    name = f"apicurio-registry-{VERSION}"
    folder = cached(name, 900, lambda part: retrieve_archive(_ARCHIVE, _SHA256, part))
    return folder / f"apicurio-registry-app-{VERSION}-runner.jar"


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
        self, subject: str, schema: Any, kind: str = "AVRO", references: Any = None
    ) -> int:
        """Register a version of a subject that refers to `references`; return the schema's id."""
        text, named = schema if isinstance(schema, str) else json.dumps(schema), references or {}
        others = [{"name": name, "subject": of, "version": 1} for name, of in named.items()]
        body = {"schema": text, "schemaType": kind, "references": others}
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
    command = [str(require_java()), "-Xmx192m", "-XX:TieredStopAtLevel=1"]
    command += [
        "-Dquarkus.log.level=WARN",
        f"-Dquarkus.http.host={HOST}",
        f"-Dquarkus.http.port={port}",
        "-jar",
        str(jar),
    ]

    answers = answering(f"http://{HOST}:{port}{_API}/subjects")
    with serving(command, folder / "registry.log", answers, _READY_SECONDS) as process:
        server = SchemaRegistry(port, process)
        try:
            yield server
        finally:
            server.resume()


def new_avro_stream(make: Make, registry: SchemaRegistry) -> tuple[World, str]:
    """Create a stream of Avro with one column `id`; return it and its subject, still empty."""
    subject = f"avro-{uuid.uuid4().hex}-value"
    columns = {"schema": "id STRING NOT NULL", "event_time": None, "key": "id"}
    one = make(registry.url, **columns, format={"type": "avro", "subject": subject})
    one.create()
    return one, subject
