"""The rows that a reader selects: the snapshot of a name or a time, and the state of the hours
there. And the provenance of a result: the hours of its files, their serving layers and revisions,
and whether more rows may come."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from pyiceberg.manifest import DataFile
from pyiceberg.table import Table
from pyiceberg.table.snapshots import ancestors_of

from anabranch.common.arrays import grouped
from anabranch.common.errors import ConfigurationError, Refused
from anabranch.config import Stream
from anabranch.iceberg.lake import Lake
from anabranch.iceberg.manifests import hour_of_file
from anabranch.iceberg.snapshots import STAGING, UNNAMED, heads, is_tag, made_at
from anabranch.offsets.hours import hours_between, is_hour, start_of
from anabranch.protocol import ledger, merge
from anabranch.protocol.ledger import Ledger
from anabranch.protocol.ledger_row import Layer, LedgerRow
from anabranch.protocol.sealing import SEALED_TAG
from anabranch.protocol.state import State, read_state, state_of
from serving_layer.query import Selected
from serving_layer.query.datasets import TableFiles


@dataclass(frozen=True)
class Revision:
    hour: str
    number: int


@dataclass(frozen=True)
class Selection:
    """The selected rows: as of a tag, branch, snapshot id or time; of accepted hours only; or one
    revision of one hour.

    Raises ConfigurationError for options that exclude each other.
    """

    as_of: str | None = None
    only_accepted: bool = False
    revision: Revision | None = None

    def __post_init__(self) -> None:
        if self.revision is None:
            return
        start_of(self.revision.hour)
        if self.as_of is not None or self.only_accepted:
            raise ConfigurationError(
                f"hour {self.revision.hour}: expected no as-of and no only-accepted with a "
                "revision, found one of them; remove it: a revision has a snapshot of its own"
            )


@dataclass(frozen=True)
class Shown:
    """The content of a snapshot. `state`: of the hours. `branch`: the layer whose branch it is;
    None for `main`, which has each hour from the layer that serves it."""

    state: State
    branch: Layer | None = None

    def layer(self, hour: str) -> Layer:
        return self.branch or self.state.served_by(hour)

    def is_accepted(self, hour: str) -> bool:
        """Return whether the hour's rows are those of its accepted revision."""
        kept = self.branch is None and hour in self.state.retained_hours
        return self.layer(hour) == "batch" and self.state.is_accepted(hour) and not kept

    def accepted_hours(self) -> frozenset[str]:
        timeline = self.state.timeline
        return frozenset(
            h for h in hours_between(timeline.first, timeline.open) if self.is_accepted(h)
        )


def snapshot_as_of(lake: Lake, stream: Stream, table: Table, as_of: str) -> int:
    """Return the id of `find_snapshot`'s snapshot. Of hours sealed together, only the last has a
    tag, which is used for `main-<hour>` of each. Raises ConfigurationError, Transient."""
    return find_snapshot(table, _tag_of_hour(lake, stream, table, as_of) or as_of)


def _tag_of_hour(lake: Lake, stream: Stream, table: Table, name: str) -> str | None:
    """Return the tag of the seal of `main-<hour>`'s hour; None if it has its own, or none."""
    refs = table.metadata.refs
    hour = name.removeprefix(SEALED_TAG)
    if name in refs or hour == name or not is_hour(hour):
        return None
    later = sorted(h for ref in refs if is_hour(h := ref.removeprefix(SEALED_TAG)) and h > hour)
    if not later:
        return None
    rows = Ledger(lake, stream.hours_table).history((hour, later[0]), without=ledger.BULKY)
    seals = {
        row.hour: row.decision_id.removesuffix(row.hour) for row in rows if row.decision == "sealed"
    }
    if seals.keys() == {hour, later[0]} and len({*seals.values()}) == 1:
        return f"{SEALED_TAG}{later[0]}"
    return None


def shown(table: Table, snapshot_id: int | None) -> Shown:
    """Return the content of a stream's table, now or in a snapshot. Raises Terminal."""
    at = heads(table)
    snapshot_id = snapshot_id if snapshot_id is not None else at["main"]
    if snapshot_id == at["main"]:
        return Shown(read_state(table))
    layers: tuple[Layer, ...] = ("speed", "batch")
    for branch in layers:
        if snapshot_id == at[branch]:
            return Shown(read_state(table), branch)
    return Shown(state_of(table, snapshot_id))


