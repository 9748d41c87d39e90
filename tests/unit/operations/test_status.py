"""When the speed layer is late, and since when a record waits."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest
from lakes import new_stream

from anabranch.config import Slo
from anabranch.operations.reports.status import late_after, late_reason
from anabranch.protocol.watermarks import waiting_since

NOW = datetime(2026, 11, 21, 3, tzinfo=UTC)
PATIENCE = timedelta(minutes=10)


@pytest.mark.parametrize(
    ("lag", "behind", "waits_for", "late"),
    [
        (0, timedelta(days=1), None, None),
        (5, timedelta(days=1), None, None),
        (5, timedelta(minutes=10), timedelta(minutes=10), None),
        # After an idle night the first record waits for seconds; a backlog of old records is read
        # as fast as it can be.
        (5, timedelta(hours=8), timedelta(seconds=30), None),
        (5, timedelta(seconds=2), timedelta(hours=8), None),
        (
            5, timedelta(hours=8), timedelta(minutes=10, seconds=1),
            "5 offsets wait, the oldest for 0:10:01, and the position has not moved for 8:00:00",
        ),
    ],
)  # fmt: skip
def test_a_speed_layer_is_late_when_a_record_waits_and_nothing_moves(
    lag: int, behind: timedelta, waits_for: timedelta | None, late: str | None
) -> None:
    waiting = NOW - waits_for if waits_for is not None else None
    assert late_reason(lag, NOW - behind, waiting, PATIENCE, NOW) == late


def test_the_fresh_through_promise_shows_a_late_speed_layer() -> None:
    for fresh, expected in (
        (None, PATIENCE),
        (timedelta(seconds=10),) * 2,
        (timedelta(hours=1), PATIENCE),
    ):
        assert late_after(new_stream(slo=Slo(fresh=fresh)), PATIENCE) == expected


MS = int(NOW.timestamp() * 1000)


@pytest.mark.parametrize(
    ("stamps", "since"),
    [
        ([], None),
        ([MS - 5_000, MS - 9_000], NOW - timedelta(seconds=9)),
        # What main is fresh through bounds what an old stamp would say; nothing was received after
        # now.
        ([MS - 3_600_000], NOW - timedelta(minutes=1)),
        ([-1], NOW - timedelta(minutes=1)),
        ([MS + 60_000], NOW),
        ([2**63 - 1], NOW),
    ],
)
def test_a_record_waits_since_kafka_received_it_whatever_its_timestamp(
    stamps: list[int], since: datetime | None
) -> None:
    assert waiting_since(stamps, NOW - timedelta(minutes=1), NOW) == since
    if stamps and since == NOW - timedelta(minutes=1):
        assert waiting_since(stamps, None, NOW) == datetime.fromtimestamp(
            max(0, stamps[0]) / 1000, UTC
        )
