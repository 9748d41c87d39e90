"""The actors of the model: what a publisher remembers, and its next step. Every decision is the
product's own.

A step reads or changes the world once, so that anything may happen between two steps. A publisher
that is not run for a while is one that was paused; one that is started again remembers nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import cache
from typing import Any, ClassVar

from small_world import MINUTE, TOPIC, File, Kafka, Lake, Request, World, ledger_row, millis
from values import replace

from anabranch.common.errors import PositionError, Refused, Transient
from anabranch.iceberg import prepare
from anabranch.iceberg.clock import Clock
from anabranch.iceberg.commits import Change, Commit
from anabranch.iceberg.prepare import CommitFate
from anabranch.iceberg.s3 import Compared
from anabranch.iceberg.snapshots import BRANCHES
from anabranch.lifecycle import maintenance
from anabranch.protocol import (
    acts,
    dead_letters,
    ledger,
    merge,
    publish_queue,
    retention,
    sealing,
    topic_change,
)
from anabranch.protocol import publish as publishing
from anabranch.protocol.ledger_row import Layer
from anabranch.protocol.publish import Publish
from anabranch.protocol.sealing import ResolvedState
from anabranch.protocol.state import NOTHING_CONFIRMED, Confirmed, check_log_end, check_topic
from anabranch.protocol.topic_change import Log

Step = tuple[str, World, "Actor"]
Offsets = tuple[tuple[int, int], ...]
# No decision of the model rests on when an operator spoke.
NOW = datetime(2026, 11, 21, tzinfo=UTC)
NIGHT = timedelta(hours=13)
# The least that a stream's file may say of how old an orphan has to be.
SPARED = timedelta(days=1)


@cache
def decide(
    lake: Lake, kafka: Kafka, last: Lake, grace: timedelta, needed: Offsets, at_once: int | None
) -> ResolvedState | None:
    """Return what `HourClock.decide` makes of Kafka, by version `last` and the version loaded."""
    upto = dict(needed) or None
    answer = sealing.ask(kafka, TOPIC, last.state, kafka.now, grace, upto, at_most=at_once)
    return sealing.resolve_state(lake.state, answer)


def is_stopped(world: World, lake: Lake) -> str | None:
    """Why jobs from a version of the table end with a request for `anabranch adopt`; or None."""
    try:
        topic = world.kafka.describe(TOPIC)
        check_topic(lake.state.position, topic, TOPIC)
        check_log_end(lake.state.position, world.kafka.stable_ends(topic), TOPIC)
    except PositionError as error:
        return str(error)
    return None


def is_waiting(world: World) -> bool:
    """Whether a decision lacks its ledger row, or named dead letters are not published."""
    if world.letters is None:
        return False
    state, known = world.lake.state, {row.decision_id for row in map(ledger_row, world.ledger)}
    if any(row.decision_id not in known for row in state.decisions):
        return True
    due = (item for item in state.dead_letters if dead_letters.is_due(state, item))
    return any(not dead_letters.is_done(world.letters.table, item) for item in due)


def files_by_hour(lake: Lake) -> Any:
    return [lake.files_by_hour(b) for b in ("main", "speed", "batch")]


@dataclass(frozen=True)
class Actor:
    """A process. `at` names its next step."""

    name: str
    at: str

    def steps(self, world: World) -> list[Step]:
        """All that may become of its next step; none when it has nothing to do for now."""
        steps = getattr(self, self.at)(world)
        return [(f"{self.name} {step}", after, actor) for step, after, actor in steps]

    def restarted(self) -> Actor:
        """Itself after kill -9. The default for who cannot be killed."""
        return self


@dataclass(frozen=True)
class Broker(Actor):
    """Producers, the clock, and operators that fix bad hours or set a branch back, by a script."""

    at: str = "play"
    script: tuple[tuple[Any, ...], ...] = ()

    def play(self, world: World) -> Iterator[Step]:
        if not self.script:
            return
        (kind, *values), rest = self.script[0], replace(self, script=self.script[1:])
        changes = {
            "record": world.kafka.append, "personal": world.kafka.append_personal,
            "retain": world.kafka.expire, "compact": world.kafka.compact,
            "end transaction": world.kafka.end_transaction, "recreate": world.kafka.recreated,
            "lose end": world.kafka.without_end, "switch": world.kafka.switched,
        }  # fmt: skip
        if kind in changes:
            yield f"sees {kind} {values}", replace(world, kafka=changes[kind](*values)), rest
        elif kind == "widen":
            readable = replace(world, kafka=world.kafka.readable())
            yield "sees rules that read every record", readable, rest
        elif kind == "tick":
            kafka = replace(world.kafka, now=world.kafka.now + values[0] * MINUTE)
            yield f"sees {kafka.now:%H:%M}", replace(world, kafka=kafka), rest
        elif kind == "adopted":
            if world.kafka.is_read_at(world.lake.state.position):
                yield "sees the log adopted", world, rest
        elif kind == "mend":
            yield "sees all hours fixed", replace(world, bad=frozenset()), rest
        else:
            [branch] = values or ["speed"]
            for version in world.lake.way(world.lake.heads[branch]):
                # Other rows break the promises of every moment until the next merge.
                if branch != "main" or version.files == world.lake.files("main"):
                    restored = world.restore(branch, version.id)
                    yield f"sees {branch} set back to {version.files}", restored, rest


@dataclass(frozen=True)
class Network(Actor):
    """The network to the catalog: a request without answer lands when it likes, or never."""

    at: str = "deliver"

    def deliver(self, world: World) -> Iterator[Step]:
        for i, request in enumerate(world.under_way):
            left = replace(world, under_way=(*world.under_way[:i], *world.under_way[i + 1 :]))
            yield f"loses {request} for good", left, self
            after = left.commit(request.loaded, request.commit, request.made_ms)
            if after is None:
                yield f"brings {request} at last, and it is refused", left, self
            else:
                yield f"brings {request} at last, and it lands", after, self


@dataclass(frozen=True)
class Publisher(Actor):
    """The steps that layers, merger and operator share: publish, look for a lost answer, merge."""

    # None until a step has loaded, asked or staged it, for the steps after that.
    lake: Any = None
    kafka: Any = None
    last: Any = None
    staged: Any = None
    back: str = ""
    was: str = ""
    lost: Any = None
    doubt: Any = None
    turn: Any = None
    over: str | None = None
    waits: str = ""
    then: str = ""
    beaten: int = 0
    skew: timedelta = timedelta(0)
    grace: timedelta = timedelta(0)
    at_once: int | None = None
    # The skews that its machine's clock is set to, whenever it likes; and when it compared it last.
    jumps: tuple[timedelta, ...] = ()
    watched: bool = False
    compared: datetime | None = None
    # For the steps after a publish: the table as it was read, dead letters that wait, what is done.
    seen: Any = None
    letters: Any = None
    decided_by: Any = None
    items: tuple[str, ...] = ()
    after: str = ""
    confirmed: Confirmed = NOTHING_CONFIRMED

    # The steps whose decisions make a merge first where it is needed.
    nesting: ClassVar[tuple[str, ...]] = ()
    # The values that a process is started with again.
    keeps: ClassVar[tuple[str, ...]] = ()
    # Whether the dead letters and the ledger's rows are done after its publish.
    finishes: ClassVar[bool] = True

    def steps(self, world: World) -> list[Step]:
        steps: list[Step] = []
        if self.jumps:
            jumped = replace(self, skew=self.jumps[0], jumps=self.jumps[1:])
            steps.append((f"{self.name}'s clock is set {jumped.skew} off", world, jumped))
        # An actor whose clock is wrong begins again, and waits until it is right.
        if self.watched and self.at == self.first and self.current_time(world) is None:
            return steps
        return steps + super().steps(world)

    @property
    def first(self) -> str:
        """Its first step."""
        return str(type(self).__dataclass_fields__["at"].default)

    def restarted(self) -> Publisher:
        kept = ("name", "grace", "at_once", "skew", "jumps", "watched", *self.keeps)
        return type(self)(**{name: getattr(self, name) for name in kept})

    def current_time(self, world: World) -> Compared | None:
        """Return when its clock was compared last, after it was read; None when it is wrong now."""
        now = world.kafka.now
        # The object store's clock is right, and so is the monotonic one.
        clock = Clock(lambda: now, lambda: now + self.skew, lambda: now.timestamp())
        clock._last = Compared(self.compared, self.compared.timestamp()) if self.compared else None
        try:
            clock.now(world.lake.updated_ms or None)
        except Transient:
            return None
        return clock._last

    def by_clock(self, world: World) -> Publisher | None:
        """Itself after it asked its clock, which it does before it stages, decides or commits; None
        when that is wrong.

        A monotonic clock is not read, which saves moments.
        """
        if not self.watched:
            return self
        compared = self.current_time(world)
        if compared is None:
            return None
        return self if compared.time == self.compared else replace(self, compared=compared.time)

    def asking(self, world: World, **values: Any) -> Any:
        """Ask Kafka for the needs of the version loaded last, on this publisher's own clock."""
        actor = self.by_clock(world)
        if actor is None:
            return self.restarted()
        kafka = replace(world.kafka, now=world.kafka.now + self.skew)
        asked = replace(actor, at="check", kafka=kafka, last=self.last or world.lake, lake=None)
        return replace(asked, **values)

    def doubting(self, world: World, error: PositionError) -> Step:
        """Kafka contradicts the version asked for: a newer one is asked for, else the job ends."""
        if self.last is not world.lake:
            again = replace(self, at="ask", last=world.lake, lake=None)
            return "asks again, in doubt", world, again
        return f"stops: {error}", world, self.restarted()

    def decided(self, lake: Lake) -> ResolvedState | None:
        return decide(lake, self.kafka, self.last, self.grace, self.needed, self.at_once)

    @property
    def needed(self) -> Offsets:
        """Up to where it is about to publish, by partition; nothing: all hours that ended."""
        return ()

    @property
    def id(self) -> str:
        """A new id, for a publish over the version that was loaded."""
        return self.lake.new_id(f"{self.name}-{self.at}")

    def publish(
        self, world: World, publish: Publish, now: datetime | None = None, in_line: bool = True
    ) -> Iterator[Step]:
        """Step 3 of every publish, over the version that was loaded. An actor that loses the answer
        has to look for it.

        An actor `in_line` waits for the turns before its own, and requests one when it is refused.
        """
        mine = self.turn if in_line and self.turn in {t.id for t in self.lake.line} else None
        turns = self.lake.line if in_line else ()
        if (first := publish_queue.turn_before(turns, mine, self.over)) is not None:
            again = self.reported(False)
            waiting = replace(again, at="wait" if mine else "join", then=again.at, waits=first.id)
            yield f"finds {first.id} before it", world, replace(waiting, turn=mine, beaten=0)
            return
        actor = self.by_clock(world)
        if actor is None:
            yield "finds its clock wrong", world, self.restarted()
            return
        if actor is not self:
            yield from actor.publish(world, publish, now, in_line)
            return
        commit = publishing.to_commit(self.lake.state, publish, now or world.kafka.now)
        if mine is not None and not self.is_within:
            commit = publish_queue.plan_turn_removal(self.lake.table.properties, mine, commit)
        request = Request(self.lake, commit, self.stamped(world))
        looking = replace(self, at="look", was=self.at, lost=request)
        # A turn whose bound passed meanwhile gave it no way any more.
        beaten = self.beaten + 1 if mine in {t.id for t in world.lake.line} else 0
        again = replace(self.reported(False), beaten=beaten, turn=mine)
        is_late = publish_queue.should_join(1, publish_queue.LONG_ATTEMPT)
        asking = in_line and mine is None and world.turns and is_late
        refused = replace(again, at="join", then=again.at) if asking else again
        yield from self.asks(world, request, self.reported(True), refused, looking)

    def confirming(self, publish: Publish) -> Publish:
        """The publish, which also drops from its branches what this publisher has seen done."""
        return replace(publish, confirmed=self.confirmed)

    def asks(
        self, world: World, request: Request, landed: Actor, refused: Actor, looking: Actor
    ) -> Iterator[Step]:
        after = world.commit(request.loaded, request.commit, request.made_ms)
        what = "moves a head in its way" if self.at == "fence" else "publishes"
        if after is None:
            yield "is refused", world, refused
            return
        yield what, after, landed
        if world.wrong_answers and self.at != "fence":
            misled = replace(after, wrong_answers=world.wrong_answers - 1)
            yield f"{what}, and the answer is a refusal", misled, refused
        if world.answers_to_lose:
            left = world.answers_to_lose - 1
            yield f"{what}, and the answer is lost", replace(after, answers_to_lose=left), looking
            if world.late:
                waits = replace(world, answers_to_lose=left, under_way=(*world.under_way, request))
                yield f"{what}, and nothing is heard of it", waits, looking

    # Turns

    @property
    def is_within(self) -> bool:
        """Whether its publish is a merge inside the decision of another, whose turn it goes by."""
        return self.at in ("merge", "swap") and self.back in self.nesting

    def join(self, world: World) -> Iterator[Step]:
        """Request a turn, as often as the world allows; then wait, if another one is first."""
        following = replace(self, at="wait") if self.waits else replace(self, at=self.then, then="")
        mine = publish_queue.Turn(f"{self.name}-{world.turns}", 0, publish_queue.MIN_TIMEOUT)
        turn = publish_queue.plan_turn(world.lake.line, mine)
        if turn is None or not world.turns:
            yield "goes without a turn", world, following
            return
        commit = Commit(turn.id, {}, (), set_properties=turn.to_properties())
        after = world.commit(world.lake, commit)
        assert after is not None
        left = replace(after, turns=world.turns - 1)
        yield f"asks for turn {turn.id}", left, replace(following, turn=turn.id, beaten=0)

    def wait(self, world: World) -> Iterator[Step]:
        then = replace(self, at=self.then, then="", waits="", over=self.waits)
        yield from self.waiting_for(world, then)

    def waiting_for(self, world: World, then: Actor) -> Iterator[Step]:
        """Wait until the turn is gone; or its bound passes, at any time, and it is taken out."""
        turn = next((t for t in world.lake.line if t.id == self.waits), None)
        if turn is None:
            yield f"sees turn {self.waits} taken back", world, then
        elif publish_queue.is_over(turn, math.inf):
            yield f"sees the bound of turn {turn.id} pass", self.without(world, turn.id), then

    def take_back(self, world: World) -> Iterator[Step]:
        then = replace(self, at=self.then, then="", turn=None)
        yield "takes back its turn", self.without(world, self.turn), then

    def without(self, world: World, turn: str) -> World:
        lake = world.lake
        left = publish_queue.plan_turn_removal(lake.table.properties, turn, Commit("", {}, ()))
        after = world.commit(lake, left)
        assert after is not None
        return after

    def leaving(self, following: Publisher) -> Actor:
        """Itself after its publish gave up: what follows, once its turn is taken back."""
        left = replace(following, over=None, beaten=0)
        behind = replace(left, at="take_back", then=following.at, turn=self.turn)
        return behind if self.turn else left

    def look(self, world: World) -> Iterator[Step]:
        status = prepare.classify_commit(world.lake.table, self.lost.commit)
        known = replace(self, at=self.was, was="", lost=None)
        if status is CommitFate.OPEN:
            yield "finds that it may still land", world, replace(self, at="fence", doubt=world.lake)
        elif status is CommitFate.FORGOTTEN:
            yield "cannot find out any more, and begins again", world, self.restarted()
        else:
            landed = status is CommitFate.LANDED
            then = known.reported(landed)
            yield f"finds that it had {'' if landed else 'not '}landed", world, then

    def fence(self, world: World) -> Iterator[Step]:
        """An empty publish after which what was asked for cannot land."""
        fence = prepare.plan_fence(self.doubt.table, self.lost.commit)
        named = replace(fence, id=self.doubt.new_id(f"{self.name}-fence"))
        request = Request(self.doubt, named, self.stamped(world))
        again = replace(self, at="look", doubt=None)
        settled = replace(self, at=self.was, was="", lost=None, doubt=None).reported(False)
        yield from self.asks(world, request, settled, again, again)

    def reported(self, landed: bool) -> Publisher:
        """Itself once it knows what became of its publish."""
        is_over = landed and not self.is_within
        own = replace(self, turn=None, over=None, beaten=0) if is_over else self
        own = replace(own, confirmed=NOTHING_CONFIRMED) if landed else own
        if self.at == "swap":
            known = replace(own, lake=None)
            return replace(known, at=self.back, back="") if landed else replace(known, at="merge")
        if not landed:
            return own.refused()
        if self.lake is not None and self.lake.accounts:
            return own.landed().finishing() if own.finishes else own.landed()
        return own.landed()

    def stamped(self, world: World) -> int:
        """Return what a commit is stamped with: this machine's clock."""
        return millis(world.kafka.now + self.skew)

    # Steps after a publish: the dead letters, then the ledger's rows

    def should_recover(self, world: World) -> bool:
        """Whether something is named of which it has not seen that it is done."""
        state = world.lake.state
        if not world.lake.accounts:
            return False
        decisions = {row.decision_id for row in state.decisions}
        is_recorded = decisions <= self.confirmed.decisions
        return not is_recorded or not state.waiting_letters <= self.confirmed.letters

    def finishing(self) -> Publisher:
        """Itself before it finishes what waits, by its own publish or another's, and goes on."""
        return replace(self, at="follow", after=self.at)

    def follow(self, world: World) -> Iterator[Step]:
        items = tuple(str(item["id"]) for item in world.lake.state.dead_letters)
        loaded = replace(self, seen=world.lake, items=items)
        yield f"loads what waits: {items}", world, loaded.following_letters()

    def record(self, world: World) -> Iterator[Step]:
        done = self.confirmed.decisions
        waiting = [row for row in self.seen.state.decisions if row.decision_id not in done]
        ids = [row.decision_id for row in waiting]
        done = replace(self, confirmed=self.confirmed | Confirmed(frozenset(ids)))
        followed = replace(done, at=self.after, after="", seen=None)
        yield f"records {ids}", world.record(waiting), followed

    def following_letters(self) -> Publisher:
        """Itself before the next of the dead letters that wait, or behind the last one."""
        own = replace(self, letters=None, decided_by=None)
        if self.items:
            return replace(own, at="open_letters")
        if self.seen.state.decisions:
            return replace(own, at="record")
        return replace(own, at=self.after, after="", seen=None)

    @property
    def item(self) -> Any:
        """The table's word, as it was loaded, on the dead letters that come next."""
        return next(item for item in self.seen.state.dead_letters if item["id"] == self.items[0])

    def done_letters(self) -> Publisher:
        confirmed = self.confirmed | Confirmed(letters=frozenset(self.items[:1]))
        done = replace(self, items=self.items[1:], confirmed=confirmed)
        return done.following_letters()

    def open_letters(self, world: World) -> Iterator[Step]:
        if dead_letters.is_done(world.letters.table, self.item):
            yield f"finds the dead letters {self.items[0]} done", world, self.done_letters()
        else:
            then = replace(self, at="judge_letters", letters=world.letters)
            yield "loads the dead letters' table", world, then

    def judge_letters(self, world: World) -> Iterator[Step]:
        loaded = replace(self, at="send_letters", decided_by=world.lake)
        if not dead_letters.is_due(world.lake.state, self.item):
            yield f"finds the dead letters {self.items[0]} not due", world, self.done_letters()
        else:
            yield f"decides to publish the dead letters {self.items[0]}", world, loaded

    def changes_of_letters(self, world: World) -> tuple[Change, ...]:
        files = self.files_of_letters(world)
        # As `_publish` leaves them out.
        expired = retention.letters_expired(self.letters.table) if self.letters is not None else ()
        files = tuple(f for f in files if f.hour not in expired)
        hours = {f.file_path: f.hour for f in files}
        return dead_letters.plan_changes(self.decided_by.state, self.item, files, hours)  # type: ignore[arg-type]

    def files_of_letters(self, world: World) -> tuple[File, ...]:
        """Return the files as they were staged, or as storage has those that are named."""
        staged = self.letters.find_staged(self.items[0])
        if staged is not None:
            return staged.files  # type: ignore[return-value]
        files = [f for f in world.storage if f.file_path in self.item["paths"]]
        return tuple(sorted(files, key=lambda f: f.hour))

    def send_letters(self, world: World) -> Iterator[Step]:
        lacks = {*self.item["paths"]} != {f.file_path for f in self.files_of_letters(world)}
        changes = self.changes_of_letters(world)
        table, decided = self.letters.table, self.decided_by.state
        now = world.kafka.now
        commit = dead_letters.plan_commit(table, decided, self.item, changes, lacks, now)
        after = world.commit_letters(self.letters, commit, self.stamped(world))
        again = replace(self, at="open_letters", letters=None, decided_by=None)
        if after is None:
            yield f"is refused with the dead letters {self.items[0]}", world, again
            return
        yield f"publishes the dead letters {self.items[0]}", after, self.done_letters()
        if world.answers_to_lose:
            left = replace(after, answers_to_lose=world.answers_to_lose - 1)
            yield f"publishes the dead letters {self.items[0]}, and the answer is lost", left, again

    def landed(self) -> Publisher:
        return replace(self, at=self.first, lake=None, kafka=None)

    def refused(self) -> Publisher:
        return replace(self, at=self.first, lake=None, kafka=None)

    # The merger, which everybody runs

    def merge(self, world: World, everything: bool = False) -> Iterator[Step]:
        state = world.lake.state
        loaded = replace(self, at="swap", lake=world.lake)
        if not (everything or merge.needs_merge(state)) or loaded.swapping(world.lake) is None:
            rest = replace(self, at=self.back, back="")
            yield "has nothing to merge", world, rest if self.is_within else self.leaving(rest)
        else:
            yield "decides to merge", world, loaded

    def swap(self, world: World) -> Iterator[Step]:
        publish = self.swapping(self.lake)
        yield from self.publish(world, publish)

    def swapping(self, lake: Lake) -> Publish | None:
        swaps = merge.plan_merge(lake.state, *files_by_hour(lake))
        return merge.plan_swaps(lake.state, swaps, self.id)


