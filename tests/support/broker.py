"""A Kafka broker of its own behind a proxy, which a test may stop and start again."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from toxiproxy import Proxy, Toxiproxy

from anabranch.dev.services import kafka_broker
from anabranch.dev.services.processes import HOST, Daemon, free_port, stop_all
from anabranch.spark.jars import ensure_jars
from anabranch.spark.java import require_java


@dataclass(frozen=True)
class ProxiedBroker:
    """The broker advertises the proxy, so that no client gets past it."""

    daemon: Daemon
    port: int
    proxy: Proxy

    @property
    def bootstrap_servers(self) -> str:
        return f"{HOST}:{self.proxy.port}"

    def start(self) -> None:
        """Start, and return once it answers."""
        java, jars = require_java(), ensure_jars().broker
        process = kafka_broker.start(
            self.daemon, java, jars, self.port, self.proxy.port, advertised_port=self.proxy.port
        )
        self.daemon.await_answer(
            process, lambda: kafka_broker.answers(self.port), kafka_broker.READY_SECONDS
        )

    def stop(self) -> None:
        process = self.daemon.process()
        if process is not None:
            stop_all([process], 30)

    def kill(self) -> None:
        """kill -9."""
        process = self.daemon.process()
        assert process is not None
        process.kill()
        stop_all([process], 30)


@contextmanager
def running_broker(folder: Path, toxiproxy: Toxiproxy) -> Iterator[ProxiedBroker]:
    """A fresh broker for the length of a `with`."""
    port = free_port()
    broker = ProxiedBroker(Daemon("kafka", "Kafka", folder), port, toxiproxy.proxy("kafka", port))
    try:
        broker.start()
        yield broker
    finally:
        broker.stop()
