"""The page's HTTP server: one process, one socket."""

from __future__ import annotations

import asyncio
import socket
from contextlib import suppress

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from anabranch.common.errors import ConfigurationError

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
