"""Hours, cuts and the timeline as values."""

from datetime import UTC, datetime, timedelta, timezone
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from anabranch.common.errors import ConfigurationError
from anabranch.offsets import hours
from anabranch.offsets.hours import Cut, HourRange, Timeline
from anabranch.offsets.position import Position, Stamped

H3, H4, H5 = "2026-11-21T03", "2026-11-21T04", "2026-11-21T05"
NOW = datetime(2026, 11, 21, 5, 10, tzinfo=UTC)


def stamped(offset: int, when: datetime) -> Stamped:
    return Stamped(offset, int(when.timestamp() * 1000))


@given(st.datetimes(datetime(2000, 1, 1), datetime(2100, 1, 1), timezones=st.just(UTC)))
def test_an_hour_contains_its_moment_and_ends_where_the_next_begins(when: datetime) -> None:
    hour = hours.hour_of(when)
    assert hours.start_of(hour) <= when < hours.end_of(hour)
    assert hours.start_of(hours.shift(hour, 1)) == hours.end_of(hour)
    found = hours.hours_between(hour, hours.shift(hour, 3))
    assert found == [hours.shift(hour, i) for i in range(3)]
    assert hours.hours_between(hour, hours.shift(hour, -3)) == []


def test_hours_and_spans_are_named_in_utc_as_people_write_them() -> None:
    of_india = timezone(timedelta(hours=5, minutes=30))
    assert hours.hour_of(datetime(2026, 11, 21, 1, 30, tzinfo=of_india)) == "2026-11-20T20"
    assert hours.shift("2026-12-31T23", 1) == "2027-01-01T00"
    assert hours.to_number("1970-01-02T01") == 25 and hours.from_number(25) == "1970-01-02T01"
    assert hours.span_of("2026-11-21T23..2026-11-22T01") == ("2026-11-21T23", "2026-11-22T01")
    assert hours.span_of("2026-11-21T23") == ("2026-11-21T23", "2026-11-21T23")
    backwards, three_dots = "2026-11-22T01..2026-11-21T23", "2026-11-21T23...2026-11-22T01"
    for wrong in (backwards, "2026-11-21T23..", "..2026-11-21T23", three_dots):
        with pytest.raises(ConfigurationError, match="hour"):
            hours.span_of(wrong)


@pytest.mark.parametrize(
    ("record", "stable_end", "floor", "expected", "why"),
    [
        (stamped(7, NOW), 9, 0, 7, "the first record of the next hour"),
        (
            stamped(7, NOW + timedelta(milliseconds=1)), 9, 0, 9,
            "a record from the future says nothing",
        ),
        (None, 9, 0, 9, "no later record"),
        (stamped(7, NOW), 9, 8, 8, "never below what is published"),
        (None, 9, 12, 12, "never below what is published"),
        (stamped(7, NOW), 5, 0, 5, "never beyond what is decided"),
    ],
)  # fmt: skip
def test_where_an_hour_ends(
    record: Stamped | None, stable_end: int, floor: int, expected: int, why: str
) -> None:
    assert hours.plan_boundary(record, stable_end, floor, NOW) == expected, why


def test_the_first_hour_is_that_of_the_oldest_record_that_waits() -> None:
    timeline, position = Timeline(H5, H5, {0: 4}), Position("t", {0: 4})
    planned = hours.plan_first_hour(timeline, position, stamped(4, hours.start_of(H3)), NOW)
    assert (planned.first, planned.open, planned.start) == (H3, H3, {0: 4})
    assert hours.plan_first_hour(timeline, position, None, NOW) == timeline
    found = hours.plan_first_hour(timeline, position, stamped(4, NOW + timedelta(hours=4)), NOW)
    assert found == timeline


@pytest.mark.parametrize(
    ("timeline", "offsets"),
    [
        (Timeline(H5, H5, {0: 4}), {0: 5}),
        (Timeline(H5, H5, {0: 4}, boundaries={H5: {0: 4}}), {0: 4}),
        (Timeline(H4, H5, {0: 4}, sealed={H4: Cut("t", {0: (4, 4)})}), {0: 4}),
        (Timeline(H4, H5, {0: 4}), {0: 4}),
        (Timeline(H5, H5, {0: 4}), {0: 4, 1: 1}),
    ],
)
def test_the_first_hour_stays_once_decided(timeline: Timeline, offsets: dict[int, int]) -> None:
    earliest = stamped(0, hours.start_of(H3))
    assert hours.plan_first_hour(timeline, Position("t", offsets), earliest, NOW) == timeline


def test_an_hour_is_undecided_until_every_partition_has_its_end() -> None:
    timeline = Timeline(H3, H3, {0: 0, 1: 0}, boundaries={H3: {0: 4, 1: 0}, H4: {0: 4}})
    assert hours.undecided(timeline, (0, 1), NOW) == [H4]
    assert hours.undecided(timeline, (0, 1, 2), NOW) == [H3, H4]
    assert hours.undecided(Timeline(H5, H5, {}), (0, 1), NOW) == []
    why = "an end in use makes an hour end for all"
    assert hours.undecided(timeline, (0, 1), hours.end_of(H3)) == [H4], why
    timeline = Timeline(H3, H3, {0: 0}, boundaries={H3: {0: 4}})
    assert hours.hour_ranges(timeline, {}, {0: 0}, NOW) == [HourRange(H3, {0: 4})]
    why = "a partition whose end is not known"
    assert hours.hour_ranges(timeline, {}, {0: 0, 1: 0}, NOW) == [], why


