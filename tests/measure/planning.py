"""Planning a query of one hour, in a table of a year of hours beside one of a day: `make bench
WHAT=planning`.

Real small Parquet files and the product's own commits, on a local SQLite catalog and a local
folder, so that what a reader computes is all that it costs. All readers take turns on both tables,
at the oldest hour, the one in the middle and the newest; milliseconds are medians of the rounds.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import yaml
from hour_files import HourFiles
from pyspark.sql import SparkSession
from scale import measured
from sessions import running_spark
from world import add_catalog

from anabranch.common.output import print_table
from anabranch.config import Environment
from anabranch.iceberg.lake import Lake
from anabranch.offsets.hours import hour_of, shift, start_of
from serving_layer.reader.selection import Selection

Reading = Callable[[], tuple[float, Counter[str], int]]
"""One planning: its seconds, the metadata files that were opened, the data files that are left."""


def by_query(stream: HourFiles, sql: str) -> Reading:
    """`anabranch query`, in this process: load, plan, and read what is left."""

    def read() -> tuple[float, Counter[str], int]:
        with measured() as cost, stream.reader.query(sql, Selection()) as answer:
            answer.rows.read_all()
        return (
            cost.wall,
            cost.read,
            sum(len(scan.files) for planned in answer.files for scan in planned.scans),
        )

    return read


def by_command(stream: HourFiles, sql: str) -> Reading:
    """The command, as a process."""
    conf = stream.lake.folder / "conf"

    def read() -> tuple[float, Counter[str], int]:
        began = time.perf_counter()
        subprocess.run(
            [sys.executable, "-m", "anabranch.cli", "query", sql, "--conf", str(conf)],
            check=True,
            capture_output=True,
        )
        return time.perf_counter() - began, Counter(), 0

    return read


def by_pyiceberg(stream: HourFiles, hour: str) -> Reading:
    def read() -> tuple[float, Counter[str], int]:
        with measured() as cost:
            table = Lake(stream.lake.environment).load(stream.lake.name)
            files = list(table.scan(row_filter=f"ingest_hour = '{hour}'").plan_files())
        return cost.wall, cost.read, len(files)

    return read


def by_spark(spark: SparkSession, catalog: str, stream: HourFiles, hour: str) -> Reading:
    """Spark, up to the tasks that it would run; what it opened is Iceberg's own count."""

    def read() -> tuple[float, Counter[str], int]:
        began = time.perf_counter()
        rows: Any = spark.sql(
            f"SELECT * FROM {catalog}.{stream.lake.name} WHERE ingest_hour = '{hour}'"
        )
        plan = rows._jdf.queryExecution().executedPlan()
        rows._jdf.queryExecution().toRdd().getNumPartitions()
        seconds = time.perf_counter() - began
        metrics = _metrics(plan)
        return (
            seconds,
            Counter({"manifest": metrics["scannedDataManifests"]}),
            metrics["resultDataFiles"],
        )

    return read


def _metrics(plan: Any) -> Counter[str]:
    found: Counter[str] = Counter()
    metrics = plan.metrics()
    keys = metrics.keysIterator()
    while keys.hasNext():
        key = keys.next()
        found[key] += metrics.apply(key).value()
    for i in range(plan.children().size()):
        found += _metrics(plan.children().apply(i))
    return found


def _described(environment: Environment) -> dict[str, str | None]:
    """The catalog, as anabranch.yaml says it."""
    catalog = environment.catalog
    return {"name": catalog.name, "uri": catalog.uri, "warehouse": catalog.warehouse}


