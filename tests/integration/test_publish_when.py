"""`speed.publish`: a publish waits for enough offsets, or for the time that a record may wait."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from running import publishes, speed_running
from waiting import wait_for
from world import World


@pytest.mark.parametrize("within", ["1 hour", pytest.param("3 seconds", marks=pytest.mark.full)])
def test_a_publish_waits_for_enough_offsets_or_for_the_time_that_a_record_may_wait(
    world: Callable[..., World], within: str
) -> None:
    one = world(speed={"trigger": "1 second", "publish": {"records": 50, "within": within}})
    one.topic()
    one.apply()
    noted: list[int] = []
    with speed_running(one, lambda: noted.append(one.published)):
        # The first micro-batch waits for nothing.
        one.send_now(10, "a")
        wait_for(lambda: one.published == 10, "the first records to be published")
        one.send_now(20, "b")
        if within == "1 hour":
            triggers = len(noted)
            wait_for(lambda: len(noted) >= triggers + 3, "triggers that find too few offsets")
            assert one.published == 10
            one.send_now(40, "c")
        wait_for(lambda: one.published == len(one.sent), "what waited to be published")
    sizes = [int(snapshot.summary["added-records"]) for snapshot in publishes(one)]
    assert sizes == ([60, 10] if within == "1 hour" else [20, 10])
    one.send_now(5, "d")
    one.speed()
    assert one.offsets() == sorted((r.partition, r.offset) for r in one.sent)
