"""A PyArrow writer of Parquet files that no snapshot refers to yet
(`anabranch.iceberg.staging.Written`). It runs in tasks; a later publish adds the files. Each
attempt of a task writes files with unique names, in the folders of Iceberg's own writer, so that
orphan removal finds them.

`Partitioning` has the partitions of rows, by the spec that `apply` made: values as in manifests,
and the folders of files.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any
from urllib.parse import quote_plus

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray
from pyiceberg.io import FileIO
from pyiceberg.io.pyarrow import (
    StatisticsCollector,
    compute_statistics_plan,
    data_file_statistics_from_parquet_metadata,
    parquet_path_to_id_mapping,
    pyarrow_to_schema,
    schema_to_pyarrow,
)
from pyiceberg.manifest import DataFile, DataFileContent, FileFormat
from pyiceberg.partitioning import PartitionField, PartitionSpec, partition_record_value
from pyiceberg.schema import Schema
from pyiceberg.table import Table
from pyiceberg.table.locations import LocationProvider, load_location_provider
from pyiceberg.transforms import BucketTransform, IdentityTransform, Transform, TruncateTransform
from pyiceberg.typedef import Record

from anabranch.config.sections import parse_field
from anabranch.iceberg.file_io import for_tasks
from anabranch.iceberg.manifests import own_spec_id
from anabranch.iceberg.staging import MOST_OPEN_FILES

OF_TIME = ("event_date", "ingest_hour")
"""The partition fields that each table of rows has."""

_LONGEST = 64
"""Characters of a value in a file's path: a system limits the length of a path, and a record may
have any value."""

_PLACES = {"write.data.path", "write.object-storage.path", "write.folder-storage.path"}
_FLAT = "write.object-storage.partitioned-paths"
_KINDS = (IdentityTransform, BucketTransform, TruncateTransform)


@dataclass(frozen=True)
class Partitioning:
    """How a table's rows are divided into files. `is_flat`: paths lack the partition. Picklable."""

    spec: PartitionSpec
    schema: Schema
    places: LocationProvider
    is_flat: bool

    def columns(self, rows: pa.Table, without: Sequence[str] = ()) -> list[pa.ChunkedArray]:
        """Return the partition values of rows by field, except the fields `without`."""
        return [self._column(rows, f) for f in self.spec.fields if f.name not in without]

    def split(self, rows: pa.Table) -> Iterator[tuple[tuple[Any, ...], NDArray[np.int64] | None]]:
        """Yield each partition's values and its rows' indexes, ascending; None for all rows."""
        if not len(rows):
            return
        columns = self.columns(rows)
        groups = _groups(columns, len(rows))
        for chosen in groups:
            first = 0 if chosen is None else int(chosen[0])
            values = zip(self.spec.fields, columns, strict=True)
            yield (
                tuple(
                    partition_record_value(field, column[first].as_py(), self.schema)
                    for field, column in values
                ),
                chosen,
            )

    def path(self, values: Sequence[Any], name: str) -> str:
        """Return the path of a file of a partition, in the folders of Iceberg's own writers."""
        if self.is_flat:
            return str(self.places.new_data_location(name))
        kinds = self.spec.partition_type(self.schema).fields
        texts = (
            field.transform.to_human_string(kind.field_type, value)
            for field, kind, value in zip(self.spec.fields, kinds, values, strict=True)
        )
        folders = (
            f"{quote_plus(field.name, safe='')}={quote_plus(text, safe='')[:_LONGEST]}"
            for field, text in zip(self.spec.fields, texts, strict=True)
        )
        return str(self.places.new_data_location("/".join((*folders, name))))

    def _column(self, rows: pa.Table, field: PartitionField) -> pa.ChunkedArray:
        source = self.schema.find_field(field.source_id)
        values = rows.column(source.name)
        transformed = field.transform.pyarrow_transform(source.field_type)(values)
        if isinstance(transformed, pa.ChunkedArray):
            return transformed
        return pa.chunked_array([transformed])


