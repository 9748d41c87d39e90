"""The generator of game events: the same bytes every time, in the numbers that it promises."""

import json
from collections import Counter
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from typing import Any

import pytest

from anabranch.dev.producers.events import (
    KINDS,
    Ack,
    ProducerRecord,
    Sent,
    expected,
    generate,
    generate_live,
)

END = datetime(2026, 11, 21, 4, 30, tzinfo=UTC)
START = END - timedelta(hours=3)
HOUR_MS = 3_600_000


def parsed(record: ProducerRecord) -> dict[str, Any]:
    assert record.value is not None
    event = json.loads(record.value)
    assert isinstance(event, dict)
    return event


@pytest.fixture(scope="module")
def dirty() -> list[ProducerRecord]:
    return list(generate(20_000, 7, START, END, dirty=True))


def of(records: list[ProducerRecord], *kinds: str) -> list[ProducerRecord]:
    return [record for record in records if record.kind in kinds]


def test_the_same_arguments_give_the_same_even_or_repeated_records(
    dirty: list[ProducerRecord],
) -> None:
    assert list(generate(20_000, 7, START, END, dirty=True)) == dirty
    stamps = [record.timestamp_ms for record in dirty]
    assert stamps == sorted(stamps)
    originals = [record.timestamp_ms for record in of(dirty, "good", "late")]
    assert originals[0] == START.timestamp() * 1000
    # The last of 20,000 steps over three hours.
    assert originals[-1] == END.timestamp() * 1000 - 540
    assert {later - earlier for earlier, later in pairwise(originals)} == {540}
    seen: dict[tuple[bytes | None, bytes | None], int] = {}
    for record in dirty:
        content = (record.key, record.value)
        if record.kind == "duplicate":
            assert 0 < record.timestamp_ms - seen[content] <= 60_000
        elif record.kind != "malformed":
            assert content not in seen
            seen[content] = record.timestamp_ms


@pytest.mark.parametrize(
    "other",
    [
        lambda: generate(500, 8, START, END, dirty=False),
        lambda: generate(501, 7, START, END, dirty=False),
        lambda: generate(500, 7, START + timedelta(seconds=1), END, dirty=False),
        lambda: generate(500, 7, START, END + timedelta(seconds=1), dirty=False),
    ],
    ids=["seed", "events", "start", "end"],
)
def test_another_argument_shares_no_event_id_with_another_run(other: Any) -> None:
    ids = {parsed(record)["event_id"] for record in generate(500, 7, START, END, dirty=False)}
    assert len(ids) == 500
    assert ids.isdisjoint(parsed(record)["event_id"] for record in other())


@pytest.mark.parametrize("events", [0, 1, 99, 100, 101, 250, 5_000])
@pytest.mark.parametrize("is_dirty", [False, True])
def test_each_kind_comes_in_its_expected_number(events: int, is_dirty: bool) -> None:
    counts = Counter(record.kind for record in generate(events, 3, START, END, is_dirty))
    assert {kind: counts[kind] for kind in KINDS} == expected(events, is_dirty)
    assert counts["good"] + counts["late"] == events
    if is_dirty and events >= 100:
        assert all(counts[kind] >= 1 for kind in KINDS)


@pytest.mark.parametrize("events", [100, 1_000, 20_000])
@pytest.mark.parametrize("hours", [2, 3])
def test_a_duplicate_crosses_an_hours_end(events: int, hours: int) -> None:
    records = list(generate(events, 11, END - timedelta(hours=hours), END, dirty=True))
    originals = {record.value: record.timestamp_ms // HOUR_MS for record in of(records, "good")}
    repeated = of(records, "duplicate")
    steps = [record.timestamp_ms // HOUR_MS - originals[record.value] for record in repeated]
    # Further apart would be outside a look-back of one hour.
    assert 1 in steps and max(steps) == 1
    if events >= 1_000:
        # Each hour's end inside [END - hours, END), which begins at half past.
        assert steps.count(1) >= hours


@pytest.mark.parametrize("end", [START, START - timedelta(hours=1), END.replace(tzinfo=None)])
def test_an_empty_or_naive_interval_is_refused(end: datetime) -> None:
    with pytest.raises(ValueError, match="start before end"):
        list(generate(10, 1, START, end, dirty=False))


def test_live_events_never_step_back_and_are_counted_by_hour() -> None:
    now = int(END.timestamp() * 1000)
    ticks = iter([now, now + 5, now - 60_000, now + 9])
    records = list(generate_live(4, 1, END, lambda: next(ticks), dirty=False))
    assert [record.timestamp_ms - now for record in records] == [0, 5, 5, 9]
    hour = int(datetime(2026, 11, 21, 3, tzinfo=UTC).timestamp() * 1000)
    sent = Sent("t")
    sent.acks += [Ack(0, 0, "good", "a", hour), Ack(0, 1, "late", "b", hour + HOUR_MS - 1)]
    sent.acks += [Ack(1, 0, "malformed", None, hour + HOUR_MS)]
    assert sent.acknowledged == 3
    assert sent.by_hour() == {
        "2026-11-21T03": {"good": 1, "late": 1, "duplicate": 0, "malformed": 0},
        "2026-11-21T04": {"good": 0, "late": 0, "duplicate": 0, "malformed": 1},
    }
