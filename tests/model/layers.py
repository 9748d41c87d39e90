"""The two layers of the model: the speed job and the batch job, step by step as `MicroBatches`,
`Rebuilder` and `seal`.

What a layer remembers between two steps is what it loaded and asked; a plan is made again from that
when it is needed, so that a memory is a small value.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any, ClassVar

from actors import NOW, Offsets, Publisher, Step, is_stopped, is_waiting
from rebuilt import given, is_left_out, read_hour
from small_world import TOPIC, File, Lake, Row, World, ledger_row, new_files, rolled_up
from values import replace

from anabranch.common.errors import PositionError
from anabranch.common.json_values import from_json
from anabranch.iceberg.rewriting import Rewritten
from anabranch.iceberg.snapshots import Staged
from anabranch.iceberg.staging import Written
from anabranch.offsets.hours import Cut, hour_of, shift
from anabranch.offsets.position import Ranges, size
from anabranch.protocol import (
    dead_letters,
    erasure,
    ledger,
    merge,
    publish_queue,
    retention,
    sealing,
    topic_change,
)
from anabranch.protocol.ledger_row import HourAccount
from anabranch.protocol.merge import needs_merge
from anabranch.protocol.publish import Publish
from anabranch.protocol.sealing import ResolvedState
from anabranch.protocol.state import Accepted, State, check_topic
from batch_layer import balance
from batch_layer import plan as batch_plan
from speed_layer import compaction
from speed_layer import plan as speed_plan
from speed_layer.plan import HourToRead, Next, Plan, Skip, StagedBatch

Pieces = tuple[tuple[int, tuple[int, int]], ...]
LOOKBACK = 1


def lookback(hour: str) -> list[str]:
    """The hours that an hour's duplicates are looked for in."""
    return [shift(hour, -i) for i in range(1, LOOKBACK + 1)]


@dataclass(frozen=True)
class Ahead:
    """A micro-batch that is staged while the one before it is being published."""

    ranges: Pieces
    topic_id: str
    split: tuple[tuple[str, Pieces], ...]
    staged: Staged | Written | None
    dead: Staged | None
    marks: frozenset[str] = frozenset()

    def values(self) -> dict[str, Any]:
        """Return what a speed layer remembers of the micro-batch that it is about to publish."""
        kept = {"topic_id": self.topic_id, "split": self.split, "staged": self.staged}
        return kept | {"dead": self.dead, "marks": self.marks}


