"""Hostile records through real Kafka and both layers: a row or a dead letter each, the same verdict
twice, no stop."""

from collections.abc import Callable
from datetime import timedelta

import hostile
from world import World, past_hour

from anabranch.offsets.hours import start_of

Verdicts = dict[int, str | None]


def verdicts(one: World) -> Verdicts:
    """Return the dead letter's code by offset, None for a row; each offset is in exactly one of the
    two tables."""
    rows = [r["kafka_offset"] for r in one.rows()]
    dead = {d["kafka_offset"]: d["error_code"] for d in one.dead()}
    assert len(rows) == len(set(rows)) and not set(rows) & set(dead)
    assert len(one.dead()) == len(dead)
    return dict.fromkeys(rows) | dead


def test_each_has_the_same_verdict_in_both_layers(world: Callable[..., World]) -> None:
    one = world(
        schema=hostile.DDL,
        key="id",
        event_time=hostile.EVENT_TIME,
        quality={"max_dead": "100 %"},
    )
    hour = past_hour(1)
    start = start_of(hour)
    cases = hostile.cases(start)
    one.topic(1, **{"max.message.bytes": "4000000"})
    values = [
        (0, start + timedelta(seconds=i), value) for i, (value, _, _) in enumerate(cases.values())
    ]
    sent = one.send(values)
    one.apply()
    expected = {r.offset: code for r, (_, code, _) in zip(sent, cases.values(), strict=True)}
    names = {r.offset: name for r, name in zip(sent, cases, strict=True)}

    one.speed()

    by_speed = verdicts(one)
    assert {names[o]: v for o, v in by_speed.items() if v != expected[o]} == {}
    assert by_speed.keys() == expected.keys()
    # A dead letter keeps the record's bytes.
    values_of = {d["kafka_offset"]: d["value"] for d in one.dead()}
    assert all(values_of[r.offset] == r.value for r in sent if expected[r.offset] is not None)

    [result] = one.batch()

    assert result.decision == "accepted"
    assert verdicts(one) == by_speed
    assert {d["layer"] for d in one.dead()} == {"batch"}
