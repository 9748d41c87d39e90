"""The next changes for a consumer, from the ledger's rows and what `main` serves. Pure.

The feed has the ledger's order: an hour is given at its newest row. Its content is what `main`
serves at that time, which is never older than the row. A decision whose row is not written yet is
given too, and recorded in the token.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime

from anabranch.iceberg.clock import MAX_CLOCK_SKEW
from anabranch.protocol.erasure import UNSERVED
from anabranch.protocol.ledger_row import LedgerRow
from anabranch.protocol.state import State
from serving_layer.changes.token import Content, Cursor, Token, digest_of

# Largest clock error. A decision is stamped after its load, by a clock that is wrong by at most
# this; a commit before that load was stamped by another such clock.
_DOUBT = 4 * MAX_CLOCK_SKEW


@dataclass(frozen=True)
class Given:
    """An hour to give: its content, the token once it is consumed, and the ids of the erasures in
    it that are behind the token before."""

    hour: str
    content: Content
    token: Token
    erasures: tuple[str, ...] = ()


def rows_after(rows: Sequence[LedgerRow], cursor: Cursor | None) -> list[LedgerRow] | None:
    """The rows after the cursor; None if `rows`, in the ledger's order, lack its row and so belong
    to another ledger."""
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
    """The newest row of each hour from `first` on that may have changed what is served, in the
    rows' order."""
    newest = {row.hour: row for row in rows if is_change(row) and row.hour >= first}
    kept = {row.decision_id for row in newest.values()}
    return [row for row in rows if row.decision_id in kept]


def is_change(row: LedgerRow) -> bool:
    """Whether a decision may change what `main` serves of a complete hour. An erasure of dead
    letters, or of archived records, does not."""
    return is_erasure(row) or row.decision in ("accepted", "served")


def is_erasure(row: LedgerRow) -> bool:
    of = row.erasure or {}
    return row.decision == "erased" and not of.get("dead") and not of.get(UNSERVED)


def erasures_of(rows: Iterable[LedgerRow]) -> dict[str, list[LedgerRow]]:
    """By hour, the erasures of rows among decisions, in their order."""
    found: dict[str, list[LedgerRow]] = {}
    for row in filter(is_erasure, rows):
        found.setdefault(row.hour, []).append(row)
    return found


def waiting_changes(state: State, first: str) -> list[LedgerRow]:
    """The waiting decisions about hours from `first` on that may change what `main` serves."""
    return [row for row in state.decisions if is_change(row) and row.hour >= first]


def plan_given(
    state: State,
    token: Token,
    rows: Sequence[LedgerRow],
    recorded: Collection[str],
    at_most: int,
    erased: Mapping[str, Sequence[LedgerRow]],
) -> list[Given]:
    """The changes for the first `at_most` of `rows` (newest of their hours, behind the token's
    cursor), and, behind the last row, for decisions that wait in `state` and that the ledger (ids
    `recorded`) lacks. An hour that is not accepted is not complete: its change follows with its
    acceptance. An hour that was already given ahead of its row, with the same content, is not given
    again. Nor is one that has expired: consumers keep what they have of it. `erased`: the erasures
    behind the token's cursor that the ledger has, by hour.
    """
    unrecorded = [
        row for row in waiting_changes(state, token.first) if row.decision_id not in recorded
    ]
    waiting, erasing = {row.hour: row for row in unrecorded}, erasures_of(unrecorded)
    pending = {row.hour for row in rows}
    ahead = {h: content for h, content in token.ahead.items() if h in waiting or h in pending}
    given: list[Given] = []

    def give(row: LedgerRow, cursor: Cursor | None) -> None:
        hour, was_given = row.hour, ahead.get(row.hour)
        erasures = [*erased.get(hour, ()), *erasing.get(hour, ())]
        # By its newest row, if the state no longer lists the hour: no decision waits then.
        accepted = state.accepted.get(hour)
        content = Content(
            accepted.revision if accepted is not None else row.revision, state.served_by(hour)
        )
        if erasures:
            content = replace(content, erased=digest_of(erasures[-1]))
        if hour not in waiting:
            ahead.pop(hour, None)
        # Without an erasure in what is new, one that was given before counts.
        has_it = was_given is not None and content in (was_given, replace(was_given, erased=""))
        if not state.is_accepted(hour) or state.is_expired(hour) or has_it:
            return
        if hour in waiting:
            ahead[hour] = content
        ids = tuple(sorted({str((e.erasure or {}).get("id")) for e in erasures}))
        given.append(Given(hour, content, replace(token, cursor=cursor, ahead=dict(ahead)), ids))

    for row in rows[:at_most]:
        give(row, Cursor.at(row))
    if len(rows) <= at_most:
        cursor = Cursor.at(rows[-1]) if rows else token.cursor
        for row in sorted(waiting.values(), key=lambda r: r.hour):
            give(row, cursor)
    return given


def token_at(stream: str, rows: Sequence[LedgerRow], snapshot_at: datetime) -> Token:
    """The token of a consumer that has a snapshot of `main` stamped `snapshot_at`. It covers all of
    `rows`, the whole ledger, before the first row that may be of a later publish."""
    before: LedgerRow | None = None
    for row in rows:
        if row.recorded_at >= snapshot_at - _DOUBT:
            break
        before = row
    return Token(stream, cursor=Cursor.at(before) if before is not None else None)


def replaced(
    token: Token, rows: Iterable[LedgerRow], new: Collection[str]
) -> dict[str, tuple[Content, LedgerRow | None]]:
    """By hour, the content that a consumer with this token got last, and the ledger's row of that
    content if there is one. `rows`: all rows of these hours; rows with ids in `new` are behind its
    cursor."""
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
