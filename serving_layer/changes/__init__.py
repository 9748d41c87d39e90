"""The changes of a stream: each hour that was completed or restated, or whose rows were erased, for
consumers that follow `main`.

    from serving_layer.changes import changes

    for change in changes("game_events", since=my_token):
        ...  # replace all your rows of change.hour, and store change.token, in one transaction

The changes come from durable data: the ledger's rows, in the order in which they were recorded, and
the current state of `main`. So a token stays valid after every snapshot of its time has expired.
Each change is delivered at least once; repeating it changes nothing for a consumer that replaces
the hour's rows: docs/how-to/follow-changes.md, decision 23.

Changes follow the ledger's order: an hour is delivered at its newest row. Its content is what
`main` serves at that time, which is never older than the row. A decision whose row is not written
yet is delivered too, and recorded in the token, which records what a consumer has received in a few
printable characters that stay valid when snapshots expire.
"""

from __future__ import annotations

import base64
import hashlib
import json
import logging
import re
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from itertools import takewhile
from typing import Any, Literal

from pyiceberg.manifest import DataFile
from pyiceberg.table import Table

from anabranch.common.arrays import grouped
from anabranch.common.errors import ConfigurationError, Transient
from anabranch.common.json_values import parse
from anabranch.iceberg.clock import MAX_CLOCK_SKEW
from anabranch.iceberg.manifests import files_at
from anabranch.iceberg.snapshots import head
from anabranch.job import Job, open_job
from anabranch.offsets.hours import hour_of, start_of
from anabranch.protocol import ledger
from anabranch.protocol.erasure import UNSERVED
from anabranch.protocol.ledger_row import Layer, LedgerRow
from anabranch.protocol.state import State, load_state
from serving_layer.reader.selection import snapshot_as_of

PREFIX = "ab1."


@dataclass(frozen=True)
class Content:
    """The content of an hour in `main`: a revision from a layer. `erased`: the digest of its newest
    known erasure; empty if it has none."""

    revision: int
    layer: Layer
    erased: str = ""


@dataclass(frozen=True)
class Cursor:
    """The newest ledger row that was consumed. A row never changes its sequence, and leaves the
    ledger only with its quarter (`keep.ledger`). `digest`: the digest of the decision's id, which
    differs in another ledger."""

    sequence: int
    digest: str

    @staticmethod
    def at(row: LedgerRow) -> Cursor:
        assert row.sequence is not None
        return Cursor(row.sequence, digest_of(row))


def digest_of(row: LedgerRow) -> str:
    """Return the digest of a decision's id in a token."""
    return hashlib.sha256(row.decision_id.encode()).hexdigest()[:12]


@dataclass(frozen=True)
class _Text:
    """The JSON of a token."""

    s: str
    f: str = ""
    c: tuple[int, str] | None = None
    a: Mapping[str, tuple[int, Layer, str]] = field(default_factory=dict)


@dataclass(frozen=True)
class Token:
    """A consumer's position. `cursor`: None before the first row. `first`: earlier hours are not
    wanted. `ahead`: contents delivered before the ledger had their decisions."""

    stream: str
    first: str = ""
    cursor: Cursor | None = None
    ahead: Mapping[str, Content] = field(default_factory=dict)

    def encode(self) -> str:
        """Return the token as printable text without blanks or quotes, opaque to consumers."""
        cursor = [*vars(self.cursor).values()] if self.cursor is not None else None
        ahead = {hour: [*vars(content).values()] for hour, content in sorted(self.ahead.items())}
        data = {"s": self.stream, "f": self.first, "c": cursor, "a": ahead}
        given = {key: value for key, value in data.items() if value}
        text = json.dumps(given, separators=(",", ":")).encode()
        return PREFIX + base64.urlsafe_b64encode(text).decode().rstrip("=")

    @staticmethod
    def decode(text: str) -> Token:
        """Return the token of a text. Raises ConfigurationError for text not of `encode`."""
        try:
            packed = text.removeprefix(PREFIX)
            data = parse(_Text, base64.urlsafe_b64decode(packed + "=" * (-len(packed) % 4)))
            cursor = Cursor(*data.c) if data.c is not None else None
            ahead = {hour: Content(*content) for hour, content in data.a.items()}
            return Token(data.s, data.f, cursor, ahead)
        except ValueError as error:
            raise ConfigurationError(
                "--since: expected a complete token printed by `anabranch changes`, found "
                f"{text[:200]!r}"
            ) from error


