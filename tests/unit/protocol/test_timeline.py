"""Hours and cuts under both layers: a simulated log, a moving clock, and every publish that may
happen in between.

The central property: the hour under which the speed layer published an offset is the hour of the
cut that holds it.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from typing import Any, Self

import pytest
from brokers import Broker
from hypothesis import given, settings
from hypothesis import strategies as st
from lakes import new_state

from anabranch.offsets import hours
from anabranch.offsets.hours import Cut, Timeline, end_of, hour_of, shift, start_of
from anabranch.offsets.position import Offsets, Position, advance, classify, trim
from anabranch.offsets.position import RangeRelation as S
from anabranch.protocol import sealing
from anabranch.protocol.sealing import KafkaOffsets, ResolvedState, Seen
from anabranch.protocol.state import Accepted, State
from anabranch.protocol.topic_change import gone_from_kafka, plan_adopt
from speed_layer.plan import HourToRead, Skip, assign, chunks, plan_catch_up, within_hours

BEGIN = datetime(2026, 11, 21, 3, 30, tzinfo=UTC)
MINUTE = timedelta(minutes=1)
MISSING = -1
# The name of a method of `World`, and its arguments.
Step = tuple[Any, ...]


def millis(when: datetime) -> int:
    return int(when.timestamp() * 1000)


def offsets_of(ranges: Mapping[int, tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Each partition and offset of some ranges."""
    return ((p, o) for p, (start, end) in ranges.items() for o in range(start, end))


