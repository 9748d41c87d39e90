"""Access to the page: the allowed Hosts, and security headers. A proxy authenticates users."""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping, Sequence

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

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
