"""Exploring the model: every interleaving of a small setting, or random walks of a larger one, with
promises kept.

A counterexample is reported as the steps that lead to it.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from operator import is_
from typing import Any, TypeVar

import account
import eraser
import importer
from actors import Actor, Publisher, Step, decide
from layers import Speed, lookback
from small_world import Lake, Violation, World, ledger_row, millis
from values import replace

from anabranch.iceberg import state_properties
from anabranch.iceberg.clock import MAX_CLOCK_SKEW
from anabranch.iceberg.expiry import plan_expiry
from anabranch.iceberg.snapshots import BRANCHES, PROVEN, PUBLISHED, WAP_ID
from anabranch.offsets.hours import hour_of, hours_between, is_untouched, shift, start_of
from anabranch.protocol.merge import needs_merge
from anabranch.protocol.watermarks import Watermarks
from batch_layer.plan import plan_recheck

T = TypeVar("T")
_ONE: dict[object, Any] = {}
# The keys are the ids of objects in `_ONE`, which keeps them.
_STEPS: dict[tuple[int, int], list[Step]] = {}
_CRASHES: dict[tuple[int, int], tuple[str, World, Actor] | None] = {}
_CHECKED: set[tuple[int, int]] = set()


def one(value: T) -> T:
    """The one object that represents all equal ones, so that they are compared and hashed once."""
    first: T = _ONE.setdefault(value, value)
    return first


def _steps(actor: Actor, world: World) -> list[Step]:
    key = (id(actor), id(world))
    if key not in _STEPS:
        steps = actor.steps(world)
        _STEPS[key] = [(step, one(after), one(changed)) for step, after, changed in steps]
    return _STEPS[key]


def _crash(actor: Actor, world: World) -> tuple[str, World, Actor] | None:
    """A kill -9 of an actor in a world that has one to come, if the actor has something to lose."""
    key = (id(actor), id(world))
    if key not in _CRASHES:
        again, killed = one(actor.restarted()), replace(world, crashes=world.crashes - 1)
        said = f"{actor.name} is killed at {actor.at}"
        _CRASHES[key] = None if again is actor else (said, one(abandoned(killed, actor)), again)
    return _CRASHES[key]


@dataclass(frozen=True, eq=False)
class Moment:
    """A state of everything: the world, and what each actor remembers; `one` of their kind each."""

    world: World
    actors: tuple[Actor, ...]

    def __hash__(self) -> int:
        return hash((id(self.world), *map(id, self.actors)))

    def __eq__(self, other: object) -> bool:
        same = isinstance(other, Moment) and self.world is other.world
        return same and all(map(is_, self.actors, other.actors))

    @staticmethod
    def of(world: World, actors: Iterable[Actor]) -> Moment:
        return Moment(one(world), tuple(one(a) for a in actors))

    def next(self) -> list[tuple[str, Moment]]:
        """All that may happen next, but for crashes; nothing when everybody is at rest."""
        following = [(i, *to) for i, a in enumerate(self.actors) for to in _steps(a, self.world)]
        return [(step, self.after(i, world, actor)) for i, step, world, actor in following]

    def after(self, i: int, world: World, actor: Actor) -> Moment:
        """The moment after a step of an actor."""
        return Moment(world, (*self.actors[:i], actor, *self.actors[i + 1 :]))

    def crashes(self) -> list[tuple[str, Moment]]:
        """Every kill -9 that may happen now."""
        if not self.world.crashes:
            return []
        crashes = [(i, _crash(actor, self.world)) for i, actor in enumerate(self.actors)]
        return [(crash[0], self.after(i, *crash[1:])) for i, crash in crashes if crash is not None]


def abandoned(world: World, actor: Actor) -> World:
    """The world once an actor was killed: no actor removes its turn any more."""
    turn = getattr(actor, "turn", None)
    return world if turn is None else replace(world, abandoned=world.abandoned | {turn})


# Properties that must hold


@cache
def check_version(lake: Lake) -> None:
    """Promises of one version of the table."""
    check_properties(lake)
    state = lake.state
    for branch in BRANCHES:
        if twice := [row for row, count in Counter(lake.rows(branch)).items() if count > 1]:
            raise Violation(f"{branch} has {twice} more than once: {lake.files(branch)}")
    if wrong := importer.check(lake):
        raise Violation("; ".join(wrong))
    if lake.accounts:
        return  # `check_account` says more
    main = {(f.hour, *row[:2]) for f in lake.files("main") for row in f.rows}
    gone = expired_places(lake)
    if back := sorted(h for h in {f.hour for f in lake.files("main")} if state.is_expired(h)):
        raise Violation(f"main serves {back}, which have expired")
    for hour, accepted in state.accepted.items():
        if state.is_expired(hour):
            continue
        cut = {(hour, p, o) for p, (s, e) in accepted.cut.ranges.items() for o in range(s, e)}
        served = {row for row in main if row[0] == hour}
        if served != cut:
            cut = accepted.cut.ranges
            raise Violation(f"{hour} is accepted as {cut}, main serves {sorted(served)}")
        # Rows of its look-back that it was not compared with may repeat its events.
        seen = {row[:2] for f in lake.files("batch") if f.hour == hour for row in f.seen}
        waits = {h for h in lookback(hour) if h not in accepted.unread and not state.is_accepted(h)}
        if served and (unseen := {(p, o) for h, p, o in main if h in waits} - seen):
            which = f"{sorted(unseen)} of its look-back"
            raise Violation(f"{hour} was not compared with {which}, and nothing says so")
    read = {(p, o) for p, end in state.position.offsets.items() for o in range(end)}
    # The speed layer's rows replace what a merge kept as soon as they cover the hour.
    if not state.retained_hours and (missing := read - gone - {(p, o) for _, p, o in main}):
        raise Violation(f"the position is {state.position.offsets}, main lacks {sorted(missing)}")


def check_proven(lake: Lake) -> None:
    """Check that `proven` is the newest publish of `batch`, and has rows of accepted hours alone:
    once the branch that was set back has a publish."""
    at = {ref.name: ref.id for ref in lake.refs}
    # An empty commit that a fence makes before the first publish of `batch` has no content of it.
    if lake.state.content["batch"] and at[PROVEN] != at[f"{PUBLISHED}batch"]:
        raise Violation("proven is not the newest publish of batch")
    hours = {f.hour for f in lake.known[at[PROVEN]].files}
    more = sorted(hour for hour in hours if not lake.state.is_accepted(hour))
    if more and at[PROVEN] == at["batch"]:
        raise Violation(f"proven has rows of {more}, which are not accepted")


def expired_places(lake: Lake) -> set[tuple[int, int]]:
    """The offsets of expired hours; of one that is forgotten, those between its neighbours'."""
    state, timeline, places = lake.state, lake.state.timeline, set[tuple[int, int]]()
    ends = dict.fromkeys(timeline.start, 0)
    for hour in hours_between(timeline.first, timeline.open):
        following = state.cuts.get(shift(hour, 1))
        cut, begins = state.cuts.get(hour), dict(ends)
        ends = following.starts if following is not None else timeline.start
        ends = cut.ends if cut is not None else ends
        if state.is_expired(hour):
            places |= {(p, o) for p, end in ends.items() for o in range(begins.get(p, 0), end)}
    return places