@dataclass
class World(Broker):
    """A log, a clock and a table; publishes are atomic by the heads that they require."""

    grace: timedelta = timedelta(0)
    at_once: int | None = None
    now: datetime = BEGIN
    log: dict[int, list[int]] = field(default_factory=lambda: {0: [], 1: []})
    held_at: dict[int, int] = field(default_factory=dict)
    position: Position = field(default_factory=lambda: Position("t", {0: 0, 1: 0}))
    timeline: Timeline = field(
        default_factory=lambda: Timeline(hour_of(BEGIN), hour_of(BEGIN), {0: 0, 1: 0})
    )
    accepted: dict[str, Accepted] = field(default_factory=dict)
    answers: dict[str, KafkaOffsets] = field(default_factory=dict)
    seen: Seen = field(default_factory=dict)
    under: dict[tuple[int, int], str] = field(default_factory=dict)
    skipped: set[tuple[int, int]] = field(default_factory=set)
    cuts: dict[str, Cut] = field(default_factory=dict)
    used: dict[tuple[str, int], int] = field(default_factory=dict)
    base: Offsets = field(default_factory=dict)

    # Kafka

    def decided(self, partition: int) -> list[int]:
        return self.log[partition][: self.stable(partition)]

    def stable(self, partition: int) -> int:
        return min(len(self.log[partition]), self.held_at.get(partition, len(self.log[partition])))

    # What `HourClock.decide` does, in two halves: others may act between them.

    def bound(self) -> Position:
        return self.position.with_partitions(tuple(self.log))

    def ask(self, grace: timedelta, needed: Offsets | None = None) -> KafkaOffsets:
        kafka, state = self.adapter, self.state
        return sealing.ask(kafka, "events", state, self.now, grace, needed, self.seen, self.at_once)

    def decide(self, who: str, grace: timedelta, needed: Offsets | None = None) -> ResolvedState:
        answer = self.answers.pop(who, None) or self.ask(grace, needed)
        return sealing.resolve_state(self.state, answer) or self.decide(who, grace, needed)

    # The layers

    @property
    def state(self) -> State:
        return new_state(self.timeline, position=self.bound(), accepted=self.accepted)

    def speed(self, at_most: dict[int, int]) -> None:
        at = self.bound().offsets
        ends = {p: min(self.stable(p), at[p] + at_most.get(p, 0)) for p in self.log}
        self.speed_publish({p: (at[p], e) for p, e in ends.items()})

    def speed_publish(self, ranges: dict[int, tuple[int, int]]) -> None:
        needed = {p: e for p, (_, e) in ranges.items()}
        for _ in range(500):
            decided = self.decide("speed", timedelta(0), needed)
            position = decided.position
            if not ranges.keys() <= position.offsets.keys():
                continue
            if classify(ranges, position.offsets) is S.PUBLISHED:
                return
            assert classify(ranges, position.offsets) is not S.AHEAD
            left = trim(ranges, position.offsets)
            timeline, cuts = decided.timeline, self.state.cuts
            known = hours.hour_ranges(timeline, cuts, position.offsets, decided.now)
            todo = within_hours(left, known)
            assert todo or timeline != self.timeline, "nothing is published and nothing decided"
            by_hour = assign(todo, known)
            given = [(p, o, h) for h, part in by_hour.items() for p, o in offsets_of(part)]
            found = sorted((p, o) for p, o, _ in given)
            assert found == [(p, o) for p in sorted(todo) for o in range(*todo[p])]
            for p, o, hour in given:
                assert (p, o) not in self.under, "published twice"
                self.under[p, o] = hour
            self.publish(decided.timeline, advance(position, todo))
            if todo == left:
                return
        raise AssertionError("the speed layer never gets to the end of a micro-batch")

    def come_back(self) -> None:
        for _ in range(200):
            step = plan_catch_up(self.state, self.bound().offsets)
            if step is None:
                return
            if isinstance(step, Skip):
                decided = self.decide("speed", timedelta(0))
                position = decided.position
                if plan_catch_up(self.state, position.offsets) != step:
                    continue
                ranges = {p: (position.offsets.get(p, 0), e) for p, e in step.to.items()}
                self.skipped |= {*offsets_of(ranges)}
                assert step.to != position.offsets
                self.publish(decided.timeline, Position(self.id, step.to))
            else:
                assert isinstance(step, HourToRead)
                for piece in chunks(step.ranges, 3):
                    self.speed_publish(piece)
        raise AssertionError("the speed layer never comes back")

    def seal(self) -> None:
        while True:
            decided = self.decide("batch", self.grace)
            sealed, done = hours.plan_seal(decided.timeline, self.id, decided.now - self.grace)
            assert [h for h in done if h in self.cuts] == []
            assert decided.position.offsets.items() >= self.position.offsets.items()
            self.cuts |= {h: sealed.sealed[h] for h in done}
            if not done:
                return
            self.publish(sealed, self.position)

    def accept(self, which: int) -> None:
        sealed, start = sorted(self.timeline.sealed.items()), self.timeline
        waiting = [h for h, c in sealed if not gone_from_kafka(start, self.id, h, c)]
        if waiting:
            hour = waiting[which % len(waiting)]
            self.accepted[hour] = Accepted(1, self.timeline.sealed[hour])
            rest = {h: c for h, c in self.timeline.sealed.items() if h != hour}
            self.publish(replace(self.timeline, sealed=rest), self.position)

    def adopt(self, kept: dict[int, int] | None) -> None:
        """The topic is made again or (`kept`) loses its log's end; an operator adopts it."""
        position = self.bound()
        ends = {p: min(kept.get(p, e), e) for p, e in position.offsets.items()} if kept else {}
        lost = {p: e for p, e in ends.items() if e < position.offsets[p]}
        begins = lost if kept else dict.fromkeys(self.log, 0)
        if not begins:
            return
        accepted = {h: a.cut for h, a in self.accepted.items()}
        id = self.id if kept else f"{self.id}'"
        adopted = plan_adopt(self.timeline, position, id, begins, accepted)
        if not kept:
            left = adopted.timeline.left_at(self.id)
            assert left is not None
            hold = self.cuts | {h: adopted.timeline.sealed[h] for h in adopted.sealed}
            comparable = [cut for h, cut in hold.items() if h >= self.timeline.since]
            read = [(p, end) for cut in comparable for p, end in cut.ends.items()]
            assert all(left.ended[p] >= e for p, e in read), "the log that is back is read twice"
        cuts = self.cuts | {h: adopted.timeline.sealed[h] for h in adopted.sealed}
        assert adopted.sealed, "no hour is sealed, so the one at hand would mix two logs"
        for (p, o), hour in self.under.items():
            s, e = cuts[hour].ranges[p]
            assert s <= o < e, "published offsets are in no cut of the old log"
        lost = {(h, p, o) for h, part in adopted.lost.items() for p, o in offsets_of(part)}
        waiting = [(h, c) for h, c in cuts.items() if h not in accepted]
        gone = [(h, c) for h, c in waiting if gone_from_kafka(adopted.timeline, id, h, c)]
        of_gone = {(h, p, o) for h, cut in gone for p, o in offsets_of(cut.ranges)}
        assert lost == {(h, p, o) for h, p, o in of_gone if (p, o) not in self.under}
        self.base = {} if not kept else adopted.timeline.start
        for p in self.log:
            self.log[p] = self.log[p][: begins[p]] if p in begins else self.log[p]
        self.held_at = {p: min(o, len(self.log[p])) for p, o in self.held_at.items()}
        self.answers, self.under, self.cuts, self.used = {}, {}, {}, {}
        self.skipped = {(p, o) for p, e in adopted.position.offsets.items() for o in range(e)}
        self.id = id
        self.publish(adopted.timeline, adopted.position)
        assert self.timeline.open > max(cuts), "the next hour is one of the old log"

    def publish(self, timeline: Timeline, position: Position) -> None:
        self.timeline, self.position = Timeline.from_json(timeline.to_json()), position
        self.check()

    # Steps: what a test or Hypothesis chooses, by name

    def append(self, partition: int, minutes: int | None, count: int) -> None:
        """Records stamped `minutes` from the clock; None: without a timestamp."""
        stamp = MISSING if minutes is None else millis(self.now + minutes * MINUTE)
        self.log.setdefault(partition if partition in self.log else 0, []).extend([stamp] * count)

    def tick(self, seconds: int) -> None:
        self.now += timedelta(seconds=seconds)

    def read(self, a: int, b: int, back: bool) -> None:
        if back:
            self.come_back()
        self.speed(dict.fromkeys(self.log, b) | {0: a})

    def answer(self, who: str) -> None:
        self.answers[who] = self.ask(self.grace if who == "batch" else timedelta(0))

    def add_partition(self) -> None:
        if len(self.log) < 4:
            self.log[len(self.log)] = []

    def hold(self, partition: int) -> None:
        """An open transaction: nothing behind its first record is decided. It holds back what comes
        after it began, never what was decided before."""
        self.held_at.setdefault(partition, len(self.log[partition]))

    def release(self) -> None:
        self.held_at.clear()

    def take(self, *steps: Step) -> Self:
        for name, *arguments in steps:
            getattr(self, name)(*arguments)
            self.check()
        return self

    # What must hold after every publish

    def check(self) -> None:
        bounds = {h: dict(b) for h, b in self.timeline.boundaries.items()}
        bounds |= {h: c.ends for h, c in self.cuts.items()}
        for hour, ends in bounds.items():
            for p, end in ends.items():
                assert self.used.setdefault((hour, p), end) == end, "an end that was used changed"
        in_order = sorted(self.cuts)
        start: Offsets = dict(self.base)
        if in_order:
            following = [*in_order[1:], self.timeline.open]
            assert [shift(hour, 1) for hour in in_order] == following, "an hour is missing"
        for hour in in_order:
            cut = self.cuts[hour]
            ranges = {p: (start.get(p, 0), e) for p, e in cut.ends.items()}
            assert cut.ranges == ranges, "start(h+1) is not end(h)"
            assert all(s <= e for s, e in cut.ranges.values()), "an end fell"
            assert set(start) <= set(cut.ends), "a partition left the hours"
            start = cut.ends
            for offset in offsets_of(cut.ranges):
                assert self.under.get(offset, hour) == hour, "the layers disagree on its hour"
        for (p, o), hour in self.under.items():
            if hour in self.cuts:
                assert o < self.cuts[hour].ends.get(p, 0), "its hour ends before it"
        assert not self.skipped & set(self.under)
        published = sorted({*self.under, *self.skipped})
        read = offsets_of({p: (0, e) for p, e in sorted(self.position.offsets.items())})
        assert published == [*read], "a hole"

    def finish(self) -> None:
        """All hours end, everything is sealed and published: the cuts hold every offset."""
        self.answers.clear()
        self.held_at.clear()
        self.come_back()
        self.speed({p: len(stamps) for p, stamps in self.log.items()})
        self.now = max(self.now, start_of(self.timeline.open)) + timedelta(hours=2) + self.grace
        self.seal()
        ends = self.cuts[max(self.cuts)].ends
        assert {p: e for p, e in ends.items() if e} == {p: len(s) for p, s in self.log.items() if s}
        self.check()


