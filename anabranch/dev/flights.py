"""A second stream from its configuration file alone: 336,776 real flights, and an analyst's question.

`make demo-flights`. Exit code 0 only if every acknowledged flight is in `main` exactly once, field by field.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from anabranch import hours
from anabranch.dev import flights_data
from anabranch.dev.comparison import Comparison, Served, compare
from anabranch.dev.events import Ack, Sent, sha256
from anabranch.dev.story import Story
from anabranch.dev.workspace import Workspace, main, open_workspace
from anabranch.errors import Refused, Terminal

if TYPE_CHECKING:
    from anabranch.session import Job

STREAM = "flights"
PAST_HOURS = 2

ROUTES = """
SELECT origin, dest, count(*) AS flights, round(avg(arr_delay), 1) AS mean_arrival_delay
FROM travel.flights GROUP BY origin, dest HAVING count(*) >= 365 ORDER BY mean_arrival_delay DESC LIMIT 10
""".strip().replace("\n", " ")


def tell(story: Story) -> None:
    """The whole story. Raises Refused if `main` is not exact at its end."""
    story.title("Every flight that left New York's airports in 2013, as events, with nothing but its own file:")
    story.say("conf/streams/flights.yaml. Three minutes or so, in a temporary folder; Ctrl-C stops all of it.")
    story.step("A Kafka broker, an S3 server, the tables, and the flights sent by librdkafka")
    with open_workspace(story, [STREAM]) as space:
        job = space.job(STREAM)
        try:
            _tell(story, space, job)
        finally:
            job.kafka.close()


def _tell(story: Story, space: Workspace, job: Job) -> None:
    story.say(f"Kafka answers at {space.services.bootstrap_servers}, S3 at {space.services.s3_endpoint}")
    space.run("apply", STREAM, show=False)
    sent = _send(story, job)
    story.step("The speed layer publishes what is there, and ends")
    space.run("speed", STREAM, "--available-now", show=False)
    story.say(f"{_rows_of_main(job):,} rows in main, served by the speed layer")
    story.step("The batch layer proves the hours, and takes them over")
    space.run("batch", STREAM, show=False)
    space.run("hours", STREAM)
    story.step("The ten routes that arrive latest, of those flown every day")
    space.run("query", ROUTES)
    story.step("Every flight that Kafka acknowledged against main, by partition, offset and content")
    with story.awaiting("comparing"):
        comparison = comparison_of(job, sent)
    for line in comparison.sentences():
        story.say(line)
    if not comparison.is_exact:
        raise Refused("main differs from what Kafka acknowledged; that must not be, please report it")
    story.say(f"Exact, after {story.seconds:.0f} s.", "bold green")


def _send(story: Story, job: Job) -> Sent:
    # An hour can be sealed once its grace has passed, so that is where the past ends.
    until = hours.start_of(hours.hour_of(datetime.now(UTC) - job.stream.batch.grace))
    began = time.monotonic()
    with story.awaiting("sending flights") as told:
        count = 0

        def on_ack(ack: Ack) -> None:
            nonlocal count
            count += 1
            if count % 5_000 == 0:
                told(f"{count:,} of {flights_data.FLIGHTS:,} acknowledged")

        sent = flights_data.send(
            job.environment.kafka, job.stream.topic, hours=PAST_HOURS, until=until, on_ack=on_ack
        )  # fmt: skip
    if sent.failed or sent.acknowledged != flights_data.FLIGHTS:
        raise Terminal(
            f"flights: expected {flights_data.FLIGHTS:,} acknowledgements, found {sent.acknowledged:,}, and "
            f"{sent.failed:,} failed: {sent.first_error}"
        )
    story.say(
        f"Kafka acknowledged {sent.acknowledged:,} flights in {time.monotonic() - began:.1f} s (gzip, three "
        f"partitions), in the hours {', '.join(sent.by_hour())} (UTC)"
    )
    return sent


def _rows_of_main(job: Job) -> int:
    return int(job.lake.load(job.stream.table).scan().count())


def comparison_of(job: Job, sent: Sent) -> Comparison:
    """What was sent against what `main` serves, and the dead letters, of which there must be none."""
    rows = job.lake.load(job.stream.table).scan().to_arrow()
    letters = job.lake.load(job.stream.dead_letters_table).scan().to_arrow().to_pylist()
    dead = (Served(row["kafka_partition"], row["kafka_offset"], sha256(row["value"])) for row in letters)
    names = [column.name for column in job.stream.columns]
    served = (
        Served(row["kafka_partition"], row["kafka_offset"], sha256(as_sent(row, names)))
        for batch in rows.to_batches()
        for row in batch.to_pylist()
    )
    # No two flights share the key, so the batch layer has no duplicate to leave out.
    return compare(sent.acks, served, dead, lambda partition, offset: False)


def as_sent(row: Mapping[str, Any], names: list[str]) -> bytes:
    """The bytes of the event that a row came from, so that their hash can be compared with the acknowledged one's."""
    moment: datetime = row["time_hour"]
    event = {name: row[name] for name in names} | {"time_hour": f"{moment.astimezone(UTC):%Y-%m-%dT%H:%M:%SZ}"}
    return json.dumps(event, separators=(",", ":")).encode()


if __name__ == "__main__":
    sys.exit(main(tell))
