"""Cuts through logs in which some records are stamped wrongly, in the past and in the future.

The central property: a record that is stamped rightly lies in the hour of its own stamp, whatever
its neighbours say.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from functools import partial
from itertools import pairwise

import pytest
from brokers import Broker
from budget import budget
from hypothesis import given, settings
from hypothesis import strategies as st
from lakes import new_state

from anabranch.offsets import hour_ends, hours
from anabranch.offsets.hour_ends import (
    MOST_FETCHED,
    PRECISION_MS,
    REACH,
    WINDOW,
    Side,
    Window,
    find_oldest,
    millis,
)
from anabranch.offsets.hours import Timeline, end_of, hour_of, start_of
from anabranch.offsets.position import Offsets, Stamped, Topic
from anabranch.protocol import sealing
from anabranch.protocol.state import State
from speed_layer.plan import assign

NOW = datetime(2026, 11, 21, 12, 0, 5, tzinfo=UTC)
MINUTE, HOUR = timedelta(minutes=1), timedelta(hours=1)
MICROS, NANOS = 1_790_000_000_000_000, 1_790_000_000_000_000_000
IN_2036 = millis(datetime(2036, 1, 1, tzinfo=UTC))
# Wrong stamps of producers: unknown, of other units, of clocks that are far off.
LIES = [-1, -NANOS, 0, 1_790_000_000, MICROS, NANOS, 2**63 - 1, -(2**63), IN_2036]


def stamped(stamps: Sequence[int], start: int = 0) -> Window:
    return tuple(Stamped(start + i, stamp) for i, stamp in enumerate(stamps))


@dataclass
class Kafka(Broker):
    """A topic that counts what it is asked."""

    questions: int = 0
    looks: int = 0
    asked: int = 0

    def _first(self, times: dict[int, int]) -> dict[int, Stamped | None]:
        self.asked += 1
        return super()._first(times)

    def first_from(self, topic: Topic, when: datetime) -> dict[int, Stamped | None]:
        self.questions += 1
        return super().first_from(topic, when)

    def stamps_from(
        self, topic: Topic, starts: Offsets, ends: Offsets, count: int
    ) -> dict[int, Window]:
        self.looks += 1
        return {p: stamped(self.log[p][s : min(s + count, ends[p])], s) for p, s in starts.items()}


def begun() -> State:
    """As `apply` leaves a stream: the hour at hand, position 0."""
    return new_state(Timeline(hour_of(NOW), hour_of(NOW), {}), {})


def decide(
    kafka: Kafka, state: State | None = None, seen: sealing.Seen | None = None
) -> list[hours.HourRange]:
    """The hours of the whole log, decided as by a batch layer that runs for the first time."""
    state, seen = state or begun(), {} if seen is None else seen
    for _ in range(10_000):
        offsets = sealing.ask(kafka, "events", state, NOW, timedelta(0), seen=seen)
        decided = sealing.resolve_state(state, offsets)
        assert decided is not None
        state = replace(state, timeline=decided.timeline, position=decided.position)
        known = hours.hour_ranges(decided.timeline, {}, decided.position.offsets, NOW)
        if known and known[-1].ends is None:
            return known
    raise AssertionError("the hours never end")


def hours_of(kafka: Kafka, **given: object) -> dict[tuple[int, int], str]:
    ranges = {p: (0, len(stamps)) for p, stamps in kafka.log.items()}
    by_hour = assign(ranges, decide(kafka, **given))  # type: ignore[arg-type]
    parts = [(h, p, of) for h, part in by_hour.items() for p, of in part.items()]
    return {(p, o): hour for hour, p, of in parts for o in range(*of)}


def a_record_a_minute(back: timedelta, every: timedelta = MINUTE) -> list[int]:
    begin = start_of(hour_of(NOW - back))
    return [millis(begin + i * every) for i in range((NOW - begin) // every + 1)]


def expected(stamps: list[int], partition: int = 0) -> dict[tuple[int, int], str]:
    times = (datetime.fromtimestamp(ts / 1000, UTC) for ts in stamps)
    return {(partition, o): hour_of(time) for o, time in enumerate(times)}


@pytest.mark.parametrize("lie", [*LIES, millis(NOW - 2 * HOUR), millis(NOW - timedelta(days=900))])
@pytest.mark.parametrize(
    "back",
    [5 * HOUR, timedelta(days=budget(3, 10))],
    ids=["down for five hours", "days of history"],
)
def test_one_record_stamped_wrongly_hides_no_hour(lie: int, back: timedelta) -> None:
    """The hazard: for every hour behind a record of the future the time index returns it."""
    log = a_record_a_minute(back)
    kafka = Kafka(log={0: [*log[:10], lie, *log[10:]], 1: list(log), 2: []})
    decided = hours_of(kafka)
    behind = {(0, o + 1): h for (_, o), h in expected(log).items() if o >= 10}
    right = expected(log[:10], 0) | behind | expected(log, 1)
    assert {at: decided[at] for at in right} == right
    assert kafka.looks <= 15 * len(set(decided.values())), "a bisection needs fewer windows"


def test_a_wrong_record_between_two_windows_does_not_decide_alone() -> None:
    """The hazard: a bisection ends beside it, and records of hours before it get another hour."""
    at, now = millis(NOW - HOUR), millis(NOW)
    for behind in range(40, 80):
        log = stamped([*[at - 1] * 8, *[at] * 7, at - 72 * 3_600_000, *[at] * behind])
        search, asked = hour_ends.find_end(at, 0, len(log), now, {}), 0
        with pytest.raises(StopIteration) as ended:
            asked = next(search)
            while True:
                asked = search.send(log[asked : asked + WINDOW])
        assert ended.value.value == 8


def test_questions_are_few_in_a_healthy_log_of_known_windows_and_of_empty_hours() -> None:
    kafka = Kafka(log={0: a_record_a_minute(50 * HOUR), 1: []})
    assert hours_of(kafka) == expected(kafka.log[0])
    assert kafka.looks <= kafka.questions + 2 <= 55
    kafka = Kafka(log={0: [IN_2036, *a_record_a_minute(50 * HOUR)]})
    seen: sealing.Seen = {}
    decide(kafka, seen=seen)
    before, kafka.looks = kafka.looks, 0
    decide(kafka, seen=seen)
    assert kafka.looks < before / 2
    assert all(len(window) == WINDOW for known in seen.values() for window in known.values())
    log = a_record_a_minute(2 * HOUR)
    kafka = Kafka(log={0: [millis(NOW - timedelta(days=90)) + i for i in range(5)] + log})
    decided = hours_of(kafka)
    assert decided[0, 0] == hour_of(NOW - timedelta(days=90))
    found = {at: h for at, h in decided.items() if at[1] >= 5}
    assert found == {(0, o + 5): h for (_, o), h in expected(log).items()}
    assert kafka.questions < 40


@pytest.mark.parametrize("days", [20, pytest.param(200, marks=pytest.mark.full)])
def test_a_long_history_is_cut_into_all_its_hours(days: int) -> None:
    kafka = Kafka(log={0: a_record_a_minute(timedelta(days=days), HOUR)})
    assert hours_of(kafka) == expected(kafka.log[0])


def test_a_commit_decides_a_bounded_number_of_hours_and_the_next_continues() -> None:
    kafka = Kafka(log=dict.fromkeys(range(300), a_record_a_minute(timedelta(days=5), HOUR)))
    state = begun()
    decided = sealing.resolve_state(state, sealing.ask(kafka, "events", state, NOW, timedelta(0)))
    assert decided is not None
    assert len(decided.timeline.boundaries) == hours.max_hours_at_once(300) == 80
    assert hours.max_hours_at_once(1) == 240 and hours.max_hours_at_once(100_000) == 1
    on = replace(state, timeline=decided.timeline, position=decided.position)
    last = max(decided.timeline.boundaries)
    assert min(sealing.ask(kafka, "events", on, NOW, timedelta(0)).answers) == hours.shift(last, 1)
    # The offsets of a coming publish are in decided hours: no more hours need a decision.
    needed = dict(decided.timeline.boundaries[last])
    assert sealing.ask(kafka, "events", on, NOW, timedelta(0), needed).answers == {}
    beyond = needed | {0: needed[0] + 1}
    assert sealing.ask(kafka, "events", on, NOW, timedelta(0), beyond).answers != {}


FAR = st.one_of(st.sampled_from(LIES), st.integers(-(2**63), 2**63 - 1))
# Off by days: plausible, but more than any pause; else the wrong one is ambiguous.
OFF = st.integers(3 * 24 * 60, 40 * 24 * 60).map(lambda minutes: minutes * 60_000)
LIE = st.tuples(st.just(False), FAR) | st.tuples(st.just(True), OFF | OFF.map(lambda ms: -ms))
LOGS = st.tuples(
    st.lists(st.sampled_from([1, 1, 1, 7, 60, 200, 900]), min_size=30, max_size=150),
    st.lists(st.tuples(st.integers(8, 40), LIE), max_size=8),
)


Outlier = tuple[int, tuple[bool, int]]


def with_outliers(gaps: list[int], outliers: list[Outlier]) -> tuple[list[int], set[int]]:
    """A log that ends now: `gaps` in minutes, and where its outliers lie, 8 records apart."""
    stamps, at = [], NOW
    for gap in gaps:
        stamps.append(millis(at))
        at -= gap * MINUTE
    log, where, next_at = stamps[::-1], set(), 4
    for distance, (off, lie) in outliers:
        next_at += distance
        if next_at >= len(log) - 8:
            break
        log.insert(next_at, log[next_at] + lie if off else lie)
        where.add(next_at)
    return log, where


@settings(max_examples=budget(50, 150))
@given(LOGS, st.integers(1, 3))
def test_outliers_move_no_other(parts: tuple[list[int], list[Outlier]], partitions: int) -> None:
    log, where = with_outliers(*parts)
    clean = [ts for o, ts in enumerate(log) if o not in where]
    kafka = Kafka(log={p: list(clean if p % 2 else log) for p in range(partitions)} | {9: []})
    decided = hours_of(kafka)
    for p in range(partitions):
        usable = {o: ts for o, ts in enumerate(kafka.log[p]) if 0 <= ts <= millis(NOW)}
        times = {o: datetime.fromtimestamp(ts / 1000, UTC) for o, ts in usable.items()}
        rightly = {(p, o): hour_of(at) for o, at in times.items() if o not in where or p % 2}
        assert {at: decided[at] for at in rightly} == rightly


@settings(max_examples=budget(40, 100))
@given(
    st.lists(
        st.lists(FAR | st.integers(millis(NOW) - 10**9, millis(NOW) + 10**7), max_size=60),
        max_size=3,
    )
)
def test_any_log_is_cut_in_order_and_whole(logs: list[list[int]]) -> None:
    kafka = Kafka(log=dict(enumerate(logs)))
    for before, after in pairwise(decide(kafka)):
        assert before.ends is not None
        assert after.ends is None or all(after.ends[p] >= e for p, e in before.ends.items())
    assert len(hours_of(kafka)) == sum(map(len, logs))


def test_most_usable_timestamps_decide_a_window_and_its_oldest_record() -> None:
    at, now = millis(NOW - HOUR), millis(NOW)
    assert hour_ends.side_of(stamped([at - 1, at - 1, at]), at, now) is Side.EARLIER
    assert hour_ends.side_of(stamped([at - 1, at, IN_2036]), at, now) is Side.LATER
    assert hour_ends.side_of(stamped(LIES), at, now) is Side.NOTHING
    assert hour_ends.side_of((), at, now) is Side.NOTHING
    month, long_ago = millis(NOW - REACH), millis(datetime(2013, 1, 1, tzinfo=UTC))
    assert hour_ends.plan_oldest(stamped([]), now) is None
    assert hour_ends.plan_oldest(stamped(LIES), now) is None
    assert hour_ends.plan_oldest(stamped([long_ago]), now) == Stamped(0, month)
    found = hour_ends.plan_oldest(stamped([long_ago, now - 5, now - 3, now]), now)
    assert found == Stamped(1, now - 5)
    shown = hour_ends.plan_oldest(stamped([now - 10, now - 5, now - 3, long_ago]), now)
    assert shown == Stamped(0, now - 10)
    seen = hour_ends.plan_oldest(stamped([long_ago + 2, long_ago, long_ago + 9, now]), now)
    assert seen == Stamped(1, long_ago)


@pytest.mark.parametrize(
    ("around", "split"),
    [
        ([-2, -1, 0, 1], 2),
        ([0, 1, 2], 0),
        ([-3, -2, -1], None),
        ([-2, 900, -1, 0, 1], 3),  # far ahead, directly before the end
        ([-2, -1, 0, -900, 1], 2),  # far behind, directly after it
        ([-2, 1, -1, 2, 3], 1),  # out of order: either is one record off
    ],
)
def test_an_hour_ends_where_fewest_lie_wrong(around: list[int], split: int | None) -> None:
    at = millis(NOW - HOUR)
    stamps = stamped([at + 1000 * seconds for seconds in around])
    assert hour_ends.plan_split(stamps, at, millis(NOW)) == split


def test_records_without_a_usable_timestamp_belong_to_the_hour_before() -> None:
    log = a_record_a_minute(4 * HOUR)
    silent = [IN_2036] * 500
    decided = hours_of(Kafka(log={0: [*log[:90], *silent, *log[90:]]}))
    assert [decided[0, o] for o in range(90)] == [h for _, h in sorted(expected(log).items())][:90]
    found = {at: h for at, h in decided.items() if at[1] >= 590}
    assert found == {(0, o + 500): h for (_, o), h in expected(log).items() if o >= 90}
    # At the end of the log no record is of a later hour.
    tail = Kafka(log={0: log[:90] + silent})
    shown = set(hours_of(tail).values())
    assert shown == set(expected(log[:90]).values()) | {max(hours_of(tail).values())}


@pytest.mark.parametrize("lie", [0, 1_790_000_000, -1, NANOS])
def test_a_single_record_with_a_wrong_timestamp_opens_no_years_of_hours(lie: int) -> None:
    assert hours_of(Kafka(log={0: [lie]})) == {(0, 0): hour_of(NOW)}


def test_a_search_ends_though_the_log_is_read_with_holes() -> None:
    """Compaction and aborted transactions leave offsets that no consumer is given."""
    log = a_record_a_minute(5 * HOUR)
    at, now = millis(end_of(hour_of(NOW - 4 * HOUR))), millis(NOW)
    offsets = [i * 1000 for i in range(len(log))]
    records = tuple(Stamped(o, ts) for o, ts in zip(offsets, log, strict=True))

    def look(wants: Offsets) -> dict[int, Window]:
        return {p: tuple(r for r in records if r.offset >= o)[:WINDOW] for p, o in wants.items()}

    search = hour_ends.find_end(at, 0, offsets[-1] + 1, now, {})
    ends = hour_ends.find_ends({0: search}, look, lambda *_: None)
    assert ends == {0: next(r.offset for r in records if r.timestamp_ms >= at)}


def search(log: Sequence[int], moment: int, low: int, now: int) -> int | None:
    """The end that windows give, whatever they cost."""
    find = hour_ends.find_end(moment, low, len(log), now, {})
    try:
        offset = next(find)
        while True:
            offset = find.send(stamped(log[offset : offset + WINDOW], offset))
    except StopIteration as found:
        return found.value


def end_by_index(log: list[int], moment: int, now: int) -> dict[int, int]:
    """The end by the time index alone."""
    kafka, topic = Kafka(log={0: log}), Topic("events", "t", (0,))
    first = next((Stamped(o, ts) for o, ts in enumerate(log) if ts >= moment), None)
    answers = {0: first} if first is not None else {}
    first_later = partial(kafka.first_later, topic)
    return hour_ends.find_confirmed_ends(answers, {0: len(log)}, now, first_later)


STEPS = st.lists(st.sampled_from([1, 1, 1, 1, 1, 1, 5, 0, -3, -40, 10**7]), max_size=40)


@given(STEPS, st.integers(-5, 40), st.integers(-2, 40))
def test_the_time_index_and_windows_agree(steps: list[int], moment: int, clock: int) -> None:
    begin = millis(NOW)
    log = [begin + sum(steps[: i + 1]) for i in range(len(steps))]
    for p, offset in end_by_index(log, begin + moment, begin + clock).items():
        assert offset == search(log, begin + moment, offset, begin + clock), (p, log)


@pytest.mark.parametrize(
    ("after", "valid"),
    [
        ([0, 1, 2, 3, 4, 5, 6, 7], True),
        # The last records of the log: more than half of them are enough.
        ([0, 1, -9], True),
        ([0], True),
        # Most may be earlier.
        ([0, 1, -9, -9], False),
        ([0, 1, 2, 3, 4, 5, 6, *[-9] * 20], False),
        ([0, 1, 2, 3, 4, 5, 6, 7, *[-9] * 20], True),
        # Two records of one millisecond: the index has only the first.
        ([0, 0, 1, 2, 3, 4, 5, 6, 7, 8], False),
        # Later than the clock.
        ([5000] * 3, False),
    ],
)
def test_an_answer_counts_if_most_of_a_window_shows(after: list[int], valid: bool) -> None:
    moment = millis(NOW) - 1000
    log = [moment - 50 + i for i in range(20)] + [moment + ts for ts in after]
    assert end_by_index(log, moment, millis(NOW)) == ({0: 20} if valid else {})


# Which partitions have the oldest next record, by the index by time alone.

HIGH = 100 * 3_600_000
# By partition, its stamps, which rise, and how many are read.
FEW_LOGS = st.lists(
    st.tuples(
        st.lists(st.integers(0, HIGH - 1), min_size=1, max_size=12).map(sorted), st.integers(0, 11)
    ),
    min_size=1,
    max_size=60,
).map(lambda logs: [(stamps, min(read, len(stamps) - 1)) for stamps, read in logs])


@given(logs=FEW_LOGS)
def test_the_next_record_is_in_one_of_few_partitions(logs: list[tuple[list[int], int]]) -> None:
    index = Kafka(log={p: stamps for p, (stamps, _) in enumerate(logs)})
    found = find_oldest({p: read for p, (_, read) in enumerate(logs)}, 0, HIGH, index._first)
    assert 0 < len(found) <= MOST_FETCHED
    oldest = min(stamps[read] for stamps, read in logs)
    assert min(logs[p][0][logs[p][1]] for p in found) - oldest <= PRECISION_MS
    assert index.asked <= 19


def test_of_many_partitions_few_are_read_and_one_without_a_timestamp() -> None:
    logs = [[0, 3_600_000 + p] for p in range(500)]
    logs[321] = [0, 1_800_000]
    index = Kafka(log=dict(enumerate(logs)))
    assert 321 in find_oldest(dict.fromkeys(range(500), 1), 0, 2 * 3_600_000, index._first)
    assert index.asked <= 14
    logs = [[0, 3_600_000 + p] for p in range(50)]
    logs[7] = [0, -1]
    index = Kafka(log=dict(enumerate(logs)))
    assert 7 in find_oldest(dict.fromkeys(range(50), 1), 0, 2 * 3_600_000, index._first)
    index = Kafka(log={p: [1] for p in range(MOST_FETCHED)})
    found = len(find_oldest(dict.fromkeys(range(MOST_FETCHED), 0), 0, HIGH, index._first))
    assert found == MOST_FETCHED
    assert index.asked == 0
