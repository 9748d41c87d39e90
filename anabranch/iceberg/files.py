"""A warehouse's files on any storage: listing (with size and time) and deletion; files that a table
names and storage does not have; and orphans, unreferenced files of a stream's tables, left by
unpublished attempts."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from itertools import takewhile
from pathlib import Path
from stat import S_ISREG

from pyiceberg.io import FileIO
from pyiceberg.table import Table, Transaction

from anabranch.common.errors import FileGone, NotOffered, Refused, Transient
from anabranch.common.json_values import parse, read_property
from anabranch.common.remote_errors import explain, full_text, lake_errors
from anabranch.iceberg import admin
from anabranch.iceberg.file_io import store_of
from anabranch.iceberg.lake import Lake
from anabranch.iceberg.manifests import files_by_branch
from anabranch.iceberg.s3 import Version, bucket_and_key
from anabranch.iceberg.snapshots import BRANCHES, head, reachable


@dataclass(frozen=True)
class Stored:
    """A file in storage, with its bytes and the time of its last change (UTC)."""

    path: str
    size: int
    modified: datetime


def same_file(path: str) -> str:
    """Return a path without what differs between writers: scheme and slashes."""
    scheme, colon, rest = path.partition(":")
    return (rest if colon and "/" not in scheme else path).lstrip("/")


def local_path(path: str) -> Path:
    """Return the local path of a `file:` location. Such a location is not a URI: `#`, `?`, `%` and
    spaces are parts of names, as PyArrow and Hadoop write them."""
    rest = path.removeprefix("file://")
    return Path(rest if rest != path else path.removeprefix("file:"))


def list_files(io: FileIO, folder: str) -> Iterator[Stored]:
    """Yield every file under `folder`, at any depth, but none of a folder that only shares the
    prefix. `io`: a file access with keys for it. Raises Transient."""
    folder = folder.rstrip("/") + "/"
    if (on_s3 := bucket_and_key(folder)) is not None:
        bucket, prefix = on_s3
        for key, size, modified in store_of(io).list_objects(bucket, prefix):
            yield Stored(f"s3://{bucket}/{key}", size, modified)
        return
    yield from _below(folder, local_path(folder))


def root_of(folder: str) -> str:
    """Return the beginning that the paths of a folder's files share. Pure."""
    return same_file(folder).rstrip("/") + "/"


def files_by_name(io: FileIO, folder: str) -> dict[str, Stored]:
    """Return the files of a folder that is only read, also those behind links, by their names
    within it. Raises Refused for a link whose file would be left out, or read twice; Transient."""
    root = root_of(folder)
    return {same_file(f.path).removeprefix(root): f for f in _list_following_links(io, folder)}


def _list_following_links(io: FileIO, folder: str) -> Iterator[Stored]:
    if bucket_and_key(folder) is not None:
        # Consoles and Hadoop make an empty object for a folder, which is no file.
        ends = ("/", "_$folder$")
        yield from (f for f in list_files(io, folder) if f.size or not f.path.endswith(ends))
        return
    seen = set[str]()

    def fail(error: OSError) -> None:
        # `os.walk` leaves out a folder that it may not read, with its rows.
        if not isinstance(error, FileNotFoundError):
            raise explain(f"list {folder}", error) from error

    for at, _, names in os.walk(local_path(folder), onerror=fail, followlinks=True):
        paths = [Path(at) / name for name in names]
        gone = [path for path in paths if not path.is_file()]
        real = os.path.realpath(at)
        # Rows of a disk that is not mounted would be missing, and nothing would show it.
        if gone or real in seen:
            found = f"{gone[0]}, which is none" if gone else f"{at}, a link to another one of them"
            raise Refused(
                f"read {folder}: expected files and folders, each once, found {found}: its rows "
                "would be missing or doubled; repair or remove the link"
            )
        seen.add(real)
        for path in paths:
            status = path.stat()
            at_time = datetime.fromtimestamp(status.st_mtime, UTC)
            yield Stored(f"file://{path}", status.st_size, at_time)


def list_versions(io: FileIO, folder: str) -> Iterator[Version]:
    """Yield the versions of deleted and replaced files under `folder`; none if the bucket or the
    storage keeps none. Raises Terminal without the permission to list them, Transient."""
    if (on_s3 := bucket_and_key(folder.rstrip("/") + "/")) is None:
        return
    store = store_of(io)
    if store.versioning(on_s3[0]):
        yield from store.former_versions(*on_s3)


def _below(folder: str, path: Path) -> Iterator[Stored]:
    try:
        with os.scandir(path) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    yield from _below(folder, Path(entry.path))
                    continue
                with suppress(FileNotFoundError):  # deleted since it was listed
                    status = entry.stat()
                    if S_ISREG(status.st_mode):
                        at = datetime.fromtimestamp(status.st_mtime, UTC)
                        yield Stored(f"file://{entry.path}", status.st_size, at)
    except FileNotFoundError:
        return
    except OSError as error:
        raise Transient(
            f"list {folder}: expected permission to read {error.filename or path}, found {error}; "
            "grant it, then run it again"
        ) from error


