"""The audit at the end of a demo: it compares the records that Kafka acknowledged with `main` and
the dead letters."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from anabranch.common.errors import Refused
from anabranch.dev.producers.events import Ack, sha256
from anabranch.protocol.state import load_state
from demo.comparison import Reconciliation, ServedRecord, compare
from demo.story import Story

if TYPE_CHECKING:
    from anabranch.job import Job

# Returns the bytes of a row's event, whose hash is compared with the acknowledged one.
AsSent = Callable[[Mapping[str, Any]], bytes]


def audit(job: Job, acks: Iterable[Ack], as_sent: AsSent) -> Reconciliation:
    """Compare every acknowledged record with the serving tables, by partition, offset and
    content."""
    table, letters = (
        job.lake.load(name) for name in (job.stream.table, job.stream.dead_letters_table)
    )
    rows = (
        ServedRecord(row["kafka_partition"], row["kafka_offset"], sha256(as_sent(row)))
        for batch in table.scan().to_arrow().to_batches()
        for row in batch.to_pylist()
    )
    wanted = ("kafka_partition", "kafka_offset", "value")
    dead = (
        ServedRecord(row["kafka_partition"], row["kafka_offset"], sha256(row["value"]))
        for row in letters.scan(selected_fields=wanted).to_arrow().to_pylist()
    )
    state = load_state(job.lake, job.stream.table)
    accepted = [
        a.cut.ranges for hour, a in state.accepted.items() if state.served_by(hour) == "batch"
    ]

    def by_batch(partition: int, offset: int) -> bool:
        return any(
            start <= offset < end
            for r in accepted
            if partition in r
            for start, end in (r[partition],)
        )

    return compare(acks, rows, dead, by_batch)


def run_audit(story: Story, job: Job, acks: Iterable[Ack], as_sent: AsSent) -> None:
    """Run the audit as the last step of a story. Raises Refused if `main` is not exact."""
    with story.awaiting("comparing"):
        comparison = audit(job, acks, as_sent)
    for line in comparison.sentences():
        story.say(line)
    if not comparison.is_exact:
        raise Refused(
            "main differs from what Kafka acknowledged; that must not be, please report it"
        )
    story.say(f"Exact, after {story.seconds:.0f} s.", "bold green")


def game_event_as_sent(row: Mapping[str, Any]) -> bytes:
    """Return the bytes of a row's game event."""
    names = ("event_id", "event_type", "game", "player_id", "event_time", "platform")
    event = {name: row[name] for name in names}
    moment: datetime = row["event_time"]
    event["event_time"] = moment.astimezone(UTC).isoformat(timespec="milliseconds")[:-6] + "Z"
    event |= {name: row[name] for name in ("level", "amount") if row[name] is not None}
    return json.dumps(event, separators=(",", ":")).encode()
