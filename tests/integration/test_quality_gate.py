"""The quality gate in the batch job: row counts; and when a refused hour is rebuilt."""

from typing import Any

import pytest
from expectations import entry
from world import Make, World, past_hour, spread

from batch_layer.quality.suite import PREVIOUS, SPEED

DAYS = entry(PREVIOUS, days=2, min_days=2, min_ratio=0.5)
LEVEL = entry("expect_column_values_to_be_between", column="level", max_value=2)


def against_speed(low: float, severity: str) -> dict[str, Any]:
    return {"type": SPEED, "kwargs": {"min_ratio": low, "max_ratio": 2}, "severity": severity}


@pytest.fixture
def three_days(world: Make) -> World:
    """The same hour of three days, 20, 20 and 5 records, published by the speed layer."""
    one = world(partitions=1)
    for ago, count in ((49, 20), (25, 20), (1, 5)):
        one.send(spread(past_hour(ago), count, f"h{ago}", partitions=1))
    one.serve()
    return one


def quality(one: World, hour: str) -> dict[str, Any]:
    rows = one.job.ledger.history()
    results = [row.quality for row in rows if row.hour == hour and row.quality is not None]
    return results[-1].as_dict()


def test_row_counts_are_judged(three_days: World) -> None:
    one, hour = three_days, past_hour(1)
    one.expect(DAYS, against_speed(1, "critical"), LEVEL | {"severity": "warning"})

    results = {r.hour: r for r in one.batch() if r.account.offsets}

    decided = {h: r.decision for h, r in results.items()}
    assert decided == {past_hour(49): "accepted", past_hour(25): "accepted", hour: "refused"}
    first = quality(one, past_hour(49))
    assert first["passed"] and first["evaluated"] == 3
    assert first["not_applicable"] == [
        {"type": PREVIOUS, "reason": "row counts of 2 previous days are needed, 0 of 2 are known"}
    ]
    assert first["met"][1]["kwargs"] == {
        "min_ratio": 1, "max_ratio": 2, "min_value": 20, "max_value": 40,
    }  # fmt: skip
    reason = (
        f"quality: {PREVIOUS}: expected at least 10, days 2, min days 2, min ratio 0.5, found 5 "
        "(the median of 2 days before is 20)"
    )
    assert results[hour].reason == reason
    (warning,) = quality(one, hour)["warnings"]
    found = "found 2 of 5 rows otherwise (the first: partition 0, offset 43)"
    assert warning["message"].endswith(found)
    assert warning["rows"] == [{"partition": 0, "offset": 40 + level} for level in (3, 4)]

    one.expect(against_speed(1.5, "critical"))
    (result,) = one.batch(hour)
    assert result.decision == "refused" and "found 5 (the speed layer has 5)" in str(result.reason)
    one.expect(against_speed(1.5, "warning"))
    (result,) = one.batch(hour)
    assert result.decision == "accepted"
    assert quality(one, hour)["warnings"][0]["unexpected_count"] is None
    assert one.contents() == one.acknowledged()


def test_an_hour_that_the_speed_layer_does_not_cover_is_not_compared_with_it(world: Make) -> None:
    one = world(partitions=1)
    one.begin(spread(past_hour(1), 5, "e", partitions=1))
    one.expect(against_speed(1, "critical"))
    (result,) = one.batch(past_hour(1))
    assert result.decision == "accepted"
    assert quality(one, past_hour(1))["not_applicable"] == [
        {"type": SPEED, "reason": "the speed layer has not read it to its end"}
    ]


def refusals(one: World) -> int:
    return sum(row.decision == "refused" for row in one.job.ledger.history())


def commits(one: World) -> int:
    """How many snapshots the table ever had: whatever is staged makes one."""
    return one.state.table.metadata.last_sequence_number


def at_most(level: int) -> dict[str, object]:
    return entry("expect_column_max_to_be_between", column="level", max_value=level)


@pytest.mark.full
def test_a_refused_hour_is_rebuilt_once_something_changed(world: Make) -> None:
    one, hour = world(partitions=1), past_hour(1)
    one.send(spread(hour, 10, "e", partitions=1))
    one.expect(at_most(3))
    one.apply()
    [first] = one.batch()
    assert (first.decision, refusals(one)) == ("refused", 1)
    # A run of every hour says it again, and neither builds nor writes anything.
    before = commits(one)
    for _ in range(2):
        [again] = one.batch()
        assert (again.hour, again.decision, again.reason) == (hour, "refused", first.reason)
        assert again.account.quality.failed and again.account.good == 10
    assert (commits(one), refusals(one)) == (before, 1)
    assert [h["state"] for h in one.hours() if h["hour"] == hour] == ["refused"]
    # Named, it is rebuilt at once; the same reason is in the ledger already.
    [named] = one.batch(hour)
    assert (named.decision, named.reason) == ("refused", first.reason)
    assert commits(one) > before
    assert refusals(one) == 1
    # Another suite is another reason, and then none.
    one.expect(at_most(4))
    [other] = one.batch()
    assert (other.decision, refusals(one)) == ("refused", 2)
    one.expect(at_most(9))
    [accepted] = one.batch()
    assert accepted.decision == "accepted"
    assert one.contents() == one.acknowledged()
