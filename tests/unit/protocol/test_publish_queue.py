"""Turns on a real lake: publishers go in request order, and none waits forever."""

import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from lakes import StreamLake, at_next_commit
from pyiceberg.exceptions import CommitFailedException
from waiting import wait_for

from anabranch.common.errors import Transient
from anabranch.iceberg.commits import Change, Commit
from anabranch.iceberg.lake import Lake
from anabranch.iceberg.snapshots import PUBLISH_ID
from anabranch.protocol import publish_queue
from anabranch.protocol.publish import Decision, Landed, Publish, land, new_id, run
from anabranch.protocol.publish_queue import (
    Turn,
    YieldToQueue,
    is_over,
    join_queue,
    plan_turn,
    read_queue,
    remove_turn,
    should_join,
    turn_before,
    turn_bound,
    turn_to_yield_to,
    wait_for_turn,
)
from anabranch.protocol.state import TURN, load_state

UNIT = Path(__file__).parents[1]


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first refusal asks for a turn, and no bound passes before the test's end."""
    monkeypatch.setattr(publish_queue, "LONG_ATTEMPT", 0.0)
    monkeypatch.setattr(publish_queue, "MIN_TIMEOUT", 300.0)


def line(lake: StreamLake) -> list[str]:
    return [t.id for t in read_queue(lake.table().properties)]


def new_turn(lake: StreamLake, what: str = "test") -> str:
    turn = join_queue(lake.again(), lake.name, what)
    assert turn is not None
    return turn.id


def move(lake: StreamLake, by: str, own: Lake | None = None) -> Decision[None]:
    """A publish without rows, that says who made it."""
    state = load_state(own or lake.lake, lake.name)
    changes = (Change("speed"), Change("main"))
    return Decision(state, Publish(f"{by}-{new_id()}", changes, state.timeline), None)


def published(lake: StreamLake) -> list[str]:
    """Who published, in order."""
    publishers = []
    for snapshot in sorted(lake.table().snapshots(), key=lambda s: s.sequence_number or 0):
        by = (snapshot.summary or {}).get(PUBLISH_ID, "") or ""
        if "-" in by and (not publishers or publishers[-1] != by):
            publishers.append(by)
    return [by.split("-")[0] for by in publishers]


class Tries:
    """Decisions of a publish of `by`, and the queue at each. Another publish comes before the first
    one, which is refused; `after` acts with the number of each."""

    def __init__(
        self,
        lake: StreamLake,
        by: str = "batch",
        after: Callable[[int], object] = lambda number: None,
        refused: bool = True,
    ) -> None:
        self._lake, self._own, self._by, self._after = lake, lake.again(), by, after
        self._refused, self.queues = refused, list[list[str]]()

    def decide(self) -> Decision[None]:
        decision = move(self._lake, self._by, self._own)
        self.queues.append(line(self._lake))
        if self._refused and len(self.queues) == 1:
            self._lake.move("speed")
        self._after(len(self.queues))
        return decision

    @property
    def lengths(self) -> list[int]:
        return [len(queue) for queue in self.queues]

    def publish(self, **timeout: timedelta) -> Landed | None:
        take_turns: Any = {"take_turns": True, **timeout}
        return run(self._own, self._lake.name, self.decide, self._by, **take_turns).landed


class SpeedLoop:
    """A speed layer that stages a moment and publishes, over and over, as `MicroBatches` does."""

    def __init__(self, lake: StreamLake, period: float = 0.2) -> None:
        self._lake, self._own, self._period = lake, lake.again(), period
        self._queue = YieldToQueue(self._own, lake.name)
        self.stop = threading.Event()
        self.published = 0

    def once(self) -> None:
        is_staged = False
        while not self.stop.is_set():
            decision, now = move(self._lake, "speed", self._own), datetime.now(UTC)
            if self._queue.wait_if_first(decision.state.table.properties):
                continue
            if not is_staged:
                is_staged = self.stop.wait(self._period / 2) or True
            elif decision.publish and land(self._own, decision.state, decision.publish, now):
                self._queue.published()
                self.published += 1
                return

    def go(self) -> None:
        while not self.stop.wait(self._period / 2):
            self.once()

    def wait_for_another(self) -> None:
        before = self.published
        wait_for(lambda: self.published > before, "the speed layer to publish")


@contextmanager
def speeding(lake: StreamLake) -> Iterator[SpeedLoop]:
    speed = SpeedLoop(lake)
    with ThreadPoolExecutor(1) as pool:
        going = pool.submit(speed.go)
        try:
            speed.wait_for_another()
            yield speed
        finally:
            speed.stop.set()
            going.result(60)


# Decisions


