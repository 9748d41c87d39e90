"""A commit as a value: the changes of each branch of one table, and the heads that the decision
requires.

`anabranch.iceberg.prepare` writes its manifests, `anabranch.iceberg.lake` makes it land.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from pyiceberg.manifest import DataFile


class Outcome(Enum):
    """The outcome of a commit."""

    LANDED = "landed"
    REFUSED = "refused"


@dataclass(frozen=True)
class Change:
    """What a commit does to one branch: files and whole hours leave it, then files come.

    `clear` names hours all of whose files leave; `copy` names hours whose files are replaced by
    another branch's, at the commit's heads. Neither reads the files' entries where a manifest is of
    one hour. Properties not named here are carried forward from the head. `rewrites`: the rows stay
    the same. `tags`: tags that move to the change's snapshot, by name, and when each ends (ms since
    the epoch).
    """

    branch: str
    add: tuple[DataFile, ...] = ()
    remove: tuple[DataFile, ...] = ()
    properties: Mapping[str, str] = field(default_factory=dict)
    clear: tuple[str, ...] = ()
    copy: Mapping[str, str] = field(default_factory=dict)
    rewrites: bool = False
    tags: Mapping[str, int] = field(default_factory=dict)

    @property
    def changes_rows(self) -> bool:
        """Whether rows may come to the branch or leave it."""
        return bool(self.add or self.remove or self.clear or self.copy) and not self.rewrites


@dataclass(frozen=True)
class Tag:
    """A snapshot that stays readable under a name until the tag expires."""

    name: str
    snapshot_id: int
    max_age_ms: int


@dataclass(frozen=True)
class Commit:
    """One atomic change of one table, and the heads it rests on. `id` names the attempt in every
    snapshot it makes.

    `staged` has, by attempt, the staged snapshots whose files the commit adds. It is refused when
    one of them is gone: who expired it deletes these files.
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
