"""Records with Kafka timestamps that no producer should set, but every broker may contain."""

from __future__ import annotations

import random
import time
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

from anabranch.common.errors import Terminal
from anabranch.dev.producers.events import Ack, Kind, Sent, generate, sha256
from anabranch.kafka.client import new_producer

if TYPE_CHECKING:
    from anabranch.job import Job

# Settings of a topic that accepts any timestamp.
ANY_STAMP = {f"message.timestamp.{side}.max.ms": str(2**63 - 1) for side in ("after", "before")}
# The pause between two of them keeps them exceptions in their partition: the timestamps of most
# records count.
_PAUSE_SECONDS = 0.3
_ACK_SECONDS = 130.0
_HOUR = 3_600_000


def strange_stamp(now_ms: int, dice: random.Random) -> int:
    """A timestamp in milliseconds: of another unit or time, or at the limit of readers."""
    return dice.choice(
        (
            now_ms * 1_000 + dice.randrange(1_000), now_ms * 1_000_000 + dice.randrange(1_000_000),
            now_ms // 1_000, 9_223_372_036_854_775, 9_223_372_036_854_776, 2**63 - 1, -(2**63),
            -9_223_372_036_854_775, -1, 0, -dice.randrange(10**12), now_ms + dice.randrange(_HOUR),
            now_ms + dice.randrange(24 * _HOUR), now_ms + 10 * 365 * 24 * _HOUR,
            now_ms - dice.randrange(_HOUR), now_ms - dice.randrange(48 * _HOUR),
            now_ms - 30 * 365 * 24 * _HOUR,
        )
    )  # fmt: skip


def send_strange(job: Job, events: int, seed: int, sent: Sent) -> None:
    """Send events with strange timestamps, some of them truncated, some twice with the same or
    another timestamp, and add them to `sent`.

    Each is a separate batch: the format of a batch limits the distance from its first timestamp.
    Raises Terminal for a record that is not acknowledged.
    """
    dice, now = random.Random(f"stamps {seed}"), datetime.now(UTC)
    producer = new_producer(job.environment.kafka, linger_ms=0, metrics_enabled=False)
    try:
        partitions = len(producer.partitions_for(sent.topic))
        for record in generate(events, seed, now - timedelta(seconds=2), now, False):
            partition, stamp = dice.randrange(partitions), strange_stamp(record.timestamp_ms, dice)
            again = {0: [], 1: [stamp], 2: [strange_stamp(record.timestamp_ms, dice)]}[
                dice.choice((0, 0, 1, 2))
            ]
            is_whole = dice.random() < 0.8
            value = record.value if is_whole or record.value is None else record.value[:-25]
            for number, millis in enumerate([stamp, *again]):
                kind: Kind = "malformed" if not is_whole else "duplicate" if number else "good"
                sent.sent[kind] += 1
                future = producer.send(sent.topic, value, record.key, [], partition, millis)
                try:
                    done = future.get(timeout=_ACK_SECONDS)
                except Exception as error:
                    sent.fail(error)
                    raise Terminal(
                        f"a record stamped {millis}: expected an acknowledgement, found {error}"
                    ) from error
                sent.acks.append(Ack(done.partition, done.offset, kind, sha256(value), millis))
                time.sleep(_PAUSE_SECONDS)
    finally:
        producer.close(timeout=5)
