"""Rows of data files: read in a table's current columns, in a task or in the driver; and rewriting
of many files as one, the same rows in the same physical schema, read back before the commit.

PyArrow reads and writes the rewritten files in the job's driver, batch by batch on one core. Memory
is bounded, and the other cores stay free for Spark.
"""

from __future__ import annotations

import io
import re
import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
import pyarrow.parquet as pq
from pyiceberg.expressions import AlwaysTrue
from pyiceberg.io import FileIO
from pyiceberg.io.pyarrow import ArrowScan
from pyiceberg.manifest import DataFile, FileFormat
from pyiceberg.table import FileScanTask, Table
from pyiceberg.table.metadata import TableMetadata

from anabranch.common.arrays import groups_by_size
from anabranch.common.errors import Terminal
from anabranch.common.remote_errors import lake_errors
from anabranch.iceberg.file_io import as_whole, for_tasks
from anabranch.iceberg.parquet_writer import codec_of, data_file_from, open_writer, with_leaves
from anabranch.iceberg.snapshot_writer import delete_quietly

_BATCH_ROWS = 65_536
# The memory of the rows of one row group.
_ROW_GROUP_BYTES = 32 * 2**20
# The maximum size of a file that is read in one request.
_WHOLE = 8 * 2**20
# Details in the Parquet library's schema text that do not describe the file.
_IGNORED = re.compile(r", is_from_converted_type=\w+|, force_set_converted_type=\w+")


class Stopped(Exception):
    """The job is stopping, so the file is incomplete."""


@dataclass(frozen=True)
class Rewritten:
    """A file with the rows of `sources`, in their order. No commit refers to it yet."""

    file: DataFile
    sources: tuple[DataFile, ...]


@dataclass(frozen=True)
class FilesBySchema:
    """Files that can be merged into one, and the physical schemas of the others by path."""

    same_schema: tuple[DataFile, ...]
    other_schemas: dict[str, str]


def group_by_schema(table: Table, files: Sequence[DataFile]) -> FilesBySchema:
    """Return the files with the most frequent schema, if PyArrow writes that schema unchanged, and
    the others.

    A file has the columns and types of its writer. Files with different schemas are not merged,
    because the schema distinguishes old rows from new ones (`serving_layer.layer_diff`).
    Raises Transient.
    """
    schemas: dict[str, str] = {}
    for data_file in files:
        with opened(table, data_file) as parquet:
            schemas[data_file.file_path] = schema_text(parquet)
            if schema_text(_written_empty(parquet.schema_arrow)) != schemas[data_file.file_path]:
                schemas[data_file.file_path] = f"alone: {data_file.file_path}"
    most, _ = Counter(schemas.values()).most_common(1)[0]
    same_schema = tuple(
        f for f in files if schemas[f.file_path] == most and not most.startswith("alone: ")
    )
    return FilesBySchema(
        same_schema, {f.file_path: schemas[f.file_path] for f in files if f not in same_schema}
    )


def schema_text(parquet: pq.ParquetFile) -> str:
    """Return a file's physical schema as text, with field ids."""
    # The first line is the object's address, the second the schema's name.
    return _IGNORED.sub("", "\n".join(str(parquet.schema).splitlines()[2:]))


def rewrite(
    table: Table, sources: Sequence[DataFile], is_stopped: Callable[[], bool] = lambda: False
) -> Rewritten:
    """Write the rows of `sources`, of one partition and one schema, to a new file, and read it
    back.

    Raises Terminal if the rows read back differ from those of the sources, Transient if storage
    does not answer, Stopped if `is_stopped` returns true. After an error the new file is deleted.
    """
    advice = "set `speed: {roll_up: false}` in the stream's file, start the speed layer again, and "
    new_file = _copy(
        table, "rolled", sources[0], lambda: read_batches(table, sources, is_stopped), advice
    )
    return Rewritten(new_file, tuple(sources))


def rewrite_kept(
    table: Table, source: DataFile, keep: Callable[[pa.RecordBatch], pa.BooleanArray]
) -> DataFile | None:
    """Write a file's rows for which `keep` is true to a new file, in their order, and read it back.
    Return None if there are none. Raises as `rewrite`."""

    def kept() -> Iterator[pa.RecordBatch]:
        return (batch.filter(keep(batch)) for batch in read_batches(table, (source,)))

    if not any(batch.num_rows for batch in kept()):
        return None
    return _copy(table, "kept", source, kept)


