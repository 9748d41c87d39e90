"""Which partitions have the oldest next record, by the index by time alone."""

from collections.abc import Mapping

from hypothesis import given
from hypothesis import strategies as st

from anabranch.offsets.hour_ends import MOST_FETCHED, PRECISION_MS, find_oldest
from anabranch.offsets.position import Stamped

HIGH = 100 * 3_600_000
# By partition, its stamps, which rise, and how many are read.
LOGS = st.lists(
    st.tuples(
        st.lists(st.integers(0, HIGH - 1), min_size=1, max_size=12).map(sorted), st.integers(0, 11)
    ),
    min_size=1,
    max_size=60,
).map(lambda logs: [(stamps, min(read, len(stamps) - 1)) for stamps, read in logs])


class Index:
    """The index by time of these logs; counts what it is asked."""

    def __init__(self, logs: list[list[int]]) -> None:
        self._logs, self.asked = logs, 0

    def first_from(self, times: Mapping[int, int]) -> dict[int, Stamped | None]:
        self.asked += 1
        return {
            p: next((Stamped(o, ts) for o, ts in enumerate(self._logs[p]) if ts >= time), None)
            for p, time in times.items()
        }


@given(logs=LOGS)
def test_the_next_record_is_in_one_of_few_partitions(logs: list[tuple[list[int], int]]) -> None:
    index = Index([stamps for stamps, _ in logs])
    found = find_oldest({p: read for p, (_, read) in enumerate(logs)}, 0, HIGH, index.first_from)
    assert 0 < len(found) <= MOST_FETCHED
    oldest = min(stamps[read] for stamps, read in logs)
    assert min(logs[p][0][logs[p][1]] for p in found) - oldest <= PRECISION_MS
    assert index.asked <= 19


def test_five_hundred_partitions_are_one_request() -> None:
    logs = [[0, 3_600_000 + p] for p in range(500)]
    logs[321] = [0, 1_800_000]
    index = Index(logs)
    assert 321 in find_oldest(dict.fromkeys(range(500), 1), 0, 2 * 3_600_000, index.first_from)
    assert index.asked <= 14


def test_a_partition_whose_next_record_has_no_timestamp_is_read() -> None:
    logs = [[0, 3_600_000 + p] for p in range(50)]
    logs[7] = [0, -1]
    assert 7 in find_oldest(dict.fromkeys(range(50), 1), 0, 2 * 3_600_000, Index(logs).first_from)


def test_a_delete_of_few_partitions_needs_no_confirmation() -> None:
    index = Index([[1]] * MOST_FETCHED)
    found = len(find_oldest(dict.fromkeys(range(MOST_FETCHED), 0), 0, HIGH, index.first_from))
    assert found == MOST_FETCHED
    assert index.asked == 0
