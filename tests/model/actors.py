"""The actors of the model: what a publisher remembers, and its next step. Every decision is the product's own.

A step reads or changes the world once, so that anything may happen between two steps. A publisher that is not run for
a while is one that was paused; one that is started again remembers nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from functools import cache
from typing import Any

from small_world import MINUTE, TOPIC, File, Kafka, Lake, World

from anabranch import publish as publishing
from anabranch import sealing, snapshots
from anabranch.commits import Change
from anabranch.errors import Refused
from anabranch.publish import Publish
from anabranch.sealing import Decided
from anabranch.snapshots import Staged
from anabranch.state import Layer
from serving_layer import merger, override

Step = tuple[str, World, "Actor"]
# No decision of the model rests on when an operator spoke.
NOW = datetime(2026, 11, 21, tzinfo=UTC)


@cache
def decide(lake: Lake, asked: Kafka, last: Lake, grace: timedelta) -> Decided | None:
    """What `HourClock.decide` makes of Kafka, asked for the needs of the version `last`, and of the version loaded."""
    return sealing.plan_decided(lake.state, sealing.ask(asked, TOPIC, last.state, asked.now, grace))


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
class Publisher(Actor):
    """What both layers, the merger and an operator share: publish, look for a lost answer, merge."""

    lake: Lake | None = None
    asked: Kafka | None = None
    last: Lake | None = None
    staged: Staged | None = None
    back: str = ""
    was: str = ""
    lost: str | None = None
    skew: timedelta = timedelta(0)
    grace: timedelta = timedelta(0)

    def restarted(self) -> Actor:
        return type(self)(self.name, skew=self.skew, grace=self.grace, **self.kept())  # type: ignore[call-arg]

    def kept(self) -> dict[str, Any]:
        """What a process is started with again."""
        return {}

    def asking(self, world: World, **values: Any) -> Any:
        """Ask Kafka for the needs of the version loaded last, on this publisher's own clock."""
        asked = replace(world.kafka, now=world.kafka.now + self.skew)
        return replace(self, at="check", asked=asked, last=self.last or world.lake, lake=None, **values)

    def decided(self, lake: Lake) -> Decided | None:
        assert self.asked is not None and self.last is not None
        return decide(lake, self.asked, self.last, self.grace)

    @property
    def id(self) -> str:
        """A new id, for a publish over the version that was loaded."""
        assert self.lake is not None
        return self.lake.new_id(f"{self.name}-{self.at}")

    def publish(self, world: World, publish: Publish, now: datetime | None = None) -> Iterator[Step]:
        """Step 3 of every publish, over the version that was loaded. Whoever loses the answer has to look for it."""
        assert self.lake is not None
        commit = publishing.to_commit(self.lake.state, publish, now or world.kafka.now)
        after = world.commit(self.lake, commit)
        if after is None:
            yield "is refused", world, self.told(False)
            return
        yield "publishes", after, self.told(True)
        if world.answers_to_lose:
            left = replace(after, answers_to_lose=world.answers_to_lose - 1)
            yield "publishes, and the answer is lost", left, replace(self, at="look", was=self.at, lost=commit.id)

    def look(self, world: World) -> Iterator[Step]:
        assert self.lost is not None
        found = snapshots.has_landed(world.lake.table, self.lost)
        known = replace(self, at=self.was, was="", lost=None)
        yield f"finds that it had {'' if found else 'not '}landed", world, known.told(found)

    def told(self, landed: bool) -> Actor:
        """Itself once it knows what became of its publish."""
        if self.at == "swap":
            known = replace(self, lake=None)
            return replace(known, at=self.back, back="") if landed else replace(known, at="merge")
        return self.landed() if landed else self.refused()

    def landed(self) -> Actor:
        raise NotImplementedError

    def refused(self) -> Actor:
        raise NotImplementedError

    # The merger, which everybody runs

    def merge(self, world: World, everything: bool = False) -> Iterator[Step]:
        state = world.lake.state
        loaded = replace(self, at="swap", lake=world.lake)
        if not (everything or merger.needs_merge(state)) or loaded.swapping(world.lake) is None:
            yield "has nothing to merge", world, replace(self, at=self.back, back="")
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
                yield f"is told of {self.wishes[0]}: {planned}", world, replace(self, wishes=self.wishes[1:])
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

    def landed(self) -> Actor:
        return replace(self, at="wish", lake=None, wishes=self.wishes[1:])

    def refused(self) -> Actor:
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
            yield "loads", world, replace(self, at="expire", lake=world.lake, runs=self.runs - 1)

    def expire(self, world: World) -> Iterator[Step]:
        assert self.lake is not None
        state = self.lake.state
        publish = Publish(self.id, (Change("speed"),), state.timeline)
        yield from self.publish(world, publish, world.kafka.now + timedelta(hours=25))

    def landed(self) -> Actor:
        return replace(self, at="find" if self.at == "expire" else "find_again", lake=None)

    def refused(self) -> Actor:
        # Whoever refused it has moved the head that it was to move.
        return self.landed()

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
