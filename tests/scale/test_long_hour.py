"""An hour of 900 micro-batches with everything real; SCALE_MICRO_BATCHES=3600 for one each second.

The batch layer accepts the hours before it meanwhile, maintenance runs, the speed layer is killed
twice and the batch layer once. What a micro-batch costs at the hour's end is compared with its
beginning by S3 requests; CPU and wall seconds are printed.
"""

import os
import statistics

import pytest
from real_hours import MOST_FILES, STREAM, RealHours, real_hours

from anabranch.iceberg.manifests import content_by_hour
from anabranch.offsets.hours import shift

MICRO_BATCHES = int(os.environ.get("SCALE_MICRO_BATCHES", "900"))
WINDOW = MICRO_BATCHES // 12
BEFORE, AFTER = MICRO_BATCHES // 30, max(60, MICRO_BATCHES // 12)
# What a micro-batch at the end may ask of S3, by what one at the beginning asks.
GROWTH = 1.1


@pytest.mark.timeout(6 * 3600)
def test_an_hour_of_micro_batches_is_exact_and_as_cheap_at_its_end() -> None:
    with real_hours() as one:
        after = one.newest
        oldest, old, hour = (shift(after, -n) for n in (3, 2, 1))
        for h, count in ((oldest, BEFORE), (old, BEFORE), (hour, MICRO_BATCHES), (after, AFTER)):
            one.send(h, count)
        one.apply()
        one.start_speed()

        one.until_in(hour, 0.1, MICRO_BATCHES)
        one.run_beside("batch", STREAM, "--hour", oldest)
        _kill_batch(one, old)
        one.until_in(hour, 0.3, MICRO_BATCHES)
        one.run_beside("maintain", STREAM)
        _kill_speed(one, hour, 0.35)
        one.until_in(hour, 0.5, MICRO_BATCHES)
        one.run_beside("batch", STREAM, "--hour", old)
        one.run_beside("maintain", STREAM)
        left = content_by_hour(one.state.table, "speed", (oldest, old))
        assert not left, "the speed layer's files of them are left"
        _kill_speed(one, hour, 0.6)
        one.until_in(hour, 0.8, MICRO_BATCHES)
        one.run_beside("maintain", STREAM)
        assert [one.hours()[h]["state"] for h in (oldest, old)] == ["accepted", "accepted"]

        one.until_behind(hour)
        one.report_looks(hour)
        windows = one.windows(hour, WINDOW)
        one.report_windows(windows)
        assert len(one.micro_batches(hour)) >= MICRO_BATCHES
        assert max(x.files for x in one.looks) <= MOST_FILES
        ends = (windows[:3], windows[-3:])
        beginning, end = (statistics.mean(w.requests for w in some) for some in ends)
        assert end <= GROWTH * beginning

        one.run_beside("batch", STREAM, "--hour", hour)
        view = one.hours()[hour]
        assert (view["state"], view["served"], view["revision"]) == ("accepted", "batch", 1)
        assert view["diff"].items() >= {"missing": 0, "extra": 0, "changed": 0}.items()
        one.drain()
        one.space.run("batch", STREAM)
        one.space.run("maintain", STREAM)
        one.require_exact()


def _kill_speed(one: RealHours, hour: str, share: float) -> None:
    """kill -9 in the middle of the hour, then a start, as an operator would."""
    one.until_in(hour, share, MICRO_BATCHES)
    running = one.speed
    assert running.code is None
    running.kill()
    count = len(one.micro_batches(hour))
    one.space.story.say(f"kill -9 for the speed layer after {count} micro-batches of {hour}")
    one.report_windows(one.windows(hour, WINDOW))
    assert one.lag > 0
    one.start_speed()


def _kill_batch(one: RealHours, hour: str) -> None:
    """kill -9 for a batch run that is at work on the hour."""
    running = one.space.start("batch", STREAM, "--hour", hour, log="batch-killed")
    one.until(
        lambda: any("rebuilding hour" in e for e in running.events()),
        f"hour {hour} to be rebuilt",
        running,
    )
    running.kill()
    assert one.hours()[hour]["state"] != "accepted"
    one.space.story.say(f"kill -9 for the batch layer at work on {hour}")
