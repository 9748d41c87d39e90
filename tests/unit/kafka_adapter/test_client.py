"""Behaviour of the Kafka adapter with brokers that do not answer, or refuse to answer us."""

import logging
import socket
import threading
import time
import tomllib
import uuid
from collections.abc import Iterator
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from kafka import TopicPartition, codec, errors
from kafka.record import default_records, util
from kafka.structs import OffsetAndTimestamp
from packaging.requirements import Requirement

from anabranch import config
from anabranch.common.errors import (
    AnabranchError,
    CodecMissing,
    ConfigurationError,
    MissingRight,
    NoTopicIds,
    Transient,
)
from anabranch.kafka import client, kafka_python
from anabranch.kafka.kafka_python import IO_THREAD
from anabranch.offsets.position import Topic

PROJECT = Path(__file__).resolve().parents[3] / "pyproject.toml"
UNREACHABLE = config.Kafka(bootstrap_servers="127.0.0.1:1")


def test_a_broker_that_is_unreachable_or_silent_is_transient(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(client, "_BOOTSTRAP_MS", 500)
    began = time.monotonic()
    with pytest.raises(Transient) as raised:
        client.KafkaAdapter(UNREACHABLE).describe("t")
    assert time.monotonic() - began < 5
    assert str(raised.value) == (
        "describe topic t at 127.0.0.1:1: KafkaTimeoutError: Unable to bootstrap from "
        "['127.0.0.1:1'] (KafkaConnectionError: 111 ECONNREFUSED); check kafka.bootstrap_servers: "
        "`anabranch doctor` examines it (transient, try again)"
    )
    # Said once, by us.
    assert not logging.getLogger("kafka").propagate
    monkeypatch.setattr(client, "_BOOTSTRAP_MS", 1_000)
    began = time.monotonic()
    # The server accepts the connection and sends nothing.
    with socket.create_server(("127.0.0.1", 0)) as silent, pytest.raises(Transient):
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        client.KafkaAdapter(config.Kafka(bootstrap_servers=address)).describe("t")
    assert time.monotonic() - began > 1.9


def test_a_sample_of_large_records_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The hazard: an array of more than 2 GB, and memory for as many records as there are."""
    adapter = client.KafkaAdapter(UNREACHABLE)
    monkeypatch.setattr(client, "_MOST_SAMPLED", 100)
    monkeypatch.setattr(adapter, "log_starts", lambda topic: {0: 0})
    monkeypatch.setattr(adapter, "stable_ends", lambda topic: {0: 50})

    def read(topic: str, ranges: dict[int, tuple[int, int]]) -> Iterator[tuple[int, list[Any]]]:
        for start, end in ranges.values():
            sizes = {"serialized_key_size": 0, "serialized_value_size": 30}
            yield 0, [SimpleNamespace(offset=i, **sizes) for i in range(start, end)]

    monkeypatch.setattr(adapter, "read_records", read)
    topic = Topic("t", "id", (0,))
    assert [r.offset for r in adapter.newest_records(topic, 20, 5)] == [47, 48, 49]
    monkeypatch.setattr(client, "_MOST_SAMPLED", 1)
    assert [r.offset for r in adapter.newest_records(topic, 20)] == [49]


@pytest.mark.parametrize("silence", [30, 0])
def test_the_start_of_a_log_is_waited_for(silence: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kafka deletes the record to read, and its leader ends before it answers where the log begins:
    kafka-python then has no position. The hazard: a TypeError, which ends a job for good."""
    record = SimpleNamespace(offset=7, timestamp=5, serialized_key_size=0, serialized_value_size=1)
    polls, positions = iter([{}, {TopicPartition("t", 0): [record]}]), iter([None, 8])
    consumer = SimpleNamespace(
        poll=lambda **_: next(polls), position=lambda *_, **__: next(positions),
        assign=lambda _: None, close=lambda: None,
    )  # fmt: skip
    adapter = client.KafkaAdapter(UNREACHABLE)
    monkeypatch.setattr(adapter, "_consumer_at", lambda _: consumer)
    monkeypatch.setattr(adapter, "_require_rights", lambda _: None)
    monkeypatch.setattr(client, "_SILENCE_S", silence)
    if not silence:
        with pytest.raises(Transient, match="expected records of partition 0 from 3"):
            adapter.stamps_from(Topic("t", "id", (0,)), {0: 3}, {0: 9}, 1)
        return
    found = adapter.stamps_from(Topic("t", "id", (0,)), {0: 3}, {0: 9}, 1)
    assert [one.offset for one in found[0]] == [7]


def test_a_report_takes_the_first_answer_about_a_topic(monkeypatch: pytest.MonkeyPatch) -> None:
    """The hazard: a topic that does not exist is confirmed for longer than several streams' answers
    may take, and the report names Kafka as the one that does not answer."""
    asked: list[str] = []
    adapter = client.KafkaAdapter(UNREACHABLE)
    monkeypatch.setattr(adapter, "_describe", asked.append)
    assert adapter.describe("t", confirmed=False) is None
    assert asked == ["t"]
    assert adapter.describe("t") is None
    assert len(asked) > 2


@pytest.mark.parametrize("address", ["127.0.0.1:1", "no-such-host.invalid:9092"])
def test_a_wrong_address_is_reported_fast(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert client._BOOTSTRAP_MS <= 5_000
    monkeypatch.setattr(client, "_BOOTSTRAP_MS", 1_000)
    tried, began, connect = list[Any](), time.monotonic(), client.connect
    monkeypatch.setattr(client, "connect", lambda *a, **k: tried.append(a) or connect(*a, **k))
    with pytest.raises(Transient, match="`anabranch doctor` examines it"):
        client.KafkaAdapter(config.Kafka(bootstrap_servers=address)).describe("t")
    assert time.monotonic() - began < 9
    assert len(tried) == 1, "an address without a broker is not waited for twice"


def logged(failure: Exception) -> None:
    """As kafka-python logs the cause of what a question then ends with."""
    logging.getLogger("kafka.net.manager").warning("Bootstrap connection failed: %s", failure)


def explained(failure: Exception, began: float | None = None, right: str = "") -> AnabranchError:
    began = began if began is not None else time.monotonic()
    return kafka_python.explained(UNREACHABLE, "describe topic t", failure, began, right)


@pytest.mark.parametrize(
    ("failure", "kind"),
    [
        (errors.SaslAuthenticationFailedError("wrong password"), ConfigurationError),
        (errors.KafkaConnectionError("Handshake failed: CERTIFICATE_VERIFY_FAILED"), ConfigurationError),
        (errors.KafkaConnectionError("111 ECONNREFUSED"), Transient),
    ],
)  # fmt: skip
def test_the_cause_the_client_logs_decides(failure: Exception, kind: type[AnabranchError]) -> None:
    began, ended = time.monotonic(), errors.KafkaTimeoutError("Unable to bootstrap")
    logged(failure)
    error = explained(ended, began)
    assert type(error) is kind and str(failure.args[0]) in str(error)
    # A cause of an earlier question does not count.
    later = explained(ended)
    assert type(later) is Transient and str(failure.args[0]) not in str(later)


@pytest.mark.parametrize(
    ("failure", "waits"),
    [
        (errors.UnknownBrokerIdError(-1), "it has no leader"),
        (errors.LeaderNotAvailableError("p"), "it has no leader"),
        (errors.OffsetNotAvailableError("p"), "min.insync.replicas"),
    ],
)
def test_a_partition_that_cannot_be_read_now_is_waited_for(failure: Exception, waits: str) -> None:
    error = explained(failure)
    assert type(error) is Transient and waits in str(error)


@pytest.mark.parametrize("kind", errors.AuthorizationError.__subclasses__())
def test_every_refusal_names_the_missing_right(kind: type[errors.AuthorizationError]) -> None:
    error = explained(kind("denied"))
    assert type(error) is MissingRight
    [option] = [option for refused, option, _ in kafka_python.RIGHTS if refused is kind]
    assert "kafka-acls.sh --bootstrap-server 127.0.0.1:1 --add" in str(error)
    assert f" {option}" in str(error)


@pytest.mark.parametrize(
    ("logged", "most"),
    [
        # The broker hangs up after a refusal, and the client logs the disconnection last.
        (["SaslAuthenticationFailedError", "socket disconnected"], "SaslAuthenticationFailedError"),
        # The attempt under way at the timeout logs only that it was cut off.
        (["111 ECONNREFUSED", "Connection timed out"], "111 ECONNREFUSED"),
        (["Connection timed out"], "Connection timed out"),
        (["111 ECONNREFUSED", "socket disconnected"], "socket disconnected"),
    ],
)
def test_the_most_specific_connection_error_is_reported(logged: list[str], most: str) -> None:
    failures = kafka_python.FailureHandler()
    for text in logged:
        of = (errors.KafkaConnectionError(text),)
        failures.emit(logging.LogRecord("kafka", logging.WARNING, "", 0, "failed: %s", of, None))
    found = failures.since(0, "kafka:9092")
    assert isinstance(found, errors.KafkaConnectionError) and most in str(found)
    assert failures.since(time.monotonic() + 1, "kafka:9092") is None


def test_the_failure_of_a_client_of_other_brokers_is_no_cause() -> None:
    failures = kafka_python.FailureHandler()
    error = errors.KafkaConnectionError("111 ECONNREFUSED")
    record = logging.LogRecord("kafka", logging.WARNING, "", 0, "failed: %s", (error,), None)
    record.threadName = f"{IO_THREAD}kafka:9092"
    failures.emit(record)
    assert failures.since(0, "kafka:9092") is error
    assert failures.since(0, "mirror:9092") is None


def test_absent_brokers_cost_no_thread_and_no_descriptor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "_BOOTSTRAP_MS", 200)
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
    kafka = config.Kafka(bootstrap_servers=address)

    def fail() -> tuple[int, int]:
        with client.KafkaAdapter(kafka) as adapter, pytest.raises(Transient, match="ECONNREFUSED"):
            adapter.topic_names()
        with pytest.raises(Transient, match="ECONNREFUSED"):
            client.new_producer(kafka, bootstrap_timeout_ms=200)
        threads = [thread for thread in threading.enumerate() if thread.name == IO_THREAD + address]
        return len(threads), len(list(select_descriptors()))

    # Clients of other tests may end meanwhile.
    _, before = fail()
    for _ in range(3):
        threads, descriptors = fail()
        assert threads == 0
        assert descriptors <= before


def select_descriptors() -> Iterator[str]:
    """The descriptors by which this process's event loops wait: one for each client."""
    for path in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):
            if "eventpoll" in (target := str(path.readlink())):
                yield target


