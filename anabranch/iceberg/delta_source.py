"""A version of a Delta table as a source of rows. delta-rs reads its log, PyArrow its files.

The log is copied before it is read. So the keys, endpoint and certificates of all files apply to it
too: delta-rs has its own settings, and none for certificates.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pyarrow as pa
from pyiceberg.io import FileIO

from anabranch.common.errors import Refused, Transient, installed
from anabranch.common.remote_errors import lake_errors
from anabranch.common.temporary import temporary_folder
from anabranch.iceberg.files import Stored, root_of, same_file

LOG_FOLDER = "_delta_log"
_SUPPORTED = {
    "columnMapping",
    "deletionVectors",
    "timestampNtz",
    "v2Checkpoint",
    "vacuumProtocolCheck",
}
"""Reader features of the Delta protocol. Tables may list the first two but not use them."""

_COMMIT = re.compile(r"(\d{20})\.json")
_CHECKPOINT = re.compile(
    r"(\d{20})\.checkpoint(?:\.(?:(\d{10})\.(\d{10})|[0-9a-f-]{36}))?\.(?:parquet|json)"
)
_ABSOLUTE = re.compile(r"([a-z][a-z0-9+.-]*):(//[^/]*)?(/.*)", re.IGNORECASE)
_COPIED_AT_ONCE = 8
_PARTITION = "partition."
_REMEDY = "write its rows as Parquet files to another folder and name that"


@dataclass(frozen=True)
class DeltaFile:
    """One data file of a table. `values`: those of the partition columns, which the files do not
    have. `rows`: the number of rows according to the table's log; None if unknown."""

    path: str
    values: Mapping[str, pa.Scalar]
    rows: int | None


def open_version(
    io: FileIO, location: str, stored: Mapping[str, Stored], version: int | None
) -> tuple[int, pa.Schema, list[DeltaFile]]:
    """Return a version of a table (None: its newest), its columns, and its data files, ordered by
    modification time and path. `stored`: the files of the table's folder, by their names within it.

    Raises Refused if the log or storage has the version only in part, and for a table with deletion
    vectors, column mapping, or an unsupported feature; ConfigurationError without `deltalake`;
    Transient.
    """
    logs = {
        name.removeprefix(f"{LOG_FOLDER}/"): one
        for name, one in stored.items()
        if name.startswith(LOG_FOLDER)
    }
    version, names = plan_log(logs, version, location)
    where = f"read {location}: version {version}"
    with temporary_folder("delta") as folder:
        _copy(io, {name: logs[name].path for name in names}, folder / LOG_FOLDER)
        schema, actions = _read_log(folder, version, where)
    root = root_of(location)
    files = [_file_of(io, stored, root, schema, actions, row, where) for row in range(len(actions))]
    return version, schema, files


def plan_log(names: Collection[str], version: int | None, location: str) -> tuple[int, list[str]]:
    """Return a version (None: the newest) and the names of the log files that define it: its newest
    complete checkpoint, if there is one, and the commits from there on. Pure. Raises Refused if the
    log lacks the version."""
    commits = {
        int(match[1]): name for name in names if (match := _COMMIT.fullmatch(name)) is not None
    }
    checkpoints = _whole_checkpoints(names)
    versions = commits.keys() | checkpoints.keys()
    chosen = max(versions, default=None) if version is None else version
    if chosen is None or chosen not in versions:
        found = f"{min(versions)} to {max(versions)}" if versions else "none"
        raise Refused(
            f"read {location}: expected "
            f"{'a version' if version is None else f'version {version}'} in the log of the Delta "
            f"table, found {found}; name one of these by --version, or check the folder's name"
        )
    begin = max((one for one in checkpoints if one <= chosen), default=0)
    of_checkpoint = checkpoints.get(begin, [])
    sidecars = (
        [name for name in names if name.startswith("_sidecars/")] if len(of_checkpoint) == 1 else []
    )
    return chosen, [
        *of_checkpoint,
        *sidecars,
        *(commits[one] for one in sorted(commits) if begin <= one <= chosen),
    ]


def _whole_checkpoints(names: Collection[str]) -> dict[int, list[str]]:
    """Return the files of complete checkpoints, with all their parts, by version."""
    whole, in_parts = dict[int, list[str]](), dict[tuple[int, int], list[str]]()
    for name in sorted(names):
        if (match := _CHECKPOINT.fullmatch(name)) is None:
            continue
        if match[3] is None:
            whole[int(match[1])] = [name]
        else:
            in_parts.setdefault((int(match[1]), int(match[3])), []).append(name)
    for (version, number), parts in in_parts.items():
        if len(parts) == number:
            whole.setdefault(version, parts)
    return whole


def _copy(io: FileIO, paths: Mapping[str, str], folder: Path) -> None:
    def copy(name: str) -> None:
        with lake_errors(f"read {paths[name]}"):
            try:
                with io.new_input(paths[name]).open() as source:
                    content = source.read()
            except FileNotFoundError as error:
                raise Transient(
                    f"read {paths[name]}: expected a file of the log that was listed a moment "
                    "ago, found none: the log is being cleaned up; run it again"
                ) from error
        (folder / name).write_bytes(content)

    (folder / "_sidecars").mkdir(parents=True)
    with ThreadPoolExecutor(_COPIED_AT_ONCE) as threads:
        list(threads.map(copy, paths))


