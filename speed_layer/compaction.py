"""Compaction: rewrite an hour's many small files as few, between two micro-batches, without
changing a row.

A micro-batch writes a file for each task and event date. Once there are enough, a thread of the
driver rewrites them as one (`anabranch.iceberg.rewriting`). The job commits the new file after the
next publish: it replaces the old ones in `speed` and `main`. Position, timeline, cuts and revisions
stay.

All streams of a process share two such threads: streams of one rate are due in the same minute, and
each rewrite takes tens of MB.

Compaction decisions, as pure functions: which files of an hour to rewrite as one, and whether a
rewrite may still be committed.
"""

from __future__ import annotations

import logging
import os
import threading
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime, timedelta

from pyiceberg.manifest import DataFile, ManifestFile
from pyiceberg.table import Table

from anabranch.common.counters import TALLY, Tally, counting
from anabranch.common.errors import AnabranchError, Transient
from anabranch.common.fail_points import Step, reach
from anabranch.common.remote_errors import lake_errors
from anabranch.config import Stream
from anabranch.iceberg.commits import Change
from anabranch.iceberg.lake import Lake
from anabranch.iceberg.manifests import content_by_hour, hour_of_file, list_manifests, read_entries
from anabranch.iceberg.rewriting import Rewritten, group_by_schema, rewrite
from anabranch.iceberg.snapshot_writer import delete_quietly
from anabranch.iceberg.snapshots import head
from anabranch.protocol.publish import Publish, land, new_id
from anabranch.protocol.publish_queue import read_queue
from anabranch.protocol.state import State, load_state

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
    """Return the longest run of smallest files that make one of a higher size class."""
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
    """Return whether `main` serves the hour from the speed layer's files. Pure."""
    return state.served_by(hour) == "speed" and hour not in state.retained_hours


def should_wait(state: State, began: datetime, now: datetime) -> bool:
    """Return True to postpone the commit to a later micro-batch, because the batch layer is queued
    or `main` needs a merge. Pure."""
    return not is_stale(began, now) and (
        not state.is_merged or bool(read_queue(state.table.properties))
    )


def is_stale(began: datetime, now: datetime) -> bool:
    """Return whether maintenance may soon delete files written since `began`. Pure."""
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


LOG = logging.getLogger(__name__)

# The number of new files after which compaction is planned: every third micro-batch at twelve files
# each.
PASS_AFTER = 32
_ATTEMPTS_AT_THE_END = 10


def shared_files(table: Table, hours: Collection[str]) -> dict[str, dict[str, DataFile]]:
    """Return the files that are in both `speed` and `main`, by hour and path. Reads each manifest
    once. Raises Transient."""
    with lake_errors(f"read the manifests of {'.'.join(table.name())}"):
        by_branch = [_manifests(table, branch, hours) for branch in ("speed", "main")]
        wanted = by_branch[0] | by_branch[1]
        entries = dict(zip(wanted, read_entries(table.io, list(wanted.values())), strict=True))
    speed, main = (
        {e.data_file.file_path: e.data_file for path in paths for e in entries[path]}
        for paths in by_branch
    )
    shared: dict[str, dict[str, DataFile]] = {}
    for path, data_file in speed.items():
        # On both branches: a file that only one of them has is replaced on neither, since a commit
        # has to remove all sources on both.
        if path in main and (hour := hour_of_file(table, data_file)) in hours:
            shared.setdefault(hour, {})[path] = data_file
    return shared


def _manifests(table: Table, branch: str, hours: Collection[str]) -> dict[str, ManifestFile]:
    """Return the manifests of a branch that may contain files of `hours`, by path."""
    listed = list_manifests(table, head(table, branch))[0]
    return {
        m.manifest.manifest_path: m.manifest for m in listed if any(m.may_hold(h) for h in hours)
    }


@dataclass(frozen=True)
class Pass:
    """The result of one pass: files to commit, ended hours with nothing left to do, schemas by path
    of files that differ from the rest of their hour, and whether to run again at once."""

    done: tuple[Rewritten, ...] = ()
    settled: frozenset[str] = frozenset()
    schemas: Mapping[str, str] = field(default_factory=dict)
    more: bool = False


def run_pass(
    state: State, last: Pass | None, is_stopped: Callable[[], bool] = lambda: False
) -> Pass:
    """Rewrite due files in each open hour and the newest ended one that is not settled. `last`: the
    previous pass; the first considers hours of any age. Raises like `rewrite`."""
    table = state.table
    before = last or Pass()
    settled, schemas = set(before.settled), dict(before.schemas)
    done: list[Rewritten] = []
    hours = sorted(h for h in _hours(table, last is None) - settled if is_served(state, h))
    waiting = [h for h in hours if has_ended(state, h)]
    running = [h for h in hours if h not in waiting]
    while running or waiting:
        ended = not running
        hour = waiting.pop() if ended else running.pop()
        groups = plan_compaction(shared_files(table, {hour}).get(hour, {}).values(), ended, schemas)
        for group in groups:
            by_schema = group_by_schema(table, group)
            schemas |= by_schema.other_schemas
            if len(by_schema.same_schema) > 1:
                done.append(rewrite(table, by_schema.same_schema, is_stopped))
        if ended and groups:
            return Pass(tuple(done), frozenset(settled), schemas, more=True)
        if ended:
            settled.add(hour)
    return Pass(tuple(done), frozenset(settled), schemas)


