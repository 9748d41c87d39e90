"""The inputs from which a view's partials of an hour were computed, as their files record them.

Partials are aggregates of an hour's rows in a table of the view (`serving_layer.views`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from pyiceberg.manifest import DataFile
from pyiceberg.table import Table

from anabranch.iceberg.manifests import files_by_hour

PROVENANCE_COLUMNS = ("decision", "files", "definition")
"""The columns that record the inputs of partials. Each file has one value, which its column bounds
contain."""


@dataclass(frozen=True)
class Filled:
    """The inputs of an hour's partials."""

    decision: str
    files: str
    definition: str


def digest_of(files: Iterable[str]) -> str:
    """Return a digest of the names of an hour's files, which are unique across locations."""
    names = sorted(path.rpartition("/")[2] for path in files)
    return hashlib.sha256("\n".join(names).encode()).hexdigest()[:32]


def filled_hours(table: Table, files_of: Mapping[str, Mapping[str, DataFile]]) -> dict[str, Filled]:
    """Return each hour's partials' inputs, by their files' bounds, unless these differ. Pure."""
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
    """Return the only value of a string column in a file; None if bounds differ or are missing."""
    least, most = (
        bounds.get(id) if bounds else None for bounds in (file.lower_bounds, file.upper_bounds)
    )
    return least.decode() if least is not None and least == most else None


def stale_hours(partials: Table, rows: Table, hours: Collection[str]) -> list[str]:
    """Return those of `hours` whose partials were computed from other files than `main` has now,
    oldest first. Raises Transient."""
    if not (files_of := files_by_hour(partials, "main", hours)):
        return []
    filled, now = filled_hours(partials, files_of), files_by_hour(rows, "main", files_of)
    current = {hour for hour, one in filled.items() if one.files == digest_of(now.get(hour, ()))}
    return sorted(files_of.keys() - current)
