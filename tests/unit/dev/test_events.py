"""The generator of game events: the same bytes every time, in the numbers that it promises."""

import json
from collections import Counter
from datetime import UTC, datetime, timedelta
from itertools import islice, pairwise
from typing import Any

import pytest

from anabranch.dev.producers.events import (
    KINDS,
    MALFORMED,
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
DAY_MS = 24 * HOUR_MS


def parsed(record: ProducerRecord) -> dict[str, Any]:
    assert record.value is not None
    event = json.loads(record.value)
    assert isinstance(event, dict)
    return event


def event_ms(record: ProducerRecord) -> int:
    return round(datetime.fromisoformat(parsed(record)["event_time"]).timestamp() * 1000)


@pytest.fixture(scope="module")
def dirty() -> list[ProducerRecord]:
    return list(generate(20_000, 7, START, END, dirty=True))


def of(records: list[ProducerRecord], *kinds: str) -> list[ProducerRecord]:
    return [record for record in records if record.kind in kinds]


def test_the_same_arguments_give_the_same_records(dirty: list[ProducerRecord]) -> None:
    assert list(generate(20_000, 7, START, END, dirty=True)) == dirty


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


def test_the_seed_alone_decides_what_is_played() -> None:
    def plays(start: datetime) -> list[dict[str, Any]]:
        events = [parsed(record) for record in generate(300, 7, start, END, dirty=False)]
        return [
            {k: v for k, v in event.items() if k not in ("event_id", "event_time")}
            for event in events
        ]

    assert plays(START) == plays(START - timedelta(days=2))


@pytest.mark.parametrize("events", [0, 1, 99, 100, 101, 250, 5_000])
@pytest.mark.parametrize("is_dirty", [False, True])
def test_each_kind_comes_in_its_expected_number(events: int, is_dirty: bool) -> None:
    counts = Counter(record.kind for record in generate(events, 3, START, END, is_dirty))
    assert {kind: counts[kind] for kind in KINDS} == expected(events, is_dirty)
    assert counts["good"] + counts["late"] == events
    if is_dirty and events >= 100:
        assert all(counts[kind] >= 1 for kind in KINDS)


def test_clean_events_are_good_ones_only_and_their_time_is_seconds_before_kafkas() -> None:
    records = list(generate(1_000, 1, START, END, dirty=False))
    assert {record.kind for record in records} == {"good"}
    assert all(0 <= record.timestamp_ms - event_ms(record) < 3_000 for record in records)


def test_kafka_timestamps_ascend_evenly_over_the_range(dirty: list[ProducerRecord]) -> None:
    stamps = [record.timestamp_ms for record in dirty]
    assert stamps == sorted(stamps)
    originals = [record.timestamp_ms for record in of(dirty, "good", "late")]
    assert originals[0] == START.timestamp() * 1000
    assert (
        originals[-1] == END.timestamp() * 1000 - 540
    )  # the last of 20,000 steps over three hours
    assert {later - earlier for earlier, later in pairwise(originals)} == {540}


def test_late_events_are_one_to_three_days_old(dirty: list[ProducerRecord]) -> None:
    ages = [record.timestamp_ms - event_ms(record) for record in of(dirty, "late")]
    assert len(ages) == 200
    assert all(DAY_MS <= age < 3 * DAY_MS for age in ages)


def test_a_duplicate_repeats_earlier_bytes_within_a_minute(dirty: list[ProducerRecord]) -> None:
    seen: dict[tuple[bytes | None, bytes | None], int] = {}
    for record in dirty:
        content = (record.key, record.value)
        if record.kind == "duplicate":
            assert 0 < record.timestamp_ms - seen[content] <= 60_000
        elif record.kind != "malformed":
            assert content not in seen
            seen[content] = record.timestamp_ms


@pytest.mark.parametrize("events", [100, 1_000, 20_000])
@pytest.mark.parametrize("hours", [2, 3])
def test_a_duplicate_crosses_an_hours_end(events: int, hours: int) -> None:
    records = list(generate(events, 11, END - timedelta(hours=hours), END, dirty=True))
    originals = {record.value: record.timestamp_ms // HOUR_MS for record in of(records, "good")}
    steps = [
        record.timestamp_ms // HOUR_MS - originals[record.value]
        for record in of(records, "duplicate")
    ]
    assert 1 in steps
    assert max(steps) == 1  # further apart would be outside a look-back of one hour
    if events >= 1_000:
        assert (
            steps.count(1) >= hours
        )  # each hour's end inside [END - hours, END), which begins at half past


def test_sparse_events_have_no_duplicate_an_hour_later() -> None:
    records = list(generate(100, 1, END - timedelta(hours=400), END, dirty=True))
    (duplicate,) = of(records, "duplicate")
    assert [r.timestamp_ms for r in records if r.value == duplicate.value] == [
        duplicate.timestamp_ms
    ] * 2


def test_every_malformed_sort_occurs_and_none_could_be_a_row(dirty: list[ProducerRecord]) -> None:
    """The reasons are looked for one by one: malformed means malformed by the schema of
    game_events."""
    counts = Counter(reason_of(record) for record in of(dirty, "malformed"))
    assert counts == dict.fromkeys(MALFORMED, 200 // len(MALFORMED))
    assert {reason_of(record) for record in of(dirty, "good", "late", "duplicate")} == {"a row"}


def reason_of(record: ProducerRecord) -> str:
    if record.value is None:
        return "null_value"
    try:
        text = record.value.decode()
    except UnicodeDecodeError:
        return "invalid_utf8"
    try:
        event = json.loads(text)
    except ValueError:
        return "truncated" if text.startswith("{") else "not_json"
    if {"event_id", "event_type", "player_id", "event_time"} - event.keys():
        return "missing_field"
    if not isinstance(event.get("level", 0), int):
        return "wrong_type"
    age = record.timestamp_ms - event_ms(record)
    return "epoch_time" if age > 30 * DAY_MS else "future_time" if age < -HOUR_MS else "a row"


def test_malformed_records_carry_event_ids_of_their_own(dirty: list[ProducerRecord]) -> None:
    ids = {parsed(record)["event_id"] for record in of(dirty, "good", "late")}
    assert len(ids) == 20_000
    for record in of(dirty, "malformed"):
        if reason_of(record) in ("missing_field", "wrong_type", "epoch_time", "future_time"):
            assert parsed(record)["event_id"] not in ids


@pytest.mark.parametrize("end", [START, START - timedelta(hours=1), END.replace(tzinfo=None)])
def test_an_empty_or_naive_interval_is_refused(end: datetime) -> None:
    with pytest.raises(ValueError, match="start before end"):
        list(generate(10, 1, START, end, dirty=False))


def test_live_events_are_stamped_when_taken_and_never_step_back() -> None:
    now = int(END.timestamp() * 1000)
    ticks = iter([now, now + 5, now - 60_000, now + 9])
    records = list(generate_live(4, 1, END, lambda: next(ticks), dirty=False))
    assert [record.timestamp_ms - now for record in records] == [0, 5, 5, 9]


def test_live_events_are_endless_without_a_number() -> None:
    records = list(
        islice(generate_live(None, 1, END, lambda: int(END.timestamp() * 1000), dirty=True), 1_030)
    )
    counts = Counter(record.kind for record in records)
    assert counts["late"] == counts["malformed"] == 10
    assert counts["duplicate"] in (9, 10)  # the last may still be to come


def test_acknowledged_records_are_counted_by_hour_and_kind() -> None:
    hour = int(datetime(2026, 11, 21, 3, tzinfo=UTC).timestamp() * 1000)
    sent = Sent("t")
    sent.acks += [Ack(0, 0, "good", "a", hour), Ack(0, 1, "late", "b", hour + HOUR_MS - 1)]
    sent.acks += [Ack(1, 0, "malformed", None, hour + HOUR_MS)]
    assert sent.acknowledged == 3
    assert sent.by_hour() == {
        "2026-11-21T03": {"good": 1, "late": 1, "duplicate": 0, "malformed": 0},
        "2026-11-21T04": {"good": 0, "late": 0, "duplicate": 0, "malformed": 1},
    }
