"""Maintenance: delete data that is no longer needed, in independent steps that may be interrupted
at any point.

1. Remove the speed layer's files from the `speed` branch, in hours that the batch layer has served
   for `maintain.speed_hours`, some hours in a commit; `main` does not change. The publish expires
   snapshots and tags, as every publish does.
2. Remove from every branch the hours whose rows, or dead letters, were kept as long as the stream's
  file says (`keep`).
3. Do step 1 for dead letters; remove the partials of expired hours; expire snapshots of the ledger
   and of the partials, and rows of the ledger (`keep.ledger`).
4. Delete unreferenced files, after their minimum age.
5. End erasures whose deadline has passed (`anabranch.lifecycle.erasure.end`): before step 4 tags
   and former snapshots, after it versions of deleted objects.
6. Delete files that killed processes left in this machine's temporary folder.

A failed step does not stop the next. A run records its result in the table at its end
(`anabranch.protocol.measured`).

`drop` removes a stream: its tables, with all their files, and so its state.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from typing import Any, TypeVar

from pyiceberg.table import Table

from anabranch.common.errors import AnabranchError, NotOffered, Refused, Transient
from anabranch.common.fail_points import Step, reach
from anabranch.common.logs import Progress
from anabranch.common.temporary import clear_abandoned
from anabranch.iceberg import admin
from anabranch.iceberg.commits import Change, Commit
from anabranch.iceberg.expiry import expired_tags, plan_expiry, plan_plain_expiry
from anabranch.iceberg.files import (
    Stored,
    delete_files,
    list_table,
    own_files,
    references,
    remember,
    same_file,
)
from anabranch.iceberg.lake import until_landed
from anabranch.iceberg.ledger_files import SNAPSHOTS_KEPT
from anabranch.iceberg.manifests import content_by_hour
from anabranch.iceberg.owner import read_owner
from anabranch.iceberg.snapshots import heads, total
from anabranch.job import Job
from anabranch.lifecycle.erasure import end
from anabranch.lifecycle.erasure.status import finished
from anabranch.lifecycle.retention import (
    LedgerExpired,
    RowsExpired,
    expire_ledger,
    expire_letters,
    expire_rows,
)
from anabranch.offsets.hours import Timeline, end_of
from anabranch.protocol import archive, ledger
from anabranch.protocol.measured import MaintainedTable, MaintenanceRun, Size, record_run
from anabranch.protocol.publish import Decision, Publish, new_id, run
from anabranch.protocol.publisher import Publisher
from anabranch.protocol.retention import letters_expired, plan_uncovered
from anabranch.protocol.sealing import check_clock
from anabranch.protocol.state import State, list_on_batch, load_state

LOG = logging.getLogger(__name__)

T = TypeVar("T")

# The hours that one commit drops from a branch: well under a second, since they have few manifests.
_HOURS_A_COMMIT = 48
# The most objects that S3 deletes in one request.
_FILES_AT_ONCE = 1000


@dataclass(frozen=True)
class Maintained:
    """Deleted data (in a dry run, data to delete): hours, and snapshots and files by table.
    `merged`: files saved by merging. `spared`: unreferenced files below the minimum age.
    `temporary`: files that killed processes left on this machine. `rows`, `letters`: hours whose
    rows, or dead letters, have expired. `ledger`: expired files of the ledger."""

    speed_hours: tuple[str, ...]
    rows: RowsExpired
    letters: RowsExpired
    ledger: LedgerExpired
    expired: dict[str, int]
    orphans: dict[str, list[Stored]]
    merged: dict[str, int]
    spared: dict[str, Size]
    temporary: Size


def plan_drop(
    state: State,
    speed_hours: Iterable[str],
    served_since: Mapping[str, datetime],
    before: datetime,
    at_most: int | None = None,
) -> tuple[tuple[str, ...], Timeline]:
    """Return the oldest hours to drop from the speed branch, at most `at_most`, and the timeline in
    which the speed layer does not cover them. Pure. Only hours that the batch layer has accepted,
    and has served since `before` or earlier; no hour that an operator assigned to the speed layer.
    """
    timeline, on_speed = state.timeline, set(speed_hours)
    late = datetime.max.replace(tzinfo=UTC)
    drop = tuple(
        h
        for h in sorted(on_speed)
        if state.is_accepted(h)
        and state.served_by(h) == "batch"
        and max(end_of(h), served_since.get(h, late)) <= before
    )[:at_most]
    if not drop:
        return (), timeline
    return drop, plan_uncovered(state, on_speed, drop)


def plan_maintenance(state: State, drop: Collection[str], timeline: Timeline, id: str) -> Publish:
    """Return the publish that drops hours from the speed branch and expires snapshots. If only
    `main` lists some accepted hours, it moves `batch` too and lists them there. Pure."""
    return Publish(
        id, (Change("speed", clear=tuple(drop)), *list_on_batch(state), Change("main")), timeline
    )


def maintain(
    job: Job, now: datetime, dry_run: bool = False, publisher: Publisher | None = None
) -> Maintained:
    """Delete data that is no longer needed, and record the run in the table; with `dry_run` only
    report. Idempotent.

    Runs every step, even after one failed. Raises the error of the first failed step: Transient if
    a service is unreachable or other commits always land first, Refused if paths are unsafe to
    delete. Completed steps stay done and recorded.
    """
    lake, stream = job.lake, job.stream
    check_clock(lake, load_state(lake, stream.table))
    began, steps = lake.clock.now(), _Steps()
    publisher = publisher or Publisher(lake, stream)
    nothing: tuple[tuple[str, ...], int] = ((), 0)
    dropped, expired = steps.run(
        "speed hours", lambda: _drop_hours(publisher, now, dry_run), nothing
    )
    reach(Step.MAINTAIN_DROPPED)
    rows = steps.run(
        "expiry of rows", lambda: expire_rows(job, publisher, now, dry_run), RowsExpired()
    )
    letters_gone = steps.run(
        "expiry of dead letters",
        lambda: expire_letters(job, publisher, now, dry_run),
        RowsExpired(),
    )
    letters = steps.run("dead letters", lambda: _maintain_dead_letters(job, now, dry_run), 0)
    expired_by_table, merged = (
        {stream.table: expired, stream.dead_letters_table: letters},
        dict[str, int](),
    )
    for name in stream.plain_tables:
        expired_by_table[name], merged[name] = steps.run(
            "ledger", partial(_maintain_plain, job, name, dry_run), (0, 0)
        )
    ledger_expired = steps.run(
        "expiry of the ledger",
        lambda: expire_ledger(job, now, dry_run, letters_gone.hours),
        LedgerExpired(),
    )
    for name in map(stream.partials_table, stream.views):
        expired_by_table[name] = steps.run(
            "views", partial(_expire_partials, job, name, now, dry_run), 0
        )
    if stream.archive is not None:
        expired_by_table[stream.archive_table] = steps.run(
            "archive", lambda: _expire_archive(job, now, dry_run), 0
        )
    if not dry_run:
        steps.run("erasures", lambda: end.clear_partials(job), 0)
        steps.run("erasures", lambda: end.end_snapshots(job, now), 0)
    reach(Step.MAINTAIN_EXPIRED)
    found = steps.run("orphans", lambda: _delete_orphans(job, now, dry_run), end.Unreferenced())
    reach(Step.MAINTAIN_DELETED)
    if not dry_run:
        steps.run("versions", lambda: end.end_versions(job, now), 0)
        steps.run("erasures", lambda: end.forget(job, publisher, finished(job, now), now), 0)
    temporary = steps.run("folders", lambda: Size(*clear_abandoned(now, dry_run)), Size())
    done = Maintained(
        dropped,
        rows,
        letters_gone,
        ledger_expired,
        expired_by_table,
        found.old,
        merged,
        found.young,
        temporary,
    )
    if not dry_run:
        run = plan_run(done, began, lake.clock.now(), steps.reasons)
        steps.run("record", lambda: record_run(lake, stream.table, run), None)
    if steps.failed:
        raise steps.failed[0]
    return done


def plan_run(
    done: Maintained, began: datetime, ended: datetime, failed: Mapping[str, str]
) -> MaintenanceRun:
    """Return the record of a run for the table. Pure."""
    tables = {
        name: MaintainedTable(
            expired,
            done.merged.get(name, 0),
            Size.of([f.size for f in done.orphans.get(name, ())]),
            done.spared.get(name, Size()),
        )
        for name, expired in done.expired.items()
    }
    return MaintenanceRun(began, ended, len(done.speed_hours), tables, dict(failed))


class _Steps:
    """A runner of independent steps; records their failures."""

    def __init__(self) -> None:
        self.failed: list[AnabranchError] = []
        self.reasons: dict[str, str] = {}

    def run(self, name: str, step: Callable[[], T], otherwise: T) -> T:
        try:
            return step()
        except AnabranchError as error:
            LOG.warning("maintenance: step failed, continuing with the next: %s", error)
            self.failed.append(error)
            self.reasons.setdefault(name, str(error))
            return otherwise


def _delete_orphans(job: Job, now: datetime, dry_run: bool) -> end.Unreferenced:
    state = load_state(job.lake, job.stream.table)
    before = end.orphans_before(state, now - job.stream.maintain.orphans_after, now)
    try:
        found = end.find_unreferenced(job, end.tables_of(job), before)
    except NotOffered as error:
        LOG.warning("stream %s: no orphan is deleted: %s", job.stream.name, error)
        return end.Unreferenced()
    orphans = found.old
    names = {name for name, files in orphans.items() if files}
    if should_move_head(orphans[job.stream.table], orphans[job.stream.dead_letters_table]):
        names.add(job.stream.table)
    if names and not dry_run:
        _move_heads(job, names)
        # List again: files that were published meanwhile are spared.
        found = end.find_unreferenced(job, end.tables_of(job), before)
        orphans = found.old
    reach(Step.MAINTAIN_LISTED)
    for name, own in found.own.items() if not dry_run else ():
        remember(job.lake, job.lake.load(name), own)
    for name, files in orphans.items():
        if files and not dry_run:
            progress = Progress(LOG, f"delete orphans of {name}", "files", len(files))
            for first in range(0, len(files), _FILES_AT_ONCE):
                some = files[first : first + _FILES_AT_ONCE]
                delete_files(found.own[name].io, [f.path for f in some])
                progress.step(len(some))
            LOG.info(
                "table %s: %d orphan files deleted, %d bytes",
                name,
                len(files),
                sum(f.size for f in files),
            )
    return found


def _drop_hours(publisher: Publisher, now: datetime, dry_run: bool) -> tuple[tuple[str, ...], int]:
    """Drop hours, one commit after another, until none is left. Return the hours, and the number of
    expired snapshots and tags."""
    dropped: tuple[str, ...] = ()
    expired = 0
    progress = Progress(LOG, f"drop hours of {publisher.stream.name}", "hours")
    while True:
        hours, gone = _drop_some(publisher, now, dry_run)
        dropped, expired = (*dropped, *hours), expired + gone
        if dry_run or len(hours) < _HOURS_A_COMMIT:
            return dropped, expired
        progress.step(len(hours))


def _drop_some(publisher: Publisher, now: datetime, dry_run: bool) -> tuple[tuple[str, ...], int]:
    lake, stream = publisher.lake, publisher.stream

    def decide(state: State) -> Decision[tuple[tuple[str, ...], int]]:
        on_speed = content_by_hour(state.table, "speed")
        served_since: dict[str, datetime] = {}
        for row in publisher.ledger.history(on_speed.keys(), ledger.BULKY):
            if row.decision in ("accepted", "served"):
                served_since[row.hour] = row.recorded_at
        at_most = None if dry_run else _HOURS_A_COMMIT
        drop, timeline = plan_drop(
            state, on_speed, served_since, now - stream.maintain.speed_hours, at_most
        )
        expired = len(plan_expiry(state.table, None, now, gone_before=state.removed_at)) + len(
            expired_tags(state.table, now)
        )
        if not (drop or expired):
            return Decision(state, None, (drop, expired))
        return Decision(state, plan_maintenance(state, drop, timeline, new_id()), (drop, expired))

    if dry_run:
        return decide(load_state(lake, stream.table)).result
    drop, expired = publisher.run_merged(decide, f"maintain {stream.name}").result
    if drop:
        LOG.info("stream %s: dropped the speed layer's rows of %s", stream.name, ", ".join(drop))
    return drop, expired


def plan_dead_letters(
    table: Table, state: State, hours: Iterable[str], id: str, now: datetime
) -> Commit:
    """Return the commit that removes from the speed branch the dead letters of those `hours` whose
    rows were dropped. It expires snapshots except those that a publish of rows references. Pure."""
    timeline = state.timeline
    gone = tuple(
        hour
        for hour in hours
        if hour < timeline.covered_from
        and timeline.is_skipped(hour)
        and state.served_by(hour) == "batch"
    )
    removed = [at for at in (letters_expired(table).at, state.erasures.changed) if at is not None]
    expire = plan_expiry(
        table, None, now, waiting=state.waiting_letters, gone_before=max(removed, default=None)
    )
    return Commit(id, heads(table), (Change("speed", clear=gone),), expire=expire)


def _maintain_dead_letters(job: Job, now: datetime, dry_run: bool) -> int:
    """Drop the speed layer's dead letters of hours whose rows were dropped, and expire snapshots.
    Return the number of these."""
    lake, stream = job.lake, job.stream
    name = stream.dead_letters_table

    def plan(table: Table) -> Commit | None:
        state = load_state(lake, stream.table)
        commit = plan_dead_letters(table, state, content_by_hour(table, "speed"), new_id(), now)
        return commit if commit.changes[0].clear or commit.expire else None

    return _land(job, name, plan, dry_run)


def _land(job: Job, name: str, plan: Callable[[Table], Commit | None], dry_run: bool) -> int:
    """Commit the results of `plan` until one clears fewer than _HOURS_A_COMMIT hours of its branch.
    Return the number of expired snapshots."""
    if dry_run:
        commit = plan(job.lake.load(name))
        return len(commit.expire) if commit is not None else 0
    expired = 0
    while (landed := job.lake.commit_until_landed(name, f"maintain {name}", plan)) is not None:
        expired += len(landed.expire)
        hours = landed.changes[0].clear
        if hours:
            LOG.info("table %s: cleared hours=%d last=%s", name, len(hours), hours[-1])
        # Expired snapshots do not count: the commit adds one, so there may always be some.
        if len(hours) < _HOURS_A_COMMIT:
            break
    return expired


def _expire_partials(job: Job, name: str, now: datetime, dry_run: bool) -> int:
    """Remove the partials of expired hours, some hours in a commit, and expire snapshots. Return
    the number of these. The table has no staged snapshots."""
    known = load_state(job.lake, job.stream.table).expired

    def plan(table: Table) -> Commit | None:
        expire = plan_expiry(table, None, now, gone_before=known.at)
        content = content_by_hour(table, "main") if known.before else ()
        gone = tuple(hour for hour in content if hour in known)[:_HOURS_A_COMMIT]
        if not (expire or gone):
            return None
        return Commit(new_id(), heads(table), (Change("main", clear=gone),), expire=expire)

    return _land(job, name, plan, dry_run)


def _expire_archive(job: Job, now: datetime, dry_run: bool) -> int:
    """Remove from the archive the hours kept for `archive.raw` and expired hours, some in a commit,
    and expire snapshots. Return the number of these."""
    lake, stream = job.lake, job.stream
    kept = stream.archive
    assert kept is not None

    def plan(table: Table) -> Commit | None:
        state = load_state(lake, stream.table)
        due = archive.plan_due(state, content_by_hour(table, "main"), kept.raw, now)
        return archive.plan_remove(table, due[:_HOURS_A_COMMIT], new_id(), now)

    return _land(job, stream.archive_table, plan, dry_run)


def _maintain_plain(job: Job, name: str, dry_run: bool) -> tuple[int, int]:
    """Merge a plain table's files and expire its snapshots, in steps. Return the numbers of expired
    snapshots and files saved. Nothing is staged there, so no publisher waits."""
    lake = job.lake
    before = lake.load(name)
    if dry_run:
        return len(plan_plain_expiry(before, SNAPSHOTS_KEPT)), 0
    # Each step that lands leaves less to do.
    while until_landed(f"maintain {name}", partial(lake.merge_files, name, idle=True)) is not None:
        pass
    after = lake.load(name)
    left = {s.snapshot_id for s in after.snapshots()}
    saved = max(
        0,
        total(before.current_snapshot(), "data-files")
        - total(after.current_snapshot(), "data-files"),
    )
    return sum(s.snapshot_id not in left for s in before.snapshots()), saved


def should_move_head(rows: Collection[object], letters: Collection[object]) -> bool:
    """Return whether the head of the rows' table must move before orphans are deleted: a paused
    publish may be about to commit files of rows or dead letters. Pure."""
    return bool(rows or letters)


def _move_heads(job: Job, names: Collection[str]) -> None:
    """Commit an empty publish to each table of `names`. Then a writer that wrote one of the orphans
    and was paused since before the listing fails to commit. Such a writer writes newer files, or
    finds its files too old (`speed_layer.compaction`) or its staged rows expired. Raises
    Transient."""
    lake, stream = job.lake, job.stream

    def decide() -> Decision[None]:
        state = load_state(lake, stream.table)
        return Decision(state, Publish(new_id(), (Change("speed"),), state.timeline), None)

    if stream.table in names:
        run(lake, stream.table, decide, f"maintain {stream.name}", take_turns=True)
    # The dead letters, views' partials, and the archive.
    for name in sorted(set(names) - {stream.table, *stream.plain_tables}):
        lake.commit_until_landed(
            name, f"maintain {name}", lambda t: Commit(new_id(), heads(t), (Change("speed"),))
        )
    for name in stream.plain_tables:
        if name in names:
            lake.touch(name)


def view(stream: str, done: Maintained, dry_run: bool) -> dict[str, Any]:
    orphans = {
        n: {"files": len(fs), "bytes": sum(f.size for f in fs)} for n, fs in done.orphans.items()
    }
    return {"stream": stream, "dry_run": dry_run} | vars(done) | {"orphans": orphans}


def tables_of(job: Job) -> list[str]:
    """Return the stream's tables that the catalog has, the table of rows last. Raises Transient."""
    return [name for name in reversed(job.stream.tables) if job.lake.exists(name)]


