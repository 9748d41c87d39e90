"""The next changes for a consumer, from the ledger's rows and the content of `main`. Pure.

Changes follow the ledger's order: an hour is delivered at its newest row. Its content is what
`main` serves at that time, which is never older than the row. A decision whose row is not written
yet is delivered too, and recorded in the token, which records what a consumer has received in a few
printable characters that stay valid when snapshots expire.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime

from anabranch.common.errors import ConfigurationError
from anabranch.common.json_values import parse
from anabranch.iceberg.clock import MAX_CLOCK_SKEW
from anabranch.protocol.erasure import UNSERVED
from anabranch.protocol.ledger_row import Layer, LedgerRow
from anabranch.protocol.state import State

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
    wanted. `ahead`: the contents that were delivered before the ledger's rows of their decisions
    were written."""

    stream: str
    first: str = ""
    cursor: Cursor | None = None
    ahead: Mapping[str, Content] = field(default_factory=dict)

    def encode(self) -> str:
        """Return the token as printable text without blanks or quotes, opaque to consumers."""
        data: dict[str, object] = {"s": self.stream}
        if self.first:
            data["f"] = self.first
        if self.cursor is not None:
            data["c"] = [self.cursor.sequence, self.cursor.digest]
        if self.ahead:
            data["a"] = {
                hour: [content.revision, content.layer, content.erased]
                for hour, content in sorted(self.ahead.items())
            }
        text = json.dumps(data, separators=(",", ":")).encode()
        return PREFIX + base64.urlsafe_b64encode(text).decode().rstrip("=")

    @staticmethod
    def decode(text: str) -> Token:
        """Return the token of a text. Raises ConfigurationError for text that `encode` did not
        write."""
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
    found: dict[str, list[LedgerRow]] = {}
    for row in filter(is_erasure, rows):
        found.setdefault(row.hour, []).append(row)
    return found


def waiting_changes(state: State, first: str) -> list[LedgerRow]:
    """Return the waiting decisions about hours from `first` on that may change the rows that `main`
    serves."""
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
    """Return the token of a consumer that has a snapshot of `main` stamped `snapshot_at`. The token
    covers the rows before the first one that may belong to a later publish. `rows`: the whole
    ledger."""
    before: LedgerRow | None = None
    for row in rows:
        if row.recorded_at >= snapshot_at - _DOUBT:
            break
        before = row
    return Token(stream, cursor=Cursor.at(before) if before is not None else None)


def replaced(
    token: Token, rows: Iterable[LedgerRow], new: Collection[str]
) -> dict[str, tuple[Content, LedgerRow | None]]:
    """Return, by hour, the content that a consumer with this token received last, and the ledger
    row of that content, if any. `rows`: all rows of these hours; rows with ids in `new` are after
    the token's cursor."""
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
