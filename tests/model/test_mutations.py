"""The model has teeth: without a decision of the product, the exploration finds what it was for."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
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
    PERSONAL_READ,
    READ,
    READ_BY_THREE,
    RECORD,
    REFUSED_AND_UNREAD,
    RESTATES,
    RETENTION,
    ROLLUP,
    SPEED,
    STAMPED,
    THREE_RECORDS,
    TO_SPEED,
    TO_SPEED_AND_BACK,
    TRUNCATED,
    TWO_HOURS,
    TWO_READ,
    broker,
    nights,
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

Replacement = Callable[[Any], Callable[..., Any]]
Decision = tuple[Any, str, Callable[[Any], Any]]


@dataclass(frozen=True)
class Mutant:
    """A decision (module, name, what takes its place), what the exploration finds without it, and
    who must take part. `also`: decisions that guard the same a second time."""

    decision: tuple[Any, str, Callable[[Any], Any], str]
    actors: tuple[Actor, ...]
    before: tuple[Actor, ...] = ()
    world: Mapping[str, Any] = field(default_factory=dict)
    also: tuple[Decision, ...] = ()

    def explore(self) -> None:
        forget()
        explore(settle(new_world(**self.world), *self.before), self.actors)


def always(value: Any) -> Replacement:
    return lambda real: lambda *given, **named: value


def instead(other: Callable[..., Any]) -> Replacement:
    return lambda real: other


def asked(ask: Callable[..., tuple[Any, ...]]) -> Replacement:
    """The decision of what `ask` makes of its arguments."""
    return lambda real: lambda *given, **named: real(*ask(*given), **named)


def answering(change: Callable[[Any], Any]) -> Replacement:
    """The decision as `change` changes it."""
    return lambda real: lambda *given, **named: change(real(*given, **named))


def outside_a_publish(commit: Commit) -> Commit:
    # Nor does the removal of orphans move a head: it would stop in time who had decided before.
    of_maintenance = "expire" in commit.id or "fence" in commit.id
    return replace(commit, changes=(), heads={}) if of_maintenance else commit


def without_expired(first: Any, *rest: Any) -> tuple[Any, ...]:
    """A state, or one that was decided, in which no hour has expired."""
    if isinstance(first, State):
        return replace(first, expired=Expired()), *rest
    return replace(first, state=replace(first.state, expired=Expired())), *rest


def without_tags(table: Table, *rest: Any) -> tuple[Any, ...]:
    branches = {name: ref for name, ref in table.metadata.refs.items() if name in BRANCHES}
    metadata = table.metadata.model_copy(update={"refs": branches})
    return Table(table.name(), metadata, "", table.io, table.catalog), *rest


def since_its_turn(real: Callable[..., Any]) -> Callable[..., Any]:
    def done(self: Any) -> Any:
        after = real(self)
        if self.ahead is None:
            return after
        return replace(after, staged=replace(after.staged, began=NOW + 2 * NIGHT))

    return done


def placing_without_a_mark(real: Callable[..., Publish]) -> Callable[..., Publish]:
    """The places are recorded, and nothing that was staged without them is staged again."""
    return lambda state, erasure, decisions, id: replace(
        real(state, erasure, (), id), decisions=tuple(decisions)
    )


def reading_nothing_held(real: Callable[..., Any]) -> Callable[..., Any]:
    return lambda state, one, hours, now: real(state, one, hours, now) if hours else None


def all_waiting(state: State) -> Confirmed:
    return Confirmed(frozenset(d.decision_id for d in state.decisions))


def speeds(one: int = 1, other: int = 1) -> tuple[Actor, ...]:
    return Speed("speed", at_most=one), Speed("rival", at_most=other)


# What takes a decision's place.
undoing_batch_alone = answering(
    lambda publish: replace(
        publish,
        changes=tuple(replace(c, clear=()) if c.branch == "main" else c for c in publish.changes),
    )
)
requiring_no_head = answering(lambda commit: replace(commit, heads={}))
expiring_outside_a_publish = answering(outside_a_publish)
without_floor = asked(lambda record, stable_end, floor, now: (record, stable_end, 0, now))
below_the_position = asked(
    lambda timeline, position, *rest: (timeline, dict.fromkeys(position, 0), *rest)
)
skipping_blindly = instead(
    lambda decided, skip, id, *_: Publish(
        id, (Change("speed"),), decided.timeline, Position("t", skip.to)
    )
)
forgetting_what_was_kept = answering(lambda change: replace(change, properties={}))
needed_by_heads_alone = instead(
    lambda table, commit, *rest: state_properties.plan_unused(table.metadata.properties, *rest)
)
removing_whatever_it_requires = asked(
    lambda table, commit, *rest: (
        table,
        replace(commit, heads=snapshots.heads(table), changes=(Change("main"),)),
        *rest,
    )
)
looking_once = answering(
    lambda fate: fate if fate is prepare.CommitFate.LANDED else prepare.CommitFate.NEVER
)
listing_none = asked(lambda state: (replace(state, accepted={}),))
over_batch = answering(lambda commit: replace(commit, changes=(Change("batch"),)))
without_a_look = asked(
    lambda state, done, there, *rest: (
        state, done, {one.file.hour: {f.file_path: f for f in one.sources} for one in done}, *rest
    )
)  # fmt: skip
knowing_no_expired_hour = asked(without_expired)
without_what_waits = asked(lambda state, *rest: (replace(state, decisions=()), *rest))
leaving_all_to_gaps = instead(lambda lost, gaps, before, erased: ({}, lost, gaps))
deleting_at_once = instead(
    lambda self, world: iter([("moves no head", world, replace(self, at="remove", lake=None))])
)
of_the_first_file = asked(lambda path, files, written: (path, files[:1], written))
since_the_last_task = instead(lambda self, written, world: replace(written, began=NOW + world.age))
as_compared_before = instead(lambda self, world: self.clock)
deleting_files = instead(
    lambda world, written: replace(world, storage=world.storage - set(written.files))
)
of_every_try = instead(lambda files, left: (*files, *left))
holding_again = asked(lambda line, waited, has_yielded: (line, waited, False))
writing_all = instead(lambda wanted, known: [*wanted.values()])
confirming_at_once = asked(
    lambda state, planned, now: (state, replace(planned, confirmed=all_waiting(state)), now)
)
as_one = instead(
    lambda one, other: Confirmed(
        *[one.decisions | one.letters | other.decisions | other.letters] * 2
    )
)
naming_no_letters = answering(lambda publish: replace(publish, dead_letters=()))
naming_nothing_staged = answering(lambda publish: replace(publish, staged={}))
by_what_was_seen = instead(
    lambda self, world: iter(
        [("trusts what it saw", world, replace(self, at="send_letters", decided_by=self.seen))]
    )
)
without_waiting = asked(lambda table, state, *rest: (table, replace(state, dead_letters=()), *rest))
from_the_beginning = answering(
    lambda begins: dict.fromkeys(begins, 0) if begins is not None else None
)
forgetting_ends = answering(lambda adoptions: tuple(replace(a, ended={}) for a in adoptions))
by_the_position_alone = instead(
    lambda state: int(published_since(state.table, "speed", POSITION).timestamp() * 1000)
)
# A control takes all that no reader is given for control records.
concluding_control = instead(
    lambda missing, seen: {"control": {p: n for p, n in missing.items() if n}}
)
without_the_position = asked(lambda state, by_speed, lacking: (state, [], lacking))
counting_what_is_sealed = instead(
    lambda state: (
        hours.shift(state.timeline.open, -1) if state.timeline.open > state.timeline.first else None
    )
)

# Three records, served by the speed layer, of which the last ends a transaction.
MARKED = (broker(RECORD, RECORD, ("end transaction", 0), ("tick", 60)), READ_BY_THREE)
AHEAD = (timedelta(minutes=10), timedelta(0))
# A publish would be refused all the same.
UNCHECKED = ((Lake, "has_staged", always(True)),)

GONE, TWICE, LACKS = "which storage does not have", "more than once", "main lacks"
LETTERS_LACK, PROPERTY_GONE = "dead letters lack", "refers to a property that is gone"

MUTANTS = {
    "the position check": Mutant(
        (speed_plan, "classify", always(RangeRelation.ADJACENT), LACKS),
        (broker(RECORD, RECORD, ("restore",), RECORD), SPEED),
    ),
    "the trim of an overlapping range": Mutant(
        (speed_plan, "trim", instead(lambda ranges, position: ranges), TWICE),
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
        world=ORPHANS, also=UNCHECKED,
    ),
    "the age of an hour whose dead letters expire apart from its rows": Mutant(
        (batch_plan, "is_staged", instead(lambda table, id, now: staged_snapshot(table, id) is not None),
         "main and its dead letters have []"),
        (BATCH, Nights(runs=2), Maintenance("maintenance", later=timedelta(0), fails=True)),
        before=(broker(MALFORMED, ("tick", 60)),), world=ACCOUNTS,
    ),
    "the age of files that nothing refers to": Mutant(
        (speed_plan, "is_young", always(True), GONE),
        (broker(RECORD), SPEED, *nights(2)),
        world=ORPHANS,
    ),
    "a clock that is read after the heads": Mutant(
        (Speed, "compared_after", as_compared_before, GONE),
        (broker(RECORD), SPEED, *nights(2)),
        world=ORPHANS,
        also=((Speed, "compared_before", instead(lambda self, world: world.age)),),
    ),
    "an age that counts from before the first task": Mutant(
        (Speed, "heard", since_the_last_task, GONE), (broker(RECORD), SPEED, *nights(2)), world=ORPHANS
    ),
    "the age of files that were staged ahead": Mutant(
        (Speed, "done", since_its_turn, GONE),
        (broker(RECORD, RECORD), EARLY, *nights(2)),
        world=ORPHANS,
    ),
    "the head that moves before files of the speed layer are deleted": Mutant(
        (Maintenance, "fence", deleting_at_once, GONE),
        (broker(RECORD), SPEED, *nights(2)),
        world=ORPHANS,
    ),
    "files that are left although their offsets are published": Mutant(
        (World, "leave", deleting_files, GONE), (broker(RECORD), SPEED), world={"wrong_answers": 1}
    ),
    "files that are left although their publish seems to have failed": Mutant(
        (World, "leave", deleting_files, GONE),
        (broker(RECORD), SPEED, NETWORK),
        world=LATE, also=((prepare, "classify_commit", looking_once),),
    ),
    "the files of one try of each task": Mutant(
        (layers, "of_one_try", of_every_try, TWICE),
        (broker(RECORD), SPEED),
        world=ORPHANS | {"retries": 1},
    ),
    "the batch layer's look for what it staged": Mutant(
        (batch_plan, "is_staged", always(True), GONE),
        (broker(*ONE_HOUR), BATCH, MAINTENANCE),
        world=ORPHANS, also=UNCHECKED,
    ),
    "expiry inside a publish": Mutant(
        (publish, "to_commit", expiring_outside_a_publish, GONE),
        (broker(RECORD), AS_SNAPSHOT, MAINTENANCE),
        world=ORPHANS, also=UNCHECKED,
    ),
    "the properties of older snapshots": Mutant(
        (prepare, "unused_properties", needed_by_heads_alone, PROPERTY_GONE),
        (broker(RECORD), SPEED),
        before=ACCEPTED, world=APART,
    ),
    "no property is removed but over the heads of all branches": Mutant(
        (prepare, "unused_properties", removing_whatever_it_requires, PROPERTY_GONE),
        (broker(RECORD), SPEED, TO_SPEED, MAINTENANCE),
        before=(*ACCEPTED, Operator("first", wishes=TO_SPEED_AND_BACK.wishes)),
        world=APART, also=((publish, "to_commit", expiring_outside_a_publish),),
    ),
    "the merger's look at coverage": Mutant(
        (merge, "uncovered_reason", always(None), "main serves []"),
        (broker(*ONE_HOUR), SPEED, BATCH, TO_SPEED),
    ),
    "the hours that a merge kept": Mutant(
        (merge, "_swap", forgetting_what_was_kept, "main has [(0, 0, 0)] more than once"),
        (broker(("restore",), RECORD, ("mend",)), SPEED, BATCH),
        before=(broker(*ONE_HOUR), SPEED, Batch("before")), world=H0_IS_BAD,
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
        before=ACCEPTED_ON_MAIN, world=ACCOUNTS,
    ),
    "the hours without records that main alone lists": Mutant(
        (state, "main_only_hours", always(()), "the ledger says [1]"),
        (broker(*AN_EMPTY_HOUR), BATCH),
        world=ACCOUNTS,
    ),
    "the hours that maintenance lists on batch": Mutant(
        (maintenance, "list_on_batch", listing_none, "the ledger says [1]"),
        (MAINTENANCE,),
        before=ACCEPTED_ON_MAIN, world=ACCOUNTS,
    ),
    "the speed layer's wait for a turn": Mutant(
        (publish_queue, "turn_to_yield_to", always(None), "has the way, and was refused 2 times"),
        (broker(*[RECORD] * 4), SPEED, RESTATES),
        before=ACCEPTED, world={"turns": 1},
    ),
    "the speed layer's publish between two turns": Mutant(
        (publish_queue, "turn_to_yield_to", holding_again,
         "waited for 2 turns and published nothing in between"),
        (broker(RECORD, RECORD), SPEED, RESTATES, MAINTENANCE),
        before=ACCEPTED, world={"turns": 2},
    ),
    "the bound of a turn": Mutant(
        (publish_queue, "is_over", always(False), "at rest, main lacks"),
        (broker(RECORD, RECORD), SPEED, RESTATES),
        before=ACCEPTED, world=CRASH | {"turns": 1},
    ),
    "a turn's end with its publish": Mutant(
        (publish_queue, "plan_turn_removal", instead(lambda properties, id, commit: commit),
         "were not taken back"),
        (broker(RECORD, RECORD), SPEED, RESTATES),
        before=ACCEPTED, world={"turns": 1},
    ),
    "the hours of a look-back that are yet to be read": Mutant(
        (merge, "unread_hours", always(frozenset()), "was not compared with"),
        (SPEED, BATCH),
        before=REFUSED_AND_UNREAD, world=H0_IS_BAD,
    ),
    "deciding an hour again once its look-back is read": Mutant(
        (batch_plan, "plan_recheck", always({}), "have yet to be decided again"),
        (SPEED, BATCH),
        before=REFUSED_AND_UNREAD, world=H0_IS_BAD,
    ),
    "the hours of a micro-batch that are decided": Mutant(
        (speed_plan, "within_hours", instead(lambda ranges, hours: ranges), LACKS),
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
        before=TWO_READ, world=ORPHANS,
    ),
    "the head that moves before orphans are deleted": Mutant(
        (Maintenance, "fence", deleting_at_once, GONE),
        (ROLLUP, MAINTENANCE),
        before=TWO_READ, world=ORPHANS,
    ),
    "the ledger's look": Mutant(
        (ledger, "plan_missing", writing_all, "the ledger has"),
        (BATCH,),
        before=OVER, world=ACCOUNTS,
    ),
    "decisions that wait until they are read back": Mutant(
        (publish, "to_commit", confirming_at_once, "is sealed, the ledger says so 0 times"),
        (broker(RECORD), SPEED, BATCH),
        before=OVER, world=ACCOUNTS,
    ),
    "the ids of decisions apart from those of dead letters": Mutant(
        (Confirmed, "__or__", as_one, "no actor ever comes to rest"),
        (BATCH,),
        before=OVER, world=ACCOUNTS,
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
        world=ACCOUNTS | ORPHANS, also=((dead_letters, "named_files", always(frozenset())),),
    ),
    "the head that moves before orphans of the dead letters are deleted": Mutant(
        (maintenance, "should_move_head", instead(lambda rows, letters: bool(rows)), LETTERS_LACK),
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
        before=OVER, world=ORPHANS,
    ),
    "the revision of an hour that is forgotten": Mutant(
        (ledger, "plan_remembering", instead(lambda state, hours, read: state),
         "the ledger says [1, 2, 2]"),
        (Batch("batch", restates=1, choice=(H0,)), Batch("rival", restates=3, choice=(H0, H1, H1))),
        before=PAST_BOTH, world=ACCOUNTS,
    ),
    "the gap that retention leaves": Mutant(
        (speed_plan, "lost_entries", always("[]"), LETTERS_LACK),
        (broker(RECORD, ("retain", 0, 1)), SPEED),
        world=ACCOUNTS,
    ),
    "what Kafka no longer gives of an hour, filled from the table": Mutant(
        (balance, "has_missing", always(False), "main served [(0, 1, 1)]"),
        (broker(("compact", 0, 1)), BY_THREE, Batch("batch", allow_gaps=("control", "compacted"))),
        before=THREE_RECORDS, world=ACCOUNTS,
    ),
    "how far the speed layer has read of an hour with gaps": Mutant(
        (batch_plan, "may_yet_be_served", always(frozenset()), "main served [(0, 1, 1)]"),
        (broker(("compact", 0, 1)), BY_THREE, Batch("batch", allow_gaps=("compacted",))),
        before=THREE_RECORDS, world=ACCOUNTS,
    ),
    "the dead letters that wait before an hour is filled": Mutant(
        (Batch, "has_letters_to_finish", always(False), "main served [(0, 1, 1)]"),
        (broker(("compact", 0, 1)), BY_THREE, Batch("batch", allow_gaps=("compacted",))),
        before=ONE_DEAD_OF_THREE, world=ACCOUNTS,
    ),
    "control records that are seen in the log": Mutant(
        (balance, "classify_gaps", concluding_control, "in gaps, the log has 0 control records"),
        (broker(("compact", 0, 1)), BY_THREE, Batch("batch", allow_gaps=("control",))),
        before=THREE_RECORDS, world=ACCOUNTS,
    ),
    "an hour whose records vanish after they were served": Mutant(
        (balance, "classify_gaps", concluding_control, "in gaps, the log has 1 control records"),
        (broker(("compact", 0, 1)), BY_THREE, Batch("batch", allow_gaps=("control",))),
        before=MARKED, world=ACCOUNTS,
        also=((balance, "has_missing", always(False)),),
    ),
    "where offsets begin again": Mutant(
        (topic_change, "plan_begins", from_the_beginning, TWICE),
        (SPEED, BATCH, ADOPTER),
        before=TRUNCATED, world=ACCOUNTS | STAMPED,
    ),
    "what Kafka cannot give any more": Mutant(
        (topic_change, "gone_from_kafka", always(None), "does not any more"),
        (broker(("adopted",), RECORD), SPEED, BATCH, ADOPTER),
        before=TRUNCATED, world=ACCOUNTS | STAMPED,
    ),
    "where a log that was left ends": Mutant(
        (topic_change, "plan_remembered", forgetting_ends, TWICE),
        (broker(OTHER, ADOPTED, BACK), SPEED, BATCH, ADOPTER),
        before=ONE_READ, world=ACCOUNTS | STAMPED,
    ),
    "when a log that comes back was published from": Mutant(
        (topic_change, "last_read_ms", by_the_position_alone, "lack"),
        (broker(BACK, *LOSES_ITS_END), BATCH, ADOPTER),
        before=ANOTHER_NAMED, world=ACCOUNTS | STAMPED,
    ),
    "the comparison of a clock that was set": Mutant(
        (clock, "should_compare", instead(lambda last, wall, elapsed: last is None),
         "the table is stamped"),
        (broker(RECORD), Speed("speed", watched=True, jumps=AHEAD)),
        world=STAMPED,
    ),
    "the tags that keep a snapshot": Mutant(
        (publish, "plan_expiry", asked(without_tags), "cannot be read any more"),
        (RESTATES, MAINTENANCE),
        before=ACCEPTED, world=STAMPED,
    ),
    "the check that a rebuilt hour has not expired": Mutant(
        (batch_plan, "check_publish", knowing_no_expired_hour, "which have expired"),
        (RESTATES, RETENTION),
        before=BOTH_ACCEPTED, world=ACCOUNTS,
    ),
    "what the speed layer leaves out of expired hours": Mutant(
        (speed_plan, "plan_publish", knowing_no_expired_hour, "which have expired"),
        (SPEED, BATCH, RETENTION),
        before=(broker(*TWO_HOURS),),
    ),
    "what a micro-batch is staged by, of an erasure": Mutant(
        (speed_plan, "erasure_marks", always(frozenset()), "are back"),
        (SPEED, ERASER),
        before=(broker(PERSONAL),), world=ACCOUNTS,
    ),
    "the age of files to import": Mutant(
        (imported, "is_young", always(True), GONE),
        (IMPORTS_ONE, *nights(2)),
        before=ONE_READ, world=ORPHANS,
    ),
    "that an import ends where the table begins": Mutant(
        (imported, "hours_between", instead(lambda first, last: [first]), "the table begins with"),
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
        before=(broker(PERSONAL, ("tick", 60)), READ), world=ACCOUNTS,
    ),
    "rows that are staged again once dead letters are found": Mutant(
        (erasure, "plan_places", placing_without_a_mark, "0 erased"),
        (RESTATES, ERASER),
        before=DEAD_PERSONAL_ACCEPTED, world=ACCOUNTS,
    ),
    "records that an erasure is of and that are yet to be read": Mutant(
        (erasure, "is_read", always(True), "is done, and there are still"),
        (SPEED, ERASER),
        before=(broker(MALFORMED_PERSONAL),), world=ACCOUNTS,
    ),
    "hours that operators keep, with records of an erasure": Mutant(
        (erasure, "held_against", always(None), "were kept"),
        (KEEPS, ERASER),
        before=(broker(PERSONAL), READ), world=ACCOUNTS,
    ),
    "hours that operators keep, with records that are yet to be read": Mutant(
        (erasure, "held_against", reading_nothing_held, "were kept"),
        (SPEED, KEEPS, ERASER),
        before=(broker(PERSONAL),), world=ACCOUNTS,
    ),
    "places that wait for their row of the ledger": Mutant(
        (ledger, "with_waiting", without_what_waits, "erased"),
        (RESTATES, ERASER),
        before=DEAD_PERSONAL_ACCEPTED, world=ACCOUNTS,
    ),
    "the account of erased records that Kafka deleted": Mutant(
        (balance, "classify_erased", leaving_all_to_gaps, "is accepted with 0 erased"),
        (Batch("batch", allow_gaps=("retention",)), ERASER),
        before=(*PERSONAL_READ, Eraser("first"), broker(("retain", 0, 1))),
        world=ACCOUNTS,
    ),
    "expiry by count": Mutant(
        (publish, "plan_expiry", always(()), "the table remembers"), (broker(*[RECORD] * 6), SPEED)
    ),
}  # fmt: skip


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
        # Nothing is missed with the decision; `make test` explores such settings elsewhere.
        mutant.explore()
    *taken_out, finds = mutant.decision
    for module, decision, instead in (taken_out, *mutant.also):
        monkeypatch.setattr(module, decision, instead(getattr(module, decision)))
    with pytest.raises(Violation) as violation:
        mutant.explore()
    assert finds in str(violation.value)
    print(violation.value)
