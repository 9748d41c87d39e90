"""The adapter of kafka-python, which only this package imports: topics, offsets, times, lag for
monitors, a producer for tools.

It decides nothing and returns plain values. Raises Transient when brokers do not answer.
"""

from __future__ import annotations

import logging
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from functools import partial
from itertools import repeat
from typing import Any, TypeVar, cast

import numpy as np
from kafka import KafkaAdminClient, KafkaConsumer, KafkaProducer, TopicPartition, errors
from kafka.admin import ConfigResource, ConfigResourceType, NewTopic, OffsetSpec
from kafka.protocol.consumer.offsets import IsolationLevel
from kafka.structs import OffsetAndMetadata
from numpy.typing import NDArray

from anabranch import config
from anabranch.common.errors import (
    AnabranchError,
    ConfigurationError,
    MissingRight,
    Transient,
)
from anabranch.common.retry import attempts
from anabranch.kafka import kafka_python
from anabranch.kafka.batches import Explanation, Fetched, Missing, explain_missing, fetch_batches
from anabranch.kafka.kafka_python import (
    FAILURES,
    LARGE_FETCH,
    LONGEST_MS,
    bytes_of,
    config_value,
    connect,
    explained,
    explaining,
    missing_right,
    plan_fetch_bytes,
    retention_of,
    topic_of,
)
from anabranch.kafka.large_records import Stretch, find_large
from anabranch.kafka.security import kafka_python_settings
from anabranch.offsets.hour_ends import MOST_FETCHED, find_oldest
from anabranch.offsets.position import (
    Offsets,
    Position,
    Ranges,
    Stamped,
    Topic,
    is_contradicted,
    plan_newest,
)

LOG = logging.getLogger(__name__)

T = TypeVar("T")

# A command should fail within seconds; a job retries.
_BOOTSTRAP_MS = 5_000
_REQUEST_MS = 15_000
# Bytes of a sample: an Arrow array has at most 2 GB, and Python's objects take several times more.
_MOST_SAMPLED = 256 << 20
# A read fails after this long without a new record.
_SILENCE_S = 30
# An answer that contradicts a position is accepted if brokers still give it after this long.
_CONFIRMED_AFTER_S = 5.0
_ASKED_AGAIN_AFTER_S = 0.5
_COORDINATOR_WITHIN_S = 15.0
# After a joint request that failed within this time, each topic is requested separately.
_ONE_BY_ONE_WITHIN_S = 5.0
_NO_COORDINATOR = (
    errors.CoordinatorNotAvailableError,
    errors.CoordinatorLoadInProgressError,
    errors.NotCoordinatorError,
)
# A consumer that reads a few existing records is replaced after this long without a record.
_STUCK_S = 3
# The first fetch size in bytes of one partition when few records are read; grows to `LARGE_FETCH`.
_SMALL_FETCH = 16 << 10


kafka_python.apply()

_READ_COMMITTED = IsolationLevel.READ_COMMITTED


def new_producer(kafka: config.Kafka, **overrides: Any) -> Any:
    """Return an idempotent kafka-python producer with acks=all, so that no record is lost."""
    defaults: dict[str, Any] = {
        "acks": "all",
        "enable_idempotence": True,
        "linger_ms": 20,
        "batch_size": 256 * 1024,
        "compression_type": None,
    }
    with explaining(kafka, "start a producer"):
        return connect(KafkaProducer, **_client_settings(kafka), **(defaults | overrides))


def _client_settings(kafka: config.Kafka) -> dict[str, Any]:
    """Return settings of a consumer or producer by which brokers never create topics."""
    return kafka_python_settings(kafka) | {"allow_auto_create_topics": False}


def _consumer_settings(kafka: config.Kafka) -> dict[str, Any]:
    return _client_settings(kafka) | {"client_rack": kafka.client_rack, "enable_auto_commit": False}


def position_to_commit(topic: str, text: str) -> Any:
    """Return offsets for `send_offsets_to_transaction` with `text` as their only information
    (metadata, see `KafkaAdapter.group_metadata`)."""
    return {TopicPartition(topic, 0): OffsetAndMetadata(0, text, -1)}


