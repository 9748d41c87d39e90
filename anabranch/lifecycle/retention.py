"""Expiry: remove hours from every branch once they were kept as long as the stream's file says,
some in a commit.

`anabranch.lifecycle.maintenance` deletes the files later, as orphans, once no snapshot and no tag
references them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from functools import partial
from typing import Literal

from pyiceberg.table import Table
from pyiceberg.table.refs import SnapshotRefType
from pyiceberg.table.snapshots import Snapshot

from anabranch.common.errors import AnabranchError
from anabranch.common.fail_points import Step, reach
from anabranch.common.logs import Progress
from anabranch.common.remote_errors import lake_errors
from anabranch.iceberg.commits import Commit, Outcome
from anabranch.iceberg.expiry import SNAPSHOTS_OF_EXPIRED
from anabranch.iceberg.lake import until_landed
from anabranch.iceberg.ledger_files import files_before
from anabranch.iceberg.manifests import (
    content_by_hour,
    hour_of_file,
    hours_on_branches,
    list_manifests,
    read_entries,
)
from anabranch.iceberg.s3 import bucket_of, open_store
from anabranch.iceberg.snapshots import BRANCHES, PROVEN, PUBLISHED, STAGING, head, heads, made_at
from anabranch.job import Job
from anabranch.offsets.hours import shift
from anabranch.protocol import dead_letters, ledger
from anabranch.protocol.measured import Size
from anabranch.protocol.publish import Decision, new_id
from anabranch.protocol.publisher import Publisher
from anabranch.protocol.registers import Expired
from anabranch.protocol.retention import (
    Due,
    letters_expired,
    plan_due,
    plan_due_letters,
    plan_expire,
    plan_expire_letters,
    plan_ledger_start,
)
from anabranch.protocol.state import Confirmed, State, load_state

LOG = logging.getLogger(__name__)

# The hours that one commit removes: well under a second with one file and one ledger row for each.
_HOURS_A_COMMIT = 240


@dataclass(frozen=True)
class Holder:
    """A reference to files of expired hours, such as a tag, and its end; None if it has no end."""

    name: str
    until: datetime | None
    size: Size


@dataclass(frozen=True)
class Promise:
    """Files that expiry frees, and when. `leaving`: files of the hours that the next run removes
    from the branches. `stored`: these, and files of removed hours that snapshots still reference.
    `gone_at`: the end of the last of the `holders`, after which the next run deletes the files;
    None if a holder has no end. `versions`: whether the bucket keeps deleted objects as versions
    until its lifecycle rules delete them; None if unknown."""

    leaving: Size
    stored: Size
    holders: Sequence[Holder]
    gone_at: datetime | None
    versions: bool | None


@dataclass(frozen=True)
class RowsExpired:
    """Hours whose rows were removed (in a dry run, would be), oldest first. `kept`: hours kept
    beyond their time, with the reason. `promise`: in a dry run, the files that this frees."""

    hours: tuple[str, ...] = ()
    kept: Mapping[str, str] = field(default_factory=dict)
    promise: Promise | None = None


@dataclass(frozen=True)
class LedgerExpired:
    """Files removed from the ledger (in a dry run, to be removed), with all its rows of hours
    before `before`; None if there was no file."""

    before: str | None = None
    size: Size = field(default_factory=Size)


def expire_rows(job: Job, publisher: Publisher, now: datetime, dry_run: bool) -> RowsExpired:
    """Remove due hours from every branch, one commit after another. Idempotent: the next run
    continues a killed one. Raises Transient."""
    if dry_run:
        state = load_state(job.lake, job.stream.table)
        due = plan_due_now(job, state, now, finished_ids(job, state))
        promise = read_promise(job, state.table, state.expired, due, state, now)
        return RowsExpired(due.leaving, due.kept, promise)
    gone: tuple[str, ...] = ()
    progress = Progress(LOG, f"expire hours of {job.stream.name}", "hours")
    while True:
        hours, due = _expire_some(job, publisher, now)
        gone = (*gone, *hours)
        if not hours:
            break
        progress.step(len(hours))
    if due.kept:
        hour, reason = next(iter(due.kept.items()))
        LOG.warning(
            "stream %s: hours kept beyond keep.rows count=%d first=%s reason=%s",
            job.stream.name,
            len(due.kept),
            hour,
            reason,
        )
    return RowsExpired(gone, due.kept)


def expire_letters(job: Job, publisher: Publisher, now: datetime, dry_run: bool) -> RowsExpired:
    """Remove the dead letters of due hours from every branch, some hours in a commit. Idempotent.
    Raises Transient."""
    lake, name, keep = job.lake, job.stream.dead_letters_table, job.stream.keep.dead_letters
    due = Due()

    def plan(table: Table) -> Commit | None:
        nonlocal due
        state = load_state(lake, job.stream.table)
        finished = finished_ids(job, state) if dry_run else publisher.confirmed
        expired = letters_expired(table)
        due = plan_due_letters(state, expired, keep, now, finished)
        if not (due.leaving or expired.before):
            return None
        content = hours_on_branches(table)
        at_most = len(content) if dry_run else _HOURS_A_COMMIT
        commit = plan_expire_letters(
            table, state, due.leaving, content, new_id(), lake.clock.now(), at_most
        )
        reach(Step.EXPIRE_LETTERS_DECIDED)
        return commit

    gone: tuple[str, ...] = ()
    if dry_run:
        table = lake.load(name)
        commit, state = plan(table), load_state(lake, job.stream.table)
        hours = commit.changes[0].clear if commit is not None else ()
        promise = read_promise(job, table, letters_expired(table), Due(hours, due.kept), state, now)
        return RowsExpired(hours, due.kept, promise)
    while (
        landed := lake.commit_until_landed(name, f"expire dead letters of {job.stream.name}", plan)
    ) is not None:
        reach(Step.EXPIRE_LETTERS_PUBLISHED)
        hours = landed.changes[0].clear
        gone = (*gone, *hours)
        LOG.info(
            "stream %s: expired dead letters hours=%d last=%s",
            job.stream.name,
            len(hours),
            hours[-1],
        )
    return RowsExpired(gone, due.kept)


def expire_ledger(
    job: Job, now: datetime, dry_run: bool, letters: Collection[str] = ()
) -> LedgerExpired:
    """Remove whole quarters of a year after `keep.ledger`, in one commit; files were merged by
    quarter. `letters`: hours whose dead letters this run removes. Idempotent. Raises Transient."""
    lake, stream = job.lake, job.stream
    if stream.keep.ledger is None:
        return LedgerExpired()
    state, left = (
        load_state(lake, stream.table),
        hours_on_branches(lake.load(stream.dead_letters_table)) - set(letters),
    )
    start = plan_ledger_start(state, left, stream.keep.ledger, now)
    if start is None:
        return LedgerExpired()

    def attempt() -> LedgerExpired | Literal[Outcome.REFUSED]:
        table = lake.load(stream.hours_table)
        with lake_errors(f"read the manifests of {stream.hours_table}"):
            files = files_before(table, start)
        done = LedgerExpired(start, Size.of([f.file_size_in_bytes for f in files]))
        if not files or dry_run:
            return done if files else LedgerExpired()
        if lake.expire_files(stream.hours_table, start) is not Outcome.LANDED:
            return Outcome.REFUSED
        LOG.info(
            "stream %s: expired rows of the ledger hours_before=%s files=%d",
            stream.name,
            start,
            len(files),
        )
        return done

    return until_landed(f"maintain {stream.hours_table}", attempt)


def plan_due_now(job: Job, state: State, now: datetime, finished: Confirmed) -> Due:
    """Return the hours that are due by file, state and egress's deliveries. Raises Transient."""
    stream = job.stream
    plan = partial(plan_due, state, stream.keep.rows, now, stream.lookback_hours, finished=finished)
    due = plan({})
    if not due.leaving or not stream.egress:
        return due
    # This imports DuckDB, which only streams with targets need.
    from serving_layer.egress import undelivered_hours

    return plan({target.name: undelivered_hours(job, target) for target in stream.egress})


