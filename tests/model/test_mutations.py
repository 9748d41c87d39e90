"""The model has teeth: when a decision of the product is taken out, the exploration finds what it
was there for."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any

import layers
import pytest
from actors import NIGHT, NOW, Actor, Expiry, Maintenance, Network, Nights, Operator, Publisher
from budget import FULL
from eraser import Eraser
from exploration import explore, forget, settle
from importer import Importer, Undoer
from layers import Batch, RollUp, Speed
from pyiceberg.table import Table
from settings import (
    ACCEPTED,
    ACCEPTED_ON_MAIN,
    ACCEPTS,
    ACCOUNTS,
    ADOPTED,
    ADOPTER,
    AN_EMPTY_HOUR,
    ANOTHER_NAMED,
    APART,
    AS_SNAPSHOT,
    BACK,
    BATCH,
    BOTH_ACCEPTED,
    BY_THREE,
    CRASH,
    DEAD_PERSONAL_ACCEPTED,
    EARLY,
    ERASER,
    EXPIRY,
    H0,
    H0_IS_BAD,
    H1,
    IMPORTER,
    IMPORTS_ONE,
    KEEPS,
    LATE,
    LOSES_ITS_END,
    MAINTENANCE,
    MALFORMED,
    MALFORMED_PERSONAL,
    NETWORK,
    ONE_DEAD_OF_THREE,
    ONE_HOUR,
    ONE_READ,
    ORPHANS,
    OTHER,
    OVER,
    OVER_AND_READ,
    PAST_BOTH,
    PERSONAL,
    READ,
    READ_BY_THREE,
    READ_BY_TWO,
    RECORD,
    REFUSED_AND_UNREAD,
    RESTATES,
    RETENTION,
    ROLLUP,
    SPEED,
    STAMPED,
    THREE_RECORDS,
    TO_SPEED,
    TRUNCATED,
    TWO_HOURS,
    TWO_READ,
    broker,
)
from small_world import Lake, Violation, World, new_world
from values import replace

from anabranch.iceberg import clock, prepare, snapshots, state_properties
from anabranch.iceberg.commits import Change, Commit
from anabranch.iceberg.snapshots import BRANCHES, published_since, staged_snapshot
from anabranch.lifecycle import maintenance
from anabranch.offsets import hours
from anabranch.offsets.position import Position, RangeRelation
from anabranch.protocol import (
    dead_letters,
    erasure,
    imported,
    ledger,
    merge,
    publish,
    publish_queue,
    state,
    topic_change,
    watermarks,
)
from anabranch.protocol.publish import Publish
from anabranch.protocol.registers import Expired
from anabranch.protocol.state import POSITION, Confirmed, State
from batch_layer import balance
from batch_layer import plan as batch_plan
from speed_layer import compaction
from speed_layer import plan as speed_plan

Decision = tuple[Any, str, Callable[[Any], Any]]


@dataclass(frozen=True)
class Mutant:
    """A decision (its module, name, and what takes its place) with what the exploration finds
    without it, and who has to take part for that to show. `also`: decisions that guard the same a
    second time."""

    decision: tuple[Any, str, Callable[[Any], Any], str]
    actors: tuple[Actor, ...]
    before: tuple[Actor, ...] = ()
    world: Mapping[str, Any] = field(default_factory=dict)
    also: tuple[Decision, ...] = ()

    def explore(self) -> None:
        forget()
        explore(settle(new_world(**self.world), *self.before), self.actors)


def undoing_batch_alone(real: Callable[..., Any]) -> Callable[..., Any]:
    def plan_undo(*given: Any) -> Any:
        publish = real(*given)
        changes = (replace(c, clear=()) if c.branch == "main" else c for c in publish.changes)
        return replace(publish, changes=tuple(changes))

    return plan_undo


def requiring_no_head(real: Callable[..., Commit]) -> Callable[..., Commit]:
    return lambda *given: replace(real(*given), heads={})


def expiring_outside_a_publish(real: Callable[..., Commit]) -> Callable[..., Commit]:
    def to_commit(state: Any, planned: Any, now: datetime) -> Commit:
        commit = real(state, planned, now)
        # Nor does the removal of orphans move a head: it would stop in time who had decided before.
        of_maintenance = "expire" in commit.id or "fence" in commit.id
        return replace(commit, changes=(), heads={}) if of_maintenance else commit

    return to_commit


def without_floor(real: Callable[..., int]) -> Callable[..., int]:
    return lambda record, stable_end, floor, now: real(record, stable_end, 0, now)


def below_the_position(real: Callable[..., Any]) -> Callable[..., Any]:
    return lambda timeline, position, *rest: real(timeline, dict.fromkeys(position, 0), *rest)


def skipping_blindly(real: Callable[..., Any]) -> Callable[..., Any]:
    def plan_skip(decided: Any, skip: Any, *rest: Any) -> Any:
        return Publish(rest[0], (Change("speed"),), decided.timeline, Position("t", skip.to))

    return plan_skip


def forgetting_what_was_kept(real: Callable[..., Change]) -> Callable[..., Change]:
    return lambda swaps: replace(real(swaps), properties={})


def needed_by_heads_alone(real: Callable[..., Any]) -> Callable[..., Any]:
    return lambda table, commit, needed, summaries: state_properties.plan_unused(
        table.metadata.properties, needed, summaries
    )


def removing_whatever_it_requires(real: Callable[..., Any]) -> Callable[..., Any]:
    def unused_properties(table: Any, commit: Commit, *rest: Any) -> Any:
        return real(
            table, replace(commit, heads=snapshots.heads(table), changes=(Change("main"),)), *rest
        )

    return unused_properties


def looking_once(real: Callable[..., Any]) -> Callable[..., Any]:
    landed, never = prepare.CommitFate.LANDED, prepare.CommitFate.NEVER
    return lambda *given: landed if real(*given) is landed else never


def listing_none(real: Callable[..., tuple[Change, ...]]) -> Callable[..., tuple[Change, ...]]:
    return lambda state: real(replace(state, accepted={}))


def over_batch(real: Callable[..., Commit]) -> Callable[..., Commit]:
    return lambda *given: replace(real(*given), changes=(Change("batch"),))


def without_a_look(real: Callable[..., Any]) -> Callable[..., Any]:
    def plan_replacement(state: Any, done: Any, there: Any, *rest: Any) -> Any:
        return real(
            state,
            done,
            {one.file.hour: {f.file_path: f for f in one.sources} for one in done},
            *rest,
        )

    return plan_replacement


def knowing_no_expired_hour(real: Callable[..., Any]) -> Callable[..., Any]:
    """A decision by a state, or by one that was decided, in which no hour has expired."""

    def decision(first: Any, *rest: Any) -> Any:
        if isinstance(first, State):
            return real(replace(first, expired=Expired()), *rest)
        return real(replace(first, state=replace(first.state, expired=Expired())), *rest)

    return decision


def placing_without_a_mark(real: Callable[..., Publish]) -> Callable[..., Publish]:
    """The places are recorded, and nothing that was staged without them is staged again."""

    def plan_places(state: State, erasure: Any, decisions: Any, id: str) -> Publish:
        return replace(real(state, erasure, (), id), decisions=tuple(decisions))

    return plan_places


def without_what_waits(real: Callable[..., Any]) -> Callable[..., Any]:
    return lambda state, hour, recorded: real(replace(state, decisions=()), hour, recorded)


def leaving_all_to_gaps(real: Callable[..., Any]) -> Callable[..., Any]:
    return lambda lost, gaps, before, erased: ({}, lost, gaps)


def deleting_at_once(real: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self, world: iter(
        [("moves no head", world, replace(self, at="remove", lake=None))]
    )


def of_the_first_file(real: Callable[..., Any]) -> Callable[..., Any]:
    return lambda path, files, written: real(path, files[:1], written)


def since_the_last_task(real: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self, written, world: replace(written, began=NOW + world.age)


def since_its_turn(real: Callable[..., Any]) -> Callable[..., Any]:
    def done(self: Any) -> Any:
        after = real(self)
        if self.ahead is None:
            return after
        return replace(after, staged=replace(after.staged, began=NOW + 2 * NIGHT))

    return done


def as_compared_before(real: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self, world: self.clock


def deleting_files(real: Callable[..., Any]) -> Callable[..., Any]:
    return lambda world, written: replace(world, storage=world.storage - set(written.files))


def of_every_try(real: Callable[..., Any]) -> Callable[..., Any]:
    return lambda files, left: (*files, *left)


def always(value: Any) -> Callable[[Any], Any]:
    return lambda real: lambda *given, **named: value


def nights(speed: Actor, runs: int = 2) -> tuple[Actor, ...]:
    """A speed layer that may sleep anywhere, and orphan removal."""
    return speed, Nights(runs=runs), Maintenance("maintenance", later=timedelta(0))


def speeds(one: int = 1, other: int = 1) -> tuple[Actor, ...]:
    return Speed("speed", at_most=one), Speed("rival", at_most=other)


def reading_nothing_held(real: Callable[..., Any]) -> Callable[..., Any]:
    def held_against(state: State, erasure: Any, hours: Any, now: Any) -> str | None:
        return real(state, erasure, hours, now) if hours else None

    return held_against


def holding_again(real: Callable[..., Any]) -> Callable[..., Any]:
    return lambda line, waited, has_yielded: real(line, waited, False)


def writing_all(real: Callable[..., Any]) -> Callable[..., Any]:
    return lambda wanted, known: list(wanted.values())


def confirming_at_once(real: Callable[..., Commit]) -> Callable[..., Commit]:
    def to_commit(state: Any, planned: Publish, now: datetime) -> Commit:
        return real(
            state,
            replace(
                planned, confirmed=Confirmed(frozenset(d.decision_id for d in state.decisions))
            ),
            now,
        )

    return to_commit


def as_one(real: Callable[..., Confirmed]) -> Callable[..., Confirmed]:
    def union(self: Confirmed, other: Confirmed) -> Confirmed:
        ids = self.decisions | self.letters | other.decisions | other.letters
        return Confirmed(ids, ids)

    return union


def naming_no_letters(real: Callable[..., Publish]) -> Callable[..., Publish]:
    return lambda *given: replace(real(*given), dead_letters=())


def naming_nothing_staged(real: Callable[..., Publish]) -> Callable[..., Publish]:
    return lambda *given, **named: replace(real(*given, **named), staged={})


def by_what_was_seen(real: Callable[..., Any]) -> Callable[..., Any]:
    def judge_letters(self: Any, world: Any) -> Any:
        return iter(
            [("trusts what it saw", world, replace(self, at="send_letters", decided_by=self.seen))]
        )

    return judge_letters


def without_waiting(real: Callable[..., Any]) -> Callable[..., Any]:
    return lambda table, state, *rest: real(table, replace(state, dead_letters=()), *rest)


def from_the_beginning(real: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *given: dict.fromkeys(begins, 0) if (begins := real(*given)) is not None else None


def forgetting_ends(real: Callable[..., Any]) -> Callable[..., Any]:
    return lambda adoptions: tuple(replace(a, ended={}) for a in real(adoptions))


def by_the_position_alone(real: Callable[..., Any]) -> Callable[..., Any]:
    return lambda state: int(published_since(state.table, "speed", POSITION).timestamp() * 1000)


def concluding_control(real: Callable[..., Any]) -> Callable[..., Any]:
    """Return a control that takes what a reader is not given for control records, as it is in most
    topics."""
    return lambda missing, seen: {"control": {p: n for p, n in missing.items() if n}}


def without_tags(real: Callable[..., Any]) -> Callable[..., Any]:
    def plan_expiry(table: Any, *rest: Any, **named: Any) -> Any:
        branches = {name: ref for name, ref in table.metadata.refs.items() if name in BRANCHES}
        metadata = table.metadata.model_copy(update={"refs": branches})
        return real(Table(table.name(), metadata, "", table.io, table.catalog), *rest, **named)

    return plan_expiry


# Three records, served by the speed layer, of which the last ends a transaction.
SERVED_WITH_A_MARKER = (
    broker(RECORD, RECORD, ("end transaction", 0), ("tick", 60)),
    READ_BY_THREE,
)
AHEAD = (timedelta(minutes=10), timedelta(0))


def without_the_position(real: Callable[..., str | None]) -> Callable[..., str | None]:
    return lambda state, by_speed, lacking: real(state, [], lacking)


def counting_what_is_sealed(real: Callable[..., str | None]) -> Callable[..., str | None]:
    return lambda state: (
        hours.shift(state.timeline.open, -1) if state.timeline.open > state.timeline.first else None
    )


# A publish would be refused all the same.
UNCHECKED = ((Lake, "has_staged", always(True)),)

GONE, TWICE, LACKS = "which storage does not have", "more than once", "main lacks"
LETTERS_LACK = "dead letters lack"

MUTANTS = {
    "the position check": Mutant(
        (speed_plan, "classify", always(RangeRelation.ADJACENT), LACKS),
        (broker(RECORD, RECORD, ("restore",), RECORD), SPEED),
    ),
    "the trim of an overlapping range": Mutant(
        (speed_plan, "trim", lambda real: lambda ranges, position: ranges, TWICE),
        (broker(RECORD, RECORD), *speeds(1, 2)),
    ),
    "the heads that a publish requires": Mutant(
        (publish, "to_commit", requiring_no_head, "the position moved back"),
        (broker(RECORD, RECORD), *speeds()),
    ),
    "the position before an hour is fresh": Mutant(
        (watermarks, "_last_complete", without_the_position, "fresh through"),
        (broker(*ONE_HOUR), SPEED, BATCH),
    ),
    "acceptance before an hour is complete": Mutant(
        (watermarks, "complete_through", counting_what_is_sealed, "complete through"),
        (broker(*ONE_HOUR), SPEED, BATCH),
    ),
    "the cut's clamp": Mutant(
        (hours, "plan_boundary", without_floor, "is accepted as {0: (0, 0)}, main serves"),
        (broker(("record", 0, 45), ("tick", 60)), SPEED, BATCH),
    ),
    "the position under the cut": Mutant(
        (hours, "plan_boundaries", below_the_position, "is accepted as {0: (0, 0)}, main serves"),
        (broker(("record", 0, 45), ("tick", 60)), SPEED, BATCH),
    ),
    "the speed layer's look for what it staged": Mutant(
        (speed_plan, "_still_exists", always(True), GONE),
        (broker(RECORD), AS_SNAPSHOT, MAINTENANCE),
        world=ORPHANS,
        also=UNCHECKED,
    ),
    "the age of an hour whose dead letters expire apart from its rows": Mutant(
        (
            batch_plan,
            "is_staged",
            lambda real: lambda table, id, now: staged_snapshot(table, id) is not None,
            "main and its dead letters have []",
        ),
        (BATCH, Nights(runs=2), Maintenance("maintenance", later=timedelta(0), fails=True)),
        before=(broker(MALFORMED, ("tick", 60)),),
        world=ACCOUNTS,
    ),
    "the age of files that nothing refers to": Mutant(
        (speed_plan, "is_young", always(True), GONE),
        (broker(RECORD), *nights(SPEED)),
        world=ORPHANS,
    ),
    "a clock that is read after the heads": Mutant(
        (Speed, "compared_after", as_compared_before, GONE),
        (broker(RECORD), *nights(SPEED)),
        world=ORPHANS,
        also=((Speed, "compared_before", lambda real: lambda self, world: world.age),),
    ),
    "an age that counts from before the first task": Mutant(
        (Speed, "heard", since_the_last_task, GONE), (broker(RECORD), *nights(SPEED)), world=ORPHANS
    ),
    "the age of files that were staged ahead": Mutant(
        (Speed, "done", since_its_turn, GONE),
        (broker(RECORD, RECORD), *nights(EARLY)),
        world=ORPHANS,
    ),
    "the head that moves before files of the speed layer are deleted": Mutant(
        (Maintenance, "fence", deleting_at_once, GONE),
        (broker(RECORD), *nights(SPEED)),
        world=ORPHANS,
    ),
    "files that are left although their offsets are published": Mutant(
        (World, "leave", deleting_files, GONE), (broker(RECORD), SPEED), world={"wrong_answers": 1}
    ),
    "files that are left although their publish seems to have failed": Mutant(
        (World, "leave", deleting_files, GONE),
        (broker(RECORD), SPEED, NETWORK),
        world=LATE,
        also=((prepare, "classify_commit", looking_once),),
    ),
    "the files of one try of each task": Mutant(
        (layers, "of_one_try", of_every_try, TWICE),
        (broker(RECORD), SPEED),
        world=ORPHANS | {"retries": 1},
    ),
    "the batch layer's look for what it staged": Mutant(
        (batch_plan, "is_staged", always(True), GONE),
        (broker(*ONE_HOUR), BATCH, MAINTENANCE),
        world=ORPHANS,
        also=UNCHECKED,
    ),
    "expiry inside a publish": Mutant(
        (publish, "to_commit", expiring_outside_a_publish, GONE),
        (broker(RECORD), AS_SNAPSHOT, MAINTENANCE),
        world=ORPHANS,
        also=UNCHECKED,
    ),
    "the properties of older snapshots": Mutant(
        (prepare, "unused_properties", needed_by_heads_alone, "refers to a property that is gone"),
        (broker(RECORD), SPEED),
        before=ACCEPTED,
        world=APART,
    ),
    "no property is removed but over the heads of all branches": Mutant(
        (
            prepare,
            "unused_properties",
            removing_whatever_it_requires,
            "refers to a property that is gone",
        ),
        (broker(RECORD), SPEED, TO_SPEED, MAINTENANCE),
        before=(
            broker(*ONE_HOUR),
            READ,
            ACCEPTS,
            Operator("first", wishes=((H0, "speed"), (H0, None))),
        ),
        world=APART,
        also=((publish, "to_commit", expiring_outside_a_publish),),
    ),
    "the merger's look at coverage": Mutant(
        (merge, "uncovered_reason", always(None), "main serves []"),
        (broker(*ONE_HOUR), SPEED, BATCH, TO_SPEED),
    ),
    "the hours that a merge kept": Mutant(
        (merge, "_swap", forgetting_what_was_kept, "main has [(0, 0, 0)] more than once"),
        (broker(("restore",), RECORD, ("mend",)), SPEED, BATCH),
        before=(broker(*ONE_HOUR), SPEED, Batch("before")),
        world=H0_IS_BAD,
    ),
    "the skip's look at where the table is by now": Mutant(
        (speed_plan, "plan_skip", skipping_blindly, "the position moved back"),
        (broker(RECORD), *speeds()),
        before=(broker(*ONE_HOUR), BATCH),
    ),
    "not landed only what cannot land any more": Mutant(
        (prepare, "classify_commit", looking_once, "landed, and what it names was discarded"),
        (broker(RECORD), AS_SNAPSHOT, NETWORK),
        world=LATE,
    ),
    "an empty publish that says what the newest said": Mutant(
        (prepare, "plan_fence", over_batch, "was sealed or accepted, and is no more"),
        (broker(*ONE_HOUR), SPEED, BATCH, NETWORK),
        world=LATE,
    ),
    # The next hour's job merges.
    "the state of a main that was set back": Mutant(
        (snapshots, "newest_publish", lambda real: snapshots.last_publish, "the ledger says [1]"),
        (broker(("restore", "main"), ("tick", 60)), BATCH),
        before=ACCEPTED_ON_MAIN,
        world=ACCOUNTS,
    ),
    "the hours without records that main alone lists": Mutant(
        (state, "main_only_hours", always(()), "the ledger says [1]"),
        (broker(*AN_EMPTY_HOUR), BATCH),
        world=ACCOUNTS,
    ),
    "the hours that maintenance lists on batch": Mutant(
        (maintenance, "list_on_batch", listing_none, "the ledger says [1]"),
        (MAINTENANCE,),
        before=ACCEPTED_ON_MAIN,
        world=ACCOUNTS,
    ),
    "the speed layer's wait for a turn": Mutant(
        (publish_queue, "turn_to_yield_to", always(None), "has the way, and was refused 2 times"),
        (broker(*[RECORD] * 4), SPEED, RESTATES),
        before=ACCEPTED,
        world={"turns": 1},
    ),
    "the speed layer's publish between two turns": Mutant(
        (
            publish_queue,
            "turn_to_yield_to",
            holding_again,
            "waited for 2 turns and published nothing in between",
        ),
        (broker(RECORD, RECORD), SPEED, RESTATES, MAINTENANCE),
        before=ACCEPTED,
        world={"turns": 2},
    ),
    "the bound of a turn": Mutant(
        (publish_queue, "is_over", always(False), "at rest, main lacks"),
        (broker(RECORD, RECORD), SPEED, RESTATES),
        before=ACCEPTED,
        world=CRASH | {"turns": 1},
    ),
    "a turn's end with its publish": Mutant(
        (
            publish_queue,
            "plan_turn_removal",
            lambda real: lambda properties, id, commit: commit,
            "were not taken back",
        ),
        (broker(RECORD, RECORD), SPEED, RESTATES),
        before=ACCEPTED,
        world={"turns": 1},
    ),
    "the hours of a look-back that are yet to be read": Mutant(
        (merge, "unread_hours", always(frozenset()), "was not compared with"),
        (SPEED, BATCH),
        before=REFUSED_AND_UNREAD,
        world=H0_IS_BAD,
    ),
    "deciding an hour again once its look-back is read": Mutant(
        (batch_plan, "plan_recheck", always({}), "have yet to be decided again"),
        (SPEED, BATCH),
        before=REFUSED_AND_UNREAD,
        world=H0_IS_BAD,
    ),
    "the hours of a micro-batch that are decided": Mutant(
        (speed_plan, "within_hours", lambda real: lambda ranges, hours: ranges, LACKS),
        (Speed("speed", at_most=3, at_once=1),),
        before=(broker(RECORD, ("tick", 210), RECORD),),
    ),
    "the look whether what was staged ahead is as decided": Mutant(
        (speed_plan, "_matches_decision", always(True), "main lacks [(0, 1)]"),
        (broker(RECORD, ("record", 0, 45), ("tick", 60)), EARLY, BATCH),
    ),
    "the roll-up's look whether its files are still there": Mutant(
        (compaction, "plan_replacement", without_a_look, TWICE),
        (ROLLUP, RollUp("rival")),
        before=TWO_READ,
    ),
    "a file of those that are rolled up": Mutant(
        (layers, "rolled_up", of_the_first_file, LACKS), (ROLLUP,), before=TWO_READ
    ),
    "the age of a file that is rolled up": Mutant(
        (compaction, "is_stale", always(False), GONE),
        (ROLLUP, MAINTENANCE),
        before=TWO_READ,
        world=ORPHANS,
    ),
    "the head that moves before orphans are deleted": Mutant(
        (Maintenance, "fence", deleting_at_once, GONE),
        (ROLLUP, MAINTENANCE),
        before=TWO_READ,
        world=ORPHANS,
    ),
    "the ledger's look": Mutant(
        (ledger, "plan_missing", writing_all, "the ledger has"),
        (BATCH,),
        before=OVER,
        world=ACCOUNTS,
    ),
    "decisions that wait until they are read back": Mutant(
        (publish, "to_commit", confirming_at_once, "is sealed, the ledger says so 0 times"),
        (broker(RECORD), SPEED, BATCH),
        before=OVER,
        world=ACCOUNTS,
    ),
    "the ids of decisions apart from those of dead letters": Mutant(
        (Confirmed, "__or__", as_one, "no actor ever comes to rest"),
        (BATCH,),
        before=OVER,
        world=ACCOUNTS,
    ),
    "the dead letters that a publish names": Mutant(
        (speed_plan, "plan_publish", naming_no_letters, LETTERS_LACK),
        (broker(MALFORMED), SPEED),
        world=ACCOUNTS,
    ),
    "the dead letters' look whether they are done": Mutant(
        (dead_letters, "is_done", always(False), TWICE),
        (broker(MALFORMED), SPEED),
        world=ACCOUNTS | {"answers_to_lose": 1},
    ),
    "the ids that the dead letters' table remembers": Mutant(
        (dead_letters, "remembered_ids", always([]), TWICE),
        (broker(MALFORMED), SPEED),
        world=ACCOUNTS | {"answers_to_lose": 1},
    ),
    "dead letters that are done and forgotten": Mutant(
        (dead_letters, "is_due", always(True), TWICE),
        (broker(MALFORMED, MALFORMED), SPEED, BATCH),
        world=ACCOUNTS,
    ),
    "the rows' state after the dead letters' table": Mutant(
        (Publisher, "judge_letters", by_what_was_seen, TWICE),
        (broker(MALFORMED, MALFORMED), SPEED, BATCH),
        world=ACCOUNTS,
    ),
    "what waits and is never expired": Mutant(
        (maintenance, "plan_dead_letters", without_waiting, LETTERS_LACK),
        (broker(MALFORMED), SPEED, MAINTENANCE),
        world=ACCOUNTS | ORPHANS,
        also=((dead_letters, "named_files", always(frozenset())),),
    ),
    "the head that moves before orphans of the dead letters are deleted": Mutant(
        (
            maintenance,
            "should_move_head",
            lambda real: lambda rows, letters: bool(rows),
            LETTERS_LACK,
        ),
        (broker(MALFORMED), SPEED, MAINTENANCE),
        world=ACCOUNTS | ORPHANS,
    ),
    "the branch that staged dead letters have": Mutant(
        (World, "protecting", always(()), LETTERS_LACK),
        (broker(MALFORMED), SPEED, Expiry("expiry", of_letters=True)),
        world=ACCOUNTS | ORPHANS,
    ),
    "the staged rows that a publish of the speed layer requires": Mutant(
        (Lake, "has_staged", always(True), GONE),
        (broker(RECORD), AS_SNAPSHOT, EXPIRY),
        world=ORPHANS,
    ),
    "the staged rows that a publish of the batch layer requires": Mutant(
        (Lake, "has_staged", always(True), GONE), (BATCH, EXPIRY), before=OVER, world=ORPHANS
    ),
    "the staged rows that the speed layer names": Mutant(
        (speed_plan, "plan_publish", naming_nothing_staged, GONE),
        (broker(RECORD), AS_SNAPSHOT, EXPIRY),
        world=ORPHANS,
    ),
    "the staged rows that the batch layer names": Mutant(
        (batch_plan, "plan_publish", naming_nothing_staged, GONE),
        (BATCH, EXPIRY),
        before=OVER,
        world=ORPHANS,
    ),
    "the revision of an hour that is forgotten": Mutant(
        (
            ledger,
            "plan_remembering",
            lambda real: lambda state, hours, read: state,
            "the ledger says [1, 2, 2]",
        ),
        (Batch("batch", restates=1, choice=(H0,)), Batch("rival", restates=3, choice=(H0, H1, H1))),
        before=PAST_BOTH,
        world=ACCOUNTS,
    ),
    "the gap that retention leaves": Mutant(
        (speed_plan, "lost_entries", always("[]"), LETTERS_LACK),
        (broker(RECORD, ("retain", 0, 1)), SPEED),
        world=ACCOUNTS,
    ),
    "what Kafka no longer gives of an hour, filled from the table": Mutant(
        (balance, "has_missing", always(False), "main served [(0, 1, 1)]"),
        (broker(("compact", 0, 1)), BY_THREE, Batch("batch", allow_gaps=("control", "compacted"))),
        before=THREE_RECORDS,
        world=ACCOUNTS,
    ),
    "how far the speed layer has read of an hour with gaps": Mutant(
        (batch_plan, "may_yet_be_served", always(frozenset()), "main served [(0, 1, 1)]"),
        (broker(("compact", 0, 1)), BY_THREE, Batch("batch", allow_gaps=("compacted",))),
        before=THREE_RECORDS,
        world=ACCOUNTS,
    ),
    "the dead letters that wait before an hour is filled": Mutant(
        (Batch, "has_letters_to_finish", always(False), "main served [(0, 1, 1)]"),
        (broker(("compact", 0, 1)), BY_THREE, Batch("batch", allow_gaps=("compacted",))),
        before=ONE_DEAD_OF_THREE,
        world=ACCOUNTS,
    ),
    "control records that are seen in the log": Mutant(
        (balance, "classify_gaps", concluding_control, "in gaps, the log has 0 control records"),
        (broker(("compact", 0, 1)), BY_THREE, Batch("batch", allow_gaps=("control",))),
        before=THREE_RECORDS,
        world=ACCOUNTS,
    ),
    "an hour whose records vanish after they were served": Mutant(
        (balance, "classify_gaps", concluding_control, "in gaps, the log has 1 control records"),
        (broker(("compact", 0, 1)), BY_THREE, Batch("batch", allow_gaps=("control",))),
        before=SERVED_WITH_A_MARKER,
        world=ACCOUNTS,
        also=((balance, "has_missing", always(False)),),
    ),
    "where offsets begin again": Mutant(
        (topic_change, "plan_begins", from_the_beginning, TWICE),
        (SPEED, BATCH, ADOPTER),
        before=TRUNCATED,
        world=ACCOUNTS | STAMPED,
    ),
    "what Kafka cannot give any more": Mutant(
        (topic_change, "gone_from_kafka", always(None), "does not any more"),
        (broker(("adopted",), RECORD), SPEED, BATCH, ADOPTER),
        before=TRUNCATED,
        world=ACCOUNTS | STAMPED,
    ),
    "where a log that was left ends": Mutant(
        (topic_change, "plan_remembered", forgetting_ends, TWICE),
        (broker(OTHER, ADOPTED, BACK), SPEED, BATCH, ADOPTER),
        before=ONE_READ,
        world=ACCOUNTS | STAMPED,
    ),
    "when a log that comes back was published from": Mutant(
        (topic_change, "last_read_ms", by_the_position_alone, "lack"),
        (broker(BACK, *LOSES_ITS_END), BATCH, ADOPTER),
        before=ANOTHER_NAMED,
        world=ACCOUNTS | STAMPED,
    ),
    "the comparison of a clock that was set": Mutant(
        (
            clock,
            "should_compare",
            lambda real: lambda last, wall, elapsed: last is None,
            "the table is stamped",
        ),
        (broker(RECORD), Speed("speed", watched=True, jumps=AHEAD)),
        world=STAMPED,
    ),
    "the tags that keep a snapshot": Mutant(
        (publish, "plan_expiry", without_tags, "cannot be read any more"),
        (RESTATES, MAINTENANCE),
        before=ACCEPTED,
        world=STAMPED,
    ),
    "the check that a rebuilt hour has not expired": Mutant(
        (batch_plan, "check_publish", knowing_no_expired_hour, "which have expired"),
        (RESTATES, RETENTION),
        before=BOTH_ACCEPTED,
        world=ACCOUNTS,
    ),
    "what the speed layer leaves out of expired hours": Mutant(
        (speed_plan, "plan_publish", knowing_no_expired_hour, "which have expired"),
        (SPEED, BATCH, RETENTION),
        before=(broker(*TWO_HOURS),),
    ),
    "what a micro-batch is staged by, of an erasure": Mutant(
        (speed_plan, "erasure_marks", always(frozenset()), "are back"),
        (SPEED, ERASER),
        before=(broker(PERSONAL),),
        world=ACCOUNTS,
    ),
    "the age of files to import": Mutant(
        (imported, "is_young", always(True), GONE),
        (IMPORTS_ONE, Nights(runs=2), Maintenance("maintenance", later=timedelta(0))),
        before=ONE_READ,
        world=ORPHANS,
    ),
    "that an import ends where the table begins": Mutant(
        (
            imported,
            "hours_between",
            lambda real: lambda first, last: [first],
            "the table begins with",
        ),
        (IMPORTER, Importer("rival")),
        before=OVER_AND_READ,
    ),
    "that an undo clears main too": Mutant(
        (imported, "plan_undo", undoing_batch_alone, "main has rows of"),
        (Undoer("undoer"),),
        before=(broker(*ONE_HOUR), READ, Importer("imports", most=1)),
    ),
    "that imported hours are before those which batch has yet to accept": Mutant(
        (imported, "SETTLED", lambda real: "elsewhere", "not accepted"),
        (IMPORTS_ONE, BATCH),
        before=OVER_AND_READ,
    ),
    "what an hour is staged by, of an erasure": Mutant(
        (erasure, "marks_of", always(frozenset()), "are back"),
        (BATCH, ERASER),
        before=(broker(PERSONAL, ("tick", 60)), READ),
        world=ACCOUNTS,
    ),
    "rows that are staged again once dead letters are found": Mutant(
        (erasure, "plan_places", placing_without_a_mark, "0 erased"),
        (RESTATES, ERASER),
        before=DEAD_PERSONAL_ACCEPTED,
        world=ACCOUNTS,
    ),
    "records that an erasure is of and that are yet to be read": Mutant(
        (erasure, "is_read", always(True), "is done, and there are still"),
        (SPEED, ERASER),
        before=(broker(MALFORMED_PERSONAL),),
        world=ACCOUNTS,
    ),
    "hours that operators keep, with records of an erasure": Mutant(
        (erasure, "held_against", always(None), "were kept"),
        (KEEPS, ERASER),
        before=(broker(PERSONAL), READ),
        world=ACCOUNTS,
    ),
    "hours that operators keep, with records that are yet to be read": Mutant(
        (erasure, "held_against", reading_nothing_held, "were kept"),
        (SPEED, KEEPS, ERASER),
        before=(broker(PERSONAL),),
        world=ACCOUNTS,
    ),
    "places that wait for their row of the ledger": Mutant(
        (ledger, "with_waiting", without_what_waits, "erased"),
        (RESTATES, ERASER),
        before=DEAD_PERSONAL_ACCEPTED,
        world=ACCOUNTS,
    ),
    "the account of erased records that Kafka deleted": Mutant(
        (balance, "classify_erased", leaving_all_to_gaps, "is accepted with 0 erased"),
        (Batch("batch", allow_gaps=("retention",)), ERASER),
        before=(
            broker(PERSONAL, RECORD, ("tick", 60)),
            READ_BY_TWO,
            Eraser("first"),
            broker(("retain", 0, 1)),
        ),
        world=ACCOUNTS,
    ),
    "expiry by count": Mutant(
        (publish, "plan_expiry", always(()), "the table remembers"), (broker(*[RECORD] * 6), SPEED)
    ),
}


@pytest.mark.parametrize("early", [False, True])
def test_files_do_not_depend_on_an_outcome(early: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepare, "classify_commit", looking_once(prepare.classify_commit))
    actors = (broker(RECORD, RECORD), Speed("speed", early=early), Network("network"))
    explored = explore(new_world(late=True, answers_to_lose=1, crashes=1), actors)
    assert explored.saw("at last, and it lands")
    assert explored.saw("speed finds its offsets published")


@pytest.mark.parametrize("name", MUTANTS)
def test_a_decision_that_is_taken_out_is_missed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mutant = MUTANTS[name]
    if FULL:
        # Nothing is missed with the decision. `make test` explores such settings in
        # test_interleavings.py.
        mutant.explore()
    *taken_out, finds = mutant.decision
    for module, decision, instead in (taken_out, *mutant.also):
        monkeypatch.setattr(module, decision, instead(getattr(module, decision)))
    with pytest.raises(Violation) as violation:
        mutant.explore()
    assert finds in str(violation.value)
    print(violation.value)
