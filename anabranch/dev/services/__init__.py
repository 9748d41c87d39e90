"""Start, find and stop Kafka and S3 on this machine."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

import psutil

from anabranch.common.errors import ConfigurationError, Terminal
from anabranch.common.temporary import locked
from anabranch.dev.services import kafka_broker, s3_server
from anabranch.dev.services.processes import HOST, Daemon, free_port, require_free_port, stop_all
from anabranch.spark.jars import Jars, Progress, ensure_jars
from anabranch.spark.java import require_java

KAFKA_PORT = 19092
S3_PORT = 19000
ACCESS_KEY = "anabranch"
SECRET_KEY = "anabranch-local"

_STOP_SECONDS = 20.0
_LOCK_SECONDS = 300.0

State = Literal["running", "not answering", "stopped"]


@dataclass(frozen=True)
class Home:
    """The folder of a pair of services: `data/`, `logs/` and `run/` (ports, properties)."""

    path: Path

    def __post_init__(self) -> None:
        # Absolute, since the services run in other folders and their marker contains this path.
        object.__setattr__(self, "path", Path(os.path.abspath(self.path)))  # noqa: PTH100

    @property
    def kafka(self) -> Daemon:
        return Daemon("kafka", "Kafka", self.path)

    @property
    def s3(self) -> Daemon:
        return Daemon("s3", "The S3 server", self.path)


@dataclass(frozen=True)
class Services:
    """Running services and their addresses. `started`: those that this call started."""

    home: Home
    kafka_port: int
    s3_port: int
    access_key: str
    secret_key: str = field(repr=False)
    started: tuple[str, ...] = ()

    @property
    def bootstrap_servers(self) -> str:
        return f"{HOST}:{self.kafka_port}"

    @property
    def s3_endpoint(self) -> str:
        return f"http://{HOST}:{self.s3_port}"


@dataclass(frozen=True)
class ServiceStatus:
    service: str
    state: State
    pid: int | None
    endpoint: str | None
    since: datetime | None
    log: Path


def up(
    home: Home,
    kafka_port: int | None = None,
    s3_port: int | None = None,
    jars: Jars | None = None,
    progress: Progress | None = None,
    access_key: str | None = None,
    secret_key: str | None = None,
    advertised_port: int | None = None,
) -> Services:
    """Start the services that do not run, and wait until both answer.

    Ports default to the current or last ones of this home, else to 19092 and 19000; keys to
    AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, else to `anabranch` and `anabranch-local`. With
    `advertised_port`, Kafka advertises that port, such as a proxy's. If the call fails or is
    interrupted, it stops the services that it started. Raises ConfigurationError if a port is taken
    or a running service has other settings, Terminal if Java is missing or a service ends,
    Transient if one does not answer.
    """
    progress = progress or (lambda _: None)
    access_key = access_key or os.environ.get("AWS_ACCESS_KEY_ID") or ACCESS_KEY
    secret_key = secret_key or os.environ.get("AWS_SECRET_ACCESS_KEY") or SECRET_KEY
    java = require_java()
    jars = jars or ensure_jars(progress=progress)
    with _locked_home(home, progress), ExitStack() as undo:
        s3, kafka = home.s3, home.kafka
        # Step 1: find running services and choose all ports, before anything is started.
        s3_process, s3_port = _find_process(s3, s3_port, S3_PORT, "--s3-port")
        kafka_process, kafka_port = _find_process(kafka, kafka_port, KAFKA_PORT, "--kafka-port")
        if s3_port == kafka_port:
            raise ConfigurationError(
                f"Kafka and S3 cannot share port {s3_port}; give --kafka-port and --s3-port."
            )
        if s3_process is not None:
            _require_settings(s3, s3_server.settings(s3, s3_port, access_key, secret_key))
        # Step 2: start missing services, S3 first: it starts while Kafka may format its storage.
        started = []
        began = time.monotonic()
        if s3_process is None:
            undo.callback(_stop, s3)
            progress(f"starting the S3 server on port {s3_port}")
            s3_process = s3_server.start(s3, java, jars.s3, s3_port, access_key, secret_key)
            started.append(s3.name)
        if kafka_process is None:
            undo.callback(_stop, kafka)
            progress(f"starting Kafka on port {kafka_port}")
            kafka_process = kafka_broker.start(
                kafka, java, jars.broker, kafka_port, s3_port, advertised_port=advertised_port
            )
            started.append(kafka.name)
        # Step 3: wait until both answer.
        s3.await_answer(s3_process, lambda: s3_server.answers(s3_port), s3_server.READY_SECONDS)
        kafka.await_answer(
            kafka_process, lambda: kafka_broker.answers(kafka_port), kafka_broker.READY_SECONDS
        )
        undo.pop_all()
        if started:
            progress(f"ready after {time.monotonic() - began:.1f} s")
        return Services(home, kafka_port, s3_port, access_key, secret_key, tuple(started))


def down(home: Home, wipe: bool = False, progress: Progress | None = None) -> tuple[str, ...]:
    """Stop running services and return their names. With `wipe`, also remove data, logs and the
    embedded catalog.

    Sends SIGTERM, and SIGKILL after 20 s. Afterwards no process of this home is alive.
    """
    progress = progress or (lambda _: None)
    if not home.path.is_dir():
        return _stop(home.s3, home.kafka)
    with _locked_home(home, progress):
        progress("stopping")
        stopped = _stop(home.s3, home.kafka)
        if wipe:
            _wipe(home)
    return stopped


def status(home: Home) -> tuple[ServiceStatus, ...]:
    """Return the state of both services; sends each a request."""
    return (
        _status(home.kafka, kafka_broker.answers, ""),
        _status(home.s3, s3_server.answers, "http://"),
    )


@contextmanager
def running(
    path: Path,
    jars: Jars | None = None,
    progress: Progress | None = None,
    advertised_port: int | None = None,
) -> Iterator[Services]:
    """Run new services on free ports within a `with`, for tests and demos.

    The keys are the fixed local ones, regardless of the process environment.
    """
    home = Home(path)
    kafka_port = free_port()
    try:
        yield up(
            home,
            kafka_port,
            free_port(kafka_port),
            jars,
            progress,
            ACCESS_KEY,
            SECRET_KEY,
            advertised_port,
        )
    finally:
        down(home)


def _find_process(
    daemon: Daemon, given_port: int | None, default: int, flag: str
) -> tuple[psutil.Process | None, int]:
    """Return the service's process, None if it does not run, and its port. Raises
    ConfigurationError if the port is taken or differs from `given_port`."""
    if (found := daemon.find()) is None:
        port = given_port or daemon.last_port() or default
        require_free_port(port, daemon.title, flag)
        return None, port
    if given_port not in (None, found.port):
        raise ConfigurationError(
            f"{flag} {given_port} was given, but {daemon.title} of {daemon.home} already runs on "
            f"port {found.port}. Run 'anabranch dev down --home {daemon.home}' first, or leave "
            "the flag out."
        )
    return found


def _require_settings(daemon: Daemon, expected: str) -> None:
    file = s3_server.properties_file(daemon)
    if not file.exists() or file.read_text(encoding="utf-8") != expected:
        raise ConfigurationError(
            f"{daemon.title} of {daemon.home} already runs with other keys than AWS_ACCESS_KEY_ID "
            f"and AWS_SECRET_ACCESS_KEY give now. Run 'anabranch dev down --home {daemon.home}', "
            "then 'up'."
        )


def _stop(*daemons: Daemon) -> tuple[str, ...]:
    """Stop every process of the services, and return the names of those that ran."""
    stopped = set[str]()
    # A second process exists only if two commands raced on a file system without locks.
    while running := {d.name: p for d in daemons if (p := d.process()) is not None}:
        stop_all(list(running.values()), _STOP_SECONDS)
        stopped |= running.keys()
    return tuple(sorted(stopped))


def _status(daemon: Daemon, answers: Callable[[int], bool], scheme: str) -> ServiceStatus:
    if (found := daemon.find()) is None:
        return ServiceStatus(daemon.name, "stopped", None, None, None, daemon.log)
    process, port = found
    state: State = "running" if answers(port) else "not answering"
    since = datetime.fromtimestamp(process.create_time(), UTC)
    endpoint = f"{scheme}{HOST}:{port}"
    return ServiceStatus(daemon.name, state, process.pid, endpoint, since, daemon.log)


@contextmanager
def _locked_home(home: Home, progress: Progress) -> Iterator[None]:
    home.path.mkdir(parents=True, exist_ok=True)
    waiting = f"another 'anabranch dev' is at work on {home.path}; waiting for it"
    with locked(home.path / "dev.lock", _LOCK_SECONDS, lambda: progress(waiting)):
        yield


def _wipe(home: Home) -> None:
    for name in ("data", "logs", "run"):
        shutil.rmtree(home.path / name, ignore_errors=True)
    # The embedded catalog points to the data.
    for file in home.path.glob("catalog.db*"):
        file.unlink()
    if left := [name for name in ("data", "logs", "run") if (home.path / name).exists()]:
        raise Terminal(f"{home.path}: {', '.join(left)} could not be removed. Remove them by hand.")
