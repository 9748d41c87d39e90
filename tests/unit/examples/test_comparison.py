"""The comparison names every way in which `main` can differ from what was acknowledged."""

import pytest
from demo.comparison import Reconciliation, ServedRecord, compare

from anabranch.dev.producers.events import Ack, Kind


def _ack(offset: int, content: str, kind: Kind = "good", partition: int = 0) -> Ack:
    return Ack(partition, offset, kind, content, 0)


ACKS = [
    _ack(0, "a"), _ack(1, "b"), _ack(2, "a", "duplicate"), _ack(3, "x", "malformed"),
    _ack(0, "c", partition=1),
]  # fmt: skip
ROWS = [ServedRecord(0, 0, "a"), ServedRecord(0, 1, "b"), ServedRecord(1, 0, "c")]
REPEATED = ServedRecord(0, 2, "a")
DEAD = [ServedRecord(0, 3, "x")]


def _compare(
    rows: list[ServedRecord], dead: list[ServedRecord] = DEAD, batch: bool = True
) -> Reconciliation:
    return compare(ACKS, rows, dead, lambda partition, offset: batch)


def test_exact_with_a_duplicate_left_out_by_the_batch_layer() -> None:
    comparison = _compare(ROWS)
    assert comparison.is_exact
    assert (comparison.acknowledged, comparison.rows, comparison.dead) == (5, 3, 1)
    assert comparison.duplicate == 1


def test_a_duplicate_is_kept_by_the_speed_layer_and_not_without_its_original() -> None:
    comparison = _compare([*ROWS, REPEATED], batch=False)
    assert comparison.is_exact
    assert (comparison.rows, comparison.duplicate) == (4, 0)
    assert _compare(ROWS, batch=False).lost == ((0, 2),)
    assert _compare(ROWS[1:]).lost == ((0, 0), (0, 2))


@pytest.mark.parametrize(
    ("rows", "dead", "wrong"),
    [
        (ROWS[:2], DEAD, {"lost": ((1, 0),)}),
        (ROWS, [], {"lost": ((0, 3),)}),
        ([*ROWS, ROWS[1]], DEAD, {"twice": ((0, 1),)}),
        ([*ROWS, ServedRecord(0, 3, "x")], DEAD, {"twice": ((0, 3),), "changed": ((0, 3),)}),
        ([*ROWS, ServedRecord(1, 7, "z")], DEAD, {"foreign": ((1, 7),)}),
        ([*ROWS[:2], ServedRecord(1, 0, "other")], DEAD, {"changed": ((1, 0),)}),
        (ROWS[:2], [*DEAD, ServedRecord(1, 0, "c")], {"changed": ((1, 0),)}),
        (ROWS, [ServedRecord(0, 3, None)], {"changed": ((0, 3),)}),
    ],
)
def test_each_difference_is_named(
    rows: list[ServedRecord], dead: list[ServedRecord], wrong: dict[str, object]
) -> None:
    comparison = _compare(rows, dead)
    assert not comparison.is_exact
    named = ("lost", "twice", "foreign", "changed")
    found = {name: getattr(comparison, name) for name in named}
    assert found == dict.fromkeys(named, ()) | wrong
    assert any(" 0:" in line or " 1:" in line for line in comparison.sentences())
