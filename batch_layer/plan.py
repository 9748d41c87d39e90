"""The batch layer's decisions, as pure functions: which hours wait, whether a staged hour may be
published, its publish, and when a refused hour is rebuilt: once an input of its verdict has
changed, and otherwise once a day.

The verdict depends on the cut, the code, the stream's file, its suite, the other hours and the
speed layer's rows. While none of them changes, a rebuild would refuse the hour again. Other inputs
are not tracked (a row count of a week ago, records that Kafka or S3 lost or restored), hence the
daily rebuild.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from enum import Enum
from typing import Any

from pyiceberg.manifest import DataFile

from anabranch.common.json_values import to_json
from anabranch.common.version import VERSION
from anabranch.config import Stream
from anabranch.iceberg.commits import Change
from anabranch.iceberg.snapshots import Staged
from anabranch.iceberg.staging import is_staged
from anabranch.offsets import hours
from anabranch.offsets.hours import Cut
from anabranch.offsets.position import ranges_to_keys
from anabranch.protocol import ledger, merge
from anabranch.protocol.ledger_row import Act, HourAccount, LedgerRow, RunFacts
from anabranch.protocol.merge import needs_merge
from anabranch.protocol.publish import Publish, new_tag
from anabranch.protocol.state import (
    KEPT,
    Accepted,
    State,
    accepted_properties,
    empty_hours_changes,
    plan_after,
)
from anabranch.protocol.topic_change import gone_from_kafka
from batch_layer.balance import GONE, Balance, Counted

# The account of an hour without records.
EMPTY = replace(Balance(Cut("", {}), Counted(), Counted(), {}, {}).counts, speed_rows=0)

# Maximum number of empty hours that a commit accepts, so that few rows wait for the ledger.
ACCEPTED_AT_ONCE = 48


class PublishCheck(Enum):
    """The next step for a staged hour, by the current state."""

    OVERTAKEN = "another run published first"
    EXPIRED = "its rows have expired"
    UNSEALED = "its seal is missing"
    GONE = "its staged snapshot is missing"
    MERGE = "main needs a merge first"
    MOVED = "what main serves in the look-back is not what duplicates were dropped against"
    PUBLISH = "it can be published"


def waiting_hours(state: State) -> list[str]:
    """Return the sealed hours that are not accepted, oldest first."""
    return [h for h in sorted(state.timeline.sealed) if not state.is_accepted(h)]


def empty_hours(state: State, candidates: Sequence[str]) -> list[str]:
    """Return the hours of `candidates` with an empty cut."""
    cuts = state.cuts
    return [h for h in candidates if h in cuts and cuts[h].offsets == 0]


def plan_acceptance_of_empty(
    state: State,
    candidates: Sequence[str],
    id: str,
    now: datetime,
    run: RunFacts | None = None,
    measured: Mapping[str, str] | None = None,
) -> Publish | None:
    """Plan the publish that accepts waiting, empty `candidates`, at most ACCEPTED_AT_ONCE; None
    without any. `measured`: the measurements that it writes to `main`."""
    waiting = set(waiting_hours(state))
    todo = {
        h: state.timeline.sealed[h]
        for h in [h for h in candidates if h in waiting][:ACCEPTED_AT_ONCE]
    }
    if not todo:
        return None
    account = replace(EMPTY, run=run)
    rows = tuple(
        ledger.decision(h, "accepted", 1, cut, now, f"{id}-{h}", served="batch", account=account)
        for h, cut in todo.items()
    )
    changes = empty_hours_changes(
        state, {h: Accepted(1, cut) for h, cut in todo.items()}, measured or {}
    )
    sealed = {h: c for h, c in state.timeline.sealed.items() if h not in todo}
    return Publish(id, changes, replace(state.timeline, sealed=sealed), decisions=rows)


def plan_seal_with_acceptance(
    state: State,
    seal: Publish,
    candidates: Collection[str] | None,
    now: datetime,
    run: RunFacts | None = None,
    measured: Mapping[str, str] | None = None,
) -> Publish:
    """Plan the publish of a seal that also accepts its empty hours, those in `candidates` or all.
    Pure.

    One commit replaces the seal and the publish of `plan_acceptance_of_empty` after it. The branch
    `speed` moves only if one of the hours has records, or if the position is bound to its topic.
    """
    sealed = [row.hour for row in seal.decisions if candidates is None or row.hour in candidates]
    after = plan_after(state, seal.changes, seal.timeline, seal.position)
    accepted = plan_acceptance_of_empty(
        after, empty_hours(after, sealed), f"{seal.id}-accepted", now, run, measured
    )
    if accepted is None:
        return seal
    moves_speed = len(accepted.decisions) < len(seal.decisions) or seal.position != state.position
    moved = {change.branch for change in accepted.changes}
    return replace(
        seal,
        changes=(
            *(c for c in seal.changes if moves_speed and c.branch not in moved),
            *accepted.changes,
        ),
        timeline=accepted.timeline,
        decisions=(*seal.decisions, *accepted.decisions),
    )


def acceptance_reason(objections: Sequence[str], accept: bool, why: str | None) -> str | None:
    """Return the ledger's reason for accepting an hour: `why`, with the objections that an operator
    overruled; None for an hour that passed by itself."""
    if accept and objections:
        return f"{ledger.BY_CHOICE}: {why}; in spite of: {'; '.join(objections)}"
    return why


def act_to_record(
    act: Act | None, before: int, objections: Sequence[str], accept: bool
) -> Act | None:
    """Return the operator's act to record with an accepted hour. Return None for an hour that the
    batch layer would have accepted by itself: it had no revision `before`, and nothing objected."""
    if act is not None and accept and objections:
        return replace(act, name="accept")
    return act if before else None


def revision_now(state: State, hour: str, before: int) -> int:
    """Return an hour's accepted revision, 0 without one, `before` if no longer listed."""
    if hour in state.accepted:
        return state.accepted[hour].revision
    return before if state.is_accepted(hour) else 0


