"""Cost of rebuilding an hour, compared with reading and parsing its records: `make bench
WHAT=batch`.

`anabranch batch` rebuilds one hour of a topic, with duplicates, dead letters, the speed layer's
rows to compare with, and three expectations. The floor reads the same offsets with Spark, parses
them with `from_json`, and drops them. Both alternate. Seconds are those of the hour itself; an hour
of few records shows the fixed cost of its process.

`--streams 8` compares the hours of so many small streams in one batch process with the hour of one
stream that has the sum of their records.
"""

from __future__ import annotations

import argparse
import os
import re
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

import many
import yaml
from peer import session
from pyspark.sql import functions as F
from runs import (
    Watch,
    anabranch,
    configure,
    edit,
    end_by_signals,
    log_events,
    run_command,
    run_quietly,
)
from shapes import SHAPES, fill_hour

from anabranch.common.output import print_table
from anabranch.dev.services import Services, running
from anabranch.job import open_job
from anabranch.offsets.hours import hour_of, shift

SHAPE = SHAPES["json_440"]
_BETWEEN = re.compile(r"rebuilding hour|accepted hour=")
_SUITE = {
    "name": "bench",
    "expectations": [
        {"type": "expect_column_values_to_be_unique", "kwargs": {"column": "event_id"}},
        {
            "type": "expect_column_values_to_be_between",
            "kwargs": {"column": "level", "min_value": 0, "max_value": 89},
        },
        {"type": "expect_column_values_to_not_be_null", "kwargs": {"column": "player_id"}},
    ],
}


@dataclass(frozen=True)
class Cost:
    """Seconds and CPU seconds of the hour itself, CPU seconds of the whole process, and peak memory
    of its JVM."""

    seconds: float
    cpu: float
    cpu_in_all: float
    jvm_peak_mb: float

    @staticmethod
    def between(watch: Watch, began: float, ended: float) -> Cost:
        cpu = watch.cpu_at(ended) - watch.cpu_at(began)
        return Cost(ended - began, cpu, watch.samples[-1].cpu, watch.jvm_peak_mb)


def rebuild(environment: dict[str, str], hour: str, folder: Path) -> Cost:
    """Rebuild or restate an hour. Raises RuntimeError unless it is accepted."""
    command = anabranch("batch", "bench", "--hour", hour, "--output", "json")
    log, watch = run_command(
        [*command, "--restate", "--why", "a benchmark"], environment, folder, Watch
    )
    at = [
        datetime.fromisoformat(e["at"]).timestamp()
        for e in log_events(log)
        if _BETWEEN.search(e["message"])
    ]
    if len(at) != 2:
        raise RuntimeError(f"hour {hour}: expected it to be accepted, found {log[-3000:]}")
    return Cost.between(watch, *at)


def floor(services: Services, folder: Path) -> Cost:
    """Read and parse all records of the topic, and drop them."""
    command = [
        sys.executable,
        str(Path(__file__)),
        "--floor",
        services.bootstrap_servers,
        str(folder),
    ]
    log, watch = run_command(command, {}, folder, Watch)
    began, ended = (
        float(line.split()[1]) for line in log.splitlines() if line.startswith("floor ")
    )
    return Cost.between(watch, began, ended)


def read_and_parse(broker: str, folder: str) -> None:
    """Run the floor: read and parse the topic, and print the times before and after."""
    spark = session("noop", Path(folder), None)
    source = (
        spark.read.format("kafka")
        .option("kafka.bootstrap.servers", broker)
        .option("subscribe", SHAPE.name)
    )
    parsed = F.from_json(F.col("value").cast("string"), SHAPE.schema.replace(" NOT NULL", ""))
    print(f"floor {time.time()}", flush=True)
    source.load().select(parsed.alias("j")).select("j.*").write.format("noop").mode(
        "overwrite"
    ).save()
    print(f"floor {time.time()}", flush=True)
    spark.stop()


def prepare(folder: Path, services: Services, records: int, hour: str) -> dict[str, str]:
    """Create a topic with `records` records in one hour, and let the speed layer read them. Return
    the environment of commands."""
    environment = configure(folder, SHAPE, services, True, {"max_offsets_per_trigger": 250_000})
    fill_hour(services.bootstrap_servers, SHAPE, records, hour)
    streams = Path(environment["ANABRANCH_CONF"]) / "streams"
    edit(streams / "bench.yaml", {"expectations": "bench.expectations.yaml"})
    (streams / "bench.expectations.yaml").write_text(yaml.safe_dump(_SUITE))
    run_quietly(environment, "apply", "bench")
    run_quietly(environment, "speed", "bench", "--available-now")
    return environment


