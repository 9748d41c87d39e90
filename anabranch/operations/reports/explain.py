"""Facts about one hour, from the ledger and the snapshots only; neither Kafka nor rows are read.
`anabranch.operations.reports.explain_text` writes them as text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime

from anabranch.config import Stream
from anabranch.iceberg import snapshots
from anabranch.iceberg.manifests import files_of
from anabranch.job import Job
from anabranch.offsets import hours as hour_words
from anabranch.offsets.hours import Cut, end_of
from anabranch.offsets.position import Ranges
from anabranch.operations.reports.diff import speed_rows_reason
from anabranch.protocol.decisions import DecisionFacts, Tagged, history_rows, hour_query, tagged
from anabranch.protocol.ledger import newest
from anabranch.protocol.ledger_row import (
    Account,
    Counts,
    Diff,
    HourAccount,
    Kind,
    Layer,
    LedgerRow,
    QualityResult,
    UnknownFields,
    ranges_of,
)
from anabranch.protocol.state import State
from anabranch.protocol.topic_change import gone_from_kafka
from serving_layer.layer_diff import unexplained_counts

# Rows of each of the hour's files, by branch and file path.
RowsByFile = Mapping[str, Mapping[str, int]]


@dataclass(frozen=True)
class BranchRows:
    rows: int
    files: int


@dataclass(frozen=True)
class Layers:
    """The rows of an hour in each branch. `uncovered`: why the speed layer does not cover a sealed
    hour completely; None if it does."""

    main: BranchRows
    speed: BranchRows
    batch: BranchRows
    uncovered: str | None


@dataclass(frozen=True)
class Refusal:
    at: datetime
    revision: int
    reason: str | None


@dataclass(frozen=True)
class Override:
    """The layer that an operator chose for an hour; time and reason are None if the ledger lacks
    them."""

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
    return hour_facts(job.stream, state, hour, of_hour, by_branch, tags, now)


def hour_facts(
    stream: Stream,
    state: State,
    hour: str,
    rows: Sequence[LedgerRow],
    by_branch: RowsByFile,
    tags: Mapping[str, Tagged],
    now: datetime,
) -> HourFacts:
    """Return the facts about an hour. `rows`: its ledger rows, oldest first; `by_branch`: its files
    by branch. Pure."""
    accepted = _last(rows, "accepted") if state.is_accepted(hour) else None
    refusals = _refusals(rows, accepted)
    account = _account(rows, accepted, refusals)
    sealed = _last(rows, "sealed")
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
        revision=_revision(state, hour, accepted),
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
        rebuild=plan_rebuild(stream.name, hour, name, gone, is_final),
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
    return newest(rows[list(rows).index(accepted) :])[accepted.hour]


def _cut(state: State, hour: str, rows: Sequence[LedgerRow]) -> Cut | None:
    return state.cuts.get(hour) or next(
        (row.cut for row in reversed(rows) if row.cut is not None), None
    )


def _revision(state: State, hour: str, accepted: LedgerRow | None) -> int:
    if hour in state.accepted:
        return state.accepted[hour].revision
    return accepted.revision if accepted is not None else 0


def _override(state: State, hour: str, rows: Sequence[LedgerRow]) -> Override | None:
    layer = state.overrides.get(hour)
    if layer is None:
        return None
    row = _last(rows, "served")
    if row is not None:
        return Override(layer, row.recorded_at, row.reason)
    return Override(layer, None, None)