# Largest clock error. A decision is stamped after its load, by a clock whose error is bounded; a
# commit before that load was stamped by another such clock.
_DOUBT = 4 * MAX_CLOCK_SKEW


@dataclass(frozen=True)
class PlannedChange:
    """An hour to deliver: its content, the token after its consumption, and the ids of its erasures
    after the previous token."""

    hour: str
    content: Content
    token: Token
    erasures: tuple[str, ...] = ()


def rows_after(rows: Sequence[LedgerRow], cursor: Cursor | None) -> list[LedgerRow] | None:
    """Return the rows after the cursor; None if `rows`, in the ledger's order, do not contain the
    cursor's row and so belong to another ledger."""
    if cursor is None:
        return list(rows)
    at = next(
        (
            i
            for i, row in enumerate(rows)
            if row.sequence == cursor.sequence and Cursor.at(row) == cursor
        ),
        None,
    )
    return list(rows[at + 1 :]) if at is not None else None


def newest_of_each(rows: Iterable[LedgerRow], first: str) -> list[LedgerRow]:
    """Return the newest row of each hour from `first` on that may have changed the served rows, in
    the order of `rows`."""
    newest = {row.hour: row for row in rows if is_change(row) and row.hour >= first}
    kept = {row.decision_id for row in newest.values()}
    return [row for row in rows if row.decision_id in kept]


def is_change(row: LedgerRow) -> bool:
    """Return whether a decision may change the rows that `main` serves for a complete hour. An
    erasure of dead letters, or of archived records, does not."""
    return is_erasure(row) or row.decision in ("accepted", "served", "undone")


def is_erasure(row: LedgerRow) -> bool:
    of = row.erasure or {}
    return row.decision == "erased" and not of.get("dead") and not of.get(UNSERVED)


def erasures_of(rows: Iterable[LedgerRow]) -> dict[str, list[LedgerRow]]:
    """Return the erasures of rows among decisions, by hour, in their order."""
    return grouped(filter(is_erasure, rows), lambda row: row.hour)


def waiting_changes(state: State, first: str) -> list[LedgerRow]:
    """Return the waiting decisions from `first` on that may change the rows of `main`."""
    return [row for row in state.decisions if is_change(row) and row.hour >= first]


