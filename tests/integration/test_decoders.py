"""Python workers decode an hour's certain records and Spark the others; where both decode one, the
values are equal."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import DataFrame
from pyspark.sql import functions as F
from world import BATCH, World, event, past_hour, spread

from anabranch import records
from anabranch.common.errors import Unexpected
from anabranch.kafka.client import new_producer
from anabranch.offsets.hours import start_of
from anabranch.protocol.ledger_row import Decoders
from anabranch.records import packed, packed_files
from anabranch.records.fast_json import CertainRows, Read
from batch_layer import sources
from batch_layer.decoders import CertainRecords
from batch_layer.rebuild import Rebuilder, RebuildRequest, Result

Make = Callable[..., World]
Batches = Iterable[pa.RecordBatch]


WORKERS = BATCH | {"decoder": "workers"}
HEADERS = [("trace", b"\x00\xff"), ("ü", b"")]


def _decoders(one: World, hour: str) -> list[Decoders | None]:
    """Return what decoded the hour, for each decision on it."""
    rows = [
        row for row in one.job.ledger.history([hour]) if row.decision in ("accepted", "refused")
    ]
    return [row.run.decoders if row.run is not None else None for row in rows]


def _sent(one: World, hour: str) -> int:
    """Good records, and one of each kind that workers leave; returns how many they leave at
    least."""
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
    producer = new_producer(one.job.environment.kafka)
    try:
        stamp = int(at.timestamp() * 1000)
        producer.send(one.name, b"{{", partition=0, timestamp_ms=stamp, headers=HEADERS).get(30)
    finally:
        producer.close()
    return len(odd) + 1


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
    counts = [
        (r.account.good, r.account.dead, r.account.duplicate, r.account.gap)
        for r in (by_spark, by_both)
    ]
    assert counts == [(802, 4, 1, 0)] * 2
    assert [
        [(h["key"], h["value"]) for h in d["headers"]] for d in one.dead("batch") if d["headers"]
    ] == [HEADERS]
    assert _contents(one) == (rows, dead)
    assert by_both.account.unknown == by_spark.account.unknown
    of_spark, of_both = _decoders(one, hour)
    assert of_spark is None and of_both is not None
    assert of_both.workers + of_both.spark == 801 + odd
    assert odd <= of_both.spark < 400
    # All certain records of a small hour are compared.
    assert (of_both.compared, of_both.differing) == (of_both.workers, None)

    # Some blocks of a large one are, or none; with --audit, all.
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
        return decode(frame, *rest, **named).withColumn(
            "level", F.expr(f"IF({is_it}, level + 1, level)")
        )

    monkeypatch.setattr(records, "decode", changed)


def _change_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers read one level one higher."""
    read = CertainRows.read

    def changed(self: CertainRows, batch: pa.RecordBatch) -> Read:
        places = zip(
            *(batch.column(n).to_pylist() for n in ("value", "partition", "offset")), strict=True
        )
        values = [
            v.replace(b'"level": 35', b'"level": 36') if (p, o) == (1, 17) else v
            for v, p, o in places
        ]
        place = batch.schema.names.index("value")
        return read(self, batch.set_column(place, "value", pa.array(values, pa.binary())))

    made = packed._pack_task

    def task(spec: packed.PackSpec) -> packed.Task:
        run = made(spec)

        def with_change(batches: Batches) -> Batches:
            # Workers are processes of their own.
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(CertainRows, "read", changed)
                yield from run(batches)

        return with_change

    monkeypatch.setattr(packed, "_pack_task", task)


@pytest.mark.parametrize(
    "change",
    [pytest.param(_change_spark, marks=pytest.mark.full), _change_workers],
    ids=["spark", "workers"],
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
    assert {r["level"] for r in one.rows()} == {
        json.loads(r.value or b"")["level"] for r in one.sent
    }
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
    assert (
        "the balance does not close: partition 1: expected 30 offsets in [0, 30), found 29: 29 good"
        in result.reason
    )


def _lose(monkeypatch: pytest.MonkeyPatch, offset: int) -> None:
    """Lose a record of partition 1 on its way to Spark."""
    for_spark = vars(CertainRecords)["for_spark"].fget
    lost = property(lambda self: for_spark(self).where(f"partition <> 1 OR offset <> {offset}"))
    monkeypatch.setattr(CertainRecords, "for_spark", lost)


def test_a_record_that_is_lost_on_the_way_to_spark_refuses_the_hour(
    world: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, hour = world(batch=WORKERS), past_hour(1)
    one.topic()
    one.send([*spread(hour, 60, "a"), (1, start_of(hour), b"{"), (1, start_of(hour), b"{{")])
    one.apply()
    _lose(monkeypatch, 30)

    result: Result = one.batch()[0]

    assert result.decision == "refused"
    assert result.reason is not None
    assert "the balance does not close" in result.reason and "from offset 30 on" in result.reason


def test_a_record_that_is_lost_on_the_way_to_the_comparison_ends_the_rebuild(
    world: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, hour = world(batch=WORKERS), past_hour(1)
    one.topic()
    one.send(spread(hour, 60, "a"))
    one.apply()
    _lose(monkeypatch, 17)

    with pytest.raises(Unexpected, match="compare the decoders: expected 60 records, found 59"):
        one.batch()

    assert one.rows() == []
