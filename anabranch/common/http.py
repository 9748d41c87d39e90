"""Requests to HTTP services, and the errors of their answers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from anabranch.common.errors import ConfigurationError, Transient

if TYPE_CHECKING:
    import requests


def is_transient(status: int) -> bool:
    """Return whether the same request may succeed later: time-outs, too early, too many requests,
    server errors. Pure."""
    return status in (408, 425, 429) or status >= 500


def request(
    session: requests.Session,
    method: str,
    url: str,
    doing: str,
    check_url: str,
    check_ca: str,
    **options: Any,
) -> requests.Response:
    """Send one request, by default without following redirects. Errors name the configuration keys
    `check_url` and `check_ca`.

    Raises Transient if the service is unreachable, ConfigurationError for a wrong URL or
    certificate.
    """
    import requests

    try:
        return session.request(method, url, **{"allow_redirects": False, **options})
    except (requests.exceptions.SSLError, requests.exceptions.InvalidURL) as error:
        raise ConfigurationError(f"{doing}: {error}; check {check_url} and {check_ca}") from error
    except requests.exceptions.RequestException as error:
        raise Transient(f"{doing}: {error} (transient, try again)") from error
    except OSError as error:
        raise ConfigurationError(f"{doing}: {error}; check {check_ca}") from error


def check_answer(status: int, found: str, doing: str, check_rights: str) -> None:
    """Raise Transient for a status that may differ later, ConfigurationError if the service denies
    access."""
    if is_transient(status):
        raise Transient(f"{doing}: {found} (transient, try again)")
    if status in (401, 403):
        raise ConfigurationError(
            f"{doing}: expected permission, found {found}; check {check_rights}"
        )
