"""Erasure of the model: the steps of `anabranch erase`, and what it promises at every moment."""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any, ClassVar

from actors import NOW, Publisher, Step, is_waiting
from small_world import File, Kafka, Lake, Row, Violation, World, in_order
from values import replace

from anabranch.iceberg.snapshots import BRANCHES
from anabranch.offsets.hours import hour_of
from anabranch.protocol import acts, dead_letters, erasure, ledger, merge
from anabranch.protocol.ledger_row import Act, LedgerRow
from anabranch.protocol.registers import Erasure
from anabranch.protocol.state import State

Rewritten = tuple[tuple[File, File | None], ...]
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


def outstanding(state: State, letters: Lake) -> list[Mapping[str, Any]]:
    """The dead letters that a publish of rows named, and that their own table has not."""
    due = [item for item in state.dead_letters if dead_letters.is_due(state, item)]
    return [item for item in due if not dead_letters.is_done(letters.table, item)]


def unread_hours(world: World) -> set[str]:
    """The hours of records with such values that no layer has read, by their timestamps."""
    read = world.lake.state.position.offsets
    logs = [(p, o, r) for p, log in enumerate(world.kafka.log) for o, r in enumerate(log)]
    personal = [r for p, o, r in logs if r.number in world.kafka.personal and o >= read.get(p, 0)]
    return {hour_of(datetime.fromtimestamp(record.stamp / 1000, UTC)) for record in personal}


@dataclass(frozen=True)
class Holder(Publisher):
    """`anabranch hold`: one hour, once."""

    at: str = "idle"
    hour: str = ""
    is_done: bool = False
    nesting: ClassVar[tuple[str, ...]] = ("idle",)
    keeps: ClassVar[tuple[str, ...]] = ("hour",)

    def idle(self, world: World) -> Iterator[Step]:
        if not self.is_done:
            yield "decides to keep an hour", world, replace(self, at="hold", lake=world.lake)

    def hold(self, world: World) -> Iterator[Step]:
        act = Act("hold", "ada", "host", NOW, "case 7")
        holds = acts.plan_hold(self.lake.state, self.hour, self.hour, act, release=False)
        if holds is None:
            yield "finds it kept", world, replace(self, at="idle", lake=None, is_done=True)
            return
        publish = acts.plan_held(self.lake.state, holds, self.hour, self.hour, act, self.id, NOW)
        yield from self.publish(world, self.confirming(publish))

    def landed(self) -> Publisher:
        return replace(self, at="idle", lake=None, is_done=True)


