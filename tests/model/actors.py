"""The actors of the model: what a publisher remembers, and its next step. Every decision is the product's own.

A step reads or changes the world once, so that anything may happen between two steps. A publisher that is not run for
a while is one that was paused; one that is started again remembers nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from functools import cache
from typing import Any, ClassVar

from small_world import MINUTE, TOPIC, File, Kafka, Lake, Request, World

from anabranch import outcomes, sealing, turns
from anabranch import publish as publishing
from anabranch.commits import Change, Commit
from anabranch.errors import Refused
from anabranch.outcomes import Standing
from anabranch.publish import Publish
from anabranch.sealing import Decided
from anabranch.snapshots import Staged
from anabranch.state import Layer
from serving_layer import merger, override

Step = tuple[str, World, "Actor"]
# No decision of the model rests on when an operator spoke.
NOW = datetime(2026, 11, 21, tzinfo=UTC)


@cache
def decide(
    lake: Lake, asked: Kafka, last: Lake, grace: timedelta, needed: tuple[tuple[int, int], ...], at_once: int | None
) -> Decided | None:
    """What `HourClock.decide` makes of Kafka, asked for the needs of the version `last`, and of the version loaded."""
    upto = dict(needed) or None
    return sealing.plan_decided(
        lake.state, sealing.ask(asked, TOPIC, last.state, asked.now, grace, upto, at_most=at_once)
    )


def files_by_hour(lake: Lake) -> Any:
    return [lake.files_by_hour(b) for b in ("main", "speed", "batch")]


@dataclass(frozen=True)
class Actor:
    """A process. `at` names its next step."""

    name: str
    at: str

    def steps(self, world: World) -> list[Step]:
        """All that may become of its next step; none when it has nothing to do for now."""
        return [(f"{self.name} {said}", after, actor) for said, after, actor in getattr(self, self.at)(world)]

    def restarted(self) -> Actor:
        """Itself after kill -9. The default for who cannot be killed."""
        return self


@dataclass(frozen=True)
class Broker(Actor):
    """Producers, the clock, who mends bad hours and who sets a branch back, in the order of a script."""

    at: str = "play"
    script: tuple[tuple[Any, ...], ...] = ()

    def play(self, world: World) -> Iterator[Step]:
        if not self.script:
            return
        (kind, *values), rest = self.script[0], replace(self, script=self.script[1:])
        if kind == "record":
            yield f"gets a record {values}", replace(world, kafka=world.kafka.append(*values)), rest
        elif kind == "tick":
            kafka = replace(world.kafka, now=world.kafka.now + values[0] * MINUTE)
            yield f"sees {kafka.now:%H:%M}", replace(world, kafka=kafka), rest
        elif kind == "mend":
            yield "sees all hours mended", replace(world, bad=frozenset()), rest
        else:
            for version in world.lake.way(world.lake.heads["speed"]):
                back = world.restore("speed", version.id)
                yield f"sees speed set back to {version.files}", back, rest


@dataclass(frozen=True)
class Network(Actor):
    """What lies between publishers and the catalog: a request whose answer is lost lands when it likes, or never."""

    at: str = "deliver"

    def deliver(self, world: World) -> Iterator[Step]:
        for i, request in enumerate(world.under_way):
            left = replace(world, under_way=(*world.under_way[:i], *world.under_way[i + 1 :]))
            yield f"loses {request} for good", left, self
            after = left.commit(request.loaded, request.commit)
            if after is None:
                yield f"brings {request} at last, and it is refused", left, self
            else:
                yield f"brings {request} at last, and it lands", after, self


@dataclass(frozen=True)
class Publisher(Actor):
    """What both layers, the merger and an operator share: publish, look for a lost answer, merge."""

    lake: Lake | None = None
    asked: Kafka | None = None
    last: Lake | None = None
    staged: Staged | None = None
    back: str = ""
    was: str = ""
    lost: Request | None = None
    doubt: Lake | None = None
    turn: str | None = None
    over: str | None = None
    waits: str = ""
    then: str = ""
    beaten: int = 0
    skew: timedelta = timedelta(0)
    grace: timedelta = timedelta(0)
    at_once: int | None = None

    # The steps whose decisions make a merge first where it is needed.
    nesting: ClassVar[tuple[str, ...]] = ()

    def restarted(self) -> Publisher:
        return type(self)(self.name, skew=self.skew, grace=self.grace, at_once=self.at_once, **self.kept())  # type: ignore[call-arg]

    def kept(self) -> dict[str, Any]:
        """What a process is started with again."""
        return {}

    def asking(self, world: World, **values: Any) -> Any:
        """Ask Kafka for the needs of the version loaded last, on this publisher's own clock."""
        asked = replace(world.kafka, now=world.kafka.now + self.skew)
        return replace(self, at="check", asked=asked, last=self.last or world.lake, lake=None, **values)

    def decided(self, lake: Lake) -> Decided | None:
        assert self.asked is not None and self.last is not None
        return decide(lake, self.asked, self.last, self.grace, self.needed, self.at_once)

    @property
    def needed(self) -> tuple[tuple[int, int], ...]:
        """Up to where it is about to publish, by partition; nothing: it wants all hours that ended."""
        return ()

    @property
    def id(self) -> str:
        """A new id, for a publish over the version that was loaded."""
        assert self.lake is not None
        return self.lake.new_id(f"{self.name}-{self.at}")

    def publish(
        self, world: World, publish: Publish, now: datetime | None = None, in_line: bool = True
    ) -> Iterator[Step]:
        """Step 3 of every publish, over the version that was loaded. Whoever loses the answer has to look for it.

        Whoever is `in_line` waits for the turns before its own, and asks for one when it is refused.
        """
        assert self.lake is not None
        mine = self.turn if in_line and self.turn in {t.id for t in self.lake.line} else None
        if in_line and (first := turns.turn_before(self.lake.line, mine, self.over)) is not None:
            again = self.told(False)
            waiting = {"at": "wait" if mine else "join", "then": again.at, "waits": first.id}
            yield f"finds {first.id} before it", world, replace(again, turn=mine, beaten=0, **waiting)
            return
        commit = publishing.to_commit(self.lake.state, publish, now or world.kafka.now)
        if mine is not None and not self.is_within:
            commit = turns.plan_taking_back(self.lake.table.properties, mine, commit)
        request = Request(self.lake, commit)
        looking = replace(self, at="look", was=self.at, lost=request)
        # A turn whose bound passed meanwhile gave it no way any more.
        beaten = self.beaten + 1 if mine in {t.id for t in world.lake.line} else 0
        again = replace(self.told(False), beaten=beaten, turn=mine)
        asking = in_line and mine is None and world.turns and turns.should_ask(1, turns.LONG_TRY)
        refused = replace(again, at="join", then=again.at) if asking else again
        yield from self.asks(world, request, self.told(True), refused, looking)

    def asks(self, world: World, request: Request, landed: Actor, refused: Actor, looking: Actor) -> Iterator[Step]:
        after = world.commit(request.loaded, request.commit)
        what = "moves a head in its way" if self.at == "fence" else "publishes"
        if after is None:
            yield "is refused", world, refused
            return
        yield what, after, landed
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
        """Ask for a turn, as often as the world allows; then wait, if somebody was before."""
        following = replace(self, at="wait" if self.waits else self.then, then=self.then if self.waits else "")
        asked = turns.plan_turn(world.lake.line, turns.Turn(f"{self.name}-{world.turns}", 0, turns.LEAST))
        if asked is None or not world.turns:
            yield "goes without a turn", world, following
            return
        commit = Commit(asked.id, {}, (), set_properties=asked.to_properties())
        after = world.commit(world.lake, commit)
        assert after is not None
        left = replace(after, turns=world.turns - 1)
        yield f"asks for turn {asked.id}", left, replace(following, turn=asked.id, beaten=0)

    def wait(self, world: World) -> Iterator[Step]:
        yield from self.waiting_for(world, replace(self, at=self.then, then="", waits="", over=self.waits))

    def waiting_for(self, world: World, then: Actor) -> Iterator[Step]:
        """Until the turn is gone; or its bound passes, which may be at any time, and it is taken out."""
        held = next((t for t in world.lake.line if t.id == self.waits), None)
        if held is None:
            yield f"sees turn {self.waits} taken back", world, then
        elif turns.is_over(held, math.inf):
            yield f"sees the bound of turn {held.id} pass", self.without(world, held.id), then

    def take_back(self, world: World) -> Iterator[Step]:
        assert self.turn is not None
        yield "takes back its turn", self.without(world, self.turn), replace(self, at=self.then, then="", turn=None)

    def without(self, world: World, turn: str) -> World:
        commit = turns.plan_taking_back(world.lake.table.properties, turn, Commit("", {}, ()))
        after = world.commit(world.lake, commit)
        assert after is not None
        return after

    def leaving(self, following: Publisher) -> Actor:
        """Itself after its publish gave up: what follows, once its turn is taken back."""
        left = replace(following, over=None, beaten=0)
        return replace(left, at="take_back", then=following.at, turn=self.turn) if self.turn else left

    def look(self, world: World) -> Iterator[Step]:
        assert self.lost is not None
        standing = outcomes.plan_standing(world.lake.table, self.lost.commit)
        known = replace(self, at=self.was, was="", lost=None)
        if standing is Standing.OPEN:
            yield "finds that it may still land", world, replace(self, at="fence", doubt=world.lake)
        elif standing is Standing.FORGOTTEN:
            yield "cannot tell any more, and begins anew", world, self.restarted()
        else:
            found = standing is Standing.LANDED
            yield f"finds that it had {'' if found else 'not '}landed", world, known.told(found)

    def fence(self, world: World) -> Iterator[Step]:
        """An empty publish after which what was asked for cannot land."""
        assert self.lost is not None and self.doubt is not None
        fence = outcomes.plan_fence(self.doubt.table, self.lost.commit)
        request = Request(self.doubt, replace(fence, id=self.doubt.new_id(f"{self.name}-fence")))
        again = replace(self, at="look", doubt=None)
        settled = replace(self, at=self.was, was="", lost=None, doubt=None).told(False)
        yield from self.asks(world, request, settled, again, again)

    def told(self, landed: bool) -> Publisher:
        """Itself once it knows what became of its publish."""
        own = replace(self, turn=None, over=None, beaten=0) if landed and not self.is_within else self
        if self.at == "swap":
            known = replace(own, lake=None)
            return replace(known, at=self.back, back="") if landed else replace(known, at="merge")
        return own.landed() if landed else own.refused()

    def landed(self) -> Publisher:
        raise NotImplementedError

    def refused(self) -> Publisher:
        raise NotImplementedError

    # The merger, which everybody runs

    def merge(self, world: World, everything: bool = False) -> Iterator[Step]:
        state = world.lake.state
        loaded = replace(self, at="swap", lake=world.lake)
        if not (everything or merger.needs_merge(state)) or loaded.swapping(world.lake) is None:
            rest = replace(self, at=self.back, back="")
            yield "has nothing to merge", world, rest if self.is_within else self.leaving(rest)
        else:
            yield "decides to merge", world, loaded

    def swap(self, world: World) -> Iterator[Step]:
        assert self.lake is not None
        publish = self.swapping(self.lake)
        assert publish is not None
        yield from self.publish(world, publish)

    def swapping(self, lake: Lake) -> Publish | None:
        swaps = merger.plan_merge(lake.state, *files_by_hour(lake))
        return merger.plan_swaps(lake.state, swaps, self.id)


