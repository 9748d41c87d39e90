"""Attempts: trying again within seconds, where one thing is asked. A job as a whole: `anabranch.common.retry`."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Iterable, Iterator
from itertools import count


def attempts(pauses: Iterable[float], seconds: float = math.inf, at_most: int | None = None) -> Iterator[int]:
    """Number the attempts of a loop, from 1 on, and pause between two of them; the loop is left when one succeeds.

    None follows the attempt that is the `at_most`th, or that ends so many `seconds` after the first began: what is
    behind the loop, or in its `else`, says that it failed.
    """
    deadline, pause = time.monotonic() + seconds, iter(pauses)
    for number in count(1):
        yield number
        if number == at_most or time.monotonic() >= deadline:
            return
        time.sleep(next(pause))


def doubling(first: float, longest: float = math.inf) -> Iterator[float]:
    """Pauses of which each is twice the one before it."""
    while True:
        yield first
        first = min(longest, first * 2)


def jitter(longest: float) -> Iterator[float]:
    """Pauses anywhere between nothing and the longest, so that those who were refused together part."""
    while True:
        yield random.uniform(0, longest)
