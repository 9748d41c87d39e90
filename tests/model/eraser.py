"""Erasure of the model: the steps of `anabranch erase`, and what it promises at every moment."""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any, ClassVar

from actors import NOW, Publisher, Step, is_waiting
from small_world import File, Kafka, Lake, Row, Violation, World
from values import replace

from anabranch.iceberg.snapshots import BRANCHES
from anabranch.offsets.hours import hour_of
from anabranch.protocol import acts, dead_letters, erasure, ledger, merge
from anabranch.protocol.ledger_row import Act, LedgerRow
from anabranch.protocol.publish import Publish
from anabranch.protocol.registers import Erasure
from anabranch.protocol.state import State

IDS = ("person", "person again")
"""The first request, and the next one of the same values."""


def newest(state: State) -> Erasure | None:
    """The request that the command goes on with."""
    return next((one for id in reversed(IDS) if (one := state.erasures.of(id)) is not None), None)


def erased(kafka: Kafka, state: State, files: tuple[File, ...], only: str = "") -> set[Row]:
    """The rows of some files that an erasure is of; `only`: of one request."""
    return {row for f in files for row in f.rows if is_erased(kafka, state, f.hour, row, only)}


def is_erased(kafka: Kafka, state: State, hour: str, row: Row, only: str = "") -> bool:
    """Whether an erasure is of a record in an hour."""
    cut = state.cuts.get(hour)
    topic_id = cut.topic_id if cut is not None else state.position.topic_id
    covering = state.erasures.covering(hour, topic_id, {row[0]: (row[1], row[1] + 1)})
    return row[2] in kafka.personal and any(only in ("", one.id) for one in covering)


def new_erasure(kafka: Kafka, state: State) -> Erasure:
    """The request of what is to be erased, by a version of the table."""
    ends = {p: len(records) for p, records in enumerate(kafka.log)}
    id = next(id for id in IDS if state.erasures.of(id) is None)
    return Erasure(id, "id", NOW, NOW, state.timeline.since, kafka.id, ends)


def held_hours(world: World, lake: Lake, one: Erasure) -> str | None:
    """Return what of the request is held in a version of the table, as the command finds it."""
    return erasure.held_against(lake.state, one, hours_with(world, lake, one), world.kafka.now)


def hours_with(world: World, lake: Lake, one: Erasure) -> set[str]:
    """The hours that have such records on a branch, of rows or of dead letters."""
    tables = [lake] if world.letters is None else [lake, world.letters]
    files = {f for table in tables for branch in BRANCHES for f in table.files(branch)}
    state, hours = lake.state, set[str]()
    for f in files:
        topic_id = erasure.log_of(state, f.hour)
        for p, o, number in f.rows:
            begin, end = one.offsets(f.hour, topic_id, p)
            if number in world.kafka.personal and begin <= o < end:
                hours.add(f.hour)
    return hours


def unread_hours(world: World) -> set[str]:
    """The hours of records with such values that no layer has read, by their timestamps."""
    read = world.lake.state.position.offsets
    return {
        hour_of(datetime.fromtimestamp(record.stamp / 1000, UTC))
        for p, records in enumerate(world.kafka.log)
        for o, record in enumerate(records)
        if record.number in world.kafka.personal and o >= read.get(p, 0)
    }


@dataclass(frozen=True)
class Holder(Publisher):
    """`anabranch hold`: one hour, once."""

    at: str = "idle"
    hour: str = ""
    is_done: bool = False
    nesting: ClassVar[tuple[str, ...]] = ("idle",)

    def kept(self) -> dict[str, Any]:
        return {"hour": self.hour}

    def idle(self, world: World) -> Iterator[Step]:
        if not self.is_done:
            yield "decides to keep an hour", world, replace(self, at="hold", lake=world.lake)

    def hold(self, world: World) -> Iterator[Step]:
        assert self.lake is not None
        act = Act("hold", "ada", "host", NOW, "case 7")
        holds = acts.plan_hold(self.lake.state, self.hour, self.hour, act, release=False)
        if holds is None:
            yield "finds it kept", world, replace(self, at="idle", lake=None, is_done=True)
            return
        publish = acts.plan_held(self.lake.state, holds, self.hour, self.hour, act, self.id, NOW)
        yield from self.publish(world, self.confirming(publish))

    def landed(self) -> Publisher:
        return replace(self, at="idle", lake=None, is_done=True)

    def refused(self) -> Publisher:
        return replace(self, at="idle", lake=None)


