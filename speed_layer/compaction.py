"""The roll-up: an hour's many small files become few, between two micro-batches, in a commit that changes no row.

A micro-batch leaves a file for each task and event date. Once there are enough of them, a thread of the job's driver
writes them again as one (`speed_layer.rewriting`), and the job itself commits that when the next micro-batch is
published: `speed` and `main` get the new file for the old ones. Position, timeline, cuts and revisions stay.
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
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

from anabranch.common.errors import AnabranchError, Transient
from anabranch.common.fail_points import Step, reach
from anabranch.common.remote_errors import lake_errors
from anabranch.config import Stream
from anabranch.iceberg.commits import Change
from anabranch.iceberg.lake import Lake
from anabranch.iceberg.manifests import HourManifest, hour_of_file, list_manifests, read_entries
from anabranch.iceberg.snapshot_writer import delete_quietly
from anabranch.iceberg.snapshots import content_by_hour, head
from anabranch.protocol.publish import Publish, land, new_id
from anabranch.protocol.publish_queue import read_line
from anabranch.protocol.state import State, load_state
from speed_layer.rewriting import Rewritten, rewrite, sort_out

if TYPE_CHECKING:
    from pyiceberg.manifest import DataFile
    from pyiceberg.table import Table

LOG = logging.getLogger(__name__)

Files = Mapping[str, Mapping[str, "DataFile"]]

# The hour's files are looked at after so many new ones: at twelve for each micro-batch, after every third.
LOOK_AFTER = 32
# A row is only ever written again into a file of so many times its rows; an hour of many files is pressed harder.
_GROWTH, _GROWTH_OF_MANY, _MANY = 8, 4, 48
# Files from half this size on are full, and no file is meant to be larger.
_TARGET_BYTES = 128 * 2**20
# One step takes so many files; of an hour that an older version left, a part of them, so that its steps are few.
_MOST_INPUTS, _PART_OF_MANY = 128, 8
# What is not committed by then is given up: after a longer wait, orphan removal may have taken the file; it spares
# files for a day at least.
_GIVEN_UP_AFTER = timedelta(minutes=10)
_ATTEMPTS_AT_THE_END = 10


def plan_rollup(
    files: Collection[DataFile], has_ended: bool, apart: Mapping[str, str] | None = None
) -> tuple[tuple[DataFile, ...], ...]:
    """Of an hour's files, those that become one file each. Pure.

    Only files of one partition, one spec and one set of columns are put together, and none that `apart` tells from the
    others. While files come, they are taken from the smallest on, as many as together have `_GROWTH` times the rows of
    the size class of the largest: so a row is written again a logarithmic number of times, and of each class fewer
    than `_GROWTH` files are left. An hour that has ended is left in as few files as can be.
    """
    growth = _GROWTH_OF_MANY if len(files) > _MANY else _GROWTH
    room_files = max(_MOST_INPUTS, len(files) // _PART_OF_MANY)
    room_bytes = _TARGET_BYTES
    groups = []
    for of_kind in _by_kind(files, apart or {}):
        small = sorted(
            (f for f in of_kind if f.file_size_in_bytes < _TARGET_BYTES // 2),
            key=lambda f: (f.record_count, f.file_path),
        )
        chosen = _fitting(small if has_ended else _due(small, growth), room_files, room_bytes)
        if len(chosen) < len(small) and not has_ended:
            # What does not fit in may be the reason why the rest was due.
            chosen = _due(chosen, growth) or chosen
        if len(chosen) > 1:
            groups.append(tuple(chosen))
            room_files -= len(chosen)
            room_bytes -= sum(f.file_size_in_bytes for f in chosen)
    return tuple(groups)


def _by_kind(files: Iterable[DataFile], apart: Mapping[str, str]) -> list[list[DataFile]]:
    """Those that may become one file, the largest number of files first."""
    kinds: dict[object, list[DataFile]] = defaultdict(list)
    for f in files:
        columns = frozenset({*(f.column_sizes or ()), *(f.value_counts or ())})
        kind = f.spec_id, tuple(f.partition[i] for i in range(len(f.partition))), columns, apart.get(f.file_path)
        kinds[kind].append(f)
    return sorted(kinds.values(), key=len, reverse=True)


def _due(ascending: Sequence[DataFile], growth: int) -> list[DataFile]:
    """The most of the smallest files that together make a file of a higher size class than any of them."""
    chosen = 0
    rows = 0
    for i, f in enumerate(ascending, 1):
        rows += f.record_count
        if _size_class(rows, growth) > _size_class(f.record_count, growth):
            chosen = i
    return list(ascending[:chosen])


def _size_class(rows: int, growth: int) -> int:
    """0 for fewer rows than `growth`, 1 for fewer than its square, and so on."""
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
    """Whether the speed layer adds nothing to the hour any more, as far as the state tells. Pure."""
    cut = state.cuts.get(hour)
    if hour < state.timeline.since or (cut is None and hour < state.timeline.open):
        return True
    ends = cut.ends if cut is not None else state.timeline.boundaries.get(hour)
    return ends is not None and all(state.position.offsets.get(p, 0) >= e for p, e in ends.items())


def is_served(state: State, hour: str) -> bool:
    """Whether `main` serves the hour from the speed layer's files, so that both branches hold the same. Pure."""
    return state.served_by(hour) == "speed" and hour not in state.retained_hours


