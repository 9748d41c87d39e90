"""Tables that other programs write, read without Spark and in bounded memory: Iceberg tables of the
catalog or of a folder (by their newest metadata file), Delta tables, folders of files, with or
without the log of Spark's file sink. Nothing is written.

That log, `_spark_metadata`, lists the valid files of a folder. A micro-batch is valid if its log
file is complete: `N`, or `N.compact`, which has the entries of all earlier micro-batches too. Files
of killed micro-batches are in the folder but in no log file. Spark's reader follows the same rules
(org.apache.spark.sql.execution.streaming.FileStreamSinkLog).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Protocol
from urllib.parse import unquote

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from pyiceberg.expressions import AlwaysTrue
from pyiceberg.io import FileIO
from pyiceberg.io.pyarrow import ArrowScan, schema_to_pyarrow
from pyiceberg.table import FileScanTask, StaticTable, Table
from pyiceberg.table.metadata import TableMetadata

from anabranch.common.arrays import grouped
from anabranch.common.errors import ConfigurationError, Refused, TableMissing
from anabranch.common.json_values import parse
from anabranch.common.remote_errors import lake_errors
from anabranch.config import Environment
from anabranch.iceberg.catalog_settings import catalog_properties
from anabranch.iceberg.delta_source import LOG_FOLDER, open_version
from anabranch.iceberg.file_io import LakeFileIO, for_tasks
from anabranch.iceberg.files import Stored, files_by_name, reports_missing_file, root_of
from anabranch.iceberg.hudi_source import newest_files
from anabranch.iceberg.lake import Lake

_NO_VALUE = "__HIVE_DEFAULT_PARTITION__"
# The bytes above which a Parquet file is read in parts of about this size.
_LARGE = 256 * 2**20
_OTHER_FORM = re.compile(r"\.(json|jsonl|ndjson|csv|orc|avro|txt|log)(\.(?!parquet$)\w+)?$")


class Part(Protocol):
    """A data file, or a part of one. `iter_batches` yields those columns or fields that it has."""

    @property
    def path(self) -> str: ...

    @property
    def schema_arrow(self) -> pa.Schema: ...

    def iter_batches(self, batch_size: int, columns: Sequence[str]) -> Iterator[pa.RecordBatch]: ...


MakeParts = Callable[["FileIO", Stored, str], Sequence[Part]]
"""Returns the parts of a file of a folder, from its name in the folder."""


@dataclass(frozen=True)
class OtherTable:
    """A table at one version: description, columns, data files. `version`: of a Delta table."""

    what: str
    schema: pa.Schema
    parts: Sequence[Part]
    version: int | None = None


def location_of(text: str) -> str:
    """Return a folder as a location: `s3://…`, or `file://…` for a local path. Raises
    ConfigurationError for other storage."""
    scheme = text.partition("://")[0] if "://" in text else ""
    if scheme not in ("", "file", "s3", "s3a"):
        raise ConfigurationError(
            f"read {text}: expected a folder on S3 (s3://) or of this machine, found {scheme}://; "
            "copy it there"
        )
    if scheme or text.startswith("file:"):
        return text.rstrip("/").replace("s3a://", "s3://", 1)
    return f"file://{Path(text).absolute()}"


def open_other(
    environment: Environment,
    name: str,
    form: str | None = None,
    version: int | None = None,
    make: MakeParts | None = None,
    strict: bool = False,
) -> OtherTable:
    """Open a table of the catalog (`namespace.table`), a `.metadata.json` of an Iceberg table, or a
    folder (local or on S3) of an Iceberg table, a Delta table or files.

    `form`: what it is (`delta`, `iceberg`, or a format of files), found if it is None. `version`:
    that of a Delta table; None for the newest. `make` opens files; None for Parquet. In the folder
    of Spark's file sink only the files in its log count, as for Spark; `strict` refuses a damaged
    log. Raises TableMissing, Refused for a table that cannot be read exactly, ConfigurationError,
    Transient.
    """
    if "/" not in name and form in (None, "iceberg"):
        lake = Lake(environment)
        if (table := lake.find(name)) is None:
            raise TableMissing(
                f"table {name}: expected it in catalog {lake.catalog_name}, found none; a folder "
                "has a / in its name, such as ./events or s3://bucket/events"
            )
        snapshot, parts = parts_of(table, name)
        what = f"Iceberg table {name}, snapshot {snapshot}"
        return OtherTable(what, table.schema().as_arrow(), parts)
    location, io = location_of(name), for_tasks(LakeFileIO(catalog_properties(environment)))
    if location.endswith(".metadata.json") and version is None:
        return _static(io, location)
    stored = files_by_name(io, location)
    # A Delta table that is an Iceberg table too (UniForm) is read as an Iceberg table.
    is_iceberg = form == "iceberg" or (form is None and version is None)
    if is_iceberg and (metadata := find_metadata(stored, location)) is not None:
        return _static(io, stored[metadata].path)
    has_log = any(path.startswith(f"{LOG_FOLDER}/") for path in stored)
    if has_log and form in (None, "delta"):
        version, schema, files = open_version(io, location, stored, version)
        what = f"Delta table {name}, version {version}"
        delta = [ParquetPart(io, one.path, one.values, rows=one.rows) for one in files]
        return OtherTable(what, schema, delta, version)
    if version is not None or form in ("delta", "iceberg"):
        wanted = f", of which --version {version} is one" if version is not None else ""
        kind, there = ("Iceberg", "metadata/") if form == "iceberg" else ("Delta", LOG_FOLDER)
        raise Refused(
            f"read {location}: expected {'an' if kind == 'Iceberg' else 'a'} {kind} table{wanted}, "
            f"found a folder without {there}; leave the option out, or check the folder's name"
        )
    return _files(io, stored, location, make or _parts_to_audit, strict)


def _static(io: FileIO, metadata: str) -> OtherTable:
    snapshot, parts = open_parts(io, metadata)
    return OtherTable(
        f"Iceberg table {metadata}, snapshot {snapshot}", parts[0].schema_arrow, parts
    )


def is_visible(name: str) -> bool:
    """Return whether Spark reads a file: no part of its path begins with `.`, or with `_` unless it
    is the value of a column (`_day=1`), and it is no copy that was not completed. Pure."""
    return not any(
        part.startswith(".") or (part.startswith("_") and "=" not in part)
        for part in name.split("/")
    ) and not name.endswith("._COPYING_")


def _files(
    io: FileIO, stored: Mapping[str, Stored], location: str, make: MakeParts, strict: bool
) -> OtherTable:
    names, what = sorted(filter(is_visible, stored)), f"folder {location}"
    listed = None
    try:
        listed = listed_files(io, stored, location)
    except Refused as error:
        if strict:
            raise
        what += (
            ": all files count, also those of killed micro-batches, since its log is damaged "
            f"({error})"
        )
    if listed is not None:
        known, log = listed
        what += (
            f": {len(known)} files of its log, through micro-batch {log.through}; "
            f"{len(names) - len(known)} files that the log does not list do not count"
        )
        names = known
    elif (newest := newest_files(stored, location)) is not None:
        what += f": {len(newest)} files of a Hudi table's newest version, of {len(names)} files"
        names = newest
    elif any(map(is_written_by_spark, names)) and "all files count" not in what:
        what += (
            f": it has no {FOLDER}, so files of micro-batches or jobs that were killed count too"
        )
    if not names:
        raise Refused(f"read {location}: expected files of rows, found none; check its name")
    parts = [part for name in names for part in make(io, stored[name], name)]
    return OtherTable(what, parts[0].schema_arrow, parts)


def listed_files(
    io: FileIO, stored: Mapping[str, Stored], location: str
) -> tuple[list[str], SinkLog] | None:
    """Return the files in the log of Spark's file sink, and the log; None for a folder without one.
    Raises Refused as `file_sink`, Transient."""
    prefix, where = f"{FOLDER}/", f"{location}/{FOLDER}"
    logs = {name.removeprefix(prefix): name for name in stored if name.startswith(prefix)}
    if not logs:
        return None

    def read(name: str) -> str:
        path = stored[logs[name]].path
        with lake_errors(f"read {path}"), io.new_input(path).open() as source:
            return source.read().decode("utf-8", "replace")

    sizes = {name: one.size for name, one in stored.items() if is_visible(name)}
    log = read_log(logs, read, where)
    return match(log, sizes, root_of(location), where), log


def folder_values(name: str) -> dict[str, pa.Scalar]:
    """Return the column values in folder names, such as `day=2026-11-21`, as text. Pure."""
    pairs = (part.partition("=") for part in name.split("/")[:-1] if "=" in part)
    values = {unquote(key): None if v == _NO_VALUE else unquote(v) for key, _, v in pairs}
    return {key: pa.scalar(value, pa.string()) for key, value in values.items()}


@dataclass(frozen=True)
class FilePart:
    """A file of a folder or of a Delta table. `folder`: the values of columns that the file lacks:
    those in the names of its folders, or in the table's log."""

    io: FileIO
    path: str
    folder: Mapping[str, pa.Scalar]

    def own_schema(self) -> pa.Schema:
        """Return the columns that the file itself has."""
        raise NotImplementedError

    def own_batches(self, batch_size: int, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
        """Yield the rows with those of `columns` that the file itself has."""
        raise NotImplementedError

    @cached_property
    def schema_arrow(self) -> pa.Schema:
        with lake_errors(f"read {self.path}"):
            own = self.own_schema()
        more = [pa.field(n, value.type) for n, value in self.folder.items() if n not in own.names]
        return pa.schema([*own, *more])

    def iter_batches(self, batch_size: int, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
        """Yield the rows. Raises Refused, Transient."""
        with lake_errors(f"read {self.path}"):
            try:
                for batch in self.own_batches(batch_size, columns):
                    for name in self.folder.keys() & {*columns} - {*batch.schema.names}:
                        value = pa.repeat(self.folder[name], batch.num_rows)
                        batch = batch.append_column(name, value)
                    yield batch
            except pa.ArrowMemoryError:
                raise
            except pa.ArrowException as error:
                # Damage, or values that PyArrow lacks, such as ORC's times after the year 2262.
                raise Refused(
                    f"read {self.path}: expected values that PyArrow reads, found {error}; write "
                    "its rows again, as Parquet files"
                ) from error


@dataclass(frozen=True)
class ParquetPart(FilePart):
    """A Parquet file, or some row groups. `rows`: their number by the table's log, if any."""

    groups: tuple[int, ...] | None = None
    rows: int | None = None

    def own_schema(self) -> pa.Schema:
        return open_parquet(self.io, self.path).schema_arrow

    def own_batches(self, batch_size: int, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
        yield from open_parquet(self.io, self.path).iter_batches(
            batch_size=batch_size, columns=list(columns), row_groups=self.groups
        )


def parquet_parts(io: FileIO, stored: Stored, name: str) -> list[ParquetPart]:
    """Return the parts of a Parquet file: a large one is read by several tasks."""
    whole = ParquetPart(io, stored.path, folder_values(name))
    if stored.size <= _LARGE:
        return [whole]
    with lake_errors(f"read {stored.path}"):
        footer = open_parquet(io, stored.path).metadata
    sizes = [footer.row_group(i).total_byte_size for i in range(footer.num_row_groups)]
    of_part = (np.cumsum([0, *sizes[:-1]]) // _LARGE).tolist()
    return [
        replace(whole, groups=tuple(i for i, own in enumerate(of_part) if own == number))
        for number in dict.fromkeys(of_part)
    ]


def _parts_to_audit(io: FileIO, stored: Stored, name: str) -> list[ParquetPart]:
    if _OTHER_FORM.search(name):
        raise Refused(
            f"read {stored.path}: expected Parquet files, the only ones that are audited beside "
            f"tables of Iceberg and Delta, found {name}; name a folder of these alone"
        )
    return parquet_parts(io, stored, name)


def open_parquet(io: FileIO, path: str) -> pq.ParquetFile:
    """Open a Parquet file. Reads INT96, in which Spark writes timestamps by default, as
    microseconds: nanoseconds overflow after the year 2262. Raises Refused for an incomplete
    file."""
    try:
        return pq.ParquetFile(io.new_input(path).open(), coerce_int96_timestamp_unit="us")
    except pa.ArrowInvalid as error:
        raise Refused(
            f"read {path}: expected a complete Parquet file, found {error}; remove it, or write "
            "it again"
        ) from error


_METADATA = re.compile(r"metadata/v?(\d+)(?:-[^/]*)?\.(?:gz\.)?metadata\.json")


def find_metadata(names: Iterable[str], location: str) -> str | None:
    """Return the newest metadata file among the files of a folder; None if it is not an Iceberg
    table. Raises Refused if two files have the newest version: one of them was never committed."""
    versions = [
        (int(match[1]), name) for name in names if (match := _METADATA.fullmatch(name)) is not None
    ]
    newest = max((version for version, _ in versions), default=None)
    found = sorted(name for version, name in versions if version == newest)
    if len(found) > 1:
        raise Refused(
            f"read {location}: expected one newest metadata file, found {' and '.join(found)}: "
            "one of them was never committed; name the one that the catalog has: "
            "…/NAME.metadata.json"
        )
    return found[0] if found else None


@dataclass(frozen=True)
class IcebergPart:
    """One data file of a table, in the table's current columns without deleted rows."""

    metadata: TableMetadata
    io: FileIO
    task: FileScanTask

    @property
    def path(self) -> str:
        return self.task.file.file_path

    @property
    def schema_arrow(self) -> pa.Schema:
        return schema_to_pyarrow(self.metadata.schema(), include_field_ids=False)

    def iter_batches(self, batch_size: int, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
        """Yield the rows with some columns. Raises Refused, Transient."""
        with _reading(self.task.file.file_path):
            projected = self.metadata.schema().select(*columns)
            scan = ArrowScan(self.metadata, self.io, projected, AlwaysTrue())
            for batch in scan.to_record_batches([self.task]):
                yield from (
                    batch.slice(begin, batch_size) for begin in range(0, batch.num_rows, batch_size)
                )


@contextmanager
def _reading(place: str) -> Iterator[None]:
    with lake_errors(f"read {place}"):
        try:
            yield
        except OSError as error:
            if not reports_missing_file(error):
                raise
            raise Refused(
                f"read {place}: expected each file that the table names, found {error}; restore "
                "it, or name the newest …metadata.json; files of a folder that was moved are "
                "looked for in its former place"
            ) from error
        except (ValueError, NotImplementedError) as error:
            raise Refused(
                f"read {place}: expected files that PyIceberg reads, found {error}; write the "
                "table's rows as Parquet files, and name their folder"
            ) from error


def open_parts(io: FileIO, metadata: str) -> tuple[int, list[IcebergPart]]:
    """Return the parts of the table of a metadata file, as `parts_of`."""
    with _reading(metadata):
        return parts_of(StaticTable.from_metadata(metadata, dict(io.properties)), metadata)


def parts_of(table: Table, name: str) -> tuple[int, list[IcebergPart]]:
    """Return a table's current snapshot id and its data files, ordered by path. Raises Refused
    without rows, for equality deletes, which PyIceberg does not read, or without a file that the
    table names; Transient."""
    with _reading(name):
        snapshot = table.current_snapshot()
        tasks = sorted(table.scan().plan_files(), key=lambda task: task.file.file_path)
        if snapshot is None or not tasks:
            raise Refused(
                f"read {name}: expected a table with rows, found one without a snapshot or without "
                "files; check its location"
            )
        summary = snapshot.summary
        if summary is not None and summary.get("total-equality-deletes") not in (None, "0"):
            raise Refused(
                f"read {name}: expected a table without equality deletes, found some, as Flink "
                "writes them; run Spark's rewrite_data_files with delete-file-threshold 1 on it "
                "first"
            )
    io = for_tasks(table.io)
    return snapshot.snapshot_id, [IcebergPart(table.metadata, io, task) for task in tasks]


FOLDER = "_spark_metadata"
_REMEDY = (
    "restore it, or import by --takeover, which reads every file of the folder, and leaves out "
    "rows that repeat others by place in Kafka or by key"
)
_BATCH = re.compile(r"(\d+)(\.compact)?")
_DATA_FILE = re.compile(r"part-\d{5}-[0-9a-f-]{36}[-.]c\d{3}\..*")


@dataclass(frozen=True)
class Entry:
    """A file in the log: its path as Spark wrote it, URL-decoded, and its size in bytes."""

    path: str
    size: int
    is_deleted: bool = False


@dataclass(frozen=True)
class _Line:
    """The JSON of a file in the log."""

    path: str
    size: int
    action: str = "add"


@dataclass(frozen=True)
class SinkLog:
    """The valid files, in the order of their micro-batches. `through`: the last micro-batch."""

    entries: tuple[Entry, ...]
    through: int


def is_written_by_spark(name: str) -> bool:
    """Return whether a file has a name as Spark's writers give it."""
    return _DATA_FILE.fullmatch(name.rpartition("/")[2]) is not None


def read_log(names: Iterable[str], read: Callable[[str], str], where: str) -> SinkLog:
    """Read the log of a sink from the files `names` of its folder. Ignores files of killed writers,
    such as `.12.….tmp`.

    Raises Refused, with the name of the log file, if one is missing or damaged. Also for the last
    one: a sink that runs again takes its micro-batch as written, so that no other files have its
    rows.
    """
    # If a number has both files, the compact one is used: its name sorts after the other's.
    log = {
        int(found[1]): name
        for name in sorted(names)
        if (found := _BATCH.fullmatch(name)) is not None
    }
    last = max(log, default=0)
    begin = max((number for number, name in log.items() if name.endswith(".compact")), default=0)
    entries: list[Entry] = []
    for number in range(begin, last + 1):
        if number not in log:
            raise Refused(
                f"{where}: expected log files {begin} to {last}, found no {number}; {_REMEDY}"
            )
        of_batch = _parse_entries(read(log[number]))
        if of_batch is None:
            raise Refused(
                f"{where}/{log[number]}: expected a line v1 and lines of JSON, found other lines; "
                f"{_REMEDY}"
            )
        entries += of_batch
    deleted = {one.path for one in entries if one.is_deleted}
    kept = [one for one in entries if one.path not in deleted]
    return SinkLog(tuple(dict.fromkeys(kept)), last)


def _parse_entries(text: str) -> list[Entry] | None:
    """Return the entries of a log file; None if it is incomplete, or of another version."""
    version, *lines = text.split("\n")
    if version != "v1":
        return None
    try:
        values = [parse(_Line, line) for line in lines if line]
        return [Entry(unquote(v.path), v.size, v.action == "delete") for v in values]
    except ValueError:
        return None


def match(log: SinkLog, sizes: dict[str, int], root: str, where: str) -> list[str]:
    """Return the names, within the folder `root`, of the valid files. `sizes` has the sizes of all
    its files by name. A copied folder has other paths than the log: its files are found by the ends
    of their paths.

    Raises Refused for a file that is missing or has another size.
    """
    by_last = grouped(sizes, lambda known: known.rpartition("/")[2])
    found = []
    name: str | None
    for entry in log.entries:
        path = (
            entry.path.partition(":")[2].lstrip("/")
            if ":" in entry.path
            else entry.path.lstrip("/")
        )
        candidates = by_last.get(path.rpartition("/")[2], ())
        own = path.removeprefix(root)
        name = (
            own if own in sizes else next((c for c in candidates if path.endswith(f"/{c}")), None)
        )
        if name is None or sizes[name] != entry.size:
            there = "none" if name is None else f"one of {sizes[name]} bytes"
            raise Refused(
                f"{where}: expected the file {entry.path} of {entry.size} bytes, which the log "
                f"lists, found {there}; restore it: its rows would be missing"
            )
        found.append(name)
    return found
