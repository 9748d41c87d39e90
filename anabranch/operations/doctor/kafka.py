"""Check Kafka: whether it answers, the user's permissions (by using them), and the topic's
retention."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta
from shlex import quote

from anabranch.common.errors import (
    AnabranchError,
    CodecMissing,
    ConfigurationError,
    MissingRight,
    NoTopicIds,
    Transient,
)
from anabranch.config import Environment, Kafka, Stream
from anabranch.config.mistakes import similar
from anabranch.kafka.client import KafkaAdapter, TopicSettings
from anabranch.offsets.hours import start_of
from anabranch.offsets.position import Offsets
from anabranch.operations.finding import (
    Finding,
    Issue,
    Severity,
    dev_up,
    error,
    info,
    warning,
)
from anabranch.operations.reports.status import SPARE

LOG = logging.getLogger(__name__)

_WEEK = timedelta(days=7)


@dataclass(frozen=True)
class KafkaFacts:
    """Facts about a stream's topic. `settings`: None if the topic does not exist.
    `partition_bytes`: None without `retention.bytes`, or if the sizes cannot be read. `similar`: a
    topic that exists in its place, if its name is almost the same."""

    settings: TopicSettings | None
    starts: Offsets
    ends: Offsets
    partition_bytes: dict[int, int] | None
    group_refused: MissingRight | None = None
    """The missing permission to commit offsets of the stream's group, if any."""
    similar: str | None = None


@dataclass(frozen=True)
class Unread:
    """The start of the records that the batch layer has not read: hour and start offsets."""

    hour: str
    starts: Offsets


def read(environment: Environment, stream: Stream) -> KafkaFacts:
    """Describe the topic and its settings, list its offsets, read one record and try a commit, as
    the layers do.

    Raises ConfigurationError for a missing permission, Transient when Kafka is unreachable.
    """
    with KafkaAdapter(environment.kafka) as kafka:
        topic = kafka.describe(stream.topic)
        settings = kafka.settings(stream.topic) if topic is not None else None
        if topic is None or settings is None:
            near = similar(stream.topic, kafka.topic_names())
            return KafkaFacts(None, {}, {}, None, similar=near)
        starts, ends = kafka.log_starts(topic), kafka.stable_ends(topic)
        held = {p: end - 1 for p, end in ends.items() if end > starts.get(p, 0)}
        one = dict(list(held.items())[:1])
        kafka.stamps_from(topic, one, ends, 1)
        try:
            sizes = (
                kafka.partition_bytes(stream.topic)
                if settings.retention_bytes is not None
                else None
            )
        except AnabranchError:
            sizes = None
        refused = None
        try:
            kafka.check_commits(f"anabranch-{stream.name}")
        except MissingRight as error:
            refused = error
        except Transient as error:
            LOG.debug("stream %s: permission to commit offsets not checked: %s", stream.name, error)
        return KafkaFacts(settings, starts, ends, sizes, refused)


def failed(kafka: Kafka, stream: Stream, failure: AnabranchError) -> Finding:
    if isinstance(failure, CodecMissing):
        expected = "the packages that decompress the topic's records"
        return error(
            Issue.KAFKA_CODEC,
            stream.topic,
            expected,
            str(failure),
            "pip install --force-reinstall anabranch",
        )
    if isinstance(failure, MissingRight):
        expected = "permission to describe and read the topic"
        return error(Issue.KAFKA_RIGHTS, stream.topic, expected, str(failure), failure.command)
    if isinstance(failure, NoTopicIds):
        expected = "brokers with topic ids, which identify a recreated topic"
        return error(Issue.TOPIC_IDS, stream.topic, expected, str(failure), "Kafka 2.8 or newer")
    if isinstance(failure, ConfigurationError):
        return error(
            Issue.KAFKA_RIGHTS,
            stream.topic,
            "permission to describe and read the topic",
            str(failure),
            f"kafka-acls.sh --bootstrap-server {quote(kafka.bootstrap_servers)} --add "
            "--allow-principal User:NAME --operation Read --operation Describe --operation "
            f"DescribeConfigs --topic {quote(stream.topic)}, or kafka.security in anabranch.yaml",
        )
    elsewhere = "kafka.bootstrap_servers in anabranch.yaml, and the network to it"
    remedy = dev_up("kafka.bootstrap_servers") if _is_local(kafka) else elsewhere
    return error(
        Issue.KAFKA_AWAY,
        kafka.bootstrap_servers,
        "an answer from the brokers",
        str(failure),
        remedy,
    )