def plan_changes(
    state: State,
    token: Token,
    rows: Sequence[LedgerRow],
    recorded: Collection[str],
    at_most: int,
    erased: Mapping[str, Sequence[LedgerRow]],
) -> list[PlannedChange]:
    """Return the changes for the first `at_most` of `rows` (the newest row of each hour after the
    token's cursor), and, after the last row, for decisions that wait in `state` and are not in the
    ledger. `recorded`: the ids of the ledger's decisions. `erased`: the ledger's erasures after the
    token's cursor, by hour.

    An hour that is not accepted is not complete: its change follows with its acceptance. Only an
    hour whose import was taken back is delivered then, without rows: a target may have got them
    while they left the table. An hour that was delivered ahead of its row, with the same content,
    is not delivered again; nor is an expired hour: consumers keep their rows of it.
    """
    unrecorded = [
        row for row in waiting_changes(state, token.first) if row.decision_id not in recorded
    ]
    waiting, erasing = {row.hour: row for row in unrecorded}, erasures_of(unrecorded)
    pending = {row.hour for row in rows}
    ahead = {h: content for h, content in token.ahead.items() if h in waiting or h in pending}
    planned: list[PlannedChange] = []

    def add_change(row: LedgerRow, cursor: Cursor | None) -> None:
        hour, delivered_before = row.hour, ahead.get(row.hour)
        erasures = [*erased.get(hour, ()), *erasing.get(hour, ())]
        # If the state no longer lists the hour, no decision waits, and its newest row has the
        # revision.
        accepted = state.accepted.get(hour)
        is_undone = row.decision == "undone" and not state.is_accepted(hour)
        content = Content(
            accepted.revision if accepted is not None else row.revision,
            "batch" if is_undone else state.served_by(hour),
        )
        if erasures:
            content = replace(content, erased=digest_of(erasures[-1]))
        if hour not in waiting:
            ahead.pop(hour, None)
        # Without a new erasure, one that was delivered before still counts.
        has_it = delivered_before is not None and content in (
            delivered_before,
            replace(delivered_before, erased=""),
        )
        if not (state.is_accepted(hour) or is_undone) or state.is_expired(hour) or has_it:
            return
        if hour in waiting:
            ahead[hour] = content
        ids = tuple(sorted({str((e.erasure or {}).get("id")) for e in erasures}))
        planned.append(
            PlannedChange(hour, content, replace(token, cursor=cursor, ahead=dict(ahead)), ids)
        )

    for row in rows[:at_most]:
        add_change(row, Cursor.at(row))
    if len(rows) <= at_most:
        cursor = Cursor.at(rows[-1]) if rows else token.cursor
        for row in sorted(waiting.values(), key=lambda r: r.hour):
            add_change(row, cursor)
    return planned


def token_at(stream: str, rows: Sequence[LedgerRow], snapshot_at: datetime) -> Token:
    """Return the token of a consumer with a snapshot of `main` of `snapshot_at`. It covers the rows
    before the first that may be of a later publish. `rows`: the whole ledger."""
    before = [*takewhile(lambda row: row.recorded_at < snapshot_at - _DOUBT, rows)]
    return Token(stream, cursor=Cursor.at(before[-1]) if before else None)


def replaced(
    token: Token, rows: Iterable[LedgerRow], new: Collection[str]
) -> dict[str, tuple[Content, LedgerRow | None]]:
    """Return, by hour, the content that a token's consumer received last, and its ledger row, if
    any. `rows`: all of these hours; those with ids in `new` are after its cursor."""
    given: dict[str, Content] = {}
    newest: dict[str, Content] = {}
    made_of: dict[tuple[str, Content], LedgerRow] = {}
    for row in filter(is_change, rows):
        if is_erasure(row) and row.hour in newest:
            content = replace(newest[row.hour], erased=digest_of(row))
        elif row.served is not None:
            content = Content(row.revision, row.served)
        else:
            continue
        newest[row.hour] = content
        made_of[row.hour, content] = row
        if row.decision_id not in new:
            given[row.hour] = content
    given |= token.ahead
    return {hour: (content, made_of.get((hour, content))) for hour, content in given.items()}


LOG = logging.getLogger(__name__)

__all__ = ["HourChange", "changes", "follow", "poll", "start_from"]

# Maximum number of hours read in one load of the table, all from that load's snapshot.
_AT_ONCE = 240
_HOUR = re.compile(r"\d{4}-\d\d-\d\dT\d\d")
EVERY = timedelta(seconds=5)


