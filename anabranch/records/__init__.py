"""Records as frames: from Kafka's bytes to the stream's columns, with one code for both layers.

`decode` reads a record's value in Python workers (`anabranch.decode`) and gives a verdict, `good`
and `dead` split records by it. All are
DataFrame -> DataFrame and lazy. A record that cannot become a row gets an error code and text.

Lookups of a value by partition in Spark SQL, at the same cost for one partition and for a
thousand.

The values are one array, indexed by partition. Spark folds such an array into a single literal,
which compiled code only refers to. So neither the plan nor the code grows with the number of
partitions, and values that change from micro-batch to micro-batch cause no new compilation. The
array is written as a string, which is one token to Spark's parser; the parser takes seconds for
tens of thousands of tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from anabranch.config import Stream
from anabranch.config.columns import Column
from anabranch.decode import Decoder, DecodeSpec, decode_spec
from anabranch.decode.inputs import AS_TEXT, assign_hours, check_hours, headers_of
from anabranch.kafka.large_records import TOO_LARGE, LogRecord
from anabranch.kafka.source import time_of
from anabranch.offsets.hours import HourRange
from anabranch.offsets.position import Ranges
from anabranch.subjects.schemas import Schemas

_NOTHING = "CAST(array() AS ARRAY<BIGINT>)"


def within(offset: str, start: str, end: str) -> str:
    """Return SQL: whether an offset is in `[start, end)`; false if a bound is null. Never null."""
    return f"coalesce({offset} >= {start} AND {offset} < {end}, false)"


def inside(ranges: Ranges, partition: str = "kafka_partition", offset: str = "kafka_offset") -> str:
    """Return Spark SQL: whether a row's offset is in the range of its partition; false for a
    partition without one. Never null."""
    every = [ranges.get(p, (0, 0)) for p in _up_to_last(ranges)]
    starts, ends = (numbers([bounds[i] for bounds in every]) for i in (0, 1))
    return within(offset, f"get({starts}, {partition})", f"get({ends}, {partition})")


def numbers(values: Sequence[int]) -> str:
    """Return Spark SQL: an array of BIGINT."""
    return (
        f"CAST(split('{','.join(map(str, values))}', ',') AS ARRAY<BIGINT>)" if values else _NOTHING
    )


def _up_to_last(values: Mapping[int, object]) -> range:
    if any(p < 0 for p in values):
        raise ValueError(f"partitions: expected 0 or more, found {min(values)}")
    return range(max(values, default=-1) + 1)


_KAFKA_COLUMNS = ("kafka_partition", "kafka_offset", "kafka_timestamp", "ingest_hour")
BYTES = ("kafka_key", "kafka_value", "kafka_headers")
"""The columns of a decoded record with Kafka's own data, for dead letters."""

UNKNOWN = "unknown_fields"
"""The column of a decoded record with the names of its fields that have no column in the stream;
null if there are none."""

INPUT = ("key", "value", "partition", "offset", "timestamp", AS_TEXT)
"""The columns of Spark's Kafka source as a decoder reads them."""

_HEADERS = "array<struct<key:string,value:binary>>"


def trim(frame: DataFrame, ranges: Ranges) -> DataFrame:
    """Keep only records with offsets in `[start, end)` of their partition; other partitions have
    none."""
    return frame.where(F.expr(inside(ranges, "partition", "offset")))


def decode(
    frame: DataFrame,
    stream: Stream,
    schemas: Schemas,
    with_unknown: bool = False,
    secret: bytes | None = None,
    hours: Sequence[HourRange] | None = None,
) -> DataFrame:
    """Read Kafka's `value` as the stream's columns, by its format and `select`, and judge it.

    `frame` has the columns of Spark's Kafka source, and `ingest_hour` unless the records' `hours`
    are given. The result has the stream's
    columns (exact types), `kafka_partition`, `kafka_offset`, `kafka_timestamp`, `ingest_hour`,
    `event_date` and `is_dead`; `error_code` and `error_text`, null for good records; and
    `kafka_key`, `kafka_value` and `kafka_headers` unchanged. If `is_dead`, the stream's columns
    contain whatever could be read. `with_unknown` adds `unknown_fields`, the names of
    a value's fields that have no column in the stream: null if there are none, and always null if
    the stream ignores them. `secret` hashes columns of `select`. A record with a schema id that
    `schemas` does not know fails the query (`schemas.unlisted_ids`).
    """
    task = _DecodeTask(
        decode_spec(stream, schemas.known, with_unknown, secret),
        stream.columns,
        check_hours(hours) if hours is not None else None,
    )
    given = ("ingest_hour",) if hours is None else ()
    read = frame.selectExpr(*INPUT, *given).mapInArrow(task, task.ddl)
    rest = [*_KAFKA_COLUMNS, "event_date", "is_dead", "error_code", "error_text", *BYTES]
    rest += [UNKNOWN] if with_unknown else []
    return read.select(*(c.name for c in stream.columns), *rest)


