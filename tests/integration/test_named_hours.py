"""Hours that are named are rebuilt by one run: oldest first, and none holds back another."""

import getpass
import socket

import pytest
from commands import call, run, shown
from pyspark.sql import DataFrame
from pyspark.sql import functions as F
from world import Make, World, hours_of_now, past_hour, spread

from anabranch.common.errors import Unexpected
from batch_layer import sources

HOURS = OLDEST, MIDDLE, NEWEST = past_hour(3), past_hour(2), past_hour(1)
hours_of_each_test = hours_of_now(globals(), HOURS=(3, 2, 1), OLDEST=3, MIDDLE=2, NEWEST=1)


@pytest.fixture
def accepted(world: Make) -> World:
    one = world(partitions=2)
    for hour, prefix in zip(HOURS, "abc", strict=True):
        one.send(spread(hour, 6, prefix))
    one.apply()
    decided = {r.hour: r.decision for r in one.batch()}
    assert [decided[hour] for hour in HOURS] == ["accepted"] * 3
    return one


def revisions(one: World) -> dict[str, int]:
    return {hour: one.state.accepted[hour].revision for hour in HOURS}


@pytest.mark.full
def test_a_span_of_hours_is_restated_by_one_command(accepted: World) -> None:
    one, before = accepted, accepted.contents()
    both = (f"{OLDEST}..{MIDDLE}", "--restate", "--why", "a wider schema")
    said = run(one, "batch", one.name, "--hour", *both)
    rows = [line.split()[:3] for line in said.splitlines() if line.startswith(tuple(HOURS))]
    assert rows == [[OLDEST, "accepted", "2"], [MIDDLE, "accepted", "2"]]
    assert revisions(one) == {OLDEST: 2, MIDDLE: 2, NEWEST: 1}
    assert one.contents() == before == one.acknowledged()
    [act] = shown(one, "history", one.name, "--acts")
    assert (act["act"], act["why"], act["hours"]) == ("restate", "a wider schema", [OLDEST, MIDDLE])
    assert act["decisions"] == {"accepted": 2}
    assert (act["user"], act["host"]) == (getpass.getuser(), socket.gethostname())


def test_an_hour_that_breaks_the_run_delays_no_other_named_hour(
    world: Make, monkeypatch: pytest.MonkeyPatch, by_spark: None
) -> None:
    one = world(partitions=2)
    for hour, prefix in ((OLDEST, "a"), (MIDDLE, "b")):
        one.send(spread(hour, 6, prefix))
    one.apply()
    stage = sources.stage_certain

    def overflow(frame: DataFrame) -> DataFrame:
        # The first three offsets of each partition are of the oldest hour.
        return frame.where(F.expr("9223372036854775807 + if(offset < 3, 1, -1) > 0"))

    monkeypatch.setattr(sources, "stage_certain", lambda raw, *rest: stage(overflow(raw), *rest))
    with pytest.raises(Unexpected, match=f"hour {OLDEST}.*ARITHMETIC_OVERFLOW"):
        one.batch(OLDEST, MIDDLE)
    assert {hour: row.revision for hour, row in one.state.accepted.items()} == {MIDDLE: 1}
    assert one.contents() == [row for row in one.acknowledged() if row[2].startswith("b-")]


def test_hours_that_fail_rules_are_accepted_hour_by_hour(world: Make) -> None:
    accepted = world(create=2)
    named = ("batch", accepted.name, "--hour")
    both = (f"{OLDEST}..{MIDDLE}", "--restate", "--accept", "--why", "known")
    assert "accept hours one by one" in call(accepted, *named, *both, expect=2)
    swapped = call(accepted, *named, f"{MIDDLE}..{OLDEST}", expect=2)
    assert "expected the earlier hour first" in swapped
    still_open = (*named, f"{NEWEST}..{past_hour(0)}", "--seal-only")
    assert "can be sealed from" in call(accepted, *still_open, expect=75)