def test_a_queue_is_read_in_request_order_whatever_its_values() -> None:
    first = Turn("b", 1, 20.0, "merge", "host:1", "2026-11-21T00:00:00+00:00")
    second = Turn("a", 2, 10.0)
    wrong = {"other": "x", f"{TURN}bad": "{", f"{TURN}old": '["x"]'}
    both = second.to_properties() | first.to_properties() | wrong
    assert read_queue(both)[-2:] == (first, second)
    assert [(t.id, t.bound) for t in read_queue(both)[:2]] == [("bad", 5.0), ("old", 5.0)]
    # An invalid value in the property delays no publisher for long.
    found = read_queue({f"{TURN}x": json.dumps({"number": 1, "bound": 1e9})})[0].bound
    assert found == publish_queue.LIMIT


def test_a_bound_follows_from_the_longest_try() -> None:
    assert [turn_bound(s) for s in (0, 0.5, 5, 15, 40, 100, 1000)] == [10, 10, 20, 60, 60, 150, 300]
    assert not is_over(Turn("a", 1, 10.0), 9.9)
    assert is_over(Turn("a", 1, 10.0), 10.0)


def test_a_turn_is_requested_when_another_refusal_is_likely() -> None:
    assert [should_join(n, 0.1) for n in (0, 1, 2, 3)] == [False, False, False, True]
    assert [should_join(n, 0.5) for n in (0, 1)] == [False, True]


def test_the_order_of_waiting_publishers() -> None:
    first, second, third = (Turn(i, n, 10.0) for n, i in enumerate("abc", 1))
    queue = (first, second, third)
    assert [turn_before(queue, mine) for mine in ("a", "b", "c", None)] == [None, *[first] * 3]
    assert turn_before(queue, "b", waited="a") is None
    assert turn_before((), None) is None
    assert plan_turn(queue, Turn("d", 0, 10.0)) == Turn("d", 4, 10.0)
    assert plan_turn(queue * 6, Turn("d", 0, 10.0)) is None
    # The speed layer: each turn once, and a publish between two.
    assert turn_to_yield_to(queue, None, has_yielded=False) == first
    assert turn_to_yield_to(queue, "a", has_yielded=False) == second
    assert turn_to_yield_to(queue, "a", has_yielded=True) is None
    assert turn_to_yield_to((first,), "a", has_yielded=False) is None


# What the table says


def test_a_turn_requested_against_the_speed_layer_is_set(lake: StreamLake) -> None:
    """The hazard: the speed layer publishes while the turn is asked for: the asking is refused."""
    own, refused = lake.again(), list[int]()

    def refuse() -> None:
        refused.append(len(refused))
        if len(refused) % 3:
            at_next_commit(own, refuse)
        raise CommitFailedException("another commit was first")

    at_next_commit(own, refuse)
    turn = join_queue(own, lake.name, "test")
    assert turn is not None and len(refused) == 3
    assert line(lake) == [turn.id]
    at_next_commit(own, refuse)
    remove_turn(own, lake.name, turn.id)
    assert len(refused) == 6
    assert not [key for key in lake.table().properties if key.startswith(TURN)]


def test_a_turn_names_its_publisher_and_purpose(lake: StreamLake) -> None:
    new_turn(lake, "hour 2026-11-21T00 of events")
    [turn] = read_queue(lake.table().properties)
    assert f"hour 2026-11-21T00 of events ({turn.by}, turn {turn.id})" == turn.who
    assert turn.by.endswith(f":{os.getpid()}")
    assert datetime.fromisoformat(turn.asked_at).tzinfo is not None


def test_two_that_ask_at_once_are_both_in_line(lake: StreamLake) -> None:
    """The hazard: both loaded before either asked; the second to land undoes the first's turn."""
    own, others = lake.again(), list[str]()
    at_next_commit(own, lambda: others.append(new_turn(lake)))
    turn = join_queue(own, lake.name, "test")
    assert turn is not None
    assert sorted(line(lake)) == sorted([turn.id, *others])


def test_a_full_queue_takes_no_publisher(lake: StreamLake, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publish_queue, "MAX_TURNS", 1)
    first = new_turn(lake)
    assert join_queue(lake.lake, lake.name, "test") is None
    assert line(lake) == [first]


def test_taking_back_a_turn_leaves_all_others(lake: StreamLake) -> None:
    first, second = new_turn(lake), new_turn(lake)
    before = lake.table().metadata_location
    remove_turn(lake.lake, lake.name, "mine")
    assert line(lake) == [first, second]
    assert lake.table().metadata_location == before, "none was taken back"
    remove_turn(lake.lake, lake.name, first)
    assert line(lake) == [second]
    remove_turn(lake.lake, lake.name, second)
    assert not [key for key in lake.table().properties if key.startswith(TURN)]


# Waiting


