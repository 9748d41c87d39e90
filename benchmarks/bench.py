"""Anabranch compared with other ways to write the same topic: `make bench`; in three minutes: `make
bench WHAT=smoke`.

The ways take turns, in several rounds. Each writes the same topic from its beginning to its end,
from a Kafka broker to local files or an S3 server. The results are medians, and ratios within a
round, since machines and their load differ. `benchmarks/recorded.json` has the ratios of
benchmarks/RESULTS.md; the smoke test compares with them.

`--master standalone` starts a Spark cluster of two workers of one core for the run. `--master
spark://…` uses a running cluster; the CPU seconds of its executors are not counted.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import peer
from registry import running_registry
from runs import OURS, Run, end_by_signals, median, on_master, run, spread
from shapes import SHAPES, Registered, Shape, fill

from anabranch.common.output import print_table
from anabranch.dev.services import Services, running

RECORDED = Path(__file__).with_name("recorded.json")
# The most that a ratio may lose against the recorded one.
LOSS = 0.15
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


def full(rounds: int, ways: tuple[str, ...] | None) -> list[Plan]:
    some = ("file_sink", "iceberg", "anabranch")
    return [
        Plan(SHAPES["json_440"], ways or (*LOCAL, *ON_S3), 1_500_000, 250_000, rounds),
        Plan(SHAPES["json_440"], ways or ("iceberg_s3", "anabranch_s3"), 1_000_000, 10_000, rounds),
        Plan(SHAPES["avro"], ways or some, 800_000, 130_000, rounds),
        Plan(SHAPES["json_2k"], ways or some, 400_000, 66_000, rounds),
        Plan(SHAPES["json_200_columns"], ways or some, 150_000, 25_000, rounds),
    ]


def smoke() -> list[Plan]:
    return [Plan(SHAPES["json_440"], ("file_sink", "anabranch"), 600_000, 150_000, 2)]


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
                "records/s",
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


def markdown(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [head, tuple("---" for _ in head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def chart(all_results: list[tuple[Plan, Results]], file: Path) -> None:
    """Draw the records per second of each way: a panel for each plan, a dot for each round."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot as plt

    figure, panels = plt.subplots(
        len(all_results), 1, figsize=(8, 2.6 * len(all_results)), squeeze=False
    )
    for (plan, results), panel in zip(all_results, panels[:, 0], strict=True):
        ways = list(results)[::-1]
        colours = ["tab:blue" if way in OURS else "tab:gray" for way in ways]
        panel.barh(
            ways, [median(results[way], "records_per_second") for way in ways], color=colours
        )
        for way in ways:
            panel.plot(
                [r.records_per_second for r in results[way]],
                [way] * len(results[way]),
                "k.",
                markersize=4,
            )
        panel.set_title(f"{plan.shape.name}, {plan.limit:,} records a micro-batch", fontsize=9)
        panel.set_xlabel("records a second", fontsize=8)
        panel.tick_params(labelsize=8)
    figure.tight_layout()
    figure.savefig(file, metadata={"Date": None})


def recorded(all_results: list[tuple[Plan, Results]], master: str) -> dict[str, float]:
    """Return the ratios of Anabranch to each other way, by shape, size of a micro-batch, way, and
    master if one is named."""
    medians = {}
    for plan, results in all_results:
        for ours in (way for way in results if way in OURS):
            for other in (
                way
                for way in results
                if way not in OURS and way.endswith("_s3") == ours.endswith("_s3")
            ):
                name = f"{plan.shape.name} {plan.limit} {ours} {other} {master}".rstrip()
                medians[name] = round(statistics.median(ratios(results, ours, other)), 3)
    return medians


def losses(now: dict[str, float], before: dict[str, float]) -> list[str]:
    """Return the ratios that lost more than LOSS against the recorded ones, as text."""
    return [
        f"{name}: {now[name]:.2f}, recorded {before[name]:.2f}"
        for name in sorted(now.keys() & before.keys())
        if now[name] < before[name] * (1 - LOSS)
    ]


def measure(plans: list[Plan]) -> tuple[list[tuple[Plan, Results]], list[str]]:
    """Run the plans. Return the results of each, and its table in Markdown."""
    every: list[tuple[Plan, Results]] = []
    text = []
    with tempfile.TemporaryDirectory(prefix="anabranch-bench-") as name:
        for plan in plans:
            # A broker for each plan, so that cached pages of other topics do not affect it.
            folder = Path(name) / f"{plan.shape.name}-{plan.limit}"
            with running(folder) as services, registered(plan, folder) as plan:
                size = fill(services.bootstrap_servers, plan.shape, plan.records) / plan.records
                results = compare(plan, services)
            every.append((plan, results))
            head, rows = table(plan, results, size)
            title = (
                f"{plan.shape.name}: {plan.records:,} records of {size:.0f} bytes, {plan.limit:,} "
                "a micro-batch"
            )
            print(title)
            print_table(head, rows)
            text.append(f"{title}, {plan.rounds} rounds\n\n{markdown(head, rows)}\n")
    return every, text


def main() -> int:
    end_by_signals()
    parser = argparse.ArgumentParser(
        description="The product against other ways to write the same topic."
    )
    parser.add_argument(
        "--smoke", action="store_true", help="compare with the recorded ratios, in three minutes"
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--ways",
        type=lambda text: tuple(text.split(",")),
        help="only these, such as file_sink,anabranch",
    )
    parser.add_argument("--shape", choices=list(SHAPES), help="only this one")
    parser.add_argument("--out", type=Path, help="a folder for bench.md, bench.json and bench.svg")
    parser.add_argument(
        "--record", action="store_true", help="write the ratios to benchmarks/recorded.json"
    )
    parser.add_argument(
        "--master", default="", help="`standalone`, or a Spark master such as spark://host:7077"
    )
    options = parser.parse_args()
    plans = smoke() if options.smoke else full(options.rounds, options.ways)
    plans = [plan for plan in plans if options.shape in (None, plan.shape.name)]
    with on_master(options.master):
        every, text = measure(plans)
    now = recorded(every, options.master)
    if options.out is not None:
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / "bench.md").write_text("\n".join(text))
        values = [
            {
                "shape": p.shape.name,
                "limit": p.limit,
                "way": way,
                "runs": [dataclasses.asdict(r) for r in runs],
            }
            for p, results in every
            for way, runs in results.items()
        ]
        (options.out / "bench.json").write_text(
            json.dumps({"ratios": now, "runs": values}, indent=2) + "\n"
        )
        chart(every, options.out / "bench.svg")
    before = json.loads(RECORDED.read_text()) if RECORDED.exists() else {}
    if options.record:
        RECORDED.write_text(json.dumps(before | now, indent=2, sort_keys=True) + "\n")
    elif lost := losses(now, before):
        print("slower than recorded by more than 15 per cent: " + "; ".join(lost))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