def _copy(
    table: Table,
    name: str,
    like: DataFile,
    rows: Callable[[], Iterable[pa.RecordBatch]],
    advice: str = "",
) -> DataFile:
    path = f"{like.file_path.rsplit('/', 1)[0]}/{name}-{uuid.uuid4().hex}.parquet"
    try:
        with lake_errors(f"rewrite {like.file_path} as {path}"):
            new_file = _write_like(table, path, like, rows())
            # Decision 15: read the new file back and compare it before any commit names it. A fault
            # of a writer would otherwise replace good rows.
            if not is_same(read_batches(table, (new_file,)), rows()):
                raise Terminal(
                    f"rewrite {like.file_path}: expected to read the same rows from {path}, found "
                    f"others; the new file was deleted, nothing was published; {advice}report this"
                )
    except BaseException:
        delete_quietly(table, [path])
        raise
    return new_file


def _write_like(
    table: Table, path: str, like: DataFile, batches: Iterable[pa.RecordBatch]
) -> DataFile:
    """Write a data file with the columns and the partition of another. Return its manifest entry,
    with the statistics of its footer. Raises OSError."""
    with opened(table, like) as parquet:
        schema, metadata = parquet.schema_arrow, parquet.metadata.metadata or {}
    # Keep the metadata of Iceberg's writer, but not Arrow's schema.
    kept = {k: v for k, v in metadata.items() if k != b"ARROW:schema"}
    groups = map(
        pa.Table.from_batches, groups_by_size(batches, lambda of: of.nbytes, _ROW_GROUP_BYTES)
    )
    with (
        table.io.new_output(path).create() as sink,
        open_writer(sink, schema, compression=codec_of(table)) as writer,
    ):
        writer.add_key_value_metadata(kept)
        for rows in groups:
            writer.write_table(rows, row_group_size=max(1, rows.num_rows))
    with table.io.new_input(path).open() as source:
        footer = pq.read_metadata(source)
    size = len(table.io.new_input(path))
    return data_file_from(table, path, size, footer, like.partition, like.spec_id)


def _written_empty(schema: pa.Schema) -> pq.ParquetFile:
    """Return a file without rows that PyArrow wrote with this schema."""
    sink = io.BytesIO()
    with open_writer(sink, schema):
        pass
    return pq.ParquetFile(sink)


def is_same(ones: Iterable[pa.RecordBatch], others: Iterable[pa.RecordBatch]) -> bool:
    """Return whether two streams of batches have the same rows in order, equal bit by bit."""
    ahead = [iter(ones), iter(others)]
    left: list[pa.RecordBatch | None] = [None, None]
    while True:
        for side, batches in enumerate(ahead):
            if left[side] is None:
                left[side] = next((b for b in batches if b.num_rows), None)
        one, other = left
        if one is None or other is None:
            return one is other
        rows = min(one.num_rows, other.num_rows)
        if not _equal(one.slice(0, rows), other.slice(0, rows)):
            return False
        left = [b.slice(rows) if b.num_rows > rows else None for b in (one, other)]


def _equal(one: pa.RecordBatch, other: pa.RecordBatch) -> bool:
    if one.schema.names != other.schema.names:
        return False
    for mine, theirs in zip(one.columns, other.columns, strict=True):
        # One side may have Arrow's large types for the same Parquet type.
        converted = theirs if theirs.type == mine.type else theirs.cast(mine.type)
        if not mine.view(as_bits(mine.type)).equals(converted.view(as_bits(converted.type))):
            return False
    return True


_BITS = {pa.float64(): pa.int64(), pa.float32(): pa.int32()}


def as_bits(kind: pa.DataType) -> pa.DataType:
    """Return the type with integers for floats: NaN never equals NaN, and -0.0 equals 0.0."""
    return with_leaves(kind, lambda leaf: _BITS.get(leaf, leaf))


