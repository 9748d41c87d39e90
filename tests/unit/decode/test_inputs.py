"""A worker's records: in parts of a bounded size, with their ingest hours by partition and offset."""

from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from anabranch.decode.inputs import assign_hours, check_hours, split_records
from anabranch.offsets.hours import HourRange
from speed_layer.plan import assign


def assigned(places: list[tuple[int, int]], hours: list[HourRange]) -> list[str]:
    partitions = pa.array([p for p, _ in places], pa.int32())
    offsets = pa.array([o for _, o in places], pa.int64())
    batch = pa.RecordBatch.from_pydict({"partition": partitions, "offset": offsets})
    found: list[str] = assign_hours(batch, check_hours(hours)).column("ingest_hour").to_pylist()
    return found


def test_hours_by_partition_and_offset() -> None:
    places = [(p, o) for p in range(3) for o in range(6)]
    hours = [
        HourRange("2026-11-21T01", {0: 2, 1: 0}),  # partition 2 was added later
        HourRange("2026-11-21T02", {0: 2, 1: 4, 2: 1}),
        HourRange("2026-11-21T03", None),
    ]
    ends = {0: (2, 2), 1: (0, 4), 2: (0, 1)}
    assert [hour[-2:] for hour in assigned(places, hours)] == [
        "01" if o < ends[p][0] else "02" if o < ends[p][1] else "03" for p, o in places
    ]
    assert assigned([], hours) == []
    assert assigned([(7, 2**62)], [HourRange("2026-11-21T01", None)]) == ["2026-11-21T01"]


@st.composite
def _hours(draw: st.DrawFn) -> list[HourRange]:
    """Hours with ends that do not decrease, of partitions 0 and 1; the last open, or closed."""
    ends = [{0: 0, 1: 0}]
    for _ in range(draw(st.integers(0, 4))):
        ends.append({p: e + draw(st.integers(0, 5)) for p, e in ends[-1].items()})
    closed = [HourRange(f"2026-11-25T0{i}", e) for i, e in enumerate(ends)]
    return [*closed, HourRange("2026-11-25T09", None)] if draw(st.booleans()) else closed


@given(_hours(), st.randoms(use_true_random=False))
def test_a_worker_assigns_the_hours_that_the_plan_assigns(hours: list[HourRange], rng: Any) -> None:
    last = hours[-1].ends
    ends = {p: 25 if last is None else last[p] for p in (0, 1)}
    ranges = assign({p: (0, end) for p, end in ends.items()}, hours).items()
    parts = [(hour, p, part) for hour, of_hour in ranges for p, part in of_hour.items()]
    planned = {(p, offset): hour for hour, p, part in parts for offset in range(*part)}
    places = [(p, offset) for p, end in ends.items() for offset in range(end)]
    rng.shuffle(places)
    assert dict(zip(places, assigned(places, hours), strict=True)) == planned


def test_an_offset_behind_the_last_hour_is_refused() -> None:
    found = "partition 1, offset 3: expected an offset of the hours 2026-11-25T00"
    with pytest.raises(ValueError, match=found):
        assigned([(0, 2), (1, 3)], [HourRange("2026-11-25T00", {0: 3, 1: 3})])


@pytest.mark.parametrize(
    "hours",
    [
        [],
        [HourRange("2026-11-21T02", {0: 1}), HourRange("2026-11-21T01", {0: 2})],
        [HourRange("2026-11-21T01", {0: 2}), HourRange("2026-11-21T02", {0: 1})],
        [HourRange("2026-11-21T01", {0: 2, 1: 1}), HourRange("2026-11-21T02", {0: 2})],
        [HourRange("2026-11-21T01", None), HourRange("2026-11-21T02", {0: 2})],
    ],
    ids=["none", "newest first", "end falls", "partition vanishes", "open hour first"],
)
def test_contradicting_hours_are_refused(hours: list[HourRange]) -> None:
    with pytest.raises(ValueError, match="expected"):
        check_hours(hours)


@pytest.mark.parametrize(
    ("sizes", "parts"),
    [
        ([], []),
        ([0, 0], [2]),
        ([1] * 10_001, [10_000, 1]),
        # A part has at most 16 MiB.
        ([2**24, 1, 1], [1, 2]),
        ([2**25, 2**25], [1, 1]),
    ],
)
def test_parts_of_records(sizes: list[int], parts: list[int]) -> None:
    records: list[Any] = [SimpleNamespace(key=None, value=b"x" * n if n else None) for n in sizes]
    found = list(split_records(records))
    assert [len(part) for part in found] == parts
    assert [r for part in found for r in part] == records
