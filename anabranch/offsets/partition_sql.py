"""Lookups of a value by partition in Spark SQL, at the same cost for one partition and for a
thousand.

The values are one array, indexed by partition. Spark folds such an array into a single literal,
which compiled code only refers to. So neither the plan nor the code grows with the number of
partitions, and values that change from micro-batch to micro-batch cause no new compilation. The
array is written as a string, which is one token to Spark's parser; the parser takes seconds for
tens of thousands of tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from anabranch.offsets.position import Ranges

_NOTHING = "CAST(array() AS ARRAY<BIGINT>)"


def within(offset: str, start: str, end: str) -> str:
    """Return SQL of any engine: whether an offset is in `[start, end)`; false if a bound is null.
    Never null."""
    return f"coalesce({offset} >= {start} AND {offset} < {end}, false)"


def inside(ranges: Ranges, partition: str = "kafka_partition", offset: str = "kafka_offset") -> str:
    """Return Spark SQL: whether a row's offset is in the range of its partition; false for a
    partition without one. Never null."""
    every = [ranges.get(p, (0, 0)) for p in _up_to_last(ranges)]
    starts, ends = (numbers([bounds[i] for bounds in every]) for i in (0, 1))
    return within(offset, f"get({starts}, {partition})", f"get({ends}, {partition})")


def numbers(values: Sequence[int]) -> str:
    """Return Spark SQL: an array of BIGINT."""
    return (
        f"CAST(split('{','.join(map(str, values))}', ',') AS ARRAY<BIGINT>)" if values else _NOTHING
    )


def _up_to_last(values: Mapping[int, object]) -> range:
    if any(p < 0 for p in values):
        raise ValueError(f"partitions: expected 0 or more, found {min(values)}")
    return range(max(values, default=-1) + 1)
