"""`anabranch health` of the real job: idle, hung, killed again and again."""

import time
from pathlib import Path

from commands import started
from world import Make

from anabranch.common.health import find_fault, is_running, read_record


def fault(file: Path, within: float | None = None, liveness: bool = False) -> str | None:
    return find_fault(read_record(file), is_running(file), time.time(), within, liveness)


def test_an_idle_job_is_healthy_a_hung_is_not(world: Make, tmp_path: Path) -> None:
    one, file = world(speed={"trigger": "1 second"}, create=2), tmp_path / "speed.health"

    def found(words: str, **options: float) -> bool:
        return words in str(fault(file, **options))

    assert found("found none: the job has not started")
    with started(one, "speed", one.name, "--health", str(file)) as command:
        command.until(lambda: fault(file, within=5) is None, "an idle job to be healthy")
        command.pause()
        command.until(
            lambda: found("idle trigger within 5 s", within=5), "a job that hangs to be unhealthy"
        )
        command.resume()
        command.until(lambda: fault(file, within=5) is None, "it to be healthy again")
        command.kill()
        assert found("its process has ended")
    with started(one, "speed", one.name, "--health", str(file)) as command:
        command.until(lambda: found("since the start"), "the next process to start")
    one.send_now(20, "a")
    with started(one, "speed", one.name, "--health", str(file)) as command:
        command.until(
            lambda: found("2 restarts within 15 minutes"),
            "a job that was restarted twice to be unhealthy",
        )
        assert fault(file, liveness=True) is None
        command.until(lambda: one.published == 20, "it to publish all the same")
        assert command.terminate(60) == 0, command.log[-3000:]
    # It was stopped: the next start is no restart.
    assert not file.exists()
