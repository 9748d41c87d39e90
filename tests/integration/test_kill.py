"""A signal to the real batch job, started by the real command line."""

import signal

import pytest
from commands import started
from expectations import entry
from waiting import wait_for
from world import Make, past_hour, spread


@pytest.mark.full
@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGINT])
def test_a_batch_job_ends_on_a_signal(world: Make, sent: signal.Signals) -> None:
    one, hour = world(), past_hour(1)
    # The quality gate needs Spark.
    one.expect(entry("expect_column_values_to_not_be_null", column="event_id"))
    one.topic()
    one.begin(spread(hour, 100, "e"))
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
