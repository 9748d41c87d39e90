"""The client of the receiver of events. Requests have a time limit and are not retried.

A module of its own: OpenLineage's client belongs to an extra, which a job may lack.
"""

from __future__ import annotations

from collections.abc import Iterable

import requests
from openlineage.client.event_v2 import RunEvent
from openlineage.client.transport.http import HttpConfig, HttpTransport

from anabranch.common.deadline import call_within
from anabranch.common.errors import AnabranchError, ConfigurationError, NoAnswer, Refused, Transient
from anabranch.common.http import is_transient, open_session
from anabranch.config import Lineage

# The caller decides whether to retry.
_ONCE = {"total": 0, "read": 0, "connect": 0}
# The path of OpenLineage's specification; `lineage.url` may have a path before it.
_PATH = "api/v1/lineage"
_SECONDS = 10.0


class Receiver:
    """Sends events by OpenLineage's client, with the settings of `anabranch.yaml` only."""

    def __init__(self, settings: Lineage) -> None:
        self._settings = settings
        key = settings.api_key.get_secret_value() if settings.api_key is not None else ""
        session = open_session("lineage.url", f"Bearer {key}" if key else None)
        # The client joins the endpoint to the URL as to a folder.
        config = HttpConfig(f"{settings.url}/", _PATH, _SECONDS, session=session, retry=_ONCE)
        self._transport = HttpTransport(config)

    def send(self, events: Iterable[RunEvent]) -> None:
        """Send events in order, within 10 s in total. Raises NoAnswer after that time,
        Transient if the receiver is unreachable, ConfigurationError for a wrong path or key,
        Refused if it rejects the events."""
        late = NoAnswer(
            f"send lineage to {self._settings.url}: found no answer within {_SECONDS:g} s "
            "(transient, try again)"
        )

        def emit() -> None:
            try:
                for event in events:
                    self._transport.emit(event)
            except Exception as error:
                raise self._explained(error) from error

        # The client's own timeout restarts with every byte, and does not cover name resolution.
        call_within(_SECONDS, "lineage", emit, late)

    def _explained(self, error: BaseException) -> AnabranchError:
        if isinstance(error, AnabranchError):
            return error
        doing = f"send lineage to {self._settings.url}/{_PATH}"
        response = error.response if isinstance(error, requests.HTTPError) else None
        if response is None:
            if isinstance(error, requests.exceptions.SSLError):
                return ConfigurationError(
                    f"{doing}: {error}; check lineage.url and its certificate"
                )
            return Transient(f"{doing}: {error} (transient, try again)")
        answer = f"{response.status_code} {response.reason or ''}".strip()
        found = f"{doing}: expected the receiver to accept the event, found {answer}"
        if is_transient(response.status_code):
            return Transient(f"{found} (transient, try again)")
        if response.status_code in (401, 403):
            return ConfigurationError(f"{found}; check lineage.api_key")
        if response.status_code in (404, 405):
            return ConfigurationError(f"{found}; check lineage.url")
        return Refused(f"{found}; see its log")