@dataclass(frozen=True)
class Merger(Publisher):
    """`anabranch merge`, up to `runs` times."""

    at: str = "idle"
    runs: int = 1
    keeps: ClassVar[tuple[str, ...]] = ("runs",)

    def idle(self, world: World) -> Iterator[Step]:
        if self.runs:
            begun = replace(self, back="idle", runs=self.runs - 1)
            yield from begun.merge(world, everything=True)


@dataclass(frozen=True)
class Operator(Publisher):
    """Gives hours to layers, or lifts that, in the order of `wishes`; a wish that is refused is
    given up.

    If `patient`, waits until the hour has rows of the batch layer.
    """

    at: str = "wish"
    patient: bool = False
    nesting: ClassVar[tuple[str, ...]] = ("wish",)
    wishes: tuple[tuple[str, Layer | None], ...] = ()
    keeps: ClassVar[tuple[str, ...]] = ("wishes", "patient")

    def wish(self, world: World) -> Iterator[Step]:
        state = world.lake.state
        if not self.wishes or (self.patient and not state.is_accepted(self.wishes[0][0])):
            return
        if not merge.needs_merge(state):
            loaded = replace(self, at="override", lake=world.lake)
            planned = loaded.overriding(world)
            if isinstance(planned, str):
                rest = replace(self, wishes=self.wishes[1:])
                yield f"receives {self.wishes[0]}: {planned}", world, self.leaving(rest)
            else:
                yield f"decides {self.wishes[0]}", world, loaded
        else:
            yield "has to merge", world, replace(self, at="merge", back="wish")

    def override(self, world: World) -> Iterator[Step]:
        publish = self.overriding(world)
        assert isinstance(publish, Publish)
        yield from self.publish(world, self.confirming(publish))

    def overriding(self, world: World) -> Publish | str:
        (hour, layer), state = self.wishes[0], self.lake.state
        if not state.is_sealed(hour):
            return "it is not sealed"
        try:
            retention.require_kept(state, hour)
            overrides, serving = acts.plan_override(state, hour, layer or "auto")
        except Refused as refused:
            return str(refused)
        accepted = state.accepted.get(hour)
        if accepted is None and world.letters is not None and state.is_accepted(hour):
            accepted = ledger.last_accepted(world.recorded(hour))
        return acts.plan_served(state, hour, overrides, serving, accepted, self.id, NOW, "")

    def landed(self) -> Publisher:
        return replace(self, at="wish", lake=None, wishes=self.wishes[1:])


