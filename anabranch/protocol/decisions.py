"""The history of hours: every decision, the changes between revisions, and which revisions can
still be read. A restatement tags the previous snapshot of `main` as `<hour>-r<revision>`. The
tagged snapshot does not always contain that revision: if an operator had assigned the hour to the
speed layer, it contains the speed layer's rows.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import Any

from pyiceberg.expressions import EqualTo
from pyiceberg.table import Table

from anabranch.common.remote_errors import lake_errors
from anabranch.config import Stream
from anabranch.iceberg.lake import Lake
from anabranch.protocol.ledger import Ledger
from anabranch.protocol.ledger_row import COUNTS, Act, Counts, Kind, Layer, LedgerRow

# Why an hour's rows left `main`, by its newest such decision; None if they came back.
_GONE: Mapping[Kind, str | None] = {
    "expired": "its rows have expired (keep.rows)",
    "undone": "its import was taken back",
    "accepted": None,
}
_COMPARED = (*COUNTS, "gaps", "speed_rows", "sources", "cut", "topic_id")


@dataclass(frozen=True)
class Tagged:
    """A tag of a replaced revision: its snapshot, the number of the hour's rows in it, and the time
    (UTC) at which it expires."""

    name: str
    snapshot_id: int
    rows: int
    until: datetime | None


@dataclass(frozen=True)
class DecisionFacts:
    """A decision and the operator's `act` that it follows from. For an accepted revision also the
    values that it `changed` (`changed_values`), and whether and how its rows can be read."""

    hour: str
    at: datetime
    decision: Kind
    revision: int
    served: Layer | None
    counts: Counts
    sources: Mapping[str, int] | None
    changed: Mapping[str, Sequence[Any]]
    reason: str | None
    code_version: str
    tag: str | None = None
    query: str | None = None
    readable: str | None = None
    act: Act | None = None


def decisions(lake: Lake, stream: Stream, hour: str | None) -> list[DecisionFacts]:
    """Return every decision about one hour, or about all if None, by hour, oldest first. Raises
    Transient if the lake does not answer."""
    wanted_hours = [hour] if hour is not None else None
    rows, state = Ledger(lake, stream.hours_table).history_and_state(
        stream.table, wanted_hours, ("partitions", "quality", "diff")
    )
    wanted = [row for row in rows if hour is None or row.hour == hour]
    tags = tagged(
        state.table, [(row.hour, row.revision) for row in wanted if row.decision == "accepted"]
    )
    return history_rows(stream.table, wanted, tags)


def history_rows(
    table: str, rows: Sequence[LedgerRow], tags: Mapping[str, Tagged]
) -> list[DecisionFacts]:
    """Return the decisions of `rows` (ledger rows, oldest first), ordered by hour. Pure."""
    made = []
    for hour in sorted({row.hour for row in rows}):
        of_hour = [row for row in rows if row.hour == hour]
        newest = max((row.revision for row in of_hour if row.decision == "accepted"), default=0)
        gone = next((_GONE[r.decision] for r in reversed(of_hour) if r.decision in _GONE), None)
        accepted: LedgerRow | None = None
        for row in of_hour:
            facts = _decision(table, row, accepted, newest, tags)
            if gone is not None and facts.query is not None and facts.tag is None:
                facts = replace(facts, query=None, readable=f"no: {gone}")
            made.append(facts)
            if row.decision == "accepted":
                accepted = row
    return made


def _decision(
    table: str, row: LedgerRow, before: LedgerRow | None, newest: int, tags: Mapping[str, Tagged]
) -> DecisionFacts:
    facts = DecisionFacts(
        hour=row.hour,
        at=row.recorded_at,
        decision=row.decision,
        revision=row.revision,
        served=row.served,
        counts=Counts.of(row),
        sources=row.sources,
        changed=changed_values(before, row)
        if row.decision == "accepted" and before is not None
        else {},
        reason=row.reason or _why(row),
        code_version=row.code_version,
        act=row.act,
    )
    if row.decision != "accepted":
        return facts
    tag, query, readable = _readable(table, row, newest, tags.get(f"{row.hour}-r{row.revision}"))
    return replace(facts, tag=tag, query=query, readable=readable)


def _why(row: LedgerRow) -> str | None:
    """Return the reason of a decision that has none of its own."""
    if row.decision != "accepted":
        return None
    return "restated (`anabranch batch --restate`)" if row.revision > 1 else None


def _readable(
    table: str, row: LedgerRow, newest: int, tag: Tagged | None
) -> tuple[str | None, str | None, str]:
    """Return the tag and the command that read a revision's rows, None if there is none, and a text
    about whether the rows can be read."""
    query = hour_query(table, row.hour)
    if row.revision == newest:
        return None, query, "it is the newest revision"
    if tag is None:
        return None, None, "no longer: its tag has expired"
    if row.good is not None and tag.rows != row.good:
        return tag.name, None, f"no: its tag shows {tag.rows} rows, the revision had {row.good}"
    until = f" until {tag.until:%F %T} UTC" if tag.until is not None else ""
    return tag.name, f"{query} --as-of {tag.name}", f"by its tag{until}"


def hour_query(table: str, hour: str) -> str:
    """Return the command that reads the rows of an hour."""
    return f"anabranch query \"SELECT * FROM {table} WHERE ingest_hour = '{hour}'\""


def changed_values(before: LedgerRow, after: LedgerRow) -> dict[str, list[Any]]:
    """Return the values that differ between two revisions: `{name: [before, after]}`, as JSON
    values. Null equals 0. Pure."""
    one, other = before.as_columns(), after.as_columns()
    pairs = {name: [one.get(name), other.get(name)] for name in _COMPARED}
    return {name: pair for name, pair in pairs.items() if (pair[0] or 0) != (pair[1] or 0)}


def changed_words(changed: Mapping[str, Sequence[Any]]) -> str:
    """Format the changes between two revisions: `good 40 to 41 (+1)`."""
    parts = []
    for name, (one, other) in changed.items():
        if isinstance(one, int | None) and isinstance(other, int | None):
            parts.append(f"{name} {one or 0} to {other or 0} ({(other or 0) - (one or 0):+})")
        else:
            parts.append(f"{name} {json.dumps(one)} to {json.dumps(other)}")
    return ", ".join(parts) or "no count changed"


def tagged(table: Table, revisions: Sequence[tuple[str, int]]) -> dict[str, Tagged]:
    """Return the remaining tags of `revisions` (hour, revision) in a loaded table, by name. Raises
    Transient."""
    by_name = {}
    for hour, revision in dict.fromkeys(revisions):
        name = f"{hour}-r{revision}"
        ref = table.metadata.refs.get(name)
        snapshot = table.metadata.snapshot_by_id(ref.snapshot_id) if ref is not None else None
        if ref is None or snapshot is None:
            continue
        scan = table.scan(
            row_filter=EqualTo(term="ingest_hour", value=hour), snapshot_id=ref.snapshot_id
        )
        with lake_errors(f"read the manifests of {'.'.join(table.name())}"):
            rows = sum(task.file.record_count for task in scan.plan_files())
        made = datetime.fromtimestamp(snapshot.timestamp_ms / 1000, UTC)
        until = (
            made + timedelta(milliseconds=ref.max_ref_age_ms)
            if ref.max_ref_age_ms is not None
            else None
        )
        by_name[name] = Tagged(name, ref.snapshot_id, rows, until)
    return by_name
