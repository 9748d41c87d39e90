"""Stage records in Python workers: each task decodes its records (`anabranch.decode`) and writes
the good ones and the dead letters to data files (`anabranch.iceberg.parquet_writer`). Its report is
the task's result, so that Spark delivers that of one successful attempt. Files of other attempts
are named by no report, and orphan removal deletes them.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import partial
from typing import TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray
from pyiceberg.schema import Schema
from pyiceberg.table import Table
from pyspark.sql import DataFrame, SparkSession

from anabranch.common.errors import Unexpected
from anabranch.config import Stream
from anabranch.config.sections import UNKNOWN_NAME_LENGTH
from anabranch.decode import (
    REFUSED_FIELD,
    Decoder,
    DecodeSpec,
    UnlistedSchema,
    WriterSchema,
    decode_spec,
    letters_of,
)
from anabranch.decode.inputs import assign_hours, check_hours
from anabranch.iceberg.parquet_writer import (
    OF_TIME,
    FileWriter,
    Output,
    Target,
    data_file_of,
    has_columns,
    target_of,
    write_all,
)
from anabranch.iceberg.staging import Written
from anabranch.offsets.hours import HourRange
from anabranch.protocol.publish import new_id
from anabranch.records import INPUT
from anabranch.records.hashes import PLACE, hash_keys

MOST_OF_RECORD, MOST_OF_TASK = 200, 10_000
"""Maximum number of names read from one record, and counted by one task."""
MOST_VALUE_BYTES = 65_536
"""Maximum bytes of a value that is kept as a sample."""

_SAMPLED = 200  # The names of a task whose values are kept.

Place = tuple[int, int]


@dataclass
class FoundName:
    """A name's number of records, first and last place (partition, offset), and the values of the
    first and the last record whose value is kept, by place."""

    records: int
    first: Place
    last: Place
    values: dict[Place, bytes] = field(default_factory=dict)

    def add(self, other: FoundName) -> None:
        self.records += other.records
        self.first, self.last = min(self.first, other.first), max(self.last, other.last)
        known = self.values | other.values
        self.values = {place: known[place] for place in {*_ends(known)}}


@dataclass
class UnknownNames:
    """The names, and the number of rows, or rows but for them, with unknown fields. Exact for the
    first MOST_OF_RECORD names of a record and MOST_OF_TASK of a task."""

    records: int = 0
    names: dict[str, FoundName] = field(default_factory=dict)
    _sampled: set[str] = field(default_factory=set)

    def add(self, names: Sequence[str], values: Mapping[Place, pa.BinaryScalar]) -> None:
        """Count names of records that have the same, given by place with their values. The first
        and the last value, of those that are given and small, are kept as samples."""
        self.records += len(values)
        places = sorted(values)
        kept = dict[Place, bytes]()
        for several in (places, reversed(places)):
            for place in several:
                value = values[place].as_py()
                if value is not None and len(value) <= MOST_VALUE_BYTES:
                    kept[place] = value
                    break
        found = FoundName(len(places), places[0], places[-1])
        for name in {name[:UNKNOWN_NAME_LENGTH] for name in names[:MOST_OF_RECORD]}:
            is_sampled = len(self.names) < _SAMPLED or name in self._sampled
            if is_sampled:
                self._sampled.add(name)
            if name in self.names or len(self.names) < MOST_OF_TASK:
                self._add(name, replace(found, values=kept if is_sampled else {}))

    @staticmethod
    def sum(several: Iterable[UnknownNames]) -> UnknownNames:
        total = UnknownNames()
        for one in several:
            total.records += one.records
            for name, found in one.names.items():
                total._add(name, found)
        return total

    def _add(self, name: str, found: FoundName) -> None:
        if (known := self.names.get(name)) is not None:
            known.add(found)
        else:
            self.names[name] = found


def _ends(values: dict[Place, bytes]) -> list[Place]:
    return [min(values), max(values)] if values else []


MOST_BYTES = 256 * 2**20
"""Approximate maximum size in memory of a file's rows that a task sorts, without their sorted copy
of a row group."""

_SLICE_ROWS = 65_536

T = TypeVar("T")
Batches = Iterable[pa.RecordBatch]
Task = Callable[[Batches], Batches]

REPORT = "report BINARY"
_REPORT_SCHEMA = pa.schema([("report", pa.binary())])


@dataclass(frozen=True)
class Tables:
    """A stream's table, as of a decision, and the table of its dead letters."""

    rows: Table
    letters: Table


