"""End erasures whose deadline has passed, as part of `anabranch maintain`: delete the remaining
copies of erased records.

1. Remove partials of views that were computed from former rows, even before the deadline.
2. Drop tags and expire former snapshots of each table that have files of the erased hours from
   before the rewrite.
3. Delete unreferenced files once they are a day old (`anabranch.lifecycle.maintenance`).
4. Delete versions of deleted objects from before the rewrite, if the bucket keeps them.
5. Remove an erasure without remaining copies from the branches, once Kafka has none of its records
   and the archive no hour with them.

A foreign branch is never dropped: the status names it. Each step is idempotent.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from functools import partial

from pyiceberg.table import Table
from pyiceberg.table.refs import SnapshotRefType

from anabranch.common.arrays import grouped
from anabranch.common.fail_points import Step, reach
from anabranch.common.logs import Progress
from anabranch.iceberg.clock import MAX_CLOCK_SKEW
from anabranch.iceberg.commits import Change, Commit
from anabranch.iceberg.expiry import plan_expiry
from anabranch.iceberg.files import (
    OwnFiles,
    Stored,
    list_table,
    list_versions,
    own_files,
    plan_orphans,
    references,
    remember,
)
from anabranch.iceberg.manifests import content_by_hour
from anabranch.iceberg.s3 import Version, open_store
from anabranch.iceberg.snapshots import PUBLISHED, STAGED, heads, made_at
from anabranch.iceberg.staging import WITHIN
from anabranch.job import Job
from anabranch.lifecycle.retention import FilesByManifest
from anabranch.offsets.hours import shift
from anabranch.protocol import erasure, ledger
from anabranch.protocol.dead_letters import named_files
from anabranch.protocol.ledger_row import LedgerRow
from anabranch.protocol.measured import Size
from anabranch.protocol.partials import stale_hours
from anabranch.protocol.publish import Decision, new_id
from anabranch.protocol.publisher import Publisher
from anabranch.protocol.registers import Erasure
from anabranch.protocol.state import State, load_state

LOG = logging.getLogger(__name__)

UNREFERENCED_FOR = timedelta(days=1)
"""The minimum age of unreferenced files to delete once a deadline has passed: the smallest value of
`maintain.orphans_after`."""

Former = Mapping[int, Mapping[str, int]]
"""Files of erased hours that no branch has any more, by snapshot id: sizes in bytes by path."""


def written_until(one: Erasure) -> datetime | None:
    """Return the time (UTC) after which no process writes files with the erasure's records: one
    that decided before the newest rewrite may write until then. None if nothing was rewritten."""
    return one.changed + WITHIN if one.changed is not None else None


def past_deadline(state: State, now: datetime) -> list[Erasure]:
    """Return the erasures that are done and whose deadline has passed. Pure."""
    return [one for one in state.erasures.all if one.done is not None and one.until <= now]


def hours_of(history: Iterable[LedgerRow], one: Erasure) -> list[str]:
    """Return the hours from which an erasure removed records, oldest first. Pure."""
    return sorted(
        {row.hour for row in history if row.erasure is not None and row.erasure.get("id") == one.id}
    )


def replaced_files(history: Iterable[LedgerRow], one: Erasure) -> set[str]:
    """Return the paths of the files that had records of an erasure. Pure."""
    parts = (
        row.erasure
        for row in history
        if row.erasure is not None and row.erasure.get("id") == one.id
    )
    return {str(path) for part in parts for path in part["files"]}


def former_files(
    table: Table, hours: Collection[str], before: datetime | None, replaced: Collection[str]
) -> Former:
    """Return the files of the hours that no branch has, by snapshot. Snapshots made up to `before`
    count with all such files; later ones, such as those of another program's branch, with files in
    `replaced`. No files if `before` is None. Raises Transient."""
    nothing: dict[int, dict[str, int]] = {s.snapshot_id: {} for s in table.snapshots()}
    if not hours or before is None:
        return nothing
    files, bound = FilesByManifest(table, set(hours).__contains__), shift(max(hours), 1)
    at_heads = {
        id: files.of(head, bound)
        for id in heads(table).values()
        if (head := table.snapshot_by_id(id))
    }
    live = {path for of_one in at_heads.values() for path in of_one}
    former = dict(nothing)
    for s in (s for s in table.snapshots() if s.snapshot_id not in at_heads):
        is_old, of_hours = made_at(s) <= before, files.of(s, bound)
        former[s.snapshot_id] = {
            p: n for p, n in of_hours.items() if p not in live and (is_old or p in replaced)
        }
    return former


def snapshots_until(job: Job, name: str, one: Erasure, now: datetime) -> datetime | None:
    """Return the time (UTC) up to which snapshots of a table may contain the erasure's records;
    None if nothing was rewritten. It is `now` for partials, which are recomputed later, and for the
    archive, which its own commits rewrite."""
    if one.changed is None:
        return None
    is_of_records = name in (job.stream.table, job.stream.dead_letters_table)
    return one.changed + MAX_CLOCK_SKEW if is_of_records else now


def plan_end(
    table: Table, former: Former, waiting: Collection[str], id: str, now: datetime
) -> Commit | None:
    """Return the commit that drops tags and expires snapshots with `former` files, if any. Pure."""
    with_files = {snapshot for snapshot, files in former.items() if files}
    tags = tuple(
        name
        for name, ref in sorted(table.metadata.refs.items())
        if ref.snapshot_ref_type == SnapshotRefType.TAG
        and not name.startswith((PUBLISHED, STAGED))
        and ref.snapshot_id in with_files
    )
    expire = plan_expiry(table, None, now, waiting=waiting, ended=with_files, dropped=tags)
    if not tags and not with_files & set(expire):
        return None
    return Commit(id, heads(table), (), expire=expire, drop_tags=tags)


def clear_partials(job: Job) -> int:
    """Remove the partials of erased hours that were not computed from the current rows of `main`.
    Return the number of hours. Readers compute such an hour from its rows until it is filled again.
    Idempotent. Raises Transient."""
    lake, stream, cleared = job.lake, job.stream, 0
    if not stream.views or not (erasures := load_state(lake, stream.table).erasures.all):
        return 0
    history = job.ledger.history(None, ledger.BULKY_EXCEPT_ERASURE)
    hours = sorted({hour for one in erasures for hour in hours_of(history, one)})

    def plan(partials: Table) -> Commit | None:
        if not (stale := stale_hours(partials, lake.load(stream.table), hours)):
            return None
        return Commit(new_id(), heads(partials), (Change("main", clear=tuple(stale)),))

    for name in map(stream.partials_table, stream.views):
        while (
            landed := lake.commit_until_landed(
                name, f"clear partials of erased rows in {name}", plan
            )
        ) is not None:
            gone = [hour for change in landed.changes for hour in change.clear]
            cleared += len(gone)
            LOG.info(
                "stream %s: cleared partials of erased rows table=%s hours=%d",
                stream.name,
                name,
                len(gone),
            )
    return cleared


def end_snapshots(job: Job, now: datetime) -> int:
    """Drop tags and expire snapshots with records of erasures whose deadline has passed. Return the
    number of tags and snapshots. Idempotent. Raises Transient."""
    lake, stream, ended = job.lake, job.stream, 0
    state = load_state(lake, stream.table)
    if not (erasures := past_deadline(state, now)):
        return 0
    history = job.ledger.history(None, ledger.BULKY_EXCEPT_ERASURE)
    for one in erasures:
        hours, replaced = hours_of(history, one), replaced_files(history, one)
        for name in erased_tables(job):
            plan = partial(
                _plan_table, job, hours, snapshots_until(job, name, one, now), replaced, now
            )
            while (
                landed := lake.commit_until_landed(name, f"end erasure {one.id} in {name}", plan)
            ) is not None:
                ended += len(landed.expire) + len(landed.drop_tags)
                LOG.info(
                    "stream %s: ended erasure=%s table=%s snapshots=%d tags=%s",
                    stream.name,
                    one.id,
                    name,
                    len(landed.expire),
                    ",".join(landed.drop_tags) or "none",
                )
    reach(Step.MAINTAIN_ENDED)
    return ended


def _plan_table(
    job: Job,
    hours: Sequence[str],
    before: datetime | None,
    replaced: Collection[str],
    now: datetime,
    table: Table,
) -> Commit | None:
    state = load_state(job.lake, job.stream.table)
    return plan_end(
        table, former_files(table, hours, before, replaced), state.waiting_letters, new_id(), now
    )


def orphans_before(state: State, before: datetime, now: datetime) -> datetime:
    """Return the time (UTC) before which maintenance deletes unreferenced files. `before`: that
    time without erasures. Pure."""
    written = [at for one in past_deadline(state, now) if (at := written_until(one)) is not None]
    return max([before, *(min(at, now - UNREFERENCED_FOR) for at in written)])


@dataclass(frozen=True)
class Unreferenced:
    """Unreferenced files by table: `old` enough to delete, and younger ones."""

    own: Mapping[str, OwnFiles] = field(default_factory=dict)
    old: dict[str, list[Stored]] = field(default_factory=dict)
    young: dict[str, Size] = field(default_factory=dict)


def find_unreferenced(job: Job, names: Sequence[str], before: datetime) -> Unreferenced:
    """Return the unreferenced files of some of the stream's tables. `before`: old ones were written
    before it. Raises Refused if no file of a table is referenced, Transient."""
    lake, stream = job.lake, job.stream
    paths, own = {name: list[str]() for name in names}, dict[str, OwnFiles]()
    # Again only if a file is in a folder that the properties do not name any more.
    while own != (wider := {n: own_files(lake, lake.load(n), paths[n]) for n in names}):
        own = wider
        # List files first: files published after this are either referenced or not in the list.
        progress = Progress(LOG, f"list the files of {stream.name}", "files")
        listed = {n: list_table(own[n], progress.step) for n in names}
        paths = {name: list(references(lake.load(name))) for name in names}
    referenced = {path for of_table in paths.values() for path in of_table}
    referenced |= named_files(load_state(lake, stream.table))
    found = Unreferenced(own)
    for name, files in listed.items():
        found.old[name], spared = plan_orphans(files, referenced, before)
        found.young[name] = Size.of([f.size for f in spared])
    return found


def remember_folders(job: Job) -> None:
    """Record the folders of the stream's files: once the files there are replaced, no snapshot
    names them. Raises Refused, Transient."""
    for name in tables_of(job):
        table = job.lake.load(name)
        remember(job.lake, table, own_files(job.lake, table, references(table)))


def list_unreferenced(job: Job) -> list[datetime]:
    """Return the modification times of unreferenced data files, in the tables that may have erased
    records. Raises Refused, Transient."""
    found = find_unreferenced(job, erased_tables(job), datetime.max.replace(tzinfo=UTC))
    files = (file for of_table in found.old.values() for file in of_table)
    return [file.modified for file in files if file.path.endswith((".parquet", ".orc"))]


def versions_of(job: Job, before: datetime) -> Iterator[Version]:
    """Yield the versions of the tables' deleted and replaced files written before `before`; none if
    the bucket keeps none. Raises Terminal without the right to list them, Transient."""
    for name in tables_of(job):
        table = job.lake.load(name)
        own = own_files(job.lake, table, references(table))
        versions = (
            version for folder in sorted(own.folders) for version in list_versions(own.io, folder)
        )
        yield from (
            version for version in versions if version.written < before and own.has(version.path)
        )


def tables_of(job: Job) -> tuple[str, ...]:
    """Return the names of all tables with files of the stream. Raises Transient."""
    return (*erased_tables(job), *job.stream.plain_tables)


def erased_tables(job: Job) -> tuple[str, ...]:
    """Return the names of all tables that may have erased records, with an existing archive that
    the stream's file does not declare any more. Raises Transient."""
    stream = job.stream
    is_left = stream.archive is None and job.lake.exists(stream.archive_table)
    return (stream.table, *stream.branched_tables, *((stream.archive_table,) if is_left else ()))


