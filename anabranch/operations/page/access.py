"""Access to the page: Host check, token, and security headers."""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import cookie_parser
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from anabranch.common.errors import ConfigurationError

COOKIE = "anabranch_page"
LOGIN = "/login"
# Paths that need no token.
_WITHOUT_TOKEN = (LOGIN, "/static/page.css", "/static/icon.svg")
_MIN_TOKEN_LENGTH = 16  # minimum length of a token

HEADERS: Mapping[str, str] = {
    "content-security-policy": (
        "default-src 'none'; style-src 'self'; script-src 'self'; connect-src 'self'; img-src "
        "'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), geolocation=(), microphone=()",
}


@dataclass(frozen=True)
class Access:
    """Access rules. `token`: if set, requests must present it. `names`: the allowed Hosts besides
    addresses and localhost. `over_tls`: a proxy terminates TLS, so the cookie is marked Secure."""

    names: frozenset[str] = frozenset()
    token: str | None = None
    over_tls: bool = False

    def is_host_known(self, host: str) -> bool:
        """Return whether a request's Host is allowed. Addresses always are, because DNS rebinding
        needs a name. Pure."""
        name = _without_port(host)
        return name == "localhost" or name in self.names or _is_address(name)

    def is_token(self, given: str) -> bool:
        """Return whether `given` is the token; the comparison takes constant time."""
        return self.token is not None and hmac.compare_digest(given.encode(), self.token.encode())

    def cookie(self) -> str:
        """Return the cookie's value, derived from the token without revealing it."""
        return hmac.new((self.token or "").encode(), b"anabranch page", hashlib.sha256).hexdigest()

    def may_read(self, headers: Headers) -> bool:
        """Return whether the header `Authorization: Bearer TOKEN` or the cookie is valid."""
        if self.token is None:
            return True
        kind, _, given = headers.get("authorization", "").partition(" ")
        if kind.lower() == "bearer" and self.is_token(given.strip()):
            return True
        shown = cookie_parser(headers.get("cookie", "")).get(COOKIE, "")
        return hmac.compare_digest(shown.encode(), self.cookie().encode())


def read_token(file: Path) -> str:
    """Return the token in a file. Raises ConfigurationError when the file is unreadable or the
    token too short."""
    try:
        token = file.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(
            f"--token-file: expected to read {file}, found: {error}"
        ) from error
    if len(token) < _MIN_TOKEN_LENGTH:
        raise ConfigurationError(
            f"--token-file: expected at least {_MIN_TOKEN_LENGTH} characters in {file}, found "
            f"{len(token)}; make one by `openssl rand -hex 32`"
        )
    return token


def is_loopback(host: str) -> bool:
    """Return whether a server that listens at `host` is reachable only from this machine. Pure."""
    return host == "localhost" or (_is_address(host) and ipaddress.ip_address(host).is_loopback)


def access_of(
    host: str, names: Sequence[str], token_file: Path | None, behind_proxy: bool
) -> Access:
    """Return the access rules of a page that listens at `host`. Raises ConfigurationError if it
    would be open to everyone."""
    if not is_loopback(host) and token_file is None and not behind_proxy:
        raise ConfigurationError(
            f"--host {host}: expected --token-file, or --behind-proxy for an authenticating "
            "proxy, found neither; without them the page listens on loopback addresses only"
        )
    own = set() if _is_address(host) else {host.lower()}
    token = read_token(token_file) if token_file is not None else None
    return Access(frozenset({*own, *(name.lower() for name in names)}), token, behind_proxy)


def _without_port(host: str) -> str:
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.rpartition(":")[0].lower() if ":" in host else host.lower()


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


class Guard:
    """Middleware that checks each request's access and adds the security headers to each
    response."""

    def __init__(self, app: ASGIApp, access: Access) -> None:
        self._app, self._access = app, access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers[name] = value
                headers.setdefault("cache-control", "no-store")
            await send(message)

        refusal = self._refusal(scope)
        await (refusal or self._app)(scope, receive, send_with_headers)

    def _refusal(self, scope: Scope) -> Response | None:
        headers = Headers(scope=scope)
        hosts = headers.getlist("host")
        if len(hosts) != 1 or not self._access.is_host_known(hosts[0]):
            text = "Unknown Host: allow it with --allow-host.\n"
            return PlainTextResponse(text, 421)
        if scope["path"] in _WITHOUT_TOKEN or self._access.may_read(headers):
            return None
        if "text/html" in headers.get("accept", "") and scope["method"] == "GET":
            return RedirectResponse(LOGIN, 303)
        text = "Expected the header Authorization: Bearer TOKEN, or the cookie of /login.\n"
        return PlainTextResponse(text, 401, {"www-authenticate": "Bearer"})
