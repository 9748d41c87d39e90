"""How many publishes a second a catalog takes over many tables: SQLite, PostgreSQL and a REST
catalog.

`make bench WHAT=metadata ARGS=--catalogs`. Processes publish micro-batches of the product's own
commits, each process to tables of its own, over files that are only named: no Spark, no Kafka, no
S3. Tables' metadata lies on the local disk, so that what is measured is the client, the catalog and
the machine. The client's CPU a publish says what one process can do; the catalog's CPU a publish
says what a catalog on so many cores can do.
"""

from __future__ import annotations

import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import psutil
from lakes import new_lake
from postgres import DATABASE, PASSWORD, USER, running_postgres
from rest_catalog import running_rest_catalog
from scale import ScaledStream

from anabranch.common.output import print_table
from anabranch.iceberg.commits import Outcome
from anabranch.offsets.hours import Timeline, hour_of

PARTITIONS = 2
CATALOGS = ("SQLite", "PostgreSQL", "REST")


@dataclass(frozen=True)
class Catalog:
    """PyIceberg's settings of it, and its server process (None: it runs in the clients)."""

    settings: dict[str, Any]
    server: int | None


@contextmanager
def running(kind: str, folder: Path) -> Iterator[Catalog]:
    """A fresh catalog."""
    if kind == "SQLite":
        yield Catalog({"uri": f"sqlite:///{folder}/catalog.db"}, None)
    elif kind == "PostgreSQL":
        with running_postgres(fsync=True) as server:
            assert server.process is not None
            uri = f"postgresql+psycopg2://{USER}:{PASSWORD}@127.0.0.1:{server.port}/{DATABASE}"
            yield Catalog({"uri": uri}, server.process.pid)
    else:
        with running_rest_catalog(folder, f"file://{folder}/warehouse") as rest:
            yield Catalog({"type": "rest", "uri": rest.url}, rest.pid)


def _cpu(pid: int | None) -> float:
    """CPU seconds of a process and its children so far, ended ones too."""
    if pid is None:
        return 0.0
    process = psutil.Process(pid)
    used = [process.cpu_times()]
    used += [child.cpu_times() for child in process.children(recursive=True)]
    return sum(t.user + t.system for t in used) + used[0].children_user + used[0].children_system


def publish_for(
    seconds: float,
    folder: Path,
    names: Sequence[str],
    settings: dict[str, Any],
    threads: int,
    ready: Any,
    ended: Any,
) -> None:
    """Create the tables, then publish to one after the other in so many threads. Runs in a process
    of its own."""
    hour = hour_of(datetime.now(UTC) - timedelta(hours=1))
    timeline = Timeline(hour, hour, dict.fromkeys(range(PARTITIONS), 0))
    streams = [
        ScaledStream(new_lake(folder, PARTITIONS, timeline, name=name, **settings), PARTITIONS)
        for name in names
    ]
    ready.wait()
    until = time.monotonic() + seconds
    began = time.process_time()

    def work(mine: Sequence[ScaledStream]) -> tuple[list[float], int]:
        took: list[float] = []
        refused = 0
        while time.monotonic() < until:
            for stream in mine:
                start = time.monotonic()
                refused += stream.micro_batch(hour) is not Outcome.LANDED
                took.append(time.monotonic() - start)
        return took, refused

    with ThreadPoolExecutor(threads) as pool:
        done = list(pool.map(work, [streams[i::threads] for i in range(threads)]))
    took = [seconds for one, _ in done for seconds in one]
    ended.put((took, sum(refused for _, refused in done), time.process_time() - began))


def measure(
    kind: str, tables: int, processes: int, threads: int, seconds: float
) -> dict[str, float]:
    """Publishes a second over so many tables, and what one costs."""
    forked = multiprocessing.get_context("spawn")
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="anabranch-commits-")))
        catalog = stack.enter_context(running(kind, folder))
        names = [f"t{i}" for i in range(tables)]
        ready, ended = forked.Barrier(processes + 1), forked.Queue()
        workers = [
            forked.Process(
                target=publish_for,
                args=(
                    seconds,
                    folder,
                    names[i::processes],
                    catalog.settings,
                    threads,
                    ready,
                    ended,
                ),
            )
            for i in range(processes)
        ]
        for worker in workers:
            worker.start()
        ready.wait(300)
        before = _cpu(catalog.server)
        found = [ended.get(timeout=seconds + 120) for _ in workers]
        server = _cpu(catalog.server) - before
        for worker in workers:
            worker.join(60)
    took = sorted(seconds for one, _, _ in found for seconds in one)
    landed = len(took) - sum(refused for _, refused, _ in found)
    return {
        "publishes/s": landed / seconds,
        "refused": sum(refused for _, refused, _ in found),
        "p50 ms": 1000 * statistics.median(took),
        "p99 ms": 1000 * took[int(len(took) * 0.99)],
        "client CPU ms": 1000 * sum(cpu for _, _, cpu in found) / landed,
        "catalog CPU ms": 1000 * server / landed,
    }


def compare(seconds: float, threads: int = 4) -> None:
    """Measure each catalog with one and 50 tables, one and four processes, and print a table."""
    rows: list[tuple[Any, ...]] = []
    found: dict[str, float] = {}
    for kind in CATALOGS:
        for tables, processes in ((1, 1), (50, 1), (50, 4)):
            found = measure(kind, tables, processes, min(threads, tables // processes), seconds)
            rows.append((kind, tables, processes, *(f"{value:.3g}" for value in found.values())))
            print(rows[-1], flush=True)
    print(f"\n{os.cpu_count()} cores, {threads} threads a process, {seconds:.0f} s each")
    print_table(("catalog", "tables", "processes", *found), rows)
