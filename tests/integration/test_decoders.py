"""Python workers decode an hour's certain records and Spark the others; where both decode one, the values are equal."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from world import BATCH, World, event, past_hour, spread

from anabranch import records
from anabranch.offsets.hours import start_of
from anabranch.protocol.ledger_row import Decoders
from anabranch.records import packed, packed_files
from anabranch.records.packed import BLOCK
from batch_layer import sources
from batch_layer.decoders import CertainRecords
from batch_layer.rebuild import Rebuilder, RebuildRequest, Result

Make = Callable[..., World]
Batches = Iterable[pa.RecordBatch]


WORKERS = BATCH | {"decoder": "workers"}


def _decoders(one: World, hour: str) -> list[Decoders | None]:
    """Of each decision on an hour, what decoded it."""
    rows = [row for row in one.job.ledger.history([hour]) if row.decision in ("accepted", "refused")]
    return [row.run.decoders if row.run is not None else None for row in rows]


def _sent(one: World, hour: str) -> int:
    """Good records, and one of each kind that workers leave; returns how many they leave at least."""
    at = start_of(hour) + timedelta(minutes=30)
    one.send(spread(hour, 400, "a"))
    odd: list[bytes | None] = [
        None,
        b"{",
        event("half", at).replace(b'"half"', b'"\\ud83d\\ude00"'),
        event("nested", at, other={"x": [1]}),
        event("late", at + timedelta(days=3)),
    ]
    one.send([(i % 2, at, value) for i, value in enumerate(odd)])
    one.send([(0, at, event("a-1", at))])
    one.send(spread(hour, 400, "b"))
    return len(odd)


def test_an_hour_of_both_decoders_is_the_hour_that_spark_alone_decodes(
    world: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, hour = world(batch=WORKERS | {"decoder": "spark"}), past_hour(1)
    one.topic()
    odd = _sent(one, hour)
    one.apply()
    [by_spark] = one.batch()
    rows, dead = _contents(one)
    one.configure(batch=WORKERS)
    one.reopen()

    [by_both] = one.batch(hour, restate=True, why="workers")

    assert [r.decision for r in (by_spark, by_both)] == ["accepted"] * 2
    counts = [(r.account.good, r.account.dead, r.account.duplicate, r.account.gap) for r in (by_spark, by_both)]
    assert counts == [(802, 3, 1, 0)] * 2
    assert _contents(one) == (rows, dead)
    assert by_both.account.unknown == by_spark.account.unknown
    of_spark, of_both = _decoders(one, hour)
    assert of_spark is None and of_both is not None
    assert of_both.workers + of_both.spark == 801 + odd
    assert odd <= of_both.spark < 400
    # Of a small hour all certain records are compared.
    assert (of_both.compared, of_both.differing) == (of_both.workers, None)

    # Of a large one some blocks are, or none; with --audit, all.
    monkeypatch.setattr(sources, "SMALL", 0)
    one.configure(batch=WORKERS | {"compare_one_in": 2**31})
    one.reopen()
    one.batch(hour, restate=True, why="sampled")
    request = RebuildRequest(restate=True, why="audited", audit=True)
    assert Rebuilder(one.job, one.spark).rebuild(hour, request).decision == "accepted"
    assert [d.compared for d in _decoders(one, hour)[2:] if d is not None] == [0, of_both.workers]
    assert _contents(one) == (rows, dead)


def _contents(one: World) -> tuple[list[Any], list[Any]]:
    rows = sorted((sorted(row.items(), key=str) for row in one.rows("batch")), key=str)
    dead = sorted((sorted(row.items(), key=str) for row in one.dead("batch")), key=str)
    return rows, dead


def _change_spark(monkeypatch: pytest.MonkeyPatch) -> None:
    """Spark's decoder reads one level one higher."""
    decode = records.decode

    def changed(frame: DataFrame, *rest: Any, **named: Any) -> DataFrame:
        is_it = "kafka_partition = 1 AND kafka_offset = 17"
        return decode(frame, *rest, **named).withColumn("level", F.expr(f"IF({is_it}, level + 1, level)"))

    monkeypatch.setattr(records, "decode", changed)


