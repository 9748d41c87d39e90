"""The soak: producer, speed layer, batch layer and maintenance together, and faults at random, from a seed.

`make soak MINUTES=10 SEED=1`. Exit code 0 only if at the end every acknowledged record is in `main` exactly once, or
accounted for by name. The same seed does the same things in the same order; how far a process had come when one of
them hit it is the machine's own.
"""

from __future__ import annotations

import functools
import os
import random
import shutil
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import click

from anabranch import hours
from anabranch.dev import audit, services
from anabranch.dev.live import Live
from anabranch.dev.produce import STREAM, produce_events
from anabranch.dev.story import Story
from anabranch.dev.workspace import Running, Workspace, main, open_workspace
from anabranch.errors import Terminal
from anabranch.fail_points import FAIL_AT, Step
from anabranch.state import load_state

if TYPE_CHECKING:
    from anabranch.session import Job

RATE = 100
EVENTS_AN_HOUR = 1_500
# Slow enough that past hours wait for the speed layer all along.
THROTTLED = {"trigger": "1 second", "max_offsets_per_trigger": 200}
# How long a fault waits for something to be published since the last one.
_PATIENCE = 45.0
_SPEED_STEPS = [s for s in Step if s.label.startswith(("speed.", "commit."))]
_BATCH_STEPS = [s for s in Step if s.label.startswith(("batch.", "commit.", "ledger.", "seal."))]


class Soak:
    """One run: what is alive, what was done to it, and by which dice."""

    def __init__(self, story: Story, space: Workspace, job: Job, seed: int) -> None:
        self._story, self._space, self._job = story, space, job
        self._dice = random.Random(seed)
        self._speed: list[Running] = []
        self._batch: list[Running] = []
        self.faults: Counter[str] = Counter()
        self._faults: list[Callable[[], None]] = [
            self._kill_speed,
            self._kill_speed,
            self._fail_speed,
            self._fail_speed,
            self._second_speed,
            self._pause_speed,
            self._delete_checkpoints,
            self._kill_batch,
            self._fail_batch,
            self._fail_batch,
            self._two_batches,
            self._restate,
            self._maintain,
            functools.partial(self._hang, "kafka"),
            functools.partial(self._hang, "s3"),
            functools.partial(self._cut, "kafka"),
            functools.partial(self._cut, "s3"),
        ]

    def run(self, seconds: float) -> None:
        """Do one thing after the other until the time is over, keeping both layers alive between them."""
        ends = time.monotonic() + seconds
        while time.monotonic() < ends:
            self._keep_alive()
            self._await_progress()
            time.sleep(self._dice.uniform(0, 8))
            self._dice.choice(self._faults)()

    def stop(self) -> None:
        """End all that is alive, roughly."""
        for running in (*self._speed, *self._batch):
            running.kill()

    def _keep_alive(self) -> None:
        self._speed = [r for r in self._speed if r.code is None]
        self._batch = [r for r in self._batch if r.code is None]
        if not self._speed:
            self._start_speed()
        if not self._batch:
            self._start_batch()

    def _start_speed(self, **environment: str) -> Running:
        self._speed.append(self._space.start("speed", STREAM, **environment))
        return self._speed[-1]

    def _start_batch(self, *arguments: str, **environment: str) -> Running:
        self._batch.append(self._space.start("batch", STREAM, *arguments, **environment))
        return self._batch[-1]

    def _await_progress(self) -> None:
        """So that there is something to break: whoever was started may take its time until it publishes."""
        before, deadline = self._progress(), time.monotonic() + _PATIENCE
        while self._progress() == before and time.monotonic() < deadline:
            time.sleep(0.5)

    def _did(self, kind: str, words: str) -> None:
        self.faults[kind] += 1
        moment = f"{self._story.seconds:5.0f} s"
        position, accepted = self._progress()
        self._story.say(f"{moment}  {words}; position {position:,}, {len(accepted)} hours accepted")

    def _progress(self) -> tuple[int, list[str]]:
        """How many offsets the speed layer has published, and which hours are accepted."""
        state = load_state(self._job.lake, self._job.stream.table)
        return sum(state.position.offsets.values()), sorted(state.accepted)

    # What is done to them.
    def _kill_speed(self) -> None:
        for running in self._speed:
            running.kill()
        self._did("kill -9 speed", "kill -9 for the speed layer")

    def _fail_speed(self) -> None:
        self._fail("speed", self._speed, _SPEED_STEPS, self._start_speed)

    def _fail_batch(self) -> None:
        self._fail("batch", self._batch, _BATCH_STEPS, self._start_batch)

    def _fail(self, layer: str, alive: list[Running], steps: list[Step], start: Callable[..., Running]) -> None:
        chosen = self._dice.choice(steps)
        after = f"{Step.COMMIT_REQUEST_LOST.label}," if chosen in (Step.COMMIT_DOUBTED, Step.COMMIT_FENCED) else ""
        step = f"{after}{chosen.label}:{self._dice.randint(1, 3)}"
        for running in alive:
            running.kill()
        start(**{FAIL_AT: step})
        self._did(f"fail point {layer}", f"the {layer} layer again, to die at {step}")
        time.sleep(self._dice.uniform(15, 25))

    def _second_speed(self) -> None:
        self._start_speed()
        self._did("second speed", "a second speed layer beside the first")
        time.sleep(20)

    def _pause_speed(self) -> None:
        if not self._speed:
            return
        hung = self._dice.choice(self._speed)
        hung.pause()
        other = self._start_speed()
        self._did("SIGSTOP speed", "SIGSTOP for a speed layer, another takes over")
        time.sleep(self._dice.uniform(15, 25))
        hung.resume()
        time.sleep(5)
        other.kill()

    def _delete_checkpoints(self) -> None:
        for checkpoint in self._space.checkpoints():
            shutil.rmtree(checkpoint, ignore_errors=True)
        self._did("checkpoints deleted", "every checkpoint deleted, under whoever runs")

    def _kill_batch(self) -> None:
        for running in self._batch:
            running.kill()
        self._did("kill -9 batch", "kill -9 for the batch layer")

    def _two_batches(self) -> None:
        self._start_batch()
        self._did("two batch runs", "a second batch run beside the first")
        time.sleep(10)

    def _restate(self) -> None:
        _, accepted = self._progress()
        if not accepted:
            return
        hour = self._dice.choice(accepted)
        self._start_batch("--hour", hour, "--restate")
        self._did("restatement", f"hour {hour} restated")
        time.sleep(15)

    def _maintain(self) -> None:
        self._batch.append(self._space.start("maintain", STREAM))
        self._did("maintenance", "maintenance beside everybody")
        time.sleep(5)

    def _cut(self, service: str) -> None:
        found = self._space.services
        os.kill(self._pid(service), signal.SIGKILL)
        seconds = self._dice.uniform(0, 10)
        time.sleep(seconds)
        services.up(found.home, access_key=found.access_key, secret_key=found.secret_key)
        self._did(f"{service} killed", f"{service} killed with every connection to it, started after {seconds:.0f} s")

    def _pid(self, service: str) -> int:
        pid = next(s.pid for s in services.status(self._space.services.home) if s.service == service)
        assert pid is not None, f"{service} is not alive"
        return pid

    def _hang(self, service: str) -> None:
        pid = self._pid(service)
        seconds = self._dice.uniform(3, 10)
        os.kill(pid, signal.SIGSTOP)
        try:
            time.sleep(seconds)
        finally:
            os.kill(pid, signal.SIGCONT)
        self._did(f"{service} hangs", f"{service} answered nobody for {seconds:.0f} s")