@dataclass(frozen=True)
class Eraser(Publisher):
    """`anabranch erase`, which finds personal records: rows by their hashes, dead letters by a
    search. `again`: with a request of those that arrived since. `former`: an hour of which former
    snapshots alone have some."""

    at: str = "idle"
    again: bool = False
    former: str = ""
    began: timedelta = timedelta(0)
    done: tuple[tuple[File, File | None], ...] = ()
    found: tuple[tuple[str, tuple[Row, ...]], ...] = field(default=())
    nesting: ClassVar[tuple[str, ...]] = ("idle",)

    def kept(self) -> dict[str, Any]:
        return {"again": self.again, "former": self.former}

    def idle(self, world: World) -> Iterator[Step]:
        state = world.lake.state
        fresh = replace(self, lake=world.lake, letters=None, done=(), found=())
        one = newest(state)
        if merge.needs_merge(state):
            yield "has to merge", world, replace(self, at="merge", back="idle")
        elif one is None and state.holds.holds and is_waiting(world):
            yield "has something to finish", world, self.finishing()
        elif one is None:
            if held_hours(world, world.lake, new_erasure(world.kafka, state)) is None:
                yield (
                    "asks for what is to be erased",
                    world,
                    replace(fresh, at="request", kafka=world.kafka),
                )
        elif one.done is not None and self.again and has_more(world.kafka, state):
            yield "asks again", world, replace(fresh, at="request", kafka=world.kafka)
        elif one.done is None and is_waiting(world):
            yield "has something to finish", world, self.finishing()
        elif one.done is None and self.has_work(world, one):
            yield "loads the table", world, replace(fresh, at="search")

    def has_work(self, world: World, one: Erasure) -> bool:
        """Whether another try gets further; else it waits for the layers to read."""
        state = world.lake.state
        letters = world.letters.held if world.letters is not None else frozenset()
        files = {f for branch in BRANCHES for f in world.lake.files(branch)} | letters
        return erasure.is_read(state, one) or bool(erased(world.kafka, state, tuple(files)))

    def request(self, world: World) -> Iterator[Step]:
        assert self.lake is not None and self.kafka is not None
        publish = erasure.plan_request(
            self.lake.state, new_erasure(self.kafka, self.lake.state), self.id
        )
        assert publish is not None
        yield from self.publish(world, self.confirming(publish))

    def search(self, world: World) -> Iterator[Step]:
        """Find what is left, by the table that was loaded and the dead letters after it."""
        assert self.lake is not None
        state, letters = self.lake.state, world.letters
        files = tuple(
            sorted({f for b in BRANCHES for f in self.lake.files(b)}, key=lambda f: f.file_path)
        )
        if rewritten := self.rewriting(world, files):
            new = tuple(f for _, f in rewritten if f is not None)
            begun = replace(self, at="swap_rows", done=rewritten, began=world.age)
            yield f"writes {[*new]} without erased rows", world.write(new), begun
            return
        loaded = replace(self, letters=letters, began=world.age)
        if letters is not None:
            files = tuple(
                sorted({f for b in BRANCHES for f in letters.files(b)}, key=lambda f: f.file_path)
            )
            if rewritten := self.rewriting(world, files):
                of_hours = Counter[str]()
                found: dict[str, set[Row]] = {}
                for f in (f for f, _ in rewritten):
                    found.setdefault(f.hour, set()).update(erased(world.kafka, state, (f,)))
                new_places = {h: self.unplaced(world, h, rows) for h, rows in found.items()}
                new_places = {h: rows for h, rows in new_places.items() if rows}
                of_hours.update({h: len(rows) for h, rows in new_places.items()})
                if new_places:
                    by_hour = tuple(
                        (h, tuple(sorted(rows))) for h, rows in sorted(new_places.items())
                    )
                    yield (
                        f"finds dead letters {dict(of_hours)}",
                        world,
                        replace(self, at="place", found=by_hour),
                    )
                    return
                new = tuple(f for _, f in rewritten if f is not None)
                yield (
                    "writes dead letters",
                    world.write(new),
                    replace(loaded, at="swap_letters", done=rewritten),
                )
                return
        one = newest(state)
        assert one is not None
        outstanding = letters is not None and any(
            dead_letters.is_due(state, item) and not dead_letters.is_done(letters.table, item)
            for item in state.dead_letters
        )
        if erasure.is_read(state, one) and not outstanding:
            if self.former and not is_recorded(world, state, one, self.former):
                yield "finds files of former snapshots", world, replace(self, at="unserved")
            else:
                yield "finds nothing left", world, replace(self, at="finish")
        else:
            yield "waits for the layers to read", world, self.restarted()

    def rewriting(
        self, world: World, files: tuple[File, ...]
    ) -> tuple[tuple[File, File | None], ...]:
        assert self.lake is not None
        done: list[tuple[File, File | None]] = []
        for f in files:
            gone = erased(world.kafka, self.lake.state, (f,))
            if not gone:
                continue
            left = tuple(row for row in f.rows if row not in gone)
            path = f"{world.new_id(self.name)}/{f.file_path.replace('/', '-')}"
            done.append(
                (f, replace(f, file_path=path, rows=left, written=world.age) if left else None)
            )
        return tuple(done)

    def unplaced(self, world: World, hour: str, rows: set[Row]) -> set[Row]:
        """The dead letters of an hour whose places are not known."""
        assert self.lake is not None
        known = erasure.places_of(
            ledger.with_waiting(self.lake.state, hour, world.recorded(hour))
        ).get(hour, set())
        return {row for row in rows if row[:2] not in known}

    @property
    def rewritten(self) -> Mapping[str, Any]:
        return {old.file_path: new for old, new in self.done}

    def decisions(
        self, world: World, found: Mapping[str, set[Row]], dead: bool
    ) -> tuple[LedgerRow, ...]:
        assert self.lake is not None
        state, one = self.lake.state, newest(self.lake.state)
        assert one is not None
        rows = []
        for hour, of_hour in sorted(found.items()):
            counts = dict(Counter(p for p, _, _ in of_hour))
            places = {row[:2] for row in of_hour} if dead else set()
            row = ledger.newest(ledger.with_waiting(state, hour, world.recorded(hour))).get(hour)
            before = row if state.is_accepted(hour) else None
            account = erasure.plan_account(before, {} if dead else counts, counts if dead else {})
            said = erasure.erased_of_hour(one, {} if dead else counts, places)
            rows.append(
                ledger.decision(
                    hour, "erased", 0, None, NOW, f"{self.id}-{hour}", account=account, erasure=said
                )
            )  # fmt: skip
        return tuple(rows)

    def swap_rows(self, world: World) -> Iterator[Step]:
        assert self.lake is not None
        state = self.lake.state
        one = newest(state)
        assert one is not None
        found: dict[str, set[Row]] = {}
        for hour in {f.hour for f, _ in self.done}:
            branch = "batch" if state.is_accepted(hour) else "speed"
            found[hour] = erased(world.kafka, state, self.lake.files_of(branch, hour))
        there: Any = {b: self.lake.files_by_hour(b) for b in BRANCHES}
        decisions = self.decisions(world, found, dead=False)
        publish = erasure.plan_rewrite(
            state, one, self.rewritten, there, decisions, self.id, NOW + self.began, NOW + world.age
        )
        if publish is None:
            yield "gives its files up", world, self.restarted()
        else:
            yield from self.publish(world, self.confirming(publish))

    def place(self, world: World) -> Iterator[Step]:
        assert self.lake is not None
        one = newest(self.lake.state)
        assert one is not None
        decisions = self.decisions(world, {hour: set(rows) for hour, rows in self.found}, dead=True)
        publish = erasure.plan_places(self.lake.state, one, decisions, self.id)
        yield from self.publish(world, self.confirming(publish))

    def swap_letters(self, world: World) -> Iterator[Step]:
        assert self.letters is not None and self.lake is not None
        there: Any = {b: self.letters.files_by_hour(b) for b in BRANCHES}
        id = self.letters.new_id(f"{self.name}-{self.at}")
        began, now = NOW + self.began, NOW + world.age
        commit = erasure.plan_letters(
            self.letters.table, self.lake.state, self.rewritten, there, id, began, now
        )  # fmt: skip
        after = (
            world.commit_letters(self.letters, commit, self.stamped(world))
            if commit is not None
            else None
        )
        if after is None:
            yield "is refused with dead letters", world, self.restarted()
        else:
            after = replace(
                after, storage=after.storage | {f for _, f in self.done if f is not None}
            )
            yield "erases dead letters", after, self.restarted()

    def unserved(self, world: World) -> Iterator[Step]:
        assert self.lake is not None
        state, one = self.lake.state, newest(self.lake.state)
        assert one is not None
        decisions = self.decisions(world, {self.former: set()}, dead=False)
        yield from self.publish(
            world, self.confirming(erasure.plan_unserved(state, one, decisions, self.id, NOW))
        )

    def finish(self, world: World) -> Iterator[Step]:
        assert self.lake is not None
        one = newest(self.lake.state)
        assert one is not None
        yield from self.publish(world, self.confirming(self.finishing_publish(one)))

    def finishing_publish(self, one: Erasure) -> Publish:
        assert self.lake is not None
        return erasure.plan_done(self.lake.state, one, self.id, NOW)

    def landed(self) -> Publisher:
        return replace(self, at="idle", lake=None, kafka=None, done=(), found=())

    def refused(self) -> Publisher:
        return replace(self, at="idle", lake=None, kafka=None, done=(), found=())


