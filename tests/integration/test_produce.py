"""A reader finds in the topic what `dev produce` says was acknowledged."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections import Counter
from pathlib import Path
from typing import Any

import confluent_kafka
import pytest
from click.testing import CliRunner
from waiting import wait_for

from anabranch import config
from anabranch.cli import main
from anabranch.cli.dev import produce
from anabranch.common.errors import ConfigurationError, Transient
from anabranch.dev.producers.events import Ack, expected, sha256
from anabranch.dev.producers.produce import produce_events
from anabranch.kafka.client import create_topic

CONF = Path(__file__).parents[2] / "conf"
Found = tuple[int, int, str | None, int]


@pytest.fixture
def topic() -> str:
    return f"produce-{uuid.uuid4().hex[:12]}"


@pytest.fixture
def conf(tmp_path: Path, services: Any, topic: str, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The configuration as it ships, but for the topic, which is this test's own."""
    folder = tmp_path / "conf"
    shutil.copytree(CONF / "streams", folder / "streams")
    shutil.copy(CONF / "anabranch.yaml", folder)
    stream = folder / "streams" / "game_events.yaml"
    stream.write_text(stream.read_text().replace("topic: game_events", f"topic: {topic}"))
    monkeypatch.setenv("ANABRANCH_KAFKA", services.kafka)
    return folder


def read_back(kafka: config.Kafka, topic: str) -> list[Found]:
    """Every record of the topic: (partition, offset, sha256 of the value, timestamp), in order."""
    settings = {"bootstrap.servers": kafka.bootstrap_servers, "group.id": "nobody"}
    consumer = confluent_kafka.Consumer(settings | {"isolation.level": "read_committed"})
    records: list[Found] = []
    try:
        ends = {}
        for partition in consumer.list_topics(topic, timeout=20).topics[topic].partitions:
            place = confluent_kafka.TopicPartition(topic, partition)
            start, ends[partition] = consumer.get_watermark_offsets(place, timeout=20)
            assert start == 0
        consumer.assign([confluent_kafka.TopicPartition(topic, partition, 0) for partition in ends])
        deadline = time.monotonic() + 60
        while len(records) < sum(ends.values()):
            assert time.monotonic() < deadline, f"read {len(records)} of {ends}"
            for m in consumer.consume(5_000, timeout=1):
                assert m.error() is None
                records.append((m.partition(), m.offset(), sha256(m.value()), m.timestamp()[1]))
    finally:
        consumer.close()
    return sorted(records)


def positions(acks: list[Ack]) -> list[Found]:
    return sorted((ack.partition, ack.offset, ack.sha256, ack.timestamp_ms) for ack in acks)


def test_acknowledged_records_are_exactly_the_topics(kafka: config.Kafka, topic: str) -> None:
    before = time.time() * 1000
    sent = produce_events(kafka, topic, events=3_000, hours=3, seed=5, dirty=True)
    assert sent.sent == expected(3_000, dirty=True)
    assert (sent.acknowledged, sent.failed) == (3_060, 0)
    assert Counter(ack.kind for ack in sent.acks) == sent.sent
    records = read_back(kafka, topic)
    assert records == positions(sent.acks)
    assert {partition for partition, *_ in records} == {0, 1, 2}
    stamps = [stamp for *_, stamp in records]
    assert before - 3 * 3_600_000 <= min(stamps) < max(stamps) <= time.time() * 1000
    assert max(stamps) - min(stamps) > 2.9 * 3_600_000
    for partition in range(3):  # an hour's cut relies on it
        in_order = [stamp for number, _, _, stamp in records if number == partition]
        assert in_order == sorted(in_order)


def test_the_command_prints_account_and_acks(conf: Path, kafka: config.Kafka, topic: str) -> None:
    acks = conf.parent / "acks.jsonl"
    arguments = ["game_events", "--events", "200", "--hours", "2", "--dirty", "--partitions", "2"]
    arguments += ["--acks", str(acks), "--conf", str(conf)]
    result = CliRunner().invoke(produce, [*arguments, "--output", "json"])
    assert result.exit_code == 0, result.output
    account = json.loads(result.stdout)
    assert account["stream"] == "game_events"
    assert account["topic"] == topic
    assert account["sent"] == {"good": 198, "late": 2, "duplicate": 2, "malformed": 2}
    assert (account["acknowledged"], account["failed"]) == (204, 0)
    assert sum(sum(hour.values()) for hour in account["by_hour"].values()) == 204
    assert len(account["by_hour"]) in (2, 3)

    result = CliRunner().invoke(produce, arguments)
    assert result.exit_code == 0, result.output
    assert f"sent 204 records to topic {topic}" in result.stdout
    assert "198 good, 2 late, 2 duplicate, 2 malformed" in result.stdout
    assert "acknowledged 204 of 204, failed 0" in result.stdout
    assert next(iter(account["by_hour"])) in result.stdout

    lines = [json.loads(line) for line in acks.read_text().splitlines()]
    assert list(lines[0]) == ["partition", "offset", "kind", "sha256", "timestamp_ms"]
    assert positions([Ack(**line) for line in lines]) == read_back(kafka, topic)
    assert {line["partition"] for line in lines} == {0, 1}


