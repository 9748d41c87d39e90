"""Erasure: the publishes that remove records with some values of a column from every branch.

1. The keyed hashes are written to the ledger, then one publish records the erasure on each branch.
   It moves every head, so rows that were staged before are staged again, without these records.
2. Files with such rows are replaced by files without them, on every branch that has them, some
   hours in a commit, which also changes the accounts of the hours.
3. The places of such dead letters are written to the ledger and to the hours' accounts by a publish
   that moves every head again; then the dead letters are removed from their own table.
4. After every record that the erasure covers was read and none is left, it is recorded as done.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from typing import TYPE_CHECKING, Any

from anabranch.iceberg.commits import Change, Commit
from anabranch.iceberg.expiry import plan_expiry
from anabranch.iceberg.snapshots import BRANCHES, heads
from anabranch.iceberg.staging import is_young
from anabranch.offsets.hours import Cut, hour_of
from anabranch.offsets.position import Offsets
from anabranch.protocol.ledger_row import Account, HourAccount, LedgerRow
from anabranch.protocol.publish import Publish
from anabranch.protocol.registers import ERASURES, Erasure, Erasures
from anabranch.protocol.state import State

if TYPE_CHECKING:
    from pyiceberg.manifest import DataFile
    from pyiceberg.table import Table

Files = Mapping[str, Mapping[str, "DataFile"]]
"""The files of a branch, by hour and path."""


def by_path(files_by_branch: Mapping[str, Files]) -> dict[str, DataFile]:
    return {
        path: f
        for files in files_by_branch.values()
        for of_hour in files.values()
        for path, f in of_hour.items()
    }


UNSERVED = "unserved"
"""The key that marks a ledger row about files that no branch of the rows table has: the rows of
`main` did not change."""

Rewritten = Mapping[str, "DataFile | None"]
"""For the path of each file with erased records, the file with its other records; None if there are
no others."""


def plan_request(state: State, erasure: Erasure, id: str) -> Publish | None:
    """Return the publish that records an erasure on each branch; None if they have it. Pure."""
    return None if state.erasures.of(erasure.id) is not None else _recording(state, erasure, id)


def held_against(
    state: State, erasure: Erasure, hours: Collection[str], now: datetime
) -> str | None:
    """Return a description of a hold on records of a request to erase; None if there is no hold.
    Pure.

    `hours`: the hours with such records. Records that are not read yet may be of any hour from the
    open one to that of `now`.
    """
    holds = state.holds
    found = ((hour, hold) for hour in sorted(hours) if (hold := holds.of(hour)) is not None)
    if (first := next(found, None)) is not None:
        return f"some of hour {first[0]}, {first[1].reason}"
    if is_read(state, erasure):
        return None
    begin, end = state.timeline.open, max(state.timeline.open, hour_of(now))
    unread = next((hold for hold in holds.holds if hold.first <= end and begin <= hold.last), None)
    if unread is not None:
        return f"records that are yet to be read, which may be of hours {unread.reason}"
    return None


def plan_rewrite(
    state: State,
    erasure: Erasure,
    rewritten: Rewritten,
    files_by_branch: Mapping[str, Files],
    decisions: Iterable[LedgerRow],
    id: str,
    began: datetime,
    now: datetime,
) -> Publish | None:
    """Return the publish that replaces each file of `rewritten` on every branch that has it. Pure.

    `files_by_branch`: the current files. None if a compaction or a rebuild has removed a file from
    every branch, or if orphan removal may have deleted the new files: `began` is when writing them
    began, `now` a time after `state` was loaded.
    """
    if not _can_replace(rewritten, files_by_branch, began, now):
        return None
    decisions = tuple(decisions)
    recorded = _with_rows(replace(erasure, changed=now), decisions)
    changes = _replacements(rewritten, files_by_branch, _erasures_property(state, recorded))
    return Publish(id, changes, state.timeline, decisions=decisions)


def plan_places(state: State, erasure: Erasure, decisions: Iterable[LedgerRow], id: str) -> Publish:
    """Return the publish after which no layer stages these dead letters again. Pure."""
    decisions = tuple(decisions)
    places = Counter(erasure.places)
    for row in decisions:
        places[row.hour] += len((row.erasure or {}).get("places", ()))
    recorded = _with_rows(replace(erasure, places=places), decisions)
    return replace(_recording(state, recorded, id), decisions=decisions)


def plan_repair(
    state: State, erasure: Erasure, rows: Iterable[LedgerRow], is_lost: bool, id: str
) -> Publish:
    """Return the publish after which the branches expect the rows that the ledger has, and the
    erasure is not done any more. `is_lost`: the ledger lost places of dead letters. Pure."""
    own = rows_of(rows, erasure.id)
    # Decision 51: a dead letter at a lost place comes back while Kafka has it.
    is_lost = is_lost or erasure.is_lost
    known = replace(erasure, rows=len(own), places=_count_places(own), is_lost=is_lost, done=None)
    return _recording(state, known, id)


def plan_unserved(
    state: State, erasure: Erasure, decisions: Iterable[LedgerRow], id: str, now: datetime
) -> Publish:
    """Return the publish whose `decisions` record files that no branch of the rows table has: files
    of the archive that are about to be replaced, and files that only former snapshots have.
    Pure."""
    unserved = tuple(
        replace(row, erasure={**(row.erasure or {}), UNSERVED: True}) for row in decisions
    )
    recorded = _with_rows(replace(erasure, changed=now), unserved)
    return replace(_recording(state, recorded, id), decisions=unserved)


def _with_rows(erasure: Erasure, decisions: Sequence[LedgerRow]) -> Erasure:
    hours = [row.hour for row in decisions]
    first = min(filter(None, (*hours, erasure.first)), default=None)
    return replace(erasure, rows=erasure.rows + len(decisions), first=first)


def plan_letters(
    table: Table,
    state: State,
    rewritten: Rewritten,
    files_by_branch: Mapping[str, Files],
    id: str,
    began: datetime,
    now: datetime,
) -> Commit | None:
    """Return the commit to the dead letters table that replaces each file of `rewritten`, as
    `plan_rewrite` does for rows. Pure."""
    if not _can_replace(rewritten, files_by_branch, began, now):
        return None
    expire = plan_expiry(table, id, now, waiting=state.waiting_letters)
    return Commit(id, heads(table), _replacements(rewritten, files_by_branch), expire=expire)


def _can_replace(
    rewritten: Rewritten, files_by_branch: Mapping[str, Files], began: datetime, now: datetime
) -> bool:
    # Decision 38: no snapshot refers to the new files yet, so only their age excludes that orphan
    # removal deleted them. A source that is gone was replaced by a file with the same rows: to add
    # its rewritten rows would double them.
    return is_young(began, now) and set(rewritten) <= set(by_path(files_by_branch))


def _replacements(
    rewritten: Rewritten,
    files_by_branch: Mapping[str, Files],
    properties: Mapping[str, str] | None = None,
) -> tuple[Change, ...]:
    """Return the changes that replace the files of `rewritten` on each branch that has them."""
    changes = []
    # On every branch that has the file, in one commit: a merge or a rollback would bring the erased
    # rows back from another branch.
    for branch in BRANCHES:
        removed = tuple(
            f for path, f in by_path({branch: files_by_branch[branch]}).items() if path in rewritten
        )
        added = tuple(new for f in removed if (new := rewritten[f.file_path]) is not None)
        changes.append(Change(branch, added, removed, properties=properties or {}))
    return tuple(changes)


def plan_done(state: State, erasure: Erasure, id: str, now: datetime) -> Publish:
    """Return the publish that records that no branch has erased records any more. Pure."""
    return _recording(state, replace(erasure, changed=now, done=now, is_lost=False), id)


def may_come_back(state: State, erasure: Erasure, log_starts: Mapping[int, int]) -> bool:
    """Whether Kafka may have records of an erasure (`log_starts`: its first offsets). Pure."""
    is_gone = all(log_starts.get(p, 0) >= end for p, end in erasure.ends.items())
    return not (_has_left_log(state, erasure) or is_gone)


def plan_forget(
    state: State,
    log_starts: Offsets,
    finished: Collection[str],
    id: str,
    now: datetime,
    archived: Collection[str] = (),
) -> Publish | None:
    """Return the publish that removes completed erasures from the branches; None if there is none.
    Pure.

    An erasure is removed if it is done and in `finished` (no copy is left), its deadline has
    passed, and no layer can read its records again: Kafka has deleted them (`log_starts`) or its
    log was left, and no hour in `archived` has any.
    """

    def may_be_archived(one: Erasure, hour: str) -> bool:
        cut = state.cuts.get(hour)
        return cut is None or bool(one.covered(hour, cut.topic_id, cut.ranges))

    def is_over(one: Erasure) -> bool:
        if one.done is None or now < one.until or one.id not in finished:
            return False
        # Decision 55: a rebuild decodes archived records, and leaves erased ones out only while the
        # branches record the erasure.
        if any(may_be_archived(one, hour) for hour in archived):
            return False
        # Decision 51: while Kafka has a covered record, a layer may read it again.
        return not may_come_back(state, one, log_starts)

    kept = Erasures(tuple(one for one in state.erasures.all if not is_over(one)))
    if kept == state.erasures:
        return None
    changes = tuple(Change(branch, properties={ERASURES: kept.to_json()}) for branch in BRANCHES)
    return Publish(id, changes, state.timeline)


def is_read(state: State, erasure: Erasure) -> bool:
    """Whether every record that an erasure covers was read, or is in a log that was left. Pure."""
    if _has_left_log(state, erasure):
        return True
    read = dict(state.position.offsets)
    for hour in sorted(h for h in state.cuts if h >= state.timeline.since):
        if not state.is_accepted(hour):
            break
        read |= {p: max(e, read.get(p, 0)) for p, e in state.cuts[hour].ends.items()}
    return all(read.get(p, 0) >= end for p, end in erasure.ends.items())


def _has_left_log(state: State, erasure: Erasure) -> bool:
    """Whether the stream left the log of an erasure. A stream without a topic id has left none."""
    return state.position.topic_id not in ("", erasure.topic_id)


def plan_account(
    before: HourAccount | None, rows: Mapping[int, int], dead: Mapping[int, int]
) -> HourAccount:
    """Return an accepted hour's account after the erasure of these numbers of rows and dead
    letters, by partition. `before`: its account until then; empty without one. Pure."""
    if before is None or before.good is None:
        return HourAccount()
    gone = sum(rows.values()) + sum(dead.values())
    partitions = None
    if before.partitions is not None:
        partitions = {
            p: _account_after(account, rows.get(p, 0), dead.get(p, 0))
            for p, account in before.partitions.items()
        }
    return HourAccount(
        good=before.good - sum(rows.values()),
        dead=(before.dead or 0) - sum(dead.values()),
        erased=((before.erased or 0) + gone) or None,
        partitions=partitions,
    )


def _account_after(account: Account, rows: int, dead: int) -> Account:
    erased = ((account.erased or 0) + rows + dead) or None
    return replace(account, good=account.good - rows, dead=account.dead - dead, erased=erased)


def rows_of(history: Iterable[LedgerRow], id: str) -> list[LedgerRow]:
    """Return the ledger's rows about what an erasure removed, each once. Pure."""
    own = (
        row
        for row in history
        if row.decision == "erased" and row.erasure is not None and row.erasure.get("id") == id
    )
    return list({row.decision_id: row for row in own}.values())


