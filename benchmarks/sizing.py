"""Cost of a record, a micro-batch and an hour: CPU seconds, S3 requests, bytes. `make bench
WHAT=sizing`.

The figures are differences between runs, which excludes the cost of starting a job: CPU seconds of
all processes of a job, as the kernel counts them, and requests that pass a front of the S3 server.
The figures and rules are in docs/reference/sizing.md.
"""

from __future__ import annotations

import resource
import sys
from collections import Counter
from dataclasses import dataclass
from datetime import UTC, datetime

import numpy as np
import yaml
from demo.story import Story, poll
from demo.workspace import Workspace, main, open_workspace
from flaky_s3 import FlakyS3, running_flaky_s3
from running import PUBLISHED
from runs import children_cpu

from anabranch.common.errors import Terminal
from anabranch.dev.producers.produce import STREAM, produce_events
from anabranch.dev.services.processes import HOST
from anabranch.iceberg.snapshots import heads
from anabranch.offsets.hours import end_of, hour_of, shift

FEW, MANY = 50_000, 1_050_000
SMALL, LARGE = 1_000, 250_000
PARTITIONS = 6
METHODS = ("GET", "HEAD", "PUT", "POST", "DELETE")


@dataclass(frozen=True)
class Cost:
    """Cost of one command: CPU seconds, requests by method, micro-batches published."""

    cpu: float
    requests: Counter[str]
    batches: int

    def values(self) -> list[float]:
        return [self.cpu, *(float(self.requests[method]) for method in METHODS)]


class Meter:
    """Runs commands of a workspace to their end, and says what each cost."""

    def __init__(self, space: Workspace, front: FlakyS3) -> None:
        self._space, self._front = space, front

    def run(self, *arguments: str) -> Cost:
        self._front.methods.clear()
        before = children_cpu()
        # Like a long-running job: these options replace the workspace's, which disable the second
        # compiler.
        running = self._space.start(
            *arguments, JDK_JAVA_OPTIONS=f"-Djava.io.tmpdir={self._space.temporary}"
        )
        self._space.story.command(arguments)
        poll(
            lambda: None if running.code is None else True, f"anabranch {arguments[0]} to end", 1200
        )
        if running.code != 0:
            raise Terminal(running.log_tail(20))
        batches = sum(bool(PUBLISHED.search(event)) for event in running.events())
        cost = Cost(children_cpu() - before, Counter(self._front.methods), batches)
        self._space.story.say(
            f"{cost.cpu:.0f} CPU seconds, {cost.batches} micro-batches, {dict(cost.requests)}"
        )
        return cost


def go_through(front: FlakyS3, space: Workspace) -> None:
    """Route the S3 requests of the workspace's next commands through the front."""
    file = space.conf / "anabranch.yaml"
    environment = yaml.safe_load(file.read_text())
    environment["s3"]["endpoint"] = f"http://{HOST}:{front.port}"
    file.write_text(yaml.safe_dump(environment))


def run(story: Story) -> None:
    """Produce, run both jobs, solve for the parts, and print them."""
    story.title("What a record, a micro-batch and an hour cost")
    with (
        open_workspace(story, STREAM) as space,
        running_flaky_s3(space.services.s3_port, seed=0) as front,
    ):
        go_through(front, space)
        meter, job = Meter(space, front), space.job(STREAM)
        meter.run("apply", STREAM)
        kafka, topic = job.environment.kafka, job.stream.topic
        # The batch layer first: records with past timestamps after the seal would not be in that
        # hour.
        last = shift(hour_of(datetime.now(UTC)), -1)
        hours, sent = {shift(last, -1): FEW, last: MANY}, 0
        for hour, events in hours.items():
            sent += produce_events(
                kafka, topic, events=events, hours=1, until=end_of(hour), partitions=PARTITIONS
            ).acknowledged
        batch = [
            ([1, n / 1e6], meter.run("batch", STREAM, "--hour", hour).values())
            for hour, n in hours.items()
        ]
        meter.run("speed", STREAM, "--available-now")
        # Three unknowns (start, micro-batch, record), three runs.
        speed = []
        for events, at_once in ((FEW, LARGE), (FEW, SMALL), (MANY, LARGE)):
            sent += produce_events(kafka, topic, events=events).acknowledged
            space.set_speed(STREAM, max_offsets_per_trigger=at_once)
            cost = meter.run("speed", STREAM, "--available-now")
            speed.append(([1, cost.batches, events / 1e6], cost.values()))
        story.say(
            f"the speed layer, of {PARTITIONS} partitions: its start, a micro-batch, a million "
            "records"
        )
        _table(story, speed, ["start", "micro-batch", "million records"])
        story.say("the batch layer: an hour, a million records")
        _table(story, batch, ["hour", "million records"])
        table = job.lake.load(job.stream.table)
        for branch in ("speed", "batch"):
            tasks = list(table.scan(snapshot_id=heads(table)[branch]).plan_files())
            rows, size = (
                sum(t.file.record_count for t in tasks),
                sum(t.file.file_size_in_bytes for t in tasks),
            )
            story.say(
                f"branch {branch}: {rows:,} rows, {len(tasks)} files, {size / rows:.0f} bytes a row"
            )
        log = sum(
            f.stat().st_size
            for f in space.folder.glob(f".anabranch/data/kafka/{job.stream.topic}-*/*.log")
        )
        story.say(f"Kafka: {log / sent:.0f} bytes a record, compressed by its producer")
        peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
        story.say(f"largest process: {peak / 1024:.0f} MB, of jobs with spark.driver.memory 2g")
        job.kafka.close()


def _table(story: Story, runs: list[tuple[list[float], list[float]]], parts: list[str]) -> None:
    known = np.array([row for row, _ in runs])
    solved, *_ = np.linalg.lstsq(known, np.array([values for _, values in runs]), rcond=None)
    rows = [
        (part, *(f"{value:.1f}" for value in row))
        for part, row in zip(parts, solved.tolist(), strict=True)
    ]
    story.table(("part", "CPU s", *METHODS), rows)


if __name__ == "__main__":
    sys.exit(main(run))
