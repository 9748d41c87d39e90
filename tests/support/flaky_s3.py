"""A proxy of S3 that fails as object stores do: 500, 503 SlowDown, no response, or a lost response.
Seeded. It can also refuse expired session tokens.

It is a reverse proxy that changes nothing, not even the Host header, so that signatures stay valid.
"""

import http.client
import random
import ssl
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from http.server import ThreadingHTTPServer
from typing import Literal

from servers import QuietHandler, in_threads

from anabranch.dev.services.processes import HOST

Fault = Literal["500", "503", "silence", "lost"]

_HEAD = '<?xml version="1.0" encoding="UTF-8"?>'
_ERRORS = {
    status: f"{_HEAD}<Error><Code>{code}</Code><Message>{text}</Message></Error>"
    for status, code, text in (
        ("500", "InternalError", "We encountered an internal error. Please try again."),
        ("503", "SlowDown", "Please reduce your request rate."),
        ("400", "ExpiredToken", "The provided token has expired."),
        ("403", "AccessDenied", "Access Denied"),
        ("405", "MethodNotAllowed", "The specified method is not allowed against this resource."),
    )
}
_SILENCE_SECONDS = 15.0  # longer than the timeout of any client of Anabranch


@dataclass
class FlakyS3:
    """The settings and counters of a proxy. `faults`: probability of each fault per request whose
    key ends in `ending`. Tokens in `expired` are refused. `refuse`: returns the status with which a
    request is refused, by method, path and token; None to serve it.

    Requests are counted by outcome (`counts`), by method (`methods`), by method and kind of file
    such as `parquet` or `metadata.json` (`kinds`), and by session token and client such as `Boto3`,
    `aws-sdk-cpp` or `s3fileio` (`tokens`). `connections`: their number by client.
    """

    upstream_port: int
    seed: int
    port: int = 0
    faults: Mapping[Fault, float] = field(default_factory=dict)
    ending: str = ""
    counts: Counter[str] = field(default_factory=Counter)
    methods: Counter[str] = field(default_factory=Counter)
    kinds: Counter[tuple[str, str]] = field(default_factory=Counter)
    tokens: Counter[tuple[str, str]] = field(default_factory=Counter)
    expired: set[str] = field(default_factory=set)
    connections: Counter[str] = field(default_factory=Counter)
    refuse: Callable[[str, str, str], str | None] = lambda *_: None

    def __post_init__(self) -> None:
        self._chance = random.Random(self.seed)
        self._lock = threading.Lock()
        self.ended = threading.Event()

    def draw(self, path: str) -> Fault | None:
        """Draw and count the fault of the next request; None for none."""
        with self._lock:
            number = self._chance.random()
            chosen: Fault | None = None
            concerned = path.partition("?")[0].endswith(self.ending)
            for fault, probability in (self.faults if concerned else {}).items():
                if number < probability:
                    chosen = fault
                    break
                number -= probability
            self.counts[chosen or "answered"] += 1
            return chosen

    @property
    def failed(self) -> int:
        """The number of requests with a fault or an expired token."""
        return sum(n for fault, n in self.counts.items() if fault != "answered")


class Handler(QuietHandler):
    protocol_version = "HTTP/1.1"
    # Otherwise head and body of a response are two segments, and the second waits 40 ms for the ACK
    # of the first.
    disable_nagle_algorithm = True
    front: FlakyS3
    is_known = False
    dropped = frozenset({"expect", "connection", "transfer-encoding", "content-length"})

    def _serve(self) -> None:
        body = self._body()
        self.front.methods[self.command] += 1
        name = self.path.partition("?")[0].rpartition("/")[2]
        self.front.kinds[self.command, name.partition(".")[2]] += 1
        token = self.headers.get("x-amz-security-token", "")
        client = self.headers.get("User-Agent", "").partition("/")[0]
        self.front.tokens[token, client] += 1
        if not self.is_known:
            self.is_known = True
            self.front.connections[client] += 1
        refused = "400" if token in self.front.expired else None
        if refused is None:
            refused = self.front.refuse(self.command, self.path, token)
        if refused is not None:
            self.front.counts["expired" if refused == "400" else refused] += 1
            headers = [("Content-Type", "application/xml"), ("Date", self.date_time_string())]
            self._answer(int(refused), headers, _ERRORS[refused].encode())
            return
        fault = self.front.draw(self.path)
        if fault == "silence":
            self.front.ended.wait(_SILENCE_SECONDS)
            self.close_connection = True
            return
        if fault in ("500", "503"):
            self._answer(int(fault), [("Content-Type", "application/xml")], _ERRORS[fault].encode())
            return
        response, content = self.forward(body)
        if fault == "lost":
            self.close_connection = True
            return
        own = {"connection", "transfer-encoding"}
        own |= {"content-length"} if self.command != "HEAD" else set()
        kept = [(n, v) for n, v in response.getheaders() if n.lower() not in own]
        self._answer(response.status, kept, content)

    def forward(self, body: bytes) -> tuple[http.client.HTTPResponse, bytes]:
        """Send the request to the server behind; return the response and its content."""
        upstream = http.client.HTTPConnection(HOST, self.front.upstream_port, timeout=60)
        try:
            upstream.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
            for name, value in self.headers.items():
                if name.lower() not in self.dropped:
                    upstream.putheader(name, value)
            if body or self.command in ("PUT", "POST"):
                upstream.putheader("Content-Length", str(len(body)))
            upstream.endheaders(body or None)
            response = upstream.getresponse()
            return response, response.read()
        finally:
            upstream.close()

    def _answer(self, status: int, headers: list[tuple[str, str]], content: bytes) -> None:
        self.send_response_only(status)
        for name, value in headers:
            self.send_header(name, value)
        if self.command != "HEAD" and status != 204:
            self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def _body(self) -> bytes:
        if "chunked" in self.headers.get("Transfer-Encoding", ""):
            parts = []
            while size := int(self.rfile.readline().split(b";")[0], 16):
                parts.append(self.rfile.read(size))
                self.rfile.readline()
            self.rfile.readline()
            return b"".join(parts)
        return self.rfile.read(int(self.headers.get("Content-Length") or 0))

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = _serve


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def handle_error(self, request: object, client_address: object) -> None:
        """Ignore errors: this server makes clients give up."""


@contextmanager
def running_flaky_s3(
    upstream_port: int, seed: int, tls: ssl.SSLContext | None = None
) -> Iterator[FlakyS3]:
    """Run a proxy on a free port within a `with`; without faults until the caller sets some."""
    front = FlakyS3(upstream_port, seed)
    with serving(type("Handler", (Handler,), {"front": front}), tls) as front.port:
        try:
            yield front
        finally:
            front.ended.set()


def serving(
    handler: type[Handler], tls: ssl.SSLContext | None = None
) -> AbstractContextManager[int]:
    """Run a proxy on a free port within a `with`; provide the port."""
    return in_threads(_Server((HOST, 0), handler), tls)
