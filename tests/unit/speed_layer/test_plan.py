"""Decisions of the speed layer: a micro-batch's hours, recovery, chunks of a range."""

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from lakes import new_state

from anabranch.iceberg.staging import NAMED_WITHIN, Written
from anabranch.offsets.hours import Cut, HourRange, Timeline, shift, start_of
from anabranch.offsets.position import Position, Ranges, size
from anabranch.protocol.sealing import ResolvedState
from anabranch.protocol.state import Accepted, State
from speed_layer.plan import (
    HourToRead,
    Next,
    Skip,
    StagedBatch,
    assign,
    chunks,
    plan_ahead,
    plan_boundary_publish,
    plan_catch_up,
    plan_micro_batch,
    plan_publish,
    plan_skip,
    plan_write,
    reaches_log_end,
)

NOW = datetime(2026, 11, 21, 6, tzinfo=UTC)
FIRST = "2026-11-21T00"
H = [shift(FIRST, i) for i in range(6)]
CUTS = {h: Cut("t", {0: (10 * i, 10 * i + 10), 1: (i, i + 1)}) for i, h in enumerate(H[:5])}


def outage(offsets: dict[int, int], accepted: str, forgotten: int = 0, **values: object) -> State:
    """Five sealed hours; `accepted` is one letter each: `a`ccepted or `r`efused."""
    batch = {h: Accepted(1, CUTS[h]) for h, a in zip(H, accepted, strict=False) if a == "a"}
    for hour in H[:forgotten]:
        batch.pop(hour, None)
    waiting = {h: CUTS[h] for h, a in zip(H, accepted, strict=False) if a == "r"}
    timeline = Timeline(FIRST, H[5], {0: 50, 1: 5}, sealed=waiting)
    return new_state(timeline, offsets, accepted=batch, settled_before=H[forgotten], **values)


# By the offsets reached, and which hours are accepted: what comes next.
CATCH_UP: dict[str, tuple[tuple[int, int], str, dict[str, Any], Skip | HourToRead | None]] = {
    "at the head: the stream": ((50, 5), "aaaaa", {}, None),
    "accepted hours: one skip": ((3, 0), "aaaaa", {}, Skip(tuple(H[:5]), {0: 50, 1: 5})),
    "refused hours behind the last accepted one: the stream": ((30, 3), "aaarr", {}, None),
    "an hour that an operator gave to the speed layer: read": (
        (0, 0), "aaaaa", {"overrides": {H[0]: "speed"}}, HourToRead(H[0], {0: (0, 10), 1: (0, 1)}),
    ),
    "a refused hour: its missing offsets by partition": (
        (4, 1), "raaaa", {}, HourToRead(H[0], {0: (4, 10)}),
    ),
    "forgotten hours: skipped to the first that is remembered": (
        (4, 1), "aaaaa", {"forgotten": 2}, Skip((), {0: 20, 1: 2}),
    ),
    "behind forgotten hours": (
        (20, 2), "aaaaa", {"forgotten": 2}, Skip(tuple(H[2:5]), {0: 50, 1: 5}),
    ),
    "a partition ahead: never moved back": ((4, 5), "aarrr", {}, Skip(tuple(H[:2]), {0: 20, 1: 5})),
}  # fmt: skip


@pytest.mark.parametrize("case", CATCH_UP)
def test_how_a_speed_layer_comes_back(case: str) -> None:
    (one, other), accepted, values, expected = CATCH_UP[case]
    offsets = {0: one, 1: other}
    assert plan_catch_up(outage(offsets, accepted, **values), offsets) == expected


def test_a_skip_names_the_process_with_the_hours() -> None:
    assert Skip((H[0],), {}).why == f"hour {H[0]} is covered by the batch layer"
    assert Skip((H[0], H[1]), {}).why == f"hours {H[0]}, {H[1]} are covered by the batch layer"
    assert Skip((), {}).why == "earlier hours are covered by the batch layer"
    assert plan_catch_up(new_state(Timeline(FIRST, FIRST, {0: 7})), {0: 7}) is None


def test_a_refused_hour_between_two_accepted_ones_is_never_jumped_over() -> None:
    position = {0: 12, 1: 1}
    steps = []
    while (step := plan_catch_up(outage(position, "aarra"), position)) is not None:
        steps.append(step)
        position |= (
            step.to if isinstance(step, Skip) else {p: e for p, (_, e) in step.ranges.items()}
        )
    assert steps == [
        Skip((H[1],), {0: 20, 1: 2}),
        HourToRead(H[2], {0: (20, 30), 1: (2, 3)}),
        HourToRead(H[3], {0: (30, 40), 1: (3, 4)}),
        Skip((H[4],), {0: 50, 1: 5}),
    ]


