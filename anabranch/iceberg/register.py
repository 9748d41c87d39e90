"""Detection of tables in storage that the catalog has lost, before they would be recreated, and
their registration. Decision 6 explains the choice of the newest metadata file.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from uuid import UUID

from pyiceberg.io import FileIO
from pyiceberg.schema import Schema
from pyiceberg.table import Table

from anabranch.common.errors import ConfigurationError, MetadataGone
from anabranch.common.remote_errors import one_line
from anabranch.iceberg import admin
from anabranch.iceberg.files import list_files, same_file
from anabranch.iceberg.lake import Lake
from anabranch.iceberg.snapshots import reachable

LOG = logging.getLogger(__name__)

_NUMBER = re.compile(r"/metadata/(?:v|0*)(\d+)[^/]*\.metadata\.json$")


@dataclass(frozen=True)
class Candidate:
    """A metadata file. `past`: its metadata log, the previous files. `broken`: why it cannot be
    read.

    `empty`: it has no branch yet. An attempt to create a table that exists leaves such a file.
    """

    path: str
    updated_ms: int = 0
    past: frozenset[str] = frozenset()
    broken: str | None = None
    empty: bool = False

    @property
    def number(self) -> int:
        match = _NUMBER.search(self.path)
        return int(match.group(1)) if match else -1


def newest_first(candidates: Iterable[Candidate]) -> list[Candidate]:
    """Sort metadata files, newest first. A file precedes those of its metadata log, whatever their
    timestamps. Unrelated files are sorted by timestamp, empty files last. Pure."""
    left, ordered = list(candidates), list[Candidate]()
    while left:
        # Decision 6: the chain of files decides, not numbers, which a restored catalog uses again.
        # An older file would lose the publishes after it.
        tips = [c for c in left if not any(same_file(c.path) in other.past for other in left)]
        newest = max(tips or left, key=lambda c: (not c.empty, c.updated_ms, c.number, c.path))
        left.remove(newest)
        ordered.append(newest)
    return ordered


def require_unknown(
    lake: Lake, name: str, schema: Schema, stream: str, is_derived: bool, at: str | None = None
) -> None:
    """Raise ConfigurationError if the location of a table that the catalog does not have contains
    metadata files. Otherwise a lost catalog would start a second table beside these files, with
    only the records that Kafka still has. Files of a table with derived content are an error only
    if the catalog has another name for them.
    """
    location, io = admin.new_place(lake, name, schema, at)
    metadata_files = _metadata_files(
        (f.path for f in list_files(io, f"{location.rstrip('/')}/metadata")), location
    )
    # Check again: another apply may be creating it.
    if not metadata_files or lake.exists(name):
        return
    _require_one_name(lake, name, location)
    if is_derived:
        return
    newest = newest_first(_read(io, path)[0] for path in metadata_files)[0]
    raise ConfigurationError(
        f"table {name}: expected nothing below {location}, since the catalog "
        f"{lake.catalog_name} does not have the table, found its files up to "
        f"{newest.path}; has the catalog been lost? `anabranch apply {stream} --register` "
        "registers the table again; to start a new table, move that folder away first"
    )


def _require_one_name(lake: Lake, name: str, location: str, uuid: UUID | None = None) -> None:
    """Raise ConfigurationError if another table of the catalog has the location, or the uuid."""
    for other in lake.every_table():
        is_there = same_file(other.location()).rstrip("/") == same_file(location).rstrip("/")
        if is_there or other.metadata.table_uuid == uuid:
            # Under two names, maintenance of one table deletes files of the other.
            of = ".".join(other.name())
            raise ConfigurationError(
                f"table {name}: expected no other name for the files below {location}, found that "
                f"the catalog has them as table {of}; was the table renamed? ALTER TABLE "
                f"{lake.catalog_name}.{of} RENAME TO {lake.catalog_name}.{name} gives it its name "
                f"back; if {of} is another program's second entry, drop it without PURGE"
            )


def register(lake: Lake, name: str, schema: Schema, at: str | None = None) -> list[str]:
    """Register a table with its newest complete metadata file; return sentences that describe the
    changes. Does nothing if the catalog and storage have the table, or if storage has no metadata
    file. Raises ConfigurationError if no metadata file is usable, or if the catalog has the table
    by another name.
    """
    try:
        if lake.exists(name):
            return []
    except MetadataGone as error:
        LOG.warning("%s", error)
        # Only the catalog's entry goes; the files stay, and one of them is registered below.
        admin.forget(lake, name)
    location, io = admin.new_place(lake, name, schema, at)
    files = [f.path for f in list_files(io, location)]
    listed = {same_file(path) for path in files}
    read = [_read(io, path) for path in _metadata_files(files, location)]
    tables = {candidate.path: table for candidate, table in read}
    landed = {path for candidate, _ in read for path in candidate.past}
    passed: list[str] = []
    for candidate in newest_first(candidate for candidate, _ in read):
        table = tables[candidate.path]
        # A refused commit has deleted its manifests, so its metadata file is incomplete. To
        # register it would lose the rows of these manifests.
        wrong = candidate.broken if table is None else _why_not(table, location, listed)
        if wrong is None and table is not None:
            _require_one_name(lake, name, location, table.metadata.table_uuid)
            admin.register(lake, name, candidate.path)
            LOG.warning("table %s: registered by %s", name, candidate.path)
            return [*passed, f"registered table {name} by {candidate.path}"]
        passed.append(f"skipped {candidate.path}: {wrong}")
        # A file in another file's log was the table's state. An older one would lose publishes.
        if same_file(candidate.path) in landed:
            break
    if passed:
        raise ConfigurationError(
            f"table {name}: expected a metadata file below {location} with all its files, found "
            f"none that fits the table; {'; '.join(passed)}; restore the bucket to a time with "
            "all of them"
        )
    return []


def _metadata_files(files: Iterable[str], location: str) -> list[str]:
    """Return the table's own metadata files: its folder may contain another table's folder."""
    own = f"{same_file(location).rstrip('/')}/metadata/"
    return [path for path in files if same_file(path).startswith(own) and _NUMBER.search(path)]


def _read(io: FileIO, path: str) -> tuple[Candidate, Table | None]:
    try:
        table = admin.read_metadata(io, path)
    except (OSError, ValueError) as error:
        return Candidate(path, broken=one_line(error), empty=True), None
    metadata = table.metadata
    past = frozenset(same_file(entry.metadata_file) for entry in metadata.metadata_log)
    return Candidate(path, metadata.last_updated_ms, past, empty=not metadata.refs), table


def _why_not(table: Table, location: str, listed: Collection[str]) -> str | None:
    """Return why a metadata file is not usable: a file of its branches and tags is missing or
    unreadable, or its location differs. None if it is usable."""
    if same_file(table.location()).rstrip("/") != same_file(location).rstrip("/"):
        return (
            f"expected the location {location}, found {table.location()}; paths in metadata are "
            "absolute: rewrite them with Iceberg's rewrite_table_path "
            "(docs/how-to/deploy/upgrade.md)"
        )
    inside = f"{same_file(location).rstrip('/')}/"

    def is_missing(path: str) -> bool:
        if same_file(path).startswith(inside):
            return same_file(path) not in listed
        return not table.io.new_input(path).exists()

    try:
        missing = next(filter(is_missing, _needed(table)), None)
    except (OSError, ValueError) as error:
        return f"expected to read its manifests, found {one_line(error)}"
    return None if missing is None else f"expected {missing}, found none"


def _needed(table: Table) -> Iterator[str]:
    """Yield the files of a table's branches and tags, each before the files that it refers to.
    Raises ValueError for a branch or tag whose snapshot is missing."""
    ids = {ref.snapshot_id for ref in table.metadata.refs.values()}
    snapshots = [s for s in table.snapshots() if s.snapshot_id in ids]
    if lacking := ids - {s.snapshot_id for s in snapshots}:
        raise ValueError(f"snapshot {min(lacking)} is not in the metadata")
    yield from reachable(table, snapshots)
