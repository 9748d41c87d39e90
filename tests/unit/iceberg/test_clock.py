"""The clock that commits go by: no jump of this machine's, while a job runs, reaches a table."""

import random
import time
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from lakes import FIRST, StreamLake
from pyiceberg.table import Transaction
from pyiceberg.types import StringType

from anabranch.common.errors import Transient
from anabranch.iceberg import admin
from anabranch.iceberg.clock import COMPARED_FOR, MAX_CLOCK_SKEW, Clock, should_compare
from anabranch.iceberg.commits import Change, Outcome
from anabranch.iceberg.s3 import Compared
from anabranch.protocol import ledger
from anabranch.protocol.ledger import Ledger
from anabranch.protocol.publish import Decision, Publish, new_id, run
from anabranch.protocol.sealing import check_clock

THEN = datetime(2026, 11, 21, 3, tzinfo=UTC)
S = timedelta(seconds=1)


@dataclass
class World:
    """The true time since THEN, how far this clock is off, how often the object store was asked."""

    true: timedelta = timedelta(0)
    off: timedelta = timedelta(0)
    requests: int = 0
    slept: timedelta = timedelta(0)

    def store(self) -> datetime:
        self.requests += 1
        return (THEN + self.true).replace(microsecond=0)

    def wall(self) -> datetime:
        return THEN + self.true + self.off

    def elapsed(self) -> float:
        return 1000 + (self.true - self.slept).total_seconds()

    def clock(self, with_store: bool = True) -> Clock:
        return Clock(self.store if with_store else None, self.wall, self.elapsed)


def test_a_clock_comparison_is_valid_for_minutes_without_requests_and_for_past_moments() -> None:
    world = World()
    one = world.clock()
    for _ in range(500):
        world.true += S
        assert one.now() == world.wall()
    assert world.requests == 1
    world.true += COMPARED_FOR
    one.now()
    assert world.requests == 2
    before, then = one.elapsed(), one.now()
    world.true += timedelta(minutes=5)
    assert one.time_of(before) == then
    assert one.time_of(one.elapsed() + 60) == one.now()  # never ahead


@pytest.mark.parametrize(
    "off", [31 * S, -31 * S, timedelta(minutes=10), timedelta(days=-400), timedelta(days=4000)]
)
def test_a_clock_that_jumps_while_a_job_runs_is_an_error(off: timedelta) -> None:
    world = World()
    one = world.clock()
    one.now()
    world.true += 5 * S
    world.off = off
    for _ in range(3):
        found = r"clock: expected this machine .* and the object store .*NTP"
        with pytest.raises(Transient, match=found):
            one.now()
    world.off = timedelta(0)
    assert one.now() == world.wall()


def test_a_clock_that_is_set_right_while_a_job_runs_is_believed() -> None:
    """A machine that was resumed: no clock of its own counted; the object store's bears it out."""
    world = World()
    one = world.clock()
    one.now()
    world.true += timedelta(hours=7)
    world.slept = timedelta(hours=7)
    assert one.now() == world.wall()
    assert world.requests == 2


def test_small_steps_do_not_add_up_to_a_wrong_time() -> None:
    """The hazard: each step of 20 s is small beside the one before it."""
    world = World()
    one = world.clock()
    one.now()
    deviations = []
    for _ in range(10):
        world.true += S
        world.off += 20 * S
        try:
            deviations.append(one.now() - (THEN + world.true))
        except Transient:
            continue
    assert world.off > 100 * S
    assert deviations == [20 * S]


def test_a_drift_that_both_clocks_of_a_machine_share_is_found_by_the_object_store() -> None:
    world = World()
    one = Clock(world.store, world.wall, lambda: 1000 + (world.true + world.off).total_seconds())
    with pytest.raises(Transient, match="object store"):
        while world.true < timedelta(days=1):
            world.true += 60 * S
            world.off = 0.01 * world.true
            one.now()
    assert world.off <= MAX_CLOCK_SKEW + 0.02 * COMPARED_FOR


