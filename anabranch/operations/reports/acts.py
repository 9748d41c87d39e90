"""Operators' acts in the ledger: who did what to which hours, when, on which host, why, and with
which result."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

from anabranch.common.arrays import grouped
from anabranch.job import Job
from anabranch.protocol.ledger_row import Act, LedgerRow


@dataclass(frozen=True)
class ActRecord:
    """An operator's act and its result. `hours`: the hours of its decisions; `decisions`: their
    number by kind; `reasons`: their reasons other than `why`."""

    at: datetime
    act: str
    user: str
    host: str
    why: str | None
    hours: tuple[str, ...]
    decisions: Mapping[str, int]
    reasons: tuple[str, ...]


def acts(job: Job, hour: str | None = None) -> list[ActRecord]:
    """Return the ledger's acts, oldest first: all, or those of `hour`. Raises Transient."""
    return [act for act in act_records(job.ledger.acts()) if hour is None or hour in act.hours]


def hours_words(act: ActRecord) -> str:
    """Return an act's hours as text: one hour, or first and last with their number. Pure."""
    first, last = act.hours[0], act.hours[-1]
    return first if first == last else f"{first}..{last} ({len(act.hours)})"


def outcome_words(act: ActRecord) -> str:
    return ", ".join(f"{count} {decision}" for decision, count in act.decisions.items())


def act_records(rows: Iterable[LedgerRow]) -> list[ActRecord]:
    """Return the acts of the ledger's rows, oldest first, each with all its decisions. Pure."""
    by_act = grouped(rows, lambda row: row.act).items()
    found = [_record(act, of_act) for act, of_act in by_act if act is not None]
    return sorted(found, key=lambda record: record.at)


def _record(act: Act, rows: Sequence[LedgerRow]) -> ActRecord:
    hours, counts = (
        tuple(sorted({row.hour for row in rows})),
        dict(Counter[str](row.decision for row in rows)),
    )
    reasons = tuple(
        dict.fromkeys(
            row.reason for row in rows if row.reason is not None and row.reason != act.why
        )
    )
    return ActRecord(act.at, act.name, act.user, act.host, act.why, hours, counts, reasons)