def _is_local(kafka: Kafka) -> bool:
    """Return whether the brokers run on this machine, like those of `anabranch dev`."""
    return kafka.bootstrap_servers.startswith(("127.0.0.1:", "localhost:"))


def findings(
    kafka: Kafka, stream: Stream, facts: KafkaFacts, unread: Unread | None, now: datetime
) -> Iterator[Finding]:
    settings, topic = facts.settings, stream.topic
    if settings is None:
        command = f"anabranch dev topic {quote(topic)} --partitions 3"
        if not _is_local(kafka):
            command = (
                f"{_tool('kafka-topics.sh', kafka)} --create --topic {quote(topic)} --partitions 3"
            )
        found = "none"
        if facts.similar is not None:
            found = f"none of this name, but {facts.similar}"
            command = f"topic: {facts.similar} in streams/{stream.name}.yaml, or {command}"
        yield error(Issue.TOPIC_MISSING, topic, "a topic", found, command)
        return
    yield from _check_retention_time(kafka, stream, settings, unread, now)
    yield from _check_retention_bytes(kafka, stream, facts, unread)
    yield from _check_compaction(kafka, stream, settings, unread, now)
    if settings.timestamp_type != "LogAppendTime":
        expected = (
            "message.timestamp.type=LogAppendTime if producers' clocks are unreliable: it decides "
            "the hour of a record"
        )
        remedy = alter(kafka, topic, "message.timestamp.type=LogAppendTime")
        yield info(Issue.TIMESTAMP_TYPE, topic, expected, settings.timestamp_type, remedy)
    if facts.group_refused is not None:
        group = f"anabranch-{stream.name}"
        expected = (
            "permission READ on the group, to commit offsets for lag monitors (nothing else uses "
            "them)"
        )
        refused = facts.group_refused
        yield warning(Issue.GROUP_RIGHTS, group, expected, str(refused), refused.command)
    yield from _check_replicas(kafka, topic, settings)


def _check_compaction(
    kafka: Kafka, stream: Stream, settings: TopicSettings, unread: Unread | None, now: datetime
) -> Iterator[Finding]:
    """Yield a finding if compaction may remove a record before the batch layer has read it. A
    compaction lag lets the layers read first. The remedy is not the policy `delete`, because
    retention would then delete older records."""
    if "compact" not in settings.cleanup_policy:
        return
    _, needed, backlog = _waiting_times(stream, unread, now)
    severity = Severity.INFO if "compacted" in stream.batch.allow_gaps else Severity.ERROR
    if settings.compaction_lag >= needed:
        return
    expected = (
        f"min.compaction.lag.ms of {words(needed)} or more: records are read before "
        f"compaction{backlog}"
    )
    remedy = alter(
        kafka, stream.topic, f"min.compaction.lag.ms={_millis(needed, timedelta(days=2))}"
    )
    given = (
        f"cleanup.policy={settings.cleanup_policy}, min.compaction.lag.ms of "
        f"{words(settings.compaction_lag)}"
    )
    yield Finding(Issue.TOPIC_COMPACTED, severity, stream.topic, expected, given, remedy)


