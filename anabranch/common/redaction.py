"""Redaction of the secrets that this process knows, in errors and logs of any library."""

from __future__ import annotations

from collections.abc import Iterable

_SHORTEST = 6
_KNOWN: set[str] = set()


def remember(secrets: Iterable[str]) -> None:
    """Redact these texts from now on, except short ones, which could match any message."""
    _KNOWN.update(secret for secret in secrets if len(secret) >= _SHORTEST)


def redact(text: str) -> str:
    """Replace known secrets in a text with `***`."""
    for secret in sorted(_KNOWN, key=len, reverse=True):
        text = text.replace(secret, "***")
    return text