def partitioning_of(table: Table) -> Partitioning | None:
    """Return how our writers divide a table's rows; None if only Iceberg's own can."""
    spec = table.specs()[own_spec_id(table)]
    if not all(isinstance(f.transform, _KINDS) for f in spec.fields):
        return None
    properties = table.metadata.properties
    has_objects, has_folders = (
        properties.get(name, default).lower() == "true"
        for name, default in (("write.object-storage.enabled", "false"), (_FLAT, "true"))
    )
    # There Iceberg puts the table's name into each path, by which orphans of a folder that tables
    # share are found; PyIceberg does not.
    if has_objects and _PLACES & properties.keys():
        return None
    places = load_location_provider(table.metadata.location, properties)
    return Partitioning(spec, table.schema(), places, has_objects and not has_folders)


def spec_of(schema: Schema, by: Iterable[str]) -> PartitionSpec:
    """Return a new table's spec, of fields as in `partition:` of a stream's file."""
    return PartitionSpec(
        *(
            PartitionField(
                schema.find_field(field.column).field_id, 1000 + i, _transform(field), field.name
            )
            for i, field in enumerate(map(parse_field, by))
        )
    )


def fields_of(table: Table) -> tuple[str, ...]:
    """Return the fields of the spec that `apply` made, as `spec_of` takes them."""
    schema, made = table.schema(), []
    for one in table.specs()[own_spec_id(table)].fields:
        name, transform = schema.find_column_name(one.source_id), one.transform
        if isinstance(transform, BucketTransform):
            made.append(f"bucket({transform.num_buckets}, {name})")
        elif isinstance(transform, TruncateTransform):
            made.append(f"truncate({transform.width}, {name})")
        else:
            made.append(str(name))
    return tuple(made)


def spark_columns(table: Table, catalog: str) -> list[str]:
    """Return Spark's expressions of the partition fields by other columns than those of time."""
    found = []
    for one in map(parse_field, fields_of(table)):
        if one.number:
            found.append(f"{catalog}.system.{one.transform}({one.number}, `{one.column}`)")
        elif one.column not in OF_TIME:
            found.append(f"`{one.column}`")
    return found


def _transform(field: Any) -> Transform[Any, Any]:
    if field.transform == "bucket":
        return BucketTransform(field.number)
    return TruncateTransform(field.number) if field.number else IdentityTransform()


def _groups(columns: Sequence[pa.ChunkedArray], rows: int) -> list[NDArray[np.int64]] | list[None]:
    """Return the row indexes of each combination of values, ascending; one None for a single."""
    codes: NDArray[np.int64] | None = None
    for column in columns:
        encoded = column.combine_chunks().dictionary_encode(null_encoding="encode")
        if len(encoded.dictionary) < 2:
            continue
        own = encoded.indices.to_numpy(zero_copy_only=False).astype(np.int64)
        # Numbered again after each column, so that no product overflows.
        codes = own if codes is None else codes * len(encoded.dictionary) + own
        codes = np.unique(codes, return_inverse=True)[1]
    if codes is None:
        return [None]
    order = np.argsort(codes, kind="stable")
    ends = np.flatnonzero(np.diff(codes[order])) + 1
    return np.split(order, ends)


# Prefix of the properties that select a manifest's statistics.
_METRICS = "write.metadata.metrics"

# The bytes of buffered rows above which each open file gets a row group.
_WAITING_BYTES = 64 * 2**20
_ID = re.compile(r"\b[0-9]+: ")


@dataclass(frozen=True)
class Target:
    """A task's settings to write a table's rows. Picklable."""

    io: FileIO
    partitions: Partitioning
    schema: pa.Schema
    codec: str


def target_of(table: Table) -> Target | None:
    """Return the settings to write a table's rows; None if only Iceberg's own writer can."""
    if "write.parquet.compression-level" in table.metadata.properties:
        return None
    return plain_target(table)


def plain_target(table: Table) -> Target | None:
    """Return the settings to write rows of a table, without the properties that only Iceberg's own
    writer supports; None if it does not support the partitioning."""
    if (partitions := partitioning_of(table)) is None:
        return None
    whole = pa.struct(list(schema_to_pyarrow(table.schema())))
    schema = pa.schema(list(with_leaves(whole, lambda kind: _SMALL.get(kind, kind), pa.list_)))
    return Target(for_tasks(table.io), partitions, schema, codec_of(table))


# Texts and bytes of 32-bit offsets, as batches have them.
_SMALL = {pa.large_string(): pa.string(), pa.large_binary(): pa.binary()}


