"""Number of metadata loads for one hour, by step (seal, rebuild, merge, verify, status), and for a
micro-batch.

`make bench WHAT=loads` runs the work of each task of the hourly DAG with its own connections, as a
process has them, on a real Kafka, a real S3 server and Spark. Loads are the product's requests to
the catalog, by table; GETs are all requests for a `metadata.json` that pass a front of the S3
server, including those of Spark and of the catalog.
"""

from __future__ import annotations

import os
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from unittest.mock import patch

from flaky_s3 import FlakyS3, running_flaky_s3
from sessions import running_spark
from world import World, event, past_hour, spread

from anabranch.cli import main as anabranch
from anabranch.common.output import print_table
from anabranch.dev.services import running
from anabranch.dev.services.processes import HOST
from anabranch.iceberg.lake import Lake
from anabranch.offsets.hours import start_of
from anabranch.spark.java import FIRST_COMPILER

TABLES = ("rows", "dead letters", "ledger")
MICRO_BATCHES = 5


@dataclass
class Loads:
    """Requests of a step: loads by table, and requests for metadata files."""

    tables: Counter[str] = field(default_factory=Counter)
    gets: int = 0

    def cells(self) -> list[int]:
        return [sum(self.tables.values()), *(self.tables[name] for name in TABLES), self.gets]

    def __sub__(self, other: Loads) -> Loads:
        return Loads(
            Counter({t: self.tables[t] - other.tables[t] for t in TABLES}), self.gets - other.gets
        )


class Meter:
    """Counts the loads of one stream's tables."""

    def __init__(self, one: World, front: FlakyS3) -> None:
        stream = one.job.stream
        self._names = dict(
            zip((stream.table, stream.dead_letters_table, stream.hours_table), TABLES, strict=True)
        )
        self._front = front

    @contextmanager
    def counted(self) -> Iterator[Loads]:
        loads, find, before = Loads(), Lake.find, self._front.kinds["GET", "metadata.json"]

        def counting(lake: Lake, name: str) -> Any:
            loads.tables[self._names[name]] += 1
            return find(lake, name)

        with patch.object(Lake, "find", counting):
            yield loads
        loads.gets = self._front.kinds["GET", "metadata.json"] - before


def hour_by_steps(one: World, meter: Meter) -> list[tuple[str, Loads]]:
    """One hour, as the tasks of the hourly DAG go through it."""
    hour = past_hour(1)
    one.send([*spread(hour, 40, "h"), (0, start_of(hour) + timedelta(minutes=59), b"{not json")])
    one.send_now(4, "now")
    one.apply()
    one.speed()

    def command(*arguments: str) -> Callable[[], Any]:
        return lambda: anabranch([*arguments, "--conf", str(one.folder)], standalone_mode=False)

    def rebuild() -> None:
        (result,) = one.batch(hour)
        assert result.decision == "accepted", result

    steps: list[tuple[str, Callable[[], Any]]] = [
        ("seal", command("batch", one.name, "--hour", hour, "--seal-only")),
        ("rebuild", rebuild),
        ("merge", command("merge", one.name)),
        ("verify: audit", command("audit", one.name, "--hours", hour, "--no-kafka")),
        ("verify: explain", command("explain", one.name, hour, "--output", "json")),
        ("status", command("status", one.name)),
    ]
    rows = []
    for name, step in steps:
        one.reopen()
        with meter.counted() as loads:
            step()
        rows.append((name, loads))
    together = Loads(sum((f.tables for _, f in rows), Counter()), sum(f.gets for _, f in rows))
    return [*rows, ("the hour", together)]


def speed_layer(one: World, meter: Meter) -> list[tuple[str, Loads]]:
    """A start of the speed layer that finds nothing, and what each micro-batch adds to it."""
    one.configure(speed={"trigger": "1 second", "max_offsets_per_trigger": 2, "roll_up": False})
    rows = []

    def run() -> Loads:
        one.reopen()
        with meter.counted() as loads:
            one.speed()
        return loads

    idle = run()
    rows.append(("speed: a start", idle))
    one.send_now(2 * MICRO_BATCHES, "more")
    rows.append((f"speed: {MICRO_BATCHES} micro-batches", run() - idle))
    now = start_of(past_hour(0)) + timedelta(minutes=58)
    one.send(
        [(i % 2, now, b"{" if i % 2 else event(f"dead-{i}", now)) for i in range(2 * MICRO_BATCHES)]
    )
    rows.append((f"speed: {MICRO_BATCHES}, with dead letters", run() - idle))
    return rows


def main() -> None:
    if datetime.now(UTC).minute >= 57:
        raise SystemExit(
            "expected to start in an hour's first 57 minutes: the count ends with the hour"
        )
    with (
        tempfile.TemporaryDirectory(prefix="anabranch-loads-") as name,
        running(Path(name) / "services") as services,
        running_flaky_s3(int(services.s3_endpoint.rpartition(":")[2]), 1) as front,
    ):
        folder = Path(name)
        os.environ |= {
            "AWS_ACCESS_KEY_ID": services.access_key,
            "AWS_SECRET_ACCESS_KEY": services.secret_key,
        }
        environment = {
            "kafka": {"bootstrap_servers": services.bootstrap_servers},
            "catalog": {
                "name": "lake",
                "uri": f"sqlite:///{folder}/catalog.db",
                "warehouse": "s3://tests/warehouse",
            },
            "s3": {
                "endpoint": f"http://{HOST}:{front.port}",
                "access_key": services.access_key,
                "secret_key": services.secret_key,
            },
            "spark": {
                "master": "local[2]",
                "conf": {
                    "spark.driver.memory": "1g",
                    "spark.driver.extraJavaOptions": FIRST_COMPILER,
                },
            },
        }
        (folder / "session").mkdir()
        with running_spark(environment, folder / "session") as spark:
            one = World(folder / "conf", environment, spark)
            try:
                one.topic()
                meter = Meter(one, front)
                rows = hour_by_steps(one, meter) + speed_layer(one, meter)
            finally:
                one.kafka.close()
    print_table(
        ("step", "loads", *TABLES, "GETs"), [(step, *loads.cells()) for step, loads in rows]
    )


if __name__ == "__main__":
    main()
