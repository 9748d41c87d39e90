"""Stage certain records with PyArrow, without Spark's reader and writer.

Spark passes each task's records to a Python worker. The worker reads them
(`anabranch.records.fast_json`, for Avro `fast_avro`) and writes them to data files
(`anabranch.iceberg.parquet_writer`). It reports the files and the records left to Spark: few or
none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime

import pyarrow as pa
from pyiceberg.schema import Schema
from pyiceberg.table import Table
from pyspark.sql import DataFrame, Row, SparkSession

from anabranch import records
from anabranch.common.errors import Unexpected
from anabranch.config import EventTime, Stream
from anabranch.config.columns import Column, can_workers_read
from anabranch.iceberg.parquet_writer import FileWriter, Output, Target, has_columns, target_of
from anabranch.iceberg.staging import Written
from anabranch.kafka.source import one_record
from anabranch.offsets.hours import HourRange, hour_of
from anabranch.offsets.partition_sql import arrays
from anabranch.records import packed_files
from anabranch.records.fast_avro import AvroRows, Fields
from anabranch.records.fast_json import CertainRows
from anabranch.records.formats import Format
from anabranch.spark.workers import can_use_workers

MOST_LEFT = 2_000
"""Maximum number of records of a micro-batch that workers may leave to Spark. With more, Spark
reads the whole micro-batch."""

_REMEDY = "none of it is published: start the speed layer again, and report this"

# A task reports one row per file, and one row for the records that it read and left.
REPORT = (
    f"{packed_files.REPORT}, seen BIGINT, left ARRAY<STRUCT<partition: INT, offset: BIGINT>>, "
    "unknown_ids ARRAY<BIGINT>"
)
_LEFT = pa.list_(pa.struct([("partition", pa.int32()), ("offset", pa.int64())]))
REPORT_SCHEMA = pa.schema(
    [
        *packed_files.REPORT_SCHEMA,
        ("seen", pa.int64()),
        ("left", _LEFT),
        ("unknown_ids", pa.list_(pa.int64())),
    ]
)
_Task = Callable[[Iterable[pa.RecordBatch]], Iterable[pa.RecordBatch]]


@dataclass(frozen=True)
class TaskSpec:
    """The part of a stream's and its table's settings that a task needs. Picklable. `schemas`: for
    Avro, the fields to read by schema id."""

    columns: tuple[Column, ...]
    event_time: EventTime | None
    target: Target
    takes_unknown: bool
    schemas: Mapping[int, Fields] | None = None


@dataclass(frozen=True)
class Certain:
    """The files that tasks wrote, the number of records read, and the offsets left to Spark by
    partition (None: too many).

    `unknown_ids`: schema ids that tasks did not know, so that they left the records; incomplete if
    there are many.
    """

    written: Written
    seen: int
    left: dict[int, list[int]] | None
    unknown_ids: frozenset[int] = frozenset()


def task_spec(
    stream: Stream, table: Table, columns: Schema, schemas: Mapping[int, Fields] | None = None
) -> TaskSpec | None:
    """Return how tasks read the stream's records, or None if Spark must read them: another format,
    unsupported types, selected columns, or a table whose columns differ from `columns`, the
    stream's. `schemas`: for Avro, the fields to read by schema id."""
    is_avro = stream.format.type == "avro"
    if (
        not (is_avro or stream.format.type == "json")
        or stream.select is not None
        or not can_workers_read(stream.columns)
    ):
        return None
    if (is_avro and any(column.rescues for column in stream.columns)) or not has_columns(
        table, columns
    ):
        return None
    target = target_of(table)
    if target is None:
        return None
    takes_unknown, known = stream.unknown != "refuse", dict(schemas or {}) if is_avro else None
    return TaskSpec(stream.columns, stream.event_time, target, takes_unknown, known)


def stage_certain(
    frame: DataFrame, spec: TaskSpec, table: Table, attempt: str, began: datetime
) -> Certain:
    """Write the certain records of `frame` (Kafka's columns and `ingest_hour`) in tasks. Readers do
    not see the rows. Raises Spark's errors, and Unexpected if a record was neither written nor
    left."""
    columns = frame.select("partition", "offset", "timestamp", "value", "ingest_hour")
    return certain_from(
        columns.mapInArrow(_certain_task(spec), REPORT).collect(), table, attempt, began
    )


def certain_from(reports: list[Row], table: Table, attempt: str, began: datetime) -> Certain:
    """Return the result of a micro-batch's tasks from their reports. Raises Unexpected if a record
    was neither written nor left."""
    seen, written = _totals(reports, table, attempt, began)
    unknown = frozenset(id for row in reports for id in row.unknown_ids or ())
    if seen - written.rows > MOST_LEFT:
        return Certain(written, seen, None, unknown)
    left: dict[int, list[int]] = {}
    for row in reports:
        for record in row.left or ():
            left.setdefault(record.partition, []).append(record.offset)
    if (number := sum(map(len, left.values()))) != seen - written.rows:
        raise Unexpected(
            f"stage {attempt}: expected each of {seen} records to be written or left to "
            f"Spark, found {written.rows} written and {number} left; {_REMEDY}"
        )
    return Certain(written, seen, left, unknown)


