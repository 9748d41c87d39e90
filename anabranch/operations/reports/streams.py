"""The streams of a configuration folder with their states, and the position of a consumer that
continues in a topic after a snapshot of `main`."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Literal

from anabranch import config
from anabranch.iceberg.snapshots import heads
from anabranch.job import Job
from anabranch.offsets.position import Offsets, size, to_keys
from anabranch.protocol.seam import plan_seam, state_at
from anabranch.protocol.state import check_topic

StreamState = Literal["ready", "new", "gone", "broken", "unknown"]


@dataclass(frozen=True)
class StreamSummary:
    """A stream as its file declares it. `state`: `ready` (its table exists), `new` (before
    `anabranch apply`), `gone` (Kafka no longer has the topic), `broken` (its file is invalid) or
    `unknown` (the catalog did not answer). `error`: the reason for the last three. `family`: the
    stream's family, if any."""

    stream: str
    family: str | None
    group: str | None
    topic: str | None
    table: str | None
    state: StreamState
    error: str | None


def namespaces_of(selected: config.Selected) -> list[str]:
    return sorted({stream.table.rpartition(".")[0] for stream in config.loaded(selected)})


def summarize(
    selected: config.Selected,
    groups: Mapping[str, str | None],
    tables: Collection[str] | str,
    members: config.Members,
) -> list[StreamSummary]:
    """Return a summary of each stream. `groups`: the group of each stream with an invalid file;
    `tables`: the catalog's tables, or why they could not be listed; `members`: the streams of
    families. Pure."""
    made = []
    for name, found in selected.items():
        member = members.get(name)
        family = member.family if member is not None else None
        if isinstance(found, config.ConfigurationError):
            group, topic = (
                (member.group, member.topic) if member is not None else (groups.get(name), None)
            )
            made.append(StreamSummary(name, family, group, topic, None, "broken", str(found)))
            continue
        state: StreamState = "new"
        error = None
        if isinstance(tables, str):
            state, error = "unknown", tables
        elif member is not None and member.is_gone:
            state, error = (
                "gone",
                f"Kafka no longer has topic {found.topic}; the stream and its tables stay",
            )
        elif found.table in tables:
            state = "ready"
        made.append(
            StreamSummary(name, family, found.group, found.topic, found.table, state, error)
        )
    return made


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
        job.stream.name, job.stream.topic, position.topic_id, at, lowest, size(between) - waiting
    )