@dataclass(frozen=True)
class Speed(Publisher):
    """The speed job: comes back hour by hour, then takes micro-batches of at most `at_most` offsets
    a partition.

    `early`: it stages the next one while one is being published, where it can. Its rows are files
    that nothing refers to before they are published; or, `as_snapshot`, the files of a staged
    snapshot.
    """

    at: str = "come_back"
    at_most: int = 1
    doing: str = ""
    ranges: Pieces = ()
    rest: tuple[Pieces, ...] = ()
    split: tuple[tuple[str, Pieces], ...] = ()
    topic_id: str = ""
    dead: Staged | None = None
    early: bool = False
    as_snapshot: bool = False
    ahead: Ahead | None = None
    # The marks that erased records were left out by.
    marks: frozenset[str] = frozenset()
    # How old its clock says that all is: read once the heads are loaded.
    clock: timedelta = timedelta(0)
    starts: tuple[tuple[int, int], ...] = ()
    behind: tuple[tuple[str, ...], tuple[tuple[int, int], ...]] = ((), ())
    waited: str | None = None
    holds: int = 0
    keeps: ClassVar[tuple[str, ...]] = ("at_most", "early", "as_snapshot")

    def steps(self, world: World) -> list[Step]:
        steps = super().steps(world)
        is_moving = self.early and self.at == "move" and self.doing == "stream"
        if is_moving and self.staged and not self.ahead:
            ahead = self.stage_ahead(world)
            steps += [(f"{self.name} {step}", after, actor) for step, after, actor in ahead]
        return steps

    def come_back(self, world: World) -> Iterator[Step]:
        fresh, state = replace(self.bare(), last=None, ahead=None, lake=None), world.lake.state
        if needs_merge(state):
            yield "has to merge", world, replace(fresh, at="merge", back="come_back")
            return
        if self.should_recover(world):
            yield "has something to finish", world, fresh.finishing()
            return
        if is_stopped(world, world.lake) is not None:
            return
        topic = world.kafka.describe(TOPIC)
        position = check_topic(state.position, topic, TOPIC).offsets
        step = speed_plan.plan_catch_up(state, position)
        log_starts = world.kafka.log_starts(topic)
        if not isinstance(step, Skip) and any(s > position[p] for p, s in log_starts.items()):
            behind: Any = ((), tuple(sorted(log_starts.items())))
            then = replace(fresh, at="ask", doing="lost", behind=behind)
            yield f"finds the log to begin at {log_starts}", world, then
            return
        if isinstance(step, Skip):
            behind = (step.hours, tuple(sorted(step.to.items())))
            then = replace(fresh, at="ask", doing="skip", behind=behind)
            yield f"wants to skip to {step.to}", world, then
        elif isinstance(step, HourToRead):
            chunks = speed_plan.chunks(step.ranges, self.at_most)
            first, *rest = [tuple(sorted(r.items())) for r in chunks]
            pieces: dict[str, Any] = {"ranges": first, "rest": tuple(rest)}
            then = replace(fresh, at="ask", doing="read", **pieces)
            yield f"wants to read {step.ranges}", world, then
        else:
            starts = tuple(sorted(position.items()))
            then = replace(fresh, at="stream", doing="stream", starts=starts)
            yield f"streams from {position}", world, then

    def stream(self, world: World) -> Iterator[Step]:
        starts = dict(self.starts)
        ends = {p: len(stamps) for p, stamps in enumerate(world.kafka.log)}
        begins = {p: starts.get(p, 0) for p in ends}
        ranges = {p: (begins[p], min(e, begins[p] + self.at_most)) for p, e in ends.items()}
        if any(begins[p] > e for p, e in ends.items()):
            # Spark's source ends the query then.
            yield "finds the log shorter than it was", world, self.restarted()
        elif size(ranges):
            yield f"takes {ranges}", world, self.asking(world, ranges=tuple(sorted(ranges.items())))

    def ask(self, world: World) -> Iterator[Step]:
        yield "asks", world, self.asking(world)

    def asking(self, world: World, **values: Any) -> Any:
        return super().asking(world, clock=self.compared_before(world), **values)

    def compared_before(self, world: World) -> timedelta:
        """Return what its clock says before the heads are loaded: no file is judged by it."""
        return timedelta(0)

    def compared_after(self, world: World) -> timedelta:
        """Return what its clock says once the heads are loaded."""
        return world.age

    def check(self, world: World) -> Iterator[Step]:
        loaded = replace(self, lake=world.lake, clock=self.compared_after(world))
        try:
            decided = self.decided(world.lake)
        except PositionError as error:
            yield self.doubting(world, error)
            return
        if decided is None:
            yield "has to ask again", world, replace(loaded, at="ask", last=world.lake)
        elif self.doing == "lost":
            planned = loaded.skipping_lost(decided)
            lost = f"decides to record {planned[1]} as lost" if planned else ""
            step = lost or "decides to publish ends alone"
            yield step, world, replace(loaded, at="move")
        elif self.doing == "skip":
            if loaded.skipping(decided) is None:
                yield "gives up its skip", world, replace(self, at="come_back")
            else:
                yield "decides to skip", world, replace(loaded, at="move")
        else:
            yield from loaded.act(world, loaded.plan(decided))

    def act(self, world: World, plan: Plan) -> Iterator[Step]:
        turn = publish_queue.turn_to_yield_to(world.lake.line, self.waited, self.holds > 0)
        if plan.next not in (Next.DONE, Next.RESTART) and turn is not None:
            holding = replace(self, at="hold", waits=turn.id, last=self.lake, lake=None)
            yield f"finds that {turn.id} has the way", world, holding
        elif plan.next is Next.PUBLISH:
            yield f"decides to publish {plan.by_hour}", world, replace(self, at="move")
        elif plan.next is Next.DECIDE:
            then = replace(self.bare(), at="move")
            yield "decides to publish ends alone", self.discarding(world), then
        elif plan.next is Next.MERGE:
            yield "has to merge", world, replace(self, at="merge", back="ask")
        else:
            left, alone = self.discarding(world), self.bare()
            if plan.next is Next.STAGE:
                yield f"decides to stage {plan.by_hour}", left, replace(alone, at="stage")
            elif plan.next is Next.DONE:
                yield "finds its offsets published", left, alone.done()
            else:
                left = left if self.ahead is None else self.ahead_discarded(left)
                yield "lies ahead of the position", left, replace(alone, at="come_back", ahead=None)

    def hold(self, world: World) -> Iterator[Step]:
        then = replace(self, at="ask", waited=self.waits, waits="", holds=self.holds + 1)
        yield from self.waiting_for(world, then)

    def stage(self, world: World) -> Iterator[Step]:
        decided = self.decided(self.lake)
        plan, actor = self.plan(decided), self.by_clock(world)
        if actor is None:
            yield "finds its clock wrong", world, self.restarted()
            return
        # The log is not compared here: the decision on the staged rows compares it.
        if decided is None or not world.kafka.holds(plan.todo):
            yield f"finds records of {plan.todo} gone", world, self.restarted()
            return
        for again in (False, True) if world.retries and not self.as_snapshot else (False,):
            after, made = self.written(world, plan, decided, again)
            # The last task of a write of files may end long after the first has written its own.
            at = "hear" if world.orphans and not self.as_snapshot else "ask"
            staged = replace(actor, at=at, last=self.lake, lake=None, **made.values())
            yield f"stages {plan.by_hour}{', a task of it twice' if again else ''}", after, staged

    def hear(self, world: World) -> Iterator[Step]:
        assert isinstance(self.staged, Written)
        then = replace(self, at="ask", staged=self.heard(self.staged, world))
        yield f"hears of {[*self.files]}", world, then

    def heard(self, written: Written, world: World) -> Written:
        return written

    def stage_ahead(self, world: World) -> Iterator[Step]:
        decided, actor = self.decided(self.lake), self.by_clock(world)
        starts = {p: e for p, (_, e) in self.ranges}
        ranges = {p: (s, min(len(world.kafka.log[p]), s + self.at_most)) for p, s in starts.items()}
        if actor is None or any(s > e for s, e in ranges.values()) or not world.kafka.holds(ranges):
            return
        plan = speed_plan.plan_ahead(decided, ranges, world.kafka.now + self.skew)
        if plan is None:
            return
        after, made = self.written(world, plan, decided)
        then = replace(actor, ahead=replace(made, ranges=tuple(ranges.items())))
        yield f"stages {plan.by_hour} ahead", after, then

    def written(
        self, world: World, plan: Plan, decided: ResolvedState, again: bool = False
    ) -> tuple[World, Ahead]:  # fmt: skip
        """The world with the rows and dead letters of a plan staged, and what that made."""
        id, kafka, now = world.new_id(self.name, self.ids), world.kafka, self.stamped(world)
        topic_id = decided.position.topic_id
        state, given = decided.state, {h: kafka.read(r) for h, r in plan.by_hour.items()}
        out = partial(is_left_out, world, state)
        read = {h: [r for r in rows if not out(h, topic_id, r)] for h, rows in given.items()}
        marks = speed_plan.erasure_marks(decided.state, topic_id, plan.by_hour)
        good = {h: [r for r in rows if r[2] not in kafka.malformed] for h, rows in read.items()}
        bad = {h: [r for r in rows if r[2] in kafka.malformed] for h, rows in read.items()}
        files = new_files(id, good)
        staged: Staged | Written | None
        if self.as_snapshot:
            after = world.stage(id, files, now)
            staged = after.lake.find_staged(id)
        else:
            files = tuple(replace(f, written=world.age) for f in files)
            copies = tuple(replace(f, file_path=f"{f.file_path}-again") for f in files)
            left = copies if again else ()
            after = replace(world.write((*files, *left)), retries=world.retries - again)
            staged = Written(id, NOW + world.age, of_one_try(files, left))  # type: ignore[arg-type]
        dead = None
        letters = new_files(f"{id}-dead", bad)
        if letters and after.letters is not None:
            after = after.stage_letters(f"{id}-dead", letters, now)
            dead = after.letters.find_staged(f"{id}-dead")
        split = tuple((h, tuple(sorted(ranges.items()))) for h, ranges in plan.by_hour.items())
        return after, Ahead((), topic_id, split, staged, dead, marks)

    @property
    def ids(self) -> frozenset[str]:
        """The ids of attempts that only it knows of."""
        staged = [self.staged, self.ahead.staged if self.ahead else None]
        return frozenset(one.id for one in staged if isinstance(one, Written))

    def ahead_discarded(self, world: World) -> World:
        return discarded(world, self.ahead.staged).discard_letters(self.ahead.dead)

    def discarding(self, world: World) -> World:
        return discarded(world, self.staged).discard_letters(self.dead)

    def bare(self) -> Speed:
        """Itself without what it staged."""
        return replace(self, staged=None, split=(), dead=None, topic_id="", marks=frozenset())

    def move(self, world: World) -> Iterator[Step]:
        decided = self.decided(self.lake)
        if self.doing == "skip":
            planned = self.skipping(decided)
            yield from self.publish(world, self.confirming(planned), decided.now, in_line=False)
            return
        if self.doing == "lost":
            skip = self.skipping_lost(decided)
            lost = skip[0] if skip else speed_plan.plan_boundary_publish(decided, self.id)
            yield from self.publish(world, self.confirming(lost), decided.now, in_line=False)
            return
        plan = self.plan(decided)
        if plan.next is Next.DECIDE:
            boundaries = self.confirming(speed_plan.plan_boundary_publish(decided, self.id))
            yield from self.publish(world, boundaries, decided.now)
            return
        hour_of_file = {f.file_path: f.hour for f in self.files}
        publish = speed_plan.plan_publish(decided, plan, self.batch, hour_of_file)
        yield from self.publish(world, self.confirming(publish), decided.now, in_line=False)

    def plan(self, decided: ResolvedState | None) -> Plan:
        now = self.kafka.now if self.as_snapshot and self.kafka is not None else NOW
        return speed_plan.plan_micro_batch(decided, dict(self.ranges), self.batch, now + self.clock)

    def skipping(self, decided: ResolvedState) -> Publish | None:
        hours, to = self.behind
        return speed_plan.plan_skip(decided, Skip(hours, dict(to)), self.id)

    def skipping_lost(self, decided: ResolvedState) -> tuple[Publish, Ranges] | None:
        return speed_plan.plan_skip_lost(decided, dict(self.behind[1]), self.id)

    @property
    def files(self) -> tuple[File, ...]:
        return self.staged.files if self.staged is not None else ()  # type: ignore[return-value]

    @property
    def batch(self) -> StagedBatch | None:
        if self.staged is None:
            return None
        split = {h: dict(ranges) for h, ranges in self.split}
        return StagedBatch(self.topic_id, split, self.staged, self.dead, erasures=self.marks)

    @property
    def needed(self) -> Offsets:
        return () if self.doing in ("skip", "lost") else tuple((p, e) for p, (_, e) in self.ranges)

    def landed(self) -> Publisher:
        done = self.done()
        if self.doing not in ("skip", "lost") and not self.plan(self.decided(self.lake)).whole:
            # The rest of its offsets belongs to hours that are still to be decided.
            done = replace(self.bare(), at="ask", lake=None, kafka=None, last=None)
        return replace(done, at="merge", back=done.at) if self.lake.state.retained_hours else done

    @property
    def finishes(self) -> bool:
        return self.dead is not None

    def refused(self) -> Publisher:
        back = "come_back" if self.doing in ("skip", "lost") else "ask"
        return replace(self, at=back, last=self.lake, lake=None)

    def done(self) -> Publisher:
        """Go on after a micro-batch or skip: to the next piece or micro-batch, or the table."""
        bare = replace(self.bare(), lake=None, kafka=None, last=None, clock=timedelta(0))
        ended = replace(bare, ranges=(), behind=((), ()), holds=0)
        if self.ahead is not None:
            ended = replace(ended, at="ask", ahead=None, ranges=self.ahead.ranges)
            return replace(ended, **self.ahead.values())
        if self.doing == "stream":
            return replace(ended, at="stream", starts=tuple((p, e) for p, (_, e) in self.ranges))
        if self.doing == "read" and self.rest:
            return replace(ended, at="ask", ranges=self.rest[0], rest=self.rest[1:])
        return replace(ended, at="come_back")


