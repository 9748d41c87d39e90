"""Texts of reports on hours: list, decisions, acts, explanation, completeness, audit."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from anabranch.cli.report import Table, Text, table_of
from anabranch.kafka.batches import CLASSES, PRESENT
from anabranch.operations.reports.acts import hours_words, outcome_words
from anabranch.protocol.decisions import changed_words
from anabranch.protocol.ledger_row import COUNTS, percent

if TYPE_CHECKING:
    from anabranch.operations.audit.checks import Audited, AuditReport
    from anabranch.operations.audit.other import OtherAudit, Spans
    from anabranch.operations.reports.acts import ActRecord
    from anabranch.operations.reports.status import HourSummary
    from anabranch.protocol.decisions import DecisionFacts
    from anabranch.protocol.watermarks import EventTimeCompleteness


def hours_text(views: Sequence[HourSummary]) -> Text:
    yield table_of(map(_hour_cells, views))


def _hour_cells(view: HourSummary) -> dict[str, object]:
    diff = view.diff
    return {
        "hour": view.hour,
        "state": view.state,
        "revision": view.revision or "",
        "served": view.served,
        **dict(zip(COUNTS, view.counts.cells, strict=True)),
        "conflicts": view.counts.conflicts or "",
        "dead share": percent(view.dead_share.share) if view.dead_share is not None else "",
        "speed rows": view.speed_rows,
        "diff": f"{diff.missing}/{diff.extra}/{diff.changed}" if diff is not None else "",
        "quality": {True: "passed", False: "failed", None: ""}[view.quality.passed],
        "reason": view.reason,
    }


def history_text(stream: str, hour: str | None, decisions: Sequence[DecisionFacts]) -> Text:
    if not decisions:
        yield f"{stream}: the ledger has no decision{f' about hour {hour}' if hour else ''} yet"
        return
    yield table_of(map(_decision_cells, decisions))
    for decision in decisions:
        if decision.readable is None or (decision.tag is None and decision.query is not None):
            continue
        revision = f"hour {decision.hour}, revision {decision.revision}"
        yield f"{revision}: can be read: {decision.readable}"
        if decision.query is not None:
            yield f"  {decision.query}"


def _decision_cells(decision: DecisionFacts) -> dict[str, object]:
    is_restated = decision.decision == "accepted" and decision.revision > 1
    return {
        "hour": decision.hour,
        "at": f"{decision.at:%F %T}",
        "decision": decision.decision,
        "revision": decision.revision or "",
        "served": decision.served,
        **dict(zip(COUNTS, decision.counts.cells, strict=True)),
        "changed": changed_words(decision.changed) if is_restated else "",
        "reason": decision.reason,
    }


def acts_text(stream: str, acts: Sequence[ActRecord]) -> Text:
    if not acts:
        yield f"{stream}: the ledger has no operator's act yet"
        return
    columns = ("at", "act", "user", "host", "hours", "led to", "why")
    rows = [
        (f"{a.at:%F %T}", a.act, a.user, a.host, hours_words(a), outcome_words(a), a.why)
        for a in acts
    ]
    yield Table(columns, rows)


def explanation_text(sentences: Sequence[tuple[str, str]]) -> Text:
    """Return a line for each subject and sentence, aligned."""
    width = max(len(subject) for subject, _ in sentences)
    for subject, sentence in sentences:
        yield f"{subject:<{width}}  {sentence}"


def event_time_text(view: EventTimeCompleteness) -> Text:
    """Return whether a stream has all events of a time."""
    rows: list[tuple[str, object]] = [
        ("events of", view.event_time),
        (
            "can be in the hours",
            f"{view.first} to {view.last or 'no bound: the stream has no event_time.past'}",
        ),
        ("accepted", view.accepted),
        ("sealed, not accepted", ", ".join(view.waiting) or "none"),
        ("not sealed yet", f"from {view.open} on" if view.open is not None else "none"),
        ("the last one ends", view.complete_at),
        ("complete", "yes" if view.complete else "no"),
    ]
    yield Table((view.stream, ""), rows)


def complete_text(common: str | None, hours: Mapping[str, str | None], is_known: bool) -> Text:
    """Return the last complete hour of each stream, and of all (`common`) if all answered."""
    yield Table(
        ("stream", "complete through"), [(name, hour or "none") for name, hour in hours.items()]
    )
    yield f"complete through: {common or ('none' if is_known else 'not known')}"


def audit_text(report: AuditReport) -> Text:
    if not report.hours and report.agrees:
        yield f"{report.stream}: no accepted hour to audit"
        return
    names = ("hour", "served", "offsets", "rows", "dead", "duplicate", "gap", "batch", "kafka", "")
    yield Table(names, [_audit_cells(hour, report) for hour in report.hours])
    for disagreement in report.disagreements:
        yield disagreement.message
    offsets = sum(_offsets(hour) for hour in report.hours)
    subject = f"{report.stream}: {len(report.hours)} accepted hours, {offsets} offsets"
    whole = sum(hour.read_of_kafka == "whole" for hour in report.hours)
    if not report.agrees:
        yield f"{subject}: {len(report.disagreements)} disagreements"
    elif whole < len(report.hours):
        yield (
            f"{subject}: ledger and files agree, and Kafka as far as it was read ({whole} hours "
            "whole)"
        )
    else:
        yield f"{subject}: ledger, files and Kafka agree"


def _offsets(audited: Audited) -> int:
    return sum(r.cut[1] - r.cut[0] for r in audited.partitions.values())


def _audit_cells(audited: Audited, report: AuditReport) -> list[object]:
    """Return the cells of an hour: counts from the files, duplicates and gaps from the ledger."""
    counted = list(audited.partitions.values())
    kafka = [r.kafka for r in counted if r.kafka is not None]
    in_kafka = sum(k.in_kafka[1] - k.in_kafka[0] for k in kafka)
    given = sum(k.offsets for k in kafka)
    duplicate, gap = audited.account.duplicate, audited.account.gap
    return [
        audited.hour,
        audited.served,
        _offsets(audited),
        sum(r.rows for r in counted),
        sum(r.dead for r in counted),
        "" if duplicate is None else duplicate,
        "" if gap is None else gap,
        sum(r.batch for r in counted),
        audited.kafka or f"{given} of {in_kafka} given",
        f"{number} disagree" if (number := len(report.of_hour(audited.hour))) else "agrees",
    ]


_GAPS = tuple(name for name in CLASSES if name != PRESENT)
_SHOWN = 10


def other_text(audit: OtherAudit) -> Text:
    yield f"{audit.table}; topic {audit.topic}; columns {', '.join(audit.columns) or 'none'}"
    if audit.unproven is not None:
        rows = [(hour or "no time", n) for hour, n in audit.by_time.items()]
        yield Table(("hour", "rows"), rows)
        yield f"{audit.rows} rows; {audit.unproven}"
        return
    names = ("hour", "offsets", "rows", "twice", "missing", *_GAPS)
    yield Table(
        names,
        [
            (
                h.hour,
                h.offsets,
                *(h.total(name) for name in names[2:5]),
                *(h.gaps[g] for g in _GAPS),
            )
            for h in audit.hours
        ],
    )
    for hour in audit.hours:
        for p, counts in hour.partitions.items():
            where = f"hour {hour.hour}, partition {p}"
            if counts.missing:
                yield f"{where}: {counts.missing} missing: {_spans(counts.missing_at)}"
            if counts.twice:
                yield f"{where}: {counts.twice} rows too many: {_spans(counts.twice_at)}"
            if counts.uncommitted:
                yield f"{where}: {counts.uncommitted} rows of aborted transactions"
    if audit.records:
        columns = ("partition", "offset", "timestamp", "key", "value")
        cells = [(r.partition, r.offset, r.timestamp_ms, r.key, r.value) for r in audit.records]
        yield Table(columns, cells)
    yield from _beside(audit)
    total = {name: sum(h.total(name) for h in audit.hours) for name in ("missing", "twice")}
    missing = f"{total['missing']} records missing" if audit.kafka else "Kafka was not read"
    beside = "audited " if audit.before or audit.behind else ""
    yield (
        f"{audit.topic}: {len(audit.hours)} hours, {sum(h.offsets for h in audit.hours)} offsets: "
        f"{missing}, {total['twice']} rows too many"
        + (f", each {beside}record is in the table once" if audit.is_proven else "")
    )


def _beside(audit: OtherAudit) -> Iterator[str]:
    if audit.unplaced:
        yield (
            f"{audit.unplaced} rows have no whole number as partition or offset: what they are is "
            "not proven"
        )
    if audit.unknown:
        yield (
            f"{audit.unknown} rows are at places that the topic's log never had: of another topic, "
            "or from before it was recreated"
        )
    if audit.elsewhere:
        yield f"{audit.elsewhere} rows are of other topics"
    if audit.before:
        yield f"before the table's first rows, not audited: {_by_partition(audit.before)}"
    if audit.behind:
        yield f"after the table's last rows, not audited: {_by_partition(audit.behind)}"
    if audit.without_rows:
        numbers = ", ".join(map(str, audit.without_rows))
        yield f"partitions without a row, of which nothing is proven: {numbers}"
    if audit.cut_off:
        numbers = ", ".join(map(str, audit.cut_off))
        yield (
            f"partitions without an offset before these hours, of which Kafka has deleted some: "
            f"{numbers}; that none was of these hours is not proven"
        )
    if audit.before or audit.behind:
        yield "--hours A..B audits whole hours"
    if retention := sum(h.gaps["retention"] for h in audit.hours):
        yield (
            f"{retention} offsets are neither in the table nor "
            + ("in Kafka any more" if audit.kafka else "looked for in Kafka")
            + ": whether they were records cannot be proven"
        )


def _by_partition(offsets: Mapping[int, int]) -> str:
    return ", ".join(f"{n} offsets of partition {p}" for p, n in offsets.items())


def _spans(spans: Spans) -> str:
    words = [str(s) if e == s + 1 else f"{s} to {e - 1}" for s, e in spans[:_SHOWN]]
    more = f", … ({len(spans)} ranges in --output json)" if len(spans) > _SHOWN else ""
    return f"offsets {', '.join(words)}{more}"
