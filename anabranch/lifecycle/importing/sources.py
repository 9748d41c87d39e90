"""The files to import: their list, their numbers of rows by hour, and their rows in the table's
columns."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from anabranch.common.errors import Refused
from anabranch.common.remote_errors import lake_errors
from anabranch.iceberg import file_sink
from anabranch.iceberg.arrow_types import may_become, open_parquet, to_type
from anabranch.iceberg.delta_source import LOG_FOLDER, open_version
from anabranch.iceberg.files import Stored, files_by_name
from anabranch.iceberg.iceberg_source import find_metadata, open_parts
from anabranch.iceberg.other_tables import Part, folder_values, is_visible, listed_files
from anabranch.lifecycle.importing.json_lines import JsonLines, is_json_lines

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from pyiceberg.io import FileIO


HOUR = "_import_hour"
TIME = "_import_time"
PLACE = ("_import_partition", "_import_offset")
"""Columns of rows read from files: the hour of import (in hours since 1970), the time of that hour,
and the record's partition and offset in Kafka, null if the files do not have them."""

OF_KAFKA = "_import_of_kafka"
"""A column: whether a row's time is the time at which Kafka received the record."""

READ_FROM_KAFKA = 2**40
"""The hour of rows whose offsets the stream reads from Kafka."""

RECEIVED_COLUMNS = ("kafka_timestamp", "timestamp")
"""Columns of a source with the time at which Kafka received a record."""

_MICROS = 3_600_000_000
_BATCH_ROWS = 65_536
_PLACES = (("kafka_partition", "kafka_offset"), ("partition", "offset"))
# The years 1 to 9999, in microseconds since 1970.
_CALENDAR = (-62_135_596_800_000_000, 253_402_300_800_000_000)
_INSTANT = pa.timestamp("us", "UTC")


@dataclass(frozen=True)
class SourceFile:
    """A file, its name within the source, and the column values in its folder names
    (`date=2026-11-21`). `part`: the reader of a table's file. `rows`: the number of rows according
    to the table's log; None if unknown."""

    path: str
    name: str
    size: int
    part: Part | None = None
    rows: int | None = None

    @property
    def folder_values(self) -> dict[str, str | None]:
        return folder_values(self.name) if self.part is None else {}


@dataclass(frozen=True)
class CountedFile:
    """A file and its number of rows by hour, in hours since 1970. If it has Kafka's offsets: `ends`
    has the offset after its last record, by partition, and `early` is the number of rows at offsets
    that the stream reads although they are older than the hour before the stream's first.
    `of_kafka`: as the column OF_KAFKA."""

    file: SourceFile
    rows: Mapping[int, int]
    ends: Mapping[int, int] | None = None
    early: int = 0
    of_kafka: bool = False


@dataclass(frozen=True)
class Seam:
    """The beginning of the stream in Kafka: offsets by partition, and the hour before its first, in
    hours since 1970. Rows of files without Kafka's offsets keep the hour of their time."""

    begins: Mapping[int, int]
    last: int

    def hours(self, times: NDArray[np.int64], places: pa.Table) -> NDArray[np.int64]:
        """Return the hour of each row; READ_FROM_KAFKA at offsets that the stream reads."""
        partitions, offsets = (places[name].to_numpy() for name in PLACE)
        is_read = np.ones(len(times), bool)
        for partition, begin in self.begins.items():
            is_read &= (partitions != partition) | (offsets >= begin)
        return np.where(is_read, READ_FROM_KAFKA, np.minimum(times, self.last))


def counts_by_hour(hours: NDArray[Any]) -> dict[int, int]:
    numbers, counts = np.unique(hours, return_counts=True)
    return dict(zip(numbers.tolist(), counts.tolist(), strict=True))


@dataclass(frozen=True)
class Source:
    """The files to import, in order, and sentences about them. `version`: that of a Delta table."""

    files: tuple[SourceFile, ...]
    notes: tuple[str, ...] = ()
    version: int | None = None


