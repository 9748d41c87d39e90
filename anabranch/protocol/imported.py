"""Imported hours: hours before the stream's first, whose rows come from files and not from Kafka.

They belong to a log of their own, whose topic id is `import`: the rows of an hour have the offsets
from `first_offset` on in partition -1. So an imported hour has a cut and an account like every
hour, and ends like an hour of a log that was left by `anabranch adopt`. Hours are imported newest
first: the stream's first hour moves back with each publish, so it shows the progress of an import,
and no hour between lacks an account.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta

from pyiceberg.manifest import DataFile

from anabranch.common.errors import Refused
from anabranch.iceberg.commits import Change
from anabranch.iceberg.staging import is_young
from anabranch.offsets.hours import (
    IMPORTED,
    Adoption,
    Cut,
    Timeline,
    hour_of,
    hours_between,
    is_untouched,
    shift,
    to_number,
)
from anabranch.offsets.position import Offsets
from anabranch.protocol import ledger
from anabranch.protocol.ledger_row import Account, Act, HourAccount, LedgerRow
from anabranch.protocol.publish import Publish
from anabranch.protocol.state import IMPORTED_FROM, KEPT, SETTLED, State

PARTITION = -1
"""The partition of imported rows; Kafka's partitions are never negative."""

HOUR_BITS = 32

SOURCE = "import"
"""The name of imported rows among the sources of an hour's records."""

UNUSED_COLUMNS = ("partitions", "quality", "diff", "unknown")
"""Large columns of the ledger that decisions about imported hours do not need."""


@dataclass(frozen=True)
class ImportedHour:
    """An hour to publish: the files with its good rows, and its account."""

    hour: str
    files: tuple[DataFile, ...]
    account: HourAccount

    @property
    def cut(self) -> Cut:
        return cut_of(self.hour, self.account.offsets or 0)


def first_offset(hour: str) -> int:
    """Return the offset of an imported hour's first row: hours since 1970, times 2^32. Pure."""
    # Offsets that began with 0 in each hour would be equal in two hours, and a topic or an index
    # would keep one of their rows.
    return to_number(hour) << HOUR_BITS


def cut_of(hour: str, rows: int) -> Cut:
    """Return the cut of an imported hour with this number of source rows."""
    first = first_offset(hour)
    return Cut(IMPORTED, {PARTITION: (first, first + rows)})


def plan_hours(
    state: State, first: str, last: str | None, keep: timedelta | None, now: datetime
) -> list[str]:
    """Return the hours from `first` to `last` that are not imported yet, newest first. `last`: None
    for the last hour before Kafka's first. Pure.

    Raises Refused for hours that have records of Kafka, that would leave hours between without an
    account, or that are older than rows are kept; for a stream whose first hour is not decided yet,
    and for one with expired hours.
    """
    first_of_kafka, known = state.timeline.first_of_kafka, state.timeline.first
    end = last or shift(first_of_kafka, -1)
    if is_untouched(state.timeline, state.position) and not state.timeline.imported_through:
        raise Refused(
            "import: expected a stream that has read records, found none: its first hour is that "
            "of the first record; start the speed layer or the batch layer, then run it again"
        )
    if end >= first_of_kafka:
        raise Refused(
            f"import: expected hours before {first_of_kafka}, where the stream begins in Kafka, "
            f"found {end}; use `--hours {first}..` for all hours before it"
        )
    if end < shift(known, -1):
        raise Refused(
            f"import: expected hours up to {shift(known, -1)}, the one before the table's first, "
            f"found {end}: the hours between would count as complete without an account; "
            f"use `--hours {first}..` to import them too"
        )
    if state.expired.before:
        raise Refused(
            "import: expected a stream without expired hours, found that hours before "
            f"{state.expired.before} have expired (`keep.rows`): the next maintenance would remove "
            "older rows"
        )
    if keep is not None and first < (kept := shift(hour_of(now - keep), 1)):
        raise Refused(
            f"import: expected hours from {kept} on, since the stream keeps rows for {keep.days} "
            f"days (`keep.rows`), found {first}; import later hours, or keep rows for longer"
        )
    return hours_between(first, known)[::-1]


