"""The next changes for a consumer, from the ledger's rows and what `main` serves. Pure.

The feed has the ledger's order: an hour is given at its newest row. Its content is what `main` serves at that time,
which is never older than the row. A decision whose row is not written yet is given too, and recorded in the token.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime

from anabranch.iceberg.clock import MAX_CLOCK_SKEW
from anabranch.protocol.ledger_row import LedgerRow
from anabranch.protocol.state import State
from serving_layer.changes.token import Content, Cursor, Token

# Largest clock error. A decision is stamped after its load, by a clock that is wrong by at most this; a commit before
# that load was stamped by another such clock.
_DOUBT = 4 * MAX_CLOCK_SKEW


@dataclass(frozen=True)
class Given:
    """An hour to give: its content, and the token once it is consumed."""

    hour: str
    content: Content
    token: Token


def rows_after(rows: Sequence[LedgerRow], cursor: Cursor | None) -> list[LedgerRow] | None:
    """The rows after the cursor; None if `rows`, in the ledger's order, lack its row and so belong to another
    ledger."""
    if cursor is None:
        return list(rows)
    at = next((i for i, row in enumerate(rows) if row.sequence == cursor.sequence and Cursor.at(row) == cursor), None)
    return list(rows[at + 1 :]) if at is not None else None


def newest_of_each(rows: Iterable[LedgerRow], first: str) -> list[LedgerRow]:
    """The newest row of each hour from `first` on that may have changed what is served, in the rows' order."""
    newest = {row.hour: row for row in rows if is_change(row) and row.hour >= first}
    kept = {row.decision_id for row in newest.values()}
    return [row for row in rows if row.decision_id in kept]


def is_change(row: LedgerRow) -> bool:
    """Whether a decision may change what `main` serves of a complete hour."""
    return row.decision in ("accepted", "served")


def waiting_changes(state: State, first: str) -> list[LedgerRow]:
    """The waiting decisions about hours from `first` on that may change what `main` serves."""
    return [row for row in state.decisions if is_change(row) and row.hour >= first]


def content_of(state: State, hour: str, row: LedgerRow) -> Content:
    """What `main` serves of an accepted hour; by its newest row if the state no longer lists it. No decision waits
    then."""
    accepted = state.accepted.get(hour)
    return Content(accepted.revision if accepted is not None else row.revision, state.served_by(hour))


def plan_given(
    state: State, token: Token, rows: Sequence[LedgerRow], recorded: Collection[str], at_most: int
) -> list[Given]:
    """The changes for the first `at_most` of `rows` (newest of their hours, behind the token's
    cursor), and, behind the last row, for decisions that wait in `state` and that the ledger (ids
    `recorded`) lacks. An hour that is not accepted is not complete: its change follows with its
    acceptance. An hour that was already given ahead of its row, with the same content, is not given
    again. Nor is one that has expired: consumers keep what they have of it.
    """
    waiting = {row.hour: row for row in waiting_changes(state, token.first) if row.decision_id not in recorded}
    pending = {row.hour for row in rows}
    ahead = {h: content for h, content in token.ahead.items() if h in waiting or h in pending}
    given: list[Given] = []

    def give(row: LedgerRow, cursor: Cursor | None) -> None:
        hour, was_given = row.hour, ahead.get(row.hour)
        content = content_of(state, hour, row)
        if hour not in waiting:
            ahead.pop(hour, None)
        if not state.is_accepted(hour) or state.is_expired(hour) or was_given == content:
            return
        if hour in waiting:
            ahead[hour] = content
        given.append(Given(hour, content, replace(token, cursor=cursor, ahead=dict(ahead))))

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
    changing = [row for row in rows if is_change(row) and row.served is not None]
    contents = {row.decision_id: Content(row.revision, row.served) for row in changing if row.served is not None}
    given = {row.hour: contents[row.decision_id] for row in changing if row.decision_id not in new}
    given |= token.ahead
    made_of = {(row.hour, contents[row.decision_id]): row for row in changing}
    return {hour: (content, made_of.get((hour, content))) for hour, content in given.items()}