def drop(job: Job) -> list[str]:
    """Drop the tables of a stream and delete their files; return a description of each step.

    The table of rows, which has the state, is the last one, so that a run that was killed is
    continued by the next one. Raises Refused for another stream's table and while an operator holds
    hours, Transient.
    """
    lake, stream = job.lake, job.stream
    tables = {name: lake.load(name) for name in tables_of(job)}
    for name, table in tables.items():
        owner = read_owner(table)
        if owner is not None and owner.stream != stream.name:
            raise Refused(
                f"table {name}: expected a table of stream {stream.name}, found one of stream "
                f"{owner.stream}; nothing was dropped; give the stream its own `table`"
            )
    if stream.table in tables:
        holds = load_state(lake, stream.table).holds.holds
        if holds:
            raise Refused(
                f"stream {stream.name}: expected no hours that an operator keeps, found "
                f"{holds[0].first} to {holds[0].last}, {holds[0].reason}; nothing was dropped; "
                f"release them with `anabranch hold {stream.name} "
                f"{holds[0].first}..{holds[0].last} --release --why TEXT`"
            )
    done = []
    for name, table in tables.items():
        files, current = _files_of(job, table), table.metadata_location
        # While the catalog has the table, the next run finds what this one did not delete.
        delete_files(table.io, [path for path in files if path != current])
        admin.forget(lake, name)
        delete_files(table.io, [current])
        LOG.warning("stream %s: dropped table %s files=%d", stream.name, name, len(files))
        done.append(f"dropped table {name} and its {len(files):,} files")
    return done


def _files_of(job: Job, table: Table) -> Collection[str]:
    """Return the files that a table's metadata names, and those that its writers left in its
    folders. A run that was killed may have deleted manifests."""
    named = list[str]()
    try:
        named += references(table)
    except Transient as error:
        LOG.warning("%s; files outside the table's folders may stay", error)
    own = own_files(job.lake, table, named)
    files = {same_file(file.path): file.path for file in list_table(own)}
    return (files | {same_file(path): path for path in named}).values()