def tell(story: Story, minutes: float, seed: int) -> None:
    """The whole soak. Raises Refused if `main` is not exact at its end."""
    story.title(f"A soak of {minutes:g} minutes, seed {seed}: everything at once, and faults at random.")
    story.step("Kafka, S3, past hours that wait, and live events")
    with open_workspace(story, [STREAM]) as space:
        job = space.job(STREAM)
        try:
            _tell(story, space, job, minutes, seed)
        finally:
            job.kafka.close()


def _tell(story: Story, space: Workspace, job: Job, minutes: float, seed: int) -> None:
    count = max(4, round(minutes * 1.5))
    until = hours.start_of(hours.hour_of(datetime.now(UTC) - job.stream.batch.grace))
    past = produce_events(
        job.environment.kafka, job.stream.topic, events=count * EVENTS_AN_HOUR, hours=count, until=until, seed=seed,
        dirty=True,
    )  # fmt: skip
    story.say(f"Kafka acknowledged {past.acknowledged:,} records of {count} past hours; {RATE} a second are added live")
    space.run("apply", STREAM, show=False)
    space.set_speed(STREAM, **THROTTLED)
    live = Live(job, RATE, seed + 1)
    soak = Soak(story, space, job, seed)
    story.step("Faults")
    with live.running():
        try:
            soak.run(minutes * 60)
        finally:
            with suppress(Exception):
                soak.stop()
    if live.sent.failed or past.failed:
        raise Terminal(f"expected every send to be acknowledged, found {live.sent.failed + past.failed} failed")
    story.step("Both layers once more, undisturbed, to their end")
    space.set_speed(STREAM)
    space.run("batch", STREAM, show=False)
    space.run("speed", STREAM, "--available-now", show=False)
    space.run("merge", STREAM)
    space.run("hours", STREAM)
    story.step("Every record that Kafka acknowledged against main, by partition, offset and content")
    for kind, number in sorted(soak.faults.items()):
        story.say(f"{kind:<22} {number:>3}")
    story.say(f"{sum(soak.faults.values())} faults in all")
    audit.tell(story, job, [*past.acks, *live.sent.acks], audit.game_event_as_sent)


@click.command()
@click.option("--minutes", type=click.FloatRange(min=0.5), default=10.0, show_default=True, help="How long.")
@click.option("--seed", type=int, default=1, show_default=True, help="Which faults, and when.")
def command(minutes: float, seed: int) -> None:
    """Run everything together, break it at random, and compare exactly."""
    sys.exit(main(functools.partial(tell, minutes=minutes, seed=seed)))


if __name__ == "__main__":
    command()
