"""Dead letters follow the rows' publish: rolled forward exactly once, by whoever comes, each offset in one place."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from lakes import FIRST, StreamLake, new_lake, waiting

from anabranch.commits import Change, Outcome
from anabranch.dead_letters import roll_forward, waiting_batch, waiting_speed
from anabranch.errors import Transient
from anabranch.hours import Cut, Timeline, shift
from anabranch.publish import Publish, new_id
from anabranch.snapshots import Staged, find_staged
from anabranch.state import DEAD_LETTERS, OVERRIDES, Accepted, State

SECOND = shift(FIRST, 1)
CUT = Cut("t", {0: (0, 10)})
NOW = datetime(2026, 11, 21, 1, tzinfo=UTC)
D = [(FIRST, 0, 7), (FIRST, 0, 8)]


@pytest.fixture
def lake(tmp_path: Path) -> StreamLake:
    return new_lake(tmp_path, timeline=Timeline(FIRST, SECOND, {0: 10}, sealed={FIRST: CUT}))


def speed_said(lake: StreamLake, staged: Staged, at: datetime = NOW) -> State:
    """The speed layer's rows publish that names `staged`; the process dies before the dead letters follow."""
    item = waiting_speed(staged, at)
    publish = Publish(new_id(), (Change("speed"), Change("main")), lake.state().timeline, dead_letters=(item,))
    assert lake.publish(publish) is Outcome.LANDED
    return lake.state()


def batch_said(lake: StreamLake, staged: Staged | None, revision: int, at: datetime = NOW) -> State:
    rows = lake.stage([(FIRST, 0, 0)])
    item = waiting_batch(staged, FIRST, revision, at)
    publish = lake.accept(rows, FIRST, Accepted(revision, CUT), dead_letters=(item,))
    assert lake.publish(publish) is Outcome.LANDED
    return lake.state()


def roll(lake: StreamLake, state: State) -> frozenset[str]:
    return roll_forward(lake.lake, lake.stream.dead_letters_table, state)


def test_a_crash_between_the_two_publishes_is_rolled_forward_once(lake: StreamLake) -> None:
    staged = lake.stage_dead(D, "speed")
    state = speed_said(lake, staged)
    assert lake.dead("main") == [], "the hazard did not happen"
    assert roll(lake, state) == {staged.wap_id}
    for again in (state, lake.state()):
        assert roll(lake, again) == {staged.wap_id}
    assert [lake.dead(b) for b in ("speed", "main", "batch")] == [D, D, []]


def test_two_who_roll_forward_at_once_publish_once(lake: StreamLake) -> None:
    staged = lake.stage_dead(D, "speed")
    state, real = speed_said(lake, staged), lake.lake.catalog.commit_table

    def commit_table(*args: object) -> object:
        lake.lake.catalog.commit_table = real  # type: ignore[method-assign]
        assert roll_forward(lake.again(), lake.stream.dead_letters_table, state) == {staged.wap_id}
        return real(*args)

    lake.lake.catalog.commit_table = commit_table  # type: ignore[method-assign]
    assert roll(lake, state) == {staged.wap_id}
    assert lake.dead("main") == D


def test_what_is_confirmed_waits_no_longer(lake: StreamLake) -> None:
    state = speed_said(lake, lake.stage_dead(D, "speed"))
    done = roll(lake, state)
    publish = Publish(new_id(), (Change("speed"), Change("main")), state.timeline, confirmed=done)
    assert lake.publish(publish) is Outcome.LANDED
    assert waiting(lake.state(), "speed", DEAD_LETTERS) == waiting(lake.state(), "main", DEAD_LETTERS) == []


def test_an_accepted_hours_dead_letters_replace_those_of_the_speed_layer(lake: StreamLake) -> None:
    roll(lake, speed_said(lake, lake.stage_dead(D, "speed")))
    roll(lake, batch_said(lake, lake.stage_dead([*D, (FIRST, 0, 9)], "batch"), 1))
    assert lake.dead("speed") == D
    assert lake.dead("main") == lake.dead("batch") == [*D, (FIRST, 0, 9)]


def test_an_accepted_hour_without_dead_letters_empties_it(lake: StreamLake) -> None:
    roll(lake, speed_said(lake, lake.stage_dead([*D, (SECOND, 0, 12)], "speed")))
    roll(lake, batch_said(lake, None, 1))
    assert lake.dead("main") == [(SECOND, 0, 12)]
    roll(lake, lake.state())
    assert lake.dead("main") == [(SECOND, 0, 12)]


def test_a_revision_that_was_replaced_is_passed_over(lake: StreamLake) -> None:
    batch_said(lake, lake.stage_dead(D, "batch"), 1)
    state = batch_said(lake, lake.stage_dead(D[:1], "batch"), 2, NOW + timedelta(minutes=1))
    assert len(state.dead_letters) == 2
    assert len(roll(lake, state)) == 2
    assert lake.dead("main") == lake.dead("batch") == D[:1]


def test_late_dead_letters_of_an_hour_that_was_accepted_meanwhile_go_to_speed_only(lake: StreamLake) -> None:
    """The hazard: whoever loaded the state before the acceptance would put each offset into `main` twice."""
    stale = speed_said(lake, lake.stage_dead(D, "speed"))
    accepted = batch_said(lake, lake.stage_dead(D, "batch"), 1, NOW - timedelta(minutes=1))
    only_batch = [item for item in accepted.dead_letters if item["layer"] == "batch"]
    roll(lake, State(**(vars(accepted) | {"dead_letters": tuple(only_batch)})))
    assert lake.dead("main") == D
    roll(lake, stale)
    assert lake.dead("main") == D
    assert lake.dead("speed") == D


def test_an_hour_that_an_operator_gave_to_the_speed_layer_keeps_its_dead_letters(lake: StreamLake) -> None:
    roll(lake, speed_said(lake, lake.stage_dead(D, "speed")))
    override = Change("main", properties={OVERRIDES: json.dumps({FIRST: "speed"})})
    assert lake.publish(Publish(new_id(), (override,), lake.state().timeline)) is Outcome.LANDED
    roll(lake, batch_said(lake, lake.stage_dead(D[:1], "batch"), 1))
    assert lake.dead("main") == D
    assert lake.dead("batch") == D[:1]


def test_staged_dead_letters_that_are_gone_are_an_error_that_names_the_remedy(lake: StreamLake) -> None:
    staged = lake.stage_dead(D, "speed")
    state = speed_said(lake, staged)
    lake.lake.discard(lake.stream.dead_letters_table, staged)
    assert find_staged(lake.lake.load(lake.stream.dead_letters_table), staged.wap_id) is None
    with pytest.raises(Transient, match="expected the staged snapshot, found none; rebuild the hour"):
        roll(lake, state)
