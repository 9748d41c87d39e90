"""How often the table is loaded: to decide, and for nothing that a step before it knows already."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from unittest.mock import patch

from brokers import Broker
from lakes import FIRST, StreamLake, at_next_commit, lose_answer, new_lake

from anabranch.iceberg.commits import Change
from anabranch.iceberg.lake import Lake
from anabranch.offsets.hours import Cut, Timeline, hour_of
from anabranch.protocol import dead_letters, ledger, publish, sealing
from anabranch.protocol.publish import Landed, Publish, new_id
from anabranch.protocol.state import Confirmed, State

NOW = datetime(2026, 11, 21, 1, tzinfo=UTC)


@contextmanager
def counted(of: StreamLake) -> Iterator[Counter[str]]:
    """The loads of each table of this lake: an earlier test's thread may still read."""
    loads, find = Counter[str](), Lake.find

    def counting(lake: Lake, name: str) -> Any:
        if lake.environment == of.environment:
            loads[name] += 1
        return find(lake, name)

    with patch.object(Lake, "find", counting):
        yield loads


def land(lake: StreamLake, publish_: Publish, before: State | None = None) -> Landed | None:
    return publish.land(lake.lake, before or lake.state(), publish_, datetime.now(UTC))


def test_a_publish_returns_the_state_that_a_load_finds(lake: StreamLake) -> None:
    staged, dead = lake.stage([(FIRST, 0, 0)]), lake.stage_dead([(FIRST, 0, 1)], "speed")
    before = lake.state()
    row = ledger.decision(FIRST, "sealed", 0, Cut("t", {0: (0, 2)}), NOW)
    waits = dead_letters.waiting_speed(dead, NOW)
    with counted(lake) as loads:
        publish = lake.speed(staged, {0: 2}, before, decisions=(row,), dead_letters=(waits,))
        landed = land(lake, publish, before)
    assert landed is not None and not loads
    assert landed.state == lake.state()
    assert [d.hour for d in landed.state.decisions] == [FIRST]
    why = "over earlier heads"
    assert land(lake, Publish(new_id(), (Change("speed"),), before.timeline), before) is None, why
    # So it does when its answer is lost.
    state = lake.state()
    at_next_commit(lake.lake, after=lose_answer)
    landed = land(lake, Publish(new_id(), (Change("speed"), Change("main")), state.timeline), state)
    assert landed is not None
    assert landed.state == lake.state()
    assert landed.state.heads["main"] != state.heads["main"]


def test_a_decision_is_written_down_and_read_back_by_one_load(lake: StreamLake) -> None:
    row = ledger.decision(FIRST, "sealed", 0, None, NOW)
    for _ in ("written", "known"):
        with counted(lake) as loads:
            assert lake.ledger.record([row]) == {row.decision_id}
        assert loads == {lake.stream.hours_table: 1}
    assert len(lake.ledger.history()) == 1


def test_nothing_that_waits_is_one_load(lake: StreamLake) -> None:
    with counted(lake) as loads:
        recovered = lake.publisher.recover()
    assert loads == {lake.name: 1}
    assert recovered == lake.state()
    with counted(lake) as loads:
        assert lake.publisher.recover(recovered) == recovered
    assert not loads


def named(lake: StreamLake, count: int) -> tuple[set[str], State]:
    """So many sets of dead letters that a publish names: their ids, and the state after it."""
    staged = [lake.stage_dead([(FIRST, 0, i)], "speed") for i in range(count)]
    letters = tuple(dead_letters.waiting_speed(one, NOW) for one in staged)
    landed = land(lake, lake.speed(lake.stage([]), {0: count}, dead_letters=letters))
    assert landed is not None
    return {one.wap_id for one in staged}, landed.state


def test_dead_letters_are_decided_over_the_table_left_before(lake: StreamLake) -> None:
    ids, state = named(lake, 3)
    with counted(lake) as loads:
        assert lake.roll(state) == ids
    # Each rests on a load of the rows' table that is younger than the dead letters'.
    assert loads == {lake.stream.dead_letters_table: 1, lake.name: 3}
    assert lake.dead("speed") == lake.dead("main") == [(FIRST, 0, i) for i in range(3)]


def test_letters_published_meanwhile_are_decided_over_a_new_load(lake: StreamLake) -> None:
    (ids, state), others, found = named(lake, 2), [lake.again()], list[frozenset[str]]()
    name, real = lake.stream.dead_letters_table, dead_letters.plan_commit

    def overtaken(*given: Any) -> Any:
        if others:
            found.append(dead_letters.roll_forward(others.pop(), name, state))
        return real(*given)

    with patch.object(dead_letters, "plan_commit", overtaken):
        assert [lake.roll(state), *found] == [ids, ids]
    assert lake.dead("speed") == [(FIRST, 0, i) for i in range(2)], "each once"


def test_an_hour_is_sealed_by_one_load_for_each_decision(tmp_path: Path) -> None:
    first = hour_of(datetime.now(UTC) - timedelta(hours=2))
    lake = new_lake(tmp_path, timeline=Timeline(first, first, {0: 0}))
    publisher = lake.publisher
    with counted(lake) as loads:
        sealed = sealing.seal(publisher, Broker(log={0: []}).adapter)
    # The hour after it too, but for its grace.
    assert sealed.hours[0] == first
    # To ask Kafka, to decide, and to find that nothing is left.
    assert loads == {lake.name: 3, lake.stream.hours_table: 1}
    assert sealed.state == lake.state()
    waiting = frozenset(d.decision_id for d in sealed.state.decisions)
    assert publisher.confirmed == Confirmed(waiting)
    with counted(lake) as loads:
        publisher.recover(sealed.state)
    assert not loads
    assert publisher.confirmed == Confirmed(waiting)
