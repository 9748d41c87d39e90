"""Reads, writes and cost of a publish, by the micro-batches of an hour and the hours of a table:
`make bench WHAT=metadata`. With `ARGS=--catalogs`: publishes a second by catalog (commits.py).

It runs the product's own publishes on a local SQLite catalog and a local folder, with files that
exist by name only: no Spark, no Kafka, no S3. Times are CPU seconds, which other programs on the
machine affect least; requests are the minimum that S3 would receive.
"""

from __future__ import annotations

import argparse
import tempfile
from datetime import UTC, datetime, timedelta
from pathlib import Path

import commits
from scale import Cost, ScaledStream, measured, median_of

from anabranch.common.output import print_table
from anabranch.iceberg.hour_files import files_of
from anabranch.offsets.hours import hour_of, shift
from anabranch.protocol.ledger import Ledger

PARTITIONS = 12
REPEATS = 30
Row = tuple[int, dict[str, float]]


def by_micro_batches(folder: Path, marks: list[int]) -> list[Row]:
    """One hour with more and more micro-batches of three event dates; at each mark a copy of its
    cost."""
    rows: list[Row] = []
    first = hour_of(datetime.now(UTC) - timedelta(days=3))
    stream = ScaledStream.create(folder, first, PARTITIONS)
    recent: list[Cost] = []
    for number in range(1, marks[-1] + 1):
        with measured() as cost:
            stream.micro_batch(first, dates=3)
        recent = [*recent[1 - REPEATS :], cost]
        if number in marks:
            rows.append((number, _common(stream, median_of(recent), first)))
            print(f"{number} micro-batches: {rows[-1][1]}", flush=True)
    return rows


def acceptance(folder: Path, marks: list[int]) -> list[Row]:
    """Accepting an hour of so many micro-batches."""
    rows: list[Row] = []
    for mark in marks:
        first = hour_of(datetime.now(UTC) - timedelta(days=3))
        stream = ScaledStream.create(folder / str(mark), first, PARTITIONS)
        for _ in range(mark):
            stream.micro_batch(first, dates=3)
        stream.micro_batch(shift(first, 1))
        stream.seal([first])
        with measured() as cost:
            stream.accept(first)
        rows.append((mark, {"accept CPU s": cost.cpu, "accept requests": cost.requests}))
        print(f"an hour of {mark} micro-batches accepted: {rows[-1][1]}", flush=True)
    return rows


def by_hours(folder: Path, marks: list[int]) -> list[Row]:
    """A table of so many accepted hours: a micro-batch, an acceptance, an hour's plan, and the
    ledger."""
    rows: list[Row] = []
    for mark in marks:
        first = hour_of(datetime.now(UTC) - timedelta(hours=mark + 2))
        stream = ScaledStream.create(folder / str(mark), first, PARTITIONS)
        stream.past(first, mark)
        last, costs = shift(first, mark), []
        for _ in range(REPEATS):
            with measured() as cost:
                stream.micro_batch(last)
            costs.append(cost)
        values = _common(stream, median_of(costs), shift(last, -1))
        stream.micro_batch(shift(last, 1))
        stream.seal([last])
        with measured() as accepted:
            stream.accept(last)
        name = stream.lake.stream.hours_table
        with measured() as recorded:
            Ledger(stream.lake.lake, name).record_waiting(stream.lake.state())
        values |= {
            "accept CPU s": accepted.cpu,
            "accept requests": accepted.requests,
            "ledger CPU s": recorded.cpu,
        }
        rows.append((mark, values))
        print(f"{mark} hours: {values}", flush=True)
    return rows


def _common(stream: ScaledStream, publish: Cost, hour: str) -> dict[str, float]:
    with measured() as load:
        state = stream.lake.state()
    with measured() as plan:
        files_of(state.table, "main", hour)
    return {
        "publish CPU s": publish.cpu,
        "publish requests": publish.requests,
        "load CPU s": load.cpu,
        "plan CPU s": plan.cpu,
        "manifests": stream.manifests("main"),
        "metadata KB": stream.metadata_bytes() / 1024,
    }


def show(title: str, unit: str, rows: list[Row]) -> None:
    names = list(rows[0][1])
    print(f"\n{title}")
    print_table(
        (unit, *names), [(mark, *(f"{values[n]:.3g}" for n in names)) for mark, values in rows]
    )


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--batches", type=int, nargs="+", default=[60, 300, 900, 1800, 3600])
    options.add_argument("--hours", type=int, nargs="+", default=[24, 168, 744, 8760])
    options.add_argument(
        "--catalogs", action="store_true", help="publishes a second by catalog instead"
    )
    options.add_argument("--seconds", type=float, default=15, help="of each catalog and load")
    parsed = options.parse_args()
    if parsed.catalogs:
        commits.compare(parsed.seconds)
        return
    with tempfile.TemporaryDirectory(prefix="anabranch-metadata-") as name:
        folder = Path(name)
        batches = by_micro_batches(folder / "batches", parsed.batches)
        accepted = acceptance(folder / "accepted", parsed.batches)
        hours = by_hours(folder / "hours", parsed.hours)
    show("A micro-batch by how many the hour has", "micro-batches", batches)
    show("Accepting an hour by how many micro-batches it had", "micro-batches", accepted)
    show("A table by how many accepted hours it has", "hours", hours)


if __name__ == "__main__":
    main()
