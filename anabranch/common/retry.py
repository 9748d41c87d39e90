"""Retries: of one request within seconds (`attempts`), and of a whole job by the policy of both
jobs (`Retry`). Refused publishes (`anabranch.protocol.publish.run`) use neither.

A job's pauses are capped exponential back-off with full jitter (random between zero and the cap, so
that jobs that failed together do not retry together). Each failure is one log line. The batch layer
limits the time. Unexplained errors are retried a few times only, whatever the limit.
"""

from __future__ import annotations

import logging
import math
import random
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from itertools import count
from typing import NoReturn, TypeVar

from anabranch.common.counters import RETRIES, TALLY
from anabranch.common.errors import NotYet, Transient, Unexpected, Unexplained
from anabranch.common.remote_errors import asked_service, explained_errors


def attempts(
    pauses: Iterable[float], seconds: float = math.inf, at_most: int | None = None
) -> Iterator[int]:
    """Yield attempt numbers from 1, with a pause between two; the caller leaves the loop on
    success.

    The last attempt is number `at_most`, or one that ends `seconds` or more after the first began.
    The code after the loop, or in its `else`, raises the failure.
    """
    deadline, pause = time.monotonic() + seconds, iter(pauses)
    for number in count(1):
        yield number
        if number == at_most or time.monotonic() >= deadline:
            return
        time.sleep(next(pause))


def doubling(first: float, longest: float = math.inf) -> Iterator[float]:
    """Yield pauses in seconds that double from `first` up to `longest`."""
    while True:
        yield first
        first = min(longest, first * 2)


def jitter(longest: float) -> Iterator[float]:
    """Yield random pauses up to `longest` seconds: processes refused together then part."""
    while True:
        yield random.uniform(0, longest)


LOG = logging.getLogger(__name__)

FIRST_PAUSE = timedelta(seconds=1)
LONGEST_PAUSE = timedelta(seconds=30)
# The number of unexplained failures, without progress between them, that ends a job.
UNEXPLAINED_TRIES = 5

T = TypeVar("T")


@dataclass(frozen=True)
class Retry:
    """How long to retry (`limit`, None: for ever) and the event that ends a pause early (`stop`).

    `pause` replaces the sleep of a pause: it returns after the given seconds or when `stop` is set.
    """

    limit: timedelta | None
    stop: threading.Event
    longest_pause: timedelta = LONGEST_PAUSE
    pause: Callable[[float, threading.Event], None] | None = None

    def call(
        self, what: str, action: Callable[[], T], progress: Callable[[], int] = lambda: 0
    ) -> T:
        """Return the result of `action`, retried after each Transient except NotYet; other errors
        of ours are raised at once. Errors of libraries are converted by
        `anabranch.common.remote_errors.explain`.

        If `progress` changed since the previous failure, pauses, limit and the count of unexplained
        failures restart. Raises the last Transient once `stop` is set, or when the next attempt
        would come after the limit; Unexpected after UNEXPLAINED_TRIES unexplained failures,
        whatever else failed between them.
        """
        seen, unexplained, number, began = progress(), 0, 0, time.monotonic()
        caps = self._caps()
        while True:
            try:
                return self._try(what, action)
            except NotYet:
                raise
            except Transient as failed:
                error = failed
            ended = time.monotonic()
            if (now := progress()) != seen:
                seen, unexplained, number, began, caps = now, 0, 0, ended, self._caps()
            number += 1
            pause = random.uniform(0, next(caps))
            left, until, is_too_often = math.inf, "no time limit", False
            if self.limit is not None:
                left = self.limit.total_seconds() - (ended - began)
                at = datetime.now(UTC) + timedelta(seconds=left)
                until = f"until {at:%T} UTC"
            if isinstance(error, Unexplained):
                unexplained += 1
                is_too_often = unexplained >= UNEXPLAINED_TRIES
                until = f"unexplained {unexplained} of {UNEXPLAINED_TRIES}, {until}"
            if self.stop.is_set() or pause >= left or is_too_often:
                self._give_up(what, error, number)
            TALLY.count(RETRIES, asked_service(error))
            LOG.warning(
                "%s: try %d failed: %s; try %d in %.1f s (%s)",
                what,
                number,
                error,
                number + 1,
                pause,
                until,
            )
            if self.pause is None:
                self.stop.wait(pause)
            else:
                self.pause(pause, self.stop)

    def _caps(self) -> Iterator[float]:
        longest = self.longest_pause.total_seconds()
        return doubling(min(FIRST_PAUSE.total_seconds(), longest), longest)

    def _try(self, what: str, action: Callable[[], T]) -> T:
        # No attempt follows a pause that `stop` ended.
        if self.stop.is_set():
            raise Transient(f"{what}: stop requested; nothing is lost, run it again")
        with explained_errors(what):
            return action()

    def _give_up(self, what: str, error: Transient, number: int) -> NoReturn:
        if self.stop.is_set():
            # Errors caused by the stop are of no importance: the next start goes on.
            if isinstance(error, Unexplained):
                raise Transient(str(error)) from error
            raise error
        if isinstance(error, Unexplained):
            raise Unexpected(
                f"{what}: given up after {number} tries, of unknown cause; published rows are not "
                f"affected; the last error: {error}"
            ) from error
        raise Transient(
            f"{what}: given up after {number} tries within {self.limit}: {error}"
        ) from error
