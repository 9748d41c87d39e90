"""The doctor checks everything that a stream needs, and gives a remedy for each fault: a command or
a setting. Each check has a reader, which calls one service, and pure functions that judge the
result. Readers run in parallel. A service that does not answer within a time limit is a finding;
the others are still checked. The doctor changes nothing except one small object under the
warehouse, which it writes, lists, reads and deletes."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from typing import Any

from anabranch.common.deadline import Answers, T, TimedRead, wait_for_all
from anabranch.common.errors import AnabranchError, NoAnswer
from anabranch.common.logs import Progress
from anabranch.config import Environment, Stream
from anabranch.iceberg.lake import Lake
from anabranch.operations.doctor import (
    airflow,
    kafka,
    local,
    s3,
    services,
    streams,
    tables,
)
from anabranch.operations.finding import Finding, Issue, Severity, error, info

LOG = logging.getLogger(__name__)

# The command must answer within 8 s; Kafka's reader reports a topic as missing after 5 s.
_SERVICE_SECONDS = 6.5

# The audit counts the rows in files of hours; each Airflow command takes seconds.
_LONG_SECONDS = 40.0


@dataclass(frozen=True)
class Examined:
    """The findings of one reader, and its duration in seconds."""

    name: str
    seconds: float
    findings: Sequence[Finding]


@dataclass(frozen=True)
class Report:
    """The doctor's report. `next`: the next command if `ready`, else the first error's remedy."""

    ready: bool
    next: str
    examined: Sequence[Examined]

    @property
    def findings(self) -> list[Finding]:
        return [finding for one in self.examined for finding in one.findings]


@dataclass(frozen=True)
class _Readings:
    stream: Stream
    kafka: TimedRead[kafka.KafkaFacts]
    tables: TimedRead[tables.TableFacts]
    status: TimedRead[streams.StreamFacts]
    registry: TimedRead[bool] | None


def examine(
    environment: Environment, chosen: Sequence[Stream], limit: float | None = None
) -> Report:
    """Examine this machine, the services, and at least one stream.

    Give up a service if none of its readers got an answer for `limit` seconds (default: 6.5), and
    any other reader after `limit` seconds (default: 40).
    """
    names = tuple(stream.name for stream in chosen)
    where = s3.place(environment)
    machine = TimedRead("this machine", lambda: local.read(environment))
    catalog_read = TimedRead("catalog", lambda: services.read_catalog(environment))
    answers = Answers()
    shared = Lake(environment)
    find_table = partial(s3.table_of_rest, shared, chosen)
    object_store = (
        TimedRead(
            "s3", lambda: s3.read(environment, where, answers.note, find_table), answers=answers
        )
        if where is not None
        else None
    )
    airflow_read = TimedRead("airflow", airflow.read) if airflow.is_configured() else None
    readings = [_read(environment, stream, shared) for stream in chosen]
    _wait(machine, object_store, catalog_read, airflow_read, readings, limit)

    examined = [_judge(machine, local.findings, lambda _: None)]
    if object_store is not None and where is not None:
        examined.append(
            _judge(
                object_store,
                partial(s3.findings, where, names),
                partial(s3.failed, environment, where),
            )
        )
    else:
        examined.append(
            Examined(
                "s3", 0.0, [_not_examined("s3", "a warehouse in S3", environment.catalog.warehouse)]
            )
        )
    lake = environment.catalog
    examined.append(_judge(catalog_read, lambda _: [], partial(services.catalog_failed, lake)))
    next_commands = []
    for reading in readings:
        parts, next_command = _examine_stream(environment, reading)
        examined += parts
        next_commands.append(next_command)
    if airflow_read is not None:
        examined.append(
            _judge(
                airflow_read,
                partial(airflow.findings, chosen),
                lambda why: airflow.failed(str(why)),
            )
        )
    found = [finding for one in examined for finding in one.findings]
    errors = [finding for finding in found if finding.severity is Severity.ERROR]
    return Report(not errors, errors[0].remedy if errors else next_commands[0], examined)


def _wait(
    machine: TimedRead[Any],
    object_store: TimedRead[Any] | None,
    catalog_read: TimedRead[Any],
    airflow_read: TimedRead[Any] | None,
    readings: Sequence[_Readings],
    limit: float | None,
) -> None:
    """Wait until each read ends or is given up."""
    services: list[Sequence[TimedRead[Any] | None]] = [
        [object_store],
        [catalog_read],
        [of.kafka for of in readings],
        [of.tables for of in readings],
        [of.registry for of in readings],
    ]
    status = [of.status for of in readings]
    progress = Progress(LOG, "examine", "services and streams", 4 + 4 * len(readings))

    def end(kind: Sequence[TimedRead[Any] | None], seconds: float) -> None:
        wait_for_all([reading for reading in kind if reading is not None], limit or seconds)
        progress.step(len(kind))

    for kind in services:
        end(kind, _SERVICE_SECONDS)
    for of in readings:
        # The stream's state requires an answer from each of these.
        needed = (object_store, catalog_read, of.kafka, of.tables)
        if any(reading is not None and reading.is_given_up for reading in needed):
            of.status.give_up()
    for kind in (status, [machine], [airflow_read]):
        end(kind, _LONG_SECONDS)


def _read(environment: Environment, stream: Stream, catalog: Lake) -> _Readings:
    name, subject = stream.name, None
    if stream.format.needs_registry:
        subject = TimedRead(f"registry {name}", lambda: services.read_registry(environment, stream))
    return _Readings(
        stream=stream,
        kafka=TimedRead(f"kafka {name}", lambda: kafka.read(environment, stream)),
        tables=TimedRead(f"tables {name}", lambda: tables.read(environment, stream, catalog)),
        status=TimedRead(f"stream {name}", lambda: streams.read(environment, stream, catalog)),
        registry=subject,
    )


def _examine_stream(environment: Environment, readings: _Readings) -> tuple[list[Examined], str]:
    """Return the findings about one stream, and the next command for it."""
    stream, settings = readings.stream, environment.kafka
    in_tables, status = readings.tables.facts(), readings.status.facts()
    unread = in_tables.unread if not isinstance(in_tables, AnabranchError) else None
    in_kafka = partial(kafka.findings, settings, stream, unread=unread, now=datetime.now(UTC))
    in_catalog = partial(tables.findings, environment.catalog.name, stream)
    examined = [
        _judge(readings.kafka, in_kafka, partial(kafka.failed, settings, stream)),
        _judge(readings.tables, in_catalog, partial(tables.failed, stream)),
    ]
    has_error = any(f.severity is Severity.ERROR for one in examined for f in one.findings)
    is_applied = not isinstance(in_tables, AnabranchError) and not in_tables.missing
    if isinstance(status, AnabranchError) and (has_error or not is_applied):
        needed = "tables and Kafka without errors, to report the stream's state"
        of_stream = [_not_examined(stream.name, needed, str(status))]
        examined.append(Examined(readings.status.name, readings.status.seconds, of_stream))
    else:
        in_stream, failed = partial(streams.findings, stream), partial(streams.failed, stream)
        examined.append(_judge(readings.status, in_stream, failed))
    if readings.registry is not None:
        examined.append(
            _judge(
                readings.registry,
                partial(services.subject_findings, stream),
                partial(services.registry_failed, stream),
            )
        )
    known = status if is_applied and not isinstance(status, AnabranchError) else None
    return examined, streams.next_command(stream, known)


def _judge(
    reading: TimedRead[T],
    findings: Callable[[T], Iterable[Finding]],
    failed: Callable[[AnabranchError], Finding | None],
) -> Examined:
    """Return the findings from a reader's result, or from its error."""
    facts = reading.facts()
    if not isinstance(facts, AnabranchError):
        return Examined(reading.name, reading.seconds, [*findings(facts)])
    is_late = isinstance(facts, NoAnswer) and reading.is_given_up
    remedy = (
        "run the same command with a larger --limit SECONDS"
        if is_late
        else "see the message, and the other findings"
    )
    unread = error(Issue.NO_ANSWER, reading.name, "the examination to end", str(facts), remedy)
    return Examined(reading.name, reading.seconds, [unread if is_late else failed(facts) or unread])


def _not_examined(subject: str, expected: str, found: str) -> Finding:
    return info(
        Issue.NOT_EXAMINED, subject, expected, found, "nothing, unless you expected an examination"
    )