def has_more(kafka: Kafka, state: State) -> bool:
    """Whether Kafka has such records that no request is of."""
    one = newest(state)
    return (
        one is not None
        and one.id != IDS[-1]
        and any(
            record.number in kafka.personal and o >= one.ends.get(p, 0)
            for p, records in enumerate(kafka.log)
            for o, record in enumerate(records)
        )
    )


def is_recorded(world: World, state: State, one: Erasure, hour: str) -> bool:
    """Whether the ledger has, or is about to have, the files of former snapshots in an hour."""
    rows = [
        row.erasure
        for row in ledger.with_waiting(state, hour, world.recorded(hour))
        if row.erasure is not None
    ]
    return any(said["id"] == one.id and said.get(erasure.UNSERVED) for said in rows)


def held(world: World, lake: Lake, only: str) -> dict[tuple[str, Row], str]:
    """The records that a request of a version is of and that a branch has, or a publish names: each
    with where."""
    state, where = lake.state, dict[tuple[str, Row], str]()
    tables = [lake] if world.letters is None else [lake, world.letters]
    for table in tables:
        for branch in BRANCHES:
            for row in erased(world.kafka, state, table.files(branch), only):
                where["rows" if table is lake else "dead letters", row] = branch
    if world.letters is not None:
        outstanding = [
            item
            for item in state.dead_letters
            if dead_letters.is_due(state, item)
            and not dead_letters.is_done(world.letters.table, item)
        ]
        named = {path for item in outstanding for path in item["paths"]}
        files = tuple(f for f in world.storage if f.file_path in named)
        for row in erased(world.kafka, state, files, only):
            where["dead letters", row] = "a publish"
    return where