def should_wait(state: State, began: datetime, now: datetime) -> bool:
    """Whether what is written is to be committed after a later micro-batch: the batch layer has its turn, or `main` has
    to be made right first. Pure."""
    return not is_stale(began, now) and (not state.is_merged or bool(read_line(state.table.properties)))


def is_stale(began: datetime, now: datetime) -> bool:
    """Whether files that were begun then may be orphans by now that maintenance is about to delete. Pure."""
    return not timedelta(0) <= now - began < _GIVEN_UP_AFTER


def plan_replacement(
    state: State, done: Sequence[Rewritten], there: Files, began: datetime, now: datetime, id: str
) -> Publish | None:
    """The publish that puts each new file in the place of its sources on `speed` and `main`; None when it must not be.

    `there`: by hour, the files that both branches hold. Where some source has left since (the hour was accepted, given
    to another layer, dropped, or rolled up by another), the new file would bring rows back. `began`: from when on the
    files were written, `now`: when `state` was loaded, or later. Pure.
    """
    served = {path for hour, files in there.items() if is_served(state, hour) for path in files}
    sources = tuple(f for one in done for f in one.sources)
    if is_stale(began, now) or not state.is_merged or not all(f.file_path in served for f in sources):
        return None
    new = tuple(one.file for one in done)
    changes = tuple(Change(branch, new, sources, rewrites=True) for branch in ("speed", "main"))
    return Publish(id, changes, state.timeline)


def shared_files(table: Table, hours: Collection[str]) -> dict[str, dict[str, DataFile]]:
    """By hour, the files that `speed` and `main` both hold. A manifest of both is read once. Raises Transient."""
    with lake_errors(f"read the manifests of {'.'.join(table.name())}"):
        by_branch = [
            {m.manifest.manifest_path: m.manifest for m in list_manifests(table, head(table, b))[0] if _may(m, hours)}
            for b in ("speed", "main")
        ]
        wanted = by_branch[0] | by_branch[1]
        entries = dict(zip(wanted, read_entries(table.io, list(wanted.values())), strict=True))
    speed, main = (
        {e.data_file.file_path: e.data_file for path in listed for e in entries[path]} for listed in by_branch
    )
    shared: dict[str, dict[str, DataFile]] = {}
    for path, data_file in speed.items():
        if path in main and (hour := hour_of_file(table, data_file)) in hours:
            shared.setdefault(hour, {})[path] = data_file
    return shared


def _may(manifest: HourManifest, hours: Collection[str]) -> bool:
    return any(manifest.may_hold(h) for h in hours)


@dataclass(frozen=True)
class Looked:
    """What a look at the table made: files that wait to be committed, hours in which nothing is left to do, files of
    another schema than the rest of their hour, and whether there is more to do at once."""

    done: tuple[Rewritten, ...] = ()
    settled: frozenset[str] = frozenset()
    apart: Mapping[str, str] = field(default_factory=dict)
    more: bool = False


def look(state: State, known: Looked | None, is_stopped: Callable[[], bool] = lambda: False) -> Looked:
    """Write as one what is due of every hour that is running, and of the newest that has ended and is not settled.

    `known` is what the look before knew; the first one looks at hours of all ages. Raises like `rewrite`.
    """
    table = state.table
    before = known or Looked()
    settled, apart = set(before.settled), dict(before.apart)
    done: list[Rewritten] = []
    hours = sorted(h for h in _hours(table, known is None) - settled if is_served(state, h))
    waiting = [h for h in hours if has_ended(state, h)]
    running = [h for h in hours if h not in waiting]
    while running or waiting:
        ended = not running
        hour = waiting.pop() if ended else running.pop()
        groups = plan_rollup(shared_files(table, {hour}).get(hour, {}).values(), ended, apart)
        for group in groups:
            sorted_out = sort_out(table, group)
            apart |= sorted_out.apart
            if len(sorted_out.alike) > 1:
                done.append(rewrite(table, sorted_out.alike, is_stopped))
        if ended and groups:
            return Looked(tuple(done), frozenset(settled), apart, more=True)
        if ended:
            settled.add(hour)
    return Looked(tuple(done), frozenset(settled), apart)


