"""The quality gate's one pass against Great Expectations' own execution: the same verdicts, found
values, and pages."""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
import yaml
from lakes import decide
from pyspark.sql import DataFrame, SparkSession
from sessions import with_settings

from batch_layer.quality import data_docs, one_pass
from batch_layer.quality.gate import SuiteResult, _evaluate, _exception, run_suite
from batch_layer.quality.row_counts import PREVIOUS, SPEED, RowCountBaseline
from batch_layer.quality.suite import Expectation

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
TWO_OF_EACH = [
    {"type": type, "kwargs": kwargs} for type, cases in CASES.items() for kwargs in cases[:2]
]

TEN = [
    {"type": "expect_table_row_count_to_be_between", "kwargs": {"min_value": 1}},
    {"type": "expect_column_values_to_not_be_null", "kwargs": {"column": "kafka_offset"}},
    {
        "type": "expect_column_values_to_be_in_set",
        "kwargs": {"column": "level", "value_set": [1, 2, 3]},
    },
    {
        "type": "expect_column_values_to_be_between",
        "kwargs": {"column": "level", "min_value": 1, "max_value": 3},
    },
    {
        "type": "expect_column_values_to_match_regex",
        "kwargs": {"column": "text", "regex": "p", "mostly": 0.3},
    },
    {"type": "expect_column_max_to_be_between", "kwargs": {"column": "level", "max_value": 3}},
    {"type": "expect_column_mean_to_be_between", "kwargs": {"column": "level", "min_value": 1}},
    {
        "type": "expect_column_pair_values_to_be_equal",
        "kwargs": {"column_A": "level", "column_B": "level"},
    },
    {
        "type": "expect_multicolumn_sum_to_equal",
        "kwargs": {"column_list": ["level", "kafka_offset"], "sum_total": 3, "mostly": 0.1},
    },
    {"type": SPEED, "kwargs": {"min_ratio": 0.9}},
]


@pytest.fixture(scope="module")
def rows(spark: SparkSession) -> Iterator[DataFrame]:
    frame = spark.createDataFrame(
        [(*row, 0, offset) for offset, row in enumerate(ROWS)], SCHEMA
    ).coalesce(1)
    # Without Spark's re-planning between stages a query is one job.
    with with_settings(spark, {"spark.sql.adaptive.enabled": "false"}):
        yield frame


def suite(folder: Path, *entries: dict[str, Any]) -> Path:
    path = folder / "some.expectations.yaml"
    path.write_text(yaml.safe_dump({"name": "some", "expectations": list(entries)}))
    return path


