"""The quality gate in the batch job: row counts against speed layer and previous days, and the Data
Docs of it."""

from collections.abc import Callable
from typing import Any

import pytest
from expectations import entry
from world import World, past_hour, spread

from batch_layer.quality.suite import PREVIOUS, SPEED

Make = Callable[..., World]

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

    assert {h: r.decision for h, r in results.items()} == {
        past_hour(49): "accepted",
        past_hour(25): "accepted",
        hour: "refused",
    }
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
    assert warning["message"].endswith(
        "found 2 of 5 rows otherwise (the first: partition 0, offset 43)"
    )
    assert warning["rows"] == [{"partition": 0, "offset": 40 + level} for level in (3, 4)]

    one.expect(against_speed(1.5, "critical"))
    (result,) = one.batch(hour)
    assert (result.decision, "found 5 (the speed layer has 5)" in str(result.reason)) == (
        "refused",
        True,
    )
    one.expect(against_speed(1.5, "warning"))
    (result,) = one.batch(hour)
    assert (result.decision, quality(one, hour)["warnings"][0]["unexpected_count"]) == (
        "accepted",
        None,
    )
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
