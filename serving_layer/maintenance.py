"""Maintenance: what is not needed any more goes, in steps of which each is safe alone and may be cut short anywhere.

1. The speed layer's files of hours that the batch layer has served for long leave the `speed` branch, some hours in a
   commit; `main` is as it was. The publish expires snapshots and tags, as every publish does.
2. The same for the dead letters; the ledger's snapshots are expired.
3. Files that nothing refers to are deleted, after their age.

A step that fails does not keep the next from its work.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, TypeVar

from anabranch.errors import AnabranchError, Transient
from anabranch.fail_points import Step, reach
from anabranch.hours import Timeline, end_of, shift
from anabranch.protocol import dead_letters, ledger
from anabranch.protocol.publish import Again, Decision, Publish, new_id, run
from anabranch.protocol.sealing import check_clock
from anabranch.protocol.state import State, load_state
from anabranch.table.commits import Change, Commit, Outcome
from anabranch.table.files import Stored, delete_files
from anabranch.table.ledger_files import SNAPSHOTS_KEPT, MergeStep
from anabranch.table.orphans import list_table, plan_orphans, references
from anabranch.table.snapshots import content_by_hour, expired_tags, heads, plan_expiry, plan_plain_expiry
from serving_layer import merge

if TYPE_CHECKING:
    from pyiceberg.table import Table

    from anabranch.job import Job

LOG = logging.getLogger(__name__)

T = TypeVar("T")

_ATTEMPTS = 20
# So many hours leave a branch in one commit: few manifests each, so that it takes well under a second.
_HOURS_A_COMMIT = 48


@dataclass(frozen=True)
class Maintained:
    """What was (or, in a dry run, would be) cleared away: hours, and by table snapshots and files."""

    speed_hours: tuple[str, ...]
    expired: dict[str, int]
    orphans: dict[str, list[Stored]]


def plan_drop(
    state: State,
    speed_hours: Iterable[str],
    served_since: Mapping[str, datetime],
    before: datetime,
    at_most: int | None = None,
) -> tuple[tuple[str, ...], Timeline]:
    """Of the hours that the speed branch has files of, those to drop, the oldest `at_most` of them, and the timeline
    that counts them as not covered by the speed layer. Pure.

    Only hours that the batch layer has accepted, and served since before the moment given; never one that an operator
    gave to the speed layer. A long past costs the timeline nothing: before `covered_from` it names what is kept.
    """
    timeline, have = state.timeline, set(speed_hours)
    late = datetime.max.replace(tzinfo=UTC)
    drop = tuple(
        h
        for h in sorted(have)
        if state.is_accepted(h)
        and state.served_by(h) == "batch"
        and max(end_of(h), served_since.get(h, late)) <= before
    )[:at_most]
    if not drop:
        return (), timeline
    covered_from = max(timeline.covered_from, shift(drop[-1], 1))
    others = (have | set(timeline.sealed) | set(state.accepted) | set(state.overrides)) - set(drop)
    kept = {h for h in others if h < covered_from and not timeline.is_skipped(h)}
    skipped = tuple(h for h in timeline.skipped if h >= covered_from)
    return drop, replace(timeline, covered_from=covered_from, kept=tuple(sorted(kept)), skipped=skipped)


def maintain(
    job: Job, now: datetime, dry_run: bool = False, confirmed: frozenset[str] = frozenset()
) -> Maintained:  # fmt: skip
    """Clear away what is not needed; with `dry_run` only say what. Run again, there is nothing left to do.

    Every step is tried, whatever became of those before it. Raises the first step's error, if any: Transient when a
    service does not answer or others are always first, Refused when paths are not what they seem; what is done by then
    is done.
    """
    lake, stream = job.lake, job.stream
    check_clock(lake, load_state(lake, stream.table))
    steps = _Steps()
    nothing: tuple[tuple[str, ...], int] = ((), 0)
    dropped, expired = steps.run(lambda: _drop_hours(job, now, dry_run, confirmed), nothing)
    reach(Step.MAINTAIN_DROPPED)
    expired_by_table = {
        stream.table: expired,
        stream.dead_letters_table: steps.run(lambda: _maintain_dead_letters(job, now, dry_run), 0),
        stream.hours_table: steps.run(lambda: _expire_ledger(job, dry_run), 0),
    }
    reach(Step.MAINTAIN_EXPIRED)
    none: dict[str, list[Stored]] = {}
    orphans = steps.run(lambda: _delete_orphans(job, now, dry_run), none)
    reach(Step.MAINTAIN_DELETED)
    if steps.failed:
        raise steps.failed[0]
    return Maintained(dropped, expired_by_table, orphans)


class _Steps:
    """Runs steps of which none needs the one before it, and remembers what failed."""

    def __init__(self) -> None:
        self.failed: list[AnabranchError] = []

    def run(self, step: Callable[[], T], otherwise: T) -> T:
        try:
            return step()
        except AnabranchError as error:
            LOG.warning("maintenance: a step failed, going on with the next: %s", error)
            self.failed.append(error)
            return otherwise


def _delete_orphans(job: Job, now: datetime, dry_run: bool) -> dict[str, list[Stored]]:
    before = now - job.stream.maintain.orphans_after
    orphans = _orphans(job, before)
    names = {name for name, files in orphans.items() if files}
    if should_move_head(orphans[job.stream.table], orphans[job.stream.dead_letters_table]):
        names.add(job.stream.table)
    if names and not dry_run:
        _move_heads(job, names)
        # What was published of them up to there is spared.
        orphans = _orphans(job, before)
    reach(Step.MAINTAIN_LISTED)
    for name, files in orphans.items():
        if files and not dry_run:
            delete_files(job.environment, [f.path for f in files])
            LOG.info("table %s: %d orphan files deleted, %d bytes", name, len(files), sum(f.size for f in files))
    return orphans


def _drop_hours(
    job: Job, now: datetime, dry_run: bool, confirmed: frozenset[str]
) -> tuple[tuple[str, ...], int]:  # fmt: skip
    """Drop hours, commit by commit, until none is left; returns them and how many snapshots and tags were expired."""
    dropped: tuple[str, ...] = ()
    expired = 0
    while True:
        hours, gone = _drop_some(job, now, dry_run, confirmed)
        dropped, expired = (*dropped, *hours), expired + gone
        if dry_run or len(hours) < _HOURS_A_COMMIT:
            return dropped, expired


def _drop_some(
    job: Job, now: datetime, dry_run: bool, confirmed: frozenset[str]
) -> tuple[tuple[str, ...], int]:  # fmt: skip
    lake, stream = job.lake, job.stream
    drop: tuple[str, ...] = ()
    expired = 0

    def decide() -> Decision:
        nonlocal drop, expired
        state = load_state(lake, stream.table)
        if merge.needs_merge(state) and not dry_run:
            merge.merge(lake, stream)
            return Again.AGAIN
        have = content_by_hour(state.table, "speed")
        served_since: dict[str, datetime] = {}
        for row in ledger.history(lake, stream.hours_table, have.keys(), ledger.BULKY):
            if row.decision in ("accepted", "served"):
                served_since[row.hour] = row.recorded_at
        at_most = None if dry_run else _HOURS_A_COMMIT
        drop, timeline = plan_drop(state, have, served_since, now - stream.maintain.speed_hours, at_most)
        expired = len(plan_expiry(state.table, None, now)) + len(expired_tags(state.table, now))
        if dry_run or not (drop or expired):
            return state, None
        changes = (Change("speed", clear=drop), Change("main"))
        return state, Publish(new_id(), changes, timeline, confirmed=confirmed)

    run(lake, stream.table, decide, f"maintain {stream.name}", take_turns=True)
    if drop and not dry_run:
        LOG.info("stream %s: the speed layer's rows of %s are dropped", stream.name, ", ".join(drop))
    return drop, expired


def plan_dead_letters(table: Table, state: State, hours: Iterable[str], id: str, now: datetime) -> Commit:
    """The commit that takes the speed layer's dead letters of hours whose rows it dropped, of `hours` that it has any
    of, off its branch, and expires snapshots: none that a publish of rows names. Pure."""
    timeline = state.timeline
    gone = tuple(
        hour
        for hour in hours
        if hour < timeline.covered_from and timeline.is_skipped(hour) and state.served_by(hour) == "batch"
    )
    expire = plan_expiry(table, None, now, waiting=frozenset(str(item["id"]) for item in state.dead_letters))
    return Commit(id, heads(table), (Change("speed", clear=gone),), expire=expire)


def _maintain_dead_letters(job: Job, now: datetime, dry_run: bool) -> int:
    """Drop the speed layer's dead letters of hours whose rows it dropped, and expire snapshots; returns how many."""
    lake, stream = job.lake, job.stream
    for _ in range(_ATTEMPTS):
        table, state = lake.load(stream.dead_letters_table), load_state(lake, stream.table)
        commit = plan_dead_letters(table, state, content_by_hour(table, "speed"), new_id(), now)
        if dry_run or not (commit.changes[0].clear or commit.expire):
            return len(commit.expire)
        if lake.commit(table, commit) is Outcome.LANDED:
            return len(commit.expire)
    raise Transient(f"maintain {stream.dead_letters_table}: expected to land in {_ATTEMPTS} attempts; try again")


