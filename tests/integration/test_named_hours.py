"""Hours that an operator names are rebuilt by one run: oldest first, and none holds back
another."""

import getpass
import socket
from collections.abc import Callable

import pytest
from commands import call, run, shown
from pyspark.sql import DataFrame
from pyspark.sql import functions as F
from world import World, hours_of_now, past_hour, spread

from anabranch.common.errors import Unexpected
from batch_layer import sources

HOURS = OLDEST, MIDDLE, NEWEST = past_hour(3), past_hour(2), past_hour(1)
hours_of_each_test = hours_of_now(globals(), HOURS=(3, 2, 1), OLDEST=3, MIDDLE=2, NEWEST=1)


@pytest.fixture
def accepted(world: Callable[..., World]) -> World:
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
    said = run(
        one, "batch", one.name, "--hour", f"{OLDEST}..{MIDDLE}", "--restate", "--why",
        "a wider schema",
    )  # fmt: skip
    assert [
        line.split()[:3] for line in said.splitlines() if line.startswith((OLDEST, MIDDLE, NEWEST))
    ] == [
        [OLDEST, "accepted", "2"],
        [MIDDLE, "accepted", "2"],
    ]
    assert revisions(one) == {OLDEST: 2, MIDDLE: 2, NEWEST: 1}
    assert one.contents() == before == one.acknowledged()
    [act] = shown(one, "history", one.name, "--acts")
    assert (act["act"], act["why"], act["decisions"]) == (
        "restate",
        "a wider schema",
        {"accepted": 2},
    )
    assert (act["hours"], act["user"], act["host"]) == (
        [OLDEST, MIDDLE],
        getpass.getuser(),
        socket.gethostname(),
    )


def test_an_hour_that_breaks_the_run_delays_no_other_named_hour(
    world: Callable[..., World], monkeypatch: pytest.MonkeyPatch, by_spark: None
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


def test_hours_that_fail_rules_are_accepted_hour_by_hour(world: Callable[..., World]) -> None:
    accepted = world()
    accepted.create()
    command = (
        "batch", accepted.name, "--hour", f"{OLDEST}..{MIDDLE}", "--restate", "--accept", "--why",
        "known",
    )  # fmt: skip
    assert "accept hours one by one" in call(accepted, *command, expect=2)
    assert "expected the earlier hour first" in call(
        accepted, "batch", accepted.name, "--hour", f"{MIDDLE}..{OLDEST}", expect=2
    )
    still_open = ("batch", accepted.name, "--hour", f"{NEWEST}..{past_hour(0)}", "--seal-only")
    assert "can be sealed from" in call(accepted, *still_open, expect=75)
