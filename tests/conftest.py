"""The fixtures of all tests, and the isolation from the user's environment.

A Kafka broker, an S3 server and one Spark session start once for a test run, for the tests that ask
for them; unit tests never do.
"""

from __future__ import annotations

import gc
import logging
import os
import signal
import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import hypothesis
import psutil
import pytest
import yaml
from sqlalchemy import event
from sqlalchemy.engine import Engine

from anabranch.spark.java import FIRST_COMPILER

if TYPE_CHECKING:
    from lakes import StreamLake
    from pyspark.sql import SparkSession
    from registry import SchemaRegistry
    from world import World

    from anabranch.config import Kafka

pytest_plugins = ["steadiness"]

# An example may take any time: a busy machine is no fault.
hypothesis.settings.register_profile("untimed", deadline=None)
hypothesis.settings.load_profile("untimed")

# Until all tests are collected: imported modules stay.
gc.disable()

for name in ("CONF", "KAFKA", "S3", "CATALOG", "WAREHOUSE", "SPARK_MASTER"):
    name = f"ANABRANCH_{name}"
    os.environ.pop(name, None)
for name in [name for name in os.environ if name.startswith("OPENLINEAGE_")]:
    del os.environ[name]
# Jobs of tests end before Java's second compiler saves what it costs: a third of a job's CPU time.
os.environ.setdefault("SPARK_SUBMIT_OPTS", FIRST_COMPILER)
os.environ.setdefault("SPARK_LAUNCHER_OPTS", FIRST_COMPILER)


_END_SECONDS = 60.0


@event.listens_for(Engine, "connect")
def do_not_wait_for_the_disk(connection: Any, _: object) -> None:
    """A catalog's file need not outlive a power failure here; a kill loses nothing by this."""
    if isinstance(connection, sqlite3.Connection):
        # A test may hold the file locked.
        with suppress(sqlite3.OperationalError):
            connection.execute("PRAGMA synchronous = OFF")


@dataclass(frozen=True)
class Neighbours:
    """Addresses of the services of this test run."""

    kafka: str
    s3: str


def pytest_configure() -> None:
    """A run that gets SIGTERM stops its services: their fixtures end as on Ctrl-C. Tests' processes
    get SIGINT even if a shell runs the tests in the background, which ignores it."""
    signal.signal(signal.SIGTERM, _end)
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_finish() -> None:
    """Collect garbage from here on less often, and of what tests make alone: most of it is many
    small objects without a cycle, which are gone with their last reference."""
    gc.freeze()
    gc.set_threshold(50_000, 20, 50)
    gc.enable()


def pytest_unconfigure(config: pytest.Config) -> None:
    """The controller stops what killed workers have left."""
    # Libraries report objects that are not destroyed at the end.
    gc.unfreeze()
    factory = getattr(config, "_tmp_path_factory", None)
    if "PYTEST_XDIST_WORKER" in os.environ or getattr(factory, "_basetemp", None) is None:
        return
    from shared_services import stop_leftovers
    from steadiness import shared_folder

    stop_leftovers(shared_folder(config) / "services")


def _end(*_: object) -> NoReturn:
    """End the run's processes first, and wait until none of their children runs."""
    if "PYTEST_XDIST_WORKER" not in os.environ:
        processes = psutil.Process().children()
        for process in processes:
            with suppress(psutil.Error):
                process.terminate()
        deadline = time.monotonic() + _END_SECONDS
        while time.monotonic() < deadline and any(map(_has_children, processes)):
            time.sleep(0.2)
    pytest.exit("terminated", returncode=143)


def _has_children(process: psutil.Process) -> bool:
    try:
        return bool(process.children())
    except psutil.Error:
        return False


@pytest.fixture(autouse=True)
def log_given_back() -> Iterator[None]:
    """A command in this process logs to the test's own standard error, which is closed after."""
    root = logging.getLogger()
    before = root.handlers[:], root.level
    yield
    root.handlers[:], root.level = before


@pytest.fixture
def lake(tmp_path: Path) -> StreamLake:
    from lakes import new_lake

    return new_lake(tmp_path)


@pytest.fixture
def one(tmp_path: Path) -> StreamLake:
    from proofs import new_proof

    return new_proof(tmp_path)


