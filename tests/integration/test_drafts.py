"""The files of `anabranch draft` load, decode the topics, and every reader has exact rows."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import yaml
from click.testing import CliRunner
from drafted_lake import Lake
from engine_readers import read_by_polars, read_by_pyiceberg
from protos import HEAD, indexed, type_of
from pyspark.sql import SparkSession
from strange_topics import TOPICS, Sent, without_maps
from wire import encode, wired

import anabranch
from anabranch.cli import main
from anabranch.job import Job

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


def test_topics_of_a_pattern_are_drafted_and_read_by_both_layers(
    environment: dict[str, Any], registry: SchemaRegistry, spark: SparkSession, tmp_path: Path
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
    assert files[cdc]["schema"]["made"] == "TIMESTAMP"
    assert files[cdc]["key"] == ["id", "source_lsn"]
    for one in json.loads(lake.call("check", "--output", "json")):
        assert (one["dead"], one["duplicates"], one["objections"]) == (0, 0, []), one
    lake.call("apply")
    lake.speed(spark)
    by_speed = {job.stream.topic: _rows(job) for job in lake.jobs()}
    lake.batch(spark)
    assert {job.stream.topic: _rows(job) for job in lake.jobs()} == by_speed
    assert {topic: len(rows) for topic, rows in by_speed.items()} == {
        json_topic: 20, csv_topic: 1_500, avro: 5, proto: 5, cdc: 5,
    }  # fmt: skip
    placed = datetime(2026, 11, 28, 10, tzinfo=UTC)
    assert by_speed[csv_topic][7] == {"id": 7, "total": Decimal("7.50"), "placed_at": placed}
    assert by_speed[avro][1] == {
        "id": "o-1", "total": Decimal("12.34"), "either": {"member_string": None, "member_long": 1},
    }  # fmt: skip
    assert by_speed[proto][1] == {"id": "p-1", "at": None, "n": [1]}
    made = placed.replace(microsecond=1)
    source: dict[str, object] = {"op": "c", "source_lsn": 1, "source_ts": placed}
    assert by_speed[cdc][1] == {"id": 1, "made": made, **source}
    assert "expected topics that match none-.*" in _error(lake, "none-.*")
    with lake.sending(f"{lake.prefix}-empty"):
        pass
    assert "expected records with values, found none" in _error(lake, f"{lake.prefix}-empty")


def _rows(job: Job) -> list[dict[str, Any]]:
    """Return the rows of a stream's own columns, by the first of them."""
    names = [column.name for column in job.stream.columns]
    rows = job.lake.load(job.stream.table).scan().to_arrow().select(names).to_pylist()
    return sorted(rows, key=lambda row: str(row[names[0]]).zfill(9))


def _error(lake: Lake, topic: str) -> str:
    done = CliRunner().invoke(main, ["draft", topic, "--conf", str(lake.folder)])
    assert done.exit_code == 75
    return str(done.stderr)


@pytest.mark.full
@pytest.mark.timeout(1800)
def test_topics_of_the_field_are_exact_at_the_first_try(
    environment: dict[str, Any],
    spark: SparkSession,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Else Polars warns that it plans without its own package.
    monkeypatch.setenv("POLARS_ICEBERG_PLANNER", "pyiceberg")
    lake = Lake(tmp_path / "conf", environment)
    sent = {f"{lake.prefix}.{name}": list(make()) for name, make in TOPICS.items()}
    for topic, records in sent.items():
        with lake.sending(topic) as send:
            for one in records:
                send(one.value, one.key, one.headers)

    # Step 1: draft and apply.
    lake.call("draft", f"{lake.prefix}[.].*", "--write")
    lake.call("apply")
    # Step 2: one speed process for all, then one batch job.
    lake.speed(spark)
    for job in lake.jobs():
        _is_exact(lake, job, sent[job.stream.topic], "speed")
    lake.batch(spark)
    # Step 3: every reader has what was sent.
    for job in lake.jobs():
        _is_exact(lake, job, sent[job.stream.topic], "batch")


def _is_exact(lake: Lake, job: Job, sent: list[Sent], layer: str) -> None:
    """Assert that each reader has a row of each record, with what is expected of it."""
    table = job.lake.load(job.stream.table)
    s3 = job.environment.s3
    assert s3.access_key is not None and s3.secret_key is not None
    task = {
        "endpoint": s3.endpoint,
        "key": s3.access_key.get_secret_value(),
        "secret": s3.secret_key.get_secret_value(),
    }
    handle = anabranch.open(job.stream.name, conf=lake.folder)
    read = {
        "PyIceberg": read_by_pyiceberg(table, None, task)[1],
        "Polars": read_by_polars(table, None, task)[1],
        "DuckDB": handle.duckdb().to_arrow_table().to_pylist(),
    }
    # Records were sent to the two partitions in turn.
    places = {(i % 2, i // 2): one.expected for i, one in enumerate(sent)}
    wanted = {place: want for place, want in places.items() if want is not None}
    letters = job.lake.load(job.stream.dead_letters_table).scan().to_arrow()
    assert len(letters) == len(sent) - len(wanted)
    for reader, rows in read.items():
        found = {(r["kafka_partition"], r["kafka_offset"]): r for r in rows}
        assert (len(found), found.keys()) == (len(rows), wanted.keys())
        for place, want in wanted.items():
            has = without_maps({name: found[place][name] for name in want})
            assert has == want, f"{job.stream.topic} by {reader} after {layer}: {place}"
