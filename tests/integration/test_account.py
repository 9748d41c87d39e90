"""The conditions for publishing a staged hour; a rebuild gives the same rows each time."""

from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from typing import Any

import numpy as np
import pytest
from budget import budget, full
from no_spark import NO_SPARK
from pyspark.sql import DataFrame
from world import Make, event, past_hour, spread

from anabranch.iceberg.manifests import files_by_hour
from anabranch.iceberg.parquet_writer import data_file_of
from anabranch.iceberg.staging import stage
from anabranch.kafka.client import new_producer
from anabranch.offsets.hours import start_of
from anabranch.records.staged import (
    Certain,
    Tables,
    TaskReport,
    TaskSpec,
    certain_from,
    read_facts,
    rewrite_file,
    stage_certain,
)
from batch_layer import build as building
from batch_layer import sources
from batch_layer.rebuild import Rebuilder, RebuildRequest
from batch_layer.stream_run import StreamRun


def one_day_less(rows: DataFrame) -> DataFrame:
    """A day's rows are a file of their own."""
    return rows.where("event_date != (SELECT min(event_date) FROM staged_rows)")


def one_row_more(rows: DataFrame) -> DataFrame:
    # The writer has one file open at a time, so rows come by date.
    return rows.unionByName(rows.limit(1)).coalesce(1).sortWithinPartitions("event_date")


def one_file_less(certain: Certain, spec: TaskSpec, tables: Tables) -> Certain:
    """Without the workers' file of one row."""
    files = sorted(certain.written.files, key=lambda file: file.record_count)[1:]
    return replace(certain, written=replace(certain.written, files=tuple(files)))


def one_file_more(certain: Certain, spec: TaskSpec, tables: Tables) -> Certain:
    """With one more file, of one of the workers' rows."""
    path = max(certain.written.files, key=lambda file: file.record_count).file_path
    [more] = rewrite_file(path, {0: np.arange(1, 11)}, spec.target)
    files = (*certain.written.files, data_file_of(tables.rows, more))
    return replace(
        certain,
        written=replace(certain.written, files=files),
        reports=(*certain.reports, TaskReport([more])),
    )


def one_row_less_than_reported(certain: Certain, spec: TaskSpec, tables: Tables) -> Certain:
    """With a file that has not all rows that its task reported."""
    outputs = [output for report in certain.reports for output in report.rows]
    whole = max(outputs, key=lambda output: len(read_facts(output.facts)))
    [less] = rewrite_file(whole.path, {0: np.array([0])}, spec.target)
    said = replace(whole, path=less.path, size=less.size)
    reports = tuple(
        replace(report, rows=[said if output is whole else output for output in report.rows])
        for report in certain.reports
    )
    return certain_from(reports, tables, certain.written.id, certain.written.began)


ONE_LESS = (
    "partition 0: expected 11 offsets in [0, 11), found 10: 10 good, 0 dead, 0 duplicate, 0 in gaps"
)
ONE_MORE = "rows: expected each offset once, found 1 more"


@pytest.mark.parametrize(
    "writer", ["this process", *(full(w) for w in ("workers, large hour", "spark"))]
)
def test_a_staged_hour_that_lacks_a_file_or_has_a_row_more_is_refused_and_cannot_be_overruled(
    world: Make, monkeypatch: pytest.MonkeyPatch, writer: str
) -> None:
    # Spark writes the rows of a stream with a sort order.
    files = {"files": {"sort": ["event_id"]}} if writer == "spark" else {}
    if "large" in writer:
        # Spark's tasks read the hour, and their reports prove it.
        for module in (building, sources):
            monkeypatch.setattr(module, "SMALL", 0)
    staging = "stage_certain" if "large" in writer else "stage_records"
    staged = getattr(sources, staging)
    one, hour = world(**files), past_hour(1)
    one.topic(1)
    at = start_of(hour) + timedelta(minutes=59)
    late = (0, at, event("late", at - timedelta(days=2)))
    one.serve([*spread(hour, 10, "e", partitions=1), late])
    served = one.rows()

    def refused_with(tamper: Callable[..., Any], accept: bool) -> str | None:
        """Tamper with what is staged, and return the reason of the refusal."""

        def tampered(rows: DataFrame, *arguments: Any) -> Any:
            rows.createOrReplaceTempView("staged_rows")
            return stage(tamper(rows), *arguments)

        def tampered_files(read: Any, spec: TaskSpec, tables: Tables, *rest: Any) -> Certain:
            return tamper(staged(read, spec, tables, *rest), spec, tables)

        with monkeypatch.context() as broken:
            if writer == "spark":
                broken.setattr(building, "stage", tampered)
            else:
                broken.setattr(sources, staging, tampered_files)
            [result] = one.batch(hour, accept=accept, why="never mind" if accept else None)
        assert result.decision == "refused"
        assert one.rows() == served
        return result.reason

    less, more = (
        (one_day_less, one_row_more) if writer == "spark" else (one_file_less, one_file_more)
    )
    assert refused_with(less, accept=False) == f"the balance does not close: {ONE_LESS}"
    assert refused_with(less, accept=True) == f"the balance does not close: {ONE_LESS}"
    assert refused_with(more, accept=True) == f"the balance does not close: {ONE_MORE}"
    if "large" in writer:
        assert refused_with(one_row_less_than_reported, accept=True) == (
            "the balance does not close: rows: expected 11 in the staged files, as their tasks "
            "reported, found 10"
        )
    [result] = one.batch(hour)
    assert result.decision == "accepted"
    assert one.contents() == one.acknowledged()


