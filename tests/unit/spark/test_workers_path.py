"""Whether executors can decode records: only where every executor has what the driver has."""

import json
import sys
from collections.abc import Mapping

import pytest

from anabranch.spark import workers
from anabranch.spark.settings import installed
from anabranch.spark.workers import reason_against

OURS = {"python": "3.12", "pyarrow": "25.0.1", "anabranch": "abc"}


def test_executors_decode_if_each_has_the_drivers_versions() -> None:
    assert reason_against(OURS, [{"host": "a", **OURS}, {"host": "b", **OURS}]) is None


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
def test_one_executor_that_differs_is_named(report: Mapping[str, str], reason: str) -> None:
    assert (reason_against(OURS, [{"host": "a", **OURS}, report]) or "").startswith(reason)


def test_a_probe_reports_what_is_installed() -> None:
    [report] = [json.loads(text) for text in workers._task()([0])]
    assert reason_against(installed(), [report]) is None


def test_a_probe_reports_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "anabranch.spark.settings", None)
    [report] = [json.loads(text) for text in workers._task()([0])]
    assert "anabranch.spark.settings" in report["missing"]
