"""Secrets that are known to this process are replaced in its errors and logs, whichever library
wrote them there."""

from __future__ import annotations

from collections.abc import Iterable

_SHORTEST = 6
_KNOWN: set[str] = set()


def remember(secrets: Iterable[str]) -> None:
    """Replace these texts from now on; one of a few characters would be found in any message."""
    _KNOWN.update(secret for secret in secrets if len(secret) >= _SHORTEST)


def redact(text: str) -> str:
    """The text without secrets."""
    for secret in sorted(_KNOWN, key=len, reverse=True):
        text = text.replace(secret, "***")
    return text
