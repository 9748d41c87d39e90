"""How much work an hour is cut into: its shuffles and its files follow its size, whatever the machine. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyiceberg.manifest import DataFile

# Of this size a file is written by a task of its own where there are cores for it.
_SMALL_FILE_BYTES = 16 * 2**20
# What a row takes where nobody has written any of the hour yet.
_ROW_BYTES = 128
_RECORDS_PER_SHUFFLE = 250_000


def shuffle_partitions(offsets: int, at_once: int) -> int:
    """Into how many parts an hour's shuffles are cut, of which `at_once` run at once."""
    return max(at_once, math.ceil(offsets / _RECORDS_PER_SHUFFLE))


def write_tasks(rows: int, of_speed: Sequence[DataFile], at_once: int, file_bytes: int) -> int:
    """How many tasks write an hour's rows, a file each for every event date: none larger than `file_bytes`, by what the
    speed layer's files of the hour say that a row takes, and as many as run at once while they are not small."""
    known = sum(f.record_count for f in of_speed)
    row_bytes = sum(f.file_size_in_bytes for f in of_speed) / known if known else _ROW_BYTES
    size = rows * row_bytes
    return max(1, math.ceil(size / file_bytes), min(at_once, math.floor(size / _SMALL_FILE_BYTES)))
