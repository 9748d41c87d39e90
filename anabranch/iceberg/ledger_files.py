"""The ledger's files: few and sorted by hour, however many appends there were.

Every append writes a file and a manifest, and reads neither. `anabranch maintain` merges many files
of similar size within a quarter of a year. So a row is rewritten a logarithmic number of times, and
the bounds of a file's column `hour` stay narrow: a reader of an hour opens few files of a ledger of
any age. Manifests are merged by the same rule, by their number of entries. A writer merges only
after very many appends without a merge, as in a stream without maintenance.

Merging changes no row. It requires the head of `main`: a refused merge is postponed, and its files
become orphans. A ledger with limited retention removes whole quarters, by metadata alone.
"""

from __future__ import annotations

import json
import time
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from itertools import groupby
from operator import attrgetter
from typing import Generic, TypeVar

import pyarrow as pa
import pyarrow.compute as pc
from pyiceberg.expressions import (
    AlwaysTrue,
    And,
    BooleanExpression,
    GreaterThanOrEqual,
    LessThanOrEqual,
)
from pyiceberg.io.pyarrow import ArrowScan
from pyiceberg.manifest import DataFile, ManifestEntry, ManifestFile
from pyiceberg.table import FileScanTask, Table
from pyiceberg.table.refs import SnapshotRefType
from pyiceberg.table.snapshots import Operation, Snapshot, Summary, ancestors_of
from pyiceberg.table.update import (
    AddSnapshotUpdate,
    RemoveSnapshotsUpdate,
    SetPropertiesUpdate,
    TableUpdate,
)

from anabranch.common.json_values import parse, read_property
from anabranch.iceberg.expiry import plan_plain_expiry
from anabranch.iceberg.file_io import write_files
from anabranch.iceberg.manifests import own_spec_id, read_entries
from anabranch.iceberg.prepare import set_ref
from anabranch.iceberg.snapshot_writer import ManifestWriter, counts_of
from anabranch.iceberg.snapshots import PUBLISH_ID, count

T = TypeVar("T")

_ALL = AlwaysTrue()

MERGED = "anabranch.merged"
"""A snapshot summary property: the number of files when merges were last planned."""

RECORDED = "anabranch.recorded"
"""A summary property of an append of few rows: the ids of their decisions."""

MANY = 16
"""The minimum number of files of similar size for a merge."""

MANY_MANIFESTS = 8

MANY_APPENDS = 32
"""The number of appends since the last merge after which a writer merges. It is more than a day's,
since an hour without records appends once."""

SNAPSHOTS_KEPT = 20

REMOVED_THROUGH = "anabranch.ledger-removed-through"
"""A table property: the highest sequence of the rows that limited retention has removed."""

FIRST_HOUR = "anabranch.ledger-first-hour"
"""A table property: rows of earlier hours have been removed."""

_MOST_ROWS = 8_192  # maximum rows of a merged file
_MOST_FILES = 64  # maximum files merged in one commit
_SMALL_ENTRIES = 32  # manifests with at most these entries count as one size
_MOST_ENTRIES = 50_000  # maximum entries of a merged manifest
_MOST_MANIFESTS = 256  # maximum manifests merged in one commit
_MOST_EXPIRED = 256  # maximum snapshots expired in one commit
_LEAST_SMALL_FILES = 4  # minimum small files of a past quarter for their merge
_MOST_TIMES_SMALLER = 32  # files with 1/32 of the rows of the largest are merged into it
_SMALL_ROWS = 32  # files with at most these rows count as one size
_MOST_NAMED_ROWS = 24  # maximum rows of an append whose summary has their ids
_BEGINNING = datetime.min.replace(tzinfo=UTC)

# Merged files are read by hour: small row groups, and statistics of the column `hour` only.
_WRITE = {
    "write.parquet.row-group-limit": "512",
    "write.metadata.metrics.default": "none",
    "write.metadata.metrics.column.hour": "full",
}


@dataclass(frozen=True)
class Span:
    """The hours from `first` to `last` inclusive."""

    first: str
    last: str


