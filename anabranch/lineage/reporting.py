"""Send the ledger's decisions to a lineage receiver: from the batch job at its end, and again from
`anabranch batch --lineage-only`. The job sends all ledger rows appended since it began, including
decisions of an earlier process that died before it recorded them.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING

from anabranch.common.errors import installed
from anabranch.iceberg.ledger_files import Span
from anabranch.protocol.ledger_row import LedgerRow

if TYPE_CHECKING:
    from anabranch.job import Job
    from anabranch.lineage.events import Subject


LOG = logging.getLogger(__name__)

JOBS_WAIT = timedelta(seconds=30)
"""The longest time that a job sends, in addition to the last request."""


def decisions_of(job: Job, hours: tuple[str, str] | None) -> list[LedgerRow]:
    """Return the decisions that are runs, of these hours or all, oldest first. Raises Transient."""
    return _runs(job.ledger.history(Span(*hours) if hours is not None else None))


def subject_of(job: Job) -> Subject:
    """Return the stream that events describe, with its current tables. Raises ConfigurationError
    without OpenLineage's client, Transient."""
    with installed("lineage", "OpenLineage's client", "anabranch[lineage]"):
        from anabranch.lineage.events import Subject

    lake, stream = job.lake, job.stream
    return Subject(
        job.environment, stream, lake.load(stream.table), lake.load(stream.dead_letters_table)
    )


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
        from anabranch.lineage.receiver import Receiver

        receiver, subject = Receiver(job.environment.lineage), subject_of(job)
        until = time.monotonic() + JOBS_WAIT.total_seconds()
        while unsent and time.monotonic() < until:
            receiver.send(subject.events(unsent[0]))
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
