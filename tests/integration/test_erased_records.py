"""Erasure beside both layers: erased records leave every branch, and a rebuild, a replay or the
speed layer brings none back, while the account of each hour closes."""

import json
from datetime import UTC, datetime
from typing import Any

import pytest
from pyspark.sql import SparkSession
from world import ERASURE, Make, World, event, past_hour, spread

from anabranch.lifecycle.erasure.run import ErasureRequest, find
from anabranch.operations.audit import audit
from anabranch.protocol.erasure import HashedValues, HourFilter, Key
from anabranch.records.erased import find_erased, without

# Each of the seven players has one or more of the records of `spread`.
GONE = "p3"
BRANCHES = ("speed", "batch", "main")


def test_a_filter_leaves_out_values_and_places(spark: SparkSession) -> None:
    rows = [("H0", 0, o, f"p{o % 3}", o * 7) for o in range(12)] + [
        ("H1", 1, o, None, None) for o in range(3)
    ]
    names = "ingest_hour STRING, kafka_partition INT, kafka_offset BIGINT, player STRING, level INT"
    frame, key = spark.createDataFrame(rows, names), Key(b"a key of this test")
    hashes = frozenset(key.hashes("player", ["p1", "p9"]))
    of_player = HashedValues("player", key, hashes, {0: (0, 10)})
    of_level = HashedValues("level", key, frozenset(key.hashes("level", ["0", "77"])), {0: (0, 20)})
    hours = (
        HourFilter("H0", (of_player, of_level), frozenset({(0, 5)})),
        HourFilter("H1", (of_player,), frozenset({(1, 2), (1, 99)})),
    )
    erased = find_erased(frame, hours)
    # Not offset 10, whose player is p1: it was accepted after the request.
    assert sorted(map(tuple, erased.collect())) == [
        (0, 0), (0, 1), (0, 4), (0, 5), (0, 7), (0, 11), (1, 2),
    ]  # fmt: skip
    assert without(frame, erased).count() == 8
    nothing = find_erased(frame, (HourFilter("H1", (of_player,), frozenset()),))
    assert (nothing.count(), without(frame, nothing).count()) == (0, 15)


def left(one: World) -> list[Any]:
    """Return the rows and dead letters of the player that any branch still has."""
    rows = [(b, r["event_id"]) for b in BRANCHES for r in one.rows(b) if r["player"] == GONE]
    return rows + [
        (b, d["value"]) for b in BRANCHES for d in one.dead(b) if b'"p3"' in (d["value"] or b"")
    ]


def kept(one: World) -> list[tuple[int, int, str]]:
    """Every good record that Kafka acknowledged, but those of the player."""
    good = [(r, json.loads(r.value)) for r in one.sent if r.value and r.value.endswith(b"}")]
    kept = [(r, v) for r, v in good if v.get("player") != GONE]
    return sorted((r.partition, r.offset, v["event_id"]) for r, v in kept)


def counts(one: World, hour: str) -> Any:
    row = one.account(hour)
    return {"good": row.good, "dead": row.dead, "erased": row.erased}


@pytest.fixture
def one(world: Make) -> World:
    """Two past hours, the first accepted; broken records; and records that are not read yet."""
    one = world()
    one.set_environment(erasure=ERASURE)
    one.topic()
    first, second = spread(past_hour(2), 14, "a"), spread(past_hour(1), 14, "b")
    at, broken = first[-1][1], b'{"event_id": "broken", "player": "p3", '
    one.send([*first, (0, at, broken), (0, at, b"{other p33")])
    one.serve(second)
    assert [r.decision for r in one.batch(past_hour(2))] == ["accepted"]
    now = datetime.now(UTC)
    other = event("other", now, player="p1")
    one.send([(0, now, event("unread", now, player=GONE)), (1, now, other)])
    return one


@pytest.mark.full
def test_erased_records_come_back_by_nothing(one: World) -> None:
    hours = [past_hour(2), past_hour(1)]
    order = ErasureRequest("player", frozenset({GONE}), "case 4711")
    found = find(one.job, order)
    assert left(one) and (found.rows, found.dead) == (4, 1)
    begun = one.erase(GONE)
    assert (begun.removed.rows, begun.removed.dead, left(one)) == (4, 1, [])
    assert begun.left is not None and "yet to be read" in begun.left
    assert counts(one, hours[0]) == {"good": 12, "dead": 1, "erased": 3}
    # The speed layer reads records from before the request, and some of a person who comes back.
    now = datetime.now(UTC)
    one.send([(0, now, event("later", now, player=GONE))])
    one.speed()
    assert [r["event_id"] for r in one.rows() if r["player"] == GONE] == ["later"]
    assert not [d for d in one.dead() if b'"p3"' in (d["value"] or b"")]
    done = one.erase(GONE)
    assert (done.left, done.erasure.done is not None, done.removed.rows) == (None, True, 0)

    assert [r.decision for r in one.batch()] == ["accepted"]
    assert [r.decision for r in one.batch(*hours, restate=True)] == ["accepted"] * 2

    assert one.contents() == sorted([*kept(one), (0, one.sent[-1].offset, "later")])
    assert [d["value"] for d in one.dead()] == [b"{other p33"]
    assert counts(one, hours[0]) == {"good": 12, "dead": 1, "erased": 3}
    assert counts(one, hours[1]) == {"good": 12, "dead": 0, "erased": 2}
    # Kafka deletes them, and the account stays what it was.
    one.delete_records(dict.fromkeys(one.ends, 4))
    assert [r.decision for r in one.batch(hours[0], restate=True)] == ["accepted"]
    assert counts(one, hours[0]) == {"good": 12, "dead": 1, "erased": 3}
    assert audit(one.job, None, True).disagreements == []
