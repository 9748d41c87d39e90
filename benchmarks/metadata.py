"""Reads, writes and cost of a publish, by the micro-batches of an hour and the hours of a table:
`make bench WHAT=metadata`. With `ARGS=--age`: what commands do about an old hour; with
`ARGS=--catalogs`: publishes a second by catalog (commits.py).

It runs the product's own publishes on a local SQLite catalog and a local folder, with files that
exist by name only: no Spark, no Kafka, no S3. Times are CPU seconds, which other programs on the
machine affect least; requests are the minimum that S3 would receive.
"""

from __future__ import annotations

import argparse
import multiprocessing
import tempfile
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, cast
from unittest import mock

import commits
import pyarrow.compute as pc
from lakes import DDL, new_stream
from named_files import named_file
from pyiceberg.conversions import to_bytes
from pyiceberg.types import PrimitiveType
from scale import Cost, ScaledStream, measured, median_of

from anabranch.common.output import print_table
from anabranch.config import EventTime, Stream
from anabranch.config.views import WINDOW_START
from anabranch.iceberg import admin, table_schemas
from anabranch.iceberg.commits import Change, Commit
from anabranch.iceberg.manifests import files_by_hour, files_of
from anabranch.iceberg.snapshots import heads
from anabranch.job import Job
from anabranch.offsets.hours import hour_of, shift, start_of
from anabranch.operations.reports.status import status_of
from anabranch.protocol.ledger import Ledger, decision
from anabranch.protocol.partials import digest_of
from anabranch.protocol.publish import new_id
from anabranch.protocol.state import load_state
from anabranch.protocol.watermarks import completeness
from serving_layer import views
from serving_layer.query.datasets import plan_files
from serving_layer.views import derive

PARTITIONS = 12
REPEATS = 30
_FILLED_AT_ONCE = 48
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


def by_age(folder: Path, marks: list[int]) -> list[Row]:
    """A table of so many accepted hours and a view of it: what commands do about the hour in the
    middle, each in a new process, without imports and Kafka's answers."""
    rows: list[Row] = []
    # Forks of a process with the imports.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["metadata"])
    for mark in marks:
        first = hour_of(datetime.now(UTC) - timedelta(hours=mark + 2))
        stream = ScaledStream.create(folder / str(mark), first, PARTITIONS)
        stream.past(first, mark)
        stream.micro_batch(shift(first, mark))
        hours = [shift(first, i) for i in range(mark)]
        _fill_view(stream, hours)
        values = {}
        for name in PARTS:
            # Each part is measured three times, each time without caches.
            with ProcessPoolExecutor(1, context, max_tasks_per_child=1) as pool:
                given = [(name, folder / str(mark), hours[mark // 2])] * 3
                values[f"{name}, ms"] = 1000 * min(pool.map(measure_part, given))
        rows.append((mark, values))
        print(f"{mark} hours: {values}", flush=True)
    return rows


def viewed() -> Stream:
    """Return the stream with a view."""
    columns = f"{DDL}, at TIMESTAMP"
    return new_stream(
        schema=columns,
        event_time=EventTime(column="at", past=timedelta(hours=2), future=timedelta(minutes=30)),
        views={"hourly": {"window": "1 hour", "aggregates": {"events": "count"}}},
    )


def _fill_view(stream: ScaledStream, hours: list[str]) -> None:
    """Record the acceptances, and commit partials of the hours, as the batch layer does."""
    one, now = stream.lake, datetime.now(UTC)
    one.ledger.record(decision(h, "accepted", 1, None, now, f"accepted-{h}") for h in hours)
    seen = viewed()
    [view] = seen.views
    name, schema = seen.partials_table(view), table_schemas.partials_schema(seen, view)
    admin.create(one.lake, name, schema, ("ingest_hour",), admin.TABLE_PROPERTIES)
    admin.add_branches(one.lake, name, {})
    files = files_by_hour(one.table(), "main")
    fields = {n: schema.find_field(n) for n in ("ingest_hour", "decision", "files", "definition")}
    for start in range(0, len(hours), _FILLED_AT_ONCE):
        table, some, made = one.lake.load(name), hours[start : start + _FILLED_AT_ONCE], []
        for hour in some:
            inputs = (hour, f"accepted-{hour}", digest_of(files[hour]), seen.definition(view))
            bounds = {
                f.field_id: to_bytes(cast(PrimitiveType, f.field_type), value)
                for f, value in zip(fields.values(), inputs, strict=True)
            }
            window = schema.find_field(WINDOW_START)
            bounds[window.field_id] = to_bytes(
                cast(PrimitiveType, window.field_type), start_of(hour)
            )
            made.append(named_file(table.location(), hour, start_of(hour).date(), bounds))
        change = Change("main", tuple(made), clear=tuple(some))
        one.lake.commit(table, Commit(new_id(), heads(table), (change,)))


def _plan_hour(one: Any, hour: str) -> int:
    files = files_of(one.table(), "main", hour)
    return len(files)


def _query_hour(one: Any, hour: str) -> int:
    condition = pc.field("ingest_hour") == hour
    return len(plan_files(one.name, one.table()).select(condition))


def _status(one: Any, hour: str) -> int:
    # Without a topic: what Kafka answers does not depend on the age of a table.
    kafka: Any = mock.Mock(describe=lambda topic, confirmed: None)
    job = Job(one.environment, one.stream, one.lake, kafka)
    return len(status_of(job, load_state(one.lake, one.name)).hours)


def _complete(one: Any, hour: str) -> int:
    return completeness(viewed(), load_state(one.lake, one.name), hour).accepted


def _accepted(one: Any, hour: str) -> int:
    return len(Ledger(one.lake, one.stream.hours_table).history([hour]))


def _query_view(one: Any, hour: str) -> int:
    seen = viewed()
    made = derive(one.lake, seen, seen.views[0], load_state(one.lake, one.name))
    condition = pc.field(WINDOW_START) == start_of(hour)
    rows, stored = made.files.values()
    return len(rows.select()) + len(stored.select(condition))


def _view_status(one: Any, hour: str) -> int:
    return sum(v.filled for v in views.fill_status(one.lake, viewed()))


PARTS: dict[str, Callable[[Any, str], int]] = {
    "hour": _plan_hour,
    "query of the hour": _query_hour,
    "status": _status,
    "completeness": _complete,
    "accepted hour": _accepted,
    "query of the view": _query_view,
    "status of the view": _view_status,
}


def measure_part(given: tuple[str, Path, str]) -> float:
    """Return the CPU seconds of a part, from the load of the table on."""
    name, folder, hour = given
    one = ScaledStream.open(folder, PARTITIONS).lake
    one.lake.catalog  # noqa: B018
    with measured() as cost:
        if not PARTS[name](one, hour):
            raise RuntimeError(f"{name}: expected files or hours, found none")
    return cost.cpu


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
        "--age", action="store_true", help="only commands about an old hour, by --hours"
    )
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
        if parsed.age:
            aged = by_age(folder, parsed.hours)
            show("Commands about the hour in the middle of a table", "hours", aged)
            return
        batches = by_micro_batches(folder / "batches", parsed.batches)
        accepted = acceptance(folder / "accepted", parsed.batches)
        hours = by_hours(folder / "hours", parsed.hours)
    show("A micro-batch by how many the hour has", "micro-batches", batches)
    show("Accepting an hour by how many micro-batches it had", "micro-batches", accepted)
    show("A table by how many accepted hours it has", "hours", hours)


if __name__ == "__main__":
    main()
