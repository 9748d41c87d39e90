"""Kafka's records as Spark DataFrames: exact offset ranges, or a stream from a position. Both
layers use it.

Spark's reader converts timestamps to microseconds, so it throws at a record that a producer stamped
in nanoseconds, and a retry does not help. `read_around` then finds such records and reads them with
the driver.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from functools import reduce
from typing import Any, TypeVar

from py4j.protocol import Py4JError
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession

from anabranch.common.remote_errors import full_text
from anabranch.config import Kafka
from anabranch.kafka.client import KafkaAdapter
from anabranch.kafka.large_records import POLLED, LogRecord, Stretch
from anabranch.kafka.security import spark_options, token_digest
from anabranch.offsets.position import Offsets, Ranges, ranges_to_keys, size, to_keys

LOG = logging.getLogger(__name__)

T = TypeVar("T")

# The schema of Spark's reader.
_COLUMNS = (
    "key BINARY, value BINARY, topic STRING, partition INT, offset BIGINT, timestamp TIMESTAMP, "
    "timestampType INT, headers ARRAY<STRUCT<key: STRING, value: BINARY>>"
)
# The largest timestamp in milliseconds that fits 64 bits as microseconds, less a year of margin.
# The driver also reads timestamps within the margin.
_LAST_MILLIS = (2**63 - 1) // 1000 - 366 * 86_400_000
# Spark bisects ranges that it cannot read down to this many offsets; the driver searches the rest.
_PIECE = 20_000
# The driver reads at most this many ranges: each makes Spark's plan longer.
_DRIVER_RANGES = 32
# Java has several copies of a record at once, in each task. The limit (bytes) is at least this
# many, however often a reader died.
_COPIES, _SMALLEST_LIMIT = 32, 4 << 20
# How long a read of many topics waits for one record: longer than the client's retry of a request.
_JOINT_POLL_MS = 12_000


def read_ranges(
    spark: SparkSession,
    kafka: Kafka,
    topic: str,
    ranges: Ranges,
    group: str | None = None,
    polled: int | None = None,
    tasks: int = 0,
) -> DataFrame:
    """Return a lazy DataFrame of Kafka's records of `ranges` (none empty). It assigns partitions
    explicitly; each action reads again. `group` as in `read_topics`. `polled`: the consumers'
    `max.poll.records`. Ranges are split so that at least `tasks` tasks read them."""
    options = _options(kafka, group)
    options |= {"kafka.max.poll.records": str(polled)} if polled is not None else {}
    options |= {"minPartitions": str(tasks)} if tasks > len(ranges) else {}
    return _read(spark, options, {topic: ranges})


def read_topics(
    spark: SparkSession, kafka: Kafka, ranges: Mapping[str, Ranges], group: str
) -> DataFrame:
    """Return a DataFrame of the records of several topics' ranges (none empty), like `read_ranges`.

    Executors cache a consumer for each partition and `group`, and reuse it in the next read.
    Without a group, each read leaves its consumers open for five minutes. Spark commits no offsets.
    """
    # A partition that cannot be read delays all topics this long; then each topic is read alone.
    options = _options(kafka, group) | {"kafkaConsumer.pollTimeoutMs": str(_JOINT_POLL_MS)}
    return _read(spark, options, ranges)


def _read(
    spark: SparkSession, options: Mapping[str, str], ranges: Mapping[str, Ranges]
) -> DataFrame:
    starts = {
        topic: to_keys({p: start for p, (start, _) in spans.items()})
        for topic, spans in ranges.items()
    }
    ends = {
        topic: to_keys({p: end for p, (_, end) in spans.items()}) for topic, spans in ranges.items()
    }
    return (
        spark.read.format("kafka")
        .options(**options)
        .option("assign", json.dumps({topic: sorted(spans) for topic, spans in ranges.items()}))
        .option("startingOffsets", json.dumps(starts))
        .option("endingOffsets", json.dumps(ends))
        .option("includeHeaders", "true")
        .load()
    )


def read_stream(
    spark: SparkSession,
    kafka: Kafka,
    topic: str,
    position: Offsets,
    max_offsets: int,
) -> DataFrame:
    """Return a streaming DataFrame of the topic from `position`, with at most `max_offsets` offsets
    a micro-batch. The query fails on data loss."""
    return (
        spark.readStream.format("kafka")
        .options(**_options(kafka))
        .option("subscribe", topic)
        .option("startingOffsets", json.dumps({topic: to_keys(position)}))
        .option("maxOffsetsPerTrigger", max_offsets)
        .option("failOnDataLoss", "true")
        .option("includeHeaders", "true")
        .load()
    )


def _options(kafka: Kafka, group: str | None = None) -> dict[str, str]:
    """Return the options of Spark's Kafka source for the configured brokers, and for a group of
    consumers; isolation is `read_committed` (KIP-98)."""
    options = {
        "kafka.isolation.level": "read_committed",
        # A deleted topic stays deleted even if brokers create topics automatically.
        "kafka.allow.auto.create.topics": "false",
        # The client reconnects by itself; after these times the job reports that it waits.
        "kafka.request.timeout.ms": "10000",
        "kafka.default.api.timeout.ms": "15000",
        "kafkaConsumer.pollTimeoutMs": "60000",
        # All planned records exist. Spark's request for the log end is queued after a fetch that
        # waits for later records: by default half a second for each partition.
        "kafka.fetch.max.wait.ms": "10",
    }
    if kafka.client_rack:
        options["kafka.client.rack"] = kafka.client_rack
    if group is not None:
        # A group's consumers have one token of a file, and Spark refuses another.
        options["kafka.group.id"] = f"{group}{token_digest(kafka)}"
    return options | spark_options(kafka)


def no_records(spark: SparkSession) -> DataFrame:
    """Return an empty DataFrame with the columns of `read_ranges`."""
    return spark.createDataFrame([], _COLUMNS)


def is_unreadable(error: BaseException) -> bool:
    """Return whether Spark's reader threw because a record's timestamp is too large. Pure."""
    # PySpark converts some Java exceptions: the name is then its type, the stack trace separate.
    text = full_text(error)
    return "ArithmeticException" in text and "long overflow" in text


def apply_to_records(
    spark: SparkSession,
    kafka: Kafka,
    adapter: KafkaAdapter,
    topic: str,
    ranges: Ranges,
    use: Callable[[DataFrame], T],
    tasks: int = 0,
) -> T:
    """Return `use` of `read_ranges`, or of `read_around` if Spark's reader cannot read one."""
    try:
        return use(read_ranges(spark, kafka, topic, ranges, tasks=tasks))
    except (PySparkException, Py4JError) as error:
        if not is_unreadable(error):
            raise
        return use(read_around(spark, kafka, adapter, topic, ranges))


