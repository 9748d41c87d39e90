"""Settings to explore: who takes part, and what happens to Kafka meanwhile. Each says what its
exploration must have seen, so that the hazard is known to have happened."""

import random
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

from actors import (
    Actor,
    Adopter,
    Broker,
    Expiry,
    Maintenance,
    Merger,
    Network,
    Nights,
    Operator,
    Retention,
)
from eraser import Eraser, Holder
from importer import Importer, Undoer
from layers import Batch, RollUp, Speed
from small_world import H0, MINUTE, World, new_world
from values import replace

from anabranch.offsets.hours import shift

H1 = shift(H0, 1)

Event = tuple[Any, ...]
# A record, then the next hour.
ONE_HOUR: tuple[Event, ...] = (("record", 0, 0), ("tick", 60))
# A record, then an hour without one; the third has begun.
AN_EMPTY_HOUR: tuple[Event, ...] = (*ONE_HOUR, ("tick", 60))
# A record in each of the first two hours; the third has begun.
TWO_HOURS: tuple[Event, ...] = (("record", 0, 0), ("tick", 40), ("record", 0, 0), ("tick", 60))
# A record in each of three hours; the fourth has begun.
THREE_HOURS: tuple[Event, ...] = (*TWO_HOURS, ("record", 0, 0), ("tick", 60))
RECORD: Event = ("record", 0, 0)
MALFORMED: Event = ("record", 0, 0, True)
PERSONAL: Event = ("personal", 0, 0)
MALFORMED_PERSONAL: Event = ("personal", 0, 0, True)
# An hour of a record that the rules cannot read, and of one that they can.
DEAD_AND_GOOD: tuple[Event, ...] = (MALFORMED, *ONE_HOUR)
RECREATED: Event = ("recreate",)
# The stream's file names another topic, and the first one again.
OTHER: Event = ("switch", "u")
BACK: Event = ("switch", "t")
ADOPTED: Event = ("adopted",)
MINUTES = ("tick", 1)
# A log that lost two of three published records, and got another one in their place.
LOST_ITS_END: tuple[Event, ...] = (("lose end", 0, 1), MINUTES, RECORD, MINUTES)
# The same while others look, and the hours after it.
LOSES_ITS_END: tuple[Event, ...] = (("lose end", 0, 1), RECORD, ("tick", 210))


def broker(*script: Event) -> Broker:
    return Broker("kafka", script=script)


# Who takes part.
SPEED = Speed("speed")
EARLY = Speed("speed", early=True)
AS_SNAPSHOT = Speed("speed", as_snapshot=True)
BY_TWO = Speed("speed", at_most=2)
BY_THREE = Speed("speed", at_most=3)
BATCH = Batch("batch")
RESTATES = Batch("batch", restates=1)
MAINTENANCE = Maintenance("maintenance")
ROLLUP = RollUp("rollup")
NETWORK = Network("network")
ADOPTER = Adopter("adopter")
ERASER = Eraser("eraser")
IMPORTER = Importer("importer")
IMPORTS_ONE = Importer("importer", most=1)
EXPIRY = Expiry("expiry")
RETENTION = Retention("retention")
RETENTION_TWICE = Retention("retention", runs=2)
KEEPS = Holder("holder", hour=H0)
TO_SPEED = Operator("operator", wishes=((H0, "speed"),))
TO_SPEED_AND_BACK = Operator("operator", wishes=((H0, "speed"), (H0, None)))
# Who was there before.
READ = Speed("before")
READ_BY_TWO = Speed("before", at_most=2)
READ_BY_THREE = Speed("before", at_most=3)
ACCEPTS = Batch("accepts")

# Beginnings: an hour that nothing has read, that the speed layer has read, that both layers hold.
OVER = (broker(*ONE_HOUR),)
OVER_AND_READ = (*OVER, READ)
ACCEPTED = (*OVER_AND_READ, ACCEPTS)
BOTH_ACCEPTED = (broker(*TWO_HOURS), READ, ACCEPTS)
ONE_READ = (broker(RECORD), READ)
TWO_READ = (broker(RECORD, RECORD), READ)
PERSONAL_READ = (broker(PERSONAL, RECORD, ("tick", 60)), READ_BY_TWO)
PERSONAL_ACCEPTED = (*PERSONAL_READ, ACCEPTS)
DEAD_ACCEPTED = (broker(*DEAD_AND_GOOD), READ_BY_TWO, ACCEPTS)
DEAD_PERSONAL_ACCEPTED = (broker(MALFORMED_PERSONAL, ("tick", 60)), READ, ACCEPTS)
# An hour with records, and one without that `main` alone lists.
AN_EMPTY_HOUR_OVER = (broker(*AN_EMPTY_HOUR), ACCEPTS, broker(("tick", 60)))
ACCEPTED_ON_MAIN = (*AN_EMPTY_HOUR_OVER, Batch("accepts on main"))
# Two hours of which the first is refused, and nothing is read.
REFUSED_AND_UNREAD = (broker(RECORD, RECORD, ("tick", 60), RECORD, ("tick", 60)),)
# Two hours that both layers hold, of which one is forgotten.
PAST_BOTH = (broker(*TWO_HOURS), ACCEPTS, broker(RECORD), Speed("after"))
THREE_PUBLISHED = (broker(*[MINUTES, RECORD] * 3, MINUTES), READ_BY_THREE)
# A log that lost two of three published records, and has another one by now.
TRUNCATED = (*THREE_PUBLISHED, broker(*LOST_ITS_END))
ANOTHER_NAMED = (*THREE_PUBLISHED, broker(OTHER), Adopter("adopts"))
# An hour of three records, of which one may vanish from the middle.
THREE_RECORDS = (broker(RECORD, RECORD, RECORD, ("tick", 60)),)
ONE_DEAD_OF_THREE = (broker(RECORD, MALFORMED, RECORD, ("tick", 60)),)

# What their world has beside rows, and what happens in it.
ACCOUNTS, STAMPED, ORPHANS, APART = (
    {name: True} for name in ("accounts", "stamped", "orphans", "apart")
)
CRASH, H0_IS_BAD = {"crashes": 1}, {"bad": frozenset({H0})}
LATE = {"late": True, "answers_to_lose": 1}


