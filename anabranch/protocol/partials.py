"""From what a view's partials of an hour were computed: their files record it.

Partials are aggregates of an hour's rows, kept in a table of the view (`serving_layer.views`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from anabranch.iceberg.hour_files import files_by_hour

if TYPE_CHECKING:
    from pyiceberg.manifest import DataFile
    from pyiceberg.table import Table

PROVENANCE_COLUMNS = ("decision", "files", "definition")
"""The columns that record from what partials were computed: one value in each file, found in its
bounds."""


@dataclass(frozen=True)
class Filled:
    """The inputs of an hour's partials."""

    decision: str
    files: str
    definition: str


def digest_of(files: Iterable[str]) -> str:
    """A digest of the names of an hour's files, which are unique in any location."""
    names = sorted(path.rpartition("/")[2] for path in files)
    return hashlib.sha256("\n".join(names).encode()).hexdigest()[:32]


def filled_hours(table: Table, files_of: Mapping[str, Mapping[str, DataFile]]) -> dict[str, Filled]:
    """The inputs of each hour's partials, by their files' bounds. Pure."""
    ids = {name: table.schema().find_field(name).field_id for name in PROVENANCE_COLUMNS}
    filled = {}
    for hour, files in files_of.items():
        values = {
            tuple(_only_value(file, ids[name]) for name in PROVENANCE_COLUMNS)
            for file in files.values()
        }
        if len(values) == 1 and None not in (only := values.pop()):
            filled[hour] = Filled(*map(str, only))
    return filled


def _only_value(file: DataFile, id: int) -> str | None:
    """The only value of a text column in a file; None if its bounds differ or are missing."""
    least, most = (
        bounds.get(id) if bounds else None for bounds in (file.lower_bounds, file.upper_bounds)
    )
    return least.decode() if least is not None and least == most else None


def stale_hours(partials: Table, rows: Table, hours: Collection[str]) -> list[str]:
    """Those of some hours that have partials of other files than `main` has now, oldest first.
    Raises Transient."""
    if not (files_of := files_by_hour(partials, "main", hours)):
        return []
    filled, now = filled_hours(partials, files_of), files_by_hour(rows, "main", files_of)
    current = {hour for hour, one in filled.items() if one.files == digest_of(now.get(hour, ()))}
    return sorted(files_of.keys() - current)
