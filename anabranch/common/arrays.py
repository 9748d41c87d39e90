"""Sorted arrays, and groups of items by key or size."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

T = TypeVar("T")
K = TypeVar("K")


def find_sorted(numbers: NDArray[np.int64], among: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the index of each number in `among`, which is in ascending order; -1 for others."""
    if not len(among):
        return np.full(len(numbers), -1, np.int64)
    at = np.searchsorted(among, numbers)
    return np.where(among[np.minimum(at, len(among) - 1)] == numbers, at, -1)


def grouped(items: Iterable[T], key: Callable[[T], K]) -> dict[K, list[T]]:
    """Return the items by their key, each key's in their order."""
    found: dict[K, list[T]] = {}
    for item in items:
        found.setdefault(key(item), []).append(item)
    return found


def groups_by_size(
    items: Iterable[T], size: Callable[[T], int], most: int, count: int = sys.maxsize
) -> Iterator[list[T]]:
    """Yield consecutive items in groups whose size is at most `most`, or of one larger item, and of
    at most `count` items."""
    group, total = list[T](), 0
    for item in items:
        own = size(item)
        if group and (total + own > most or len(group) == count):
            yield group
            group, total = [], 0
        group.append(item)
        total += own
    if group:
        yield group
