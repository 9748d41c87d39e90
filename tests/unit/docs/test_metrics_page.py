"""docs/reference/metrics.md has the metrics of the code's table, each with its labels."""

import re
from pathlib import Path
from typing import Any

from prometheus_client.core import CounterMetricFamily

from anabranch.operations.reports.metrics import ALWAYS, GROUPS, READ, Row

PAGE = Path(__file__).resolve().parents[3] / "docs" / "reference" / "metrics.md"


def test_the_page_has_every_metric_with_its_labels_and_no_other() -> None:
    lines = [line for line in PAGE.read_text("utf-8").splitlines() if line.startswith("| `")]
    named = {
        name: {*re.findall(r"`([a-z_]+)`", meaning)}
        for _, names, meaning, _ in (line.split("|") for line in lines)
        for name in re.findall(r"`anabranch_(\w+)`", names)
    }
    rows: list[Row[Any]] = [*ALWAYS, *GROUPS, *READ]
    known = {
        row.name + ("_total" if row.family is CounterMetricFamily else ""): {*row.labels}
        for row in rows
    }
    assert named.keys() == known.keys()
    assert [name for name, labels in known.items() if not labels <= named[name]] == []
