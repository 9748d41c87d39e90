"""The balance closes for the true account, and for no account in which one record is wrong."""

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
RANGES = {0: (100, 110), 1: (5, 9), 2: (3, 3)}
TRUE = Balance(
    cut=Cut("t", RANGES), good=Counted({0: 6, 1: 3}, rows=9), dead=Counted({0: 1}, rows=1),
    duplicate={0: 1, 1: 1}, gaps={"control": {0: 1}, "aborted": {0: 1}}, conflicts={1: 1},
)  # fmt: skip


def test_the_true_balance_and_an_empty_hour_close_with_their_counts() -> None:
    assert [*TRUE.problems(), *TRUE.disallowed(ALLOWED)] == []
    assert TRUE.counts == HourAccount(
        offsets=14, good=9, dead=1, duplicate=2, gap=2, conflicts=1,
        gaps={"aborted": 1, "control": 1},
    )  # fmt: skip
    assert [account.conflicts for account in TRUE.partitions.values()] == [None, 1, None]
    expected = "gaps: expected only none, found 1"
    assert TRUE.disallowed(()) == [f"{expected} aborted", f"{expected} control"]
    empty = Balance(Cut("t", {0: (4, 4)}), Counted(), Counted(), {}, {})
    assert [*empty.problems(), *empty.disallowed(())] == [] and empty.counts.offsets == 0


def unequal(partition: int, good: int, dead: int, duplicate: int, gaps: int) -> str:
    """The problem of a partition in which so many offsets are found."""
    (start, end), found = RANGES[partition], good + dead + duplicate + gaps
    counts = f"{good} good, {dead} dead, {duplicate} duplicate, {gaps} in gaps"
    of = f"{end - start} offsets in [{start}, {end})"
    return f"partition {partition}: expected {of}, found {found}: {counts}"


# A fault, the counts of it, and the problem that is found.
PERTURBED: list[tuple[str, dict[str, Any], str]] = [
    ("one row lost", {"good": Counted({0: 5, 1: 3}, 8)}, unequal(0, 5, 1, 1, 2)),
    ("one row twice", {"good": Counted({0: 6, 1: 3}, 10)}, "rows: expected each offset once, found 1 more"),
    ("one row outside the cut", {"good": Counted({0: 6, 1: 3}, 10, 1)}, "rows: expected none outside the cut, found 1"),
    ("one row outside in place of one inside", {"good": Counted({0: 6, 1: 2}, 9, 1)}, unequal(1, 2, 0, 1, 0)),
    ("one dead letter lost", {"dead": Counted()}, unequal(0, 6, 0, 1, 2)),
    ("one dead letter twice", {"dead": Counted({0: 1}, 2)}, "dead letters: expected each offset once, found 1 more"),
    (
        "one dead letter outside the cut", {"dead": Counted({0: 1}, 2, 1)},
        "dead letters: expected none outside the cut, found 1",
    ),
    ("one record both good and dead", {"dead": Counted({0: 1, 1: 1}, 2)}, unequal(1, 3, 1, 1, 0)),
    ("one duplicate forgotten", {"duplicate": {0: 1}}, unequal(1, 3, 0, 0, 0)),
    (
        "two duplicates with other content among one", {"conflicts": {1: 2}},
        "partition 1: expected duplicates with other content among 1 duplicates, found 2",
    ),
    ("one gap not explained", {"gaps": {"control": {0: 1}}}, unequal(0, 6, 1, 1, 1)),
    (
        "one gap of a class that is not allowed", {"gaps": {"control": {0: 1}, "retention": {0: 1}}},
        "gaps: expected only control, aborted, found 1 retention",
    ),
    ("a loss in one partition that another makes up for", {"good": Counted({0: 7, 1: 2}, 9)}, unequal(0, 7, 1, 1, 2)),
    ("a row in a partition whose range is empty", {"good": Counted({0: 6, 1: 3, 2: 1}, 10)}, unequal(2, 1, 0, 0, 0)),
]  # fmt: skip


@pytest.mark.parametrize(("_", "wrong", "problem"), PERTURBED, ids=[name for name, *_ in PERTURBED])
def test_the_account_does_not_close(_: str, wrong: dict[str, Any], problem: str) -> None:
    balance = replace(TRUE, **wrong)
    assert problem in [*balance.problems(), *balance.disallowed(ALLOWED)]


def test_conflicts_and_erased_records_are_those_of_the_accepted_revision() -> None:
    before = {0: Account(9, 4, 0, 5, {}, conflicts=3), 1: Account(9, 4, 0, 5, {})}
    assert conflicts_of({0: 4, 1: 5}, before, {0: 1}) == {0: 2}
    assert conflicts_of({0: 1}, before, {}) == {0: 1}
    assert conflicts_of({0: 4}, before, {0: 3}) == {}
    assert conflicts_of({2: 1}, before, {}) == {}
    account = replace(TRUE, good=Counted({0: 4, 1: 3}, 7), erased={0: 2})
    assert not account.problems() and account.counts.erased == 2
    assert [p.erased for p in account.partitions.values()] == [2, None, None]
    [problem] = replace(account, erased={0: 1}).problems()
    assert problem.startswith("partition 0: expected") and problem.endswith("1 erased")
    expected = ({}, {0: 2}, {"compacted": {0: 1}})
    assert classify_erased({0: 2}, {"compacted": {0: 1}}, {}, {}) == expected