def begins_of(state: State, stream_ledger: ledger.Ledger) -> Offsets:
    """Return the offsets at which the stream begins in Kafka. Raises Refused if the ledger lacks
    its first hour, Transient."""
    timeline = state.timeline
    if timeline.imported_through:
        return timeline.adoptions[0].begins
    hour = timeline.first
    if hour == timeline.open:
        return dict(timeline.start)
    cut = state.cuts.get(hour)
    if cut is None and (accepted := stream_ledger.accepted(state, hour)) is not None:
        cut = accepted.cut
    assert cut is not None
    return cut.starts


def plan_import(
    state: State,
    imported: Sequence[ImportedHour],
    begins: Offsets,
    id: str,
    began: datetime,
    now: datetime,
    reason: str,
    act: Act | None = None,
    undone: Mapping[str, int] | None = None,
) -> Publish | None:
    """Return the publish that accepts consecutive hours up to the table's first hour. Pure.

    `batch` and `main` get their files; the speed branch gets none, since the speed layer has never
    read them. `begins`: the offsets at which the stream begins in Kafka. None if the table's first
    hour has changed, since another import landed first or a branch was rolled back, or if orphan
    removal may have deleted the files: `began` is when writing them began, `now` a time after
    `state` was loaded. `undone`: the revision of each hour that was taken back before.
    """
    hours = tuple(sorted(one.hour for one in imported))
    timeline = state.timeline
    # Decision 56: a gap would count as complete without an account, and an hour that is imported
    # twice would have its rows twice.
    is_next = list(hours) == hours_between(hours[0], timeline.first)
    if not is_next or not is_young(began, now):
        return None
    files = tuple(f for one in imported for f in one.files)
    first_imported = {IMPORTED_FROM: hours[0]}
    batch_properties = first_imported | {SETTLED: state.settled_before}
    main_properties = first_imported | {
        KEPT: json.dumps([h for h in state.retained_hours if h not in hours])
    }
    changes = (
        # `clear` removes what an earlier import left there: the same import adds files again after
        # `batch` was set back (decision 56).
        Change("batch", files, properties=batch_properties, clear=hours),
        Change("main", files, properties=main_properties, clear=hours),
    )
    rows = tuple(
        ledger.decision(
            one.hour,
            "accepted",
            # A consumer that has the hour as it was taken back gets it again.
            (undone or {}).get(one.hour, 0) + 1,
            one.cut,
            now,
            f"{id}-{one.hour}",
            served="batch",
            reason=reason,
            account=one.account,
            act=act,
        )
        for one in sorted(imported, key=lambda one: one.hour)
    )
    return Publish(id, changes, _begun_at(timeline, hours[0], begins), decisions=rows)


def imported_hours(state: State) -> list[str]:
    """Return the imported hours on any branch, oldest first: `batch` lacks those of an import that
    it was set back behind. Pure."""
    timeline, main = state.timeline, state.branch_properties["main"]
    if not timeline.imported_through:
        return []
    first = min(timeline.first, main.get(IMPORTED_FROM, timeline.first))
    return hours_between(first, timeline.first_of_kafka)


