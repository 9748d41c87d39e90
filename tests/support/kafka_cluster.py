"""Three Kafka brokers with replication and ACLs, which a test may kill, stop and start."""

import os
import uuid
from base64 import urlsafe_b64encode
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import kafka_admin
import psutil
from kafka import TopicPartition
from kafka.errors import KafkaError
from kafka_tools import write_scripts
from programs import output_of
from servers import free_ports
from waiting import wait_for

from anabranch.dev.services import kafka_broker
from anabranch.dev.services.processes import HOST, Daemon, properties_text, stop_all, write_private
from anabranch.spark.jars import ensure_jars, jvm_folder
from anabranch.spark.java import require_java

NODES = (1, 2, 3)
USER, PASSWORD = "reader", "reader-secret"


@dataclass(frozen=True)
class Ports:
    """The ports of a node. `plain`: of brokers and super user; `sasl`: of the user with ACLs."""

    plain: int
    controller: int
    sasl: int


@dataclass(frozen=True)
class KafkaCluster:
    """Each node is broker and controller in its own rack. `gone`: the lost nodes."""

    folder: Path
    ports: dict[int, Ports]
    gone: set[int] = field(default_factory=set)

    @property
    def super_servers(self) -> str:
        return ",".join(f"{HOST}:{ports.plain}" for ports in self.ports.values())

    @property
    def section(self) -> dict[str, Any]:
        """The `kafka` section of a configuration, for the user with ACLs."""
        servers = ",".join(f"{HOST}:{ports.sasl}" for ports in self.ports.values())
        plain = {"security.protocol": "SASL_PLAINTEXT", "sasl.mechanism": "PLAIN"}
        security = plain | {"sasl.username": USER, "sasl.password": PASSWORD}
        return {"bootstrap_servers": servers, "security": security}

    def admin(self) -> closing[Any]:
        return kafka_admin.admin_of(self.super_servers.split(","))

    def allow(self, topic: str, group: str) -> None:
        kafka_admin.grant_reading(self.super_servers.split(","), [USER], topic, group)

    def create(
        self, topic: str, partitions: int, configs: Mapping[str, str], replicas: Sequence[int] = ()
    ) -> None:
        """Create a topic, and wait until each partition has a leader. With `replicas`, all
        partitions are on these nodes, and the first is the preferred leader."""
        wanted: dict[str, Any] = {"configs": dict(configs)}
        if not replicas:
            wanted["num_partitions"] = partitions
        else:
            wanted["assignments"] = {p: list(replicas) for p in range(partitions)}
        with self.admin() as admin:
            admin.create_topics({topic: wanted})
        self.await_in_sync(topic, 1)

    def delete(self, *topics: str) -> None:
        with self.admin() as admin:
            admin.delete_topics(list(topics))

    def lead_by(self, topic: str, *nodes: int) -> None:
        """Reassign a topic of one partition to these nodes, and wait until the first leads it."""
        place = TopicPartition(topic, 0)
        with self.admin() as admin:
            admin.alter_partition_reassignments({place: list(nodes)})
        # The controller moves leadership to the preferred leader by itself.
        wait_for(lambda: self.leaders(topic) == [nodes[0]], f"node {nodes[0]} to lead", 60, 0.3)

    def set_topic(self, topic: str, **configs: str) -> None:
        kafka_admin.set_topic(self.super_servers.split(","), topic, **configs)

    def compact_soon(self) -> None:
        kafka_admin.compact_soon(self.super_servers.split(","), *self.ports)

    @contextmanager
    def quota(self, name: str, value: int) -> Iterator[None]:
        """Set a quota of the user with ACLs, such as `consumer_byte_rate`, within a `with`."""
        self._alter_quota("--add-config", f"{name}={value}")
        try:
            yield
        finally:
            self._alter_quota("--delete-config", name)

    def _alter_quota(self, *change: str) -> None:
        tools = self.folder / "tools"
        if not tools.exists():
            tools.mkdir()
            write_scripts(tools)
        of_user = ("--entity-type", "users", "--entity-name", USER)
        command = (tools / "kafka-configs.sh", "--bootstrap-server", self.super_servers)
        output_of(*command, "--alter", *of_user, *change, seconds=60)

    def sent_bytes(self, node: int) -> int:
        """Return the bytes that a node has written to files and connections since its start."""
        return int(self._process(node).io_counters().write_chars)

    def _process(self, node: int) -> psutil.Process:
        process = self._daemon(node).process()
        assert process is not None, f"node {node} is not running"
        return process

    def start(self, *nodes: int) -> None:
        """Start nodes, and wait until they answer: a quorum answers only once two nodes run."""
        started = {}
        for node in nodes:
            command = [*self._jvm(node), "kafka.Kafka", str(self._properties(node))]
            started[node] = self._daemon(node).start(command, self.ports[node].plain, _java_path())
        for node, process in started.items():
            answers = partial(kafka_broker.answers, self.ports[node].plain)
            self._daemon(node).await_answer(process, answers, kafka_broker.READY_SECONDS)

    def start_all(self) -> None:
        """Start every node that does not run, also a lost one."""
        self.gone.clear()
        self.start(*(node for node in self.ports if self._daemon(node).process() is None))

    def kill(self, node: int) -> None:
        """Send SIGKILL, and wait for the end."""
        process = self._process(node)
        process.kill()
        stop_all([process], 30)

    def stop(self, node: int) -> None:
        """Shut a node down in a controlled way: its leaderships move first."""
        stop_all([self._process(node)], 60)

    def lose(self, node: int) -> None:
        """Kill a node that stays down until `start_all`."""
        self.kill(node)
        self.gone.add(node)

    def partitions(self, topic: str) -> list[dict[str, Any]]:
        """Each partition's metadata (leader_id, isr_nodes, …); empty without an answer."""
        try:
            with self.admin() as admin:
                [described] = admin.describe_topics([topic])
                return sorted(described["partitions"], key=lambda p: int(p["partition_index"]))
        except (KafkaError, OSError, ValueError):
            return []

    def leaders(self, topic: str) -> list[int]:
        return [int(p["leader_id"]) for p in self.partitions(topic)]

    def await_in_sync(self, topic: str, nodes: int) -> None:
        """Wait until each partition has a leader and at least `nodes` replicas in sync."""

        def is_in_sync() -> bool:
            found = self.partitions(topic)
            ready = [p["leader_id"] >= 0 and len(p["isr_nodes"]) >= nodes for p in found]
            return bool(ready) and all(ready)

        wait_for(is_in_sync, f"{nodes} replicas in sync", 90, 0.3)

    def close(self) -> None:
        stop_all([p for node in NODES if (p := self._daemon(node).process()) is not None], 10)

    def format(self) -> None:
        """Write each node's properties, and format its storage."""
        cluster = urlsafe_b64encode(uuid.uuid4().bytes).decode().rstrip("=")
        for node in NODES:
            home = self.folder / str(node)
            (home / "run").mkdir(parents=True)
            (home / "data").mkdir()
            write_private(self._properties(node), properties_text(self._settings(node)))
            tool = ("kafka.tools.StorageTool", "format", f"--cluster-id={cluster}", "-c")
            command = (*self._jvm(node), *tool, self._properties(node))
            output_of(*command, env=_java_path(), seconds=60)

    def _settings(self, node: int) -> dict[str, object]:
        ports = self.ports[node]
        voters = ",".join(f"{n}@{HOST}:{p.controller}" for n, p in self.ports.items())
        own = {
            "node.id": node,
            "controller.quorum.voters": voters,
            "listeners": f"CLIENT://{HOST}:{ports.plain},SASL://{HOST}:{ports.sasl},CONTROLLER://{HOST}:{ports.controller}",
            "advertised.listeners": f"CLIENT://{HOST}:{ports.plain},SASL://{HOST}:{ports.sasl}",
            "listener.security.protocol.map": "CLIENT:PLAINTEXT,SASL:SASL_PLAINTEXT,CONTROLLER:PLAINTEXT",
            "listener.name.sasl.sasl.enabled.mechanisms": "PLAIN",
            "listener.name.sasl.plain.sasl.jaas.config": (
                "org.apache.kafka.common.security.plain.PlainLoginModule required "
                f'user_{USER}="{PASSWORD}";'
            ),
            "authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
            "super.users": "User:ANONYMOUS",
            "broker.rack": rack(node),
            "log.retention.check.interval.ms": 1000,
            "replica.selector.class": "org.apache.kafka.common.replica.RackAwareReplicaSelector",
            "auto.create.topics.enable": "true",
            "default.replication.factor": 3,
            "min.insync.replicas": 2,
            "unclean.leader.election.enable": "false",
            "replica.lag.time.max.ms": 3000,
            "controlled.shutdown.enable": "true",
            "leader.imbalance.check.interval.seconds": 2,
            "offsets.topic.replication.factor": 3,
            "transaction.state.log.replication.factor": 3,
            "transaction.state.log.min.isr": 2,
        }
        data = self.folder / str(node) / "data"
        return {**kafka_broker.broker_properties(ports.plain, ports.controller, data), **own}

    def _properties(self, node: int) -> Path:
        return self.folder / str(node) / "run" / "kafka.properties"

    def _daemon(self, node: int) -> Daemon:
        return Daemon("kafka", f"Kafka {node}", self.folder / str(node))

    def _jvm(self, node: int) -> list[str]:
        java = str(require_java())
        logs = f"-Dlog4j2.configurationFile={(jvm_folder() / 'log4j2-kafka.xml').as_uri()}"
        marker = self._daemon(node).marker(self.ports[node].plain)
        small = ("-Xmx320m", "-XX:TieredStopAtLevel=1", "-Djava.awt.headless=true")
        return [java, *small, marker, logs]


def rack(node: int) -> str:
    """Return the rack of a node, for `broker.rack` and a client's `client.rack`."""
    return f"zone-{node}"


def _java_path() -> dict[str, str]:
    return {**os.environ, "CLASSPATH": os.pathsep.join(map(str, ensure_jars().broker))}


@contextmanager
def running_cluster(folder: Path) -> Iterator[KafkaCluster]:
    """Run three new brokers within a `with`."""
    taken = free_ports(3 * len(NODES))
    ports = {node: Ports(*taken[3 * i : 3 * i + 3]) for i, node in enumerate(NODES)}
    cluster = KafkaCluster(folder, ports)
    cluster.format()
    try:
        cluster.start(*NODES)
        yield cluster
    finally:
        cluster.close()
