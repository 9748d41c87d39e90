"""The real broker and S3 server as child processes: started, damaged, repaired, stopped."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import boto3
import psutil
import pytest
from budget import full
from demo.story import Story
from demo.workspace import open_workspace
from kafka import KafkaConsumer, KafkaProducer, TopicPartition
from kafka.admin import NewTopic
from kafka_admin import admin_of
from waiting import wait_for

from anabranch.common.errors import ConfigurationError, Terminal
from anabranch.dev import services
from anabranch.dev.services import Home, Services
from anabranch.dev.services.processes import HOST, free_port
from anabranch.spark.jars import Jars, ensure_jars, jvm_folder, verify

OLD = 1_000_000_000_000  # 2001-09-09, in milliseconds


@pytest.fixture(scope="module")
def jars() -> Jars:
    return ensure_jars()


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Home]:
    home = Home(tmp_path / "home")
    yield home
    services.down(home)


def _up(
    home: Home, jars: Jars, kafka_port: int | None = None, s3_port: int | None = None
) -> Services:
    return services.up(
        home, kafka_port, s3_port, jars, access_key="anabranch", secret_key="anabranch-local"
    )


def _alive(home: Home) -> list[int]:
    """Every process whose command line names the home, however it was started."""
    pids = []
    for process in psutil.process_iter(["cmdline", "status"]):
        named = any(f":{home.path}" in part for part in process.info["cmdline"] or [])
        if named and process.info["status"] != psutil.STATUS_ZOMBIE:
            pids.append(process.pid)
    return pids


def _pid(home: Home, service: str) -> int:
    (pid,) = [status.pid for status in services.status(home) if status.service == service]
    assert pid is not None
    return pid


def _s3(running: Services) -> boto3.client:
    return boto3.client(
        "s3", endpoint_url=running.s3_endpoint, aws_access_key_id=running.access_key,
        aws_secret_access_key=running.secret_key, region_name="us-east-1",
    )  # fmt: skip


def _read_value(running: Services, topic: str) -> bytes:
    consumer = KafkaConsumer(bootstrap_servers=running.bootstrap_servers)
    try:
        consumer.assign([TopicPartition(topic, 0)])
        consumer.seek(TopicPartition(topic, 0), 0)
        values: list[bytes] = []

        def arrived() -> bool:
            polled = consumer.poll(1000).values()
            values.extend(record.value for records in polled for record in records)
            return bool(values)

        wait_for(arrived, f"a record of {topic}")
        return values[0]
    finally:
        consumer.close()


def test_the_resolved_jars_are_those_of_the_list(jars: Jars) -> None:
    verify(jars.folder, jvm_folder() / "jars.sha256")


def _require_private(home: Home, running: Services) -> None:
    """Only this machine is listened on, and others cannot read the secret."""
    for service in ("kafka", "s3"):
        process = psutil.Process(_pid(home, service))
        connections = process.net_connections("tcp")
        listening = [c.laddr.ip for c in connections if c.status == psutil.CONN_LISTEN]
        assert listening
        assert {ip.removeprefix("::ffff:") for ip in listening} == {HOST}
        assert running.secret_key not in " ".join(process.cmdline())
    files = [*(home.path / "run").iterdir()]
    readable = [file for file in files if running.secret_key in file.read_text()]
    assert [file.name for file in readable] == ["s3.properties"]
    assert readable[0].stat().st_mode & 0o077 == 0


@pytest.mark.full
def test_both_serve_privately_keep_their_data_and_are_repaired(home: Home, jars: Jars) -> None:
    first = _up(home, jars, free_port(), free_port())
    assert first.started == ("s3", "kafka")
    _require_private(home, first)

    # Both are what they say they are.
    with admin_of(first.bootstrap_servers) as admin:
        admin.create_topics([NewTopic("kept", num_partitions=1, replication_factor=1)])
    producer = KafkaProducer(bootstrap_servers=first.bootstrap_servers)
    assert producer.send("kept", b"record", timestamp_ms=OLD).get(30).offset == 0
    producer.close()
    _s3(first).create_bucket(Bucket="kept")
    _s3(first).put_object(Bucket="kept", Key="a/b", Body=b"object")

    # A second start finds both and starts nothing.
    second = _up(home, jars)
    assert second.started == ()
    assert (second.kafka_port, second.s3_port) == (first.kafka_port, first.s3_port)

    # Another port or other keys than the running ones' are not silently ignored.
    with pytest.raises(
        ConfigurationError, match=f"--kafka-port .* already runs on port {first.kafka_port}"
    ):
        _up(home, jars, free_port())
    with pytest.raises(ConfigurationError, match="other keys"):
        services.up(home, jars=jars, access_key="someone", secret_key="else")

    # One killed: seen, and it alone is started again, where it was.
    s3_pid = _pid(home, "s3")
    os.kill(_pid(home, "kafka"), signal.SIGKILL)
    wait_for(lambda: services.status(home)[0].state == "stopped", "Kafka seen as stopped")
    repaired = _up(home, jars)
    assert repaired.started == ("kafka",)
    assert repaired.kafka_port == first.kafka_port
    assert _pid(home, "s3") == s3_pid
    assert _read_value(repaired, "kept") == b"record"

    # Down and up again, on other ports: the data is still there.
    assert services.down(home) == ("kafka", "s3")
    assert _alive(home) == []
    assert services.down(home) == ()
    third = _up(home, jars, free_port(), free_port())
    assert _read_value(third, "kept") == b"record"
    assert _s3(third).get_object(Bucket="kept", Key="a/b")["Body"].read() == b"object"

    # Without its files, `down` finds the processes.
    shutil.rmtree(home.path / "run")
    assert len(_alive(home)) == 2
    assert services.down(home, wipe=True) == ("kafka", "s3")
    assert _alive(home) == []
    assert [file.name for file in home.path.iterdir()] == ["dev.lock"]


def test_a_taken_port_stops_up_before_anything_is_started(home: Home, jars: Jars) -> None:
    with socket.create_server((HOST, 0)) as holder:
        port = holder.getsockname()[1]
        with pytest.raises(ConfigurationError, match=f"Kafka needs port {port} .*--kafka-port"):
            _up(home, jars, port, free_port())
        assert _alive(home) == []
        assert holder.fileno() != -1


def test_services_that_up_started_are_stopped_if_another_fails(home: Home, jars: Jars) -> None:
    # The hazard: Kafka's storage is damaged, so it ends at once, while the S3 server runs already.
    (home.path / "data" / "kafka").mkdir(parents=True)
    properties = home.path / "data" / "kafka" / "meta.properties"
    properties.write_text("version=1\nnode.id=99\ncluster.id=x\n")
    with pytest.raises(Terminal, match=r"(?s)Kafka ended while it was starting.*node"):
        _up(home, jars, free_port(), free_port())
    assert (home.path / "logs" / "s3.log").exists()
    assert _alive(home) == []


@pytest.mark.parametrize("sent", [signal.SIGINT, full(signal.SIGTERM)])
@pytest.mark.parametrize("step", [full("formatting"), "starting"])
def test_an_interrupted_up_leaves_nothing(home: Home, step: str, sent: signal.Signals) -> None:
    code = "from anabranch.cli.dev import dev; dev()"
    ports = ["--kafka-port", str(free_port()), "--s3-port", str(free_port())]
    command = [sys.executable, "-c", code, "up", "--home", str(home.path), *ports]
    storage = home.path / "data" / "kafka"
    reached = {
        "formatting": storage.with_name("kafka.part").exists,
        "starting": home.kafka.port_file.exists,
    }
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process:
        wait_for(lambda: reached[step]() and len(_alive(home)) == 2, f"both at work, Kafka {step}")
        process.send_signal(sent)
        process.communicate(timeout=300)
    assert process.returncode != 0
    assert _alive(home) == []
    assert storage.exists() is (step == "starting")


@pytest.mark.full
def test_the_services_outlive_the_command_and_its_ctrl_c(home: Home) -> None:
    code = "from anabranch.cli.dev import dev; dev()"
    ports = ["--kafka-port", str(free_port()), "--s3-port", str(free_port())]
    command = [
        sys.executable, "-c", code, "up", "--home", str(home.path), *ports, "--output", "json",
    ]  # fmt: skip
    # A session of its own replaces a terminal: Ctrl-C there goes to the whole foreground group.
    with subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True) as process:
        answer = json.loads(process.communicate(timeout=180)[0])
        assert process.returncode == 0
    assert answer["started"] == ["s3", "kafka"]
    assert [service["state"] for service in answer["services"]] == ["running", "running"]
    with pytest.raises(ProcessLookupError):
        os.killpg(process.pid, signal.SIGINT)
    assert [status.state for status in services.status(home)] == ["running", "running"]


@pytest.mark.full
def test_a_closed_workspace_leaves_the_handlers_of_signals_as_they_were() -> None:
    """Processes that start after it would ignore SIGTERM."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = [signal.getsignal(number) for number in numbers]
    with open_workspace(Story(is_brief=True), "game_events") as space:
        folder = space.folder
    assert [signal.getsignal(number) for number in numbers] == before
    assert not folder.exists()
