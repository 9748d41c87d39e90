"""Three brokers with three replicas and ACLs under both layers: they move leaders, restart and die, and cost no row."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from commands import Command, run, started
from confluent_kafka import KafkaError, Message, Producer
from kafka_cluster import KafkaCluster, running_cluster
from pyspark.sql import SparkSession
from world import World, event, past_hour

from anabranch import config
from anabranch.kafka.client import create_topic

PARTITIONS = 4
PAST, BEFORE = 1, 2  # hours ago

Make = Callable[..., World]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KafkaCluster]:
    with running_cluster(tmp_path_factory.mktemp("cluster")) as running:
        yield running


@pytest.fixture
def make(tmp_path: Path, environment: dict[str, Any], spark: SparkSession, cluster: KafkaCluster) -> Iterator[Make]:
    """Makes a stream whose user has the rights of docs/how-to/deploy/services.md, and a topic of three replicas."""
    made: list[World] = []

    def new(**topic: str) -> World:
        settings = copy.deepcopy(environment) | {"kafka": cluster.section}
        one = World(tmp_path / f"conf{len(made)}", settings, spark)
        made.append(one)
        create_topic(config.Kafka(bootstrap_servers=cluster.super_servers), one.name, PARTITIONS, topic)
        cluster.allow(one.name, f"anabranch-{one.name}")
        cluster.await_in_sync(one.name, len(cluster.ports) - len(cluster.gone))
        one.apply()
        return one

    yield new
    for one in made:
        one.kafka.close()


class Feed:
    """A producer that every replica in sync acknowledges, in a thread; it remembers what was acknowledged.

    Null keys, header names of any bytes, and tombstones, which become dead letters.
    """

    def __init__(self, cluster: KafkaCluster, topic: str, rate: int) -> None:
        self._topic, self._rate = topic, rate
        self.rows: list[tuple[int, int, str]] = []
        self.tombstones: list[tuple[int, int]] = []
        self.failures: list[KafkaError] = []
        self._stop = threading.Event()
        self._producer = Producer(
            {
                "bootstrap.servers": cluster.super_servers, "acks": "all", "enable.idempotence": True,
                "message.timeout.ms": 120_000, "compression.type": "lz4", "linger.ms": 20,
            }
        )  # fmt: skip
        self._thread = threading.Thread(target=self._run, daemon=True)

    def send(self, count: int, prefix: str, at: datetime) -> None:
        for i in range(count):
            self._one(f"{prefix}-{i}", i, at)
        assert self._producer.flush(60) == 0

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
        value = None if tombstone else event(name, at)
        key = b"k%d" % (number % 97) if tombstone else None
        self._producer.produce(
            self._topic, value, key, number % PARTITIONS, timestamp=int(at.timestamp() * 1000),
            headers=[("caf\u00e9", b"\xff\x00"), ("none", None)],
            on_delivery=lambda error, message: self._delivered(error, message, None if tombstone else name),
        )  # fmt: skip
        self._producer.poll(0)

    def _delivered(self, error: KafkaError | None, message: Message, name: str | None) -> None:
        if error is not None:
            self.failures.append(error)
            return
        at = (message.partition() or 0, message.offset() or 0)
        if name is None:
            self.tombstones.append(at)
        else:
            self.rows.append((*at, name))


def middle_of(ago: int) -> datetime:
    return datetime.strptime(past_hour(ago), "%Y-%m-%dT%H").replace(tzinfo=UTC) + timedelta(minutes=30)


def progress(one: World, feed: Feed, job: Command) -> None:
    """Until the speed layer has published all that is acknowledged by now."""
    until = len(feed.rows) + len(feed.tombstones)
    job.until(lambda: one.published >= until, f"{until} offsets to be published", 180)


def assert_exact(one: World, feed: Feed) -> None:
    assert feed.failures == []
    assert one.contents() == sorted(feed.rows)
    assert sorted((r["kafka_partition"], r["kafka_offset"]) for r in one.dead()) == sorted(feed.tombstones)


def test_brokers_that_move_restart_and_die_cost_no_row(make: Make, cluster: KafkaCluster) -> None:
    """Rolling restarts, kills of leaders, and a broker lost for good; the batch layer rebuilds hours meanwhile."""
    one = make()
    before, past = past_hour(BEFORE), past_hour(PAST)
    feed = Feed(cluster, one.name, rate=100)
    feed.send(400, "before", middle_of(BEFORE))
    feed.send(400, "past", middle_of(PAST))
    seen = [cluster.leaders(one.name)]
    with started(one, "speed", one.name) as speed, feed:
        progress(one, feed, speed)
        # A rolling restart: each node's leaders move, and move back.
        with started(one, "batch", one.name, "--hour", before) as batch:
            for node in cluster.ports:
                cluster.stop(node)
                seen.append(cluster.leaders(one.name))
                cluster.start(node)
                cluster.await_in_sync(one.name, 3)
            assert batch.wait() == 0, batch.log[-4000:]
        progress(one, feed, speed)
        # Leaders that die without a word.
        for _ in range(2):
            leader = cluster.leaders(one.name)[0]
            cluster.kill(leader)
            progress(one, feed, speed)
            seen.append(cluster.leaders(one.name))
            cluster.start(leader)
            cluster.await_in_sync(one.name, 3)
        # One of three is gone for good; two replicas in sync are enough to produce.
        with started(one, "batch", one.name, "--hour", past) as batch:
            cluster.lose(cluster.leaders(one.name)[1])
            cluster.await_in_sync(one.name, 2)
            assert batch.wait() == 0, batch.log[-4000:]
        seen.append(cluster.leaders(one.name))
        progress(one, feed, speed)
    try:
        assert len({tuple(leaders) for leaders in seen}) >= 4, f"the hazard did not happen: leaders stayed {seen}"
        run(one, "speed", one.name, "--available-now")
        assert_exact(one, feed)
        run(one, "audit", one.name)
    finally:
        for node in set(cluster.gone):
            cluster.start(node)
            cluster.gone.discard(node)
