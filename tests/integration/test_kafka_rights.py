"""A broker with ACLs that creates topics by itself: missing rights, deleted topics."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import pytest
from kafka.admin import ACLOperation, ResourceType
from kafka_admin import admin_of
from secure_broker import SecureBroker, running_secure_broker
from waiting import wait_for

from anabranch import config
from anabranch.common.errors import AnabranchError, MissingRight
from anabranch.kafka import source
from anabranch.kafka.client import KafkaAdapter, create_topic, new_producer
from anabranch.offsets.position import Topic

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

GROUP = "anabranch-events"
Ask = Callable[[KafkaAdapter, Topic], Any]


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SecureBroker]:
    properties = {"auto.create.topics.enable": "true"}
    with running_secure_broker(tmp_path_factory.mktemp("rights"), properties) as running:
        yield running


@pytest.fixture
def super_user(broker: SecureBroker) -> config.Kafka:
    return config.Kafka(bootstrap_servers=broker.plain)


@pytest.fixture
def user(broker: SecureBroker) -> config.Kafka:
    return config.Kafka.model_validate(broker.security("plain"))


@pytest.fixture
def topic(super_user: config.Kafka) -> Topic:
    """A topic of one record."""
    name = f"t{uuid.uuid4().hex[:12]}"
    create_topic(super_user, name, 1)
    producer = new_producer(super_user)
    producer.send(name, b"{}")
    producer.flush()
    producer.close()
    with KafkaAdapter(super_user) as adapter:
        described = adapter.describe(name)
    assert described is not None
    return described


@pytest.mark.parametrize(
    ("granted", "ask", "missing"),
    [
        ((), lambda a, t: a.describe(t.name), "Describe --topic {topic}"),
        ((), lambda a, t: a.stable_ends(t), "Describe --topic {topic}"),
        ((), lambda a, t: a.stamps_from(t, {0: 0}, {0: 1}, 1), "Describe --topic {topic}"),
        ((), lambda a, t: list(a.read_records(t.name, {0: (0, 1)})), "Describe --topic {topic}"),
        (("DESCRIBE",), lambda a, t: a.stamps_from(t, {0: 0}, {0: 1}, 1), "Read --topic {topic}"),
        (
            ("DESCRIBE",),
            lambda a, t: list(a.read_records(t.name, {0: (0, 1)})),
            "Read --topic {topic}",
        ),
        (("READ",), lambda a, t: a.retention(t.name), "DescribeConfigs --topic {topic}"),
        (("READ",), lambda a, t: a.settings(t.name), "DescribeConfigs --topic {topic}"),
        (("READ",), lambda a, t: a.partition_bytes(t.name), "Describe --cluster"),
        (("READ",), lambda a, t: a.commit_lag(GROUP, t.name, {0: 1}), f"Read --group {GROUP}"),
        (("READ",), lambda a, t: a.check_commits(GROUP), f"Read --group {GROUP}"),
        (("READ",), lambda a, t: a.group_metadata(GROUP, t.name), f"Describe --group {GROUP}"),
    ],
)
def test_a_missing_right_is_named_within_seconds(
    broker: SecureBroker,
    user: config.Kafka,
    topic: Topic,
    granted: tuple[str, ...],
    ask: Ask,
    missing: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("anabranch.kafka.client._STUCK_S", 1)
    if granted:
        broker.grant(ResourceType.TOPIC, topic.name, *(ACLOperation[name] for name in granted))
    began = time.monotonic()
    with KafkaAdapter(user) as adapter, pytest.raises(MissingRight) as raised:
        ask(adapter, topic)
    assert f"--operation {missing.format(topic=topic.name)}" in str(raised.value)
    assert time.monotonic() - began < 15


def test_the_right_to_commit_is_tried_without_a_commit(
    broker: SecureBroker, user: config.Kafka, super_user: config.Kafka, topic: Topic
) -> None:
    group = f"anabranch-{topic.name}"
    broker.grant(ResourceType.GROUP, group, ACLOperation.READ)
    with KafkaAdapter(user) as adapter:
        adapter.check_commits(group)
    with admin_of(super_user.bootstrap_servers) as admin:
        assert admin.list_group_offsets({group: None})[group] == {}


def _topics(kafka: config.Kafka) -> set[str]:
    with admin_of(kafka.bootstrap_servers) as admin:
        return set(admin.list_topics())


def _delete(kafka: config.Kafka, topic: str) -> None:
    with admin_of(kafka.bootstrap_servers) as admin:
        admin.delete_topics([topic])
    wait_for(lambda: topic not in _topics(kafka), "the topic is deleted", 120)


@pytest.mark.parametrize(
    "ask",
    [
        lambda a, t: a.describe(t.name),
        lambda a, t: a.settings(t.name),
        lambda a, t: a.stable_ends(t),
        lambda a, t: a.stamps_from(t, {0: 0}, {0: 1}, 1),
        lambda a, t: list(a.read_records(t.name, {0: (0, 1)})),
    ],
    ids=["describe", "settings", "stable_ends", "stamps_from", "read_records"],
)
def test_asking_for_a_deleted_topic_does_not_create_it(
    super_user: config.Kafka, topic: Topic, ask: Ask, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("anabranch.kafka.client._SILENCE_S", 2)
    monkeypatch.setattr("anabranch.kafka.client._CONFIRMED_AFTER_S", 1.0)
    _delete(super_user, topic.name)
    with KafkaAdapter(super_user) as adapter, suppress(AnabranchError):
        assert ask(adapter, topic) is None
    assert topic.name not in _topics(super_user)


def test_a_producer_does_not_create_a_deleted_topic(super_user: config.Kafka, topic: Topic) -> None:
    _delete(super_user, topic.name)
    producer = new_producer(super_user, max_block_ms=2000)
    with pytest.raises(Exception, match="metadata"):
        producer.send(topic.name, b"{}")
    producer.close()
    assert topic.name not in _topics(super_user)


@pytest.mark.full
def test_spark_does_not_create_a_topic_that_is_deleted_before_it_is_read(
    super_user: config.Kafka, topic: Topic, spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = source._options
    # Spark tries the task four times.
    short_timeouts = {
        "kafka.request.timeout.ms": "2000",
        "kafka.default.api.timeout.ms": "3000",
        "kafkaConsumer.pollTimeoutMs": "3000",
    }
    monkeypatch.setattr(source, "_options", lambda *given: options(*given) | short_timeouts)
    frame = source.read_ranges(spark, super_user, topic.name, {0: (0, 1)})
    planned = frame._jdf.queryExecution().toRdd()
    assert planned.getNumPartitions() == 1
    _delete(super_user, topic.name)
    with pytest.raises(Exception, match="Exception"):
        planned.count()
    assert topic.name not in _topics(super_user)