@dataclass(frozen=True)
class Maintenance(Publisher):
    """Comes `later` than whatever was before: a publish expires what is published or abandoned,
    then unreferenced files of some age are removed. If it `fails`, its publish alone does."""

    at: str = "idle"
    runs: int = 1
    orphans: frozenset[File] = frozenset()
    later: timedelta = timedelta(hours=25)
    before: timedelta = timedelta(0)
    fails: bool = False
    # Its clock is read once: by that, snapshots staged after it began are young.
    began_with: Lake | None = None
    keeps: ClassVar[tuple[str, ...]] = ("runs", "later", "fails")
    finishes: ClassVar[bool] = False

    def idle(self, world: World) -> Iterator[Step]:
        if self.runs:
            following = "load_letters" if self.fails else "load"
            begun = replace(self, at=following, runs=self.runs - 1, began_with=world.letters)
            yield "begins", world, begun

    def load(self, world: World) -> Iterator[Step]:
        yield "loads", world, replace(self, at="expire", lake=world.lake)

    def expire(self, world: World) -> Iterator[Step]:
        state = self.lake.state
        publish = maintenance.plan_maintenance(state, (), state.timeline, self.id)
        yield from self.publish(world, publish, self.now(world))

    def now(self, world: World) -> datetime:
        return world.kafka.now + world.age + self.later

    def landed(self) -> Publisher:
        expired = "load_letters" if self.lake is not None and self.lake.accounts else "find"
        return replace(self, at=expired if self.at == "expire" else "find_again", lake=None)

    def load_letters(self, world: World) -> Iterator[Step]:
        then = replace(self, at="expire_letters", letters=world.letters)
        yield "loads the dead letters", world, then

    def expire_letters(self, world: World) -> Iterator[Step]:
        state, id = world.lake.state, self.letters.new_id(f"{self.name}-{self.at}")
        hours = {f.hour for f in self.letters.files("speed")}
        now = self.now(world)
        commit = maintenance.plan_dead_letters(self.letters.table, state, hours, id, now)
        known = self.began_with.known if self.began_with is not None else {}
        commit = replace(commit, expire=tuple(i for i in commit.expire if i in known))
        after = world.commit_letters(self.letters, commit) if commit.expire else world
        actor = replace(self, at="find", letters=None, began_with=None)
        if after is None:
            actor = replace(actor, began_with=self.began_with)
            yield "is refused with dead letters", world, replace(actor, at="load_letters")
        else:
            yield f"expires {len(commit.expire)} snapshots of dead letters", after, actor

    def refused(self) -> Publisher:
        return replace(self, at="load" if self.at == "expire" else "aim", lake=None)

    def aim(self, world: World) -> Iterator[Step]:
        yield "loads to move a head", world, replace(self, at="fence", lake=world.lake)

    def find(self, world: World) -> Iterator[Step]:
        later = replace(world, age=world.age + self.later)
        before = later.age - SPARED
        orphans = later.orphans_before(before)
        tags = sum(ref.max_age_ms is not None for ref in world.lake.refs)
        letters = [f for f in orphans if "-dead/" in f.file_path]
        following = "remove" if orphans else "idle"
        if maintenance.should_move_head(orphans - set(letters), letters):
            following = "fence"
        actor = replace(self, at=following, lake=None, orphans=orphans, before=timedelta(0))
        if following == "fence":
            actor = replace(actor, lake=world.lake, before=before)
        yield f"finds {len(orphans)} orphans and {tags} tags", later, actor

    def find_again(self, world: World) -> Iterator[Step]:
        left = world.orphans_before(self.before)
        actor = replace(self, at="remove" if left else "idle", orphans=left, before=timedelta(0))
        yield f"finds {len(left)} of them again", world, actor

    def fence(self, world: World) -> Iterator[Step]:
        publish = Publish(self.id, (Change("speed"),), self.lake.state.timeline)
        yield from self.publish(world, publish, self.now(world))

    def remove(self, world: World) -> Iterator[Step]:
        left = replace(world, storage=world.storage - self.orphans)
        then = replace(self, at="idle", orphans=frozenset())
        yield f"removes {sorted(f.file_path for f in self.orphans)}", left, then


