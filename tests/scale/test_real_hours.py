"""An hour of 900 micro-batches with everything real, accepted while the speed layer goes on with
the next one."""

from __future__ import annotations

import os

import pytest
from real_hours import MOST_FILES, STREAM, real_hours

from anabranch.offsets.hours import shift

# Fewer for a quick look: `SCALE_MICRO_BATCHES=60`.
MICRO_BATCHES = int(os.environ.get("SCALE_MICRO_BATCHES", "900"))
# Enough for the speed layer to be at work all the time that the batch layer takes.
NEXT = max(60, MICRO_BATCHES // 4)


@pytest.mark.timeout(3600)
def test_an_hour_of_900_micro_batches_is_accepted_beside_the_next_one_with_each_record_once() -> (
    None
):
    with real_hours() as one:
        following = one.newest
        hour = shift(following, -1)
        one.send(hour, MICRO_BATCHES)
        one.send(following, NEXT)
        one.apply()

        one.start_speed()
        one.until_behind(hour)
        one.report_looks(hour)
        assert len(one.micro_batches(hour)) >= MICRO_BATCHES
        assert max(x.files for x in one.looks) <= MOST_FILES

        one.run_beside("batch", STREAM, "--hour", hour)
        view = one.hours()[hour]
        assert (view["state"], view["served"], view["revision"]) == ("accepted", "batch", 1)
        assert view["diff"] == {"missing": 0, "extra": 0, "changed": 0}

        one.drain()
        one.report_looks(following)
        assert max(x.files for x in one.looks) <= MOST_FILES
        one.report_windows(one.windows(hour, MICRO_BATCHES // 5))
        one.space.run("batch", STREAM)
        one.require_exact()
        # The last hour may have ended meanwhile, without a record.
        states = {h: v["state"] for h, v in one.hours().items() if h <= following}
        assert states == {hour: "accepted", following: "accepted"}
