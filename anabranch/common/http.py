"""Sessions and requests to HTTP services, and the errors of their answers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from anabranch.common.errors import ConfigurationError, Transient

if TYPE_CHECKING:
    import requests

_CONNECT_SECONDS = 5.0


def is_transient(status: int) -> bool:
    """Return whether the same request may succeed later, by its HTTP status. Pure."""
    return status in (408, 425, 429) or status >= 500


def open_session(url_key: str, credentials: tuple[str, str] | str | None) -> requests.Session:
    """Return a session that authenticates with `credentials` only: a user and a password, or the
    value of the header Authorization. Proxies and certificate authorities come from the
    environment. A redirect raises ConfigurationError, naming the configuration key `url_key`."""
    import requests

    def authorize(request: requests.PreparedRequest) -> requests.PreparedRequest:
        if isinstance(credentials, str):
            request.headers["Authorization"] = credentials
        return request

    def refuse_redirect(response: requests.Response, **_: Any) -> None:
        # A redirect can send credentials to another host. It also changes POST to GET, whose answer
        # would count as that of a delivery.
        if response.is_redirect:
            raise ConfigurationError(
                f"ask {response.url}: expected an answer, found {response.status_code}, a redirect "
                f"to {response.headers['Location']}; check {url_key}"
            )

    session = requests.Session()
    # Without an `auth` of the session, requests sends the credentials of `.netrc`.
    session.auth = credentials if isinstance(credentials, tuple) else authorize
    session.hooks["response"].append(refuse_redirect)
    return session


def request(
    session: requests.Session,
    method: str,
    url: str,
    doing: str,
    check_url: str,
    check_ca: str,
    seconds: float,
    **options: Any,
) -> requests.Response:
    """Send one request, and wait up to `seconds` for each part of the answer. Errors name the
    configuration keys `check_url` and `check_ca`.

    Raises Transient if the service is unreachable, ConfigurationError for a wrong URL or
    certificate.
    """
    import requests

    try:
        return session.request(method, url, timeout=(_CONNECT_SECONDS, seconds), **options)
    except (requests.exceptions.SSLError, requests.exceptions.InvalidURL) as error:
        raise ConfigurationError(f"{doing}: {error}; check {check_url} and {check_ca}") from error
    except requests.exceptions.RequestException as error:
        raise Transient(f"{doing}: {error} (transient, try again)") from error
    except OSError as error:
        raise ConfigurationError(f"{doing}: {error}; check {check_ca}") from error


def check_answer(status: int, found: str, doing: str, check_rights: str) -> None:
    """Raise Transient for a status that may change, ConfigurationError for denied access."""
    if is_transient(status):
        raise Transient(f"{doing}: {found} (transient, try again)")
    if status in (401, 403):
        raise ConfigurationError(
            f"{doing}: expected permission, found {found}; check {check_rights}"
        )
