"""A commit as a value: what changes on which branch of one table, and the heads that the decision rests on; and what of
it is written before the catalog is asked. `anabranch.lake` makes it land.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from pyiceberg.manifest import DataFile, ManifestFile
from pyiceberg.table import Table, Transaction
from pyiceberg.table.refs import SnapshotRefType
from pyiceberg.table.update import RemoveSnapshotRefUpdate, RemoveSnapshotsUpdate, SetSnapshotRefUpdate, TableUpdate
from pyiceberg.table.update.snapshot import _SnapshotProducer

from anabranch.neighbours import explain
from anabranch.snapshots import carried, written


class Outcome(Enum):
    """What became of a commit."""

    LANDED = "landed"
    REFUSED = "refused"


@dataclass(frozen=True)
class Change:
    """What a commit does to one branch. Properties not named here are carried forward from the head."""

    branch: str
    add: tuple[DataFile, ...] = ()
    remove: tuple[DataFile, ...] = ()
    properties: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Tag:
    """A snapshot that stays readable under a name until its age ends."""

    name: str
    snapshot_id: int
    max_age_ms: int


@dataclass(frozen=True)
class Commit:
    """One atomic change of one table, and the heads it rests on. `id` names the attempt in every snapshot it makes."""

    id: str
    heads: Mapping[str, int]
    changes: tuple[Change, ...]
    tags: tuple[Tag, ...] = ()
    drop_tags: tuple[str, ...] = ()
    expire: tuple[int, ...] = ()
    set_properties: Mapping[str, str] = field(default_factory=dict)
    remove_properties: tuple[str, ...] = ()


def prepare(table: Table, commit: Commit) -> tuple[list[_SnapshotProducer[Any]], tuple[TableUpdate, ...]]:
    """Write the commit's manifests and say what it changes. Nothing is visible yet. Raises Transient."""
    tx = Transaction(table)
    producers: list[_SnapshotProducer[Any]] = []
    try:
        for change in commit.changes:
            said = written(table, change.branch, carried(table, change.branch, change.properties, commit.id))
            update = tx.update_snapshot(snapshot_properties=said, branch=change.branch)
            producer = update.overwrite() if change.remove else update.fast_append()
            _evaluate_apart(producer)
            producers.append(producer)
            for data_file in change.add:
                producer.append_data_file(data_file)
            for data_file in change.remove:
                producer.delete_data_file(data_file)
            producer.commit()
    except OSError as error:
        for started in producers:
            started._clean_all_uncommitted()
        raise explain(f"write the manifests of commit {commit.id} of {'.'.join(table.name())}", error) from error
    if commit.set_properties:
        tx.set_properties(dict(commit.set_properties))
    if commit.remove_properties:
        tx.remove_properties(*commit.remove_properties)
    updates = list(tx._updates)
    if commit.expire:
        updates.append(RemoveSnapshotsUpdate(snapshot_ids=list(commit.expire)))
    updates += [set_ref(t.name, t.snapshot_id, SnapshotRefType.TAG, t.max_age_ms) for t in commit.tags]
    updates += [RemoveSnapshotRefUpdate(ref_name=name) for name in commit.drop_tags]
    return producers, tuple(updates)


def set_ref(name: str, snapshot_id: int, kind: str, max_age_ms: int | None = None) -> SetSnapshotRefUpdate:
    return SetSnapshotRefUpdate(
        ref_name=name,
        snapshot_id=snapshot_id,
        type=kind,
        max_ref_age_ms=max_age_ms,
        max_snapshot_age_ms=None,
        min_snapshots_to_keep=None,
    )


def _evaluate_apart(producer: _SnapshotProducer[Any]) -> None:
    """Have each manifest judged by an evaluator of its own.

    PyIceberg 0.12 shares one among the threads that look for the files to be removed, and it remembers the manifest at
    hand: so a manifest is judged by the bounds of another, and a file that is there is said to be missing.
    """
    build = producer._build_manifest_evaluator

    def build_apart(spec_id: int) -> Callable[[ManifestFile], bool]:
        return lambda manifest: build(spec_id)(manifest)

    producer._build_manifest_evaluator = build_apart  # type: ignore[method-assign]
