"""`anabranch check` of real topics before there are tables, and the warning of `apply`."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from commands import call, shown
from world import Make

if TYPE_CHECKING:
    from registry import SchemaRegistry


SCHEMA = "event_id STRING NOT NULL, ts TIMESTAMP"


def test_a_wrong_file_is_found_before_it_has_a_table(world: Make) -> None:
    one = world(schema=SCHEMA, event_time=None)
    assert "expected its records, found no topic" in call(one, "check", one.name, expect=75)
    one.topic(3)
    assert f"topic {one.name} has no records to check" in call(one, "check", one.name)
    now = datetime.now(UTC)
    millis = int(now.timestamp() * 1000)
    values = [{"event_id": f"e-{i}", "ts": millis + i} for i in range(30)]
    one.send([(i % 2, now, json.dumps(value).encode()) for i, value in enumerate(values)])

    found = shown(one, "check", one.name, "--records", "20", expect=1)
    assert (found["records"], found["good"], found["dead"]) == (20, 0, 20)
    assert found["reasons"][0]["text"].startswith("ts: expected timestamp, found ")
    assert not one.lake.exists(one.job.stream.table)
    # Applied all the same, with a warning.
    printed = call(one, "apply", one.name)
    assert f"{one.name}: created table {one.job.stream.table}" in printed
    assert f"{one.name}: warning: dead letters: expected at most 5 % of 30 records" in printed

    stamp = {"type": "TIMESTAMP", "unit": "millis"}
    one.reconfigure(schema={"event_id": "STRING NOT NULL", "ts": stamp})
    assert "would be dead letters" not in call(one, "check", one.name)
    assert call(one, "apply", one.name) == f"{one.name}: nothing to change\n"


def test_a_subjects_columns_are_those_of_apply(world: Make, registry: SchemaRegistry) -> None:
    one = world(registry.url, schema="registry", format="avro", event_time=None, partitions=1)
    fields = [{"name": "event_id", "type": "string"}, {"name": "n", "type": "int"}]
    schema = {"type": "record", "name": "E", "fields": fields}
    id = registry.register(f"{one.name}-value", schema)
    # "a" and 1.
    good = b"\0" + id.to_bytes(4, "big") + b"\x02a\x02"
    now = datetime.now(UTC)
    one.send([(0, now, good), (0, now, b"{}")])
    printed = call(one, "check", one.name, "--output", "json", expect=1)
    assert '"good": 1,' in printed and '"event_id": "a"' in printed
    assert '"code": "not_wire_format"' in printed
    assert not one.lake.exists(one.job.stream.table)