def list_source(io: FileIO, location: str, version: int | None = None) -> Source:
    """Return the files of an Iceberg table's current snapshot, of a Delta table's `version` (None:
    its newest), or the valid files of a folder: Parquet, JSON lines.

    In the folder of Spark's file sink these are the files in its log, in the order of their
    micro-batches. In another folder these are all files by name, except files and folders whose
    names begin with `_` or `.`, as in Spark. Raises Refused for other files, for no file, and for a
    log that is damaged or lists a missing file; Transient.
    """
    if location.endswith(".metadata.json"):
        _require_delta(location, version)
        return _of_iceberg(io, location)
    stored = files_by_name(io, location)
    # A Delta table that is an Iceberg table too (UniForm) is read as an Iceberg table.
    if version is None and (metadata := find_metadata(stored, location)) is not None:
        return _of_iceberg(io, stored[metadata].path)
    if any(name.startswith(f"{LOG_FOLDER}/") for name in stored):
        return _of_delta(io, location, stored, version)
    _require_delta(location, version)
    names = sorted(filter(is_visible, stored))
    notes: list[str] = []
    if (listed := listed_files(io, stored, location)) is not None:
        notes = list(_sink_notes(listed[1], len(listed[0]), len(names) - len(listed[0])))
        names = listed[0]
    elif any(map(file_sink.is_written_by_spark, names)):
        notes = [
            (
                f"the folder has no {file_sink.FOLDER}: files of micro-batches or jobs that were "
                "killed count too; their rows are left out where they repeat others by the "
                "stream's key"
            )
        ]
    wanted = (
        "files of Parquet (.parquet) or JSON lines (.json, .jsonl, .ndjson, each also with .gz)"
    )
    if other := next(
        (name for name in names if not name.endswith(".parquet") and not is_json_lines(name)), None
    ):
        raise Refused(
            f"import {location}: expected {wanted}, found {other}; name a folder of these alone"
        )
    if not names:
        raise Refused(f"import {location}: expected {wanted}, found none; check the folder's name")
    return Source(tuple(SourceFile(stored[n].path, n, stored[n].size) for n in names), tuple(notes))


def _of_iceberg(io: FileIO, metadata: str) -> Source:
    snapshot, parts = open_parts(io, metadata)
    files = (
        SourceFile(p.task.file.file_path, p.task.file.file_path, p.task.file.file_size_in_bytes, p)
        for p in parts
    )
    return Source(tuple(files), (f"Iceberg table {metadata}, snapshot {snapshot}",))


def _require_delta(location: str, version: int | None) -> None:
    if version is not None:
        raise Refused(
            f"import {location}: expected a Delta table, of which --version {version} is one, "
            f"found a folder without {LOG_FOLDER}; leave the option out, or check the folder's "
            "name"
        )


def _of_delta(
    io: FileIO, location: str, stored: Mapping[str, Stored], version: int | None
) -> Source:
    version, parts = open_version(io, location, stored, version)
    files = (SourceFile(part.path, part.path, part.size, part, part.rows) for part in parts)
    return Source(tuple(files), (f"Delta table {location}, version {version}",), version)


def _sink_notes(log: file_sink.SinkLog, files: int, left: int) -> Iterator[str]:
    yield (
        f"the log of Spark's file sink decides which files count: {files} of micro-batches up to "
        f"{log.through}; {left} others are left out"
    )
    if log.cut_short is not None:
        yield f"its last file {log.cut_short} is incomplete, so that micro-batch is left out"


