"""Provenance of a result: the hours and event dates of its files, their serving layers and
revisions, and whether more rows may come."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime, time, timedelta
from functools import partial
from typing import TypeVar

from pyiceberg.manifest import DataFile
from pyiceberg.table import Table

from anabranch.config import Stream
from anabranch.iceberg.lake import Lake
from anabranch.iceberg.manifests import hour_of_file
from anabranch.iceberg.snapshots import made_at
from anabranch.offsets.hours import hours_between, shift
from anabranch.protocol import coverage, ledger
from anabranch.protocol.completeness import plan_hours
from anabranch.protocol.ledger import Ledger
from anabranch.protocol.ledger_row import Layer, LedgerRow
from serving_layer.query.datasets import TableFiles
from serving_layer.reader.selection import Selection, Shown, shown

K = TypeVar("K")

_EPOCH = date(1970, 1, 1)


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
class DateProvenance:
    """An event date in the opened files. `hours`: the number of ingest hours with such files.
    `complete`: every hour that can contain records of the date is accepted."""

    event_date: date
    hours: int
    complete: bool
    note: str | None
    files: int
    rows: int


@dataclass(frozen=True)
class Provenance:
    """Provenance of a result in one table: the snapshot, and its hours and event dates in order."""

    table: str
    snapshot_id: int
    as_of: datetime
    hours: Sequence[HourProvenance]
    event_dates: Sequence[DateProvenance]


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
    by_hour, by_date = (
        _grouped(opened, partial(hour_of_file, table)),
        _grouped(opened, partial(_date_of, table)),
    )
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
        [_date(stream, seen, day, table, files) for day, files in sorted(by_date.items())],
    )


def _grouped(files: Iterable[DataFile], key: Callable[[DataFile], K]) -> dict[K, list[DataFile]]:
    groups: dict[K, list[DataFile]] = {}
    for file in files:
        groups.setdefault(key(file), []).append(file)
    return groups


def _date_of(table: Table, file: DataFile) -> date:
    names = [field.name for field in table.specs()[file.spec_id].fields]
    return _EPOCH + timedelta(days=file.partition[names.index("event_date")])


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
    if (reason := coverage.uncovered_reason(state, layer, hour)) is not None:
        return False, reason
    if layer == "speed":
        return True, "not accepted yet" if not state.is_accepted(
            hour
        ) else "served by speed by choice"
    if (accepted := state.accepted.get(hour)) is not None and accepted.unread:
        return True, f"rebuilt once the speed layer has read {', '.join(accepted.unread)}"
    return True, None


def _date(
    stream: Stream, seen: Shown, day: date, table: Table, files: Sequence[DataFile]
) -> DateProvenance:
    complete, note = date_completeness(stream, seen, day)
    hours = {hour_of_file(table, file) for file in files}
    return DateProvenance(
        day, len(hours), complete, note, len(files), sum(file.record_count for file in files)
    )


def date_completeness(stream: Stream, seen: Shown, day: date) -> tuple[bool, str | None]:
    """Return whether all hours that can contain records of an event date are accepted, and the
    reason if not. Pure."""
    bounds, begin = stream.event_time, datetime.combine(day, time(), UTC)
    first = last = None
    if bounds is not None:
        first, last = plan_hours(bounds, begin, begin + timedelta(days=1))
    if first is None or last is None or stream.most_event_dates is None:
        return False, "its late records have no bound (event_time.past, event_time.future)"
    timeline = seen.state.timeline
    if last >= timeline.open:
        return False, f"records of it may come until {last}"
    waiting = [
        h
        for h in hours_between(max(first, timeline.first), shift(last, 1))
        if not seen.is_accepted(h)
    ]
    if waiting:
        return (
            False,
            f"{len(waiting)} hours that may contain it are not accepted, the first is {waiting[0]}",
        )
    gone = [
        h
        for h in hours_between(max(first, timeline.first), shift(last, 1))
        if seen.state.is_expired(h)
    ]
    if gone:
        return (
            False,
            f"{len(gone)} hours that may contain it have expired (keep.rows), the last is "
            f"{gone[-1]}",
        )
    return True, None
