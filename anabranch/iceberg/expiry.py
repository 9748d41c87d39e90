"""Decide which snapshots and tags expire."""

from __future__ import annotations

from collections.abc import Collection
from datetime import datetime, timedelta
from typing import TYPE_CHECKING

from pyiceberg.table.refs import SnapshotRefType

from anabranch.iceberg.snapshots import (
    BRANCHES,
    PUBLISH_ID,
    STAGED,
    WAP_ID,
    ancestors_to_last_publish,
)

if TYPE_CHECKING:
    from pyiceberg.table import Table


SNAPSHOTS_OF_EXPIRED = timedelta(days=1)
"""How long snapshots stay that have rows which no branch is to keep: for those who read them."""


def plan_expiry(
    table: Table,
    publishing: str | None,
    now: datetime,
    keep: int = 100,
    *,
    waiting: Collection[str] = (),
    gone_before: datetime | None = None,
    ended: Collection[int] = (),
    dropped: Collection[str] = (),
) -> tuple[int, ...]:
    """The snapshots that the next commit removes: staged ones that are published or abandoned, and
    all but the newest. A snapshot staged under an id of `waiting` is never abandoned: a publish
    refers to it. Heads, their ancestors down to the newest publish, tags, and the parents of
    waiting staged snapshots stay. Files are never deleted here. `gone_before`: snapshots from
    before it have rows that no branch is to keep, so they stay for SNAPSHOTS_OF_EXPIRED alone.
    Snapshots of `ended` do not stay. Tags of `dropped` leave with the same commit, so they keep
    nothing.
    """
    snapshots = table.snapshots()
    published = {s.summary.get(PUBLISH_ID) for s in snapshots if s.summary is not None} | {
        publishing
    }
    refs = {name: ref for name, ref in table.metadata.refs.items() if name not in dropped}
    kept = {ref.snapshot_id for name, ref in refs.items() if not name.startswith(STAGED)}
    kept |= {s.snapshot_id for b in BRANCHES for s in ancestors_to_last_publish(table, b)}
    day_ago = now.timestamp() * 1000 - 86_400_000
    removed, line = [], []
    for s in snapshots:
        wap_id = s.summary.get(WAP_ID) if s.summary is not None else None
        if wap_id is None:
            line.append(s)
        elif wap_id in published or (s.timestamp_ms < day_ago and wap_id not in waiting):
            removed.append(s.snapshot_id)
        elif s.parent_snapshot_id is not None:
            kept.add(s.parent_snapshot_id)
    line.sort(key=lambda s: s.sequence_number or 0, reverse=True)
    old = 0.0
    if gone_before is not None:
        old = min(gone_before, now - SNAPSHOTS_OF_EXPIRED).timestamp() * 1000
    removed += [
        s.snapshot_id
        for number, s in enumerate(line)
        if number >= keep or s.timestamp_ms < old or s.snapshot_id in ended
    ]
    return tuple(id for id in removed if id not in kept)


def plan_plain_expiry(table: Table, keep: int = 200) -> tuple[int, ...]:
    """The same for a table without our branches and stages: all but the newest snapshots and those
    with a ref."""
    line = sorted(table.snapshots(), key=lambda s: s.sequence_number or 0, reverse=True)
    kept = {ref.snapshot_id for ref in table.metadata.refs.values()}
    return tuple(s.snapshot_id for s in line[keep:] if s.snapshot_id not in kept)


def expired_tags(table: Table, now: datetime) -> tuple[str, ...]:
    """Tags whose age has ended."""
    ended = []
    for name, ref in table.metadata.refs.items():
        if ref.snapshot_ref_type != SnapshotRefType.TAG or ref.max_ref_age_ms is None:
            continue
        snapshot = table.metadata.snapshot_by_id(ref.snapshot_id)
        if snapshot is None or snapshot.timestamp_ms + ref.max_ref_age_ms < now.timestamp() * 1000:
            ended.append(name)
    return tuple(ended)
