"""The page's HTTP server: one process, one socket; the allowed Hosts, and security headers. A proxy
authenticates users."""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections.abc import Mapping, Sequence
from contextlib import suppress

import uvicorn
from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from anabranch.common.errors import ConfigurationError

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
    "cache-control": "no-store",
}
_LOOPBACK = ("localhost", "127.0.0.1", "[::1]")


def allowed_hosts(host: str, names: Sequence[str], behind_proxy: bool) -> list[str]:
    """Return the Hosts that requests may have: a page that a browser reaches under another name is
    the target of DNS rebinding. Raises ConfigurationError if the page would be open to everyone."""
    if not behind_proxy and not _is_loopback(host):
        raise ConfigurationError(
            f"--host {host}: expected --behind-proxy, for a proxy that authenticates users, found "
            "none; without it the page listens on loopback addresses only"
        )
    if wrong := [name for name in names if "*" in name]:
        raise ConfigurationError(f"--allow-host: expected a host name, found {wrong[0]!r}")
    return [*_LOOPBACK, *(f"[{name}]" if ":" in name else name for name in (host, *names))]


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


class SecurityHeaders:
    """Middleware that adds the security headers to each response."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(HEADERS)
            await send(message)

        await self._app(scope, receive, send_with_headers)


_REQUEST_WITHIN_S = 10.0


class _BoundedConnection(H11Protocol):
    """A connection that is closed when no request began for a while and none is in progress.
    uvicorn itself waits for ever for the rest of a request's head, and its limit of connections
    would refuse everybody as soon as enough clients send half a request."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.loop.call_later(_REQUEST_WITHIN_S, self._close_idle, None)

    def _close_idle(self, before: object) -> None:
        newest = self.cycle
        is_in_progress = newest is not None and not newest.response_complete
        if newest is before and not is_in_progress:
            self.transport.close()
        elif not self.transport.is_closing():
            self.loop.call_later(_REQUEST_WITHIN_S, self._close_idle, newest)


def listen(host: str, port: int) -> socket.socket:
    """Return a listening socket. Raises ConfigurationError when the address cannot be bound."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family)
    except OSError as error:
        raise ConfigurationError(
            f"page: expected to listen at {host}:{port}, found: {error.strerror or error}; "
            "choose another --port"
        ) from error


def server(app: ASGIApp) -> uvicorn.Server:
    return uvicorn.Server(
        uvicorn.Config(
            app,
            http=_BoundedConnection,
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            lifespan="on",
            timeout_graceful_shutdown=3,
            ws="none",
        )
    )


def run(app: ASGIApp, at: socket.socket) -> None:
    """Serve until SIGINT or SIGTERM."""
    # uvicorn raises the signal again after its shutdown.
    with suppress(KeyboardInterrupt):
        server(app).run(sockets=[at])
