"""The partition with the oldest unread record, without a fetch from each partition.

A fetch returns a whole batch of a partition, and only one batch a response if records are large:
with 500 partitions of 1 MB records, that is 500 requests and 500 MB. Kafka's time index answers for
all partitions at once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from anabranch.offsets.position import Offsets, Stamped

MOST_FETCHED = 8
"""The most partitions whose records are fetched."""
PRECISION_MS = 1_000

FirstFrom = Callable[[Mapping[int, int]], Mapping[int, Stamped | None]]
"""Return, by partition, the earliest record with this timestamp (milliseconds) or a later one; None
if there is none."""


def find_oldest(starts: Offsets, low: int, high: int, first_from: FirstFrom) -> frozenset[int]:
    """Return at most MOST_FETCHED partitions, one of which has the oldest record at its offset of
    `starts`. If more partitions are about as old, the oldest is exact to PRECISION_MS. Calls
    `first_from` some twenty times; pure otherwise.

    `low` and `high` are the bounds of the search, in milliseconds: no record is later than `high`,
    and records older than `low` count as equally old. If timestamps do not rise with offsets, a
    partition may seem younger than it is.
    """
    left = set(starts)
    while len(left) > MOST_FETCHED and high - low > PRECISION_MS:
        middle = (low + high) // 2
        found = first_from(dict.fromkeys(sorted(left), middle))
        # The first record from `middle` on comes after the next record, so the latter is older.
        older = {p for p in left if (record := found.get(p)) is None or record.offset > starts[p]}
        if older:
            left, high = older, middle
        else:
            low = middle
    return frozenset(sorted(left)[:MOST_FETCHED])