def test_a_skip_moves_the_position_once() -> None:
    state = outage({0: 3, 1: 0}, "aaaaa")
    skip = plan_catch_up(state, {0: 3, 1: 0})
    assert isinstance(skip, Skip)
    publish = plan_skip(ResolvedState(state, state.position, state.timeline, NOW), skip, "id")
    assert publish is not None and publish.position == Position("t", {0: 50, 1: 5})
    assert publish.timeline.skipped == tuple(H[:5])
    # The hazard: planned over an older load, it moves the position back: rows come twice.
    skip = plan_catch_up(outage({0: 3, 1: 0}, "aaaaa"), {0: 3, 1: 0})
    assert skip == Skip(tuple(H[:5]), {0: 50, 1: 5})
    for offsets in ({0: 50, 1: 5}, {0: 57, 1: 6}, {0: 12, 1: 1}):
        state = outage(offsets, "aaaaa")
        decided = ResolvedState(state, state.position, state.timeline, NOW)
        assert plan_skip(decided, skip, "id") is None


ENDS = st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20)), min_size=1, max_size=5).map(
    lambda ends: list(zip(sorted(a for a, _ in ends), sorted(b for _, b in ends), strict=True))
)
SPAN = st.tuples(st.integers(0, 25), st.integers(0, 25)).map(lambda r: (min(r), max(r)))
RANGES = st.fixed_dictionaries(dict.fromkeys((0, 1, 2), SPAN))


@given(RANGES, ENDS)
def test_each_offset_has_its_one_hour(ranges: Ranges, ends: list[tuple[int, int]]) -> None:
    hours = [HourRange(H[i], {0: a, 1: b}) for i, (a, b) in enumerate(ends)]
    assigned = assign(ranges, [*hours, HourRange("running", None)])
    for p, (start, end) in ranges.items():
        for offset in range(start, end):
            parts = [(h, part[p]) for h, part in assigned.items() if p in part]
            matches = [h for h, (start, end) in parts if start <= offset < end]
            ended = (h.hour for h in hours if h.ends and offset < h.ends.get(p, 0))
            assert matches == [next(ended, "running")]
    assert sum(size(part) for part in assigned.values()) == size(ranges)