def lacks_places(history: Iterable[LedgerRow], erasure: Erasure, hour: str | None = None) -> bool:
    """Whether the ledger has fewer places than the branches expect, in an hour or any. Pure."""
    found = _count_places(rows_of(history, erasure.id))
    wanted = erasure.places if hour is None else {hour: erasure.places.get(hour, 0)}
    return any(found.get(h, 0) < count for h, count in wanted.items())


def lacks_rows(history: Iterable[LedgerRow], erasure: Erasure) -> bool:
    """Whether the ledger has fewer rows about an erasure than the branches expect. Pure."""
    return len(rows_of(history, erasure.id)) < erasure.rows


def _count_places(rows: Iterable[LedgerRow]) -> dict[str, int]:
    return {hour: len(places) for hour, places in places_of(rows).items() if places}


def places_of(history: Iterable[LedgerRow]) -> dict[str, set[tuple[int, int]]]:
    """Return the places (partition, offset) of erased dead letters in the ledger, by hour. Pure."""
    places: dict[str, set[tuple[int, int]]] = {}
    for row in history:
        if row.erasure is not None and row.decision == "erased":
            places.setdefault(row.hour, set()).update(
                (p, o) for p, o in row.erasure.get("places", ())
            )
    return places


def erased_of_hour(
    erasure: Erasure,
    rows: Mapping[int, int],
    places: Collection[tuple[int, int]],
    files: Collection[str] = (),
) -> dict[str, Any]:
    """Return the ledger's JSON about an erasure in one hour: the number of rows and dead letters,
    their total by partition, the places of the dead letters, and the files that had them."""
    counts = dict(rows)
    for p, _ in places:
        counts[p] = counts.get(p, 0) + 1
    return {
        "id": erasure.id,
        "rows": sum(rows.values()),
        "dead": len(places),
        "partitions": {str(p): n for p, n in sorted(counts.items())},
        "places": sorted([p, o] for p, o in places),
        "files": sorted(files),
    }


def log_of(state: State, hour: str) -> str:
    """Return the topic id of an hour's log. Pure."""
    if (cut := state.cuts.get(hour)) is not None:
        return cut.topic_id
    left = next((adoption for adoption in state.timeline.adoptions if hour <= adoption.hour), None)
    return left.topic_id if left is not None else state.position.topic_id


def marks_of(state: State, hour: str, cut: Cut) -> frozenset[str]:
    """Return the marks with which an hour's rows must be staged; only for comparison. Pure."""
    return frozenset(
        f"erased {mark}" for mark in state.erasures.marks(hour, cut.topic_id, cut.ranges)
    )


def _recording(state: State, erasure: Erasure, id: str) -> Publish:
    properties = _erasures_property(state, erasure)
    # Decision 51: it moves every head, so a publish that was decided before it is refused, and its
    # rows are staged again without the erased records.
    return Publish(
        id, tuple(Change(branch, properties=properties) for branch in BRANCHES), state.timeline
    )


def _erasures_property(state: State, erasure: Erasure) -> dict[str, str]:
    return {ERASURES: state.erasures.plus(erasure).to_json()}
