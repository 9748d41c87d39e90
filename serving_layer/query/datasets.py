"""A table's files for DuckDB: a PyArrow dataset of the planned data files, and a connection that spills to disk.

No table holds a delete file, so the planned data files are the table. They are read through the table's own file system
and credentials, with projection and filter push-down, and nothing is downloaded.
"""

from __future__ import annotations

import tempfile
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import duckdb
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
from pyiceberg.expressions import AlwaysTrue, In

from anabranch.errors import Refused, Transient

if TYPE_CHECKING:
    from pyiceberg.table import FileScanTask, Table

_SECONDS = {"hour": 3600, "day": 86400}


@contextmanager
def connected(memory: str | None = None) -> Iterator[duckdb.DuckDBPyConnection]:
    """A connection of its own, in UTC. What is larger than `memory` (default: most of the machine's) spills to a
    folder that is gone afterwards."""
    with tempfile.TemporaryDirectory(prefix="anabranch-query-") as folder:
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


def is_reading_failure(error: duckdb.Error) -> bool:
    """DuckDB wraps what PyArrow raises while the rows flow; its text is all that is left of it."""
    return isinstance(error, duckdb.IOException) or "reading the stream registered as" in str(error).partition("\n")[0]


def columns_only(table: Table) -> ds.Dataset:
    return ds.dataset(table.schema().as_arrow().empty_table())


def dataset(name: str, table: Table, snapshot_id: int | None = None, hours: Collection[str] = ()) -> ds.Dataset:
    """The table's files as one dataset of its current columns: a column that a file lacks is null, types widen.

    Of the snapshot that the object holds, or of `snapshot_id`; of all ingest hours, or of `hours` alone. Raises Refused
    for a table that has delete files, Transient when the manifests could not be read.
    """
    scan = table.scan(In(term="ingest_hour", literals=set(hours)) if hours else AlwaysTrue(), snapshot_id=snapshot_id)
    try:
        tasks = list(scan.plan_files())
    except OSError as error:
        raise Transient(f"read {name}: expected its manifests, found: {error} (run it again)") from error
    if with_deletes := [task.file.file_path for task in tasks if task.delete_files]:
        raise Refused(
            f"read {name}: expected it to hold no delete files, found some for {with_deletes[0]}; "
            "only another writer adds them: read the table with an Iceberg engine, then rewrite its files"
        )
    if not tasks:
        return columns_only(table)
    if not _readable_by_name(table):
        # PyIceberg reads by field id: right for a renamed column too, but the whole table goes through memory.
        return ds.dataset(scan.to_arrow())
    columns = table.schema().as_arrow()
    file_io: Any = table.io
    schemes = {file_io.parse_location(task.file.file_path, file_io.properties)[:2] for task in tasks}
    if len(schemes) != 1:
        raise Refused(f"read {name}: expected its files in one place, found {sorted(map('://'.join, schemes))}")
    file_system = file_io.fs_by_scheme(*schemes.pop())
    parquet = ds.ParquetFileFormat()
    fragments = [
        parquet.make_fragment(
            file_io.parse_location(task.file.file_path, file_io.properties)[2],
            file_system,
            partition_expression=_known_of(table, task, columns),
            file_size=task.file.file_size_in_bytes,  # spares a request for each file
        )
        for task in tasks
    ]
    return ds.FileSystemDataset(fragments, columns, parquet, file_system)


def _readable_by_name(table: Table) -> bool:
    """Whether every column, nested ones too, has kept one name and one field id over all of the table's schemas."""
    pairs = {
        (schema.find_field(column).field_id, column)
        for schema in table.schemas().values()
        for column in schema.column_names
    }
    return len({field_id for field_id, _ in pairs}) == len(pairs) == len({column for _, column in pairs})


def _known_of(table: Table, task: FileScanTask, columns: pa.Schema) -> pc.Expression | None:
    """What the file's partition says of its rows, so that a filter skips the file without opening it."""
    spec = table.specs()[task.file.spec_id]
    known = None
    for position, field in enumerate(spec.fields):
        value = task.file.partition[position]
        column = table.schema().find_column_name(field.source_id)
        if value is None or column is None or column not in columns.names:
            continue
        kind, transform = columns.field(column).type, str(field.transform)
        if transform == "identity":
            says = pc.field(column) == pa.scalar(value, kind)
        elif transform in _SECONDS and pa.types.is_timestamp(kind):
            micros = _SECONDS[transform] * 1_000_000
            start, end = pa.scalar(value * micros, kind), pa.scalar((value + 1) * micros, kind)
            says = (pc.field(column) >= start) & (pc.field(column) < end)
        else:
            continue
        known = says if known is None else known & says
    return known