def plan_recheck(state: State) -> dict[str, tuple[str, ...]]:
    """Return the accepted hours whose duplicates were dropped against an incomplete look-back that
    is complete now, each with the hours that were incomplete. Pure."""
    # Decision 16: without this restatement, an event that both hours have would stay in two
    # accepted hours.
    waiting = {h: a.unread for h, a in sorted(state.accepted.items()) if a.unread}
    return {h: unread for h, unread in waiting.items() if not merge.unread_hours(state, unread)}


def fingerprint(
    state: State,
    hours: Iterable[str],
    files: Mapping[str, Iterable[str]],
    rows: Mapping[str, int],
    unread: Collection[str] = (),
) -> frozenset[str]:
    """Return a value that changes if `main` serves other rows of the hours that duplicates were
    dropped against. Pure.

    For an hour that batch serves, it contains the files (`files` has only these hours). For an hour
    that speed serves, it contains the number of rows, which only grows, while compaction may change
    the files. For an hour in `unread`, it only states that speed still serves it: the hour may
    grow, since the later hours are rechecked once it has been read.
    """
    served = set()
    for hour in hours:
        if state.served_by(hour) == "batch":
            served |= {f"{hour} {path}" for path in files.get(hour, ())}
        elif hour in unread:
            # Decision 16: acceptance does not wait for the speed layer. `unread` records that
            # duplicates of the later rows have to be found again.
            served.add(f"{hour} speed, in part")
        else:
            served.add(f"{hour} speed {rows.get(hour, 0)}")
    return frozenset(served)


def may_yet_be_served(
    state: State, hours: Mapping[str, tuple[Cut, Mapping[str, int] | None]]
) -> frozenset[str]:
    """Return a value that changes if the speed layer reads on in `hours`, given by cut and gaps by
    class. Pure.

    The speed layer may have staged records that Kafka has deleted and the table does not contain
    yet. In an hour with such gaps, the unread parts must be the same when the hour is published.
    """
    gone = {
        h: cut for h, (cut, gaps) in hours.items() if any((gaps or {}).get(name) for name in GONE)
    }
    return frozenset(
        f"{h} unread {sorted(merge.unread_ranges(state, h, cut).items())}"
        for h, cut in gone.items()
    )


def check_publish(
    state: State,
    hour: str,
    cut: Cut,
    before: int,
    wap_id: str,
    lookback: frozenset[str],
    staged_lookback: frozenset[str],
    now: datetime,
) -> PublishCheck:
    """Check whether an hour that was staged over revision `before`, with the look-back's
    fingerprint `staged_lookback`, may be published `now`."""
    # Decision 50: an expired hour is never published again, also if it was staged before it
    # expired.
    if state.is_expired(hour):
        return PublishCheck.EXPIRED
    # Another run published a newer revision. This one would replace it by rows that were decided
    # before it.
    if revision_now(state, hour, before) != before or state.cuts.get(hour, cut) != cut:
        return PublishCheck.OVERTAKEN
    # A speed branch that was set back loses its newest seals.
    if not state.is_sealed(hour):
        return PublishCheck.UNSEALED
    # Decision 42: files of an expired snapshot may be deleted at any time.
    if not is_staged(state.table, wap_id, now):
        return PublishCheck.GONE
    if needs_merge(state):
        return PublishCheck.MERGE
    return PublishCheck.PUBLISH if lookback == staged_lookback else PublishCheck.MOVED


