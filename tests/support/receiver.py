"""A receiver of webhooks: an HTTP server that stores its messages, and fails on request."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class Receiver:
    """A receiver. `mode`: `takes`, the status of an error, `silent` (no response) or `drips` (a byte
    of the response now and then); `takes` for the first `after` messages. `taken`: the bodies that
    were answered with 200. `headers`: those of all requests."""

    def __init__(self) -> None:
        self.mode: str | int = "takes"
        self.after: int | None = None
        self.taken: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.over = threading.Event()
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                receiver.headers.append(dict(self.headers.items()))
                mode = receiver.mode
                if receiver.after is not None and len(receiver.taken) < receiver.after:
                    mode = "takes"
                if mode == "takes":
                    receiver.taken.append(body)
                    self.send_response(200)
                    self.end_headers()
                elif isinstance(mode, int):
                    self.send_response(mode)
                    if mode in (301, 307):
                        self.send_header("Location", receiver.url)
                    self.end_headers()
                else:
                    self._never_done(mode)

            def _never_done(self, mode: str) -> None:
                try:
                    while not receiver.over.wait(0.02):
                        if mode == "drips":
                            self.wfile.write(b"H")
                            self.wfile.flush()
                except OSError:
                    pass
                self.close_connection = True

            def log_message(self, *_: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}/hooks/secret-part"

    @contextmanager
    def serving(self) -> Iterator[Receiver]:
        thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True)
        thread.start()
        try:
            yield self
        finally:
            self.over.set()
            self._server.shutdown()
            self._server.server_close()
            thread.join()


def closed_port() -> int:
    """Return a port without a listener."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])