def check_properties(lake: Lake) -> None:
    """The table has the properties that its snapshots refer to, whatever a process remembers."""
    if not lake.apart:
        return
    state_properties._READ.clear()
    for version in lake.versions:
        try:
            state_properties.load_all(lake.table, dict(version.summary))
        except state_properties.StateGone as error:
            message = f"snapshot {version.id} refers to a property that is gone: {error}"
            raise Violation(message) from error


def stated(lake: Lake) -> Watermarks:
    return Watermarks.from_properties(dict(lake.properties))


def check_promises(before: Lake, after: Lake) -> None:
    """Check what the table states downstream: hours that are accepted and, when it is stated again,
    the content of `main`.

    A partition that is new later may have records in an hour that was fresh before there were any.
    """
    state, timeline, now = after.state, after.state.timeline, stated(after)
    if now.complete_through is not None:
        promised = hours_between(timeline.first, shift(now.complete_through, 1))
        if waits := [h for h in promised if not state.is_accepted(h)]:
            message = f"complete through {now.complete_through} is stated, {waits} are not accepted"
            raise Violation(message)
    is_new = now.fresh_through not in (None, stated(before).fresh_through)
    if not is_new or timeline.adoptions or after.accounts:
        return
    last = shift(hour_of(now.fresh_through), -1)
    cut = state.cuts.get(last)
    ends = cut.ends if cut is not None else timeline.boundaries.get(last, {})
    main = {row[:2] for row in after.rows("main")} | expired_places(after)
    if missing := [(p, o) for p, end in ends.items() for o in range(end) if (p, o) not in main]:
        raise Violation(f"fresh through {last} is stated, main lacks {missing}")


