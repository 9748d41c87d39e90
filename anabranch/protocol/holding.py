"""Holding and releasing hours: one publish that changes no rows, and a ledger row with the
operator's act."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from datetime import datetime

from anabranch.common.errors import Refused
from anabranch.common.fail_points import Step, reach
from anabranch.iceberg.commits import Change, Commit
from anabranch.iceberg.snapshots import BRANCHES, heads
from anabranch.offsets.hours import hours_between
from anabranch.protocol import ledger
from anabranch.protocol.ledger_row import Act, Kind, act_now
from anabranch.protocol.publish import Decision, Publish, new_id
from anabranch.protocol.publisher import Publisher
from anabranch.protocol.registers import HOLDS, Hold, Holds, new_hold
from anabranch.protocol.state import State, load_state

LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class Held:
    """The holds of a stream after the act. `changed` is False if they were so already. `erasures`:
    the ids of erasures that were requested before a hold and are not done."""

    holds: tuple[Hold, ...]
    changed: bool
    erasures: tuple[str, ...] = ()


def plan_hold(state: State, first: str, last: str, act: Act, release: bool) -> Holds | None:
    """Return the holds after an operator's act; None if they do not change. Raises Refused for a
    hold of an expired hour. Pure."""
    before = state.holds
    if release:
        is_held = any(hold.first <= last and first <= hold.last for hold in before.holds)
        return before.without(first, last, act.at) if is_held else None
    # A hold may extend centuries into the future.
    until = min(last, state.expired.before)
    gone = (
        next((h for h in hours_between(first, until) if state.is_expired(h)), None)
        if until
        else None
    )
    gone = gone or (last if state.is_expired(last) else None)
    if gone is not None:
        raise Refused(
            f"hours {first}..{last}: expected hours whose rows are kept, found that {gone} has "
            "expired; name the hours that are left"
        )
    if any((hold.first, hold.last, hold.why) == (first, last, act.why) for hold in before.holds):
        return None
    return before.plus(new_hold(first, last, act))


def plan_held(
    state: State, holds: Holds, first: str, last: str, act: Act, id: str, now: datetime
) -> Publish:
    """Return the publish that records the holds on each branch. It moves every head, so expiries
    that were decided before are refused. Pure."""
    properties = {HOLDS: holds.to_json()}
    kind: Kind = "held" if act.name == "hold" else "released"
    span = first if first == last else f"{first}..{last}"
    row = ledger.decision(
        first, kind, 0, None, now, f"{id}-{first}", reason=f"{span}: {act.why}", act=act
    )
    return Publish(
        id,
        tuple(Change(b, properties=properties) for b in BRANCHES),
        state.timeline,
        decisions=(row,),
    )


def hold(publisher: Publisher, first: str, last: str, why: str, release: bool = False) -> Held:
    """Hold the hours `first` to `last`, both included, whatever the retention in the stream's file;
    with `release`, end that. Idempotent. Raises Refused, Transient.

    After a hold, no expiry that was decided before removes data of these hours; erasures that were
    requested before still do.
    """
    lake, stream = publisher.lake, publisher.stream
    act = act_now("release" if release else "hold", why)

    def decide() -> Decision[Held]:
        state = load_state(lake, stream.table)
        holds = plan_hold(state, first, last, act, release)
        running = () if release else tuple(one.id for one in state.erasures.all if one.done is None)
        if holds is None:
            return Decision(state, None, Held(state.holds.holds, False, running))
        publish = plan_held(state, holds, first, last, act, new_id(), lake.clock.now())
        return Decision(state, publish, Held(holds.holds, True, running))

    published = publisher.run(decide, f"{act.name} hours of {stream.name}")
    reach(Step.HOLD_PUBLISHED)
    # Also for a hold that the branches had: an earlier run may have been killed at this step.
    if not release:
        _move_other_heads(publisher)
    reach(Step.HOLD_MOVED)
    if published.landed is not None:
        publisher.record_decisions(published.state)
        LOG.info(
            "stream %s: %s hours first=%s last=%s reason=%s",
            stream.name,
            act.name,
            first,
            last,
            why,
        )
    return published.result


def _move_other_heads(publisher: Publisher) -> None:
    """Move the heads of the dead letters table and the archive, which have expiry commits of their
    own: expiries that were decided before are refused."""
    lake, stream = publisher.lake, publisher.stream
    for name in (stream.dead_letters_table, stream.archive_table):
        if lake.exists(name):
            lake.commit_until_landed(
                name,
                f"keep hours of {stream.name}",
                lambda table: Commit(new_id(), heads(table), (Change("speed"),)),
            )
