"""The client of the receiver of events. Requests have a time limit and are not retried.

A module of its own: OpenLineage's client belongs to an extra, which a job may lack.
"""

from __future__ import annotations

from collections.abc import Iterable

from openlineage.client.event_v2 import RunEvent
from openlineage.client.serde import Serde

from anabranch.common import http
from anabranch.common.deadline import call_within
from anabranch.common.errors import ConfigurationError, NoAnswer, Refused, Transient
from anabranch.config import Lineage

# The path of OpenLineage's specification; `lineage.url` may have a path before it.
_PATH = "api/v1/lineage"
_SECONDS = 10.0


class Receiver:
    """Sends events, with the settings of `anabranch.yaml` only."""

    def __init__(self, settings: Lineage) -> None:
        self._url = f"{settings.url}/{_PATH}"
        key = settings.api_key.get_secret_value() if settings.api_key is not None else ""
        self._session = http.open_session("lineage.url", f"Bearer {key}" if key else None)

    def send(self, events: Iterable[RunEvent]) -> None:
        """Send events in order, within 10 s in total. Raises NoAnswer after that time,
        Transient if the receiver is unreachable, ConfigurationError for a wrong path or key,
        Refused if it rejects the events."""
        late = NoAnswer(
            f"send lineage to {self._url}: found no answer within {_SECONDS:g} s (transient, try "
            "again)"
        )

        def send() -> None:
            for event in events:
                self._send(Serde.to_json(event))

        # The timeout of a request restarts with every byte, and does not cover name resolution.
        call_within(_SECONDS, "lineage", send, late)

    def _send(self, event: str) -> None:
        doing = f"send lineage to {self._url}"
        answer = http.request(
            self._session,
            "POST",
            self._url,
            doing,
            "lineage.url",
            "its certificate",
            _SECONDS,
            data=event,
            headers={"Content-Type": "application/json"},
        )
        status = f"{answer.status_code} {answer.reason or ''}".strip()
        found = f"{doing}: expected the receiver to accept the event, found {status}"
        if http.is_transient(answer.status_code):
            raise Transient(f"{found} (transient, try again)")
        if answer.status_code in (401, 403):
            raise ConfigurationError(f"{found}; check lineage.api_key")
        if answer.status_code in (404, 405):
            raise ConfigurationError(f"{found}; check lineage.url")
        if not answer.ok:
            raise Refused(f"{found}; see its log")
