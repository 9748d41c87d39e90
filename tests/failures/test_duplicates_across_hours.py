"""Each event once in `main`, in whatever order hours are accepted and restated."""

from collections import Counter
from datetime import timedelta

import pytest
from expectations import entry
from running import speed_running
from waiting import wait_for
from world import Make, World, event, hours_of_now, past_hour

from anabranch.offsets.hours import start_of
from batch_layer import stream_run

A, B, C = (past_hour(ago) for ago in (3, 2, 1))
hours_of_each_test = hours_of_now(globals(), A=3, B=2, C=1)


def send(one: World, hour: str, *names: str, event_hour: str | None = None) -> None:
    """Records of an hour; their event time is the hour's, or that of another."""
    received = start_of(hour) + timedelta(minutes=30)
    happened = start_of(event_hour or hour) + timedelta(minutes=30)
    one.send([(0, received, event(name, happened, player=hour)) for name in names])


def where(one: World) -> dict[str, str]:
    """Every event of `main` and the hour that holds it; each is there once."""
    rows = [(row["event_id"], row["ingest_hour"]) for row in one.rows()]
    assert max(Counter(name for name, _ in rows).values()) == 1, rows
    return dict(rows)


def revisions(one: World) -> dict[str, int]:
    return {h["hour"]: h["revision"] for h in one.hours() if h["hour"] in (A, B, C)}


@pytest.fixture
def one(world: Make) -> World:
    return world(batch={"grace": "0 seconds", "lookback_hours": 2}, partitions=1)


@pytest.mark.parametrize("order", ["ABC", "CBA", "BCA", "CAB"])
def test_an_event_is_once_in_its_first_accepted_hour(one: World, order: str) -> None:
    send(one, A, "a", "abc", "ab")
    send(one, B, "b", "ab", "abc", "bc")
    send(one, C, "c", "bc", "abc")
    one.apply()
    for name in order:
        [result] = one.batch({"A": A, "B": B, "C": C}[name])
        assert result.decision == "accepted"
        where(one)
    assert where(one) == {"a": A, "ab": A, "abc": A, "b": B, "bc": B, "c": C}
    counts = {h["hour"]: h["counts"] for h in one.hours()}
    found = [(counts[h]["good"], counts[h]["duplicate"]) for h in (A, B, C)]
    assert found == [(3, 0), (2, 2), (1, 2)]
    # The hazard: out of order, an hour that was accepted already had to give events back, and says
    # so.
    if order != "ABC":
        assert max(revisions(one).values()) > 1
        rows = one.job.ledger.history()
        assert any((row.reason or "").startswith("decided again after") for row in rows)
    else:
        assert revisions(one) == {A: 1, B: 1, C: 1}


def test_an_event_that_a_restated_hour_loses_comes_back_in_the_hour_after(one: World) -> None:
    old = past_hour(9)
    send(one, A, "a")
    # The same event twice; in the first hour with a time that tighter bounds will not let pass.
    send(one, B, "twice", event_hour=old)
    send(one, C, "twice", "c")
    one.apply()
    one.batch()
    assert where(one) == {"a": A, "twice": B, "c": C}
    one.reconfigure(event_time={"column": "event_time", "past": "2 hours", "future": "1 hour"})
    [result] = one.batch(B, restate=True)
    assert (result.decision, result.account.good, result.account.dead) == ("accepted", 0, 1)
    assert where(one) == {"a": A, "twice": C, "c": C}
    assert revisions(one) == {A: 1, B: 2, C: 2}
    # And back again, when the bounds are widened.
    one.reconfigure(event_time={"column": "event_time", "past": "30 days", "future": "1 hour"})
    one.batch(B, restate=True)
    assert where(one) == {"a": A, "twice": B, "c": C}
    assert revisions(one) == {A: 1, B: 3, C: 3}
    assert one.dead() == []


def test_a_restatement_that_changes_no_event_leaves_the_hours_after_it_alone(one: World) -> None:
    for hour, names in ((A, ("a", "x")), (B, ("b", "x")), (C, ("c", "x"))):
        send(one, hour, *names)
    one.apply()
    one.batch()
    one.batch(A, restate=True)
    assert revisions(one) == {A: 2, B: 1, C: 1}
    assert where(one) == {"a": A, "x": A, "b": B, "c": C}


