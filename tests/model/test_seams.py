"""Rows of `main` at a snapshot, then the records of the topic from exactly its offsets: each record
once, at every seam of random walks with kills, lost answers, restatements and restored branches.

A seam is a snapshot of `main` that the table keeps, and the log at any moment after it: rows may be
restated, and hours rebuilt, between the two.
"""

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from budget import budget
from exploration import expired_places, forget, walk
from settings import at_random
from small_world import Kafka, Row, Version, Violation, World
from values import replace

from anabranch.common.errors import Refused
from anabranch.offsets.position import Ranges
from anabranch.protocol.merge import Seam, plan_seam, state_at
from anabranch.protocol.state import read_state, state_of

SEAMS = budget(1_000, 10_000)

Plan = Callable[[Any, int], Seam]


def seam_of(table: Any, at: int) -> Seam:
    return plan_seam(state_at(table, at), at)


class Reader:
    """Reads at each new version of the table during a walk: all snapshots of `main`, the topic."""

    def __init__(self, plan: Plan) -> None:
        self._plan, self._seen = plan, set[int]()
        self._malformed = frozenset[int]()
        self.seams, self.refused, self.waiting, self.restated = 0, 0, 0, 0

    def look(self, world: World) -> None:
        # Rules that read more records make no rows of earlier dead letters.
        self._malformed |= world.kafka.malformed
        lake = world.lake
        if id(lake) in self._seen or not world.kafka.is_read_at(lake.state.position):
            return
        self._seen.add(id(lake))
        at: int | None = lake.heads["main"]
        while at in lake.known:
            version = lake.known[at]
            self._read(world, version)
            at = version.parent

    def _read(self, world: World, version: Version) -> None:
        kafka, lake = world.kafka, world.lake
        try:
            seam = self._plan(lake.table, version.id)
        except Refused:
            self.refused += 1
            return
        self.seams += 1
        self.waiting += bool(seam.waiting)
        self.restated += version.id != lake.heads["main"]
        rows = Counter(row for f in version.files for row in f.rows)
        ends = {p: len(log) for p, log in enumerate(kafka.log)}
        for part in seam.ranges(ends):
            rows.update(kafka.read(_held(kafka, part)))
        if wrong := [
            (row, rows[row])
            for row in kafka.present
            if rows[row] > 1 or (rows[row] == 0 and self._must_have(world, row))
        ]:
            raise Violation(f"main at {version.id}, then the topic from {seam}: {wrong}")

    def _must_have(self, world: World, row: Row) -> bool:
        """Whether a reader must get a record: readable, no dead letter, and not expired."""
        is_readable = row not in world.kafka.taken and row[2] not in self._malformed
        return is_readable and row[:2] not in expired_places(world.lake)


def _held(kafka: Kafka, ranges: Ranges) -> Ranges:
    return {p: (max(s, kafka.start(p)), max(e, kafka.start(p))) for p, (s, e) in ranges.items()}


def read_walks(plan: Plan = seam_of) -> list[Reader]:
    """Walk until there were enough seams. Raises Violation."""
    readers: list[Reader] = []
    while sum(reader.seams for reader in readers) < SEAMS:
        seed = len(readers) + 1
        if seed % 20 == 0:
            forget()
        readers.append(Reader(plan))
        walk(*at_random(seed), seed, look=readers[-1].look)
    return readers


def test_each_record_is_once_in_main_or_after_it_in_the_topic() -> None:
    readers = read_walks()
    seams, refused, waiting, restated = (
        sum(getattr(reader, name) for reader in readers)
        for name in ("seams", "refused", "waiting", "restated")
    )
    print(f"{len(readers)} walks, {seams} seams, {refused=} {waiting=} {restated=}")
    assert waiting > seams / 50, "hours wait between accepted ones"
    assert restated > seams / 10, "main moves between the rows and the topic"
    assert refused < seams / 50


def _without_waiting(table: Any, at: int) -> Seam:
    return replace(seam_of(table, at), waiting=())


def _whole_hours(table: Any, at: int) -> Seam:
    """Read the hours that wait again from their start."""
    seam, cuts = seam_of(table, at), state_of(table, at).cuts
    return replace(seam, waiting=tuple((h, cuts[h].ranges) for h, _ in seam.waiting if h in cuts))


def _from_the_position(table: Any, at: int) -> Seam:
    """Read what a job would that knows of no accepted hours."""
    state = state_of(table, at)
    return replace(seam_of(table, at), waiting=(), start=state.position.offsets)


def _from_the_current_position(table: Any, at: int) -> Seam:
    return replace(seam_of(table, at), start=dict(read_state(table).position.offsets))


@pytest.mark.parametrize(
    "mutant", [_without_waiting, _whole_hours, _from_the_position, _from_the_current_position]
)
def test_a_wrong_seam_is_found(mutant: Plan) -> None:
    with pytest.raises(Violation, match="then the topic from"):
        read_walks(mutant)
