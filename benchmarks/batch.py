"""Cost of rebuilding an hour, compared with reading and parsing its records: `make bench
WHAT=batch`.

`anabranch batch` rebuilds one hour of a topic, with duplicates, dead letters, the speed layer's
rows to compare with, and three expectations. The floor reads the same offsets with Spark, parses
them with `from_json`, and drops them. Both alternate. Seconds are those of the hour itself; an hour
of few records shows the fixed cost of its process.

`--lookback 24` (`make bench WHAT=lookback`): the hour with and without a look-back at 24 earlier
hours of the same size. `--cores 1,2,4` (`make bench WHAT=cluster`): the hour on a standalone
cluster of that many workers of one core. `--drift`: the hour with a field in each record that the
schema lacks, ignored and counted.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

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
from anabranch.offsets.hours import hour_of, shift

FEW = 1_000
SHAPE = SHAPES["json_440"]
_BETWEEN = re.compile(r"rebuilding hour|accepted hour=")
_TIMES = ("seconds", "cpu")
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


def prepare(
    folder: Path,
    services: Services,
    records: int,
    hour: str,
    events: Path | None,
    before: int = 0,
    catalog: str = "",
    settings: Mapping[str, object] | None = None,
) -> dict[str, str]:
    """Create a topic with `records` records in one hour and in each of the `before` hours before
    it, and let the speed layer read them. Return the environment of commands. `catalog`: a URI that
    replaces the file's; `settings`: keys of the stream's file."""
    environment = configure(folder, SHAPE, services, True, {"max_offsets_per_trigger": 250_000})
    for number in range(before + 1):
        fill_hour(
            services.bootstrap_servers,
            SHAPE,
            records,
            shift(hour, number - before),
            number * records,
        )
    conf = Path(environment["ANABRANCH_CONF"])
    if catalog:
        edit(conf / "anabranch.yaml", {"catalog": {"uri": catalog}})
    suite = {"expectations": "bench.expectations.yaml"}
    edit(conf / "streams" / "bench.yaml", suite | dict(settings or {}))
    (conf / "streams" / "bench.expectations.yaml").write_text(yaml.safe_dump(_SUITE))
    if events is not None:
        # Each process of the batch layer writes its event log to a file.
        events.mkdir(parents=True, exist_ok=True)
        conf_of_spark = {
            "spark.eventLog.enabled": "true", "spark.eventLog.dir": f"file://{events.resolve()}",
            "spark.eventLog.rolling.enabled": "false", "spark.eventLog.compress": "false",
        }  # fmt: skip
        edit(conf / "anabranch.yaml", {"spark": {"conf": conf_of_spark}})
    run_quietly(environment, "apply", "bench")
    run_quietly(environment, "speed", "bench", "--available-now")
    return environment


def measure_lookback(records: int, rounds: int, before: int) -> list[tuple[str, ...]]:
    """Measure the cost of a look-back's hours, each of the same size as the rebuilt hour."""
    lookbacks = dict.fromkeys((0, 1, before))
    ways = {f"look-back of {n} hours": {"batch": {"lookback_hours": n}} for n in lookbacks}
    rows = measure_ways(records, rounds, ways, before=before)
    return [
        (str(n), f"{n * records:,}", *times) for n, (_, *times) in zip(lookbacks, rows, strict=True)
    ]


def measure_drift(records: int, rounds: int) -> list[tuple[str, ...]]:
    """Measure the cost of counting unknown fields. Every record has one, the shape's last
    column."""
    ways: dict[str, dict[str, Any]] = {way: {"unknown": way} for way in ("ignore", "count")}
    return measure_ways(records, rounds, ways, {"schema": SHAPE.schema.rpartition(", ")[0]})


def measure_decoders(records: int, rounds: int) -> list[tuple[str, ...]]:
    """Measure the cost of an hour by `batch.decoder`."""
    return measure_ways(
        records, rounds, {way: {"batch": {"decoder": way}} for way in ("spark", "workers")}
    )


def measure_ways(
    records: int,
    rounds: int,
    ways: Mapping[str, Mapping[str, Any]],
    settings: Mapping[str, object] | None = None,
    before: int = 0,
) -> list[tuple[str, ...]]:
    """Measure the hour with several settings of the stream's file in turn. Return medians of
    seconds and CPU seconds."""
    costs: dict[str, list[Cost]] = {way: [] for way in ways}
    with tempfile.TemporaryDirectory(prefix="anabranch-batch-", ignore_cleanup_errors=True) as name:
        folder, hour = Path(name), shift(hour_of(datetime.now(UTC)), -2)
        with running(folder / "services") as services:
            environment = prepare(folder, services, records, hour, None, before, settings=settings)
            file = Path(environment["ANABRANCH_CONF"]) / "streams" / "bench.yaml"
            for _ in range(rounds):
                for way, keys in ways.items():
                    edit(file, keys)
                    costs[way].append(rebuild(environment, hour, folder))
                    last = costs[way][-1]
                    print(f"{way}: {last.seconds:.1f} s, {last.cpu:.0f} CPU s", flush=True)
    return [
        (way, *(f"{statistics.median(getattr(c, n) for c in of):.1f}" for n in _TIMES))
        for way, of in costs.items()
    ]