@pytest.fixture
def recorded(request: pytest.FixtureRequest) -> Iterator[Callable[[Any], None]]:
    """Require that a report is, whole, what the YAML file beside the test's module has for it. After
    an intended change, run the test with `ANABRANCH_WRITE_VIEWS=1`."""
    file, name = request.path.with_suffix(".yaml"), request.node.name
    known = yaml.safe_load(file.read_text("utf-8")) if file.exists() else {}
    is_writing, shown = "ANABRANCH_WRITE_VIEWS" in os.environ, list[Any]()

    def compare(report: Any) -> None:
        shown.append(report)
        assert is_writing or report == known[name][len(shown) - 1]

    yield compare
    if is_writing:
        text = yaml.safe_dump(known | {name: shown}, width=116, allow_unicode=True)
        file.write_text(text, "utf-8")
    else:
        assert len(shown) == len(known[name]), "each recorded report is compared"


@pytest.fixture(scope="session")
def services(pytestconfig: pytest.Config) -> Iterator[Neighbours]:
    from shared_services import shared_services
    from steadiness import shared_folder

    with shared_services(shared_folder(pytestconfig) / "services") as servers:
        os.environ |= {
            "AWS_ACCESS_KEY_ID": servers.access_key,
            "AWS_SECRET_ACCESS_KEY": servers.secret_key,
        }
        yield Neighbours(servers.bootstrap_servers, servers.s3_endpoint)


@pytest.fixture
def kafka(services: Neighbours) -> Kafka:
    from anabranch.config import Kafka

    return Kafka(bootstrap_servers=services.kafka)


@pytest.fixture(scope="session")
def environment(services: Neighbours, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The content of `anabranch.yaml` in every test."""
    from anabranch.spark.java import FIRST_COMPILER

    return {
        "kafka": {"bootstrap_servers": services.kafka},
        "catalog": {
            "name": "lake",
            "uri": f"sqlite:///{tmp_path_factory.mktemp('catalog')}/catalog.db",
            "warehouse": "s3://tests/warehouse",
        },
        "s3": {
            "endpoint": services.s3,
            "access_key": "${AWS_ACCESS_KEY_ID}",
            "secret_key": "${AWS_SECRET_ACCESS_KEY}",
        },
        "spark": {
            "master": "local[2]",
            "conf": {"spark.driver.memory": "1g", "spark.driver.extraJavaOptions": FIRST_COMPILER},
        },
    }


@pytest.fixture(scope="session")
def spark(
    environment: dict[str, Any], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[SparkSession]:
    """The one Spark session of a test run."""
    from sessions import running_spark

    with running_spark(environment, tmp_path_factory.mktemp("session")) as session:
        yield session


@pytest.fixture(scope="session")
def registry(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SchemaRegistry]:
    """A schema registry; its subjects are the tests' own."""
    from registry import running_registry

    with running_registry(tmp_path_factory.mktemp("registry")) as server:
        yield server


@pytest.fixture
def steady_hour() -> None:
    """Run a test that counts hours again if it fails and an hour ended meanwhile."""


@pytest.fixture
def single_broker(monkeypatch: pytest.MonkeyPatch) -> None:
    """Accept that a topic is gone or recreated after one second: the tests' cluster has no second
    broker that could contradict. test_kafka_clients.py tests the real delay."""
    from anabranch.kafka import client

    monkeypatch.setattr(client, "_CONFIRMED_AFTER_S", 1.0)


@pytest.fixture
def by_spark(monkeypatch: pytest.MonkeyPatch) -> None:
    """Spark reads every hour in this process, as it reads hours of many records (decision 68)."""
    from batch_layer import sources

    monkeypatch.setattr(sources, "SMALL", 0)


@pytest.fixture
def world(
    tmp_path: Path, environment: dict[str, Any], spark: SparkSession
) -> Iterator[Callable[..., World]]:
    """Makes streams of their own for a test, each in a configuration folder of its own or `beside`
    another, with a topic of so many `partitions`, if any, or (`create`) with that and tables."""
    from world import World, closed_at_the_end

    def make(
        registry: str | None = None,
        beside: World | None = None,
        partitions: int = 0,
        create: int = 0,
        **stream: Any,
    ) -> World:
        own = environment | ({"registry": {"url": registry}} if registry is not None else {})
        folder = tmp_path / f"conf{len(made)}" if beside is None else beside.folder
        made.append(World(folder, own, spark, **stream))
        if partitions or create:
            made[-1].topic(partitions or create)
        if create:
            made[-1].apply()
        return made[-1]

    with closed_at_the_end() as made:
        yield make
