"""A commit as a value: the changes of each branch of one table, and the heads that the decision
requires.

`anabranch.iceberg.prepare` writes its manifests, and `anabranch.iceberg.lake` sends it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from pyiceberg.manifest import DataFile


class Outcome(Enum):
    LANDED = "landed"
    REFUSED = "refused"


@dataclass(frozen=True)
class Change:
    """A commit's change of one branch: files and whole hours are removed, then files are added.

    `clear`: hours to remove. `copy`: hours to replace by another branch's files, at the commit's
    heads (hour -> branch). Neither reads the entries of manifests with one hour. `properties`: new
    values; the head's other properties are carried forward. `rewrites`: the rows stay the same.
    """

    branch: str
    add: tuple[DataFile, ...] = ()
    remove: tuple[DataFile, ...] = ()
    properties: Mapping[str, str] = field(default_factory=dict)
    clear: tuple[str, ...] = ()
    copy: Mapping[str, str] = field(default_factory=dict)
    rewrites: bool = False

    @property
    def changes_rows(self) -> bool:
        """Whether the change may add or remove rows of the branch."""
        return bool(self.add or self.remove or self.clear or self.copy) and not self.rewrites


@dataclass(frozen=True)
class Tag:
    """A tag that keeps a snapshot readable for `max_age_ms` after the snapshot's time."""

    name: str
    snapshot_id: int
    max_age_ms: int


@dataclass(frozen=True)
class Commit:
    """One atomic change of one table, and the heads that it requires. Each snapshot that it makes
    has its `id`.

    `staged`: the staged snapshots whose files the commit adds, by attempt. The commit is refused if
    one of them is gone: it is expired, and orphan removal deletes its files.
    """

    id: str
    heads: Mapping[str, int]
    changes: tuple[Change, ...]
    tags: tuple[Tag, ...] = ()
    drop_tags: tuple[str, ...] = ()
    expire: tuple[int, ...] = ()
    staged: Mapping[str, int] = field(default_factory=dict)
    set_properties: Mapping[str, str] = field(default_factory=dict)
    remove_properties: tuple[str, ...] = ()