def measure_cluster(records: int, rounds: int, cores: list[int]) -> list[tuple[str, ...]]:
    """Measure the hour on clusters with these numbers of one-core workers. Return seconds, and the
    ideal time, that of the fewest workers scaled by their number, divided by them."""
    # Imported here: the process of the floor lacks the tests' dependencies.
    from cluster import running_cluster
    from postgres import DATABASE, PASSWORD, USER, running_postgres

    seconds: dict[int, list[float]] = {n: [] for n in cores}
    with tempfile.TemporaryDirectory(prefix="anabranch-batch-", ignore_cleanup_errors=True) as name:
        folder, hour = Path(name), shift(hour_of(datetime.now(UTC)), -2)
        with running(folder / "services") as services, running_postgres() as postgres:
            catalog = (
                f"postgresql+psycopg2://{USER}:{PASSWORD}@127.0.0.1:{postgres.port}/{DATABASE}"
            )
            environment = prepare(folder, services, records, hour, None, catalog=catalog)
            with running_cluster([f"127.0.0.{n + 1}" for n in range(max(cores))]) as cluster:
                for _ in range(rounds):
                    for n in cores:
                        conf = {
                            "spark.cores.max": str(n),
                            "spark.driver.memory": "2g",
                            "spark.executor.memory": "1g",
                        }
                        file = Path(environment["ANABRANCH_CONF"]) / "anabranch.yaml"
                        edit(file, {"spark": {"master": cluster.master, "conf": conf}})
                        seconds[n].append(rebuild(environment, hour, folder).seconds)
                        print(f"{n} workers: {seconds[n][-1]:.1f} s", flush=True)
    took = {n: statistics.median(of) for n, of in seconds.items()}
    ideal = took[min(cores)] * min(cores)
    return [(str(n), f"{s:.1f}", f"{ideal / n / s:.2f}") for n, s in took.items()]


def measure(records: int, rounds: int, events: Path | None) -> tuple[list[Cost], list[Cost]]:
    """Measure the costs of rebuilding an hour, and of the floor."""
    rebuilt, floors = [], []
    with tempfile.TemporaryDirectory(prefix="anabranch-batch-", ignore_cleanup_errors=True) as name:
        folder, hour = Path(name), shift(hour_of(datetime.now(UTC)), -2)
        with running(folder / "services") as services:
            environment = prepare(folder, services, records, hour, events)
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


def main() -> None:
    end_by_signals()
    parser = argparse.ArgumentParser(description="What it takes to rebuild an hour.")
    parser.add_argument(
        "--records",
        type=lambda text: [int(n) for n in text.split(",")],
        default=[1_000_000, 3_000_000],
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--events", type=Path, help="a folder for Spark's event logs of the batch layer"
    )
    parser.add_argument(
        "--lookback", type=int, help="measure a look-back of so many hours in place of the floor"
    )
    parser.add_argument(
        "--cores", type=lambda text: [int(n) for n in text.split(",")], help="measure on a cluster"
    )
    parser.add_argument(
        "--drift", action="store_true", help="measure what counting unknown fields costs"
    )
    parser.add_argument(
        "--decoders", action="store_true", help="measure both decoders of the batch layer"
    )
    parser.add_argument("--json", type=Path, help="a file for all that was measured")
    parser.add_argument("--floor", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.floor:
        read_and_parse(*options.floor)
        return
    if options.lookback:
        rows = measure_lookback(options.records[0], options.rounds, options.lookback)
        print_table(("look-back hours", "records in them", "rebuilt s", "CPU s"), rows)
        return
    if options.drift:
        rows = measure_drift(options.records[0], options.rounds)
        print_table(("unknown", "rebuilt s", "CPU s"), rows)
        return
    if options.decoders:
        rows = measure_decoders(options.records[0], options.rounds)
        print_table(("decoder", "rebuilt s", "CPU s"), rows)
        return
    if options.cores:
        rows = measure_cluster(options.records[0], options.rounds, options.cores)
        print_table(("workers", "rebuilt s", "of ideal"), rows)
        return
    costs = {n: measure(n, options.rounds, options.events) for n in (FEW, *options.records)}
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
    print_table(head, [row(n, *both) for n, both in costs.items()])
    if options.json is not None:
        of = {
            n: {"rebuilt": [vars(c) for c in r], "floor": [vars(c) for c in f]}
            for n, (r, f) in costs.items()
        }
        options.json.write_text(json.dumps(of, indent=2) + "\n")


if __name__ == "__main__":
    main()