@dataclass(frozen=True)
class _DecodeTask:
    """A task that decodes records to the table's `columns`. `hours`: of records without
    `ingest_hour`."""

    spec: DecodeSpec
    columns: tuple[Column, ...]
    hours: tuple[HourRange, ...] | None

    @property
    def ddl(self) -> str:
        return ", ".join(
            [
                *(f"`{c.name}` {c.type}" for c in self.columns),
                "kafka_partition INT, kafka_offset BIGINT, kafka_timestamp TIMESTAMP",
                "ingest_hour STRING, event_date DATE, is_dead BOOLEAN",
                f"error_code STRING, error_text STRING, {UNKNOWN} ARRAY<STRING>",
                f"kafka_key BINARY, kafka_value BINARY, kafka_headers {_HEADERS}",
            ]
        )

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        decoder = Decoder(self.spec)
        for batch in batches:
            if len(batch):
                whole = batch if self.hours is None else assign_hours(batch, self.hours)
                yield self._decoded(decoder, whole)

    def _decoded(self, decoder: Decoder, batch: pa.RecordBatch) -> pa.RecordBatch:
        decoded, every = decoder.decode(batch), range(len(batch))
        errors = [decoded.errors.get(i, (None, None)) for i in every]
        columns = [column.combine_chunks() for column in decoded.rows.columns]
        columns += [
            pa.array([code is not None for code, _ in errors], pa.bool_()),
            pa.array([code for code, _ in errors], pa.string()),
            pa.array([text for _, text in errors], pa.string()),
            pa.array([decoded.unknown.get(i) for i in every], pa.list_(pa.string())),
        ]
        columns += [batch.column("key"), batch.column("value")]
        columns.append(headers_of(batch.column("headers")))
        own = ["is_dead", "error_code", "error_text", UNKNOWN, *BYTES]
        return pa.RecordBatch.from_arrays(columns, [*decoded.rows.column_names, *own])


_LETTER = (
    "kafka_partition INT, kafka_offset BIGINT, kafka_timestamp TIMESTAMP, ingest_hour STRING, key "
    f"BINARY, value BINARY, headers {_HEADERS}, error_code STRING, error_text STRING"
)


def too_large(
    spark: SparkSession,
    stream: Stream,
    large: Iterable[LogRecord],
    hour_of: Callable[[LogRecord], str],
) -> DataFrame:
    """Return records that are too large to be read in the columns of `decode`, with errors and
    unknown fields, as dead ones without their bytes."""
    rows = [
        (
            r.partition,
            r.offset,
            time_of(r.timestamp),
            hour_of(r),
            None,
            None,
            None,
            TOO_LARGE,
            f"expected a record that fits the memory of a job, found {r.size} bytes",
        )
        for r in large
    ]
    return as_dead(spark.createDataFrame(rows, _LETTER), stream)


def as_dead(letters: DataFrame, stream: Stream) -> DataFrame:
    """Return dead letters with the columns of `decode`, with their errors."""
    return letters.selectExpr(
        *(f"CAST(NULL AS {column.type}) AS `{column.name}`" for column in stream.columns),
        *_KAFKA_COLUMNS,
        "to_date(coalesce(kafka_timestamp, to_timestamp(ingest_hour, \"yyyy-MM-dd'T'HH\"))) "
        "AS event_date",
        "true AS is_dead",
        "error_code",
        "error_text",
        *(f"{name.removeprefix('kafka_')} AS {name}" for name in BYTES),
        f"CAST(NULL AS array<string>) AS {UNKNOWN}",
    )


def as_decoded(rows: DataFrame, stream: Stream) -> DataFrame:
    """Return the table's rows with `decode`'s columns, as good records without bytes."""
    names = [column.name for column in stream.columns]
    unknown = {
        "error_code": "STRING",
        "error_text": "STRING",
        "kafka_key": "BINARY",
        "kafka_value": "BINARY",
        "kafka_headers": _HEADERS,
        UNKNOWN: "array<string>",
    }
    return rows.selectExpr(
        *(f"`{name}`" for name in names),
        *_KAFKA_COLUMNS,
        "event_date",
        "false AS is_dead",
        *(f"CAST(NULL AS {kind}) AS {name}" for name, kind in unknown.items()),
    )


def good(decoded: DataFrame, stream: Stream) -> DataFrame:
    """Return the rows of the table: good records with the table's columns in the table's order."""
    names = [column.name for column in stream.columns]
    return decoded.where("NOT is_dead").select(*names, *_KAFKA_COLUMNS, "event_date")


def dead(decoded: DataFrame, topic_id: str, layer: str) -> DataFrame:
    """Return the dead letters: the records with a verdict, with their bytes unchanged."""
    return decoded.where("is_dead").select(
        F.lit(topic_id).alias("topic_id"),
        *_KAFKA_COLUMNS,
        *(F.col(name).alias(name.removeprefix("kafka_")) for name in BYTES),
        "error_code",
        "error_text",
        F.lit(layer).alias("layer"),
    )
