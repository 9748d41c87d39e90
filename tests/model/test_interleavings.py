"""Every interleaving of small settings: whatever is paused or killed wherever, `main` is exact.

Each setting says what its exploration must have seen, so that the hazard is known to have happened.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import pytest
from actors import Actor, Adopter, Expiry, Maintenance, Merger, Network, Nights, Operator, Retention
from budget import budget
from eraser import Eraser, Holder
from exploration import explore, settle, walk
from importer import Importer, Undoer
from layers import Batch, RollUp, Speed
from settings import (
    ADOPTED,
    AN_EMPTY_HOUR,
    BACK,
    DEAD_AND_GOOD,
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
    RECREATED,
    THREE_HOURS,
    TWO_HOURS,
    broker,
)
from small_world import MINUTE, new_world
from values import replace


@dataclass(frozen=True)
class Setting:
    """Who takes part, what was over before they begin, and what their interleavings must show."""

    actors: tuple[Actor, ...]
    sees: tuple[str, ...]
    before: tuple[Actor, ...] = ()
    world: dict[str, Any] = field(default_factory=dict)


def nights(nights: int, runs: int = 1) -> tuple[Actor, ...]:
    """Time that passes anywhere, and orphan removal."""
    return Nights(runs=nights), Maintenance("maintenance", runs=runs, later=timedelta(0))


SETTINGS = {
    "both layers over two hours": Setting(
        (broker(*TWO_HOURS), Speed("speed"), Batch("batch")),
        ("speed is refused", "batch is refused", "speed decides to skip"),
    ),
    "either layer killed at any step": Setting(
        (broker(*ONE_HOUR, RECORD), Speed("speed"), Batch("batch")),
        (
            "speed is killed at stage",
            "speed is killed at move",
            "batch is killed at accept",
            "speed is refused",
        ),
        world={"crashes": 1},
    ),
    "an answer lost, and a process killed": Setting(
        (broker(*ONE_HOUR, RECORD), Speed("speed"), Batch("batch")),
        (
            "speed finds that it had landed",
            "batch finds that it had landed",
            "speed is killed at look",
        ),
        world={"crashes": 1, "answers_to_lose": 1},
    ),
    "a publish that lands whenever it likes, or never": Setting(
        (broker(RECORD, RECORD), Speed("speed"), Network("network")),
        (
            "at last, and it lands",
            "at last, and it is refused",
            "for good",
            "speed finds that it may still land",
            "speed moves a head in its way",
            "speed finds that it had landed",
            "is killed at fence",
            "speed moves a head in its way, and nothing is heard of it",
        ),
        world={"late": True, "answers_to_lose": 2, "crashes": 1},
    ),
    "a micro-batch that lands late beside another speed layer": Setting(
        (broker(RECORD), Speed("speed"), Speed("rival"), Network("network")),
        (
            "at last, and it lands",
            "speed finds that it had not landed",
            "finds its offsets published",
        ),
        world={"late": True, "answers_to_lose": 1},
    ),
    "an hour, its seal or its acceptance that lands late": Setting(
        (broker(*ONE_HOUR), Speed("speed"), Batch("batch"), Network("network")),
        (
            "network brings batch",
            "batch moves a head in its way",
            "batch finds that it had not landed",
        ),
        world={"late": True, "answers_to_lose": 1},
    ),
    "hours without records, accepted by the commit that seals them or after it": Setting(
        (broker(*AN_EMPTY_HOUR, RECORD), Speed("speed"), Batch("batch")),
        (
            "batch decides to seal and accept",
            "batch is killed at seal",
            "batch is refused",
            "lists ('2026-11-21T01'",
        ),
        world={"crashes": 1},
    ),
    "hours without records, accepted by two batch jobs": Setting(
        (broker(*AN_EMPTY_HOUR), Batch("batch"), Batch("rival")),
        (
            "batch decides to seal and accept",
            "rival decides to seal and accept",
            "batch is refused",
        ),
    ),
    "hours without records, whose seal and acceptance land late": Setting(
        (broker(*AN_EMPTY_HOUR), Batch("batch"), Network("network")),
        (
            "batch decides to seal and accept",
            "network brings batch",
            "batch moves a head in its way",
        ),
        world={"late": True, "answers_to_lose": 1},
    ),
    "hours without records, and main set back": Setting(
        (broker(("restore", "main"), ("tick", 60), RECORD), Speed("speed"), Batch("batch")),
        (
            "kafka sees main set back",
            "batch decides to merge",
            "speed publishes",
            "batch decides to seal and accept",
        ),
        before=(
            broker(*AN_EMPTY_HOUR),
            Batch("before"),
            broker(("tick", 60)),
            Batch("of main alone"),
        ),
        world={"accounts": True},
    ),
    "hours without records, and maintenance that lists them on batch": Setting(
        (broker(("tick", 60), RECORD), Speed("speed"), Batch("batch"), Maintenance("maintenance")),
        (
            "maintenance publishes",
            "batch decides to seal and accept",
            "batch is refused",
            "maintenance is refused",
        ),
        before=(
            broker(*AN_EMPTY_HOUR),
            Batch("before"),
            broker(("tick", 60)),
            Batch("of main alone"),
        ),
        world={"accounts": True},
    ),
    "a late publish, expiry and orphan removal": Setting(
        (broker(RECORD), Speed("speed"), Maintenance("maintenance"), Network("network")),
        ("at last, and it lands", "maintenance removes", "speed moves a head in its way"),
        world={"late": True, "answers_to_lose": 1, "orphans": True},
    ),
    "two speed layers, their micro-batches of different sizes": Setting(
        (broker(RECORD, RECORD, RECORD), Speed("speed"), Speed("rival", at_most=2)),
        (
            "finds its offsets published",
            "speed is refused",
            "decides to stage {'2026-11-21T00': {0: (1, 2)}}",
        ),
    ),
    "two speed layers at an hour's end": Setting(
        (broker(RECORD, ("tick", 60), RECORD), Speed("speed"), Speed("rival", at_most=2)),
        ("rival decides to stage {'2026-11-21T00': {0: (0, 1)}, '2026-11-21T01': {0: (1, 2)}}",),
        world={"crashes": 1},
    ),
    "two speed layers, and a partition that one of them does not know yet": Setting(
        (broker(RECORD, ("record", 1, 0)), Speed("speed"), Speed("rival")),
        ("has to ask again", "takes {0: (1, 1), 1: (0, 1)}"),
    ),
    "clocks half a minute apart at an hour's end": Setting(
        (
            broker(("tick", 29.9), RECORD, ("tick", 0.2), RECORD, ("tick", 1)),
            Speed("speed", skew=timedelta(seconds=15)),
            Batch("batch", skew=timedelta(seconds=-15)),
        ),
        ("reads 2026-11-21T00",),
    ),
    "two speed layers that come back to an accepted hour": Setting(
        (broker(RECORD), Speed("speed"), Speed("rival")),
        ("speed decides to skip", "gives up its skip", "is killed at move"),
        before=(broker(*ONE_HOUR), Batch("batch")),
        world={"crashes": 1},
    ),
    "a speed layer that comes back to a refused hour between two accepted ones": Setting(
        (broker(("mend",), RECORD), Speed("speed"), Batch("batch")),
        ("wants to read {0: (1, 2)}", "wants to skip", "batch 2026-11-21T01: it can be published"),
        before=(broker(*THREE_HOURS), Batch("before")),
        world={"crashes": 1, "bad": frozenset({H1})},
    ),
    "an hour refused, then fixed": Setting(
        (broker(*TWO_HOURS, ("mend",)), Speed("speed"), Batch("batch")),
        ("batch refuses 2026-11-21T00", "batch 2026-11-21T00: it can be published"),
        world={"bad": frozenset({H0})},
    ),
    "two batch runs of an hour, and its restatement": Setting(
        (broker(*ONE_HOUR), Speed("speed"), Batch("batch", restates=1), Batch("backlog")),
        ("batch restates 2026-11-21T00", "another run published first", "backlog is refused"),
    ),
    "two batch runs of two hours, out of order": Setting(
        (broker(*TWO_HOURS), Batch("batch", restates=1), Batch("backlog")),
        ("what main serves in the look-back is not what", "another run published first"),
    ),
    "an hour given to the speed layer, and taken back": Setting(
        (
            broker(*ONE_HOUR),
            Speed("speed"),
            Batch("batch", restates=1),
            Operator("operator", wishes=((H0, "speed"), (H0, None))),
        ),
        (
            "operator publishes",
            "the speed layer has not read it to its end",
            "the speed layer skipped it",
            "restates",
        ),
        world={"crashes": 1},
    ),
    "an hour given to the batch layer before its time": Setting(
        (
            broker(*ONE_HOUR),
            Speed("speed"),
            Batch("batch"),
            Merger("merger"),
            Operator("operator", wishes=((H0, "batch"), (H0, None))),
        ),
        ("the batch layer has not accepted it", "it is not sealed", "operator publishes"),
    ),
    "expiry and orphan removal around what the speed layer stages": Setting(
        (broker(*ONE_HOUR), Speed("speed"), Maintenance("maintenance", runs=2)),
        ("maintenance removes ['speed-0/T00']", "speed is killed at move", "speed is refused"),
        world={"crashes": 1, "orphans": True},
    ),
    "expiry and orphan removal around what the batch layer stages": Setting(
        (Batch("batch"), Maintenance("maintenance")),
        (
            "its staged snapshot is missing",
            "maintenance removes ['batch-",
            "batch is killed at accept",
        ),
        before=(broker(*ONE_HOUR),),
        world={"crashes": 1, "orphans": True},
    ),
    "expiry and orphan removal around both layers": Setting(
        (Speed("speed"), Batch("batch"), Maintenance("maintenance")),
        (
            "its staged snapshot is missing",
            "maintenance removes ['speed-0/T00']",
            "maintenance removes ['batch-",
        ),
        before=(broker(*ONE_HOUR),),
        world={"orphans": True},
    ),
    (
        "files that nothing refers to, of a process that sleeps, is killed, or has a task tried "
        "again"
    ): Setting(
        (broker(RECORD), Speed("speed"), *nights(3)),
        (
            "a task of it twice",
            "speed is killed at hear",
            "speed is killed at move",
            "speed is refused",
            "night makes all 1 day, 15:00:00 old",
            "maintenance removes ['speed-0/T00']",
            "maintenance removes ['speed-0/T00', 'speed-0/T00-again']",
        ),
        world={"orphans": True, "crashes": 1, "retries": 1},
    ),
    (
        "files that nothing refers to, of a process that sleeps, and orphans that are looked for "
        "twice"
    ): Setting(
        (broker(RECORD), Speed("speed"), *nights(4, runs=2)),
        ("maintenance removes ['speed-0/T00']", "maintenance removes ['speed-1/T00']"),
        world={"orphans": True},
    ),
    "files that nothing refers to, staged ahead by a process that sleeps": Setting(
        (broker(RECORD, RECORD), Speed("speed", early=True), *nights(2)),
        (
            "ahead",
            "maintenance removes ['speed-0/T00', 'speed-1/T00']",
            "speed is refused",
            "speed is killed at move",
        ),
        world={"orphans": True, "crashes": 1},
    ),
    "files that nothing refers to, of two speed layers that sleep": Setting(
        (Speed("speed"), Speed("rival"), *nights(2)),
        (
            "speed finds its offsets published",
            "rival is refused",
            "maintenance removes ['rival-0/T00']",
        ),
        before=(broker(RECORD),),
        world={"orphans": True},
    ),
    "files that nothing refers to, a publish that lands late, and a process that sleeps": Setting(
        (broker(RECORD), Speed("speed"), Network("network"), *nights(2)),
        (
            "at last, and it lands",
            "at last, and it is refused",
            "maintenance removes ['speed-0/T00']",
            "moves a head",
        ),
        world={"orphans": True, "late": True, "answers_to_lose": 1, "crashes": 1},
    ),
    "unreferenced files of a publish that landed and whose answer is a refusal": Setting(
        (broker(RECORD, RECORD), Speed("speed", early=True), RollUp("rollup"), *nights(2)),
        (
            "speed publishes, and the answer is a refusal",
            "speed finds its offsets published",
            "rollup publishes",
        ),
        world={"orphans": True, "wrong_answers": 1},
    ),
    "files that nothing refers to, of an hour that ends while a process sleeps": Setting(
        (broker(("record", 0, 45), ("tick", 60)), Speed("speed"), *nights(2)),
        (
            "speed decides to stage {'2026-11-21T01'",
            "maintenance removes ['speed-1/T00']",
            "speed publishes",
        ),
        before=(broker(RECORD), Speed("before")),
        world={"orphans": True, "crashes": 1},
    ),
    "files that nothing refers to, of an hour that is accepted while a process sleeps": Setting(
        (Speed("speed"), Batch("batch"), *nights(2)),
        ("maintenance removes ['speed-0/T00']", "batch publishes", "speed is refused"),
        before=(broker(*ONE_HOUR),),
        world={"orphans": True},
    ),
    "files that nothing refers to and dead letters, of a process that sleeps": Setting(
        (broker(MALFORMED, RECORD), Speed("speed", at_most=2), *nights(2)),
        (
            "publishes the dead letters speed-0-dead",
            "snapshots of dead letters",
            "maintenance removes ['speed-0-dead/",
        ),
        world={"accounts": True, "orphans": True, "crashes": 1},
    ),
    "files that nothing refers to beside what another speed layer stages as a snapshot": Setting(
        (broker(RECORD, RECORD), Speed("speed"), Speed("rival", at_most=2, as_snapshot=True)),
        (
            "speed finds its offsets published",
            "rival finds its offsets published",
            "rival is refused",
        ),
        world={"crashes": 1},
    ),
    "a backlog of hours, cut one at a time": Setting(
        (Speed("speed", at_most=3, at_once=1), Batch("batch", at_once=1)),
        (
            "speed decides to publish ends alone",
            "speed is refused",
            "speed is killed at move",
            "batch is killed at seal",
        ),
        before=(broker(RECORD, ("tick", 210), RECORD),),
        world={"crashes": 1},
    ),
    "hours behind a record stamped years ahead": Setting(
        (Speed("speed", at_most=3), Batch("batch")),
        ("reads 2026-11-21T00: {0: (0, 2)}", "reads 2026-11-21T01: {0: (2, 3)}"),
        before=(broker(("record", 0, 60 * 24 * 365), RECORD, ("tick", 60), RECORD, ("tick", 60)),),
    ),
    "a record stamped ahead that the speed layer has published": Setting(
        (broker(("record", 0, 45), ("tick", 60), RECORD), Speed("speed"), Batch("batch")),
        ("reads 2026-11-21T00: {0: (0, 1)}",),
        world={"crashes": 1},
    ),
    "the branch of the speed layer set back": Setting(
        (broker(RECORD, RECORD, ("restore",), RECORD), Speed("speed")),
        ("lies ahead of the position", "decides to merge"),
        world={"crashes": 1},
    ),
    "the branch of the speed layer set back behind a sealed hour": Setting(
        (broker(("restore",), RECORD, ("mend",)), Speed("speed"), Batch("batch")),
        ("kafka sees speed set back to ()", "speed decides to merge", "batch decides to seal"),
        before=(broker(*ONE_HOUR), Speed("speed"), Batch("before")),
        world={"bad": frozenset({H0})},
    ),
    "a batch job's turn against a speed layer, and either killed": Setting(
        (broker(RECORD, RECORD, RECORD), Speed("speed"), Batch("batch", restates=1)),
        (
            "batch asks for turn",
            "has the way",
            "taken back",
            "bound of turn",
            "batch is killed at accept",
        ),
        before=(broker(*ONE_HOUR), Speed("before"), Batch("accepts")),
        world={"turns": 2, "crashes": 1},
    ),
    "a batch job's turn while it seals and accepts": Setting(
        (broker(RECORD, RECORD, RECORD), Speed("speed"), Batch("batch")),
        ("batch asks for turn", "has the way", "batch decides to seal"),
        before=(broker(*ONE_HOUR),),
        world={"turns": 1},
    ),
    "the turns of a restatement and of a maintenance, and anybody killed": Setting(
        (broker(RECORD), Speed("speed"), Batch("batch", restates=1), Maintenance("maintenance")),
        (
            "finds batch-2 before it",
            "finds maintenance-2 before it",
            "takes back its turn",
            "without a turn",
        ),
        before=(broker(*ONE_HOUR), Speed("before"), Batch("accepts")),
        world={"turns": 2, "crashes": 1},
    ),
    "the turns of a restatement, of a maintenance and of an operator": Setting(
        (
            Batch("batch", restates=1),
            Maintenance("maintenance"),
            Operator("operator", wishes=((H0, "speed"),)),
        ),
        ("finds batch-3 before it", "finds maintenance-3 before it", "finds operator-3 before it"),
        before=(broker(*ONE_HOUR), Speed("before"), Batch("accepts")),
        world={"turns": 3},
    ),
    "an hour accepted while the speed layer works off the refused one before it": Setting(
        (broker(("mend",)), Speed("speed"), Batch("batch")),
        (
            "speed publishes",
            "batch reads 2026-11-21T01",
            "batch decides 2026-11-21T01 again",
            "batch publishes",
            "batch reads 2026-11-21T00",
        ),
        before=(broker(RECORD, RECORD, ("tick", 60), RECORD, ("tick", 60)),),
        world={"bad": frozenset({H0})},
    ),
    "files put together while both layers are at work": Setting(
        (broker(RECORD, ("tick", 60)), Speed("speed"), Batch("batch"), RollUp("rollup")),
        (
            "rollup writes",
            "rollup is refused",
            "rollup publishes",
            "rollup gives it up",
            "speed is refused",
        ),
        before=(broker(RECORD, RECORD), Speed("before")),
    ),
    "files put together by a process that is killed or loses an answer, and by another": Setting(
        (RollUp("rollup"), RollUp("rival"), Batch("batch")),
        (
            "rollup is killed at swap_files",
            "rollup finds that it had landed",
            "rival gives it up",
            "batch is refused",
        ),
        before=(broker(RECORD, RECORD, ("tick", 60)), Speed("before")),
        world={"crashes": 1, "answers_to_lose": 1},
    ),
    "files put together of an hour that is given to the speed layer and taken back": Setting(
        (
            RollUp("rollup", runs=2),
            Batch("batch"),
            Operator("operator", wishes=((H0, "speed"), (H0, None))),
        ),
        ("rollup publishes", "rollup gives it up", "operator publishes", "operator is refused"),
        before=(broker(RECORD, RECORD, ("tick", 60)), Speed("before")),
    ),
    "micro-batches staged ahead, and killed anywhere": Setting(
        (broker(RECORD, RECORD, RECORD), Speed("speed", early=True), Batch("batch", restates=1)),
        (
            "speed stages {'2026-11-21T01': {0: (2, 3)}} ahead",
            "speed is refused",
            "speed is killed at move",
        ),
        before=(broker(*ONE_HOUR), Speed("before"), Batch("accepts")),
        world={"crashes": 1, "turns": 1},
    ),
    "micro-batches staged ahead by two speed layers": Setting(
        (broker(RECORD, RECORD, RECORD), Speed("speed", early=True), Speed("rival", at_most=2)),
        (
            "speed stages {'2026-11-21T00': {0: (1, 2)}} ahead",
            "finds its offsets published",
            "decides to stage",
        ),
    ),
    "micro-batches staged ahead as an hour ends, of a record that belongs to the next": Setting(
        (
            broker(RECORD, ("record", 0, 45), ("tick", 60)),
            Speed("speed", early=True),
            Batch("batch"),
        ),
        (
            "speed stages {'2026-11-21T00': {0: (1, 2)}} ahead",
            "decides to stage {'2026-11-21T01': {0: (1, 2)}}",
        ),
    ),
    "micro-batches staged ahead while what is old is expired and removed": Setting(
        (broker(RECORD, RECORD), Speed("speed", early=True), Maintenance("maintenance")),
        ("ahead", "maintenance removes ['speed-", "speed is killed at move"),
        world={"crashes": 1, "orphans": True},
    ),
    "micro-batches staged ahead, a publish that lands late, and the branch set back": Setting(
        (
            broker(RECORD, RECORD, ("restore",), RECORD),
            Speed("speed", early=True),
            Network("network"),
        ),
        ("ahead", "at last, and it lands", "lies ahead of the position"),
        world={"late": True, "answers_to_lose": 1},
    ),
    "micro-batches with dead letters staged ahead": Setting(
        (broker(MALFORMED, MALFORMED, RECORD), Speed("speed", early=True), Batch("batch")),
        ("ahead", "speed publishes the dead letters speed-", "speed is killed at send_letters"),
        world={"accounts": True, "crashes": 1},
    ),
    "micro-batches staged ahead of a recreated topic": Setting(
        (
            broker(RECORD, RECORD, RECREATED, *[RECORD] * 3),
            Speed("speed", early=True),
            Adopter("adopter"),
        ),
        ("ahead", "speed stops", "adopter publishes"),
        world={"accounts": True, "stamped": True, "bad": frozenset({H0})},
    ),
    "dead letters of both layers": Setting(
        (broker(*DEAD_AND_GOOD), Speed("speed", at_most=2), Batch("batch")),
        (
            "speed publishes the dead letters speed-",
            "batch publishes the dead letters batch-",
            "is refused with the dead letters",
            "not due",
            "batch records ['batch-seal",
        ),
        world={"accounts": True},
    ),
    "a speed layer with dead letters that is killed or loses an answer": Setting(
        (broker(MALFORMED, MALFORMED, RECORD), Speed("speed")),
        (
            "speed is killed at send_letters",
            "speed has something to finish",
            "speed finds the dead letters speed-",
            "publishes the dead letters speed-0-dead, and the answer is lost",
        ),
        world={"accounts": True, "crashes": 1, "answers_to_lose": 1},
    ),
    "a batch job with dead letters that is killed anywhere": Setting(
        (broker(MALFORMED), Batch("batch"), Speed("speed")),
        (
            "batch is killed at record",
            "batch is killed at send_letters",
            "batch has something to finish",
        ),
        before=(broker(*DEAD_AND_GOOD), Speed("before", at_most=2)),
        world={"accounts": True, "crashes": 1},
    ),
    "dead letters that the ledger states as complete, and an idle hour": Setting(
        (broker(("tick", 60), MALFORMED), Batch("batch"), Speed("speed")),
        (
            "batch reads in the ledger that ('accepts-",
            "batch is killed at look_for_lost",
            "batch decides to seal and accept",
            "speed publishes the dead letters speed-",
            "batch publishes the dead letters speed-",
        ),
        before=(broker(*DEAD_AND_GOOD), Speed("before", at_most=2), Batch("accepts")),
        world={"accounts": True, "crashes": 1},
    ),
    "dead letters that the ledger states as complete, and a restatement": Setting(
        (broker(("tick", 60)), Batch("batch", restates=1), Batch("rival")),
        (
            "rival reads in the ledger that ('accepts-1-dead', 'before-0-dead') are complete",
            "rival publishes the dead letters batch-",
            "rival reads in the ledger that ('accepts-1-dead', 'batch-2-dead') are complete",
            "batch is refused with the dead letters",
        ),
        before=(broker(*DEAD_AND_GOOD), Speed("before", at_most=2), Batch("accepts")),
        world={"accounts": True},
    ),
    "dead letters that become rows, by two restatements at once": Setting(
        (broker(("widen",)), Batch("batch", restates=1), Batch("rival", restates=1)),
        (
            "another run published first",
            "rival is refused with the dead letters",
            "not due",
            "stages [batch-2/T00[(0, 0)",
        ),
        before=(broker(*DEAD_AND_GOOD), Speed("before", at_most=2), Batch("accepts")),
        world={"accounts": True},
    ),
    "dead letters of an hour that is given to the speed layer and taken back": Setting(
        (Operator("operator", wishes=((H0, "speed"), (H0, None))), Batch("batch", restates=1)),
        (
            "operator publishes the dead letters operator-",
            "not due",
            "batch publishes the dead letters",
        ),
        before=(broker(*DEAD_AND_GOOD), Speed("before", at_most=2), Batch("accepts")),
        world={"accounts": True, "crashes": 1},
    ),
    "dead letters that wait while what is old is expired and removed": Setting(
        (broker(MALFORMED), Speed("speed"), Maintenance("maintenance")),
        (
            "maintenance expires 1 snapshots of dead letters",
            "maintenance removes ['speed-0-dead/T00']",
        ),
        world={"accounts": True, "orphans": True, "crashes": 1},
    ),
    "hours that are no longer remembered, restated by two at once": Setting(
        (Batch("batch", restates=1), Batch("rival", restates=1)),
        (
            "batch restates 2026-11-21T00",
            "batch 2026-11-21T00: another run published first",
            "batch stages [batch-4/T00[(0, 0)]]",
            "rival publishes the dead letters rival-",
        ),
        before=(
            broker(MALFORMED, *TWO_HOURS[1:]),
            Batch("accepts"),
            broker(RECORD, ("widen",)),
            Speed("after"),
        ),
        world={"accounts": True},
    ),
    "retention that overtakes both layers": Setting(
        (
            broker(RECORD, RECORD, ("retain", 0, 1), ("tick", 60)),
            Speed("speed"),
            Batch("batch", allow_gaps=("retention",)),
        ),
        (
            "speed finds the log to begin at {0: 1}",
            "speed decides to record {0: (0, 1)} as lost",
            "speed finds records of {0: (0, 1)} gone",
            "speed is refused",
            "batch publishes",
        ),
        world={"accounts": True},
    ),
    "retention that overtakes an hour that may have no gap": Setting(
        (broker(("retain", 0, 2)), Speed("speed", at_most=2), Batch("batch")),
        (
            "batch refuses 2026-11-21T00: gaps",
            "batch stages [batch-",
            "speed publishes the dead letters",
        ),
        before=(broker(*DEAD_AND_GOOD),),
        world={"accounts": True},
    ),
    "an hour that Kafka lost, restated from what is accepted": Setting(
        (broker(("retain", 0, 2), RECORD), Speed("speed"), Batch("batch", restates=2)),
        (
            "batch restates 2026-11-21T00",
            "batch stages [batch-",
            "batch publishes the dead letters",
        ),
        before=(broker(*DEAD_AND_GOOD), Batch("accepts")),
        world={"accounts": True},
    ),
    "a record that compaction takes from the middle of an hour, before or after it was served": Setting(
        (
            broker(("compact", 0, 1)),
            Speed("speed", at_most=3),
            Batch("batch", allow_gaps=("control", "compacted")),
        ),
        (
            "batch stages [batch-1/T00[(0, 0), (0, 2)]]",
            "T00[(0, 0), (0, 1), (0, 2)]]",
            "speed publishes",
            "batch 2026-11-21T00: it can be published",
            "what main serves in the look-back is not what",
        ),
        before=(broker(RECORD, RECORD, RECORD, ("tick", 60)),),
        world={"accounts": True},
    ),
    "a dead letter whose record compaction takes from the middle of an hour": Setting(
        (
            broker(("compact", 0, 1)),
            Speed("speed", at_most=3),
            Batch("batch", allow_gaps=("control", "compacted")),
        ),
        (
            "speed publishes the dead letters",
            "batch publishes the dead letters",
            "batch 2026-11-21T00: it can be published",
        ),
        before=(broker(RECORD, MALFORMED, RECORD, ("tick", 60)),),
        world={"accounts": True},
    ),
    "records that compaction takes from the middle of an hour that may lack none": Setting(
        (
            broker(("compact", 0, 1), ("compact", 0, 3)),
            Speed("speed", at_most=4),
            Batch("batch", allow_gaps=("control",)),
        ),
        ("batch refuses 2026-11-21T00: gaps: expected only control, found", "batch stages [batch-"),
        before=(broker(RECORD, MALFORMED, ("end transaction", 0), RECORD, ("tick", 60)),),
        world={"accounts": True},
    ),
    "an hour from whose middle records vanish after they were served, restated": Setting(
        (
            broker(("compact", 0, 1), ("retain", 0, 1), RECORD),
            Speed("speed"),
            Batch("batch", restates=2),
        ),
        (
            "batch restates 2026-11-21T00",
            "batch stages [batch-",
            "batch publishes the dead letters",
        ),
        before=(broker(RECORD, MALFORMED, RECORD, ("tick", 60)), Batch("accepts")),
        world={"accounts": True},
    ),
    "a topic recreated under both layers": Setting(
        (
            broker(RECORD, RECREATED, RECORD, RECORD),
            Speed("speed"),
            Batch("batch"),
            Adopter("adopter"),
        ),
        (
            "speed stops: ",
            "speed finds records of {0: (0, 1)} gone",
            "finds the log shorter",
            "adopter is refused",
            "Kafka no longer has it",
        ),
        world={"accounts": True, "stamped": True},
    ),
    "a topic recreated behind a backlog of the batch layer": Setting(
        (broker(RECORD), Speed("speed"), Batch("batch"), Adopter("adopter"), Adopter("other")),
        (
            "batch refuses 2026-11-21T00: Kafka no longer",
            "other is refused",
            "adopter is killed at adopt",
        ),
        before=(broker(RECORD, ("tick", 60), RECORD), Speed("before"), broker(RECREATED)),
        world={"accounts": True, "stamped": True, "crashes": 1},
    ),
    "a topic recreated behind a backlog of the speed layer": Setting(
        (broker(RECORD), Speed("speed"), Batch("batch"), Adopter("adopter")),
        ("adopter publishes", "speed streams from {0: 0}"),
        before=(broker(RECORD, ("tick", 60), RECORD), Batch("before"), broker(RECREATED)),
        world={"accounts": True, "stamped": True, "crashes": 1},
    ),
    "a log that lost its end, and that got records before it was adopted": Setting(
        (
            broker(("adopted",), ("tick", 60), RECORD),
            Speed("speed"),
            Batch("batch"),
            Adopter("adopter"),
        ),
        (
            "speed streams from {0: 1}",
            "batch refuses 2026-11-21T00: Kafka no longer",
            "adopter is killed at adopt",
        ),
        before=(
            broker(*[MINUTES, RECORD] * 3, MINUTES),
            Speed("before", at_most=3),
            broker(*LOST_ITS_END),
        ),
        world={"accounts": True, "stamped": True, "crashes": 1},
    ),
    "another topic named for a moment, and put right": Setting(
        (broker(OTHER, ADOPTED, BACK, RECORD), Speed("speed"), Batch("batch"), Adopter("adopter")),
        ("speed stops: ", "adopter publishes", "speed streams from {0: 1}", "adopter is refused"),
        before=(broker(RECORD), Speed("before")),
        world={"accounts": True, "stamped": True},
    ),
    "another topic that has records, named and corrected by two operators": Setting(
        (broker(ADOPTED, BACK), Adopter("adopter"), Adopter("other"), Batch("batch")),
        (
            "adopter is refused",
            "other is refused",
            "batch refuses 2026-11-21T00: Kafka no longer",
            "batch publishes",
        ),
        before=(broker(RECORD), Speed("before"), broker(OTHER, RECORD)),
        world={"accounts": True, "stamped": True, "crashes": 1},
    ),
    "another topic named behind a backlog of both layers, and put right": Setting(
        (broker(ADOPTED, BACK, ADOPTED, ("tick", 240)), Batch("batch"), Adopter("adopter")),
        ("batch refuses 2026-11-21T01: Kafka no longer", "batch reads 2026-11-21T01: {0: (1, 2)}"),
        before=(
            broker(RECORD, ("tick", 60), RECORD),
            Batch("before"),
            Speed("reads"),
            broker(OTHER),
        ),
        world={"accounts": True, "stamped": True},
    ),
    "a topic that loses its end while another one is named, or while it is adopted again": Setting(
        (broker(BACK, *LOSES_ITS_END), Batch("batch"), Adopter("adopter")),
        ("adopter is refused", "adopter publishes", "batch refuses 2026-11-21T00: Kafka no longer"),
        before=(
            broker(*[MINUTES, RECORD] * 3, MINUTES),
            Speed("before", at_most=3),
            broker(OTHER),
            Adopter("adopts"),
        ),
        world={"accounts": True, "stamped": True},
    ),
    "a clock that is set while a job runs": Setting(
        (
            broker(("tick", 15), RECORD, ("tick", 20)),
            Speed("speed", watched=True, jumps=(10 * MINUTE, -10 * MINUTE, timedelta(0))),
            Batch("batch", watched=True, jumps=(10 * MINUTE, timedelta(0))),
        ),
        (
            "speed finds its clock wrong",
            "batch's clock is set 0:10:00 off",
            "batch finds its clock wrong",
        ),
        world={"stamped": True},
    ),
    "snapshots and tags that expire by their age": Setting(
        (
            broker(("tick", 60)),
            Batch("batch", restates=1),
            Maintenance("maintenance", later=timedelta(days=8)),
        ),
        ("maintenance finds 0 orphans and 0 tags", "maintenance finds 0 orphans and 1 tags"),
        before=(broker(*ONE_HOUR), Speed("before"), Batch("accepts")),
        world={"stamped": True},
    ),
    "what branches say in table properties, removed with the snapshots that need them": Setting(
        (broker(RECORD), Speed("speed"), Maintenance("maintenance"), Network("network")),
        (
            "maintenance is refused",
            "speed is refused",
            "at last, and it lands",
            "at last, and it is refused",
        ),
        before=(broker(*ONE_HOUR), Speed("before"), Batch("accepts")),
        world={"apart": True, "late": True, "answers_to_lose": 1},
    ),
    "what branches say in table properties, said again after it was taken back": Setting(
        (
            broker(("restore",), RECORD),
            Speed("speed"),
            Operator("operator", wishes=((H0, "speed"), (H0, None))),
            Maintenance("maintenance"),
        ),
        ("operator publishes", "maintenance is refused", "speed is refused"),
        before=(broker(*ONE_HOUR), Speed("before"), Batch("accepts")),
        world={"apart": True},
    ),
    "rows that are staged while another program expires snapshots": Setting(
        (broker(RECORD), Speed("speed", as_snapshot=True), Expiry("expiry")),
        ("expiry deletes ['speed-", "speed is refused", "speed publishes"),
        world={"orphans": True},
    ),
    "an hour that is rebuilt while another program expires snapshots": Setting(
        (Batch("batch"), Expiry("expiry")),
        (
            "expiry deletes ['batch-",
            "batch is refused",
            "its staged snapshot is missing",
            "batch publishes",
        ),
        before=(broker(*ONE_HOUR),),
        world={"orphans": True},
    ),
    "dead letters that are staged while another program expires snapshots": Setting(
        (broker(MALFORMED, MALFORMED, RECORD), Speed("speed"), Expiry("expiry", of_letters=True)),
        (
            "expiry expires snapshots with []",
            "speed is killed at send_letters",
            "speed publishes the dead letters",
        ),
        world={"accounts": True, "orphans": True, "crashes": 1},
    ),
    "dead letters of both layers while another program expires snapshots": Setting(
        (Batch("batch"), Speed("speed", at_most=2), Expiry("expiry", of_letters=True)),
        (
            "expiry expires",
            "batch publishes the dead letters",
            "speed publishes the dead letters",
            "is refused with",
        ),
        before=(broker(*DEAD_AND_GOOD),),
        world={"accounts": True, "orphans": True},
    ),
    "hours that expire beside both layers": Setting(
        (
            broker(RECORD, ("tick", 60)),
            Speed("speed"),
            Batch("batch"),
            Retention("retention", runs=2),
        ),
        (
            "retention decides to expire ('2026-11-21T00',)",
            "retention is refused",
            "retention is killed at expire",
            "batch is refused",
            "speed is refused",
        ),
        before=(broker(*TWO_HOURS), Speed("before"), Batch("accepts")),
        world={"crashes": 1},
    ),
    "an hour that expires while it is rebuilt": Setting(
        (Batch("batch", restates=1), Retention("retention", runs=2)),
        (
            "batch 2026-11-21T00: its rows have expired",
            "batch finds that 2026-11-21T00 has expired",
            "batch is refused",
            "retention is refused",
            "retention is killed at record",
        ),
        before=(broker(*TWO_HOURS), Speed("before"), Batch("accepts")),
        world={"accounts": True, "crashes": 1},
    ),
    "hours that expire before the speed layer has read them": Setting(
        (Speed("speed"), Batch("batch"), Retention("retention", runs=2)),
        (
            "retention decides to expire",
            "speed decides to skip",
            "speed is refused",
            "retention is refused",
        ),
        before=(broker(*TWO_HOURS),),
    ),
    "an expiry that lands late, or never": Setting(
        (broker(RECORD), Speed("speed"), Retention("retention"), Network("network")),
        (
            "network brings retention",
            "retention moves a head in its way",
            "retention finds that it had landed",
        ),
        before=(broker(*TWO_HOURS), Speed("before"), Batch("accepts")),
        world={"late": True, "answers_to_lose": 1},
    ),
    "an hour that an operator gave to the speed layer expires": Setting(
        (
            Batch("batch", restates=1),
            Operator("operator", wishes=((H0, "speed"), (H0, None), (H0, "speed"))),
            Retention("retention", runs=2),
        ),
        ("operator publishes", "found that they have expired", "retention decides to expire"),
        before=(broker(*TWO_HOURS), Speed("before"), Batch("accepts")),
    ),
    "hours that expire, and a branch that is set back": Setting(
        (
            broker(("restore",), RECORD),
            Speed("speed"),
            Merger("merger"),
            Retention("retention", runs=2),
        ),
        ("sees speed set back", "retention decides to expire", "merger publishes"),
        before=(broker(*TWO_HOURS), Speed("before"), Batch("accepts")),
    ),
    "hours with dead letters that expire while they are rebuilt": Setting(
        (Batch("batch", restates=1), Retention("retention")),
        (
            "retention decides to expire",
            "retention expires the dead letters of ('2026-11-21T00',)",
            "retention is refused",
            "batch finds that 2026",
        ),
        before=(broker(*DEAD_AND_GOOD, RECORD, ("tick", 60)), Speed("before"), Batch("accepts")),
        world={"accounts": True},
    ),
    "hours imported beside both layers": Setting(
        (broker(RECORD, ("tick", 60)), Speed("speed"), Batch("batch"), Importer("importer")),
        ("importer publishes", "importer is refused", "batch is refused", "speed is refused"),
        before=(broker(*ONE_HOUR), Speed("before")),
    ),
    "hours imported while the stream's first is restated, and a kill": Setting(
        (Batch("batch", restates=1), Importer("importer")),
        (
            "importer is killed at accept",
            "importer is killed at check",
            "importer is refused",
            "batch is refused",
        ),
        before=(broker(*TWO_HOURS), Speed("before"), Batch("accepts")),
        world={"crashes": 1},
    ),
    "two imports of the same hours": Setting(
        (Importer("importer"), Importer("rival")),
        ("importer gives its files up", "rival gives its files up", "importer is refused"),
        before=(broker(*ONE_HOUR), Speed("before")),
        world={"crashes": 1},
    ),
    "an import that is taken back beside both layers": Setting(
        (broker(RECORD), Speed("speed"), Batch("batch"), Undoer("undoer")),
        ("undoer publishes", "undoer is refused", "batch is refused", "speed is refused"),
        before=(broker(*ONE_HOUR), Speed("before"), Importer("imports", most=1)),
    ),
    "an import that is taken back step by step while another one imports, and a kill": Setting(
        (Importer("importer"), Undoer("undoer", runs=2)),
        (
            "undoer is killed at undo",
            "undoer is refused",
            "importer gives its files up",
            "importer is refused",
        ),
        before=(broker(*ONE_HOUR), Speed("before"), Importer("imports")),
        world={"crashes": 1},
    ),
    "an import that lands late, or never": Setting(
        (broker(RECORD), Speed("speed"), Importer("importer"), Network("network")),
        (
            "network brings importer",
            "importer moves a head in its way",
            "importer finds that it had landed",
        ),
        before=(broker(*ONE_HOUR), Speed("before")),
        world={"late": True, "answers_to_lose": 1},
    ),
    "files to import that nothing refers to, of a process that sleeps": Setting(
        (
            Importer("importer", most=1),
            Nights(runs=2),
            Maintenance("maintenance", later=timedelta(0)),
        ),
        ("maintenance removes ['importer-", "importer gives its files up", "importer publishes"),
        before=(broker(RECORD), Speed("before")),
        world={"orphans": True},
    ),
    "imported hours, and the speed layer's branch is set back": Setting(
        (
            broker(("restore",), RECORD),
            Speed("speed"),
            Merger("merger"),
            Importer("importer", most=1),
        ),
        ("sees speed set back", "importer publishes", "importer is refused"),
        before=(broker(*TWO_HOURS), Speed("before"), Batch("accepts")),
    ),
    "an hour that is rebuilt while records of it are erased": Setting(
        (Batch("batch", restates=1), Eraser("eraser")),
        (
            "eraser publishes",
            "eraser is refused",
            "batch 2026-11-21T00: what main serves",
            "eraser finds nothing left",
        ),
        before=(
            broker(PERSONAL, RECORD, ("tick", 60)),
            Speed("before", at_most=2),
            Batch("accepts"),
        ),
        world={"accounts": True},
    ),
    "an hour that is rebuilt while records of it are erased, and a kill": Setting(
        (Batch("batch", restates=1), Eraser("eraser")),
        (
            "eraser is killed at swap_rows",
            "eraser is killed at follow",
            "batch is killed at accept",
        ),
        before=(
            broker(PERSONAL, RECORD, ("tick", 60)),
            Speed("before", at_most=2),
            Batch("accepts"),
        ),
        world={"accounts": True, "crashes": 1},
    ),
    "an hour that is rebuilt while dead letters of it are erased": Setting(
        (Batch("batch", restates=1), Eraser("eraser")),
        (
            "eraser finds dead letters {'2026-11-21T00': 1}",
            "eraser erases dead letters",
            "eraser is refused",
            "batch is refused",
            "batch records ['eraser-place-",
        ),
        before=(broker(MALFORMED_PERSONAL, ("tick", 60)), Speed("before"), Batch("accepts")),
        world={"accounts": True},
    ),
    "an hour that is rebuilt while dead letters of it are erased, and a kill": Setting(
        (Batch("batch", restates=1), Eraser("eraser")),
        (
            "eraser is killed at swap_letters",
            "eraser is killed at record",
            "batch is killed at send_letters",
        ),
        before=(
            broker(MALFORMED_PERSONAL, RECORD, ("tick", 60)),
            Speed("before", at_most=2),
            Batch("accepts"),
        ),
        world={"accounts": True, "crashes": 1},
    ),
    "micro-batches that are staged ahead of an erasure": Setting(
        (Speed("speed", early=True), Eraser("eraser")),
        ("ahead", "eraser is refused", "speed is refused", "speed decides to stage"),
        before=(broker(PERSONAL, PERSONAL),),
        world={"accounts": True},
    ),
    "records that are erased before the speed layer has read them": Setting(
        (Speed("speed"), Eraser("eraser")),
        (
            "eraser waits for the layers to read",
            "eraser finds dead letters",
            "eraser erases dead letters",
        ),
        before=(broker(MALFORMED_PERSONAL, PERSONAL),),
        world={"accounts": True},
    ),
    "records of an hour that is not accepted are erased, then Kafka deletes them": Setting(
        (broker(("retain", 0, 1)), Batch("batch"), Eraser("eraser")),
        ("sees retain", "eraser publishes", "batch publishes"),
        before=(broker(PERSONAL, RECORD, ("tick", 60)), Speed("before", at_most=2)),
        world={"accounts": True},
    ),
    "records of an accepted hour are erased, then Kafka deletes them, and it is rebuilt": Setting(
        (broker(("retain", 0, 1)), Batch("batch", restates=1), Eraser("eraser")),
        ("sees retain", "eraser publishes", "batch publishes"),
        before=(
            broker(PERSONAL, RECORD, ("tick", 60)),
            Speed("before", at_most=2),
            Batch("accepts"),
        ),
        world={"accounts": True},
    ),
    "files put together while their records are erased": Setting(
        (RollUp("rollup"), Eraser("eraser")),
        ("rollup gives it up", "eraser is refused", "rollup is refused", "eraser publishes"),
        before=(broker(PERSONAL, RECORD), Speed("before")),
        world={"accounts": True},
    ),
    "an erasure that lands late, or never": Setting(
        (Speed("speed"), Eraser("eraser"), Network("network")),
        (
            "network brings eraser",
            "eraser moves a head in its way",
            "eraser finds that it had landed",
        ),
        before=(broker(PERSONAL), Speed("before"), broker(RECORD)),
        world={"accounts": True, "late": True, "answers_to_lose": 1},
    ),
    "files without erased rows that nothing refers to, of a process that sleeps": Setting(
        (Eraser("eraser"), Nights(runs=2), Maintenance("maintenance", later=timedelta(0))),
        ("maintenance removes ['eraser-", "eraser gives its files up", "eraser is refused"),
        before=(broker(PERSONAL, RECORD), Speed("before", at_most=2)),
        world={"accounts": True, "orphans": True},
    ),
    "an hour that an operator gives to the speed layer while records of it are erased": Setting(
        (Operator("operator", wishes=((H0, "speed"),)), Eraser("eraser")),
        ("operator publishes", "operator is refused", "eraser is refused"),
        before=(
            broker(PERSONAL, RECORD, ("tick", 60)),
            Speed("before", at_most=2),
            Batch("accepts"),
        ),
        world={"accounts": True},
    ),
    "an hour that is kept while an erasure of its records is requested": Setting(
        (Holder("holder", hour=H0), Eraser("eraser")),
        ("holder publishes", "holder is refused", "eraser is refused", "eraser finds nothing left"),
        before=(
            broker(PERSONAL, RECORD, ("tick", 60)),
            Speed("before", at_most=2),
            Batch("accepts"),
        ),
        world={"accounts": True},
    ),
    "an hour that is kept while an erasure is requested, before its records are read": Setting(
        (Speed("speed"), Holder("holder", hour=H0), Eraser("eraser")),
        (
            "holder publishes",
            "holder is refused",
            "eraser is refused",
            "eraser has something to finish",
        ),
        before=(broker(MALFORMED_PERSONAL),),
        world={"accounts": True},
    ),
    "records that arrive during an erasure are erased by the next request": Setting(
        (broker(PERSONAL), Speed("speed"), Eraser("eraser", again=True)),
        ("eraser asks again", "eraser is refused", "speed is refused"),
        before=(broker(PERSONAL), Speed("before")),
        world={"accounts": True},
    ),
    "files of former snapshots are recorded beside the speed layer, and a kill": Setting(
        (broker(RECORD), Speed("speed"), Eraser("eraser", former=H0)),
        (
            "eraser is killed at unserved",
            "eraser is killed at record",
            "eraser is refused",
            "speed is refused",
        ),
        before=(broker(PERSONAL, ("tick", 60)), Speed("before"), Batch("accepts")),
        world={"accounts": True, "crashes": 1},
    ),
    "files put together, and orphans removed before they are in place": Setting(
        (RollUp("rollup"), Maintenance("maintenance")),
        (
            "maintenance removes ['rollup-",
            "rollup gives it up",
            "rollup is refused",
            "rollup publishes",
        ),
        before=(broker(RECORD, RECORD), Speed("before")),
        world={"crashes": 1, "orphans": True},
    ),
}


# The same, where the speed layer stages its rows as a snapshot.
SETTINGS |= {
    f"{name}, staged as a snapshot": replace(
        SETTINGS[name],
        actors=tuple(
            replace(a, as_snapshot=True) if isinstance(a, Speed) else a
            for a in SETTINGS[name].actors
        ),
    )
    for name in (
        "an answer lost, and a process killed",
        "a publish that lands whenever it likes, or never",
        "a late publish, expiry and orphan removal",
        "two speed layers, their micro-batches of different sizes",
        "expiry and orphan removal around what the speed layer stages",
        "expiry and orphan removal around both layers",
        "micro-batches staged ahead as an hour ends, of a record that belongs to the next",
        "micro-batches staged ahead while what is old is expired and removed",
        "dead letters that wait while what is old is expired and removed",
    )
}


# Those that take longest: `make test` walks them at random, `make test-full` explores them whole.
LARGE = (
    "a backlog of hours, cut one at a time",
    "a batch job with dead letters that is killed anywhere",
    "a topic that loses its end while another one is named, or while it is adopted again",
    "an answer lost, and a process killed, staged as a snapshot",
    "an hour from whose middle records vanish after they were served, restated",
    "an hour refused, then fixed",
    "an hour that is kept while an erasure is requested, before its records are read",
    "an hour that is rebuilt while dead letters of it are erased",
    "an hour that is rebuilt while dead letters of it are erased, and a kill",
    "an hour that is rebuilt while records of it are erased, and a kill",
    "another topic named for a moment, and put right",
    "another topic that has records, named and corrected by two operators",
    "expiry and orphan removal around both layers",
    "expiry and orphan removal around both layers, staged as a snapshot",
    "expiry and orphan removal around what the speed layer stages, staged as a snapshot",
    "files that nothing refers to and dead letters, of a process that sleeps",
    "files that nothing refers to, a publish that lands late, and a process that sleeps",
    "files that nothing refers to, of a process that sleeps, is killed, or has a task tried again",
    "files that nothing refers to, of an hour that is accepted while a process sleeps",
    "files that nothing refers to, of two speed layers that sleep",
    "files that nothing refers to, staged ahead by a process that sleeps",
    "files of former snapshots are recorded beside the speed layer, and a kill",
    "hours imported beside both layers",
    "hours without records, accepted by the commit that seals them or after it",
    "micro-batches staged ahead while what is old is expired and removed, staged as a snapshot",
    "records of an accepted hour are erased, then Kafka deletes them, and it is rebuilt",
    "records of an hour that is not accepted are erased, then Kafka deletes them",
    "two batch runs of two hours, out of order",
    "unreferenced files of a publish that landed and whose answer is a refusal",
)
WALKS = budget(100, 300)


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.full) if name in LARGE else name for name in SETTINGS],
)
def test_every_interleaving_keeps_main_exact(name: str) -> None:
    setting = SETTINGS[name]
    world = settle(new_world(**setting.world), *setting.before)
    explored = explore(world, setting.actors)
    print(
        f"{name}: {explored.moments} moments, {explored.rests} of rest, at most "
        f"{explored.longest} steps"
    )
    for what in setting.sees:
        assert explored.saw(what), (
            f"expected {what!r} to happen, found only {sorted(explored.steps)}"
        )


@pytest.mark.parametrize("name", LARGE)
def test_random_walks_of_a_large_setting_keep_main_exact(name: str) -> None:
    setting = SETTINGS[name]
    world = settle(new_world(**setting.world), *setting.before)
    seen = set[str]()
    for seed in range(1, WALKS + 1):
        seen.update(walk(world, setting.actors, seed))
    happened = [what for what in setting.sees if any(what in step for step in seen)]
    print(f"{name}: {WALKS} walks, {len(happened)} of {len(setting.sees)}: {happened}")
    assert happened, f"expected one of {setting.sees} to happen, found only {sorted(seen)}"
