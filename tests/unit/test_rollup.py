"""The roll-up of small files: what becomes one file, that the one holds the same rows, and when it is committed."""

from __future__ import annotations

import math
import random
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lakes import FIRST, StreamLake, new_lake, new_state, new_stream
from lakes import stage as stage_rows
from pyiceberg.catalog import Catalog
from pyiceberg.exceptions import CommitFailedException
from pyiceberg.io.pyarrow import schema_to_pyarrow
from pyiceberg.manifest import DataFile

from anabranch import tables
from anabranch.commits import Outcome
from anabranch.errors import Terminal, Transient
from anabranch.evolution import evolve
from anabranch.hours import Cut, Timeline, shift
from anabranch.publish import TURN, new_id, to_commit
from anabranch.schema import parse_columns
from anabranch.snapshots import files_of, has_landed
from anabranch.state import Accepted
from serving_layer.maintenance import maintain
from speed_layer import rewriting, rollup
from speed_layer.rewriting import is_same, kind_of, rewrite, sort_out
from speed_layer.rollup import (
    LOOK_AFTER,
    Rollup,
    has_ended,
    is_stale,
    look,
    plan_replacement,
    plan_rollup,
    shared_files,
    should_wait,
)

NEXT = shift(FIRST, 1)
NOW = datetime(2026, 11, 21, tzinfo=UTC)
MB = 2**20


@pytest.fixture
def lake(tmp_path: Path) -> StreamLake:
    return new_lake(tmp_path)


# What becomes one file


@dataclass(frozen=True)
class Small:
    """Stands where PyIceberg's DataFile would."""

    file_path: str
    record_count: int
    partition: tuple[object, ...] = (date(2026, 11, 21), FIRST)
    bytes_a_row: int = 60
    spec_id: int = 0
    column_sizes: dict[int, int] = field(default_factory=lambda: {1: 1})
    value_counts: dict[int, int] = field(default_factory=dict)

    @property
    def file_size_in_bytes(self) -> int:
        return self.record_count * self.bytes_a_row


def plan(files: list[Small], has_ended: bool = False, apart: dict[str, str] | None = None) -> list[tuple[Small, ...]]:
    return [*plan_rollup(files, has_ended, apart)]  # type: ignore[arg-type, list-item]


def step(files: list[Small], has_ended: bool, written: Counter[str], whence: dict[str, list[str]]) -> list[Small]:
    """The files after one step. `whence`: which first files a file was made of; `written`: how often each of those."""
    for group in plan(files, has_ended):
        name = new_id()
        whence[name] = [first for f in group for first in whence.get(f.file_path, [f.file_path])]
        written.update(whence[name])
        gone = {f.file_path for f in group}
        files = [f for f in files if f.file_path not in gone]
        files.append(replace(group[0], file_path=name, record_count=sum(f.record_count for f in group)))
    return files


@pytest.mark.parametrize(("dates", "each"), [(1, 12), (3, 4)])
@pytest.mark.parametrize("rows", [3, 800])
def test_a_reader_of_the_running_hour_opens_at_most_a_hundred_files(dates: int, each: int, rows: int) -> None:
    files: list[Small] = []
    written: Counter[str] = Counter()
    whence: dict[str, list[str]] = {}
    most, new = 0, 0
    for batch in range(900):
        for back in range(dates):
            partition = (date(2026, 11, 21 - back), FIRST)
            files += [Small(f"{batch}-{back}-{i}", rows + i, partition) for i in range(each)]
        new += dates * each
        most = max(most, len(files))
        if new >= LOOK_AFTER:
            files, new = step(files, False, written, whence), 0
    assert most <= 100 - dates * each, "a look takes a micro-batch to be committed"
    assert max(written.values()) <= math.log(sum(f.record_count for f in files), rollup._GROWTH_OF_MANY)
    while len(after := step(files, True, written, whence)) < len(files):
        files = after
    size = sum(f.file_size_in_bytes for f in files)
    assert len(files) <= dates + size // (rollup._TARGET_BYTES // 2), "an hour that has ended is left in few files"


@given(
    rows=st.lists(st.integers(1, 3_000_000), max_size=150),
    seed=st.integers(0, 9),
    has_ended=st.booleans(),
)
@settings(max_examples=60, deadline=None)
def test_each_file_is_in_one_group_of_one_kind_that_is_not_too_large(
    rows: list[int], seed: int, has_ended: bool
) -> None:
    chance = random.Random(seed)
    files = [
        Small(
            str(i), n, (date(2026, 11, chance.choice([20, 21])), FIRST), spec_id=chance.choice([0, 0, 1]),
            column_sizes=chance.choice([{1: 1}, {1: 1}, {1: 1, 2: 1}]),
        )
        for i, n in enumerate(rows)
    ]  # fmt: skip
    apart = {str(i): "other" for i in range(0, len(rows), 7)}
    groups = plan(files, has_ended, apart)
    taken = [f.file_path for group in groups for f in group]
    assert len(taken) == len(set(taken))
    assert sum(map(len, groups)) <= 128
    for group in groups:
        assert len(group) > 1
        kinds = {(f.partition, f.spec_id, tuple(f.column_sizes), apart.get(f.file_path)) for f in group}
        assert len(kinds) == 1
        assert all(f.file_size_in_bytes < 64 * MB for f in group)
        assert sum(f.file_size_in_bytes for f in group) <= 128 * MB


@given(st.lists(st.integers(1, 100_000), min_size=2, max_size=120), st.booleans())
@settings(max_examples=60, deadline=None)
def test_what_is_left_while_an_hour_runs_is_a_few_files_of_each_size(rows: list[int], many: bool) -> None:
    growth = rollup._GROWTH_OF_MANY if len(rows) > rollup._MANY else rollup._GROWTH
    files = [Small(str(i), n, bytes_a_row=1) for i, n in enumerate(rows)]
    groups = plan(files)
    gone = {f.file_path for group in groups for f in group}
    left = [f for f in files if f.file_path not in gone]
    for group in groups:
        together = sum(f.record_count for f in group)
        assert all(
            rollup._size_class(together, growth) > rollup._size_class(f.record_count, growth) for f in group
        )
    by_size = Counter(rollup._size_class(f.record_count, growth) for f in left)
    assert all(count < growth for count in by_size.values())


def test_an_hour_that_an_older_version_left_is_done_in_few_steps() -> None:
    files = [Small(str(i), 800) for i in range(20_000)]
    written: Counter[str] = Counter()
    whence: dict[str, list[str]] = {}
    steps = 0
    while plan(files, True):
        files = step(files, True, written, whence)
        steps += 1
    assert steps <= 40
    assert len(files) <= 20_000 * 800 * 60 // (64 * MB) + 1