@dataclass(frozen=True)
class TaskSpec:
    """The part of a stream's and its tables' settings that a task needs, and the `hours` of the
    records. `letters`: where dead letters go, with the `topic_id`. `order`: the columns by which a
    task sorts its rows, nulls first; then its report has the places in each file, and the hashes of
    the `key`, if any (`facts_of`). Picklable."""

    decode: DecodeSpec
    hours: tuple[HourRange, ...]
    target: Target
    letters: Target
    topic_id: str
    layer: str = "speed"
    order: tuple[str, ...] = ()
    key: tuple[str, ...] = ()
    most_bytes: int = MOST_BYTES


@dataclass
class TaskReport:
    """A task's files of rows and of dead letters, the number of records that it read, the schema
    ids that it was not given, and the names of unknown fields."""

    rows: list[Output] = field(default_factory=list)
    letters: list[Output] = field(default_factory=list)
    seen: int = 0
    unlisted: set[int] = field(default_factory=set)
    unknown: UnknownNames = field(default_factory=UnknownNames)

    def as_bytes(self) -> bytes:
        return pickle.dumps(self)

    @staticmethod
    def of(data: bytes) -> TaskReport:
        report: TaskReport = pickle.loads(data)
        return report


@dataclass(frozen=True)
class Certain:
    """The files of rows and of dead letters that tasks wrote, with the tasks' reports.

    `unknown_ids`: schema ids that tasks were not given. Then nothing else is complete.
    """

    written: Written
    letters: Written
    unknown_ids: frozenset[int] = frozenset()
    reports: tuple[TaskReport, ...] = ()


def task_spec(
    stream: Stream,
    tables: Tables,
    columns: Schema,
    schemas: Mapping[int, WriterSchema],
    hours: Sequence[HourRange],
    topic_id: str,
    secret: bytes | None,
    *,
    layer: str = "speed",
    order: Sequence[str] = (),
    key: Sequence[str] = (),
) -> TaskSpec | None:
    """Return how tasks read and write the stream's records, or None if Spark must write the rows:
    a table that only Spark's writer supports or whose columns differ from `columns`, the
    stream's. `secret`: of hashed columns."""
    target = target_of(tables.rows) if has_columns(tables.rows, columns) else None
    letters = target_of(tables.letters)
    if target is None or letters is None:
        return None
    # Unknown fields are counted once, with the hour.
    decode = decode_spec(stream, schemas, lists_unknown=layer == "batch", secret=secret)
    known = check_hours(hours)
    return TaskSpec(decode, known, target, letters, topic_id, layer, tuple(order), tuple(key))


def stage_certain(
    frame: DataFrame, spec: TaskSpec, tables: Tables, attempt: str, began: datetime
) -> Certain:
    """Write the records of `frame` (Kafka's columns) in tasks. Readers do not see them. Raises
    Spark's errors, and Unexpected if a record was not written."""
    rows = frame.selectExpr(*INPUT).mapInArrow(_certain_task(spec), REPORT).collect()
    return certain_from([TaskReport.of(bytes(row.report)) for row in rows], tables, attempt, began)


def stage_records(
    batches: Batches, spec: TaskSpec, tables: Tables, attempt: str, began: datetime
) -> Certain:
    """Write the records of batches (`anabranch.records.INPUT`) in this process, as one task does.
    Raises Unexpected like `stage_certain`."""
    task = CertainTask(spec)
    for batch in batches:
        task.read(batch)
    return certain_from([task.end()], tables, attempt, began)


