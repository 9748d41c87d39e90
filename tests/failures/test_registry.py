"""The registry away, silent, refusing, or late with a schema: no record is a dead letter for it."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import pytest
from pyspark.sql import SparkSession
from running import TRIED_AGAIN, await_failure, lines, speed_running
from wire import encode, wired
from world import Make, World, past_hour

from anabranch.common.errors import ConfigurationError, Transient
from anabranch.offsets.hours import start_of
from batch_layer import stream_run

if TYPE_CHECKING:
    from registry import SchemaRegistry
    from toxiproxy import Proxy, Toxiproxy


SCHEMA = "event_id STRING NOT NULL, event_time TIMESTAMP NOT NULL, level INT"
TIME = {"type": "long", "logicalType": "timestamp-micros"}


@pytest.fixture(autouse=True)
def _logged(caplog: pytest.LogCaptureFixture) -> None:
    for name in ("anabranch", "speed_layer", "batch_layer"):
        caplog.set_level("INFO", logger=name)


@pytest.fixture
def proxy(toxiproxy: Toxiproxy, registry: SchemaRegistry) -> Iterator[Proxy]:
    """The registry behind a proxy of its own."""
    made = toxiproxy.proxy(f"registry-{uuid.uuid4().hex[:8]}", registry.port)
    yield made
    toxiproxy.remove(made)


def avro_stream(world: Make, registry: SchemaRegistry, port: int, **stream: Any) -> World:
    url = registry.url.replace(f":{registry.port}/", f":{port}/")
    one = world(url, schema=SCHEMA, format="avro", **stream, create=1)
    return one


def schema(*more: str) -> dict[str, Any]:
    """A writer's schema that is not registered yet."""
    fields = [{"name": "event_id", "type": "string"}, {"name": "event_time", "type": TIME}]
    fields += [{"name": name, "type": "int"} for name in more]
    return {"type": "record", "name": f"E{uuid.uuid4().hex[:12]}", "fields": fields}


def send(
    one: World, schema_id: int, by: dict[str, Any], event_id: str, at: datetime | None = None
) -> None:
    at = at or datetime.now(UTC)
    value = {"event_id": event_id, "event_time": int(at.timestamp()) * 1_000_000}
    value |= {field["name"]: 7 for field in by["fields"][2:]}
    one.send([(0, at, wired(schema_id, encode(by, value)))])


def test_registry_cut_under_a_running_speed_job(
    world: Make, registry: SchemaRegistry, proxy: Proxy, caplog: pytest.LogCaptureFixture
) -> None:
    """Records of known schemas go on; the first of a new one waits, and is no dead letter."""
    one = avro_stream(world, registry, proxy.port)
    old, new = schema(), schema("level")
    old_id = registry.register(f"{one.name}-value", old)
    send(one, old_id, old, "a")
    with speed_running(one):
        one.await_published(1)
        proxy.cut()
        send(one, old_id, old, "b")
        # A record of a known schema is published without the registry.
        one.await_published(2)
        send(one, registry.register(f"{one.name}-value", new), new, "c")
        await_failure(caplog)
        assert one.published == 2
        proxy.restore()
        one.await_published(3)
    assert "ask the schema registry for http://127.0.0.1:" in lines(caplog, TRIED_AGAIN)[0]
    assert "(transient, try again); try 2 in" in lines(caplog, TRIED_AGAIN)[0]
    assert one.ids() == ["a", "b", "c"] and one.dead() == []


def test_an_unreachable_registry_refuses_no_hour(
    world: Make,
    registry: SchemaRegistry,
    proxy: Proxy,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(stream_run, "RETRY_FOR", timedelta(seconds=30))
    one = avro_stream(world, registry, proxy.port, batch={"grace": "0 seconds"})
    hour, by = past_hour(1), schema()
    schema_id = registry.register(f"{one.name}-value", by)
    send(one, schema_id, by, "a", start_of(hour) + timedelta(minutes=1))
    proxy.cut()
    with pytest.raises(Transient, match=r"given up after .*ask the schema registry"):
        one.batch()
    assert lines(caplog, TRIED_AGAIN)
    proxy.restore()
    assert [(r.hour, r.decision) for r in one.batch()] == [(hour, "accepted")]
    assert one.ids() == ["a"] and one.dead() == []


def test_a_registry_that_does_not_answer_is_retried(
    world: Make, registry: SchemaRegistry, caplog: pytest.LogCaptureFixture
) -> None:
    one = avro_stream(world, registry, registry.port)
    by = schema()
    schema_id = registry.register(f"{one.name}-value", by)
    send(one, schema_id, by, "a")
    registry.pause()
    try:
        with speed_running(one):
            await_failure(caplog)
            assert "timed out" in lines(caplog, TRIED_AGAIN)[0]
            registry.resume()
            one.await_published(1)
    finally:
        registry.resume()
    assert one.ids() == ["a"] and one.dead() == []


def test_another_registry_path_ends_the_job(world: Make, registry: SchemaRegistry) -> None:
    """The hazard: its 404 taken for the registry's word that a schema does not exist."""
    by = schema()
    url = registry.url.replace("/ccompat/", "/nothing/")
    one = world(url, schema=SCHEMA, format="avro", create=1)
    send(one, registry.register(f"{one.name}-value", by), by, "a")
    wrong = r"expected the answer of a schema registry's REST API, found 404"
    with pytest.raises(ConfigurationError, match=wrong):
        one.speed()
    assert one.published == 0 and one.dead() == []


def test_a_schema_that_comes_late_is_read_by_a_restatement(
    world: Make, spark: SparkSession, registry: SchemaRegistry
) -> None:
    one = avro_stream(world, registry, registry.port)
    hour, old, new = past_hour(1), schema(), schema("level")
    at = start_of(hour) + timedelta(minutes=1)
    old_id = registry.register(f"{one.name}-value", old)
    send(one, old_id, old, "a", at)
    # Ids are counted up, so the next one is known.
    send(one, old_id + 1, new, "b", at + timedelta(seconds=1))
    one.speed()
    assert [(r.hour, r.decision) for r in one.batch()] == [(hour, "accepted")]
    assert [(d["error_code"], d["kafka_offset"]) for d in one.dead()] == [("unknown_schema", 1)]
    assert one.ids() == ["a"]
    assert registry.register(f"{one.name}-value", new) == old_id + 1
    assert [(r.hour, r.decision) for r in one.batch(hour, restate=True)] == [(hour, "accepted")]
    assert one.ids() == ["a", "b"] and one.dead() == []
