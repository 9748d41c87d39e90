"""Stage records in Python workers: each task decodes its records (`anabranch.decode`) and writes
the good ones to data files (`anabranch.iceberg.parquet_writer`). It reports the files and the
records that it left: those without a row, which get dead letters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime

import pyarrow as pa
from pyiceberg.schema import Schema
from pyiceberg.table import Table
from pyspark.sql import DataFrame, Row, SparkSession

from anabranch.common.errors import Unexpected
from anabranch.config import Stream
from anabranch.decode import Decoder, DecodeSpec, UnlistedSchema, WriterSchema, decode_spec
from anabranch.iceberg.parquet_writer import FileWriter, Output, Target, has_columns, target_of
from anabranch.iceberg.staging import Written
from anabranch.offsets.partition_sql import arrays
from anabranch.records import INPUT, packed_files

MOST_LEFT = 2_000
"""Maximum number of records of a micro-batch whose places workers report. With more, Spark writes
the whole micro-batch."""

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
    """The part of a stream's and its table's settings that a task needs. Picklable."""

    decode: DecodeSpec
    target: Target


@dataclass(frozen=True)
class Certain:
    """The files that tasks wrote, the number of records read, and the offsets left to Spark by
    partition (None: too many).

    `unknown_ids`: schema ids that tasks were not given. Then nothing else is complete.
    """

    written: Written
    seen: int
    left: dict[int, list[int]] | None
    unknown_ids: frozenset[int] = frozenset()


def task_spec(
    stream: Stream,
    table: Table,
    columns: Schema,
    schemas: Mapping[int, WriterSchema],
    secret: bytes | None,
) -> TaskSpec | None:
    """Return how tasks read and write the stream's records, or None if Spark must write the rows:
    a table that only Spark's writer supports or whose columns differ from `columns`, the
    stream's. `secret`: of hashed columns."""
    target = target_of(table) if has_columns(table, columns) else None
    if target is None:
        return None
    return TaskSpec(decode_spec(stream, schemas, secret=secret), target)


def stage_certain(
    frame: DataFrame, spec: TaskSpec, table: Table, attempt: str, began: datetime
) -> Certain:
    """Write the good records of `frame` (Kafka's columns and `ingest_hour`) in tasks. Readers do
    not see the rows. Raises Spark's errors, and Unexpected if a record was neither written nor
    left."""
    columns = frame.selectExpr(*INPUT, "ingest_hour")
    return certain_from(
        columns.mapInArrow(_certain_task(spec), REPORT).collect(), table, attempt, began
    )


def certain_from(reports: list[Row], table: Table, attempt: str, began: datetime) -> Certain:
    """Return the result of a micro-batch's tasks from their reports. Raises Unexpected if a record
    was neither written nor left."""
    seen, written = _totals(reports, table, attempt, began)
    unknown = frozenset(id for row in reports for id in row.unknown_ids or ())
    if unknown:
        return Certain(written, seen, None, unknown)
    if seen - written.rows > MOST_LEFT:
        return Certain(written, seen, None, unknown)
    left: dict[int, list[int]] = {}
    for row in reports:
        for record in row.left or ():
            left.setdefault(record.partition, []).append(record.offset)
    # Decision 21: a record that is neither written nor left would be lost, since the publish moves
    # the position past it.
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
    at_once = spark.sparkContext.defaultParallelism
    spark.range(at_once, numPartitions=at_once).mapInArrow(
        lambda batches: batches, "id BIGINT"
    ).collect()


def _totals(reports: list[Row], table: Table, attempt: str, began: datetime) -> tuple[int, Written]:
    """Return the number of records that tasks read, and the files that they wrote."""
    files = packed_files.data_files(table, (row for row in reports if row.path is not None))
    return sum(row.seen or 0 for row in reports), Written(attempt, began, tuple(files))


class CertainTask:
    """A task's writer for one stream: it writes the good records, and collects the offsets of the
    others."""

    def __init__(self, spec: TaskSpec) -> None:
        self._decoder, self._files = Decoder(spec.decode), FileWriter(spec.target)
        self._seen, self._left = 0, list[dict[str, int]]()
        self._unlisted: set[int] = set()

    def read(self, batch: pa.RecordBatch) -> None:
        """Decode the next records (Kafka's columns and `ingest_hour`) and write the good ones."""
        # Count before decoding, so that a record which the decoder drops is noticed.
        self._seen += len(batch)
        try:
            decoded = self._decoder.decode(batch)
        except UnlistedSchema as error:
            # Decision 65: the records are staged again with the schema. As dead letters they would
            # be lost for readers although the registry knows their schema.
            self._unlisted.update(error.ids)
            return
        if decoded.errors:
            others = pa.array(sorted(decoded.errors), pa.int64())
            self._left += batch.select(["partition", "offset"]).take(others).to_pylist()
        rows = decoded.good
        if (mask := self._files.write(rows)) is not None:
            places = rows.filter(mask).select(["kafka_partition", "kafka_offset"])
            self._left += places.rename_columns(["partition", "offset"]).to_pylist()

    def end(self) -> list[dict[str, object]]:
        """Close the files. Return the rows of the task's report."""
        rows = report_rows(self._files.close(), self._seen, self._left[: MOST_LEFT + 1])
        rows[-1]["unknown_ids"] = sorted(self._unlisted)
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