@dataclass(frozen=True)
class File:
    """A data file of the ledger, with its number of rows and their first and last hour."""

    path: str
    rows: int
    first: str
    last: str

    @property
    def bucket(self) -> str | None:
        """The quarter of all its rows; None if they are of several quarters."""
        first, last = bucket_of(self.first), bucket_of(self.last)
        return first if first == last else None

    def may_hold(self, hours: Span | Sequence[str]) -> bool:
        """Return whether it can contain a row of one of the hours; a sequence must be sorted."""
        if not self.last:
            return True
        if isinstance(hours, Span):
            return self.first <= hours.last and hours.first <= self.last
        at = bisect_left(hours, self.first)
        return at < len(hours) and hours[at] <= self.last


def bucket_of(hour: str) -> str:
    """Return the quarter of a year of an hour, such as 2026-3 for October to December. Pure."""
    return f"{hour[:4]}-{(int(hour[5:7] or 1) - 1) // 3}" if hour[5:7].isdecimal() else ""


def first_hour_of(bucket: str) -> str:
    """Return the first hour of a quarter in the form of `bucket_of`. Pure."""
    year, quarter = bucket.split("-")
    return f"{year}-{3 * int(quarter) + 1:02}-01T00"


def tiered(sizes: Sequence[int], least: int, small: int, most: int) -> int:
    """Return how many of `sizes`, sorted ascending, to merge into one; 0 if fewer than `least`.
    Each is at most `small` or the sum of the smaller ones, so a rewrite at least doubles a larger
    size. Their sum is at most `most`. Pure."""
    total = count = 0
    for size in sizes:
        if size > max(small, total) or (count and total + size > most):
            break
        total, count = total + size, count + 1
    return count if count >= least else 0