def check_step(before: World, after: World) -> None:
    """Promises from one version to the next, and of the files in storage."""
    if after.discarded and (named := after.discarded & after.lake.ids_of_publishes):
        raise Violation(f"{sorted(named)} landed, and what it names was discarded")
    eraser.check(before, after)
    if after.letters is not None:
        account.check(after)
        if after.restored == before.restored:
            account.check_kept(before, after)
    if after.lake is before.lake and after.storage == before.storage:
        return
    if after.lake is not before.lake:
        check_version(after.lake)
        # A branch that was set back takes the promise with it by the next publish.
        if not after.restored:
            check_promises(before.lake, after.lake)
    if after.lake is not before.lake and after.restored == before.restored:
        old, new = before.lake.state, after.lake.state
        published = after.lake.ids_of_publishes - before.lake.ids_of_publishes
        is_undone = any("-undo" in id for id in published)
        earlier = new.timeline.first <= old.timeline.first or is_undone
        same_start = old.timeline.first_of_kafka == new.timeline.first_of_kafka
        # The first publish begins the table at the hour of the oldest record that waits.
        if not earlier or not (same_start or is_untouched(old.timeline, old.position)):
            began, begins = old.timeline.first, new.timeline.first
            raise Violation(f"the table began with {began}, and begins with {begins}")
        same_log = old.timeline.adoptions == new.timeline.adoptions
        was, now = old.position.offsets, new.position.offsets
        if same_log and any(now.get(p, 0) < o for p, o in was.items()):
            raise Violation(f"the position moved back from {was} to {now}")
        for hour, cut in old.cuts.items():
            if new.cuts.get(hour, cut) != cut:
                message = f"the cut of {hour} was {cut.ranges} and is {new.cuts[hour].ranges}"
                raise Violation(message)
            if old.is_expired(hour) and not new.is_expired(hour):
                raise Violation(f"{hour} had expired, and has not any more")
            if not new.is_sealed(hour) or (old.is_accepted(hour) and not new.is_accepted(hour)):
                raise Violation(f"{hour} was sealed or accepted, and is no more")
        if not after.restored:
            for branch in BRANCHES:
                if back := sorted(h for h in after.lake.files_by_hour(branch) if new.is_expired(h)):
                    raise Violation(f"{branch} has rows of {back}, which have expired")
        for hour in old.accepted.keys() & new.accepted.keys():
            if new.accepted[hour].revision < old.accepted[hour].revision:
                raise Violation(f"the revision of {hour} fell")
    check_clocks(before, after)
    for lake in (after.lake, after.letters):
        for branch in BRANCHES if lake is not None else ():
            if gone := set(lake.files(branch)) - after.storage:
                raise Violation(f"{branch} refers to {gone}, which storage does not have")
    check_lifetimes(before, after)
    if after.lake is not before.lake:
        check_proven(after.lake)