def read_around(
    spark: SparkSession, kafka: Kafka, adapter: KafkaAdapter, topic: str, ranges: Ranges
) -> DataFrame:
    """Return the DataFrame of `read_ranges`, with records that Spark's reader cannot read, and
    those near them, read by the driver: their bytes unchanged, a timestamp after year 9999 as null.
    Reads the ranges to find such records."""
    unreadable: dict[int, list[int]] = {}
    for piece in _unreadable_pieces(spark, kafka, topic, ranges):
        for p, records in adapter.read_records(topic, piece):
            unreadable.setdefault(p, []).extend(
                r.offset for r in records if abs(r.timestamp) > _LAST_MILLIS
            )
    taken = plan_driver_ranges(unreadable, _DRIVER_RANGES)
    LOG.warning(
        "topic %s: the driver read records with timestamps too large for Spark, such as "
        "nanoseconds records=%d offsets=%s",
        topic,
        sum(map(len, unreadable.values())),
        [ranges_to_keys(part) for part in taken],
    )
    rows = [
        _row(topic, r)
        for part in taken
        for _, records in adapter.read_records(topic, part)
        for r in records
    ]
    frames = [read_ranges(spark, kafka, topic, part) for part in plan_spark_ranges(ranges, taken)]
    return _union(spark, rows, frames)