def at_random(seed: int) -> tuple[World, list[Actor]]:
    """A larger setting: two or three partitions, four hours, two of each layer, all else."""
    chance = random.Random(seed)
    grace = timedelta(minutes=chance.choice([0, 2, 90]))
    hours = [shift(H0, i) for i in range(4)]
    wishes = tuple(
        (chance.choice(hours), chance.choice(["speed", "batch", None]))
        for _ in range(chance.randrange(5))
    )
    at_most = chance.choice([1, 2, 5])
    at_once = chance.choice([None, 1, 2])
    staging: list[Any] = [{"as_snapshot": chance.random() < 0.25} for _ in range(2)]
    actors: list[Actor] = [
        Broker("kafka", script=script_at_random(chance)),
        Speed(
            "speed", at_most=at_most, at_once=at_once, skew=skew(chance),
            early=chance.random() < 0.7, **staging[0],
        ),
        Batch(
            "batch",
            grace=grace,
            at_once=at_once,
            restates=chance.choice([0, 1, 3]),
            skew=skew(chance),
        ),
    ]  # fmt: skip
    others = [
        Speed("rival", at_most=at_most, skew=skew(chance), **staging[1]),
        Batch("backlog", grace=grace, restates=chance.choice([0, 1]), skew=skew(chance)),
        Operator("operator", wishes=wishes, patient=chance.random() < 0.8),  # type: ignore[arg-type]
        Merger("merger", runs=2),
        RollUp("rollup", runs=4),
        Maintenance(
            "maintenance", runs=3, later=chance.choice([timedelta(0), timedelta(hours=25)])
        ),
        Nights(runs=6),
    ]
    actors += [other for other in others if chance.random() < 0.6]
    world = new_world(
        partitions=2, orphans=True, crashes=chance.choice([0, 1, 4]),
        answers_to_lose=chance.choice([0, 1, 3]),
        bad=frozenset(h for h in hours if chance.random() < 0.2), late=chance.random() < 0.5,
        turns=chance.choice([0, 0, 1, 4]), retries=chance.choice([0, 1, 3]),
    )  # fmt: skip
    if chance.random() < 0.4:
        world, actors = with_accounts(chance, world, actors)
    return world, [*actors, Network("network")]


def with_accounts(
    chance: random.Random, world: World, actors: list[Actor]
) -> tuple[World, list[Actor]]:
    """The same with dead letters, ledger, malformed records, and some that retention takes."""
    fresh = new_world(partitions=2, accounts=True)
    world = replace(world, lake=fresh.lake, letters=fresh.letters)
    script, records = list[Event](), 0
    for event in actors[0].script:  # type: ignore[attr-defined]
        if event[0] == "record":
            records += event[1] == 0
            event = (*event, chance.random() < 0.3)
        if event[0] != "restore":
            script.append(event)
        if records and chance.random() < 0.05:
            script.append(("retain", 0, chance.randrange(records + 1)))
        if records and chance.random() < 0.1:
            script.append(("compact", 0, chance.randrange(records)))
        if records and chance.random() < 0.1:
            script.append(("end transaction", 0))
            records += 1
        if chance.random() < 0.05:
            script.append(("widen",))
    allowed = ("control", "compacted", "retention")
    changed = [replace(a, allow_gaps=allowed) if isinstance(a, Batch) else a for a in actors[1:]]
    return world, [Broker("kafka", script=tuple(script)), *changed]


def skew(chance: random.Random) -> timedelta:
    """How far a machine's clock is off; the product stops above 30 s."""
    return timedelta(seconds=chance.choice([0, 0, -15, 15]))


def script_at_random(chance: random.Random) -> tuple[Event, ...]:
    """Records around the ends of hours, on time, late and early; all hours end and are fixed."""
    events: list[Event] = []
    for _ in range(chance.randrange(4, 14)):
        if chance.random() < 0.65:
            minutes = chance.choice([0, 0, 0, -1, 1, -50, 50, 60 * 24 * 365])
            events.append(("record", chance.choice([0, 0, 0, 1, 1, 2]), minutes))
        else:
            events.append(("tick", chance.choice([0.2, 1, 29.8, 30, 60, 150])))
    if chance.random() < 0.3:
        events.insert(chance.randrange(len(events) + 1), ("restore",))
    # Records at the end, so that a speed layer finds out what became of its branch.
    return (
        *events, ("tick", 60), ("mend",), ("record", 0, 0), ("record", 1, 0), ("record", 2, 0),
        ("tick", 150),
    )  # fmt: skip


@dataclass(frozen=True)
class Setting:
    """Who takes part, what was over before they begin, and what their interleavings must show: the
    parts of `sees`, each between two semicolons."""

    actors: tuple[Actor, ...]
    sees: str
    before: tuple[Actor, ...] = ()
    world: dict[str, Any] = field(default_factory=dict)
    # Takes longest: `make test` walks it at random, `make test-full` explores it whole.
    large: bool = False
    # Whether this is so where the speed layer stages its rows as a snapshot; None: no such setting.
    large_as_snapshot: bool | None = None


def nights(nights: int, runs: int = 1) -> tuple[Actor, ...]:
    """Time that passes anywhere, and orphan removal."""
    return Nights(runs=nights), Maintenance("maintenance", runs=runs, later=timedelta(0))


