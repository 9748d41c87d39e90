"""The records of an hour in a topic: what is sent in which order, and where a process goes on. Pure."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

import pytest
from lakes import FIRST, decide, new_stream
from proofs import NOW

from anabranch.errors import ConfigurationError, Transient
from anabranch.hours import Cut
from anabranch.protocol.deliveries import Delivery
from serving_layer.egress.hour import Hour
from serving_layer.egress.records import (
    LONGEST,
    At,
    Position,
    chunks,
    key_of,
    may_have_been_otherwise,
    places,
    value_of,
)

NONE: Any = None
HOUR = Hour("events", FIRST, 1, "batch", 7, 3, "source", 3, NONE)
DELIVERY = Delivery("d1", FIRST, "feed", "out (id)", 1, "batch", 7, 3, 0, "ab1.x", NOW)
CUT = Cut("topic-id", {1: (5, 8), 0: (2, 4)})


def rows(*of: tuple[int, int]) -> list[dict[str, Any]]:
    return [{"kafka_partition": p, "kafka_offset": o} for p, o in of]


def test_every_place_of_the_cut_that_has_no_row_is_named_in_its_turn() -> None:
    given = rows((0, 3), (1, 5), (1, 7))
    assert [(p, o, row is not None) for p, o, row in places(given, CUT)] == [
        (0, 2, False), (0, 3, True), (1, 5, True), (1, 6, False), (1, 7, True)
    ]  # fmt: skip
    assert [row for *_, row in places(given, None)] == given
    assert list(places([], None)) == []
    assert [row for *_, row in places([], CUT)] == [None] * 5


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
def test_of_several_transactions_the_last_is_known(items: str, expected: list[tuple[str, bool]]) -> None:
    assert [("".join(chunk), last) for chunk, last in chunks(items, 2)] == expected


def test_only_an_hour_that_was_decided_once_needs_no_nulls() -> None:
    accepted = decide(FIRST, "accepted", 1, CUT, NOW, "a")
    sealed = decide(FIRST, "sealed", 0, CUT, NOW, "s")
    assert not may_have_been_otherwise(HOUR, [sealed, accepted, accepted])
    assert may_have_been_otherwise(replace(HOUR, revision=2), [accepted])
    assert may_have_been_otherwise(replace(HOUR, served="speed"), [accepted])
    given_away_and_back = [accepted, *(decide(FIRST, "served", 1, None, NOW, id) for id in "bc")]
    assert may_have_been_otherwise(HOUR, given_away_and_back)
    # A branch that was set back gives a number twice.
    assert may_have_been_otherwise(HOUR, [accepted, decide(FIRST, "accepted", 1, CUT, NOW, "again")])


def test_a_position_is_read_as_it_was_written() -> None:
    for position in (
        Position("out (id)"),
        Position("out (id)", DELIVERY),
        Position("out (id)", DELIVERY, At(FIRST, "source", 1, 2**40)),
    ):
        assert Position.decode(position.encode()) == position
    with pytest.raises(ConfigurationError, match="expected a position of its own"):
        Position.decode("lag monitor")
    with pytest.raises(Transient, match="run `anabranch merge STREAM`"):
        Position("out (id)", replace(DELIVERY, token="x" * LONGEST)).encode()


def test_a_record_is_its_identity_and_its_row_as_json() -> None:
    assert key_of("z8XKj-3aS8unzq2Q1f17iA", 3, 17) == b"z8XKj-3aS8unzq2Q1f17iA:3:17"
    row = {"id": "ü", "at": datetime(2026, 11, 21, 3, tzinfo=UTC), "price": Decimal("1.50"), "raw": b"\x00", "n": None}
    assert json.loads(value_of(row)) == {
        "id": "ü", "at": "2026-11-21T03:00:00Z", "price": "1.50", "raw": "AA==", "n": None
    }  # fmt: skip


def test_a_topic_is_not_delivered_to_itself() -> None:
    with pytest.raises(ValueError, match="expected other topics than the stream's own"):
        new_stream(egress=[{"name": "a", "type": "topic", "topic": "events"}])
    with pytest.raises(ValueError, match="expected each place once"):
        new_stream(egress=[{"name": n, "type": "topic", "topic": "out"} for n in "ab"])
