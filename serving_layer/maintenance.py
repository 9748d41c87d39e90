"""Maintenance: what nobody needs any more goes, in steps of which each is safe alone and may be cut short anywhere.

1. The speed layer's files of hours that the batch layer has served for long leave the `speed` branch; `main` is as it
   was. The publish expires snapshots and tags, as every publish does.
2. The same for the dead letters; the ledger's snapshots are expired.
3. Files that nothing refers to are deleted, after their age.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from anabranch import ledger
from anabranch.commits import Change, Commit, Outcome
from anabranch.errors import Transient
from anabranch.fail_points import Step, reach
from anabranch.hours import Timeline, end_of, shift
from anabranch.orphans import list_table, plan_orphans, references
from anabranch.publish import Publish, new_id, run
from anabranch.sealing import check_clock
from anabranch.snapshots import expired_tags, files_by_hour, find_staged, heads, plan_expiry, plan_plain_expiry
from anabranch.state import State, load_state
from anabranch.storage import Stored, delete_files
from serving_layer import merger

if TYPE_CHECKING:
    from anabranch.session import Job

LOG = logging.getLogger(__name__)

_ATTEMPTS = 20


@dataclass(frozen=True)
class Maintained:
    """What was (or, in a dry run, would be) cleared away: hours, and by table snapshots and files."""

    speed_hours: tuple[str, ...]
    expired: dict[str, int]
    orphans: dict[str, list[Stored]]


def plan_drop(
    state: State, speed_hours: Iterable[str], served_since: Mapping[str, datetime], before: datetime
) -> tuple[tuple[str, ...], Timeline]:
    """Of the hours that the speed branch has files of, those to drop, and the timeline that counts them as not covered
    by the speed layer. Pure.

    Only hours that the batch layer has accepted, and served since before the moment given; never one that an operator
    gave to the speed layer. A long past costs the timeline nothing: before `covered_from` it names what is kept.
    """
    timeline, have = state.timeline, set(speed_hours)
    late = datetime.max.replace(tzinfo=UTC)
    drop = tuple(
        h
        for h in sorted(have)
        if state.is_accepted(h)
        and state.serving_layer(h) == "batch"
        and max(end_of(h), served_since.get(h, late)) <= before
    )
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
    """Clear away what nobody needs; with `dry_run` only say what. Run again, there is nothing left to do.

    Raises Transient when a neighbour does not answer or others are always first, Refused when paths are not what they
    seem; what is done by then is done.
    """
    lake, stream = job.lake, job.stream
    check_clock(job.environment, load_state(lake, stream.table))
    dropped, expired = _drop_hours(job, now, dry_run, confirmed)
    reach(Step.MAINTAIN_DROPPED)
    found = {stream.table: expired}
    found[stream.dead_letters_table] = _maintain_dead_letters(job, now, dry_run)
    found[stream.hours_table] = _expire_ledger(job, dry_run)
    reach(Step.MAINTAIN_EXPIRED)
    orphans = _orphans(job, now - stream.maintain.orphans_after)
    if orphans[stream.table] and not dry_run:
        _move_head(job)
        # What was published of them up to there is spared.
        orphans = _orphans(job, now - stream.maintain.orphans_after)
    reach(Step.MAINTAIN_LISTED)
    for name, files in orphans.items():
        if files and not dry_run:
            delete_files(job.environment, [f.path for f in files])
            LOG.info("table %s: %d orphan files deleted, %d bytes", name, len(files), sum(f.size for f in files))
    reach(Step.MAINTAIN_DELETED)
    return Maintained(dropped, found, orphans)


def _drop_hours(
    job: Job, now: datetime, dry_run: bool, confirmed: frozenset[str]
) -> tuple[tuple[str, ...], int]:  # fmt: skip
    lake, stream = job.lake, job.stream
    drop: tuple[str, ...] = ()
    expired = 0

    def decide() -> tuple[State, Publish | None]:
        nonlocal drop, expired
        state = load_state(lake, stream.table)
        if merger.needs_merge(state) and not dry_run:
            merger.merge(lake, stream)
            return decide()
        files = files_by_hour(state.table, "speed")
        served_since: dict[str, datetime] = {}
        for row in ledger.history(lake, stream.hours_table):
            if row["decision"] in ("accepted", "served"):
                served_since[row["hour"]] = row["recorded_at"]
        drop, timeline = plan_drop(state, files, served_since, now - stream.maintain.speed_hours)
        expired = len(plan_expiry(state.table, None, now)) + len(expired_tags(state.table, now))
        if dry_run or not (drop or expired):
            return state, None
        gone = tuple(f for h in drop for f in files[h].values())
        changes = (Change("speed", remove=gone), Change("main"))
        return state, Publish(new_id(), changes, timeline, confirmed=confirmed)

    run(lake, stream.table, decide, f"maintain {stream.name}", take_turns=True)
    if drop and not dry_run:
        LOG.info("stream %s: the speed layer's rows of %s are dropped", stream.name, ", ".join(drop))
    return drop, expired


def _maintain_dead_letters(job: Job, now: datetime, dry_run: bool) -> int:
    """Drop the speed layer's dead letters of hours whose rows it dropped, and expire snapshots; returns how many."""
    lake, stream = job.lake, job.stream
    for _ in range(_ATTEMPTS):
        table, state = lake.load(stream.dead_letters_table), load_state(lake, stream.table)
        timeline = state.timeline
        gone = tuple(
            f
            for hour, files in files_by_hour(table, "speed").items()
            if hour < timeline.covered_from and timeline.is_skipped(hour) and state.serving_layer(hour) == "batch"
            for f in files.values()
        )
        waiting = {s.snapshot_id for item in state.dead_letters if (s := find_staged(table, str(item["id"])))}
        expire = tuple(i for i in plan_expiry(table, None, now) if i not in waiting)
        if dry_run or not (gone or expire):
            return len(expire)
        commit = Commit(new_id(), heads(table), (Change("speed", remove=gone),), expire=expire)
        if lake.commit(table, commit) is Outcome.LANDED:
            return len(expire)
    raise Transient(f"maintain {stream.dead_letters_table}: expected to land in {_ATTEMPTS} attempts; try again")


