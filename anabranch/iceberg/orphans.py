"""Orphans: unreferenced files of a stream's tables, left by unpublished attempts."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from functools import partial
from typing import TYPE_CHECKING

from pyiceberg.io import FileIO

from anabranch.common.errors import Refused, Transient
from anabranch.common.json_values import parse, read_property
from anabranch.iceberg import admin
from anabranch.iceberg.files import Stored, list_files, same_file
from anabranch.iceberg.snapshots import reachable

if TYPE_CHECKING:
    from pyiceberg.table import Table, Transaction

    from anabranch.iceberg.lake import Lake

FOLDERS = "anabranch.folders"
"""The table property with the folders of the table's files outside of its location."""

_METADATA = r"[^/]+\.(?:metadata\.json|avro|stats|puffin|anabranch)"
_DATA = r"[^/]+\.(?:parquet|orc|avro)"
# Iceberg's object storage layout: https://iceberg.apache.org/docs/latest/aws/.
_HASH = r"(?:[01]{4}/){3}"
_METADATA_PATH = "write.metadata.path"
_PATHS = {
    "write.data.path",
    "write.object-storage.path",
    "write.folder-storage.path",
    _METADATA_PATH,
}


@dataclass(frozen=True)
class OwnFiles:
    """The folders of a table's files, and the names that its writers give files there. Files of
    another table in or beside a folder have other names."""

    folders: frozenset[str]
    _names: re.Pattern[str]
    io: FileIO = field(compare=False)

    def has(self, path: str) -> bool:
        """Return whether the table's writers may have written a path."""
        return self._names.fullmatch(same_file(path)) is not None


def own_files(lake: Lake, table: Table, paths: Iterable[str] = ()) -> OwnFiles:
    """Return a table's own files: in the folders of its location, of its properties (`remember`),
    and of `paths`, files of the table. Raises Refused for a folder outside of the location in which
    another table of the catalog gives files the same names, Transient."""
    location = table.location().rstrip("/")
    parts = {
        "".join(f"{re.escape(f.name)}=[^/]*/" for f in spec.fields)
        for spec in table.specs().values()
    }
    part = f"(?:{'|'.join(sorted(parts))})"
    # Iceberg writes this outside of a location, so that tables may share a folder.
    context = re.escape("/".join(same_file(location).split("/")[-2:]))
    of_table = rf"{_HASH}[01]{{8}}/{context}/(?:{part})?{_DATA}"
    of_any = rf"(?:{_HASH}[01]{{8}}/)?{part}{_DATA}|{_HASH}{_DATA}|{_METADATA}"
    # By folder, whether the names there are of this table alone.
    folders = {f"{location}/data": False, f"{location}/metadata": False}
    has_objects = table.properties.get("write.object-storage.enabled", "").lower() == "true"
    for path in _remembered(table):
        folders[path] = False
    for key in _PATHS & table.properties.keys():
        path = table.properties[key]
        is_apart = has_objects and key != _METADATA_PATH and not path.startswith(location)
        folders[path.rstrip("/")] = is_apart
    name = re.compile(f"(.*?)/(?:({of_table})|{of_any})")
    for found in filter(None, map(name.fullmatch, paths)):
        folders[found[1]] = folders.get(found[1], True) and found[2] is not None
    shared = _shared(lake, table, folders)
    names = (
        f"{re.escape(same_file(folder))}/(?:{of_table}{'' if folder in shared else f'|{of_any}'})"
        for folder in sorted(folders)
    )
    return OwnFiles(frozenset(folders), re.compile("|".join(names)), table.io)


def _shared(lake: Lake, table: Table, folders: Mapping[str, bool]) -> set[str]:
    """Return the folders outside of the location in which other tables of the catalog write too.
    Raises Refused unless the names there are of this table alone."""
    own, shared = f"{same_file(table.location()).rstrip('/')}/", set[str]()
    elsewhere = {same_file(f): f for f in folders if not f"{same_file(f)}/".startswith(own)}
    for other in lake.every_table() if elsewhere else ():
        location = other.location().rstrip("/")
        paths = [other.properties[key].rstrip("/") for key in _PATHS & other.properties.keys()]
        paths += _remembered(other)
        both = elsewhere.keys() & map(
            same_file, (f"{location}/data", f"{location}/metadata", *paths)
        )
        for folder in (elsewhere[path] for path in both if other.name() != table.name()):
            if not folders[folder]:
                # Live files of the other table would be orphans of this one.
                raise Refused(
                    f"table {'.'.join(table.name())}: expected a folder of its own for its files "
                    f"outside of its location, found that table {'.'.join(other.name())} writes "
                    f"in {folder} too; nothing is deleted; give each table a folder of its own "
                    "by write.data.path and write.metadata.path"
                )
            shared.add(folder)
    return shared


def _remembered(table: Table) -> list[str]:
    return read_property(table.properties, FOLDERS, partial(parse, list[str]), "[]")


def remember(lake: Lake, table: Table, own: OwnFiles) -> None:
    """Record the folders of a table's files in its properties. Later, neither another property nor
    a file that a snapshot refers to may name them. Raises Transient."""
    inside = f"{table.location().rstrip('/')}/"
    folders = sorted(folder for folder in own.folders if not folder.startswith(inside))
    if folders != _remembered(table):

        def write(_: Table, tx: Transaction) -> None:
            tx.set_properties({FOLDERS: json.dumps(folders)})

        admin.change_table(lake, ".".join(table.name()), "folders", write)


def list_table(own: OwnFiles, listed: Callable[[], None] = lambda: None) -> list[Stored]:
    """List a table's own files. Calls `listed` for each file in the folders. Raises Transient."""
    found = dict[str, Stored]()
    for file in (f for folder in sorted(own.folders) for f in list_files(own.io, folder)):
        listed()
        if own.has(file.path):
            found[file.path] = file
    return list(found.values())


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