def test_kafka_python_is_corrected_for_ends_of_connections_and_checksums() -> None:
    class Transport:
        def _sock_recv(self) -> tuple[bytes, Exception | None]:
            return b"why", OSError("hung up")

    kafka_python.deliver_data_before_eof(Transport)
    assert Transport()._sock_recv() == (b"why", None)
    # Its values are those of RFC 3720, B.4; google-crc32c computes them.
    zeros = memoryview(bytes(40))[8:]
    assert default_records.calc_crc32c(zeros) == util.calc_crc32c(zeros) == 0x8A9136AA
    assert default_records.calc_crc32c.__module__ == kafka_python.__name__


def installed_with(
    package: str, extras: frozenset[str], found: set[tuple[str, frozenset[str]]]
) -> set[str]:
    """Return the packages that installing `package` brings, by those installed here."""
    if (package, extras) not in found:
        found.add((package, extras))
        for one in map(Requirement, metadata.requires(package) or []):
            if any(one.marker is None or one.marker.evaluate({"extra": e}) for e in extras or {""}):
                installed_with(one.name.lower(), frozenset(one.extras), found)
    return {name for name, _ in found}


def test_an_installation_has_the_package_of_each_codec() -> None:
    """The development environment may have one of them only because another tool brings it."""
    installed = installed_with("anabranch", frozenset(), set())
    assert set(kafka_python.CODEC_PACKAGES.values()) <= installed
    project = tomllib.loads(PROJECT.read_text(encoding="utf-8"))["project"]
    declared = {one.name: one.extras for one in map(Requirement, project["dependencies"])}
    assert "google-crc32c" in declared and "crc32c" not in declared["kafka-python"]
    assert "deptry" not in installed
    assert codec.has_gzip() and codec.has_snappy() and codec.has_lz4() and codec.has_zstd()