def discarded(world: World, staged: Staged | Written | None) -> World:
    """The world once a speed layer discarded the rows that it staged."""
    return world.leave(staged) if isinstance(staged, Written) else world.discard(staged)


def of_one_try(files: tuple[File, ...], left: tuple[File, ...]) -> tuple[File, ...]:
    """Return what a driver knows of its tasks' files: of ended tries, not what others `left`."""
    return files


@dataclass(frozen=True)
class RollUp(Publisher):
    """The speed job between its micro-batches, or another speed job: puts an hour's files together,
    `runs` times.

    Any two files are enough; of many, all become one.
    """

    at: str = "idle"
    runs: int = 1
    began: timedelta = timedelta(0)
    checked: timedelta = timedelta(0)
    done: tuple[Rewritten, ...] = ()
    keeps: ClassVar[tuple[str, ...]] = ("runs",)
    finishes: ClassVar[bool] = False

    def idle(self, world: World) -> Iterator[Step]:
        state = world.lake.state
        for hour, files in sorted(self.there(world.lake).items()):
            if not self.runs or len(files) < 2 or not compaction.is_served(state, hour):
                continue
            sources = tuple(files.values())
            new = rolled_up(f"{world.new_id(self.name)}/{hour[-3:]}", sources, world.age)
            done: Any = (Rewritten(new, sources),)  # type: ignore[arg-type]
            begun = replace(self, at="check", runs=self.runs - 1, began=world.age, done=done)
            yield f"writes {new}", world.write((new,)) if world.orphans else world, begun

    def check(self, world: World) -> Iterator[Step]:
        loaded = replace(self, lake=world.lake, checked=world.age)
        if loaded.replacing() is None:
            yield "gives it up", world, self.landed()
        else:
            yield "decides to put it in place", world, replace(loaded, at="swap_files")

    def swap_files(self, world: World) -> Iterator[Step]:
        publish = self.replacing()
        yield from self.publish(world, publish, in_line=False)

    def replacing(self) -> Publish | None:
        state, there, began = self.lake.state, self.there(self.lake), NOW + self.began
        checked = NOW + self.checked
        return compaction.plan_replacement(state, self.done, there, began, checked, self.id)

    def there(self, lake: Lake) -> Any:
        main = set(lake.files("main"))
        by_hour = lake.files_by_hour("speed").items()
        return {h: {path: f for path, f in of.items() if f in main} for h, of in by_hour}

    def landed(self) -> Publisher:
        ended = replace(self, at="idle", lake=None, done=())
        return replace(ended, began=timedelta(0), checked=timedelta(0))

    def refused(self) -> Publisher:
        return replace(self, at="check", lake=None, checked=timedelta(0))


