"""Stage records in Python workers: each task decodes its records (`anabranch.decode`) and writes
the good ones and the dead letters to data files (`anabranch.iceberg.parquet_writer`). It reports
the files.
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
from anabranch.decode.hours import assign_hours, check_hours
from anabranch.decode.letters import letters_of
from anabranch.iceberg.parquet_writer import FileWriter, Output, Target, has_columns, target_of
from anabranch.iceberg.staging import Written
from anabranch.offsets.hours import HourRange
from anabranch.protocol.publish import new_id
from anabranch.records import INPUT, packed_files

_REMEDY = "none of it is published: start the speed layer again, and report this"

# A task reports one row per file, and one row for the records that it read.
REPORT = f"{packed_files.REPORT}, is_dead BOOLEAN, seen BIGINT, unknown_ids ARRAY<BIGINT>"
REPORT_SCHEMA = pa.schema(
    [
        *packed_files.REPORT_SCHEMA,
        ("is_dead", pa.bool_()),
        ("seen", pa.int64()),
        ("unknown_ids", pa.list_(pa.int64())),
    ]
)
_Task = Callable[[Iterable[pa.RecordBatch]], Iterable[pa.RecordBatch]]


@dataclass(frozen=True)
class Tables:
    """A stream's table, as of a decision, and the table of its dead letters."""

    rows: Table
    letters: Table


@dataclass(frozen=True)
class TaskSpec:
    """The part of a stream's and its tables' settings that a task needs, and the `hours` of the
    records. `letters`: where dead letters go, with the `topic_id`. Picklable."""

    decode: DecodeSpec
    hours: tuple[HourRange, ...]
    target: Target
    letters: Target
    topic_id: str


@dataclass(frozen=True)
class Certain:
    """The files of rows and of dead letters that tasks wrote.

    `unknown_ids`: schema ids that tasks were not given. Then nothing else is complete.
    """

    written: Written
    letters: Written
    unknown_ids: frozenset[int] = frozenset()


def task_spec(
    stream: Stream,
    tables: Tables,
    columns: Schema,
    schemas: Mapping[int, WriterSchema],
    hours: Sequence[HourRange],
    topic_id: str,
    secret: bytes | None,
) -> TaskSpec | None:
    """Return how tasks read and write the stream's records, or None if Spark must write the rows:
    a table that only Spark's writer supports or whose columns differ from `columns`, the
    stream's. `secret`: of hashed columns."""
    target = target_of(tables.rows) if has_columns(tables.rows, columns) else None
    letters = target_of(tables.letters)
    if target is None or letters is None:
        return None
    decode = decode_spec(stream, schemas, secret=secret)
    return TaskSpec(decode, check_hours(hours), target, letters, topic_id)


def stage_certain(
    frame: DataFrame, spec: TaskSpec, tables: Tables, attempt: str, began: datetime
) -> Certain:
    """Write the records of `frame` (Kafka's columns) in tasks. Readers do not see them. Raises
    Spark's errors, and Unexpected if a record was not written."""
    reports = frame.selectExpr(*INPUT).mapInArrow(_certain_task(spec), REPORT).collect()
    return certain_from(reports, tables, attempt, began)


def certain_from(reports: list[Row], tables: Tables, attempt: str, began: datetime) -> Certain:
    """Return the result of a micro-batch's tasks from their reports. Raises Unexpected if a record
    was not written."""
    files = [row for row in reports if row.path is not None]
    rows = packed_files.data_files(tables.rows, (row for row in files if not row.is_dead))
    letters = packed_files.data_files(tables.letters, (row for row in files if row.is_dead))
    certain = Certain(
        Written(attempt, began, tuple(rows)),
        Written(new_id(), began, tuple(letters)),
        frozenset(id for row in reports for id in row.unknown_ids or ()),
    )
    seen = sum(row.seen or 0 for row in reports)
    number = certain.written.rows + certain.letters.rows
    # Decision 21: a record that is neither a row nor a dead letter would be lost, since the publish
    # moves the position past it.
    if number != seen and not certain.unknown_ids:
        raise Unexpected(
            f"stage {attempt}: expected each of {seen} records to be a row or a dead letter, found "
            f"{certain.written.rows} rows and {certain.letters.rows} dead letters; {_REMEDY}"
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
        self._files, self._letters = FileWriter(spec.target), FileWriter(spec.letters)
        self._outputs, self._dead = list[Output](), list[Output]()
        self._seen, self._unlisted = 0, set[int]()

    def read(self, batch: pa.RecordBatch) -> None:
        """Decode the next records (`anabranch.records.INPUT`) and write them."""
        # Count before decoding, so that a record which the decoder drops is noticed.
        self._seen += len(batch)
        batch = assign_hours(batch, self._spec.hours)
        try:
            decoded = self._decoder.decode(batch)
        except UnlistedSchema as error:
            # Decision 65: the records are staged again with the schema. As dead letters they would
            # be lost for readers although the registry knows their schema.
            self._unlisted.update(error.ids)
            return
        self._outputs += packed_files.write_all(self._files, decoded.good)
        if decoded.errors:
            letters = letters_of(batch, decoded, self._spec.topic_id, "speed")
            self._dead += packed_files.write_all(self._letters, letters)

    def end(self) -> list[dict[str, object]]:
        """Close the files. Return the rows of the task's report."""
        rows = [*self._outputs, *self._files.close()]
        letters = [*self._dead, *self._letters.close()]
        return [
            *(asdict(output) | {"is_dead": False} for output in rows),
            *(asdict(output) | {"is_dead": True} for output in letters),
            {"seen": self._seen, "unknown_ids": sorted(self._unlisted)},
        ]


def _certain_task(spec: TaskSpec) -> _Task:
    def run(batches: Iterable[pa.RecordBatch]) -> Iterable[pa.RecordBatch]:
        task = CertainTask(spec)
        for batch in batches:
            task.read(batch)
        yield pa.RecordBatch.from_pylist(task.end(), schema=REPORT_SCHEMA)

    return run
