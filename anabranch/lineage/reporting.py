"""Send the ledger's decisions to a lineage receiver: from the batch job at its end, and again from
`anabranch batch --lineage-only`. The job sends all ledger rows appended since it began, including
decisions of an earlier process that died before it recorded them.

Requests to the receiver have a time limit and are not retried.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING

import requests
from openlineage.client.event_v2 import RunEvent
from openlineage.client.transport.http import HttpConfig, HttpTransport

from anabranch.common.deadline import call_within
from anabranch.common.errors import AnabranchError, ConfigurationError, NoAnswer, Refused, Transient
from anabranch.common.http import is_transient, open_session
from anabranch.config import Lineage
from anabranch.iceberg.ledger_files import Span
from anabranch.protocol.ledger_row import LedgerRow

if TYPE_CHECKING:
    from openlineage.client.event_v2 import RunEvent

    from anabranch.job import Job
    from anabranch.lineage.events import HourRun, Subject


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
        """Send events in order, within 10 s. Raises NoAnswer after that, Transient (unreachable),
        ConfigurationError (path, key), Refused (events rejected)."""
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


LOG = logging.getLogger(__name__)

JOBS_WAIT = timedelta(seconds=30)
"""The longest time that a job sends, in addition to the last request."""


def decisions_of(job: Job, hours: tuple[str, str] | None) -> list[LedgerRow]:
    """Return the decisions that are runs, of these hours or all, oldest first. Raises Transient."""
    return _runs(job.ledger.history(Span(*hours) if hours is not None else None))


def subject_of(job: Job) -> Subject:
    """Return the stream that events describe, with its current tables. Raises ConfigurationError
    without OpenLineage's client, Transient."""
    try:
        from anabranch.lineage.events import Subject
    except ModuleNotFoundError as error:
        raise ConfigurationError(
            f"lineage: expected OpenLineage's client, found no {error.name}; run `pip install "
            "'anabranch[lineage]'`"
        ) from error

    lake, stream = job.lake, job.stream
    return Subject(
        job.environment, stream, lake.load(stream.table), lake.load(stream.dead_letters_table)
    )


def run_events(subject: Subject, row: LedgerRow) -> tuple[HourRun, tuple[RunEvent, RunEvent]]:
    from anabranch.lineage.events import events_of, run_of

    run = run_of(subject.table_uuid, row)
    return run, events_of(subject, run)


def _runs(rows: list[LedgerRow]) -> list[LedgerRow]:
    # Lineage covers only hours that jobs read from Kafka.
    return [row for row in rows if row.decision in ("accepted", "refused") and row.imported is None]


@contextmanager
def report_lineage(job: Job) -> Iterator[None]:
    """Send the decisions that the ledger gets meanwhile, at the end, also of a job that fails.
    Does nothing without `lineage.url`. A failure to send fails nothing: the log names the hours
    that were not sent and the command that sends them."""
    since = _next_sequence(job) if job.environment.lineage.url else None
    try:
        yield
    finally:
        if since is not None:
            _send_since(job, since)


def _next_sequence(job: Job) -> int | None:
    try:
        subject_of(job)
        return job.lake.load(job.stream.hours_table).metadata.next_sequence_number()
    except Exception as error:
        LOG.warning("stream %s: lineage disabled for this job: %s", job.stream.name, error)
        return None


def _send_since(job: Job, sequence: int) -> None:
    unsent: list[LedgerRow] = []
    try:
        unsent = _runs(job.ledger.history_since(sequence))
        if not unsent:
            return

        receiver, subject = Receiver(job.environment.lineage), subject_of(job)
        until = time.monotonic() + JOBS_WAIT.total_seconds()
        while unsent and time.monotonic() < until:
            receiver.send(run_events(subject, unsent[0])[1])
            unsent = unsent[1:]
    except Exception as error:
        LOG.warning("stream %s: lineage not sent: %s", job.stream.name, error)
    if unsent:
        hours = sorted({row.hour for row in unsent})
        LOG.warning(
            "stream %s: lineage not sent hours=%d first=%s last=%s; to send it: anabranch batch "
            "%s --lineage-only --hour %s..%s",
            job.stream.name,
            len(hours),
            hours[0],
            hours[-1],
            job.stream.name,
            hours[0],
            hours[-1],
        )
