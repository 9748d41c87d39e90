"""Whether workers are used on a cluster: only where every executor has what the driver has."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping

import pytest

from anabranch.spark import workers
from anabranch.spark.executor_python import installed
from anabranch.spark.workers import is_worker_failure, reason_for_spark

OURS = {"python": "3.12", "pyarrow": "25.0.1", "anabranch": "abc"}


def test_workers_are_used_if_every_executor_has_the_drivers_versions() -> None:
    assert reason_for_spark(OURS, [{"host": "a", **OURS}, {"host": "b", **OURS}]) is None


@pytest.mark.parametrize(
    ("report", "reason"),
    [
        (
            {"host": "b", "missing": "No module named 'pyarrow'"},
            "executor on b: expected our packages, found No module",
        ),
        (
            {"host": "b", **OURS, "pyarrow": "24.0.0"},
            "executor on b: expected pyarrow 25.0.1, found 24.0.0",
        ),
        (
            {"host": "b", **OURS, "anabranch": "def"},
            "executor on b: expected anabranch abc, found def",
        ),
        (
            {"host": "b", "python": "3.12", "pyarrow": "25.0.1"},
            "executor on b: expected anabranch abc, found none",
        ),
    ],
    ids=["missing", "another version", "other code", "no code"],
)
def test_one_executor_that_differs_leaves_all_records_to_spark(
    report: Mapping[str, str], reason: str
) -> None:
    assert (reason_for_spark(OURS, [{"host": "a", **OURS}, report]) or "").startswith(reason)


@pytest.mark.parametrize(
    ("text", "of_workers"),
    [
        ("org.apache.spark.api.python.PythonException: Traceback", True),
        (
            "Cannot run program\n at org.apache.spark.api.python.PythonWorkerFactory.startDaemon",
            True,
        ),
        ("org.apache.spark.SparkException: Python worker exited unexpectedly (crashed)", True),
        (
            "KafkaException: Timeout\n at "
            "org.apache.spark.api.python.BasePythonRunner$ReaderInputStream.read",
            False,
        ),
        ("ExecutorLostFailure (executor 1 exited)", False),
    ],
)
def test_only_errors_of_python_workers_leave_records_to_spark(text: str, of_workers: bool) -> None:
    assert is_worker_failure(RuntimeError(text)) is of_workers


def test_a_probe_reports_what_is_installed() -> None:
    [report] = [json.loads(text) for text in workers._task()([0])]
    assert reason_for_spark(installed(), [report]) is None


def test_a_probe_reports_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "anabranch.spark.executor_python", None)
    [report] = [json.loads(text) for text in workers._task()([0])]
    assert "anabranch.spark.executor_python" in report["missing"]
