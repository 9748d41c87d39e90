"""A table's files for DuckDB: a PyArrow dataset that opens only the files that a query needs, and a
connection that spills to disk.

Tables have no delete files, so the planned data files are the table. They are read through the
table's own file system and credentials, with projection and filter push-down, and nothing is
downloaded.

Pruning: guarantees about the rows of a file or a manifest, before it is opened. Pure. A
guarantee is a PyArrow expression. DuckDB passes pushed-down conditions to PyArrow, which skips
files without a possible matching row, and treats a condition as met only where the guarantee
implies it. So DuckDB and PyArrow define the meaning of a condition (nulls, NaN, time zones, LIKE,
NOT, OR), and no SQL is translated here. A guarantee that is too weak opens a file too many; a
guarantee is never too strong.
"""

from __future__ import annotations

import dataclasses
import re
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, reduce
from itertools import product
from math import isqrt
from operator import and_
from typing import Any, TypeVar

import duckdb
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
from pyarrow.fs import LocalFileSystem
from pyiceberg import types as iceberg
from pyiceberg.conversions import from_bytes
from pyiceberg.manifest import DataFile, ManifestFile
from pyiceberg.partitioning import PartitionField, PartitionSpec
from pyiceberg.schema import Schema
from pyiceberg.table import Table
from pyiceberg.transforms import BucketTransform

from anabranch.common.errors import FileGone, Refused, Transient
from anabranch.common.logs import Progress
from anabranch.common.temporary import temporary_folder
from anabranch.iceberg.files import reports_missing_file
from anabranch.iceberg.manifests import HourManifest, hour_of_file, list_manifests, read_entries
from anabranch.iceberg.rewriting import dataset_of, is_readable_by_name, read_by_id

# Maximum number of columns whose nulls are a separate case; each doubles the number of cases.
_CASES_OF = 4
# Maximum number of values of a condition that are compared with a file's bucket.
_VALUES = 16
_TEXT, _NUMBER = re.compile(r'"([^"]*)"'), re.compile(r"(?<![\w.])-?\d{1,19}(?![\w.])")
_MICROS = {"hour": 3_600_000_000, "day": 86_400_000_000}
_FLOATS = (iceberg.FloatType, iceberg.DoubleType)
# Types whose bounds Iceberg, Parquet, PyArrow and DuckDB compare in the same way.
_EXACT = (
    iceberg.IntegerType,
    iceberg.LongType,
    iceberg.DateType,
    iceberg.DecimalType,
    iceberg.StringType,
    iceberg.TimestampType,
    iceberg.TimestamptzType,
)
_ORDERED = (*_EXACT, *_FLOATS)


def file_guarantee(
    schema: Schema, columns: pa.Schema, spec: PartitionSpec, file: DataFile
) -> pc.Expression | None:
    """Return the guarantee of a data file's partition and bounds about its rows; None without one.
    `columns`: those of the table's schema that may be compared."""
    partition = zip(spec.fields, (file.partition[i] for i in range(len(spec.fields))), strict=True)
    known = [_value_guarantee(schema, columns, field, value) for field, value in partition]
    return all_of([*known, bounds_guarantee(schema, columns, [file])])


def bounds_guarantee(
    schema: Schema, columns: pa.Schema, files: Sequence[DataFile]
) -> pc.Expression | None:
    """Return the guarantee that the bounds of data files give about the rows of all of them; None
    without one. `columns`: as for `file_guarantee`."""
    compared = (field for field in schema.fields if field.name in columns.names)
    return all_of([_column_guarantee(columns, field, files) for field in compared])


def manifest_guarantee(
    schema: Schema, columns: pa.Schema, spec: PartitionSpec, manifest: ManifestFile
) -> pc.Expression | None:
    """Return the guarantee that the manifest list gives about the rows of a manifest's files, for
    `columns`; None without one."""
    known = []
    for field, summary in zip(spec.fields, manifest.partitions or (), strict=False):
        if summary.lower_bound is None or summary.upper_bound is None:
            continue
        kind = field.transform.result_type(schema.find_type(field.source_id))
        if not isinstance(kind, _EXACT):
            continue
        low, high = from_bytes(kind, summary.lower_bound), from_bytes(kind, summary.upper_bound)
        known.append(
            _range_guarantee(schema, columns, field, low, high, nulls=bool(summary.contains_null))
        )
    return all_of(known)


