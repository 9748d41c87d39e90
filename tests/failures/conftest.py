"""Faulty neighbours: proxies, an S3 front that fails at random, a PostgreSQL server."""

from __future__ import annotations

import copy
import uuid
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlparse

import pytest

if TYPE_CHECKING:
    from broker import ProxiedBroker
    from flaky_s3 import FlakyS3
    from kafka_cluster import KafkaCluster
    from postgres import Postgres
    from pyspark.sql import SparkSession
    from toxiproxy import Proxy, Toxiproxy
    from world import Make, World


@pytest.fixture(scope="session")
def toxiproxy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Toxiproxy]:
    from toxiproxy import running_toxiproxy

    with running_toxiproxy(tmp_path_factory.mktemp("toxiproxy")) as server:
        yield server


@pytest.fixture(scope="session")
def _broker(
    toxiproxy: Toxiproxy, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ProxiedBroker]:
    from broker import running_broker

    with running_broker(tmp_path_factory.mktemp("broker"), toxiproxy) as broker:
        yield broker


@pytest.fixture
def proxied_kafka(_broker: ProxiedBroker) -> Iterator[ProxiedBroker]:
    """A broker that is reached through its proxy alone, whole again after each test."""
    yield _broker
    _broker.proxy.restore()


def _s3_port(environment: dict[str, Any]) -> int:
    port = urlparse(environment["s3"]["endpoint"]).port
    assert port is not None
    return port


@pytest.fixture
def proxied_s3(toxiproxy: Toxiproxy, environment: dict[str, Any]) -> Iterator[Proxy]:
    """The S3 server behind a proxy of its own."""
    proxy = toxiproxy.proxy(f"s3-{uuid.uuid4().hex[:8]}", _s3_port(environment))
    yield proxy
    toxiproxy.remove(proxy)


@pytest.fixture
def flaky_s3(environment: dict[str, Any]) -> Iterator[FlakyS3]:
    """The S3 server behind a front that, given faults, fails at random: always the same."""
    from flaky_s3 import running_flaky_s3

    with running_flaky_s3(_s3_port(environment), seed=7) as front:
        yield front


@pytest.fixture(scope="session")
def postgres() -> Iterator[Postgres]:
    from postgres import running_postgres

    with running_postgres() as server:
        yield server


@pytest.fixture
def behind(
    world: Make, tmp_path: Path, environment: dict[str, Any], spark: SparkSession
) -> Iterator[Make]:
    """Makes streams with tables whose Kafka, S3 or catalog has another address."""
    from world import World, add_catalog, closed_at_the_end

    def make(
        kafka: str | None = None, s3: int | None = None, catalog: str | None = None, **stream: Any
    ) -> World:
        name = f"c{uuid.uuid4().hex[:12]}"
        own = copy.deepcopy(environment)
        own["catalog"] |= {"name": name, "uri": catalog or f"sqlite:///{tmp_path}/{name}.db"}
        if kafka is not None:
            own["kafka"]["bootstrap_servers"] = kafka
        if s3 is not None:
            own["s3"]["endpoint"] = f"http://127.0.0.1:{s3}"
        one = World(tmp_path / name, own, spark, **stream)
        add_catalog(spark, one.job.environment)
        made.append(one)
        one.create()
        return one

    with closed_at_the_end() as made:
        yield make


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KafkaCluster]:
    """Three brokers, all running again after each test that uses `on_cluster`."""
    from kafka_cluster import running_cluster

    with running_cluster(tmp_path_factory.mktemp("cluster")) as running:
        yield running


@pytest.fixture
def on_cluster(
    tmp_path: Path, environment: dict[str, Any], spark: SparkSession, cluster: KafkaCluster
) -> Iterator[Make]:
    """Makes a stream on the three brokers, with a topic of `configs` on the nodes `replicas`, whose
    user has the documented rights. `kafka` adds keys to the section of that name."""
    from waiting import wait_for
    from world import World

    from anabranch.common.errors import MissingRight

    made: list[World] = []

    def make(
        partitions: int = 4,
        configs: Mapping[str, str] | None = None,
        replicas: Sequence[int] = (),
        kafka: Mapping[str, Any] | None = None,
        **stream: Any,
    ) -> World:
        settings = copy.deepcopy(environment) | {"kafka": {**cluster.section, **(kafka or {})}}
        one = World(tmp_path / f"conf{len(made)}", settings, spark, **stream)
        made.append(one)
        cluster.create(one.name, partitions, configs or {}, replicas)
        cluster.allow(one.name, f"anabranch-{one.name}")
        cluster.await_in_sync(one.name, len(replicas or cluster.ports))
        # Each broker learns of ACLs by itself.
        wait_for(lambda: is_readable(one), "the user to be allowed to read the topic", 30, 0.3)
        one.apply()
        return one

    def is_readable(one: World) -> bool:
        try:
            topic = one.kafka.describe(one.name)
            return topic is not None and bool(one.kafka.stable_ends(topic))
        except MissingRight:
            return False

    yield make
    for one in made:
        one.kafka.close()
    cluster.start_all()
    cluster.delete(*(one.name for one in made))
