"""Hours of which Kafka no longer has everything, and dead letters that can be read by now."""

from datetime import timedelta

import pytest
from budget import full
from world import Make, World, event, past_hour, spread

from anabranch.offsets.hours import start_of
from anabranch.protocol import topic_change
from anabranch.protocol.ledger_row import Account
from anabranch.protocol.merge import merge
from anabranch.protocol.sealing import seal
from anabranch.protocol.topic_change import StartChoice

WIDE = {"column": "event_time", "past": "90 days", "future": "1 hour"}


def send_hour(one: World, hour: str) -> None:
    """On one partition 20 good records, then a repeated event, and one of 60 days ago."""
    at = start_of(hour) + timedelta(minutes=59)
    old = at - timedelta(days=60)
    again = (0, at, event("e-3", at, player="again"))
    one.send([*spread(hour, 20, "e", partitions=1), again, (0, at, event("old", old))])


@pytest.mark.parametrize("set_back", [False, full(True)])
def test_lost_offsets_are_filled_from_the_speed_layer(world: Make, set_back: bool) -> None:
    one, hour = world(partitions=1), past_hour(1)
    send_hour(one, hour)
    one.apply()
    seal(one.publisher, one.kafka)
    before = one.state.heads["speed"]
    one.speed()
    if set_back:
        # The hazard: only `main` still has the rows, which a merge kept there.
        table = one.lake.load(one.job.stream.table)
        table.manage_snapshots().create_branch(before, "speed").commit()
        merge(one.lake, one.job.stream)
        assert (one.rows("speed"), one.state.retained_hours) == ([], (hour,))
    # The hazard: of the first ten, and of the dead letter behind them, only the speed layer has
    # something.
    one.delete_records({0: 10})
    [result] = one.batch(hour)
    assert (result.decision, result.reason) == ("accepted", None)
    row = one.decision(hour)
    assert (row.good, row.dead, row.duplicate, row.gap) == (20, 1, 1, 0)
    assert row.sources == {"kafka": 12, "speed": 10}
    assert row.partitions == {0: Account(22, good=20, dead=1, duplicate=1, gaps={}, conflicts=1)}
    assert one.contents() == one.acknowledged()[:20]


@pytest.mark.full
def test_an_hour_that_kafka_lost_is_restated_and_its_letters_replayed(world: Make) -> None:
    one, hour = world(partitions=1), past_hour(1)
    send_hour(one, hour)
    one.apply()
    one.batch(hour)
    before = one.rows()
    assert [d["error_code"] for d in one.dead()] == ["event_time_out_of_bounds"]
    # The hazard: only the table has records of the hour; only the ledger has the duplicate.
    one.delete_records({0: 22})
    [again] = one.batch(hour, restate=True, why="to see whether it closes")
    assert (again.decision, again.revision) == ("accepted", 2)
    assert one.rows() == before
    row = one.decision(hour)
    assert (row.good, row.dead, row.duplicate, row.gap) == (20, 1, 1, 0)
    assert row.sources == {"accepted": 20, "dead_letters": 1}
    assert row.reason == "to see whether it closes"
    assert one.replay() == []
    # Widen the bound: the dead letter can be read by now.
    one.reconfigure(event_time=WIDE)
    assert one.replay(past_hour(9), past_hour(8)) == []
    [replayed] = one.replay(hour, past_hour(8))
    assert (replayed.decision, replayed.revision) == ("accepted", 3)
    assert one.offsets() == [(0, o) for o in (*range(20), 21)]
    assert one.dead() == []
    row = one.decision(hour)
    assert (row.good, row.dead, row.duplicate, row.gap) == (21, 0, 1, 0)
    assert row.reason == "dead letters replayed: 1 decode now"
    assert one.replay() == []


@pytest.mark.usefixtures("single_broker")
def test_an_accepted_hour_of_a_deleted_topic_is_restated_from_the_table_alone(world: Make) -> None:
    one, hour = world(partitions=1), past_hour(1)
    send_hour(one, hour)
    one.apply()
    one.batch(hour)
    before, letters = one.rows(), one.dead()
    one.delete_topic()
    one.topic(1)
    # The hazard: the same offsets of the new topic hold something else.
    one.send_now(5, "new", partitions=1)
    choice = StartChoice("earliest")
    assert topic_change.adopt(one.publisher, one.kafka, choice=choice) is not None
    [again] = one.batch(hour, restate=True, why="to see whether it closes")
    assert (again.decision, again.revision) == ("accepted", 2)
    assert one.rows() == before
    assert [d["value"] for d in one.dead()] == [d["value"] for d in letters]
    assert one.decision(hour).sources == {"accepted": 20, "dead_letters": 1}


@pytest.mark.full
def test_an_hour_after_a_replayed_one_is_decided_again_though_kafka_lost_both(world: Make) -> None:
    one, first, second = world(partitions=1), past_hour(2), past_hour(1)
    send_hour(one, first)
    at = start_of(second)
    one.begin([(0, at, event("old", at)), *spread(second, 3, "f", partitions=1)])
    one.batch()
    one.delete_topic()
    one.topic(1)
    assert topic_change.adopt(one.publisher, one.kafka) is not None
    assert (0, 22) in one.offsets()
    one.reconfigure(event_time=WIDE)
    assert [(r.hour, r.decision) for r in one.replay()] == [(first, "accepted")]
    # The first hour's letter is the event now, and what repeats it an hour later is the duplicate.
    assert one.offsets() == [(0, o) for o in (*range(20), 21, 23, 24, 25)]
    row = one.decision(second)
    assert (row.revision, row.good, row.duplicate) == (2, 3, 1)


def test_records_in_no_source_are_a_gap_that_an_operator_may_accept(world: Make) -> None:
    one, hour = world(partitions=1), past_hour(1)
    send_hour(one, hour)
    one.apply()
    one.delete_records({0: 5})
    [refused] = one.batch(hour)
    assert refused.decision == "refused"
    assert one.rows() == []
    why, objection = (
        "the archive has them",
        "gaps: expected only control, aborted, found 5 retention",
    )
    [accepted] = one.batch(hour, accept=True, why=why)
    assert accepted.reason == f"accepted by choice: {why}; in spite of: {objection}"
    assert one.state.accepted[hour].by_choice
    assert one.decision(hour).gaps == {"retention": 5}
    # What the twentieth repeats is lost, so it stays.
    assert one.offsets() == [(0, o) for o in range(5, 21)]
    # Without the word it is refused again, and what was accepted stays.
    [again] = one.batch(hour, restate=True)
    assert again.decision == "refused"
    assert one.offsets() == [(0, o) for o in range(5, 21)]
