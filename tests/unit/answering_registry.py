"""An HTTP server that answers as a schema registry, with what a test gives it."""

import json
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

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

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            answering.paths.append(self.path)
            answering.authorization = self.headers.get("Authorization")
            status, body = answering.answers.get(self.path.removeprefix("/api"), NOT_FOUND)
            self.send_response(status)
            self.send_header("Content-Length", str(len(body.encode())))
            self.end_headers()
            self.wfile.write(body.encode())

        def log_message(self, format: str, *args: object) -> None:
            """Log nothing."""

    with ThreadingHTTPServer((HOST, 0), Handler) as http:
        if tls is not None:
            http.socket = tls.wrap_socket(http.socket, server_side=True)
        thread = threading.Thread(target=http.serve_forever, args=(0.01,))
        thread.start()
        answering.url = f"http{'s' * (tls is not None)}://{HOST}:{http.server_address[1]}/api"
        try:
            yield answering
        finally:
            http.shutdown()
            thread.join()
