"""Facts about one hour, from the ledger and the snapshots only (neither Kafka nor rows are read),
and their text for an operator: short sentences with numbers and the next command."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime

from anabranch.common.output import name_text
from anabranch.config import Stream
from anabranch.iceberg import snapshots
from anabranch.iceberg.manifests import content_by_hour, files_of
from anabranch.job import Job
from anabranch.offsets import hours as hour_words
from anabranch.offsets.hours import IMPORTED, Cut, end_of
from anabranch.offsets.position import Ranges
from anabranch.operations.reports.dead_letters import speed_rows_reason
from anabranch.operations.reports.status import unexplained_words
from anabranch.protocol import ledger
from anabranch.protocol.decisions import (
    DecisionFacts,
    Tagged,
    changed_words,
    history_rows,
    hour_query,
    tagged,
)
from anabranch.protocol.ledger_row import (
    TERMS,
    Account,
    Counts,
    Diff,
    HourAccount,
    Kind,
    Layer,
    LedgerRow,
    QualityResult,
    UnknownFields,
    accounted,
    ranges_of,
    unexplained_counts,
)
from anabranch.protocol.retention import is_kept
from anabranch.protocol.state import State
from anabranch.protocol.topic_change import gone_from_kafka

# Rows of each of the hour's files, by branch and file path.
RowsByFile = Mapping[str, Mapping[str, int]]


@dataclass(frozen=True)
class BranchRows:
    rows: int
    files: int


@dataclass(frozen=True)
class Layers:
    """An hour's rows in each branch, and its dead letters in `main`. `uncovered`: why the speed
    layer does not cover a sealed hour completely; None if it does."""

    main: BranchRows
    speed: BranchRows
    batch: BranchRows
    uncovered: str | None
    dead_letters: int


@dataclass(frozen=True)
class Refusal:
    at: datetime
    revision: int
    reason: str | None


@dataclass(frozen=True)
class Override:
    """The layer that an operator chose for an hour; time and reason None if not in the ledger."""

    layer: Layer
    at: datetime | None
    reason: str | None


@dataclass(frozen=True)
class HourFacts:
    """Facts about an hour; None for values that do not exist yet or are no longer recorded. `state`
    is from `classify_hour`. The account (`counts` to `unknown`) belongs to the accepted revision,
    after its erasures, else to the newest refused build. `merged`: `main` contains exactly the
    serving layer's files. `kept`: `main` retains rows that this layer does not cover. `gone`: why
    Kafka can no longer supply the hour."""

    stream: str
    hour: str
    state: str
    first_hour: str
    open_hour: str
    sealed_at: datetime | None
    sealed_reason: str | None
    can_be_sealed_from: datetime | None
    topic_id: str | None
    cut: Ranges | None
    offsets: int | None
    revision: int
    accepted_at: datetime | None
    snapshot_id: int | None
    reason: str | None
    counts: Counts
    gaps: Mapping[str, int]
    partitions: Mapping[int, Account] | None
    sources: Mapping[str, int] | None
    layers: Layers
    speed_rows: int | None
    diff: Diff | None
    unexplained: Mapping[str, int]
    quality: QualityResult | None
    unknown: UnknownFields | None
    refusals: Sequence[Refusal]
    served: Layer | None
    served_since: datetime | None
    override: Override | None
    merged: bool
    kept: bool
    gone: str | None
    revisions: Sequence[DecisionFacts]
    query: str | None
    rebuild: str | None


def explain(job: Job, hour: str, now: datetime) -> HourFacts:
    """Return the facts about an hour. Raises Transient when the lake is unreachable."""
    rows, state = job.ledger.history_and_state(job.stream.table, [hour])
    of_hour = [row for row in rows if row.hour == hour]
    by_branch = {
        b: {f.file_path: f.record_count for f in files_of(state.table, b, hour)}
        for b in snapshots.BRANCHES
    }
    tags = tagged(
        state.table, [(hour, row.revision) for row in of_hour if row.decision == "accepted"]
    )
    letters = content_by_hour(job.lake.load(job.stream.dead_letters_table), "main", {hour})
    dead = sum(content.rows for content in letters.values())
    return hour_facts(job.stream, state, hour, of_hour, by_branch, tags, now, dead)


def hour_facts(
    stream: Stream,
    state: State,
    hour: str,
    rows: Sequence[LedgerRow],
    by_branch: RowsByFile,
    tags: Mapping[str, Tagged],
    now: datetime,
    dead: int = 0,
) -> HourFacts:
    """Return an hour's facts. `rows`: of the ledger, oldest first; `by_branch`: files; `dead`: dead
    letters in `main`. Pure."""
    accepted = _last(rows, "accepted") if state.is_accepted(hour) else None
    refusals = _refusals(rows, accepted)
    account = _account(rows, accepted, refusals)
    newest, sealed = state.accepted.get(hour) or accepted, _last(rows, "sealed")
    cut = _cut(state, hour, rows)
    uncovered = speed_rows_reason(state, hour) if state.is_sealed(hour) else None
    gone = (
        gone_from_kafka(state.timeline, state.position.topic_id, hour, cut)
        if cut is not None
        else None
    )
    served = state.served_by(hour)
    is_final = cut is not None and (cut.offsets == 0 or cut.topic_id == hour_words.IMPORTED)
    name = classify_hour(state, hour, bool(refusals), now)
    # Decision 50: without the expired rows of its look-back, a restatement is refused.
    has_lookback = is_kept(state, hour, stream.lookback_hours)
    return HourFacts(
        stream=stream.name,
        hour=hour,
        state=name,
        first_hour=state.timeline.first,
        open_hour=state.timeline.open,
        sealed_at=sealed.recorded_at if sealed else None,
        sealed_reason=sealed.reason if sealed else None,
        can_be_sealed_from=end_of(hour) + stream.batch.grace if name in ("open", "ended") else None,
        topic_id=cut.topic_id if cut is not None else None,
        cut=ranges_of(cut),
        offsets=cut.offsets if cut is not None else None,
        revision=newest.revision if newest is not None else 0,
        accepted_at=accepted.recorded_at if accepted else None,
        snapshot_id=accepted.snapshot_id if accepted else None,
        reason=accepted.reason if accepted else None,
        counts=Counts.of(account),
        gaps=account.gaps or {},
        partitions=account.partitions,
        sources=account.sources,
        layers=Layers(
            **{b: BranchRows(sum(files.values()), len(files)) for b, files in by_branch.items()},
            uncovered=uncovered,
            dead_letters=dead,
        ),
        speed_rows=account.speed_rows,
        diff=replace(account.diff, sample=None) if account.diff is not None else None,
        unexplained=unexplained_counts(account.diff, account.gaps),
        quality=account.quality,
        unknown=account.unknown,
        refusals=[Refusal(row.recorded_at, row.revision, row.reason) for row in refusals],
        served=served if name not in _UNKNOWN else None,
        served_since=served_since(rows, served),
        override=_override(state, hour, rows),
        merged=set(by_branch["main"]) == set(by_branch[served]),
        kept=hour in state.retained_hours,
        gone=gone,
        revisions=[d for d in history_rows(stream.table, rows, tags) if d.decision == "accepted"],
        query=hour_query(stream.table, hour) if name not in (*_UNKNOWN, "expired") else None,
        rebuild=plan_rebuild(stream.name, hour, name, gone, is_final) if has_lookback else None,
    )


_UNKNOWN = ("before the first", "not begun")


def classify_hour(state: State, hour: str, refused: bool, now: datetime) -> str:
    """Return the state of an hour, as one to three words. Pure."""
    timeline = state.timeline
    if hour < timeline.first:
        return "before the first"
    if hour >= timeline.open:
        # After an adoption, the open hour may be in the future and already receive records.
        if hour > max(timeline.open, hour_words.hour_of(now)):
            return "not begun"
        return "ended" if end_of(hour) <= now else "open"
    if state.is_accepted(hour):
        return "expired" if state.is_expired(hour) else "accepted"
    return "refused" if refused else "sealed"


def served_since(rows: Sequence[LedgerRow], served: str) -> datetime | None:
    """Return the time since which the current layer serves the hour, from the ledger; None if only
    the speed layer ever served it, which serves rows as soon as it publishes them. Pure."""
    layer, since = "speed", None
    for row in rows:
        if (
            row.decision in ("accepted", "served")
            and row.served is not None
            and row.served != layer
        ):
            layer, since = row.served, row.recorded_at
    return since if layer == served else None


def plan_rebuild(stream: str, hour: str, name: str, gone: str | None, is_final: bool) -> str | None:
    """Return the command that rebuilds the hour; None if it cannot or need not be rebuilt.
    `is_final`: the hour has no records, or was imported. Pure."""
    if (
        (gone is not None and name != "accepted")
        or name in (*_UNKNOWN, "open", "expired")
        or (is_final and name == "accepted")
    ):
        return None
    return f"anabranch batch {stream} --hour {hour}" + (" --restate" if name == "accepted" else "")


def _last(rows: Sequence[LedgerRow], decision: Kind) -> LedgerRow | None:
    return next((row for row in reversed(rows) if row.decision == decision), None)


def _refusals(rows: Sequence[LedgerRow], accepted: LedgerRow | None) -> list[LedgerRow]:
    """Return the refusals since the newest acceptance, oldest first."""
    behind = list(rows).index(accepted) + 1 if accepted is not None else 0
    return [row for row in rows[behind:] if row.decision == "refused"]


def _account(
    rows: Sequence[LedgerRow], accepted: LedgerRow | None, refusals: Sequence[LedgerRow]
) -> HourAccount:
    if accepted is None:
        return refusals[-1] if refusals else HourAccount()
    return ledger.newest(rows[list(rows).index(accepted) :])[accepted.hour]


def _cut(state: State, hour: str, rows: Sequence[LedgerRow]) -> Cut | None:
    return state.cuts.get(hour) or next(
        (row.cut for row in reversed(rows) if row.cut is not None), None
    )


def _override(state: State, hour: str, rows: Sequence[LedgerRow]) -> Override | None:
    layer = state.overrides.get(hour)
    if layer is None:
        return None
    row = _last(rows, "served")
    if row is not None:
        return Override(layer, row.recorded_at, row.reason)
    return Override(layer, None, None)


_PARTITIONS = 8  # maximum partitions of a cut in a sentence
_FIELDS = 8  # maximum unknown fields in a sentence


def explain_sentences(facts: HourFacts) -> list[tuple[str, str]]:
    """Return an hour's explanation as (subject, text) pairs of a sentence or two. Pure."""
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
            for subject, text in (("account", _account_words(facts)), ("checks", _checks(facts)))
            if text
        ]
    sentences += [("refused", _refusal(facts, refusal)) for refusal in facts.refusals[-1:]]
    sentences.append(("served", _served(facts)))
    sentences += [("revision", _revision_words(decision)) for decision in facts.revisions]
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
    if layers.dead_letters and facts.counts.good is None:
        text += f"; {_many(layers.dead_letters, 'dead letter')} ({_dead_letters(facts)})"
    if layers.uncovered is not None:
        text += f"; speed does not cover the whole hour: {layers.uncovered}"
    return text


