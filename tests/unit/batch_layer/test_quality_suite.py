"""A suite's file loads whole or not at all; what the gate says of a failed expectation."""

import json
from collections.abc import Callable
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from anabranch.common.errors import ConfigurationError
from batch_layer.quality.gate import _exception, describe_failure
from batch_layer.quality.suite import (
    PREVIOUS,
    SPEED,
    Expectation,
    RowCountBaseline,
    great_expectations,
    load_suite,
    plan_bounds,
)

STREAMS = Path(__file__).parents[3] / "conf" / "streams"
UNIQUE = {"type": "expect_column_values_to_be_unique", "kwargs": {"column": "event_id"}}


def _file(folder: Path, *entries: Any, **keys: Any) -> Path:
    path = folder / "some.expectations.yaml"
    path.write_text(yaml.safe_dump({"name": "some", "expectations": list(entries)} | keys))
    return path


def test_suites_load_whole_and_in_order_with_defaults(tmp_path: Path) -> None:
    path = STREAMS / "game_events.expectations.yaml"
    suite = load_suite(path)
    raw = yaml.safe_load(path.read_text())["expectations"]
    assert suite.name == "game_events" and len(suite.expectations) == 5
    found = [(e.type, e.kwargs, e.severity) for e in suite.expectations]
    assert found == [(e["type"], e["kwargs"], e["severity"]) for e in raw]
    since = {"meta": {"since": date(2026, 11, 21)}}
    second = load_suite(_file(tmp_path, UNIQUE | since, UNIQUE | {"severity": "info"}))
    assert [e.severity for e in second.expectations] == ["critical", "info"]
    with pytest.raises(ConfigurationError, match=r"none\.yaml: expected a readable suite"):
        load_suite(tmp_path / "none.yaml")
    entries = [
        {"type": SPEED, "kwargs": {"min_ratio": 0.99}, "severity": "warning"},
        {"type": PREVIOUS, "kwargs": {"days": 14, "min_days": 2, "min_ratio": 0.5, "max_ratio": 2}},
    ]
    third = load_suite(_file(tmp_path, *entries))
    of_previous = (PREVIOUS, entries[1]["kwargs"], "critical")
    found = [(e.type, e.kwargs, e.severity) for e in third.expectations]
    assert found == [(SPEED, {"min_ratio": 0.99}, "warning"), of_previous]


def test_packages_of_few_expectations_are_imported_on_first_use() -> None:
    great_expectations()
    import altair
    from scipy import stats

    assert stats.entropy([1, 1], [1, 1]) == 0
    assert altair.Chart.__name__ == "Chart"


@pytest.mark.parametrize(
    ("info", "expected"),
    [
        ({"raised_exception": False, "exception_message": None}, None),
        ({}, None),
        (None, None),
        ({"raised_exception": True, "exception_message": "no column\nat line 1"}, "no column"),
        (
            {
                "metric 1": {"raised_exception": True, "exception_message": "no column"},
                "metric 2": {"raised_exception": True, "exception_message": "no column"},
                "metric 3": {"raised_exception": False, "exception_message": None},
            },
            "no column",
        ),
        ({"m": {"raised_exception": True, "exception_message": "called o1\nCaused by: A: why\n\tat x"}}, "A: why"),
        ({"m": {"raised_exception": True, "exception_message": ""}}, "no message"),
    ],
)  # fmt: skip
def test_an_exception_is_read_flat_and_by_metric(info: Any, expected: str | None) -> None:
    assert _exception(SimpleNamespace(exception_info=info)) == expected


BETWEEN = "expect_column_values_to_be_between"
FAILED: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    (BETWEEN, {"column": "amount", "min_value": 0, "max_value": 10000}, {"element_count": 1000, "unexpected_count": 3, "partial_unexpected_list": [-5.0, -6.0]}),
    ("expect_column_values_to_match_regex", {"column": "p", "regex": "^p$", "mostly": 0.9}, {"element_count": 2, "unexpected_count": 1, "partial_unexpected_list": ["x" * 500]}),
    ("expect_column_values_to_not_be_in_set", {"column": "p", "value_set": ["a", "b"]}, {"element_count": 2, "unexpected_count": 1, "partial_unexpected_list": ["a"]}),
    ("expect_table_row_count_to_be_between", {"min_value": 1}, {"observed_value": 0}),
    ("expect_column_mean_to_be_between", {"column": "amount", "max_value": 1}, {"observed_value": None}),
    ("expect_column_to_exist", {"column": "amount"}, {}),
]  # fmt: skip


def test_a_failed_expectation_is_one_sentence(recorded: Callable[[Any], None]) -> None:
    said = []
    for type_, kwargs, result in FAILED:
        failed = describe_failure(Expectation(type=type_, kwargs=kwargs), result, None)
        assert failed["unexpected_count"] == result.get("unexpected_count")
        said.append(failed["message"])
    recorded(said)


def test_the_verdict_is_json_whatever_was_observed(recorded: Callable[[Any], None]) -> None:
    seen = [
        Decimal("1.50"), datetime(2026, 11, 21, tzinfo=UTC), float("nan"), b"\x00",
        {"a": (1, None)}, True, 0.5,
    ]  # fmt: skip
    kwargs = {"column": "c", "min_value": date(2026, 1, 1)}
    expected = Expectation(type="expect_table_x", kwargs=kwargs)
    entry = describe_failure(expected, {"observed_value": seen, "unexpected_count": 7}, None)
    assert json.loads(json.dumps(entry, allow_nan=False)) == entry
    recorded(entry)


FOUND_AT = [{"player": "p-4711", "kafka_partition": 1, "kafka_offset": 3}]
FOUND = {"partial_unexpected_list": ["p-4711"], "partial_unexpected_index_list": FOUND_AT}