def _hours(table: Table, all_of_them: bool) -> set[str]:
    """Return the hours with several speed files; without `all_of_them`, the hours with manifests of
    their own (the last day's)."""
    if all_of_them:
        return {h for h, content in content_by_hour(table, "speed").items() if content.files > 1}
    with lake_errors(f"read the manifests of {'.'.join(table.name())}"):
        return {
            m.hour for m in list_manifests(table, head(table, "speed"))[0] if m.hour is not None
        }


class Compaction:
    """The compaction of one stream, one step at a time: keeps the number of files small in hours
    that the speed layer serves. Transient failures are retried after later micro-batches. Only rows
    that differ when read back end the job."""

    def __init__(self, lake: Lake, stream: Stream, tally: Tally = TALLY) -> None:
        self._lake, self._stream = lake, stream
        self._tally = tally
        self._stop = threading.Event()
        self._last: Pass | None = None
        self._new_files = PASS_AFTER
        self._work: Future[Pass] | None = None
        self._began: datetime
        self._waiting: tuple[Rewritten, ...] = ()
        self._commit_requested = False
        self._is_on = stream.speed.roll_up

    def begin(self) -> None:
        """Start from the table: the next pass considers all hours, also of earlier processes."""
        self._last, self._new_files = None, PASS_AFTER

    def published(self, files: int) -> None:
        """Take the next step after a publish of `files` files, without waiting. Raises Terminal if
        a rewritten file differs from its sources when read back."""
        self._new_files += files
        if self._is_on:
            self._step()

    def finish(self) -> None:
        """Take every due step, at the end of a job that ends by itself. Raises like `published`."""
        if not self._is_on:
            return
        self._step()
        tries = 0
        while (self._work is not None or self._waiting) and tries < _ATTEMPTS_AT_THE_END:
            if self._work is not None:
                wait([self._work])
            tries = tries + 1 if self._waiting else 0
            self._step()

    def close(self) -> None:
        """Stop at once, and delete files that no commit refers to."""
        self._stop.set()
        if self._work is not None and not self._work.cancel() and self._work.exception() is None:
            self._delete(self._work.result().done)
        self._drop()

    def _step(self) -> None:
        try:
            if self._work is not None and self._work.done():
                self._take_pass()
            if self._waiting:
                self._commit()
            if self._work is None and not self._waiting and self._new_files >= PASS_AFTER:
                self._start_pass()
        except Transient as error:
            LOG.warning("stream %s: compaction postponed: %s", self._stream.name, error)

    def _start_pass(self) -> None:
        state = load_state(self._lake, self._stream.table)
        self._new_files, self._commit_requested = 0, False
        self._work = _POOL.submit(self._run_pass, state)

    def _run_pass(self, state: State) -> Pass:
        self._began = self._lake.clock.now()
        with counting(self._tally):
            return run_pass(state, self._last, self._stop.is_set)

    def _take_pass(self) -> None:
        """Take the result of a finished pass; its files wait for their commit."""
        assert self._work is not None
        work, self._work = self._work, None
        try:
            self._last = work.result()
        except AnabranchError:
            raise
        except Exception:
            # Spark wrote a file that PyArrow cannot read or rewrite. The stream continues without
            # compaction.
            LOG.exception("stream %s: compaction disabled until the next start", self._stream.name)
            self._is_on = False
            return
        self._waiting = self._last.done
        if self._last.more:
            self._new_files = PASS_AFTER
        if self._waiting:
            reach(Step.ROLLUP_WRITTEN)

    def _commit(self) -> None:
        """Commit the waiting files, postpone the commit, or drop them. Raises Transient."""
        state = load_state(self._lake, self._stream.table)
        now = self._lake.clock.now()
        # Decision 15: it waits while the batch layer has its turn, which this commit would refuse.
        if should_wait(state, self._began, now):
            return
        hours = {hour_of_file(state.table, one.file) for one in self._waiting}
        publish = plan_replacement(
            state, self._waiting, shared_files(state.table, hours), self._began, now, new_id()
        )
        if publish is None:
            LOG.info(
                "stream %s: compaction dropped, its source files changed meanwhile hours=%s",
                self._stream.name,
                _names(hours),
            )
            self._drop()
            return
        # From here on a commit may refer to the files even if the catalog's answer is lost, so do
        # not delete them.
        self._commit_requested = True
        if land(self._lake, state, publish, now) is None:
            LOG.info("stream %s: compaction refused, a head moved; retrying", self._stream.name)
            return
        reach(Step.ROLLUP_PUBLISHED)
        LOG.info(
            "stream %s: compacted files=%d into=%d hours=%s",
            self._stream.name,
            sum(len(one.sources) for one in self._waiting),
            len(self._waiting),
            _names(hours),
        )
        self._waiting = ()

    def _drop(self) -> None:
        self._delete(self._waiting)
        self._waiting = ()

    def _delete(self, done: Iterable[Rewritten]) -> None:
        """Delete files for which no commit was requested; orphan removal handles the others."""
        paths = [one.file.file_path for one in done]
        # Decision 15: a commit whose answer was lost may name the files, and `main` would have
        # missing ones.
        if paths and not self._commit_requested:
            with suppress(AnabranchError):
                delete_quietly(self._lake.load(self._stream.table), paths)


def _names(hours: Iterable[str]) -> str:
    return ",".join(sorted(hours))


def _lower_priority() -> None:
    """Lower this thread's priority, below Spark's. On Linux each thread has its own."""
    with suppress(OSError, AttributeError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 10)


_POOL = ThreadPoolExecutor(2, "compaction", _lower_priority)
