"""Send the lines of a file as records."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Any

from anabranch import config
from anabranch.common.errors import ConfigurationError, Terminal, Transient
from anabranch.kafka.client import KafkaAdapter, new_producer

_IN_FLIGHT = 10_000
# Longer than the producer's delivery timeout of two minutes.
_ACKNOWLEDGED_WITHIN_SECONDS = 130.0


def send_lines(kafka: config.Kafka, topic: str, lines: Iterable[bytes]) -> int:
    """Send each line that is not blank, without its line ending, with the time of its send as
    timestamp. Return the number of records.

    Every record is acknowledged when this returns. Raises ConfigurationError if the topic does not
    exist, Terminal for a line that the producer rejects, Transient if a record was not
    acknowledged; the messages have the number of records before it.
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
                f"{type(error).__name__}: {error} after {acknowledged} acknowledged ones; "
                "`anabranch dev up` starts a broker that does not run"
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