def _change_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers read one level one higher."""
    made = packed._pack_task

    def task(spec: packed.PackSpec) -> packed.Task:
        run, column = made(spec), packed.RECORD

        def changed(batches: Batches) -> Batches:
            for batch in batches:
                record = pa.RecordBatch.from_struct_array(batch.column(column))
                values = [
                    v.replace(b'"level": 35', b'"level": 36') if (p, o) == (1, 17) else v
                    for v, p, o in zip(
                        *(record.column(n).to_pylist() for n in ("value", "partition", "offset")), strict=True
                    )
                ]
                place = record.schema.names.index("value")
                record = record.set_column(place, "value", pa.array(values, pa.binary()))
                place = batch.schema.names.index(column)
                yield from run([batch.set_column(place, column, record.to_struct_array())])

        return changed

    monkeypatch.setattr(packed, "_pack_task", task)


@pytest.mark.parametrize(
    "change", [pytest.param(_change_spark, marks=pytest.mark.full), _change_workers], ids=["spark", "workers"]
)
def test_a_record_that_the_decoders_read_differently_refuses_its_hour_and_spark_decodes_it_next(
    world: Make, monkeypatch: pytest.MonkeyPatch, change: Callable[[pytest.MonkeyPatch], None]
) -> None:
    one, hour = world(batch=WORKERS), past_hour(1)
    one.topic()
    one.send(spread(hour, 60, "a"))
    one.apply()
    with monkeypatch.context() as changed:
        change(changed)

        [refused] = one.batch()

    assert refused.decision == "refused"
    assert refused.reason is not None
    assert "found 1 that differ: partition 1, offset 17: level;" in refused.reason
    assert one.rows() == []
    [decoders] = _decoders(one, hour)
    assert decoders == Decoders(60, 0, 60, ({"partition": 1, "offset": 17, "columns": ["level"]},))

    # No input has changed, yet the next run builds the hour, and Spark decodes all of it.
    [accepted] = one.batch()

    assert (accepted.decision, accepted.revision) == ("accepted", 1)
    assert one.contents() == one.acknowledged()
    assert {r["level"] for r in one.rows()} == {json.loads(r.value or b"")["level"] for r in one.sent}
    assert _decoders(one, hour)[1:] == [None]


def test_a_row_that_is_lost_between_decoder_and_file_refuses_the_hour(
    world: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A row that workers lose is missing in the account, whatever the decoders agree on."""
    one, hour = world(batch=WORKERS), past_hour(1)
    one.topic()
    one.send(spread(hour, 60, "a"))
    one.apply()
    write = packed_files._write_task

    def losing(spec: packed_files.WriteSpec) -> packed.Task:
        # As an unknown duplicate.
        return write(replace(spec, dropped={1: pa.array([17])}))

    monkeypatch.setattr(packed_files, "_write_task", losing)

    result: Result = one.batch()[0]

    assert (result.decision, one.rows()) == ("refused", [])
    assert result.reason is not None
    assert "the balance does not close: partition 1: expected 30 offsets in [0, 30), found 29: 29 good" in result.reason


def test_a_record_that_is_lost_on_the_way_to_spark_refuses_the_hour(
    world: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, hour = world(batch=WORKERS), past_hour(1)
    one.topic()
    one.send([*spread(hour, 60, "a"), (1, start_of(hour), b"{"), (1, start_of(hour), b"{{")])
    one.apply()
    left = vars(CertainRecords)["left"].fget
    lost = property(lambda self: left(self).where("kafka_offset <> 30"))
    monkeypatch.setattr(CertainRecords, "left", lost)

    result: Result = one.batch()[0]

    assert result.decision == "refused"
    assert result.reason is not None
    assert "the balance does not close" in result.reason and "from offset 30 on" in result.reason


def test_blocks_are_chosen_by_the_hours_name_and_one_in_so_many(spark: SparkSession) -> None:
    """And whatever the order in which records are read."""
    hours = [f"2026-11-21T{h:02}" for h in range(6)]
    offsets = spark.range(0, 1_000 * BLOCK, BLOCK // 2).selectExpr("0 AS partition", "id AS offset")
    chosen = {}
    for hour in hours:
        of_hour = offsets.where(packed.is_compared(hour, 50)).collect()
        chosen[hour] = {row["offset"] // BLOCK for row in of_hour}
        # Both halves of each block.
        assert len(of_hour) == 2 * len(chosen[hour])
    assert all(5 <= len(blocks) <= 45 for blocks in chosen.values())
    assert len({frozenset(blocks) for blocks in chosen.values()}) == 6
    assert offsets.where(packed.is_compared(hours[0], 1)).count() == 2_000