def test_a_restatement_whose_next_hour_fails_is_refused(one: World) -> None:
    send(one, B, "twice", event_hour=past_hour(9))
    send(one, C, "twice", "c")
    one.apply()
    one.batch()
    before = where(one)
    one.configure(event_time={"column": "event_time", "past": "2 hours", "future": "1 hour"})
    one.expect(entry("expect_table_row_count_to_be_between", min_value=0, max_value=1))
    [result] = one.batch(B, restate=True)
    assert result.decision == "refused"
    assert f"{C}, decided again" in (result.reason or "")
    assert where(one) == before
    assert revisions(one)[B] == 1


# Hours that the speed layer serves, since they were refused, and has not read yet.


def refuse_first_hour(one: World, count: int = 3) -> None:
    """The hour A has `count` records, x among them, and is refused; B has x too."""
    send(one, A, "x", *(f"a{i}" for i in range(1, count)))
    send(one, B, "x", "b")
    one.expect(entry("expect_column_values_to_not_be_in_set", column="player", value_set=[A]))
    one.apply()


def twice(one: World) -> list[str]:
    return [name for name, count in Counter(one.ids()).items() if count > 1]


def test_a_look_back_to_be_read_decides_again(world: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """The hazard: micro-batches change what duplicates are dropped against, for ever."""
    monkeypatch.setattr(stream_run, "RETRY_FOR", timedelta(seconds=1))
    one = world(
        batch={"grace": "0 seconds", "lookback_hours": 1},
        speed={"trigger": "1 second", "max_offsets_per_trigger": 2},
        partitions=1,
    )
    refuse_first_hour(one, count=300)
    with speed_running(one):
        wait_for(lambda: one.published > 0, "the first micro-batch")
        results = one.batch(A), one.batch(B)
        assert [r.decision for (r,) in results] == ["refused", "accepted"]
        state = one.state
        assert 0 < state.position.offsets[0] < 300, "the hazard did not happen"
        assert state.accepted[B].unread == (A,)
    one.reconfigure(speed={"trigger": "1 second", "max_offsets_per_trigger": 1000})
    one.speed()
    # Whichever hour a run is about, it decides B again.
    again, current = one.batch(C)
    assert (current.hour, current.decision) == (C, "accepted")
    assert (again.hour, again.decision, again.revision) == (B, "accepted", 2)
    assert again.reason == f"duplicates rechecked: the speed layer has now read {A} completely"
    assert where(one) == {"x": A, "b": B} | {f"a{i}": A for i in range(1, 300)}
    assert one.state.accepted[B].unread == ()
    assert [r.decision for r in one.batch()] == ["refused"], "nothing else is left to do"


def test_a_speed_layer_that_is_down_delays_no_hour(world: Make) -> None:
    one = world(partitions=1)
    refuse_first_hour(one)
    decided = [(r.hour, r.decision) for r in one.batch()]
    assert decided == [(A, "refused"), (B, "accepted"), (C, "accepted")]
    assert where(one) == {"x": B, "b": B}
    one.speed()
    assert twice(one) == ["x"], "the hazard did not happen"
    decided_again = [(r.hour, r.decision, r.revision) for r in one.batch()]
    assert decided_again == [(A, "refused", 1), (B, "accepted", 2)]
    assert where(one) == {"x": A, "a1": A, "a2": A, "b": B}


def test_an_hour_accepted_after_speed_has_the_next_decided_again(world: Make) -> None:
    """The hazard: `main` serves the same events before and after, so nothing seems to change."""
    one = world(partitions=1)
    refuse_first_hour(one)
    one.batch()
    one.speed()
    assert twice(one) == ["x"], "the hazard did not happen"
    [result] = one.batch(A, accept=True, why="known")
    assert result.decision == "accepted"
    assert where(one) == {"x": A, "a1": A, "a2": A, "b": B}
    assert revisions(one) == {A: 1, B: 2, C: 1}
    assert one.batch() == []
