"""The webhook: posts each change of an hour's state as JSON, in ledger order, at least once.

1. The position is a sequence of the ledger, kept in a property of the ledger's table, one for each
  receiver.
2. The job posts later decisions, one request each, with the decision's id.
3. The position moves past the messages that the receiver accepted.

A receiver that is unreachable, slow or refusing delays a job by seconds and has no other effect:
messages stay pending in the ledger until the next job or `anabranch webhook`.
"""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import requests

from anabranch.common.deadline import call_within
from anabranch.common.errors import ConfigurationError, NoAnswer, Transient
from anabranch.iceberg import admin
from anabranch.notifications.webhook.message import Message, messages
from anabranch.protocol import ledger
from anabranch.protocol.ledger import Ledger

if TYPE_CHECKING:
    from pyiceberg.table import Table, Transaction

    from anabranch.config import Webhook
    from anabranch.job import Job

LOG = logging.getLogger(__name__)

FIRST_LOOK = timedelta(days=1)
"""A receiver without a position gets the decisions of this period before now."""
JOBS_WAIT = timedelta(seconds=10)
"""Longest time that a job posts, in addition to the last request."""

_POSITION = "anabranch.webhook."
# Write the position after this many messages.
_AT_ONCE = 50


@dataclass(frozen=True)
class Posted:
    """A message that the receiver accepted."""

    id: str
    hour: str
    event: str
    revision: int


class Notifier:
    """Posts the pending messages of a stream's receiver. Raises ConfigurationError if none is
    configured."""

    def __init__(self, job: Job) -> None:
        webhook = webhook_of(job)
        if webhook is None:
            raise ConfigurationError(
                f"stream {job.stream.name}: expected `webhook:` in its file or in anabranch.yaml, "
                "found none"
            )
        self._job, self._webhook = job, webhook
        self._key = (
            _POSITION + hashlib.sha256(webhook.url.get_secret_value().encode()).hexdigest()[:16]
        )

    def post(self, within: timedelta | None = None) -> Iterator[Posted]:
        """Post pending messages for about this long (None: all), and yield each that the receiver
        accepted. Raises Transient if it does not accept one; that message and all later ones stay
        pending."""
        deadline = time.monotonic() + within.total_seconds() if within is not None else None
        table = self._job.lake.load(self._job.stream.hours_table)
        position = self._position(table)
        waiting = self._pending(position)
        kept = done = position or 0
        if position is None and waiting:
            # Keep it even if none is accepted: a first look a day later would not find them.
            done = waiting[0].row.sequence or 0
        try:
            for at, message in enumerate(waiting):
                if deadline is not None and time.monotonic() >= deadline:
                    LOG.info(
                        "stream %s: webhook: %d messages pending",
                        self._job.stream.name,
                        len(waiting) - at,
                    )
                    return
                self._send(message)
                row = message.row
                # Decisions of one commit share a sequence: the position moves past it only after
                # all of them are posted.
                if at + 1 == len(waiting) or waiting[at + 1].row.sequence != row.sequence:
                    done = (row.sequence or 0) + 1
                if at % _AT_ONCE == _AT_ONCE - 1 and done != kept:
                    self._keep(done)
                    kept = done
                yield Posted(row.decision_id, row.hour, message.event, row.revision)
        finally:
            if done != kept:
                self._keep(done)

    def skip(self) -> None:
        """Move the position past all recorded decisions without posting them."""
        table = self._job.lake.load(self._job.stream.hours_table)
        self._keep(table.metadata.next_sequence_number())

    def _position(self, table: Table) -> int | None:
        kept = table.properties.get(self._key)
        return int(kept) if kept is not None else None

    def _pending(self, position: int | None) -> list[Message]:
        lake, name = self._job.lake, self._job.stream.hours_table
        new = Ledger(lake, name).history_since(position or 0, ledger.BULKY)
        if position is None:
            since = lake.clock.now() - FIRST_LOOK
            new = [row for row in new if row.recorded_at >= since]
        if not new:
            return []
        sequences = [row.sequence or 0 for row in new]
        rows = Ledger(lake, name).history(
            {row.hour for row in new}, ("partitions", "sources", "cut")
        )
        # Not rows recorded since `new` was read: there may be earlier ones of other hours.
        known = [row for row in rows if (row.sequence or 0) <= max(sequences)]
        return list(messages(known, min(sequences)))

    def _keep(self, position: int) -> None:
        def write(table: Table, tx: Transaction) -> None:
            # Another job may have posted more.
            if (self._position(table) or 0) < position:
                tx.set_properties({self._key: str(position)})

        admin.change_table(
            self._job.lake, self._job.stream.hours_table, "position of the webhook", write
        )

    def _send(self, message: Message) -> None:
        stream, webhook = self._job.stream, self._webhook
        body = message.as_dict(stream.name, stream.table, webhook.page)
        if (why := send(webhook, body)) is not None:
            # Name only the host: the rest of the URL may be a secret.
            host = urlsplit(webhook.url.get_secret_value()).hostname
            raise Transient(
                f"stream {stream.name}: webhook {host}: expected it to accept {message.row.hour} "
                f"{message.event}, found {why}; the message stays pending, `anabranch webhook "
                f"{stream.name}` posts it"
            )


def webhook_of(job: Job) -> Webhook | None:
    """Return the webhook of the stream, else of the environment, if configured."""
    return job.stream.webhook or job.environment.webhook


def notify(job: Job) -> bool:
    """Post pending messages from a job, for a bounded time; errors do not stop the job. Return
    False if messages stay pending because of an error."""
    if webhook_of(job) is None:
        return True
    try:
        for posted in Notifier(job).post(JOBS_WAIT):
            LOG.info(
                "stream %s: webhook accepted %s %s", job.stream.name, posted.hour, posted.event
            )
    except Exception as error:
        LOG.warning("%s", error)
        return False
    return True


def send(webhook: Webhook, body: dict[str, Any]) -> str | None:
    """Post one message; return why it failed, or None. Takes at most `webhook.within`."""
    seconds = webhook.within.total_seconds()
    # The client's timeout restarts with each byte of a slow answer, so limit the time here.
    try:
        return call_within(
            seconds,
            "webhook",
            partial(_post, webhook, body),
            NoAnswer(f"no answer within {seconds:g} s; check that it answers"),
        )
    except NoAnswer as late:
        return str(late)


def _post(webhook: Webhook, body: dict[str, Any]) -> str | None:
    headers = {name: value.get_secret_value() for name, value in webhook.headers.items()}
    headers |= {"Content-Type": "application/json", "Idempotency-Key": str(body["id"])}
    try:
        with requests.post(
            webhook.url.get_secret_value(),
            json.dumps(body).encode(),
            headers=headers,
            auth=_with_own_headers,
            timeout=webhook.within.total_seconds(),
            allow_redirects=False,
            stream=True,
        ) as answer:
            return (
                None
                if 200 <= answer.status_code < 300
                else f"{answer.status_code} {answer.reason or ''}".strip()
            )
    except (requests.exceptions.RequestException, ValueError) as error:
        # The error's text contains the URL.
        return type(error).__name__


def _with_own_headers(request: requests.PreparedRequest) -> requests.PreparedRequest:
    """Keep the configured headers: without an auth hook, requests would use the machine's
    .netrc."""
    return request