def check_clocks(before: World, after: World) -> None:
    """Promises of time: whatever a machine's clock says, nothing is stamped or decided ahead of the
    time by more than two clocks may be apart."""
    latest = millis(after.kafka.now + MAX_CLOCK_SKEW)
    if after.lake is not before.lake and after.lake.updated_ms > latest:
        raise Violation(f"the table is stamped {(after.lake.updated_ms - latest) / 1000} s ahead")
    timeline = after.lake.state.timeline
    running = shift(max([*timeline.boundaries, shift(timeline.open, -1)]), 1)
    # An adoption ends the hour at hand before its time.
    if not timeline.adoptions and start_of(running) > after.kafka.now + MAX_CLOCK_SKEW:
        raise Violation(f"hours before {running} have ends at {after.kafka.now:%F %T}")


def check_lifetimes(before: World, after: World) -> None:
    """Promises of what the table remembers: what has a name stays readable, the rest small."""
    lake = after.lake
    for ref in lake.refs:
        known = lake.known.get(ref.id)
        if gone := set(known.files) - after.storage if known is not None else "no snapshot":
            raise Violation(f"{ref.name} cannot be read any more: {gone}")
    staged = {dict(v.summary).get(WAP_ID) for v in lake.versions} - lake.ids_of_publishes - {None}
    # The snapshots that it keeps, those that have a name or had one before the publish, those that
    # are staged with their parent, those that a publish makes, and fences.
    # `proven` names the newest publish of `batch`, which has its tag.
    refs = [r for of in (lake, before.lake) for r in of.refs if not of.is_tag_of_a_head(r)]
    named = len({ref.name for ref in refs} - {PROVEN})
    most = plan_expiry.__defaults__[0] + named + 2 * len(staged) + len(BRANCHES) + 3
    if lake is not before.lake and len(lake.versions) > most and after.restored == before.restored:
        raise Violation(f"the table remembers {len(lake.versions)} snapshots")


def check_actors(actors: Sequence[Actor]) -> None:
    """Promises of turns: who has the way gets through, and the speed layer publishes between."""
    publishers = [a for a in actors if isinstance(a, Publisher)]
    for actor in publishers:
        if actor.turn is not None and actor.beaten >= len(publishers):
            raise Violation(f"{actor.name} has the way, and was refused {actor.beaten} times")
        if isinstance(actor, Speed) and actor.holds > 1:
            waited = f"{actor.name} waited for {actor.holds} turns"
            raise Violation(f"{waited} and published nothing in between")


def check_rest(world: World) -> None:
    """Promises once everybody is at rest."""
    state = world.lake.state
    eraser.check_rest(world)
    if world.letters is not None:
        account.check_rest(world)
    else:
        main, gone = Counter(world.lake.rows("main")), expired_places(world.lake)
        if missing := [row for row in world.kafka.rows if main[row] != 1 and row[:2] not in gone]:
            raise Violation(f"at rest, main lacks {missing}")
    refused = {row.hour for row in map(ledger_row, world.ledger) if row.decision == "refused"}
    if waiting := [h for h in state.timeline.sealed if h not in world.bad and h not in refused]:
        raise Violation(f"at rest, {waiting} are not accepted")
    if left := {t.id for t in world.lake.line} - world.abandoned:
        raise Violation(f"at rest, {sorted(left)} were not taken back")
    if again := [h for h in plan_recheck(state) if h not in world.bad]:
        raise Violation(f"at rest, {again} have yet to be decided again")
    if needs_merge(state):
        raise Violation("at rest, main is not made from the other branches as they are")


# Exploring


@dataclass(frozen=True)
class Explored:
    """The account of what an exploration has seen."""

    moments: int
    rests: int
    longest: int
    steps: Counter[str]

    def saw(self, what: str) -> bool:
        return any(what in step for step in self.steps)