@pytest.mark.parametrize("name", kafka_python.CODEC_PACKAGES)
def test_a_missing_codec_package_ends_the_job_and_is_named(name: str) -> None:
    missing = f"Libraries for {name} compression codec not found"
    error = explained(errors.UnsupportedCodecError(missing))
    assert type(error) is CodecMissing and error.exit_code == 2
    assert f"run `pip install {kafka_python.CODEC_PACKAGES[name]}`" in str(error)


def test_an_unknown_codec_ends_the_job_and_a_refusal_names_its_own_right() -> None:
    error = explained(errors.UnsupportedCodecError("Unrecognized compression type: 7"))
    assert type(error) is CodecMissing and "upgrade Anabranch" in str(error)
    # A transaction touches a topic, a group and a transactional id; each refusal names its own.
    error = explained(errors.GroupAuthorizationFailedError(), None, "--operation Write --topic t")
    assert "--operation Read --group GROUP" in str(error)


@pytest.mark.parametrize("given", [uuid.UUID(int=0), str(uuid.UUID(int=0)), None, ""])
def test_a_topic_without_an_id_is_refused(given: object) -> None:
    """The hazard: zeros, which brokers without ids are read to give, are one id of all topics."""
    found = r"topic t: expected an id from the brokers \(KIP-516\), found none"
    with pytest.raises(NoTopicIds, match=found) as refused:
        kafka_python.topic_id("t", given)
    assert refused.value.exit_code == 2
    assert kafka_python.topic_id("t", uuid.UUID(int=1)) == 21 * "A" + "Q"