def _millis(needed: timedelta, least: timedelta) -> int:
    """Return `needed` in milliseconds, rounded up to whole days, and at least `least`."""
    days = timedelta(days=-(-needed // timedelta(days=1)))
    return max(least, days) // timedelta(milliseconds=1)


def _waiting_times(
    stream: Stream, unread: Unread | None, now: datetime
) -> tuple[timedelta, timedelta, str]:
    """Return how long records have waited for the batch layer, how long Kafka must keep records (a
    day longer than they wait), and the reason as text."""
    waits = max(timedelta(), now - start_of(unread.hour)) if unread is not None else timedelta()
    backlog = f" (it has not read {unread.hour} and later hours)" if unread is not None else ""
    # The batch layer reads an hour after the hour's end and its grace.
    return waits, max(waits, timedelta(hours=1) + stream.batch.grace) + SPARE, backlog


def _check_retention_time(
    kafka: Kafka, stream: Stream, settings: TopicSettings, unread: Unread | None, now: datetime
) -> Iterator[Finding]:
    waits, needed, backlog = _waiting_times(stream, unread, now)
    if settings.retention is None or settings.retention >= needed:
        return
    expected = (
        f"retention.ms of {words(needed)} or more: the batch layer's unread records, plus a "
        f"day{backlog}"
    )
    severity = Severity.ERROR if settings.retention <= waits else Severity.WARNING
    remedy = alter(kafka, stream.topic, f"retention.ms={_millis(needed, _WEEK)}")
    yield Finding(
        Issue.RETENTION_TIME, severity, stream.topic, expected, words(settings.retention), remedy
    )


def _check_retention_bytes(
    kafka: Kafka, stream: Stream, facts: KafkaFacts, unread: Unread | None
) -> Iterator[Finding]:
    limit = facts.settings.retention_bytes if facts.settings is not None else None
    if limit is None:
        return
    remedy = alter(kafka, stream.topic, "retention.bytes=-1")
    expected = (
        "retention.bytes=-1, or twice the bytes that the batch layer has not read of each partition"
    )
    if facts.partition_bytes is None or unread is None:
        found = f"{limit} bytes a partition, and an unknown number of unread bytes"
        yield info(Issue.RETENTION_BYTES, stream.topic, expected, found, remedy)
        return
    waiting = unread_bytes(facts, facts.partition_bytes, unread.starts)
    partition = max(waiting, key=lambda p: waiting[p], default=None)
    if partition is None or limit >= 2 * waiting[partition]:
        return
    severity = Severity.ERROR if limit < waiting[partition] else Severity.WARNING
    found = f"{limit} bytes a partition, and {waiting[partition]} unread in partition {partition}"
    yield Finding(Issue.RETENTION_BYTES, severity, stream.topic, expected, found, remedy)


def unread_bytes(facts: KafkaFacts, sizes: dict[int, int], starts: Offsets) -> dict[int, int]:
    """Return the estimated bytes from `starts` on, for records of equal size. Pure."""
    waiting = {}
    for p, end in facts.ends.items():
        start = facts.starts.get(p, 0)
        if end > start:
            waiting[p] = (
                sizes.get(p, 0)
                * (end - min(end, max(start, starts.get(p, start))))
                // (end - start)
            )
    return waiting


def _check_replicas(kafka: Kafka, topic: str, settings: TopicSettings) -> Iterator[Finding]:
    if settings.replicas < 2 and settings.brokers == 1 and _is_local(kafka):
        return  # one broker, as on a development machine
    if settings.replicas < 2:
        expected = "a replication factor of 3: with one replica, losing a broker loses records"
        severity = Severity.WARNING if settings.brokers > 1 else Severity.INFO
        given = f"{settings.replicas}, of {settings.brokers} brokers"
        remedy = (
            f"{_tool('kafka-reassign-partitions.sh', kafka)} --execute, with three brokers for "
            "each partition"
        )
        yield Finding(Issue.REPLICATION, severity, topic, expected, given, remedy)
    elif settings.min_insync < 2:
        expected = (
            "min.insync.replicas=2: Kafka acknowledges a record only after two brokers stored it"
        )
        remedy = alter(kafka, topic, "min.insync.replicas=2")
        yield warning(Issue.MIN_INSYNC, topic, expected, str(settings.min_insync), remedy)


def alter(kafka: Kafka, topic: str, setting: str) -> str:
    """Return the command that changes a topic's setting. Pure."""
    return (
        f"{_tool('kafka-configs.sh', kafka)} --alter --topic {quote(topic)} --add-config {setting}"
    )


def _tool(name: str, kafka: Kafka) -> str:
    secured = " --command-config client.properties" if kafka.security else ""
    return f"{name} --bootstrap-server {quote(kafka.bootstrap_servers)}{secured}"


def words(time: timedelta) -> str:
    """Return a duration as short text: `36 hours`, `7 days`. Pure."""
    for unit, size in (
        ("day", timedelta(days=1)),
        ("hour", timedelta(hours=1)),
        ("minute", timedelta(minutes=1)),
    ):
        if time >= 3 * size or (time >= size and not time % size):
            number = time // size
            return f"{number} {unit}{'s' if number != 1 else ''}"
    return f"{time.total_seconds():.0f} seconds"
