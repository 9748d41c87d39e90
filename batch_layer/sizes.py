"""The division of an hour's work: tasks, shuffle partitions and files follow its size, not the
machine. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence

from pyiceberg.manifest import DataFile
from pyspark.sql import DataFrame

SMALL = 50_000
"""Maximum number of offsets of a small hour: once read, one task does each step of it."""

MOST_HASHED = 8_000_000
"""Maximum number of offsets of an hour whose keys' hashes the driver compares: 8 bytes each, in
Java, Python, and once more while they are sorted."""

# Files of at least this size are written by a task each, while cores are free.
_SMALL_FILE_BYTES = 16 * 2**20
# Estimated bytes of a row if the speed layer has no file of the hour.
_ROW_BYTES = 128
_RECORDS_PER_SHUFFLE = 250_000


def in_one_task(rows: DataFrame, offsets: int) -> DataFrame:
    """Return the rows, read by one task if the hour is small. Spark then does not shuffle them, and
    compiles and runs fewer stages."""
    return rows.coalesce(1) if offsets <= SMALL else rows


def shuffle_partitions(offsets: int, at_once: int) -> int:
    """Return the number of shuffle partitions of an hour; `at_once` tasks run in parallel."""
    return max(at_once, math.ceil(offsets / _RECORDS_PER_SHUFFLE))


def write_tasks(rows: int, of_speed: Sequence[DataFile], at_once: int, file_bytes: int) -> int:
    """Return the number of tasks that write an hour's rows; each writes one file per event date.

    No file is larger than `file_bytes`, estimated by the bytes of a row in the speed layer's files.
    Up to `at_once` tasks are used as long as the files are not small.
    """
    known = sum(f.record_count for f in of_speed)
    row_bytes = sum(f.file_size_in_bytes for f in of_speed) / known if known else _ROW_BYTES
    size = rows * row_bytes
    return max(1, math.ceil(size / file_bytes), min(at_once, math.floor(size / _SMALL_FILE_BYTES)))
