"""Formats through real Kafka, a real schema registry and both layers: each record a row or a dead
letter, as its bytes say, with the same verdict twice."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping
from datetime import datetime, timedelta
from typing import Any

import pytest
from format_cases import (
    CSV_DDL,
    DDL,
    EVENT_TIME,
    RAW_DDL,
    V1,
    V2,
    Case,
    avro_cases,
    csv_cases,
    json_schema_cases,
    record,
)
from registry import SchemaRegistry
from world import World, past_hour

from anabranch.offsets.hours import start_of

Make = Callable[..., World]

ANY_SHARE = {"max_dead": "100 %"}


class Ids:
    """The ids of what is registered for one test, under subjects of its own."""

    def __init__(self, registry: SchemaRegistry) -> None:
        self.subject = f"s{uuid.uuid4().hex[:12]}-value"
        self.v1 = registry.register(self.subject, V1)
        self.v2 = registry.register(self.subject, V2)
        self.incompatible = registry.register(
            self.subject, record(("event_id", "int"), ("event_time", "long"))
        )
        self.without_time = registry.register(self.subject, record(("event_id", "string")))
        self.recursive = registry.register(
            self.subject, record(("event_id", "string"), ("next", ["null", "shop.Event"]))
        )
        schema = {
            "$schema": "http://json-schema.org/draft-07/schema#",
            "type": "object",
            "title": self.subject,
        }
        self.json = registry.register(f"{self.subject}-json", schema, "JSON")
        self.foreign = registry.register(
            f"{self.subject}-other", record(("event_id", "string"), name=self.subject[:13])
        )


def through_both_layers(one: World, cases: Mapping[str, Case], start: datetime) -> None:
    """Each case is in exactly one of the two tables, with its verdict, by either layer; both
    publish the same rows."""
    one.topic(1, **{"max.message.bytes": "4000000"})
    sent = one.send(
        [(0, start + timedelta(seconds=i), value) for i, (value, _, _) in enumerate(cases.values())]
    )
    one.apply()
    expected = {r.offset: code for r, (_, code, _) in zip(sent, cases.values(), strict=True)}
    names = {r.offset: name for r, name in zip(sent, cases, strict=True)}

    def rows_and_verdicts() -> tuple[dict[int, dict[str, Any]], dict[int, str | None]]:
        rows = {r["kafka_offset"]: r for r in one.rows()}
        dead = {d["kafka_offset"]: d["error_code"] for d in one.dead()}
        assert (
            len(rows) == len(one.rows())
            and len(dead) == len(one.dead())
            and not rows.keys() & dead.keys()
        )
        kept = {d["kafka_offset"]: d["value"] for d in one.dead()}
        assert all(kept[r.offset] == r.value for r in sent if r.offset in kept)
        return rows, dict.fromkeys(rows) | dead

    one.speed()
    by_speed, verdicts_by_speed = rows_and_verdicts()
    assert {names[o]: v for o, v in verdicts_by_speed.items() if v != expected[o]} == {}
    assert verdicts_by_speed.keys() == expected.keys()
    [result] = one.batch()
    assert (result.decision, result.reason) == ("accepted", None)
    by_batch, verdicts_by_batch = rows_and_verdicts()
    assert verdicts_by_batch == verdicts_by_speed
    # As text, since NaN does not equal itself.
    assert {o: repr(row) for o, row in by_batch.items()} == {
        o: repr(row) for o, row in by_speed.items()
    }


def test_avro_through_both_layers(world: Make, registry: SchemaRegistry) -> None:
    ids, start = Ids(registry), start_of(past_hour(1))
    form = {"type": "avro", "subject": ids.subject}
    one = world(registry.url, schema=DDL, format=form, event_time=EVENT_TIME, quality=ANY_SHARE)
    through_both_layers(one, avro_cases(ids, start), start)


@pytest.mark.full
def test_json_schema_through_both_layers(world: Make, registry: SchemaRegistry) -> None:
    ids, start = Ids(registry), start_of(past_hour(1))
    form = {"type": "json_schema", "subject": f"{ids.subject}-json"}
    through_both_layers(
        world(registry.url, schema=DDL, format=form, quality=ANY_SHARE),
        json_schema_cases(ids, start),
        start,
    )


@pytest.mark.full
def test_csv_through_both_layers(world: Make) -> None:
    start = start_of(past_hour(1))
    one = world(schema=CSV_DDL, format={"type": "csv", "delimiter": ";"}, quality=ANY_SHARE)
    # Values of a megabyte are tested with the decoders, above.
    small = {name: case for name, case in csv_cases(start).items() if len(case[0] or b"") < 1_000}
    through_both_layers(one, small, start)


@pytest.mark.full
def test_raw_through_both_layers(world: Make) -> None:
    start = start_of(past_hour(1))
    one = world(schema=RAW_DDL, format="raw", key=["key", "value"], event_time=None)
    cases: dict[str, Case] = {
        "any bytes": (bytes(range(256)), None, ""),
        "text": (b"x", None, ""),
        "no bytes": (b"", None, ""),
        "null": (None, "missing_required", ""),
    }
    through_both_layers(one, cases, start)
    assert {r["key"] for r in one.rows()} == {"k"}