SETTINGS = {
    "both layers over two hours": Setting(
        (broker(*TWO_HOURS), SPEED, BATCH),
        "speed is refused; batch is refused; speed decides to skip",
    ),
    "either layer killed at any step": Setting(
        (broker(*ONE_HOUR, RECORD), SPEED, BATCH),
        "speed is killed at stage; speed is killed at move; batch is killed at accept; "
        "speed is refused",
        world=CRASH,
    ),
    "an answer lost, and a process killed": Setting(
        (broker(*ONE_HOUR, RECORD), SPEED, BATCH),
        "speed finds that it had landed; batch finds that it had landed; speed is killed at look",
        world=CRASH | {"answers_to_lose": 1}, large_as_snapshot=True,
    ),
    "a publish that lands whenever it likes, or never": Setting(
        (broker(RECORD, RECORD), SPEED, NETWORK),
        "at last, and it lands; at last, and it is refused; for good; "
        "speed finds that it may still land; speed moves a head in its way; "
        "speed finds that it had landed; is killed at fence; "
        "speed moves a head in its way, and nothing is heard of it",
        world=CRASH | {"late": True, "answers_to_lose": 2}, large_as_snapshot=False,
    ),
    "a micro-batch that lands late beside another speed layer": Setting(
        (broker(RECORD), SPEED, Speed("rival"), NETWORK),
        "at last, and it lands; speed finds that it had not landed; finds its offsets published",
        world=LATE,
    ),
    "an hour, its seal or its acceptance that lands late": Setting(
        (broker(*ONE_HOUR), SPEED, BATCH, NETWORK),
        "network brings batch; batch moves a head in its way; batch finds that it had not landed",
        world=LATE,
    ),
    "hours without records, accepted by the commit that seals them or after it": Setting(
        (broker(*AN_EMPTY_HOUR, RECORD), SPEED, BATCH),
        "batch decides to seal and accept; batch is killed at seal; batch is refused; "
        "lists ('2026-11-21T01'",
        world=CRASH, large=True,
    ),
    "hours without records, accepted by two batch jobs": Setting(
        (broker(*AN_EMPTY_HOUR), BATCH, Batch("rival")),
        "batch decides to seal and accept; rival decides to seal and accept; batch is refused",
    ),
    "hours without records, whose seal and acceptance land late": Setting(
        (broker(*AN_EMPTY_HOUR), BATCH, NETWORK),
        "batch decides to seal and accept; network brings batch; batch moves a head in its way",
        world=LATE,
    ),
    "hours without records, and main set back": Setting(
        (broker(("restore", "main"), ("tick", 60), RECORD), SPEED, BATCH),
        "kafka sees main set back; batch decides to merge; speed publishes; "
        "batch decides to seal and accept",
        before=ACCEPTED_ON_MAIN, world=ACCOUNTS,
    ),
    "hours without records, and maintenance that lists them on batch": Setting(
        (broker(("tick", 60), RECORD), SPEED, BATCH, MAINTENANCE),
        "maintenance publishes; batch decides to seal and accept; batch is refused; "
        "maintenance is refused",
        before=ACCEPTED_ON_MAIN, world=ACCOUNTS,
    ),
    "a late publish, expiry and orphan removal": Setting(
        (broker(RECORD), SPEED, MAINTENANCE, NETWORK),
        "at last, and it lands; maintenance removes; speed moves a head in its way",
        world=ORPHANS | LATE, large_as_snapshot=False,
    ),
    "two speed layers, their micro-batches of different sizes": Setting(
        (broker(RECORD, RECORD, RECORD), SPEED, Speed("rival", at_most=2)),
        "finds its offsets published; speed is refused; "
        "decides to stage {'2026-11-21T00': {0: (1, 2)}}",
        large_as_snapshot=False,
    ),
    "two speed layers at an hour's end": Setting(
        (broker(RECORD, ("tick", 60), RECORD), SPEED, Speed("rival", at_most=2)),
        "rival decides to stage {'2026-11-21T00': {0: (0, 1)}, '2026-11-21T01': {0: (1, 2)}}",
        world=CRASH,
    ),
    "two speed layers, and a partition that one of them does not know yet": Setting(
        (broker(RECORD, ("record", 1, 0)), SPEED, Speed("rival")),
        "has to ask again; takes {0: (1, 1), 1: (0, 1)}",
    ),
    "clocks half a minute apart at an hour's end": Setting(
        (
            broker(("tick", 29.9), RECORD, ("tick", 0.2), RECORD, ("tick", 1)),
            Speed("speed", skew=timedelta(seconds=15)),
            Batch("batch", skew=timedelta(seconds=-15)),
        ),
        "reads 2026-11-21T00",
    ),
    "two speed layers that come back to an accepted hour": Setting(
        (broker(RECORD), SPEED, Speed("rival")),
        "speed decides to skip; gives up its skip; is killed at move",
        before=(broker(*ONE_HOUR), BATCH), world=CRASH,
    ),
    "a speed layer that comes back to a refused hour between two accepted ones": Setting(
        (broker(("mend",), RECORD), SPEED, BATCH),
        "wants to read {0: (1, 2)}; wants to skip; batch 2026-11-21T01: it can be published",
        before=(broker(*THREE_HOURS), Batch("before")),
        world={"crashes": 1, "bad": frozenset({H1})},
    ),
    "an hour refused, then fixed": Setting(
        (broker(*TWO_HOURS, ("mend",)), SPEED, BATCH),
        "batch refuses 2026-11-21T00; batch 2026-11-21T00: it can be published",
        world=H0_IS_BAD, large=True,
    ),
    "two batch runs of an hour, and its restatement": Setting(
        (broker(*ONE_HOUR), SPEED, RESTATES, Batch("backlog")),
        "batch restates 2026-11-21T00; another run published first; backlog is refused",
    ),
    "two batch runs of two hours, out of order": Setting(
        (broker(*TWO_HOURS), RESTATES, Batch("backlog")),
        "what main serves in the look-back is not what; another run published first",
        large=True,
    ),
    "an hour given to the speed layer, and taken back": Setting(
        (broker(*ONE_HOUR), SPEED, RESTATES, TO_SPEED_AND_BACK),
        "operator publishes; the speed layer has not read it to its end; "
        "the speed layer skipped it; restates",
        world=CRASH,
    ),
    "an hour given to the batch layer before its time": Setting(
        (
            broker(*ONE_HOUR), SPEED, BATCH, Merger("merger"),
            Operator("operator", wishes=((H0, "batch"), (H0, None))),
        ),
        "the batch layer has not accepted it; it is not sealed; operator publishes",
    ),
    "expiry and orphan removal around what the speed layer stages": Setting(
        (broker(*ONE_HOUR), SPEED, Maintenance("maintenance", runs=2)),
        "maintenance removes ['speed-0/T00']; speed is killed at move; speed is refused",
        world=ORPHANS | CRASH, large_as_snapshot=True,
    ),
    "expiry and orphan removal around what the batch layer stages": Setting(
        (BATCH, MAINTENANCE),
        "its staged snapshot is missing; maintenance removes ['batch-; batch is killed at accept",
        before=OVER, world=ORPHANS | CRASH,
    ),
    "expiry and orphan removal around both layers": Setting(
        (SPEED, BATCH, MAINTENANCE),
        "its staged snapshot is missing; maintenance removes ['speed-0/T00']; "
        "maintenance removes ['batch-",
        before=OVER, world=ORPHANS, large=True, large_as_snapshot=True,
    ),
    (
        "files that nothing refers to, of a process that sleeps, is killed, or has a task "
        "tried again"
    ): Setting(
        (broker(RECORD), SPEED, *nights(3)),
        "a task of it twice; speed is killed at hear; speed is killed at move; speed is refused; "
        "night makes all 1 day, 15:00:00 old; maintenance removes ['speed-0/T00']; "
        "maintenance removes ['speed-0/T00', 'speed-0/T00-again']",
        world=ORPHANS | CRASH | {"retries": 1}, large=True,
    ),
    (
        "files that nothing refers to, of a process that sleeps, and orphans that are looked "
        "for twice"
    ): Setting(
        (broker(RECORD), SPEED, *nights(4, runs=2)),
        "maintenance removes ['speed-0/T00']; maintenance removes ['speed-1/T00']",
        world=ORPHANS,
    ),
    "files that nothing refers to, staged ahead by a process that sleeps": Setting(
        (broker(RECORD, RECORD), EARLY, *nights(2)),
        "ahead; maintenance removes ['speed-0/T00', 'speed-1/T00']; speed is refused; "
        "speed is killed at move",
        world=ORPHANS | CRASH, large=True,
    ),
    "files that nothing refers to, of two speed layers that sleep": Setting(
        (SPEED, Speed("rival"), *nights(2)),
        "speed finds its offsets published; rival is refused; maintenance removes ['rival-0/T00']",
        before=(broker(RECORD),), world=ORPHANS, large=True,
    ),
    "files that nothing refers to, a publish that lands late, and a process that sleeps": Setting(
        (broker(RECORD), SPEED, NETWORK, *nights(2)),
        "at last, and it lands; at last, and it is refused; maintenance removes ['speed-0/T00']; "
        "moves a head",
        world=ORPHANS | LATE | CRASH, large=True,
    ),
    "unreferenced files of a publish that landed and whose answer is a refusal": Setting(
        (broker(RECORD, RECORD), EARLY, ROLLUP, *nights(2)),
        "speed publishes, and the answer is a refusal; speed finds its offsets published; "
        "rollup publishes",
        world=ORPHANS | {"wrong_answers": 1}, large=True,
    ),
    "files that nothing refers to, of an hour that ends while a process sleeps": Setting(
        (broker(("record", 0, 45), ("tick", 60)), SPEED, *nights(2)),
        "speed decides to stage {'2026-11-21T01'; maintenance removes ['speed-1/T00']; "
        "speed publishes",
        before=ONE_READ, world=ORPHANS | CRASH,
    ),
    "files that nothing refers to, of an hour that is accepted while a process sleeps": Setting(
        (SPEED, BATCH, *nights(2)),
        "maintenance removes ['speed-0/T00']; batch publishes; speed is refused",
        before=OVER, world=ORPHANS, large=True,
    ),
    "files that nothing refers to and dead letters, of a process that sleeps": Setting(
        (broker(MALFORMED, RECORD), BY_TWO, *nights(2)),
        "publishes the dead letters speed-0-dead; snapshots of dead letters; "
        "maintenance removes ['speed-0-dead/",
        world=ACCOUNTS | ORPHANS | CRASH, large=True,
    ),
    "files that nothing refers to beside what another speed layer stages as a snapshot": Setting(
        (broker(RECORD, RECORD), SPEED, Speed("rival", at_most=2, as_snapshot=True)),
        "speed finds its offsets published; rival finds its offsets published; rival is refused",
        world=CRASH,
    ),
    "a backlog of hours, cut one at a time": Setting(
        (Speed("speed", at_most=3, at_once=1), Batch("batch", at_once=1)),
        "speed decides to publish ends alone; speed is refused; speed is killed at move; "
        "batch is killed at seal",
        before=(broker(RECORD, ("tick", 210), RECORD),), world=CRASH, large=True,
    ),
    "hours behind a record stamped years ahead": Setting(
        (BY_THREE, BATCH),
        "reads 2026-11-21T00: {0: (0, 2)}; reads 2026-11-21T01: {0: (2, 3)}",
        before=(broker(("record", 0, 60 * 24 * 365), RECORD, ("tick", 60), RECORD, ("tick", 60)),),
    ),
    "a record stamped ahead that the speed layer has published": Setting(
        (broker(("record", 0, 45), ("tick", 60), RECORD), SPEED, BATCH),
        "reads 2026-11-21T00: {0: (0, 1)}",
        world=CRASH,
    ),
    "the branch of the speed layer set back": Setting(
        (broker(RECORD, RECORD, ("restore",), RECORD), SPEED),
        "lies ahead of the position; decides to merge",
        world=CRASH,
    ),
    "the branch of the speed layer set back behind a sealed hour": Setting(
        (broker(("restore",), RECORD, ("mend",)), SPEED, BATCH),
        "kafka sees speed set back to (); speed decides to merge; batch decides to seal",
        before=(broker(*ONE_HOUR), SPEED, Batch("before")), world=H0_IS_BAD,
    ),
    "a batch job's turn against a speed layer, and either killed": Setting(
        (broker(RECORD, RECORD, RECORD), SPEED, RESTATES),
        "batch asks for turn; has the way; taken back; bound of turn; batch is killed at accept",
        before=ACCEPTED, world=CRASH | {"turns": 2},
    ),
    "a batch job's turn while it seals and accepts": Setting(
        (broker(RECORD, RECORD, RECORD), SPEED, BATCH),
        "batch asks for turn; has the way; batch decides to seal",
        before=OVER, world={"turns": 1},
    ),
    "the turns of a restatement and of a maintenance, and anybody killed": Setting(
        (broker(RECORD), SPEED, RESTATES, MAINTENANCE),
        "finds batch-2 before it; finds maintenance-2 before it; takes back its turn; "
        "without a turn",
        before=ACCEPTED, world=CRASH | {"turns": 2},
    ),
    "the turns of a restatement, of a maintenance and of an operator": Setting(
        (RESTATES, MAINTENANCE, TO_SPEED),
        "finds batch-3 before it; finds maintenance-3 before it; finds operator-3 before it",
        before=ACCEPTED, world={"turns": 3},
    ),
    "an hour accepted while the speed layer works off the refused one before it": Setting(
        (broker(("mend",)), SPEED, BATCH),
        "speed publishes; batch reads 2026-11-21T01; batch decides 2026-11-21T01 again; "
        "batch publishes; batch reads 2026-11-21T00",
        before=REFUSED_AND_UNREAD, world=H0_IS_BAD,
    ),
    "files put together while both layers are at work": Setting(
        (broker(RECORD, ("tick", 60)), SPEED, BATCH, ROLLUP),
        "rollup writes; rollup is refused; rollup publishes; rollup gives it up; speed is refused",
        before=TWO_READ,
    ),
    "files put together by a process that is killed or loses an answer, and by another": Setting(
        (ROLLUP, RollUp("rival"), BATCH),
        "rollup is killed at swap_files; rollup finds that it had landed; rival gives it up; "
        "batch is refused",
        before=(broker(RECORD, RECORD, ("tick", 60)), READ), world=CRASH | {"answers_to_lose": 1},
    ),
    "files put together of an hour that is given to the speed layer and taken back": Setting(
        (RollUp("rollup", runs=2), BATCH, TO_SPEED_AND_BACK),
        "rollup publishes; rollup gives it up; operator publishes; operator is refused",
        before=(broker(RECORD, RECORD, ("tick", 60)), READ),
    ),
    "micro-batches staged ahead, and killed anywhere": Setting(
        (broker(RECORD, RECORD, RECORD), EARLY, RESTATES),
        "speed stages {'2026-11-21T01': {0: (2, 3)}} ahead; speed is refused; "
        "speed is killed at move",
        before=ACCEPTED, world=CRASH | {"turns": 1},
    ),
    "micro-batches staged ahead by two speed layers": Setting(
        (broker(RECORD, RECORD, RECORD), EARLY, Speed("rival", at_most=2)),
        "speed stages {'2026-11-21T00': {0: (1, 2)}} ahead; finds its offsets published; "
        "decides to stage",
    ),
    "micro-batches staged ahead as an hour ends, of a record that belongs to the next": Setting(
        (broker(RECORD, ("record", 0, 45), ("tick", 60)), EARLY, BATCH),
        "speed stages {'2026-11-21T00': {0: (1, 2)}} ahead; "
        "decides to stage {'2026-11-21T01': {0: (1, 2)}}",
        large_as_snapshot=False,
    ),
    "micro-batches staged ahead while what is old is expired and removed": Setting(
        (broker(RECORD, RECORD), EARLY, MAINTENANCE),
        "ahead; maintenance removes ['speed-; speed is killed at move",
        world=ORPHANS | CRASH, large_as_snapshot=True,
    ),
    "micro-batches staged ahead, a publish that lands late, and the branch set back": Setting(
        (broker(RECORD, RECORD, ("restore",), RECORD), EARLY, NETWORK),
        "ahead; at last, and it lands; lies ahead of the position",
        world=LATE,
    ),
    "micro-batches with dead letters staged ahead": Setting(
        (broker(MALFORMED, MALFORMED, RECORD), EARLY, BATCH),
        "ahead; speed publishes the dead letters speed-; speed is killed at send_letters",
        world=ACCOUNTS | CRASH,
    ),
    "micro-batches staged ahead of a recreated topic": Setting(
        (broker(RECORD, RECORD, RECREATED, *[RECORD] * 3), EARLY, ADOPTER),
        "ahead; speed stops; adopter publishes",
        world={"accounts": True, "stamped": True, "bad": frozenset({H0})},
    ),
    "dead letters of both layers": Setting(
        (broker(*DEAD_AND_GOOD), BY_TWO, BATCH),
        "speed publishes the dead letters speed-; batch publishes the dead letters batch-; "
        "is refused with the dead letters; not due; batch records ['batch-seal",
        world=ACCOUNTS,
    ),
    "a speed layer with dead letters that is killed or loses an answer": Setting(
        (broker(MALFORMED, MALFORMED, RECORD), SPEED),
        "speed is killed at send_letters; speed has something to finish; "
        "speed finds the dead letters speed-; "
        "publishes the dead letters speed-0-dead, and the answer is lost",
        world=ACCOUNTS | CRASH | {"answers_to_lose": 1},
    ),
    "a batch job with dead letters that is killed anywhere": Setting(
        (broker(MALFORMED), BATCH, SPEED),
        "batch is killed at record; batch is killed at send_letters; batch has something to finish",
        before=(broker(*DEAD_AND_GOOD), READ_BY_TWO), world=ACCOUNTS | CRASH, large=True,
    ),
    "dead letters that become rows, by two restatements at once": Setting(
        (broker(("widen",)), RESTATES, Batch("rival", restates=1)),
        "another run published first; rival is refused with the dead letters; not due; "
        "stages [batch-2/T00[(0, 0)",
        before=DEAD_ACCEPTED, world=ACCOUNTS,
    ),
    "dead letters of an hour that is given to the speed layer and taken back": Setting(
        (TO_SPEED_AND_BACK, RESTATES),
        "operator publishes the dead letters operator-; not due; batch publishes the dead letters",
        before=DEAD_ACCEPTED, world=ACCOUNTS | CRASH,
    ),
    "dead letters that wait while what is old is expired and removed": Setting(
        (broker(MALFORMED), SPEED, MAINTENANCE),
        "maintenance expires 1 snapshots of dead letters; maintenance removes ['speed-0-dead/T00']",
        world=ACCOUNTS | ORPHANS | CRASH, large_as_snapshot=False,
    ),
    "hours that are no longer remembered, restated by two at once": Setting(
        (RESTATES, Batch("rival", restates=1)),
        "batch restates 2026-11-21T00; batch 2026-11-21T00: another run published first; "
        "batch stages [batch-4/T00[(0, 0)]]; rival publishes the dead letters rival-",
        before=(
            broker(MALFORMED, *TWO_HOURS[1:]), ACCEPTS, broker(RECORD, ("widen",)), Speed("after"),
        ),
        world=ACCOUNTS,
    ),
    "retention that overtakes both layers": Setting(
        (
            broker(RECORD, RECORD, ("retain", 0, 1), ("tick", 60)),
            SPEED,
            Batch("batch", allow_gaps=("retention",)),
        ),
        "speed finds the log to begin at {0: 1}; speed decides to record {0: (0, 1)} as lost; "
        "speed finds records of {0: (0, 1)} gone; speed is refused; batch publishes",
        world=ACCOUNTS,
    ),
    "retention that overtakes an hour that may have no gap": Setting(
        (broker(("retain", 0, 2)), BY_TWO, BATCH),
        "batch refuses 2026-11-21T00: gaps; batch stages [batch-; speed publishes the dead letters",
        before=(broker(*DEAD_AND_GOOD),), world=ACCOUNTS,
    ),
    "an hour that Kafka lost, restated from what is accepted": Setting(
        (broker(("retain", 0, 2), RECORD), SPEED, Batch("batch", restates=2)),
        "batch restates 2026-11-21T00; batch stages [batch-; batch publishes the dead letters",
        before=(broker(*DEAD_AND_GOOD), ACCEPTS), world=ACCOUNTS,
    ),
    (
        "a record that compaction takes from the middle of an hour, before or after it was served"
    ): Setting(
        (broker(("compact", 0, 1)), BY_THREE, Batch("batch", allow_gaps=("control", "compacted"))),
        "batch stages [batch-1/T00[(0, 0), (0, 2)]]; T00[(0, 0), (0, 1), (0, 2)]]; "
        "speed publishes; batch 2026-11-21T00: it can be published; "
        "what main serves in the look-back is not what",
        before=THREE_RECORDS, world=ACCOUNTS,
    ),
    "a dead letter whose record compaction takes from the middle of an hour": Setting(
        (broker(("compact", 0, 1)), BY_THREE, Batch("batch", allow_gaps=("control", "compacted"))),
        "speed publishes the dead letters; batch publishes the dead letters; "
        "batch 2026-11-21T00: it can be published",
        before=ONE_DEAD_OF_THREE, world=ACCOUNTS,
    ),
    "records that compaction takes from the middle of an hour that may lack none": Setting(
        (
            broker(("compact", 0, 1), ("compact", 0, 3)),
            Speed("speed", at_most=4),
            Batch("batch", allow_gaps=("control",)),
        ),
        "batch refuses 2026-11-21T00: gaps: expected only control, found; batch stages [batch-",
        before=(broker(RECORD, MALFORMED, ("end transaction", 0), RECORD, ("tick", 60)),),
        world=ACCOUNTS,
    ),
    "an hour from whose middle records vanish after they were served, restated": Setting(
        (broker(("compact", 0, 1), ("retain", 0, 1), RECORD), SPEED, Batch("batch", restates=2)),
        "batch restates 2026-11-21T00; batch stages [batch-; batch publishes the dead letters",
        before=(broker(RECORD, MALFORMED, RECORD, ("tick", 60)), ACCEPTS), world=ACCOUNTS,
        large=True,
    ),
    "a topic recreated under both layers": Setting(
        (broker(RECORD, RECREATED, RECORD, RECORD), SPEED, BATCH, ADOPTER),
        "speed stops: ; speed finds records of {0: (0, 1)} gone; finds the log shorter; "
        "adopter is refused; Kafka no longer has it",
        world=ACCOUNTS | STAMPED,
    ),
    "a topic recreated behind a backlog of the batch layer": Setting(
        (broker(RECORD), SPEED, BATCH, ADOPTER, Adopter("other")),
        "batch refuses 2026-11-21T00: Kafka no longer; other is refused; "
        "adopter is killed at adopt",
        before=(broker(RECORD, ("tick", 60), RECORD), READ, broker(RECREATED)),
        world=ACCOUNTS | STAMPED | CRASH,
    ),
    "a topic recreated behind a backlog of the speed layer": Setting(
        (broker(RECORD), SPEED, BATCH, ADOPTER),
        "adopter publishes; speed streams from {0: 0}",
        before=(broker(RECORD, ("tick", 60), RECORD), Batch("before"), broker(RECREATED)),
        world=ACCOUNTS | STAMPED | CRASH,
    ),
    "a log that lost its end, and that got records before it was adopted": Setting(
        (broker(("adopted",), ("tick", 60), RECORD), SPEED, BATCH, ADOPTER),
        "speed streams from {0: 1}; batch refuses 2026-11-21T00: Kafka no longer; "
        "adopter is killed at adopt",
        before=TRUNCATED, world=ACCOUNTS | STAMPED | CRASH,
    ),
    "another topic named for a moment, and put right": Setting(
        (broker(OTHER, ADOPTED, BACK, RECORD), SPEED, BATCH, ADOPTER),
        "speed stops: ; adopter publishes; speed streams from {0: 1}; adopter is refused",
        before=ONE_READ, world=ACCOUNTS | STAMPED, large=True,
    ),
    "another topic that has records, named and corrected by two operators": Setting(
        (broker(ADOPTED, BACK), ADOPTER, Adopter("other"), BATCH),
        "adopter is refused; other is refused; batch refuses 2026-11-21T00: Kafka no longer; "
        "batch publishes",
        before=(broker(RECORD), READ, broker(OTHER, RECORD)), world=ACCOUNTS | STAMPED | CRASH,
        large=True,
    ),
    "another topic named behind a backlog of both layers, and put right": Setting(
        (broker(ADOPTED, BACK, ADOPTED, ("tick", 240)), BATCH, ADOPTER),
        "batch refuses 2026-11-21T01: Kafka no longer; batch reads 2026-11-21T01: {0: (1, 2)}",
        before=(
            broker(RECORD, ("tick", 60), RECORD), Batch("before"), Speed("reads"), broker(OTHER),
        ),
        world=ACCOUNTS | STAMPED,
    ),
    "a topic that loses its end while another one is named, or while it is adopted again": Setting(
        (broker(BACK, *LOSES_ITS_END), BATCH, ADOPTER),
        "adopter is refused; adopter publishes; batch refuses 2026-11-21T00: Kafka no longer",
        before=ANOTHER_NAMED, world=ACCOUNTS | STAMPED, large=True,
    ),
    "a clock that is set while a job runs": Setting(
        (
            broker(("tick", 15), RECORD, ("tick", 20)),
            Speed("speed", watched=True, jumps=(10 * MINUTE, -10 * MINUTE, timedelta(0))),
            Batch("batch", watched=True, jumps=(10 * MINUTE, timedelta(0))),
        ),
        "speed finds its clock wrong; batch's clock is set 0:10:00 off; "
        "batch finds its clock wrong",
        world=STAMPED,
    ),
    "snapshots and tags that expire by their age": Setting(
        (broker(("tick", 60)), RESTATES, Maintenance("maintenance", later=timedelta(days=8))),
        "maintenance finds 0 orphans and 0 tags; maintenance finds 0 orphans and 1 tags",
        before=ACCEPTED, world=STAMPED,
    ),
    "what branches say in table properties, removed with the snapshots that need them": Setting(
        (broker(RECORD), SPEED, MAINTENANCE, NETWORK),
        "maintenance is refused; speed is refused; at last, and it lands; "
        "at last, and it is refused",
        before=ACCEPTED, world=LATE | APART,
    ),
    "what branches say in table properties, said again after it was taken back": Setting(
        (broker(("restore",), RECORD), SPEED, TO_SPEED_AND_BACK, MAINTENANCE),
        "operator publishes; maintenance is refused; speed is refused",
        before=ACCEPTED, world=APART,
    ),
    "rows that are staged while another program expires snapshots": Setting(
        (broker(RECORD), AS_SNAPSHOT, EXPIRY),
        "expiry deletes ['speed-; speed is refused; speed publishes",
        world=ORPHANS,
    ),
    "an hour that is rebuilt while another program expires snapshots": Setting(
        (BATCH, EXPIRY),
        "expiry deletes ['batch-; batch is refused; its staged snapshot is missing; "
        "batch publishes",
        before=OVER, world=ORPHANS,
    ),
    "dead letters that are staged while another program expires snapshots": Setting(
        (broker(MALFORMED, MALFORMED, RECORD), SPEED, Expiry("expiry", of_letters=True)),
        "expiry expires snapshots with []; speed is killed at send_letters; "
        "speed publishes the dead letters",
        world=ACCOUNTS | ORPHANS | CRASH,
    ),
    "dead letters of both layers while another program expires snapshots": Setting(
        (BATCH, BY_TWO, Expiry("expiry", of_letters=True)),
        "expiry expires; batch publishes the dead letters; speed publishes the dead letters; "
        "is refused with",
        before=(broker(*DEAD_AND_GOOD),), world=ACCOUNTS | ORPHANS,
    ),
    "hours that expire beside both layers": Setting(
        (broker(RECORD, ("tick", 60)), SPEED, BATCH, RETENTION_TWICE),
        "retention decides to expire ('2026-11-21T00',); retention is refused; "
        "retention is killed at expire; batch is refused; speed is refused",
        before=BOTH_ACCEPTED, world=CRASH,
    ),
    "an hour that expires while it is rebuilt": Setting(
        (RESTATES, RETENTION_TWICE),
        "batch 2026-11-21T00: its rows have expired; batch finds that 2026-11-21T00 has expired; "
        "batch is refused; retention is refused; retention is killed at record",
        before=BOTH_ACCEPTED, world=ACCOUNTS | CRASH,
    ),
    "hours that expire before the speed layer has read them": Setting(
        (SPEED, BATCH, RETENTION_TWICE),
        "retention decides to expire; speed decides to skip; speed is refused; "
        "retention is refused",
        before=(broker(*TWO_HOURS),),
    ),
    "an expiry that lands late, or never": Setting(
        (broker(RECORD), SPEED, RETENTION, NETWORK),
        "network brings retention; retention moves a head in its way; "
        "retention finds that it had landed",
        before=BOTH_ACCEPTED, world=LATE,
    ),
    "an hour that an operator gave to the speed layer expires": Setting(
        (
            RESTATES,
            Operator("operator", wishes=((H0, "speed"), (H0, None), (H0, "speed"))),
            RETENTION_TWICE,
        ),
        "operator publishes; found that they have expired; retention decides to expire",
        before=BOTH_ACCEPTED,
    ),
    "hours that expire, and a branch that is set back": Setting(
        (broker(("restore",), RECORD), SPEED, Merger("merger"), RETENTION_TWICE),
        "sees speed set back; retention decides to expire; merger publishes",
        before=BOTH_ACCEPTED,
    ),
    "hours with dead letters that expire while they are rebuilt": Setting(
        (RESTATES, RETENTION),
        "retention decides to expire; retention expires the dead letters of ('2026-11-21T00',); "
        "retention is refused; batch finds that 2026",
        before=(broker(*DEAD_AND_GOOD, RECORD, ("tick", 60)), READ, ACCEPTS), world=ACCOUNTS,
    ),
    "hours imported beside both layers": Setting(
        (broker(RECORD, ("tick", 60)), SPEED, BATCH, IMPORTER),
        "importer publishes; importer is refused; batch is refused; speed is refused",
        before=OVER_AND_READ, large=True,
    ),
    "hours imported while the stream's first is restated, and a kill": Setting(
        (RESTATES, IMPORTER),
        "importer is killed at accept; importer is killed at check; importer is refused; "
        "batch is refused",
        before=BOTH_ACCEPTED, world=CRASH,
    ),
    "two imports of the same hours": Setting(
        (IMPORTER, Importer("rival")),
        "importer gives its files up; rival gives its files up; importer is refused",
        before=OVER_AND_READ, world=CRASH,
    ),
    "an import that is taken back beside both layers": Setting(
        (broker(RECORD), SPEED, BATCH, Undoer("undoer")),
        "undoer publishes; undoer is refused; batch is refused; speed is refused",
        before=(broker(*ONE_HOUR), READ, Importer("imports", most=1)),
    ),
    "an import that is taken back step by step while another one imports, and a kill": Setting(
        (IMPORTER, Undoer("undoer", runs=2)),
        "undoer is killed at undo; undoer is refused; importer gives its files up; "
        "importer is refused",
        before=(broker(*ONE_HOUR), READ, Importer("imports")), world=CRASH,
    ),
    "an import that lands late, or never": Setting(
        (broker(RECORD), SPEED, IMPORTER, NETWORK),
        "network brings importer; importer moves a head in its way; "
        "importer finds that it had landed",
        before=OVER_AND_READ, world=LATE,
    ),
    "files to import that nothing refers to, of a process that sleeps": Setting(
        (IMPORTS_ONE, *nights(2)),
        "maintenance removes ['importer-; importer gives its files up; importer publishes",
        before=ONE_READ, world=ORPHANS,
    ),
    "imported hours, and the speed layer's branch is set back": Setting(
        (broker(("restore",), RECORD), SPEED, Merger("merger"), IMPORTS_ONE),
        "sees speed set back; importer publishes; importer is refused",
        before=BOTH_ACCEPTED,
    ),
    "an hour that is rebuilt while records of it are erased": Setting(
        (RESTATES, ERASER),
        "eraser publishes; eraser is refused; batch 2026-11-21T00: what main serves; "
        "eraser finds nothing left",
        before=PERSONAL_ACCEPTED, world=ACCOUNTS,
    ),
    "an hour that is rebuilt while records of it are erased, and a kill": Setting(
        (RESTATES, ERASER),
        "eraser is killed at swap_rows; eraser is killed at follow; batch is killed at accept",
        before=PERSONAL_ACCEPTED, world=ACCOUNTS | CRASH, large=True,
    ),
    "an hour that is rebuilt while dead letters of it are erased": Setting(
        (RESTATES, ERASER),
        "eraser finds dead letters {'2026-11-21T00': 1}; eraser erases dead letters; "
        "eraser is refused; batch is refused; batch records ['eraser-place-",
        before=DEAD_PERSONAL_ACCEPTED, world=ACCOUNTS, large=True,
    ),
    "an hour that is rebuilt while dead letters of it are erased, and a kill": Setting(
        (RESTATES, ERASER),
        "eraser is killed at swap_letters; eraser is killed at record; "
        "batch is killed at send_letters",
        before=(broker(MALFORMED_PERSONAL, RECORD, ("tick", 60)), READ_BY_TWO, ACCEPTS),
        world=ACCOUNTS | CRASH, large=True,
    ),
    "micro-batches that are staged ahead of an erasure": Setting(
        (EARLY, ERASER),
        "ahead; eraser is refused; speed is refused; speed decides to stage",
        before=(broker(PERSONAL, PERSONAL),), world=ACCOUNTS,
    ),
    "records that are erased before the speed layer has read them": Setting(
        (SPEED, ERASER),
        "eraser waits for the layers to read; eraser finds dead letters; "
        "eraser erases dead letters",
        before=(broker(MALFORMED_PERSONAL, PERSONAL),), world=ACCOUNTS,
    ),
    "records of an hour that is not accepted are erased, then Kafka deletes them": Setting(
        (broker(("retain", 0, 1)), BATCH, ERASER),
        "sees retain; eraser publishes; batch publishes",
        before=PERSONAL_READ, world=ACCOUNTS, large=True,
    ),
    "records of an accepted hour are erased, then Kafka deletes them, and it is rebuilt": Setting(
        (broker(("retain", 0, 1)), RESTATES, ERASER),
        "sees retain; eraser publishes; batch publishes",
        before=PERSONAL_ACCEPTED, world=ACCOUNTS, large=True,
    ),
    "files put together while their records are erased": Setting(
        (ROLLUP, ERASER),
        "rollup gives it up; eraser is refused; rollup is refused; eraser publishes",
        before=(broker(PERSONAL, RECORD), READ), world=ACCOUNTS,
    ),
    "an erasure that lands late, or never": Setting(
        (SPEED, ERASER, NETWORK),
        "network brings eraser; eraser moves a head in its way; eraser finds that it had landed",
        before=(broker(PERSONAL), READ, broker(RECORD)), world=ACCOUNTS | LATE,
    ),
    "files without erased rows that nothing refers to, of a process that sleeps": Setting(
        (ERASER, *nights(2)),
        "maintenance removes ['eraser-; eraser gives its files up; eraser is refused",
        before=(broker(PERSONAL, RECORD), READ_BY_TWO), world=ACCOUNTS | ORPHANS,
    ),
    "an hour that an operator gives to the speed layer while records of it are erased": Setting(
        (TO_SPEED, ERASER),
        "operator publishes; operator is refused; eraser is refused",
        before=PERSONAL_ACCEPTED, world=ACCOUNTS,
    ),
    "an hour that is kept while an erasure of its records is requested": Setting(
        (KEEPS, ERASER),
        "holder publishes; holder is refused; eraser is refused; eraser finds nothing left",
        before=PERSONAL_ACCEPTED, world=ACCOUNTS,
    ),
    "an hour that is kept while an erasure is requested, before its records are read": Setting(
        (SPEED, KEEPS, ERASER),
        "holder publishes; holder is refused; eraser is refused; eraser has something to finish",
        before=(broker(MALFORMED_PERSONAL),), world=ACCOUNTS, large=True,
    ),
    "records that arrive during an erasure are erased by the next request": Setting(
        (broker(PERSONAL), SPEED, Eraser("eraser", again=True)),
        "eraser asks again; eraser is refused; speed is refused",
        before=(broker(PERSONAL), READ), world=ACCOUNTS,
    ),
    "files of former snapshots are recorded beside the speed layer, and a kill": Setting(
        (broker(RECORD), SPEED, Eraser("eraser", former=H0)),
        "eraser is killed at unserved; eraser is killed at record; eraser is refused; "
        "speed is refused",
        before=(broker(PERSONAL, ("tick", 60)), READ, ACCEPTS), world=ACCOUNTS | CRASH, large=True,
    ),
    "files put together, and orphans removed before they are in place": Setting(
        (ROLLUP, MAINTENANCE),
        "maintenance removes ['rollup-; rollup gives it up; rollup is refused; rollup publishes",
        before=TWO_READ, world=ORPHANS | CRASH,
    ),
}  # fmt: skip

SETTINGS |= {
    f"{name}, staged as a snapshot": replace(
        one,
        actors=tuple(
            replace(a, as_snapshot=True) if isinstance(a, Speed) else a for a in one.actors
        ),
        large=one.large_as_snapshot,
    )
    for name, one in SETTINGS.items()
    if one.large_as_snapshot is not None
}
LARGE = [name for name, one in SETTINGS.items() if one.large]
