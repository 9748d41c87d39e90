"""How an hour is cut into shuffles and files: by its size."""

from types import SimpleNamespace
from typing import Any

import pytest

from batch_layer.passes import shuffle_partitions, write_tasks

MB = 2**20
FILE_BYTES = 256 * MB


def files(*sizes: tuple[int, int]) -> list[Any]:
    return [SimpleNamespace(record_count=rows, file_size_in_bytes=size) for rows, size in sizes]


@pytest.mark.parametrize(
    ("offsets", "at_once", "parts"),
    [
        (0, 2, 2), (1, 2, 2), (500_000, 2, 2), (500_001, 2, 3), (36_000_000, 2, 144),
        (36_000_000, 400, 400),
    ],
)  # fmt: skip
def test_shuffles_follow_the_size_and_use_all_cores(offsets: int, at_once: int, parts: int) -> None:
    assert shuffle_partitions(offsets, at_once) == parts


@pytest.mark.parametrize(
    ("rows", "row_bytes", "at_once", "tasks"),
    [
        (0, 100, 8, 1),
        # Of less than 32 MB there are no two files that are not small.
        (32 * MB // 100, 100, 8, 1),
        (32 * MB // 100 + 1, 100, 8, 2),
        (FILE_BYTES, 1, 2, 2),
        (FILE_BYTES, 1, 1, 1),
        (FILE_BYTES + 1, 1, 1, 2),
        (36_000_000, 100, 2, 14),
        (36_000_000, 100, 64, 64),
        (36_000_000, 100, 1000, 214),
    ],
)
def test_files_follow_the_bytes(rows: int, row_bytes: int, at_once: int, tasks: int) -> None:
    there = files((10, 10 * row_bytes), (30, 30 * row_bytes))
    assert write_tasks(rows, there, at_once, FILE_BYTES) == tasks


def test_without_rows_of_the_speed_layer_a_row_is_taken_for_a_usual_one() -> None:
    for empty in ([], files((0, 0))):
        assert write_tasks(FILE_BYTES // 128, empty, 1, FILE_BYTES) == 1
    assert write_tasks(FILE_BYTES // 128 + 1, [], 1, FILE_BYTES) == 2