def null_cases(columns: pa.Schema, condition: pc.Expression) -> list[pc.Expression | None]:
    """Return the cases to combine with a guarantee, one of which is true for every row: which of
    the nullable columns that the condition looks up in a list (IN) are null. PyArrow cannot
    simplify a list lookup if a value may be null."""
    text = str(condition)
    listed = [pc.field(c.name) for c in columns if c.nullable and f"is_in({c.name}, " in text][
        :_CASES_OF
    ]
    return [
        all_of(case)
        for case in product(*((column.is_valid(), column.is_null()) for column in listed))
    ]


def bucket_cases(
    schema: Schema, columns: pa.Schema, spec: PartitionSpec, file: DataFile, condition: str
) -> list[pc.Expression | None]:
    """Return cases, one of which is true for every row of a file in a bucket: a column of the
    bucket is between those values in the condition's text that belong to other buckets, or null.
    Values that are missed only open a file too many."""
    for i, one in enumerate(spec.fields):
        name = schema.find_column_name(one.source_id)
        if not isinstance(one.transform, BucketTransform) or name not in columns.names:
            continue
        kind, values = schema.find_type(one.source_id), set[Any]()
        if isinstance(kind, iceberg.StringType):
            values = set(_TEXT.findall(condition))
        elif isinstance(kind, iceberg.IntegerType | iceberg.LongType):
            values = {n for n in map(int, _NUMBER.findall(condition)) if kind.min <= n <= kind.max}
        bucket_of = one.transform.transform(kind)
        apart = sorted(v for v in values if bucket_of(v) != file.partition[i])[:_VALUES]
        column = pc.field(name)
        scalars = [pa.scalar(value, columns.field(name).type) for value in apart]
        above = [None, *(column > scalar for scalar in scalars)]
        below = [*(column < scalar for scalar in scalars), None]
        between = (_between(column, *of, nulls=False) for of in zip(above, below, strict=True))
        return [*between, column.is_null()] if apart else [None]
    return [None]


def _value_guarantee(
    schema: Schema, columns: pa.Schema, field: PartitionField, value: Any
) -> pc.Expression | None:
    name = schema.find_column_name(field.source_id)
    if value is None or name is None or name not in columns.names:
        return None
    if str(field.transform) == "identity" and isinstance(schema.find_type(name), _EXACT):
        return pc.field(name) == pa.scalar(value, columns.field(name).type)
    return _range_guarantee(schema, columns, field, value, value, nulls=False)


def _range_guarantee(
    schema: Schema, columns: pa.Schema, field: PartitionField, low: Any, high: Any, nulls: bool
) -> pc.Expression | None:
    """Return the guarantee that a partition value from `low` to `high`, both included, gives about
    its source column."""
    name = schema.find_column_name(field.source_id)
    if name is None or name not in columns.names:
        return None
    column, kind, transform = pc.field(name), columns.field(name).type, str(field.transform)
    if transform == "identity" and isinstance(schema.find_type(name), _EXACT):
        return _between(
            column, column >= pa.scalar(low, kind), column <= pa.scalar(high, kind), nulls
        )
    if transform in _MICROS and pa.types.is_timestamp(kind):
        start, end = (pa.scalar(value * _MICROS[transform], kind) for value in (low, high + 1))
        return _between(column, column >= start, column < end, nulls)
    return None


def _column_guarantee(
    columns: pa.Schema, field: iceberg.NestedField, files: Sequence[DataFile]
) -> pc.Expression | None:
    kind, id = field.field_type, field.field_id
    if not isinstance(kind, _ORDERED):
        return None
    # Bounds ignore NaN, which DuckDB orders last and PyArrow does not order.
    if isinstance(kind, _FLOATS) and any((f.nan_value_counts or {}).get(id) != 0 for f in files):
        return None
    column, arrow = pc.field(field.name), columns.field(field.name).type
    nulls = [(f.null_value_counts or {}).get(id) for f in files]
    if all(n is not None and n == f.record_count for n, f in zip(nulls, files, strict=True)):
        return column.is_null()

    def bound(of: Callable[[DataFile], Mapping[int, bytes] | None], pick: Any) -> Any:
        found = [(of(f) or {}).get(id) for f in files]
        known = [from_bytes(kind, one) for one in found if one is not None]
        return pa.scalar(pick(known), arrow) if len(known) == len(files) else None

    low, high = bound(lambda f: f.lower_bounds, min), bound(lambda f: f.upper_bounds, max)
    from_low = column >= low if low is not None else None
    to_high = column <= high if high is not None else None
    return _between(column, from_low, to_high, any(n != 0 for n in nulls))


