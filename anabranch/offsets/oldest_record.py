"""When the oldest of each partition's next records was received, without a look at each partition.

A fetch gives a whole batch of a partition, and one batch in a response where records are large:
with 500 partitions of 1 MB records, a look at each is 500 requests and 500 MB. The index by time
answers for all partitions at once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from anabranch.offsets.position import Offsets, Stamped

MOST_FETCHED = 8
"""How many partitions' records are fetched at most."""
PRECISION_MS = 1_000

FirstFrom = Callable[[Mapping[int, int]], Mapping[int, Stamped | None]]
"""By partition, the earliest record that is stamped at a time in milliseconds, or later; None for
none."""


def find_oldest(starts: Offsets, low: int, high: int, first_from: FirstFrom) -> frozenset[int]:
    """The partitions, at most MOST_FETCHED, of which one has the oldest record at its offset of
    `starts`: to a second where more of them are as old. Asks some twenty times. Pure but for
    `first_from`.

    No record is older than `low`, or how much older does not matter; none is later than `high`.
    Where stamps do not rise with offsets, a partition may seem younger than it is.
    """
    left = set(starts)
    while len(left) > MOST_FETCHED and high - low > PRECISION_MS:
        middle = (low + high) // 2
        found = first_from(dict.fromkeys(sorted(left), middle))
        # The first record from then on is behind the next record, so that one is older.
        older = {p for p in left if (record := found.get(p)) is None or record.offset > starts[p]}
        if older:
            left, high = older, middle
        else:
            low = middle
    return frozenset(sorted(left)[:MOST_FETCHED])
