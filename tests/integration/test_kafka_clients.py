"""Records as other clients write them, read by the Kafka adapter: every codec, header names of any
bytes. Transactions of two processes. How long Spark waits at the end of a log."""

import time
import uuid
from contextlib import closing
from typing import Any

import pytest
from confluent_kafka import Producer
from kafka import KafkaConsumer
from pyspark.sql import SparkSession

from anabranch import config
from anabranch.common.errors import NoTopicIds, Transient
from anabranch.kafka import client, source
from anabranch.kafka.client import KafkaAdapter, create_topic
from anabranch.kafka.transactions import Outgoing, TransactionalProducer
from anabranch.offsets.hour_ends import MOST_FETCHED

RECORDS = 200
CODECS = ("none", "gzip", "snappy", "lz4", "zstd")


@pytest.fixture
def kafka(services: Any) -> config.Kafka:
    return config.Kafka(bootstrap_servers=services.kafka)


@pytest.mark.parametrize("codec", CODECS)
def test_the_adapter_reads_every_codec(kafka: config.Kafka, codec: str) -> None:
    topic, value = f"t{uuid.uuid4().hex[:12]}", b'{"event_id": "repeated"}' * 20
    create_topic(kafka, topic, 1)
    settings = {
        "bootstrap.servers": kafka.bootstrap_servers,
        "compression.type": codec,
        "linger.ms": 50,
    }
    producer = Producer(settings)
    for _ in range(RECORDS):
        producer.produce(topic, value)
    assert producer.flush(30) == 0
    with KafkaAdapter(kafka) as adapter:
        described = adapter.describe(topic)
        assert described is not None
        ends = adapter.stable_ends(described)
        compressed = adapter.partition_bytes(topic)[0] < RECORDS * len(value) / 2
        assert compressed is (codec != "none")
        assert len(adapter.stamps_from(described, {0: 0}, ends, 15)[0]) == 15
        records = [r for _, piece in adapter.read_records(topic, {0: (0, ends[0])}) for r in piece]
    assert [r.offset for r in records] == list(range(RECORDS))
    assert {r.value for r in records} == {value}


def test_the_adapter_reads_header_names_of_any_bytes(kafka: config.Kafka) -> None:
    """kafka-python decodes header names strictly, and Kafka does not look at them."""
    topic, name = f"t{uuid.uuid4().hex[:12]}", "caf\u00e9"
    create_topic(kafka, topic, 1)

    class AnyBytes(str):
        def encode(self, *_: Any) -> bytes:
            return b"\xff\xfeid"

    producer = client.new_producer(kafka, compression_type="gzip")
    for i in range(20):
        producer.send(
            topic, b"%d" % i, headers=[(AnyBytes("any") if i % 5 == 2 else name, b"v"), ("n", b"")]
        )
    producer.flush()
    producer.close()
    with KafkaAdapter(kafka) as adapter:
        described = adapter.describe(topic)
        assert described is not None
        ends = adapter.stable_ends(described)
        assert len(adapter.stamps_from(described, {0: 0}, ends, 15)[0]) == 15
        records = [r for _, piece in adapter.read_records(topic, {0: (0, ends[0])}) for r in piece]
    assert [r.value for r in records] == [b"%d" % i for i in range(20)]
    # What Java's client makes of the bytes, so Spark's reader too.
    assert [r.headers for r in records] == [
        [("\ufffd\ufffdid" if i % 5 == 2 else name, b"v"), ("n", b"")] for i in range(20)
    ]


def test_records_of_an_open_transaction_are_accepted_first(kafka: config.Kafka) -> None:
    topic = f"t{uuid.uuid4().hex[:12]}"
    create_topic(kafka, topic, 1)
    producer = Producer({"bootstrap.servers": kafka.bootstrap_servers, "transactional.id": topic})
    producer.init_transactions(30)
    producer.begin_transaction()
    producer.produce(topic, b"{}")
    assert producer.flush(30) == 0
    with KafkaAdapter(kafka) as adapter:
        described = adapter.describe(topic)
        assert described is not None
        assert (adapter.stable_ends(described), adapter.accepted_ends(described)) == (
            {0: 0},
            {0: 1},
        )
        producer.abort_transaction(30)
        # The record, and the marker of its end, which brokers report a moment later.
        assert adapter.stable_ends(described, {0: 2}) == adapter.accepted_ends(described) == {0: 2}


def test_brokers_without_ids_are_out(kafka: config.Kafka, monkeypatch: pytest.MonkeyPatch) -> None:
    """A recreated topic could not be distinguished from the deleted one. The client acts as with
    brokers before 2.8."""
    topic = f"t{uuid.uuid4().hex[:12]}"
    create_topic(kafka, topic, 1)
    settings = client.kafka_python_settings
    monkeypatch.setattr(
        client, "kafka_python_settings", lambda kafka: settings(kafka) | {"api_version": (2, 6)}
    )
    with KafkaAdapter(kafka) as adapter, pytest.raises(NoTopicIds, match=r"Kafka 2\.8 or newer"):
        adapter.describe(topic)


def test_the_oldest_large_record(kafka: config.Kafka, monkeypatch: pytest.MonkeyPatch) -> None:
    """The hazard: a look at each of 500 partitions fetches 500 MB where records have 1 MB."""
    topic, partitions, size = f"t{uuid.uuid4().hex[:12]}", 40, 100_000
    create_topic(kafka, topic, partitions)
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
        described = adapter.describe(topic)
        assert described is not None
        ends = adapter.stable_ends(described)
        assert adapter.oldest_stamp(described, starts, ends, now - 7_200_000, high) == stamps[31][1]
        assert adapter.oldest_stamp(described, ends, ends, now - 7_200_000, high) is None
        assert sum(fetched) <= (MOST_FETCHED + 4) * size
        fetched.clear()
        adapter.stamps_from(described, starts, ends, 1)
        assert sum(fetched) >= partitions * size, "the hazard did not happen"


def test_a_process_that_was_replaced_commits_nothing(kafka: config.Kafka) -> None:
    topic = f"t{uuid.uuid4().hex[:12]}"
    create_topic(kafka, topic, 1)
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
        described = adapter.describe(topic)
        assert described is not None
        ranges = {0: (0, adapter.stable_ends(described)[0])}
        assert [r.value for _, records in adapter.read_records(topic, ranges) for r in records] == [
            b"1",
            b"3",
        ]


def test_spark_does_not_wait_at_the_end_of_each_partitions_log(
    kafka: config.Kafka, spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The hazard: Spark asks for a log's end on a connection on which the consumer already waits
    for later records."""
    topic, partitions = f"t{uuid.uuid4().hex[:12]}", 8
    create_topic(kafka, topic, partitions)
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
