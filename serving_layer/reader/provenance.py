"""Provenance of a result: the hours of its files, their serving layers and revisions, and whether
more rows may come."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

from pyiceberg.manifest import DataFile

from anabranch.config import Stream
from anabranch.iceberg.lake import Lake
from anabranch.iceberg.manifests import hour_of_file
from anabranch.iceberg.snapshots import made_at
from anabranch.protocol import ledger, merge
from anabranch.protocol.ledger import Ledger
from anabranch.protocol.ledger_row import Layer, LedgerRow
from serving_layer.query.datasets import TableFiles
from serving_layer.reader.selection import Selection, Shown, shown


@dataclass(frozen=True)
class HourProvenance:
    """An ingest hour with opened files. `layer`: the layer that serves it. `revision`: the accepted
    revision, if these are its rows. `complete`: whether the rows include all of the hour's records;
    `note`: the reason if not, or another remark. `rows`: the number of rows in the files."""

    hour: str
    layer: Layer
    revision: int | None
    complete: bool
    note: str | None
    files: int
    rows: int


@dataclass(frozen=True)
class Provenance:
    """Provenance of a result in one table: the snapshot, and its hours in order."""

    table: str
    snapshot_id: int
    as_of: datetime
    hours: Sequence[HourProvenance]


def provenance(
    lake: Lake, streams: Mapping[str, Stream], selection: Selection, read: Iterable[TableFiles]
) -> list[Provenance]:
    """Return the provenance of a result in each stream's table. Raises Terminal for a snapshot
    without the state of `main`, Transient."""
    return [
        _provenance(lake, streams[planned.name], selection, planned)
        for planned in read
        if streams[planned.name].table == planned.name
        and planned.table.current_snapshot() is not None
    ]


def _provenance(
    lake: Lake, stream: Stream, selection: Selection, planned: TableFiles
) -> Provenance:
    table = planned.table
    snapshot = (
        table.snapshot_by_id(planned.snapshot_id)
        if planned.snapshot_id
        else table.current_snapshot()
    )
    assert snapshot is not None
    opened = list({file.file_path: file for scan in planned.scans for file in scan.files}.values())
    by_hour: dict[str, list[DataFile]] = {}
    for file in opened:
        by_hour.setdefault(hour_of_file(table, file), []).append(file)
    if (revision := selection.revision) is not None:
        seen, revisions = shown(table, None), {revision.hour: revision.number}
        seen = Shown(seen.state, "batch")
    else:
        seen = shown(table, planned.snapshot_id)
        revisions = accepted_revisions(lake, stream, seen, by_hour, made_at(snapshot))
    return Provenance(
        planned.name,
        snapshot.snapshot_id,
        made_at(snapshot),
        [_hour(seen, hour, revisions, files) for hour, files in sorted(by_hour.items())],
    )


def accepted_revisions(
    lake: Lake, stream: Stream, seen: Shown, hours: Iterable[str], until: datetime
) -> dict[str, int]:
    """Return the revision of each hour whose accepted rows are shown: from the snapshot, and for
    old hours from the ledger as of `until`. Raises Transient."""
    accepted = [h for h in hours if seen.is_accepted(h)]
    revisions = {h: seen.state.accepted[h].revision for h in accepted if h in seen.state.accepted}
    forgotten = [h for h in accepted if h not in revisions]
    rows: list[LedgerRow] = Ledger(lake, stream.hours_table).history(forgotten, ledger.BULKY)
    for row in rows:
        if row.decision == "accepted" and row.recorded_at <= until:
            revisions[row.hour] = row.revision
    return revisions


def _hour(
    seen: Shown, hour: str, revisions: Mapping[str, int], files: Sequence[DataFile]
) -> HourProvenance:
    complete, note = hour_completeness(seen, hour)
    rows = sum(file.record_count for file in files)
    return HourProvenance(
        hour, seen.layer(hour), revisions.get(hour), complete, note, len(files), rows
    )


def hour_completeness(seen: Shown, hour: str) -> tuple[bool, str | None]:
    """Return whether all of an hour's records are in the result, and the reason if not, or another
    remark. Pure."""
    state, layer = seen.state, seen.layer(hour)
    if hour >= state.timeline.open:
        return False, "the hour is not sealed: more may come"
    if state.is_expired(hour):
        return False, "its rows have expired (keep.rows)"
    if seen.branch is None and hour in state.retained_hours:
        return False, f"main keeps older rows, since the {layer} layer does not cover it"
    if (reason := merge.uncovered_reason(state, layer, hour)) is not None:
        return False, reason
    if layer == "speed":
        return True, "not accepted yet" if not state.is_accepted(
            hour
        ) else "served by speed by choice"
    if (accepted := state.accepted.get(hour)) is not None and accepted.unread:
        return True, f"rebuilt once the speed layer has read {', '.join(accepted.unread)}"
    return True, None
