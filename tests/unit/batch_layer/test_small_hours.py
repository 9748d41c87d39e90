"""Hours that are read without Spark: the records' parts, the places that the table has, and a
session that opens on first use."""

import threading
from types import SimpleNamespace
from typing import Any, cast

import pyarrow as pa
import pytest
from pyspark.sql import SparkSession

from anabranch.common.errors import ConfigurationError, Transient
from anabranch.decode.inputs import split_records
from anabranch.spark.session import LazySpark
from batch_layer.offset_counts import OffsetMasks


def record(size: int) -> Any:
    return SimpleNamespace(key=None, value=b"x" * size if size else None)


@pytest.mark.parametrize(
    ("sizes", "parts"),
    [
        ([], []),
        ([0, 0], [2]),
        ([1] * 10_001, [10_000, 1]),
        # A part ends once it has more than 16 MiB.
        ([2**24, 1, 1], [2, 1]),
        ([2**25, 2**25], [1, 1]),
    ],
)
def test_parts_of_records(sizes: list[int], parts: list[int]) -> None:
    records = [record(size) for size in sizes]
    found = list(split_records(records))
    assert [len(part) for part in found] == parts
    assert [r for part in found for r in part] == records


@pytest.mark.parametrize(
    ("partition", "offsets", "expected"),
    [
        (0, [10, 12], False),
        (0, [10, 11], True),
        (1, [0], True),
        # Outside of the ranges.
        (0, [9, 14], False),
        (7, [11], False),
    ],
)
def test_places_that_were_not_read(partition: int, offsets: list[int], expected: bool) -> None:
    def places(partition: int, offsets: list[int]) -> pa.Table:
        ofs = pa.array(offsets, pa.int64())
        of = pa.array([partition] * len(offsets), pa.int32())
        return pa.table({"kafka_partition": of, "kafka_offset": ofs})

    masks = OffsetMasks.of([places(0, [10, 12, 13])], {0: (10, 14), 1: (0, 1)})
    assert masks.lacks([places(partition, offsets)]) is expected


def test_a_session_opens_once_for_all_threads() -> None:
    opened: list[object] = []

    def open_session() -> SparkSession:
        opened.append(object())
        return cast(SparkSession, opened[-1])

    lazy, found = LazySpark(open_session), list[object]()
    assert lazy.opened is None
    threads = [threading.Thread(target=lambda: found.append(lazy())) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [lazy.opened] * 8
    assert len(opened) == 1


def test_a_session_that_cannot_be_opened_is_tried_again() -> None:
    answers: list[Any] = [ConfigurationError("no workers"), cast(SparkSession, object())]

    def open_session() -> SparkSession:
        answer = answers.pop(0)
        if isinstance(answer, ConfigurationError):
            raise answer
        return cast(SparkSession, answer)

    lazy = LazySpark(open_session)
    with pytest.raises(ConfigurationError, match="no workers"):
        lazy()
    assert lazy() is lazy.opened


def test_an_error_without_spark_is_classified() -> None:
    lazy = LazySpark(lambda: cast(SparkSession, None))
    with pytest.raises(Transient), lazy.explained("rebuild an hour"):
        raise ConnectionResetError("connection reset by peer")