def read_batches(
    table: Table, files: Sequence[DataFile], is_stopped: Callable[[], bool] = lambda: False
) -> Iterator[pa.RecordBatch]:
    """Yield the rows of files, in order. Raises Terminal unless a file has the rows of its manifest
    entry, Transient; Stopped if `is_stopped` returns true."""
    for data_file in files:
        rows = 0
        with opened(table, data_file) as parquet:
            for batch in parquet.iter_batches(batch_size=_BATCH_ROWS, use_threads=False):
                if is_stopped():
                    raise Stopped
                rows += batch.num_rows
                yield batch
        # Decision 15: a copy is compared with the same rows, so it would lack those not read here.
        if rows != data_file.record_count:
            raise Terminal(
                f"read {data_file.file_path}: expected the {data_file.record_count} rows of its "
                f"manifest entry, found {rows}; nothing was published; rebuild the file's hour: "
                "`anabranch batch STREAM --hour HOUR --restate`; until then, the speed layer runs "
                "with `speed: {roll_up: false}` in the stream's file"
            )


def opened(table: Table, data_file: DataFile) -> pq.ParquetFile:
    """Open a data file, a small one by one request. Raises Terminal (no Parquet), Transient."""
    if data_file.file_format != FileFormat.PARQUET:
        raise Terminal(
            f"read {data_file.file_path}: expected Parquet, found {data_file.file_format.name}, "
            "as the table's property write.format.default was when it was written; unset that "
            "property, then rebuild the file's hour: `anabranch batch STREAM --hour HOUR --restate`"
        )
    with lake_errors(f"read {data_file.file_path}"):
        if data_file.file_size_in_bytes > _WHOLE:
            return pq.ParquetFile(table.io.new_input(data_file.file_path).open())
        with as_whole(table.io, data_file.file_path).open() as source:
            return pq.ParquetFile(pa.BufferReader(source.read()))


# PyArrow reads some batches of so many rows ahead, and some files, since small ones take requests.
_ROWS, _AHEAD, _FILES_AHEAD = 16_384, 2, 4
_PARQUET = ds.ParquetFileFormat()


@dataclass(frozen=True)
class RowReader:
    """Reads rows of a table's files, with its columns (`schema`). `metadata`: the table's, if a
    column was renamed, so that columns are found by their ids. Picklable."""

    io: FileIO
    schema: pa.Schema
    metadata: TableMetadata | None

    @staticmethod
    def of(table: Table) -> RowReader:
        metadata = None
        if not is_readable_by_name(table):
            history = dict[str, Any](snapshots=[], snapshot_log=[], metadata_log=[], refs={})
            metadata = table.metadata.model_copy(update=history)
        return RowReader(for_tasks(table.io), table.schema().as_arrow(), metadata)

    def read(
        self,
        files: Sequence[DataFile],
        columns: Sequence[str] | None = None,
        condition: pc.Expression | None = None,
    ) -> pa.RecordBatchReader:
        """Return the rows of files, some at a time."""
        options = {"columns": columns and [*columns], "filter": condition, "batch_size": _ROWS}
        if self.metadata is not None:
            rows = ds.dataset(read_by_id(self.metadata, self.io, files))
            return rows.scanner(**options).to_reader()
        scanner = dataset_of(self.io, self.schema, files).scanner(
            **options, batch_readahead=_AHEAD, fragment_readahead=_FILES_AHEAD
        )
        return scanner.to_reader()


def read_by_id(metadata: TableMetadata, io: FileIO, files: Iterable[DataFile]) -> pa.Table:
    """Return the rows of files. PyIceberg reads by field id: renamed columns are right."""
    scan = ArrowScan(metadata, io, metadata.schema(), AlwaysTrue())
    return scan.to_table([FileScanTask(file) for file in files])


def is_readable_by_name(table: Table) -> bool:
    """Return whether each column has one name and one field id in all of a table's schemas."""
    pairs = {
        (schema.find_field(column).field_id, column)
        for schema in table.schemas().values()
        for column in schema.column_names
    }
    return (
        len({field_id for field_id, _ in pairs})
        == len(pairs)
        == len({column for _, column in pairs})
    )


def dataset_of(io: Any, schema: pa.Schema, files: Iterable[DataFile]) -> ds.FileSystemDataset:
    """Return a dataset of only these files, on any storage, with columns by name: a column that a
    file lacks is null, and types widen."""
    fragments = []
    for file in files:
        scheme, netloc, path = io.parse_location(file.file_path, io.properties)
        file_system = io.fs_by_scheme(scheme, netloc)
        # With its size given, opening a file takes one request less.
        fragments.append(
            _PARQUET.make_fragment(path, file_system, file_size=file.file_size_in_bytes)
        )
    return ds.FileSystemDataset(fragments, schema, _PARQUET)