def stage_rows(
    rows: DataFrame, spec: TaskSpec, table: Table, attempt: str, began: datetime
) -> Written:
    """Write rows that Spark decoded, in the table's columns, in tasks. Readers do not see them.
    Raises Spark's errors, and Unexpected if the number of rows written differs from the number
    read."""
    seen, written = _totals(
        rows.mapInArrow(_rows_task(spec), REPORT).collect(), table, attempt, began
    )
    if written.rows != seen:
        raise Unexpected(
            f"stage {attempt}: expected {seen} rows written, found {written.rows}; {_REMEDY}"
        )
    return written


def records_at(frame: DataFrame, offsets: dict[int, list[int]]) -> DataFrame:
    return frame.where(f"array_contains(get({arrays(offsets)}, partition), offset)")


def warm_up(spark: SparkSession) -> None:
    """Start the Python workers, so that the first micro-batch does not wait a second for them."""
    if can_use_workers(spark):
        at_once = spark.sparkContext.defaultParallelism
        spark.range(at_once, numPartitions=at_once).mapInArrow(
            lambda batches: batches, "id BIGINT"
        ).collect()


def warm_up_decoder(spark: SparkSession, stream: Stream, form: Format) -> int:
    """Decode one broken record and discard it, so that Spark loads and compiles its decoder before
    a micro-batch needs it. Return the number of dead letters: one."""
    now = datetime.now(UTC)
    record = one_record(spark, b"{", now).cache()
    try:
        decoded = records.decode(
            records.assign_hours(record, [HourRange(hour_of(now), None)]), stream, form
        )
        return len(records.good(decoded, stream).collect()) + len(
            records.dead(decoded, "", "speed").collect()
        )
    finally:
        record.unpersist()


def _totals(reports: list[Row], table: Table, attempt: str, began: datetime) -> tuple[int, Written]:
    """Return the number of records that tasks read, and the files that they wrote."""
    files = packed_files.data_files(table, (row for row in reports if row.path is not None))
    return sum(row.seen or 0 for row in reports), Written(attempt, began, tuple(files))


class CertainTask:
    """A task's writer for one stream: it writes the certain records, and collects the offsets of
    the records that it leaves."""

    def __init__(self, spec: TaskSpec) -> None:
        self._rows: CertainRows | AvroRows = (
            CertainRows(spec.columns, spec.event_time, spec.takes_unknown)
            if spec.schemas is None
            else AvroRows(spec.columns, spec.event_time, spec.schemas)
        )
        self._files = FileWriter(spec.target)
        self._seen, self._left = 0, list[dict[str, int]]()

    def read(self, batch: pa.RecordBatch) -> None:
        """Read the next records (Kafka's columns and `ingest_hour`) and write the certain ones."""
        self._seen += len(batch)
        read = self._rows.read(batch)
        if len(read.left):
            self._left += batch.select(["partition", "offset"]).take(read.left).to_pylist()
        if (mask := self._files.write(read.rows)) is not None:
            places = read.rows.filter(mask).select(["kafka_partition", "kafka_offset"])
            self._left += places.rename_columns(["partition", "offset"]).to_pylist()

    def end(self) -> list[dict[str, object]]:
        """Close the files. Return the rows of the task's report."""
        rows = report_rows(self._files.close(), self._seen, self._left[: MOST_LEFT + 1])
        if isinstance(self._rows, AvroRows):
            rows[-1]["unknown_ids"] = sorted(self._rows.unknown_ids)
        return rows


def _certain_task(spec: TaskSpec) -> _Task:

    def run(batches: Iterable[pa.RecordBatch]) -> Iterable[pa.RecordBatch]:
        task = CertainTask(spec)
        for batch in batches:
            task.read(batch)
        yield _report(task.end())

    return run


def _rows_task(spec: TaskSpec) -> _Task:
    def run(batches: Iterable[pa.RecordBatch]) -> Iterable[pa.RecordBatch]:
        files, outputs, seen = FileWriter(spec.target), list[Output](), 0
        for batch in batches:
            seen += len(batch)
            outputs += packed_files.write_all(files, pa.table(batch))
        yield _report(report_rows([*outputs, *files.close()], seen))

    return run


def report_rows(
    outputs: list[Output], seen: int, left: Sequence[dict[str, int]] = ()
) -> list[dict[str, object]]:
    return [*map(asdict, outputs), {"seen": seen, "left": left}]


def _report(rows: list[dict[str, object]]) -> pa.RecordBatch:
    return pa.RecordBatch.from_pylist(rows, schema=REPORT_SCHEMA)
