"""Everything known of one hour, as facts: from the ledger and the snapshots alone, without Kafka and without the rows.

`serving_layer.views.explain_text` says them in words.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from typing import Any

from anabranch import hours as hour_words
from anabranch.config import Stream
from anabranch.hours import Cut, end_of
from anabranch.job import Job
from anabranch.position import ranges_to_keys
from anabranch.protocol import ledger
from anabranch.protocol.adoption import gone_from_kafka
from anabranch.protocol.ledger_row import HourAccount, Kind, LedgerRow
from anabranch.protocol.state import State, load_state
from anabranch.table import snapshots
from anabranch.table.snapshots import files_of
from serving_layer.diff.kinds import unexplained_counts
from serving_layer.views.diff import speed_rows_reason
from serving_layer.views.history import COUNTS, Tagged, history_rows, tagged, with_waiting

# By branch, the hour's files: how many rows are in each.
Held = Mapping[str, Mapping[str, int]]


def explain(job: Job, hour: str, now: datetime) -> dict[str, Any]:
    """The facts of an hour. Raises Transient when the lake does not answer."""
    rows = ledger.history(job.lake, job.stream.hours_table, [hour])
    state = load_state(job.lake, job.stream.table)
    of_hour = [row for row in with_waiting(rows, state.decisions) if row.hour == hour]
    held = {b: {f.file_path: f.record_count for f in files_of(state.table, b, hour)} for b in snapshots.BRANCHES}
    tags = tagged(state.table, [(hour, row.revision) for row in of_hour if row.decision == "accepted"])
    return hour_facts(job.stream, state, hour, of_hour, held, tags, now)


def hour_facts(
    stream: Stream,
    state: State,
    hour: str,
    rows: Sequence[LedgerRow],
    held: Held,
    tags: Mapping[str, Tagged],
    now: datetime,
) -> dict[str, Any]:
    """The facts of an hour: `rows` are the ledger's of it, oldest first, `held` what the branches hold of it. Pure."""
    accepted = _last(rows, "accepted") if state.is_accepted(hour) else None
    refusals = _refusals(rows, accepted)
    account = accepted or (refusals[-1] if refusals else HourAccount())
    sealed = _last(rows, "sealed")
    cut = _cut(state, hour, rows)
    uncovered = speed_rows_reason(state, hour) if state.is_sealed(hour) else None
    gone = gone_from_kafka(state.timeline, hour, cut) if cut is not None else None
    empty = cut is not None and cut.offsets == 0
    served = state.served_by(hour)
    name = classify_hour(state, hour, bool(refusals), now)
    return {
        "stream": stream.name,
        "hour": hour,
        "state": name,
        "first_hour": state.timeline.first,
        "open_hour": state.timeline.open,
        "sealed_at": sealed.recorded_at if sealed else None,
        "sealed_reason": sealed.reason if sealed else None,
        "can_be_sealed_from": end_of(hour) + stream.batch.grace if name in ("open", "ended") else None,
        "topic_id": cut.topic_id if cut is not None else None,
        "cut": ranges_to_keys(cut.ranges) if cut is not None else None,
        "offsets": cut.offsets if cut is not None else None,
        "revision": _revision(state, hour, accepted),
        "accepted_at": accepted.recorded_at if accepted else None,
        "snapshot_id": accepted.snapshot_id if accepted else None,
        "reason": accepted.reason if accepted else None,
        "counts": {count: getattr(account, count) for count in COUNTS},
        "gaps": account.gaps or {},
        "partitions": account.partitions,
        "sources": account.sources,
        "layers": {
            **{branch: {"rows": sum(files.values()), "files": len(files)} for branch, files in held.items()},
            "uncovered": uncovered,
        },
        "speed_rows": account.speed_rows,
        "diff": replace(account.diff, sample=None).as_dict() if account.diff is not None else None,
        "unexplained": unexplained_counts(account.diff, account.gaps, uncovered is None),
        "quality": account.quality.as_dict() if account.quality is not None else None,
        "refusals": [{"at": row.recorded_at, "revision": row.revision, "reason": row.reason} for row in refusals],
        "served": served if name not in _UNKNOWN else None,
        "served_since": served_since(rows, served),
        "override": _override(state, hour, rows),
        "merged": set(held["main"]) == set(held[served]),
        "kept": hour in state.retained_hours,
        "gone": gone,
        "revisions": [d for d in history_rows(stream.table, rows, tags) if d["decision"] == "accepted"],
        "query": _query(stream, hour) if name not in _UNKNOWN else None,
        "rebuild": plan_rebuild(stream.name, hour, name, gone, empty),
    }  # fmt: skip


_UNKNOWN = ("before the first", "not begun")


def classify_hour(state: State, hour: str, refused: bool, now: datetime) -> str:
    """What an hour is, in a word or two. Pure."""
    timeline = state.timeline
    if hour < timeline.first:
        return "before the first"
    if hour >= timeline.open:
        # After an adoption the open hour receives records before its name on the clock.
        if hour > max(timeline.open, hour_words.hour_of(now)):
            return "not begun"
        return "ended" if end_of(hour) <= now else "open"
    if state.is_accepted(hour):
        return "accepted"
    return "refused" if refused else "sealed"


def served_since(rows: Sequence[LedgerRow], served: str) -> datetime | None:
    """Since when the layer that serves the hour now has done so, as far as the ledger tells. Pure.

    None for the speed layer's own hours: it serves rows from the moment that it publishes them.
    """
    layer, since = "speed", None
    for row in rows:
        if row.decision in ("accepted", "served") and row.served is not None and row.served != layer:
            layer, since = row.served, row.recorded_at
    return since if layer == served else None


def plan_rebuild(stream: str, hour: str, name: str, gone: str | None, empty: bool) -> str | None:
    """The command that rebuilds the hour, None when there is none. Pure."""
    if (gone is not None and name != "accepted") or name in (*_UNKNOWN, "open") or (empty and name == "accepted"):
        return None
    return f"anabranch batch {stream} --hour {hour}" + (" --restate" if name == "accepted" else "")


def _last(rows: Sequence[LedgerRow], decision: Kind) -> LedgerRow | None:
    return next((row for row in reversed(rows) if row.decision == decision), None)


def _refusals(rows: Sequence[LedgerRow], accepted: LedgerRow | None) -> list[LedgerRow]:
    """The refusals since the newest acceptance, oldest first."""
    behind = list(rows).index(accepted) + 1 if accepted is not None else 0
    return [row for row in rows[behind:] if row.decision == "refused"]


def _cut(state: State, hour: str, rows: Sequence[LedgerRow]) -> Cut | None:
    if hour in state.cuts:
        return state.cuts[hour]
    return next((row.cut for row in reversed(rows) if row.cut is not None), None)


def _revision(state: State, hour: str, accepted: LedgerRow | None) -> int:
    if hour in state.accepted:
        return state.accepted[hour].revision
    return accepted.revision if accepted is not None else 0


def _override(state: State, hour: str, rows: Sequence[LedgerRow]) -> dict[str, Any] | None:
    layer = state.overrides.get(hour)
    if layer is None:
        return None
    row = _last(rows, "served")
    if row is None:
        return {"layer": layer, "at": None, "reason": None}
    return {"layer": layer, "at": row.recorded_at, "reason": row.reason}


def _query(stream: Stream, hour: str) -> str:
    return f"anabranch query \"SELECT * FROM {stream.table} WHERE ingest_hour = '{hour}'\""
