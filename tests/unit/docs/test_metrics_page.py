"""docs/reference/metrics.md has every metric that a stream can have, and none that does not
exist."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from pathlib import Path

from anabranch.operations.reports.metrics import metrics_of

PAGE = Path(__file__).resolve().parents[3] / "docs" / "reference" / "metrics.md"


def test_the_page_has_every_metric_and_no_other() -> None:
    rows = "\n".join(
        line for line in PAGE.read_text("utf-8").splitlines() if line.startswith("| `")
    )
    named = {name.removesuffix("_total") for name in re.findall(r"`(anabranch_\w+)`", rows)}
    assert named == {family.name for family in metrics_of({}, datetime.now(UTC))}
