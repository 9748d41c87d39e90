"""A second stream by its configuration file alone: 336,776 real flights, and an analyst's query.

Run `make demo-flights`. The exit code is 0 only if every acknowledged flight is in `main` exactly
once, with the same fields.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from anabranch.common.errors import Terminal
from anabranch.dev import audit
from anabranch.dev.demo.story import Story
from anabranch.dev.demo.workspace import Workspace, main, open_workspace
from anabranch.dev.producers import flights_data
from anabranch.dev.producers.events import Ack, Sent
from anabranch.offsets import hours

if TYPE_CHECKING:
    from anabranch.config import Stream
    from anabranch.job import Job

STREAM = "flights"
PAST_HOURS = 2

ROUTES = """
SELECT origin, dest, count(*) AS flights, round(avg(arr_delay), 1) AS mean_arrival_delay
FROM travel.flights GROUP BY origin, dest HAVING count(*) >= 365
ORDER BY mean_arrival_delay DESC LIMIT 10
""".strip().replace("\n", " ")


def run(story: Story) -> None:
    """Run the whole demo. Raises Refused if `main` is not exact at its end."""
    story.title(
        "Every flight that left New York's airports in 2013, as events, with nothing but its own "
        "file:"
    )
    story.say(
        "conf/streams/flights.yaml. Three minutes or so, in a temporary folder; Ctrl-C stops all "
        "of it."
    )
    story.step("A Kafka broker, an S3 server, the tables, and the flights")
    with open_workspace(story, STREAM) as space:
        job = space.job(STREAM)
        with job.kafka:
            _run(story, space, job)


def _run(story: Story, space: Workspace, job: Job) -> None:
    story.say(
        f"Kafka answers at {space.services.bootstrap_servers}, S3 at {space.services.s3_endpoint}"
    )
    space.run("apply", STREAM, show=False)
    sent = _send(story, job)
    story.step("The speed layer publishes what is there, and ends")
    space.run("speed", STREAM, "--available-now", show=False)
    rows = job.lake.load(job.stream.table).scan().count()
    story.say(f"{rows:,} rows in main, served by the speed layer")
    story.step("The batch layer proves the hours, and takes them over")
    space.run("batch", STREAM, show=False)
    space.run("hours", STREAM)
    story.step("The ten routes that arrive latest, of those flown every day")
    space.run("query", ROUTES)
    story.step(
        "Every flight that Kafka acknowledged against main, by partition, offset and content"
    )
    audit.run_audit(story, job, sent.acks, as_sent_of(job.stream))


def _send(story: Story, job: Job) -> Sent:
    # The past ends with the last hour whose grace has passed: it can be sealed.
    until = hours.start_of(hours.hour_of(datetime.now(UTC) - job.stream.batch.grace))
    began = time.monotonic()
    with story.awaiting("sending flights") as show:
        count = 0

        def on_ack(ack: Ack) -> None:
            nonlocal count
            count += 1
            if count % 5_000 == 0:
                show(f"{count:,} of {flights_data.FLIGHTS:,} acknowledged")

        sent = flights_data.send(
            job.environment.kafka, job.stream.topic, hours=PAST_HOURS, until=until, on_ack=on_ack
        )
    if sent.failed or sent.acknowledged != flights_data.FLIGHTS:
        raise Terminal(
            f"flights: expected {flights_data.FLIGHTS:,} acknowledgements, found "
            f"{sent.acknowledged:,}, and {sent.failed:,} failed: {sent.first_error}"
        )
    story.say(
        f"Kafka acknowledged {sent.acknowledged:,} flights in {time.monotonic() - began:.1f} s "
        f"(gzip, three partitions), in the hours {', '.join(sent.by_hour())} (UTC)"
    )
    return sent


def as_sent_of(stream: Stream) -> audit.AsSent:
    """Return a function from a row of the flights' stream to the bytes of its event."""
    names = [column.name for column in stream.columns]

    def as_sent(row: Mapping[str, Any]) -> bytes:
        moment: datetime = row["time_hour"]
        event = {name: row[name] for name in names} | {
            "time_hour": f"{moment.astimezone(UTC):%Y-%m-%dT%H:%M:%SZ}"
        }
        return json.dumps(event, separators=(",", ":")).encode()

    return as_sent


if __name__ == "__main__":
    sys.exit(main(run))
