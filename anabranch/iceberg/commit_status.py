"""The outcome of a commit whose answer was lost, by the current table: it landed, never will, or
still may.

A request without an answer may still be executed at any later time: by a catalog behind a gateway
that timed out, or by a client's retry. Only once a head that it requires has moved can it no longer
land.
"""

from __future__ import annotations

import uuid
from enum import Enum
from typing import TYPE_CHECKING

from pyiceberg.table.snapshots import ancestors_of

from anabranch.iceberg.commits import Change, Commit
from anabranch.iceberg.snapshots import has_landed, newest_publish

if TYPE_CHECKING:
    from pyiceberg.table import Table


class CommitFate(Enum):
    """The outcome of a commit with snapshots, according to a table."""

    LANDED = "a snapshot carries its id"
    NEVER = "a head that it requires has moved, and no snapshot since is its own"
    OPEN = "the heads are those that it requires: it may still land"
    FORGOTTEN = "a head that it requires has moved, and the snapshots since are not all remembered"


def classify_commit(table: Table, commit: Commit) -> CommitFate:
    """Return the outcome of a commit whose answer was lost, according to the current table.
    Pure."""
    # First: a commit that landed has moved the heads itself, and would count as refused below.
    if has_landed(table, commit.id):
        return CommitFate.LANDED
    refs = table.metadata.refs
    if all(
        branch in refs and refs[branch].snapshot_id == id for branch, id in commit.heads.items()
    ):
        return CommitFate.OPEN
    # It lands on all of its branches or on none, so one branch without it decides for all.
    if any(
        _comes_from(table, change.branch, commit.heads[change.branch]) for change in commit.changes
    ):
        return CommitFate.NEVER
    # Snapshots in between are expired, and one of them may be this commit.
    return CommitFate.FORGOTTEN


def plan_fence(table: Table, commit: Commit) -> Commit:
    """Return an empty commit after which an `OPEN` commit cannot land: it requires the same heads
    and moves one of them.

    It repeats the properties of the newest publish on that publish's branch, so they stay the
    newest. Pure except for its random id.
    """

    def age(branch: str) -> int:
        newest = newest_publish(table, branch)
        return (newest.sequence_number or 0) if newest is not None else 0

    return Commit(
        uuid.uuid4().hex, dict(commit.heads), (Change(max(sorted(commit.heads), key=age)),)
    )


def _comes_from(table: Table, branch: str, id: int) -> bool:
    """Return whether a snapshot is an ancestor of a branch's head, or the head, and the table still
    has every snapshot between them."""
    head = table.metadata.snapshot_by_name(branch)
    return any(s.snapshot_id == id for s in ancestors_of(head, table.metadata))