@pytest.mark.parametrize("hashed", [8_000_000, full(0)])
def test_a_duplicate_in_the_last_record_of_a_large_hour_is_found(
    world: Make, monkeypatch: pytest.MonkeyPatch, hashed: int
) -> None:
    """The hashes of the reports find it, and Spark does; only its file is written again."""
    for module in (building, sources):
        monkeypatch.setattr(module, "SMALL", 0)
    monkeypatch.setattr(sources, "MOST_HASHED", hashed)
    monkeypatch.setattr(sources, "write_tasks", lambda *_: 2)
    written: list[Certain] = []

    def noted(*given: Any) -> Certain:
        written.append(stage_certain(*given))
        return written[-1]

    monkeypatch.setattr(sources, "stage_certain", noted)
    one, hour = world(partitions=2), past_hour(1)
    last = start_of(hour) + timedelta(minutes=59, seconds=59)
    one.begin([*spread(hour, 400, "e"), (1, last, event("e-0", last, player="again"))])
    [result] = one.batch(hour)
    account = result.account
    assert (account.good, account.duplicate, account.conflicts) == (400, 1, 1)
    one.sent.pop()
    assert one.contents() == one.acknowledged()
    [certain] = written
    before = {file.file_path for file in certain.written.files}
    now = {path for files in files_by_hour(one.state.table, "main").values() for path in files}
    assert (len(before), len(now), len(before & now)) == (2, 2, 1)


def test_an_hour_rebuilt_some_times_has_the_same_rows(world: Make) -> None:
    one, hour = world(partitions=2), past_hour(1)
    at = start_of(hour) + timedelta(minutes=59)
    again = [(i % 2, at, event(f"e-{i}", at, player="again")) for i in range(5)]
    one.begin([*spread(hour, 40, "e"), *again, (0, at, b"not JSON")])

    one.batch(hour)
    first = one.rows()
    assert len(first) == 40
    for revision in range(2, budget(3, 6)):
        [result] = one.batch(hour, restate=True)
        assert (result.decision, result.revision) == ("accepted", revision)
        assert repr(one.rows()) == repr(first)
    assert len(one.dead()) == 1


@pytest.mark.full
def test_an_hour_gives_back_its_disk(world: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    # Spark caches the records of a stream with an archive.
    one, hours = world(archive={"raw": "30 days"}, partitions=1), [past_hour(3), past_hour(2)]
    for hour in hours:
        one.send(spread(hour, 10, hour[-2:], partitions=1))
    one.apply()

    def kept() -> set[int]:
        return set(one.spark.sparkContext._jsc.getPersistentRDDs().keys())

    before, taken = kept(), []
    monkeypatch.setattr(building, "reach", lambda step: taken.append(kept() - before))
    for hour in hours:
        assert [r.decision for r in one.batch(hour)] == ["accepted"]
        assert kept() <= before
    # The hazard: while an hour is built, its records are on the disk.
    assert any(taken)
    assert one.contents() == one.acknowledged()


def test_a_small_hour_is_read_alike(world: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows, dead letters with all their bytes, and the account."""
    one, hour = world(), past_hour(1)
    largest = str(2**63 - 1)
    one.topic(2, **{"message.timestamp.after.max.ms": largest, "retention.ms": "-1"})
    begin = start_of(hour)
    one.send([*spread(hour, 20, "e"), (0, begin, event("e-1", begin)), (1, begin, b"{broken")])
    millis = int(begin.timestamp() * 1000)
    headers = [("a", b"\x00\xff"), ("a", b""), ("ключ", "ü".encode())]
    producer = new_producer(one.job.environment.kafka, compression_type="gzip")
    try:
        # Nanoseconds, a time before 1970, the largest one, and none.
        for stamp in (millis, millis * 1_000_000, -86_400_001, 2**63 - 1, -1):
            for value in (event(f"at-{stamp}", begin), b"{broken", None):
                producer.send(one.name, value, b"k\xff", headers, 1, stamp).get(timeout=30)
                producer.send(one.name, value, None if value else b"k", [], 0, stamp).get(
                    timeout=30
                )
    finally:
        producer.close()
    one.apply()

    def rebuilt(restate: bool) -> tuple[Any, ...]:
        [result] = one.batch(hour, restate=restate, accept=True, why="half of it is broken")
        assert result.decision == "accepted"
        account = replace(result.account, run=None, quality=None)
        return one.rows(), one.dead(), account

    small = rebuilt(restate=False)
    assert {row["kafka_partition"] for row in small[1]} == {0, 1}
    monkeypatch.setattr(sources, "SMALL", 0)
    assert rebuilt(restate=True) == small


def test_small_hours_open_no_spark(world: Make) -> None:
    """With a duplicate, a dead letter, rows of the speed layer, and a later hour accepted before."""
    one, earlier, later = world(partitions=2), past_hour(2), past_hour(1)
    one.send(spread(earlier, 20, "e"))
    at = start_of(later) + timedelta(minutes=59, seconds=59)
    one.serve([*spread(later, 20, "f"), (0, at, b"{broken"), (1, at, event("e-3", at))])
    runs = {hour: StreamRun(one.job, Rebuilder(one.job, NO_SPARK)) for hour in (later, earlier)}
    results = [r for hour, run in runs.items() for r in run.rebuild([hour], RebuildRequest())]
    assert [(r.hour, r.decision) for r in results] == [(later, "accepted"), (earlier, "accepted")]
    accounts = [r.account for r in results]
    assert [(a.good, a.dead, a.duplicate) for a in accounts] == [(20, 1, 1), (20, 0, 0)]
    assert all(a.run is not None and a.run.spark is None for a in accounts)
    # Without the dead letter and the duplicate.
    del one.sent[40:]
    assert one.contents() == one.acknowledged()