def certain_from(
    reports: Sequence[TaskReport], tables: Tables, attempt: str, began: datetime
) -> Certain:
    """Return the result of the tasks of a micro-batch or an hour from their reports. Raises
    Unexpected if a record was not written."""
    rows = tuple(data_file_of(tables.rows, o) for report in reports for o in report.rows)
    letters = tuple(data_file_of(tables.letters, o) for report in reports for o in report.letters)
    certain = Certain(
        Written(attempt, began, rows),
        Written(new_id(), began, letters),
        frozenset(id for report in reports for id in report.unlisted),
        tuple(reports),
    )
    seen = sum(report.seen for report in reports)
    number = certain.written.rows + certain.letters.rows
    # Decision 21: a record that is neither a row nor a dead letter would be lost, since the publish
    # moves the position past it.
    if number != seen and not certain.unknown_ids:
        raise Unexpected(
            f"stage {attempt}: expected each of {seen} records to be a row or a dead letter, found "
            f"{certain.written.rows} rows and {certain.letters.rows} dead letters; none of it is "
            "published: start the job again, and report this"
        )
    return certain


def warm_up(spark: SparkSession) -> None:
    """Start the Python workers, so that the first micro-batch does not wait a second for them."""
    at_once = spark.sparkContext.defaultParallelism
    spark.range(at_once, numPartitions=at_once).mapInArrow(
        lambda batches: batches, "id BIGINT"
    ).collect()


class CertainTask:
    """A task's writer for one stream: of rows and of dead letters."""

    def __init__(self, spec: TaskSpec) -> None:
        self._spec, self._decoder = spec, Decoder(spec.decode)
        note, note_letters = (
            (partial(facts_of, key=spec.key), facts_of) if spec.order else (None, None)
        )
        self._files = FileWriter(spec.target, note)
        self._letters = FileWriter(spec.letters, note_letters)
        self._waiting, self._size = list[pa.Table](), 0
        self._report = TaskReport()

    def read(self, batch: pa.RecordBatch) -> None:
        """Decode the next records (`anabranch.records.INPUT`) and write them."""
        # Count before decoding, so that a record which the decoder drops is noticed.
        self._report.seen += len(batch)
        batch = assign_hours(batch, self._spec.hours)
        try:
            decoded = self._decoder.decode(batch)
        except UnlistedSchema as error:
            # Decision 65: the records are staged again with the schema. As dead letters they would
            # be lost for readers although the registry knows their schema.
            self._report.unlisted.update(error.ids)
            return
        self._write(decoded.good)
        if decoded.errors:
            letters = letters_of(batch, decoded, self._spec.topic_id, self._spec.layer)
            self._report.letters += write_all(self._letters, letters)
        by_names: dict[tuple[str, ...], list[int]] = {}
        for i, names in decoded.unknown.items():
            # A record without a row for another reason does not lack a column.
            if i not in decoded.errors or decoded.errors[i][0] == REFUSED_FIELD:
                by_names.setdefault(tuple(names), []).append(i)
        partitions, offsets, value = (batch.column(c) for c in ("partition", "offset", "value"))
        for alike, records in by_names.items():
            places = ((partitions[i].as_py(), offsets[i].as_py()) for i in records)
            values = {place: value[i] for place, i in zip(places, records, strict=True)}
            self._report.unknown.add(alike, values)

    def end(self) -> TaskReport:
        """Close the files. Return the task's report."""
        self._write_sorted()
        self._report.rows += self._files.close()
        self._report.letters += self._letters.close()
        return self._report

    def _write(self, rows: pa.Table) -> None:
        if not self._spec.order:
            self._report.rows += write_all(self._files, rows)
            return
        rows = rows.select(self._spec.target.schema.names).cast(self._spec.target.schema)
        self._waiting.append(rows)
        self._size += rows.nbytes
        if self._size > self._spec.most_bytes:
            self._write_sorted()

    def _write_sorted(self) -> None:
        """Write the waiting rows, sorted, to files of their own."""
        if not self._size:
            return
        # One chunk: rows are taken from it in slices, and Arrow would copy the chunks for each.
        rows = pa.concat_tables(self._waiting).combine_chunks()
        self._waiting, self._size = [], 0
        # By partition first, so that few files are open at once.
        partitions = self._spec.target.partitions.columns(rows, without=OF_TIME)
        names = [f"partition {i}" for i in range(len(partitions))]
        keyed = pa.table([*rows.columns, *partitions], [*rows.column_names, *names])
        keys = [(column, "ascending", "at_start") for column in (*names, *self._spec.order)]
        places = pc.sort_indices(keyed, sort_keys=keys)
        for start in range(0, len(rows), _SLICE_ROWS):
            some = rows.take(places.slice(start, _SLICE_ROWS))
            self._report.rows += write_all(self._files, some)
        self._report.rows += self._files.close()


