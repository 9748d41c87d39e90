"""The publish queue: a publisher whose commits would be refused repeatedly gets a turn before other
publishers.

Each turn is a table property of its own, `anabranch.turn.<id>`, so concurrent processes never
overwrite each other's turns. The turns of a table are a queue: the first publishes, the others wait
until it is removed or its timeout has passed. A publisher that sees a timeout pass removes that
turn.

1. Join: a publisher that was refused, or that finds others before it, adds its turn at the end of
   the queue.
2. Wait: a publisher that is about to commit and finds a turn before its own waits for that turn,
   then decides again.
3. Leave: the publish that lands removes the turn in the same commit; otherwise the publisher
   removes it at its end.

A waiter measures a timeout by its own clock, from when it first saw that turn at the head: clocks
of different processes are never compared.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import threading
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any

from pyiceberg.table import Table

from anabranch.common.errors import Transient
from anabranch.common.json_values import from_json, parse
from anabranch.common.retry import doubling
from anabranch.iceberg.commits import Commit
from anabranch.iceberg.lake import Lake, Overtaken
from anabranch.protocol.state import TURN

LOG = logging.getLogger(__name__)

# A turn's timeout, in seconds: several attempts of its owner, short enough for readers of fresh
# rows.
ATTEMPTS, MIN_TIMEOUT, MAX_TIMEOUT = 4.0, 10.0, 60.0
# A longer attempt needs a longer turn: one attempt and a half, at most LIMIT.
ATTEMPT_AND_A_HALF, LIMIT = 1.5, 300.0
# The timeout of a turn with an invalid value.
MALFORMED_BOUND = 5.0
# A publisher joins after this many refusals, or after one refusal if an attempt took this long
# (seconds).
REFUSALS, LONG_ATTEMPT = 3, 0.3
# The longest queue; further publishers continue without a turn.
MAX_TURNS = 16
# Commits that began before their publishers could see the turn land within this many seconds.
SETTLE_SECONDS = 2.0


@dataclass(frozen=True)
class Turn:
    """An entry of the queue. `bound`: its timeout (s); `what`, `by`, `asked_at`: for operators."""

    id: str
    number: int
    bound: float
    what: str = ""
    by: str = ""
    asked_at: str = ""

    def to_properties(self) -> dict[str, str]:
        """Return the table property of the turn."""
        values = {name: value for name, value in vars(self).items() if name != "id"}
        return {TURN + self.id: json.dumps(values)}

    @property
    def who(self) -> str:
        """The description of the turn for log lines."""
        return f"{self.what} ({self.by}, turn {self.id})" if self.what else f"turn {self.id}"


Queue = tuple[Turn, ...]


def read_queue(properties: Mapping[str, str]) -> Queue:
    """Return the turns in a table's properties, in queue order."""
    turns = []
    for key, text in properties.items():
        if key.startswith(TURN):
            turns.append(_read(key.removeprefix(TURN), text))
    return tuple(sorted(turns, key=lambda t: (t.number, t.id)))


def _read(id: str, text: str) -> Turn:
    try:
        turn = from_json(Turn, parse(dict[str, Any], text) | {"id": id})
        return replace(turn, bound=min(LIMIT, turn.bound))
    except ValueError:
        # Edited by hand: others wait for it only briefly.
        return Turn(id, 0, MALFORMED_BOUND)


def turn_bound(longest: float) -> float:
    """Return the timeout of a turn, from its owner's longest attempt, both in seconds. Pure."""
    return min(
        LIMIT, max(MIN_TIMEOUT, min(MAX_TIMEOUT, ATTEMPTS * longest), ATTEMPT_AND_A_HALF * longest)
    )


def plan_turn(queue: Queue, turn: Turn) -> Turn | None:
    """Return `turn` with the last number of the queue; None if the queue is full. Pure."""
    if len(queue) >= MAX_TURNS:
        return None
    return replace(turn, number=max((t.number for t in queue), default=0) + 1)


def should_join(refusals: int, longest: float) -> bool:
    """Whether a publisher joins the queue after this number of refusals, given its longest attempt
    in seconds. Pure.

    An attempt of one second always loses against a publisher that commits every second.
    """
    return refusals >= REFUSALS or (refusals > 0 and longest >= LONG_ATTEMPT)


def turn_before(queue: Queue, mine: str | None, waited: str | None = None) -> Turn | None:
    """Return the turn to wait for before a publisher with turn `mine` commits; None if it is first.
    Pure.

    `waited` is a turn that the publisher has already waited for. A publisher that is not in the
    queue comes after all turns.
    """
    first = next((t for t in queue if t.id != waited), None)
    return None if first is None or first.id == mine else first