def configure(stream: HourFiles) -> None:
    """A configuration's folder of the stream's lake, for the command."""
    conf = stream.lake.folder / "conf"
    (conf / "streams").mkdir(parents=True)
    made = stream.lake.stream
    settings = {
        "kafka": {"bootstrap_servers": "127.0.0.1:1"},
        "catalog": _described(stream.lake.environment),
    }
    (conf / "anabranch.yaml").write_text(yaml.safe_dump(settings))
    (conf / "streams" / "events.yaml").write_text(
        yaml.safe_dump(
            {
                "topic": "events",
                "table": made.table,
                "format": "json",
                "schema": made.ddl,
                "key": "id",
            }
        )
    )


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--hours", type=int, nargs=2, default=[24, 8760])
    options.add_argument("--rounds", type=int, default=7)
    options.add_argument("--keep", type=Path, help="Build the tables here, or use those that are.")
    parsed = options.parse_args()
    with tempfile.TemporaryDirectory(prefix="anabranch-planning-") as name:
        measure(parsed.keep or Path(name), Path(name), *parsed.hours, parsed.rounds)


def build(folder: Path, hours: int) -> HourFiles:
    """The table of so many hours, made once."""
    if (folder / "catalog.db").exists():
        return HourFiles.open(folder, f"of_{hours}")
    folder.mkdir(parents=True)
    stream = HourFiles.make(
        folder, hour_of(datetime.now(UTC) - timedelta(hours=hours + 2)), f"of_{hours}"
    )
    began = time.monotonic()
    stream.past(stream.lake.state().timeline.first, hours)
    stream.fill()
    configure(stream)
    print(f"{hours} hours in {time.monotonic() - began:.0f} s", flush=True)
    return stream


def measure(folder: Path, temporary: Path, few: int, many: int, rounds: int) -> None:
    streams = {hours: build(folder / str(hours), hours) for hours in (few, many)}
    (temporary / "spark").mkdir()
    environments = [stream.lake.environment for stream in streams.values()]
    settings = {
        "kafka": {"bootstrap_servers": "127.0.0.1:1"},
        "catalog": _described(environments[0]),
    }
    with running_spark(settings, temporary / "spark") as spark:
        add_catalog(spark, environments[1])
        readers: dict[tuple[str, int, str], Reading] = {}
        for hours, stream in streams.items():
            first = stream.lake.state().timeline.first
            for where, hour in (
                ("oldest", first),
                ("middle", shift(first, hours // 2)),
                ("newest", shift(first, hours - 1)),
            ):
                sql = f"SELECT count(*) FROM {stream.lake.name} WHERE ingest_hour = '{hour}'"
                view = stream.lake.stream.view_table(stream.lake.stream.views[0])
                begin, end = start_of(hour), start_of(shift(hour, 1))
                of_view = (
                    f"SELECT sum(events) FROM {view} WHERE window_start >= '{begin}' AND "
                    f"window_start < '{end}'"
                )
                readers["Spark", hours, where] = by_spark(spark, f"of_{hours}", stream, hour)
                readers["PyIceberg", hours, where] = by_pyiceberg(stream, hour)
                readers["query", hours, where] = by_query(stream, sql)
                readers["query of the view", hours, where] = by_query(stream, of_view)
                readers["the command", hours, where] = by_command(stream, sql)
        taken: dict[tuple[str, int, str], list[float]] = defaultdict(list)
        opened: dict[tuple[str, int, str], tuple[Counter[str], int]] = {}
        for number in range(rounds + 2):
            for key, read in readers.items():
                if key[0] == "the command" and number % 3:
                    continue
                seconds, metadata, files = read()
                # The first rounds warm up the JVM and the caches of files.
                if number >= 2:
                    taken[key].append(seconds * 1000)
                    opened[key] = metadata, files
    rows = []
    for reader, where in dict.fromkeys((reader, where) for reader, _, where in readers):
        day, year = (statistics.median(taken[reader, hours, where]) for hours in (few, many))
        metadata, files = opened[reader, many, where]
        counted = (str(metadata["manifest"]), str(files)) if reader != "the command" else ("", "")
        rows.append((reader, where, f"{day:.1f}", f"{year:.1f}", f"{year / day:.2f}", *counted))
    print_table(
        ("reader", "hour", f"{few} hours, ms", f"{many} hours, ms", "ratio", "manifests", "files"),
        rows,
    )
    print(f"manifests on main: {[s.manifests('main') for s in streams.values()]}")


if __name__ == "__main__":
    main()