def _read_log(folder: Path, version: int, where: str) -> tuple[pa.Schema, pa.Table]:
    """Return the columns of a version, and its data files ordered by modification time and path."""
    with installed(where, "the package deltalake to read a Delta table", "anabranch[delta]"):
        from deltalake import DeltaTable
        from deltalake.exceptions import DeltaError
    try:
        table = DeltaTable(folder, version=version)
        _require_supported(table, where)
        schema = pa.schema(table.schema().to_arrow())
        actions = pa.table(table.get_add_actions(flatten=True))
    except DeltaError as error:
        raise Refused(
            f"{where}: expected a log from which the version can be read, found {error}; name "
            f"another version by --version, or {_REMEDY}"
        ) from error
    if not len(actions):
        raise Refused(
            f"{where}: expected a version with rows, found no files; name another one by --version"
        )
    binary = [
        name
        for name in actions.column_names
        if name.startswith(_PARTITION) and _is_binary(actions[name].type)
    ]
    if binary:
        # delta-rs does not decode these values.
        name = binary[0].removeprefix(_PARTITION)
        raise Refused(f"{where}: expected no partition column of BINARY, found {name}; {_REMEDY}")
    return schema, actions.sort_by([("modification_time", "ascending"), ("path", "ascending")])


def _is_binary(kind: pa.DataType) -> bool:
    return bool(
        pa.types.is_binary(kind) or pa.types.is_large_binary(kind) or pa.types.is_binary_view(kind)
    )


def _require_supported(table: Any, where: str) -> None:
    protocol, settings = table.protocol(), table.metadata().configuration
    features = {*(protocol.reader_features or ())}
    if unknown := sorted(features - _SUPPORTED):
        raise Refused(
            f"{where}: expected no reader features but {', '.join(sorted(_SUPPORTED))}, found "
            f"{', '.join(unknown)}; {_REMEDY}"
        )
    mode = settings.get("delta.columnMapping.mode", "none")
    if mode != "none":
        raise Refused(
            f"{where}: expected a table without column mapping, found delta.columnMapping.mode "
            f"{mode}: its files have other column names; {_REMEDY}"
        )
    if "deletionVectors" in features and (found := _deletion_vectors(table)):
        raise Refused(
            f"{where}: expected a table without deletion vectors, found {found}; run REORG TABLE "
            "… APPLY (PURGE) on it, then read its newest version"
        )


def _deletion_vectors(table: Any) -> str:
    """Return a description of the deletion vectors; empty if there are none. Those in separate
    files are not copied with the log, so delta-rs raises an error: it is the description then."""
    from deltalake.exceptions import DeltaError

    try:
        number = len(pa.table(table.deletion_vectors()))
    except DeltaError as error:
        return f"some ({error})"
    return f"those of {number} files" if number else ""


def _file_of(
    io: FileIO,
    stored: Mapping[str, Stored],
    root: str,
    schema: pa.Schema,
    actions: pa.Table,
    row: int,
    where: str,
) -> DeltaFile:
    path, size, rows = (
        actions[name][row].as_py() for name in ("path", "size_bytes", "num_records")
    )
    path = _path_of(path, where)
    one = stored.get(same_file(path).removeprefix(root))
    found = one.size if one is not None else _size_of(io, path) if "://" in path else None
    if found is None:
        raise Refused(
            f"{where}: expected the file {path}, which its log lists, found none: VACUUM has "
            "deleted it; name a newer version by --version, or restore the file"
        )
    if found != size:
        raise Refused(
            f"{where}: expected {size} bytes of {path}, as its log says, found {found}; restore "
            "the file, or name another version by --version"
        )
    values = {
        name: actions[f"{_PARTITION}{name}"][row].cast(kind)
        for name, kind in zip(schema.names, schema.types, strict=True)
        if f"{_PARTITION}{name}" in actions.column_names
    }
    return DeltaFile(one.path if one is not None else path, values, rows)


def _path_of(path: str, where: str) -> str:
    """Return the path of a data file from its URI in the log: relative to the table's folder, or
    absolute for a file of a shallow clone's source. Raises Refused for other storage."""
    match = _ABSOLUTE.fullmatch(path)
    if match is None:
        return unquote(path)
    scheme, host, rest = match[1].lower(), match[2] or "//", unquote(match[3])
    if scheme not in ("s3", "s3a", "s3n", "file"):
        raise Refused(f"{where}: expected files on S3 or local, found {path}; {_REMEDY}")
    return f"{'file' if scheme == 'file' else 's3'}:{host}{rest}"


def _size_of(io: FileIO, path: str) -> int | None:
    with lake_errors(f"read {path}"):
        try:
            return len(io.new_input(path))
        except FileNotFoundError:
            return None
