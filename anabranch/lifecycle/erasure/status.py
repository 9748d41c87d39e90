"""The status of erasures: removed records, remaining copies with their end, and a scan that checks
it.

The status of an erasure that is done and has no copies left is its certificate.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from datetime import datetime
from functools import cache, partial

from pyiceberg.table import Table

from anabranch.common.errors import AnabranchError, ConfigurationError, Terminal
from anabranch.common.remote_errors import lake_errors
from anabranch.config.views import PARTIALS
from anabranch.iceberg.manifests import files_by_branch, files_by_hour
from anabranch.iceberg.snapshots import BRANCHES
from anabranch.job import Job
from anabranch.lifecycle.erasure.end import (
    UNREFERENCED_FOR,
    Former,
    erased_tables,
    former_files,
    hours_of,
    list_unreferenced,
    past_deadline,
    replaced_files,
    snapshots_until,
    versions_of,
    written_until,
)
from anabranch.lifecycle.erasure.search import Values, find_rows
from anabranch.lifecycle.retention import Holder, holders_of, last_end
from anabranch.offsets.hours import hour_of
from anabranch.protocol import erasure, ledger
from anabranch.protocol.erasure import is_read, keys_of, load_requests
from anabranch.protocol.ledger_row import Act, LedgerRow
from anabranch.protocol.measured import read_runs
from anabranch.protocol.partials import stale_hours
from anabranch.protocol.registers import Erasure
from anabranch.protocol.state import State, load_state

SEARCHED = (
    "rows: the column's value. Dead letters and archived records: whole words in key, value and "
    "headers, in UTF-8, in JSON of UTF-16 or UTF-32, and in Windows-1252, composed and decomposed. "
    "Not: other encodings, compressed bytes, Base64"
)
_AT_ONCE = 16
_ORPHANS = (
    "`anabranch maintain` deletes them once they are as old as maintain.orphans_after, after the "
    f"deadline {UNREFERENCED_FOR.days} day old"
)


@dataclass(frozen=True)
class ErasureStatus:
    """An erasure: its request, its removed records, and the remaining copies.

    `files`: the number of replaced files, and of other files of these hours in former snapshots,
    that storage still has; `holders`: the references to them. `versions`: the number of versions of
    deleted files from before the rewrite; None if they cannot be listed. `gone_at`: when the last
    holder ends; None if one has no end, or there is none. `left`: sentences about what is left and
    why; empty if nothing is. `scanned`: the number of rows that a scan of every branch found; None
    without a scan. `searched`: where, and in which encodings, the values were searched.
    """

    id: str
    column: str
    requested: datetime
    by: Act | None
    values: int
    until: datetime
    done: datetime | None
    rows: int
    dead_letters: int
    hours: Sequence[str]
    replaced: int
    files: int
    versions: int | None
    holders: Sequence[Holder]
    gone_at: datetime | None
    left: Sequence[str]
    scanned: int | None = None
    searched: str = SEARCHED

    @property
    def is_certificate(self) -> bool:
        """Whether the erasure is done and nothing is left."""
        return self.done is not None and not self.left


def finished(job: Job, now: datetime) -> frozenset[str]:
    """Return the erasures past their deadline that have nothing left. Raises Transient."""
    state = load_state(job.lake, job.stream.table)
    return frozenset(
        one.id
        for one in _statuses(job, state, past_deadline(state, now), now)
        if one.is_certificate
    )


def read_statuses(job: Job, now: datetime, scan: bool = False) -> list[ErasureStatus]:
    """Return the status of each erasure that the branches record, oldest first. `scan`: search the
    rows of every branch for its values again, by their hashes. Raises ConfigurationError if a key
    for the scan is missing, Transient."""
    state = load_state(job.lake, job.stream.table)
    statuses = _statuses(job, state, state.erasures.all, now, scan)
    return sorted(statuses, key=lambda status: status.requested)


def _statuses(
    job: Job, state: State, erasures: Sequence[Erasure], now: datetime, scan: bool = False
) -> list[ErasureStatus]:
    """Return the status of each erasure. Sends many requests for each."""
    if not erasures:
        return []
    history = job.ledger.history(None, ledger.BULKY_EXCEPT_ERASURE)
    asked = job.ledger.requests({hour_of(one.at) for one in erasures})
    requests = {row.erasure["id"]: row for row in asked if row.erasure is not None}
    unreferenced, removed = cache(partial(list_unreferenced, job)), list(_removed_views(job))
    return [
        _with_unreferenced(
            _status(job, state, one, history, requests.get(one.id), now, scan, removed),
            one,
            unreferenced,
        )
        for one in erasures
    ]


def _with_unreferenced(
    status: ErasureStatus, one: Erasure, unreferenced: Callable[[], list[datetime]]
) -> ErasureStatus:
    """Add unreferenced files to a status: files of compactions and of unpublished attempts may have
    such records. Lists files only if nothing else is left."""
    before = written_until(one)
    if not status.is_certificate or before is None:
        return status
    if not (count := sum(written < before for written in unreferenced())):
        return status
    why = (
        f"{count} files from before {before:%F %H:%M} UTC that nothing refers to are stored; "
        f"{_ORPHANS}"
    )
    return replace(status, left=[why])


def _status(
    job: Job,
    state: State,
    one: Erasure,
    history: Sequence[LedgerRow],
    request: LedgerRow | None,
    now: datetime,
    scan: bool,
    removed: Sequence[str],
) -> ErasureStatus:
    rows = [row for row in history if row.erasure is not None and row.erasure.get("id") == one.id]
    parts = [row.erasure for row in rows if row.erasure is not None]
    replaced = replaced_files(rows, one)
    hours = hours_of(rows, one)
    tables = {name: job.lake.load(name) for name in erased_tables(job)}
    former = {
        n: former_files(table, hours, snapshots_until(job, n, one, now), replaced)
        for n, table in tables.items()
    }
    wanted = {path for of_table in former.values() for files in of_table.values() for path in files}
    again = [*_brought_back(job, tables, hours, replaced), *removed]
    # Before versions are counted: a file deleted meanwhile becomes a version.
    there = _stored(state.table, replaced | wanted)
    holders = [
        h for n, table in tables.items() for h in _holders(table, former[n], there, one, now)
    ]
    versions = _count_versions(job, one)
    views = {view.name: tables[job.stream.partials_table(view)] for view in job.stream.views}
    stale = {view: stale_hours(partials, state.table, hours) for view, partials in views.items()}
    scanned = _scan(job, state, one) if scan and request is not None else None
    known = [*rows, *state.decisions]
    if request is None or erasure.lacks_rows(known, one) or erasure.lacks_places(known, one):
        again.append("the ledger lost its rows: run the command again, with the same values")
    return ErasureStatus(
        id=one.id,
        column=one.column,
        requested=one.at,
        by=request.act if request is not None else None,
        values=len(request.erasure["hashes"])
        if request is not None and request.erasure is not None
        else 0,
        until=one.until,
        done=one.done,
        rows=sum(part["rows"] for part in parts),
        dead_letters=sum(part["dead"] for part in parts),
        hours=hours,
        replaced=len(replaced),
        files=len(there),
        versions=versions if isinstance(versions, int) else None,
        holders=holders,
        gone_at=last_end(holders, None),
        left=[*again, *_describe_left(state, one, there, versions, holders, stale, now, scanned)],
        scanned=scanned,
    )


def _brought_back(
    job: Job, tables: Mapping[str, Table], hours: Collection[str], replaced: Collection[str]
) -> Iterator[str]:
    """Yield a sentence for each branch that has replaced files again."""
    for name in (job.stream.table, job.stream.dead_letters_table):
        for branch in BRANCHES:
            there = erasure.by_path(
                {branch: files_by_hour(tables[name], branch, hours)} if hours else {}
            )
            if count := len(there.keys() & set(replaced)):
                has = f"was set back and has {count} replaced files again"
                yield f"branch {branch} of {name} {has}: run the command again"


def _removed_views(job: Job) -> Iterator[str]:
    """Yield a sentence for each table of a view that the stream's file no longer has."""
    stream, prefix = job.stream, f"{job.stream.table}_"
    try:
        names = job.lake.table_names(stream.table.rpartition(".")[0])
    except Terminal:
        return  # The catalog does not list tables to this user.
    # Another stream's table may begin with the name of this one, or have the name of its view.
    others = [f"{n}_" for n in names if n.startswith(prefix) and f"{n}_hours" in names]
    for name in sorted(names - {*stream.tables}):
        view = name.removesuffix(PARTIALS)
        is_own = name.startswith(prefix) and not view.startswith(tuple(others))
        if is_own and name.endswith(PARTIALS):
            yield f"table {name} of a removed view may have the values: drop it, with its files"


