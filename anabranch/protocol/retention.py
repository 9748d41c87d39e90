"""Retention: the hours that are due to expire, the reasons why others are kept longer, and the
publish that removes hours.

One publish removes the rows of an hour from every branch, by metadata alone: every data file
belongs to one ingest hour. The hour stays accepted, and the ledger keeps its account; the decision
of its newest row is `expired`. It is never rebuilt.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta

from pyiceberg.table import Table

from anabranch.common.errors import Refused
from anabranch.iceberg.commits import Change, Commit
from anabranch.iceberg.expiry import plan_expiry
from anabranch.iceberg.ledger_files import bucket_of, first_hour_of
from anabranch.iceberg.snapshots import BRANCHES, branch_properties, heads
from anabranch.offsets.hours import Timeline, hour_of, hours_between, shift
from anabranch.protocol import ledger
from anabranch.protocol.ledger_row import NOTES
from anabranch.protocol.publish import Publish
from anabranch.protocol.registers import EXPIRED, Expired
from anabranch.protocol.state import KEPT, NOTHING_CONFIRMED, OVERRIDES, Confirmed, State

_GRACE = timedelta(days=1)  # maintenance runs once a day

Undelivered = Mapping[str, Collection[str] | None]
"""The hours that each target of egress has not received yet, by target; None for all hours."""


@dataclass(frozen=True)
class Due:
    """Hours past their retention. `leaving`: the hours to remove now, oldest first. `kept`: the
    reasons why other hours are kept, by hour."""

    leaving: tuple[str, ...] = ()
    kept: Mapping[str, str] = field(default_factory=dict)


def plan_due(
    state: State,
    keep: timedelta | None,
    now: datetime,
    lookback: int,
    undelivered: Undelivered,
    finished: Confirmed = NOTHING_CONFIRMED,
) -> Due:
    """Return the hours whose rows have been kept for `keep` since the hour ended, and that have not
    expired. Pure.

    Only accepted hours are removed, and none that an operator holds. An hour is kept while a
    publish of it is incomplete, while it or an hour with it in its look-back is not accepted or
    will be rebuilt, and until each target of egress has it. `finished`: the waiting decisions and
    dead letters that are known to be complete.
    """
    if keep is None:
        return Due()
    timeline, expired = state.timeline, state.expired
    bound = min(hour_of(now - keep), timeline.open)
    kept_before = [
        hour for first, last in expired.kept for hour in hours_between(first, shift(last, 1))
    ]
    candidates = [*kept_before, *hours_between(max(expired.before, timeline.first), bound)]
    reasons = _incomplete(state, finished) | _look_back_reasons(state, lookback)
    leaving, kept = [], dict[str, str]()
    for hour in candidates:
        if (hold := state.holds.of(hour)) is not None:
            kept[hour] = hold.reason
        # Decision 50: an hour without an account would lose its records without a trace.
        elif not state.is_accepted(hour):
            kept[hour] = "it is not accepted"
        elif (reason := reasons.get(hour) or _undelivered_reason(hour, undelivered)) is not None:
            kept[hour] = reason
        else:
            leaving.append(hour)
    return Due(tuple(leaving), kept)


@dataclass(frozen=True)
class Overdue:
    """Hours that are more than a day past their retention and that no operator holds: their number,
    the oldest, and why it is kept; None if the next maintenance may remove it."""

    hours: int
    oldest: str
    reason: str | None


def find_overdue(
    state: State, keep: timedelta | None, now: datetime, lookback: int
) -> Overdue | None:
    """Return the hours that should have expired a day ago; None if there are none. Pending
    deliveries of egress are not considered. Pure."""
    due = plan_due(state, keep + _GRACE if keep is not None else None, now, lookback, {})
    kept = {hour: reason for hour, reason in due.kept.items() if state.holds.of(hour) is None}
    oldest = min((*due.leaving, *kept), default=None)
    if oldest is not None:
        return Overdue(len(due.leaving) + len(kept), oldest, kept.get(oldest))
    return None


def _incomplete(state: State, finished: Confirmed) -> dict[str, str]:
    letters = [item for item in state.dead_letters if item["id"] not in finished.letters]
    decisions = [row for row in state.decisions if row.decision_id not in finished.decisions]
    waiting = {str(item["hour"]) for item in letters if item.get("hour")}
    waiting |= {row.hour for row in decisions if row.decision not in NOTES}
    unread = {hour for hour, accepted in state.accepted.items() if accepted.unread}
    reasons = dict.fromkeys(waiting, "a publish of it is not complete")
    return reasons | dict.fromkeys(
        unread, "it is rebuilt once the speed layer has read the hours of its look-back"
    )


def _look_back_reasons(state: State, lookback: int) -> dict[str, str]:
    """Return why hours in the look-back of an undecided or restated hour are kept, by hour."""
    # Decision 50: duplicates of expired rows would be accepted as rows.
    undecided = {h for h in state.timeline.sealed if not state.is_accepted(h)}
    undecided |= {h for h, accepted in state.accepted.items() if accepted.unread} | {
        state.timeline.open
    }
    return {
        shift(hour, -back): f"hour {hour}, which is not accepted yet, looks for duplicates in it"
        for hour in sorted(undecided, reverse=True)
        for back in range(1, lookback + 1)
    }


def _undelivered_reason(hour: str, undelivered: Undelivered) -> str | None:
    # A target that lacks the hour could not get it any more: decision 50.
    waits = sorted(
        target for target, hours in undelivered.items() if hours is None or hour in hours
    )
    return f"egress has not delivered it to {', '.join(waits)}" if waits else None


def plan_expire(
    state: State,
    hours: Sequence[str],
    speed_hours: Iterable[str],
    revisions: Mapping[str, int],
    reason: str,
    id: str,
    now: datetime,
) -> Publish:
    """Return the publish that removes the rows of `hours` from every branch. Pure.

    `speed_hours`: the hours that the speed branch has rows of. `revisions`: the accepted revisions
    by hour, for the ledger.
    """
    first = min(state.timeline.first, *hours)
    properties = {EXPIRED: state.expired.plus(hours, first, now).to_json()}
    gone = set(hours)
    overrides = {h: layer for h, layer in state.overrides.items() if h not in gone}
    main_properties = {KEPT: json.dumps([h for h in state.retained_hours if h not in gone])}
    if overrides != state.overrides:
        main_properties[OVERRIDES] = json.dumps(overrides, sort_keys=True)
    # On every branch in one commit (decision 50): a merge, or a branch that is set back, would
    # restore the rows from the branch that still has them.
    changes = tuple(
        Change(
            b, properties=properties | (main_properties if b == "main" else {}), clear=tuple(hours)
        )
        for b in BRANCHES
    )
    rows = tuple(
        ledger.decision(h, "expired", revisions.get(h, 0), None, now, f"{id}-{h}", reason=reason)
        for h in hours
        # Once in the ledger, also if a later maintenance removes rows that a branch brought back.
        if not state.is_expired(h)
    )
    return Publish(id, changes, plan_uncovered(state, speed_hours, hours), decisions=rows)


def letters_expired(table: Table) -> Expired:
    """Return the hours whose dead letters have expired, from the loaded dead letters table."""
    return Expired.of_branches(branch_properties(table, branch) for branch in BRANCHES)


def plan_due_letters(
    state: State,
    expired: Expired,
    keep: timedelta | None,
    now: datetime,
    finished: Confirmed = NOTHING_CONFIRMED,
) -> Due:
    """Return the hours whose dead letters are due, as `plan_due`; those of the hours in `expired`
    have expired. They are in no look-back, and egress does not deliver them. Pure."""
    return plan_due(replace(state, expired=expired), keep, now, 0, {}, finished)


def plan_expire_letters(
    table: Table,
    state: State,
    due: Sequence[str],
    content: Collection[str],
    id: str,
    now: datetime,
    at_most: int,
) -> Commit | None:
    """Return the commit that removes the dead letters of `due` hours, and of expired hours whose
    dead letters came back, from every branch; at most `at_most` hours. `content`: the hours that
    any branch has dead letters of. None if there are none to remove. Pure."""
    expired, wanted = letters_expired(table), set(due)
    gone = tuple(sorted(h for h in content if h in wanted or h in expired))[:at_most]
    if not gone:
        return None
    first = min(state.timeline.first, gone[0])
    leaving = [h for h in due if h <= gone[-1]]
    known = expired.plus(leaving, first, now) if leaving else replace(expired, at=now)
    changes = tuple(Change(b, properties={EXPIRED: known.to_json()}, clear=gone) for b in BRANCHES)
    expire = plan_expiry(table, id, now, waiting=state.waiting_letters, gone_before=expired.at)
    return Commit(id, heads(table), changes, expire=expire)


def plan_ledger_start(
    state: State, letter_hours: Iterable[str], keep: timedelta, now: datetime
) -> str | None:
    """Return the first hour of the ledger after the removal of quarters of a year, oldest first:
    quarters that ended `keep` ago and that have no rows, dead letters (`letter_hours`), waiting
    decisions, erasure requests or erased records. None if no quarter is removed. Pure."""
    first_kept = state.expired.first_kept(state.timeline.first)
    if first_kept <= state.timeline.first:
        return None
    # The next process writes waiting decisions again if the ledger lacks their rows.
    waiting = (row.hour for row in state.decisions)
    requests = (hour_of(erasure.at) for erasure in state.erasures.all)
    erased = (erasure.first for erasure in state.erasures.all if erasure.first is not None)
    kept = (*letter_hours, *waiting, *requests, *erased)
    oldest = min([hour_of(now - keep), first_kept, *kept])
    start = first_hour_of(bucket_of(oldest))
    return start if start > state.timeline.first else None


def plan_uncovered(state: State, speed_hours: Iterable[str], drop: Sequence[str]) -> Timeline:
    """Return the timeline in which the speed layer does not cover the hours `drop` (in order).
    `speed_hours`: the hours that the speed branch has rows of. The timeline stays small: before
    `covered_from` it lists only the hours that are kept. Pure.
    """
    timeline = state.timeline
    covered_from = max(timeline.covered_from, shift(drop[-1], 1))
    others = (
        {*speed_hours} | set(timeline.sealed) | set(state.accepted) | set(state.overrides)
    ) - set(drop)
    kept = {h for h in others if h < covered_from and not timeline.is_skipped(h)}
    skipped = tuple(h for h in timeline.skipped if h >= covered_from)
    return replace(timeline, covered_from=covered_from, kept=tuple(sorted(kept)), skipped=skipped)


def is_kept(state: State, hour: str, lookback: int = 0) -> bool:
    """Whether neither the hour nor any of the `lookback` hours before it has expired. Pure."""
    return not any(state.is_expired(shift(hour, -back)) for back in range(lookback + 1))


def require_kept(state: State, hour: str, lookback: int = 0) -> None:
    """Raise Refused if the hour has expired, or one of the `lookback` hours before it, whose rows
    are needed to find duplicates."""
    if is_kept(state, hour, lookback):
        return
    if state.is_expired(hour):
        raise Refused(
            f"hour {hour}: expected rows that are kept, found that they have expired "
            "(`keep.rows`); an expired hour is not built, served or replayed again: `anabranch "
            f"history STREAM --hour {hour}` shows its account"
        )
    raise Refused(
        f"hour {hour}: expected the rows of its look-back ({lookback} hours, "
        "batch.lookback_hours), found that some of these hours have expired (`keep.rows`); its "
        "duplicates cannot be found any more, so the hour stays as it was accepted"
    )