@dataclass(frozen=True)
class Eraser(Publisher):
    """`anabranch erase` of personal records: rows by hashes, dead letters by a search. `again`:
    with a request of later ones. `former`: an hour of which former snapshots alone have some."""

    at: str = "idle"
    again: bool = False
    former: str = ""
    began: timedelta = timedelta(0)
    done: Rewritten = ()
    found: tuple[tuple[str, tuple[Row, ...]], ...] = field(default=())
    nesting: ClassVar[tuple[str, ...]] = ("idle",)
    keeps: ClassVar[tuple[str, ...]] = ("again", "former")

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
                then = replace(fresh, at="request", kafka=world.kafka)
                yield "asks for what is to be erased", world, then
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
        new = new_erasure(self.kafka, self.lake.state)
        publish = erasure.plan_request(self.lake.state, new, self.id)
        yield from self.publish(world, self.confirming(publish))

    def search(self, world: World) -> Iterator[Step]:
        """Find what is left, by the table that was loaded and the dead letters after it."""
        state, letters = self.lake.state, world.letters
        files = in_order({f for b in BRANCHES for f in self.lake.files(b)})
        if rewritten := self.rewriting(world, files):
            new = tuple(f for _, f in rewritten if f is not None)
            begun = replace(self, at="swap_rows", done=rewritten, began=world.age)
            yield f"writes {[*new]} without erased rows", world.write(new), begun
            return
        loaded = replace(self, letters=letters, began=world.age)
        if letters is not None:
            files = in_order({f for b in BRANCHES for f in letters.files(b)})
            if rewritten := self.rewriting(world, files):
                found: dict[str, set[Row]] = {}
                for f, _ in rewritten:
                    found.setdefault(f.hour, set()).update(erased(world.kafka, state, (f,)))
                unplaced = {h: self.unplaced(world, h, rows) for h, rows in found.items()}
                if new := {h: rows for h, rows in unplaced.items() if rows}:
                    by_hour = tuple((h, tuple(sorted(new[h]))) for h in sorted(new))
                    of_hours = {h: len(rows) for h, rows in new.items()}
                    then = replace(self, at="place", found=by_hour)
                    yield f"finds dead letters {of_hours}", world, then
                    return
                new = tuple(f for _, f in rewritten if f is not None)
                then = replace(loaded, at="swap_letters", done=rewritten)
                yield "writes dead letters", world.write(new), then
                return
        one = newest(state)
        waits = letters is not None and outstanding(state, letters)
        if erasure.is_read(state, one) and not waits:
            if self.former and not is_recorded(world, state, one, self.former):
                yield "finds files of former snapshots", world, replace(self, at="unserved")
            else:
                yield "finds nothing left", world, replace(self, at="finish")
        else:
            yield "waits for the layers to read", world, self.restarted()

    def rewriting(self, world: World, files: tuple[File, ...]) -> Rewritten:
        done = []
        for f in files:
            gone = erased(world.kafka, self.lake.state, (f,))
            if not gone:
                continue
            left = tuple(row for row in f.rows if row not in gone)
            path = f"{world.new_id(self.name)}/{f.file_path.replace('/', '-')}"
            new = replace(f, file_path=path, rows=left, written=world.age) if left else None
            done.append((f, new))
        return tuple(done)

    def unplaced(self, world: World, hour: str, rows: set[Row]) -> set[Row]:
        """The dead letters of an hour whose places are not known."""
        recorded = ledger.with_waiting(self.lake.state, hour, world.recorded(hour))
        known = erasure.places_of(recorded).get(hour, set())
        return {row for row in rows if row[:2] not in known}

    @property
    def rewritten(self) -> Mapping[str, Any]:
        return {old.file_path: new for old, new in self.done}

    def decisions(
        self, world: World, found: Mapping[str, set[Row]], dead: bool
    ) -> tuple[LedgerRow, ...]:
        state, one = self.lake.state, newest(self.lake.state)
        rows = []
        for hour, of_hour in sorted(found.items()):
            counts = dict(Counter(p for p, _, _ in of_hour))
            places = {row[:2] for row in of_hour} if dead else set()
            row = ledger.newest(ledger.with_waiting(state, hour, world.recorded(hour))).get(hour)
            before = row if state.is_accepted(hour) else None
            account = erasure.plan_account(before, {} if dead else counts, counts if dead else {})
            said = erasure.erased_of_hour(one, {} if dead else counts, places)
            id, of = f"{self.id}-{hour}", {"account": account, "erasure": said}
            rows.append(ledger.decision(hour, "erased", 0, None, NOW, id, **of))
        return tuple(rows)

    def swap_rows(self, world: World) -> Iterator[Step]:
        state = self.lake.state
        one = newest(state)
        found: dict[str, set[Row]] = {}
        for hour in {f.hour for f, _ in self.done}:
            branch = "batch" if state.is_accepted(hour) else "speed"
            found[hour] = erased(world.kafka, state, self.lake.files_of(branch, hour))
        there: Any = {b: self.lake.files_by_hour(b) for b in BRANCHES}
        decisions = self.decisions(world, found, dead=False)
        began, now = NOW + self.began, NOW + world.age
        rewritten = self.rewritten
        publish = erasure.plan_rewrite(state, one, rewritten, there, decisions, self.id, began, now)
        if publish is None:
            yield "gives its files up", world, self.restarted()
        else:
            yield from self.publish(world, self.confirming(publish))

    def place(self, world: World) -> Iterator[Step]:
        one = newest(self.lake.state)
        decisions = self.decisions(world, {hour: set(rows) for hour, rows in self.found}, dead=True)
        publish = erasure.plan_places(self.lake.state, one, decisions, self.id)
        yield from self.publish(world, self.confirming(publish))

    def swap_letters(self, world: World) -> Iterator[Step]:
        there: Any = {b: self.letters.files_by_hour(b) for b in BRANCHES}
        id = self.letters.new_id(f"{self.name}-{self.at}")
        began, now = NOW + self.began, NOW + world.age
        commit = erasure.plan_letters(
            self.letters.table, self.lake.state, self.rewritten, there, id, began, now
        )  # fmt: skip
        after = None
        if commit is not None:
            after = world.commit_letters(self.letters, commit, self.stamped(world))
        if after is None:
            yield "is refused with dead letters", world, self.restarted()
        else:
            new = {f for _, f in self.done if f is not None}
            after = replace(after, storage=after.storage | new)
            yield "erases dead letters", after, self.restarted()

    def unserved(self, world: World) -> Iterator[Step]:
        state, one = self.lake.state, newest(self.lake.state)
        decisions = self.decisions(world, {self.former: set()}, dead=False)
        publish = erasure.plan_unserved(state, one, decisions, self.id, NOW)
        yield from self.publish(world, self.confirming(publish))

    def finish(self, world: World) -> Iterator[Step]:
        one = newest(self.lake.state)
        publish = erasure.plan_done(self.lake.state, one, self.id, NOW)
        yield from self.publish(world, self.confirming(publish))

    def landed(self) -> Publisher:
        return replace(super().landed(), done=(), found=())

    refused = landed