@pytest.mark.parametrize("seed", range(20))
def test_the_clock_never_returns_a_time_far_from_the_true_one(seed: int) -> None:
    chance = random.Random(seed)
    world = World()
    one = world.clock()
    answers = 0
    for _ in range(500):
        world.true += timedelta(seconds=chance.expovariate(1 / 40))
        if chance.random() < 0.1:
            off = chance.choice([0, 0, chance.gauss(0, 25), chance.gauss(0, 1e5)])
            world.off = timedelta(seconds=off)
        if chance.random() < 0.02:
            slept = timedelta(seconds=chance.expovariate(1 / 4000))
            world.true, world.slept = world.true + slept, world.slept + slept
        try:
            now = one.now()
        except Transient:
            continue
        answers += 1
        # The object store says whole seconds.
        assert abs(now - (THEN + world.true)) <= MAX_CLOCK_SKEW + S
    assert answers > 100


def test_without_an_object_store_a_clock_that_was_set_is_never_believed_in_this_process() -> None:
    world = World()
    one = world.clock(with_store=False)
    assert one.now() == world.wall()
    world.true += timedelta(hours=5)
    assert one.now() == world.wall()
    world.off = timedelta(minutes=10)
    found = r"it was set while the process ran.*restart the process if the clock is"
    with pytest.raises(Transient, match=found):
        one.now()
    with pytest.raises(Transient, match="it was set while the process ran"):
        one.compare()
    assert world.clock(with_store=False).now() == world.wall()


def test_a_table_with_a_timestamp_in_the_future_is_reported_and_not_committed_to() -> None:
    world = World()
    one = world.clock()
    millis = int(THEN.timestamp() * 1000)
    assert one.now(millis + 29_000) == THEN
    with pytest.raises(Transient, match="not to be behind the table's last update"):
        one.now(millis + 31_000)


def test_when_to_compare() -> None:
    last = Compared(THEN, 0)
    assert should_compare(None, THEN, 0)
    assert not should_compare(last, THEN + 40 * S, 10)
    assert should_compare(last, THEN + 41 * S, 10)
    assert should_compare(last, THEN - 21 * S, 10)
    assert not should_compare(last, THEN + COMPARED_FOR, COMPARED_FOR.total_seconds())
    assert should_compare(last, THEN + COMPARED_FOR + S, COMPARED_FOR.total_seconds() + 1)


def test_no_commit_has_a_jumped_clock(lake: StreamLake, monkeypatch: pytest.MonkeyPatch) -> None:
    """The hazard: a table stamped ahead stops batch jobs, and Spark's readers, until that time."""
    publisher = lake.again()
    empty = Publish(new_id(), (Change("speed"),), lake.state().timeline)
    assert lake.publish(empty, lake_=publisher) is Outcome.LANDED
    before = lake.table().metadata_location
    state = lake.state()
    publish = Publish(new_id(), (Change("speed"),), state.timeline)
    decided = ledger.decision(FIRST, "refused", 1, None, datetime.now(UTC))
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() + 600)
    # The hazard: a commit without a clock check gives the table a timestamp in the future.
    tx = Transaction(lake.table())
    tx.update_snapshot(branch="speed").fast_append().commit()
    assert tx.table_metadata.last_updated_ms > (real() + 590) * 1000

    def add(_: Any, tx: Transaction) -> None:
        tx.update_schema().add_column("m", StringType()).commit()

    for doing in (
        lambda: lake.publish(publish, state, publisher),
        lambda: run(publisher, lake.name, lambda: Decision(state, publish, None), "publish"),
        lambda: Ledger(publisher, lake.stream.hours_table).record([decided]),
        lambda: admin.change_table(publisher, lake.name, "schema", add),
        lambda: admin.create(publisher, "games.another", lake.table().schema(), (), {}),
        lambda: check_clock(publisher, state),
    ):
        with pytest.raises(Transient, match="clock: expected this machine"):
            doing()
    monkeypatch.undo()
    assert lake.table().metadata_location == before
    assert lake.publish(publish, state, publisher) is Outcome.LANDED