def test_failed_sends_are_counted_as_such(conf: Path, kafka: config.Kafka, topic: str) -> None:
    create_topic(kafka, topic, 1, {"max.message.bytes": "100"})  # smaller than any event
    result = CliRunner().invoke(
        produce, ["game_events", "--events", "5", "--output", "json", "--conf", str(conf)]
    )
    account = json.loads(result.stdout)
    assert account["sent"]["good"] == 5
    assert (account["acknowledged"], account["failed"]) == (0, 5)
    assert isinstance(result.exception, Transient)
    assert result.exception.exit_code == 75
    assert "expected 5 acknowledgements, found 0" in str(result.exception)
    assert read_back(kafka, topic) == []


@pytest.mark.usefixtures("single_broker")
def test_a_topic_of_ones_own_and_a_files_lines(conf: Path, kafka: config.Kafka, topic: str) -> None:
    def run(*arguments: str, input: bytes = b"", expect: int = 0) -> str:
        done = CliRunner().invoke(main, ["dev", *arguments, "--conf", str(conf)], input=input)
        assert done.exit_code == expect, done.output
        return done.output

    lines = conf / "records.jsonl"
    lines.write_bytes(b'{"id": 1}\n\n{"id": "\xc3\xa9"}\r\n{"id": 3}')
    assert f"run `anabranch dev topic {topic}`" in run("send", topic, str(lines), expect=2)
    assert run("topic", topic, "--partitions", "2") == f"topic {topic} created with 2 partitions\n"
    assert run("topic", topic) == f"topic {topic} is there already, with 2 partitions\n"
    assert run("send", topic, str(lines)) == f"topic {topic}: 3 records sent and acknowledged\n"
    sent = run("send", topic, "-", input=b"a line")
    assert sent == f"topic {topic}: 1 record sent and acknowledged\n"
    values = (b'{"id": 1}', '{"id": "é"}'.encode(), b'{"id": 3}', b"a line")
    assert Counter(found[2] for found in read_back(kafka, topic)) == Counter(map(sha256, values))
    lines.write_bytes(b"{}\n" + b"x" * 2_000_000)
    found = run("send", topic, str(lines), expect=75)
    assert "expected 2 acknowledgements, found 1; the first failure: MessageSizeTooLarge" in found


def test_another_stream_is_refused_with_a_pointer_to_send(conf: Path) -> None:
    result = CliRunner().invoke(produce, ["flights", "--events", "5", "--conf", str(conf)])
    assert isinstance(result.exception, ConfigurationError)
    assert "found 'flights'" in str(result.exception)
    assert "anabranch dev send TOPIC FILE" in str(result.exception)


def test_ctrl_c_prints_the_account_exits_130(conf: Path, kafka: config.Kafka, topic: str) -> None:
    acks = conf.parent / "acks.jsonl"
    code = "from anabranch.cli.dev import produce; produce()"
    arguments = ["game_events", "--events", "1000000", "--rate", "300", "--acks", str(acks)]
    arguments += ["--output", "json", "--conf", str(conf)]
    process = subprocess.Popen(
        [sys.executable, "-c", code, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        text=True, env=os.environ | {"PYTHONUNBUFFERED": "1"},
    )  # fmt: skip
    try:
        wait_for(lambda: acks.exists() and acks.stat().st_size > 0, "an acknowledgement")
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=300)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 130, err
    account = json.loads(out)
    assert 0 < account["acknowledged"] == account["sent"]["good"] < 1_000_000
    assert account["failed"] == 0
    acked = [Ack(**json.loads(line)) for line in acks.read_text().splitlines()]
    assert positions(acked) == read_back(kafka, topic)