def _certain_task(spec: TaskSpec) -> Task:
    def run(batches: Batches) -> Batches:
        task = CertainTask(spec)
        for batch in batches:
            task.read(batch)
        yield pa.RecordBatch.from_pylist([{"report": task.end().as_bytes()}], schema=_REPORT_SCHEMA)

    return run


def run_in_tasks(spark: SparkSession, tasks: Sequence[Callable[[], T]]) -> list[T]:
    """Run functions in a task each; return their results in order. Raises Spark's errors."""

    def run(batches: Batches) -> Batches:
        for number in (i for batch in batches for i in batch.column("id").to_pylist()):
            found = {"report": pickle.dumps(tasks[number]())}
            yield pa.RecordBatch.from_pylist([found], schema=_REPORT_SCHEMA)

    numbers = spark.range(len(tasks), numPartitions=max(1, len(tasks)))
    # Java would pickle collected rows, which takes longer than the tasks if results are large.
    reports = numbers.mapInArrow(run, REPORT).toArrow().column("report")
    return [pickle.loads(report.as_buffer()) for report in reports]


def rewrite_file(path: str, dropped: Mapping[int, np.ndarray], target: Target) -> list[Output]:
    """Write the rows of a file again, without those at the offsets `dropped` by partition."""
    files, outputs = FileWriter(target, facts_of), list[Output]()
    with target.io.new_input(path).open() as source:
        for some in pq.ParquetFile(source).iter_batches(_SLICE_ROWS):
            outputs += write_all(files, _without(pa.table(some), dropped))
    return outputs + files.close()


def _without(rows: pa.Table, dropped: Mapping[int, np.ndarray]) -> pa.Table:
    return rows.filter(pa.array(~is_at(rows, dropped)))


def is_at(places: pa.Table, offsets: Mapping[int, np.ndarray]) -> NDArray[np.bool_]:
    """Return for each place whether its offset is among `offsets` of its partition."""
    partitions, at = (places.column(name).to_numpy() for name in PLACE)
    found: NDArray[np.bool_] = np.zeros(len(places), bool)
    for p in np.unique(partitions).tolist():
        if p in offsets:
            of = partitions == p
            found[of] = np.isin(at[of], offsets[p])
    return found


def facts_of(rows: pa.Table, key: Sequence[str] = ()) -> pa.Table:
    """Return the places of rows, each as its difference from the one before, which compresses well;
    and the `hash` of their key, if there is one. `read_facts` reads them."""
    facts = _each_place(rows.select(PLACE), lambda values: np.diff(values, prepend=0))
    return facts.append_column("hash", hash_keys(rows, key).combine_chunks()) if key else facts


def read_facts(data: bytes | None) -> pa.Table:
    """Return the places of a file's rows, in its order, and the hashes of their keys, if any."""
    if data is None:
        return pa.table({name: pa.array([], pa.int64()) for name in PLACE})
    # The differences begin again with each batch.
    with pa.ipc.open_stream(data) as stream:
        return pa.concat_tables(_each_place(pa.table(batch), np.cumsum) for batch in stream)


def _each_place(facts: pa.Table, change: Callable[[np.ndarray], np.ndarray]) -> pa.Table:
    for i, name in enumerate(PLACE):
        values = change(facts.column(name).to_numpy().astype(np.int64))
        facts = facts.set_column(i, name, pa.array(values))
    return facts
