"""The conditions for publishing a staged hour; a rebuild gives the same rows each time."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pyarrow as pa
import pytest
from budget import budget
from pyiceberg.manifest import DataFile
from pyiceberg.table import Table
from pyspark.sql import DataFrame
from world import World, event, past_hour, spread

from anabranch.iceberg.staging import stage
from anabranch.offsets.hours import start_of
from anabranch.records.packed_files import WriteSpec, write_files
from batch_layer import build as building

Make = Callable[..., World]


def one_day_less(rows: DataFrame) -> DataFrame:
    """A day's rows are a file of their own."""
    return rows.where("event_date != (SELECT min(event_date) FROM staged_rows)")


def one_row_more(rows: DataFrame) -> DataFrame:
    # The writer has one file open at a time, so rows come by date.
    return rows.unionByName(rows.limit(1)).coalesce(1).sortWithinPartitions("event_date")


def one_file_less(write: Callable[[pa.Array], list[DataFile]]) -> list[DataFile]:
    """Workers' file of one row."""
    return sorted(write(pa.array([], pa.int64())), key=lambda file: file.record_count)[1:]


def one_file_more(write: Callable[[pa.Array], list[DataFile]]) -> list[DataFile]:
    """Workers' files, and one with one of their rows."""
    return [*write(pa.array([], pa.int64())), *write(pa.array(range(1, 11), pa.int64()))]


ONE_LESS = (
    "partition 0: expected 11 offsets in [0, 11), found 10: 10 good, 0 dead, 0 duplicate, 0 in gaps"
)
ONE_MORE = "rows: expected each offset once, found 1 more"


@pytest.mark.parametrize("writer", ["workers", pytest.param("spark", marks=pytest.mark.full)])
def test_a_staged_hour_that_lacks_a_file_or_has_a_row_more_is_refused_and_cannot_be_overruled(
    world: Make, monkeypatch: pytest.MonkeyPatch, writer: str
) -> None:
    # Spark writes the rows of a stream with a sort order.
    files = {"files": {"sort": ["event_id"]}} if writer == "spark" else {}
    one, hour = world(**files), past_hour(1)
    one.topic(1)
    late = start_of(hour) - timedelta(days=2)
    one.send(
        [
            *spread(hour, 10, "e", partitions=1),
            (0, start_of(hour) + timedelta(minutes=59), event("late", late)),
        ]
    )
    one.apply()
    one.speed()
    served = one.rows()

    def refused_with(tamper: Callable[[Any], Any], accept: bool) -> str | None:
        """Tamper with what is staged, and return the reason of the refusal."""

        def tampered(rows: DataFrame, *arguments: Any) -> Any:
            rows.createOrReplaceTempView("staged_rows")
            return stage(tamper(rows), *arguments)

        def tampered_files(
            pieces: DataFrame, others: DataFrame | None, tasks: int, spec: WriteSpec, table: Table
        ) -> Any:
            return tamper(
                lambda dropped: write_files(
                    pieces, others, tasks, replace(spec, dropped={0: dropped}), table
                )
            )

        with monkeypatch.context() as broken:
            broken.setattr(
                building,
                *(("stage", tampered) if writer == "spark" else ("write_files", tampered_files)),
            )
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
    [result] = one.batch(hour)
    assert result.decision == "accepted"
    assert one.contents() == one.acknowledged()


def test_an_hour_rebuilt_some_times_has_the_same_rows(world: Make) -> None:
    one, hour = world(), past_hour(1)
    one.topic()
    at = start_of(hour) + timedelta(minutes=59)
    again = [(i % 2, at, event(f"e-{i}", at, player="again")) for i in range(5)]
    one.send([*spread(hour, 40, "e"), *again, (0, at, b"not JSON")])
    one.apply()

    def content() -> str:
        rows = sorted(one.rows(), key=lambda r: (r["kafka_partition"], r["kafka_offset"]))
        return hashlib.sha256(repr([sorted(row.items()) for row in rows]).encode()).hexdigest()

    one.batch(hour)
    first = content()
    assert len(one.rows()) == 40
    for revision in range(2, budget(3, 6)):
        [result] = one.batch(hour, restate=True)
        assert (result.decision, result.revision) == ("accepted", revision)
        assert content() == first
    assert len(one.dead()) == 1


@pytest.mark.full
def test_an_hour_gives_back_the_disk_that_it_took(
    world: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, hours = world(), [past_hour(3), past_hour(2)]
    one.topic(1)
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
