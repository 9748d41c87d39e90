"""Producers of other languages: all programs of `producers/` have the same input and output.

An input line has partition, timestamp in milliseconds, key, value and headers, separated by tabs.
Keys, values, and names and values of headers are in base64, `-` for null; headers are `name:value`,
separated by commas.
"""

import shutil
from base64 import b64encode
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import go_tools
from confluent_kafka import Producer
from maven import cached
from programs import output_of

from anabranch import config
from anabranch.kafka.client import new_producer
from anabranch.spark.jars import ensure_jars
from anabranch.spark.java import require_java, spark_home

_PROGRAMS = Path(__file__).with_name("producers")
_KAFKAJS = "2.2.4"


@dataclass(frozen=True)
class Sent:
    """A record to send."""

    partition: int
    timestamp_ms: int
    key: bytes | None
    value: bytes | None
    headers: tuple[tuple[bytes, bytes | None], ...] = ()

    @property
    def line(self) -> str:
        headers = ",".join(f"{_packed(name)}:{_packed(value)}" for name, value in self.headers)
        return f"{self.partition}\t{self.timestamp_ms}\t{_packed(self.key)}\t{_packed(self.value)}\t{headers}\n"


Send = Callable[[str, str, Sequence[Sent]], list[tuple[int, int]]]
"""Function of brokers, topic and records: sends with acks=all; partitions and offsets."""


def _packed(value: bytes | None) -> str:
    return "-" if value is None else b64encode(value).decode()


def _by_program(command: Sequence[object], records: Sequence[Sent]) -> list[tuple[int, int]]:
    printed = output_of(*command, input="".join(record.line for record in records))
    acknowledged = [line.split() for line in printed.splitlines()]
    return [(int(partition), int(offset)) for partition, offset in acknowledged]


def send_by_java(servers: str, topic: str, records: Sequence[Sent]) -> list[tuple[int, int]]:
    """Send with the Java client of Spark's jars."""
    jars = [jar for jar in ensure_jars().spark if jar.name.startswith("kafka-clients")]
    for name in ("slf4j-api", "zstd-jni"):
        jars += (spark_home() / "jars").glob(f"{name}-*.jar")
    class_path = ":".join(map(str, jars))
    command = [require_java(), "-cp", class_path, _PROGRAMS / "Send.java", servers, topic]
    return _by_program(command, records)


def send_by_franz_go(servers: str, topic: str, records: Sequence[Sent]) -> list[tuple[int, int]]:
    return _by_program([go_tools.ensure_own(_PROGRAMS), "franz-go", servers, topic], records)


def send_by_sarama(servers: str, topic: str, records: Sequence[Sent]) -> list[tuple[int, int]]:
    return _by_program([go_tools.ensure_own(_PROGRAMS), "sarama", servers, topic], records)


def send_by_kafkajs(servers: str, topic: str, records: Sequence[Sent]) -> list[tuple[int, int]]:
    def fill(part: Path) -> None:
        npm = shutil.which("npm")
        assert npm is not None, "expected node and npm on the PATH, found none; install Node.js"
        options = ("--no-audit", "--no-fund", "--prefix", part)
        output_of(npm, "install", *options, f"kafkajs@{_KAFKAJS}")

    modules = cached(f"kafkajs-{_KAFKAJS}", 600, fill) / "node_modules"
    command = ("env", f"NODE_PATH={modules}", "node", _PROGRAMS / "send.js", servers, topic)
    return _by_program(command, records)


def send_by_librdkafka(servers: str, topic: str, records: Sequence[Sent]) -> list[tuple[int, int]]:
    producer = Producer({"bootstrap.servers": servers, "acks": "all", "compression.type": "zstd"})
    sent: list[tuple[int, int]] = []

    def delivered(error: Any, message: Any) -> None:
        assert error is None, error
        sent.append((message.partition(), message.offset()))

    for record in records:
        headers: Any = [(name.decode(), value) for name, value in record.headers]
        producer.produce(
            topic, record.value, record.key, record.partition, timestamp=record.timestamp_ms,
            headers=headers, on_delivery=delivered,
        )  # fmt: skip
        producer.flush(30)
    return sent


def send_by_kafka_python(
    servers: str, topic: str, records: Sequence[Sent]
) -> list[tuple[int, int]]:
    producer = new_producer(config.Kafka(bootstrap_servers=servers), compression_type="snappy")
    sent = []
    for r in records:
        headers = [(name.decode(), value) for name, value in r.headers]
        future = producer.send(topic, r.value, r.key, headers, r.partition, r.timestamp_ms)
        sent.append(future.get(timeout=30))
    producer.close()
    return [(metadata.partition, metadata.offset) for metadata in sent]


CLIENTS: dict[str, Send] = {
    "java": send_by_java, "librdkafka": send_by_librdkafka, "kafka-python": send_by_kafka_python,
    "franz-go": send_by_franz_go, "sarama": send_by_sarama, "kafkajs": send_by_kafkajs,
}  # fmt: skip
ANY_HEADER_NAME = ("franz-go", "sarama")
"""Clients that accept any bytes as header names; the others accept text."""
