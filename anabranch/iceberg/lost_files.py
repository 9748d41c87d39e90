"""Files that a table names and storage does not have."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import takewhile
from typing import TYPE_CHECKING

from pyiceberg.io import FileIO

from anabranch.common.errors import FileGone, NotOffered, Transient
from anabranch.common.remote_errors import full_text, lake_errors
from anabranch.iceberg.files import list_files, same_file
from anabranch.iceberg.hour_files import files_by_branch
from anabranch.iceberg.snapshots import BRANCHES, head

if TYPE_CHECKING:
    from pyiceberg.table import Table

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
    """Require that storage has the manifests of the branches. Raises FileGone, Transient,
    Terminal."""
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
    """Return a manifest, or list of manifests, that storage lacks, and the branches that name
    it."""
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
