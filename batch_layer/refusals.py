"""Refusals that stand: an hour that was refused is rebuilt by itself once something changed that its verdict rests on.

What a rebuild finds is decided by the cut, the code, the stream's file, its suite, and what the other hours and the
speed layer hold by then. As long as all of that is as it was, rebuilding it every hour would find the same again; what
can't be told from here (a row count of a week ago, what Kafka or S3 lost or found again) is looked at once a day.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import TYPE_CHECKING

from anabranch import __version__
from anabranch.offsets import hours
from anabranch.offsets.hours import Cut
from anabranch.offsets.position import ranges_to_keys
from anabranch.protocol import coverage
from anabranch.protocol.ledger_row import LedgerRow
from anabranch.protocol.state import State
from anabranch.protocol.topic_change import gone_from_kafka

if TYPE_CHECKING:
    from anabranch.config import Stream

AGAIN_AFTER = timedelta(days=1)
# What of a stream's file says nothing about how an hour is judged.
_OTHER = {"speed", "maintain", "airflow"}


def read_suite(stream: Stream) -> bytes:
    """The suite's file as it is; one that cannot be read is for the quality gate to say."""
    try:
        return stream.expectations.read_bytes() if stream.expectations is not None else b""
    except OSError:
        return b"unreadable"


def refusal_basis(stream: Stream, suite: bytes, state: State, hour: str, cut: Cut) -> str:
    """What the verdict on an hour rests on, as a short text that is the same for as long as all of it is. Pure."""
    around = stream.batch.lookback_hours
    first, last = hours.shift(hour, -around), hours.shift(hour, around)
    rests_on = {
        "code": __version__,
        "stream": stream.model_dump(mode="json", exclude=_OTHER),
        "suite": hashlib.sha256(suite).hexdigest(),
        "cut": cut.as_dict(),
        "accepted": {h: a.revision for h, a in state.accepted.items() if first <= h <= last},
        "overrides": {h: layer for h, layer in state.overrides.items() if first <= h <= last},
        "unread": ranges_to_keys(coverage.unread_ranges(state, hour, cut)),
    }
    # An hour of another log is looked at again at once when the stream reads that log again.
    if gone := gone_from_kafka(state.timeline, state.position.topic_id, hour, cut):
        rests_on["gone"] = gone
    return hashlib.sha256(json.dumps(rests_on, sort_keys=True, default=str).encode()).hexdigest()[:16]


def decision_id(id: str, basis: str) -> str:
    """The id of a refusal's ledger row: it ends with what the refusal rests on."""
    return f"{id}-{basis}"


def last_refusal(rows: Sequence[LedgerRow], hour: str) -> LedgerRow | None:
    """The newest refusal of an hour, of the ledger's rows, oldest first; None when a newer row speaks of another
    decision than who serves it. Pure."""
    of_hour = [row for row in rows if row.hour == hour and row.decision != "served"]
    return of_hour[-1] if of_hour and of_hour[-1].decision == "refused" else None


def stands(refusal: LedgerRow | None, basis: str, now: datetime) -> bool:
    """Whether a refusal need not be looked at again yet: it rests on what is so still, and is not a day old. Pure."""
    if refusal is None or not refusal.decision_id.endswith(f"-{basis}"):
        return False
    return now - refusal.recorded_at < AGAIN_AFTER


def should_record(refusal: LedgerRow | None, basis: str, revision: int, reason: str, now: datetime) -> bool:
    """Whether a refusal says anything that the newest one in the ledger does not. Pure."""
    same = refusal is not None and (refusal.revision, refusal.reason) == (revision, reason)
    return not (same and stands(refusal, basis, now))