@dataclass(frozen=True)
class SourceReader:
    """A reader of files in the columns of a table: `schema` has the stream's columns with the
    table's types.

    `time`: the column with the time of a row's hour; None for the first existing one of
    `kafka_timestamp`, `timestamp` and the stream's event time, `event_time`. A time without a time
    zone is UTC. `seam`: None to ignore Kafka's partitions and offsets.
    """

    io: FileIO
    schema: pa.Schema
    time: str | None = None
    event_time: str | None = None
    seam: Seam | None = None

    def count(self, file: SourceFile) -> CountedFile:
        """Return the numbers of a file's rows by hour. Raises Refused if the file's columns do not
        fit the table's, or a row has no time; Transient."""
        rows, ends, early = Counter[int](), dict[int, int](), 0
        with lake_errors(f"read {file.path}"):
            opened = self._open(file)
            self._require_columns(file, opened.schema_arrow)
            for batch in self._batches(file, opened, ()):
                found = batch[HOUR].to_numpy()
                rows.update(counts_by_hour(found))
                if self.seam is None or batch[PLACE[0]].null_count:
                    continue
                early += int(
                    ((found == READ_FROM_KAFKA) & (_hours(batch[TIME]) < self.seam.last)).sum()
                )
                partitions, offsets = (batch[name].to_numpy() for name in PLACE)
                for partition in np.unique(partitions).tolist():
                    end = int(offsets[partitions == partition].max()) + 1
                    ends[partition] = max(end, ends.get(partition, 0))
            names = opened.schema_arrow.names
            if file.rows is not None and rows.total() != file.rows:
                raise Refused(
                    f"import {file.path}: expected {file.rows} rows, as its table's log says, "
                    f"found {rows.total()}; restore the file"
                )
            has_places, of_kafka = (
                self._place_of(names) is not None,
                self.time_of(file, names) in self.received,
            )
        return CountedFile(file, rows, ends if has_places else None, early, of_kafka)

    def read(self, files: Sequence[CountedFile], first: int, last: int) -> pa.Table:
        """Return the rows of hours from `first` to `last`, in hours since 1970, with `HOUR`,
        `TIME`, `OF_KAFKA` and `PLACE`: ordered by hour, then as in the files. Raises the errors of
        `count`."""
        parts = []
        for counted in files:
            if not any(first <= hour <= last for hour in counted.rows):
                continue
            with lake_errors(f"read {counted.file.path}"):
                opened = self._open(counted.file)
                for batch in self._batches(counted.file, opened, self.schema.names):
                    inside = pc.and_(
                        pc.greater_equal(batch[HOUR], first), pc.less_equal(batch[HOUR], last)
                    )
                    parts.append(batch.filter(inside))
        if not parts:
            return self.empty()
        rows = pa.concat_tables(parts).combine_chunks()
        return rows.take(pa.array(np.argsort(rows[HOUR].to_numpy(), kind="stable")))

    @property
    def received(self) -> tuple[str, ...]:
        """The columns with the time at which Kafka received a record: none of the stream's own."""
        # An event may reach Kafka long after a time of its own, and would be searched around it.
        return tuple(name for name in RECEIVED_COLUMNS if name not in self.schema.names)

    def empty(self) -> pa.Table:
        """Return a table without rows, with the columns of `read`."""
        places = (pa.field(name, pa.int64()) for name in PLACE)
        own = (
            pa.field(TIME, _INSTANT),
            pa.field(OF_KAFKA, pa.bool_()),
            *places,
            pa.field(HOUR, pa.int64()),
        )
        return pa.schema(
            [*(field.with_nullable(True) for field in self.schema), *own]
        ).empty_table()

    def _place_of(self, names: Sequence[str]) -> tuple[str, str] | None:
        """Return the columns of a file with Kafka's partition and offset; None if it has none or
        they are ignored."""
        if self.seam is None:
            return None
        return next(
            (p for p in _PLACES if {*p} <= {*names} and not {*p} & {*self.schema.names}), None
        )

    def time_of(self, file: SourceFile, names: Sequence[str]) -> str:
        """Return the column of a file with the time of each row's hour. Raises Refused if there is
        none."""
        wanted = (self.time,) if self.time is not None else (*self.received, self.event_time)
        found = next((name for name in wanted if name in names), None)
        if found is None:
            tried = " or ".join(name for name in wanted if name)
            raise Refused(
                f"import {file.path}: expected a column {tried} with the time at which each row "
                f"was received, found {', '.join(names)}; name the column by --time"
            )
        return found

    def _open(self, file: SourceFile) -> Part:
        if file.part is not None:
            return file.part
        if is_json_lines(file.name):
            return JsonLines(self.io, file.path, self.schema, file.folder_values)
        parquet: Part = open_parquet(self.io, file.path)
        return parquet

    def _require_columns(self, file: SourceFile, there: pa.Schema) -> None:
        values, names = file.folder_values, set(there.names)
        for field in self.schema:
            if field.name in names:
                kind = there.field(field.name).type
                if not may_become(kind, field.type):
                    raise _mismatch(file, field, f"found {kind}")
            elif field.name not in values and not field.nullable:
                raise _mismatch(file, field, "found no such column")

    def _batches(
        self, file: SourceFile, opened: Part, columns: Sequence[str]
    ) -> Iterator[pa.Table]:
        """Yield the rows with `columns` in the table's types, `TIME`, `OF_KAFKA`, `PLACE` and
        `HOUR`."""
        there = opened.schema_arrow.names
        time, place = self.time_of(file, there), self._place_of(there)
        wanted = dict.fromkeys([*(c for c in columns if c in there), time, *(place or ())])
        for batch in opened.iter_batches(batch_size=_BATCH_ROWS, columns=list(wanted)):
            times = self._times(file, time, batch[time])
            rows = {name: self._column(file, batch, name) for name in columns}
            of_kafka = pa.repeat(time in self.received, batch.num_rows)
            found = pa.table(
                {**rows, TIME: times, OF_KAFKA: of_kafka, **self._places(file, batch, place)}
            )
            hours = _hours(found[TIME])
            if self.seam is not None and place is not None:
                hours = self.seam.hours(hours, found)
            yield found.append_column(HOUR, pa.array(hours, pa.int64()))

    def _places(
        self, file: SourceFile, batch: pa.RecordBatch, place: tuple[str, str] | None
    ) -> dict[str, pa.Array]:
        if place is None:
            return {name: pa.nulls(batch.num_rows, pa.int64()) for name in PLACE}
        for name in place:
            if not pa.types.is_integer(batch[name].type) or batch[name].null_count:
                raise Refused(
                    f"import {file.path}: column {name}: expected the place of each record in "
                    f"Kafka, found {batch[name].type} with {batch[name].null_count} null; use "
                    "--seam key"
                )
        return {own: batch[name].cast(pa.int64()) for own, name in zip(PLACE, place, strict=True)}

    def _column(self, file: SourceFile, batch: pa.RecordBatch, name: str) -> pa.Array:
        field = self.schema.field(name)
        if name in batch.schema.names:
            found = batch[name]
        else:
            value = file.folder_values.get(name)
            kind = field.type if value is None else pa.string()
            found = pa.repeat(pa.scalar(value, kind), batch.num_rows)
        if not field.nullable and found.null_count:
            raise _mismatch(file, field, f"found null in {found.null_count} rows or more")
        try:
            made = to_type(found, field.type)
            # Text that is not UTF-8 ends each later delivery and query of an accepted hour.
            made.validate(full=True)
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError, pa.ArrowTypeError) as error:
            raise _mismatch(file, field, f"found {error}") from error
        if not _is_in_calendar(made):
            raise _mismatch(file, field, "found values outside of the years 1 to 9999")
        return made

    def _times(self, file: SourceFile, name: str, found: pa.Array) -> pa.Array:
        if not pa.types.is_timestamp(found.type):
            raise Refused(
                f"import {file.path}: column {name}: expected a timestamp, from which a row's "
                f"hour follows, found {found.type}; name another column by --time"
            )
        if found.null_count:
            raise Refused(
                f"import {file.path}: column {name}: expected the time of each row, from which "
                f"its hour follows, found null in {found.null_count} rows or more; name another "
                "column by --time"
            )
        times = pc.cast(found, _INSTANT, safe=False)
        if not _is_in_calendar(times):
            raise Refused(
                f"import {file.path}: column {name}: expected times of the years 1 to 9999, found "
                "others: their unit may be another than the file says; name another column by "
                "--time, or write the file again"
            )
        return times


