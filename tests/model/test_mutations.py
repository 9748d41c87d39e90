"""The model has teeth: when a decision of the product is taken out, the exploration finds what it
was there for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

import layers
import pytest
from actors import (
    NIGHT,
    NOW,
    Actor,
    Adopter,
    Expiry,
    Maintenance,
    Network,
    Nights,
    Operator,
    Publisher,
    Retention,
)
from budget import FULL
from eraser import Eraser, Holder
from exploration import explore, forget, settle
from importer import Importer
from layers import Batch, RollUp, Speed
from pyiceberg.table import Table
from settings import (
    ADOPTED,
    AN_EMPTY_HOUR,
    BACK,
    H0,
    H1,
    LOSES_ITS_END,
    LOST_ITS_END,
    MALFORMED,
    MALFORMED_PERSONAL,
    MINUTES,
    ONE_HOUR,
    OTHER,
    PERSONAL,
    RECORD,
    TWO_HOURS,
    broker,
)
from small_world import Lake, Violation, World, new_world
from values import replace

from anabranch.iceberg import clock, commit_status, prepare, snapshots, state_properties
from anabranch.iceberg.commits import Change, Commit
from anabranch.iceberg.snapshots import BRANCHES, published_since, staged_snapshot
from anabranch.lifecycle import maintenance
from anabranch.offsets import hours
from anabranch.offsets.position import Position, RangeRelation
from anabranch.protocol import (
    coverage,
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
from anabranch.protocol.expired import Expired
from anabranch.protocol.publish import Publish
from anabranch.protocol.state import POSITION, Confirmed, State
from batch_layer import balance
from batch_layer import plan as batch_plan
from speed_layer import compaction_plan
from speed_layer import plan as speed_plan


@dataclass(frozen=True)
class Mutant:
    """A decision, what takes its place, and who has to take part for that to show.

    `also` are decisions that guard the same a second time.
    """

    name: str
    module: Any
    decision: str
    instead: Callable[[Any], Any]
    actors: tuple[Actor, ...]
    finds: str
    before: tuple[Actor, ...]
    world: dict[str, Any]
    also: tuple[tuple[Any, str, Callable[[Any], Any]], ...] = ()

    def explore(self) -> None:
        forget()
        explore(settle(new_world(**self.world), *self.before), self.actors)


def mutant(
    module: Any,
    decision: str,
    instead: Callable[[Any], Any],
    *actors: Actor,
    finds: str,
    name: str,
    before: tuple[Actor, ...] = (),
    also: tuple[tuple[Any, str, Callable[[Any], Any]], ...] = (),
    **world: Any,
) -> Any:
    return pytest.param(
        Mutant(name, module, decision, instead, actors, finds, before, world, also), id=name
    )


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
    landed, never = commit_status.CommitFate.LANDED, commit_status.CommitFate.NEVER
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
        return (
            after
            if self.ahead is None
            else replace(after, staged=replace(after.staged, began=NOW + 2 * NIGHT))
        )

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


def by_content_alone(real: Callable[..., bool]) -> Callable[..., bool]:
    return lambda complete, state: real(
        replace(complete, ids=complete.ids | state.waiting_letters), state
    )


def by_recording(real: Callable[..., Any]) -> Callable[..., Any]:
    def open_letters(self: Any, world: Any) -> Any:
        return iter(
            [("states what waits as complete", world, replace(self, at="look_for_lost", items=()))]
        )

    return open_letters


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


# An hour that both layers hold.
ACCEPTED = (broker(*ONE_HOUR), Speed("before"), Batch("accepts"))
# Two hours of which the first is refused, and nothing is read.
REFUSED_AND_UNREAD = (broker(RECORD, RECORD, ("tick", 60), RECORD, ("tick", 60)),)
# An hour with records, and one without that `main` alone lists.
ACCEPTED_ON_MAIN = (
    broker(*AN_EMPTY_HOUR),
    Batch("accepts"),
    broker(("tick", 60)),
    Batch("accepts on main"),
)
TO_SPEED = Operator("operator", wishes=((H0, "speed"),))
# Two hours that both layers hold, of which one is forgotten.
PAST_BOTH = (broker(*TWO_HOURS), Batch("accepts"), broker(RECORD), Speed("after"))
# A log that lost two of three published records, and has another one by now.
TRUNCATED = (
    broker(*[MINUTES, RECORD] * 3, MINUTES),
    Speed("before", at_most=3),
    broker(*LOST_ITS_END),
)
# An hour of three records, of which one may vanish from the middle.
THREE_RECORDS = (broker(RECORD, RECORD, RECORD, ("tick", 60)),)
# Such an hour, served by the speed layer, whose last record ends a transaction.
SERVED_WITH_A_MARKER = (
    broker(RECORD, RECORD, ("end transaction", 0), ("tick", 60)),
    Speed("before", at_most=3),
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

MUTANTS = [
    mutant(
        speed_plan,
        "classify",
        always(RangeRelation.ADJACENT),
        broker(RECORD, RECORD, ("restore",), RECORD),
        Speed("speed"),
        finds="main lacks",
        name="the position check",
    ),
    mutant(
        speed_plan,
        "trim",
        lambda real: lambda ranges, position: ranges,
        broker(RECORD, RECORD),
        *speeds(1, 2),
        finds="more than once",
        name="the trim of an overlapping range",
    ),
    mutant(
        publish,
        "to_commit",
        requiring_no_head,
        broker(RECORD, RECORD),
        *speeds(),
        finds="the position moved back",
        name="the heads that a publish requires",
    ),
    mutant(
        watermarks,
        "_last_complete",
        without_the_position,
        broker(*ONE_HOUR),
        Speed("speed"),
        Batch("batch"),
        finds="fresh through",
        name="the position before an hour is fresh",
    ),
    mutant(
        watermarks,
        "complete_through",
        counting_what_is_sealed,
        broker(*ONE_HOUR),
        Speed("speed"),
        Batch("batch"),
        finds="complete through",
        name="acceptance before an hour is complete",
    ),
    mutant(
        hours,
        "plan_boundary",
        without_floor,
        broker(("record", 0, 45), ("tick", 60)),
        Speed("speed"),
        Batch("batch"),
        finds="is accepted as {0: (0, 0)}, main serves",
        name="the cut's clamp",
    ),
    mutant(
        hours,
        "plan_boundaries",
        below_the_position,
        broker(("record", 0, 45), ("tick", 60)),
        Speed("speed"),
        Batch("batch"),
        finds="is accepted as {0: (0, 0)}, main serves",
        name="the position under the cut",
    ),
    mutant(
        speed_plan,
        "_still_exists",
        always(True),
        broker(RECORD),
        Speed("speed", as_snapshot=True),
        Maintenance("maintenance"),
        finds="which storage does not have",
        name="the speed layer's look for what it staged",
        also=UNCHECKED,
        orphans=True,
    ),
    mutant(
        batch_plan,
        "is_staged",
        lambda real: lambda table, id, now: staged_snapshot(table, id) is not None,
        Batch("batch"),
        Nights(runs=2),
        Maintenance("maintenance", later=timedelta(0), fails=True),
        finds="main and its dead letters have []",
        name="the age of an hour whose dead letters expire apart from its rows",
        before=(broker(MALFORMED, ("tick", 60)),),
        accounts=True,
    ),
    mutant(
        speed_plan,
        "is_young",
        always(True),
        broker(RECORD),
        *nights(Speed("speed")),
        finds="which storage does not have",
        name="the age of files that nothing refers to",
        orphans=True,
    ),
    mutant(
        Speed,
        "compared_after",
        as_compared_before,
        broker(RECORD),
        *nights(Speed("speed")),
        finds="which storage does not have",
        name="a clock that is read after the heads",
        also=((Speed, "compared_before", lambda real: lambda self, world: world.age),),
        orphans=True,
    ),
    mutant(
        Speed,
        "heard",
        since_the_last_task,
        broker(RECORD),
        *nights(Speed("speed")),
        finds="which storage does not have",
        name="an age that counts from before the first task",
        orphans=True,
    ),
    mutant(
        Speed,
        "done",
        since_its_turn,
        broker(RECORD, RECORD),
        *nights(Speed("speed", early=True)),
        finds="which storage does not have",
        name="the age of files that were staged ahead",
        orphans=True,
    ),
    mutant(
        Maintenance,
        "fence",
        deleting_at_once,
        broker(RECORD),
        *nights(Speed("speed")),
        finds="which storage does not have",
        name="the head that moves before files of the speed layer are deleted",
        orphans=True,
    ),
    mutant(
        World,
        "leave",
        deleting_files,
        broker(RECORD),
        Speed("speed"),
        finds="which storage does not have",
        name="files that are left although their offsets are published",
        wrong_answers=1,
    ),
    mutant(
        World,
        "leave",
        deleting_files,
        broker(RECORD),
        Speed("speed"),
        Network("network"),
        finds="which storage does not have",
        name="files that are left although their publish seems to have failed",
        also=((commit_status, "classify_commit", looking_once),),
        late=True,
        answers_to_lose=1,
    ),
    mutant(
        layers,
        "of_one_try",
        of_every_try,
        broker(RECORD),
        Speed("speed"),
        finds="more than once",
        name="the files of one try of each task",
        orphans=True,
        retries=1,
    ),
    mutant(
        batch_plan,
        "is_staged",
        always(True),
        broker(*ONE_HOUR),
        Batch("batch"),
        Maintenance("maintenance"),
        finds="which storage does not have",
        name="the batch layer's look for what it staged",
        also=UNCHECKED,
        orphans=True,
    ),
    mutant(
        publish,
        "to_commit",
        expiring_outside_a_publish,
        broker(RECORD),
        Speed("speed", as_snapshot=True),
        Maintenance("maintenance"),
        finds="which storage does not have",
        name="expiry inside a publish",
        also=UNCHECKED,
        orphans=True,
    ),
    mutant(
        prepare,
        "unused_properties",
        needed_by_heads_alone,
        broker(RECORD),
        Speed("speed"),
        finds="refers to a property that is gone",
        name="the properties of older snapshots",
        before=(broker(*ONE_HOUR), Speed("before"), Batch("accepts")),
        apart=True,
    ),
    mutant(
        prepare,
        "unused_properties",
        removing_whatever_it_requires,
        broker(RECORD),
        Speed("speed"),
        TO_SPEED,
        Maintenance("maintenance"),
        finds="refers to a property that is gone",
        name="no property is removed but over the heads of all branches",
        before=(
            broker(*ONE_HOUR),
            Speed("before"),
            Batch("accepts"),
            Operator("first", wishes=((H0, "speed"), (H0, None))),
        ),
        apart=True,
        also=((publish, "to_commit", expiring_outside_a_publish),),
    ),
    mutant(
        coverage,
        "uncovered_reason",
        always(None),
        broker(*ONE_HOUR),
        Speed("speed"),
        Batch("batch"),
        TO_SPEED,
        finds="main serves []",
        name="the merger's look at coverage",
    ),
    mutant(
        merge,
        "_swap",
        forgetting_what_was_kept,
        broker(("restore",), RECORD, ("mend",)),
        Speed("speed"),
        Batch("batch"),
        finds="main has [(0, 0, 0)] more than once",
        name="the hours that a merge kept",
        before=(broker(*ONE_HOUR), Speed("speed"), Batch("before")),
        bad=frozenset({H0}),
    ),
    mutant(
        speed_plan,
        "plan_skip",
        skipping_blindly,
        broker(RECORD),
        *speeds(),
        finds="the position moved back",
        name="the skip's look at where the table is by now",
        before=(broker(*ONE_HOUR), Batch("batch")),
    ),
    mutant(
        commit_status,
        "classify_commit",
        looking_once,
        broker(RECORD),
        Speed("speed", as_snapshot=True),
        Network("network"),
        finds="landed, and what it names was discarded",
        name="not landed only what cannot land any more",
        late=True,
        answers_to_lose=1,
    ),
    mutant(
        commit_status,
        "plan_fence",
        over_batch,
        broker(*ONE_HOUR),
        Speed("speed"),
        Batch("batch"),
        Network("network"),
        finds="was sealed or accepted, and is no more",
        name="an empty publish that says what the newest said",
        late=True,
        answers_to_lose=1,
    ),
    mutant(
        snapshots,
        "newest_publish",
        lambda real: snapshots.last_publish,
        # The next hour's job merges.
        broker(("restore", "main"), ("tick", 60)),
        Batch("batch"),
        finds="the ledger says [1]",
        name="the state of a main that was set back",
        before=ACCEPTED_ON_MAIN,
        accounts=True,
    ),
    mutant(
        state,
        "main_only_hours",
        always(()),
        broker(*AN_EMPTY_HOUR),
        Batch("batch"),
        finds="the ledger says [1]",
        name="the hours without records that main alone lists",
        accounts=True,
    ),
    mutant(
        maintenance,
        "list_on_batch",
        listing_none,
        Maintenance("maintenance"),
        finds="the ledger says [1]",
        name="the hours that maintenance lists on batch",
        before=ACCEPTED_ON_MAIN,
        accounts=True,
    ),
    mutant(
        publish_queue,
        "turn_to_yield_to",
        always(None),
        broker(*[RECORD] * 4),
        Speed("speed"),
        Batch("batch", restates=1),
        finds="has the way, and was refused 2 times",
        name="the speed layer's wait for a turn",
        before=ACCEPTED,
        turns=1,
    ),
    mutant(
        publish_queue,
        "turn_to_yield_to",
        holding_again,
        broker(RECORD, RECORD),
        Speed("speed"),
        Batch("batch", restates=1),
        Maintenance("maintenance"),
        finds="waited for 2 turns and published nothing in between",
        name="the speed layer's publish between two turns",
        before=ACCEPTED,
        turns=2,
    ),
    mutant(
        publish_queue,
        "is_over",
        always(False),
        broker(RECORD, RECORD),
        Speed("speed"),
        Batch("batch", restates=1),
        finds="at rest, main lacks",
        name="the bound of a turn",
        before=ACCEPTED,
        turns=1,
        crashes=1,
    ),
    mutant(
        publish_queue,
        "plan_turn_removal",
        lambda real: lambda properties, id, commit: commit,
        broker(RECORD, RECORD),
        Speed("speed"),
        Batch("batch", restates=1),
        finds="were not taken back",
        name="a turn's end with its publish",
        before=ACCEPTED,
        turns=1,
    ),
    mutant(
        coverage,
        "unread_hours",
        always(frozenset()),
        Speed("speed"),
        Batch("batch"),
        finds="was not compared with",
        name="the hours of a look-back that are yet to be read",
        before=REFUSED_AND_UNREAD,
        bad=frozenset({H0}),
    ),
    mutant(
        batch_plan,
        "plan_recheck",
        always({}),
        Speed("speed"),
        Batch("batch"),
        finds="have yet to be decided again",
        name="deciding an hour again once its look-back is read",
        before=REFUSED_AND_UNREAD,
        bad=frozenset({H0}),
    ),
    mutant(
        speed_plan,
        "within_hours",
        lambda real: lambda ranges, hours: ranges,
        Speed("speed", at_most=3, at_once=1),
        finds="main lacks",
        name="the hours of a micro-batch that are decided",
        before=(broker(RECORD, ("tick", 210), RECORD),),
    ),
    mutant(
        speed_plan,
        "_matches_decision",
        always(True),
        broker(RECORD, ("record", 0, 45), ("tick", 60)),
        Speed("speed", early=True),
        Batch("batch"),
        finds="main lacks [(0, 1)]",
        name="the look whether what was staged ahead is as decided",
    ),
    mutant(
        compaction_plan,
        "plan_replacement",
        without_a_look,
        RollUp("rollup"),
        RollUp("rival"),
        finds="more than once",
        name="the roll-up's look whether its files are still there",
        before=(broker(RECORD, RECORD), Speed("before")),
    ),
    mutant(
        layers,
        "rolled_up",
        of_the_first_file,
        RollUp("rollup"),
        finds="main lacks",
        name="a file of those that are rolled up",
        before=(broker(RECORD, RECORD), Speed("before")),
    ),
    mutant(
        compaction_plan,
        "is_stale",
        always(False),
        RollUp("rollup"),
        Maintenance("maintenance"),
        finds="which storage does not have",
        name="the age of a file that is rolled up",
        before=(broker(RECORD, RECORD), Speed("before")),
        orphans=True,
    ),
    mutant(
        Maintenance,
        "fence",
        deleting_at_once,
        RollUp("rollup"),
        Maintenance("maintenance"),
        finds="which storage does not have",
        name="the head that moves before orphans are deleted",
        before=(broker(RECORD, RECORD), Speed("before")),
        orphans=True,
    ),
    mutant(
        ledger,
        "plan_missing",
        writing_all,
        Batch("batch"),
        finds="the ledger has",
        name="the ledger's look",
        before=(broker(*ONE_HOUR),),
        accounts=True,
    ),
    mutant(
        publish,
        "to_commit",
        confirming_at_once,
        broker(RECORD),
        Speed("speed"),
        Batch("batch"),
        finds="is sealed, the ledger says so 0 times",
        name="decisions that wait until they are read back",
        before=(broker(*ONE_HOUR),),
        accounts=True,
    ),
    mutant(
        Confirmed,
        "__or__",
        as_one,
        Batch("batch"),
        finds="no actor ever comes to rest",
        name="the ids of decisions apart from those of dead letters",
        before=(broker(*ONE_HOUR),),
        accounts=True,
    ),
    mutant(
        dead_letters.Complete,
        "covers",
        by_content_alone,
        broker(MALFORMED),
        Speed("speed"),
        Batch("batch"),
        finds="states that dead letters are complete",
        name="the sets that the ledger states as complete",
        before=(broker(MALFORMED, *ONE_HOUR), Speed("before", at_most=2), Batch("accepts")),
        accounts=True,
    ),
    mutant(
        Publisher,
        "open_letters",
        by_recording,
        Batch("batch"),
        finds="states that dead letters are complete",
        name="dead letters before the rows of the ledger that state them",
        before=(broker(MALFORMED, *ONE_HOUR),),
        accounts=True,
    ),
    mutant(
        speed_plan,
        "plan_publish",
        naming_no_letters,
        broker(MALFORMED),
        Speed("speed"),
        finds="dead letters lack",
        name="the dead letters that a publish names",
        accounts=True,
    ),
    mutant(
        dead_letters,
        "is_done",
        always(False),
        broker(MALFORMED),
        Speed("speed"),
        finds="more than once",
        name="the dead letters' look whether they are done",
        accounts=True,
        answers_to_lose=1,
    ),
    mutant(
        dead_letters,
        "remembered_ids",
        always([]),
        broker(MALFORMED),
        Speed("speed"),
        finds="more than once",
        name="the ids that the dead letters' table remembers",
        accounts=True,
        answers_to_lose=1,
    ),
    mutant(
        dead_letters,
        "is_due",
        always(True),
        broker(MALFORMED, MALFORMED),
        Speed("speed"),
        Batch("batch"),
        finds="more than once",
        name="dead letters that are done and forgotten",
        accounts=True,
    ),
    mutant(
        Publisher,
        "judge_letters",
        by_what_was_seen,
        broker(MALFORMED, MALFORMED),
        Speed("speed"),
        Batch("batch"),
        finds="more than once",
        name="the rows' state after the dead letters' table",
        accounts=True,
    ),
    mutant(
        maintenance,
        "plan_dead_letters",
        without_waiting,
        broker(MALFORMED),
        Speed("speed"),
        Maintenance("maintenance"),
        finds="dead letters lack",
        name="what waits and is never expired",
        also=((dead_letters, "named_files", always(frozenset())),),
        accounts=True,
        orphans=True,
    ),
    mutant(
        maintenance,
        "should_move_head",
        lambda real: lambda rows, letters: bool(rows),
        broker(MALFORMED),
        Speed("speed"),
        Maintenance("maintenance"),
        finds="dead letters lack",
        name="the head that moves before orphans of the dead letters are deleted",
        accounts=True,
        orphans=True,
    ),
    mutant(
        World,
        "protecting",
        always(()),
        broker(MALFORMED),
        Speed("speed"),
        Expiry("expiry", of_letters=True),
        finds="dead letters lack",
        name="the branch that staged dead letters have",
        accounts=True,
        orphans=True,
    ),
    mutant(
        Lake,
        "has_staged",
        always(True),
        broker(RECORD),
        Speed("speed", as_snapshot=True),
        Expiry("expiry"),
        finds="which storage does not have",
        name="the staged rows that a publish of the speed layer requires",
        orphans=True,
    ),
    mutant(
        Lake,
        "has_staged",
        always(True),
        Batch("batch"),
        Expiry("expiry"),
        finds="which storage does not have",
        name="the staged rows that a publish of the batch layer requires",
        before=(broker(*ONE_HOUR),),
        orphans=True,
    ),
    mutant(
        speed_plan,
        "plan_publish",
        naming_nothing_staged,
        broker(RECORD),
        Speed("speed", as_snapshot=True),
        Expiry("expiry"),
        finds="which storage does not have",
        name="the staged rows that the speed layer names",
        orphans=True,
    ),
    mutant(
        batch_plan,
        "plan_publish",
        naming_nothing_staged,
        Batch("batch"),
        Expiry("expiry"),
        finds="which storage does not have",
        name="the staged rows that the batch layer names",
        before=(broker(*ONE_HOUR),),
        orphans=True,
    ),
    mutant(
        ledger,
        "plan_remembering",
        lambda real: lambda state, hours, read: state,
        Batch("batch", restates=1, choice=(H0,)),
        Batch("rival", restates=3, choice=(H0, H1, H1)),
        finds="the ledger says [1, 2, 2]",
        name="the revision of an hour that is forgotten",
        before=PAST_BOTH,
        accounts=True,
    ),
    mutant(
        speed_plan,
        "lost_entries",
        always("[]"),
        broker(RECORD, ("retain", 0, 1)),
        Speed("speed"),
        finds="dead letters lack",
        name="the gap that retention leaves",
        accounts=True,
    ),
    mutant(
        balance,
        "has_missing",
        always(False),
        broker(("compact", 0, 1)),
        Speed("speed", at_most=3),
        Batch("batch", allow_gaps=("control", "compacted")),
        finds="main served [(0, 1, 1)]",
        name="what Kafka no longer gives of an hour, filled from the table",
        before=THREE_RECORDS,
        accounts=True,
    ),
    mutant(
        batch_plan,
        "may_yet_be_served",
        always(frozenset()),
        broker(("compact", 0, 1)),
        Speed("speed", at_most=3),
        Batch("batch", allow_gaps=("compacted",)),
        finds="main served [(0, 1, 1)]",
        name="how far the speed layer has read of an hour with gaps",
        before=THREE_RECORDS,
        accounts=True,
    ),
    mutant(
        Batch,
        "has_letters_to_finish",
        always(False),
        broker(("compact", 0, 1)),
        Speed("speed", at_most=3),
        Batch("batch", allow_gaps=("compacted",)),
        finds="main served [(0, 1, 1)]",
        name="the dead letters that wait before an hour is filled",
        before=(broker(RECORD, MALFORMED, RECORD, ("tick", 60)),),
        accounts=True,
    ),
    mutant(
        balance,
        "classify_gaps",
        concluding_control,
        broker(("compact", 0, 1)),
        Speed("speed", at_most=3),
        Batch("batch", allow_gaps=("control",)),
        finds="in gaps, the log has 0 control records",
        name="control records that are seen in the log",
        before=THREE_RECORDS,
        accounts=True,
    ),
    mutant(
        balance,
        "classify_gaps",
        concluding_control,
        broker(("compact", 0, 1)),
        Speed("speed", at_most=3),
        Batch("batch", allow_gaps=("control",)),
        finds="in gaps, the log has 1 control records",
        name="an hour whose records vanish after they were served",
        before=SERVED_WITH_A_MARKER,
        accounts=True,
        also=((balance, "has_missing", always(False)),),
    ),
    mutant(
        topic_change,
        "plan_begins",
        from_the_beginning,
        Speed("speed"),
        Batch("batch"),
        Adopter("adopter"),
        finds="more than once",
        name="where offsets begin again",
        before=TRUNCATED,
        accounts=True,
        stamped=True,
    ),
    mutant(
        topic_change,
        "gone_from_kafka",
        always(None),
        broker(("adopted",), RECORD),
        Speed("speed"),
        Batch("batch"),
        Adopter("adopter"),
        finds="does not any more",
        name="what Kafka cannot give any more",
        before=TRUNCATED,
        accounts=True,
        stamped=True,
    ),
    mutant(
        topic_change,
        "plan_remembered",
        forgetting_ends,
        broker(OTHER, ADOPTED, BACK),
        Speed("speed"),
        Batch("batch"),
        Adopter("adopter"),
        finds="more than once",
        name="where a log that was left ends",
        before=(broker(RECORD), Speed("before")),
        accounts=True,
        stamped=True,
    ),
    mutant(
        topic_change,
        "last_read_ms",
        by_the_position_alone,
        broker(BACK, *LOSES_ITS_END),
        Batch("batch"),
        Adopter("adopter"),
        finds="lack",
        name="when a log that comes back was published from",
        before=(
            broker(*[MINUTES, RECORD] * 3, MINUTES),
            Speed("before", at_most=3),
            broker(OTHER),
            Adopter("adopts"),
        ),
        accounts=True,
        stamped=True,
    ),
    mutant(
        clock,
        "should_compare",
        lambda real: lambda last, wall, elapsed: last is None,
        broker(RECORD),
        Speed("speed", watched=True, jumps=AHEAD),
        finds="the table is stamped",
        name="the comparison of a clock that was set",
        stamped=True,
    ),
    mutant(
        publish,
        "plan_expiry",
        without_tags,
        Batch("batch", restates=1),
        Maintenance("maintenance"),
        finds="cannot be read any more",
        name="the tags that keep a snapshot",
        before=ACCEPTED,
        stamped=True,
    ),
    mutant(
        batch_plan,
        "check_publish",
        knowing_no_expired_hour,
        Batch("batch", restates=1),
        Retention("retention"),
        finds="which have expired",
        name="the check that a rebuilt hour has not expired",
        before=(broker(*TWO_HOURS), Speed("before"), Batch("accepts")),
        accounts=True,
    ),
    mutant(
        speed_plan,
        "plan_publish",
        knowing_no_expired_hour,
        Speed("speed"),
        Batch("batch"),
        Retention("retention"),
        finds="which have expired",
        name="what the speed layer leaves out of expired hours",
        before=(broker(*TWO_HOURS),),
    ),
    mutant(
        speed_plan,
        "erasure_marks",
        always(frozenset()),
        Speed("speed"),
        Eraser("eraser"),
        finds="are back",
        name="what a micro-batch is staged by, of an erasure",
        before=(broker(PERSONAL),),
        accounts=True,
    ),
    mutant(
        imported,
        "is_young",
        always(True),
        Importer("importer", most=1),
        Nights(runs=2),
        Maintenance("maintenance", later=timedelta(0)),
        finds="which storage does not have",
        name="the age of files to import",
        before=(broker(RECORD), Speed("before")),
        orphans=True,
    ),
    mutant(
        imported,
        "hours_between",
        lambda real: lambda first, last: [first],
        Importer("importer"),
        Importer("rival"),
        finds="the table began with",
        name="that an import ends where the table begins",
        before=(broker(*ONE_HOUR), Speed("before")),
    ),
    mutant(
        imported,
        "SETTLED",
        lambda real: "elsewhere",
        Importer("importer", most=1),
        Batch("batch"),
        finds="not accepted",
        name="that imported hours are before those which batch has yet to accept",
        before=(broker(*ONE_HOUR), Speed("before")),
    ),
    mutant(
        erasure,
        "marks_of",
        always(frozenset()),
        Batch("batch"),
        Eraser("eraser"),
        finds="are back",
        name="what an hour is staged by, of an erasure",
        before=(broker(PERSONAL, ("tick", 60)), Speed("before")),
        accounts=True,
    ),
    mutant(
        erasure,
        "plan_places",
        placing_without_a_mark,
        Batch("batch", restates=1),
        Eraser("eraser"),
        finds="0 erased",
        name="rows that are staged again once dead letters are found",
        before=(broker(MALFORMED_PERSONAL, ("tick", 60)), Speed("before"), Batch("accepts")),
        accounts=True,
    ),
    mutant(
        erasure,
        "is_read",
        always(True),
        Speed("speed"),
        Eraser("eraser"),
        finds="is done, and there are still",
        name="records that an erasure is of and that are yet to be read",
        before=(broker(MALFORMED_PERSONAL),),
        accounts=True,
    ),
    mutant(
        erasure,
        "held_against",
        always(None),
        Holder("holder", hour=H0),
        Eraser("eraser"),
        finds="were kept",
        name="hours that operators keep, with records of an erasure",
        before=(broker(PERSONAL), Speed("before")),
        accounts=True,
    ),
    mutant(
        erasure,
        "held_against",
        reading_nothing_held,
        Speed("speed"),
        Holder("holder", hour=H0),
        Eraser("eraser"),
        finds="were kept",
        name="hours that operators keep, with records that are yet to be read",
        before=(broker(PERSONAL),),
        accounts=True,
    ),
    mutant(
        ledger,
        "with_waiting",
        without_what_waits,
        Batch("batch", restates=1),
        Eraser("eraser"),
        finds="erased",
        name="places that wait for their row of the ledger",
        before=(broker(MALFORMED_PERSONAL, ("tick", 60)), Speed("before"), Batch("accepts")),
        accounts=True,
    ),
    mutant(
        balance,
        "classify_erased",
        leaving_all_to_gaps,
        Batch("batch", allow_gaps=("retention",)),
        Eraser("eraser"),
        finds="is accepted with 0 erased",
        name="the account of erased records that Kafka deleted",
        before=(
            broker(PERSONAL, RECORD, ("tick", 60)),
            Speed("before", at_most=2),
            Eraser("first"),
            broker(("retain", 0, 1)),
        ),
        accounts=True,
    ),
    mutant(
        publish,
        "plan_expiry",
        always(()),
        broker(*[RECORD] * 6),
        Speed("speed"),
        finds="the table remembers",
        name="expiry by count",
    ),
]


@pytest.mark.parametrize("early", [False, True])
def test_leftover_files_do_not_depend_on_a_publishs_outcome(
    early: bool, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    monkeypatch.setattr(
        commit_status, "classify_commit", looking_once(commit_status.classify_commit)
    )
    actors = (broker(RECORD, RECORD), Speed("speed", early=early), Network("network"))
    explored = explore(new_world(late=True, answers_to_lose=1, crashes=1), actors)
    assert explored.saw("at last, and it lands")
    assert explored.saw("speed finds its offsets published")


@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_decision_that_is_taken_out_is_missed(
    mutant: Mutant, monkeypatch: pytest.MonkeyPatch
) -> None:
    if FULL:
        # Nothing is missed with the decision. `make test` explores such settings in
        # test_interleavings.py.
        mutant.explore()
    for module, decision, instead in (
        (mutant.module, mutant.decision, mutant.instead),
        *mutant.also,
    ):
        monkeypatch.setattr(module, decision, instead(getattr(module, decision)))
    with pytest.raises(Violation) as violation:
        mutant.explore()
    assert mutant.finds in str(violation.value)
    print(violation.value)
