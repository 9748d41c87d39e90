"""Kafka's records as Spark frames: exactly the ranges asked for, or a stream from a position. Both
layers read so.

Spark's reader holds a record's timestamp in microseconds, so it throws at one that a producer
stamped in nanoseconds, and no other try gets past it. Where it does, `read_around` finds such
records and takes them through the driver.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from functools import reduce
from typing import TYPE_CHECKING, Any, TypeVar

from py4j.protocol import Py4JError
from pyspark.errors import PySparkException

from anabranch.common.remote_errors import full_text
from anabranch.config import Kafka, PublishWhen
from anabranch.kafka.client import KafkaAdapter
from anabranch.kafka.security import spark_options
from anabranch.offsets.position import Offsets, Ranges, ranges_to_keys, size, to_keys

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, DataFrameReader, SparkSession

LOG = logging.getLogger(__name__)

T = TypeVar("T")

# What Spark's reader gives, by name and type.
_COLUMNS = (
    "key BINARY, value BINARY, topic STRING, partition INT, offset BIGINT, timestamp TIMESTAMP, "
    "timestampType INT, headers ARRAY<STRUCT<key: STRING, value: BINARY>>"
)
# Milliseconds that microseconds in 64 bits hold, less a year: values between are read by the driver
# without need.
_LAST_MILLIS = (2**63 - 1) // 1000 - 366 * 86_400_000
# Spark looks for what it cannot read in pieces down to this many offsets; the driver looks through
# those.
_PIECE = 20_000
# How many stretches are taken out of what Spark reads, at most: each makes the plan longer.
_STRETCHES = 32
# For how long a read of many topics waits for one record: longer than the client takes to repeat a
# request.
_JOINT_POLL_MS = 12_000


def read_ranges(
    spark: SparkSession,
    kafka: Kafka,
    topic: str,
    ranges: Ranges,
    uncommitted: bool = False,
    group: str | None = None,
) -> DataFrame:
    """Kafka's records of `ranges` (none empty), the partitions assigned by name. Lazy; each action
    reads again.

    With `uncommitted` also the records of aborted and open transactions (KIP-98). `group` as in
    `read_topics`.
    """
    isolation = {"kafka.isolation.level": "read_uncommitted"} if uncommitted else {}
    options = _options(kafka) | isolation | ({"kafka.group.id": group} if group is not None else {})
    return _read(spark, options, {topic: ranges}).option("includeHeaders", "true").load()


def read_topics(
    spark: SparkSession, kafka: Kafka, ranges: Mapping[str, Ranges], group: str
) -> DataFrame:
    """Kafka's records of ranges (none empty) of several topics, like `read_ranges`, without
    headers.

    Executors keep a consumer for each partition under the name `group` and use it again in the next
    read; without one, each read leaves its consumers for five minutes. Spark commits no offsets.
    """
    # One partition that cannot be read delays all topics for so long, then each is read alone.
    options = _options(kafka) | {
        "kafka.group.id": group,
        "kafkaConsumer.pollTimeoutMs": str(_JOINT_POLL_MS),
    }
    return _read(spark, options, ranges).load()


def _read(
    spark: SparkSession, options: Mapping[str, str], ranges: Mapping[str, Ranges]
) -> DataFrameReader:
    starts = {
        topic: to_keys({p: start for p, (start, _) in of.items()}) for topic, of in ranges.items()
    }
    ends = {topic: to_keys({p: end for p, (_, end) in of.items()}) for topic, of in ranges.items()}
    return (
        spark.read.format("kafka")
        .options(**options)
        .option("assign", json.dumps({topic: sorted(of) for topic, of in ranges.items()}))
        .option("startingOffsets", json.dumps(starts))
        .option("endingOffsets", json.dumps(ends))
    )


def read_stream(
    spark: SparkSession,
    kafka: Kafka,
    topic: str,
    position: Offsets,
    max_offsets: int,
    wait: PublishWhen | None = None,
) -> DataFrame:
    """An endless frame of the topic from `position` on, at most `max_offsets` a micro-batch; lost
    data fails it.

    With `wait`, a micro-batch begins once that many offsets wait, or that long after the one before
    it.
    """
    waiting = {}
    if wait is not None:
        seconds = max(1, round(wait.within.total_seconds()))
        waiting = {"minOffsetsPerTrigger": str(wait.records), "maxTriggerDelay": f"{seconds}s"}
    return (
        spark.readStream.format("kafka")
        .options(**(_options(kafka) | waiting))
        .option("subscribe", topic)
        .option("startingOffsets", json.dumps({topic: to_keys(position)}))
        .option("maxOffsetsPerTrigger", max_offsets)
        .option("failOnDataLoss", "true")
        .option("includeHeaders", "true")
        .load()
    )


def _options(kafka: Kafka) -> dict[str, str]:
    """The source's options for the configured brokers; only decided records are read (KIP-98)."""
    options = {
        "kafka.isolation.level": "read_committed",
        # A topic that was deleted stays deleted where brokers create topics by themselves.
        "kafka.allow.auto.create.topics": "false",
        # The client itself goes on after a cut; these say after which the job says that it waits.
        "kafka.request.timeout.ms": "10000",
        "kafka.default.api.timeout.ms": "15000",
        "kafkaConsumer.pollTimeoutMs": "60000",
        # All planned records are there. Spark asks for a log's end behind a fetch that waits for
        # later records: by default half a second for each partition.
        "kafka.fetch.max.wait.ms": "10",
    }
    if kafka.client_rack:
        options["kafka.client.rack"] = kafka.client_rack
    return options | spark_options(kafka)