def create_topic(
    kafka: config.Kafka, topic: str, partitions: int, configs: Mapping[str, str] | None = None
) -> bool:
    """Create a topic; return False if it existed."""
    with KafkaAdapter(kafka) as adapter:
        return adapter.create_topic(topic, partitions, configs or {})


@dataclass(frozen=True)
class TopicSettings:
    """How the brokers keep a topic. `retention` and `retention_bytes` (of one partition) are None
    if unlimited. `replicas` is the smallest number of replicas of a partition, `brokers` the number
    of the cluster's brokers."""

    retention: timedelta | None
    retention_bytes: int | None
    cleanup_policy: str
    compaction_lag: timedelta
    timestamp_type: str
    min_insync: int
    replicas: int
    brokers: int


class KafkaAdapter:
    """A client of the brokers with one admin connection. Not thread-safe.

    Each request raises Transient within half a minute if the brokers do not answer, and
    ConfigurationError for rejected credentials or missing rights.
    """

    def __init__(self, kafka: config.Kafka) -> None:
        self._kafka = kafka
        self._admin: Any = None
        self._consumer: Any = None
        self._fetch_bytes = _SMALL_FETCH
        # The size in bytes of one record that was read, by topic id.
        self._record_bytes: dict[str, int] = {}

    def __enter__(self) -> KafkaAdapter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def describe(
        self, topic: str, expected: Position | None = None, confirmed: bool = True
    ) -> Topic | None:
        """Return the topic, or None if the brokers do not know it.

        A broker that has just started, or lags behind the others, may not know a topic or a
        partition for a moment, or may still know a deleted topic. So None, or a topic that
        contradicts the position `expected`, is returned only if brokers repeat the answer for some
        seconds over new connections. If the topic's id is not the expected one, the result contains
        `records` and `cluster_id` too. Not `confirmed`: the first answer, for a report.
        """
        if not confirmed:
            return self._describe(topic)
        found = self._confirmed(
            lambda: self._describe(topic), lambda described: is_contradicted(described, expected)
        )
        if found is None or expected is None or expected.topic_id in ("", found.id):
            return found
        starts, ends = self.log_starts(found), self.stable_ends(found)
        records = sum(max(0, end - starts.get(p, 0)) for p, end in ends.items())
        return replace(found, records=records, cluster_id=self.cluster_id())

    def topic_names(self) -> frozenset[str]:
        """Return the topics of the cluster that this client may describe."""
        return frozenset(self._ask("list the topics", lambda admin: admin.list_topics()))

    def cluster_id(self) -> str:
        """Return the cluster's id; empty if the brokers have none or the right is missing."""
        try:
            cluster = self._ask("describe the cluster", lambda admin: admin.describe_cluster())
        except ConfigurationError:
            return ""
        return str(cluster.get("cluster_id") or "")

    def _confirmed(self, question: Callable[[], T], is_doubtful: Callable[[T], bool]) -> T:
        """Return an answer; ask again for some seconds while it is doubtful."""
        for number in attempts(repeat(_ASKED_AGAIN_AFTER_S), _CONFIRMED_AFTER_S):
            if number > 1:
                # The next connection uses the broker that answers first.
                self.close()
            answer = question()
            if not is_doubtful(answer):
                break
            LOG.debug("found %s, which is doubtful", answer)
        return answer

    def _describe(self, topic: str) -> Topic | None:
        doing, began = f"describe topic {topic}", time.monotonic()
        topics = self._ask(doing, lambda admin: admin.describe_topics([topic]))
        for entry in topics:
            if entry["name"] != topic:
                continue
            if entry["error_code"] == errors.UnknownTopicOrPartitionError.errno:
                return None
            if entry["error_code"]:
                error = errors.for_code(entry["error_code"])()
                raise explained(
                    self._kafka, doing, error, began, f"--operation Describe --topic {topic}"
                )
            return topic_of(entry)
        return None

    def log_starts(self, topic: Topic) -> dict[int, int]:
        """Return the first offset that each partition still has."""
        return {
            p: s.offset
            for p, s in self._offsets(
                topic, dict.fromkeys(topic.partitions, OffsetSpec.EARLIEST)
            ).items()
        }

    def stable_ends(self, topic: Topic, reached: Mapping[int, int] | None = None) -> dict[int, int]:
        """Return the last stable offset of each partition: no offset below it belongs to an open
        transaction (KIP-98).

        A leader that was replaced and does not know it yet answers with an earlier end. So an end
        below `reached` is accepted only if brokers repeat it for some seconds.
        """
        return self._ends(topic, reached, _READ_COMMITTED)

    def accepted_ends(
        self, topic: Topic, reached: Mapping[int, int] | None = None
    ) -> dict[int, int]:
        """Return the log end offset of each partition: all records that Kafka has accepted are
        below it, those of open transactions too. `reached` as in `stable_ends`."""
        return self._ends(topic, reached, IsolationLevel.READ_UNCOMMITTED)

    def _ends(
        self, topic: Topic, reached: Mapping[int, int] | None, isolation: Any
    ) -> dict[int, int]:
        def ends() -> dict[int, int]:
            latest = self._offsets(
                topic, dict.fromkeys(topic.partitions, OffsetSpec.LATEST), isolation
            )
            return {p: stamped.offset for p, stamped in latest.items()}

        known = reached or {}
        return self._confirmed(
            ends, lambda offsets: any(offsets.get(p, o) < o for p, o in known.items())
        )

    def stable_ends_of(
        self, topics: Mapping[str, Iterable[int]]
    ) -> dict[str, Offsets | AnabranchError]:
        """Return the last stable offset of each partition of several topics, by one request to each
        broker.

        The value of a topic without an answer, such as a deleted one or one that this client may
        not describe, is its error. An end may come from a leader that was just replaced: see
        `stable_ends`. Raises Transient if the brokers do not answer at all, ConfigurationError for
        rejected credentials.
        """
        specs = {
            TopicPartition(topic, p): OffsetSpec.LATEST
            for topic, partitions in topics.items()
            for p in partitions
        }
        if not specs:
            return {}
        began = time.monotonic()
        try:
            answer = self._ask(
                f"list offsets of {len(topics)} topics",
                lambda admin: admin.list_partition_offsets(specs, isolation_level=_READ_COMMITTED),
                "--operation Describe --topic TOPIC",
            )
        except AnabranchError as error:
            # One partition without an answer fails the whole request.
            is_late = time.monotonic() - began > _ONE_BY_ONE_WITHIN_S
            if not isinstance(error, MissingRight) and (len(topics) == 1 or is_late):
                raise
            return {name: self._stable_ends_or_error(name, ps) for name, ps in topics.items()}
        ends: dict[str, Offsets | AnabranchError] = {topic: {} for topic in topics}
        for partition, found in answer.items():
            cast("Offsets", ends[partition.topic])[partition.partition] = found.offset
        return ends

    def _stable_ends_or_error(
        self, topic: str, partitions: Iterable[int]
    ) -> Offsets | AnabranchError:
        try:
            offsets = self._offsets(
                Topic(topic, "", tuple(partitions)), dict.fromkeys(partitions, OffsetSpec.LATEST)
            )
        except AnabranchError as error:
            return error
        return {p: stamped.offset for p, stamped in offsets.items()}

    def describe_all(self, names: Sequence[str]) -> dict[str, Topic | None]:
        """Return topics by name, by one request; None for a topic that the brokers do not know or
        do not describe now.

        The answer is one broker's at this moment: call `describe` to confirm a contradiction.
        """
        found: dict[str, Topic | None] = dict.fromkeys(names)
        for entry in self._ask(
            f"describe {len(names)} topics", lambda admin: admin.describe_topics(list(names))
        ):
            if entry["name"] in found and not entry["error_code"]:
                found[entry["name"]] = topic_of(entry)
        return found

    def first_from(self, topic: Topic, when: datetime) -> dict[int, Stamped | None]:
        """Return for each partition the first offset with a timestamp at or after `when`, below the
        last stable offset; None if there is none."""
        return self._first_at(
            topic, dict.fromkeys(topic.partitions, max(0, int(when.timestamp() * 1000)))
        )

    def first_later(
        self, topic: Topic, records: Mapping[int, Stamped]
    ) -> dict[int, Stamped | None]:
        """Return for each partition of `records` the first offset with a later timestamp than its
        record, below the last stable offset; None if there is none. Empty if the topic's records
        are small: reading them costs less."""
        if not records or not self._are_large(topic, *next(iter(records.items()))):
            return {}
        return self._first_at(topic, {p: record.timestamp_ms + 1 for p, record in records.items()})

    def _are_large(self, topic: Topic, partition: int, record: Stamped) -> bool:
        """Return whether a topic's records are larger than a small fetch, judged by one record."""
        if topic.id not in self._record_bytes:
            one = {partition: (record.offset, record.offset + 1)}
            for _, given in self._read_few(topic.name, one, 1):
                self._record_bytes.update((topic.id, bytes_of(r)) for r in given)
        return self._record_bytes.get(topic.id, 0) > _SMALL_FETCH

    def stamps_from(
        self, topic: Topic, starts: Mapping[int, int], ends: Mapping[int, int], count: int
    ) -> dict[int, tuple[Stamped, ...]]:
        """Return for each partition of `starts` the offsets and timestamps of the first `count`
        records that a consumer receives from there, below `ends` (at most the last stable offsets);
        fewer if there are no more. Cheap for a few records."""
        by_partition: dict[int, list[Stamped]] = {p: [] for p in starts}
        ranges = {p: (s, ends.get(p, 0)) for p, s in starts.items() if s < ends.get(p, 0)}
        for p, records in self._read_few(topic.name, ranges, count):
            by_partition[p] += [Stamped(r.offset, r.timestamp) for r in records]
        return {p: tuple(stamps[:count]) for p, stamps in by_partition.items()}

    def oldest_stamp(
        self, topic: Topic, starts: Offsets, ends: Offsets, low: int, high: int
    ) -> int | None:
        """Return the smallest timestamp, in milliseconds, of the partitions' first records from
        `starts`, below `ends`; None if there are none.

        Fetches at most one batch of each partition. If more than MOST_FETCHED partitions have large
        records, fetches only those that `find_oldest` returns for the times `low` and `high`."""
        unread = {p: s for p, s in starts.items() if s < ends.get(p, 0)}
        if len(unread) > MOST_FETCHED:
            partition, offset = min(unread.items())
            if self._are_large(topic, partition, Stamped(offset, 0)):
                chosen = find_oldest(unread, low, high, lambda times: self._first_at(topic, times))
                unread = {p: unread[p] for p in chosen}
        stamps = self.stamps_from(topic, unread, ends, 1)
        return min((s.timestamp_ms for first in stamps.values() for s in first), default=None)

    def _first_at(self, topic: Topic, times: Mapping[int, int]) -> dict[int, Stamped | None]:
        """Return for each partition the first offset with a timestamp at or after its time in
        milliseconds, else None."""
        return {p: s if s.offset >= 0 else None for p, s in self._offsets(topic, times).items()}

    def _read_few(self, topic: str, ranges: Ranges, count: int) -> Iterator[tuple[int, list[Any]]]:
        """Yield records of each range, in order, until it has given `count` records or its end is
        reached. All calls share one connection."""
        if not ranges:
            return
        began = heard = time.monotonic()
        doing = f"read records of topic {topic}"
        open_ = {TopicPartition(topic, p): s for p, (s, _) in ranges.items()}
        left = dict.fromkeys(open_, count)
        try:
            consumer = self._consumer_at(open_)
            while open_:
                sizes: list[int] = []
                for tp, records in consumer.poll(timeout_ms=1000).items():
                    if tp in open_ and records:
                        heard = time.monotonic()
                        given = [
                            r for r in records if open_[tp] <= r.offset < ranges[tp.partition][1]
                        ]
                        left[tp] -= len(given)
                        sizes += map(bytes_of, given)
                        yield tp.partition, given
                fetched = len(open_)
                for tp, end in ((tp, ranges[tp.partition][1]) for tp in list(open_)):
                    # The position also passes offsets without a readable record. kafka-python has
                    # none while no broker answers where the log begins (`_is_stuck` ends the wait).
                    at = consumer.position(tp, timeout_ms=_REQUEST_MS) or 0
                    open_[tp] = max(open_[tp], at)
                    if left[tp] <= 0 or open_[tp] >= end:
                        del open_[tp]
                        heard = time.monotonic()
                if open_ and len(open_) < fetched:
                    # Finished partitions are not paused: kafka-python 3.0.12 may then return
                    # nothing for the others.
                    consumer.assign(list(open_))
                is_stuck = self._is_stuck(topic, doing, heard, open_, "from")
                wanted = plan_fetch_bytes(self._fetch_bytes, sizes, count)
                if is_stuck or (open_ and wanted > self._fetch_bytes):
                    self._fetch_bytes = wanted
                    self._drop_consumer()
                    consumer = self._consumer_at(open_)
            consumer.assign([])
        except (errors.KafkaError, OSError) as error:
            self.close()
            raise explained(
                self._kafka, doing, error, began, f"--operation Read --topic {topic}"
            ) from error

    def _consumer_at(self, starts: Mapping[Any, int]) -> Any:
        """Return the consumer that reads few records, at these positions."""
        if self._consumer is None:
            # Deleted records are skipped: callers request the log start where it matters.
            self._consumer = connect(
                KafkaConsumer,
                **_consumer_settings(self._kafka),
                group_id=None,
                auto_offset_reset="earliest",
                isolation_level="read_committed",
                max_partition_fetch_bytes=self._fetch_bytes,
                fetch_max_wait_ms=100,
            )
        self._consumer.assign(list(starts))
        for tp, at in starts.items():
            self._consumer.seek(tp, at)
        return self._consumer

    def _drop_consumer(self) -> None:
        consumer, self._consumer = self._consumer, None
        if consumer is not None:
            consumer.close()

    def retention(self, topic: str) -> timedelta | None:
        """Return how long the brokers keep a record of the topic; None if unlimited."""
        return retention_of(int(config_value(self._configs(topic), topic, "retention.ms")))

    def settings(self, topic: str) -> TopicSettings | None:
        """Return a topic's settings; None if the brokers do not know it."""
        described = self._ask(
            f"describe topic {topic}", lambda admin: admin.describe_topics([topic])
        )
        replicas = [
            len(p["replica_nodes"])
            for t in described
            if t["name"] == topic
            for p in t["partitions"]
        ]
        if not replicas:
            return None
        configs = self._configs(topic)
        cluster = self._ask("describe the cluster", lambda admin: admin.describe_cluster())

        def number(key: str) -> int:
            return int(config_value(configs, topic, key))

        retention_bytes = number("retention.bytes")
        return TopicSettings(
            retention=retention_of(number("retention.ms")),
            retention_bytes=retention_bytes if retention_bytes >= 0 else None,
            cleanup_policy=str(config_value(configs, topic, "cleanup.policy")),
            compaction_lag=timedelta(milliseconds=min(number("min.compaction.lag.ms"), LONGEST_MS)),
            timestamp_type=str(config_value(configs, topic, "message.timestamp.type")),
            min_insync=number("min.insync.replicas"),
            replicas=min(replicas),
            brokers=len(cluster["brokers"]),
        )

    def partition_bytes(self, topic: str) -> dict[int, int]:
        """Return for each partition the bytes of its log, on the broker with the largest replica.
        Needs DESCRIBE of the cluster."""
        doing = f"describe the log directories of topic {topic}"
        answer = self._ask(doing, lambda admin: admin.describe_log_dirs([topic]))
        sizes: dict[int, int] = {}
        topics = [
            t for broker in answer for log_dir in broker["log_dirs"] for t in log_dir["topics"]
        ]
        for found in (p for t in topics for p in t["partitions"]):
            partition = int(found["partition_index"])
            sizes[partition] = max(sizes.get(partition, 0), int(found["partition_size"]))
        if not sizes:
            # kafka-python drops the brokers' error.
            raise missing_right(
                self._kafka,
                doing,
                "expected the size of each partition, found none",
                "--operation Describe --cluster",
            )
        return sizes

    def largest_record(self, topic: str) -> int:
        """Return the topic's `max.message.bytes`: the size of a compressed batch of records."""
        return int(config_value(self._configs(topic), topic, "max.message.bytes"))

    def _configs(self, topic: str) -> Any:
        resource = ConfigResource(ConfigResourceType.TOPIC, topic)
        return self._ask(
            f"describe the configuration of topic {topic}",
            lambda admin: admin.describe_configs([resource], config_filter="all"),
            f"--operation DescribeConfigs --topic {topic}",
        )

    def group_metadata(self, group: str, topic: str) -> str | None:
        """Return the metadata that a group committed with the offset of a topic's partition 0; None
        if there is none.

        Waits until transactions that commit offsets of the group are complete (KIP-447): a commit
        returns earlier, so an answer without the wait may lack it. Raises MissingRight, Transient.
        """
        settings = _consumer_settings(self._kafka) | {
            "group_id": group,
            "isolation_level": "read_committed",
        }
        with (
            explaining(
                self._kafka,
                f"read offsets of group {group}",
                f"--operation Describe --group {group}",
            ),
            closing(connect(KafkaConsumer, **settings)) as consumer,
        ):
            found = consumer.committed(
                TopicPartition(topic, 0), metadata=True, timeout_ms=_REQUEST_MS
            )
        return found.metadata or None if found is not None else None

    def _retry_coordinator(self, question: Callable[[], T]) -> T:
        """Return the answer of a group's coordinator; retry while brokers that start have none."""
        for _ in attempts(repeat(_ASKED_AGAIN_AFTER_S), _COORDINATOR_WITHIN_S):
            try:
                return question()
            except Transient as error:
                if not isinstance(error.__cause__, _NO_COORDINATOR):
                    raise
                last = error
        raise last

    def commit_lag(self, group: str, topic: str, offsets: Mapping[int, int]) -> None:
        """Commit the offsets of a stream for lag monitors. Anabranch never reads them."""
        doing, began = f"commit offsets of group {group}", time.monotonic()
        for failure in self._commit(doing, group, topic, offsets):
            raise explained(
                self._kafka, doing, failure(), began, f"--operation Read --group {group}"
            )

    def check_commits(self, group: str) -> None:
        """Raise MissingRight if this client may not commit offsets for a group. Commits none: it
        uses a topic that does not exist."""
        doing, began = f"commit offsets of group {group}", time.monotonic()
        topic = f"{group}-{uuid.uuid4()}"
        for failure in self._retry_coordinator(lambda: self._commit(doing, group, topic, {0: 0})):
            if issubclass(failure, errors.GroupAuthorizationFailedError):
                raise explained(
                    self._kafka, doing, failure(), began, f"--operation Read --group {group}"
                )

    def _commit(
        self, doing: str, group: str, topic: str, offsets: Mapping[int, int]
    ) -> list[type[Exception]]:
        """Commit offsets; return the failures of partitions as kafka-python's types."""
        values = {
            TopicPartition(topic, p): OffsetAndMetadata(o, "", None) for p, o in offsets.items()
        }
        right = f"--operation Read --group {group}"
        results = self._ask(doing, lambda admin: admin.alter_group_offsets(group, values), right)
        return [failure for failure in results.values() if failure is not errors.NoError]

    def read_records(self, topic: str, ranges: Ranges) -> Iterator[tuple[int, list[Any]]]:
        """Yield kafka-python's records of `ranges` that a `read_committed` consumer receives, with
        their partition, in order and in pieces. No range is empty, and all end at or below the last
        stable offsets. Reads some 20,000 records a second on a shared core. Raises Transient if the
        brokers stop answering or no longer have a range."""
        ends = {TopicPartition(topic, p): e for p, (_, e) in ranges.items()}
        doing = f"read topic {topic}"
        settings = _consumer_settings(self._kafka) | {
            "group_id": None,
            "auto_offset_reset": "none",
            "isolation_level": "read_committed",
            "max_poll_records": 20_000,
            "max_partition_fetch_bytes": LARGE_FETCH,
        }
        with (
            explaining(self._kafka, doing, f"--operation Read --topic {topic}"),
            closing(connect(KafkaConsumer, **settings)) as consumer,
        ):
            consumer.assign(list(ends))
            for tp in ends:
                consumer.seek(tp, ranges[tp.partition][0])
            heard = time.monotonic()
            while ends:
                for tp, records in consumer.poll(timeout_ms=1000).items():
                    heard = time.monotonic()
                    yield tp.partition, [r for r in records if r.offset < ends[tp]]
                # The position also passes offsets without a readable record.
                done = [
                    tp
                    for tp, end in ends.items()
                    if (consumer.position(tp, timeout_ms=_REQUEST_MS) or 0) >= end
                ]
                if done:
                    consumer.pause(*done)
                    ends = {tp: end for tp, end in ends.items() if tp not in done}
                    heard = time.monotonic()
                self._is_stuck(topic, doing, heard, ends, "up to")

    def newest_records(self, topic: Topic, count: int, oldest: int = 0) -> list[Any]:
        """Return the newest `count` records of a topic, and of those before them the `oldest`, both
        spread over its partitions, as kafka-python has them; fewer if compaction or aborted
        transactions left gaps, or they are large. Raises as `read_records`."""
        starts, ends = self.log_starts(topic), self.stable_ends(topic)
        newest = plan_newest(starts, ends, count)
        before = {p: newest[p][0] if p in newest else end for p, end in ends.items()}
        sizes = plan_newest(starts, before, oldest)
        first = {p: (starts[p], starts[p] + e - s) for p, (s, e) in sizes.items()}
        parts = [self.read_records(topic.name, ranges) for ranges in (first, newest) if ranges]
        found, size = deque[Any](), 0
        for record in (record for read in parts for _, records in read for record in records):
            found.append(record)
            size += bytes_of(record)
            while size > _MOST_SAMPLED and len(found) > 1:
                size -= bytes_of(found.popleft())
        return list(found)

    def explain_missing(self, topic: str, missing: Mapping[int, Missing]) -> dict[int, Explanation]:
        """Return for each partition why a consumer does not receive these offsets, all below the
        last stable offset. Reads the record batches around them (`anabranch.kafka.batches`)."""
        fetch = self._fetch_of(topic)
        return {p: explain_missing(partial(fetch, p), m) for p, m in sorted(missing.items())}

    def classify(self, topic: str, partition: int, start: int, end: int) -> NDArray[np.uint8]:
        """Return the class of each offset of a range, as in `anabranch.kafka.batches.CODES`; all
        are below the last stable offset. Reads the record batches."""
        every = Missing(start, np.ones(end - start, np.bool_))
        return explain_missing(partial(self._fetch_of(topic), partition), every).codes

    def find_large(self, topic: str, ranges: Ranges, limit: int) -> list[Stretch]:
        """Return the stretches of `ranges`, all below the last stable offset, that have a record of
        more than `limit` bytes. Reads the record batches (`anabranch.kafka.large_records`)."""
        fetch = self._fetch_of(topic)
        return [
            stretch
            for p, (start, end) in sorted(ranges.items())
            for stretch in find_large(partial(fetch, p), p, start, end, limit)
        ]

    def _fetch_of(self, topic: str) -> Callable[[int, int, int], Fetched]:
        nodes: dict[int, int] = {}
        rack = self._kafka.client_rack

        def fetch(partition: int, offset: int, size: int) -> Fetched:
            doing = (
                f"read record batches of topic {topic}, partition {partition}, from offset "
                f"{offset} on"
            )
            return cast(
                Fetched,
                self._ask(
                    doing,
                    lambda admin: fetch_batches(admin, nodes, topic, partition, offset, size, rack),
                ),
            )

        return fetch

    def create_topic(self, topic: str, partitions: int, configs: Mapping[str, str]) -> bool:
        if self._describe(topic) is not None:
            return False
        new = NewTopic(
            topic, num_partitions=partitions, replication_factor=-1, topic_configs=dict(configs)
        )
        try:
            right = f"--operation Create --topic {topic}"
            self._ask(f"create topic {topic}", lambda admin: admin.create_topics([new]), right)
        except errors.TopicAlreadyExistsError:
            return False
        for _ in attempts(repeat(0.05), seconds=30):
            if (created := self._describe(topic)) is not None and len(
                created.partitions
            ) >= partitions:
                return True
        raise Transient(
            f"create topic {topic}: expected to see it within 30 s, found it missing; try again"
        )

    def _offsets(
        self, topic: Topic, wanted: Mapping[int, Any], isolation: Any = _READ_COMMITTED
    ) -> dict[int, Stamped]:
        """Return each partition's answer for its kafka-python OffsetSpec or its time (ms)."""
        specs = {TopicPartition(topic.name, p): spec for p, spec in wanted.items()}
        try:
            offsets = self._ask(
                f"list offsets of topic {topic.name}",
                lambda admin: admin.list_partition_offsets(specs, isolation_level=isolation),
                f"--operation Describe --topic {topic.name}",
            )
        except Transient as error:
            if isinstance(error.__cause__, errors.UnknownTopicOrPartitionError):
                self._require_rights(topic.name)
            raise
        return {
            tp.partition: Stamped(value.offset, value.timestamp) for tp, value in offsets.items()
        }

    def _require_rights(self, topic: str) -> None:
        """Raise MissingRight if this client may not describe the topic. kafka-python then reports
        the topic as missing, and its consumer waits forever."""
        self._describe(topic)

    def _is_stuck(
        self, topic: str, doing: str, heard: float, waiting: Mapping[Any, int], word: str
    ) -> bool:
        """Return whether a consumer has returned nothing for `_STUCK_S` since `heard`.

        Raises MissingRight, and Transient after `_SILENCE_S`: its message has the offset of each
        partition in `waiting` after `word`."""
        silent = time.monotonic() - heard
        if silent > _STUCK_S:
            self._require_rights(topic)
        if silent > _SILENCE_S:
            partitions = ", ".join(
                f"partition {tp.partition} {word} {at}" for tp, at in sorted(waiting.items())
            )
            raise Transient(
                f"{doing}: expected records of {partitions}, found none in {_SILENCE_S} s; try "
                "again"
            )
        return silent > _STUCK_S

    def _ask(self, doing: str, question: Any, right: str = "") -> Any:
        """Return the answer to a request. `right` are the options of kafka-acls.sh that grant the
        rights it needs."""
        began = time.monotonic()
        try:
            if self._admin is None:
                self._admin = self._open_admin(began)
            return question(self._admin)
        except errors.TopicAlreadyExistsError:
            raise
        # RuntimeError: "Failed to find active controller id!"
        except (errors.KafkaError, OSError, ValueError, RuntimeError) as error:
            self.close()
            raise explained(self._kafka, doing, error, began, right) from error

    def _open_admin(self, began: float) -> Any:
        """Connect. After a timeout without another failure, such as a refused connection, try once
        more: slow brokers get twice the time."""
        settings = kafka_python_settings(self._kafka) | {"request_timeout_ms": _REQUEST_MS}
        try:
            return connect(KafkaAdminClient, **settings, bootstrap_timeout_ms=_BOOTSTRAP_MS)
        except errors.KafkaTimeoutError:
            cause = FAILURES.since(began, self._kafka.bootstrap_servers)
            if cause is not None and "timed out" not in str(cause):
                raise
            return connect(KafkaAdminClient, **settings, bootstrap_timeout_ms=_BOOTSTRAP_MS)

    def close(self) -> None:
        """Close the connections; the next request opens new ones. Failures are only logged: they do
        not affect completed requests."""
        broken, self._admin, self._consumer = (self._admin, self._consumer), None, None
        for connection in broken:
            try:
                if connection is not None:
                    connection.close()
            except Exception:
                LOG.debug("closing a Kafka connection failed", exc_info=True)