@dataclass(frozen=True)
class Batch(Publisher):
    """The batch job: seals what has ended, accepts what is empty, rebuilds what waits; restates up
    to `restates` hours, any, or those of `choice` in its order."""

    at: str = "idle"
    restates: int = 0
    choice: tuple[str, ...] = ()
    restating: bool = False
    todo: tuple[str, ...] = ()
    cut: Pieces = ()
    topic_id: str = "t"
    before: int = 0
    lookback: frozenset[str] = frozenset()
    unread: tuple[str, ...] = ()
    seen: frozenset[Row] = frozenset()
    # The part of an hour with gaps that the speed layer had yet to read, if that matters.
    read: frozenset[str] = frozenset()
    given_up: frozenset[str] = frozenset()
    # The classes of gaps that it may accept, the account of what it staged, and its dead letters.
    allow_gaps: tuple[str, ...] = ()
    counts: str = "{}"
    dead: Staged | None = None
    # Whether the commit that seals hours also accepts those that are empty.
    joins: bool = False

    nesting: ClassVar[tuple[str, ...]] = ("verdict",)
    keeps: ClassVar[tuple[str, ...]] = ("restates", "choice", "given_up", "allow_gaps")

    def waiting(self, world: World) -> list[str]:
        refused = {r.hour for r in map(ledger_row, world.ledger) if r.decision == "refused"}
        lost = refused - self.found_again(world)
        hopeless = self.given_up & world.bad | lost - world.bad
        return [h for h in batch_plan.waiting_hours(world.lake.state) if h not in hopeless]

    def found_again(self, world: World) -> set[str]:
        """The hours that were refused while the stream read another log, and can be read now."""
        rows = [row for row in map(ledger_row, world.ledger) if row.decision == "refused"]
        away = [row for row in rows if (row.reason or "").startswith("Kafka no longer")]
        timeline, id = world.lake.state.timeline, world.lake.state.position.topic_id
        cuts = [(row.hour, row.cut) for row in away if row.cut]
        return {h for h, cut in cuts if not topic_change.gone_from_kafka(timeline, id, h, cut)}

    def idle(self, world: World) -> Iterator[Step]:
        state = world.lake.state
        if is_stopped(world, world.lake) is not None:
            return
        fresh = replace(self, last=None, lake=None, kafka=None, staged=None)
        due = hour_of(world.kafka.now + self.skew - self.grace) > state.timeline.open
        if due or self.waiting(world) or is_waiting(world):
            yield "starts", world, replace(fresh, at="ask")
        for hour in batch_plan.plan_recheck(state):
            if hour not in self.given_up & world.bad:
                then = replace(fresh, at="rebuild", todo=(hour,), restating=True)
                yield f"decides {hour} again", world, then
        if self.restates:
            # Also those that are no longer remembered one by one, which the ledger knows.
            rows = map(ledger_row, world.ledger)
            forgotten = {row.hour for row in rows if state.is_accepted(row.hour)}
            for hour in sorted(forgotten.union(state.accepted)):
                if hour not in (self.choice[:1] or (hour,)):
                    continue
                begun = replace(fresh, at="rebuild", todo=(hour,), restating=True)
                begun = replace(begun, restates=self.restates - 1, choice=self.choice[1:])
                yield f"restates {hour}", world, begun

    # Seal

    def ask(self, world: World) -> Iterator[Step]:
        yield "asks", world, self.asking(world)

    def check(self, world: World) -> Iterator[Step]:
        loaded = replace(self, lake=world.lake)
        try:
            decided = self.decided(world.lake)
        except PositionError as error:
            yield self.doubting(world, error)
            return
        if decided is None:
            yield "has to ask again", world, replace(loaded, at="ask", last=world.lake)
        elif loaded.sealing(decided) is None:
            rest = replace(self, at="recover", lake=None, last=None, kafka=None)
            yield "has nothing to seal", world, self.leaving(rest)
        else:
            yield "decides to seal", world, replace(loaded, at="seal")
            joining = replace(loaded, at="seal", joins=True)
            if joining.sealing(decided) != loaded.sealing(decided):
                yield "decides to seal and accept", world, joining

    def sealing(self, decided: ResolvedState) -> Publish | None:
        seal = sealing.plan_sealing(decided, self.grace, self.id)
        if seal is None or not self.joins:
            return seal
        return batch_plan.plan_seal_with_acceptance(decided.state, seal, None, decided.now)

    def seal(self, world: World) -> Iterator[Step]:
        decided = self.decided(self.lake)
        publish = self.sealing(decided)
        yield from self.publish(world, self.confirming(publish))

    # Accept what is empty, list what waits

    def recover(self, world: World) -> Iterator[Step]:
        if not needs_merge(world.lake.state) and self.should_recover(world):
            yield "has something to finish", world, self.finishing()
        elif not needs_merge(world.lake.state):
            hours = tuple(self.waiting(world))
            empty = batch_plan.empty_hours(world.lake.state, hours)
            rest = tuple(h for h in hours if h not in empty)
            loaded = replace(self, todo=rest, lake=world.lake)
            then = replace(loaded, at="empty") if empty else self.leaving(loaded.following(rest))
            yield f"lists {hours}", world, then
        else:
            yield "has to merge", world, replace(self, at="merge", back="recover")

    def empty(self, world: World) -> Iterator[Step]:
        state = self.lake.state
        candidates = batch_plan.empty_hours(state, batch_plan.waiting_hours(state))
        publish = batch_plan.plan_acceptance_of_empty(state, candidates, self.id, world.kafka.now)
        yield from self.publish(world, self.confirming(publish))

    # Rebuild

    def following(self, todo: tuple[str, ...]) -> Publisher:
        names = (
            "cut",
            "before",
            "lookback",
            "unread",
            "seen",
            "read",
            "topic_id",
            "counts",
            "dead",
        )
        forgotten = {name: getattr(type(self), name) for name in names}
        ended = replace(self, todo=todo, staged=None, lake=None, **forgotten)
        ended = ended if todo else replace(ended, restating=False)
        return replace(ended, at="rebuild" if todo else "idle")

    def lookback_files(self, lake: Lake, unread: tuple[str, ...]) -> frozenset[str]:
        hours = lookback(self.todo[0])
        files = {h: lake.files_of("main", h) for h in hours}
        return batch_plan.fingerprint(
            lake.state, hours, {h: [f.file_path for f in of_hour] for h, of_hour in files.items()},
            {h: sum(f.record_count for f in of_hour) for h, of_hour in files.items()}, unread,
        )  # fmt: skip

    def read_by_speed(self, lake: Lake) -> frozenset[str]:
        cut, gaps = Cut(self.topic_id, dict(self.cut)), json.loads(self.counts).get("gaps")
        read = batch_plan.may_yet_be_served(lake.state, {self.todo[0]: (cut, gaps)})
        return read | erasure.marks_of(lake.state, self.todo[0], cut)

    def remembering(self, world: World, state: State) -> State:
        """The state in which the hour is remembered; the ledger has what is forgotten."""

        def read(hour: str) -> Accepted | None:
            return ledger.last_accepted(world.recorded(hour)) if world.letters else None

        return ledger.plan_remembering(state, self.todo[:1], read)

    def rebuild(self, world: World) -> Iterator[Step]:
        hour, state = self.todo[0], world.lake.state
        accepted = state.accepted.get(hour)
        if accepted is None and world.letters is not None and state.is_accepted(hour):
            accepted = ledger.last_accepted(world.recorded(hour))
        cut = accepted.cut if accepted is not None else state.cuts.get(hour)
        if cut is None or (state.is_accepted(hour) and not self.restating):
            yield f"leaves {hour}", world, self.following(self.todo[1:])
            return
        if not retention.is_kept(state, hour, LOOKBACK if accepted is not None else 0):
            yield f"finds that {hour} has expired", world, self.following(self.todo[1:])
            return
        unread = tuple(sorted(merge.unread_hours(state, lookback(hour))))
        there = [f for h in lookback(hour) for f in world.lake.files_of("main", h)]
        loaded = replace(
            self, at="stage", cut=tuple(sorted(cut.ranges.items())), topic_id=cut.topic_id,
            before=accepted.revision if accepted is not None else 0,
            lookback=self.lookback_files(world.lake, unread), unread=unread,
            seen=frozenset(row for f in there for row in f.rows), lake=world.lake if world.letters else None,
        )  # fmt: skip
        gone = topic_change.gone_from_kafka(state.timeline, state.position.topic_id, hour, cut)
        if gone and not loaded.before:
            yield from loaded.refusing(world, f"{loaded.name}-gone-{world.lake.commits}", gone)
        else:
            yield f"reads {hour}: {cut.ranges}", world, loaded

    def refusing(self, world: World, id: str, reason: str) -> Iterator[Step]:
        """The ledger's row of a refusal, in a step of its own as in the product."""
        hour, cut = self.todo[0], Cut(self.topic_id, dict(self.cut))
        now, id = world.kafka.now, f"{id}-{hour}"
        row = ledger.decision(hour, "refused", self.before + 1, cut, now, id, reason=reason)
        yield f"refuses {hour}: {reason}", world.record([row]), self.following(self.todo[1:])

    def stage(self, world: World) -> Iterator[Step]:
        hour, cut, actor = self.todo[0], Cut(self.topic_id, dict(self.cut)), self.by_clock(world)
        if actor is None:
            yield "finds its clock wrong", world, self.restarted()
            return
        if self.has_letters_to_finish(world, cut):
            yield "has dead letters to finish", world, self.finishing()
            return
        read = read_hour(world, self.lake or world.lake, hour, cut, self.before)
        if read is None:
            yield "stops: the log is another one", world, self.restarted()
            return
        id, now = world.new_id(self.name), self.stamped(world)
        files = tuple(replace(f, seen=self.seen) for f in new_files(id, {hour: read.good}))
        after = world.stage(id, files, now)
        if read.dead and after.letters is not None:
            letters = new_files(f"{id}-dead", {hour: read.dead})
            after = after.stage_letters(f"{id}-dead", letters, now)
        staged = after.lake.find_staged(id)
        staged_dead = after.letters.find_staged(f"{id}-dead") if after.letters is not None else None
        if hour in world.bad:
            refused = replace(self, given_up=self.given_up | {hour}).following(self.todo[1:])
            yield f"refuses {hour}", after.discard(staged).discard_letters(staged_dead), refused
        elif objections := read.balance.disallowed(self.allow_gaps):
            left = after.discard(staged).discard_letters(staged_dead)
            yield from self.refusing(left, id, "; ".join(objections))
        else:
            account = replace(read.balance.counts, partitions=read.balance.partitions)
            counts = json.dumps(account.as_dict()) if world.letters else "{}"
            done = replace(actor, at="verdict", staged=staged, dead=staged_dead, counts=counts)
            done = replace(done, read=done.read_by_speed(self.lake or world.lake), lake=None)
            yield f"stages {[*files]}", after, done

    def has_letters_to_finish(self, world: World, cut: Cut) -> bool:
        """Whether Kafka lacks records of the hour, and some may be among dead letters that wait."""
        # The process that dropped an entry from the table saw it done.
        lakes = (self.lake or world.lake, world.lake)
        named, waiting = ({str(i["id"]) for i in lake.state.dead_letters} for lake in lakes)
        if not named & waiting - self.confirmed.letters:
            return False
        return balance.has_missing(cut.ranges, given(world, cut))

    def discarding(self, world: World) -> World:
        return world.discard(self.staged).discard_letters(self.dead)

    def verdict(self, world: World) -> Iterator[Step]:
        hour, state = self.todo[0], self.remembering(world, world.lake.state)
        verdict = batch_plan.check_publish(
            state, hour, Cut(self.topic_id, dict(self.cut)), self.before, self.staged.wap_id,
            self.lookback_files(world.lake, self.unread) | self.read_by_speed(world.lake),
            self.lookback | self.read, world.kafka.now + world.age,
        )  # fmt: skip
        step = f"{hour}: {verdict.value}"
        if verdict is batch_plan.PublishCheck.PUBLISH:
            yield step, world, replace(self, at="accept", lake=world.lake)
        elif verdict is batch_plan.PublishCheck.MERGE:
            yield step, world, replace(self, at="merge", back="verdict")
        elif verdict is batch_plan.PublishCheck.MOVED:
            again = replace(self, at="rebuild", staged=None, dead=None, counts="{}")
            yield step, self.discarding(world), self.leaving(again)
        elif verdict in (batch_plan.PublishCheck.OVERTAKEN, batch_plan.PublishCheck.EXPIRED):
            yield step, self.discarding(world), self.leaving(self.following(self.todo[1:]))
        else:
            yield step, world, self.leaving(self.restarted())

    def accept(self, world: World) -> Iterator[Step]:
        hour, state, now = self.todo[0], self.remembering(world, self.lake.state), world.kafka.now
        accepted = Accepted(self.before + 1, Cut(self.topic_id, dict(self.cut)), unread=self.unread)
        id = f"{self.staged.wap_id}-{hour}"
        letters = (dead_letters.waiting_batch(self.dead, hour, accepted.revision, now, id),)
        counts = from_json(HourAccount, json.loads(self.counts))
        rebuilt = batch_plan.Rebuilt(hour, accepted, self.staged, letters, counts)
        publish = batch_plan.plan_publish(state, [rebuilt], now)
        yield from self.publish(world, self.confirming(publish))

    def landed(self) -> Publisher:
        fresh = replace(self, lake=None)
        if self.at in ("accept", "empty"):
            return fresh.following(self.todo[1:] if self.at == "accept" else self.todo)
        return replace(fresh, at="recover", kafka=None, last=None, joins=False)

    def refused(self) -> Publisher:
        back = {"seal": "ask", "empty": "recover", "accept": "verdict"}[self.at]
        last = self.lake if back == "ask" else None
        return replace(self, at=back, last=last, lake=None, joins=False)
