"""Stage the records that are certain to be good without Spark's reader and writer: by PyArrow, in tasks.

Spark hands each task's records from Kafka to a Python worker, which reads them (`anabranch.records.fast_json`), writes
them to files (`anabranch.iceberg.parquet_writer`) and reports the files and the records that it left.
Those are few or none, and go the way of any record afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import pyarrow as pa

from anabranch import records
from anabranch.common.errors import Unexpected
from anabranch.iceberg.parquet_writer import FileWriter, Output, Target, data_file_of, target_of
from anabranch.iceberg.staging import Written
from anabranch.kafka.source import one_record
from anabranch.offsets.hours import HourRange, hour_of
from anabranch.offsets.partition_sql import arrays
from anabranch.records.fast_json import CertainRows, can_read
from anabranch.spark.settings import runs_here

if TYPE_CHECKING:
    from pyiceberg.schema import Schema
    from pyiceberg.table import Table
    from pyspark.sql import DataFrame, Row, SparkSession

    from anabranch.config import EventTime, Stream
    from anabranch.config.columns import Column
    from anabranch.records.formats import Format

MOST_LEFT = 2_000
_REMEDY = "nothing of it is published: start the speed layer again, and report this"
"""How many records of a micro-batch may be left to be read by Spark; with more, it reads all of them."""

SETTINGS = {
    "spark.python.daemon.module": "speed_layer.worker_daemon",
    # What a worker is handed at once.
    "spark.sql.execution.arrow.maxRecordsPerBatch": "10000",
    "spark.sql.execution.arrow.maxBytesPerBatch": str(16 * 2**20),
}
"""What a session is told whose tasks read and write so."""

# What a task tells: a row for each file, and one for the records that it saw and left.
_TOLD = (
    "path STRING, day INT, hour STRING, size BIGINT, footer BINARY, seen BIGINT, "
    "left ARRAY<STRUCT<partition: INT, offset: BIGINT>>"
)
_LEFT = pa.list_(pa.struct([("partition", pa.int32()), ("offset", pa.int64())]))
_TOLD_SCHEMA = pa.schema(
    [
        ("path", pa.string()),
        ("day", pa.int32()),
        ("hour", pa.string()),
        ("size", pa.int64()),
        ("footer", pa.binary()),
        ("seen", pa.int64()),
        ("left", _LEFT),
    ]
)
_Task = Callable[[Iterable[pa.RecordBatch]], Iterable[pa.RecordBatch]]


@dataclass(frozen=True)
class TaskSpec:
    """What a task has to know of the stream and its table. Picklable."""

    columns: tuple[Column, ...]
    event_time: EventTime | None
    target: Target
    takes_unknown: bool


@dataclass(frozen=True)
class Certain:
    """What tasks have written, how many records they saw, and by partition the offsets of those that they left; None
    for too many to tell."""

    written: Written
    seen: int
    left: dict[int, list[int]] | None


def task_spec(stream: Stream, table: Table, columns: Schema) -> TaskSpec | None:
    """How the stream's records are read by tasks; None where Spark has to read them: another format, other types, a
    table of other `columns` than the stream's."""
    if stream.format.type != "json" or not can_read(stream.columns) or _kinds(table.schema()) != _kinds(columns):
        return None
    target = target_of(table)
    if target is None:
        return None
    return TaskSpec(stream.columns, stream.event_time, target, takes_unknown=stream.unknown != "refuse")


def _kinds(schema: Schema) -> dict[str, tuple[str, bool]]:
    return {f.name: (str(f.field_type), f.required) for f in schema.fields}


def stage_certain(frame: DataFrame, spec: TaskSpec, table: Table, attempt: str, began: datetime) -> Certain:
    """Have the tasks of `frame` (Kafka's columns and `ingest_hour`) write what is certain; nobody sees the rows.

    Raises what Spark does, and Unexpected when the records that were seen are not those that were written or left.
    """
    told = _told(frame.selectExpr("partition", "offset", "timestamp", "value", "ingest_hour"), _certain_task(spec))
    seen, written = _seen(told), _written(told, table, attempt, began)
    if seen - written.rows > MOST_LEFT:
        return Certain(written, seen, None)
    left: dict[int, list[int]] = {}
    for row in told:
        for record in row.left or ():
            left.setdefault(record.partition, []).append(record.offset)
    if (number := sum(map(len, left.values()))) != seen - written.rows:
        raise Unexpected(
            f"stage {attempt}: expected each of {seen} records written or left, found {written.rows} and {number}; "
            f"{_REMEDY}"
        )
    return Certain(written, seen, left)


