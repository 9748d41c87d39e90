"""Sorted arrays, and groups of items by size."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

T = TypeVar("T")


def find_sorted(numbers: NDArray[np.int64], among: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the index of each number in `among`, which is in ascending order; -1 for others."""
    if not len(among):
        return np.full(len(numbers), -1, np.int64)
    at = np.searchsorted(among, numbers)
    return np.where(among[np.minimum(at, len(among) - 1)] == numbers, at, -1)


def groups_by_size(items: Iterable[T], size: Callable[[T], int], enough: int) -> Iterator[list[T]]:
    """Yield consecutive items in groups. A group ends once its size is `enough`."""
    group, total = list[T](), 0
    for item in items:
        group.append(item)
        total += size(item)
        if total >= enough:
            yield group
            group, total = [], 0
    if group:
        yield group
