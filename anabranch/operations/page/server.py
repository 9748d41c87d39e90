"""The page's HTTP server: one process, one socket."""

from __future__ import annotations

import socket
from contextlib import suppress

import uvicorn
from starlette.types import ASGIApp

from anabranch.common.errors import ConfigurationError

# Maximum number of concurrent requests; further ones get status 503.
_AT_ONCE = 200


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


def run(app: ASGIApp, at: socket.socket) -> None:
    """Serve until SIGINT or SIGTERM."""
    configuration = uvicorn.Config(
        app,
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        lifespan="on",
        limit_concurrency=_AT_ONCE,
        timeout_graceful_shutdown=3,
        ws="none",
    )
    # uvicorn raises the signal again after its shutdown.
    with suppress(KeyboardInterrupt):
        uvicorn.Server(configuration).run(sockets=[at])
