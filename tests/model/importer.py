"""An import of hours before the stream's first, beside everybody else."""

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, ClassVar

from actors import NOW, Publisher, Step
from small_world import H0, File, Lake, World
from values import replace

from anabranch.offsets.hours import hours_between, shift
from anabranch.protocol import imported, merge

PARTITION = imported.PARTITION


def source(hour: str) -> tuple[tuple[int, int, int], ...]:
    """The row that an hour has in the files to import."""
    return ((PARTITION, imported.first_offset(hour), -len(hours_between(hour, H0))),)


@dataclass(frozen=True)
class Importer(Publisher):
    """Imports the `most` hours before the stream's first, newest first, one a publish."""

    at: str = "idle"
    most: int = 2
    began: timedelta = timedelta(0)
    written: tuple[File, ...] = ()
    nesting: ClassVar[tuple[str, ...]] = ("idle",)
    keeps: ClassVar[tuple[str, ...]] = ("most",)
    finishes: ClassVar[bool] = False

    def idle(self, world: World) -> Iterator[Step]:
        state = world.lake.state
        hour = shift(state.timeline.first, -1)
        if hour < shift(H0, -self.most) or not any(state.position.offsets.values()):
            return
        path = f"{world.new_id(self.name)}/{hour[-3:]}"
        file = File(path, hour, source(hour), written=world.age)
        begun = replace(self, at="check", began=world.age, written=(file,))
        yield f"writes {hour}", world.write((file,)), begun

    def check(self, world: World) -> Iterator[Step]:
        if merge.needs_merge(world.lake.state):
            yield "has to merge", world, replace(self, at="merge", back="check")
            return
        loaded = replace(self, lake=world.lake)
        if loaded.planned(world) is None:
            yield "gives its files up", world, self.landed()
        else:
            yield "decides to import", world, replace(loaded, at="accept")

    def accept(self, world: World) -> Iterator[Step]:
        publish = self.planned(world)
        if publish is None:
            yield "gives its files up", world, self.landed()
        else:
            yield from self.publish(world, self.confirming(publish))

    def planned(self, world: World) -> Any:
        account = imported.account_of(1, 0, 0, {})
        hours: Any = [imported.ImportedHour(f.hour, (f,), account) for f in self.written]  # type: ignore[arg-type]
        state, now = self.lake.state, NOW + world.age
        return imported.plan_import(state, hours, {0: 0}, self.id, NOW + self.began, now, "")

    def landed(self) -> Publisher:
        return replace(self, at="idle", lake=None, began=timedelta(0), written=())

    def refused(self) -> Publisher:
        return replace(self, at="check", lake=None)


@dataclass(frozen=True)
class Undoer(Publisher):
    """Takes imported hours back, one in a publish, `runs` times. It begins when it likes."""

    at: str = "idle"
    runs: int = 1
    nesting: ClassVar[tuple[str, ...]] = ("idle",)
    keeps: ClassVar[tuple[str, ...]] = ("runs",)
    finishes: ClassVar[bool] = False

    def idle(self, world: World) -> Iterator[Step]:
        if not (self.runs and imported.imported_hours(world.lake.state)):
            return
        if merge.needs_merge(world.lake.state):
            yield "has to merge", world, replace(self, at="merge", back="idle")
        else:
            yield "decides to undo", world, replace(self, at="undo", lake=world.lake)

    def undo(self, world: World) -> Iterator[Step]:
        state = self.lake.state
        hours = imported.imported_hours(state)[:1]
        publish = imported.plan_undo(state, hours, {}, self.id, NOW)
        yield from self.publish(world, self.confirming(publish))

    def landed(self) -> Publisher:
        return replace(self, at="idle", lake=None, runs=self.runs - 1)


def check(lake: Lake) -> list[str]:
    """The faults of imported hours in a version of the table."""
    timeline = lake.state.timeline
    found = []
    for hour in hours_between(timeline.first, timeline.first_of_kafka):
        for branch in ("batch", "main"):
            rows = tuple(row for f in lake.files_of(branch, hour) for row in f.rows)
            if rows != source(hour):
                found.append(f"{hour} is imported, {branch} has {rows} of it")
        if not lake.state.is_accepted(hour):
            found.append(f"{hour} is imported, and not accepted")
    for branch in ("batch", "main"):
        back = sorted(h for h in lake.files_by_hour(branch) if h < timeline.first)
        if back:
            found.append(f"the table begins with {timeline.first}, {branch} has rows of {back}")
    return found
