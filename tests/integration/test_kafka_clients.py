"""The Kafka adapter against a real broker: records as other clients write them, transactions of two
processes, how long Spark waits at the end of a log, and answers of a broker that does not know a
topic, or all its partitions, for a moment: it is asked again before it is believed."""

import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from typing import Any, TypeVar

import pytest
from confluent_kafka import Producer
from kafka import KafkaConsumer
from kafka_admin import admin_of
from pyspark.sql import SparkSession
from waiting import wait_for

from anabranch import config
from anabranch.common.errors import NoTopicIds, Transient
from anabranch.kafka import client, source
from anabranch.kafka.client import KafkaAdapter, create_topic, new_producer
from anabranch.kafka.transactions import Outgoing, TransactionalProducer
from anabranch.offsets.hour_ends import MOST_FETCHED
from anabranch.offsets.position import Position, Topic, is_contradicted
from anabranch.protocol.state import check_topic

RECORDS = 200
T = TypeVar("T")
CODECS = ("none", "gzip", "snappy", "lz4", "zstd")


def new_topic(kafka: config.Kafka, partitions: int = 1) -> str:
    topic = f"t{uuid.uuid4().hex[:12]}"
    create_topic(kafka, topic, partitions)
    return topic


def found(adapter: KafkaAdapter, topic: str) -> Topic:
    described = adapter.describe(topic)
    assert described is not None
    return described


def read_all(adapter: KafkaAdapter, topic: Topic) -> list[Any]:
    """The records of the first partition."""
    ranges = {0: (0, adapter.stable_ends(topic)[0])}
    return [r for _, records in adapter.read_records(topic.name, ranges) for r in records]


@pytest.mark.parametrize("codec", CODECS)
def test_the_adapter_reads_every_codec(kafka: config.Kafka, codec: str) -> None:
    topic, value = new_topic(kafka), b'{"event_id": "repeated"}' * 20
    servers = {"bootstrap.servers": kafka.bootstrap_servers}
    producer = Producer(servers | {"compression.type": codec, "linger.ms": 50})
    for _ in range(RECORDS):
        producer.produce(topic, value)
    assert producer.flush(30) == 0
    with KafkaAdapter(kafka) as adapter:
        described = found(adapter, topic)
        ends = adapter.stable_ends(described)
        compressed = adapter.partition_bytes(topic)[0] < RECORDS * len(value) / 2
        assert compressed is (codec != "none")
        assert len(adapter.stamps_from(described, {0: 0}, ends, 15)[0]) == 15
        records = read_all(adapter, described)
    assert [r.offset for r in records] == list(range(RECORDS))
    assert {r.value for r in records} == {value}


def test_the_adapter_reads_header_names_of_any_bytes(kafka: config.Kafka) -> None:
    """kafka-python decodes header names strictly, and Kafka does not look at them."""
    topic, name = new_topic(kafka), "caf\u00e9"

    class AnyBytes(str):
        def encode(self, *_: Any) -> bytes:
            return b"\xff\xfeid"

    producer = new_producer(kafka, compression_type="gzip")
    for i in range(20):
        headers = [(AnyBytes("any") if i % 5 == 2 else name, b"v"), ("n", b"")]
        producer.send(topic, b"%d" % i, headers=headers)
    producer.flush()
    producer.close()
    with KafkaAdapter(kafka) as adapter:
        described = found(adapter, topic)
        ends = adapter.stable_ends(described)
        assert len(adapter.stamps_from(described, {0: 0}, ends, 15)[0]) == 15
        records = read_all(adapter, described)
    assert [r.value for r in records] == [b"%d" % i for i in range(20)]
    # What Java's client makes of the bytes, so Spark's reader too.
    assert [r.headers for r in records] == [
        [("\ufffd\ufffdid" if i % 5 == 2 else name, b"v"), ("n", b"")] for i in range(20)
    ]