def with_leaves(
    kind: pa.DataType,
    leaf: Callable[[pa.DataType], pa.DataType],
    large: Callable[[pa.Field], pa.DataType] = pa.large_list,
) -> pa.DataType:
    """Return the type with `leaf` of its innermost types, and with `large` of large lists."""

    def inside(field: pa.Field) -> pa.Field:
        return field.with_type(with_leaves(field.type, leaf, large))

    if pa.types.is_struct(kind):
        return pa.struct([inside(field) for field in kind])
    if pa.types.is_map(kind):
        return pa.map_(inside(kind.key_field), inside(kind.item_field))
    if pa.types.is_list(kind):
        return pa.list_(inside(kind.value_field))
    if pa.types.is_large_list(kind):
        return large(inside(kind.value_field))
    return leaf(kind)


def has_columns(table: Table, columns: Schema) -> bool:
    """Return whether a table has exactly these columns, by name, type and nullability."""
    return _kinds(table.schema()) == _kinds(columns)


def _kinds(schema: Schema) -> dict[str, tuple[str, bool]]:
    # Without the ids of nested fields, which the table has assigned.
    return {f.name: (_ID.sub("", str(f.field_type)), f.required) for f in schema.fields}


def has_own_layout(table: Table) -> bool:
    """Return whether a table's properties request a Parquet layout of Iceberg's own writer."""
    known = "write.parquet.compression-codec"
    return any(
        name.startswith("write.parquet.") and name != known for name in table.metadata.properties
    )


def codec_of(table: Table) -> str:
    """Return PyArrow's name of the table's compression."""
    codec = table.metadata.properties.get("write.parquet.compression-codec", "zstd")
    return "none" if codec == "uncompressed" else codec


def open_writer(sink: Any, schema: pa.Schema, **options: Any) -> pq.ParquetWriter:
    """Return a writer of files like those of Iceberg's own writer: without the Arrow schema."""
    return pq.ParquetWriter(
        sink, schema, store_schema=False, store_decimal_as_integer=True, **options
    )


@dataclass(frozen=True)
class Output:
    """A written file: its path, the values of its partition, bytes, and Parquet footer. `facts`:
    those of its rows that the writer was asked to note, as a compressed stream of Arrow data."""

    path: str
    partition: tuple[Any, ...]
    size: int
    footer: bytes
    facts: bytes | None = None


@dataclass
class _OpenFile:
    path: str
    partition: tuple[Any, ...]
    sink: Any
    parquet: pq.ParquetWriter
    footers: list[pq.FileMetaData] = field(default_factory=list)
    waiting: list[pa.Table] = field(default_factory=list)
    facts: list[pa.Table] = field(default_factory=list)


class FileWriter:
    """A writer with one file for each partition of the table. Files are complete once `close` has
    returned; later rows go to new files. `note`: the facts of rows to return with their file."""

    def __init__(self, target: Target, note: Callable[[pa.Table], pa.Table] | None = None) -> None:
        self._target, self._note = target, note
        self._open: dict[tuple[Any, ...], _OpenFile] = {}
        self._waiting = 0

    def write(self, rows: pa.Table) -> pa.Array | None:
        """Write rows with at least the table's columns. Return None, or a mask of the rows that
        were not written because they need more than MOST_OPEN_FILES files. Raises OSError."""
        left: NDArray[np.bool_] | None = None
        schema = self._target.schema
        rows_of_table = rows.select(schema.names).cast(schema)
        for partition, chosen in self._target.partitions.split(rows_of_table):
            if (to := self._file(partition)) is None:
                left = np.zeros(len(rows), bool) if left is None else left
                left[slice(None) if chosen is None else chosen] = True
                continue
            some = rows_of_table if chosen is None else _take(rows_of_table, chosen)
            to.waiting.append(some)
            self._waiting += some.nbytes
        if self._waiting > _WAITING_BYTES:
            for to in self._open.values():
                self._flush(to)
            self._waiting = 0
        return None if left is None else pa.array(left)

    def close(self) -> list[Output]:
        """Complete all files and return them. Raises OSError."""
        outputs = []
        for to in self._open.values():
            self._flush(to)
            to.parquet.close()
            size = to.sink.tell()
            to.sink.close()
            [metadata] = to.footers
            footer = pa.BufferOutputStream()
            metadata.write_metadata_file(footer)
            facts = _stream(to.facts) if to.facts else None
            outputs.append(
                Output(to.path, to.partition, size, footer.getvalue().to_pybytes(), facts)
            )
        self._open.clear()
        self._waiting = 0
        return outputs

    def _file(self, partition: tuple[Any, ...]) -> _OpenFile | None:
        if (known := self._open.get(partition)) is not None:
            return known
        # The caller writes these rows to later files, so they are not lost.
        if len(self._open) == MOST_OPEN_FILES:
            return None
        # Decision 21: a new name for each attempt of a task. The driver publishes the files of one
        # attempt; under one name, a slow earlier attempt would overwrite a published file.
        path = self._target.partitions.path(partition, f"{uuid.uuid4().hex}.parquet")
        footers: list[pq.FileMetaData] = []
        sink = self._target.io.new_output(path).create()
        schema, codec = self._target.schema, self._target.codec
        parquet = open_writer(sink, schema, compression=codec, metadata_collector=footers)
        self._open[partition] = opened = _OpenFile(path, partition, sink, parquet, footers)
        return opened

    def _flush(self, to: _OpenFile) -> None:
        if to.waiting:
            rows = pa.concat_tables(to.waiting)
            to.waiting.clear()
            to.parquet.write_table(rows, row_group_size=max(1, len(rows)))
            if self._note is not None:
                to.facts.append(self._note(rows))


