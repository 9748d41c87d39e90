"""Tables that other programs write, read without Spark and in bounded memory: Iceberg tables of the
catalog or of a folder, Delta tables, folders of files. Nothing is written."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Protocol
from urllib.parse import unquote

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from anabranch.common.errors import Refused, TableMissing
from anabranch.common.remote_errors import lake_errors
from anabranch.config import Environment
from anabranch.iceberg import file_sink
from anabranch.iceberg.catalog_settings import catalog_properties
from anabranch.iceberg.delta_source import LOG_FOLDER, open_version
from anabranch.iceberg.file_io import LakeFileIO, for_tasks
from anabranch.iceberg.files import Stored, files_by_name, root_of
from anabranch.iceberg.iceberg_source import find_metadata, open_parts, parts_of
from anabranch.iceberg.lake import Lake

if TYPE_CHECKING:
    from pyiceberg.io import FileIO

_NO_VALUE = "__HIVE_DEFAULT_PARTITION__"
# The bytes above which a Parquet file is read in parts of about this size.
_LARGE = 256 * 2**20


class Part(Protocol):
    """A data file, or a part of one. `iter_batches` yields rows with the columns, or fields of
    columns (`a.b`), that the file has."""

    @property
    def path(self) -> str: ...

    @property
    def schema_arrow(self) -> pa.Schema: ...

    def iter_batches(self, batch_size: int, columns: Sequence[str]) -> Iterator[pa.RecordBatch]: ...


MakeParts = Callable[["FileIO", Stored, str], Sequence[Part]]
"""Returns the parts of a file of a folder, from its name in the folder."""


@dataclass(frozen=True)
class OtherTable:
    """A table at one version: its description, its columns, and its data files. `version`: that of
    a Delta table."""

    what: str
    schema: pa.Schema
    parts: Sequence[Part]
    version: int | None = None


def location_of(text: str) -> str:
    """Return a folder as a location: `s3://…`, or `file://…` for a local path."""
    if "://" in text or text.startswith("file:"):
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
    return _files(io, stored, location, make or parquet_parts, strict)


def _static(io: FileIO, metadata: str) -> OtherTable:
    snapshot, parts = open_parts(io, metadata)
    return OtherTable(
        f"Iceberg table {metadata}, snapshot {snapshot}", parts[0].schema_arrow, parts
    )


def is_visible(name: str) -> bool:
    """Return whether Spark reads a file: neither its name nor a folder's begins with `_` or `.`.
    Pure."""
    return not any(part.startswith(("_", ".")) for part in name.split("/"))


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
        if log.cut_short is not None:
            what += f"; its last file {log.cut_short} is incomplete and does not count"
        names = known
    elif any(map(file_sink.is_written_by_spark, names)) and "all files count" not in what:
        what += (
            f": it has no {file_sink.FOLDER}, so files of micro-batches or jobs that were killed "
            "count too"
        )
    if not names:
        raise Refused(f"read {location}: expected files of rows, found none; check its name")
    parts = [part for name in names for part in make(io, stored[name], name)]
    return OtherTable(what, parts[0].schema_arrow, parts)


def listed_files(
    io: FileIO, stored: Mapping[str, Stored], location: str
) -> tuple[list[str], file_sink.SinkLog] | None:
    """Return the files in the log of Spark's file sink, and the log; None for a folder without one.
    Raises Refused as `file_sink`, Transient."""
    prefix, where = f"{file_sink.FOLDER}/", f"{location}/{file_sink.FOLDER}"
    logs = {name.removeprefix(prefix): name for name in stored if name.startswith(prefix)}
    if not logs:
        return None

    def read(name: str) -> str:
        path = stored[logs[name]].path
        with lake_errors(f"read {path}"), io.new_input(path).open() as source:
            return source.read().decode("utf-8", "replace")

    sizes = {name: one.size for name, one in stored.items() if is_visible(name)}
    log = file_sink.read_log(logs, read, where)
    return file_sink.match(log, sizes, root_of(location), where), log


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
            for batch in self.own_batches(batch_size, columns):
                for name in self.folder.keys() & {*columns} - {*batch.schema.names}:
                    batch = batch.append_column(name, pa.repeat(self.folder[name], batch.num_rows))
                yield batch


@dataclass(frozen=True)
class ParquetPart(FilePart):
    """A Parquet file, or some of its row groups. `rows`: their number by the table's log, if it has
    one."""

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