@dataclass(frozen=True)
class HourChange:
    """An hour as `main` serves it in `snapshot`. Its rows replace all rows of the hour that the
    consumer has.

    `kind`: `completed` for an hour that the consumer has not received before; `erased` if rows that
    it received may have been erased, by the `erasures` with these ids; else `replaced`.

    `replaces`: the revision that the consumer received before, or None. `removed`: that revision's
    files that `main` no longer serves; None if its snapshots have expired. `token`: store it with
    the hour's rows, to continue after this change.
    """

    hour: str
    kind: Literal["completed", "replaced", "erased"]
    revision: int
    served: Layer
    snapshot: int
    rows: int
    replaces: int | None
    added: tuple[str, ...]
    removed: tuple[str, ...] | None
    erasures: tuple[str, ...]
    token: str

    def as_dict(self) -> dict[str, Any]:
        values = {
            k: v
            for k, v in vars(self).items()
            if k not in ("added", "removed", "erasures", "token")
        }
        files = {"added": self.added, "removed": self.removed}
        return values | {"files": files, "erasures": self.erasures, "token": self.token}


def changes(
    stream: str,
    since: str | None = None,
    *,
    conf: str | None = None,
    following: bool = False,
    every: timedelta = EVERY,
) -> Iterator[HourChange]:
    """Yield the changes of a stream after `since`: a token; an hour to start from; a snapshot of
    `main` that the consumer has, by id or tag; or None, for all hours. `conf`: the configuration
    folder.

    Ends with the last change; the consumer then has every complete hour as `main` serves it. With
    `following`, waits for more and polls at the interval `every`. Raises ConfigurationError if
    `since` is not of this stream, and, unless following, Transient when the lake does not answer.
    """
    job = open_job(stream, conf)
    token = start_from(job, since)
    yield from follow(job, token, every) if following else poll(job, token)


def start_from(job: Job, since: str | None) -> Token:
    """Return the token for `since`, which is as in `changes`."""
    stream = job.stream.name
    if since is None:
        return Token(stream)
    if since.startswith(PREFIX):
        token = Token.decode(since)
        if token.stream != stream:
            raise ConfigurationError(
                f"--since: expected a token of stream {stream}, found one of {token.stream}"
            )
        return token
    if _HOUR.fullmatch(since):
        return Token(stream, first=hour_of(start_of(since)))
    table = job.lake.load(job.stream.table)
    snapshot = table.metadata.snapshot_by_id(snapshot_as_of(job.lake, job.stream, table, since))
    assert snapshot is not None
    rows = job.ledger.history(without=ledger.BULKY_EXCEPT_ERASURE)
    return token_at(stream, rows, datetime.fromtimestamp(snapshot.timestamp_ms / 1000, UTC))


def follow(job: Job, token: Token, every: timedelta = EVERY) -> Iterator[HourChange]:
    """Poll without end, and yield the changes. Retries when the lake does not answer."""
    while True:
        try:
            for change in poll(job, token):
                yield change
                token = Token.decode(change.token)
        except Transient as error:
            LOG.warning("stream %s: %s; retrying in %s", job.stream.name, error, every)
        time.sleep(every.total_seconds())


def poll(job: Job, token: Token) -> Iterator[HourChange]:
    """Yield the current changes after a token. Raises Transient."""
    # Step 1: read the ledger, then the table, so that the table is never older than the rows.
    new = _rows_after_token(job, token)
    if new is None:
        LOG.warning(
            "stream %s: the ledger of the token was recreated; delivering all its hours again",
            job.stream.name,
        )
        token = replace(token, cursor=None, ahead={})
        new = job.ledger.history(without=ledger.BULKY_EXCEPT_ERASURE)
    ids, erased = {row.decision_id for row in new}, erasures_of(new)
    todo = newest_of_each(new, token.first)
    while True:
        state = load_state(job.lake, job.stream.table)
        if not state.is_merged:
            # `main` may have rows of a branch's earlier state; the next publisher merges first.
            LOG.info("stream %s: waiting for main to be merged", job.stream.name)
            return
        # Step 2: select complete hours that were not delivered yet.
        given = plan_changes(
            state, token, todo, ids | _recorded(job, state, token), _AT_ONCE, erased
        )
        # Step 3: read their files, and the files that they replace.
        for change in _changes(job, state, token, given, ids):
            yield change
            token = Token.decode(change.token)
        todo = todo[_AT_ONCE:]
        if not todo:
            return


