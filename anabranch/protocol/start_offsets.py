"""The start that an operator chooses in a log that the stream never read: its earliest record, its
end, a time, or offsets. Only an operator can choose: a topic that was deleted and recreated is read
from its earliest record, but a mirror of a topic that was read repeats its records, so it is read
from where reading of that topic ended.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Literal

from anabranch.common.errors import ConfigurationError, Refused
from anabranch.kafka.client import KafkaAdapter
from anabranch.offsets.position import Offsets, Position, Topic, to_keys

_OFFSETS = re.compile(r"\d+=\d+(,\d+=\d+)*")


@dataclass(frozen=True)
class Log:
    """A topic's log in Kafka: the oldest available offset and the last stable offset by
    partition."""

    topic: Topic
    starts: Offsets
    ends: Offsets

    @property
    def records(self) -> int:
        """The number of offsets in the log: its records, plus compacted and aborted records and
        transaction markers."""
        return sum(max(0, end - self.starts.get(p, 0)) for p, end in self.ends.items())


@dataclass(frozen=True)
class StartChoice:
    """The value of `--from`: `when` for the kind `time`, `offsets` for the kind `offsets`."""

    kind: Literal["earliest", "latest", "time", "offsets"]
    when: datetime | None = None
    offsets: Offsets | None = None


def parse_start(text: str) -> StartChoice:
    """Parse `earliest`, `latest`, a time such as `2026-11-21T03:15:00Z` (UTC without a zone), or
    offsets such as `0=120,1=98`. Raises ConfigurationError."""
    if text == "earliest":
        return StartChoice("earliest")
    if text == "latest":
        return StartChoice("latest")
    if _OFFSETS.fullmatch(text):
        pairs = [pair.split("=") for pair in text.split(",")]
        offsets = {int(p): int(o) for p, o in pairs}
        if len(offsets) == len(pairs):
            return StartChoice("offsets", offsets=offsets)
    try:
        when = datetime.fromisoformat(text)
    except ValueError:
        raise ConfigurationError(
            "--from: expected earliest, latest, a time such as 2026-11-21T03:15:00Z, or the "
            f"offset of each partition once, such as 0=120,1=98, found {text!r}"
        ) from None
    return StartChoice("time", when=when if when.tzinfo is not None else when.replace(tzinfo=UTC))


def read_log(kafka: KafkaAdapter, topic: Topic, reached: Offsets) -> Log:
    """Read the topic's log. An end below the offsets `reached` is believed only if the brokers
    repeat it."""
    # A replaced leader that does not know it yet returns an earlier end, and the log would look as
    # if it had lost published records.
    return Log(topic, kafka.log_starts(topic), kafka.stable_ends(topic, reached))


def resolve_start(choice: StartChoice, kafka: KafkaAdapter, log: Log) -> Offsets:
    """Return the offset of a choice in each partition of the log. A time means the first record
    with this timestamp or a later one, or the log's end without one. Raises Refused for offsets
    that the log does not have."""
    if choice.kind == "earliest":
        return dict(log.starts)
    if choice.kind == "latest":
        return dict(log.ends)
    if choice.when is not None:
        first = kafka.first_from(log.topic, choice.when)
        return {
            p: stamped.offset if (stamped := first.get(p)) is not None else end
            for p, end in log.ends.items()
        }
    offsets = choice.offsets or {}
    if offsets.keys() != set(log.topic.partitions) or any(
        not log.starts.get(p, 0) <= o <= log.ends.get(p, 0) for p, o in offsets.items()
    ):
        ranges = ", ".join(
            f"{p}={log.starts.get(p, 0)}..{log.ends.get(p, 0)}" for p in log.topic.partitions
        )
        raise Refused(
            f"adopt topic {log.topic.name}: expected --from with an offset of each partition "
            f"within {ranges}, found {to_text(offsets)}; nothing was changed: run it again with "
            "offsets that are there"
        )
    return offsets


def question(stream: str, kafka: KafkaAdapter, position: Position, log: Log) -> str:
    """Return the message of why an operator has to choose where to begin, and when each choice
    applies."""
    now_ms = int(datetime.now(UTC).timestamp() * 1000)
    stamp = kafka.oldest_stamp(log.topic, log.starts, log.ends, 0, now_ms)
    oldest = (
        f"{datetime.fromtimestamp(stamp / 1000, UTC):%Y-%m-%dT%H:%M:%SZ}"
        if stamp is not None
        else "unknown"
    )
    mirrored = {
        p: max(log.starts.get(p, 0), min(position.offsets.get(p, 0), log.ends.get(p, 0)))
        for p in log.topic.partitions
    }
    return (
        f"adopt topic {log.topic.name}: expected topic id {position.topic_id}, which was read up "
        f"to {to_text(position.offsets)}, or an id that was read before, found id {log.topic.id} "
        f"with {log.records} records, the oldest of {oldest}; nothing was changed. If `topic:` or "
        "kafka.bootstrap_servers name the wrong topic or cluster: correct them. Otherwise choose "
        f"where to begin: `anabranch adopt {stream} --from earliest` when the topic was deleted "
        f"and made again and all of it is new; `--from {to_text(mirrored)}` when it mirrors the "
        "former topic offset by offset; `--from TIME` when it mirrors it otherwise; `--from "
        "latest` when none of its records are wanted"
    )


def to_text(offsets: Offsets) -> str:
    """Format offsets as `--from` accepts them."""
    return ",".join(f"{p}={o}" for p, o in to_keys(offsets).items())