def delete_files(io: FileIO, paths: Iterable[str]) -> int:
    """Delete files; ignore missing ones. Return the number of paths. Raises Transient for files
    that cannot be deleted, after deleting all others."""
    by_bucket: dict[str, list[str]] = {}
    done = 0
    left: list[tuple[str, OSError]] = []
    for path in paths:
        done += 1
        if (on_s3 := bucket_and_key(path)) is not None:
            bucket, key = on_s3
            by_bucket.setdefault(bucket, []).append(key)
            continue
        try:
            local_path(path).unlink(missing_ok=True)
        except OSError as error:
            left.append((path, error))
    for bucket, keys in by_bucket.items():
        store_of(io).delete_objects(bucket, keys)
    if left:
        path, first = left[0]
        raise Transient(
            f"delete {done} files: expected permission, found {len(left)} left, first {path}: "
            f"{first}; all others are deleted: run it again as a user that may delete these"
        ) from first
    return done


# Folders beyond this number are listed by their common parent.
_FOLDERS = 30
_OPENED_AT_ONCE = 16

# A missing file in the words of S3's error codes, botocore, PyArrow, DuckDB, the AWS SDK for Java
# and Java.
_MISSING = (
    "NoSuchKey",
    "NO_SUCH_KEY",
    "FileNotFound",
    "RESOURCE_NOT_FOUND",
    "Path does not exist",
    "Location does not exist",
    "NoSuchFileException",
    "No such file",
    "error occurred (404)",
    "Status Code: 404",
    "HTTP status 404",
)


@dataclass(frozen=True)
class LostFile:
    """A data file that branches of a table name and storage does not have."""

    table: str
    hour: str
    path: str
    branches: tuple[str, ...]
    rows: int

    @property
    def words(self) -> str:
        return f"{self.path}, which {' and '.join(self.branches)} of {self.table} names"


def reports_missing_file(error: BaseException) -> bool:
    """Return whether an error is about a missing file, by its text. Pure."""
    text = full_text(error)
    return any(word in text for word in _MISSING)


def missing_paths(io: FileIO, paths: Iterable[str]) -> set[str]:
    """Return the paths that storage does not have, by listing their folders, or by opening each
    where storage lists nothing to anybody. Raises Transient and Terminal if storage does not list
    them: such a file is not missing."""
    wanted = {same_file(path): path for path in paths}
    folders = {path.rpartition("/")[0] for path in wanted.values()}
    if len(folders) > _FOLDERS:
        folders = {_common_parent(folders)}
    try:
        for folder in folders:
            for stored in list_files(io, folder):
                wanted.pop(same_file(stored.path), None)
    except NotOffered:
        with ThreadPoolExecutor(_OPENED_AT_ONCE) as threads:
            paths = [*wanted.values()]
            opened = threads.map(partial(_opens, io), paths)
            return {path for path, is_there in zip(paths, opened, strict=True) if not is_there}
    return set(wanted.values())


def _opens(io: FileIO, path: str) -> bool:
    with lake_errors(f"open {path}"):
        try:
            # PyArrow's check of an object that is missing would list.
            io.new_input(path).open().close()
        except FileNotFoundError:
            return False
    return True


def _common_parent(folders: Collection[str]) -> str:
    parts = [folder.split("/") for folder in folders]
    # The first part that differs ends it: a file beside a deeper folder would count as lost.
    same = list(takewhile(lambda of: len(set(of)) == 1, zip(*parts, strict=False)))
    # The scheme, the empty part after it, and a bucket at least.
    return "/".join(parts[0][: max(3, len(same))])


def require_manifests(table: Table) -> None:
    """Require that storage has the branches' manifests. Raises FileGone, Transient, Terminal."""
    # A process that expires snapshots may delete those of former heads meanwhile.
    if not _lost_manifests(table) or not (lost := _lost_manifests(table.refresh())):
        return
    branches, path = lost
    name = ".".join(table.name())
    raise FileGone(
        f"table {name}: expected the manifests of {' and '.join(branches)} in storage, found none "
        f"of {path}; restore it from a version of the bucket or a backup, or make the branch again "
        'from another: docs/runbooks.md, "A manifest is gone"'
    )


def _lost_manifests(table: Table) -> tuple[list[str], str] | None:
    """Return a manifest, or manifest list, that storage lacks, and the branches that name it."""
    branches: dict[str, list[str]] = {}
    for branch in BRANCHES:
        snapshot = head(table, branch)
        paths = [snapshot.manifest_list]
        try:
            with lake_errors(f"read the list of manifests of {branch}"):
                paths += [manifest.manifest_path for manifest in snapshot.manifests(table.io)]
        except Transient as error:
            if not reports_missing_file(error):
                raise
        for path in paths:
            branches.setdefault(path, []).append(branch)
    lost = min(missing_paths(table.io, branches), default=None)
    return (branches[lost], lost) if lost is not None else None


def find_lost_files(table: Table, hours: Collection[str] | None = None) -> list[LostFile]:
    """Return the lost files of a table's branches in `hours` (None: all), oldest hour first. Raises
    FileGone if a manifest is lost, Transient, Terminal."""
    require_manifests(table)
    branches: dict[str, list[str]] = {}
    found = {}
    for branch, by_hour in files_by_branch(table, hours).items():
        for hour, files in by_hour.items():
            for path, file in files.items():
                branches.setdefault(path, []).append(branch)
                found[path] = (hour, file.record_count)
    name = ".".join(table.name())
    return sorted(
        (
            LostFile(name, found[path][0], path, tuple(branches[path]), found[path][1])
            for path in missing_paths(table.io, found)
        ),
        key=lambda lost: (lost.hour, lost.path),
    )


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