def pending_hours(job: Job, token: Token) -> set[str]:
    """Return the hours that may change after a token, with or without a row. Raises Transient."""
    state = load_state(job.lake, job.stream.table)
    recorded = _recorded(job, state, token)
    waiting = [
        row for row in waiting_changes(state, token.first) if row.decision_id not in recorded
    ]
    new = _rows_after_token(job, token)
    if new is None:
        new = job.ledger.history(without=ledger.BULKY_EXCEPT_ERASURE)
    return {row.hour for row in (*newest_of_each(new, token.first), *waiting)}


def _rows_after_token(job: Job, token: Token) -> list[LedgerRow] | None:
    cursor = token.cursor
    rows = job.ledger.history_since(
        cursor.sequence if cursor is not None else 0, ledger.BULKY_EXCEPT_ERASURE
    )
    new = rows_after(rows, cursor)
    if new is None and cursor is not None and cursor.sequence <= job.ledger.removed_through():
        # The cursor's row was removed with its quarter (`keep.ledger`); part of its commit may be
        # delivered again.
        return rows
    return new


def _recorded(job: Job, state: State, token: Token) -> set[str]:
    """Return the decision ids in the ledger, for hours with decisions waiting on a branch."""
    hours = {row.hour for row in waiting_changes(state, token.first)}
    rows = job.ledger.history(hours, ledger.BULKY_EXCEPT_ERASURE)
    return {row.decision_id for row in rows}


def _changes(
    job: Job, state: State, token: Token, given: Sequence[PlannedChange], new: set[str]
) -> Iterator[HourChange]:
    if not given:
        return
    hours = {g.hour for g in given}
    before: dict[str, tuple[Content, LedgerRow | None]] = {}
    if token.cursor is not None or token.ahead:
        rows = job.ledger.history(hours, ledger.BULKY_EXCEPT_ERASURE)
        before = replaced(token, rows, new)
    main = head(state.table, "main")
    files = files_at(state.table, main, hours)
    old = _old_files(state.table, before)
    for g in given:
        current, previous = files.get(g.hour, {}), before.get(g.hour)
        gone = {} if previous is None else old.get(g.hour)
        erasures = g.erasures if previous is not None else ()
        yield HourChange(
            hour=g.hour,
            kind="erased" if erasures else "replaced" if previous is not None else "completed",
            revision=g.content.revision,
            served=g.content.layer,
            snapshot=main.snapshot_id,
            rows=sum(f.record_count for f in current.values()),
            replaces=previous[0].revision if previous is not None else None,
            added=tuple(sorted(current.keys() - (gone or {}).keys())),
            removed=tuple(sorted(gone.keys() - current.keys())) if gone is not None else None,
            erasures=erasures,
            token=g.token.encode(),
        )


def _old_files(
    table: Table, before: dict[str, tuple[Content, LedgerRow | None]]
) -> dict[str, dict[str, DataFile]]:
    """Return the files of each hour's content in `before`, of hours that have snapshots."""
    hours_of: dict[int, list[str]] = {}
    for hour, (content, row) in before.items():
        tag = table.metadata.refs.get(f"{hour}-r{content.revision}")
        is_tagged = tag is not None and content.layer == "batch" and not content.erased
        tagged = tag.snapshot_id if tag is not None and is_tagged else None
        ids = (row.snapshot_id if row is not None else None, tagged)
        kept = [id for id in ids if id is not None and table.snapshot_by_id(id) is not None]
        if kept:
            hours_of.setdefault(kept[0], []).append(hour)
    old: dict[str, dict[str, DataFile]] = {}
    for id, hours in hours_of.items():
        snapshot = table.metadata.snapshot_by_id(id)
        assert snapshot is not None
        found = files_at(table, snapshot, hours)
        old |= {hour: found.get(hour, {}) for hour in hours}
    return old
