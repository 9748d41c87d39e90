"""Settings to explore: who takes part, and what happens to Kafka meanwhile."""

from __future__ import annotations

import random
from datetime import timedelta
from typing import Any

from actors import Actor, Broker, Maintenance, Merger, Network, Nights, Operator
from layers import Batch, RollUp, Speed
from small_world import BEGIN, World, new_world
from values import replace

from anabranch.offsets.hours import hour_of, shift

H0 = hour_of(BEGIN)
H1, H2 = shift(H0, 1), shift(H0, 2)

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


def at_random(seed: int) -> tuple[World, list[Actor]]:
    """A larger setting: two partitions and perhaps a third, about four hours, two of each layer,
    everybody else too."""
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
            "speed",
            at_most=at_most,
            at_once=at_once,
            skew=skew(chance),
            early=chance.random() < 0.7,
            **staging[0],
        ),
        Batch(
            "batch",
            grace=grace,
            at_once=at_once,
            restates=chance.choice([0, 1, 3]),
            skew=skew(chance),
        ),
    ]
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
        partitions=2,
        orphans=True,
        crashes=chance.choice([0, 1, 4]),
        answers_to_lose=chance.choice([0, 1, 3]),
        bad=frozenset(h for h in hours if chance.random() < 0.2),
        late=chance.random() < 0.5,
        turns=chance.choice([0, 0, 1, 4]),
        retries=chance.choice([0, 1, 3]),
    )
    if chance.random() < 0.4:
        world, actors = with_accounts(chance, world, actors)
    return world, [*actors, Network("network")]


def with_accounts(
    chance: random.Random, world: World, actors: list[Actor]
) -> tuple[World, list[Actor]]:
    """The same with dead letters and the ledger, and with records that are malformed or that
    retention takes."""
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
    """Records around the ends of hours, on time, late and early; in the end all hours have ended
    and are fixed."""
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
        *events,
        ("tick", 60),
        ("mend",),
        ("record", 0, 0),
        ("record", 1, 0),
        ("record", 2, 0),
        ("tick", 150),
    )
