"""Compare the layers' rows of an hour by their files, in tasks, for the batch job.

Digests of blocks of offsets are compared first, then the rows of blocks that differ. Where the
layers agree, the driver reads one row for each 1,024 offsets of a file.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol, TypeVar

import pyarrow as pa
from pyiceberg.manifest import DataFile

from anabranch.common.arrays import groups_by_size
from anabranch.iceberg.rewriting import RowReader
from anabranch.offsets.position import Ranges
from anabranch.records.hashes import digest_files, hash_files, in_duckdb
from serving_layer.layer_diff.duckdb import kinds_of
from serving_layer.layer_diff.kinds import SAMPLE, Difference, to_difference

T = TypeVar("T")


class Run(Protocol):
    """Runs functions in tasks, and returns their results in order."""

    def __call__(self, tasks: Sequence[Callable[[], T]], /) -> Sequence[T]: ...


# Rows that a task reads, if it has several files; blocks whose rows the driver compares at once.
_TASK_ROWS, _BLOCKS = 500_000, 4_096


def compare_files(
    speed: Sequence[DataFile],
    batch: Sequence[DataFile],
    reader: RowReader,
    content: Sequence[str],
    removed: pa.Table,
    left_out: pa.Table,
    unread: Ranges,
    run: Run,
) -> Difference:
    """Compare the rows in the files of both layers. `content`: SQL of the compared columns.
    `removed`: places of records that the batch layer dropped as duplicates. `left_out`: places of
    rows of the speed layer to ignore. `unread`: the offsets that the speed layer's rows do not
    account for (`anabranch.protocol.merge`)."""
    nothing = left_out.slice(0, 0)

    def read(task: Callable[..., pa.Table], *of_layers: tuple[pa.Table, ...]) -> list[pa.Table]:
        tasks = [
            [partial(task, reader, some, content, *more) for some in by_task(files)]
            for files, more in zip((speed, batch), of_layers, strict=True)
        ]
        found, of_speed = run([*tasks[0], *tasks[1]]), len(tasks[0])
        return [pa.concat_tables(found[:of_speed]), pa.concat_tables(found[of_speed:])]

    digests = read(digest_files, (removed, left_out), (nothing, nothing))
    others, counts = _equal_blocks(*digests)
    shown = []
    for start in range(0, len(others), _BLOCKS):
        some = others.slice(start, _BLOCKS)
        ours, theirs = read(hash_files, (some, left_out), (some, nothing))
        kinds, first = kinds_of(ours, theirs, removed, unread)
        counts += kinds
        shown += first
    shown.sort(key=lambda one: (one["kind"], one["partition"], one["offset"]))
    return to_difference(counts, shown[:SAMPLE])


def by_task(files: Sequence[DataFile]) -> list[Sequence[DataFile]]:
    """Return files in groups, one for each task; at least one group."""
    return [*groups_by_size(files, lambda file: file.record_count, _TASK_ROWS)] or [()]


def _equal_blocks(speed: pa.Table, batch: pa.Table) -> tuple[pa.Table, Counter[str]]:
    """Return the blocks whose rows differ, apart from removed ones, by partition and block; and the
    kinds of the rows in all other blocks."""
    sums = "sum(rows) AS rows, sum(removed) AS removed, sum(high) AS high, sum(low) AS low"
    sides = (
        f"(SELECT kafka_partition, block, {sums} FROM {of} GROUP BY ALL)"
        for of in ("speed", "batch")
    )
    same = " AND ".join(f"coalesce(s.{n}, 0) = coalesce(b.{n}, 0)" for n in ("rows", "high", "low"))
    blocks = in_duckdb(
        f"""
        SELECT kafka_partition, block, {same} AS is_equal, coalesce(b.rows, 0)::BIGINT AS same,
            coalesce(s.removed, 0)::BIGINT AS duplicate
        FROM {next(sides)} s FULL JOIN {next(sides)} b USING (kafka_partition, block)
        ORDER BY ALL
        """,
        speed=speed,
        batch=batch,
    )
    equal, others = (
        blocks.filter(m) for m in (blocks["is_equal"], pa.compute.invert(blocks["is_equal"]))
    )
    counts = {kind: sum(equal[kind].to_pylist()) for kind in ("same", "duplicate")}
    return others.select(["kafka_partition", "block"]), Counter(counts)