def finished_ids(job: Job, state: State) -> Confirmed:
    """Return the complete decisions and dead letters that wait on a branch. Raises Transient."""
    rows = job.ledger.history({row.hour for row in state.decisions}, ledger.BULKY)
    letters = job.lake.load(job.stream.dead_letters_table)
    done = {str(item["id"]) for item in state.dead_letters if dead_letters.is_done(letters, item)}
    return Confirmed(frozenset(row.decision_id for row in rows), frozenset(done))


def _expire_some(job: Job, publisher: Publisher, now: datetime) -> tuple[tuple[str, ...], Due]:
    stream = job.stream

    def decide(state: State) -> Decision[tuple[tuple[str, ...], Due]]:
        due = plan_due_now(job, state, now, publisher.confirmed)
        hours = tuple(sorted({*due.leaving, *find_returned(state)}))[:_HOURS_A_COMMIT]
        if not hours:
            return Decision(state, None, ((), due))
        accepted = ledger.newest(job.ledger.history(hours, ledger.BULKY))
        revisions = {hour: row.revision for hour, row in accepted.items()}
        kept = stream.keep.rows
        assert kept is not None or not due.leaving
        reason = f"kept for {kept.days} days (keep.rows)" if kept is not None else "expired before"
        speed_hours = content_by_hour(state.table, "speed")
        publish = plan_expire(
            state, hours, speed_hours, revisions, reason, new_id(), job.lake.clock.now()
        )
        reach(Step.EXPIRE_DECIDED)
        return Decision(state, publish, (hours, due))

    published = publisher.run_merged(decide, f"expire hours of {stream.name}")
    hours, due = published.result
    if published.landed is not None:
        reach(Step.EXPIRE_PUBLISHED)
        publisher.record_decisions(published.state)
        reach(Step.EXPIRE_RECORDED)
        LOG.info(
            "stream %s: expired hours count=%d first=%s last=%s",
            stream.name,
            len(hours),
            hours[0],
            hours[-1],
        )
    return hours, due


