"""Write the rows of pieces (`anabranch.records.packed`) to the files of an hour, in Python workers.

Each task sorts its rows and writes a file for each event date; it starts another file when the rows
take too much memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass

import pyarrow as pa
import pyarrow.compute as pc
from pyiceberg.manifest import DataFile
from pyiceberg.table import Table
from pyspark.sql import DataFrame, Row

from anabranch.iceberg.parquet_writer import FileWriter, Output, Target, data_file_of
from anabranch.records.packed import PLACE, ROWS, Batches, Task, as_bytes, tables

MOST_BYTES = 256 * 2**20
"""Approximate maximum size in memory of a file's rows in a task, without their sorted copy of a row
group."""

_SLICE_ROWS = 65_536

REPORT = "path STRING, day INT, hour STRING, size BIGINT, footer BINARY"
"""The columns of a task's report of its files."""
REPORT_SCHEMA = pa.schema(
    [
        ("path", pa.string()),
        ("day", pa.int32()),
        ("hour", pa.string()),
        ("size", pa.int64()),
        ("footer", pa.binary()),
    ]
)


@dataclass(frozen=True)
class WriteSpec:
    """The parameters of a task. `order`: the columns by which rows are sorted, nulls first.
    `dropped`: offsets of rows to leave out, by partition. Picklable."""

    target: Target
    order: tuple[str, ...]
    dropped: dict[int, pa.Array]
    most_bytes: int = MOST_BYTES


def dropped_places(places: pa.Table) -> dict[int, pa.Array]:
    """Return the offsets of a table of places, by partition."""
    partitions, offsets = (places.column(name).combine_chunks() for name in PLACE)
    return {p: offsets.filter(pc.equal(partitions, p)) for p in pc.unique(partitions).to_pylist()}


def write_files(
    pieces: DataFrame, others: DataFrame | None, tasks: int, spec: WriteSpec, table: Table
) -> list[DataFile]:
    """Write the certain rows of pieces, and Spark's rows in the table's columns, in `tasks` tasks.
    Return the files of one successful attempt of each task; no snapshot refers to them yet. Raises
    Spark's errors."""
    data = pieces.where(f"kind = '{ROWS}'").select("data")
    if others is not None:
        data = data.union(others.mapInArrow(_pack_rows, "data BINARY"))
    return data_files(table, data.coalesce(tasks).mapInArrow(_write_task(spec), REPORT).collect())


def data_files(table: Table, reports: Iterable[Row]) -> list[DataFile]:
    """Return the manifest entries of files of a table that tasks report (`REPORT`)."""
    return [
        data_file_of(table, Output(r.path, r.day, r.hour, r.size, bytes(r.footer))) for r in reports
    ]


def _pack_rows(batches: Batches) -> Batches:
    for batch in batches:
        yield pa.RecordBatch.from_pydict(
            {"data": pa.array([as_bytes(pa.table(batch))], pa.binary())}
        )


def _write_task(spec: WriteSpec) -> Task:
    def run(batches: Batches) -> Batches:
        waiting, size, outputs = list[pa.Table](), 0, list[Output]()
        for table in tables(batches):
            rows = (
                _kept(table, spec.dropped).select(spec.target.schema.names).cast(spec.target.schema)
            )
            waiting.append(rows)
            size += rows.nbytes
            if size > spec.most_bytes:
                outputs += _write_sorted(waiting, spec)
                waiting, size = [], 0
        outputs += _write_sorted(waiting, spec)
        yield pa.RecordBatch.from_pylist(
            [asdict(output) for output in outputs], schema=REPORT_SCHEMA
        )

    return run


def _kept(table: pa.Table, dropped: dict[int, pa.Array]) -> pa.Table:
    partitions, offsets = (table.column(name) for name in PLACE)
    for p in pc.unique(partitions).to_pylist():
        if p in dropped:
            is_dropped = pc.and_(pc.equal(partitions, p), pc.is_in(offsets, value_set=dropped[p]))
            table = table.filter(pc.invert(is_dropped))
            partitions, offsets = (table.column(name) for name in PLACE)
    return table


def _write_sorted(tables: Sequence[pa.Table], spec: WriteSpec) -> list[Output]:
    if not any(map(len, tables)):
        return []
    rows = pa.concat_tables(tables)
    places = pc.sort_indices(rows, sort_keys=[(c, "ascending", "at_start") for c in spec.order])
    files, outputs = FileWriter(spec.target), list[Output]()
    for start in range(0, len(rows), _SLICE_ROWS):
        outputs += write_all(files, rows.take(places.slice(start, _SLICE_ROWS)))
    return [*outputs, *files.close()]


def write_all(files: FileWriter, rows: pa.Table) -> list[Output]:
    """Write rows with few files open at once, whatever the number of partitions; return the files
    that were closed."""
    closed: list[Output] = []
    while (mask := files.write(rows)) is not None:
        rows = rows.filter(mask)
        closed += files.close()
    return closed