def _hours(table: Table, all_of_them: bool) -> set[str]:
    """The hours that the speed layer has files of; but for `all_of_them`, only those that have manifests of their own,
    which hours of the last day have."""
    if all_of_them:
        return {h for h, content in content_by_hour(table, "speed").items() if content.files > 1}
    with lake_errors(f"read the manifests of {'.'.join(table.name())}"):
        return {m.hour for m in list_manifests(table, head(table, "speed"))[0] if m.hour is not None}


class Rollup:
    """Keeps the files of the hours that the speed layer serves few, one step at a time.

    Nothing rests on it: what fails is tried again after the next micro-batches, and only rows that are not read back
    as they were end the job.
    """

    def __init__(self, lake: Lake, stream: Stream) -> None:
        self._lake, self._stream = lake, stream
        self._pool = ThreadPoolExecutor(1, "rollup", initializer=_give_way)
        self._stop = threading.Event()
        self._known: Looked | None = None
        self._new_files = LOOK_AFTER
        self._work: Future[Looked] | None = None
        self._began = datetime.now(UTC)
        self._waiting: tuple[Rewritten, ...] = ()
        self._commit_requested = False
        self._is_on = stream.speed.roll_up

    def begin(self) -> None:
        """Start from the table: look at all hours, as an earlier process may have left them."""
        self._known, self._new_files = None, LOOK_AFTER

    def published(self, files: int) -> None:
        """After each publish of so many files: take the next step that is due, without waiting for anything.

        Raises Terminal when a file was not read back as it was written.
        """
        self._new_files += files
        if self._is_on:
            self._step()

    def finish(self) -> None:
        """At the end of a job that ends by itself: take every step that is due. Raises like `published`."""
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
        """Stop at once, and delete what no commit knows of."""
        self._stop.set()
        self._pool.shutdown()
        if self._work is not None and self._work.exception() is None:
            self._forget(self._work.result().done)
        self._drop()

    def _step(self) -> None:
        try:
            if self._work is not None and self._work.done():
                self._take()
            if self._waiting:
                self._commit()
            if self._work is None and not self._waiting and self._new_files >= LOOK_AFTER:
                self._look()
        except Transient as error:
            LOG.warning("stream %s: files are not rolled up for now: %s", self._stream.name, error)

    def _look(self) -> None:
        state = load_state(self._lake, self._stream.table)
        self._new_files, self._began, self._commit_requested = 0, datetime.now(UTC), False
        self._work = self._pool.submit(look, state, self._known, self._stop.is_set)

    def _take(self) -> None:
        """What a look made waits to be committed."""
        assert self._work is not None
        work, self._work = self._work, None
        try:
            self._known = work.result()
        except AnabranchError:
            raise
        except Exception:
            # Whatever PyArrow cannot read or write, Spark has written and others read: the stream goes on without.
            LOG.exception("stream %s: files are not rolled up any more until the next start", self._stream.name)
            self._is_on = False
            return
        self._waiting = self._known.done
        if self._known.more:
            self._new_files = LOOK_AFTER
        if self._waiting:
            reach(Step.ROLLUP_WRITTEN)

    def _commit(self) -> None:
        """Commit what waits, or leave it for after the next micro-batch, or give it up. Raises Transient."""
        state = load_state(self._lake, self._stream.table)
        now = datetime.now(UTC)
        if should_wait(state, self._began, now):
            return
        hours = {hour_of_file(state.table, one.file) for one in self._waiting}
        publish = plan_replacement(state, self._waiting, shared_files(state.table, hours), self._began, now, new_id())
        if publish is None:
            LOG.info("stream %s: files of %s changed meanwhile; not rolled up", self._stream.name, _named(hours))
            self._drop()
            return
        # From here on a commit may know of the files, whatever becomes of the answer: nobody here deletes them.
        self._commit_requested = True
        if land(self._lake, state, publish, now) is None:
            LOG.info("stream %s: roll-up refused: a head moved; trying again", self._stream.name)
            return
        reach(Step.ROLLUP_PUBLISHED)
        LOG.info(
            "stream %s: %d files of %s rolled up into %d",
            self._stream.name,
            sum(len(one.sources) for one in self._waiting),
            _named(hours),
            len(self._waiting),
        )
        self._waiting = ()

    def _drop(self) -> None:
        self._forget(self._waiting)
        self._waiting = ()

    def _forget(self, done: Iterable[Rewritten]) -> None:
        """Delete files that no commit was asked for; the others are for orphan removal to judge."""
        paths = [one.file.file_path for one in done]
        if paths and not self._commit_requested:
            with suppress(AnabranchError):
                delete_quietly(self._lake.load(self._stream.table), paths)


def _named(hours: Iterable[str]) -> str:
    return "hour " + ", ".join(sorted(hours))


def _give_way() -> None:
    """On Linux a priority is a thread's own: Spark's work goes first."""
    with suppress(OSError, AttributeError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 10)
