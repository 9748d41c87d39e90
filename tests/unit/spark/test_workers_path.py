"""Whether executors can decode records: only where every executor has what the driver has."""

import json
import sys
from collections.abc import Mapping

import pytest

from anabranch.spark import workers
from anabranch.spark.settings import installed
from anabranch.spark.workers import reason_against

OURS = {"python": "3.12", "pyarrow": "25.0.1", "anabranch": "abc"}


@pytest.mark.parametrize(
    ("report", "reason"),
    [
        (OURS, None),
        ({"missing": "No module named 'pyarrow'"}, "expected our packages, found No module"),
        ({**OURS, "pyarrow": "24.0.0"}, "expected pyarrow 25.0.1, found 24.0.0"),
        ({**OURS, "anabranch": "def"}, "expected anabranch abc, found def"),
        ({"python": "3.12", "pyarrow": "25.0.1"}, "expected anabranch abc, found none"),
    ],
    ids=["equal", "missing", "another version", "other code", "no code"],
)
def test_one_executor_that_differs_is_named(report: Mapping[str, str], reason: str | None) -> None:
    found = reason_against(OURS, [{"host": "a", **OURS}, {"host": "b", **report}])
    assert found is None if reason is None else (found or "").startswith(f"executor on b: {reason}")


def test_a_probe_reports_what_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    [report] = [json.loads(text) for text in workers._task()([0])]
    assert reason_against(installed(), [report]) is None
    monkeypatch.setitem(sys.modules, "anabranch.spark.settings", None)
    [report] = [json.loads(text) for text in workers._task()([0])]
    assert "anabranch.spark.settings" in report["missing"]