def _take(rows: pa.Table, chosen: NDArray[np.int64]) -> pa.Table:
    """Return rows by their indexes, ascending; neighbours without a copy."""
    first, last = int(chosen[0]), int(chosen[-1])
    is_slice = last - first + 1 == len(chosen)
    return rows.slice(first, len(chosen)) if is_slice else rows.take(chosen)


def _stream(tables: Sequence[pa.Table]) -> bytes:
    sink, options = pa.BufferOutputStream(), pa.ipc.IpcWriteOptions(compression="zstd")
    with pa.ipc.new_stream(sink, tables[0].schema, options=options) as writer:
        for table in tables:
            writer.write_table(table)
    return bytes(sink.getvalue())


def write_all(files: FileWriter, rows: pa.Table) -> list[Output]:
    """Write rows with few files open at once; return the files that were closed."""
    closed: list[Output] = []
    while (mask := files.write(rows)) is not None:
        rows = rows.filter(mask)
        closed += files.close()
    return closed


def data_file_of(table: Table, output: Output) -> DataFile:
    """Return the manifest entry of an output."""
    footer = pq.read_metadata(pa.BufferReader(output.footer))
    partition = Record(*output.partition)
    return data_file_from(table, output.path, output.size, footer, partition, own_spec_id(table))


def data_file_from(
    table: Table, path: str, size: int, footer: pq.FileMetaData, partition: Record, spec_id: int
) -> DataFile:
    """Return the manifest entry of a Parquet file, with the statistics of its footer."""
    # Field metadata has the ids; schema metadata differs between writers.
    schema = footer.schema.to_arrow_schema().remove_metadata().serialize().to_pybytes()
    modes = tuple(
        (k, v) for k, v in sorted(table.metadata.properties.items()) if k.startswith(_METRICS)
    )
    statistics = data_file_statistics_from_parquet_metadata(
        footer, *_statistics_plan(schema, modes)
    )
    made = DataFile.from_args(
        content=DataFileContent.DATA,
        file_path=path,
        file_format=FileFormat.PARQUET,
        partition=partition,
        file_size_in_bytes=size,
        sort_order_id=None,
        equality_ids=None,
        key_metadata=None,
        **statistics.to_serialized_dict(),
    )
    made.spec_id = spec_id
    return made


# Cached for all streams of a process: a plan takes longer than the statistics of a small file.
@lru_cache(maxsize=1 << 10)
def _statistics_plan(
    schema: bytes, modes: tuple[tuple[str, str], ...]
) -> tuple[dict[int, StatisticsCollector], dict[str, int]]:
    """Return the statistics for this Arrow schema by the table's properties, and field ids."""
    ours = pyarrow_to_schema(pa.ipc.read_schema(pa.py_buffer(schema)))
    return compute_statistics_plan(ours, dict(modes)), parquet_path_to_id_mapping(ours)
