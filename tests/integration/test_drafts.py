"""`anabranch draft` of real topics: the files that it writes load, decode the topics at the first
try, and give rows that are exact in every reader."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml
from click.testing import CliRunner
from protos import HEAD, indexed, type_of
from wire import encode, wired

from anabranch import config
from anabranch.cli import main
from anabranch.kafka.client import create_topic, new_producer

if TYPE_CHECKING:
    from registry import SchemaRegistry

ORDER = {
    "type": "record", "name": "Order", "namespace": "shop", "fields": [
        {"name": "id", "type": "string"}, {"name": "total", "type": ["null", {"type": "bytes", "logicalType": "decimal", "precision": 9, "scale": 2}]},
        {"name": "either", "type": ["null", "string", "long"]}, {"name": "nothing", "type": "null"},
    ],
}  # fmt: skip
ROW = {
    "type": "record", "name": "Value", "namespace": "shop", "fields": [
        {"name": "id", "type": "long"},
        {"name": "made", "type": ["null", {"type": "long", "connect.name": "io.debezium.time.MicroTimestamp"}]},
    ],
}  # fmt: skip
CHANGE = {
    "type": "record", "name": "Envelope", "namespace": "shop", "fields": [
        {"name": "before", "type": ["null", ROW]}, {"name": "after", "type": ["null", "shop.Value"]},
        {"name": "source", "type": {"type": "record", "name": "Source", "fields": [{"name": "ts_ms", "type": "long"}, {"name": "lsn", "type": ["null", "long"]}]}},
        {"name": "op", "type": "string"},
    ],
}  # fmt: skip
PROTO = (
    HEAD + "message Paid { string id = 1; google.protobuf.Timestamp at = 2; repeated int64 n = 3; }"
)


class Lake:
    """A configuration folder, and a producer for its Kafka."""

    def __init__(self, folder: Path, environment: dict[str, Any]) -> None:
        self.folder, self.prefix = folder, f"d{uuid.uuid4().hex[:10]}"
        (folder / "streams").mkdir(parents=True)
        (folder / "anabranch.yaml").write_text(yaml.safe_dump(environment))
        self._kafka = config.load_environment(folder).kafka

    def call(self, *arguments: str, expect: int = 0) -> str:
        done = CliRunner().invoke(main, [*arguments, "--conf", str(self.folder)])
        assert done.exit_code == expect, f"{arguments}: {done.output}\n{done.exception!r}"
        return str(done.stdout)

    @contextmanager
    def sending(self, topic: str, partitions: int = 2) -> Iterator[Any]:
        """Create a topic, and yield what sends values to it, one after the other."""
        create_topic(self._kafka, topic, partitions, {})
        producer, count = new_producer(self._kafka), 0

        def send(value: bytes | None, key: bytes | None = None, headers: Any = ()) -> None:
            nonlocal count
            producer.send(topic, value, key, [*headers], count % partitions)
            count += 1

        try:
            yield send
            producer.flush()
        finally:
            producer.close()


def test_topics_of_a_pattern_are_drafted_and_checked(
    environment: dict[str, Any], registry: SchemaRegistry, tmp_path: Path
) -> None:
    lake = Lake(tmp_path / "conf", environment | {"registry": {"url": registry.url}})
    json_topic, csv_topic, avro, proto, cdc = (
        f"{lake.prefix}.{name}" for name in ("json", "csv", "avro", "proto", "cdc")
    )
    with lake.sending(json_topic) as send:
        for i in range(20):
            send(json.dumps({"id": i, "@timestamp": 1795860000000 + i, "tags": ["a"]}).encode())
    with lake.sending(csv_topic, 1) as send:
        send(b"id;placed at;total")
        for i in range(1_500):
            send(b"%d;28.11.2026 10:00:00;%d,50" % (i, i))
    order = registry.register("shop.Order", ORDER)
    with lake.sending(avro) as send:
        for i in range(5):
            value = {
                "id": f"o-{i}",
                "total": {"bytes": "\x04\xd2"},
                "either": {"long": i},
                "nothing": None,
            }
            send(wired(order, encode(ORDER, value)))  # fmt: skip
    paid, new = registry.register(f"{proto}-value", PROTO, "PROTOBUF"), type_of(PROTO, "shop.Paid")
    with lake.sending(proto) as send:
        for i in range(5):
            send(indexed(paid, new(id=f"p-{i}", n=[i])))
    changes = registry.register(f"{cdc}-value", CHANGE)
    key = {"type": "record", "name": "Key", "fields": [{"name": "id", "type": "long"}]}
    registry.register(f"{cdc}-key", key)
    with lake.sending(cdc) as send:
        for i in range(5):
            row = {"shop.Value": {"id": i, "made": {"long": 1795860000000001}}}
            change = {"before": None, "after": row, "source": {"ts_ms": 1795860000000, "lsn": {"long": i}}, "op": "c"}  # fmt: skip
            send(wired(changes, encode(CHANGE, change)))

    printed = lake.call("draft", f"{lake.prefix}[.].*")
    documents = list(yaml.safe_load_all(printed))
    assert len(documents) == 5
    assert lake.call("draft", f"{lake.prefix}[.].*", "--write").count("wrote ") == 5
    # Files that exist are kept.
    assert lake.call("draft", json_topic, "--write", expect=2) == ""
    files = {one["topic"]: one for one in documents}
    assert files[json_topic]["schema"]["timestamp"] == {
        "type": "TIMESTAMP", "from": "@timestamp", "unit": "millis",
    }  # fmt: skip
    # The header is not among the newest records.
    assert files[csv_topic]["format"]["header"] == ["id", "placed at", "total"]
    assert files[csv_topic]["schema"]["total"] == {"type": "DECIMAL(18,2)", "decimal": ","}
    assert files[avro] == {
        "topic": avro, "table": f"{lake.prefix}.avro", "format": {"type": "avro", "subject": "shop.Order"},
        "schema": {"exclude": ["nothing"]}, "key": "id",
    }  # fmt: skip
    assert (files[proto]["format"], files[proto]["schema"]) == ("protobuf", "registry")
    assert files[cdc]["format"] == {"type": "avro", "envelope": "debezium"}
    assert files[cdc]["schema"]["made"] == {"type": "TIMESTAMP", "unit": "micros"}
    assert files[cdc]["key"] == ["id", "source_lsn"]
    for one in json.loads(lake.call("check", "--output", "json")):
        assert (one["dead"], one["duplicates"], one["objections"]) == (0, 0, []), one
    assert "expected topics that match none-.*" in _error(lake, "none-.*")
    with lake.sending(f"{lake.prefix}-empty"):
        pass
    assert "expected records with values, found none" in _error(lake, f"{lake.prefix}-empty")


def _error(lake: Lake, topic: str) -> str:
    done = CliRunner().invoke(main, ["draft", topic, "--conf", str(lake.folder)])
    assert done.exit_code == 75
    return str(done.stderr)
