"""The soak test: producer, speed layer, batch layer and maintenance together, with random faults
from a seed.

Run `make soak MINUTES=10 SEED=1`. The exit code is 0 only if at the end every acknowledged record
is in `main` exactly once, is a dead letter or a duplicate, and the audit agrees. The same seed
gives the same faults in the same order; the progress of a process at the time of a fault depends on
the machine.
"""

import functools
import sys
from contextlib import ExitStack, suppress
from datetime import UTC, datetime

import click
from demo import audit
from demo.live import Live
from demo.story import Story
from demo.workspace import ExternalServices, Workspace, main, open_workspace

from anabranch.common.errors import Terminal
from anabranch.dev.producers.produce import STREAM, TOPIC_CONFIGS, produce_events
from anabranch.iceberg.lake import Lake
from anabranch.job import Job
from anabranch.kafka.client import create_topic
from anabranch.offsets import hours
from soak.cutting_proxy import CuttingProxy
from soak.faults import Faults, Service
from soak.interference import Gateway, Interference
from soak.strange_stamps import ANY_STAMP

RATE = 100
EVENTS_AN_HOUR = 1_500
PARTITIONS = 3
# Slow enough that past hours wait for the speed layer during the whole soak.
THROTTLED = {"trigger": "1 second", "max_offsets_per_trigger": 200}


def run(story: Story, minutes: float, seed: int, only: tuple[str, ...] = ()) -> None:
    """Run the whole soak. Raises Refused if `main` is not exact at its end."""
    story.title(
        f"A soak of {minutes:g} minutes, seed {seed}: everything at once, and faults at random."
    )
    story.step("Kafka, S3, past hours that wait, and live events")
    with ExitStack() as stack:
        kafka, s3 = (stack.enter_context(CuttingProxy(seed + i).running()) for i in range(2))
        space = stack.enter_context(
            open_workspace(story, STREAM, ExternalServices(kafka_proxy=kafka, s3_proxy=s3))
        )
        job = space.job(STREAM)
        stack.callback(job.kafka.close)
        _run(story, space, job, {"kafka": kafka, "s3": s3}, minutes, seed, only)


def _run(
    story: Story,
    space: Workspace,
    job: Job,
    proxies: dict[Service, CuttingProxy],
    minutes: float,
    seed: int,
    only: tuple[str, ...],
) -> None:
    count = max(4, round(minutes * 1.5))
    until = hours.start_of(hours.hour_of(datetime.now(UTC) - job.stream.batch.grace))
    create_topic(job.environment.kafka, job.stream.topic, PARTITIONS, TOPIC_CONFIGS | ANY_STAMP)
    past = produce_events(
        job.environment.kafka, job.stream.topic, events=count * EVENTS_AN_HOUR, hours=count,
        until=until, seed=seed, dirty=True,
    )  # fmt: skip
    of_past = f"{past.acknowledged:,} records of {count} past hours"
    story.say(f"Kafka acknowledged {of_past}; {RATE} a second are added live")
    space.run("apply", STREAM, show=False)
    space.set_speed(STREAM, **THROTTLED)
    live = Live(job, RATE, seed + 1)
    interference = Interference(space.folder / "interference")
    faults = Faults(story, space, job, interference, proxies, seed, only)
    story.step("Faults")
    # A separate catalog client for the gateway's thread.
    with (
        Gateway(interference.requests, Lake(job.environment).catalog).running() as gateway,
        live.running(),
    ):
        try:
            faults.run(minutes * 60)
        finally:
            with suppress(Exception):
                faults.stop()
    for sent in (past, live.sent, faults.sent):
        if sent.failed:
            found = f"{sent.failed} failed: {sent.first_error}"
            raise Terminal(f"expected every send to be acknowledged, found {found}")
    story.step("Both layers once more, undisturbed, to their end")
    space.set_speed(STREAM)
    space.run("batch", STREAM, show=False)
    space.run("speed", STREAM, "--available-now", show=False)
    space.run("merge", STREAM)
    space.run("hours", STREAM)
    story.step("Every acknowledged record against main, by partition, offset and content")
    for kind, number in sorted((*faults.counts.items(), *faults.exit_codes().items())):
        story.say(f"{kind:<26} {number:>5}")
    others = f"refused {gateway.refused}, lost {gateway.dropped}"
    story.say(f"requests that landed late   {gateway.landed:>4}, {others}")
    for name, proxy in (("Kafka", proxies["kafka"]), ("S3", proxies["s3"])):
        story.say(f"cut short of {name:<14} {proxy.bodies:>4} bodies, {proxy.answers} answers")
    story.say(f"{faults.counts.total()} faults in all")
    acks = [*past.acks, *live.sent.acks, *faults.sent.acks]
    audit.run_audit(story, job, acks, audit.game_event_as_sent)
    space.run("audit", STREAM)
    faults.require_explained()


@click.command()
@click.option(
    "--minutes", type=click.FloatRange(min=0.5), default=10.0, show_default=True, help="How long."
)
@click.option("--seed", type=int, default=1, show_default=True, help="Which faults, and when.")
@click.option("--only", multiple=True, help="Only faults with this word in their name; repeatable.")
def command(minutes: float, seed: int, only: tuple[str, ...]) -> None:
    """Run everything together, break it at random, and compare exactly."""
    sys.exit(main(functools.partial(run, minutes=minutes, seed=seed, only=only)))


if __name__ == "__main__":
    command()