def _dead_letters(facts: HourFacts) -> str:
    return f"`anabranch dead-letters {facts.stream} --hours {facts.hour}`"


def _rows(rows: BranchRows) -> str:
    return f"{_many(rows.rows, 'row')} in {_many(rows.files, 'file')}" if rows.files else "no rows"


def _account_words(facts: HourFacts) -> str | None:
    counts, stream, hour = facts.counts, facts.stream, facts.hour
    if counts.good is None:
        return "the ledger has no counts" if facts.state in _ACCEPTED else None
    parts = [f"{counts.good} became rows"]
    if counts.dead:
        parts.append(f"{counts.dead} are dead letters ({_dead_letters(facts)})")
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
    names = ", ".join(name_text(field.name) for field in shown)
    more = len(unknown.fields) - len(shown) + unknown.others
    of = names + (f" and {more} more" if more else "")
    held = _many(unknown.records, "record")
    remedy = f"`anabranch check {stream} --drift`"
    return f"{held} with fields that the schema does not know: {of} ({remedy})"


def _diff(facts: HourFacts, diff: Diff) -> str:
    why = {
        "not read by the speed layer at that time": diff.unread,
        "dead letters of the speed layer": diff.missing_dead,
    }
    known = ", ".join(f"{n} of them {what}" for what, n in why.items() if n)
    dead = (
        f" ({diff.extra_dead} of them dead letters of the batch layer)" if diff.extra_dead else ""
    )
    text = (
        f"compared with {facts.speed_rows or 0} rows of speed: {diff.missing} missing"
        + (f" ({known})" if known else "")
        + f", {diff.extra} extra{dead}, {diff.changed} changed"
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


def _revision_words(decision: DecisionFacts) -> str:
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
    elif facts.offsets and facts.state == "accepted":
        why = "rows of its look-back have expired (keep.rows)"
        commands.append(("rebuild", f"it cannot be rebuilt: {why}"))
    elif facts.state == "accepted":
        commands.append(("rebuild", "nothing to rebuild: it has no records"))
    if facts.state == "accepted":
        commands.append(("audit", f"`anabranch audit {facts.stream} --hours {facts.hour}`"))
    return commands


def _many(n: int, noun: str) -> str:
    return f"{n} {noun}" if n == 1 else f"{n} {noun}s"


def _time(when: datetime) -> str:
    return f"{when:%F %T} UTC"