YEARS_AHEAD = 4 * 365 * 24 * 60
STAMPS = st.one_of(
    st.just(0), st.none(), st.integers(-10, 10), st.integers(-300, 300), st.just(YEARS_AHEAD),
    st.just(-2 * 24 * 60),
)  # fmt: skip
# Clocks of two machines may differ by half a minute, so the clock that decides may seem to go back.
TICKS = st.one_of(st.integers(1, 600), st.integers(600, 4 * 3600), st.integers(-30, 30))


def step(name: str, *arguments: st.SearchStrategy[Any]) -> st.SearchStrategy[Step]:
    return st.tuples(st.just(name), *arguments)


APPEND = step("append", st.integers(0, 3), STAMPS, st.integers(1, 4))
READ = step("read", st.integers(0, 5), st.integers(0, 5), st.booleans())
TICK = step("tick", TICKS)
ANSWER = step("answer", st.sampled_from(["speed", "batch"]))
SEAL, ADD_PARTITION = step("seal"), step("add_partition")
STEPS = st.one_of(
    APPEND, APPEND, TICK, TICK, READ, READ, ANSWER, SEAL, step("accept", st.integers(0, 3)),
    ADD_PARTITION, step("hold", st.integers(0, 1)), step("release"),
)  # fmt: skip
GRACES = st.sampled_from([timedelta(0), timedelta(seconds=10), 2 * MINUTE, 90 * MINUTE])


