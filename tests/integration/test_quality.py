"""The quality gate on real Spark frames: verdicts, what they say, and what they leave behind."""

import json
import logging
import tempfile
import threading
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
import yaml
from expectations import entry, suite_of
from pyspark.sql import DataFrame, SparkSession

from anabranch.common.errors import Transient
from batch_layer.quality.gate import run_suite
from batch_layer.quality.suite import SPEED, RowCountBaseline

GAME_EVENTS = Path(__file__).parents[2] / "conf" / "streams" / "game_events.expectations.yaml"
AT = datetime(2026, 11, 21, tzinfo=UTC)
SCHEMA = (
    "event_id STRING, event_type STRING, amount DOUBLE, player_id STRING, occurred_at TIMESTAMP, "
    "price DECIMAL(10, 2), tags ARRAY<STRING>, kafka_partition INT, kafka_offset BIGINT"
)


def _rows(spark: SparkSession, *changed: dict[str, Any], good: int = 4) -> DataFrame:
    """`good` rows that the suite of game_events accepts, then one more for each of `changed`."""
    columns = [part.strip().split(" ", 1)[0] for part in SCHEMA.replace("(10, 2)", "").split(", ")]
    rows = []
    for i, change in enumerate([{}] * good + list(changed)):
        row = {
            "event_id": f"e{i}", "event_type": "purchase", "amount": float(i), "player_id": f"p{i}",
            "occurred_at": AT, "price": Decimal("1.50"), "tags": ["a"], "kafka_partition": 0,
            "kafka_offset": i,
        } | change  # fmt: skip
        rows.append(tuple(row[c] for c in columns))
    return spark.createDataFrame(rows, SCHEMA)


def test_good_rows_pass(spark: SparkSession) -> None:
    record = run_suite(_rows(spark), GAME_EVENTS).as_dict()
    met = record.pop("met")
    assert record == {
        "passed": True, "failed": [], "warnings": [], "evaluated": 5, "suite": "game_events",
        "not_applicable": [],
    }  # fmt: skip
    assert met == yaml.safe_load(GAME_EVENTS.read_text())["expectations"]


def test_bad_rows_fail_with_counts_and_a_warning_lets_pass(spark: SparkSession) -> None:
    bad = _rows(
        spark, {"amount": -5.0}, {"event_id": None, "amount": None}, {"event_type": "refund"},
        {"event_id": "e0"}, {"player_id": "unknown"},
    )  # fmt: skip
    quality = run_suite(bad, GAME_EVENTS)
    types = "session_start, session_end, level_up, purchase, achievement"

    def found(count: int, first: int) -> str:
        return f"found {count} of 9 rows otherwise (the first: partition 0, offset {first})"

    assert [f["message"] for f in quality.failed] == [
        f"expect_column_values_to_not_be_null(event_id): expected to not be null, {found(1, 5)}",
        f"expect_column_values_to_be_unique(event_id): expected to be unique, {found(2, 0)}",
        f"expect_column_values_to_be_in_set(event_type): expected one of {types}, {found(1, 6)}",
        f"expect_column_values_to_be_between(amount): expected 0 to 10000, {found(1, 4)}",
    ]
    [warning] = quality.warnings or ()
    assert warning["message"] == (
        "expect_column_values_to_match_regex(player_id): expected to match regex ^p[0-9]+$, "
        f"mostly 0.999, {found(1, 8)}"
    )
    assert (quality.passed, quality.evaluated) == (False, 5)
    assert [f["unexpected_count"] for f in quality.failed] == [1, 2, 1, 1]
    assert quality.failed[3]["observed"] is None
    places = [[(r["partition"], r["offset"]) for r in f["rows"]] for f in quality.failed[:2]]
    assert places == [[(0, 5)], [(0, 0), (0, 7)]]
    recorded = json.dumps(quality.as_dict(), allow_nan=False)
    # The ledger gets no value of a row.
    assert not any(value in recorded for value in ("-5.0", "refund", "e0", 'unknown"'))

    quality = run_suite(_rows(spark, {"player_id": "unknown"}), GAME_EVENTS)
    assert (quality.passed, quality.failed, len(quality.warnings or ())) == (True, (), 1)


def test_rows_are_named_by_each_expectation_on_rows(spark: SparkSession, tmp_path: Path) -> None:
    path = suite_of(
        tmp_path,
        entry("expect_compound_columns_to_be_unique", column_list=["event_id", "player_id"]),
        entry("expect_column_pair_values_to_be_equal", column_A="event_id", column_B="player_id"),
        entry("expect_column_values_to_be_between", column="kafka_offset", max_value=3),
        entry("expect_column_value_lengths_to_be_between", column="event_id", max_value=2),
        entry(SPEED, min_ratio=0.9),
    )
    rows = _rows(spark, {"event_id": "e0", "player_id": "p0"})
    quality = run_suite(rows, path, RowCountBaseline(10))
    failures = [
        (f["type"], [(r["partition"], r["offset"]) for r in f["rows"]]) for f in quality.failed
    ]
    assert failures == [
        ("expect_compound_columns_to_be_unique", [(0, 0), (0, 4)]),
        ("expect_column_pair_values_to_be_equal", [(0, i) for i in range(5)]),
        ("expect_column_values_to_be_between", [(0, 4)]),
        (SPEED, []),
    ]
    assert quality.failed[3]["message"] == (
        f"{SPEED}: expected at least 9, min ratio 0.9, found 5 (the speed layer has 10)"
    )
    assert run_suite(_rows(spark), path, RowCountBaseline(4)).failed[-1]["type"] != SPEED
    json.dumps(quality.as_dict(), allow_nan=False)