def turn_to_yield_to(queue: Queue, waited: str | None, has_yielded: bool) -> Turn | None:
    """Return the turn that the speed layer waits for before it stages or commits a micro-batch.
    Pure.

    It waits once for each turn, and for at most one turn in each micro-batch, so it publishes
    between any two turns.
    """
    # Decision 8: one wait between two publishes, else a queue of long publishes would keep fresh
    # rows from readers.
    return None if has_yielded else turn_before(queue, None, waited)


def is_over(turn: Turn, seconds: float) -> bool:
    """Whether a turn that has been at the head for `seconds` has timed out. Pure."""
    return seconds >= turn.bound


def plan_turn_removal(properties: Mapping[str, str], id: str, commit: Commit) -> Commit:
    """Return `commit` with the removal of a turn from the queue. Pure.

    The commit sets the key that it removes: PyIceberg fails to remove a key that another process
    has already removed.
    """
    key = TURN + id
    if key not in properties:
        return commit
    return replace(
        commit,
        set_properties={**commit.set_properties, key: ""},
        remove_properties=(*commit.remove_properties, key),
    )


def join_queue(lake: Lake, table_name: str, what: str, longest: float = 0.0) -> Turn | None:
    """Add a new turn at the end of the queue and return it; its timeout follows from the longest
    attempt so far.

    None if the queue is full, or if other commits land first for a quarter of a minute. Raises
    Transient.
    """
    by, at = (
        f"{socket.gethostname()}:{os.getpid()}",
        datetime.now(UTC).isoformat(timespec="seconds"),
    )
    wanted = Turn(uuid.uuid4().hex, 0, turn_bound(longest), what, by, at)
    joined: list[Turn] = []

    def plan(table: Table) -> Commit | None:
        queue = read_queue(table.properties)
        # The previous attempt may have landed with its answer lost.
        joined[:] = [t for t in queue if t.id == wanted.id]
        if joined or (turn := plan_turn(queue, wanted)) is None:
            return None
        joined[:] = [turn]
        return Commit(turn.id, {}, (), set_properties=turn.to_properties())

    try:
        lake.commit_until_landed(table_name, "join the publish queue", plan)
    except Overtaken as error:
        LOG.debug("%s", error)
        return None
    return joined[0] if joined else None


def remove_turn(lake: Lake, table_name: str, id: str) -> None:
    """Remove a turn from the queue: the caller's own, if no publish removed it, or another one that
    timed out.

    Raises Transient; the turn then stays until a waiter sees its timeout pass.
    """

    def plan(table: Table) -> Commit | None:
        if TURN + id not in table.properties:
            return None
        return plan_turn_removal(table.properties, id, Commit(uuid.uuid4().hex, {}, ()))

    lake.commit_until_landed(table_name, "leave the publish queue", plan)


def wait_for_turn(
    lake: Lake,
    table_name: str,
    turn: str | None,
    waited: str | None,
    stop: threading.Event | None = None,
) -> str | None:
    """Wait until `turn` is removed or its timeout has passed, counted from now; remove a turn that
    timed out.

    Does not wait again for `waited`, the turn of an earlier call. `stop` ends the wait at once.
    Returns the turn to pass as `waited` to the next call. Raises Transient.
    """
    if turn is None or turn == waited:
        return turn
    # Decision 8: measure the timeout from now by this process's clock. By another machine's time, a
    # living publisher's turn might be removed at once, or a dead one's never.
    began, pauses, stop = time.monotonic(), doubling(0.1, 1.0), stop or threading.Event()
    ahead = _find(lake, table_name, turn)
    if ahead is not None:
        LOG.info(
            "table %s: waiting up to %.0f s for %s, first in the publish queue",
            table_name,
            ahead.bound,
            ahead.who,
        )
    while ahead is not None and not stop.is_set():
        if is_over(ahead, time.monotonic() - began):
            LOG.warning(
                "table %s: removed %s from the publish queue after its timeout of %.0f s; "
                "continuing",
                table_name,
                ahead.who,
                ahead.bound,
            )
            remove_turn(lake, table_name, turn)
            break
        stop.wait(min(next(pauses), ahead.bound))
        ahead = _find(lake, table_name, turn)
    return turn


def _find(lake: Lake, table_name: str, id: str) -> Turn | None:
    return next((t for t in read_queue(lake.load(table_name).properties) if t.id == id), None)


