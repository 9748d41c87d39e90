"""Erasure: the publishes that remove records with some values of a column from every branch.

1. The keyed hashes are written to the ledger, then one publish records the erasure on each branch.
   It moves every head, so rows that were staged before are staged again, without these records.
2. Files with such rows are replaced by files without them, on every branch that has them, some
   hours in a commit, which also changes the accounts of the hours.
3. The places of such dead letters are written to the ledger and to the hours' accounts by a publish
   that moves every head again; then the dead letters are removed from their own table.
4. After every record that the erasure covers was read and none is left, it is recorded as done.

`HourFilter` has the erased records that a layer leaves out: the hashes of the erasures that
cover its offsets, by secret keys, and the places of erased dead letters of its hours.
"""

from __future__ import annotations

import hashlib
import hmac
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

from pyiceberg.manifest import DataFile
from pyiceberg.table import Table

from anabranch.common.errors import ConfigurationError, Terminal
from anabranch.config import Environment, Stream
from anabranch.iceberg.commits import Change, Commit
from anabranch.iceberg.expiry import plan_expiry
from anabranch.iceberg.snapshots import BRANCHES, heads
from anabranch.iceberg.staging import is_young
from anabranch.offsets.hours import Cut, hour_of
from anabranch.offsets.position import Offsets, Ranges
from anabranch.protocol.ledger import Ledger, with_waiting
from anabranch.protocol.ledger_row import Account, HourAccount, LedgerRow
from anabranch.protocol.publish import Publish
from anabranch.protocol.registers import ERASURES, Erasure, Erasures
from anabranch.protocol.state import State

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
    properties: Mapping[str, str] | None = None,
) -> Commit | None:
    """Return the commit to the table of dead letters, or to the archive, that replaces each file of
    `rewritten`, as `plan_rewrite` does for rows, with `properties` of its snapshots. Pure."""
    if not _can_replace(rewritten, files_by_branch, began, now):
        return None
    expire = plan_expiry(table, id, now, waiting=state.waiting_letters)
    changes = _replacements(rewritten, files_by_branch, properties)
    return Commit(id, heads(table), changes, expire=expire)


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
    """Return the changes that replace the files of `rewritten` on each of these branches."""
    changes = []
    # On every branch that has the file, in one commit: a merge or a rollback would bring the erased
    # rows back from another branch.
    for branch, files in files_by_branch.items():
        removed = tuple(f for path, f in by_path({branch: files}).items() if path in rewritten)
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


_BYTES = 16


@dataclass(frozen=True)
class Key:
    """A secret key of the configuration. Its id does not reveal it.

    A hash is an HMAC-SHA256 of column and value, truncated to 128 bits: without the key, values
    cannot be tried against it.
    """

    secret: bytes

    @property
    def id(self) -> str:
        """The id of the key in the ledger."""
        return hmac.new(self.secret, b"id of a key of erasures", hashlib.sha256).hexdigest()[
            :_BYTES
        ]

    def hash(self, column: str, value: str) -> str:
        """Return the hash of a value of a column, as 32 hex digits."""
        message = f"{column}\0{value}".encode()
        return hmac.new(self.secret, message, hashlib.sha256).digest()[:_BYTES].hex()

    def hashes(self, column: str, values: Iterable[str]) -> tuple[str, ...]:
        """Return the hashes of values, each once, in an order that does not reveal the values'."""
        return tuple(sorted({self.hash(column, value) for value in values}))

    def id_of(self, column: str, hashes: Iterable[str], number: int = 0) -> str:
        """Return the id of an erasure of values. `number` counts repeated requests, from 1."""
        message = "\0".join((column, *hashes, *([str(number)] if number else []))).encode()
        return hmac.new(self.secret, message, hashlib.sha256).hexdigest()[:_BYTES]

    def __repr__(self) -> str:
        return f"Key({self.id})"


_REPAIR = (
    "was the ledger dropped or set back? Erased records would come back: run `anabranch erase` "
    "with the same values, which records it again, or roll the ledger back to a snapshot with it"
)


@dataclass(frozen=True)
class Request:
    """The request of an erasure in the ledger: its column, the keyed hashes of its values, and the
    id of their key. `source`: the source of the column's values (`source_of`)."""

    column: str
    key: str
    hashes: frozenset[str]
    source: str


@dataclass(frozen=True)
class HashedValues:
    """Hashes of erased values of a column, and the offset ranges in which they are erased."""

    column: str
    key: Key
    hashes: frozenset[str]
    ranges: Ranges

    def matches(self, value: str) -> bool:
        """Whether records with this value, as a string, are erased."""
        return self.key.hash(self.column, value) in self.hashes


@dataclass(frozen=True)
class HourFilter:
    """The records to leave out of an hour, by value and by place (partition, offset)."""

    hour: str
    values: tuple[HashedValues, ...]
    places: frozenset[tuple[int, int]]