def test_sealing_stops_where_an_hour_is_not_decided_for_all_or_has_not_ended() -> None:
    timeline = Timeline(H3, H3, {0: 1}, boundaries={H3: {0: 4}, H4: {0: 6, 1: 2}, H5: {0: 6, 1: 2}})
    sealed, done = hours.plan_seal(timeline, "t", NOW)
    assert done == [H3, H4]
    assert sealed.sealed == {H3: Cut("t", {0: (1, 4)}), H4: Cut("t", {0: (4, 6), 1: (0, 2)})}
    assert (sealed.open, sealed.start, sealed.boundaries) == (H5, {0: 6, 1: 2}, {H5: {0: 6, 1: 2}})
    assert hours.plan_seal(Timeline(H3, H3, {0: 1}, boundaries={H4: {0: 6}}), "t", NOW)[1] == []
    assert hours.plan_seal(sealed, "t", NOW) == (sealed, []), "sealing again seals nothing"
    added = Timeline(H3, H3, {0: 1}, boundaries={H3: {0: 4, 1: 2}, H4: {0: 6}})
    next_sealed, then = hours.plan_seal(added, "t", NOW)
    assert (then, next_sealed.open, next_sealed.boundaries) == ([H3], H4, {H4: {0: 6}})


@pytest.mark.parametrize(
    ("needed", "at_most", "wanted"),
    [(None, 9, [H4]), ({0: 4}, 9, []), ({0: 5}, 9, [H4]), ({0: 4, 1: 1}, 9, [H4])],
)
def test_hours_are_decided(needed: dict[int, int] | None, at_most: int, wanted: list[str]) -> None:
    timeline = Timeline(H3, H3, {0: 0}, boundaries={H3: {0: 4}})
    assert hours.plan_wanted(timeline, {0: 0}, NOW, needed, at_most) == wanted
    why = "inside what is sealed"
    assert hours.plan_wanted(Timeline(H3, H3, {0: 2}), {0: 0}, NOW, {0: 2}, 1) == [], why
    why = "one at a time"
    assert hours.plan_wanted(Timeline(H3, H3, {0: 2}), {0: 0}, NOW, None, 1) == [H3], why


def test_hour_ranges_go_from_sealed_over_ended_to_the_running_hour() -> None:
    timeline = Timeline(H3, H4, {0: 4}, boundaries={H4: {0: 6}})
    cuts = {H3: Cut("t", {0: (0, 4)})}
    running = HourRange(H5, None)
    found = hours.hour_ranges(timeline, cuts, {0: 2}, NOW)
    assert found == [HourRange(H3, {0: 4}), HourRange(H4, {0: 6}), running]
    assert hours.hour_ranges(timeline, cuts, {0: 4}, NOW) == [HourRange(H4, {0: 6}), running]
    behind = hours.start_of(H3)
    why = "a clock behind reopens no hour"
    assert hours.hour_ranges(timeline, cuts, {0: 4}, behind)[-1] == running, why


OFFSETS = st.dictionaries(st.integers(0, 9), st.integers(0, 2**53), max_size=4)
RANGES = st.dictionaries(
    st.integers(0, 9), st.tuples(st.integers(0, 99), st.integers(99, 2**53)), max_size=4
)
HOURS = st.integers(0, 99).map(lambda n: hours.shift(H3, n))


@given(
    st.builds(
        Timeline, HOURS, HOURS, OFFSETS, st.dictionaries(HOURS, OFFSETS, max_size=3),
        st.dictionaries(HOURS, st.builds(Cut, st.text(), RANGES), max_size=3),
        st.lists(HOURS, max_size=3).map(tuple),
    )
)  # fmt: skip
def test_a_timeline_comes_back_from_json_as_it_was(timeline: Timeline) -> None:
    assert Timeline.from_json(timeline.to_json()) == timeline


def test_a_long_backlog_is_not_built_again_by_each_micro_batch() -> None:
    timeline = Timeline(H3, H3, {0: 0}, {hours.shift(H3, i): {0: i + 1} for i in range(8_760)})
    now = hours.start_of(hours.shift(H3, 8_760))
    assert hours.undecided(timeline, [0], now) == []
    assert hours.plan_boundaries(timeline, {0: 0}, {}, {0: 9_000}, now, now) is timeline
    assert Timeline.from_json(timeline.to_json()) == timeline
    assert Timeline.from_json(timeline.to_json()) is Timeline.from_json(timeline.to_json())


@given(st.sets(st.integers(0, 30)))
def test_hours_as_spans(numbers: set[int]) -> None:
    named = {hours.shift("2026-11-21T20", n) for n in numbers}
    spans = hours.spans_of(named)
    spanned = [hours.hours_between(first, hours.shift(last, 1)) for first, last in spans]
    assert sorted(named) == [hour for some in spanned for hour in some]
    assert all(hours.shift(a[1], 1) < b[0] for a, b in pairwise(spans))
