"""The records of an hour in a topic: order, and where a process continues. Pure."""

import json
from dataclasses import replace
from datetime import UTC, datetime
from decimal import Decimal

import pytest
from lakes import FIRST
from proofs import NOW

from anabranch.common.errors import ConfigurationError, Transient
from anabranch.offsets.hours import Cut, Timeline, shift
from anabranch.offsets.position import Position
from anabranch.protocol.deliveries import Delivery
from anabranch.protocol.topic_change import plan_adopt
from serving_layer.egress import hour

DELIVERY = Delivery("d1", FIRST, "feed", "out (id)", 1, "batch", 7, 3, 0, "ab1.x", NOW)
CUT = Cut("topic-id", {1: (5, 8), 0: (2, 4)})


def test_every_place_of_the_cut_that_has_no_row_is_named_in_its_turn() -> None:
    given = [{"kafka_partition": p, "kafka_offset": o} for p, o in ((0, 3), (1, 5), (1, 7))]
    assert [(p, o, row is not None) for p, o, row in hour.places(given, CUT)] == [
        (0, 2, False), (0, 3, True), (1, 5, True), (1, 6, False), (1, 7, True)
    ]  # fmt: skip
    assert [row for *_, row in hour.places([], CUT)] == [None] * 5


@pytest.mark.parametrize(
    ("items", "expected"),
    [
        ("", [("", True)]),
        ("a", [("a", True)]),
        ("ab", [("ab", True)]),
        ("abc", [("ab", False), ("c", True)]),
        ("abcd", [("ab", False), ("cd", True)]),
    ],
)
def test_the_last_transaction_counts(items: str, expected: list[tuple[str, bool]]) -> None:
    assert [("".join(chunk), last) for chunk, last in hour.chunks(items, 2, 100, len)] == expected


@pytest.mark.parametrize(
    ("at_most", "max_bytes", "expected"),
    [(2, 100, [2, 2, 1]), (9, 1, [1] * 5), (9, 100, [5]), (9, 7, [3, 1, 1])],
)
def test_records_and_bytes_bound_them(at_most: int, max_bytes: int, expected: list[int]) -> None:
    records = [b"1", b"22", b"333", b"4444", b"55555"]
    cut = list(hour.chunks(records, at_most, max_bytes, len))
    assert [len(chunk) for chunk, _ in cut] == expected
    assert [last for _, last in cut] == [False] * (len(cut) - 1) + [True]
    assert [one for chunk, _ in cut for one in chunk] == records


def test_a_record_in_the_place_of_a_lost_one_has_another_identity() -> None:
    """The hazard: a log that lost its end gives offsets again: two records have one key."""
    timeline = Timeline(FIRST, FIRST, {0: 0})
    once = plan_adopt(timeline, Position("T", {0: 100, 1: 7}), "T", {0: 90}, {})
    before, after = FIRST, once.timeline.open
    timeline = once.timeline
    assert timeline == Timeline.from_json(timeline.to_json())
    first = hour.Identity("T", timeline.replaced_before(before, "T"))
    then = hour.Identity("T", timeline.replaced_before(after, "T"))
    keys = {first.key_of(0, o) for o in range(90, 100)}
    assert keys.isdisjoint(then.key_of(0, o) for o in range(90, 140))
    assert first.key_of(0, 95) == b"T:0:95"
    assert then.key_of(0, 95) == b"T~1:0:95"
    # What no other record has keeps the key that targets hold already.
    expected = [b"T:0:100", b"T:0:89", b"T:1:6"]
    assert [then.key_of(p, o) for p, o in ((0, 100), (0, 89), (1, 6))] == expected
    # A second time.
    twice = plan_adopt(timeline, Position("T", {0: 97, 1: 9}), "T", {0: 92}, {}).timeline
    last = hour.Identity("T", twice.replaced_before(shift(after, 1), "T"))
    assert [last.key_of(0, o) for o in (91, 95, 98)] == [b"T~1:0:91", b"T~2:0:95", b"T~1:0:98"]
    assert then == hour.Identity("T", twice.replaced_before(after, "T"))
    begun, position = Timeline(FIRST, FIRST, {0: 0}), Position("T", {0: 9})
    away = plan_adopt(begun, position, "U", {0: 0}, {}).timeline
    back = plan_adopt(away, Position("U", {0: 4}), "T", {0: 5}, {}).timeline
    assert hour.Identity("T", back.replaced_before(back.open, "T")).key_of(0, 6) == b"T~1:0:6"
    assert hour.Identity("U", back.replaced_before(away.open, "U")).key_of(0, 6) == b"U:0:6"


def test_a_position_is_read_as_it_was_written() -> None:
    for position in (
        hour.SenderPosition("out (id)"),
        hour.SenderPosition("out (id)", DELIVERY),
        hour.SenderPosition("out (id)", DELIVERY, hour.LastPlace(FIRST, "source", 1, 2**40)),
    ):
        assert hour.SenderPosition.decode(position.encode()) == position
    with pytest.raises(ConfigurationError, match="expected a position of its own"):
        hour.SenderPosition.decode("lag monitor")
    with pytest.raises(Transient, match="run `anabranch merge STREAM`"):
        hour.SenderPosition(
            "out (id)", replace(DELIVERY, token="x" * hour.MAX_POSITION_BYTES)
        ).encode()


def test_a_record_is_its_identity_and_its_row_as_json() -> None:
    assert hour.Identity("z8XKj-3aS8unzq2Q1f17iA").key_of(3, 17) == b"z8XKj-3aS8unzq2Q1f17iA:3:17"
    row = {
        "id": "ü", "at": datetime(2026, 11, 21, 3, tzinfo=UTC), "price": Decimal("1.50"),
        "raw": b"\x00", "n": None,
    }  # fmt: skip
    assert json.loads(hour.value_of(row)) == {
        "id": "ü", "at": "2026-11-21T03:00:00Z", "price": "1.50", "raw": "AA==", "n": None
    }  # fmt: skip