def test_records_of_an_open_transaction_are_accepted_first(kafka: config.Kafka) -> None:
    topic = new_topic(kafka)
    producer = Producer({"bootstrap.servers": kafka.bootstrap_servers, "transactional.id": topic})
    producer.init_transactions(30)
    producer.begin_transaction()
    producer.produce(topic, b"{}")
    assert producer.flush(30) == 0
    with KafkaAdapter(kafka) as adapter:
        described = found(adapter, topic)
        assert (adapter.stable_ends(described), adapter.accepted_ends(described)) == (
            {0: 0},
            {0: 1},
        )
        producer.abort_transaction(30)
        # The record, and the marker of its end, which brokers report a moment later.
        assert adapter.stable_ends(described, {0: 2}) == adapter.accepted_ends(described) == {0: 2}


def test_brokers_without_ids_are_out(kafka: config.Kafka, monkeypatch: pytest.MonkeyPatch) -> None:
    """The client cannot distinguish a recreated topic, as with brokers before 2.8."""
    topic = new_topic(kafka)
    settings = client.kafka_python_settings
    monkeypatch.setattr(
        client, "kafka_python_settings", lambda kafka: settings(kafka) | {"api_version": (2, 6)}
    )
    with KafkaAdapter(kafka) as adapter, pytest.raises(NoTopicIds, match=r"Kafka 2\.8 or newer"):
        adapter.describe(topic)


def test_the_oldest_large_record(kafka: config.Kafka, monkeypatch: pytest.MonkeyPatch) -> None:
    """The hazard: a look at each of 500 partitions fetches 500 MB where records have 1 MB."""
    partitions, size = 40, 100_000
    topic = new_topic(kafka, partitions)
    now = int(time.time() * 1000)
    stamps = {p: (now - 3_600_000, now - 600_000 + p * 1_000) for p in range(partitions)}
    stamps[31] = (now - 3_600_000, now - 1_800_000)
    producer = Producer({"bootstrap.servers": kafka.bootstrap_servers, "linger.ms": 0})
    for p, both in stamps.items():
        for stamp in both:
            # Each in a batch of its own.
            producer.produce(topic, b"x" * size, partition=p, timestamp=stamp)
            assert producer.flush(30) == 0
    fetched: list[int] = []

    class Counting(KafkaConsumer):  # type: ignore[misc]
        def poll(self, *given: Any, **named: Any) -> Any:
            records = super().poll(*given, **named)
            fetched.extend(len(r.value) for of_one in records.values() for r in of_one)
            return records

    monkeypatch.setattr(client, "KafkaConsumer", Counting)
    starts, high = dict.fromkeys(range(partitions), 1), now
    with KafkaAdapter(kafka) as adapter:
        described = found(adapter, topic)
        ends = adapter.stable_ends(described)
        assert adapter.oldest_stamp(described, starts, ends, now - 7_200_000, high) == stamps[31][1]
        assert adapter.oldest_stamp(described, ends, ends, now - 7_200_000, high) is None
        assert sum(fetched) <= (MOST_FETCHED + 4) * size
        fetched.clear()
        adapter.stamps_from(described, starts, ends, 1)
        assert sum(fetched) >= partitions * size, "the hazard did not happen"


def test_a_process_that_was_replaced_commits_nothing(kafka: config.Kafka) -> None:
    topic = new_topic(kafka)
    with (
        KafkaAdapter(kafka) as adapter,
        closing(TransactionalProducer(kafka, topic, 1 << 20)) as replaced,
    ):
        replaced.send(topic, [Outgoing(b"a", b"1")], "one")
        with closing(TransactionalProducer(kafka, topic, 1 << 20)) as newer:
            with pytest.raises(Transient, match="another process has replaced it"):
                replaced.send(topic, [Outgoing(b"b", b"2")], "two")
            assert newer.committed(topic, adapter) == "one"
            newer.send(topic, [Outgoing(b"c", b"3")], "three")
            assert newer.committed(topic, adapter) == "three"
            # Brokers answer a commit before the group's coordinator has its offsets.
            for position in map(str, range(30)):
                newer.send(topic, [], position)
                assert newer.committed(topic, adapter) == position
        records = read_all(adapter, found(adapter, topic))
        assert [r.value for r in records] == [b"1", b"3"]


