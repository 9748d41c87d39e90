"""The facts about an hour as short sentences for an operator, with numbers and the next command."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime

from anabranch.common.output import text
from anabranch.offsets.hours import IMPORTED
from anabranch.operations.reports.explain import BranchRows, HourFacts, Refusal
from anabranch.operations.reports.status import unexplained_words
from anabranch.protocol.decisions import DecisionFacts, changed_words
from anabranch.protocol.ledger_row import TERMS, Diff, QualityResult, UnknownFields, accounted

_PARTITIONS = 8  # maximum partitions of a cut in a sentence
_FIELDS = 8  # maximum unknown fields in a sentence


def explain_sentences(facts: HourFacts) -> list[tuple[str, str]]:
    """Return the explanation of an hour as (subject, text) pairs, each text a sentence or two.
    Pure."""
    sentences = [("hour", _headline(facts))]
    if facts.state in ("before the first", "not begun"):
        return sentences
    if facts.can_be_sealed_from is not None:
        seal = (
            f"it can be sealed from {_time(facts.can_be_sealed_from)} on, by any run of the batch "
            "layer"
        )
        return [*sentences, ("seal", seal), ("layers", _layers(facts)), *_commands(facts)]
    sentences += [("sealed", _sealed(facts)), ("layers", _layers(facts))]
    if facts.offsets != 0:
        sentences += [
            (subject, text)
            for subject, text in (("account", _account(facts)), ("checks", _checks(facts)))
            if text
        ]
    sentences += [("refused", _refusal(facts, refusal)) for refusal in facts.refusals[-1:]]
    sentences.append(("served", _served(facts)))
    sentences += [("revision", _revision(decision)) for decision in facts.revisions]
    return [*sentences, *_commands(facts)]


def _headline(facts: HourFacts) -> str:
    hour, first = f"{facts.hour} of {facts.stream}", facts.first_hour
    match facts.state:
        case "before the first":
            return (
                f"{hour} is before {first}, where the stream begins; earlier records of Kafka "
                f"belong to {first}"
            )
        case "not begun":
            return f"{hour} has not begun; the open hour is {facts.open_hour}"
        case "open":
            return f"{hour} is open: it still receives records, and the speed layer serves them"
        case "ended":
            return f"{hour} has ended and is not sealed yet; the speed layer serves it"
        case "accepted":
            return (
                f"{hour} is accepted as revision {facts.revision}; the {facts.served} layer "
                "serves it"
            )
        case "expired":
            return (
                f"{hour} is accepted as revision {facts.revision}; its rows have expired "
                "(keep.rows)"
            )
        case "refused":
            return f"{hour} is refused; the {facts.served} layer still serves it"
    return f"{hour} is sealed and waits for the batch layer; the {facts.served} layer serves it"


def _sealed(facts: HourFacts) -> str:
    if facts.topic_id == IMPORTED:
        return f"without a seal: it was imported, with {facts.offsets} source rows as its offsets"
    at = (
        f"at {_time(facts.sealed_at)}"
        if facts.sealed_at is not None
        else "at a time that is not in the ledger"
    )
    reason = f" ({facts.sealed_reason})" if facts.sealed_reason else ""
    if facts.cut is None:
        return f"{at}{reason}; its cut is no longer in the table or the ledger"
    if facts.offsets == 0:
        return f"{at}{reason}, without records"
    ranges = [f"partition {p} [{s}, {e})" for p, (s, e) in facts.cut.items() if s < e]
    more = f" and {len(ranges) - _PARTITIONS} more" if len(ranges) > _PARTITIONS else ""
    where = ", ".join(ranges[:_PARTITIONS]) + more
    return f"{at}{reason}: {facts.offsets} offsets of topic id {facts.topic_id}: {where}"


def _layers(facts: HourFacts) -> str:
    layers = facts.layers
    text = (
        f"speed has {_rows(layers.speed)}, batch has {_rows(layers.batch)}, main serves "
        f"{_rows(layers.main)}"
    )
    if layers.uncovered is not None:
        text += f"; speed does not cover the whole hour: {layers.uncovered}"
    return text


def _rows(rows: BranchRows) -> str:
    return f"{_many(rows.rows, 'row')} in {_many(rows.files, 'file')}" if rows.files else "no rows"


def _account(facts: HourFacts) -> str | None:
    counts, stream, hour = facts.counts, facts.stream, facts.hour
    if counts.good is None:
        return "the ledger has no counts" if facts.state in _ACCEPTED else None
    parts = [f"{counts.good} became rows"]
    if counts.dead:
        parts.append(
            f"{counts.dead} are dead letters (`anabranch dead-letters {stream} --hours {hour}`)"
        )
    if counts.duplicate:
        other = f", {counts.conflicts} of them with OTHER CONTENT" if counts.conflicts else ""
        parts.append(
            f"{counts.duplicate} were removed as duplicates{other} (`anabranch explain {stream} "
            f"{hour} --rows`)"
        )
    if counts.gap:
        classes = ", ".join(f"{n} {name}" for name, n in facts.gaps.items())
        parts.append(f"{counts.gap} are gaps ({classes})")
    if counts.erased:
        parts.append(f"{counts.erased} were erased (`anabranch erasures {stream}`)")
    build = "of" if facts.state in _ACCEPTED else "in the build that was refused, of"
    offsets = counts.offsets if counts.offsets is not None else "its"
    return f"{build} {offsets} offsets " + ", ".join(parts) + _sources(facts.sources)


_ACCEPTED = ("accepted", "expired")
_FROM = {
    "kafka": "Kafka",
    "accepted": "the rows that were accepted",
    "dead_letters": "the dead letters' bytes",
    "speed": "the speed layer",
    "import": "files (`anabranch import`)",
}


def _sources(sources: Mapping[str, int] | None) -> str:
    """Return the sources of the records as text; empty if the ledger has none."""
    counted = {name: n for name, n in (sources or {}).items() if n}
    if set(counted) <= {"kafka"}:
        return "; all read from Kafka" if counted else ""
    return "; " + ", ".join(f"{n} read from {_FROM.get(name, name)}" for name, n in counted.items())


def _checks(facts: HourFacts) -> str | None:
    parts, counts = [], facts.counts
    if (total := accounted(counts)) is not None and counts.offsets is not None:
        terms = " + ".join(
            str(getattr(counts, name)) for name in (*TERMS, *(["erased"] if counts.erased else []))
        )
        closes = "closes" if total == counts.offsets else "does NOT close"
        parts.append(f"the balance {closes} ({terms} = {total} of {counts.offsets} offsets)")
    if facts.quality is not None:
        parts.append(_quality(facts.quality))
    if facts.diff is not None:
        parts.append(_diff(facts, facts.diff))
    if facts.unknown is not None and facts.unknown.records:
        parts.append(_unknown(facts.stream, facts.unknown))
    return "; ".join(parts) or None


def _quality(quality: QualityResult) -> str:
    """Return the gate's verdict as text."""
    if quality.evaluated == 0:
        return "the stream has no expectations"
    verdict = "passed" if quality.passed else "failed"
    text = f"the quality gate {verdict} ({_many(quality.evaluated, 'expectation')})"
    for kind, entries in (("critical", quality.failed), ("warnings", quality.warnings)):
        if entries:
            text += f", {kind}: {', '.join(str(entry.get('type', entry)) for entry in entries)}"
    return text


