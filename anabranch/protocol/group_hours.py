"""Tags for an hour of a group: `group-<group>-<hour>` on each table, after the hour and all earlier
ones are accepted in every stream of the group.

A tag refers to a snapshot of branch `batch`, which has the accepted revision of each hour up to the
tag's, and no rows of the speed layer. A restatement moves the tags of its hour and of later hours
in its own commit (`moved_tags`). Decision 47 has the reasons.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import TYPE_CHECKING

from pyiceberg.table.refs import SnapshotRefType

from anabranch.config import Stream
from anabranch.iceberg.commits import Commit, Outcome, Tag
from anabranch.iceberg.lake import Lake
from anabranch.iceberg.snapshots import head
from anabranch.offsets.hours import hours_between, shift
from anabranch.protocol.publish import new_id
from anabranch.protocol.state import State, read_state
from anabranch.protocol.watermarks import complete_through

if TYPE_CHECKING:
    from pyiceberg.table import Table

GROUP_TAG = "group-"
"""The prefix of a group's tags, before the group, `-` and the hour."""

_NAMED = re.compile(rf"{GROUP_TAG}(.+)-(\d{{4}}-\d\d-\d\dT\d\d)")
_HOUR = timedelta(hours=1)
_AT_ONCE = 8


def group_tag(group: str, hour: str) -> str:
    """Return the name of the tag. Pure."""
    return f"{GROUP_TAG}{group}-{hour}"


def tagged_hours(table: Table, group: str | None = None) -> dict[str, str]:
    """Return the group tags of a loaded table, of one group or of all: hour by name, oldest hour
    first. Pure."""
    found = {}
    for name, ref in table.metadata.refs.items():
        match = _NAMED.fullmatch(name)
        is_wanted = match is not None and group in (None, match[1])
        if match is not None and is_wanted and ref.snapshot_ref_type == SnapshotRefType.TAG:
            found[name] = match[2]
    return dict(sorted(found.items(), key=lambda item: item[1]))


def moved_tags(table: Table, hours: Iterable[str]) -> dict[str, int]:
    """Return the group tags whose snapshots contain one of `hours`, and when each expires (ms since
    the epoch). The commit that replaces rows of these hours on `batch` moves them to its snapshot.
    Pure."""
    first, metadata, moved = min(hours), table.metadata, {}
    for name, hour in tagged_hours(table).items():
        snapshot, age = (
            metadata.snapshot_by_id(metadata.refs[name].snapshot_id),
            metadata.refs[name].max_ref_age_ms,
        )
        if hour >= first and snapshot is not None and age is not None:
            moved[name] = snapshot.timestamp_ms + age
    return moved


def plan_hours(through: str, tagged: Iterable[str], first: str, at_most: int) -> list[str]:
    """Return the complete hours to tag, oldest first: those after the newest tagged one, or from
    the stream's first, but only the newest `at_most`. Pure."""
    begin = max([shift(first, -1), shift(through, -at_most), *tagged])
    return hours_between(shift(begin, 1), shift(through, 1)) if begin < through else []


def plan_tags(
    state: State, group: str, through: str, keep: timedelta, now: datetime
) -> Commit | None:
    """Return the commit that tags the hours of a group that are complete `through` an hour; None if
    there is nothing to tag. It requires the head of `batch` and moves no head, so no publish is
    refused because of it. Pure."""
    if (own := complete_through(state)) is None or own < through:
        return None
    table, made = state.table, head(state.table, "batch")
    tagged = tagged_hours(table, group).values()
    hours = plan_hours(through, tagged, state.timeline.first, max(1, keep // _HOUR))
    # Iceberg counts the age from the snapshot's timestamp.
    age = int(now.timestamp() * 1000) - made.timestamp_ms + int(keep.total_seconds() * 1000)
    tags = tuple(Tag(group_tag(group, hour), made.snapshot_id, age) for hour in hours)
    return Commit(new_id(), {"batch": made.snapshot_id}, (), tags=tags) if tags else None


@dataclass(frozen=True)
class GroupedStream:
    """A stream of a group, with the state that its hours were read from."""

    lake: Lake
    stream: Stream
    state: State


def tag_hours(group: str, through: str, members: Iterable[GroupedStream]) -> list[str]:
    """Tag the hours of a group that are complete `through` an hour, on each member's table. Returns
    the hours that got a tag in some table, oldest first.

    Idempotent: hours with a tag are skipped, and the next call completes the work of a killed one.
    An error of one table does not stop the others; the first one is raised: Transient if the lake
    does not answer, or if other commits land first for a quarter of a minute.
    """
    with ThreadPoolExecutor(_AT_ONCE, "tag") as threads:
        tagging = [threads.submit(_tag, group, through, member) for member in members]
    return sorted({hour for done in tagging for hour in done.result()})


def _tag(group: str, through: str, member: GroupedStream) -> Sequence[str]:
    lake, name, keep = member.lake, member.stream.table, member.stream.maintain.group_hours

    def plan(table: Table) -> Commit | None:
        return plan_tags(read_state(table), group, through, keep, lake.clock.now())

    commit = plan(member.state.table)
    if commit is not None and lake.commit(member.state.table, commit) is Outcome.REFUSED:
        commit = lake.commit_until_landed(name, f"tag hour {through} of group {group}", plan)
    return [tag.name[-len(through) :] for tag in commit.tags] if commit is not None else []