def _between(
    column: pc.Expression, low: pc.Expression | None, high: pc.Expression | None, nulls: bool
) -> pc.Expression | None:
    """Return the bounds in the form that PyArrow simplifies."""
    bounds = [bound for bound in (low, high) if bound is not None]
    if nulls:
        return all_of([bound | column.is_null() for bound in bounds])
    return all_of([*bounds, column.is_valid()])


def all_of(known: Iterable[pc.Expression | None]) -> pc.Expression | None:
    """Return the conjunction of all guarantees; None without any."""
    parts = [part for part in known if part is not None]
    return reduce(and_, parts) if parts else None


@dataclass(frozen=True)
class Opened:
    """One scan of a table. `bytes`: size of the opened files; `column_bytes`: size of the columns
    read from them; `all_files` and `all_bytes`: number and size of the snapshot's files.
    `condition`: the pushed-down condition that chose the files, or None."""

    table: str
    columns: tuple[str, ...]
    condition: str | None
    files: int
    all_files: int
    bytes: int
    all_bytes: int
    column_bytes: int


def opened(read: Iterable[TableFiles]) -> list[Opened]:
    """Return the scans of queries that have ended. Opens every manifest of the tables. Raises
    OSError."""
    found = []
    for planned in read:
        everything = planned.whole().select()
        found += [_opened(planned, scan, everything) for scan in planned.scans]
    return found


def _opened(planned: TableFiles, scan: Scan, everything: Sequence[DataFile]) -> Opened:
    read = {c for c in planned.columns.names if c in scan.columns or c in (scan.condition or "")}
    schema = planned.table.schema()
    ids = {
        id
        for id in schema.field_ids
        if (schema.find_column_name(id) or "").partition(".")[0] in read
    }
    return Opened(
        planned.name,
        tuple(c for c in planned.columns.names if c in read),
        scan.condition,
        len(scan.files),
        len(everything),
        sum(file.file_size_in_bytes for file in scan.files),
        sum(file.file_size_in_bytes for file in everything),
        sum(
            size
            for file in scan.files
            for id, size in (file.column_sizes or {}).items()
            if id in ids
        ),
    )


T = TypeVar("T")

_PARQUET = ds.ParquetFileFormat()
_NOWHERE = LocalFileSystem()


@contextmanager
def connected(memory: str | None = None) -> Iterator[duckdb.DuckDBPyConnection]:
    """Open a new connection, in UTC. Data beyond `memory` (default: most of the machine's) spills
    to a temporary folder."""
    with temporary_folder("query") as folder:
        connection = duckdb.connect(":memory:")
        try:
            connection.execute("SET TimeZone = 'UTC'")
            connection.execute(f"SET temp_directory = '{folder}'")
            if memory is not None:
                connection.execute(f"SET memory_limit = '{memory}'")
                connection.execute("SET preserve_insertion_order = false")
            yield connection
        finally:
            connection.close()


def quoted(identifier: str) -> str:
    return '"' + identifier.replace('"', '""') + '"'


def key_part(column: str) -> str:
    """Return SQL for a column of a key: an empty text is no part of it, like null."""
    return f"CASE WHEN CAST({column} AS VARCHAR) <> '' THEN {column} END"


def quoted_table(name: str) -> str:
    """Return a table's name with quotes: a namespace may be a word of SQL, such as `default`."""
    namespace, _, table = name.rpartition(".")
    return f"{quoted(namespace)}.{quoted(table)}"


_GONE = (
    "`anabranch audit STREAM` names the file, its hour and the remedy, unless a program has "
    "expired the snapshot meanwhile: then run it again"
)


class _ManifestsUnreadable(OSError):
    """Manifests that cannot be read; `is_reading_failure` recognizes this class by its name."""


def is_reading_failure(error: Exception) -> bool:
    """Return whether a file could not be read. DuckDB wraps PyArrow's errors while it reads rows,
    and PyArrow wraps DuckDB's, so only the text remains."""
    said = str(error).partition("\n")[0]
    signs = ("reading the stream registered as", _ManifestsUnreadable.__name__)
    return (
        isinstance(error, duckdb.IOException)
        or said.startswith("IO Error")
        or any(sign in said for sign in signs)
    )


@contextmanager
def reading_failures(expected: str, remedy: str = " (run it again)") -> Iterator[None]:
    """Raise Transient if DuckDB or PyArrow cannot read a file within the block, FileGone if storage
    does not have it; other errors pass unchanged."""
    try:
        yield
    except UnicodeDecodeError as error:
        # DuckDB cuts the value in its error's text by bytes, perhaps within a character.
        raise duckdb.ConversionException(
            "expected values of another form, found one that is too long to be shown; TRY(…) and "
            "TRY_CAST(…) give null in its place"
        ) from error
    except (duckdb.Error, pa.ArrowException, OSError) as error:
        if not is_reading_failure(error):
            raise
        if reports_missing_file(error):
            found = f"found that storage does not have one: {str(error).splitlines()[0]}"
            raise FileGone(f"{expected}, {found}; {_GONE}") from error
        raise Transient(f"{expected}, found: {error}{remedy}") from error