AT_ONCE = st.sampled_from([None, None, 1, 2])


def play(steps: list[Step], grace: timedelta = timedelta(0), at_once: int | None = None) -> None:
    World(grace=grace, at_once=at_once).take(*steps).finish()


@settings(max_examples=200)
@given(st.lists(STEPS, min_size=5, max_size=60), GRACES, AT_ONCE)
def test_both_layers_put_every_offset_into_the_same_hour(
    steps: list[Step], grace: timedelta, at_once: int | None
) -> None:
    play(steps, grace, at_once)


KEPT = st.none() | st.dictionaries(st.integers(0, 2), st.integers(0, 6), min_size=1)


@settings(max_examples=200)
@given(st.lists(st.one_of(STEPS, *[step("adopt", KEPT)] * 3), min_size=8, max_size=60), GRACES)
def test_no_hour_contains_offsets_of_two_logs(steps: list[Step], grace: timedelta) -> None:
    """The hazard: beside a position that began again, old cuts contain or skip new offsets."""
    play(steps, grace)


NEAR_THE_HOUR = st.one_of(
    step("append", st.integers(0, 2), st.integers(-1, 1), st.just(1)),
    step("tick", st.sampled_from([-25, -12, 12, 25])),
    step("read", st.sampled_from([0, 1, 9]), st.just(9), st.just(False)),
    ANSWER, SEAL, ADD_PARTITION,
)  # fmt: skip


@settings(max_examples=150)
@given(st.lists(NEAR_THE_HOUR, min_size=5, max_size=40))
def test_clocks_half_a_minute_apart_agree_around_the_end_of_an_hour(steps: list[Step]) -> None:
    play([("tick", 29 * 60 + 55), *steps])


def test_an_end_that_one_clock_has_used_ends_the_hour_for_a_clock_behind_it_too() -> None:
    world = World().take(
        ("tick", 30 * 60 + 10), ("append", 0, 0, 1), ("speed", {0: 99}), ("tick", -20),
        ("add_partition",), ("append", 0, 0, 1), ("append", 2, 0, 1), ("speed", {0: 99, 2: 99}),
    )  # fmt: skip
    assert world.under[0, 1] == "2026-11-21T04"
    world.finish()


def test_hours_of_a_partition_that_was_added_after_the_request_are_requested() -> None:
    """The hazard: an hour is decided without the new partition: its records go to the next."""
    world = World().take(
        ("tick", 30 * 60), ("answer", "speed"), ("add_partition",), ("append", 2, 0, 1),
        ("answer", "batch"), ("read", 0, 1, False), ("seal",),
    )  # fmt: skip
    assert world.cuts["2026-11-21T03"].ends[2] == 0
    assert world.under[2, 0] == "2026-11-21T04"
    world.finish()


