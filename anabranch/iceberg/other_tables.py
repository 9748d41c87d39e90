"""Tables that other programs write, read without Spark and in bounded memory: Iceberg tables of the
catalog or of a folder, Delta tables, folders of Parquet files. Nothing is written."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol
from urllib.parse import unquote

import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow.fs import FileSelector, FileType, LocalFileSystem, SubTreeFileSystem
from pyiceberg.expressions import AlwaysTrue
from pyiceberg.io.pyarrow import ArrowScan
from pyiceberg.table import StaticTable

from anabranch.common.errors import ConfigurationError, Refused, TableMissing
from anabranch.common.remote_errors import lake_errors
from anabranch.config import Environment
from anabranch.iceberg import file_sink
from anabranch.iceberg.catalog_settings import catalog_properties
from anabranch.iceberg.file_io import LakeFileIO
from anabranch.iceberg.lake import Lake

if TYPE_CHECKING:
    from pyarrow.fs import FileSystem
    from pyiceberg.table import FileScanTask, Table

_METADATA = re.compile(r"metadata/v?(\d+)(?:-[^/]*)?\.(?:gz\.)?metadata\.json")
_DELTA = "_delta_log"
_NO_VALUE = "__HIVE_DEFAULT_PARTITION__"
_BATCH_ROWS = 1 << 20


class Part(Protocol):
    """A reader of one data file: it yields the given columns, nested ones by names with dots. A
    column that the file lacks is left out of the batches."""

    def __call__(self, columns: Sequence[str]) -> Iterator[pa.RecordBatch]: ...


@dataclass(frozen=True)
class OtherTable:
    """A table at one version: its description, its columns, and its data files."""

    what: str
    schema: pa.Schema
    parts: Sequence[Part]


def open_other(environment: Environment, name: str) -> OtherTable:
    """Open a table of the catalog (`namespace.table`), a `.metadata.json` of an Iceberg table, or a
    folder (local or on S3) of an Iceberg table, a Delta table or Parquet files.

    In the folder of Spark's file sink only the files in its log count, as for Spark. Raises
    TableMissing, Refused for a table that cannot be read exactly, ConfigurationError, Transient.
    """
    if "/" not in name:
        lake = Lake(environment)
        if (table := lake.find(name)) is None:
            raise TableMissing(
                f"table {name}: expected it in catalog {lake.catalog_name}, found none; a folder "
                "has a / in its name, such as ./events or s3://bucket/events"
            )
        return _iceberg(table, name)
    location = name.rstrip("/").replace("s3a://", "s3://", 1)
    if "://" not in location and not location.startswith("file:"):
        location = f"file://{Path(location).absolute()}"
    io = LakeFileIO(catalog_properties(environment))
    if location.endswith(".metadata.json"):
        return _static(io, location, name)
    scheme, host, root = io.parse_location(location, io.properties)
    files: Any = io.fs_by_scheme(scheme, host)
    with lake_errors(f"list {name}"):
        sizes = _list(files, root, name)
    if (metadata := _find_metadata(sizes, name)) is not None:
        return _static(io, f"{location}/{metadata}", name)
    if any(path.startswith(f"{_DELTA}/") for path in sizes):
        return _delta(environment, SubTreeFileSystem(root, files), location, name)
    return _parquet(SubTreeFileSystem(root, files), sizes, root.lstrip("/") + "/", name)


def _list(files: FileSystem, root: str, name: str) -> dict[str, int]:
    """Return the sizes of a folder's files by name, also of those behind links. Raises Refused for
    a link whose rows would not be counted, or twice."""
    if isinstance(files, LocalFileSystem):
        return _list_local(root, name)
    found = files.get_file_info(FileSelector(root, recursive=True))
    return {
        one.path.removeprefix(root).lstrip("/"): one.size
        for one in found
        if one.type == FileType.File
    }


def _list_local(root: str, name: str) -> dict[str, int]:
    if not Path(root).is_dir():
        raise TableMissing(f"table {name}: expected a folder, found none")
    sizes, seen = dict[str, int](), set[str]()
    for folder, _, names in os.walk(root, followlinks=True):
        real = os.path.realpath(folder)
        paths = [Path(folder) / one for one in names]
        gone = [path for path in paths if not path.is_file()]
        if gone or real in seen:
            found = f"{gone[0]}, a link to nothing" if gone else f"{folder}, a link to another one"
            raise Refused(
                f"table {name}: expected files and folders in it once, found {found}: its rows "
                "would not be counted, or twice; repair or remove it"
            )
        seen.add(real)
        sizes |= {str(path.relative_to(root)): path.stat().st_size for path in paths}
    return sizes


def _find_metadata(names: Mapping[str, int], name: str) -> str | None:
    """Return the newest metadata file of an Iceberg table's folder, None for another folder. Raises
    Refused if two files have the newest version: one of them was never committed."""
    versions = [(int(match[1]), one) for one in names if (match := _METADATA.fullmatch(one))]
    newest = max((version for version, _ in versions), default=None)
    found = sorted(one for version, one in versions if version == newest)
    if len(found) > 1:
        raise Refused(
            f"table {name}: expected one newest metadata file, found {' and '.join(found)}: one of "
            "them was never committed; name the table as the catalog has it, or one of these files"
        )
    return found[0] if found else None


def _static(io: LakeFileIO, metadata: str, name: str) -> OtherTable:
    with lake_errors(f"read {metadata}"):
        return _iceberg(StaticTable.from_metadata(metadata, dict(io.properties)), name)


def _iceberg(table: Table, name: str) -> OtherTable:
    snapshot, schema = table.current_snapshot(), table.schema().as_arrow()
    if snapshot is None:
        return OtherTable(f"Iceberg table {name} without a snapshot", schema, ())
    summary = snapshot.summary
    if summary is not None and summary.get("total-equality-deletes") not in (None, "0"):
        raise Refused(
            f"table {name}: expected no equality deletes, found some, as Flink's upserts write "
            "them: which rows they delete is not read here; run Spark's rewrite_data_files with "
            "delete-file-threshold 1 on it first"
        )
    with lake_errors(f"read the manifests of {name}"):
        tasks = sorted(table.scan().plan_files(), key=lambda task: task.file.file_path)
    parts = [partial(_read_task, table, task) for task in tasks]
    return OtherTable(f"Iceberg table {name}, snapshot {snapshot.snapshot_id}", schema, parts)


def _read_task(
    table: Table, task: FileScanTask, columns: Sequence[str]
) -> Iterator[pa.RecordBatch]:
    with lake_errors(f"read {task.file.file_path}"):
        projected = table.schema().select(*columns)
        scan = ArrowScan(table.metadata, table.io, projected, AlwaysTrue())
        yield from scan.to_record_batches([task])


def _delta(environment: Environment, files: FileSystem, location: str, name: str) -> OtherTable:
    try:
        from deltalake import DeltaTable
        from deltalake.exceptions import DeltaError
    except ModuleNotFoundError as error:
        raise ConfigurationError(
            f"table {name}: expected the package deltalake to read a Delta table, found no "
            f"{error.name}; run `pip install 'anabranch[delta]'`"
        ) from error
    remedy = "write its rows as Parquet to another folder, and name that"
    try:
        table = DeltaTable(location, storage_options=_delta_options(environment))
        mode = table.metadata().configuration.get("delta.columnMapping.mode", "none")
        if mode != "none":
            raise Refused(
                f"table {name}: expected no column mapping, found mode {mode}: its files have "
                f"other column names; {remedy}"
            )
        features = table.protocol().reader_features or ()
        if "deletionVectors" in features and (number := len(pa.table(table.deletion_vectors()))):
            raise Refused(
                f"table {name}: expected no deletion vectors, found those of {number} files; run "
                "REORG TABLE … APPLY (PURGE) on it first"
            )
        schema = pa.schema(table.schema().to_arrow())
        actions = pa.table(table.get_add_actions(flatten=True)).to_pylist()
    except (DeltaError, OSError) as error:
        raise Refused(
            f"table {name}: expected a Delta log that can be read, found {error}; {remedy}"
        ) from error
    parts = []
    for action in sorted(actions, key=lambda one: str(one["path"])):
        values = {
            key.removeprefix("partition."): value
            for key, value in action.items()
            if key.startswith("partition.")
        }
        parts.append(partial(_read_parquet, files, unquote(action["path"]), values))
    return OtherTable(f"Delta table {name}, version {table.version()}", schema, parts)


def _delta_options(environment: Environment) -> dict[str, str]:
    """Return the settings of S3 for delta-rs, which reads the log by itself."""
    s3 = environment.s3
    options = {"AWS_REGION": s3.region}
    if s3.endpoint:
        options |= {"AWS_ENDPOINT_URL": s3.endpoint, "AWS_ALLOW_HTTP": "true"}
    if s3.access_key and s3.secret_key:
        options |= {
            "AWS_ACCESS_KEY_ID": s3.access_key.get_secret_value(),
            "AWS_SECRET_ACCESS_KEY": s3.secret_key.get_secret_value(),
        }
    return options


def _parquet(files: FileSystem, sizes: Mapping[str, int], root: str, name: str) -> OtherTable:
    """Return the files of a folder that Spark would read: not those whose name, or a folder's,
    begins with `_` or `.`; of a file sink only those in its log."""
    names = sorted(
        one for one in sizes if not any(part.startswith(("_", ".")) for part in one.split("/"))
    )
    what, logs = f"Parquet folder {name}", f"{file_sink.FOLDER}/"
    if any(one.startswith(logs) for one in sizes):
        try:
            known, through = _listed(files, {one: sizes[one] for one in names}, sizes, root, name)
            what += (
                f": {len(known)} files of its log, through micro-batch {through}; "
                f"{len(names) - len(known)} files that the log does not list do not count"
            )
            names = known
        except Refused as error:
            what += (
                ": all files count, also those of killed micro-batches, since its log is damaged "
                f"({error})"
            )
    if not names:
        raise Refused(f"table {name}: expected Parquet files in it, found none")
    with lake_errors(f"read {name}"), files.open_input_file(names[0]) as first:
        schema = _opened(first, f"{name}/{names[0]}").schema_arrow
    values = {one: _folder_values(one) for one in names}
    for key in values[names[0]].keys() - {*schema.names}:
        schema = schema.append(pa.field(key, pa.string()))
    parts = [partial(_read_parquet, files, one, values[one]) for one in names]
    return OtherTable(what, schema, parts)


def _listed(
    files: FileSystem, data: dict[str, int], sizes: Mapping[str, int], root: str, name: str
) -> tuple[list[str], int]:
    """Return the files in the log of Spark's file sink, and its last micro-batch."""
    where = f"{name}/{file_sink.FOLDER}"
    logs = {one.partition("/")[2]: one for one in sizes if one.startswith(f"{file_sink.FOLDER}/")}
    log = file_sink.read_log(logs, lambda one: _read_text(files, logs[one]), where)
    return file_sink.match(log, data, root, where), log.through


