"""Send the ledger's decisions to a lineage receiver: from the batch job as it decides, and again
from `anabranch lineage`. The job sends all ledger rows appended since it began, including decisions
of an earlier process that died before it recorded them. A failure to send never fails an hour. A
job waits at most once, for `lineage.timeout`, for a receiver that does not answer, and as long
after each hour for a slow one.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from anabranch.common.errors import ConfigurationError
from anabranch.iceberg.ledger_files import Span
from anabranch.protocol.ledger_row import LedgerRow

if TYPE_CHECKING:
    from openlineage.client.event_v2 import RunEvent

    from anabranch.job import Job
    from anabranch.notifications.lineage.events import Subject
    from anabranch.notifications.lineage.receiver import Receiver
    from anabranch.notifications.lineage.runs import HourRun

LOG = logging.getLogger(__name__)

_LAST = "9999-12-31T23"


def decisions_since(job: Job, hour: str | None) -> list[LedgerRow]:
    """Return the decisions that are runs, from this hour on or all, oldest first. Raises
    Transient."""
    hours = Span(hour, _LAST) if hour is not None else None
    return _runs(job.ledger.history(hours))


def subject_of(job: Job) -> Subject:
    """Return the stream that events describe, with its current tables. Raises ConfigurationError
    without OpenLineage's client, Transient."""
    try:
        from anabranch.notifications.lineage.events import Subject
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
    from anabranch.notifications.lineage.events import events_of
    from anabranch.notifications.lineage.runs import run_of

    run = run_of(subject.table_uuid, row)
    return run, events_of(subject, run)


def _runs(rows: list[LedgerRow]) -> list[LedgerRow]:
    # Lineage covers only hours that jobs read from Kafka.
    return [row for row in rows if row.decision in ("accepted", "refused") and row.imported is None]


class LineageReporter:
    """Sends a job's decisions while it works. Does nothing without `lineage.url`. No method raises.
    After a failure it stops sending; `missed` are the hours that were not sent.
    """

    def __init__(self, job: Job, parent: str | None = None, root: str | None = None) -> None:
        self._job, self._parent, self._root = job, parent, root
        self._since = 0
        self._subject: Subject | None = None
        self._receiver: Receiver | None = None
        self.missed: set[str] = set()

    def begin(self) -> None:
        if not self._job.environment.lineage.url:
            return
        try:
            self._subject = subject_of(self._job)
            from anabranch.notifications.lineage.receiver import Receiver

            recorded = self._job.lake.load(self._job.stream.hours_table)
            self._since = recorded.metadata.next_sequence_number()
            self._receiver = Receiver(self._job.environment.lineage)
        except Exception as error:
            self._subject = None
            LOG.warning(
                "stream %s: lineage disabled for this job: %s", self._job.stream.name, error
            )

    def report(self) -> None:
        """Send the decisions since the last call."""
        if self._subject is None:
            return
        try:
            rows = self._job.ledger.history_since(self._since)
            self._since = max([self._since, *((row.sequence or 0) + 1 for row in rows)])
            rows = _runs(rows)
            self.missed |= {row.hour for row in rows}
            if self._receiver is None or not rows:
                return
            subject = subject_of(self._job)
            until = time.monotonic() + self._job.environment.lineage.timeout.total_seconds()
            for i, row in enumerate(rows):
                # One run may accept many empty hours at once: bound the delay of the next hour.
                if i and time.monotonic() > until:
                    break
                self._receiver.send(run_events(subject, row)[1])
                self.missed = self.missed - {row.hour} | {left.hour for left in rows[i + 1 :]}
        except Exception as error:
            self._give_up(error)

    def failed(self, hour: str, began: datetime, error: Exception) -> None:
        """Report a failed attempt of an hour, which the ledger does not record."""
        if self._subject is None or self._receiver is None:
            return
        try:
            from anabranch.notifications.lineage.events import events_of
            from anabranch.notifications.lineage.runs import failed_run

            now, uuid = datetime.now(UTC), self._subject.table_uuid
            run = failed_run(uuid, hour, began, now, str(error), self._parent, self._root)
            self._receiver.send(events_of(self._subject, run))
        except Exception as failure:
            self._give_up(failure)

    def end(self) -> None:
        """Log the hours that were not sent."""
        if self.missed:
            name = self._job.stream.name
            hours = sorted(self.missed)
            which = (
                ", ".join(hours)
                if len(hours) < 4
                else f"{len(hours)} hours from {hours[0]} to {hours[-1]}"
            )
            LOG.warning(
                "stream %s: lineage not sent for %s; to send it: anabranch lineage %s --since %s",
                name,
                which,
                name,
                hours[0],
            )

    def _give_up(self, error: Exception) -> None:
        self._receiver = None
        LOG.warning(
            "stream %s: lineage stopped, the job continues: %s", self._job.stream.name, error
        )


@contextmanager
def report_lineage(
    job: Job, parent: str | None = None, root: str | None = None
) -> Iterator[LineageReporter]:
    """Yield a reporter for the duration of a job; `parent` and `root` are the scheduler's runs that
    contain it."""
    reporter = LineageReporter(job, parent, root)
    reporter.begin()
    try:
        yield reporter
        reporter.report()
    finally:
        reporter.end()
