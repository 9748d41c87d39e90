"""An HTTP server that answers as a schema registry, with what a test gives it."""

import json
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import ThreadingHTTPServer

from servers import QuietHandler, in_threads

from anabranch import config
from anabranch.dev.services.processes import HOST
from anabranch.kafka.schema_registry import SchemaRegistryClient

NOT_FOUND = (404, json.dumps({"error_code": 40403, "message": "Schema 7 not found"}))


@dataclass
class Answering:
    """The server's answers by path, and the requests that it received."""

    url: str = ""
    answers: dict[str, tuple[int, str]] = field(default_factory=dict)
    paths: list[str] = field(default_factory=list)
    authorization: str | None = None

    def registry(self, **settings: str) -> SchemaRegistryClient:
        return SchemaRegistryClient(config.Registry.model_validate({"url": self.url, **settings}))


@contextmanager
def answering_registry(tls: ssl.SSLContext | None = None) -> Iterator[Answering]:
    answering = Answering()

    class Handler(QuietHandler):
        def do_GET(self) -> None:
            answering.paths.append(self.path)
            answering.authorization = self.headers.get("Authorization")
            status, body = answering.answers.get(self.path.removeprefix("/api"), NOT_FOUND)
            self.answer(status, body.encode())

    with in_threads(ThreadingHTTPServer((HOST, 0), Handler), tls) as port:
        answering.url = f"http{'s' * (tls is not None)}://{HOST}:{port}/api"
        yield answering
