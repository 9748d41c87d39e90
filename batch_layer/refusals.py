"""Refusals: a refused hour is rebuilt once an input of its verdict has changed, and otherwise once
a day.

The verdict depends on the cut, the code, the stream's file, its suite, the other hours and the
speed layer's rows. While none of them changes, a rebuild would refuse the hour again. Other inputs
are not tracked (a row count of a week ago, records that Kafka or S3 lost or restored), hence the
daily rebuild.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from datetime import datetime, timedelta

from anabranch.common.version import VERSION
from anabranch.config import Stream
from anabranch.offsets import hours
from anabranch.offsets.hours import Cut
from anabranch.offsets.position import ranges_to_keys
from anabranch.protocol import coverage
from anabranch.protocol.ledger_row import LedgerRow
from anabranch.protocol.state import State
from anabranch.protocol.topic_change import gone_from_kafka

REBUILD_AFTER = timedelta(days=1)
# Sections of a stream's file that do not affect the verdict.
_OTHER = {"speed", "maintain", "airflow"}


def refusal_basis(stream: Stream, suite: bytes, state: State, hour: str, cut: Cut) -> str:
    """Return a hash of the inputs of an hour's verdict. Pure."""
    around = stream.lookback_hours
    first, last = hours.shift(hour, -around), hours.shift(hour, around)
    inputs = {
        "code": VERSION,
        "stream": stream.model_dump(mode="json", exclude=_OTHER),
        "suite": hashlib.sha256(suite).hexdigest(),
        "cut": cut.as_dict(),
        "accepted": {h: a.revision for h, a in state.accepted.items() if first <= h <= last},
        "overrides": {h: layer for h, layer in state.overrides.items() if first <= h <= last},
        "unread": ranges_to_keys(coverage.unread_ranges(state, hour, cut)),
    }
    # An hour of another topic is rebuilt at once when the stream reads that topic again.
    if gone := gone_from_kafka(state.timeline, state.position.topic_id, hour, cut):
        inputs["gone"] = gone
    return hashlib.sha256(json.dumps(inputs, sort_keys=True, default=str).encode()).hexdigest()[:16]


def current_basis(stream: Stream, state: State, hour: str, cut: Cut) -> str:
    """Return the basis of a verdict on an hour now. Reads the suite's file; the quality gate
    reports a file that cannot be read."""
    try:
        suite = stream.expectations.read_bytes() if stream.expectations is not None else b""
    except OSError:
        suite = b"unreadable"
    return refusal_basis(stream, suite, state, hour, cut)


def decision_id(id: str, basis: str) -> str:
    """Return the id of a refusal's ledger row, which ends with its basis."""
    return f"{id}-{basis}"


def last_refusal(rows: Sequence[LedgerRow], hour: str) -> LedgerRow | None:
    """Return an hour's newest refusal in the ledger's rows (oldest first); None if a newer decision
    replaced it. Pure."""
    of_hour = [row for row in rows if row.hour == hour and row.decision != "served"]
    return of_hour[-1] if of_hour and of_hour[-1].decision == "refused" else None


def is_still_valid(refusal: LedgerRow | None, basis: str, now: datetime) -> bool:
    """Return True if a refusal needs no rebuild yet: its basis is unchanged and it is less than a
    day old. Pure."""
    if refusal is None or not refusal.decision_id.endswith(f"-{basis}"):
        return False
    return now - refusal.recorded_at < REBUILD_AFTER


def should_record(
    refusal: LedgerRow | None, basis: str, revision: int, reason: str, now: datetime
) -> bool:
    """Return True if a refusal differs from the newest one in the ledger. Pure."""
    same = refusal is not None and (refusal.revision, refusal.reason) == (revision, reason)
    return not (same and is_still_valid(refusal, basis, now))