def check(before: World, after: World) -> None:
    """Nothing that was erased comes back. Raises Violation."""
    for one in after.lake.state.erasures.all:
        if not after.restored:
            _check_one(before, after, one)


def _check_one(before: World, after: World, one: Erasure) -> None:
    if before.lake.state.erasures.of(one.id) is None:
        hours = hours_with(before, before.lake, one) | unread_hours(before)
        if held_ones := {hour for hour in hours if before.lake.state.holds.of(hour) is not None}:
            raise Violation(
                f"an erasure was requested while {sorted(held_ones)}, which have its records, "
                "were kept"
            )
        return
    left = held(after, after.lake, one.id)
    if one.done is not None and left:
        raise Violation(f"the erasure is done, and there are still {left}")
    if before.lake is after.lake and before.letters is after.letters:
        return
    known = {row[:2] for _, row in held(before, before.lake, one.id)}
    state = after.lake.state
    placed = {
        (hour, *place)
        for hour, places in erasure.places_of(_all_rows(after, state)).items()
        for place in places
    }
    back = {
        (what, row): where
        for (what, row), where in left.items()
        if row[:2] not in known
        and (what == "rows" or any(place[1:] == row[:2] for place in placed))
    }
    if back:
        raise Violation(f"records that were erased are back: {back}")


def _all_rows(world: World, state: State) -> list[LedgerRow]:
    hours = sorted(set(state.cuts) | {state.timeline.open} | {row.hour for row in state.decisions})
    return [row for h in hours for row in ledger.with_waiting(state, h, world.recorded(h))]


def check_rest(world: World) -> None:
    """Check that every erasure is done, at rest. Raises Violation."""
    for one in world.lake.state.erasures.all:
        if one.done is None:
            raise Violation(
                f"at rest, the erasure is not done: {held(world, world.lake, one.id)} are left"
            )
