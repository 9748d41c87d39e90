"""Turns of a job of many streams: the number of concurrent hours, and whose hour is next.

Each stream has a thread, which works only while it has a turn. The next turn goes to the stream
that had the fewest, and among these to the one with the oldest hour: a stream with a long backlog
delays another by one hour at most. A small hour takes one of `at_once` places; a large hour takes
more, by its size, and waits until they are free. A stream that waits before a retry gives its
places back.
"""

from __future__ import annotations

import heapq
import itertools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from anabranch.spark.session import LazySpark

OFFSETS_OF_A_PLACE = 250_000
"""The number of offsets per place that an hour takes."""


def places(offsets: int | None, at_once: int) -> int:
    """Return the number of places, at most `at_once`, that an hour of `offsets` offsets takes: all
    if the number is unknown. Pure."""
    if offsets is None:
        return at_once
    return max(1, min(at_once, -(-offsets // OFFSETS_OF_A_PLACE)))


class Turns:
    """The places of a job. Each has a Spark session, since an hour's settings are those of its
    session. `open_session` is called for each place that is used, at most `at_once` times."""

    def __init__(self, at_once: int, open_session: Callable[[], LazySpark]) -> None:
        self.at_once = at_once
        self._open = open_session
        self._free = at_once
        self._sessions: list[LazySpark] = []
        self._waiting: list[tuple[int, str, int]] = []
        self._arrivals = itertools.count()
        self._changed = threading.Condition()

    def take(self, turns_had: int, hour: str, number: int) -> LazySpark:
        """Wait for `number` places. Streams with fewer turns than `turns_had` go first, then those
        with as many turns and an older hour. Return the session of a place."""
        ticket = (turns_had, hour, next(self._arrivals))
        with self._changed:
            heapq.heappush(self._waiting, ticket)
            self._changed.wait_for(lambda: self._waiting[0] == ticket and self._free >= number)
            heapq.heappop(self._waiting)
            self._free -= number
            session = self._sessions.pop() if self._sessions else None
            self._changed.notify_all()
        return session if session is not None else self._open()

    def give_back(self, session: LazySpark, number: int) -> None:
        with self._changed:
            self._sessions.append(session)
            self._free += number
            self._changed.notify_all()


class StreamTurns:
    """The turns of one stream, for use by its thread only. `use` is called with the session at the
    start of each turn."""

    def __init__(self, turns: Turns, use: Callable[[LazySpark], None]) -> None:
        self._turns, self._use = turns, use
        self._turns_had = 0
        self._now: tuple[LazySpark, str, int] | None = None

    @contextmanager
    def take(self, hour: str = "", offsets: int | None = 0) -> Iterator[None]:
        """Take a turn for an hour of `offsets` offsets (None: unknown), or for the work before and
        after hours."""
        self._begin(hour, places(offsets, self._turns.at_once))
        try:
            yield
        finally:
            self._end()

    def pause(self, seconds: float, stop: threading.Event) -> None:
        """Wait for `seconds` or for `stop`, without a place. Within a turn, take the places again
        afterwards."""
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
        session = self._turns.take(self._turns_had, hour, number)
        self._now = (session, hour, number)
        self._turns_had += 1
        self._use(session)

    def _end(self) -> None:
        if self._now is not None:
            session, _, number = self._now
            self._now = None
            self._turns.give_back(session, number)
