"""kill -9 of the real speed job, started by the real command line: nothing lost, nothing twice."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

from world import World, event

ROOT = Path(__file__).resolve().parents[2]


@contextmanager
def _speed(one: World, temporary: Path) -> Iterator[subprocess.Popen[bytes]]:
    """The speed job as an operator starts it, in a process group of its own."""
    temporary.mkdir(exist_ok=True)
    log = (temporary / "speed.log").open("ab")
    command = [sys.executable, "-m", "anabranch.cli", "speed", one.name, "--conf", str(one.folder)]
    process = subprocess.Popen(
        command, cwd=ROOT, stdout=log, stderr=log, start_new_session=True, env=os.environ | {"TMPDIR": str(temporary)}
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(timeout=30)
        log.close()


def _send(one: World, count: int, prefix: str) -> None:
    now = datetime.now(UTC)
    one.send([(i % 2, now, event(f"{prefix}-{i}", now)) for i in range(count)])


def _await(condition: Callable[[], bool], what: str, temporary: Path, seconds: float = 150) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        log = (temporary / "speed.log").read_text()[-3000:]
        assert time.monotonic() < deadline, f"expected {what} within {seconds} s; the speed job's log ends:\n{log}"
        time.sleep(0.1)


def _published(one: World) -> int:
    return sum(one.state.position.offsets.values())


def test_a_speed_job_killed_at_random_loses_and_repeats_nothing(world: Callable[..., World]) -> None:
    one = world(speed={"trigger": "1 second", "max_offsets_per_trigger": 300})
    one.topic()
    one.apply()
    temporary = Path(tempfile.mkdtemp(prefix="anabranch-test-", dir=one.folder))
    chance = random.Random(7)
    for round_ in range(2):
        _send(one, 1500, f"round{round_}")
        before = _published(one)
        with _speed(one, temporary) as process:
            _await(lambda b=before: _published(one) > b, "a first micro-batch to be published", temporary)  # type: ignore[misc]
            # Somewhere in the micro-batches that follow: staging, publishing, or between the two.
            pause = time.monotonic() + chance.uniform(0, 2)
            while time.monotonic() < pause:
                _send(one, 20, f"round{round_}-{time.monotonic_ns()}")
            os.killpg(process.pid, signal.SIGKILL)
            process.wait(timeout=30)
        # The hazard: it died with work left, and its checkpoint is still lying there.
        assert _published(one) < len(one.sent)
        assert list(temporary.glob("anabranch-checkpoint-*"))
    with _speed(one, temporary) as process:
        _await(lambda: _published(one) == len(one.sent), "the restarted job to reach the head", temporary)
        assert one.contents() == one.acknowledged()
        # Told to stop, it stops between micro-batches, by itself and cleanly.
        process.terminate()
        assert process.wait(timeout=60) == 0, (temporary / "speed.log").read_text()[-3000:]
    assert one.contents() == one.acknowledged()
