"""The files that a query opened: columns, files and bytes of each scan of a table, with the totals
of its snapshot."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from pyiceberg.manifest import DataFile

from serving_layer.query.datasets import Scan, TableFiles


@dataclass(frozen=True)
class Opened:
    """One scan of a table. `bytes`: size of the opened files; `column_bytes`: size of the columns
    read from them; `all_files` and `all_bytes`: number and size of the snapshot's files.
    `condition`: the pushed-down condition that chose the files, or None."""

    table: str
    columns: tuple[str, ...]
    condition: str | None
    files: int
    all_files: int
    bytes: int
    all_bytes: int
    column_bytes: int


def opened(read: Iterable[TableFiles]) -> list[Opened]:
    """Return the scans of queries that have ended. Opens every manifest of the tables. Raises
    OSError."""
    found = []
    for planned in read:
        everything = planned.whole().select()
        found += [_opened(planned, scan, everything) for scan in planned.scans]
    return found


def _opened(planned: TableFiles, scan: Scan, everything: Sequence[DataFile]) -> Opened:
    read = {c for c in planned.columns.names if c in scan.columns or c in (scan.condition or "")}
    schema = planned.table.schema()
    ids = {
        id
        for id in schema.field_ids
        if (schema.find_column_name(id) or "").partition(".")[0] in read
    }
    return Opened(
        planned.name,
        tuple(c for c in planned.columns.names if c in read),
        scan.condition,
        len(scan.files),
        len(everything),
        sum(file.file_size_in_bytes for file in scan.files),
        sum(file.file_size_in_bytes for file in everything),
        sum(
            size
            for file in scan.files
            for id, size in (file.column_sizes or {}).items()
            if id in ids
        ),
    )