@dataclass(frozen=True)
class Expiry(Actor):
    """Another program's expire_snapshots of all but what a branch or tag names, in the rows' or the
    dead letters' table: the commit, a look at the table, the removal of files of what expired."""

    at: str = "expire"
    of_letters: bool = False
    candidates: frozenset[File] = frozenset()

    def expire(self, world: World) -> Iterator[Step]:
        table = world.letters if self.of_letters else world.lake
        kept = table.without_unnamed()
        if kept is not table:
            lost = table.held - kept.held
            after = replace(world, **{"letters" if self.of_letters else "lake": kept})
            then = replace(self, at="look", candidates=lost)
            yield f"expires snapshots with {sorted(f.file_path for f in lost)}", after, then

    def look(self, world: World) -> Iterator[Step]:
        table = world.letters if self.of_letters else world.lake
        left = self.candidates - table.held
        then = replace(self, at="delete", candidates=left)
        yield f"finds {len(left)} files that nothing refers to", world, then

    def delete(self, world: World) -> Iterator[Step]:
        after = replace(world, storage=world.storage - self.candidates)
        done = replace(self, at="done", candidates=frozenset())
        yield f"deletes {sorted(f.file_path for f in self.candidates)}", after, done

    def done(self, world: World) -> Iterator[Step]:
        return iter(())


