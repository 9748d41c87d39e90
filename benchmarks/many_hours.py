"""The hour of many small streams in one batch process, compared with one stream that has the sum of
their records: `make bench WHAT=many-hours STREAMS=50 RECORDS=2000`.

Each stream has a topic of two partitions with one hour of records, a duplicate in a thousand, a
dead letter in five thousand, and a table on the S3 server. Measures CPU seconds of the batch
process and its workers.
"""

from __future__ import annotations

import argparse
import tempfile
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from many import configure, create_streams
from runs import Watch, anabranch, edit, end_by_signals, log_events, run_command
from shapes import SHAPES, fill_hour

from anabranch.common.output import print_table
from anabranch.dev.services import running
from anabranch.job import open_job
from anabranch.offsets.hours import hour_of, shift

SUM = "sum"


def rebuild(environment: dict[str, str], folder: Path, *selected: str) -> tuple[float, float]:
    """Rebuild the waiting hours. Return the CPU seconds of the start until the first hour, and from
    then on."""
    command = anabranch("batch", *selected, "--output", "json")
    log, watch = run_command(command, environment, folder, Watch)
    first = next(event for event in log_events(log) if "rebuilding hour" in event["message"])
    start = watch.cpu_at(datetime.fromisoformat(first["at"]).timestamp())
    return start, watch.samples[-1].cpu - start


def check(conf: str, streams: list[str], hour: str, records: int) -> None:
    """Raise RuntimeError unless the batch layer has accounted for `records` records in the hour of
    each stream, without a gap."""
    for name in streams:
        accepted = next(
            row for row in open_job(name, conf).ledger.history([hour]) if row.decision == "accepted"
        )
        found = [accepted.good, accepted.dead, accepted.duplicate, accepted.gap]
        if found[-1] or sum(filter(None, found)) != records:
            raise RuntimeError(
                f"{name}: expected {records} records in hour {hour} and no gap, found {found}"
            )


def main() -> None:
    end_by_signals()
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--streams", type=int, default=50)
    parser.add_argument(
        "--records",
        type=int,
        default=2_000,
        help="of each stream; a multiple of 5,000 has dead ones",
    )
    parser.add_argument(
        "--spark",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="a setting of Spark to try",
    )
    parser.add_argument(
        "--alone", action="store_true", help="leave out the one stream with the sum of the records"
    )
    given = parser.parse_args()
    names = [f"s{number:02}" for number in range(given.streams)]
    with tempfile.TemporaryDirectory(prefix="anabranch-many-", ignore_cleanup_errors=True) as name:
        folder, hour = Path(name), shift(hour_of(datetime.now(UTC)), -2)
        with running(folder / "services") as services:
            environment = configure(folder, services, [*names, SUM], 10)
            conf = environment["ANABRANCH_CONF"]
            settings = dict(setting.split("=", 1) for setting in given.spark)
            edit(Path(conf) / "anabranch.yaml", {"spark": {"conf": settings}})
            create_streams(conf, services, [*names, SUM])
            rows = []
            ways = [
                (f"{given.streams} streams, {given.records:,} records each", names, given.records)
            ]
            if not given.alone:
                sum_of_all = given.streams * given.records
                ways.insert(0, (f"one stream, {sum_of_all:,} records", [SUM], sum_of_all))
            for what, streams, records in ways:
                for stream in streams:
                    shape = replace(SHAPES["json_440"], name=stream)
                    fill_hour(services.bootstrap_servers, shape, records, hour, is_new=False)
                start, cpu = rebuild(environment, folder, *streams)
                check(conf, streams, hour, records)
                rows.append((what, f"{start:.0f}", f"{cpu:.0f}", f"{cpu / len(streams):.2f}"))
                print(rows[-1], flush=True)
    print_table(("hours", "CPU s until the first", "CPU s of all", "CPU s an hour"), rows)


if __name__ == "__main__":
    main()
