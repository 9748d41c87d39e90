"""The decision which snapshots and tags expire."""

from __future__ import annotations

from collections.abc import Collection
from datetime import datetime, timedelta

from pyiceberg.table import Table
from pyiceberg.table.refs import SnapshotRefType

from anabranch.iceberg.snapshots import (
    BRANCHES,
    PUBLISH_ID,
    STAGED,
    WAP_ID,
    ancestors_to_last_publish,
)

SNAPSHOTS_OF_EXPIRED = timedelta(days=1)
"""The time that snapshots with expired rows stay, for readers that use them."""


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
    """Return the snapshots that the next commit expires. Deletes no file. Pure.

    A staged snapshot expires once published, or abandoned for a day. It is not abandoned while a
    publish refers to it (`waiting`). Of the others, all but the newest `keep` expire, and those in
    `ended`. `gone_before`: older snapshots have rows that no branch keeps, so they expire after
    SNAPSHOTS_OF_EXPIRED. Heads, their ancestors down to the newest publish, tagged snapshots, and
    the parents of staged snapshots stay. `dropped`: tags that the same commit removes.
    """
    snapshots = table.snapshots()
    published = {s.summary.get(PUBLISH_ID) for s in snapshots if s.summary is not None} | {
        publishing
    }
    refs = {name: ref for name, ref in table.metadata.refs.items() if name not in dropped}
    kept = {ref.snapshot_id for name, ref in refs.items() if not name.startswith(STAGED)}
    # The newest publish of a branch has its state. Commits of other programs above it have none
    # (decision 38).
    kept |= {s.snapshot_id for b in BRANCHES for s in ancestors_to_last_publish(table, b)}
    day_ago = now.timestamp() * 1000 - 86_400_000
    removed, unstaged = [], []
    for s in snapshots:
        wap_id = s.summary.get(WAP_ID) if s.summary is not None else None
        if wap_id is None:
            unstaged.append(s)
        # Decision 12: `waiting` has no limit of age. A publish names these dead letters, and their
        # records are at no other place once Kafka has deleted them.
        elif wap_id in published or (s.timestamp_ms < day_ago and wap_id not in waiting):
            removed.append(s.snapshot_id)
        elif s.parent_snapshot_id is not None:
            # The staged rows are the difference to the parent: without it they cannot be read.
            kept.add(s.parent_snapshot_id)
    unstaged.sort(key=lambda s: s.sequence_number or 0, reverse=True)
    old = 0.0
    # Decisions 50 and 51: the rows are gone from the branches. Without this bound, snapshots of an
    # idle table would keep them until a hundred newer ones exist.
    if gone_before is not None:
        old = min(gone_before, now - SNAPSHOTS_OF_EXPIRED).timestamp() * 1000
    removed += [
        s.snapshot_id
        for number, s in enumerate(unstaged)
        if number >= keep or s.timestamp_ms < old or s.snapshot_id in ended
    ]
    return tuple(id for id in removed if id not in kept)


def plan_plain_expiry(table: Table, keep: int = 200) -> tuple[int, ...]:
    """Return the snapshots to expire in a table without our branches and staging: all but the
    newest `keep` and those with a ref. Pure."""
    newest_first = sorted(table.snapshots(), key=lambda s: s.sequence_number or 0, reverse=True)
    kept = {ref.snapshot_id for ref in table.metadata.refs.values()}
    return tuple(s.snapshot_id for s in newest_first[keep:] if s.snapshot_id not in kept)


def expired_tags(table: Table, now: datetime) -> tuple[str, ...]:
    """Return the tags that have reached their maximum age, or whose snapshot is gone. Pure."""
    ended = []
    for name, ref in table.metadata.refs.items():
        if ref.snapshot_ref_type != SnapshotRefType.TAG or ref.max_ref_age_ms is None:
            continue
        snapshot = table.metadata.snapshot_by_id(ref.snapshot_id)
        if snapshot is None or snapshot.timestamp_ms + ref.max_ref_age_ms < now.timestamp() * 1000:
            ended.append(name)
    return tuple(ended)
