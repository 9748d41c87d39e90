"""An hour's page: the output of `explain --rows`, `history` and `dead-letters` in one place, with
the commands that apply to the hour."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from anabranch.common.errors import Refused
from anabranch.common.output import text
from anabranch.job import Job
from anabranch.operations.reports import dead_letters, diff
from anabranch.operations.reports.dead_letters import DeadLetters
from anabranch.operations.reports.diff import HourDifference, HourDuplicates
from anabranch.operations.reports.explain import HourFacts, explain
from anabranch.operations.reports.explain_text import explain_sentences
from anabranch.protocol.decisions import DecisionFacts, decisions
from anabranch.protocol.ledger_row import Entries, accounted
from serving_layer.layer_diff import Sample

_SAMPLES = 3  # samples of each kind of difference and each reason of a dead letter
_DUPLICATES = 20
_LONGEST = 300  # maximum characters of a value


@dataclass(frozen=True)
class HourRows:
    """The data about an hour from its data files. `comparison_unavailable`: why differences and
    duplicates cannot be shown; None if they are."""

    letters: DeadLetters
    difference: HourDifference | None
    duplicates: HourDuplicates | None
    comparison_unavailable: str | None


def read_rows(job: Job, hour: str) -> HourRows:
    """Read the dead letters, and compare the layers if the hour is accepted. Raises Transient when
    the lake does not answer."""
    letters = dead_letters.letters(job, (hour, hour), _SAMPLES)
    try:
        difference = diff.difference(job, hour, _SAMPLES)
        return HourRows(letters, difference, diff.duplicates(job, hour, _DUPLICATES), None)
    except Refused as refusal:
        return HourRows(letters, None, None, str(refusal))


@dataclass(frozen=True)
class Command:
    does: str
    line: str


@dataclass(frozen=True)
class BalanceLine:
    """A term of the hour's account, in total and by partition."""

    term: str
    total: int
    partitions: Sequence[int]


@dataclass(frozen=True)
class BalanceTable:
    """The hour's account; `closes` is None if the ledger row is incomplete."""

    partitions: Sequence[int]
    lines: Sequence[BalanceLine]
    offsets: int | None
    closes: bool | None


@dataclass(frozen=True)
class ExpectationLine:
    verdict: str
    type: str
    about: str
    severity: str
    observed: str
    message: str


@dataclass(frozen=True)
class SampleLine:
    """A row in which the layers differ. `columns`: (name, value in speed, value in batch)."""

    kind: str
    partition: int
    offset: int
    columns: Sequence[tuple[str, str, str]]


@dataclass(frozen=True)
class HourRecord:
    """The data about an hour from ledger and snapshots."""

    facts: HourFacts
    sentences: Sequence[tuple[str, str]]
    decisions: Sequence[DecisionFacts]
    balance: BalanceTable | None
    expectations: Sequence[ExpectationLine]
    commands: Sequence[Command]


def read_record(job: Job, hour: str, now: datetime) -> HourRecord:
    """Read the ledger and the snapshots. Raises Transient when the lake is unreachable."""
    facts = explain(job, hour, now)
    return HourRecord(
        facts=facts,
        sentences=explain_sentences(facts),
        decisions=decisions(job.lake, job.stream, hour),
        balance=balance_of(facts),
        expectations=expectation_lines(facts),
        commands=hour_commands(facts),
    )


def balance_of(facts: HourFacts) -> BalanceTable | None:
    """Return the account as a table: good, dead, duplicate, each class of gap, and erased; None
    without counts. Pure."""
    counts = facts.counts
    if counts.good is None:
        return None
    accounts = dict(sorted((facts.partitions or {}).items()))
    each = list(accounts.values())
    terms = [
        ("good", counts.good, [a.good for a in each]),
        ("dead", counts.dead or 0, [a.dead for a in each]),
    ]
    duplicate, conflicts = counts.duplicate or 0, counts.conflicts or 0
    others = [a.conflicts or 0 for a in each]
    equal = [a.duplicate - n for a, n in zip(each, others, strict=True)]
    terms.append(("duplicate", duplicate - conflicts, equal))
    if conflicts:
        terms.append(("duplicate, other content", conflicts, others))
    terms += [
        (f"gap: {name}", n, [a.gaps.get(name, 0) for a in each]) for name, n in facts.gaps.items()
    ]
    if not facts.gaps:
        terms.append(("gap", counts.gap or 0, [a.gap for a in each]))
    if counts.erased:
        terms.append(("erased", counts.erased, [a.erased or 0 for a in each]))
    total = accounted(counts)
    closes = total == counts.offsets if total is not None and counts.offsets is not None else None
    return BalanceTable(
        tuple(accounts), [BalanceLine(*term) for term in terms], counts.offsets, closes
    )