def columns_only(table: Table) -> ds.Dataset:
    return ds.dataset(table.schema().as_arrow().empty_table())


class ListedDataset(ds.FileSystemDataset):  # type: ignore[misc]
    """The columns of a table, for a statement that lists tables. A scan raises ValueError."""

    def scanner(self, *_: Any, **__: Any) -> Any:
        raise ValueError(
            "expected the name of each table in the statement, found one that the statement "
            "composes; write it out"
        )


def listed(columns: pa.Schema) -> ds.Dataset:
    return ListedDataset([], columns, _PARQUET, _NOWHERE)


@dataclass(frozen=True)
class Scan:
    """A scan of a table: projected columns, pushed-down condition, files left to open."""

    columns: tuple[str, ...]
    condition: str | None
    files: tuple[DataFile, ...]


@dataclass(frozen=True)
class TableFiles:
    """The data files of a table's snapshot (the table object's, or `snapshot_id`) for all ingest
    hours, or only for `hours`, except hours in `without`. `listed`: the files, if already known.
    Manifests are opened when needed; each scan adds an entry to `scans`."""

    name: str
    table: Table
    snapshot_id: int | None
    hours: Collection[str] | None
    manifests: tuple[HourManifest, ...]
    without: frozenset[str] = frozenset()
    listed: Sequence[DataFile] | None = None
    scans: list[Scan] = dataclasses.field(default_factory=list)

    @cached_property
    def columns(self) -> pa.Schema:
        schema: pa.Schema = self.table.schema().as_arrow()
        return schema

    def whole(self) -> TableFiles:
        """Return the files of all hours, without scans."""
        return replace(self, hours=None, without=frozenset(), listed=None, scans=[])

    def select(self, condition: pc.Expression | None = None) -> Sequence[DataFile]:
        """Return the files that may contain a row that meets the condition. Raises OSError."""
        schema, specs = self.table.schema(), self.table.specs()
        # A column is in the condition only if its name is in the text.
        compared = pa.schema([column for column in self.columns if column.name in str(condition)])

        def guarantee_of(manifest: HourManifest) -> pc.Expression | None:
            spec = specs[manifest.manifest.partition_spec_id]
            return manifest_guarantee(schema, compared, spec, manifest.manifest)

        files = self.listed
        if files is None:
            files = self._read(self._satisfiable(self._of_hours(), guarantee_of, condition))
        # A thousand guarantees take a tenth of a second: first those of many files at once.
        length = isqrt(len(files)) or 1
        runs: Sequence[Sequence[DataFile]] = [
            files[i : i + length] for i in range(0, len(files), length)
        ]
        if len(runs) > 1:
            runs = self._satisfiable(
                runs, lambda run: bounds_guarantee(schema, compared, run), condition
            )
        return self._satisfiable(
            [file for run in runs for file in run],
            lambda f: file_guarantee(schema, compared, specs[f.spec_id], f),
            condition,
            lambda f: bucket_cases(schema, compared, specs[f.spec_id], f, str(condition)),
        )

    def _read(self, manifests: Sequence[HourManifest]) -> list[DataFile]:
        try:
            read = read_entries(self.table.io, [m.manifest for m in manifests])
            files = [entry.data_file for entries in read for entry in entries]
        except OSError as error:
            raise _ManifestsUnreadable(
                f"expected the manifests of {self.name}, found: {error}"
            ) from error
        if self.hours is not None:
            files = [file for file in files if hour_of_file(self.table, file) in self.hours]
        if self.without:
            files = [file for file in files if hour_of_file(self.table, file) not in self.without]
        return files

    def dataset(self, progress: Progress | None = None) -> ds.Dataset:
        """Return the rows as a dataset: a column that a file lacks is null, and types widen.
        `scans` records each scan; `progress` counts the files read. Raises Transient."""
        if not self.manifests:
            return columns_only(self.table)
        if not is_readable_by_name(self.table):
            try:
                files = self.select()
                self.scans.append(Scan(tuple(self.columns.names), None, tuple(files)))
                return ds.dataset(read_by_id(self.table.metadata, self.table.io, files))
            except OSError as error:
                raise Transient(
                    f"read {self.name}: expected its files, found: {error} (run it again)"
                ) from error
        made = _PlannedDataset([], self.columns, _PARQUET, _NOWHERE)
        made.planned, made.progress = self, progress
        return made

    def open(self, files: Sequence[DataFile]) -> ds.Dataset:
        """Return a dataset of only these files, on any storage."""
        return dataset_of(self.table.io, self.columns, files)

    def _of_hours(self) -> Sequence[HourManifest]:
        if self.hours is None:
            without = sorted(self.without)
            return [manifest for manifest in self.manifests if not manifest.is_within(without)]
        hours = sorted(self.hours)
        places = [(manifest, bisect_left(hours, manifest.first)) for manifest in self.manifests]
        return [manifest for manifest, i in places if i < len(hours) and hours[i] <= manifest.last]

    def _satisfiable(
        self,
        items: Sequence[T],
        guarantee_of: Callable[[T], pc.Expression | None],
        condition: pc.Expression | None,
        cases_of: Callable[[T], Sequence[pc.Expression | None]] = lambda _: (None,),
    ) -> Sequence[T]:
        """Return the items that may have a row that meets the condition, by PyArrow's
        simplification of the guarantees. `cases_of`: cases, one of which is true for each row."""
        if condition is None:
            return items
        cases = null_cases(self.columns, condition)
        # Files that are never opened, named by their index.
        fragments = [
            _PARQUET.make_fragment(str(i), _NOWHERE, partition_expression=all_of([known, *both]))
            for i, item in enumerate(items)
            for known in [guarantee_of(item)]
            for both in product(cases, cases_of(item))
        ]
        candidates = ds.FileSystemDataset(fragments, self.columns, _PARQUET, _NOWHERE)
        left = {int(fragment.path) for fragment in candidates.get_fragments(filter=condition)}
        return [items[i] for i in sorted(left)]