def no_records(spark: SparkSession) -> DataFrame:
    """What `read_ranges` gives for nothing: no record, in the same columns."""
    return spark.createDataFrame([], _COLUMNS)


def one_record(spark: SparkSession, value: bytes, at: datetime) -> DataFrame:
    """A record that no topic has, in the same columns."""
    return spark.createDataFrame([(None, bytearray(value), "", 0, 0, at, 0, None)], _COLUMNS)


def is_unreadable(error: BaseException) -> bool:
    """Whether Spark's reader threw because a record's timestamp is none that it can hold. Pure."""
    # PySpark makes some of Java's exceptions its own: then the name is that of the type, and the
    # trace apart.
    text = full_text(error)
    return "ArithmeticException" in text and "long overflow" in text


def using(
    spark: SparkSession,
    kafka: Kafka,
    adapter: KafkaAdapter,
    topic: str,
    ranges: Ranges,
    use: Callable[[DataFrame], T],
) -> T:
    """What `use` makes of Kafka's records of `ranges`, as `read_ranges` gives them; where Spark's
    reader cannot pass one of them, what it makes of `read_around`."""
    try:
        return use(read_ranges(spark, kafka, topic, ranges))
    except (PySparkException, Py4JError) as error:
        if not is_unreadable(error):
            raise
        return use(read_around(spark, kafka, adapter, topic, ranges))


def read_around(
    spark: SparkSession,
    kafka: Kafka,
    adapter: KafkaAdapter,
    topic: str,
    ranges: Ranges,
    uncommitted: bool = False,
) -> DataFrame:
    """As `read_ranges`, with the records that Spark's reader cannot pass, and those beside them,
    taken through the driver: their bytes as they are, a timestamp that it cannot hold as null.
    Looks for them by reading."""
    odd: dict[int, list[int]] = {}
    for piece in _failing(spark, kafka, topic, ranges, uncommitted):
        for p, records in adapter.read_records(topic, piece, uncommitted):
            odd.setdefault(p, []).extend(
                r.offset for r in records if abs(r.timestamp) > _LAST_MILLIS
            )
    taken = plan_stretches(odd, _STRETCHES)
    LOG.warning(
        "topic %s: skipped timestamps too large for Spark, such as nanoseconds, by the driver "
        "records=%d offsets=%s",
        topic,
        sum(map(len, odd.values())),
        [ranges_to_keys(part) for part in taken],
    )
    rows = [
        _row(topic, r)
        for part in taken
        for _, records in adapter.read_records(topic, part, uncommitted)
        for r in records
    ]
    frames = [
        read_ranges(spark, kafka, topic, part, uncommitted) for part in plan_rest(ranges, taken)
    ]
    return reduce(
        lambda one, other: one.unionByName(other), frames, spark.createDataFrame(rows, _COLUMNS)
    )


def _failing(
    spark: SparkSession, kafka: Kafka, topic: str, ranges: Ranges, uncommitted: bool
) -> Iterable[Ranges]:
    """The pieces of `ranges`, of `_PIECE` offsets at most, that Spark's reader throws at."""
    waiting = [{p: span} for p, span in sorted(ranges.items())]
    while waiting:
        piece = waiting.pop()
        if size(piece) > _PIECE:
            try:
                read_ranges(spark, kafka, topic, piece, uncommitted).agg(
                    {"offset": "max"}
                ).collect()
                continue
            except (PySparkException, Py4JError) as error:
                if not is_unreadable(error):
                    raise
            [(p, (s, e))] = piece.items()
            waiting += [{p: (s, (s + e) // 2)}, {p: ((s + e) // 2, e)}]
        else:
            yield piece


def plan_stretches(odd: dict[int, list[int]], at_most: int) -> list[Ranges]:
    """Stretches that hold all `odd` offsets, each of one partition: close ones together, so that
    there are at most `at_most`, or one for each partition."""
    joined = 0
    while True:
        stretches: list[Ranges] = []
        for p, offsets in sorted(odd.items()):
            for offset in sorted(offsets):
                if stretches and p in stretches[-1] and offset - stretches[-1][p][1] <= joined:
                    stretches[-1] = {p: (stretches[-1][p][0], offset + 1)}
                else:
                    stretches.append({p: (offset, offset + 1)})
        if len(stretches) <= max(at_most, len(odd)):
            return stretches
        joined = max(64, 2 * joined)


def plan_rest(ranges: Ranges, taken: Sequence[Ranges]) -> list[Ranges]:
    """What `taken`, in order, leaves of `ranges`, in as few parts as there can be: each of one span
    a partition."""
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
    """A record of kafka-python in the columns of Spark's reader."""
    headers = [(key, value) for key, value in record.headers] or None
    at = _moment(record.timestamp)
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


def _moment(millis: int) -> datetime | None:
    try:
        return datetime(1970, 1, 1, tzinfo=UTC) + timedelta(milliseconds=millis)
    except OverflowError:
        return None
