"""Sends records of one's own: each line of a file is a record's value."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Any

from anabranch import config
from anabranch.common.errors import ConfigurationError, Terminal, Transient
from anabranch.kafka.client import KafkaAdapter, new_producer

_IN_FLIGHT = 10_000
# The producer gives a record up after two minutes.
_ACKNOWLEDGED_WITHIN_SECONDS = 130.0


def send_lines(kafka: config.Kafka, topic: str, lines: Iterable[bytes]) -> int:
    """Send each line that is not blank, without its line ending, stamped with the time of its send;
    return how many.

    Every record is acknowledged when this returns. Raises ConfigurationError for a topic that is
    not there, Terminal for a line that the producer does not take, Transient when a record was not
    acknowledged; the message has the number of those that were.
    """
    with KafkaAdapter(kafka) as adapter:
        if adapter.describe(topic) is None:
            raise ConfigurationError(
                f"dev send: expected topic {topic} at {kafka.bootstrap_servers}, found none; run "
                f"`anabranch dev topic {topic}`"
            )
    producer = new_producer(kafka, compression_type="gzip", metrics_enabled=False)
    pending: deque[Any] = deque()
    acknowledged = 0

    def settle() -> None:
        nonlocal acknowledged
        try:
            pending.popleft().get(timeout=_ACKNOWLEDGED_WITHIN_SECONDS)
        except Exception as error:
            raise Transient(
                "dev send: expected each record to be acknowledged, found "
                f"{type(error).__name__}: {error} after {acknowledged} that were; is the broker "
                "up? `anabranch dev status` says"
            ) from error
        acknowledged += 1

    try:
        for number, line in enumerate(lines, 1):
            if not (value := line.rstrip(b"\r\n")).strip():
                continue
            try:
                pending.append(producer.send(topic, value=value))
            except Exception as error:
                raise Terminal(
                    f"dev send: line {number}: expected a record that Kafka takes, found "
                    f"{type(error).__name__}: {error} ({len(pending) + acknowledged} records "
                    "before it were sent)"
                ) from error
            while len(pending) >= _IN_FLIGHT:
                settle()
        while pending:
            settle()
    finally:
        producer.close(timeout=5)
    return acknowledged