def _stored(table: Table, paths: Collection[str]) -> set[str]:
    def exists(path: str) -> bool:
        return table.io.new_input(path).exists()

    ordered = sorted(paths)
    with (
        lake_errors(f"look for replaced files of {'.'.join(table.name())}"),
        ThreadPoolExecutor(_AT_ONCE) as pool,
    ):
        return {
            path
            for path, is_there in zip(ordered, pool.map(exists, ordered), strict=True)
            if is_there
        }


def _holders(
    table: Table, former: Former, paths: Collection[str], one: Erasure, now: datetime
) -> list[Holder]:
    """Return the references to former files in storage."""
    of_snapshot = {
        id: {path: size for path, size in of_one.items() if path in paths}
        for id, of_one in former.items()
    }
    found = holders_of(table, of_snapshot, one.changed, now)
    # `anabranch maintain` ends them at the deadline, except branches of other programs.
    return [
        h
        if h.until is None and h.name.startswith("branch ")
        else replace(h, until=min(h.until or one.until, one.until))
        for h in found
    ]


def _count_versions(job: Job, one: Erasure) -> int | str:
    """Return the number of deleted files' versions before the rewrite, or why it is unknown."""
    before = written_until(one)
    try:
        return sum(1 for _ in versions_of(job, before)) if before is not None else 0
    except AnabranchError as error:
        return str(error)


