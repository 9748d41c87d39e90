"""Check a stream's state as `status` reports it, and audit its newest accepted hours."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta

from anabranch.common.arrays import grouped
from anabranch.common.errors import AnabranchError, FileGone
from anabranch.config import Environment, Stream
from anabranch.iceberg.lake import Lake
from anabranch.job import Job
from anabranch.kafka.client import KafkaAdapter
from anabranch.offsets.hours import shift
from anabranch.operations.audit import Lost, audit, find_lost
from anabranch.operations.finding import Finding, Issue, Severity, error, info, warning
from anabranch.operations.reports.status import (
    MAY_WAIT,
    StreamStatus,
    faults,
    late_after,
    status,
)
from anabranch.protocol.state import State, load_state

# Number of hours to audit; more would take too long, since an audit reads all their files.
_AUDITED = 3


@dataclass(frozen=True)
class StreamFacts:
    """Facts about a stream. `disagreements`: differences between ledger and files by hour, for the
    newest hours only. `lost`: files that storage lacks, on every branch. `undelivered`: the number
    of hours that each target of egress lacks. `unfinished`: the erasures that are not done."""

    status: StreamStatus
    disagreements: Mapping[str, Sequence[str]]
    lost: Lost = field(default_factory=Lost)
    undelivered: Mapping[str, int] = field(default_factory=dict)
    unfinished: tuple[str, ...] = ()


def read(environment: Environment, stream: Stream, catalog: Lake) -> StreamFacts:
    """Read the status, and audit the newest accepted hours. Raises Transient."""
    with KafkaAdapter(environment.kafka) as kafka:
        job = Job.connect(environment, stream, catalog=catalog, kafka=kafka)
        view = status(job, late_after(stream))
        last = view.newest_accepted
        counted = (
            audit(job, (shift(last, 1 - _AUDITED), last), with_kafka=False)
            if last is not None
            else None
        )
        state = load_state(job.lake, stream.table)
        lost = find_lost(job, state)
        waiting = undelivered(job, view)
    gone = {one.hour for one in lost.served}
    by_hour: dict[str, list[str]] = {}
    for disagreement in counted.disagreements if counted is not None else ():
        if disagreement.hour not in gone:
            by_hour.setdefault(disagreement.hour, []).append(disagreement.message)
    return StreamFacts(view, by_hour, lost, waiting, unfinished(state, datetime.now(UTC)))


def unfinished(state: State, now: datetime) -> tuple[str, ...]:
    """Return the erasures that were requested a day ago and are not done. Pure."""
    return tuple(
        one.id
        for one in state.erasures.all
        if one.done is None and now - one.at > timedelta(days=1)
    )


def undelivered(job: Job, view: StreamStatus) -> dict[str, int]:
    """Return how many accepted hours each target lacks. Raises Transient."""
    if not job.stream.egress:
        return {}
    from serving_layer.egress import undelivered_hours

    waiting = {target.name: undelivered_hours(job, target) for target in job.stream.egress}
    return {name: len(view.hours if hours is None else hours) for name, hours in waiting.items()}


def findings(stream: Stream, facts: StreamFacts) -> Iterator[Finding]:
    view, name = facts.status, stream.name
    # Kafka's check names a topic that is missing.
    found_by_state = [one for one in faults(view) if one.check is not Issue.TOPIC_MISSING]
    yield from (one for one in found_by_state if one.check is Issue.TOPIC_RECREATED)
    for hour, messages in facts.disagreements.items():
        remedy = f"anabranch batch {name} --hour {hour} --restate"
        found = f"{messages[0]}" + (f", and {len(messages) - 1} more" if len(messages) > 1 else "")
        yield error(
            Issue.LEDGER, f"{name} {hour}", "no difference between ledger and files", found, remedy
        )
    yield from _lost_files(stream, facts)
    for one in found_by_state:
        # An error if freshness is promised (`slo.fresh`); otherwise the lag may be intended.
        is_promised = one.check is Issue.LATE and stream.slo.fresh is not None
        if one.check is not Issue.TOPIC_RECREATED:
            yield replace(one, severity=Severity.ERROR) if is_promised else one
    for id in facts.unfinished:
        expected, remedy = "an erasure to be done within a day", f"anabranch erasures {name}"
        yield warning(Issue.ERASURE, f"{name} {id}", expected, "it is not", remedy)
    for target, hours in facts.undelivered.items():
        if hours > MAY_WAIT:
            expected = f"at most {MAY_WAIT} hours waiting for target {target}"
            remedy = f"anabranch egress {name} --target {target}"
            yield warning(Issue.EGRESS, name, expected, f"{hours} accepted hours", remedy)


def _lost_files(stream: Stream, facts: StreamFacts) -> Iterator[Finding]:
    waiting = {*facts.status.backlog, *facts.status.to_seal, *facts.status.refused}
    for is_served, lost in ((True, facts.lost.served), (False, facts.lost.unserved)):
        for hour, files in grouped(lost, lambda one: one.hour).items():
            found = f"none of {files[0].words}"
            found += f", and {len(files) - 1} more" if len(files) > 1 else ""
            remedy = f"anabranch batch {stream.name} --hour {hour}"
            if hour <= (facts.status.newest_accepted or "") and hour not in waiting:
                remedy += " --restate"
            if not is_served:
                remedy = "nothing: the batch layer serves the hour"
            yield (error if is_served else info)(
                Issue.LOST_FILE, f"{stream.name} {hour}", "its files in storage", found, remedy
            )


def failed(stream: Stream, found: AnabranchError) -> Finding | None:
    """Return the finding for tables that storage lacks files of; None for another error."""
    if not isinstance(found, FileGone):
        return None
    expected, remedy = "the files of its tables in storage", "the last part of the message"
    return error(Issue.LOST_FILE, stream.name, expected, str(found), remedy)


def next_command(stream: Stream, facts: StreamFacts | None) -> str:
    """Return the next command for a stream without problems; no `facts` before `apply`. Pure."""
    if facts is None:
        return f"anabranch apply {stream.name}"
    if facts.status.lag.offsets:
        return f"anabranch speed {stream.name}"
    if facts.status.backlog or facts.status.to_seal:
        return f"anabranch batch {stream.name}"
    return f"anabranch hours {stream.name}"