def _expire_ledger(job: Job, dry_run: bool) -> int:
    """Merge the ledger's files and expire its snapshots, in steps; returns how many snapshots. Nothing is ever staged
    there, so nobody waits for one of them."""
    lake, name = job.lake, job.stream.hours_table
    before = lake.load(name)
    if dry_run:
        return len(plan_plain_expiry(before, SNAPSHOTS_KEPT))
    refused = 0
    while (step := lake.merge_files(name, idle=True)) is not MergeStep.NOTHING:
        # A step that another was before is looked at again; each that lands leaves less to do.
        refused = refused + 1 if step is MergeStep.REFUSED else 0
        if refused == _ATTEMPTS:
            raise Transient(f"maintain {name}: expected to land in {_ATTEMPTS} attempts; try again")
    left = {s.snapshot_id for s in lake.load(name).snapshots()}
    return sum(s.snapshot_id not in left for s in before.snapshots())


def should_move_head(rows: Collection[object], letters: Collection[object]) -> bool:
    """Whether the rows' head has to move before orphans of the rows and of the dead letters are deleted: a publish of
    rows may be about to name either. Pure."""
    return bool(rows or letters)


def _move_heads(job: Job, names: Collection[str]) -> None:
    """Publish nothing, in each table of `names`. Who was paused, since before the orphans were listed, between writing
    one of them and the commit that names it, is refused; who then writes or checks again has a newer one, or finds it
    too old (`speed_layer.rollup`), or its staged rows expired. Raises Transient."""
    lake, stream = job.lake, job.stream

    def decide() -> tuple[State, Publish]:
        state = load_state(lake, stream.table)
        return state, Publish(new_id(), (Change("speed"),), state.timeline)

    if stream.table in names:
        run(lake, stream.table, decide, f"maintain {stream.name}", take_turns=True)
    if stream.dead_letters_table in names:
        _until_landed(stream.dead_letters_table, lambda: _move_dead_letters(job))
    if stream.hours_table in names:
        _until_landed(stream.hours_table, lambda: lake.touch(stream.hours_table))