def both_ways(
    frame: DataFrame, path: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[tuple[SuiteResult, int], tuple[SuiteResult, int]]:
    """Return each verdict and how many queries it took: by the one pass where it knows the type,
    and by Great Expectations' own execution alone."""
    ours = counted(frame, path)
    with monkeypatch.context() as without:
        without.setattr(one_pass, "TYPES", frozenset())
        return ours, counted(frame, path)


def counted(frame: DataFrame, path: Path) -> tuple[SuiteResult, int]:
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


def record(quality: SuiteResult) -> str:
    return json.dumps(quality.recorded().as_dict(), indent=1)


def verdicts(frame: DataFrame, entries: list[dict[str, Any]]) -> dict[int, bool | str]:
    """Return whether each expectation is met, or what it raised, without a second reading of those
    that are not."""
    known = {
        i: Expectation(e["type"], e["kwargs"])
        for i, e in enumerate(entries)
        if e["type"] not in (SPEED, PREVIOUS)
    }
    results = _evaluate(frame, "some", known, {"result_format": "BOOLEAN_ONLY"})
    return {i: _exception(result) or result.success for i, result in results.items()}


@pytest.mark.parametrize(
    "entries",
    [TWO_OF_EACH, pytest.param(ENTRIES, marks=pytest.mark.full)],
    ids=["two of each", "all"],
)
def test_every_type_has_great_expectations_own_verdicts_on_hostile_values(
    entries: list[dict[str, Any]], rows: DataFrame, monkeypatch: pytest.MonkeyPatch
) -> None:
    with queries(rows) as count:
        ours = verdicts(rows, entries)
    assert count() == 1
    monkeypatch.setattr(one_pass, "TYPES", frozenset())
    assert verdicts(rows, entries) == ours
    assert set(ours.values()) == {True, False}


@pytest.mark.parametrize("kept", ["kafka_offset < 0", "kafka_offset = 2"])
def test_without_rows_and_of_nothing_but_nulls_too(
    kept: str, rows: DataFrame, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = verdicts(rows.where(kept), TWO_OF_EACH[::2])
    monkeypatch.setattr(one_pass, "TYPES", frozenset())
    assert verdicts(rows.where(kept), TWO_OF_EACH[::2]) == ours


@pytest.mark.full
def test_findings_and_pages_equal_those_of_great_expectations(
    rows: DataFrame, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (ours, _), (own, _) = both_ways(rows, suite(tmp_path, *TWO_OF_EACH), monkeypatch)
    assert record(ours) == record(own)
    assert (
        set(CASES) == one_pass.TYPES == {e.type for e in ours.met} == {f.type for f in ours.failed}
    )
    assert [f for f in ours.failed if f.raised] == []

    pages = []
    for name, quality in (("ours", ours), ("own", own)):
        row = decide("2026-11-21T03", "refused", 1, None, AT, quality=json.loads(record(quality)))
        data_docs.build("some", "games.some", [row], tmp_path / name)
        (page,) = (tmp_path / name / "validations").rglob("*.html")
        # Great Expectations puts the time at which it renders a page into it, and ids of its parts.
        pages.append(
            re.sub(
                r"\d{8}T\d{6}\.\d{6}Z|[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}",
                "",
                page.read_text("utf-8"),
            )
        )
    assert pages[0] == pages[1]


def test_ten_expectations_are_one_query_and_great_expectations_evaluates_the_others(
    rows: DataFrame, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (ours, queries), (own, own_queries) = both_ways(rows, suite(tmp_path, *TEN), monkeypatch)
    assert ours.passed and record(ours) == record(own)
    assert (queries, own_queries) == (
        1,
        7,
    )  # rows, aggregates, values, and two for each of several columns

    chosen = {"column": "level", "row_condition": "kafka_offset < 2", "condition_parser": "spark"}
    left = [
        {"type": "expect_column_values_to_be_unique", "kwargs": {"column": "kafka_offset"}},
        {"type": "expect_column_values_to_not_be_null", "kwargs": chosen},
    ]
    with warnings.catch_warnings():  # row_condition as text is deprecated, and what a file can hold
        warnings.simplefilter("ignore", DeprecationWarning)
        (ours, queries), (own, own_queries) = both_ways(
            rows, suite(tmp_path, *TEN, *left), monkeypatch
        )
    assert ours.passed and record(ours) == record(own)
    assert (queries, own_queries) == (
        1 + 3,
        7 + 3,
    )  # uniqueness; the chosen rows; the findings in them


def test_only_failed_expectations_are_read_again(
    rows: DataFrame, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing = {
        "type": "expect_column_max_to_be_between",
        "kwargs": {"column": "level", "max_value": 2},
    }
    (ours, queries), (own, _) = both_ways(rows, suite(tmp_path, *TEN, failing), monkeypatch)
    assert record(ours) == record(own)
    assert queries == 2


@pytest.mark.parametrize(
    "spoiling",
    [
        [
            ("expect_column_values_to_match_regex", {"column": "text", "regex": "("})
        ],  # fails the one query
        [
            ("expect_column_values_to_not_be_null", {"column": "nowhere"}),
            ("expect_column_pair_values_to_be_equal", {"column_A": "level", "column_B": "nowhere"}),
            ("expect_column_values_to_be_between", {"column": "tags", "min_value": 0}),
        ],
    ],
)
def test_an_expectation_that_cannot_be_evaluated_spoils_no_other_verdict(
    spoiling: list[tuple[str, dict[str, Any]]],
    rows: DataFrame,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    entries = [{"type": type, "kwargs": kwargs} for type, kwargs in spoiling]
    (ours, _), (own, _) = both_ways(rows, suite(tmp_path, *TEN, *entries), monkeypatch)
    assert record(ours) == record(own)
    assert [f.type for f in ours.failed if f.raised] == [type for type, _ in spoiling]
    assert len(ours.met) == len(TEN)
