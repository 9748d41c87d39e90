"""A TLS proxy of a search engine that requires an API key and simulates load.

It answers the first bulk request with 429. It forwards half of the second, and answers 429 for the
other items. It forwards the third, and loses the response. It forwards later ones unchanged.
"""

import json
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any

import requests
import trustme
from servers import QuietHandler, in_threads

from anabranch.dev.services.processes import HOST

_BUSY = {
    "type": "rejected_execution_exception",
    "reason": "rejected execution of coordinating operation",
}


@dataclass
class SearchFront:
    """A proxy: its URL, its authority's file, and what it `did` to bulk requests, in order."""

    upstream: str
    key: str
    ca: str
    url: str = ""
    did: list[str] = field(default_factory=list)


class _Handler(QuietHandler):
    protocol_version = "HTTP/1.1"
    front: SearchFront

    def _serve(self) -> None:
        body = self.body()
        if self.headers.get("Authorization") != f"ApiKey {self.front.key}":
            return self._answer(401, {"error": {"type": "security_exception"}, "status": 401})
        if not self.path.endswith("/_bulk"):
            return self._answer(*self._ask(body))
        faults = ("refused", "halved", "lost")
        self.front.did.append(
            faults[len(self.front.did)] if len(self.front.did) < len(faults) else "answered"
        )
        done = self.front.did[-1]
        if done == "refused":
            return self._answer(429, {"error": _BUSY, "status": 429})
        if done == "halved":
            return self._answer(*self._half(body))
        status, answer = self._ask(body)
        if done == "lost":
            self.close_connection = True
            return None
        return self._answer(status, answer)

    def _half(self, body: bytes) -> tuple[int, Any]:
        """Forward every second document; all actions are `index`, of two lines each."""
        lines = body.splitlines(keepends=True)
        actions = [b"".join(lines[i : i + 2]) for i in range(0, len(lines), 2)]
        status, answer = self._ask(b"".join(actions[::2]))
        items, taken = [], iter(answer["items"])
        for i, action in enumerate(actions):
            id_ = json.loads(action.splitlines()[0])["index"]["_id"]
            busy = {"index": {"_id": id_, "status": 429, "error": _BUSY}}
            items.append(busy if i % 2 else next(taken))
        return status, answer | {"items": items, "errors": True}

    def _ask(self, body: bytes) -> tuple[int, Any]:
        headers = (
            {"Content-Type": self.headers["Content-Type"]} if "Content-Type" in self.headers else {}
        )
        answer = requests.request(
            self.command, self.front.upstream + self.path, data=body, headers=headers, timeout=60
        )
        return answer.status_code, answer.json()

    def _answer(self, status: int, answer: Any) -> None:
        self.answer(status, json.dumps(answer).encode(), Content_Type="application/json")

    do_GET = do_POST = _serve


@contextmanager
def running_search_front(upstream: str, key: str, folder: Path) -> Iterator[SearchFront]:
    """Run a proxy on a free port within a `with`."""
    authority = trustme.CA()
    authority.cert_pem.write_to_path(str(folder / "ca.pem"))
    front = SearchFront(upstream, key, str(folder / "ca.pem"))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert(HOST).configure_cert(context)
    handler = type("Handler", (_Handler,), {"front": front})
    with in_threads(ThreadingHTTPServer((HOST, 0), handler), context) as port:
        front.url = f"https://{HOST}:{port}"
        yield front
