"""Child processes are found again, and only they: real processes, none of them a JVM."""

import os
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from waiting import wait_for

from anabranch.common.errors import Terminal, Transient
from anabranch.dev import services
from anabranch.dev.services import kafka_broker, processes, s3_server
from anabranch.dev.services.processes import Daemon

SLEEPS = "import time; print('here', flush=True); time.sleep(600)"
DEAF = (
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('here', "
    "flush=True); time.sleep(600)"
)


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Daemon]:
    daemon = Daemon("kafka", "Kafka", tmp_path)
    yield daemon
    if process := daemon.process():
        processes.stop_all([process], 0.0)


def _start(daemon: Daemon, code: str = SLEEPS) -> psutil.Process:
    process = daemon.start([sys.executable, "-c", code, daemon.marker(4711)], 4711, os.environ)
    daemon.await_answer(process, lambda: "here" in daemon.log.read_text(), 30)
    return process


def test_a_started_process_is_found_by_its_command_line_alone(daemon: Daemon) -> None:
    process = _start(daemon)
    daemon.port_file.unlink()
    assert Daemon("kafka", "Kafka", daemon.home).find() == (process, 4711)
    others = (
        Daemon("kafka", "Kafka", daemon.home / "other"),
        Daemon("kafka", "Kafka", daemon.home.parent),
        Daemon("s3", "S3", daemon.home),
    )
    assert [other.find() for other in others] == [None, None, None]


def test_its_port_is_known_after_it_was_stopped(daemon: Daemon) -> None:
    assert daemon.last_port() is None
    _start(daemon)
    assert daemon.last_port() == 4711
    services.down(services.Home(daemon.home))
    assert (daemon.find(), daemon.last_port()) == (None, 4711)
    assert services._find_process(daemon, None, 1, "--kafka-port") == (None, 4711)
    assert services._find_process(daemon, 4712, 1, "--kafka-port") == (None, 4712)
    services.down(services.Home(daemon.home), wipe=True)
    assert daemon.last_port() is None


@pytest.mark.parametrize("content", ["", "x"])
def test_a_damaged_port_file_counts_as_none(daemon: Daemon, content: str) -> None:
    daemon.port_file.parent.mkdir(parents=True)
    daemon.port_file.write_text(content)
    assert daemon.last_port() is None


def test_a_killed_process_is_not_found(daemon: Daemon) -> None:
    process = _start(daemon)
    os.kill(process.pid, signal.SIGKILL)
    wait_for(lambda: process.status() == psutil.STATUS_ZOMBIE, "the process to end", 120)
    assert daemon.find() is None
    assert processes.stop_all([process], 30) == ()
    # The next start reaps it.
    _start(daemon)
    assert not psutil.pid_exists(process.pid)


def test_a_process_that_ignores_sigterm_is_killed_and_its_log_kept(daemon: Daemon) -> None:
    process = _start(daemon, DEAF)
    assert processes.stop_all([process], 0.3) == (process.pid,)
    assert daemon.process() is None
    processes.stop_all([_start(daemon, SLEEPS.replace("here", "here first"))], 30)
    _start(daemon)
    assert "first" not in daemon.log.read_text()
    assert "first" in daemon.log.with_name("kafka.log.1").read_text()


def test_one_that_ends_at_once_or_does_not_answer_is_reported(daemon: Daemon) -> None:
    process = daemon.start(
        [sys.executable, "-c", "raise SystemExit('no such disk')", daemon.marker(1)], 1, os.environ
    )
    found = r"(?s)ended while it was starting.*kafka\.log.*no such disk"
    with pytest.raises(Terminal, match=found):
        daemon.await_answer(process, lambda: False, 30)
    with pytest.raises(Transient, match="has not answered"):
        daemon.await_answer(_start(daemon), lambda: False, 0.2)


def _answer_once(reply: bytes) -> tuple[int, threading.Thread]:
    server = socket.create_server((processes.HOST, 0))

    def serve() -> None:
        with server:
            connection, _ = server.accept()
            with connection:
                connection.recv(1024)
                connection.sendall(reply)

    thread = threading.Thread(target=serve)
    thread.start()
    return server.getsockname()[1], thread


@pytest.mark.parametrize(
    ("reply", "ready"),
    [
        (b"\0\0\0\x0a" + b"\0\0\0\x01" + b"\0\0" + b"\0\0\0\0", True),
        (b"\0\0\0\x0a" + b"\0\0\0\x01" + b"\0\x23" + b"\0\0\0\0", False),
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", False),
        (b"", False),
    ],
)
def test_only_a_broker_that_answers_without_error_is_ready(reply: bytes, ready: bool) -> None:
    port, thread = _answer_once(reply)
    assert kafka_broker.answers(port) is ready
    thread.join()


def test_only_an_s3_server_with_a_listener_is_ready() -> None:
    refusal = b"<Error><Code>AccessDenied</Code></Error>"
    head = b"HTTP/1.1 403 Forbidden\r\nContent-Length: %d\r\n\r\n"
    refused = head % len(refusal) + refusal
    for reply, ready in ((refused, True), (head % 0, False), (b"nonsense", False)):
        port, thread = _answer_once(reply)
        assert s3_server.answers(port) is ready
        thread.join()
    port = processes.free_port()
    assert not kafka_broker.answers(port) and not s3_server.answers(port)


def test_properties_are_escaped_and_the_broker_forgets_nothing() -> None:
    text = processes.properties_text({"path": "/tmp/a b\\c/ü😀", "n": 1})
    assert text == "path=/tmp/a b\\\\c/\\u00fc\\ud83d\\ude00\nn=1\n"
    values = kafka_broker.broker_properties(1, 2, Path("/data"))
    assert values["listeners"] == "CLIENT://127.0.0.1:1,CONTROLLER://127.0.0.1:2"
    assert (values["log.retention.ms"], values["log.retention.bytes"]) == (-1, -1)
    assert values["auto.create.topics.enable"] == "false"
    replicated = (".replication.factor", ".min.isr")
    assert [values[key] for key in values if key.endswith(replicated)] == [1] * 6
    # Behind a proxy.
    values = kafka_broker.broker_properties(1, 2, Path("/data"), advertised_port=3)
    assert values["listeners"] == "CLIENT://127.0.0.1:1,CONTROLLER://127.0.0.1:2"
    assert values["advertised.listeners"] == "CLIENT://127.0.0.1:3"