def find_returned(state: State) -> Sequence[str]:
    """Return the expired hours with rows on a branch that was set back. Raises Transient."""
    expired, found = state.expired, set[str]()
    if not expired.before:
        return ()
    with lake_errors(f"read the manifests of {'.'.join(state.table.name())}"):
        for branch in BRANCHES:
            listed = list_manifests(state.table, head(state.table, branch))[0]
            old = [m for m in listed if m.first < expired.before]
            found |= {m.hour for m in old if m.hour is not None}
            for entries in read_entries(
                state.table.io, [m.manifest for m in old if m.hour is None]
            ):
                found |= {hour_of_file(state.table, entry.data_file) for entry in entries}
    return sorted(filter(state.is_expired, found))


def read_promise(
    job: Job, table: Table, expired: Expired, due: Due, state: State, now: datetime
) -> Promise:
    """Return the files of a table that are freed by expiring the due hours, and by earlier expiry
    (`expired`). Raises Transient."""
    hours, first = set(due.leaving), state.timeline.first
    bound = max([expired.before, *(shift(hour, 1) for hour in due.leaving)])
    files = FilesByManifest(
        table, lambda hour: hour in hours or (hour >= first and hour in expired)
    )
    of_snapshot = {
        snapshot.snapshot_id: files.of(snapshot, bound) for snapshot in table.snapshots()
    }
    on_heads = {
        path: size for id in heads(table).values() for path, size in of_snapshot[id].items()
    }
    holders = list(holders_of(table, of_snapshot, expired.at, now))
    stored = {path: size for of_one in of_snapshot.values() for path, size in of_one.items()}
    return Promise(
        Size.of(on_heads.values()),
        Size.of(stored.values()),
        holders,
        last_end(holders, now),
        is_versioned(job),
    )


def last_end(holders: Sequence[Holder], otherwise: datetime | None) -> datetime | None:
    """Return when the last holder ends, `otherwise` without one; None if one has no end. Pure."""
    ends = [holder.until for holder in holders]
    return max((at for at in ends if at is not None), default=otherwise) if all(ends) else None


class FilesByManifest:
    """The data files of some hours in snapshots: bytes by path. Reads each manifest once."""

    def __init__(self, table: Table, is_wanted: Callable[[str], bool]) -> None:
        self._table, self._is_wanted = table, is_wanted
        self._read: dict[str, dict[str, int]] = {}

    def of(self, snapshot: Snapshot, before: str) -> dict[str, int]:
        with lake_errors(f"read the manifests of {'.'.join(self._table.name())}"):
            listed = [
                m.manifest for m in list_manifests(self._table, snapshot)[0] if m.first < before
            ]
            new = [m for m in listed if m.manifest_path not in self._read]
            for manifest, entries in zip(new, read_entries(self._table.io, new), strict=True):
                wanted = (
                    e.data_file
                    for e in entries
                    if self._is_wanted(hour_of_file(self._table, e.data_file))
                )
                self._read[manifest.manifest_path] = {
                    f.file_path: f.file_size_in_bytes for f in wanted
                }
        return {path: size for m in listed for path, size in self._read[m.manifest_path].items()}


def holders_of(
    table: Table,
    of_snapshot: Mapping[int, Mapping[str, int]],
    removed_at: datetime | None,
    now: datetime,
) -> Iterator[Holder]:
    """Yield the references to files that leave the branches or left them at `removed_at`.
    `of_snapshot` has the sizes of these files by path, for each snapshot."""
    named = set[int]()
    for name, ref in sorted(table.metadata.refs.items()):
        snapshot = table.metadata.snapshot_by_id(ref.snapshot_id)
        named.add(ref.snapshot_id)
        is_own = name in (*BRANCHES, PROVEN) or name.startswith((PUBLISHED, STAGING))
        if is_own or snapshot is None or not of_snapshot[ref.snapshot_id]:
            continue
        age = ref.max_ref_age_ms
        until = made_at(snapshot) + timedelta(milliseconds=age) if age is not None else None
        kind = "tag" if ref.snapshot_ref_type == SnapshotRefType.TAG else "branch"
        yield Holder(f"{kind} {name}", until, Size.of(of_snapshot[ref.snapshot_id].values()))
    # After the hours have left, the current heads are former snapshots too.
    former = {
        p: size for id, files in of_snapshot.items() if id not in named for p, size in files.items()
    }
    leaving = {p: size for id in heads(table).values() for p, size in of_snapshot[id].items()}
    if former or leaving:
        left = now if leaving or removed_at is None else removed_at
        yield Holder(
            "former snapshots", left + SNAPSHOTS_OF_EXPIRED, Size.of((former | leaving).values())
        )


def is_versioned(job: Job) -> bool | None:
    """Return whether the bucket keeps deleted objects as versions; None if unknown."""
    bucket = bucket_of(job.stream.location or job.environment.catalog.warehouse)
    if bucket is None:
        return False
    try:
        return open_store(job.environment.s3).versioning(bucket) == "Enabled"
    except AnabranchError as error:
        LOG.debug("stream %s: %s", job.stream.name, error)
        return None