def test_a_failed_expectation_names_rows_and_is_short_in_the_ledger() -> None:
    index = [{"amount": -5.0, "kafka_partition": 1, "kafka_offset": i} for i in range(9)]
    result = {
        "element_count": 1000, "unexpected_count": 9, "partial_unexpected_list": ["x" * 5000] * 5,
        "partial_unexpected_index_list": index,
    }  # fmt: skip
    kwargs = {"column": "amount", "value_set": list(range(1000))}
    in_set = "expect_column_values_to_be_in_set"
    expectation = Expectation(type=in_set, kwargs=kwargs, severity="warning")
    entry = describe_failure(expectation, result, None)
    found = "found 9 of 1000 rows otherwise (the first: partition 1, offset 0)"
    assert entry["message"].endswith(found)
    assert entry["rows"] == [{"partition": 1, "offset": i} for i in range(5)]
    assert (entry["severity"], entry["element_count"]) == ("warning", 1000)
    assert entry["kwargs"]["value_set"] == [*range(20), "… 1000 in all"]
    assert len(json.dumps(entry)) < 2500


@pytest.mark.parametrize(
    ("type_", "result"),
    [
        ("expect_column_values_to_be_null", {"element_count": 2, "unexpected_count": 1, **FOUND}),
        ("expect_column_values_to_be_null", {"unexpected_count": 1, **FOUND}),
        ("expect_column_max_to_be_between", {"observed_value": "p-4711"}),
        ("expect_column_distinct_values_to_be_in_set", {"observed_value": ["p-4711"], "details": FOUND}),
        ("expect_column_quantile_values_to_be_between", {"observed_value": {"values": ["p-4711"]}}),
        ("expect_column_most_common_value_to_be_in_set", {"observed_value": ["p-4711"]}),
    ],
)  # fmt: skip
def test_a_failed_expectation_has_no_value_of_a_row(type_: str, result: dict[str, Any]) -> None:
    invalid = "[CAST_INVALID_INPUT] The value '{}"
    for raised in (None, *map(invalid.format, ("O'p-4711' of the type STRING", "p-4711…; none"))):
        expectation = Expectation(type=type_, kwargs={"column": "player"})
        failed = describe_failure(expectation, result, raised)
        assert "4711" not in json.dumps(failed)
        assert raised is None or failed["raised"].startswith(invalid.format("…'"))


RAISED = (
    '[CAST_OVERFLOW] The value 4711L of the type "BIGINT" is',
    "[RANGE] -4711.25 is no Decimal(4, 2)",
    'NumberFormatException: For input string: "p-4711"',
    'Error: The column "player" in BatchData does not',
    'Error: The column "4711" in BatchData does not',
    "[UNRESOLVED] A column `level_2` cannot be resolved",
)


def test_an_exception_is_recorded_without_values(recorded: Callable[[Any], None]) -> None:
    any_of = Expectation(type="expect_any", kwargs={"column": "player"})
    recorded([describe_failure(any_of, {}, raised)["raised"] for raised in RAISED])


def previous(*counts: int) -> RowCountBaseline:
    return RowCountBaseline(previous=lambda days: counts[:days])


BOUNDS: list[tuple[str, dict[str, Any], RowCountBaseline]] = [
    (SPEED, {"min_ratio": 0.99, "max_ratio": 1.01}, RowCountBaseline(1000)),
    (SPEED, {"min_ratio": 0.07}, RowCountBaseline(100)),
    (SPEED, {"max_ratio": 1.1}, RowCountBaseline(100)),
    (SPEED, {"min_ratio": 1}, RowCountBaseline(0)),
    (SPEED, {"min_ratio": 1}, RowCountBaseline(why="it skipped it")),
    (PREVIOUS, {"min_ratio": 0.5, "max_ratio": 2}, previous(100, 300, 90)),
    (PREVIOUS, {"min_ratio": 0.5, "days": 1}, previous(100, 300)),
    (PREVIOUS, {"min_ratio": 0.5}, previous(100, 300)),
    (PREVIOUS, {"min_ratio": 0.5, "min_days": 2}, previous(100, 301)),
    (PREVIOUS, {"min_ratio": 0.5, "min_days": None}, previous(100, 300)),
    (PREVIOUS, {"min_ratio": 0.5, "days": 2, "min_days": None}, previous(100, 300)),
]


def test_an_expectation_of_ours_bounds_the_row_count(recorded: Callable[[Any], None]) -> None:
    meant = []
    for type_, kwargs, known in BOUNDS:
        planned = plan_bounds(type_, kwargs, known)
        assert planned.applies is ((planned.min_value, planned.max_value) != (None, None))
        meant.append(f"{planned.min_value} to {planned.max_value}: {planned.basis}")
    recorded(meant)


@pytest.mark.parametrize(
    ("type_", "kwargs", "expected"),
    [
        (SPEED, {}, "expected min_ratio, max_ratio or both, found neither"),
        (SPEED, {"min_ratio": 2, "max_ratio": 1}, "min_ratio up to max_ratio, found 2.0 above 1.0"),
        (PREVIOUS, {"min_ratio": 1, "days": 2, "min_days": 3}, r"min_days up to days \(2\), found 3"),
    ],
)  # fmt: skip
def test_an_expectation_of_ours_is_checked_like_the_others(
    type_: str, kwargs: dict[str, Any], expected: str, tmp_path: Path
) -> None:
    """mistakes.yaml has those of one value."""
    with pytest.raises(ConfigurationError, match=expected):
        load_suite(_file(tmp_path, {"type": type_, "kwargs": kwargs}))
