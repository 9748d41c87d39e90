"""The work of an import in tasks: count rows, find what repeats, write files. Tasks read a source
by PyArrow and write as those of the layers do; Spark runs them on its executors."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray
from pyspark.sql import SparkSession

from anabranch.common.arrays import find_sorted, groups_by_size
from anabranch.common.errors import AnabranchError, Terminal
from anabranch.common.remote_errors import lake_errors
from anabranch.decode.values import dates_of
from anabranch.iceberg.other_tables import Part
from anabranch.iceberg.parquet_writer import FileWriter, Output, Target, write_all
from anabranch.iceberg.rewriting import as_bits
from anabranch.lifecycle.importing.sources import (
    NUMBER,
    OF_KAFKA,
    PLACE,
    READ_FROM_KAFKA,
    TIME,
    CountedPart,
    Numbers,
    SourceReader,
    counts_by_hour,
    first_number,
    hours_of,
)
from anabranch.offsets.hours import from_number
from anabranch.protocol.imported import PARTITION
from anabranch.records.hashes import hash_keys, in_duckdb
from anabranch.records.staged import run_in_tasks

T = TypeVar("T")

HASH = "_import_hash"
# Each file that a task has to open takes longer than these rows.
_ROWS_A_FILE = 10_000


@dataclass(frozen=True)
class Workers:
    """`run(task, number)` yields the results of tasks 0 to `number` - 1, in order, and raises their
    errors. `at_once`: how many of them run at a time."""

    at_once: int
    run: Callable[[Callable[[int], Any], int], Iterator[Any]]


HERE = Workers(1, lambda task, number: map(task, range(number)))
"""This process."""


def on_spark(spark: SparkSession) -> Workers:
    """Return the executors of a session."""
    at_once = spark.sparkContext.defaultParallelism

    def run(task: Callable[[int], Any], number: int) -> Iterator[Any]:
        # Some at a time: for progress, and so that few results wait in the driver.
        for begin in range(0, number, 8 * at_once):
            end = min(number, begin + 8 * at_once)
            some = [partial(outcome, task, i) for i in range(begin, end)]
            for result in run_in_tasks(spark, some):
                if isinstance(result, AnabranchError):
                    raise result
                yield result

    return Workers(at_once, run)


def outcome(task: Callable[[int], T], number: int) -> T | AnabranchError:
    """Return a task's result or its error, whose type Spark would lose."""
    try:
        return task(number)
    except AnabranchError as error:
        return error


