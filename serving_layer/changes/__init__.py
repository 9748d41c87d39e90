"""The changes of a stream: each hour that was completed or restated, or whose rows were erased, for
consumers that follow `main`.

    from serving_layer.changes import changes

    for change in changes("game_events", since=my_token):
        ...  # replace all your rows of change.hour, and store change.token, in one transaction

The changes come from durable data: the ledger's rows, in the order in which they were recorded, and
the current state of `main`. So a token stays valid after every snapshot of its time has expired.
Each change is delivered at least once; repeating it changes nothing for a consumer that replaces
the hour's rows: docs/how-to/follow-changes.md, decision 23.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import Any, Literal

from pyiceberg.manifest import DataFile
from pyiceberg.table import Table

from anabranch.common.errors import ConfigurationError, Transient
from anabranch.iceberg.manifests import files_at
from anabranch.iceberg.snapshots import head
from anabranch.job import Job, open_job
from anabranch.offsets.hours import hour_of, start_of
from anabranch.protocol import ledger
from anabranch.protocol.ledger_row import Layer, LedgerRow
from anabranch.protocol.state import State, load_state
from serving_layer.changes import plan
from serving_layer.changes.plan import PREFIX, Content, Token
from serving_layer.reader.selection import snapshot_as_of

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
    return plan.token_at(stream, rows, datetime.fromtimestamp(snapshot.timestamp_ms / 1000, UTC))


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
    ids, erased = {row.decision_id for row in new}, plan.erasures_of(new)
    todo = plan.newest_of_each(new, token.first)
    while True:
        state = load_state(job.lake, job.stream.table)
        if not state.is_merged:
            # `main` may have rows of a branch's earlier state; the next publisher merges first.
            LOG.info("stream %s: waiting for main to be merged", job.stream.name)
            return
        # Step 2: select complete hours that were not delivered yet.
        given = plan.plan_changes(
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
    """Return the hours that may have a change after a token, whether or not the ledger has its row
    yet. Raises Transient."""
    state = load_state(job.lake, job.stream.table)
    recorded = _recorded(job, state, token)
    waiting = [
        row for row in plan.waiting_changes(state, token.first) if row.decision_id not in recorded
    ]
    new = _rows_after_token(job, token)
    if new is None:
        new = job.ledger.history(without=ledger.BULKY_EXCEPT_ERASURE)
    return {row.hour for row in (*plan.newest_of_each(new, token.first), *waiting)}


def _rows_after_token(job: Job, token: Token) -> list[LedgerRow] | None:
    cursor = token.cursor
    rows = job.ledger.history_since(
        cursor.sequence if cursor is not None else 0, ledger.BULKY_EXCEPT_ERASURE
    )
    new = plan.rows_after(rows, cursor)
    if new is None and cursor is not None and cursor.sequence <= job.ledger.removed_through():
        # The cursor's row was removed with its quarter (`keep.ledger`); part of its commit may be
        # delivered again.
        return rows
    return new


def _recorded(job: Job, state: State, token: Token) -> set[str]:
    """Return the decision ids in the ledger, for hours with decisions waiting on a branch."""
    hours = {row.hour for row in plan.waiting_changes(state, token.first)}
    rows = job.ledger.history(hours, ledger.BULKY_EXCEPT_ERASURE)
    return {row.decision_id for row in rows}


def _changes(
    job: Job, state: State, token: Token, given: Sequence[plan.PlannedChange], new: set[str]
) -> Iterator[HourChange]:
    if not given:
        return
    hours = {g.hour for g in given}
    before: dict[str, tuple[Content, LedgerRow | None]] = {}
    if token.cursor is not None or token.ahead:
        rows = job.ledger.history(hours, ledger.BULKY_EXCEPT_ERASURE)
        before = plan.replaced(token, rows, new)
    main = head(state.table, "main")
    files = files_at(state.table, main, hours)
    old = _old_files(state.table, before)
    for g in given:
        current, previous = files.get(g.hour, {}), before.get(g.hour)
        replaced = {} if previous is None else old.get(g.hour)
        erasures = g.erasures if previous is not None else ()
        yield HourChange(
            hour=g.hour,
            kind="erased" if erasures else "replaced" if previous is not None else "completed",
            revision=g.content.revision,
            served=g.content.layer,
            snapshot=main.snapshot_id,
            rows=sum(f.record_count for f in current.values()),
            replaces=previous[0].revision if previous is not None else None,
            added=tuple(sorted(current.keys() - (replaced or {}).keys())),
            removed=tuple(sorted(replaced.keys() - current.keys()))
            if replaced is not None
            else None,
            erasures=erasures,
            token=g.token.encode(),
        )


def _old_files(
    table: Table, before: dict[str, tuple[Content, LedgerRow | None]]
) -> dict[str, dict[str, DataFile]]:
    """Return the files of each hour's content in `before`, without hours whose snapshots have
    expired."""
    hours_of: dict[int, list[str]] = {}
    for hour, (content, row) in before.items():
        tag = table.metadata.refs.get(f"{hour}-r{content.revision}")
        is_tagged = tag is not None and content.layer == "batch" and not content.erased
        tagged = tag.snapshot_id if tag is not None and is_tagged else None
        id = next(
            (
                i
                for i in (row.snapshot_id if row is not None else None, tagged)
                if _is_kept(table, i)
            ),
            None,
        )
        if id is not None:
            hours_of.setdefault(id, []).append(hour)
    old: dict[str, dict[str, DataFile]] = {}
    for id, hours in hours_of.items():
        snapshot = table.metadata.snapshot_by_id(id)
        assert snapshot is not None
        found = files_at(table, snapshot, hours)
        old |= {hour: found.get(hour, {}) for hour in hours}
    return old


def _is_kept(table: Table, id: int | None) -> bool:
    return id is not None and table.metadata.snapshot_by_id(id) is not None
