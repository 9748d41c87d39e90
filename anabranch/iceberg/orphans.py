"""Orphans: unreferenced files of a stream's tables, left by unpublished attempts."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator
from datetime import datetime
from typing import TYPE_CHECKING

from anabranch.common.errors import Refused, Transient
from anabranch.config import Environment
from anabranch.iceberg.files import Stored, list_files, same_file
from anabranch.iceberg.snapshots import reachable

if TYPE_CHECKING:
    from pyiceberg.table import Table

_METADATA = r"metadata/[^/]+\.(metadata\.json|avro|stats|puffin|anabranch)"


def list_table(
    environment: Environment, table: Table, listed: Callable[[], None] = lambda: None
) -> list[Stored]:
    """List the files that this table's writers may have written, by their names and folders: files
    of another table in or beside this one's folder are excluded. Calls `listed` for each file in
    the folders. Raises Transient."""
    stored = (f for folder in folders_of(table) for f in list_files(environment, folder))
    is_own, found = own_files(table), []
    for file in stored:
        listed()
        if is_own(file.path):
            found.append(file)
    return found


def folders_of(table: Table) -> tuple[str, ...]:
    """Return the folders of a table's files. Pure."""
    return tuple(f"{table.location().rstrip('/')}/{folder}" for folder in ("data", "metadata"))


def own_files(table: Table) -> Callable[[str], bool]:
    """Return a check whether this table's writers may have written a path. Pure."""
    parts = [
        "".join(f"{re.escape(f.name)}=[^/]*/" for f in spec.fields)
        for spec in table.specs().values()
    ]
    pattern = re.compile("|".join([_METADATA, *(rf"data/{part}[^/]+\.parquet" for part in parts)]))
    below = len(same_file(table.location().rstrip("/"))) + 1
    return lambda path: pattern.fullmatch(same_file(path)[below:]) is not None


def references(table: Table) -> Iterator[str]:
    """Yield every file that a table's metadata refers to: its own file, the metadata log,
    statistics, and the manifest lists, manifests and data files of all snapshots, staged and tagged
    ones included. Raises Transient if one cannot be read."""
    metadata = table.metadata
    yield table.metadata_location
    yield from (entry.metadata_file for entry in metadata.metadata_log)
    yield from (s.statistics_path for s in (*metadata.statistics, *metadata.partition_statistics))
    try:
        # An entry with status DELETED is live in an older snapshot until that snapshot expires.
        yield from reachable(table, table.snapshots())
    except OSError as error:
        raise Transient(
            f"look for orphans of {'.'.join(table.name())}: expected to read its manifests, found "
            f"{type(error).__name__}: {error}; nothing is deleted, try again"
        ) from error


def plan_orphans(
    listed: Iterable[Stored], referenced: Collection[str], before: datetime
) -> tuple[list[Stored], list[Stored]]:
    """Return the files of `listed` without a reference: those written before `before`, and the
    others. Pure.

    List the files before reading the references, so that files published meanwhile are kept. Raises
    Refused if no listed file is referenced: the paths differ, and every file would look like an
    orphan.
    """
    listed, named = list(listed), {same_file(path) for path in referenced}
    if listed and not any(same_file(f.path) in named for f in listed):
        raise Refused(
            f"look for orphans: expected some of {len(listed)} files to be referenced, found "
            f"none, first {listed[0].path}; nothing is deleted: compare the table's location with "
            "the paths in its metadata"
        )
    unreferenced = [f for f in listed if same_file(f.path) not in named]
    # The age is for files that a running writer has not published yet (decision 21).
    return [f for f in unreferenced if f.modified < before], [
        f for f in unreferenced if f.modified >= before
    ]
