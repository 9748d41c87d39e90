"""The snapshot that a name or a time selects."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING

from pyiceberg.table.snapshots import ancestors_of

from anabranch.common.errors import ConfigurationError
from anabranch.iceberg.snapshots import STAGING, UNNAMED, is_tag, made_at

if TYPE_CHECKING:
    from pyiceberg.table import Table


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