@dataclass(frozen=True)
class Nights(Actor):
    """Time that may pass anywhere: after one night no publish names a file, after two it goes."""

    name: str = "night"
    at: str = "fall"
    runs: int = 1

    def fall(self, world: World) -> Iterator[Step]:
        if self.runs:
            later = replace(world, age=world.age + NIGHT)
            yield f"makes all {later.age} old", later, replace(self, runs=self.runs - 1)


@dataclass(frozen=True)
class Adopter(Publisher):
    """`anabranch adopt`, run whenever the jobs stop and ask for it."""

    at: str = "idle"

    def idle(self, world: World) -> Iterator[Step]:
        if is_stopped(world, world.lake) is not None:
            yield "loads to adopt", world, replace(self, at="ask_log", lake=world.lake)

    def ask_log(self, world: World) -> Iterator[Step]:
        yield "asks for the first offsets", world, replace(self, at="adopt", kafka=world.kafka)

    def adopt(self, world: World) -> Iterator[Step]:
        planned = self.adopting()
        if planned is None:
            yield "has nothing to adopt", world, self.restarted()
        else:
            yield from self.publish(world, self.confirming(planned))

    def adopting(self) -> Publish | None:
        state, kafka = self.lake.state, self.kafka
        topic = kafka.describe(TOPIC)
        log = Log(topic, kafka.log_starts(topic), kafka.stable_ends(topic))
        read_ms, left = topic_change.last_read_ms(state), state.timeline.left_at(topic.id)
        since = left.read_ms if left is not None else 0
        since = read_ms if topic.id == state.position.topic_id else since
        unpublished = sealing.first_after(kafka, topic, datetime.fromtimestamp(since / 1000, UTC))
        begins = topic_change.plan_begins(state.timeline, state.position, log, unpublished)
        if begins is None:
            return None
        accepted = {h: a.cut for h, a in state.accepted.items()}
        adopted = topic_change.plan_adopt(
            state.timeline, state.position, topic.id, begins, accepted, read_ms, since
        )
        return topic_change.plan_publish(state, adopted, self.id, kafka.now)


