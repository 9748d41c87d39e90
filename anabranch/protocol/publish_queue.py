"""Turns: a right of way over other publishes, for a publisher that would be refused again and again.

Each turn is a table property of its own, `anabranch.turn.<id>`, so that asking for one and taking one back never undo
what another process asks at the same time. The turns that a table holds are a line: the first has the way, every other
waits until it is gone or its bound has passed, and a publisher that saw that happen takes it out.

1. Ask: a publisher that was refused, or that finds others before it, puts its turn at the end of the line.
2. Wait: a publisher that is about to commit and finds a turn before its own waits for that one, then decides again.
3. Take back: the publish that lands takes its turn with it, or its end does.

A bound is measured by the waiter's clock, from when it saw the turn first in line: no two clocks are compared.
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

from anabranch.common.attempts import attempts, jitter
from anabranch.common.errors import Transient
from anabranch.iceberg.commits import Commit, Outcome
from anabranch.iceberg.lake import Lake
from anabranch.protocol.state import TURN

LOG = logging.getLogger(__name__)

_PREFIX = f"{TURN}."
# A turn's bound, in seconds: several of its owner's tries, within what a reader of fresh rows can bear.
TRIES, LEAST, MOST = 4.0, 10.0, 60.0
# Where a single try takes that long, a shorter turn would be in vain: one try and a half, within minutes.
TRY_AND_A_HALF, LIMIT = 1.5, 300.0
# How long a turn of an older version holds others: its property is an id and nothing else.
BARE_BOUND = 5.0
# So many refusals in a row ask for a turn; a try that took so many seconds asks at once.
REFUSALS, LONG_TRY = 3, 0.3
# More askers than this go on without a turn.
LONGEST_LINE = 16
# Asking is a commit too, and others' may come first: for so many seconds it is tried again.
ASKING = 15.0
# What others had begun to commit when they could not know of the turn yet lands within so many seconds.
SETTLING = 2.0


@dataclass(frozen=True)
class Turn:
    """One asker's place in line. `bound` is how many seconds it may hold others; the rest is for people."""

    id: str
    number: int
    bound: float
    what: str = ""
    by: str = ""
    asked_at: str = ""

    def to_properties(self) -> dict[str, str]:
        """As the table carries it. The bare id is what older versions wait for."""
        values = {
            "number": self.number, "bound": self.bound, "what": self.what, "by": self.by, "asked_at": self.asked_at,
        }  # fmt: skip
        return {_PREFIX + self.id: json.dumps(values), TURN: self.id}

    @property
    def who(self) -> str:
        """For a log line."""
        return f"{self.what} ({self.by}, turn {self.id})" if self.what else f"turn {self.id}"


Line = tuple[Turn, ...]


def read_line(properties: Mapping[str, str]) -> Line:
    """The turns that a table's properties hold, in the order in which they have the way."""
    turns = []
    for key, text in properties.items():
        if key.startswith(_PREFIX):
            turns.append(_read(key.removeprefix(_PREFIX), text))
    bare = properties.get(TURN)
    if bare and _PREFIX + bare not in properties:
        # Its asker is of a version that knows no other form.
        turns.append(Turn(bare, 0, BARE_BOUND))
    return tuple(sorted(turns, key=lambda t: (t.number, t.id)))


def _read(id: str, text: str) -> Turn:
    try:
        values = json.loads(text)
        bound = min(LIMIT, float(values["bound"]))
        return Turn(id, int(values["number"]), bound, *(str(values.get(k, "")) for k in ("what", "by", "asked_at")))
    except (ValueError, KeyError, TypeError, AttributeError):
        # Written by hand, or by a version to come: it holds nobody for long.
        return Turn(id, 0, BARE_BOUND)


def turn_bound(longest: float) -> float:
    """The bound of a turn whose owner's longest try took so many seconds. Pure."""
    return min(LIMIT, max(LEAST, min(MOST, TRIES * longest), TRY_AND_A_HALF * longest))


def plan_turn(line: Line, turn: Turn) -> Turn | None:
    """`turn` at the end of the line; None when the line is full. Pure."""
    if len(line) >= LONGEST_LINE:
        return None
    return replace(turn, number=max((t.number for t in line), default=0) + 1)


def should_ask(refusals: int, longest: float) -> bool:
    """Whether a publisher asks for a turn after so many refusals, the longest try having taken so many seconds. Pure.

    A try that takes a second loses against a publisher that lands every second, however often it is repeated.
    """
    return refusals >= REFUSALS or (refusals > 0 and longest >= LONG_TRY)