def test_an_expectation_without_answer_fails_alone(spark: SparkSession, tmp_path: Path) -> None:
    path = suite_of(
        tmp_path,
        entry("expect_column_values_to_not_be_null", column="nowhere"),
        entry("expect_compound_columns_to_be_unique", column_list=["event_id", "nowhere"]),
        entry("expect_column_mean_to_be_between", column="nowhere", min_value=0),
        entry("expect_column_to_exist", column="nowhere"),
        entry("expect_column_values_to_match_regex", column="player_id", regex="("),
        entry("expect_column_values_to_be_between", column="tags", min_value=0),
        entry("expect_column_values_to_be_unique", column="nowhere") | {"severity": "warning"},
        entry("expect_column_values_to_be_unique", column="event_id"),
        entry("expect_column_values_to_not_be_null", column="player_id"),
    )
    quality = run_suite(_rows(spark), path)
    missing = 'could not be evaluated: Error: The column "nowhere" in BatchData does not exist.'
    messages = [f["message"] for f in quality.failed]
    assert all(message.endswith(missing) for message in messages[:3])
    assert messages[3] == "expect_column_to_exist(nowhere): expected to exist, found otherwise"
    unclosed = "could not be evaluated: java.util.regex.PatternSyntaxException: Unclosed group"
    assert unclosed in messages[4]
    between = "expect_column_values_to_be_between(tags): expected at least 0, could not be eval"
    assert messages[5].startswith(between)
    assert len(messages) == 6
    assert [w["kwargs"] for w in quality.warnings or ()] == [{"column": "nowhere"}]
    assert (quality.passed, quality.evaluated) == (False, 9)


def test_aggregates_are_judged_and_observed(spark: SparkSession, tmp_path: Path) -> None:
    path = suite_of(
        tmp_path,
        entry("expect_table_row_count_to_be_between", min_value=5),
        entry("expect_column_mean_to_be_between", column="amount", min_value=1, max_value=2),
        entry("expect_column_max_to_be_between", column="amount", max_value=2),
        # Judged by NumPy, whose bool is not JSON.
        entry(
            "expect_column_quantile_values_to_be_between",
            column="amount",
            quantile_ranges={"quantiles": [0.5], "value_ranges": [[7, 9]]},
        ),
        entry("expect_column_values_to_be_unique", column="event_id"),
        entry("expect_column_values_to_be_unique", column="event_id"),
    )
    quality = run_suite(_rows(spark), path)
    names = [f["type"].split("_to_")[0] for f in quality.failed]
    assert names == ["expect_table_row_count", "expect_column_max", "expect_column_quantile_values"]
    # Of the amounts, no mean but a maximum and a quantile failed: values of rows.
    assert [f["observed"] for f in quality.failed] == [4, None, None]
    assert quality.evaluated == 6  # an entry that is there twice is evaluated twice
    json.dumps(quality.as_dict(), allow_nan=False)


def test_without_rows_columns_and_aggregates_can_fail(spark: SparkSession, tmp_path: Path) -> None:
    empty = _rows(spark, good=0)
    quality = run_suite(empty, GAME_EVENTS)
    assert (quality.passed, quality.warnings, quality.evaluated) == (True, (), 5)
    path = suite_of(
        tmp_path,
        entry("expect_column_values_to_match_regex", column="player_id", regex="^p", mostly=0.9),
        entry("expect_column_values_to_not_be_null", column="nowhere"),
        entry("expect_table_row_count_to_be_between", min_value=1),
        entry("expect_column_mean_to_be_between", column="amount", min_value=0),
    )
    quality = run_suite(empty, path)
    assert [f["message"].split(", ", 1)[1] for f in quality.failed] == [
        'could not be evaluated: Error: The column "nowhere" in BatchData does not exist.',
        "found 0",
        "found no value",
    ]


def test_the_gate_leaves_nothing_behind_and_is_quiet(
    spark: SparkSession,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    frame = _rows(spark, {"amount": -5.0})
    (tmp_path / "home").mkdir()
    (tmp_path / "temporary").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    settings = dict(spark.conf.getAll)
    persistent = spark.sparkContext._jsc.getPersistentRDDs().size()
    capsys.readouterr()
    with caplog.at_level(logging.INFO):
        assert not run_suite(frame, GAME_EVENTS).passed
    loggers = ("batch_layer", "great_expectations")
    ours = [r.name for r in caplog.records if r.name.startswith(loggers)]
    assert ours == ["batch_layer.quality.gate"]  # the one line of the one failed expectation
    assert tuple(capsys.readouterr()) == ("", "")
    assert sorted(p.name for p in tmp_path.rglob("*")) == ["home", "temporary"]
    assert spark.sparkContext._jsc.getPersistentRDDs().size() == persistent
    assert dict(spark.conf.getAll) == settings
    assert frame.count() == 5  # the session goes on


def test_jobs_that_a_stop_cancels_are_no_verdict_on_rows(
    spark: SparkSession, tmp_path: Path
) -> None:
    """The hazard: an hour was refused by the quality gate since its job was asked to stop."""
    slow = spark.range(0, 50, 1, 1).selectExpr(
        "id AS n", "reflect('java.lang.Thread', 'sleep', 100L) AS slept"
    )
    suite = suite_of(tmp_path, entry("expect_column_values_to_be_null", column="slept"))
    ended = threading.Event()

    def stop() -> None:
        while not ended.wait(0.2):
            spark.sparkContext.cancelAllJobs()

    canceller = threading.Thread(target=stop)
    canceller.start()
    try:
        with pytest.raises(Transient, match="evaluate the suite some: "):
            run_suite(slow, suite)
    finally:
        ended.set()
        canceller.join()
