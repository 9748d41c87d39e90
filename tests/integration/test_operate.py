"""What operators do to a stream that lives: adopt, override, restore, maintain; each compared record by record."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from datetime import UTC, datetime

import pytest
from click.testing import CliRunner
from kafka import KafkaAdminClient
from world import World, event, past_hour, spread

from anabranch.cli import main
from anabranch.errors import PositionError
from anabranch.hours import shift
from serving_layer import merger
from serving_layer import status as views

Make = Callable[..., World]


def run(one: World, *arguments: str, expect: int = 0) -> str:
    """A command as a user runs it."""
    done = CliRunner().invoke(main, [*arguments, "--conf", str(one.folder)])
    assert done.exit_code == expect, f"{arguments}: {done.exit_code}\n{done.output}\n{done.exception!r}"
    return str(done.output if expect else done.stdout)


def recreate(one: World, partitions: int = 2) -> None:
    """Delete the topic with all that it holds, and make another of the same name."""
    admin = KafkaAdminClient(bootstrap_servers=one.job.environment.kafka.bootstrap_servers)
    admin.delete_topics([one.name])
    admin.close()
    deadline = time.monotonic() + 30
    while one.kafka.describe(one.name) is not None:
        assert time.monotonic() < deadline, "the topic was not deleted within 30 s"
        time.sleep(0.1)
    one.topic(partitions)


@pytest.fixture
def two_hours(world: Make) -> World:
    """Two past hours of 20 records each, the older one accepted, and 6 records of the running hour; all published."""
    one = world()
    one.topic()
    for ago in (2, 1):
        one.send(spread(past_hour(ago), 20, f"h{ago}"))
    now = datetime.now(UTC)
    one.send([(i % 2, now, event(f"now-{i}", now)) for i in range(6)])
    one.apply()
    one.speed()
    assert [r.decision for r in one.batch(past_hour(2))] == ["accepted"]
    return one


def ids(one: World, branch: str = "main") -> list[str]:
    """The events of a branch, sorted; one that is there twice is there twice."""
    return sorted(r["event_id"] for r in one.rows(branch))


def test_a_recreated_topic_is_adopted_and_every_record_of_both_is_there_once(two_hours: World) -> None:
    one = two_hours
    before = ids(one)
    recreate(one, partitions=3)
    now = datetime.now(UTC)
    one.send([(i % 3, now, event(f"new-{i}", now)) for i in range(9)])
    with pytest.raises(PositionError, match="anabranch adopt"):
        one.speed()
    with pytest.raises(PositionError, match="anabranch adopt"):
        one.batch()
    assert ids(one) == before

    adopted = json.loads(run(one, "adopt", one.name, "--output", "json"))

    assert (adopted["adopted"], adopted["sealed"], adopted["lost"]) == (True, [past_hour(0)], {})
    assert adopted["position"] == {"0": 0, "1": 0, "2": 0}
    assert "nothing to adopt" in run(one, "adopt", one.name)
    one.speed()
    assert ids(one) == sorted([*before, *(f"new-{i}" for i in range(9))])
    # No hour mixes two topics: the new records are of the next one.
    by_hour = {r["event_id"].split("-")[0]: r["ingest_hour"] for r in one.rows()}
    assert (by_hour["now"], by_hour["new"]) == (past_hour(0), shift(past_hour(0), 1))
    # What Kafka lost is refused with its reason, once, and stays served by the speed layer; nothing is lost or twice.
    results = one.batch()
    assert [(r.hour, r.decision) for r in results] == [(past_hour(1), "refused"), (past_hour(0), "refused")]
    assert one.batch() == []
    said = {h["hour"]: h for h in views.hours(one.job)}
    assert [said[past_hour(ago)]["served"] for ago in (2, 1, 0)] == ["batch", "speed", "speed"]
    assert "Kafka no longer holds it" in said[past_hour(1)]["reason"]
    assert merger.merge(one.lake, one.job.stream, everything=True) == []
    assert ids(one) == sorted([*before, *(f"new-{i}" for i in range(9))])


def test_a_topic_that_does_not_exist_is_not_adopted(two_hours: World) -> None:
    one = two_hours
    admin = KafkaAdminClient(bootstrap_servers=one.job.environment.kafka.bootstrap_servers)
    admin.delete_topics([one.name])
    admin.close()
    deadline = time.monotonic() + 30
    while one.kafka.describe(one.name) is not None:
        assert time.monotonic() < deadline, "the topic was not deleted within 30 s"
        time.sleep(0.1)
    assert "expected it to exist, found none" in run(one, "adopt", one.name, expect=1)
