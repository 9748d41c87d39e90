"""Freshness of the table under a steady producer: `make bench WHAT=freshness`.

Measures the time from a record's acknowledgement by Kafka until an independent reader has loaded a
table whose `main` contains it. Producer, speed layer, Kafka, S3 and reader share this machine.
Prints percentiles by minute, including the first, in which Java compiles. Raises RuntimeError
unless the table has as many rows as records were acknowledged.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import subprocess
import tempfile
import threading
import time
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
from demo.story import poll
from runs import anabranch, configure, end_by_signals, on_master, run_quietly
from shapes import SHAPES, Shape, acknowledged_at, create
from sqlalchemy import Engine, create_engine, text

from anabranch import config
from anabranch.common.output import print_table
from anabranch.dev.services import Services, running
from anabranch.iceberg.lake import Lake
from anabranch.protocol.state import load_state

_EVERY = 0.02
_START_SECONDS, _DRAIN_SECONDS = 120.0, 120.0


class Reader:
    """A thread that polls the table. `seen`: by partition, the published ends and the times at
    which they were first read."""

    def __init__(self, conf: str) -> None:
        self.seen: dict[int, list[tuple[int, float]]] = {}
        environment = config.load_environment(conf)
        self._lake = Lake(environment)
        self._catalog: Engine = create_engine(str(environment.catalog.uri))
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        self._thread.join(30)

    @property
    def rows(self) -> int:
        table = self._lake.load("bench.events")
        return sum(task.file.record_count for task in table.scan().plan_files())

    def holds(self, ends: dict[int, int]) -> bool:
        return all(self.seen.get(p, [(0, 0.0)])[-1][0] >= end for p, end in ends.items())

    def _pointer(self) -> str | None:
        """Return the table's current metadata file in the catalog."""
        named = text("SELECT metadata_location FROM iceberg_tables WHERE table_name = 'events'")
        with self._catalog.connect() as connection:
            return connection.execute(named).scalar()

    def _look(self) -> None:
        last = None
        while not self._stop.wait(_EVERY):
            # Loading the table each time would take a third of a core.
            if (pointer := self._pointer()) == last:
                continue
            last = pointer
            offsets = load_state(self._lake, "bench.events").position.offsets
            now = time.time()
            for partition, end in offsets.items():
                ends = self.seen.setdefault(partition, [])
                if not ends or end > ends[-1][0]:
                    ends.append((end, now))


@dataclass(frozen=True)
class Sent:
    """Partition, offset and acknowledgement time of each record."""

    partitions: np.ndarray
    offsets: np.ndarray
    at: np.ndarray

    @property
    def ends(self) -> dict[int, int]:
        return {
            int(p): int(self.offsets[self.partitions == p].max()) + 1
            for p in np.unique(self.partitions)
        }


def delays(sent: Sent, seen: dict[int, list[tuple[int, float]]]) -> tuple[np.ndarray, np.ndarray]:
    """Return the acknowledgement time of each record, and the seconds until the reader had it."""
    at, waited = [], []
    for partition, ends in seen.items():
        mine = sent.partitions == partition
        first = np.searchsorted([end for end, _ in ends], sent.offsets[mine], side="right")
        at.append(sent.at[mine])
        waited.append(np.array([when for _, when in ends])[first] - sent.at[mine])
    return np.concatenate(at), np.concatenate(waited)


def produce(
    broker: str, shapes: list[Shape], rate: int, seconds: float, **options: Any
) -> dict[str, Sent]:
    """Send records for `seconds`, with the options of `acknowledged_at`. Return the
    acknowledgements by topic."""
    stop = threading.Event()
    threading.Timer(seconds, stop.set).start()
    acks = {shape.name: (array("i"), array("q"), array("d")) for shape in shapes}
    for topic, partition, offset, at in acknowledged_at(broker, shapes, rate, stop, **options):
        partitions, offsets, moments = acks[topic]
        partitions.append(partition)
        offsets.append(offset)
        moments.append(at)
    return {topic: Sent(*(np.array(values) for values in of)) for topic, of in acks.items()}


def produce_shape(broker: str, shape: str, rate: int, seconds: float, into: Connection) -> None:
    into.send(produce(broker, [SHAPES[shape]], rate, seconds))


@contextmanager
def spawned(send: Callable[..., None], *arguments: object) -> Iterator[Connection]:
    """Run `send` in a separate process until the end of the `with`. Yield the connection to which
    it sends the acknowledgements."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    sender = context.Process(target=send, args=(*arguments, there), daemon=True)
    sender.start()
    there.close()
    yield here
    sender.join(60)


def by_minute(at: np.ndarray, waited: np.ndarray) -> Iterator[tuple[int, tuple[str, ...]]]:
    """Yield the number of each minute, and its cells: minute, records and percentiles."""
    minute = ((at - at.min()) // 60).astype(int)
    for number in sorted(set(minute.tolist())):
        some = waited[minute == number]
        percentiles = (f"{value:.2f}" for value in np.percentile(some, [50, 95, 99, 100]))
        yield number, (str(number + 1), f"{len(some):,}", *percentiles)


def measure(services: Services, folder: Path, rate: int, minutes: float) -> list[tuple[str, ...]]:
    shape = SHAPES["json_440"]
    create(services.bootstrap_servers, shape)
    environment = configure(
        folder, shape, services, True, {"trigger": "1 second", "max_offsets_per_trigger": 250_000}
    )
    run_quietly(environment, "apply", "bench")
    reader = Reader(environment["ANABRANCH_CONF"])
    began = time.monotonic()
    with (folder / "speed.log").open("wb") as log:
        speed = subprocess.Popen(
            anabranch("speed", "bench", "--output", "json"),
            env=os.environ | environment,
            stdout=log,
            stderr=log,
        )
        try:
            streaming = "reading from the table's position"
            log_file = folder / "speed.log"
            poll(
                lambda: streaming in log_file.read_text() or None,
                "the speed layer to stream",
                _START_SECONDS,
            )
            print(f"start to streaming: {time.monotonic() - began:.1f} s", flush=True)
            reader.start()
            with spawned(
                produce_shape, services.bootstrap_servers, shape.name, rate, minutes * 60
            ) as here:
                sent: Sent = here.recv()[shape.name]
            poll(
                lambda: reader.holds(sent.ends) or None,
                "every acknowledged record in main",
                _DRAIN_SECONDS,
            )
        finally:
            speed.terminate()
            speed.wait(60)
            reader.stop()
    if (rows := reader.rows) != len(sent.at):
        raise RuntimeError(f"expected {len(sent.at)} rows, found {rows}")
    at, waited = delays(sent, reader.seen)
    return [cells for _, cells in by_minute(at, waited)]


def main() -> None:
    end_by_signals()
    parser = argparse.ArgumentParser(description="How fresh the table is under a steady producer.")
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--rate", type=int, default=10_000, help="records a second")
    parser.add_argument(
        "--master", default="", help="`standalone`, or a Spark master such as spark://host:7077"
    )
    options = parser.parse_args()
    with on_master(options.master), tempfile.TemporaryDirectory(prefix="anabranch-fresh-") as name:
        folder = Path(name)
        (folder / "run").mkdir()
        with running(folder / "services") as services:
            table = measure(services, folder / "run", options.rate, options.minutes)
    print_table(("minute", "records", "p50 s", "p95 s", "p99 s", "most s"), table)


if __name__ == "__main__":
    main()
