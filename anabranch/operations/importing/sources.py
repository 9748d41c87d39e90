"""The files to import: which there are, how many rows of each hour each has, and their rows as the table's columns."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from anabranch.common.errors import Refused
from anabranch.common.remote_errors import lake_errors
from anabranch.iceberg.files import list_files, same_file
from anabranch.offsets.hours import hour_of, start_of

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from pyiceberg.io import FileIO

    from anabranch.config import Environment

HOUR = "_import_hour"
TIME = "_import_time"
"""Of rows that were read: the hour, in hours since 1970, and the time that it follows from."""

_MICROS = 3_600_000_000
_BATCH_ROWS = 65_536
_NO_VALUE = "__HIVE_DEFAULT_PARTITION__"
_TIMES = ("kafka_timestamp", "timestamp")
_INSTANT = pa.timestamp("us", "UTC")


@dataclass(frozen=True)
class SourceFile:
    """A file, its name within the source, and the values of columns that its folders name (`date=2026-11-21`)."""

    path: str
    name: str
    size: int

    @property
    def of_folders(self) -> dict[str, str | None]:
        parts = [part.partition("=") for part in self.name.split("/")[:-1] if "=" in part]
        return {unquote(name): None if value == _NO_VALUE else unquote(value) for name, _, value in parts}


@dataclass(frozen=True)
class Counted:
    """A file and its number of rows by hour, in hours since 1970."""

    file: SourceFile
    rows: Mapping[int, int]


def to_number(hour: str) -> int:
    """An hour as hours since 1970."""
    return int(start_of(hour).timestamp()) // 3600


def from_number(number: int) -> str:
    return hour_of(datetime.fromtimestamp(number * 3600, UTC))


def location_of(text: str) -> str:
    """A folder as a location: `s3://…`, or `file://…` for a local path."""
    if "://" in text or text.startswith("file:"):
        return text.rstrip("/").replace("s3a://", "s3://", 1)
    return f"file://{Path(text).absolute()}"


def list_source(environment: Environment, location: str) -> list[SourceFile]:
    """The Parquet files under a folder, ordered by name. Files and folders whose names begin with `_` or `.` are left
    out, as Spark does. Raises Refused for other files and for none, Transient."""
    root = same_file(location).rstrip("/") + "/"
    found = []
    for stored in list_files(environment, location):
        name = same_file(stored.path).removeprefix(root)
        if any(part.startswith(("_", ".")) for part in name.split("/")):
            continue
        if not name.endswith(".parquet"):
            raise Refused(
                f"import {location}: expected Parquet files, found {name}; name a folder of Parquet files alone"
            )
        found.append(SourceFile(stored.path, name, stored.size))
    if not found:
        raise Refused(f"import {location}: expected Parquet files, found none; check the folder's name")
    return sorted(found, key=lambda f: f.name)


@dataclass(frozen=True)
class SourceReader:
    """Reads files as the columns of a table: `schema` has the stream's columns with the table's types.

    `time`: the column from which a row's hour follows; None for the first that there is of `kafka_timestamp`,
    `timestamp` and the stream's event time, `event_time`. A time without a time zone is UTC.
    """

    io: FileIO
    schema: pa.Schema
    time: str | None = None
    event_time: str | None = None

    def count(self, file: SourceFile) -> Counted:
        """The rows of a file by hour. Raises Refused for a file whose columns do not fit the table's, and for a row
        without a time; Transient."""
        rows = Counter[int]()
        with lake_errors(f"read {file.path}"):
            parquet = self._open(file)
            self._require_columns(file, parquet.schema_arrow)
            for times in self._batches(file, parquet, ()):
                hours, numbers = np.unique(_hours(times[TIME]), return_counts=True)
                rows.update(dict(zip(hours.tolist(), numbers.tolist(), strict=True)))
        return Counted(file, rows)

    def read(self, files: Sequence[Counted], first: int, last: int) -> pa.Table:
        """The rows of hours from `first` to `last`, in hours since 1970, by hour, then in the order of the files and
        of their rows; with `HOUR` and `TIME`. Raises as `count`."""
        parts = []
        for counted in files:
            if not any(first <= hour <= last for hour in counted.rows):
                continue
            with lake_errors(f"read {counted.file.path}"):
                parquet = self._open(counted.file)
                for batch in self._batches(counted.file, parquet, self.schema.names):
                    hours = pa.array(_hours(batch[TIME]), pa.int64())
                    inside = pc.and_(pc.greater_equal(hours, first), pc.less_equal(hours, last))
                    parts.append(batch.append_column(HOUR, hours).filter(inside))
        if not parts:
            empty = [*self.schema, pa.field(TIME, _INSTANT), pa.field(HOUR, pa.int64())]
            return pa.schema(empty).empty_table()
        rows = pa.concat_tables(parts).combine_chunks()
        return rows.take(pa.array(np.argsort(rows[HOUR].to_numpy(), kind="stable")))

    def time_of(self, file: SourceFile, names: Sequence[str]) -> str:
        """The column of a file that the hours follow from. Raises Refused."""
        wanted = (self.time,) if self.time is not None else (*_TIMES, self.event_time)
        found = next((name for name in wanted if name in names), None)
        if found is None:
            tried = " or ".join(name for name in wanted if name)
            raise Refused(
                f"import {file.path}: expected a column {tried} with the time at which each row was received, found "
                f"{', '.join(names)}; name the column by --time"
            )
        return found

    def names_of(self, file: SourceFile) -> list[str]:
        """The columns of a file. Raises Refused, Transient."""
        with lake_errors(f"read {file.path}"):
            return list(self._open(file).schema_arrow.names)

    def _open(self, file: SourceFile) -> pq.ParquetFile:
        try:
            return pq.ParquetFile(self.io.new_input(file.path).open())
        except pa.ArrowInvalid as error:
            raise Refused(
                f"import {file.path}: expected a whole Parquet file, found {error}; remove it, or write it again"
            ) from error

    def _require_columns(self, file: SourceFile, there: pa.Schema) -> None:
        values, names = file.of_folders, set(there.names)
        for field in self.schema:
            if field.name in names:
                kind = there.field(field.name).type
                if not may_become(kind, field.type):
                    raise _mismatch(file, field, f"found {kind}")
            elif field.name not in values and not field.nullable:
                raise _mismatch(file, field, "found no such column")

    def _batches(self, file: SourceFile, parquet: pq.ParquetFile, columns: Sequence[str]) -> Iterator[pa.Table]:
        """The rows with `columns`, as the table has them, and `TIME`."""
        there = parquet.schema_arrow.names
        time = self.time_of(file, there)
        wanted = dict.fromkeys([*(c for c in columns if c in there), time])
        for batch in parquet.iter_batches(batch_size=_BATCH_ROWS, columns=list(wanted)):
            times = self._times(file, time, batch[time])
            rows = {name: self._column(file, batch, name) for name in columns}
            yield pa.table({**rows, TIME: times})

    def _column(self, file: SourceFile, batch: pa.RecordBatch, name: str) -> pa.Array:
        field = self.schema.field(name)
        if name in batch.schema.names:
            found = batch[name]
        else:
            found = pa.array([file.of_folders.get(name)] * batch.num_rows, pa.string())
        if not field.nullable and found.null_count:
            raise _mismatch(file, field, f"found null in {found.null_count} rows or more")
        try:
            return to_type(found, field.type)
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
            raise _mismatch(file, field, f"found {error}") from error

    def _times(self, file: SourceFile, name: str, found: pa.Array) -> pa.Array:
        if not pa.types.is_timestamp(found.type):
            raise Refused(
                f"import {file.path}: column {name}: expected a timestamp, from which a row's hour follows, found "
                f"{found.type}; name another column by --time"
            )
        if found.null_count:
            raise Refused(
                f"import {file.path}: column {name}: expected the time of each row, from which its hour follows, found "
                f"null in {found.null_count} rows or more; name another column by --time"
            )
        return pc.cast(found, _INSTANT, safe=False)


def may_become(kind: pa.DataType, wanted: pa.DataType) -> bool:
    """Whether values of a file's type can be values of a table's type without a change of their meaning. Integers may
    be wider, where each value fits."""
    t = pa.types
    if t.is_dictionary(kind):
        return may_become(kind.value_type, wanted)
    same = (
        t.is_integer, t.is_boolean, t.is_date, t.is_timestamp, t.is_decimal, t.is_struct, t.is_map,
        lambda k: t.is_string(k) or t.is_large_string(k),
        lambda k: t.is_binary(k) or t.is_large_binary(k) or t.is_fixed_size_binary(k),
        lambda k: t.is_list(k) or t.is_large_list(k),
    )  # fmt: skip
    if t.is_floating(kind) and t.is_floating(wanted):
        return bool(kind.bit_width <= wanted.bit_width)
    if t.is_integer(kind) and t.is_decimal(wanted):
        return True
    return t.is_null(kind) or any(is_one(kind) and is_one(wanted) for is_one in same)


def to_type(found: pa.Array, wanted: pa.DataType) -> pa.Array:
    """Values as a table's type. Raises ArrowInvalid for one that does not fit."""
    if pa.types.is_dictionary(found.type):
        found = found.dictionary_decode()
    return found if found.type == wanted else pc.cast(found, wanted)


def _hours(times: pa.ChunkedArray) -> NDArray[np.int64]:
    micros: NDArray[np.int64] = times.cast(pa.int64()).to_numpy()
    return micros // _MICROS


def _mismatch(file: SourceFile, field: pa.Field, found: str) -> Refused:
    needed = "" if field.nullable else " in each row"
    return Refused(
        f"import {file.path}: column {field.name}: expected {field.type}{needed}, as the table has it, {found}; "
        "correct the file, or the stream's schema"
    )
