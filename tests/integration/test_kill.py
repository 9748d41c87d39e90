"""kill -9 of the real speed job, started by the real command line: nothing lost, nothing twice."""

import random
import signal
import time
from collections.abc import Callable

import pytest
from commands import started
from waiting import wait_for
from world import World, past_hour, spread


@pytest.mark.full
def test_a_speed_job_killed_at_random_is_exact(world: Callable[..., World]) -> None:
    one = world(speed={"trigger": "1 second", "max_offsets_per_trigger": 300})
    one.create()
    chance = random.Random(7)
    for round_ in range(2):
        one.send_now(1500, f"round{round_}")
        before = one.published
        with started(one, "speed", one.name) as command:
            command.until(lambda b=before: one.published > b, "a first micro-batch to be published")  # type: ignore[misc]
            # Somewhere in the micro-batches that follow: staging, publishing, or between the two.
            pause = time.monotonic() + chance.uniform(0, 2)
            while time.monotonic() < pause:
                one.send_now(20, f"round{round_}-{time.monotonic_ns()}")
            command.kill()
        # The hazard: it died with work left, and its checkpoint is still lying there.
        assert one.published < len(one.sent)
        assert list(command.temporary.glob("anabranch-checkpoint-*"))
    with started(one, "speed", one.name) as command:
        command.until(lambda: one.published == len(one.sent), "the restarted job to reach the head")
        assert one.contents() == one.acknowledged()
        # On a stop, it ends between micro-batches, by itself and cleanly.
        assert command.terminate(60) == 0, command.log[-3000:]
    assert one.contents() == one.acknowledged()


@pytest.mark.full
@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGINT])
def test_a_batch_job_ends_on_a_signal(world: Callable[..., World], sent: signal.Signals) -> None:
    one, hour = world(), past_hour(1)
    # The quality gate needs Spark.
    one.expect({"type": "expect_column_values_to_not_be_null", "kwargs": {"column": "event_id"}})
    one.topic()
    one.send(spread(hour, 100, "e"))
    one.apply()
    with started(one, "batch", one.name) as command:
        command.until(
            lambda: any("SparkSubmit" in line for line in command.command_lines()),
            "Spark's JVM to start",
        )
        command.send(sent)
        assert command.wait(60) == 75, command.log[-3000:]
        wait_for(lambda: not command.is_alive(), "the JVM to end with it", 20)
    assert not one.state.is_accepted(hour)
    [result] = one.batch(hour)
    assert result.decision == "accepted"
    assert one.contents() == one.acknowledged()
