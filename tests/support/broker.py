"""A separate Kafka broker behind a proxy, which a test may stop and start."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from toxiproxy import Proxy, Toxiproxy

from anabranch.dev.services import kafka_broker
from anabranch.dev.services.processes import HOST, Daemon, free_port, stop_all
from anabranch.spark.jars import ensure_jars
from anabranch.spark.java import require_java


@dataclass(frozen=True)
class ProxiedBroker:
    """A broker that advertises its proxy, so that no client bypasses it."""

    daemon: Daemon
    port: int
    proxy: Proxy

    @property
    def bootstrap_servers(self) -> str:
        return f"{HOST}:{self.proxy.port}"

    def start(self) -> None:
        """Start the broker, and wait until it answers."""
        java, jars = require_java(), ensure_jars().broker
        start, port = partial(kafka_broker.start, self.daemon, java, jars), self.proxy.port
        process = start(self.port, port, advertised_port=port)
        answers = partial(kafka_broker.answers, self.port)
        self.daemon.await_answer(process, answers, kafka_broker.READY_SECONDS)

    def stop(self) -> None:
        process = self.daemon.process()
        if process is not None:
            stop_all([process], 30)

    def kill(self) -> None:
        """Send SIGKILL, and wait for the end."""
        process = self.daemon.process()
        assert process is not None
        process.kill()
        stop_all([process], 30)


@contextmanager
def running_broker(folder: Path, toxiproxy: Toxiproxy) -> Iterator[ProxiedBroker]:
    """Run a new broker within a `with`."""
    port = free_port()
    broker = ProxiedBroker(Daemon("kafka", "Kafka", folder), port, toxiproxy.proxy("kafka", port))
    try:
        broker.start()
        yield broker
    finally:
        broker.stop()
