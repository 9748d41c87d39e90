"""When the speed layer is late: offsets wait, and the position stands still."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from serving_layer.views.status import late_reason

NOW = datetime(2026, 11, 21, 3, tzinfo=UTC)
PATIENCE = timedelta(minutes=10)


@pytest.mark.parametrize(
    ("lag", "stands_for", "late"),
    [
        (0, timedelta(days=1), None),
        (5, timedelta(minutes=10), None),
        (5, timedelta(minutes=10, seconds=1), "5 offsets wait, and the position has not moved for 0:10:01"),
    ],
)
def test_a_speed_layer_is_late_when_offsets_wait_and_nothing_moves(
    lag: int, stands_for: timedelta, late: str | None
) -> None:
    assert late_reason(lag, NOW - stands_for, PATIENCE, NOW) == late
