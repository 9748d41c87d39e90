"""The balance closes for the true account, and for no account in which one record is wrong."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from anabranch.offsets.hours import Cut
from anabranch.protocol.ledger_row import Account, HourAccount
from batch_layer.balance import (
    Balance,
    Counted,
    classify_erased,
    classify_gaps,
    classify_unheld,
    conflicts_of,
    has_missing,
)

ALLOWED = ("control", "aborted")
TRUE = Balance(
    cut=Cut("t", {0: (100, 110), 1: (5, 9), 2: (3, 3)}),
    good=Counted({0: 6, 1: 3}, rows=9),
    dead=Counted({0: 1}, rows=1),
    duplicate={0: 1, 1: 1},
    gaps={"control": {0: 1}, "aborted": {0: 1}},
    conflicts={1: 1},
)


def test_the_true_balance_closes_with_its_counts() -> None:
    assert [*TRUE.problems(), *TRUE.disallowed(ALLOWED)] == []
    assert TRUE.counts == HourAccount(
        offsets=14,
        good=9,
        dead=1,
        duplicate=2,
        gap=2,
        conflicts=1,
        gaps={"aborted": 1, "control": 1},
    )
    assert [account.conflicts for account in TRUE.partitions.values()] == [None, 1, None]


PERTURBED: dict[str, tuple[Callable[[Balance], Balance], str]] = {
    "one row lost": (
        lambda b: replace(b, good=Counted({0: 5, 1: 3}, rows=8)),
        "partition 0: expected 10 offsets in [100, 110), found 9: 5 good, 1 dead, 1 duplicate, 2 "
        "in gaps",
    ),
    "one row twice": (
        lambda b: replace(b, good=Counted({0: 6, 1: 3}, rows=10)),
        "rows: expected each offset once, found 1 more",
    ),
    "one row outside the cut": (
        lambda b: replace(b, good=Counted({0: 6, 1: 3}, rows=10, outside=1)),
        "rows: expected none outside the cut, found 1",
    ),
    "one row outside in place of one inside": (
        lambda b: replace(b, good=Counted({0: 6, 1: 2}, rows=9, outside=1)),
        "partition 1: expected 4 offsets in [5, 9), found 3: 2 good, 0 dead, 1 duplicate, 0 in "
        "gaps",
    ),
    "one dead letter lost": (
        lambda b: replace(b, dead=Counted()),
        "partition 0: expected 10 offsets in [100, 110), found 9: 6 good, 0 dead, 1 duplicate, 2 "
        "in gaps",
    ),
    "one dead letter twice": (
        lambda b: replace(b, dead=Counted({0: 1}, rows=2)),
        "dead letters: expected each offset once, found 1 more",
    ),
    "one dead letter outside the cut": (
        lambda b: replace(b, dead=Counted({0: 1}, rows=2, outside=1)),
        "dead letters: expected none outside the cut, found 1",
    ),
    "one record both good and dead": (
        lambda b: replace(b, dead=Counted({0: 1, 1: 1}, rows=2)),
        "partition 1: expected 4 offsets in [5, 9), found 5: 3 good, 1 dead, 1 duplicate, 0 in "
        "gaps",
    ),
    "one duplicate forgotten": (
        lambda b: replace(b, duplicate={0: 1}),
        "partition 1: expected 4 offsets in [5, 9), found 3: 3 good, 0 dead, 0 duplicate, 0 in "
        "gaps",
    ),
    "two duplicates with other content among one": (
        lambda b: replace(b, conflicts={1: 2}),
        "partition 1: expected duplicates with other content among 1 duplicates, found 2",
    ),
    "one gap not explained": (
        lambda b: replace(b, gaps={"control": {0: 1}}),
        "partition 0: expected 10 offsets in [100, 110), found 9: 6 good, 1 dead, 1 duplicate, 1 "
        "in gaps",
    ),
    "one gap of a class that is not allowed": (
        lambda b: replace(b, gaps={"control": {0: 1}, "retention": {0: 1}}),
        "gaps: expected only control, aborted, found 1 retention",
    ),
    "a loss in one partition that another makes up for": (
        lambda b: replace(b, good=Counted({0: 7, 1: 2}, rows=9)),
        "partition 0: expected 10 offsets in [100, 110), found 11: 7 good, 1 dead, 1 duplicate, 2 "
        "in gaps",
    ),
    "a row in a partition whose range is empty": (
        lambda b: replace(b, good=Counted({0: 6, 1: 3, 2: 1}, rows=10)),
        "partition 2: expected 0 offsets in [3, 3), found 1: 1 good, 0 dead, 0 duplicate, 0 in "
        "gaps",
    ),
}


@pytest.mark.parametrize("name", PERTURBED)
def test_the_account_does_not_close_with(name: str) -> None:
    perturb, problem = PERTURBED[name]
    balance = perturb(TRUE)
    assert problem in [*balance.problems(), *balance.disallowed(ALLOWED)]


def test_conflicts_that_were_not_found_again_are_those_of_the_accepted_revision() -> None:
    before = {0: Account(9, 4, 0, 5, {}, conflicts=3), 1: Account(9, 4, 0, 5, {})}
    assert conflicts_of({0: 4, 1: 5}, before, {0: 1}) == {0: 2}
    assert conflicts_of({0: 1}, before, {}) == {0: 1}
    assert conflicts_of({0: 4}, before, {0: 3}) == {}
    assert conflicts_of({2: 1}, before, {}) == {}


def test_a_stream_that_allows_no_gap_gets_that_remedy() -> None:
    assert TRUE.disallowed(()) == [
        "gaps: expected only none, found 1 aborted", "gaps: expected only none, found 1 control",
    ]  # fmt: skip


def test_an_empty_hour_closes() -> None:
    empty = Balance(Cut("t", {0: (4, 4)}), Counted(), Counted(), {}, {})
    assert [*empty.problems(), *empty.disallowed(())] == []
    assert empty.counts.offsets == 0


def test_a_gap_has_the_class_that_the_log_shows() -> None:
    seen = {"control": {0: 2}, "aborted": {0: 4, 1: 1}, "compacted": {0: 1, 1: 1}, "retention": {}}
    assert classify_gaps({0: 7, 1: 2, 2: 0}, seen) == {
        "control": {0: 2}, "aborted": {0: 4, 1: 1}, "compacted": {0: 1, 1: 1},
    }  # fmt: skip


def test_an_unexplained_offset_is_not_a_control_record() -> None:
    """The hazard: a record that the log holds, and that its reader was not given."""
    gaps = classify_gaps({0: 3, 1: 1}, {"control": {0: 1}, "present": {0: 2}})
    assert gaps == {"control": {0: 1}, "unexplained": {0: 2, 1: 1}}
    balance = Balance(
        Cut("t", {0: (0, 5), 1: (0, 1)}),
        Counted({0: 2}, rows=2),
        Counted(),
        {},
        gaps,
        {0: ((2, 3), (4, 5))},
    )
    assert balance.counts.gap == 4
    assert balance.problems() == [
        (
            "partition 0: expected Kafka's log to explain every offset that was not read, found 2 "
            "whose record the log contains, from offset 2, 4 on"
        ),
        (
            "partition 1: expected Kafka's log to explain every offset that was not read, found 1 "
            "without an explanation"
        ),
    ]
    # No class in a stream's file allows it, and no operator overrules it.
    assert balance.disallowed(("control",)) == []


def test_nothing_missing_is_no_gap() -> None:
    assert classify_gaps({0: 0, 1: 0}, {}) == {}
    assert not has_missing({0: (3, 5), 1: (7, 7)}, {0: 2})
    assert has_missing({0: (3, 5), 1: (7, 8)}, {0: 2})


BEFORE = {0: Account(10, good=5, dead=1, duplicate=2, gaps={"aborted": 1, "control": 1})}


def test_offsets_in_no_source_are_lost() -> None:
    assert classify_unheld({0: 4, 1: 0}, {}, {}, {}, {}) == ({}, {"retention": {0: 4}})


def test_offsets_that_an_accepted_revision_explained_are_not_lost() -> None:
    assert classify_unheld({0: 4}, {}, BEFORE, {0: 6}, {}) == (
        {0: 2},
        {"aborted": {0: 1}, "control": {0: 1}},
    )
    # Kafka still holds the end of the hour, with the control record, and the table one of the
    # duplicates.
    gaps = {"control": {0: 1}}
    assert classify_unheld({0: 2}, gaps, BEFORE, {0: 6}, {0: 1}) == (
        {0: 1},
        {"aborted": {0: 1}, "control": {0: 1}},
    )


def test_offsets_beyond_the_accepted_account_are_lost() -> None:
    assert classify_unheld({0: 5}, {}, BEFORE, {0: 6}, {}) == (
        {0: 2}, {"aborted": {0: 1}, "control": {0: 1}, "retention": {0: 1}},
    )  # fmt: skip


def test_an_accepted_revision_that_is_not_all_there_accounts_for_nothing() -> None:
    """The hazard: a row that storage lost would pass for a duplicate."""
    assert classify_unheld({0: 5}, {}, BEFORE, {0: 5}, {}) == ({}, {"retention": {0: 5}})
    assert classify_unheld({}, {"compacted": {0: 2}}, BEFORE, {0: 5}, {}) == (
        {},
        {"compacted": {0: 2}},
    )


def test_a_gap_that_retention_made_before_stays_one() -> None:
    before = {0: Account(10, good=6, dead=0, duplicate=0, gaps={"retention": 4})}
    assert classify_unheld({0: 4}, {}, before, {0: 6}, {}) == ({}, {"retention": {0: 4}})


def test_a_duplicate_that_is_compacted_away_stays_one() -> None:
    before = {0: Account(10, good=5, dead=1, duplicate=2, gaps={"compacted": 2})}
    # Compaction removed four, two of them earlier; an offset that is found again is not a duplicate
    # twice.
    assert classify_unheld({}, {"compacted": {0: 4}}, before, {0: 6}, {}) == (
        {0: 2},
        {"compacted": {0: 2}},
    )
    assert classify_unheld({}, {"compacted": {0: 3}}, before, {0: 6}, {0: 1}) == (
        {0: 1},
        {"compacted": {0: 2}},
    )
    assert classify_unheld({}, {"compacted": {0: 2}}, before, {0: 6}, {0: 2}) == (
        {},
        {"compacted": {0: 2}},
    )


def test_the_logs_class_has_precedence_over_an_earlier_revision() -> None:
    """The hazard: a revision that took compacted records for control records."""
    before = {0: Account(10, good=2, dead=0, duplicate=0, gaps={"control": 8})}
    gaps = {"control": {0: 1}, "compacted": {0: 7}}
    assert classify_unheld({}, gaps, before, {0: 2}, {}) == (
        {},
        {"control": {0: 1}, "compacted": {0: 7}},
    )


def test_lost_and_compacted_offsets_are_accounted_for_once() -> None:
    before = {0: Account(10, good=6, dead=0, duplicate=2, gaps={"compacted": 1, "control": 1})}
    assert classify_unheld({0: 2}, {"compacted": {0: 2}}, before, {0: 6}, {}) == (
        {0: 2}, {"control": {0: 1}, "compacted": {0: 1}},
    )  # fmt: skip


def test_erased_records_close_the_account() -> None:
    account = replace(TRUE, good=Counted({0: 4, 1: 3}, 7), erased={0: 2})
    assert not account.problems()
    assert account.counts.erased == 2
    assert [p.erased for p in account.partitions.values()] == [2, None, None]
    [problem] = replace(account, erased={0: 1}).problems()
    assert problem.startswith("partition 0: expected") and problem.endswith("1 erased")


# Of an hour of which three records of partition 0 were erased.
OF_ERASED = {0: Account(10, good=5, dead=0, duplicate=1, gaps={"compacted": 1}, erased=3)}


@pytest.mark.parametrize(
    ("lost", "compacted", "read_again", "expected"),
    [
        ({}, 1, 3, ({}, {}, 1)),  # all are in Kafka still
        ({0: 4}, 1, 0, ({0: 3}, {0: 1}, 1)),  # all are deleted, with a duplicate
        ({0: 1}, 1, 2, ({0: 1}, {0: 0}, 1)),
        ({}, 3, 1, ({0: 2}, {}, 1)),  # compacted since
        ({0: 1}, 4, 0, ({0: 3}, {0: 0}, 2)),
    ],
)
def test_erased_records_that_kafka_deleted_stay_erased(
    lost: dict[int, int], compacted: int, read_again: int, expected: tuple[Any, Any, int]
) -> None:
    found, left, gaps = classify_erased(
        lost, {"compacted": {0: compacted}}, OF_ERASED, {0: read_again}
    )
    assert (found, left, gaps["compacted"][0]) == expected


def test_nothing_was_erased_of_an_hour_without_an_account() -> None:
    assert classify_erased({0: 2}, {"compacted": {0: 1}}, {}, {}) == (
        {},
        {0: 2},
        {"compacted": {0: 1}},
    )
