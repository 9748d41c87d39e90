"""Expectations of many types on hostile values: each has a verdict, a finding and its part of a
page, and only failed ones are read again."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from expectations import entry, suite_of
from lakes import decide
from pyspark.sql import DataFrame, SparkSession
from sessions import with_settings

from anabranch.protocol.ledger_row import Entries, QualityResult
from batch_layer.quality.gate import run_suite
from batch_layer.quality.suite import PREVIOUS, SPEED, RowCountBaseline

AT = datetime(2026, 11, 21, 3, tzinfo=UTC)
KNOWN = RowCountBaseline(speed_rows=7, previous=lambda days: [7] * days)
SCHEMA = (
    "level INT, total BIGINT, amount DOUBLE, price DECIMAL(10, 2), text STRING, other STRING, "
    "stamp STRING, flag BOOLEAN, at TIMESTAMP, day DATE, nothing STRING, tags ARRAY<STRING>, "
    "kafka_partition INT, kafka_offset BIGINT"
)
COLUMNS = [part.split(" ")[0] for part in SCHEMA.replace("(10, 2)", "").split(", ")]
NAN, INF, LARGEST = float("nan"), float("inf"), 2**63 - 1
ROWS = [
    (
        1,
        LARGEST,
        0.5,
        Decimal("1.50"),
        "p1",
        "p1",
        "2026-11-21T03:00:00",
        True,
        AT,
        AT.date(),
        None,
        ["a"],
    ),
    (
        2,
        2,
        -0.0,
        Decimal("-2.25"),
        "p2",
        "q",
        "2026-11-21T03:59:59",
        False,
        AT,
        AT.date(),
        None,
        [],
    ),
    (None, None, None, None, None, None, None, None, None, None, None, None),
    (
        3,
        -LARGEST,
        NAN,
        Decimal("0.00"),
        "",
        "",
        "2026-11-20",
        True,
        None,
        date(1, 1, 1),
        None,
        ["a", None],
    ),
    (
        3,
        0,
        INF,
        Decimal("99999999.99"),
        "a\nb",
        None,
        None,
        None,
        datetime(1970, 1, 1, tzinfo=UTC),
        None,
        None,
        None,
    ),
    (None, 3, -INF, None, "Größe '\"\\", "p2", None, False, AT, AT.date(), None, [None]),
    (2, 2, 1e308, Decimal("0.01"), "10", "9", "2026-11-21", True, AT, AT.date(), None, ["b"]),
]


def bounds(column: str, *low_high: tuple[Any, Any], **more: Any) -> list[dict[str, Any]]:
    return [
        {"column": column, "min_value": low, "max_value": high} | more for low, high in low_high
    ]


NUMBERS = [
    *bounds("level", (1, 3), (None, 2)),
    *bounds("amount", (-1, 1), (None, INF)),
    *bounds("price", (-2.25, 1e9)),
    *bounds("total", (-LARGEST, LARGEST)),
]
STRICT = [*bounds("level", (1, 3), strict_min=True), *bounds("level", (0, 3), strict_max=True)]
TIMES = [*bounds("at", ("1970-01-01T00:00:00", "2027-01-01T00:00:00"), ("2026-11-21", None))]
EXTREMES = [
    *NUMBERS,
    *STRICT,
    *TIMES,
    *bounds("stamp", ("2026-11-20", "2026-11-22"), ("2026-11-21T03:00:00", None)),
    *bounds("nothing", (0, 1)),
]
SETS: list[tuple[str, list[Any]]] = [
    ("text", ["p1", "p2", "", "a\nb", "Größe '\"\\", "10"]),
    ("level", ["1", "2"]),
    ("level", [1, 2, 3]),
    ("amount", [0.5, 0, NAN, INF]),
    ("price", [1.5, 0.01]),
    ("day", ["2026-11-21"]),
    ("nothing", ["a"]),
]
REGEXES = [("text", "^p[0-9]$"), ("level", "[4-9]"), ("text", "(?s)^.*$"), ("nothing", "a")]
PAIRS: list[dict[str, Any]] = [
    {
        "column_A": "text",
        "column_B": "other",
        "ignore_row_if": "both_values_are_missing",
        "mostly": 0.4,
    },
    {
        "column_A": "text",
        "column_B": "other",
        "ignore_row_if": "either_value_is_missing",
        "mostly": 0.4,
    },
    {"column_A": "text", "column_B": "other", "ignore_row_if": "neither"},
    {"column_A": "level", "column_B": "total", "ignore_row_if": "either_value_is_missing"},
]
LISTS: list[dict[str, Any]] = [
    {"column_list": ["text", "other"], "ignore_row_if": "all_values_are_missing", "mostly": 0.3},
    {"column_list": ["text", "other", "stamp"], "ignore_row_if": "any_value_is_missing"},
    {"column_list": ["level", "total", "kafka_offset"], "ignore_row_if": "never"},
]

CASES: dict[str, list[dict[str, Any]]] = {
    "expect_column_min_to_be_between": [*bounds("level", (2, None)), *EXTREMES],
    "expect_column_max_to_be_between": EXTREMES,
    "expect_column_mean_to_be_between": NUMBERS,
    "expect_column_sum_to_be_between": [*bounds("level", (None, 100)), *NUMBERS],
    "expect_column_stdev_to_be_between": NUMBERS,
    "expect_column_proportion_of_non_null_values_to_be_between": [
        *bounds("level", (0.5, 1), (0.9, None)),
        *bounds("nothing", (0, 0)),
    ],
    "expect_column_to_exist": [
        {"column": "level"},
        {"column": "nowhere"},
        {"column": "level", "column_index": 1},
    ],
    "expect_column_value_lengths_to_be_between": [
        *bounds("text", (0, 9), (1, 2)),
        *bounds("nothing", (1, 1)),
        *bounds("text", (0, 9), strict_min=True),
    ],
    "expect_column_value_lengths_to_equal": [
        {"column": "text", "value": 2},
        {"column": "nothing", "value": 2},
        {"column": "text", "value": 2, "mostly": 0.5},
    ],
    "expect_column_values_to_be_between": [*NUMBERS, *STRICT, *TIMES],
    "expect_column_values_to_be_null": [
        {"column": "nothing"},
        {"column": "text"},
        {"column": "amount", "mostly": 0.1},
        {"column": "tags", "mostly": 0.3},
    ],
    "expect_column_values_to_not_be_null": [
        {"column": "kafka_offset"},
        {"column": "text"},
        {"column": "nothing", "mostly": 0.1},
        {"column": "tags", "mostly": 0.7},
    ],
    "expect_column_values_to_be_in_set": [{"column": c, "value_set": s} for c, s in SETS],
    "expect_column_values_to_not_be_in_set": [
        {"column": "stamp", "value_set": ["x"]},
        *({"column": c, "value_set": s, "mostly": 0.8} for c, s in SETS),
    ],
    "expect_column_values_to_match_regex": [
        {"column": c, "regex": r, "mostly": 0.3} for c, r in REGEXES
    ],
    "expect_column_values_to_not_match_regex": [{"column": c, "regex": r} for c, r in REGEXES],
    "expect_column_values_to_match_regex_list": [
        {"column": "text", "regex_list": ["^p", "."], "match_on": "any"},
        {"column": "text", "regex_list": ["(?s)^.*$"], "match_on": "all"},
    ],
    "expect_column_values_to_not_match_regex_list": [
        {"column": "text", "regex_list": ["^p", "x"]},
        {"column": "text", "regex_list": ["^y$"]},
    ],
    "expect_column_pair_values_to_be_equal": [*PAIRS, {"column_A": "level", "column_B": "level"}],
    "expect_column_pair_values_a_to_be_greater_than_b": [
        {
            "column_A": "level",
            "column_B": "level",
            "or_equal": True,
            "ignore_row_if": "either_value_is_missing",
        },
        *PAIRS,
    ],
    "expect_column_pair_values_to_be_in_set": [
        {
            "column_A": "level",
            "column_B": "kafka_offset",
            "value_pairs_set": [[1, 0], [2, 1], [3, 3]],
            "mostly": m,
        }
        for m in (0.4, 1)
    ],
    "expect_multicolumn_sum_to_equal": [
        {
            "column_list": ["level", "kafka_offset"],
            "sum_total": 3,
            "ignore_row_if": ignored,
            "mostly": m,
        }
        for ignored, m in (
            ("all_values_are_missing", 0.1),
            ("never", 0.3),
            ("any_value_is_missing", 0.2),
        )
    ],
    "expect_multicolumn_values_to_be_equal": LISTS,
    "expect_select_column_values_to_be_unique_within_record": LISTS,
    "expect_table_column_count_to_be_between": [{"min_value": 14}, {"min_value": 15}],
    "expect_table_column_count_to_equal": [{"value": 14}, {"value": 3}],
    "expect_table_columns_to_match_ordered_list": [
        {"column_list": COLUMNS},
        {"column_list": COLUMNS[::-1]},
    ],
    "expect_table_columns_to_match_set": [
        {"column_set": ["level"], "exact_match": False},
        {"column_set": ["level"]},
    ],
    "expect_table_row_count_to_be_between": [{"min_value": 7, "max_value": 7}, {"min_value": 8}],
    "expect_table_row_count_to_equal": [{"value": 7}, {"value": 0}],
    SPEED: [{"min_ratio": 0.9}, {"max_ratio": 0.9}],
    PREVIOUS: [{"min_ratio": 0.9}, {"max_ratio": 0.9}],
}
ENTRIES = [{"type": type, "kwargs": kwargs} for type, cases in CASES.items() for kwargs in cases]

TEN = [
    entry("expect_table_row_count_to_be_between", min_value=1),
    entry("expect_column_values_to_not_be_null", column="kafka_offset"),
    entry("expect_column_values_to_be_in_set", column="level", value_set=[1, 2, 3]),
    entry("expect_column_values_to_be_between", column="level", min_value=1, max_value=3),
    entry("expect_column_values_to_match_regex", column="text", regex="p", mostly=0.3),
    entry("expect_column_max_to_be_between", column="level", max_value=3),
    entry("expect_column_mean_to_be_between", column="level", min_value=1),
    entry("expect_column_pair_values_to_be_equal", column_A="level", column_B="level"),
    entry(
        "expect_multicolumn_sum_to_equal",
        column_list=["level", "kafka_offset"],
        sum_total=3,
        mostly=0.1,
    ),
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
    with queries(frame) as count:
        quality = run_suite(frame, path, KNOWN)
    return quality, count()


@contextmanager
def queries(frame: DataFrame) -> Iterator[Callable[[], int]]:
    """Count the queries that Spark runs until the end of the `with`."""
    context, group = frame.sparkSession.sparkContext, str(uuid4())
    context.setJobGroup(group, "a suite")
    try:
        yield lambda: len(context.statusTracker().getJobIdsForGroup(group))
    finally:
        context.setLocalProperty("spark.jobGroup.id", None)


def types(entries: Entries | None) -> set[str]:
    return {entry["type"] for entry in entries or ()}


@pytest.mark.full
def test_every_type_has_a_verdict_and_a_finding(rows: DataFrame, tmp_path: Path) -> None:
    quality = run_suite(rows, suite_of(tmp_path, *ENTRIES), KNOWN)
    assert set(CASES) == types(quality.met) == types(quality.failed)
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