def _unknown(stream: str, unknown: UnknownFields) -> str:
    shown = unknown.fields[:_FIELDS]
    names = ", ".join(text(field.name) for field in shown)
    more = len(unknown.fields) - len(shown) + unknown.others
    of = names + (f" and {more} more" if more else "")
    held = _many(unknown.records, "record")
    remedy = f"`anabranch check {stream} --drift`"
    return f"{held} with fields that the schema does not know: {of} ({remedy})"


def _diff(facts: HourFacts, diff: Diff) -> str:
    unread = (
        f" ({diff.unread} of them not read by the speed layer at that time)" if diff.unread else ""
    )
    text = (
        f"compared with {facts.speed_rows or 0} rows of speed: {diff.missing} missing{unread}, "
        f"{diff.extra} extra, {diff.changed} changed"
    )
    if facts.unexplained:
        look = f"`anabranch explain {facts.stream} {facts.hour} --rows`"
        return f"{text}; NOTHING EXPLAINS {unexplained_words(facts.unexplained)}: {look}"
    return text


def _refusal(facts: HourFacts, refusal: Refusal) -> str:
    times = len(facts.refusals)
    text = (
        f"at {_time(refusal.at)}"
        + (f" (refusal {times})" if times > 1 else "")
        + f": {refusal.reason}"
    )
    if facts.state in _ACCEPTED:
        return (
            f"a restatement (revision {refusal.revision}) {text}; revision {facts.revision} stays"
        )
    return text


def _served(facts: HourFacts) -> str:
    stream, hour = facts.stream, facts.hour
    since = f" since {_time(facts.served_since)}" if facts.served_since is not None else ""
    text = f"by {facts.served}{since}"
    if facts.override is not None:
        why = facts.override.reason or "the reason is not in the ledger"
        text += (
            f", by choice: {why}; `anabranch override {stream} {hour} --layer auto --why TEXT` "
            "removes it"
        )
    elif facts.state in _ACCEPTED:
        text += ", by the rule: the batch layer has accepted it"
    else:
        text += ", by the rule: the batch layer has not accepted it"
    if not facts.merged and not facts.kept:
        text += (
            f"; but main does NOT contain the {facts.served} layer's files: `anabranch merge "
            f"{stream}` repairs it"
        )
    if facts.kept:
        text += "; main keeps rows that this layer does not cover yet"
    return text


def _revision(decision: DecisionFacts) -> str:
    text = f"{decision.revision} at {_time(decision.at)}"
    if decision.revision > 1:
        text += f", {decision.reason}: {changed_words(decision.changed)}"
    elif decision.reason:
        text += f", {decision.reason}"
    if decision.tag is not None or decision.query is None:
        text += f"; can be read: {decision.readable}"
    if decision.tag is not None and decision.query is not None:
        text += f": `{decision.query}`"
    return text


def _commands(facts: HourFacts) -> list[tuple[str, str]]:
    commands = []
    if facts.query is not None:
        commands.append(("query", f"`{facts.query}`"))
    if facts.rebuild is not None:
        mend = "fix the cause of the refusal, then " if facts.state == "refused" else ""
        kept = (
            f", from the rows and dead letters in the table: {facts.gone}"
            if facts.gone is not None
            else ""
        )
        commands.append(("rebuild", f"{mend}`{facts.rebuild}`{kept}"))
    elif facts.gone is not None and facts.state != "expired":
        stays = f"the {facts.served} layer's rows stay served"
        commands.append(("rebuild", f"it cannot be rebuilt: {facts.gone}; {stays}"))
    elif facts.state == "expired":
        commands.append(
            ("rebuild", "an expired hour is not rebuilt: its account stays in the ledger")
        )
    elif facts.state == "accepted":
        commands.append(("rebuild", "nothing to rebuild: it has no records"))
    if facts.state == "accepted":
        commands.append(("audit", f"`anabranch audit {facts.stream} --hours {facts.hour}`"))
    return commands


def _many(n: int, noun: str) -> str:
    return f"{n} {noun}" if n == 1 else f"{n} {noun}s"


def _time(when: datetime) -> str:
    return f"{when:%F %T} UTC"
