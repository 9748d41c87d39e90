"""Positions in sorted arrays, and groups by size, against Python's own lists."""

from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from anabranch.common.arrays import find_sorted, groups_by_size

NUMBERS = st.lists(st.one_of(st.integers(-3, 3), st.integers(-(2**63), 2**63 - 1)))


@given(numbers=NUMBERS, among=NUMBERS)
def test_each_number_has_its_index_or_none(numbers: list[int], among: list[int]) -> None:
    among = sorted(set(among))
    found = find_sorted(np.array(numbers, np.int64), np.array(among, np.int64))
    assert found.tolist() == [among.index(n) if n in among else -1 for n in numbers]


@given(sizes=st.lists(st.integers(0, 9)), most=st.integers(1, 12), count=st.integers(1, 4))
def test_a_group_ends_before_it_is_too_large(sizes: list[int], most: int, count: int) -> None:
    groups = list(groups_by_size(sizes, int, most, count))
    assert [size for group in groups for size in group] == sizes
    assert all(len(group) <= count for group in groups)
    assert all(sum(group) <= most or len(group) == 1 for group in groups)
    pairs = [(one, other[0]) for one, other in pairwise(groups) if len(one) < count]
    assert all(sum(one) + following > most for one, following in pairs)
