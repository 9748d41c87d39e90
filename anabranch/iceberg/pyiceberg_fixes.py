"""What PyIceberg 0.12.0 does slowly, corrected when the lake is imported. Each goes when a release has it."""

from __future__ import annotations

from typing import TypeVar

from pyiceberg.partitioning import PartitionSpec
from pyiceberg.schema import Schema
from pyiceberg.table.refs import SnapshotRef
from pyiceberg.table.snapshots import MetadataLogEntry, Snapshot, SnapshotLogEntry
from pyiceberg.table.sorting import SortOrder

T = TypeVar("T")

PARTS = (Schema, PartitionSpec, SortOrder, Snapshot, SnapshotRef, SnapshotLogEntry, MetadataLogEntry)
"""The parts of a table's metadata. PyIceberg declares them frozen, and nothing changes one in place."""


def share_parts() -> None:
    """Have a deep copy of a table's metadata share its parts with the original.

    PyIceberg copies all of the metadata once for each update of a transaction and once for each commit: every field of
    every schema and every property of every snapshot.
    """
    for part in PARTS:
        part.__deepcopy__ = _itself  # type: ignore[method-assign,assignment]


def _itself(part: T, memo: object = None) -> T:
    return part