def turn_before(line: Line, mine: str | None, over: str | None = None) -> Turn | None:
    """The turn that one whose own is `mine` has to wait for before it commits; None when it has the way. Pure.

    `over` was waited for already. Who is not in line is behind all of it.
    """
    first = next((t for t in line if t.id != over), None)
    return None if first is None or first.id == mine else first


def turn_to_hold_for(line: Line, waited: str | None, has_held: bool) -> Turn | None:
    """The turn that the speed layer waits for before it stages or commits a micro-batch. Pure.

    Each is waited for once, and at most one for each micro-batch: between any two turns it publishes.
    """
    return None if has_held else turn_before(line, None, waited)


def is_over(turn: Turn, seconds: float) -> bool:
    """Whether a turn that was seen first in line so many seconds ago holds nobody any more. Pure."""
    return seconds >= turn.bound


def plan_taking_back(properties: Mapping[str, str], id: str, commit: Commit) -> Commit:
    """`commit`, which also takes a turn out of the line. Pure.

    The key is set before it is removed: PyIceberg fails to remove one that another process took out meanwhile.
    """
    keys = (_PREFIX + id, *((TURN,) if properties.get(TURN) == id else ()))
    if not any(key in properties for key in keys):
        return commit
    return replace(
        commit,
        set_properties={**commit.set_properties, **dict.fromkeys(keys, "")},
        remove_properties=(*commit.remove_properties, *keys),
    )


def ask_for_turn(lake: Lake, table_name: str, what: str, longest: float = 0.0) -> Turn | None:
    """Put a new turn at the end of the line, with a bound that follows from the longest try so far.

    None when the line is full, or when others' commits came first for a quarter of a minute. Raises Transient.
    """
    by, at = f"{socket.gethostname()}:{os.getpid()}", datetime.now(UTC).isoformat(timespec="seconds")
    wanted = Turn(uuid.uuid4().hex, 0, turn_bound(longest), what, by, at)
    for _ in attempts(jitter(0.1), ASKING):
        table = lake.load(table_name)
        line = read_line(table.properties)
        # The answer of the attempt before may have been lost.
        if own := next((t for t in line if t.id == wanted.id), None):
            return own
        turn = plan_turn(line, wanted)
        if turn is None:
            return None
        if lake.commit(table, Commit(turn.id, {}, (), set_properties=turn.to_properties())) is Outcome.LANDED:
            return turn
    return None


def take_back_turn(lake: Lake, table_name: str, id: str) -> None:
    """Take a turn out of the line: one's own that no publish took back, or another's whose bound has passed.

    What others' commits don't let it take out within a quarter of a minute stays, until its bound is seen to pass.
    """
    for _ in attempts(jitter(0.1), ASKING):
        table = lake.load(table_name)
        if id not in {t.id for t in read_line(table.properties)}:
            return
        commit = plan_taking_back(table.properties, id, Commit(uuid.uuid4().hex, {}, ()))
        if lake.commit(table, commit) is Outcome.LANDED:
            return


def wait_for_turn(
    lake: Lake, table_name: str, turn: str | None, waited: str | None, stop: threading.Event | None = None
) -> str | None:
    """Hold back until `turn` is taken back or its bound has passed, counted from now; then it is taken out of the line.

    A turn that was `waited` for before is not waited for again. `stop` ends the wait at once. Returns the turn waited
    for, to be passed as `waited` to the next call.
    """
    if turn is None or turn == waited:
        return turn
    began, pause, stop = time.monotonic(), 0.05, stop or threading.Event()
    ahead = _find(lake, table_name, turn)
    if ahead is not None:
        LOG.info("table %s: %s has the way; waiting at most %.0f s", table_name, ahead.who, ahead.bound)
    while ahead is not None and not stop.is_set():
        if is_over(ahead, time.monotonic() - began):
            LOG.warning(
                "table %s: %s was not taken back within its %.0f s; going on", table_name, ahead.who, ahead.bound
            )
            take_back_turn(lake, table_name, turn)
            break
        stop.wait(min(pause, ahead.bound))
        pause = min(pause * 1.3, 0.5)
        ahead = _find(lake, table_name, turn)
    return turn


def _find(lake: Lake, table_name: str, id: str) -> Turn | None:
    return next((t for t in read_line(lake.load(table_name).properties) if t.id == id), None)