def test_a_gap_has_the_class_that_the_log_shows() -> None:
    seen = {"control": {0: 2}, "aborted": {0: 4, 1: 1}, "compacted": {0: 1, 1: 1}, "retention": {}}
    assert classify_gaps({0: 7, 1: 2, 2: 0}, seen) == {
        "control": {0: 2}, "aborted": {0: 4, 1: 1}, "compacted": {0: 1, 1: 1},
    }  # fmt: skip
    assert classify_gaps({0: 0, 1: 0}, {}) == {}
    assert not has_missing({0: (3, 5), 1: (7, 7)}, {0: 2})
    assert has_missing({0: (3, 5), 1: (7, 8)}, {0: 2})


def test_an_unexplained_offset_is_not_a_control_record() -> None:
    """The hazard: a record that the log holds, and that its reader was not given."""
    gaps = classify_gaps({0: 3, 1: 1}, {"control": {0: 1}, "present": {0: 2}})
    assert gaps == {"control": {0: 1}, "unexplained": {0: 2, 1: 1}}
    balance = Balance(
        Cut("t", {0: (0, 5), 1: (0, 1)}), Counted({0: 2}, rows=2), Counted(), {}, gaps,
        {0: ((2, 3), (4, 5))},
    )  # fmt: skip
    assert balance.counts.gap == 4
    why = "expected Kafka's log to explain every offset that was not read, found"
    assert balance.problems() == [
        f"partition 0: {why} 2 whose record the log contains, from offset 2, 4 on",
        f"partition 1: {why} 1 without an explanation",
    ]
    # No class in a stream's file allows it, and no operator overrules it.
    assert balance.disallowed(("control",)) == []


def before(good: int = 5, dead: int = 1, duplicate: int = 2, **gaps: int) -> dict[int, Account]:
    """The account of an accepted revision."""
    return {0: Account(10, good, dead, duplicate, gaps)}


EXPLAINED = before(aborted=1, control=1)
TWICE = before(compacted=2)
# Offsets that no source has: how many are lost; gaps by the log; the accepted account; its rows and
# dead letters that are there; duplicates that are found again. Then the duplicates and the gaps.
UNHELD: dict[str, tuple[int, dict[str, int], Any, int, int, int, dict[str, int]]] = {
    "nothing is accepted": (4, {}, {}, 0, 0, 0, {"retention": 4}),
    "an accepted revision explained them": (
        4, {}, EXPLAINED, 6, 0, 2, {"aborted": 1, "control": 1},
    ),
    # Kafka holds the end of the hour, with the control record; the table, a duplicate.
    "it explained some": (2, {"control": 1}, EXPLAINED, 6, 1, 1, {"aborted": 1, "control": 1}),
    "more are lost than it accounts for": (
        5, {}, EXPLAINED, 6, 0, 2, {"aborted": 1, "control": 1, "retention": 1},
    ),
    # The hazard: a row that storage lost would pass for a duplicate.
    "a row of it is lost": (5, {}, EXPLAINED, 5, 0, 0, {"retention": 5}),
    "a row of it is lost beside gaps": (0, {"compacted": 2}, EXPLAINED, 5, 0, 0, {"compacted": 2}),
    "retention made the gap before": (
        4, {}, before(6, 0, 0, retention=4), 6, 0, 0, {"retention": 4},
    ),
    # Compaction removed four, two of them earlier; an offset found again is no duplicate twice.
    "duplicates are compacted away": (0, {"compacted": 4}, TWICE, 6, 0, 2, {"compacted": 2}),
    "one is found again": (0, {"compacted": 3}, TWICE, 6, 1, 1, {"compacted": 2}),
    "both are found again": (0, {"compacted": 2}, TWICE, 6, 2, 0, {"compacted": 2}),
    # The hazard: a revision that took compacted records for control records.
    "the log's class has precedence": (
        0, {"control": 1, "compacted": 7}, before(2, 0, 0, control=8), 2, 0, 0,
        {"control": 1, "compacted": 7},
    ),
    "lost and compacted ones count once": (
        2, {"compacted": 2}, before(6, 0, compacted=1, control=1), 6, 0, 2,
        {"control": 1, "compacted": 1},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", UNHELD)
def test_offsets_in_no_source(name: str) -> None:
    lost, seen, accepted, there, again, duplicates, gaps = UNHELD[name]
    found = classify_unheld(
        {0: lost} if lost else {}, {name: {0: count} for name, count in seen.items()}, accepted,
        {0: there} if accepted else {}, {0: again} if again else {},
    )  # fmt: skip
    expected = {name: {0: count} for name, count in gaps.items()}
    assert found == ({0: duplicates} if duplicates else {}, expected)


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
    gaps = {"compacted": {0: compacted}}
    found, left, gaps = classify_erased(lost, gaps, OF_ERASED, {0: read_again})
    assert (found, left, gaps["compacted"][0]) == expected