def _describe_left(
    state: State,
    one: Erasure,
    there: Collection[str],
    versions: int | str,
    holders: Sequence[Holder],
    stale: Mapping[str, Sequence[str]],
    now: datetime,
    scanned: int | None,
) -> list[str]:
    left = []
    if one.done is None and not is_read(state, one):
        left.append(
            "records from before the request are yet to be read; then run the command again"
        )
    elif one.is_lost:
        left.append(
            "the ledger lost the places of erased dead letters: run the command again after a "
            "rebuild, and once Kafka has deleted the records from before the request"
        )
    elif one.done is None:
        left.append("branches were not searched to the end: run the command again")
    if scanned:
        left.append(f"a scan found {scanned} rows: run the command again")
    left += [
        (
            f"view {name} has partials of {len(hours)} hours that were computed from former rows, "
            f"{hours[0]} is the first; `anabranch maintain` removes them"
        )
        for name, hours in stale.items()
        if hours
    ]
    if there:
        held = ", ".join(
            f"{h.name}{f' until {h.until:%F %H:%M} UTC' if h.until else ''}" for h in holders
        )
        why = f"referred to by {held}" if held else _ORPHANS
        left.append(f"{len(there)} replaced files are stored; {why}")
        if endless := [h.name for h in holders if h.until is None]:
            left.append(
                f"{', '.join(endless)}: `anabranch maintain` drops no branch of another program; "
                "drop it"
            )
    if isinstance(versions, str):
        left.append(
            f"versions of deleted files cannot be listed ({versions}): allow "
            "s3:GetBucketVersioning and s3:ListBucketVersions, or end versions by a lifecycle rule"
        )
    elif versions:
        left.append(
            f"{versions} versions of deleted files are stored; `anabranch maintain` deletes them "
            f"once the deadline {one.until:%F %H:%M} UTC has passed (s3:DeleteObjectVersion)"
        )
        if reason := _last_failure(state.table):
            left.append(f"the last `anabranch maintain` could not delete versions: {reason}")
    if left and now > one.until:
        left.append(f"the deadline {one.until:%F %H:%M} UTC has passed")
    return left


def _last_failure(table: Table) -> str | None:
    """Return why the last maintenance run could not delete versions; None if it did not fail."""
    runs = read_runs(table.properties)
    return max(runs, key=lambda run: run.ended).failed.get("versions") if runs else None


def _scan(job: Job, state: State, one: Erasure) -> int:
    """Return the number of rows with one of the values, on any branch."""
    request = load_requests(job.ledger, [one])[one.id]
    key = keys_of(job.environment).get(request.key)
    if key is None:
        raise ConfigurationError(
            f"erasure.key: expected the key {request.key} of erasure {one.id}, found another; add "
            "the former key to `erasure.key` in conf/anabranch.yaml"
        )
    values = Values(
        one.column, frozenset(), lambda text: key.hash(one.column, text) in request.hashes
    )
    found = find_rows(state, one, values, erasure.by_path(files_by_branch(state.table)).values())
    return sum(sum(counts.values()) for counts in found.values())


def status_lines(status: ErasureStatus) -> list[str]:
    asked = (
        f" by {status.by.user}@{status.by.host}: {status.by.why}" if status.by is not None else ""
    )
    lines = [
        f"erasure {status.id} of {status.values} values of {status.column}, requested "
        f"{status.requested:%F %T} UTC{asked}",
        (
            f"  removed {status.rows} rows and {status.dead_letters} dead letters of "
            f"{len(status.hours)} hours, replaced {status.replaced} files"
        ),
    ]
    if status.scanned is not None:
        lines.append(f"  a scan of every branch found {status.scanned} rows")
    lines += [f"  left: {reason}" for reason in status.left]
    if status.is_certificate:
        lines.append(f"  nothing is left; done {status.done:%F %T} UTC")
    return lines


def view(statuses: Sequence[ErasureStatus]) -> list[Mapping[str, object]]:
    return [vars(status) | {"certificate": status.is_certificate} for status in statuses]
