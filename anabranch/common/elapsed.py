"""The monotonic clock, and the time of another clock since it was read."""

from __future__ import annotations

import time
from dataclasses import dataclass
from datetime import datetime, timedelta


def elapsed_seconds() -> float:
    """Return the seconds of the monotonic clock; on Linux it also counts while the machine
    sleeps."""
    return (
        time.clock_gettime(time.CLOCK_BOOTTIME)
        if hasattr(time, "CLOCK_BOOTTIME")
        else time.monotonic()
    )


@dataclass(frozen=True)
class Compared:
    """One comparison: the other clock's time, and the monotonic clock in seconds at that moment."""

    time: datetime
    elapsed: float

    def says(self, elapsed: float) -> datetime:
        """Return the other clock's time when the monotonic clock is at `elapsed` seconds."""
        return self.time + timedelta(seconds=elapsed - self.elapsed)