@given(st.lists(st.integers(0, 50), min_size=1, max_size=6), st.integers(1, 120))
def test_a_short_micro_batch_is_no_end_of_the_log(waiting: list[int], at_most: int) -> None:
    """Spark gives each partition its share, rounded down, and one offset at least."""
    total = sum(waiting)
    taken = [
        w if total <= at_most else min(w, max(1, at_most * w // total)) if w else 0 for w in waiting
    ]
    ranges = {p: (7, 7 + n) for p, n in enumerate(taken)}
    if reaches_log_end(ranges, at_most):
        assert taken == waiting
    assert reaches_log_end({0: (0, 5), 1: (3, 3)}, 7)
    assert not reaches_log_end({0: (0, 6), 1: (3, 3)}, 7)


@given(RANGES, st.integers(1, 12))
def test_chunks_have_every_offset_once_in_the_limit(ranges: Ranges, at_most: int) -> None:
    pieces = chunks(ranges, at_most)
    for p, (start, end) in ranges.items():
        offsets = [o for piece in pieces if p in piece for o in range(*piece[p])]
        assert offsets == list(range(start, end))
    assert all(0 < size(piece) <= at_most for piece in pieces)
    assert all(size(piece) == at_most for piece in pieces[:-1])


def test_a_partition_missing_in_kafkas_answer_is_not_published() -> None:
    """The hazard: ended hours have no end there: all records are the running hour's."""
    state = outage({0: 50, 1: 5}, "aaaaa")
    position, before = Position("t", {0: 50, 1: 5}), NOW - timedelta(minutes=30)
    decided = ResolvedState(state, position, state.timeline, before)
    assert plan_micro_batch(decided, {0: (50, 51)}, None).next is Next.STAGE
    assert plan_micro_batch(decided, {0: (50, 51), 2: (0, 1)}, None).next is Next.RESTART


def test_files_are_open_side_by_side_only_while_they_are_few() -> None:
    def is_at_once(dates: int | None, hours: int) -> bool:
        return plan_write(dates, hours)["fanout-enabled"] == "true"

    assert is_at_once(32, 1) and is_at_once(32, 2) and is_at_once(1, 64)
    assert not is_at_once(32, 3) and not is_at_once(1, 65) and not is_at_once(None, 1)


def test_a_micro_batch_is_published_as_far_as_its_hours_are_decided() -> None:
    """The hazard: offsets of hours that are not decided yet, published under the hour at hand."""
    hour = "2026-11-21T03"
    timeline = Timeline(hour, hour, {0: 0}, boundaries={hour: {0: 4}})
    state = new_state(timeline, {0: 0})
    decided = ResolvedState(state, state.position, timeline, start_of("2026-11-21T09"))
    plan = plan_micro_batch(decided, {0: (0, 9)}, None)
    assert (plan.next, plan.todo) == (Next.STAGE, {0: (0, 4)})
    assert (plan.trimmed, plan.whole) == (True, False)
    behind = replace(decided, state=new_state(timeline, {0: 4}), position=Position("t", {0: 4}))
    plan = plan_micro_batch(behind, {0: (0, 9)}, None)
    assert (plan.next, plan.todo, plan.whole) == (Next.DECIDE, {}, False)
    assert plan_boundary_publish(behind, "id").timeline == timeline


@given(RANGES, RANGES, st.integers(0, 25))
def test_early_staging_equals_the_decision(first: Ranges, sizes: Ranges, ended: int) -> None:
    """Staged by a decision for the micro-batch before, published as it is after that."""
    ends = {H[0]: dict.fromkeys(first, ended)}
    timeline = Timeline(H[0], H[0], dict.fromkeys(first, 0), boundaries=ends)
    same = {"speed": "publish", "batch": ""}
    state = new_state(timeline, {p: s for p, (s, _) in first.items()}, content=same, merged=same)
    decided = ResolvedState(state, state.position, timeline, start_of(H[1]) + timedelta(minutes=5))
    following = {p: (e, e + sizes[p][1] - sizes[p][0]) for p, (_, e) in first.items()}
    plan = plan_ahead(decided, following, decided.now + timedelta(minutes=1))
    after = replace(decided, position=Position("t", {p: e for p, (_, e) in first.items()}))
    if plan is None:
        assert size(following) == 0
        return
    staged = StagedBatch("t", plan.by_hour, Written("files", decided.now, ()), None)
    decided_then = plan_micro_batch(after, following, staged, decided.now)
    assert decided_then.next is Next.PUBLISH
    assert (plan.todo, plan.hours) == (decided_then.todo, decided_then.hours)
    assert plan.trimmed == decided_then.trimmed
    # A batch of another log is staged again.
    other = replace(after, position=Position("u", after.position.offsets))
    assert plan_micro_batch(other, following, staged, decided.now).next is Next.STAGE


def test_files_without_a_snapshot_are_published_for_half_an_hour_and_then_staged_again() -> None:
    timeline = Timeline(H[0], H[0], {0: 0})
    same = {"speed": "publish", "batch": ""}
    state = new_state(timeline, {0: 5}, content=same, merged=same)
    decided = ResolvedState(state, state.position, timeline, start_of(H[0]))
    staged = StagedBatch("t", {H[0]: {0: (5, 7)}}, Written("files", NOW, ()), None)
    # The time of the decision does not show it: it is earlier than the load of the state.
    for age, step in (
        (timedelta(0), Next.PUBLISH),
        (NAMED_WITHIN, Next.PUBLISH),
        (NAMED_WITHIN + timedelta(1), Next.STAGE),
    ):
        assert plan_micro_batch(decided, {0: (5, 7)}, staged, NOW + age).next is step
        assert plan_micro_batch(decided, {0: (5, 7)}, staged, NOW - age).next is step
    with pytest.raises(AssertionError, match="a clock that is read after the state"):
        plan_micro_batch(decided, {0: (5, 7)}, staged)
    plan = plan_micro_batch(decided, {0: (5, 7)}, staged, NOW)
    assert plan_publish(decided, plan, staged, {}).id == "files"


def test_nothing_is_staged_ahead_where_its_hours_are_yet_to_be_decided() -> None:
    timeline = Timeline(H[0], H[0], {0: 0})
    state = new_state(timeline, {0: 5})
    decided = ResolvedState(state, state.position, timeline, start_of(H[1]) - timedelta(minutes=1))
    in_a_moment = decided.now + timedelta(seconds=10)
    ahead = plan_ahead(decided, {0: (7, 9)}, in_a_moment)
    assert ahead is not None and ahead.by_hour == {H[0]: {0: (7, 9)}}
    why = "the hour has ended since"
    assert plan_ahead(decided, {0: (7, 9)}, decided.now + timedelta(minutes=2)) is None, why
    assert plan_ahead(decided, {0: (7, 9), 1: (0, 2)}, in_a_moment) is None, "a partition is new"
    assert plan_ahead(decided, {0: (7, 7)}, in_a_moment) is None, "there is nothing to stage"
    behind = replace(decided, now=start_of(H[4]))
    assert plan_ahead(behind, {0: (7, 9)}, behind.now) is None, "hours before have no end yet"
    some = replace(behind, timeline=Timeline(H[0], H[0], {0: 0}, boundaries={H[0]: {0: 8}}))
    assert plan_ahead(some, {0: (7, 8)}, some.now) is not None
    why = "the hour of its last offset has no end yet"
    assert plan_ahead(some, {0: (7, 9)}, some.now) is None, why
