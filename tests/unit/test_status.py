"""When the speed layer is late, and since when a record waits."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from anabranch.protocol.watermarks import waiting_since
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


MS = int(NOW.timestamp() * 1000)


@pytest.mark.parametrize(
    ("stamps", "since"),
    [
        ([], None),
        ([MS - 5_000, MS - 9_000], NOW - timedelta(seconds=9)),
        # What main is fresh through bounds what an old stamp would say; nothing was received after now.
        ([MS - 3_600_000], NOW - timedelta(minutes=1)),
        ([-1], NOW - timedelta(minutes=1)),
        ([MS + 60_000], NOW),
        ([2**63 - 1], NOW),
    ],
)
def test_a_record_waits_since_kafka_received_it_whatever_it_is_stamped_with(
    stamps: list[int], since: datetime | None
) -> None:
    assert waiting_since(stamps, NOW - timedelta(minutes=1), NOW) == since
    if stamps and since == NOW - timedelta(minutes=1):
        assert waiting_since(stamps, None, NOW) == datetime.fromtimestamp(max(0, stamps[0]) / 1000, UTC)
