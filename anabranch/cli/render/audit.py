"""Print an audit."""

from __future__ import annotations

from anabranch.common.output import print_json, print_table
from anabranch.operations.audit.checks import AuditedHour, AuditReport


def print_audit(report: AuditReport, output: str) -> None:
    if output == "json":
        print_json(report.as_dict())
        return
    if not report.hours and report.agrees:
        print(f"{report.stream}: no accepted hour to audit")
        return
    names = ("hour", "served", "offsets", "rows", "dead", "duplicate", "gap", "batch", "kafka", "")
    print_table(names, [_cells(hour) for hour in report.hours])
    for disagreement in report.disagreements:
        print(disagreement.message)
    offsets = sum(_offsets(hour) for hour in report.hours)
    subject = f"{report.stream}: {len(report.hours)} accepted hours, {offsets} offsets"
    whole = sum(hour.read_of_kafka == "whole" for hour in report.hours)
    if not report.agrees:
        print(f"{subject}: {len(report.disagreements)} disagreements")
    elif whole < len(report.hours):
        print(
            f"{subject}: ledger and files agree, and Kafka as far as it was read ({whole} hours "
            "whole)"
        )
    else:
        print(f"{subject}: ledger, files and Kafka agree")


def _offsets(hour: AuditedHour) -> int:
    return sum(r.cut[1] - r.cut[0] for r in hour.audited.partitions.values())


def _cells(hour: AuditedHour) -> list[object]:
    """Return the cells of an hour: counts from the files, duplicates and gaps from the ledger."""
    audited = hour.audited
    counted = list(audited.partitions.values())
    kafka = [r.kafka for r in counted if r.kafka is not None]
    in_kafka, given = (
        sum(k.in_kafka[1] - k.in_kafka[0] for k in kafka),
        sum(k.offsets for k in kafka),
    )
    duplicate, gap = audited.account.duplicate, audited.account.gap
    return [
        audited.hour,
        audited.served,
        _offsets(hour),
        sum(r.rows for r in counted),
        sum(r.dead for r in counted),
        "" if duplicate is None else duplicate,
        "" if gap is None else gap,
        sum(r.batch for r in counted),
        audited.kafka or f"{given} of {in_kafka} given",
        f"{len(hour.disagreements)} disagree" if hour.disagreements else "agrees",
    ]
