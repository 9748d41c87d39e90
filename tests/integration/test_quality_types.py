"""Expectations of many types on hostile values: each has a verdict, a finding and a page."""

import json
from collections.abc import Iterator
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path
from uuid import uuid4

import pytest
import yaml
from expectations import entry, suite_of
from lakes import decide
from pyspark.sql import DataFrame, SparkSession
from sessions import with_settings

from anabranch.protocol.ledger_row import Entries, QualityResult
from batch_layer.quality.gate import run_suite
from batch_layer.quality.suite import SPEED, RowCountBaseline

AT = datetime(2026, 11, 21, 3, tzinfo=UTC)
KNOWN = RowCountBaseline(speed_rows=7, previous=lambda days: [7] * days)
SCHEMA = (
    "level INT, total BIGINT, amount DOUBLE, price DECIMAL(10, 2), text STRING, other STRING, "
    "stamp STRING, flag BOOLEAN, at TIMESTAMP, day DATE, nothing STRING, tags ARRAY<STRING>, "
    "kafka_partition INT, kafka_offset BIGINT"
)
NAN, INF, LARGEST = float("nan"), float("inf"), 2**63 - 1
NOON = (AT, AT.date(), None)
ROWS = [
    (1, LARGEST, 0.5, Decimal("1.50"), "p1", "p1", "2026-11-21T03:00:00", True, *NOON, ["a"]),
    (2, 2, -0.0, Decimal("-2.25"), "p2", "q", "2026-11-21T03:59:59", False, *NOON, []),
    (None,) * 12,
    (3, -LARGEST, NAN, Decimal("0.00"), "", "", "2026-11-20", True, None, date(1, 1, 1), None,
     ["a", None]),
    (3, 0, INF, Decimal("99999999.99"), "a\nb", None, None, None, datetime(1970, 1, 1, tzinfo=UTC),
     None, None, None),
    (None, 3, -INF, None, "Größe '\"\\", "p2", None, False, *NOON, [None]),
    (2, 2, 1e308, Decimal("0.01"), "10", "9", "2026-11-21", True, *NOON, ["b"]),
]  # fmt: skip
EVERY = Path(__file__).with_name("quality_types.expectations.yaml")
TYPES = {entry["type"] for entry in yaml.safe_load(EVERY.read_text("utf-8"))["expectations"]}
SUMMED = ["level", "kafka_offset"]
TEN = [
    entry("expect_table_row_count_to_be_between", min_value=1),
    entry("expect_column_values_to_not_be_null", column="kafka_offset"),
    entry("expect_column_values_to_be_in_set", column="level", value_set=[1, 2, 3]),
    entry("expect_column_values_to_be_between", column="level", min_value=1, max_value=3),
    entry("expect_column_values_to_match_regex", column="text", regex="p", mostly=0.3),
    entry("expect_column_max_to_be_between", column="level", max_value=3),
    entry("expect_column_mean_to_be_between", column="level", min_value=1),
    entry("expect_column_pair_values_to_be_equal", column_A="level", column_B="level"),
    entry("expect_multicolumn_sum_to_equal", column_list=SUMMED, sum_total=3, mostly=0.1),
    entry(SPEED, min_ratio=0.9),
]


@pytest.fixture(scope="module")
def rows(spark: SparkSession) -> Iterator[DataFrame]:
    frame = spark.createDataFrame(
        [(*row, 0, offset) for offset, row in enumerate(ROWS)], SCHEMA
    ).coalesce(1)
    # Without Spark's re-planning between stages a query is one job.
    with with_settings(spark, {"spark.sql.adaptive.enabled": "false"}):
        yield frame


def counted(frame: DataFrame, path: Path) -> tuple[QualityResult, int]:
    """Run a suite; return its result, and the number of queries that Spark ran for it."""
    context, group = frame.sparkSession.sparkContext, str(uuid4())
    context.setJobGroup(group, "a suite")
    try:
        quality = run_suite(frame, path, KNOWN)
        return quality, len(context.statusTracker().getJobIdsForGroup(group))
    finally:
        context.setLocalProperty("spark.jobGroup.id", None)


def types(entries: Entries | None) -> set[str]:
    return {entry["type"] for entry in entries or ()}


@pytest.mark.full
def test_every_type_has_a_verdict_and_a_finding(rows: DataFrame) -> None:
    quality = run_suite(rows, EVERY, KNOWN)
    assert TYPES == types(quality.met) == types(quality.failed)
    assert not any("raised" in entry for entry in quality.failed)
    recorded = json.loads(json.dumps(quality.as_dict(), allow_nan=False))
    row = decide("2026-11-21T03", "refused", 1, None, AT, quality=recorded)
    assert row.quality is not None and row.quality.as_dict() == quality.as_dict()


def test_only_failed_expectations_are_read_again(rows: DataFrame, tmp_path: Path) -> None:
    passed, queries = counted(rows, suite_of(tmp_path, *TEN))
    assert passed.passed
    # The number of rows, aggregates, values, and two for each expectation of several columns.
    assert queries == 7
    failing = entry("expect_column_max_to_be_between", column="level", max_value=2)
    failed, queries = counted(rows, suite_of(tmp_path, *TEN, failing))
    assert [entry["kwargs"] for entry in failed.failed] == [failing["kwargs"]]
    # The number of rows and the aggregate.
    assert queries == 7 + 2
