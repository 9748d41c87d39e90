"""Retries of one request within seconds. `anabranch.common.retry` retries a whole job."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Iterable, Iterator
from itertools import count


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
    """Yield random pauses in seconds up to `longest`, so that processes refused together do not
    collide again."""
    while True:
        yield random.uniform(0, longest)