@dataclass(frozen=True)
class Rebuilt:
    """A staged hour to publish: acceptance, account, reason, and the operator's act."""

    hour: str
    accepted: Accepted
    staged: Staged
    letters: tuple[Mapping[str, Any], ...]
    account: HourAccount
    reason: str | None = None
    act: Act | None = None


def plan_publish(
    state: State,
    rebuilt: Sequence[Rebuilt],
    now: datetime,
    measured: Mapping[str, str] | None = None,
) -> Publish:
    """Plan one publish of an hour, listed first, and of the hours rechecked because of it.

    It replaces their files on `batch`, and on `main` unless an operator gave an hour to the speed
    layer. Replaced revisions are tagged. Later hours that keep their rows no longer wait for it.
    `measured`: properties for `main`.
    """
    by_batch = {r.hour for r in rebuilt if state.overrides.get(r.hour, "batch") == "batch"}
    later_hours = {
        h: replace(a, unread=tuple(u for u in a.unread if u not in by_batch))
        for h, a in state.accepted.items()
        if by_batch & set(a.unread)
    }
    properties = accepted_properties(state, later_hours | {r.hour: r.accepted for r in rebuilt})
    kept = {KEPT: json.dumps([h for h in state.retained_hours if h not in by_batch])}
    changes = (
        Change(
            "batch",
            _files(rebuilt),
            properties=properties,
            clear=tuple(r.hour for r in rebuilt),
        ),
        Change(
            "main",
            _files(r for r in rebuilt if r.hour in by_batch),
            # Clearing these hours also removes rows that a merge retained.
            properties=kept | dict(measured or {}),
            clear=tuple(r.hour for r in rebuilt if r.hour in by_batch),
        ),
    )
    rows = tuple(
        ledger.decision(
            r.hour,
            "accepted",
            r.accepted.revision,
            r.accepted.cut,
            now,
            # The same decision has the same id in each attempt, so the ledger has its row once.
            id=f"{r.staged.wap_id}-{r.hour}",
            served="batch" if r.hour in by_batch else "speed",
            reason=r.reason,
            account=r.account,
            act=r.act,
        )
        for r in rebuilt
    )
    # The replaced revision is on `main`, unless an operator gave the hour to the speed layer.
    tags = [
        new_tag(
            state,
            f"{r.hour}-r{r.accepted.revision - 1}",
            "main" if r.hour in by_batch else "batch",
            now,
        )
        for r in rebuilt
        if r.accepted.revision > 1
    ]
    done = {r.hour for r in rebuilt}
    sealed = {h: c for h, c in state.timeline.sealed.items() if h not in done}
    return Publish(
        # The id of the publish is that of its stage, so a later attempt finds the landed publish in
        # the metadata instead of publishing the hour again.
        id=rebuilt[0].staged.wap_id,
        changes=changes,
        timeline=replace(state.timeline, sealed=sealed),
        decisions=rows,
        dead_letters=tuple(item for r in rebuilt for item in r.letters),
        tags=tuple(tags),
        # Decision 42: the commit fails if another program expired one of these snapshots since the
        # load; else `main` would name deleted files.
        staged={r.staged.wap_id: r.staged.snapshot_id for r in rebuilt},
    )


def _files(rebuilt: Iterable[Rebuilt]) -> tuple[DataFile, ...]:
    return tuple(f for r in rebuilt for f in r.staged.files)


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
        "cut": to_json(cut),
        "accepted": {h: a.revision for h, a in state.accepted.items() if first <= h <= last},
        "overrides": {h: layer for h, layer in state.overrides.items() if first <= h <= last},
        "unread": ranges_to_keys(merge.unread_ranges(state, hour, cut)),
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
    """Return an hour's newest refusal, rows oldest first; None if it was replaced. Pure."""
    of_hour = [row for row in rows if row.hour == hour and row.decision != "served"]
    return of_hour[-1] if of_hour and of_hour[-1].decision == "refused" else None


def is_still_valid(refusal: LedgerRow | None, basis: str, now: datetime) -> bool:
    """Return whether a refusal needs no rebuild: same basis, less than a day old. Pure."""
    if refusal is None or not refusal.decision_id.endswith(f"-{basis}"):
        return False
    return now - refusal.recorded_at < REBUILD_AFTER


def should_record(
    refusal: LedgerRow | None, basis: str, revision: int, reason: str, now: datetime
) -> bool:
    """Return True if a refusal differs from the newest one in the ledger. Pure."""
    same = refusal is not None and (refusal.revision, refusal.reason) == (revision, reason)
    return not (same and is_still_valid(refusal, basis, now))