def _move_dead_letters(job: Job) -> bool:
    table = job.lake.load(job.stream.dead_letters_table)
    return job.lake.commit(table, Commit(new_id(), heads(table), (Change("speed"),))) is Outcome.LANDED


def _until_landed(name: str, attempt: Callable[[], bool]) -> None:
    if not any(attempt() for _ in range(_ATTEMPTS)):
        raise Transient(f"maintain {name}: expected to land in {_ATTEMPTS} attempts; try again")


def _orphans(job: Job, before: datetime) -> dict[str, list[Stored]]:
    lake, stream = job.lake, job.stream
    names = (stream.table, stream.dead_letters_table, stream.hours_table)
    # Listed first: what is published from here on is seen as referenced, or is not listed at all.
    listed = {name: list_table(job.environment, lake.load(name)) for name in names}
    referenced = {path for name in names for path in references(lake.load(name))}
    waiting = dead_letters.named_files(load_state(lake, stream.table))
    return {name: plan_orphans(files, referenced | waiting, before) for name, files in listed.items()}


def view(stream: str, done: Maintained, dry_run: bool) -> dict[str, Any]:
    """As JSON shows it."""
    orphans = {n: {"files": len(fs), "bytes": sum(f.size for f in fs)} for n, fs in done.orphans.items()}
    return {
        "stream": stream, "dry_run": dry_run, "speed_hours": list(done.speed_hours), "expired": done.expired,
        "orphans": orphans,
    }  # fmt: skip