def find_large(
    spark: SparkSession, adapter: KafkaAdapter, topic: str, ranges: Ranges, deaths: int
) -> list[Stretch]:
    """Return the stretches near records that are too large to be read. `deaths`: the number of
    readers in a row that died in these ranges; the limit halves with each. Raises Transient."""
    limit = max(_SMALLEST_LIMIT, _memory(spark) // (_COPIES << (deaths - 1)))
    LOG.warning(
        "topic %s: an earlier read of these offsets did not end (its process died, or a service "
        "did not answer); looking for records of more than %d bytes ranges=%s",
        topic,
        limit,
        ranges_to_keys(ranges),
    )
    return adapter.find_large(topic, ranges, limit)


def read_without_large(
    spark: SparkSession,
    kafka: Kafka,
    adapter: KafkaAdapter,
    topic: str,
    ranges: Ranges,
    deaths: int,
) -> tuple[DataFrame, list[LogRecord]]:
    """Return the DataFrame of `read_ranges` without the records that are too large to be read, and
    these records, without their bytes. The driver reads the records near them. `deaths` as in
    `find_large`. Raises Transient."""
    stretches = find_large(spark, adapter, topic, ranges, deaths)
    large = [r for one in stretches for r in one.records if r.size is not None]
    for record in large:
        LOG.error(
            "topic %s: a record is too large to be read, it becomes a dead letter partition=%d "
            "offset=%d bytes=%d",
            topic,
            record.partition,
            record.offset,
            record.size,
        )
    taken = [{one.partition: (one.start, one.end)} for one in stretches]
    rows = [_row(topic, r) for one in stretches for r in one.records if r.size is None]
    frames = [
        read_ranges(spark, kafka, topic, part, polled=POLLED)
        for part in plan_spark_ranges(ranges, taken)
    ]
    return _union(spark, rows, frames), large


def _memory(spark: SparkSession) -> int:
    """Return the maximum memory (bytes) of the JVM that reads records."""
    context: Any = spark.sparkContext
    if context.master.startswith("local"):
        return int(context._jvm.java.lang.Runtime.getRuntime().maxMemory())
    memory = context.getConf().get("spark.executor.memory", "1g")
    return int(context._jvm.org.apache.spark.network.util.JavaUtils.byteStringAsBytes(memory))


def _union(
    spark: SparkSession, rows: Sequence[tuple[Any, ...]], frames: Sequence[DataFrame]
) -> DataFrame:
    return reduce(
        lambda one, other: one.unionByName(other), frames, spark.createDataFrame(rows, _COLUMNS)
    )


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an executor died, or Java's memory was exhausted. Pure."""
    text = full_text(error)
    return any(word in text for word in ("OutOfMemoryError", "ExecutorLostFailure"))


def _unreadable_pieces(
    spark: SparkSession, kafka: Kafka, topic: str, ranges: Ranges
) -> Iterable[Ranges]:
    """Yield pieces of `ranges`, of `_PIECE` offsets at most, that contain every record at which
    Spark's reader throws. A piece may have no such record."""
    waiting = [{p: span} for p, span in sorted(ranges.items())]
    while waiting:
        piece = waiting.pop()
        if size(piece) > _PIECE:
            try:
                read_ranges(spark, kafka, topic, piece).agg({"offset": "max"}).collect()
                continue
            except (PySparkException, Py4JError) as error:
                if not is_unreadable(error):
                    raise
            [(p, (s, e))] = piece.items()
            waiting += [{p: (s, (s + e) // 2)}, {p: ((s + e) // 2, e)}]
        else:
            yield piece


def plan_driver_ranges(unreadable: dict[int, list[int]], at_most: int) -> list[Ranges]:
    """Return ranges that contain all `unreadable` offsets, each of one partition. Joins close
    offsets, so that there are at most `at_most` ranges, or one for each partition."""
    distance = 0
    while True:
        ranges: list[Ranges] = []
        for p, offsets in sorted(unreadable.items()):
            for offset in sorted(offsets):
                if ranges and p in ranges[-1] and offset - ranges[-1][p][1] <= distance:
                    ranges[-1] = {p: (ranges[-1][p][0], offset + 1)}
                else:
                    ranges.append({p: (offset, offset + 1)})
        if len(ranges) <= max(at_most, len(unreadable)):
            return ranges
        distance = max(64, 2 * distance)


def plan_spark_ranges(ranges: Ranges, taken: Sequence[Ranges]) -> list[Ranges]:
    """Return `ranges` without `taken` in few parts, each with a range for a partition at most."""
    left: list[Ranges] = []
    for p, (start, end) in sorted(ranges.items()):
        spans = [part[p] for part in taken if p in part]
        edges = [start, *(edge for span in spans for edge in span), end]
        free = [(s, e) for s, e in zip(edges[::2], edges[1::2], strict=True) if s < e]
        for i, span in enumerate(free):
            if i == len(left):
                left.append({})
            left[i][p] = span
    return left


def _row(topic: str, record: Any) -> tuple[Any, ...]:
    """Return a record of kafka-python in the columns of Spark's reader."""
    headers = [(key, value) for key, value in record.headers] or None
    at = time_of(record.timestamp)
    return (
        record.key,
        record.value,
        topic,
        record.partition,
        record.offset,
        at,
        record.timestamp_type,
        headers,
    )


def time_of(millis: int) -> datetime | None:
    """Return Kafka's timestamp; None for a year that Python's dates do not have."""
    try:
        return datetime(1970, 1, 1, tzinfo=UTC) + timedelta(milliseconds=millis)
    except OverflowError:
        return None