class YieldToQueue:
    """The speed layer's side of the queue: it waits once a turn and publishes between two."""

    def __init__(self, lake: Lake, table_name: str, stop: threading.Event | None = None) -> None:
        self._lake, self._table_name, self._stop = lake, table_name, stop
        self._waited: str | None = None
        self._has_yielded = False

    def wait_if_first(self, properties: Mapping[str, str]) -> bool:
        """Wait for the first turn in the loaded properties; return False without one."""
        turn = turn_to_yield_to(read_queue(properties), self._waited, self._has_yielded)
        if turn is None:
            return False
        self._waited = wait_for_turn(
            self._lake, self._table_name, turn.id, self._waited, self._stop
        )
        self._has_yielded = True
        return True

    def published(self) -> None:
        """Record a publish: from now on the layer waits for the next turn."""
        self._has_yielded = False


class QueueEntry:
    """A publisher's entry in the queue until it ends. Without `takes_turns` it never joins."""

    def __init__(self, lake: Lake, table_name: str, what: str, takes_turns: bool) -> None:
        self._lake, self._table_name, self._what, self._takes_turns = (
            lake,
            table_name,
            what,
            takes_turns,
        )
        self._turn: Turn | None = None
        self._waited: str | None = None
        self._longest = 0.0
        self._refusals = 0
        self._inner = 0

    def wait_for_others(self, properties: Mapping[str, str], deadline: float) -> bool:
        """Wait for the turns before this one in the loaded properties; return False if there are
        none.

        Joins the queue if it is not in it yet, so publishes land in request order. Does not wait
        after `deadline` (monotonic clock, seconds).
        """
        first = self._before(properties)
        if first is None:
            return False
        while first is not None and time.monotonic() < deadline:
            if self._turn is None:
                self._join()
            self._waited = wait_for_turn(self._lake, self._table_name, first.id, self._waited)
            first = self._before(self._lake.load(self._table_name).properties)
        self._settle()
        return True

    def refused(self, seconds: float) -> None:
        """Record a refused attempt and its duration in seconds; join the queue if `should_join`."""
        self._refusals, self._longest = self._refusals + 1, max(self._longest, seconds)
        if self._takes_turns and self._turn is None and should_join(self._refusals, self._longest):
            self._join()
            self._settle()

    def with_removal(self, properties: Mapping[str, str], commit: Commit) -> Commit:
        """Return the commit with the removal of this entry's turn; unchanged for a publish inside
        another publish's decision."""
        if self._turn is None or self._inner:
            return commit
        return plan_turn_removal(properties, self._turn.id, commit)

    def landed(self) -> None:
        """Record that the publish landed and removed the turn."""
        if not self._inner:
            self._turn = None

    @contextmanager
    def inside(self) -> Iterator[QueueEntry]:
        """Yield this entry to a publish inside this one's decision (a merge that has to come
        first), which must not wait for this turn."""
        self._inner += 1
        try:
            yield self
        finally:
            self._inner -= 1

    def leave(self) -> None:
        """Remove a turn that no publish removed. Otherwise the turn times out."""
        if self._turn is None:
            return
        try:
            remove_turn(self._lake, self._table_name, self._turn.id)
        except Transient as error:
            LOG.warning("%s: turn not removed from the publish queue: %s", self._what, error)
        self._turn = None

    def is_for(self, table_name: str) -> bool:
        return self._table_name == table_name and self._takes_turns

    def _before(self, properties: Mapping[str, str]) -> Turn | None:
        if not self._takes_turns:
            return None
        queue = read_queue(properties)
        if self._turn is not None and self._turn.id not in {t.id for t in queue}:
            LOG.info("%s: turn timed out before the publish landed", self._what)
            self._turn = None
        return turn_before(queue, self._turn.id if self._turn else None, self._waited)

    def _join(self) -> None:
        self._turn = join_queue(self._lake, self._table_name, self._what, self._longest)
        if self._turn is not None:
            LOG.info(
                "%s: joined the publish queue turn=%s timeout=%.0f s",
                self._what,
                self._turn.id,
                self._turn.bound,
            )

    def _settle(self) -> None:
        # Commits that began before their publishers could see the turn would refuse a long attempt.
        time.sleep(min(SETTLE_SECONDS, self._longest / 4))


_ENTRY: ContextVar[QueueEntry | None] = ContextVar("queue_entry", default=None)


@contextmanager
def queue_entry(lake: Lake, table_name: str, what: str, takes_turns: bool) -> Iterator[QueueEntry]:
    """Yield the entry of a publish until it landed or gave up: the outer publish's entry if it is
    inside one for the same table that takes turns."""
    outer = _ENTRY.get()
    if outer is not None and takes_turns and outer.is_for(table_name):
        with outer.inside():
            yield outer
        return
    entry = QueueEntry(lake, table_name, what, takes_turns)
    token = _ENTRY.set(entry)
    try:
        yield entry
    finally:
        _ENTRY.reset(token)
        entry.leave()
