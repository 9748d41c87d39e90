"""An OAuth 2 token server over HTTPS (RFC 6749), and a file with a token that is renewed."""

import base64
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

import jwt
from authority import new_authority
from cryptography.hazmat.primitives.asymmetric import rsa
from jwt.algorithms import RSAAlgorithm
from servers import QuietHandler, in_threads
from soak.interference import replace_file

from anabranch.dev.services.processes import HOST

CLIENT, SECRET, SCOPE, AUDIENCE = "anabranch", 'client-"secret', "kafka", "kafka-brokers"


@dataclass
class TokenServer:
    """A running server. Tokens live `seconds`; `issued` has the user agent of each request for one.
    The broker's keys are in `jwks`; `file` has a token. With `status`, requests are answered by
    it."""

    folder: Path
    seconds: float
    port: int = 0
    issued: list[str] = field(default_factory=list)
    status: int = 200

    def __post_init__(self) -> None:
        self._key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
        public = json.loads(RSAAlgorithm.to_jwk(self._key.public_key()))
        keys = {"keys": [public | {"kid": "k1", "use": "sig", "alg": "RS256"}]}
        self.jwks.write_text(json.dumps(keys))

    @property
    def url(self) -> str:
        return f"https://{HOST}:{self.port}/token"

    @property
    def ca(self) -> Path:
        return self.folder / "ca.pem"

    @property
    def jwks(self) -> Path:
        return self.folder / "jwks.json"

    @property
    def file(self) -> Path:
        return self.folder / "token.jwt"

    def token(self) -> str:
        now = int(time.time())
        claims = {"sub": CLIENT, "iss": self.url, "aud": AUDIENCE, "scope": SCOPE}
        claims |= {"iat": now, "exp": now + self.seconds}
        return jwt.encode(claims, self._key, "RS256", {"kid": "k1"})

    def write_file(self) -> None:
        replace_file(self.file, self.token())

    def answer(self, authorization: str, form: dict[str, list[str]]) -> tuple[int, dict[str, Any]]:
        expected = base64.b64encode(f"{CLIENT}:{SECRET}".encode()).decode()
        if self.status != 200:
            return self.status, {}
        if authorization != f"Basic {expected}":
            return 401, {"error": "invalid_client"}
        if form.get("grant_type") != ["client_credentials"] or form.get("scope") != [SCOPE]:
            return 400, {"error": "invalid_scope"}
        kind = {"token_type": "Bearer", "expires_in": self.seconds}
        return 200, {"access_token": self.token(), **kind}


@contextmanager
def running_token_server(folder: Path, seconds: float) -> Iterator[TokenServer]:
    """Run a new server within a `with`, in threads of this process."""
    folder.mkdir(parents=True, exist_ok=True)
    server = TokenServer(folder, seconds)

    class Handler(QuietHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            form = parse_qs(self.body().decode())
            status, body = server.answer(self.headers.get("Authorization", ""), form)
            if status == 200:
                server.issued.append(self.headers.get("User-Agent", ""))
            self.answer(status, json.dumps(body).encode(), Content_Type="application/json")

    context = new_authority(folder).server_context()
    ended = threading.Event()

    def renew() -> None:
        while True:
            server.write_file()
            if ended.wait(seconds / 2):
                return

    renewing = threading.Thread(target=renew)
    with in_threads(ThreadingHTTPServer((HOST, 0), Handler), context) as server.port:
        renewing.start()
        try:
            yield server
        finally:
            ended.set()
            renewing.join(30)
