"""A wheel that is installed alone reads all of Kafka's codecs, by every command."""

import json
import subprocess
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import yaml
from confluent_kafka import Producer
from installation import build_wheel, install, run
from world import SCHEMA, event, past_hour

from anabranch import config
from anabranch.kafka.client import KafkaAdapter, create_topic
from anabranch.offsets.hours import start_of
from anabranch.spark.jars import ensure_jars
from anabranch.spark.java import require_java

ROOT = Path(__file__).resolve().parents[2]
CODECS = ("none", "gzip", "snappy", "lz4", "zstd")
PRODUCE = ROOT / "tests" / "support" / "Produce.java"
RECORDS = 30  # of each producer and codec


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The `anabranch` of an environment of the wheel and its declared dependencies alone."""
    folder = tmp_path_factory.mktemp("wheel")
    return install(build_wheel(folder), folder / "venv") / "anabranch"


@dataclass(frozen=True)
class Part:
    """A partition that is to have records of one codec."""

    topic: str
    partition: int
    codec: str

    def values(self, producer: str, at: datetime) -> list[bytes]:
        return [event(f"{self.codec}-{producer}-{i}", at, player="p" * 100) for i in range(RECORDS)]


def produce(bootstrap_servers: str, parts: list[Part], at: datetime) -> None:
    """Send RECORDS to each part with librdkafka, then with Kafka's own producer."""
    stamp = int(at.timestamp() * 1000)
    for part in parts:
        settings = {"bootstrap.servers": bootstrap_servers, "compression.type": part.codec}
        producer = Producer(settings | {"linger.ms": 500})
        for value in part.values("c", at):
            producer.produce(part.topic, value, partition=part.partition, timestamp=stamp)
        assert producer.flush(30) == 0
    lines = [
        b"%s\t%d\t%s\t%s" % (p.topic.encode(), p.partition, p.codec.encode(), v)
        for p in parts
        for v in p.values("java", at)
    ]
    jars = ":".join(map(str, ensure_jars().broker))
    command = (require_java(), "-cp", jars, PRODUCE, bootstrap_servers, stamp)
    run(*command, input=b"\n".join(lines), text=False)


def test_the_wheel_alone_reads_every_codec(
    installed: Path, services: Any, environment: dict[str, Any], tmp_path: Path
) -> None:
    hour = past_hour(2)
    at = start_of(hour) + timedelta(minutes=20)
    kafka = config.Kafka(bootstrap_servers=services.kafka)
    conf = tmp_path / "conf"
    (conf / "streams").mkdir(parents=True)
    (conf / "anabranch.yaml").write_text(yaml.safe_dump(environment))
    # The layers and the audit read one topic with a codec in each partition; the doctor reads one
    # record of a topic.
    topics = {"codecs": CODECS} | {f"codec_{codec}": (codec,) for codec in CODECS}
    for name, codecs in topics.items():
        stream = {
            "topic": name,
            "table": f"{name}.events",
            "format": "json",
            "schema": SCHEMA,
            "key": "event_id",
            "event_time": {"column": "event_time", "past": "30 days", "future": "1 hour"},
            "batch": {"grace": "0 seconds", "lookback_hours": 1},
        }
        (conf / "streams" / f"{name}.yaml").write_text(yaml.safe_dump(stream))
        create_topic(kafka, name, len(codecs))
    run(installed, "apply", "codecs", "--conf", conf)
    parts = [Part(name, *part) for name, codecs in topics.items() for part in enumerate(codecs)]
    produce(kafka.bootstrap_servers, parts, at)
    with KafkaAdapter(kafka) as adapter:
        sizes = adapter.partition_bytes("codecs")
    is_smaller = [sizes[p] < sizes[0] / 2 for p in range(1, len(CODECS))]
    assert all(is_smaller), f"a producer did not compress: {sizes}"

    run(installed, "speed", "codecs", "--available-now", "--conf", conf)
    run(installed, "batch", "codecs", "--conf", conf)
    accepted = run(
        installed, "query", "SELECT event_id FROM codecs.events", "--only-accepted", "--conf", conf,
        "--output", "json",
    )  # fmt: skip
    sent = [(codec, by) for codec in CODECS for by in ("c", "java")]
    expected = sorted(f"{codec}-{by}-{i}" for codec, by in sent for i in range(RECORDS))
    assert sorted(row["event_id"] for row in json.loads(accepted)) == expected
    run(installed, "audit", "codecs", "--conf", conf)
    # It ends with 1: of most of these streams nothing was applied.
    command = [installed, "doctor", "--conf", conf, "--output", "json"]
    report = json.loads(subprocess.run(command, capture_output=True, text=True, timeout=120).stdout)
    examined = [one for one in report["examined"] if one["name"].startswith("kafka ")]
    of_kafka = {one["name"]: one["findings"] for one in examined}
    assert set(of_kafka) == {f"kafka {name}" for name in topics}
    found = [finding for findings in of_kafka.values() for finding in findings]
    assert [finding for finding in found if finding["severity"] == "error"] == []