def load_filter(
    environment: Environment,
    stream: Stream,
    ledger: Ledger,
    state: State,
    topic_id: str,
    by_hour: Mapping[str, Ranges],
) -> tuple[HourFilter, ...]:
    """Return the filters for offsets of one log by hour, of the hours that an erasure covers. They
    have the erasures of `state`, whose marks the staged rows get. Raises ConfigurationError if the
    key of an erasure is missing or the source of its column changed, Terminal if the ledger lacks
    its hashes, Transient."""
    covering = {h: state.erasures.covering(h, topic_id, ranges) for h, ranges in by_hour.items()}
    wanted = {one.id: one for erasures in covering.values() for one in erasures}
    if not wanted:
        return ()
    keys, requests = keys_of(environment), load_requests(ledger, list(wanted.values()))
    _require_sources(environment, stream, requests)
    history = ledger.history([h for h, erasures in covering.items() if erasures])

    for hour, erasures in covering.items():
        for one in erasures:
            if lacks_places(with_waiting(state, hour, history), one, hour):
                raise Terminal(
                    f"ledger {ledger.name}: expected {one.places[hour]} places of dead letters of "
                    f"erasure {one.id} in hour {hour}, found fewer; {_REPAIR}"
                )

    def values(one: Erasure, hour: str) -> HashedValues:
        request = requests[one.id]
        # An error, not an empty filter: erased records would come back as rows.
        if (key := keys.get(request.key)) is None:
            raise ConfigurationError(
                f"erasure.key: expected the key {request.key} of erasure {one.id}, found "
                f"{', '.join(keys) or 'none'}; add the former key to `erasure.key` in "
                "conf/anabranch.yaml: without it, erased records would come back"
            )
        return HashedValues(
            one.column, key, request.hashes, one.covered(hour, topic_id, by_hour[hour])
        )

    return tuple(
        HourFilter(
            hour,
            tuple(values(one, hour) for one in erasures),
            # Decision 51: places that still wait for their ledger row count too, else their dead
            # letters would be staged again.
            frozenset(places_of(with_waiting(state, hour, history)).get(hour, ())),
        )
        for hour, erasures in covering.items()
        if erasures
    )


def source_of(environment: Environment, stream: Stream, column: str) -> str:
    """Return the source of a column in the stream's file, and the id of the secret if the column is
    a keyed hash. Both determine its values."""
    source, secret = stream.source_of(column), environment.masking_secret
    is_masked = any(one.masks for one in stream.select or () if one.name == column)
    return f"{source} by secret {Key(secret).id}" if is_masked and secret is not None else source


def require_sources(
    environment: Environment, stream: Stream, ledger: Ledger, erasures: Erasures
) -> None:
    """Raise ConfigurationError if the source of an erasure's column changed since its request: its
    hashes are of the former values. Raises Terminal and Transient as `load_requests`."""
    _require_sources(environment, stream, load_requests(ledger, erasures.all))


def _require_sources(
    environment: Environment, stream: Stream, requests: Mapping[str, Request]
) -> None:
    for id, request in requests.items():
        now = source_of(environment, stream, request.column)
        if request.source != now:
            raise ConfigurationError(
                f"stream {stream.name}: select: {request.column}: expected {request.source}, as "
                f"when erasure {id} was requested, found {now}: other values have other hashes, "
                "so erased records would come back; restore it until `anabranch erasures "
                f"{stream.name}` no longer lists the erasure, and select the new values "
                "under another name"
            )


def keys_of(environment: Environment) -> dict[str, Key]:
    """Return the keys of the configuration by id, the current one first."""
    if environment.erasure is None:
        return {}
    keys = (Key(secret.get_secret_value().encode()) for secret in environment.erasure.key)
    return {key.id: key for key in keys}


_REQUESTS: dict[tuple[str, str], Request] = {}


def load_requests(ledger: Ledger, erasures: Sequence[Erasure]) -> dict[str, Request]:
    """Return the requests of these erasures by id. A process reads each once: it never changes.
    Raises Terminal if the ledger lacks one, Transient."""
    missing = [one for one in erasures if (ledger.name, one.id) not in _REQUESTS]
    if missing:
        rows = ledger.requests({hour_of(one.at) for one in missing})
        found = {row.erasure["id"]: row.erasure for row in rows if row.erasure is not None}
        for one in missing:
            if one.id not in found:
                raise Terminal(
                    f"ledger {ledger.name}: expected the request of erasure {one.id} of "
                    f"{one.at:%F %T} UTC, found none; {_REPAIR}"
                )
            said = found[one.id]
            hashes = frozenset(said["hashes"])
            _REQUESTS[ledger.name, one.id] = Request(
                said["column"], said["key"], hashes, said["source"]
            )
    return {one.id: _REQUESTS[ledger.name, one.id] for one in erasures}