def count_parts(
    workers: Workers, reader: SourceReader, parts: Sequence[Part]
) -> Iterator[list[CountedPart]]:
    """Yield the parts with their numbers of rows by hour, some at a time, in order."""
    size = max(1, min(64, len(parts) // (4 * workers.at_once)))
    groups = [parts[at : at + size] for at in range(0, len(parts), size)]
    yield from workers.run(partial(_count, reader, groups), len(groups))


def _count(reader: SourceReader, groups: Sequence[Sequence[Part]], i: int) -> list[CountedPart]:
    return [reader.count(part) for part in groups[i]]


@dataclass(frozen=True)
class Window:
    """The rows of the hours from `first` to `last`, in hours since 1970: of `parts`, each with the
    numbers of its rows, by task."""

    reader: SourceReader
    parts: tuple[tuple[tuple[Part, Numbers], ...], ...]
    first: int
    last: int

    def read(self, i: int, columns: Sequence[str]) -> Iterator[pa.Table]:
        for part, numbers in self.parts[i]:
            yield from self.reader.read(part, numbers, columns, self.first, self.last)


def plan_window(
    workers: Workers,
    reader: SourceReader,
    counted: Sequence[CountedPart],
    first: int,
    last: int,
    late: NDArray[np.int64] | None = None,
) -> Window:
    """Return the rows of hours, for a few tasks of about equal size. `late`: the numbers of rows of
    later hours that count for `last`, after its own. Pure."""
    before, chosen, size = Counter[int](), list[tuple[Part, dict[int, int], int]](), 0
    for one in counted:
        # Only these hours: a task gets all of it.
        end = last if late is None else READ_FROM_KAFKA - 1
        hours = [hour for hour in one.rows if first <= hour <= end]
        if hours:
            rows = sum(one.rows[h] for h in hours) + _ROWS_A_FILE
            chosen.append((one.part, {h: before[h] for h in hours}, rows))
            size += rows
        before.update(one.rows)
    later = (late, first_number(last) + before[last]) if late is not None else ()
    # Consecutive parts have neighbouring hours, so that few files are written.
    groups = groups_by_size(chosen, lambda one: one[2], size // workers.at_once)
    parts = [tuple((part, Numbers(known, *later)) for part, known, _ in group) for group in groups]
    return Window(reader, tuple(parts), first, last)


def read_facts(
    workers: Workers, window: Window, key: tuple[str, ...], erased: tuple[str, ...]
) -> pa.Table:
    """Return the facts that decide which rows of a window are imported, ordered by number:
    `NUMBER`, `HASH` of the `key`, `PLACE` if the source has places, and the texts of the columns
    `erased`."""
    found = list(workers.run(partial(_facts, window, key, erased), len(window.parts)))
    rows = pa.concat_tables([_no_facts(erased), *found], promote_options="default")
    numbers = rows[NUMBER].to_numpy()
    return rows if (np.diff(numbers) > 0).all() else rows.take(pa.array(np.argsort(numbers)))


def _no_facts(erased: tuple[str, ...]) -> pa.Table:
    kinds = {NUMBER: pa.int64(), HASH: pa.int64(), **dict.fromkeys(PLACE, pa.int64())}
    kinds |= dict.fromkeys(erased, pa.string())
    return pa.schema(list(kinds.items())).empty_table()


def _facts(window: Window, key: tuple[str, ...], erased: tuple[str, ...], i: int) -> pa.Table:
    found = [_no_facts(erased)]
    for rows in window.read(i, [*dict.fromkeys([*key, *erased])]):
        hashes = hash_keys(rows, key) if key else pa.nulls(len(rows), pa.int64())
        # Most sources have no places, and nulls would be sent as numbers.
        places = {name: rows[name] for name in PLACE if rows[name].null_count < len(rows)}
        texts = {name: rows[name].cast(pa.string()) for name in erased}
        found.append(pa.table({NUMBER: rows[NUMBER], HASH: hashes, **places, **texts}))
    return pa.concat_tables(found[1:], promote_options="default") if found[1:] else found[0]


def read_keys(
    workers: Workers, window: Window, key: Sequence[str], at: NDArray[np.int64] | None = None
) -> pa.Table:
    """Return the keys of a window's rows, or of those with the numbers `at`, ordered by number."""
    found = workers.run(partial(_keys, window, tuple(key), at), len(window.parts))
    return pa.concat_tables([_no_keys(window, key), *found]).sort_by(NUMBER)


def _no_keys(window: Window, key: Sequence[str]) -> pa.Table:
    columns = [window.reader.schema.field(name).with_nullable(True) for name in key]
    return pa.schema([*columns, (NUMBER, pa.int64())]).empty_table()


def _keys(window: Window, key: tuple[str, ...], at: NDArray[np.int64] | None, i: int) -> pa.Table:
    found = [_no_keys(window, key)]
    for rows in window.read(i, key):
        rows = rows.select([*key, NUMBER])
        if at is not None:
            rows = rows.filter(pa.array(find_sorted(rows[NUMBER].to_numpy(), at) >= 0))
        found.append(rows.cast(found[0].schema))
    return pa.concat_tables(found)


@dataclass(frozen=True)
class WriteSpec:
    """The rows to write: those of a window without the numbers `dropped`, as rows of the table.
    `event_time`: the column of the event time, if any."""

    window: Window
    dropped: NDArray[np.int64]
    target: Target
    event_time: str | None


@dataclass(frozen=True)
class WrittenRows:
    """The files of a task. By hour, in hours since 1970: the number of rows that it read, and the
    checksum of those that it wrote."""

    outputs: tuple[Output, ...]
    seen: Mapping[int, int]
    checksums: Mapping[int, int]


def write_rows(workers: Workers, spec: WriteSpec) -> list[WrittenRows]:
    """Write rows, and read them back. Raises Terminal if the rows read back differ, Transient."""
    return list(workers.run(partial(_write, spec), len(spec.window.parts)))


def _write(spec: WriteSpec, i: int) -> WrittenRows:
    files, outputs, seen = FileWriter(spec.target), list[Output](), Counter[int]()
    written = Sums()
    with lake_errors(f"write rows to {spec.target.partitions.places.data_path}"):
        for found in spec.window.read(i, spec.window.reader.schema.names):
            numbers = found[NUMBER].to_numpy()
            seen.update(counts_by_hour(hours_of(numbers)))
            kept = find_sorted(numbers, spec.dropped) < 0
            rows = found if kept.all() else found.filter(pa.array(kept))
            if len(rows):
                rows = as_rows(rows, spec)
                written.add(rows)
                outputs += write_all(files, rows)
        outputs += files.close()
        there = Sums()
        for output in outputs:
            with spec.target.io.new_input(output.path).open() as source:
                for batch in pq.ParquetFile(source).iter_batches():
                    there.add(pa.table(batch))
    # Decision 56: an imported hour is final, so a fault of a writer would stay.
    if there != written:
        raise Terminal(
            f"import: expected to read the rows that were written to {len(outputs)} files in "
            f"{spec.target.partitions.places.data_path}, found others; nothing was published; "
            "report this"
        )
    return WrittenRows(tuple(outputs), seen, written.by_hour)


def as_rows(found: pa.Table, spec: WriteSpec) -> pa.Table:
    """Return rows of a source as rows of the table."""
    numbers, times = found[NUMBER].to_numpy(), found[TIME]
    hours = pa.array(hours_of(numbers)).dictionary_encode()
    names = pa.array(map(from_number, hours.dictionary.to_pylist()), pa.string())
    at = times if spec.event_time is None else pc.coalesce(found[spec.event_time], times)
    columns = {
        **{name: found[name] for name in spec.window.reader.schema.names},
        "kafka_partition": pa.array(np.full(len(found), PARTITION, np.int32)),
        "kafka_offset": found[NUMBER],
        "kafka_timestamp": pc.if_else(found[OF_KAFKA], times, None),
        "ingest_hour": names.take(hours.indices),
        "event_date": dates_of(at),
    }
    schema = spec.target.schema
    return pa.table([columns[name] for name in schema.names], names=schema.names).cast(schema)


@dataclass
class Sums:
    """The sums of the hashes of rows by hour, equal for the same rows in any order."""

    by_hour: Counter[int] = field(default_factory=Counter)

    def add(self, rows: pa.Table) -> None:
        hours = hours_of(rows["kafka_offset"].to_numpy())
        columns = {f"c{i}": _viewed(column) for i, column in enumerate(rows.columns)}
        total = f"sum(hash({', '.join(columns)}))::VARCHAR AS total"
        rows = pa.table({"hour": hours, **columns})
        sums = in_duckdb(f"SELECT hour, {total} FROM rows GROUP BY hour", rows=rows)
        for one in sums.to_pylist():
            self.by_hour[one["hour"]] = (self.by_hour[one["hour"]] + int(one["total"])) % 2**64


def _viewed(column: pa.ChunkedArray) -> pa.ChunkedArray:
    kind = as_bits(column.type)
    if kind == column.type:
        return column
    return pa.chunked_array([chunk.view(kind) for chunk in column.chunks], kind)
