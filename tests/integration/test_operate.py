"""The operations on a stream that lives: adopt, override, restore; each compared record by record."""

from datetime import UTC, datetime

import pytest
from commands import call, shown
from world import Make, World, event, past_hour, spread

from anabranch.common.errors import PositionError
from anabranch.iceberg.manifests import files_of
from anabranch.kafka.client import create_topic
from anabranch.offsets.hours import shift
from anabranch.protocol import merge


@pytest.fixture
def two_hours(world: Make) -> World:
    """Two past hours of 20 records, the older one accepted, and 6 records of the running one."""
    one = world(partitions=2)
    for ago in (2, 1):
        one.send(spread(past_hour(ago), 20, f"h{ago}"))
    now = datetime.now(UTC)
    one.serve([(i % 2, now, event(f"now-{i}", now)) for i in range(6)])
    assert [r.decision for r in one.batch(past_hour(2))] == ["accepted"]
    return one


@pytest.mark.usefixtures("single_broker")
def test_a_recreated_topic_is_adopted_and_both_are_there_once(two_hours: World) -> None:
    one = two_hours
    before = one.ids()
    one.delete_topic()
    one.topic(3)
    now = datetime.now(UTC)
    one.send([(i % 3, now, event(f"new-{i}", now)) for i in range(9)])
    for run in (one.speed, one.batch):
        with pytest.raises(PositionError, match=r"deleted and made again.*anabranch adopt"):
            run()
    assert one.ids() == before

    asked = call(one, "adopt", one.name, expect=1)
    assert "with 9 records, the oldest of" in asked and "nothing was changed" in asked
    adopted = shown(one, "adopt", one.name, "--from", "earliest")

    assert (adopted["adopted"], adopted["sealed"], adopted["lost"]) == (True, [past_hour(0)], {})
    assert adopted["position"] == {"0": 0, "1": 0, "2": 0}
    assert "nothing to adopt" in call(one, "adopt", one.name)
    one.speed()
    assert one.ids() == sorted([*before, *(f"new-{i}" for i in range(9))])
    # No hour mixes two topics: the new records are of the next one.
    by_hour = {r["event_id"].split("-")[0]: r["ingest_hour"] for r in one.rows()}
    assert (by_hour["now"], by_hour["new"]) == (past_hour(0), shift(past_hour(0), 1))
    # An hour of which Kafka lost records is refused with its reason, once, and stays served by the
    # speed layer; nothing is lost or twice.
    refused = [(r.hour, r.decision) for r in one.batch()]
    assert refused == [(past_hour(1), "refused"), (past_hour(0), "refused")]
    assert one.batch() == []
    hours = {h["hour"]: h for h in one.hours()}
    assert [hours[past_hour(ago)]["served"] for ago in (2, 1, 0)] == ["batch", "speed", "speed"]
    assert "Kafka no longer has it" in hours[past_hour(1)]["reason"]
    assert merge.merge(one.lake, one.job.stream, everything=True).swaps == []
    assert one.ids() == sorted([*before, *(f"new-{i}" for i in range(9))])


@pytest.mark.usefixtures("single_broker")
def test_a_wrong_topic_is_adopted_and_left_again_without_duplicates(world: Make) -> None:
    one = world(partitions=2)
    one.send_now(6, "now")
    one.serve()
    before, right = one.ids(), one.job.stream.topic
    wrong = f"{right}_wrong"
    create_topic(one.job.environment.kafka, wrong, 1)
    one.reconfigure(topic=wrong)
    with pytest.raises(PositionError, match="name the wrong topic or cluster"):
        one.speed()
    assert shown(one, "adopt", one.name)["adopted"]
    one.reconfigure(topic=right)
    assert shown(one, "adopt", one.name)["adopted"]
    one.send_now(1, "after")
    one.speed()
    assert one.ids() == sorted([*before, "after-0"])


def test_an_hour_is_given_to_the_speed_layer_and_back(two_hours: World) -> None:
    one = two_hours
    hour = past_hour(2)
    chosen = ("override", one.name, hour, "--why", "the rule is wrong", "--layer")
    before = one.contents()
    assert one.hours()[0]["served"] == "batch"
    assert "now served by speed, by choice" in call(one, *chosen, "speed")
    assert one.contents() == before
    first = one.hours()[0]
    assert (first["served"], "the rule is wrong" in first["reason"]) == ("speed", True)
    speed = {f.file_path for f in files_of(one.state.table, "speed", hour)}
    assert {f.file_path for f in files_of(one.state.table, "main", hour)} == speed
    # A restatement and the speed layer honour it.
    assert [(r.decision, r.revision) for r in one.batch(hour, restate=True)] == [("accepted", 2)]
    one.send_now(1, "later")
    one.speed()
    assert {f.file_path for f in files_of(one.state.table, "main", hour)} == speed
    assert "served by batch, by the rule" in call(one, *chosen, "auto")
    assert not {f.file_path for f in files_of(one.state.table, "main", hour)} & speed
    assert one.contents() == one.acknowledged()
    assert "has not accepted it" in call(
        one, "override", one.name, past_hour(1), "--why", "w", "--layer", "batch", expect=1
    )


def test_dropped_branches_and_ledger_are_recreated_exactly(two_hours: World) -> None:
    one = two_hours
    before = one.contents()
    table = one.lake.load(one.job.stream.table)
    for branch in ("batch", "speed"):
        table.manage_snapshots().remove_branch(branch).commit()
        table = one.lake.load(one.job.stream.table)
    one.lake.catalog.drop_table(one.job.stream.hours_table)

    output = call(one, "apply", one.name)

    assert "created branch batch" in output
    assert "created branch speed" in output
    # The acceptance still waits on a branch, and says more than what is restored.
    assert "restored 1 rows" in output
    shown = [(h["hour"], h["state"], h["served"]) for h in one.hours()]
    assert shown == [
        (past_hour(2), "accepted", "batch"),
        (past_hour(1), "sealed", "speed"),
        (past_hour(0), "open", "speed"),
    ]
    one.send_now(1, "later")
    one.speed()
    assert one.contents() == one.acknowledged()
    assert [(r.hour, r.decision) for r in one.batch()] == [(past_hour(1), "accepted")]
    [again] = one.batch(past_hour(2), restate=True)
    assert (again.decision, again.revision) == ("accepted", 2)
    assert one.contents() == one.acknowledged()
    assert len(before) < len(one.contents())
