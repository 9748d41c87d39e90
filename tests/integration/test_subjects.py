"""Columns from a subject of the real registry: what `apply` lists, creates and changes, and what it
refuses."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import yaml
from commands import call, shown
from world import World

from anabranch.kafka.client import create_topic
from anabranch.subjects.plan import table_columns

if TYPE_CHECKING:
    from registry import SchemaRegistry

Make = Callable[..., World]

ID = {"name": "event_id", "type": "string"}


def avro(*fields: dict[str, Any]) -> dict[str, Any]:
    return {"type": "record", "name": "E", "fields": [ID, *fields]}


def columns(one: World, table: str) -> dict[str, str]:
    """The columns of a table, without those of where a row came from."""
    own = table_columns(one.lake.load(table).schema())
    return {c.name: c.type if c.nullable else f"{c.type} NOT NULL" for c in own}


def test_apply_takes_up_what_a_subject_adds(world: Make, registry: SchemaRegistry) -> None:
    one = world(registry.url, schema="registry", format="avro", event_time=None, partitions=1)
    table, subject = f"{one.name}.events", f"{one.name}-value"
    assert f"expected subject {subject} in the schema registry, found none" in call(
        one, "apply", one.name, expect=75
    )
    assert not one.lake.exists(table)

    registry.register(
        subject, avro({"name": "level", "type": "int"}, {"name": "old", "type": "string"})
    )
    printed = call(one, "apply", one.name).splitlines()
    of = f"{one.name}: subject {subject} version"
    assert (
        printed[0]
        == f"{of} 1: new table {table} with event_id STRING NOT NULL, level INT, old STRING"
    )
    assert f"{one.name}: created table {table}" in printed
    assert columns(one, table) == {"event_id": "string NOT NULL", "level": "int", "old": "string"}

    at = {
        "name": "at",
        "type": ["null", {"type": "long", "logicalType": "timestamp-micros"}],
        "default": None,
    }
    registry.register(subject, avro({"name": "level", "type": "long"}, at))
    assert call(one, "apply", one.name).splitlines() == [
        f"{of} 2: column level of {table} becomes bigint",
        f"{of} 2: new column at of {table}, timestamp",
        f"{one.name}: widened column level of {table} from int to bigint",
        f"{one.name}: added column at to {table}",
    ]
    taken_up = {
        "event_id": "string NOT NULL", "level": "bigint", "old": "string", "at": "timestamp",
    }  # fmt: skip
    assert columns(one, table) == taken_up
    assert call(one, "apply", one.name) == f"{one.name}: nothing to change\n"

    registry.register(
        subject, avro({"name": "level", "type": "string"}, {"name": "more", "type": "int"})
    )
    refused = call(one, "apply", one.name, expect=1)
    assert (
        f"stream {one.name} (subject {subject}), column level: expected bigint, found string"
        in refused
    )
    following = {"name": "next", "type": ["null", "node"], "default": None}
    node = {"type": "record", "name": "node", "fields": [following]}
    registry.register(subject, avro({"name": "odd", "type": node}))
    refused = call(one, "apply", one.name, expect=1)
    assert "version 4: expected an Avro schema" in refused
    assert "contains itself, found node" in refused
    assert columns(one, table) == taken_up

    registry.register(subject, avro({"name": "odd", "type": ["int", "string"]}))
    union = "struct<member_int:int,member_string:string>"
    assert f"{of} 5: new column odd of {table}, {union}" in call(one, "apply", one.name)
    assert columns(one, table) == taken_up | {"odd": union}


def test_each_topic_of_a_family_has_its_columns(world: Make, registry: SchemaRegistry) -> None:
    one = world(registry.url)
    family: dict[str, Any] = {
        "topics": {"pattern": f"{one.name}-(.*)"}, "table": f"{one.name}_raw.{{1}}",
        "format": "json_schema", "schema": {"columns": "at TIMESTAMP NOT NULL"},
        "event_time": {"column": "at"}, "key": "event_id", "group": "small",
    }  # fmt: skip
    (one.folder / "streams" / "fam.yaml").write_text(yaml.safe_dump(family))
    for end, fields in (
        ("a", {"n": {"type": "integer"}}),
        ("b", {"tags": {"type": "array", "items": {"enum": ["x"]}}}),
    ):
        create_topic(one.job.environment.kafka, f"{one.name}-{end}", 1, {})
        properties = {"event_id": {"type": "string"}, "at": {"type": "string"}, **fields}
        schema = {"type": "object", "properties": properties}
        registry.register(f"{one.name}-{end}-value", json.dumps(schema), kind="JSON")
    call(one, "apply", "--group", "small")
    ours = {"event_id": "string NOT NULL", "at": "timestamp NOT NULL"}
    assert columns(one, f"{one.name}_raw.a") == ours | {"n": "bigint"}
    assert columns(one, f"{one.name}_raw.b") == ours | {"tags": "array<string>"}
    [a, b] = shown(one, "status", "--group", "small")
    assert (a["topic"], b["topic"]) == (f"{one.name}-a", f"{one.name}-b")
