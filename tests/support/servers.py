"""Servers as child processes of a test, and in threads of its own."""

import os
import ssl
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from socketserver import TCPServer

import requests

from anabranch.dev.services.processes import free_port


@contextmanager
def serving(
    command: Sequence[str],
    log: Path,
    answers: Callable[[], bool],
    seconds: float = 60,
    environment: Mapping[str, str] | None = None,
) -> Iterator[subprocess.Popen[bytes]]:
    """Start a server in the folder of its log, wait until it answers, and stop it at the end of the
    `with`.

    `answers` is called until it returns True; an OSError, such as a client's connection error,
    counts as False. `environment` is added to this process's.
    """
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, cwd=log.parent,
            env=os.environ | (environment or {}),
        )  # fmt: skip
    try:
        deadline = time.monotonic() + seconds
        while not _answers(answers):
            text = log.read_text(encoding="utf-8", errors="replace")[-2000:]
            assert process.poll() is None, f"expected {command[0]} to run, it ended:\n{text}"
            late = f"expected an answer within {seconds} s; {log.name} ends:\n{text}"
            assert time.monotonic() < deadline, late
            time.sleep(0.1)
        yield process
    finally:
        process.terminate()
        process.wait(timeout=30)


def answering(url: str) -> Callable[[], bool]:
    """Return what asks a URL whether it answers with 200."""
    return lambda: requests.get(url, timeout=5).status_code == 200


def free_ports(count: int) -> list[int]:
    """Return different free ports."""
    ports: list[int] = []
    for _ in range(count):
        ports.append(free_port(*ports))
    return ports


def _answers(answers: Callable[[], bool]) -> bool:
    try:
        return answers()
    except OSError:
        return False


class QuietHandler(BaseHTTPRequestHandler):
    """Answers with all of a body, and logs nothing."""

    def body(self) -> bytes:
        return self.rfile.read(int(self.headers.get("Content-Length") or 0))

    def answer(self, status: int, body: bytes = b"", **headers: str) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing: the tests see what was asked."""


@contextmanager
def in_threads(server: TCPServer, tls: ssl.SSLContext | None = None) -> Iterator[int]:
    """Run a server in threads of this process within a `with`; provide its port."""
    if tls is not None:
        # The thread of each connection does its handshake.
        later = {"server_side": True, "do_handshake_on_connect": False}
        server.socket = tls.wrap_socket(server.socket, **later)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield server.server_address[1]
    finally:
        server.shutdown()
        with suppress(OSError):
            server.server_close()
        thread.join(30)
