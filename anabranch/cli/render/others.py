"""Texts of the audit of a table that another program writes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from anabranch.cli.report import Table, Text
from anabranch.kafka.batches import CLASSES, PRESENT

if TYPE_CHECKING:
    from anabranch.operations.audit.other import OtherAudit, Spans

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
    yield (
        f"{audit.topic}: {len(audit.hours)} hours, {sum(h.offsets for h in audit.hours)} offsets: "
        f"{missing}, {total['twice']} rows too many"
        + (", each record is in the table once" if audit.is_proven else "")
    )


def _beside(audit: OtherAudit) -> Iterator[str]:
    if audit.unplaced:
        yield f"{audit.unplaced} rows have no partition or no offset: what they are is not proven"
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