def measure(records: int, rounds: int) -> tuple[list[Cost], list[Cost]]:
    """Measure the costs of rebuilding an hour, and of the floor."""
    rebuilt, floors = [], []
    with tempfile.TemporaryDirectory(prefix="anabranch-batch-", ignore_cleanup_errors=True) as name:
        folder, hour = Path(name), shift(hour_of(datetime.now(UTC)), -2)
        with running(folder / "services") as services:
            environment = prepare(folder, services, records, hour)
            for number in range(rounds):
                floors.append(floor(services, folder))
                rebuilt.append(rebuild(environment, hour, folder))
                said = (
                    f"{records:,} records, round {number + 1}: floor {floors[-1].seconds:.1f} s, "
                    "rebuilt in"
                )
                print(
                    f"{said} {rebuilt[-1].seconds:.1f} s, {rebuilt[-1].cpu:.0f} CPU s", flush=True
                )
    return rebuilt, floors


def row(records: int, rebuilt: list[Cost], floors: list[Cost]) -> tuple[str, ...]:
    def middle(costs: list[Cost], name: str) -> float:
        return float(statistics.median(getattr(cost, name) for cost in costs))

    of_floor = statistics.median(
        one.seconds / other.seconds for one, other in zip(rebuilt, floors, strict=True)
    )
    busy = middle(rebuilt, "cpu") / middle(rebuilt, "seconds") / (os.cpu_count() or 1)
    return (
        f"{records:,}",
        f"{middle(floors, 'seconds'):.1f}",
        f"{middle(rebuilt, 'seconds'):.1f}",
        f"{of_floor:.2f}",
        f"{middle(rebuilt, 'cpu') / records * 1e6:.1f}",
        f"{busy:.2f}",
        f"{middle(rebuilt, 'cpu_in_all'):.0f}",
        f"{middle(rebuilt, 'jvm_peak_mb'):,.0f}",
    )


def rebuild_streams(
    environment: dict[str, str], folder: Path, streams: list[str], hour: str, records: int
) -> float:
    """Rebuild the hour of each stream in one process, and return its CPU seconds. Raises
    RuntimeError unless each hour accounts for `records` records, without a gap."""
    command = anabranch("batch", *streams, "--output", "json")
    _, watch = run_command(command, environment, folder, Watch)
    for name in streams:
        history = open_job(name, environment["ANABRANCH_CONF"]).ledger.history([hour])
        row = next(row for row in history if row.decision == "accepted")
        found = [row.good, row.dead, row.duplicate, row.gap]
        if found[-1] or sum(filter(None, found)) != records:
            raise RuntimeError(
                f"{name}: expected {records} records in hour {hour} and no gap, found {found}"
            )
    return watch.samples[-1].cpu


def measure_streams(number: int, records: int) -> list[tuple[str, ...]]:
    """Measure the hours of `number` streams with `records` records each, and the hour of one stream
    with all of them, start of the process included."""
    names, one = [f"s{i:02}" for i in range(number)], "sum"
    ways = [
        (f"one stream, {number * records:,} records", [one], number * records),
        (f"{number} streams, {records:,} records each", names, records),
    ]
    rows: list[tuple[str, ...]] = []
    base = 0.0
    with tempfile.TemporaryDirectory(prefix="anabranch-batch-", ignore_cleanup_errors=True) as name:
        folder, hour = Path(name), shift(hour_of(datetime.now(UTC)), -2)
        with running(folder / "services") as services:
            plan = many.Plan([*names, one], 0, 0.0, 10, (SHAPE,))
            environment = many.configure(folder, services, plan)
            many.create_streams(environment["ANABRANCH_CONF"], services, [*names, one])
            for way, streams, each in ways:
                for stream in streams:
                    shape = replace(SHAPE, name=stream)
                    fill_hour(services.bootstrap_servers, shape, each, hour, is_new=False)
                cpu = rebuild_streams(environment, folder, streams, hour, each)
                base = base or cpu
                rows.append((way, f"{cpu:.0f}", f"{cpu / base:.2f}"))
                print(rows[-1], flush=True)
    return rows


def main() -> None:
    end_by_signals()
    parser = argparse.ArgumentParser(description="What it takes to rebuild an hour.")
    parser.add_argument(
        "--records",
        type=lambda text: [int(n) for n in text.split(",")],
        help="in the hour; with --streams of each stream, a multiple of 5,000 has dead ones  "
        "[default: 1000,1000000,3000000; 2000]",
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--streams", type=int, help="the hours of so many streams in one process")
    parser.add_argument("--floor", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.floor:
        read_and_parse(*options.floor)
        return
    if options.streams:
        rows = measure_streams(options.streams, (options.records or [2_000])[0])
        print_table(("hours", "CPU s", "of one stream"), rows)
        return
    records = options.records or [1_000, 1_000_000, 3_000_000]
    head = (
        "records",
        "floor s",
        "rebuilt s",
        "of the floor",
        "CPU s a million",
        "busy cores",
        "CPU s in all",
        "JVM MB",
    )
    print_table(head, [row(n, *measure(n, options.rounds)) for n in records])


if __name__ == "__main__":
    main()
