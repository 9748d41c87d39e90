"""Attempts: retry one request within seconds. `anabranch.common.retry` retries a whole job."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Iterable, Iterator
from itertools import count


def attempts(
    pauses: Iterable[float], seconds: float = math.inf, at_most: int | None = None
) -> Iterator[int]:
    """Number the attempts of a loop, from 1 on, and pause between two of them; the loop is left
    when one succeeds.

    The last attempt is the `at_most`th, or one that ends `seconds` after the first began. The code
    after the loop, or in its `else`, raises the failure.
    """
    deadline, pause = time.monotonic() + seconds, iter(pauses)
    for number in count(1):
        yield number
        if number == at_most or time.monotonic() >= deadline:
            return
        time.sleep(next(pause))


def doubling(first: float, longest: float = math.inf) -> Iterator[float]:
    """Pauses that double, up to the longest."""
    while True:
        yield first
        first = min(longest, first * 2)


def jitter(longest: float) -> Iterator[float]:
    """Random pauses up to the longest, so that processes refused together do not collide again."""
    while True:
        yield random.uniform(0, longest)
