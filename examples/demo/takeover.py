"""The demo of a takeover: the file sink of another job breaks, and its records and Kafka's become
one table, each once, while the producer goes on.

Run `make demo-takeover`. The exit code is 0 only if `main` has every acknowledged record once.
"""

from __future__ import annotations

import shutil
import sys
from collections import Counter
from datetime import UTC, datetime
from pathlib import Path

from kafka import KafkaAdminClient, TopicPartition

from anabranch.common.errors import Refused, Terminal
from anabranch.dev.producers.events import Sent, sha256
from anabranch.dev.producers.produce import STREAM, produce_events
from anabranch.job import Job
from anabranch.offsets import hours
from demo.audit import game_event_as_sent
from demo.live import Live
from demo.old_job import EACH
from demo.story import Story, poll
from demo.workspace import Workspace, main, open_workspace

EVENTS = 200_000
PAST_HOURS = 5
RATE = 50


def run(story: Story) -> None:
    """Run the whole demo. Raises Refused if `main` is not exact at its end."""
    story.title("A file sink of Spark breaks; its records move to one exact table, each once.")
    story.step("A Kafka broker, an S3 server, and the job of another team")
    with open_workspace(story, STREAM) as space:
        job = space.job(STREAM)
        with job.kafka:
            _run(story, space, job)


def _run(story: Story, space: Workspace, job: Job) -> None:
    folder = space.folder / "old-events"
    past = _send(story, job)
    _write_by_sink(story, space, job, folder)
    story.step("The sink breaks: a log file is cut short, the checkpoint is deleted")
    _break(folder)
    story.say("Its own query would now fail, or begin again and write every record twice")
    _delete_half(story, space, job, past)
    live = Live(job, RATE, dirty=False)
    with live.running():
        story.step(f"The takeover, beside {RATE} live events a second")
        space.run("apply", STREAM, show=False)
        space.run("speed", STREAM, "--available-now", show=False)
        space.run("import", STREAM, "--from", str(folder), "--takeover")
    story.step("The producer stops; the stream reads the rest")
    space.run("speed", STREAM, "--available-now", show=False)
    _compare(story, job, [past, live.sent])


def _send(story: Story, job: Job) -> Sent:
    until = hours.start_of(hours.hour_of(datetime.now(UTC)))
    with story.awaiting(f"sending {EVENTS:,} events"):
        sent = produce_events(
            job.environment.kafka, job.stream.topic, events=EVENTS, hours=PAST_HOURS, until=until
        )
    if sent.acknowledged != EVENTS:
        raise Terminal(f"expected {EVENTS} acknowledged events, found {sent.acknowledged}")
    story.say(f"Kafka acknowledged {EVENTS:,} events of {PAST_HOURS} hours")
    return sent


def _write_by_sink(story: Story, space: Workspace, job: Job, folder: Path) -> None:
    schema = ", ".join(f"{column.name} {column.type}" for column in job.stream.columns)
    topic, servers = job.stream.topic, space.services.bootstrap_servers
    running = space.start(str(folder), topic, servers, schema, log="old", module="demo.old_job")
    with story.awaiting("another team's file sink"):
        poll(lambda: None if running.code is None else True, "the file sink to end", 600)
    if running.code != 0:
        running.require_alive()
    files = len(list(folder.glob("part-*.parquet")))
    story.say(f"Spark's file sink wrote them to {files} files, {EACH:,} in a micro-batch")


def _break(folder: Path) -> None:
    log = sorted(
        (path for path in (folder / "_spark_metadata").iterdir() if path.name[0].isdigit()),
        key=lambda path: int(path.name.partition(".")[0]),
    )
    # In the middle: Spark itself goes on past one at the end.
    log[len(log) // 2].write_text("v1\n{")
    shutil.rmtree(f"{folder}-checkpoint")


def _delete_half(story: Story, space: Workspace, job: Job, past: Sent) -> None:
    """Delete the older half of the records from Kafka, as its retention does."""
    counts = Counter(ack.partition for ack in past.acks)
    admin = KafkaAdminClient(bootstrap_servers=space.services.bootstrap_servers)
    try:
        topic = job.stream.topic
        admin.delete_records({TopicPartition(topic, p): n // 2 for p, n in counts.items()})
    finally:
        admin.close()
    story.say("Kafka's retention deletes the older half of the records")


def _compare(story: Story, job: Job, sent: list[Sent]) -> None:
    acknowledged = Counter(ack.sha256 for one in sent for ack in one.acks)
    with story.awaiting("comparing"):
        rows = job.lake.load(job.stream.table).scan().to_arrow().to_pylist()
    found = Counter(sha256(game_event_as_sent(row)) for row in rows)
    imported = sum(row["kafka_partition"] == -1 for row in rows)
    story.say(
        f"{acknowledged.total():,} records were acknowledged; main has {len(rows):,} rows, "
        f"{imported:,} of them imported"
    )
    if found != acknowledged:
        raise Refused(
            f"main lacks {(acknowledged - found).total()} records and has "
            f"{(found - acknowledged).total()} too many; that must not be, please report it"
        )
    story.say(f"Every record once, after {story.seconds:.0f} s.", "bold green")


if __name__ == "__main__":
    sys.exit(main(run, is_brief=True))