@dataclass(frozen=True)
class Merger(Publisher):
    """`anabranch merge`, up to `runs` times."""

    at: str = "idle"
    runs: int = 1

    def kept(self) -> dict[str, Any]:
        return {"runs": self.runs}

    def idle(self, world: World) -> Iterator[Step]:
        if self.runs:
            begun = replace(self, back="idle", runs=self.runs - 1)
            yield from begun.merge(world, everything=True)


@dataclass(frozen=True)
class Operator(Publisher):
    """Gives hours to layers, or lifts that, in the order of `wishes`; a wish that is refused is given up.

    If `patient`, waits until the hour has rows of the batch layer.
    """

    at: str = "wish"
    patient: bool = False
    nesting: ClassVar[tuple[str, ...]] = ("wish",)
    wishes: tuple[tuple[str, Layer | None], ...] = ()

    def kept(self) -> dict[str, Any]:
        return {"wishes": self.wishes, "patient": self.patient}

    def wish(self, world: World) -> Iterator[Step]:
        if not self.wishes or (self.patient and not world.lake.state.is_accepted(self.wishes[0][0])):
            return
        if not merger.needs_merge(world.lake.state):
            loaded = replace(self, at="override", lake=world.lake)
            planned = loaded.overriding(world.lake)
            if isinstance(planned, str):
                told = replace(self, wishes=self.wishes[1:])
                yield f"is told of {self.wishes[0]}: {planned}", world, self.leaving(told)
            else:
                yield f"decides {self.wishes[0]}", world, loaded
        else:
            yield "has to merge", world, replace(self, at="merge", back="wish")

    def override(self, world: World) -> Iterator[Step]:
        assert self.lake is not None
        publish = self.overriding(self.lake)
        assert isinstance(publish, Publish)
        yield from self.publish(world, publish)

    def overriding(self, lake: Lake) -> Publish | str:
        (hour, layer), state = self.wishes[0], lake.state
        if not state.is_sealed(hour):
            return "it is not sealed"
        try:
            overrides, serving = override.plan_override(state, hour, layer or "auto")
        except Refused as refused:
            return str(refused)
        return replace(
            override.plan_served(
                state, hour, overrides, serving, state.accepted.get(hour), self.id, NOW, "", frozenset()
            ),
            # The ledger and the dead letters are not in the model.
            decisions=(), dead_letters=(),
        )  # fmt: skip

    def landed(self) -> Publisher:
        return replace(self, at="wish", lake=None, wishes=self.wishes[1:])

    def refused(self) -> Publisher:
        return replace(self, at="wish", lake=None)


