"""The archive: a stream's records as Kafka gave them, hour by hour, in a table of their own
(`archive` of its file).

It is an input of the batch layer, as Kafka is, and no result: no reader is given it, and no account
depends on it. So its commits are apart from those of the rows, and come first. What an hour has is
only ever completed, by the records that it lacks; a commit requires the head that these were looked
for on, so no record is in it twice. Erasure and retention remove records.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from datetime import datetime, timedelta
from typing import TYPE_CHECKING

from anabranch.iceberg.commits import Change, Commit
from anabranch.iceberg.expiry import plan_expiry
from anabranch.iceberg.snapshots import Staged, branch_properties, heads
from anabranch.iceberg.staging import NAMED_WITHIN
from anabranch.offsets.hours import Cut, hour_of
from anabranch.protocol.erasure import marks_of
from anabranch.protocol.state import State

if TYPE_CHECKING:
    from pyiceberg.manifest import DataFile
    from pyiceberg.table import Table

_REMOVED = "anabranch.archive-removed"


def plan_archive(
    table: Table,
    staged: Staged,
    had: Collection[str],
    has: Collection[str],
    is_current: bool,
    now: datetime,
) -> Commit | None:
    """The commit that adds an hour's staged records; None if they are to be looked for again. Pure.

    `had`: the paths of the hour's files when they were looked for, `has`: in `table`. `is_current`,
    of a state loaded after `table`: the erasures are those by which the records were read. An
    erasure first records itself on the branches, then moves this head.
    """
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
    """Whether records that were read by one state are to be archived by a later one. Pure."""
    return not now.is_expired(hour) and marks_of(before, hour, cut) == marks_of(now, hour, cut)


def plan_due(
    state: State, content: Collection[str], keep: timedelta | None, now: datetime
) -> tuple[str, ...]:
    """The hours that leave the archive, of those in it: kept long enough and not held, or expired.
    Pure."""
    bound = hour_of(now - keep) if keep is not None else ""
    return tuple(
        hour
        for hour in sorted(content)
        if state.is_expired(hour) or (hour < bound and state.holds.of(hour) is None)
    )


def plan_remove(table: Table, hours: Collection[str], id: str, now: datetime) -> Commit | None:
    """The commit by which hours leave, and snapshots expire: those from before records left after a
    day. None for nothing to do. Pure."""
    expire = plan_expiry(table, None, now, gone_before=removed_at(table))
    if not (hours or expire):
        return None
    change = Change("main", clear=tuple(hours), properties=_removed(now) if hours else {})
    return Commit(id, heads(table), (change,), expire=expire)


def removed_at(table: Table) -> datetime | None:
    """When records last left the archive; older snapshots have them."""
    text = branch_properties(table, "main").get(_REMOVED)
    return datetime.fromisoformat(text) if text is not None else None


def _removed(now: datetime) -> dict[str, str]:
    return {_REMOVED: now.isoformat()}


def plan_erase(
    table: Table,
    files: Mapping[str, DataFile],
    written: Mapping[str, DataFile | None],
    id: str,
    began: datetime,
    now: datetime,
) -> Commit | None:
    """The commit that replaces files by those without erased records; None if a file left
    meanwhile, or the new ones may be orphans by now. Pure."""
    if abs(now - began) > NAMED_WITHIN or not written.keys() <= files.keys():
        return None
    added = tuple(new for new in written.values() if new is not None)
    removed = tuple(files[path] for path in written)
    change = Change("main", added, removed, properties=_removed(now))
    return Commit(id, heads(table), (change,), expire=plan_expiry(table, id, now))


def plan_searched(
    table: Table, files: Collection[str], searched: Collection[str], id: str, now: datetime
) -> Commit | None:
    """The commit that moves the head once each of the files was searched for erased records; None
    if one was not: it came meanwhile. Pure."""
    if not set(files) <= set(searched):
        return None
    return Commit(id, heads(table), (Change("main"),), expire=plan_expiry(table, id, now))
