"""The Kafka broker of `anabranch dev`: one KRaft node of Apache Kafka."""

from __future__ import annotations

import os
import shutil
import socket
import struct
import subprocess
import uuid
from base64 import urlsafe_b64encode
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil

from anabranch.common.errors import Terminal, Transient
from anabranch.dev.services.processes import HOST, Daemon, free_port, properties_text, write_private
from anabranch.spark.jars import jvm_folder

READY_SECONDS = 120.0
_API_VERSIONS = 18


def broker_properties(
    port: int, controller_port: int, data: Path, advertised_port: int | None = None
) -> dict[str, object]:
    """Return the server.properties of a broker on one machine, with one replica. It advertises
    `advertised_port`, if given.

    Retention is unlimited. It goes by the timestamps of records, so the default of seven days would
    delete records with older timestamps within minutes.
    """
    return {
        "process.roles": "broker,controller",
        "node.id": 1,
        # A static quorum: no metadata contains its address, so the port may differ at every start.
        "controller.quorum.voters": f"1@{HOST}:{controller_port}",
        "listeners": f"CLIENT://{HOST}:{port},CONTROLLER://{HOST}:{controller_port}",
        "advertised.listeners": f"CLIENT://{HOST}:{advertised_port or port}",
        "listener.security.protocol.map": "CLIENT:PLAINTEXT,CONTROLLER:PLAINTEXT",
        "inter.broker.listener.name": "CLIENT",
        "controller.listener.names": "CONTROLLER",
        "log.dirs": data,
        "auto.create.topics.enable": "false",
        "num.partitions": 1,
        "default.replication.factor": 1,
        "min.insync.replicas": 1,
        "log.retention.ms": -1,
        "log.retention.bytes": -1,
        "log.message.timestamp.before.max.ms": 2**63 - 1,
        "offsets.topic.replication.factor": 1,
        "offsets.topic.num.partitions": 4,
        "transaction.state.log.replication.factor": 1,
        "transaction.state.log.min.isr": 1,
        "transaction.state.log.num.partitions": 4,
        "share.coordinator.state.topic.replication.factor": 1,
        "share.coordinator.state.topic.min.isr": 1,
        "share.coordinator.state.topic.num.partitions": 4,
        "group.initial.rebalance.delay.ms": 0,
        # A killed broker cannot register again before its session times out: 9 s by default.
        "broker.session.timeout.ms": 3000,
        "broker.heartbeat.interval.ms": 500,
        # 128 MB by default, a quarter of this heap.
        "log.cleaner.dedupe.buffer.size": 16 * 1024 * 1024,
    }


def start(
    daemon: Daemon,
    java: Path,
    jars: Sequence[Path],
    port: int,
    *avoid: int,
    advertised_port: int | None = None,
    more: Mapping[str, object] | None = None,
    format_options: Sequence[str] = (),
) -> psutil.Process:
    """Format the storage at the first start, and start the broker. It is ready once `answers` is
    True.

    The controller gets a free port other than `port` and `avoid`. The broker advertises
    `advertised_port`, if given, such as a proxy's. `more` adds or replaces properties of the
    broker. Raises Terminal or Transient if the storage cannot be formatted.
    """
    data = daemon.home / "data" / "kafka"
    if "," in str(data):
        raise Terminal(
            "Kafka splits folder names at commas; choose a home without one instead of "
            f"{daemon.home}."
        )
    environment = {**os.environ, "CLASSPATH": os.pathsep.join(map(str, jars))}
    jvm = [
        str(java),
        "-Xmx512m",
        "-Djava.awt.headless=true",
        "-XX:+ExitOnOutOfMemoryError",
        daemon.marker(port),
    ]
    jvm.append(f"-Dlog4j2.configurationFile={(jvm_folder() / 'log4j2-kafka.xml').as_uri()}")
    properties = daemon.home / "run" / "kafka.properties"
    controller_port = free_port(port, *avoid)
    if not (data / "meta.properties").exists():
        # Format another folder and rename it, so that an interrupted start leaves no partly
        # formatted storage.
        part = data.with_name("kafka.part")
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
        write_private(
            properties,
            properties_text(_merged(broker_properties(port, controller_port, part), more)),
        )
        cluster = urlsafe_b64encode(uuid.uuid4().bytes).decode().rstrip("=")
        # A cluster id that begins with a dash would be read as an option.
        storage_tool = [
            *jvm,
            "kafka.tools.StorageTool",
            "format",
            f"--cluster-id={cluster}",
            "-c",
            str(properties),
        ]
        storage_tool += format_options
        try:
            answer = subprocess.run(
                storage_tool,
                env=environment,
                cwd=daemon.home,
                capture_output=True,
                text=True,
                timeout=READY_SECONDS,
            )
        except subprocess.TimeoutExpired as error:
            raise Transient(
                f"Kafka's storage in {part} was not formatted within {READY_SECONDS:.0f} s."
            ) from error
        if answer.returncode != 0:
            raise Terminal(
                f"Kafka's storage in {part} could not be formatted:\n{answer.stdout}{answer.stderr}"
            )
        part.rename(data)
    server_properties = broker_properties(port, controller_port, data, advertised_port)
    write_private(properties, properties_text(_merged(server_properties, more)))
    return daemon.start([*jvm, "kafka.Kafka", str(properties)], port, environment)


def _merged(
    properties: Mapping[str, object], more: Mapping[str, object] | None
) -> dict[str, object]:
    """Return the properties updated with `more`, whose lists of listeners are appended."""
    lists = ("listeners", "advertised.listeners", "listener.security.protocol.map")
    added = {
        key: f"{properties[key]},{value}" if key in lists else value
        for key, value in (more or {}).items()
    }
    return {**properties, **added}


def answers(port: int) -> bool:
    """Return whether a broker answers an ApiVersions request; it does so only once it has joined
    and leads.

    Sends version 0 of the request over a socket: a client would retry, and log.
    """
    request = struct.pack(">hhih", _API_VERSIONS, 0, 1, -1)
    try:
        with socket.create_connection((HOST, port), timeout=2) as connection:
            connection.settimeout(2)
            connection.sendall(struct.pack(">i", len(request)) + request)
            head = connection.recv(10, socket.MSG_WAITALL)
    except OSError:
        return False
    if len(head) < 10:
        return False
    _, correlation, error = struct.unpack(">iih", head)
    return bool(correlation == 1 and error == 0)