@dataclass(frozen=True)
class Maintenance(Publisher):
    """Expires a day later, inside a publish, what is published or abandoned; then removes the files nobody holds."""

    at: str = "idle"
    runs: int = 1
    orphans: frozenset[File] = frozenset()

    def kept(self) -> dict[str, Any]:
        return {"runs": self.runs}

    def idle(self, world: World) -> Iterator[Step]:
        if self.runs:
            yield "begins", world, replace(self, at="load", runs=self.runs - 1)

    def load(self, world: World) -> Iterator[Step]:
        yield "loads", world, replace(self, at="expire", lake=world.lake)

    def expire(self, world: World) -> Iterator[Step]:
        assert self.lake is not None
        state = self.lake.state
        publish = Publish(self.id, (Change("speed"),), state.timeline)
        yield from self.publish(world, publish, world.kafka.now + timedelta(hours=25))

    def landed(self) -> Publisher:
        return replace(self, at="find" if self.at == "expire" else "find_again", lake=None)

    def refused(self) -> Publisher:
        return replace(self, at="load" if self.at == "expire" else "aim", lake=None)

    def aim(self, world: World) -> Iterator[Step]:
        yield "loads to move a head", world, replace(self, at="fence", lake=world.lake)

    def find(self, world: World) -> Iterator[Step]:
        orphans = world.storage - world.lake.held
        later = replace(world, ages=world.ages + 1)
        found = replace(self, at="fence", lake=world.lake, orphans=orphans) if orphans else replace(self, at="idle")
        yield f"finds {len(orphans)} orphans", later, found

    def find_again(self, world: World) -> Iterator[Step]:
        left = self.orphans - world.lake.held
        yield f"finds {len(left)} of them again", world, replace(self, at="remove" if left else "idle", orphans=left)

    def fence(self, world: World) -> Iterator[Step]:
        assert self.lake is not None
        yield from self.publish(world, Publish(self.id, (Change("speed"),), self.lake.state.timeline))

    def remove(self, world: World) -> Iterator[Step]:
        left = replace(world, storage=world.storage - self.orphans)
        yield (
            f"removes {sorted(f.file_path for f in self.orphans)}",
            left,
            replace(self, at="idle", orphans=frozenset()),
        )
