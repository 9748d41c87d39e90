"""Records for a Kafka cluster whose brokers move and fail; all acknowledged ones must be served."""

from __future__ import annotations

import os
import threading
from datetime import UTC, datetime, timedelta
from functools import partial

from commands import Command, call
from confluent_kafka import KafkaError, Message, Producer
from kafka_cluster import KafkaCluster
from world import World, event, past_hour

from anabranch.offsets.hours import start_of

PARTITIONS = 4


class Feed:
    """A producer that sends in a thread, or by `send`, and keeps the acknowledged records. `acks`
    is Kafka's setting.

    Records have null keys and headers; some are tombstones, which become dead letters. With `keys`,
    records have that number of different keys. With `size`, they have about that number of
    incompressible bytes.
    """

    def __init__(
        self,
        cluster: KafkaCluster,
        topic: str,
        rate: int = 100,
        partitions: int = PARTITIONS,
        acks: str = "all",
        size: int = 0,
        keys: int = 0,
    ) -> None:
        self._topic, self._rate, self._partitions = topic, rate, partitions
        self._size, self._keys = size, keys
        self.rows: list[tuple[int, int, str]] = []
        self.tombstones: list[tuple[int, int]] = []
        self.failures: list[KafkaError] = []
        self._stop = threading.Event()
        self._producer = Producer(
            {
                "bootstrap.servers": cluster.super_servers, "acks": acks,
                "enable.idempotence": acks == "all", "message.timeout.ms": 120_000,
                "compression.type": "lz4", "linger.ms": 20,
            }
        )  # fmt: skip
        self._thread = threading.Thread(target=self._run, daemon=True)

    def send(self, count: int, prefix: str, at: datetime) -> None:
        for i in range(count):
            self._one(f"{prefix}-{i}", i, at)
        assert self._producer.flush(60) == 0

    def add(self, other: Feed) -> None:
        """Add the acknowledged records of another feed of the same topic to this one's."""
        self.rows += other.rows
        self.tombstones += other.tombstones
        self.failures += other.failures

    @property
    def acknowledged(self) -> int:
        return len(self.rows) + len(self.tombstones)

    def __enter__(self) -> Feed:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(30)
        assert self._producer.flush(180) == 0

    def _run(self) -> None:
        number = 0
        while not self._stop.wait(1 / self._rate):
            self._one(f"live-{number}", number, datetime.now(UTC))
            number += 1

    def _one(self, name: str, number: int, at: datetime) -> None:
        tombstone = number % 50 == 7
        fields = {"player": os.urandom(self._size // 2).hex()} if self._size else {}
        value = None if tombstone else event(name, at, **fields)
        key = b"k%d" % (number % (self._keys or 97)) if tombstone or self._keys else None
        self._producer.produce(
            self._topic,
            value,
            key,
            number % self._partitions,
            timestamp=int(at.timestamp() * 1000),
            headers=[("caf\u00e9", b"\xff\x00"), ("none", None)],
            on_delivery=partial(self._delivered, None if tombstone else name),
        )
        self._producer.poll(0)

    def _delivered(self, name: str | None, error: KafkaError | None, message: Message) -> None:
        if error is not None:
            self.failures.append(error)
            return
        at = (message.partition() or 0, message.offset() or 0)
        if name is None:
            self.tombstones.append(at)
        else:
            self.rows.append((*at, name))


def middle_of(ago: int) -> datetime:
    return start_of(past_hour(ago)) + timedelta(minutes=30)


def progress(one: World, feed: Feed, job: Command) -> None:
    """Wait until the speed layer has published all records that are acknowledged now."""
    until = feed.acknowledged
    job.until(lambda: one.published >= until, f"{until} offsets to be published", 400)


def assert_exact(one: World, feed: Feed) -> None:
    assert feed.failures == []
    assert one.contents() == sorted(feed.rows)
    assert one.dead_offsets() == sorted(feed.tombstones)


def assert_exact_through_both_layers(one: World, feed: Feed) -> None:
    """Assert that the speed layer serves exactly the acknowledged records, that the batch layer
    accepts every ended hour and serves the same, and that the audit agrees with Kafka."""
    one.speed()
    assert_exact(one, feed)
    results = one.batch()
    assert results and {(r.decision, r.reason) for r in results} == {("accepted", None)}, results
    assert_exact(one, feed)
    call(one, "audit", one.name)
