"""Records as other clients write them, read by the Kafka adapter: every codec, header names of any bytes."""

from __future__ import annotations

import uuid
from typing import Any

import pytest
from confluent_kafka import Producer

from anabranch import config
from anabranch.kafka.client import KafkaAdapter, create_topic

RECORDS = 200
CODECS = ("none", "gzip", "snappy", "lz4", "zstd")


@pytest.fixture
def kafka(services: Any) -> config.Kafka:
    return config.Kafka(bootstrap_servers=services.kafka)


@pytest.mark.parametrize("codec", CODECS)
def test_the_adapter_reads_every_codec(kafka: config.Kafka, codec: str) -> None:
    topic, value = f"t{uuid.uuid4().hex[:12]}", b'{"event_id": "repeated"}' * 20
    create_topic(kafka, topic, 1)
    settings = {"bootstrap.servers": kafka.bootstrap_servers, "compression.type": codec, "linger.ms": 50}
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
