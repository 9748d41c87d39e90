"""The position of a consumer that continues in the topic after a snapshot of `main`."""

from __future__ import annotations

from dataclasses import dataclass

from anabranch.iceberg.snapshots import heads
from anabranch.job import Job
from anabranch.offsets.position import Offsets, size, to_keys
from anabranch.protocol.seam import plan_seam, state_at
from anabranch.protocol.state import check_topic


@dataclass(frozen=True)
class ConsumerPosition:
    """The first offset of each partition that a snapshot of `main` does not account for. `again`:
    the number of offsets after it that the snapshot accounts for all the same, since an earlier
    hour waits to be accepted."""

    stream: str
    topic: str
    topic_id: str
    snapshot_id: int
    offsets: Offsets
    again: int

    def as_spark(self) -> dict[str, dict[str, int]]:
        """Return `startingOffsets` of Spark's Kafka source."""
        return {self.topic: to_keys(self.offsets)}

    def as_csv(self) -> list[str]:
        """Return the lines of a file for `kafka-consumer-groups --reset-offsets --from-file`."""
        return [f"{self.topic},{p},{o}" for p, o in sorted(self.offsets.items())]


def position_of(job: Job) -> ConsumerPosition:
    """Return the position after the current snapshot. Partitions that the stream has not read yet
    begin at 0. Raises PositionError for a recreated topic, Refused as `plan_seam`, Transient."""
    table = job.lake.load(job.stream.table)
    at = heads(table)["main"]
    state = state_at(table, at)
    topic = job.kafka.describe(job.stream.topic, state.position)
    position = check_topic(state.position, topic, job.stream.topic)
    seam = plan_seam(state, at)
    lowest = dict.fromkeys(position.offsets, 0) | seam.lowest
    waiting = sum(size(part) for _, part in seam.waiting)
    between = {p: (o, seam.start.get(p, o)) for p, o in lowest.items()}
    return ConsumerPosition(
        job.stream.name,
        job.stream.topic,
        position.topic_id,
        at,
        lowest,
        size(between) - waiting,
    )