class _PlannedDataset(ds.FileSystemDataset):  # type: ignore[misc]
    """A dataset for DuckDB; a scanner's columns and condition choose its files."""

    planned: TableFiles
    progress: Progress | None

    def scanner(
        self, columns: Any = None, filter: pc.Expression | None = None, **options: Any
    ) -> Any:
        files = self.planned.select(filter)
        asked = tuple(columns if columns is not None else self.schema.names)
        self.planned.scans.append(
            Scan(asked, str(filter) if filter is not None else None, tuple(files))
        )
        scanner = self.planned.open(files).scanner(columns=columns, filter=filter, **options)
        if self.progress is None:
            return scanner
        self.progress.more(len(files))
        return FollowedScan(scanner, len(files), self.progress)


@dataclass(frozen=True)
class FollowedScan:
    """One scan of files, which DuckDB gets in place of a scanner."""

    scanner: ds.Scanner
    files: int
    progress: Progress

    @property
    def projected_schema(self) -> pa.Schema:
        return self.scanner.projected_schema

    def to_reader(self) -> pa.RecordBatchReader:
        """Return the scanner's batches, file by file, and count the files."""
        return pa.RecordBatchReader.from_batches(self.scanner.projected_schema, self._batches())

    def _batches(self) -> Iterator[pa.RecordBatch]:
        file, left = None, self.files
        for read in self.scanner.scan_batches():
            path = read.fragment.path
            ended = int(file is not None and path != file)
            self.progress.step(ended)
            file, left = path, left - ended
            yield read.record_batch
        self.progress.step(left)


def plan_files(
    name: str,
    table: Table,
    snapshot_id: int | None = None,
    hours: Collection[str] | None = None,
    without: frozenset[str] = frozenset(),
) -> TableFiles:
    """Return the files of the table object's snapshot, or of `snapshot_id`. Raises Refused for a
    table that has delete files, Transient when the manifest list cannot be read."""
    snapshot = (
        table.snapshot_by_id(snapshot_id) if snapshot_id is not None else table.current_snapshot()
    )
    try:
        manifests, others = list_manifests(table, snapshot) if snapshot is not None else ([], [])
    except OSError as error:
        raise Transient(
            f"read {name}: expected its manifests, found: {error} (run it again)"
        ) from error
    if with_deletes := [
        m.manifest_path for m in others if m.has_added_files() or m.has_existing_files()
    ]:
        raise Refused(
            f"read {name}: expected no delete files, found some in {with_deletes[0]}; only "
            "another writer adds them: read the table with an Iceberg engine, then rewrite its "
            "files"
        )
    return TableFiles(name, table, snapshot_id, hours, tuple(manifests), without)
