"""Compaction decisions, as pure functions: which files of an hour to rewrite as one, and whether a
rewrite may still be committed."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from datetime import datetime, timedelta

from pyiceberg.manifest import DataFile

from anabranch.iceberg.commits import Change
from anabranch.iceberg.rewriting import Rewritten
from anabranch.protocol.publish import Publish
from anabranch.protocol.publish_queue import read_queue
from anabranch.protocol.state import State

Files = Mapping[str, Mapping[str, "DataFile"]]

# A rewrite moves rows to a higher size class; classes grow by this factor. Hours with more files
# than `_MANY` use the smaller factor, so they are compacted more.
_GROWTH, _GROWTH_OF_MANY, _MANY = 8, 4, 48
# Files of half this size or more are not rewritten; no file is planned to be larger than it.
_TARGET_BYTES = 128 * 2**20
# Maximum number of inputs of one pass over an hour, or this part of a very large number of files,
# so that few passes suffice.
_MOST_INPUTS, _PART_OF_MANY = 128, 8
# A rewrite not committed within this time is dropped: orphan removal may have deleted the file. It
# keeps files for at least a day.
_GIVEN_UP_AFTER = timedelta(minutes=10)


def plan_compaction(
    files: Collection[DataFile], has_ended: bool, schemas: Mapping[str, str] | None = None
) -> tuple[tuple[DataFile, ...], ...]:
    """Return the files of an hour to rewrite, each group as one file. Pure.

    A group has one partition, one spec, one set of columns and one physical schema (`schemas`: by
    path, if it differs from the rest of the hour). In an open hour, groups start from the smallest
    files and have `_GROWTH` times the rows of the largest file's size class. So a row is rewritten
    a logarithmic number of times, and fewer than `_GROWTH` files of each class remain. An ended
    hour is left in as few files as possible.
    """
    growth = _GROWTH_OF_MANY if len(files) > _MANY else _GROWTH
    room_files = max(_MOST_INPUTS, len(files) // _PART_OF_MANY)
    room_bytes = _TARGET_BYTES
    groups = []
    for of_kind in _by_kind(files, schemas or {}):
        small = sorted(
            (f for f in of_kind if f.file_size_in_bytes < _TARGET_BYTES // 2),
            key=lambda f: (f.record_count, f.file_path),
        )
        chosen = _fitting(small if has_ended else _due(small, growth), room_files, room_bytes)
        if len(chosen) < len(small) and not has_ended:
            # The files that did not fit may have been the reason to compact the others.
            chosen = _due(chosen, growth) or chosen
        if len(chosen) > 1:
            groups.append(tuple(chosen))
            room_files -= len(chosen)
            room_bytes -= sum(f.file_size_in_bytes for f in chosen)
    return tuple(groups)


def _by_kind(files: Iterable[DataFile], schemas: Mapping[str, str]) -> list[list[DataFile]]:
    """Group files that can become one file, the largest group first."""
    kinds: dict[object, list[DataFile]] = defaultdict(list)
    for f in files:
        # Decision 15: a file's columns distinguish old rows from new ones, so files of different
        # columns stay apart.
        columns = frozenset({*(f.column_sizes or ()), *(f.value_counts or ())})
        kind = (
            f.spec_id,
            tuple(f.partition[i] for i in range(len(f.partition))),
            columns,
            schemas.get(f.file_path),
        )
        kinds[kind].append(f)
    return sorted(kinds.values(), key=len, reverse=True)


def _due(ascending: Sequence[DataFile], growth: int) -> list[DataFile]:
    """Return the longest run of smallest files that together make a file of a higher size class
    than any of them."""
    chosen = 0
    rows = 0
    for i, f in enumerate(ascending, 1):
        rows += f.record_count
        if _size_class(rows, growth) > _size_class(f.record_count, growth):
            chosen = i
    return list(ascending[:chosen])


def _size_class(rows: int, growth: int) -> int:
    """Return 0 for fewer rows than `growth`, 1 for fewer than its square, and so on."""
    size_class = 0
    while rows >= growth:
        rows //= growth
        size_class += 1
    return size_class


def _fitting(files: Sequence[DataFile], room_files: int, room_bytes: int) -> list[DataFile]:
    chosen = []
    for f in files[: max(0, room_files)]:
        room_bytes -= f.file_size_in_bytes
        if room_bytes < 0:
            break
        chosen.append(f)
    return chosen


def has_ended(state: State, hour: str) -> bool:
    """Return True if the speed layer adds no more rows to the hour, judged by the state. Pure."""
    cut = state.cuts.get(hour)
    if hour < state.timeline.since or (cut is None and hour < state.timeline.open):
        return True
    ends = cut.ends if cut is not None else state.timeline.boundaries.get(hour)
    return ends is not None and all(state.position.offsets.get(p, 0) >= e for p, e in ends.items())


def is_served(state: State, hour: str) -> bool:
    """Return True if `main` serves the hour from the speed layer's files, so that both branches
    contain the same files. Pure."""
    return state.served_by(hour) == "speed" and hour not in state.retained_hours


def should_wait(state: State, began: datetime, now: datetime) -> bool:
    """Return True to postpone the commit to a later micro-batch, because the batch layer is queued
    or `main` needs a merge. Pure."""
    return not is_stale(began, now) and (
        not state.is_merged or bool(read_queue(state.table.properties))
    )


def is_stale(began: datetime, now: datetime) -> bool:
    """Return True if maintenance may be about to delete files written since `began` as orphans.
    Pure."""
    return not timedelta(0) <= now - began < _GIVEN_UP_AFTER


def plan_replacement(
    state: State, done: Sequence[Rewritten], shared: Files, began: datetime, now: datetime, id: str
) -> Publish | None:
    """Plan the publish that replaces the sources by the new files on `speed` and `main`. Return
    None if it is no longer valid. Pure.

    `shared`: files on both branches, by hour. If a source is no longer among them (its hour was
    accepted, switched to another layer, dropped, or compacted by another job), the new file would
    bring rows back. `began`: when writing began. `now`: when `state` was loaded, or later.
    """
    served = {path for hour, files in shared.items() if is_served(state, hour) for path in files}
    sources = tuple(f for one in done for f in one.sources)
    if (
        # Decision 15: no snapshot refers to the new file, so orphan removal deletes it once it is
        # old; the commit would name a deleted file.
        is_stale(began, now)
        or not state.is_merged
        or not all(f.file_path in served for f in sources)
    ):
        return None
    new = tuple(one.file for one in done)
    # On both branches in one commit: a merge compares their files, and would restore the sources.
    changes = tuple(Change(branch, new, sources, rewrites=True) for branch in ("speed", "main"))
    return Publish(id, changes, state.timeline)