def plan_merge(files: Iterable[File], idle: bool = False) -> tuple[File, ...]:
    """Return the files that the next commit merges; empty if there are few. Pure.

    A file with rows of several quarters is returned alone, to be split. In the newest quarter,
    files of similar size are merged; an earlier quarter becomes one file.
    """
    by_bucket: dict[str, list[File]] = {}
    for file in sorted(files, key=lambda f: (f.rows, f.path)):
        if file.bucket is None:
            return (file,)
        by_bucket.setdefault(file.bucket, []).append(file)
    newest = max(by_bucket, default="")
    for bucket, in_bucket in sorted(by_bucket.items(), reverse=True):
        sizes = [f.rows for f in in_bucket]
        count = tiered(sizes, MANY, _SMALL_ROWS, _MOST_ROWS)
        if bucket != newest:
            count = max(
                count, _count_of_past([rows for rows in sizes if rows <= _MOST_ROWS // 2], idle)
            )
        if count > 1:
            return tuple(in_bucket[: min(count, _MOST_FILES)])
    return ()


def _count_of_past(sizes: Sequence[int], idle: bool) -> int:
    """Return how many of a past quarter's files to merge, by rows, ascending: all with `idle` or if
    the small ones are large together; else all but the largest if there are several."""
    *small, largest = sizes or (0,)
    if small and (idle or _MOST_TIMES_SMALLER * sum(small) >= largest):
        # Each has at most half the rows of a merged file.
        total, count = 0, 0
        for size in sizes:
            if total + size > _MOST_ROWS:
                break
            total, count = total + size, count + 1
        return count
    return len(small) if len(small) >= _LEAST_SMALL_FILES else 0


def plan_fold(counts: Mapping[str, int], must: Iterable[str] = ()) -> tuple[str, ...]:
    """Return the manifests whose entries the next commit writes into one, `must` included.
    `counts`: entries by manifest. Pure."""
    chosen = set(must)
    others = sorted(
        (path for path in counts if path not in chosen), key=lambda path: (counts[path], path)
    )
    least = 1 if chosen else MANY_MANIFESTS
    count = tiered([counts[path] for path in others], least, _SMALL_ENTRIES, _MOST_ENTRIES)
    return (*sorted(chosen), *others[: min(count, _MOST_MANIFESTS)])


def read(table: Table, hours: Span | Collection[str] | None, columns: Sequence[str]) -> pa.Table:
    """Read the rows of `hours`, all for None; skip files without these hours. Raises OSError."""
    files = _live(table).values()
    if hours is None:
        return _read(table, files, columns)
    wanted = hours if isinstance(hours, Span) else sorted(set(hours))
    span = hours if isinstance(hours, Span) else Span(wanted[0], wanted[-1])  # type: ignore[index]
    chosen = [f for f in files if _file(table, f).may_hold(wanted)]
    of_span = And(
        GreaterThanOrEqual(term="hour", value=span.first),
        LessThanOrEqual(term="hour", value=span.last),
    )
    rows = _read(table, chosen, columns, of_span)
    if isinstance(wanted, Span):
        return rows
    return rows.filter(pc.is_in(rows["hour"], pa.array(wanted, rows["hour"].type)))


def read_since(table: Table, sequence: int, columns: Sequence[str]) -> pa.Table:
    """Read the rows with at least this sequence; skip older files. Raises OSError."""
    newest = _NEWEST.ask(table)
    rows = _read(table, [f for p, f in _live(table).items() if newest[p] >= sequence], columns)
    return rows.filter(pc.greater_equal(rows["sequence"], sequence))


def has_many(table: Table) -> bool:
    """Return whether to merge: MANY_APPENDS files since merges were last planned. Pure."""
    snapshot = table.current_snapshot()
    return (
        snapshot is not None
        and count(snapshot, "total-data-files") - count(snapshot, MERGED) >= MANY_APPENDS
    )


def append(table: Table, rows: pa.Table, commit_id: str) -> tuple[TableUpdate, ...]:
    """Write a file of `rows`; return the updates of the commit that appends it. Raises OSError."""
    # Decision 52: the metadata shows whether a decision is recorded, so a retry finds its rows
    # without reading files. Rows of egress tables have no decisions.
    is_named = "decision_id" in rows.column_names and rows.num_rows <= _MOST_NAMED_ROWS
    named = {RECORDED: json.dumps(rows["decision_id"].to_pylist())} if is_named else {}
    return _commit(table, _properties(table, commit_id) | named, (), _write(table, rows))


def newest_ids(table: Table) -> tuple[frozenset[str], datetime]:
    """Return the decision ids in the newest appends' summaries, and the time since which they are
    complete: every later append's ids are included. Reads only metadata. Pure."""
    ids: set[str] = set()
    since = _BEGINNING
    for snapshot in ancestors_of(table.current_snapshot(), table.metadata):
        since, summary = datetime.fromtimestamp(snapshot.timestamp_ms / 1000, UTC), snapshot.summary
        properties = summary.additional_properties if summary is not None else {}
        if RECORDED in properties:
            ids.update(read_property(properties, RECORDED, partial(parse, list[str])))
        elif PUBLISH_ID not in properties or (
            summary is not None and summary.operation == Operation.APPEND
        ):
            # Our append of many rows names no ids; another program may have changed any row.
            break
        if snapshot.sequence_number == 1:
            # The table's first snapshot. A missing parent does not prove it: PyIceberg removes the
            # parent id when the parent expires.
            since = _BEGINNING
    return frozenset(ids), since


def _properties(table: Table, commit_id: str, merged: int | None = None) -> dict[str, str]:
    """Return a snapshot's summary properties. `merged`: the number of files when merges were last
    planned; None keeps the current snapshot's."""
    snapshot = table.current_snapshot()
    if merged is None:
        merged = count(snapshot, MERGED) if snapshot is not None else 0
    return {PUBLISH_ID: commit_id} | ({MERGED: str(merged)} if merged else {})


def touch(table: Table, commit_id: str) -> tuple[TableUpdate, ...]:
    """Return the updates of a commit that moves the head without changing rows. Raises OSError."""
    return _commit(table, _properties(table, commit_id), (), ())


def merge(table: Table, commit_id: str, idle: bool = False) -> tuple[TableUpdate, ...]:
    """Write one bounded step that merges files or manifests and expires snapshots; return the
    updates of its commit, empty if there is nothing to do. With `idle`, also merge files that would
    otherwise wait for more. Raises OSError."""
    snapshot = table.current_snapshot()
    if snapshot is None:
        return ()
    manifests = snapshot.manifests(table.io)
    expire = plan_plain_expiry(table, SNAPSHOTS_KEPT)[-_MOST_EXPIRED:]
    # An old ledger has as many manifests as files: merge manifests first, without reading all.
    files = {} if len(manifests) > _MOST_MANIFESTS else _live(table)
    chosen = plan_merge((_file(table, f) for f in files.values()), idle)
    if not (chosen or plan_fold(_counts(manifests))):
        return _expired(expire if idle or len(expire) >= MANY else ())
    removed = tuple(files[f.path] for f in chosen)
    added = _write(table, *_split(_read(table, removed))) if removed else []
    merged = max(0, count(snapshot, "total-data-files") - len(removed) + len(added))
    return (
        *_commit(table, _properties(table, commit_id, merged), removed, added),
        *_expired(expire),
    )


def files_before(table: Table, hour: str) -> list[DataFile]:
    """Return the files that contain only rows of hours before `hour`. Raises OSError."""
    return [f for f in _live(table).values() if (last := _file(table, f).last) and last < hour]


def expire(table: Table, hour: str, commit_id: str) -> tuple[TableUpdate, ...]:
    """Return the updates of the commit that removes the files of `files_before`; empty if there are
    none. A file that also has later rows stays until `merge` has split it. Raises OSError."""
    files, snapshot = files_before(table, hour), table.current_snapshot()
    if not files or snapshot is None:
        return ()
    newest = _NEWEST.ask(table)
    # Decision 50: in the commit that removes the rows. Without it, a consumer's token of a removed
    # row looks like one of another ledger, and every hour is delivered again.
    through = max(removed_through(table), *(newest[f.file_path] for f in files))
    properties = _properties(table, commit_id, max(0, count(snapshot, MERGED) - len(files)))
    removal = SetPropertiesUpdate(updates={REMOVED_THROUGH: str(through), FIRST_HOUR: hour})
    return (*_commit(table, properties, files, (), Operation.DELETE), removal)


def removed_through(table: Table) -> int:
    """Return the highest sequence of the rows that retention removed; 0 for none. Pure."""
    return int(table.properties.get(REMOVED_THROUGH, 0))


class PerFile(Generic[T]):
    """A process's cache of one value for each file of a ledger. A file never changes, so it is read
    once."""

    def __init__(self, columns: Sequence[str], answer: Callable[[pa.Table], T]) -> None:
        self._columns, self._answer = columns, answer
        self._known: dict[str, dict[str, T]] = {}

    def ask(self, table: Table, hours: Collection[str] | None = None) -> dict[str, T]:
        """Return the value of each file of the loaded table, by path; with `hours`, only of files
        that may contain a row of them. Raises OSError."""
        files = _live(table)
        known = {
            path: value
            for path, value in self._known.get(table.location(), {}).items()
            if path in files
        }
        wanted = sorted(hours) if hours is not None else None
        asked = [p for p, f in files.items() if wanted is None or _file(table, f).may_hold(wanted)]
        if unknown := [files[p] for p in asked if p not in known]:
            # One read, in the files' order: a ledger's files have no delete files.
            rows, start = _read(table, unknown, self._columns), 0
            for file in unknown:
                known[file.file_path] = self._answer(rows.slice(start, file.record_count))
                start += file.record_count
        self._known[table.location()] = known
        return {path: known[path] for path in asked}


def _newest_sequence(rows: pa.Table) -> int:
    return int(pc.max(rows["sequence"]).as_py() or 0)


_NEWEST = PerFile(("sequence",), _newest_sequence)


def _expired(ids: Sequence[int]) -> tuple[TableUpdate, ...]:
    return (RemoveSnapshotsUpdate(snapshot_ids=list(ids)),) if ids else ()


def _commit(
    table: Table,
    properties: dict[str, str],
    removed: Sequence[DataFile],
    added: Sequence[DataFile],
    operation: Operation | None = None,
) -> tuple[TableUpdate, ...]:
    """Write the snapshot of a commit that removes and adds files, and merges small manifests unless
    it only adds files; return its updates. Raises OSError."""
    parent = table.current_snapshot()
    there = {m.manifest_path: m for m in parent.manifests(table.io)} if parent is not None else {}
    entries = _entries(table, there.values()) if removed else {}
    gone = {f.file_path for f in removed}
    touched = [
        p for p, listed in entries.items() if any(e.data_file.file_path in gone for e in listed)
    ]
    # An append reads no manifest.
    fold = plan_fold(_counts(there.values()), touched) if removed or not added else ()
    entries |= _entries(table, (there[path] for path in fold if path not in entries))
    kept = [e for path in fold for e in entries[path] if e.data_file.file_path not in gone]
    writer = ManifestWriter(
        table, max(time.time_ns() // 1_000_000, table.metadata.last_updated_ms + 1)
    )
    writer.begin_snapshot()
    manifests = [writer.write_manifest(own_spec_id(table), (), added)] if added else []
    of_spec = attrgetter("data_file.spec_id")
    manifests += [
        writer.write_manifest(spec, some)
        for spec, some in groupby(sorted(kept, key=of_spec), of_spec)
    ]
    folded = set(fold)
    manifests += [m for path, m in there.items() if path not in folded]
    # Except in an append and an expiry, rows are unchanged: incremental readers skip REPLACE.
    replaces = Operation.REPLACE if removed or not added else Operation.APPEND
    summary = Summary(operation or replaces, **_summary(parent, removed, added), **properties)
    snapshot = writer.write_snapshot(parent, manifests, summary)
    return AddSnapshotUpdate(snapshot=snapshot), set_ref(
        "main", snapshot.snapshot_id, SnapshotRefType.BRANCH
    )


def _entries(table: Table, manifests: Iterable[ManifestFile]) -> dict[str, list[ManifestEntry]]:
    some = tuple(manifests)
    return {m.manifest_path: e for m, e in zip(some, read_entries(table.io, some), strict=True)}


def _summary(
    parent: Snapshot | None, removed: Sequence[DataFile], added: Sequence[DataFile]
) -> dict[str, str]:
    """Return the summary's counts of a snapshot's changes, and the new totals."""
    rows = sum(f.record_count for f in removed)
    changes = {
        "total-data-files": len(added) - len(removed),
        "total-records": sum(f.record_count for f in added) - rows,
    }
    totals = {
        name: str((count(parent, name) if parent is not None else 0) + by)
        for name, by in changes.items()
    }
    return counts_of(added, len(removed), rows) | totals


def _counts(manifests: Iterable[ManifestFile]) -> dict[str, int]:
    return {
        m.manifest_path: (m.added_files_count or 0) + (m.existing_files_count or 0)
        for m in manifests
    }


# The files of each manifest, by table location. A manifest never changes.
_LISTED: dict[str, dict[str, tuple[DataFile, ...]]] = {}


def _live(table: Table) -> dict[str, DataFile]:
    """Return the files of `main` by path; read only manifests that are not cached."""
    snapshot = table.current_snapshot()
    if snapshot is None:
        return {}
    before, manifests = _LISTED.get(table.location(), {}), snapshot.manifests(table.io)
    unknown = _entries(table, (m for m in manifests if m.manifest_path not in before))
    known = before | {
        path: tuple(e.data_file for e in entries) for path, entries in unknown.items()
    }
    listed = {m.manifest_path: known[m.manifest_path] for m in manifests}
    _LISTED[table.location()] = listed
    return {f.file_path: f for files in listed.values() for f in files}


def _file(table: Table, data_file: DataFile) -> File:
    id = table.schema().find_field("hour").field_id
    first, last = (
        bounds.get(id, b"").decode() for bounds in (data_file.lower_bounds, data_file.upper_bounds)
    )
    return File(data_file.file_path, data_file.record_count, first, last)


def _read(
    table: Table,
    files: Iterable[DataFile],
    columns: Sequence[str] = (),
    row_filter: BooleanExpression = _ALL,
) -> pa.Table:
    """Read the matching rows, in the files' order; all columns if none are named."""
    schema = table.schema().select(*columns) if columns else table.schema()
    scan = ArrowScan(table.metadata, table.io, schema, row_filter)
    return scan.to_table([FileScanTask(f) for f in files])


def _split(rows: pa.Table) -> list[pa.Table]:
    """Sort rows by hour and sequence, and split them by quarter, at most _MOST_ROWS each. The
    decisions of an hour keep their order. Pure."""
    ordered = rows.sort_by([("hour", "ascending"), ("sequence", "ascending")])
    starts = [0]
    hours: list[str] = ordered["hour"].to_pylist()
    for i in range(1, len(hours)):
        if bucket_of(hours[i]) != bucket_of(hours[i - 1]) or i - starts[-1] >= _MOST_ROWS:
            starts.append(i)
    return [ordered.slice(s, e - s) for s, e in zip(starts, [*starts[1:], len(hours)], strict=True)]


def _write(table: Table, *parts: pa.Table) -> list[DataFile]:
    return [f for part in parts for f in write_files(table, part, _WRITE)]
