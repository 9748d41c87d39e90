"""Explained and unexplained differences of the layers, on values only."""

from dataclasses import replace
from datetime import UTC, datetime

import pytest
from lakes import FIRST, new_state

from anabranch.offsets.hours import Adoption, Cut, Timeline, shift
from anabranch.operations.reports import status
from anabranch.protocol import ledger
from anabranch.protocol.ledger_row import Diff, HourAccount, LedgerRow, unexplained_counts
from anabranch.protocol.merge import unread_ranges
from serving_layer.layer_diff import to_difference

HOUR, NEXT = FIRST, shift(FIRST, 1)
CUT = Cut("t", {0: (0, 10), 1: (4, 8)})
TIMELINE = Timeline(HOUR, shift(FIRST, 2), {0: 10, 1: 8}, sealed={HOUR: CUT})


def diff(
    missing: int = 0, extra: int = 0, changed: int = 0, duplicate: int = 0, unread: int = 0
) -> Diff:
    return Diff(missing, extra, changed, duplicate, unread, ())


@pytest.mark.parametrize(
    ("difference", "gaps", "left"),
    [
        (None, None, {}),
        (diff(unread=0, duplicate=7), {}, {}),
        # Missing: only as far as the speed layer had not read, when it was compared.
        (diff(missing=5, unread=5), {}, {}),
        (diff(missing=5, unread=3), {}, {"missing": 2}),
        (diff(missing=5, unread=0), {}, {"missing": 5}),
        # Extra: only where Kafka no longer gave the offsets.
        (diff(extra=2, unread=0), {}, {"extra": 2}),
        (diff(extra=2, unread=0), {"control": 9, "aborted": 9}, {"extra": 2}),
        (diff(extra=2, unread=0), {"retention": 1, "compacted": 1}, {}),
        (diff(extra=2, unread=0), {"retention": 1}, {"extra": 1}),
        # Other content: never, whatever else is wrong with the hour.
        (diff(changed=1, unread=0), {"retention": 9}, {"changed": 1}),
        (
            diff(missing=1, extra=1, changed=1, unread=0),
            None,
            {"missing": 1, "extra": 1, "changed": 1},
        ),
    ],
)
def test_the_explanations_of_a_difference(
    difference: Diff | None, gaps: dict[str, int] | None, left: dict[str, int]
) -> None:
    assert unexplained_counts(difference, gaps) == left


def test_offsets_behind_the_position_are_unread() -> None:
    assert unread_ranges(new_state(TIMELINE, {0: 10, 1: 8}), HOUR, CUT) == {}
    assert unread_ranges(new_state(TIMELINE, {0: 7, 1: 8}), HOUR, CUT) == {0: (7, 10)}
    assert unread_ranges(new_state(TIMELINE, {0: 99}), HOUR, CUT) == {1: (4, 8)}


def test_all_of_an_hour_that_was_jumped_over_or_dropped_is_unread() -> None:
    far = {0: 99, 1: 99}
    found = unread_ranges(new_state(replace(TIMELINE, skipped=(HOUR,)), far), HOUR, CUT)
    assert found == CUT.ranges
    got = unread_ranges(new_state(replace(TIMELINE, covered_from=NEXT), far), HOUR, CUT)
    assert got == CUT.ranges
    kept = replace(TIMELINE, covered_from=NEXT, kept=(HOUR,))
    assert unread_ranges(new_state(kept, far), HOUR, CUT) == {}


def test_an_hour_of_a_log_before_this_one_is_not_compared_with_the_position() -> None:
    adopted = replace(TIMELINE, adoptions=(Adoption(HOUR, "former", {0: 0, 1: 0}),))
    assert unread_ranges(new_state(adopted, {0: 0, 1: 0}), HOUR, CUT) == {}
    assert unread_ranges(new_state(adopted, {0: 0, 1: 0}), NEXT, CUT) == CUT.ranges


def test_unread_rows_are_missing_rows_and_duplicates_are_the_speed_layers() -> None:
    difference = to_difference(
        {"missing": 1, "unread": 2, "duplicate": 4, "same": 8, "extra": 16, "changed": 32}, []
    )
    assert difference.diff == Diff(
        missing=3, extra=16, changed=32, duplicate=4, unread=2, sample=()
    )
    assert difference.speed_rows == 4 + 8 + 16 + 32


def row(difference: Diff | None) -> LedgerRow:
    now = datetime(2026, 11, 21, 2, tzinfo=UTC)
    return ledger.decision(HOUR, "accepted", 1, CUT, now, account=HourAccount(diff=difference))


def test_status_names_the_hours_that_nothing_explains() -> None:
    rows = {HOUR: row(diff(missing=1, unread=0)), NEXT: row(diff()), "x": row(None)}
    assert status.unexplained(rows) == {HOUR: {"missing": 1}}
