"""Lookups by partition: text of one size for any number of partitions, hours or offsets."""

import pytest

from anabranch.records import inside, numbers


def tokens(sql: str) -> int:
    """How many tokens Spark's parser sees: a text in quotes is one."""
    return len("''".join(sql.split("'")[::2]).replace("(", " ( ").split())


def test_a_condition_is_as_small_for_a_thousand_partitions_as_for_one() -> None:
    one, many = (inside({p: (p, 10**12) for p in range(n)}) for n in (1, 1000))
    assert tokens(one) == tokens(many)


def test_nothing_lies_inside_no_ranges_and_inside_partitions_between_others() -> None:
    assert inside({}) == inside({}, "kafka_partition", "kafka_offset")
    assert numbers([]) in inside({})
    assert numbers([0, 0, 5]) in inside({2: (5, 7)}) and numbers([0, 0, 7]) in inside({2: (5, 7)})


def test_a_negative_partition_is_refused() -> None:
    with pytest.raises(ValueError, match="expected 0 or more, found -1"):
        inside({-1: (0, 1), 0: (0, 1)})