@pytest.mark.parametrize(
    ("now", "sizes", "count", "planned"),
    [
        (16 << 10, [200] * 40, 15, 16 << 10),
        (16 << 10, [], 15, 16 << 10),
        (16 << 10, [20_000], 15, 600_000),
        (16 << 10, [1_000_000], 15, 4 << 20),
        # The size that another look needed is kept.
        (600_000, [200], 15, 600_000),
    ],
)
def test_a_look_fetches_what_it_needs(now: int, sizes: list[int], count: int, planned: int) -> None:
    assert kafka_python.plan_fetch_bytes(now, sizes, count) == planned


class Admin:
    """An admin connection that may not describe `secret`: one partition fails the whole request."""

    def list_partition_offsets(self, specs: Any, **_: Any) -> Any:
        if any(partition.topic == "secret" for partition in specs):
            raise errors.TopicAuthorizationFailedError("secret")
        return {partition: OffsetAndTimestamp(7, -1, -1) for partition in specs}

    def close(self) -> None:
        pass


@pytest.mark.parametrize("within", [5.0, -1.0], ids=["at once", "late"])
def test_a_forbidden_topic_takes_no_ends(within: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "_ONE_BY_ONE_WITHIN_S", within)
    monkeypatch.setattr(client, "connect", lambda *_, **__: Admin())
    adapter = client.KafkaAdapter(UNREACHABLE)
    found = adapter.stable_ends_of({"open": [0, 1], "secret": [0]})
    assert found["open"] == {0: 7, 1: 7} and isinstance(found["secret"], MissingRight)
    alone = adapter.stable_ends_of({"secret": [0]})["secret"]
    assert "--operation Describe --topic secret" in str(alone)
