"""A TLS proxy of a search engine that requires an API key and simulates load.

It answers the first bulk request with 429. It forwards half of the second, and answers 429 for the
other items. It forwards the third, and loses the response. It forwards later ones unchanged.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any

import requests
from authority import new_authority
from servers import QuietHandler, in_threads

from anabranch.dev.services.processes import HOST

_REASON = "rejected execution of coordinating operation"
_BUSY = {"type": "rejected_execution_exception", "reason": _REASON}


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
        faults = dict(enumerate(("refused", "halved", "lost")))
        done = faults.get(len(self.front.did), "answered")
        self.front.did.append(done)
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
        headers = {k: v for k, v in self.headers.items() if k.lower() == "content-type"}
        url, of = self.front.upstream + self.path, {"data": body, "headers": headers}
        answer = requests.request(self.command, url, timeout=60, **of)
        return answer.status_code, answer.json()

    def _answer(self, status: int, answer: Any) -> None:
        self.answer(status, json.dumps(answer).encode(), Content_Type="application/json")

    do_GET = do_POST = _serve


@contextmanager
def running_search_front(upstream: str, key: str, folder: Path) -> Iterator[SearchFront]:
    """Run a proxy on a free port within a `with`."""
    authority = new_authority(folder)
    front = SearchFront(upstream, key, str(authority.file))
    handler = type("Handler", (_Handler,), {"front": front})
    server = ThreadingHTTPServer((HOST, 0), handler)
    with in_threads(server, authority.server_context()) as port:
        front.url = f"https://{HOST}:{port}"
        yield front