def _hours(times: pa.ChunkedArray) -> NDArray[np.int64]:
    micros: NDArray[np.int64] = times.cast(pa.int64()).to_numpy()
    return micros // _MICROS


def _is_in_calendar(values: pa.Array) -> bool:
    """Return whether all times and dates, nested ones too, are of the years 1 to 9999. Pure."""
    t, kind = pa.types, values.type
    if t.is_map(kind):
        return _is_in_calendar(values.keys) and _is_in_calendar(values.items)
    if t.is_list(kind) or t.is_large_list(kind):
        return _is_in_calendar(values.flatten())
    if t.is_struct(kind):
        return all(map(_is_in_calendar, values.flatten()))
    if not (t.is_timestamp(kind) or t.is_date32(kind)) or values.null_count == len(values):
        return True
    unit = 24 * _MICROS if t.is_date32(kind) else 1
    span = pc.min_max(values.cast(pa.int32() if t.is_date32(kind) else pa.int64())).as_py()
    return bool(_CALENDAR[0] <= span["min"] * unit and span["max"] * unit < _CALENDAR[1])


def _mismatch(file: SourceFile, field: pa.Field, found: str) -> Refused:
    needed = "" if field.nullable else " in each row"
    return Refused(
        f"import {file.path}: column {field.name}: expected {field.type}{needed}, as the table "
        f"has it, {found}; correct the file, or the stream's schema"
    )