def _expire_ledger(job: Job, dry_run: bool) -> int:
    """Expire the ledger's snapshots; returns how many. Nothing is ever staged there, so no head has to move."""
    lake, name = job.lake, job.stream.hours_table
    for _ in range(_ATTEMPTS):
        table = lake.load(name)
        current, expire = table.current_snapshot(), plan_plain_expiry(table)
        if dry_run or current is None or not expire:
            return len(expire)
        if lake.commit(table, Commit(new_id(), {"main": current.snapshot_id}, (), expire=expire)) is Outcome.LANDED:
            return len(expire)
    raise Transient(f"maintain {name}: expected to land in {_ATTEMPTS} attempts; try again")


def _move_head(job: Job) -> None:
    """Publish nothing. Who was paused, since before the orphans were listed, between its check and a publish of one of
    them (`speed_layer.rollup`) is refused; who checks again finds it too old."""
    lake, stream = job.lake, job.stream

    def decide() -> tuple[State, Publish]:
        state = load_state(lake, stream.table)
        return state, Publish(new_id(), (Change("speed"),), state.timeline)

    run(lake, stream.table, decide, f"maintain {stream.name}", take_turns=True)


def _orphans(job: Job, before: datetime) -> dict[str, list[Stored]]:
    lake, stream = job.lake, job.stream
    names = (stream.table, stream.dead_letters_table, stream.hours_table)
    # Listed first: what is published from here on is seen as referenced, or is not listed at all.
    listed = {name: list_table(job.environment, lake.load(name)) for name in names}
    referenced = {path for name in names for path in references(lake.load(name))}
    waiting = {path for item in load_state(lake, stream.table).dead_letters for path in item["paths"]}
    return {name: plan_orphans(files, referenced | waiting, before) for name, files in listed.items()}


def view(stream: str, done: Maintained, dry_run: bool) -> dict[str, Any]:
    """As JSON shows it."""
    orphans = {n: {"files": len(fs), "bytes": sum(f.size for f in fs)} for n, fs in done.orphans.items()}
    return {
        "stream": stream, "dry_run": dry_run, "speed_hours": list(done.speed_hours), "expired": done.expired,
        "orphans": orphans,
    }  # fmt: skip
