"""Anabranch compared with other ways to write the same topic: `make bench`.

The ways take turns, in several rounds. Each writes the same topic from its beginning to its end,
from a Kafka broker to local files or an S3 server. The results are medians, and ratios within a
round, since machines and their load differ. The figures are in docs/reference/performance.md.

`--master standalone` starts a Spark cluster of two workers of one core for the run. `--master
spark://…` uses a running cluster; the CPU seconds of its executors are not counted.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import peer
from parts import measure_parts
from registry import running_registry
from runs import Run, end_by_signals, median, on_master, run, spread
from shapes import SHAPES, Registered, Shape, fill

from anabranch.common.output import print_table
from anabranch.dev.services import Services, running

LOCAL, ON_S3 = (*peer.WAYS, "anabranch"), ("file_sink_s3", "iceberg_s3", "anabranch_s3")
Results = dict[str, list[Run]]


@dataclasses.dataclass(frozen=True)
class Plan:
    """The ways to compare for a shape, the number of records, and of records in a micro-batch."""

    shape: Shape
    ways: tuple[str, ...]
    records: int
    limit: int
    rounds: int


def plan_shapes(rounds: int, ways: tuple[str, ...] | None) -> list[Plan]:
    some, two = ("file_sink", "iceberg", "anabranch"), ("file_sink", "anabranch")
    return [
        Plan(SHAPES["json_440"], ways or (*LOCAL, *ON_S3), 1_500_000, 250_000, rounds),
        Plan(SHAPES["json_440"], ways or ("iceberg_s3", "anabranch_s3"), 1_000_000, 10_000, rounds),
        Plan(SHAPES["json_broken"], ways or two, 1_500_000, 250_000, rounds),
        Plan(SHAPES["json_select"], ways or two, 1_500_000, 250_000, rounds),
        Plan(SHAPES["json_nested"], ways or two, 800_000, 130_000, rounds),
        Plan(SHAPES["avro"], ways or some, 800_000, 130_000, rounds),
        Plan(SHAPES["protobuf"], ways or two, 800_000, 130_000, rounds),
        Plan(SHAPES["json_2k"], ways or some, 400_000, 66_000, rounds),
        Plan(SHAPES["json_200_columns"], ways or some, 150_000, 25_000, rounds),
    ]


@contextmanager
def registered(plan: Plan, folder: Path) -> Iterator[Plan]:
    """Register the plan's Avro schema with a registry that runs within the `with`; a plan without
    one is unchanged."""
    if not plan.shape.avro:
        yield plan
        return
    (folder / "registry").mkdir()
    with running_registry(folder / "registry") as registry:
        id = registry.register(f"{plan.shape.name}-value", plan.shape.avro)
        yield dataclasses.replace(
            plan, shape=dataclasses.replace(plan.shape, registered=Registered(registry.url, id))
        )


def compare(plan: Plan, services: Services) -> Results:
    """Run all ways of a plan in turn, round after round."""
    results: Results = {way: [] for way in plan.ways}
    for number in range(plan.rounds):
        for way in plan.ways:
            done = run(way, plan.shape, services, plan.limit, plan.records)
            results[way].append(done)
            print(
                f"{plan.shape.name}, round {number + 1}, {way}: {done.records_per_second:,.0f} "
                f"records/s, {done.cpu_per_million:.1f} CPU s a million",
                flush=True,
            )
    return results


def ratios(results: Results, way: str, base: str) -> list[float]:
    """Return the ratio of one way's rate to another's in each round."""
    pairs = zip(results[way], results[base], strict=True)
    return [one.records_per_second / other.records_per_second for one, other in pairs]


def table(
    plan: Plan, results: Results, size: float
) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    base = next(
        way
        for way in ("file_sink", "file_sink_s3", "iceberg", "iceberg_s3", plan.ways[0])
        if way in results
    )
    head = (
        "way",
        "records/s",
        "least to most",
        f"of {base}",
        "MB/s",
        "CPU s a million",
        "CPU s a micro-batch",
        "s a micro-batch",
        "JVM MB",
    )
    rows: list[tuple[str, ...]] = []
    for way, runs in results.items():
        rate, (least, most) = median(runs, "records_per_second"), spread(runs, "records_per_second")
        rows.append(
            (
                way,
                f"{rate:,.0f}",
                f"{least:,.0f} to {most:,.0f}",
                f"{statistics.median(ratios(results, way, base)):.2f}",
                f"{rate * size / 1e6:.0f}",
                f"{median(runs, 'cpu_per_million'):.1f}",
                f"{median(runs, 'cpu_per_micro_batch'):.2f}",
                f"{median(runs, 'seconds_per_micro_batch'):.2f}",
                f"{median(runs, 'jvm_peak_mb'):,.0f}",
            )
        )
    return head, rows


def measure(plans: list[Plan]) -> None:
    """Run the plans, and print a table of each."""
    with tempfile.TemporaryDirectory(prefix="anabranch-bench-") as name:
        for plan in plans:
            # A broker for each plan, so that cached pages of other topics do not affect it.
            folder = Path(name) / f"{plan.shape.name}-{plan.limit}"
            with running(folder) as services, registered(plan, folder) as plan:
                size = fill(services.bootstrap_servers, plan.shape, plan.records) / plan.records
                if plan.shape.proto:
                    # Spark's Protobuf functions are not among its wheel's jars: others read Avro.
                    avro = dataclasses.replace(SHAPES["avro"], registered=Registered("", 1))
                    fill(services.bootstrap_servers, avro, plan.records)
                results = compare(plan, services)
            print(
                f"{plan.shape.name}: {plan.records:,} records of {size:.0f} bytes, {plan.limit:,} "
                f"a micro-batch, {plan.rounds} rounds"
            )
            print_table(*table(plan, results, size))


def main() -> None:
    end_by_signals()
    parser = argparse.ArgumentParser(
        description="The product against other ways to write the same topic."
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--records", type=float, default=1.0, help="factor of the records of each shape"
    )
    parser.add_argument(
        "--ways",
        type=lambda text: tuple(text.split(",")),
        help="only these, such as file_sink,anabranch",
    )
    parser.add_argument("--shape", choices=list(SHAPES), help="only this one")
    parser.add_argument(
        "--master", default="", help="`standalone`, or a Spark master such as spark://host:7077"
    )
    parser.add_argument("--parts", action="store_true", help="where the time of a record goes")
    options = parser.parse_args()
    if options.parts:
        measure_parts(options.rounds)
        return
    plans = [
        dataclasses.replace(
            plan,
            records=int(plan.records * options.records),
            limit=int(plan.limit * options.records),
        )
        for plan in plan_shapes(options.rounds, options.ways)
        if options.shape in (None, plan.shape.name)
    ]
    with on_master(options.master):
        measure(plans)


if __name__ == "__main__":
    main()