def undo_refusal(
    state: State, rows: Sequence[LedgerRow], delivered: Mapping[str, str], lookback: int
) -> str | None:
    """Return what rests on the imported hours, so that they cannot be taken back; None if nothing
    does. `rows`: decisions about them and the hours after them, oldest first. `delivered`: a target
    of each hour that egress delivered. Pure."""
    hours = imported_hours(state)
    for hour in hours:
        if (hold := state.holds.of(hour)) is not None:
            return f"hour {hour} is {hold.reason}"
        if state.is_expired(hour):
            return f"the rows of hour {hour} have expired (keep.rows)"
        if hour in delivered:
            return f"egress delivered hour {hour} to {delivered[hour]}"
    # A record of Kafka that repeats an imported row is in no other hour: it would be lost.
    imported, duplicates = set[str](), dict[str, int]()
    for row in rows:
        if row.decision == "undone":
            imported.discard(row.hour)
        elif row.imported is not None:
            imported.add(row.hour)
        elif row.decision == "accepted":
            duplicates[row.hour] = (row.duplicate or 0) if imported else 0
    end = shift(state.timeline.first_of_kafka, lookback)
    for hour in hours_between(state.timeline.first_of_kafka, end):
        if (duplicate := duplicates.get(hour)) and state.is_accepted(hour):
            return (
                f"hour {hour} was accepted after the import without {duplicate} duplicates, which "
                "may repeat imported rows"
            )
    return None


def plan_undo(
    state: State,
    hours: Sequence[str],
    rows: Mapping[str, LedgerRow],
    id: str,
    now: datetime,
    act: Act | None = None,
) -> Publish:
    """Return the publish that takes the oldest imported `hours` back; after the last one the table
    is as before the import. `rows`: their newest decisions. Pure."""
    timeline, left = state.timeline, shift(hours[-1], 1)
    # A `batch` that was set back lacks also the hours that are taken back later.
    first = max(left, timeline.first)
    adoptions = timeline.adoptions[1:] if left == timeline.first_of_kafka else timeline.adoptions
    kept = json.dumps([h for h in state.retained_hours if h >= left])
    changes = (
        Change("batch", properties={IMPORTED_FROM: first}, clear=tuple(hours)),
        Change("main", properties={IMPORTED_FROM: left, KEPT: kept}, clear=tuple(hours)),
    )
    decisions = tuple(
        ledger.decision(
            hour,
            "undone",
            (row.revision if (row := rows.get(hour)) is not None else 1) + 1,
            row.cut if row is not None else None,
            now,
            f"{id}-{hour}",
            served="batch",
            act=act,
        )
        for hour in hours
    )
    after = replace(timeline, first=first, adoptions=adoptions)
    return Publish(id, changes, after, decisions=decisions)


def _begun_at(timeline: Timeline, first: str, begins: Offsets) -> Timeline:
    """Return the timeline that begins with an imported hour. The log of imported hours ends where
    Kafka's first hour begins."""
    first_of_kafka, adoptions = timeline.first_of_kafka, timeline.adoptions
    if not timeline.imported_through:
        adoptions = (Adoption(shift(first_of_kafka, -1), IMPORTED, dict(begins)), *adoptions)
    return replace(
        timeline,
        first=first,
        covered_from=max(timeline.covered_from, first_of_kafka),
        adoptions=adoptions,
    )


def require_of_kafka(state: State, hour: str) -> None:
    """Raise Refused if the hour was imported: it cannot be rebuilt."""
    if hour <= state.timeline.imported_through:
        raise Refused(
            f"hour {hour}: expected an hour of Kafka's records, found that it was imported; its "
            f"rows stay as they are: `anabranch history STREAM --hour {hour}` shows where they "
            "came from"
        )


def account_of(
    rows: int, duplicate: int, erased: int, imported: Mapping[str, object]
) -> HourAccount:
    """Return the account of an imported hour from the numbers of its source rows, duplicates and
    erased rows: offsets = good + duplicate + erased."""
    good = rows - duplicate - erased
    part = Account(rows, good, 0, duplicate, {}, erased or None)
    return HourAccount(
        offsets=rows,
        good=good,
        dead=0,
        duplicate=duplicate,
        gap=0,
        erased=erased or None,
        gaps={},
        partitions={PARTITION: part},
        sources={SOURCE: rows},
        speed_rows=0,
        imported=imported,
    )