def test_spark_does_not_wait_at_the_end_of_each_partitions_log(
    kafka: config.Kafka, spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The hazard: Spark asks for a log's end while the consumer waits for later records."""
    partitions = 8
    topic = new_topic(kafka, partitions)
    producer = Producer({"bootstrap.servers": kafka.bootstrap_servers})
    for partition in range(partitions):
        producer.produce(topic, b"{}", partition=partition)
    assert producer.flush(30) == 0

    def seconds() -> float:
        began = time.monotonic()
        frame = source.read_ranges(spark, kafka, topic, dict.fromkeys(range(partitions), (0, 1)))
        assert len(frame.select("value").collect()) == partitions
        return time.monotonic() - began

    ours = min(seconds(), seconds())
    options = source._options
    monkeypatch.setattr(
        source, "_options", lambda *of: options(*of) | {"kafka.fetch.max.wait.ms": "500"}
    )
    # Kafka's default: each of two threads waits half a second for each of four partitions.
    assert ours + 1 < min(seconds(), seconds())


@contextmanager
def asked_meanwhile(question: Callable[[], T]) -> Iterator[list[T]]:
    """The answer to a question that is being asked while the body runs."""
    answers: list[T] = []
    thread = threading.Thread(target=lambda: answers.append(question()))
    thread.start()
    yield answers
    thread.join(300)


def first_answer(adapter: KafkaAdapter, topic: str, wanted: Callable[[Topic | None], bool]) -> None:
    """Return once a broker has given the answer that must not be believed at once."""
    wait_for(lambda: wanted(adapter._describe(topic)), "the hazard to happen", 30, 0)


def test_a_topic_unknown_for_a_moment_is_requested_again(kafka: config.Kafka) -> None:
    name = f"t{uuid.uuid4().hex[:12]}"
    with KafkaAdapter(kafka) as one, KafkaAdapter(kafka) as other:
        with asked_meanwhile(lambda: one.describe(name)) as answers:
            first_answer(other, name, lambda topic: topic is None)
            assert not answers, "one answer was believed at once"
            create_topic(kafka, name, 1)
        assert answers[0] is not None and answers[0].partitions == (0,)


def test_partitions_that_brokers_do_not_know_yet_are_no_contradiction(kafka: config.Kafka) -> None:
    name = new_topic(kafka)
    operator = admin_of(kafka.bootstrap_servers)
    with KafkaAdapter(kafka) as one, KafkaAdapter(kafka) as other, operator as admin:
        position = Position(found(one, name).id, {0: 5, 1: 7})
        with asked_meanwhile(lambda: one.describe(name, position)) as answers:
            first_answer(other, name, lambda topic: is_contradicted(topic, position))
            admin.create_partitions({name: 2})
        assert answers[0] is not None
        assert check_topic(position, answers[0], name) == position


def test_a_log_that_ends_below_the_position_is_requested_again(
    kafka: config.Kafka, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The hazard: a leader that was replaced, and has not noticed, answers with an earlier end."""
    name = new_topic(kafka)
    with KafkaAdapter(kafka) as one:
        topic = found(one, name)
        assert one.stable_ends(topic) == {0: 0}
        with asked_meanwhile(lambda: one.stable_ends(topic, {0: 2})) as answers:
            producer = new_producer(kafka)
            for _ in range(2):
                producer.send(name, b"{}", partition=0)
            producer.flush()
            producer.close()
        assert answers == [{0: 2}]
        # An answer that brokers repeat is accepted: the records were lost.
        monkeypatch.setattr(client, "_CONFIRMED_AFTER_S", 1.0)
        assert one.stable_ends(topic, {0: 3}) == {0: 2}


@pytest.mark.usefixtures("single_broker")
def test_a_repeated_answer_of_brokers_is_accepted_within_seconds(kafka: config.Kafka) -> None:
    with KafkaAdapter(kafka) as one:
        assert one.describe(f"t{uuid.uuid4().hex[:12]}") is None
