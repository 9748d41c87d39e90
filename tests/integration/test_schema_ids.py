"""A new schema id in a micro-batch makes the speed layer stage it again."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import pytest
from format_cases import record
from wire import encode, wired
from world import Make, World

from anabranch.kafka.source import read_ranges
from speed_layer.micro_batch import MicroBatches

if TYPE_CHECKING:
    from registry import SchemaRegistry


SCHEMA = "event_id STRING NOT NULL, level INT"


def schema(*more: str) -> dict[str, Any]:
    """A writer's schema that is not registered yet."""
    name, ints = f"E{uuid.uuid4().hex[:12]}", ((name, "int") for name in more)
    return record(("event_id", "string"), *ints, name=name)


class Stream:
    """An Avro stream, its records and its micro-batches, each of what was sent since the last."""

    def __init__(self, one: World, registry: SchemaRegistry) -> None:
        self.one, self.registry = one, registry
        self.arm = MicroBatches(one.job)
        self._next = 0

    def new(self, *more: str) -> tuple[int, dict[str, Any]]:
        by = schema(*more)
        return self.registry.register(f"{self.one.name}-value", by), by

    def send(self, event_id: str, schema_id: int, by: dict[str, Any]) -> None:
        value = {"event_id": event_id} | {field["name"]: 7 for field in by["fields"][1:]}
        self.one.send([(0, datetime.now(UTC), wired(schema_id, encode(by, value)))])

    def publish(self) -> None:
        ranges = {0: (self._next, self.one.ends[0])}
        self._next = ranges[0][1]
        kafka = self.one.job.environment.kafka
        self.arm.submit(lambda: read_ranges(self.one.spark, kafka, self.one.name, ranges), ranges)
        self.arm.wait()


@pytest.fixture
def stream(world: Make, registry: SchemaRegistry) -> Iterator[Stream]:
    one = world(registry.url, schema=SCHEMA, format="avro", event_time=None, create=1)
    made = Stream(one, registry)
    yield made
    made.arm.close()


def test_a_new_schema_id_is_listed_and_each_record_is_published_once(stream: Stream) -> None:
    old, new = stream.new(), stream.new("level")
    stream.send("a", *old)
    stream.publish()
    stream.send("b", *new)
    stream.send("c", *old)
    stream.publish()
    stream.send("d", *old)
    stream.send("e", *new)
    stream.publish()
    assert stream.one.ids() == ["a", "b", "c", "d", "e"] and stream.one.dead() == []
    assert {row["event_id"]: row["level"] for row in stream.one.rows()} == {
        "a": None, "b": 7, "c": None, "d": None, "e": 7,
    }  # fmt: skip


def test_an_unregistered_schema_id_is_a_dead_letter_and_is_looked_up_again(stream: Stream) -> None:
    """Hazard: the missing schema is cached, or other records become dead letters too."""
    old, late = stream.new(), schema("level")
    stream.send("a", *old)
    stream.publish()
    stream.send("b", *old)
    # Schema ids are sequential, so the next one is predictable.
    stream.send("too early", old[0] + 1, late)
    stream.publish()
    assert stream.one.ids() == ["a", "b"]
    letters = [(d["error_code"], d["kafka_offset"]) for d in stream.one.dead()]
    assert letters == [("unknown_schema", 2)]
    assert stream.registry.register(f"{stream.one.name}-value", late) == old[0] + 1
    stream.send("c", old[0] + 1, late)
    stream.send("d", *old)
    stream.publish()
    assert stream.one.ids() == ["a", "b", "c", "d"]
    assert len(stream.one.dead()) == 1
