"""Savings by the archive of Java classes: `make bench WHAT=archive`.

Runs both jobs on a thousand records with and without the archive, in turn. Measures the seconds of
the command and the CPU seconds of all its processes.
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from pathlib import Path

from thousand_records import HOUR, run_java, thousand_records

from anabranch.common.output import print_table
from anabranch.spark.archive import make_archive
from anabranch.spark.jars import cache_folder, ensure_jars


def cost_of(conf: Path, *arguments: str) -> tuple[float, float]:
    """Seconds and CPU seconds of a command."""
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    command = [sys.executable, "-m", "anabranch.cli", *arguments, "--conf", str(conf)]
    subprocess.run(command, check=True, capture_output=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.monotonic() - began, sum(
        getattr(after, kind) - getattr(before, kind) for kind in ("ru_utime", "ru_stime")
    )


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--rounds", type=int, default=5)
    rounds = options.parse_args().rounds
    found: dict[tuple[str, str], list[tuple[float, float]]] = defaultdict(list)
    with thousand_records() as (one, folder):
        caches = {"with": folder / "cache", "without": folder / "no-cache"}
        for cache in caches.values():
            cache.mkdir()
            (cache / "jars").symlink_to(cache_folder() / "jars")
        os.environ["ANABRANCH_CACHE"] = str(caches["with"])
        began = time.monotonic()
        file = make_archive(ensure_jars(), print)
        print(
            f"made in {time.monotonic() - began:.0f} s, {file.stat().st_size / 1e6:.0f} MB",
            flush=True,
        )
        run_java(one, "")
        batch = ("batch", one.name, "--hour", HOUR, "--restate")
        jobs = {
            "batch, an hour of 1,000 records": batch,
            "speed, nothing to read": ("speed", one.name, "--available-now"),
        }
        for number in range(rounds + 1):
            for name, cache in caches.items():
                os.environ["ANABRANCH_CACHE"] = str(cache)
                for job, arguments in jobs.items():
                    cost = cost_of(one.folder, *arguments)
                    # The first round publishes what is there.
                    if number:
                        found[job, name].append(cost)
    rows = []
    for job in jobs:
        spent = {
            name: [statistics.median(one) for one in zip(*found[job, name], strict=True)]
            for name in caches
        }
        ratios = [spent["with"][i] / spent["without"][i] for i in range(2)]
        figures = [spent[name][i] for i in range(2) for name in ("without", "with")]
        rows.append(
            (
                job,
                *(f"{x:.1f}" for x in figures[:2]),
                f"{ratios[0]:.2f}",
                *(f"{x:.1f}" for x in figures[2:]),
                f"{ratios[1]:.2f}",
            )
        )
    print_table(
        ("job", "s without", "s with", "ratio", "CPU s without", "CPU s with", "ratio"), rows
    )


if __name__ == "__main__":
    main()
