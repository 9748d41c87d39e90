"""Restoring a ledger: its missing rows are written from the state on the branches."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from datetime import datetime

from anabranch.config import Stream
from anabranch.iceberg.lake import Lake
from anabranch.iceberg.manifests import content_by_hour
from anabranch.offsets.hours import hours_between
from anabranch.protocol import ledger
from anabranch.protocol.ledger import Ledger
from anabranch.protocol.ledger_row import HourAccount, Kind, LedgerRow
from anabranch.protocol.state import State, load_state

LOG = logging.getLogger(__name__)

WHY = "restored from the state on the branches; other fields were in the ledger only"


def plan_rows(
    state: State,
    known: Collection[str],
    good: Mapping[str, int],
    dead: Mapping[str, int],
    now: datetime,
    first: str = "",
) -> list[LedgerRow]:
    """Return rows for the sealed hours from `first` on that the ledger lacks, oldest first: cut,
    revision, and the counts that the branches have (`good` and `dead`: the rows of the batch
    branches by hour; unknown for an expired hour). The ids are deterministic, so two processes that
    restore at once write each row once.
    """
    rows = []
    for hour in missing_hours(state, known, first):
        accepted = state.accepted.get(hour)
        served = state.served_by(hour)
        cut = state.cuts.get(hour)
        kind: Kind = "sealed"
        revision, account = 0, HourAccount()
        if state.is_accepted(hour):
            kind, revision = "accepted", accepted.revision if accepted is not None else 1
            if not state.is_expired(hour):
                account = HourAccount(good=good.get(hour, 0), dead=dead.get(hour, 0))
        # Two processes that restore at once write the same id, so the second append finds its row.
        id = f"restored-{hour}-{kind}-{revision}"
        rows.append(
            ledger.decision(
                hour, kind, revision, cut, now, id, served=served, reason=WHY, account=account
            )
        )
        if state.is_expired(hour):
            rows.append(
                ledger.decision(
                    hour, "expired", revision, None, now, f"restored-{hour}-expired", reason=WHY
                )
            )
    return rows


def missing_hours(state: State, known: Collection[str], first: str = "") -> list[str]:
    """Return the sealed hours from `first` on that are not in `known`. Pure."""
    return [
        h
        for h in hours_between(max(state.timeline.first, first), state.timeline.open)
        if h not in known
    ]


def restore_ledger(lake: Lake, stream: Stream) -> int:
    """Write the missing ledger rows of the table's hours; return their number. Idempotent. Raises
    Transient.

    Writes decisions that wait on a branch first, since they have more fields.
    """
    state = load_state(lake, stream.table)
    if state.timeline.open == state.timeline.first:
        return 0
    stream_ledger = Ledger(lake, stream.hours_table)
    stream_ledger.record_waiting(state)
    known = {row.hour for row in stream_ledger.history(without=ledger.BULKY)}
    # Decision 50: hours before it were removed by retention and are not lost.
    first = stream_ledger.first_hour()
    if not missing_hours(state, known, first):
        return 0
    good, dead = (
        {h: content.rows for h, content in content_by_hour(lake.load(t), "batch").items()}
        for t in (stream.table, stream.dead_letters_table)
    )
    rows = plan_rows(state, known, good, dead, lake.clock.now(), first)
    stream_ledger.record(rows)
    LOG.warning(
        "stream %s: restored ledger rows from the state on the branches rows=%d",
        stream.name,
        len(rows),
    )
    return len(rows)
