"""Reads around bad records: stretches hold every record that Spark cannot read, and few others."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from anabranch import config
from anabranch.kafka import source

ODD = st.dictionaries(st.integers(0, 3), st.sets(st.integers(0, 999), max_size=60).map(sorted))


@settings(max_examples=30)
@given(ODD, st.integers(1, 8))
def test_stretches_and_rest_are_all_offsets_once(odd: dict[int, list[int]], at_most: int) -> None:
    ranges = dict.fromkeys(range(4), (0, 1000))
    taken = source.plan_driver_ranges(odd, at_most)
    assert len(taken) <= max(at_most, len(odd))
    parts = [*taken, *source.plan_spark_ranges(ranges, taken)]
    offsets = sorted((p, o) for part in parts for p, (s, e) in part.items() for o in range(s, e))
    assert offsets == [(p, o) for p in range(4) for o in range(1000)]
    covered = {(p, o) for part in taken for p, (s, e) in part.items() for o in range(s, e)}
    assert {(p, o) for p, odd_offsets in odd.items() for o in odd_offsets} <= covered


def test_records_alone_are_taken_alone_around_an_overflow() -> None:
    taken = source.plan_driver_ranges({0: [7, 3], 2: [5]}, 32)
    assert taken == [{0: (3, 4)}, {0: (7, 8)}, {2: (5, 6)}]
    expected = [{0: (4, 7), 1: (0, 2)}, {0: (8, 9)}]
    assert source.plan_spark_ranges({0: (3, 9), 1: (0, 2), 2: (5, 6)}, taken) == expected
    assert source.is_unreadable(
        Exception("Caused by: java.lang.ArithmeticException: long overflow")
    )
    assert source.is_unreadable(type("ArithmeticException", (Exception,), {})("long overflow"))
    assert not source.is_unreadable(Exception("java.lang.ArithmeticException: divide by zero"))
    assert not source.is_unreadable(Exception("org.apache.kafka.common.errors.TimeoutException"))


@pytest.mark.parametrize(
    ("millis", "moment"),
    [
        (0, datetime(1970, 1, 1, tzinfo=UTC)),
        (1_700_000_000_123, datetime(2023, 11, 14, 22, 13, 20, 123_000, tzinfo=UTC)),
        (1_790_000_000_000_000, None),
        (2**63 - 1, None),
        (-(2**63), None),
    ],
)
def test_a_timestamp_out_of_range_is_null(millis: int, moment: datetime | None) -> None:
    assert source.time_of(millis) == moment


def test_a_silent_partition_delays_many_topics_less(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source, "_read", lambda _, options, ranges: options)
    kafka, spark = config.Kafka(bootstrap_servers="127.0.0.1:1"), cast(Any, None)
    alone: Any = source.read_ranges(spark, kafka, "t", {0: (0, 1)})
    assert alone["kafkaConsumer.pollTimeoutMs"] == "60000"
    joint: Any = source.read_topics(spark, kafka, {"t": {0: (0, 1)}}, "g")
    waits = int(joint["kafkaConsumer.pollTimeoutMs"])
    # A request that is lost is sent again in the meantime.
    assert int(joint["kafka.request.timeout.ms"]) < waits <= 15_000