def test_a_turn_is_awaited_once_until_it_is_removed(lake: StreamLake) -> None:
    turn, happened, own = new_turn(lake), list[str](), lake.again()
    with ThreadPoolExecutor(1) as pool:
        waited = pool.submit(wait_for_turn, lake.lake, lake.name, turn, None)
        waited.add_done_callback(lambda _: happened.append("waited"))
        time.sleep(0.3)
        happened.append("taken back")
        remove_turn(own, lake.name, turn)
        assert waited.result() == turn
    assert happened == ["taken back", "waited"]
    other = new_turn(lake)
    # Neither of these would come back before the test's end.
    assert wait_for_turn(lake.lake, lake.name, other, other) == other
    assert wait_for_turn(lake.lake, lake.name, None, other) is None
    assert line(lake) == [other]


def test_a_long_wait_loads_once_a_second(lake: StreamLake, monkeypatch: pytest.MonkeyPatch) -> None:
    turn, now, loads, load = new_turn(lake), [0.0], list[str](), lake.lake.load

    class Passing(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            now[0] += timeout or 0.0
            return False

    def counted(name: str) -> Any:
        loads.append(name)
        return load(name)

    monkeypatch.setattr(publish_queue, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(lake.lake, "load", counted)
    assert wait_for_turn(lake.lake, lake.name, turn, None, Passing()) == turn
    assert now[0] >= publish_queue.MIN_TIMEOUT
    assert len(loads) <= publish_queue.MIN_TIMEOUT + 10


def test_an_abandoned_turn_is_removed_after_its_bound(
    lake: StreamLake, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(publish_queue, "MIN_TIMEOUT", 0.3)
    turn = new_turn(lake)
    assert wait_for_turn(lake.lake, lake.name, turn, None) == turn
    assert line(lake) == []
    assert "from the publish queue after its timeout of 0 s; continuing" in caplog.text


def test_an_invalid_turn_is_removed(lake: StreamLake, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publish_queue, "MALFORMED_BOUND", 0.3)
    lake.lake.commit(lake.table(), Commit(new_id(), {}, (), set_properties={f"{TURN}x": "{"}))
    assert YieldToQueue(lake.lake, lake.name).wait_if_first(lake.table().properties)
    assert line(lake) == []


def test_a_stop_ends_the_wait_of_the_speed_layer(lake: StreamLake) -> None:
    turn, stop = new_turn(lake), threading.Event()
    stop.set()
    assert YieldToQueue(lake.lake, lake.name, stop).wait_if_first(lake.table().properties)
    assert line(lake) == [turn]


HOLDER = f"""
import sys, time
sys.path[:0] = [{str(UNIT)!r}, {str(UNIT.parents[1])!r}]
from pathlib import Path
from lakes import new_environment, new_stream
from anabranch.protocol import publish_queue
from anabranch.iceberg.lake import Lake
publish_queue.MIN_TIMEOUT = 1.0
lake = Lake(new_environment(Path(sys.argv[1])))
print(publish_queue.join_queue(lake, new_stream().table, "a holder").id, flush=True)
time.sleep(600)
"""


def test_a_killed_owner_of_a_turn_delays_the_speed_layer_up_to_its_bound(lake: StreamLake) -> None:
    command = [sys.executable, "-c", HOLDER, str(lake.folder)]
    holder = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
    try:
        assert holder.stdout is not None
        turn = holder.stdout.readline().strip()
    finally:
        holder.send_signal(signal.SIGKILL)
        holder.communicate()
    # The hazard: its turn is there, and no process will remove it.
    assert line(lake) == [turn]
    speed = SpeedLoop(lake)
    speed.once()
    assert (speed.published, line(lake)) == (1, [])
    speed.once()
    assert speed.published == 2


def test_speed_publishes_between_turns(lake: StreamLake, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publish_queue, "MIN_TIMEOUT", 0.3)
    first, second = new_turn(lake), new_turn(lake)
    speed, left = SpeedLoop(lake), []
    for _ in range(2):
        speed.once()
        left.append(line(lake))
    assert left == [[second], []], f"{first} and {second}"
    assert speed.published == 2


# Publishing


@pytest.mark.usefixtures("at_once")
def test_a_publish_takes_its_turn_with_it_when_it_lands(lake: StreamLake) -> None:
    before, tries = lake.table().metadata.last_sequence_number, Tries(lake)
    assert tries.publish() is not None
    assert tries.lengths == [0, 1]
    assert line(lake) == []
    why = "expected no commit of its own to take it back"
    assert lake.table().metadata.last_sequence_number == before + 3, why


@pytest.mark.usefixtures("at_once")
@pytest.mark.parametrize("ending", ["nothing to do", "error", "timeout"])
def test_a_publish_that_gives_up_takes_its_turn_back(lake: StreamLake, ending: str) -> None:
    found = r"test: expected a publish within 0:00:02, found \d+ refusals; try again"
    tries = Tries(lake, refused=False)

    def decide() -> Decision[None]:
        decision = tries.decide()
        if len(tries.queues) > 1 and ending == "nothing to do":
            return Decision(decision.state, None, None)
        if len(tries.queues) > 1 and ending == "error":
            raise ValueError("no")
        lake.move("speed")
        return decision

    ends: Any = {
        "nothing to do": nullcontext(), "error": pytest.raises(ValueError, match="no"),
        "timeout": pytest.raises(Transient, match=found),
    }[ending]  # fmt: skip
    timeout = timedelta(seconds=2 if ending == "timeout" else 60)
    with ends:
        given_up = run(lake.lake, lake.name, decide, "test", take_turns=True, timeout=timeout)
        assert given_up.landed is None
    assert tries.queues[1] != []
    assert line(lake) == []


@pytest.mark.usefixtures("at_once")
def test_a_turn_that_another_publisher_removed_does_not_stop_a_publish(lake: StreamLake) -> None:
    """The hazard: its bound passes before the commit, which is to take back what is gone."""

    def remove(number: int) -> None:
        if number > 1:
            remove_turn(lake.again(), lake.name, tries.queues[1][0])

    tries = Tries(lake, after=remove)
    assert tries.publish() is not None
    assert tries.lengths == [0, 1]
    assert line(lake) == []


@pytest.mark.usefixtures("at_once")
def test_a_publish_inside_another_ones_decision_uses_the_outer_turn(
    lake: StreamLake, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The hazard: a merge that has to come first waits for the publish that it is made for."""
    monkeypatch.setattr(publish_queue, "MIN_TIMEOUT", 1.0)
    caplog.set_level(logging.INFO)
    merge, tries = Tries(lake, "merge", refused=False), Tries(lake)

    def decide() -> Decision[None]:
        if len(tries.queues) == 1:
            assert merge.publish() is not None
        return tries.decide()

    assert run(lake.lake, lake.name, decide, "test", take_turns=True).landed is not None
    assert tries.lengths == [0, 1], "the merge left the outer publish its turn"
    assert "first in the publish queue" not in caplog.text
    assert published(lake) == ["merge", "batch"]
    assert line(lake) == []


@pytest.mark.usefixtures("at_once")
def test_a_slow_publisher_joins_again(lake: StreamLake, monkeypatch: pytest.MonkeyPatch) -> None:
    out = threading.Event()
    slow = Tries(lake, "slow", lambda number: number != 2 or out.wait(300))
    quick = Tries(lake, "quick", refused=False)
    monkeypatch.setattr(publish_queue, "MIN_TIMEOUT", 0.3)
    with ThreadPoolExecutor(1) as pool:
        landing = pool.submit(slow.publish)
        try:
            what = "the slow one to have its turn"
            wait_for(lambda: len(slow.queues) == 2 or landing.done(), what)
            assert quick.publish() is not None
        finally:
            out.set()
        assert landing.result(60) is not None
    assert published(lake) == ["quick", "slow"]
    # The hazard: the slow one had the way when the quick one came.
    assert len(quick.queues[0]) == 1
    assert line(lake) == []


def test_a_publish_of_seconds_lands_against_a_busy_speed_layer(lake: StreamLake) -> None:
    work = threading.Event()
    tries = Tries(lake, after=lambda _: work.wait(3), refused=False)
    with speeding(lake) as speed:
        assert tries.publish(timeout=timedelta(minutes=2)) is not None
        speed.wait_for_another()
    # The hazard: without a turn it is refused.
    assert tries.queues[0] == []
    assert 2 <= len(tries.queues) <= 4
    assert line(lake) == []


@pytest.mark.usefixtures("at_once")
def test_two_batch_publishes_and_a_maintenance_land_in_order(lake: StreamLake) -> None:
    names, all_asked = ("hour", "rebuild", "maintain"), threading.Event()
    tries = {name: Tries(lake, name, refused=False) for name in names[1:]}
    tries["hour"] = Tries(lake, "hour", lambda number: number == 1 or all_asked.wait(100))
    with speeding(lake) as speed, ThreadPoolExecutor(3) as pool:
        landing = []
        for number, name in enumerate(names, 1):
            landing.append(pool.submit(tries[name].publish))
            what = f"{name} to be in line"
            wait_for(lambda n=number: len(line(lake)) == n or landing[-1].done(), what)  # type: ignore[misc]
            assert not landing[-1].done(), landing[-1].result()
        assert [t.what for t in read_queue(lake.table().properties)] == list(names)
        all_asked.set()
        assert all(one.result(100) is not None for one in landing)
        speed.wait_for_another()
    assert [by for by in published(lake) if by != "speed"] == list(names)
    assert line(lake) == []