def explore(world: World, actors: Sequence[Actor], at_most: int = 400_000) -> Explored:
    """Visit every moment that can be reached, breadth first, so that a counterexample is a shortest
    one.

    Raises Violation with the steps that lead to it, also for a moment from which no actor ever
    comes to rest.
    """
    first = Moment.of(world, actors)
    reached: dict[Moment, int] = {first: 0}
    came: list[tuple[int, str]] = [(0, "begin")]
    depth, rests, onward = [0], [], [[0][:0]]
    counts: Counter[str] = Counter()
    waiting = deque([first])

    def path(number: int, *last: str) -> list[str]:
        steps = list(last)
        while number:
            number, step = came[number]
            steps.insert(0, step)
        return steps

    while waiting:
        moment = waiting.popleft()
        number = reached[moment]
        following = moment.next()
        if not following:
            rests.append(number)
            _described(path(number), check_rest, moment.world)
        for step, after in [*following, *moment.crashes()]:
            _described_step(path, number, step, moment.world, after)
            counts[step] += 1
            seen = reached.get(after)
            if seen is None:
                seen = reached[after] = len(came)
                came.append((number, step))
                depth.append(depth[number] + 1)
                onward.append([])
                waiting.append(after)
                if len(came) > at_most:
                    found = f"expected at most {at_most} moments, found more"
                    raise RuntimeError(f"{found}: make the setting smaller")
            onward[number].append(seen)
    _check_that_all_come_to_rest(onward, rests, path)
    return Explored(len(came), len(rests), max(depth), counts)


def walk(
    world: World, actors: Sequence[Actor], seed: int, at_most: int = 2_000, look: Any = bool
) -> list[str]:
    """One random run of a seed until all are at rest; returns its steps. `look`: at each moment."""
    chance = random.Random(seed)
    moment, steps = Moment.of(world, actors), [f"seed {seed}"]
    busy, patience = 0, 0
    while following := moment.next():
        choices = following
        if moment.world.crashes and chance.random() < 0.03:
            choices = moment.crashes() or following
        elif patience:
            # One actor runs on while the others are paused.
            name = moment.actors[busy].name
            choices = [c for c in following if c[0].startswith(name + " ")] or following
            patience -= 1
        else:
            busy, patience = chance.randrange(len(moment.actors)), chance.choice([0, 1, 3, 8, 30])
        step, after = chance.choice(choices)
        _described_step(lambda _, last: [*steps, last], 0, step, moment.world, after)
        steps.append(step)
        moment = after
        _described(steps, look, moment.world)
        if len(steps) > at_most:
            raise Violation(_story(f"no actor came to rest in {at_most} steps", steps))
    _described(steps, check_rest, moment.world)
    return steps


def settle(world: World, *actors: Actor) -> World:
    """A world to begin in: these actors came to rest, each running as long as it can."""
    moment = Moment.of(world, actors)
    while following := moment.next():
        moment = following[0][1]
    return moment.world


def forget() -> None:
    """Forget what was computed: a decision of the product was exchanged, or memory is short."""
    Lake.forget()
    decide.cache_clear()
    check_version.cache_clear()
    account.forget()
    _CHECKED.clear()
    _CRASHES.clear()
    _STEPS.clear()
    _ONE.clear()


def _described(steps: list[str], check: Callable[..., None], *given: Any) -> None:
    try:
        check(*given)
    except Violation as violation:
        raise Violation(_story(str(violation), steps)) from None


def _described_step(
    path: Callable[..., list[str]], number: int, step: str, before: World, after: Moment
) -> None:
    key = (id(before), id(after.world))
    try:
        # Moments of other actors pass from one of these worlds to the other too.
        if key not in _CHECKED:
            check_step(before, after.world)
            _CHECKED.add(key)
        check_actors(after.actors)
    except Violation as violation:
        raise Violation(_story(str(violation), path(number, step))) from None


def _story(what: str, steps: list[str]) -> str:
    return "\n".join([what, *(f"{i:4} {step}" for i, step in enumerate(steps, 1))])


def _check_that_all_come_to_rest(
    onward: list[list[int]], rests: list[int], path: Callable[..., list[str]]
) -> None:
    back: list[list[int]] = [[] for _ in onward]
    for number, others in enumerate(onward):
        for other in others:
            back[other].append(number)
    calm, waiting = set(rests), list(rests)
    while waiting:
        for number in back[waiting.pop()]:
            if number not in calm:
                calm.add(number)
                waiting.append(number)
    if len(calm) < len(onward):
        restless = next(n for n in range(len(onward)) if n not in calm)
        raise Violation(_story("no actor ever comes to rest from here", path(restless)))