def expectation_lines(facts: HourFacts) -> list[ExpectationLine]:
    """Return the gate's results, failures first. Pure."""
    quality = facts.quality
    if quality is None:
        return []
    groups: tuple[tuple[str, Entries], ...] = (
        ("failed", quality.failed),
        ("warning", quality.warnings),
        ("not applicable", quality.not_applicable),
        ("met", quality.met),
    )
    return [_expectation(verdict, entry) for verdict, entries in groups for entry in entries]


def _expectation(verdict: str, entry: Mapping[str, Any]) -> ExpectationLine:
    kwargs = entry.get("kwargs") or {}
    return ExpectationLine(
        verdict=verdict,
        type=str(entry.get("type", "")),
        about=", ".join(f"{name} {_short(value)}" for name, value in kwargs.items()),
        severity=str(entry.get("severity", "")),
        observed=_short(entry.get("observed")),
        message=str(entry.get("message") or entry.get("reason") or ""),
    )


def sample_line(sample: Sample) -> SampleLine:
    names = sample.columns or [
        n for n in (sample.speed or sample.batch or {}) if not n.startswith("kafka_")
    ]
    one, other = sample.speed or {}, sample.batch or {}
    columns = [(n, _short(one.get(n)), _short(other.get(n))) for n in names]
    return SampleLine(sample.kind, sample.partition, sample.offset, columns)


def _short(value: object) -> str:
    line = text(value)
    return line if len(line) <= _LONGEST else line[:_LONGEST] + "…"


def hour_commands(facts: HourFacts) -> list[Command]:
    """Return the commands that apply to the hour in its state, ready to run; WHY is a placeholder
    for the operator's reason. Pure."""
    stream, hour = shlex.quote(facts.stream), facts.hour
    commands = []
    if facts.query is not None:
        commands.append(Command("read its rows", facts.query))
    for revision in facts.revisions:
        if revision.tag is not None and revision.query is not None:
            commands.append(
                Command(f"read its rows of revision {revision.revision}", revision.query)
            )
    if facts.rebuild is not None:
        what = {"accepted": "rebuild it from Kafka as a new revision", "ended": "seal and build it"}
        commands.append(Command(what.get(facts.state, "build it (again)"), facts.rebuild))
    if facts.state == "refused" and facts.rebuild is not None:
        why = f"{facts.rebuild} --accept --why WHY"
        commands.append(Command("publish it although it was refused; the balance must close", why))
    if not facts.merged and not facts.kept:
        commands.append(
            Command("put the serving layer's files into main", f"anabranch merge {stream}")
        )
    if facts.state == "accepted":
        commands += [
            Command(
                "recount it in the files and in Kafka", f"anabranch audit {stream} --hours {hour}"
            ),
            Command(
                "compare the layers row by row, and list what batch removed as duplicates",
                f"anabranch explain {stream} {hour} --rows",
            ),
        ]
    if facts.counts.dead:
        letters = f"anabranch dead-letters {stream} --hours {hour}"
        commands.append(Command("list its dead letters", letters))
        if facts.state == "accepted":
            commands.append(Command("restate it if some of them decode now", f"{letters} --replay"))
    if facts.override is not None:
        line = f"anabranch override {stream} {hour} --layer auto --why WHY"
        commands.append(Command("lift the override", line))
    elif facts.state == "accepted" and facts.layers.uncovered is None:
        line = f"anabranch override {stream} {hour} --layer speed --why WHY"
        commands.append(Command("serve it from the speed layer", line))
    return commands