def has_more(kafka: Kafka, state: State) -> bool:
    """Whether Kafka has such records that no request is of."""
    one = newest(state)
    if one is None or one.id == IDS[-1]:
        return False
    logs = ((p, o, record) for p, log in enumerate(kafka.log) for o, record in enumerate(log))
    return any(r.number in kafka.personal and o >= one.ends.get(p, 0) for p, o, r in logs)


def is_recorded(world: World, state: State, one: Erasure, hour: str) -> bool:
    """Whether the ledger has, or is about to have, the files of former snapshots in an hour."""
    rows = ledger.with_waiting(state, hour, world.recorded(hour))
    erasures = [row.erasure for row in rows if row.erasure is not None]
    return any(said["id"] == one.id and said.get(erasure.UNSERVED) for said in erasures)


def held(world: World, lake: Lake, only: str) -> dict[tuple[str, Row], str]:
    """The records of a version's requests that a branch has or a publish names: each with where."""
    state, where = lake.state, dict[tuple[str, Row], str]()
    tables = [lake] if world.letters is None else [lake, world.letters]
    for table in tables:
        for branch in BRANCHES:
            for row in erased(world.kafka, state, table.files(branch), only):
                where["rows" if table is lake else "dead letters", row] = branch
    if world.letters is not None:
        items = outstanding(state, world.letters)
        named = {path for item in items for path in item["paths"]}
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
            kept = f"{sorted(held_ones)}, which have its records"
            raise Violation(f"an erasure was requested while {kept}, were kept")
        return
    left = held(after, after.lake, one.id)
    if one.done is not None and left:
        raise Violation(f"the erasure is done, and there are still {left}")
    if before.lake is after.lake and before.letters is after.letters:
        return
    known = {row[:2] for _, row in held(before, before.lake, one.id)}
    state = after.lake.state
    by_hour = erasure.places_of(_all_rows(after, state)).values()
    placed = {place for places in by_hour for place in places}
    new = {(what, row): where for (what, row), where in left.items() if row[:2] not in known}
    back = {at: where for at, where in new.items() if at[0] == "rows" or at[1][:2] in placed}
    if back:
        raise Violation(f"records that were erased are back: {back}")


def _all_rows(world: World, state: State) -> list[LedgerRow]:
    hours = sorted(set(state.cuts) | {state.timeline.open} | {row.hour for row in state.decisions})
    return [row for h in hours for row in ledger.with_waiting(state, h, world.recorded(h))]


def check_rest(world: World) -> None:
    """Check that every erasure is done, at rest. Raises Violation."""
    for one in world.lake.state.erasures.all:
        if one.done is None:
            left = held(world, world.lake, one.id)
            raise Violation(f"at rest, the erasure is not done: {left} are left")
