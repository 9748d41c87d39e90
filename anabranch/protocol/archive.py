"""The archive: a stream's records as Kafka returned them, by hour, in a table of their own
(`archive` in the stream's file).

It is an input of the batch layer like Kafka, not a result: readers do not use it, and no account
depends on it. So its commits are separate from those of the rows and come first. A commit only adds
records that the hour lacks, and requires the head at which they were found missing, so no record is
in it twice. Erasure and retention remove records.
"""

from __future__ import annotations

from collections.abc import Collection
from datetime import datetime, timedelta

from pyiceberg.table import Table

from anabranch.common.json_values import read_property
from anabranch.iceberg.commits import Change, Commit
from anabranch.iceberg.expiry import plan_expiry
from anabranch.iceberg.snapshots import Staged, branch_properties, heads
from anabranch.offsets.hours import Cut, hour_of
from anabranch.protocol.erasure import marks_of
from anabranch.protocol.state import State

_REMOVED = "anabranch.archive-removed"


def plan_archive(
    table: Table,
    staged: Staged,
    had: Collection[str],
    has: Collection[str],
    is_current: bool,
    now: datetime,
) -> Commit | None:
    """Return the commit that adds an hour's staged records; None if the missing records have to be
    determined again. Pure.

    `had`: the paths of the hour's files at that time, `has`: the paths in `table`. `is_current`: by
    a state loaded after `table`, the records were read with the current erasures. An erasure is
    first recorded on the branches, then moves this head.
    """
    # Decision 55: an added file may have some of these records, which would be archived twice; with
    # a new erasure, some of them have to be left out.
    if set(had) != set(has) or not is_current:
        return None
    expire = plan_expiry(table, staged.wap_id, now)
    return Commit(
        staged.wap_id,
        heads(table),
        (Change("main", staged.files),),
        expire=expire,
        staged={staged.wap_id: staged.snapshot_id},
    )


def is_current(before: State, now: State, hour: str, cut: Cut) -> bool:
    """Whether records that were read with the state `before` may be archived with the state `now`:
    the hour has not expired, and its erasures are the same. Pure."""
    return not now.is_expired(hour) and marks_of(before, hour, cut) == marks_of(now, hour, cut)


def plan_due(
    state: State, content: Collection[str], keep: timedelta | None, now: datetime
) -> tuple[str, ...]:
    """Return the archive's hours to remove: past retention and not held, or expired. Pure."""
    bound = hour_of(now - keep) if keep is not None else ""
    return tuple(
        hour
        for hour in sorted(content)
        if state.is_expired(hour) or (hour < bound and state.holds.of(hour) is None)
    )


def plan_remove(table: Table, hours: Collection[str], id: str, now: datetime) -> Commit | None:
    """Return the commit that removes hours and expires snapshots; snapshots with removed records
    expire after a day. None if there is nothing to do. Pure."""
    expire = plan_expiry(table, None, now, gone_before=removed_at(table))
    if not (hours or expire):
        return None
    change = Change("main", clear=tuple(hours), properties=removed_now(now) if hours else {})
    return Commit(id, heads(table), (change,), expire=expire)


def removed_at(table: Table) -> datetime | None:
    """Return when records last left the archive (UTC), or None; older snapshots have them."""
    properties = branch_properties(table, "main")
    if _REMOVED not in properties:
        return None
    return read_property(properties, _REMOVED, datetime.fromisoformat)


def removed_now(now: datetime) -> dict[str, str]:
    """Return the properties of a change that removes records (`removed_at`)."""
    return {_REMOVED: now.isoformat()}


def plan_searched(
    table: Table, files: Collection[str], searched: Collection[str], id: str, now: datetime
) -> Commit | None:
    """Return the commit that moves the head after all `files` were searched for erased records;
    None if a file was added meanwhile and not searched. Pure."""
    if not set(files) <= set(searched):
        return None
    return Commit(id, heads(table), (Change("main"),), expire=plan_expiry(table, id, now))