def stage_rows(rows: DataFrame, spec: TaskSpec, table: Table, attempt: str, began: datetime) -> Written:
    """Have tasks write rows that Spark has decoded, in the columns of the table; nobody sees them.

    Raises what Spark does, and Unexpected when other rows were written than were seen.
    """
    told = _told(rows, _rows_task(spec))
    seen, written = _seen(told), _written(told, table, attempt, began)
    if written.rows != seen:
        raise Unexpected(f"stage {attempt}: expected each of {seen} rows written, found {written.rows}; {_REMEDY}")
    return written


def only(frame: DataFrame, offsets: dict[int, list[int]]) -> DataFrame:
    """The records of these offsets, by partition."""
    return frame.where(f"array_contains(get({arrays(offsets)}, partition), offset)")


def warm_up(spark: SparkSession) -> None:
    """Start the workers, which takes a second that the first micro-batch would wait for otherwise."""
    if runs_here(spark.sparkContext.master):
        at_once = spark.sparkContext.defaultParallelism
        spark.range(at_once, numPartitions=at_once).mapInArrow(_no_task, "id BIGINT").collect()


def warm_up_decoder(spark: SparkSession, stream: Stream, form: Format) -> int:
    """Decode a record that is broken as the few are that the workers leave, to no effect: Spark loads and compiles what
    reads them, for which the micro-batch of the first one would wait otherwise. Returns how many dead letters it saw:
    one."""
    now = datetime.now(UTC)
    record = one_record(spark, b"{", now).cache()
    try:
        decoded = records.decode(records.assign_hours(record, [HourRange(hour_of(now), None)]), stream, form)
        return len(records.good(decoded, stream).collect()) + len(records.dead(decoded, "", "speed").collect())
    finally:
        record.unpersist()


def _no_task(batches: Iterable[pa.RecordBatch]) -> Iterable[pa.RecordBatch]:
    return batches


def _told(frame: DataFrame, task: _Task) -> list[Row]:
    return frame.mapInArrow(task, _TOLD).collect()


def _seen(told: list[Row]) -> int:
    return sum(row.seen or 0 for row in told)


def _written(told: list[Row], table: Table, attempt: str, began: datetime) -> Written:
    outputs = (Output(r.path, r.day, r.hour, r.size, bytes(r.footer)) for r in told if r.path is not None)
    return Written(attempt, began, tuple(data_file_of(table, output) for output in outputs))


def _certain_task(spec: TaskSpec) -> _Task:
    """What a worker does with the records of a task."""

    def run(batches: Iterable[pa.RecordBatch]) -> Iterable[pa.RecordBatch]:
        rows, files = CertainRows(spec.columns, spec.event_time, spec.takes_unknown), FileWriter(spec.target)
        seen, left = 0, list[dict[str, int]]()
        for batch in batches:
            seen += len(batch)
            read = rows.read(batch)
            if len(read.left):
                left += batch.select(["partition", "offset"]).take(read.left).to_pylist()
            if (mask := files.write(read.rows)) is not None:
                places = read.rows.filter(mask).select(["kafka_partition", "kafka_offset"])
                left += places.rename_columns(["partition", "offset"]).to_pylist()
        yield _tell(files.close(), seen, left[: MOST_LEFT + 1])

    return run


def _rows_task(spec: TaskSpec) -> _Task:
    def run(batches: Iterable[pa.RecordBatch]) -> Iterable[pa.RecordBatch]:
        files, outputs, seen = FileWriter(spec.target), list[Output](), 0
        for batch in batches:
            seen += len(batch)
            rows = pa.table(batch)
            # However many partitions there are, few files are open at once.
            while (mask := files.write(rows)) is not None:
                rows = rows.filter(mask)
                outputs += files.close()
        yield _tell([*outputs, *files.close()], seen)

    return run


def _tell(outputs: list[Output], seen: int, left: Sequence[dict[str, int]] = ()) -> pa.RecordBatch:
    rows: list[dict[str, object]] = [
        {"path": o.path, "day": o.day, "hour": o.hour, "size": o.size, "footer": o.footer} for o in outputs
    ]
    return pa.RecordBatch.from_pylist([*rows, {"seen": seen, "left": left}], schema=_TOLD_SCHEMA)
