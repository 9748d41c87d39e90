"""Turns of a job of many streams: how many hours are worked on at once, and whose is next.

Each stream has a thread, which works only while it has a turn. The next turn goes to the stream
that had the fewest, and of these to the one with the oldest hour: a stream with a long backlog
delays another by one hour at most. A small hour takes one of `at_once` places; a large hour takes
as many as it is large, and waits until they are free. A stream that pauses before another try gives
its place away.
"""

from __future__ import annotations

import heapq
import itertools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from pyspark.sql import SparkSession

OFFSETS_OF_A_PLACE = 250_000
"""An hour takes a place for each so many offsets."""


def places(offsets: int | None, at_once: int) -> int:
    """The places that an hour of so many offsets takes, of `at_once`: all for an unknown number.
    Pure."""
    if offsets is None:
        return at_once
    return max(1, min(at_once, -(-offsets // OFFSETS_OF_A_PLACE)))


class Turns:
    """The places of a job. Each has a Spark session, since an hour's settings are those of its
    session. `open_session` makes a session: called for each place that is used, at most `at_once`
    times."""

    def __init__(self, at_once: int, open_session: Callable[[], SparkSession]) -> None:
        self.at_once = at_once
        self._open = open_session
        self._free = at_once
        self._sessions: list[SparkSession] = []
        self._waiting: list[tuple[int, str, int]] = []
        self._arrivals = itertools.count()
        self._changed = threading.Condition()

    def take(self, had: int, hour: str, number: int) -> SparkSession:
        """Wait for `number` places, after streams that had fewer turns than `had` and, with as
        many, an older hour."""
        ticket = (had, hour, next(self._arrivals))
        with self._changed:
            heapq.heappush(self._waiting, ticket)
            self._changed.wait_for(lambda: self._waiting[0] == ticket and self._free >= number)
            heapq.heappop(self._waiting)
            self._free -= number
            session = self._sessions.pop() if self._sessions else None
            self._changed.notify_all()
        try:
            return session if session is not None else self._open()
        except BaseException:
            self._give(number)
            raise

    def give_back(self, session: SparkSession, number: int) -> None:
        with self._changed:
            self._sessions.append(session)
        self._give(number)

    def _give(self, number: int) -> None:
        with self._changed:
            self._free += number
            self._changed.notify_all()


class StreamTurns:
    """The turns of one stream, for its thread alone. `use` is called with the session at the
    beginning of each."""

    def __init__(self, turns: Turns, use: Callable[[SparkSession], None]) -> None:
        self._turns, self._use = turns, use
        self._had = 0
        self._now: tuple[SparkSession, str, int] | None = None

    @contextmanager
    def take(self, hour: str = "", offsets: int | None = 0) -> Iterator[None]:
        """A turn, for an hour of so many offsets (None: unknown), or for what comes before and
        after hours."""
        self._begin(hour, places(offsets, self._turns.at_once))
        try:
            yield
        finally:
            self._end()

    def pause(self, seconds: float, stop: threading.Event) -> None:
        """Wait for so long, or for `stop`, without a place; within a turn it goes on afterwards."""
        if self._now is None:
            stop.wait(seconds)
            return
        _, hour, number = self._now
        self._end()
        try:
            stop.wait(seconds)
        finally:
            self._begin(hour, number)

    def _begin(self, hour: str, number: int) -> None:
        session = self._turns.take(self._had, hour, number)
        self._now = (session, hour, number)
        self._had += 1
        self._use(session)

    def _end(self) -> None:
        if self._now is not None:
            session, _, number = self._now
            self._now = None
            self._turns.give_back(session, number)