def _read_text(files: FileSystem, path: str) -> str:
    with lake_errors(f"read {path}"), files.open_input_file(path) as source:
        return bytes(source.read()).decode("utf-8", errors="replace")


def _opened(source: Any, path: str) -> pq.ParquetFile:
    try:
        return pq.ParquetFile(source)
    except pa.ArrowInvalid as error:
        raise Refused(
            f"read {path}: expected a Parquet file, found {error}; remove it, or name a folder of "
            "Parquet files alone"
        ) from error


def _folder_values(path: str) -> dict[str, str | None]:
    """Return the column values in folder names, such as `day=2026-11-21`."""
    pairs = (part.partition("=") for part in path.split("/")[:-1] if "=" in part)
    return {key: None if value == _NO_VALUE else unquote(value) for key, _, value in pairs}


def _read_parquet(
    files: FileSystem, path: str, values: Mapping[str, object], columns: Sequence[str]
) -> Iterator[pa.RecordBatch]:
    with lake_errors(f"read {path}"), files.open_input_file(path) as source:
        opened = _opened(source, path)
        own = {*opened.schema_arrow.names}
        given = {name: values[name] for name in columns if name in values and name not in own}
        for batch in opened.iter_batches(_BATCH_ROWS, columns=list(columns)):
            for name, value in given.items():
                batch = batch.append_column(name, pa.array([value] * batch.num_rows))
            yield batch