def select(lake: Lake, stream: Stream, selection: Selection, name: str, table: Table) -> Selected:
    """Return a table's rows for a query. Raises ConfigurationError, Refused, Transient."""
    if selection.revision is not None:
        return _select_revision(lake, stream, name, table, selection.revision)
    as_of = selection.as_of
    snapshot_id = snapshot_as_of(lake, stream, table, as_of) if as_of is not None else None
    if not selection.only_accepted or name in stream.plain_tables:
        return Selected(snapshot_id)
    rows = table if name == stream.table else lake.load(stream.table)
    seen = shown(rows, snapshot_as_of(lake, stream, rows, as_of) if as_of is not None else None)
    if seen.branch == "speed":
        raise ConfigurationError(
            f"read {name}: expected main or batch, whose hours are accepted, found speed"
        )
    if seen.branch is None and as_of is None:
        seen.state.require_merged(f"read {name}", stream.name)
    return Selected(snapshot_id, seen.accepted_hours())


def _select_revision(
    lake: Lake, stream: Stream, name: str, table: Table, revision: Revision
) -> Selected:
    from anabranch.protocol.decisions import decisions

    if name != stream.table:
        raise ConfigurationError(
            f"read {name}: expected {stream.table}, found another table; only its rows are "
            "kept by revision"
        )
    known = {
        d.revision: d for d in decisions(lake, stream, revision.hour) if d.decision == "accepted"
    }
    what = f"hour {revision.hour} of {stream.name}"
    if (wanted := known.get(revision.number)) is None:
        found = ", ".join(map(str, sorted(known))) or "none"
        raise ConfigurationError(
            f"{what}: expected an accepted revision, found {revision.number} (known: {found})"
        )
    if wanted.query is None:
        raise Refused(
            f"{what}: expected revision {revision.number} to be readable, found: "
            f"{wanted.readable}; `anabranch history {stream.name} --hour {revision.hour}` "
            "lists the readable ones"
        )
    if wanted.tag is None:
        if not read_state(table).is_accepted(revision.hour):
            raise Refused(
                f"{what}: expected it on the batch branch, found that it waits to be rebuilt; "
                f"run `anabranch batch {stream.name} --hour {revision.hour}`"
            )
        return Selected(heads(table)["batch"], frozenset({revision.hour}))
    return Selected(find_snapshot(table, wanted.tag), frozenset({revision.hour}))


def find_snapshot(table: Table, as_of: str) -> int:
    """Return the id of the snapshot that `as_of` names: a tag, a branch, a snapshot id, or a time
    (ISO 8601; UTC without an offset), which selects main's snapshot at that time. Raises
    ConfigurationError if there is none, or if the snapshot of that time is not kept."""
    if (ref := table.metadata.refs.get(as_of)) is not None:
        return ref.snapshot_id
    if as_of.isdecimal() and table.metadata.snapshot_by_id(int(as_of)) is not None:
        return int(as_of)
    if (when := _moment(as_of)) is not None:
        return _main_at(table, when)
    known = (
        ", ".join(
            sorted(n for n in table.metadata.refs if n != STAGING and not n.startswith(UNNAMED))
        )
        or "none"
    )
    raise ConfigurationError(
        f"table {'.'.join(table.name())}: expected a tag, a branch, a snapshot's id or a time, "
        f"found {as_of!r} (known: {known}; tags expire)"
    )


def _moment(text: str) -> datetime | None:
    try:
        when = datetime.fromisoformat(text)
    except ValueError:
        return None
    # A text of digits is the id of a missing snapshot, not a date.
    return None if text.isdecimal() else when.replace(tzinfo=when.tzinfo or UTC)


def _main_at(table: Table, when: datetime) -> int:
    """Return the id of main's snapshot at a time: the newest that is not later, in the gapless
    ancestors of the head. Older tagged snapshots do not count: the time of the publish after them
    is not known. Raises ConfigurationError.
    """
    name, metadata = ".".join(table.name()), table.metadata
    oldest = None
    for snapshot in ancestors_of(metadata.snapshot_by_name("main"), metadata):
        if made_at(snapshot) <= when:
            return snapshot.snapshot_id
        oldest = snapshot
    since = (
        f"its publishes only since {made_at(oldest).isoformat()}"
        if oldest is not None
        else "none of its publishes"
    )
    made = {
        n: made_at(s)
        for n, r in metadata.refs.items()
        if (s := metadata.snapshot_by_id(r.snapshot_id))
    }
    tags = {n: made[n] for n in made if is_tag(metadata.refs, n)}
    before = max((n for n in tags if tags[n] <= when), key=tags.__getitem__, default=None)
    after = min((n for n in tags if tags[n] > when), key=tags.__getitem__, default=None)
    near = [f"{n} ({tags[n].isoformat()})" for n in (before, after) if n is not None]
    remedy = f"name a tag beside it: {', '.join(near)}" if near else "no tag of that time is left"
    raise ConfigurationError(
        f"table {name}: expected main's snapshot at {when.isoformat()}, found {since}; {remedy}"
    )


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
    by_hour = grouped(opened, lambda file: hour_of_file(table, file))
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
    """Return whether an hour's records are all in the result; why not, or a remark. Pure."""
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
