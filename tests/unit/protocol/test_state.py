"""The state that a table holds: overrides, acceptance, forgotten hours, the position's topic."""

import json
from dataclasses import replace

import pytest
from lakes import FIRST, StreamLake, new_state

from anabranch.common.errors import PositionError, Terminal
from anabranch.common.json_values import from_json
from anabranch.iceberg.commits import Change
from anabranch.offsets.hours import Cut, Timeline, shift
from anabranch.offsets.position import Position, Topic
from anabranch.protocol.state import (
    ACCEPTED,
    OVERRIDES,
    REMEMBERED_HOURS,
    SETTLED,
    Accepted,
    State,
    accepted_properties,
    check_topic,
    read_state,
)

H = [shift(FIRST, i) for i in range(REMEMBERED_HOURS + 6)]


def cut(i: int) -> Cut:
    return Cut("t", {0: (10 * i, 10 * i + 10)})


def after(state: State, hours: dict[str, Accepted]) -> State:
    """The state once the batch branch says what `accepted_properties` planned."""
    properties = accepted_properties(state, hours)
    accepted = {h: from_json(Accepted, a) for h, a in json.loads(properties[ACCEPTED]).items()}
    sealed = {h: c for h, c in state.timeline.sealed.items() if h not in hours}
    timeline = replace(state.timeline, sealed=sealed)
    return replace(state, accepted=accepted, settled_before=properties[SETTLED], timeline=timeline)


def accept_all(read_to: int, refused: tuple[int, ...] = ()) -> State:
    """Every hour sealed and, but for `refused`, accepted; speed has read `read_to` offsets."""
    sealed = {h: cut(i) for i, h in enumerate(H)}
    timeline = Timeline(FIRST, shift(H[-1], 1), {0: 10 * len(H)}, sealed=sealed)
    state = new_state(timeline, {0: read_to})
    for i, hour in enumerate(H):
        if i not in refused:
            state = after(state, {hour: Accepted(1, cut(i))})
    return state


def test_an_hour_is_served_by_batch_once_accepted_unless_overridden() -> None:
    timeline = Timeline(FIRST, H[2], {0: 20}, sealed={H[1]: cut(1)})
    state = new_state(timeline, {0: 20}, accepted={H[0]: Accepted(1, cut(0))})
    assert [state.served_by(h) for h in H[:3]] == ["batch", "speed", "speed"]
    assert replace(state, overrides={H[0]: "speed"}).served_by(H[0]) == "speed"
    assert state.cuts == {H[0]: cut(0), H[1]: cut(1)}


def test_hours_behind_both_layers_are_forgotten_one_by_one_and_stay_accepted() -> None:
    state = accept_all(10 * len(H))
    assert sorted(state.accepted) == H[-REMEMBERED_HOURS:]
    assert state.settled_before == H[-REMEMBERED_HOURS]
    assert all(state.is_accepted(h) for h in H)
    assert not state.is_accepted(shift(FIRST, -1)), "before the stream's first hour"
    assert not state.is_accepted(shift(H[-1], 1)), "not sealed"
    # An hour that the speed layer has not passed is not forgotten.
    assert sorted(accept_all(15).accepted) == H[1:], "an hour read in part was forgotten"
    assert sorted(accept_all(0).accepted) == H


def test_a_refused_hour_among_forgotten_ones_is_not_accepted_until_it_is() -> None:
    state = accept_all(10 * len(H), refused=(1,))
    assert state.settled_before > H[1]
    assert not state.is_accepted(H[1])
    assert state.served_by(H[1]) == "speed"
    assert state.cuts[H[1]] == cut(1)
    # The hazard: accepted or restated now, it would be forgotten in its own publish, and its dead
    # letters with it.
    assert after(state, {H[1]: Accepted(1, cut(1))}).accepted[H[1]] == Accepted(1, cut(1))
    assert after(state, {H[0]: Accepted(2, cut(0))}).accepted[H[0]] == Accepted(2, cut(0))


def test_the_newest_publish_of_any_branch_has_the_hours(lake: StreamLake) -> None:
    for i, branch in enumerate(("speed", "batch", "main", "speed")):
        newer = Timeline(FIRST, H[i], {0: 10 * i})
        lake.change(Change(branch), timeline=newer)
        assert lake.state().timeline == newer
    lake.foreign_commit("batch")
    why = "a head that says nothing is newer, and hides what was said"
    assert lake.state().timeline == newer, why


def test_overrides_and_acceptances_are_read_from_their_own_branch(lake: StreamLake) -> None:
    timeline = Timeline(FIRST, H[2], {0: 20})
    state, overrides = replace(lake.state(), timeline=timeline), json.dumps({H[1]: "batch"})
    accepted = accepted_properties(state, {H[0]: Accepted(3, cut(0))})
    batch, main = Change("batch", properties=accepted), {OVERRIDES: overrides}
    lake.change(batch, Change("main", properties=main), timeline=timeline)
    state = lake.state()
    assert state.accepted == {H[0]: Accepted(3, cut(0))}
    assert state.overrides == {H[1]: "batch"}
    assert state.served_by(H[1]) == "batch"


def test_a_table_that_carries_no_position_names_the_remedy(lake: StreamLake) -> None:
    found = r"expected a position on branch speed, found none; run `anabranch apply`"
    with pytest.raises(Terminal, match=found):
        read_state(lake.letters())


@pytest.mark.parametrize(
    ("topic", "message"),
    [
        (None, "topic events: expected it to exist, found none"),
        (
            Topic("events", "other", (0, 1)),
            r"expected id t, read up to 6 offsets in 2 partitions, found id other: it was deleted.*anabranch adopt",
        ),
        (Topic("events", "t", (0,)), "expected partition 1, found only 1 partitions"),
    ],
)
def test_a_topic_that_contradicts_the_position_stops(topic: Topic | None, message: str) -> None:
    with pytest.raises(PositionError, match=message):
        check_topic(Position("t", {0: 4, 1: 2}), topic, "events")


def test_another_topic_is_described_so_that_a_wrong_name_is_seen() -> None:
    """The hazard: an operator reads of a recreated topic, and adopts one named by mistake."""
    topic = Topic("events", "other", (0,), records=12, cluster_id="c2")
    with pytest.raises(PositionError) as stopped:
        check_topic(Position("t", {0: 4}), topic, "events", read_from="c1")
    expected = "id t in cluster c1, read up to 4 offsets in 1 partitions"
    found = "id other in cluster c2, which has 12 records"
    mistake = "`topic:` or kafka.bootstrap_servers name the wrong topic or cluster"
    for words in (expected, found, mistake, "correct the configuration"):
        assert words in str(stopped.value)


def test_a_position_is_bound_to_the_topic_as_it_is_now() -> None:
    found = check_topic(Position("", {}), Topic("events", "t", (0, 1)), "events")
    assert found == Position("t", {0: 0, 1: 0})
    grown = check_topic(Position("t", {0: 4}), Topic("events", "t", (0, 1)), "events")
    assert grown == Position("t", {0: 4, 1: 0})