BATCH_STAMPS = st.sampled_from([0, 5, 45, 100, -45, None, YEARS_AHEAD])
BATCH_ONLY = st.one_of(
    step("append", st.integers(0, 1), BATCH_STAMPS, st.integers(1, 3)),
    step("tick", st.sampled_from([300, 1800, 3600, 3 * 3600])), SEAL, ADD_PARTITION,
)  # fmt: skip


@settings(max_examples=100)
@given(st.lists(BATCH_ONLY, min_size=5, max_size=40), GRACES)
def test_the_batch_layer_alone_partitions_all_offsets(steps: list[Step], grace: timedelta) -> None:
    world = World(grace=grace).take(*steps)
    world.now += timedelta(hours=8) + grace  # behind every stamp but those of years ahead
    world.seal()
    assert world.under == {}
    assert sum(c.offsets for c in world.cuts.values()) == sum(len(s) for s in world.log.values())


@settings(max_examples=30)
@given(
    st.lists(st.integers(0, 90), min_size=1, max_size=40),
    st.lists(st.booleans(), min_size=40, max_size=40),
)
def test_ordered_records_are_cut_at_their_hour(gaps: list[int], publish: list[bool]) -> None:
    world = World()
    expected: dict[tuple[int, int], str] = {}
    for i, (gap, by_speed) in enumerate(zip(gaps, publish, strict=False)):
        world.now += gap * MINUTE
        p = i % 2
        expected[p, len(world.log[p])] = hour_of(world.now)
        world.log[p].append(millis(world.now))
        if by_speed:
            world.speed({0: 99, 1: 99})
    world.finish()
    assert {at: h for h, cut in world.cuts.items() for at in offsets_of(cut.ranges)} == expected


@pytest.mark.parametrize("by", [("speed", {0: 99}), ("check",)], ids=["speed", "batch alone"])
def test_a_record_stamped_in_2030_stops_neither_the_hours_nor_the_speed_layer(by: Step) -> None:
    world = World()
    world.log[0].append(millis(datetime(2030, 1, 1, tzinfo=UTC)))
    for _ in range(3):
        world.take(("append", 0, 0, 2), by, ("tick", 3600), ("seal",))
    assert [world.cuts[h].ranges[0] for h in sorted(world.cuts)] == [(0, 3), (3, 5), (5, 7)]


def test_a_hung_transaction_stops_no_hour() -> None:
    some, hour_ends = ("append", 0, 0, 2), (("tick", 3600), ("append", 0, 0, 2), ("seal",))
    world = World().take(
        some, ("hold", 0), some, *hour_ends, ("release",), ("tick", 3600), ("seal",)
    )
    assert [world.cuts[h].ranges[0] for h in sorted(world.cuts)] == [(0, 2), (2, 6)]


def test_a_partition_added_later_begins_at_0_and_joins_the_hours() -> None:
    world = World().take(
        ("append", 0, 0, 1), ("speed", {0: 9}), ("tick", 3600), ("speed", {0: 9}),
        ("add_partition",), ("append", 2, 0, 3), ("seal",), ("tick", 3600), ("seal",),
    )  # fmt: skip
    assert [world.cuts[h].ranges[2] for h in sorted(world.cuts)] == [(0, 0), (0, 3)]


def test_a_topic_that_already_contains_hours_is_cut_into_them() -> None:
    stamped = (-200, -130, -70, 0)
    world = World().take(*(("append", 0, minutes, 2) for minutes in stamped))
    world.speed({0: 99})
    assert world.timeline.first == hour_of(BEGIN - 200 * MINUTE)
    assert sorted(set(world.under.values())) == [hour_of(BEGIN + m * MINUTE) for m in stamped]


def test_a_restaged_micro_batch_takes_the_recorded_cut() -> None:
    """The hazard: decided before the seal, it puts a record of the next hour into this one."""
    one = ("append", 0, 0, 1)
    world = World().take(one, ("answer", "speed"), ("tick", 30 * 60), ("seal",), one)
    assert world.answers["speed"].now < end_of(world.timeline.first)
    world.speed({0: 99})
    assert world.under == {(0, 0): "2026-11-21T03", (0, 1): "2026-11-21T04"}
