"""Lookups: values of each partition as Spark SQL, at the same cost for one partition and for a
thousand.

The values are one array, by partition, and a row finds its own by index. Spark folds such an array
into a single literal, which compiled code only refers to. So neither the plan nor the code grows
with the partitions, and values that change from micro-batch to micro-batch cause no new
compilation. As text the array is one token to Spark's parser, which takes seconds for tens of
thousands of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from anabranch.offsets.position import Ranges

MAX_OFFSET = 2**63 - 1

_NOTHING = "CAST(array() AS ARRAY<BIGINT>)"


def within(offset: str, start: str, end: str) -> str:
    """Whether an offset lies in `[start, end)`; false where there are no bounds. Never null. SQL of
    any engine."""
    return f"coalesce({offset} >= {start} AND {offset} < {end}, false)"


def inside(ranges: Ranges, partition: str = "kafka_partition", offset: str = "kafka_offset") -> str:
    """Whether a row's offset lies in `[start, end)` of its partition; false for any other
    partition. Never null."""
    every = [ranges.get(p, (0, 0)) for p in _up_to_last(ranges)]
    starts, ends = (numbers([bounds[i] for bounds in every]) for i in (0, 1))
    return within(offset, f"get({starts}, {partition})", f"get({ends}, {partition})")


def arrays(values: Mapping[int, Sequence[int]]) -> str:
    """An array of arrays, by partition; one without values, among others that have some, gets an
    empty array."""
    return (
        f"array({', '.join(numbers(values.get(p, ())) for p in _up_to_last(values)) or _NOTHING})"
    )


def numbers(values: Sequence[int]) -> str:
    """An array of BIGINT."""
    return (
        f"CAST(split('{','.join(map(str, values))}', ',') AS ARRAY<BIGINT>)" if values else _NOTHING
    )


def texts(values: Sequence[str]) -> str:
    """An array of texts that hold neither commas nor quotes."""
    return f"split('{','.join(values)}', ',')"


def _up_to_last(values: Mapping[int, object]) -> range:
    if any(p < 0 for p in values):
        raise ValueError(f"partitions: expected 0 or more, found {min(values)}")
    return range(max(values, default=-1) + 1)