class Holding:
    """The speed layer's side: it waits for each turn once, and publishes between any two."""

    def __init__(self, lake: Lake, table_name: str, stop: threading.Event | None = None) -> None:
        self._lake, self._table_name, self._stop = lake, table_name, stop
        self._waited: str | None = None
        self._has_held = False

    def holds(self, properties: Mapping[str, str]) -> bool:
        """Wait for a turn that the properties, as loaded, hold; False when there is none to wait for."""
        turn = turn_to_hold_for(read_line(properties), self._waited, self._has_held)
        if turn is None:
            return False
        self._waited = wait_for_turn(self._lake, self._table_name, turn.id, self._waited, self._stop)
        self._has_held = True
        return True

    def published(self) -> None:
        """It published: the next turn may hold it."""
        self._has_held = False


class Place:
    """A publisher's place in line, from its first try until it landed or gave up; without `takes_turns`, none."""

    def __init__(self, lake: Lake, table_name: str, what: str, takes_turns: bool) -> None:
        self._lake, self._table_name, self._what, self._takes_turns = lake, table_name, what, takes_turns
        self._turn: Turn | None = None
        self._over: str | None = None
        self._longest = 0.0
        self._refusals = 0
        self._inner = 0

    def waits(self, properties: Mapping[str, str], deadline: float) -> bool:
        """Wait for all that are before it, as the properties that were loaded say; False when it has the way.

        Who was not in line is from then on, so that askers land in their order. Waits for nobody once `deadline`, of
        the monotonic clock, has passed.
        """
        first = self._before(properties)
        if first is None:
            return False
        while first is not None and time.monotonic() < deadline:
            if self._turn is None:
                self._ask()
            self._over = wait_for_turn(self._lake, self._table_name, first.id, self._over)
            first = self._before(self._lake.load(self._table_name).properties)
        self._settle()
        return True

    def refused(self, seconds: float) -> None:
        """Count a try that was refused after so many seconds, and ask for a turn when it is time to."""
        self._refusals, self._longest = self._refusals + 1, max(self._longest, seconds)
        if self._takes_turns and self._turn is None and should_ask(self._refusals, self._longest):
            self._ask()
            self._settle()

    def taking_back(self, properties: Mapping[str, str], commit: Commit) -> Commit:
        """The commit, which also takes its turn back; not yet in a publish inside another's decision."""
        if self._turn is None or self._inner:
            return commit
        return plan_taking_back(properties, self._turn.id, commit)

    def landed(self) -> None:
        """Its publish landed, and took the turn back."""
        if not self._inner:
            self._turn = None

    @contextmanager
    def inside(self) -> Iterator[Place]:
        """Itself for a publish inside this one's decision (a merge that has to come first), which goes by this turn:
        it would wait for its own otherwise."""
        self._inner += 1
        try:
            yield self
        finally:
            self._inner -= 1

    def leave(self) -> None:
        """Take back a turn that no publish took back. What a lake that is away does not let it take back ends by its
        bound."""
        if self._turn is None:
            return
        try:
            take_back_turn(self._lake, self._table_name, self._turn.id)
        except Transient as error:
            LOG.warning("%s: its turn is not taken back: %s", self._what, error)
        self._turn = None

    def is_for(self, table_name: str) -> bool:
        return self._table_name == table_name and self._takes_turns

    def _before(self, properties: Mapping[str, str]) -> Turn | None:
        if not self._takes_turns:
            return None
        line = read_line(properties)
        if self._turn is not None and self._turn.id not in {t.id for t in line}:
            LOG.info("%s: its turn was over before its publish landed", self._what)
            self._turn = None
        return turn_before(line, self._turn.id if self._turn else None, self._over)

    def _ask(self) -> None:
        self._turn = ask_for_turn(self._lake, self._table_name, self._what, self._longest)
        if self._turn is not None:
            LOG.info("%s: asked for a turn (%s) of at most %.0f s", self._what, self._turn.id, self._turn.bound)

    def _settle(self) -> None:
        # A try that takes long would be wasted on a commit that was under way before the turn was seen.
        time.sleep(min(SETTLING, self._longest / 4))


_PLACE: ContextVar[Place | None] = ContextVar("place", default=None)


@contextmanager
def in_line(lake: Lake, table_name: str, what: str, takes_turns: bool) -> Iterator[Place]:
    """The place of a publish, until it landed or gave up."""
    outer = _PLACE.get()
    if outer is not None and takes_turns and outer.is_for(table_name):
        with outer.inside():
            yield outer
        return
    place = Place(lake, table_name, what, takes_turns)
    token = _PLACE.set(place)
    try:
        yield place
    finally:
        _PLACE.reset(token)
        place.leave()