def end_versions(job: Job, now: datetime) -> int:
    """Delete versions of deleted files from before the rewrites of erasures whose deadline has
    passed. Return their number. Raises Terminal without the right, Transient."""
    state = load_state(job.lake, job.stream.table)
    written = [at for one in past_deadline(state, now) if (at := written_until(one)) is not None]
    if not written:
        return 0
    by_bucket = grouped(versions_of(job, max(written)), lambda version: version.bucket)
    for bucket, versions in by_bucket.items():
        open_store(job.environment.s3).delete_versions(bucket, versions)
        LOG.info(
            "stream %s: deleted versions of files bucket=%s count=%d",
            job.stream.name,
            bucket,
            len(versions),
        )
    reach(Step.MAINTAIN_VERSIONS_DELETED)
    return sum(map(len, by_bucket.values()))


def log_starts(job: Job, state: State) -> dict[int, int]:
    """Return the first offsets of the position's log; empty if it is gone. Raises Transient."""
    topic = job.kafka.describe(job.stream.topic, state.position)
    is_there = topic is not None and topic.id == state.position.topic_id
    return job.kafka.log_starts(topic) if topic is not None and is_there else {}


def forget(job: Job, publisher: Publisher, finished: Collection[str], now: datetime) -> int:
    """Remove the `finished` erasures, without copies, from the branches once neither Kafka has
    their records nor the archive their hours. Return their number. Raises Transient."""
    state = load_state(job.lake, job.stream.table)
    if not any(one.id in finished for one in past_deadline(state, now)):
        return 0
    starts = log_starts(job, state)
    archive = job.stream.archive_table
    archived = content_by_hour(job.lake.load(archive), "main") if job.lake.exists(archive) else ()

    def decide() -> Decision[int]:
        state = load_state(job.lake, job.stream.table)
        known = job.ledger.remembering(state, archived)
        publish = erasure.plan_forget(known, starts, finished, new_id(), now, archived)
        return Decision(state, publish, len(state.erasures.all))

    published = publisher.run(decide, f"forget erasures of {job.stream.name}")
    return published.result - len(published.state.erasures.all)