@dataclass(frozen=True)
class Retention(Publisher):
    """Expiry by `anabranch maintain`, of a stream that keeps rows for no time at all: up to `runs`
    times, the `most` oldest hours that are due leave every branch."""

    at: str = "idle"
    runs: int = 1
    most: int = 1
    lookback: int = 1
    nesting: ClassVar[tuple[str, ...]] = ("idle",)
    keeps: ClassVar[tuple[str, ...]] = ("runs", "most")

    def idle(self, world: World) -> Iterator[Step]:
        if not self.runs:
            return
        if merge.needs_merge(world.lake.state):
            yield "has to merge", world, replace(self, at="merge", back="idle")
            return
        if leaving := self.due(world, world.lake):
            yield f"decides to expire {leaving}", world, replace(self, at="expire", lake=world.lake)

    def due(self, world: World, lake: Lake) -> tuple[str, ...]:
        now, done = world.kafka.now, finished_ids(world, lake)
        due = retention.plan_due(lake.state, timedelta(0), now, self.lookback, {}, done)
        return due.leaving[: self.most]

    def expire(self, world: World) -> Iterator[Step]:
        state, speed_hours = self.lake.state, self.lake.files_by_hour("speed")
        now, due = world.kafka.now + world.age, self.due(world, self.lake)
        publish = retention.plan_expire(state, due, speed_hours, {}, "", self.id, now)
        yield from self.publish(world, self.confirming(publish))

    def landed(self) -> Publisher:
        accounts = self.lake is not None and self.lake.accounts
        after = "load_letters" if accounts else "idle"
        return replace(self, at=after, lake=None, runs=self.runs - 1)

    def load_letters(self, world: World) -> Iterator[Step]:
        loaded = replace(self, at="expire_letters", letters=world.letters, decided_by=world.lake)
        yield "loads the dead letters", world, loaded

    def expire_letters(self, world: World) -> Iterator[Step]:
        table, state, now = self.letters.table, self.decided_by.state, world.kafka.now + world.age
        expired, finished = retention.letters_expired(table), finished_ids(world, self.decided_by)
        due = retention.plan_due_letters(state, expired, timedelta(0), now, finished)
        content = {f.hour for branch in BRANCHES for f in self.letters.files(branch)}
        id = self.letters.new_id(f"{self.name}-{self.at}")
        hours, most = due.leaving, self.most
        commit = retention.plan_expire_letters(table, state, hours, content, id, now, most)
        done = replace(self, at="idle", letters=None, decided_by=None)
        if commit is None:
            yield "finds no dead letters to expire", world, done
            return
        after = world.commit_letters(self.letters, commit, self.stamped(world))
        if after is None:
            yield "is refused with expired dead letters", world, replace(done, at="load_letters")
        else:
            yield f"expires the dead letters of {commit.changes[0].clear}", after, done


def finished_ids(world: World, lake: Lake) -> Confirmed:
    """The decisions and dead letters that wait and are complete; all, where none is followed."""
    state = lake.state
    if world.letters is None:
        decisions = frozenset(row.decision_id for row in state.decisions)
        return Confirmed(decisions, state.waiting_letters)
    known = {row.decision_id for row in map(ledger_row, world.ledger)}
    table = world.letters.table
    done = {str(i["id"]) for i in state.dead_letters if dead_letters.is_done(table, i)}
    return Confirmed(frozenset(known), frozenset(done))
