"""The clock for hours and commits: this machine's clock, confirmed by another clock. A machine's
clock may change while a job runs, after a resume or by a wrong time server. So it is compared with
the object store's clock, and between two such comparisons with the monotonic clock. A time that was
not compared is never returned.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta

from anabranch.common.errors import Transient
from anabranch.config import Environment
from anabranch.iceberg.s3 import Compared, bucket_of, elapsed_seconds, open_store

MAX_CLOCK_SKEW = timedelta(seconds=30)
# Without a time server, both the machine's clock and the monotonic clock drift.
COMPARED_FOR = timedelta(minutes=10)


def is_apart(one: datetime, other: datetime) -> bool:
    """Return whether two clocks differ too much for a commit. Pure."""
    return abs(one - other) > MAX_CLOCK_SKEW


def is_within(limit: timedelta, began: datetime, now: datetime) -> bool:
    """Return whether `now` is certainly at most `limit` after `began`: a clock that was set back
    does not show how long ago that was. Pure."""
    return abs(now - began) <= limit


def should_compare(last: Compared | None, wall: datetime, elapsed: float) -> bool:
    """Return whether this machine's clock must be compared before use. Pure."""
    # The machine's clock was set since: a suspended process would judge the age of its files by a
    # time before its sleep.
    if last is None or is_apart(wall, last.says(elapsed)):
        return True
    return timedelta(seconds=elapsed - last.elapsed) > COMPARED_FOR


class Clock:
    """A clock that returns a confirmed time or raises Transient. `ask` reads the other clock;
    without it, this machine's first time is trusted, later changes are not. Thread-safe."""

    def __init__(
        self,
        ask: Callable[[], datetime] | None,
        wall: Callable[[], datetime] | None = None,
        elapsed: Callable[[], float] | None = None,
    ) -> None:
        self._ask, self._wall, self._elapsed = ask, wall or _wall, elapsed or elapsed_seconds
        self._last: Compared | None = None

    def now(self, updated_ms: int | None = None) -> datetime:
        """Return the time for a commit's timestamp. `updated_ms`: the table's last update.

        Raises Transient, naming the clocks, if this machine's clock is more than half a minute off
        or behind the last update.
        """
        wall = self._wall()
        if should_compare(self._last, wall, self._elapsed()):
            wall = self.compare()
        if updated_ms is not None:
            updated = datetime.fromtimestamp(updated_ms / 1000, UTC)
            if updated - wall > MAX_CLOCK_SKEW:
                raise Transient(
                    "clock: expected this machine not to be behind the table's last update "
                    f"{updated.isoformat()}, found {wall.isoformat()}; set the clocks (NTP) of "
                    "the machines that publish"
                )
        return wall

    def elapsed(self) -> float:
        """Return the monotonic clock's seconds."""
        return self._elapsed()

    def time_of(self, elapsed: float) -> datetime:
        """Return the time at which `elapsed()` had this value. Raises Transient, as `now`."""
        return self.now() - timedelta(seconds=max(0.0, self._elapsed() - elapsed))

    def compare(self) -> datetime:
        """Compare this machine's clock with the other clock; return its time. Raises Transient."""
        store_time = self._ask() if self._ask is not None else None
        wall, elapsed = self._wall(), self._elapsed()
        # Decision 4: a fast clock would seal hours that have not ended. By a slow one, staged files
        # would look younger than they are (decision 21).
        if store_time is not None and is_apart(wall, store_time):
            raise Transient(
                f"clock: expected this machine ({wall.isoformat()}) and the object store "
                f"({store_time.isoformat()}) within {MAX_CLOCK_SKEW}; set this machine's clock "
                "(NTP)"
            )
        if (
            store_time is None
            and self._last is not None
            and is_apart(wall, self._last.says(elapsed))
        ):
            raise Transient(
                f"clock: expected this machine's clock at {self._last.says(elapsed).isoformat()} "
                f"by the monotonic clock, found {wall.isoformat()}: it was set while the process "
                "ran, and there is no object store to compare with; set the clock (NTP), or "
                "restart the process if the clock is right now"
            )
        self._last = Compared(store_time or wall, elapsed)
        return wall


def store_clock(environment: Environment) -> Clock:
    """Return the clock of a process that commits to the warehouse. Only an object store has one to
    compare with."""
    bucket = bucket_of(environment.catalog.warehouse)
    if bucket is None:
        return Clock(None)
    return Clock(lambda: open_store(environment.s3).time_now(bucket))


def _wall() -> datetime:
    return datetime.fromtimestamp(time.time(), UTC)
