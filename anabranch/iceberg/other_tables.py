"""Tables that other programs write, read without Spark and in bounded memory: Iceberg tables of the
catalog or of a folder, Delta tables, folders of Parquet files. Nothing is written."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol
from urllib.parse import unquote

import pyarrow as pa

from anabranch.common.errors import Refused, TableMissing
from anabranch.common.remote_errors import lake_errors
from anabranch.config import Environment
from anabranch.iceberg import file_sink
from anabranch.iceberg.arrow_types import open_parquet
from anabranch.iceberg.catalog_settings import catalog_properties
from anabranch.iceberg.delta_source import LOG_FOLDER, open_version
from anabranch.iceberg.file_io import LakeFileIO
from anabranch.iceberg.files import Stored, files_by_name, root_of
from anabranch.iceberg.iceberg_source import find_metadata, open_parts, parts_of
from anabranch.iceberg.lake import Lake

if TYPE_CHECKING:
    from pyiceberg.io import FileIO

_NO_VALUE = "__HIVE_DEFAULT_PARTITION__"


class Part(Protocol):
    """A data file. `iter_batches` yields rows with the columns, or fields of columns (`a.b`), that
    the file has."""

    @property
    def schema_arrow(self) -> pa.Schema: ...

    def iter_batches(self, batch_size: int, columns: Sequence[str]) -> Iterator[pa.RecordBatch]: ...


@dataclass(frozen=True)
class OtherTable:
    """A table at one version: its description, its columns, and its data files."""

    what: str
    schema: pa.Schema
    parts: Sequence[Part]


def location_of(text: str) -> str:
    """Return a folder as a location: `s3://…`, or `file://…` for a local path."""
    if "://" in text or text.startswith("file:"):
        return text.rstrip("/").replace("s3a://", "s3://", 1)
    return f"file://{Path(text).absolute()}"


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
        snapshot, parts = parts_of(table, name)
        what = f"Iceberg table {name}, snapshot {snapshot}"
        return OtherTable(what, table.schema().as_arrow(), parts)
    location, io = location_of(name), LakeFileIO(catalog_properties(environment))
    if location.endswith(".metadata.json"):
        return _static(io, location)
    stored = files_by_name(io, location)
    # A Delta table that is an Iceberg table too (UniForm) is read as an Iceberg table.
    if (metadata := find_metadata(stored, location)) is not None:
        return _static(io, stored[metadata].path)
    if any(path.startswith(f"{LOG_FOLDER}/") for path in stored):
        version, delta = open_version(io, location, stored, None)
        return OtherTable(f"Delta table {name}, version {version}", delta[0].schema_arrow, delta)
    return _parquet(io, stored, location)


def _static(io: FileIO, metadata: str) -> OtherTable:
    snapshot, parts = open_parts(io, metadata)
    return OtherTable(
        f"Iceberg table {metadata}, snapshot {snapshot}", parts[0].schema_arrow, parts
    )


def is_visible(name: str) -> bool:
    """Return whether Spark reads a file: neither its name nor a folder's begins with `_` or `.`.
    Pure."""
    return not any(part.startswith(("_", ".")) for part in name.split("/"))


def _parquet(io: FileIO, stored: Mapping[str, Stored], location: str) -> OtherTable:
    names, what = sorted(filter(is_visible, stored)), f"Parquet folder {location}"
    try:
        listed = listed_files(io, stored, location)
    except Refused as error:
        listed = None
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
    if not names:
        raise Refused(f"read {location}: expected Parquet files, found none; check its name")
    parts = [ParquetPart(io, stored[name].path, folder_values(name)) for name in names]
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


def folder_values(name: str) -> dict[str, str | None]:
    """Return the column values in folder names, such as `day=2026-11-21`. Pure."""
    pairs = (part.partition("=") for part in name.split("/")[:-1] if "=" in part)
    return {unquote(key): None if value == _NO_VALUE else unquote(value) for key, _, value in pairs}


@dataclass(frozen=True)
class ParquetPart:
    """A file of a folder. `values`: the columns in the names of its folders."""

    io: FileIO
    path: str
    values: Mapping[str, str | None]

    @property
    def schema_arrow(self) -> pa.Schema:
        with lake_errors(f"read {self.path}"):
            own = open_parquet(self.io, self.path).schema_arrow
        more = [pa.field(name, pa.string()) for name in self.values if name not in own.names]
        return pa.schema([*own, *more])

    def iter_batches(self, batch_size: int, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
        with lake_errors(f"read {self.path}"):
            opened = open_parquet(self.io, self.path)
            own = opened.schema_arrow.names
            for batch in opened.iter_batches(batch_size=batch_size, columns=list(columns)):
                for name in self.values.keys() & {*columns} - {*own}:
                    value = pa.repeat(pa.scalar(self.values[name], pa.string()), batch.num_rows)
                    batch = batch.append_column(name, value)
                yield batch
