"""Acts of operators on hours, each one publish and a ledger row: hold and release, which change no
rows, and overrides, by which an operator assigns an hour to a layer and gives a reason; the swap
and the override land in one commit."""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Literal

from anabranch.common.errors import Refused
from anabranch.common.fail_points import Step, reach
from anabranch.iceberg.commits import Change, Commit
from anabranch.iceberg.files import find_lost_files
from anabranch.iceberg.snapshots import BRANCHES, heads
from anabranch.offsets.hours import hours_between
from anabranch.protocol import dead_letters, ledger, merge
from anabranch.protocol.ledger_row import Act, Kind, Layer, act_now
from anabranch.protocol.publish import Again, Decision, Publish, new_id
from anabranch.protocol.publisher import Publisher
from anabranch.protocol.registers import HOLDS, Hold, Holds, new_hold
from anabranch.protocol.retention import require_kept
from anabranch.protocol.sealing import require_sealed
from anabranch.protocol.state import (
    KEPT,
    OVERRIDES,
    Accepted,
    State,
    accepted_properties,
    load_state,
)

LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class Held:
    """The holds of a stream after the act. `changed` is False if they were so already. `erasures`:
    the ids of erasures that were requested before a hold and are not done."""

    changed: bool
    holds: tuple[Hold, ...]
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
            return Decision(state, None, Held(False, state.holds.holds, running))
        publish = plan_held(state, holds, first, last, act, new_id(), lake.clock.now())
        return Decision(state, publish, Held(True, holds.holds, running))

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


Choice = Literal["speed", "batch", "auto"]


@dataclass(frozen=True)
class Served:
    """The layer that serves the hour now. `changed`: whether the override changed."""

    hour: str
    layer: Layer
    override: Layer | None
    changed: bool


def plan_override(state: State, hour: str, choice: Choice) -> tuple[dict[str, Layer], Layer]:
    """Return the overrides after `choice`, and the layer that then serves the hour. Pure.

    Raises Refused with the reason if the overrides change and that layer's rows do not cover the
    hour's cut.
    """
    overrides = {h: layer for h, layer in state.overrides.items() if h != hour}
    if choice != "auto":
        overrides[hour] = choice
    layer = replace(state, overrides=overrides).served_by(hour)
    if (
        overrides != state.overrides
        and (reason := merge.uncovered_reason(state, layer, hour)) is not None
    ):
        raise Refused(
            f"hour {hour}: expected the {layer} layer's rows to cover its cut, found that "
            f"{reason}; {state.served_by(hour)} keeps serving it: `anabranch explain` shows the "
            "options"
        )
    return overrides, layer


def plan_served(
    state: State,
    hour: str,
    overrides: dict[str, Layer],
    layer: Layer,
    accepted: Accepted | None,
    id: str,
    now: datetime,
    why: str,
    act: Act | None = None,
) -> Publish:
    """Return the publish of an override that `plan_override` allows: override and swap in one
    commit. `accepted` is the accepted revision of the hour. Pure."""
    kept = [h for h in state.retained_hours if h != hour]
    properties = {OVERRIDES: json.dumps(overrides, sort_keys=True), KEPT: json.dumps(kept)}
    changes = [Change("main", properties=properties, copy={hour: layer})]
    if accepted is not None and layer == "speed":
        # The branch lists the hour from now on: a recreated batch branch could not distinguish it
        # from other hours.
        changes.append(Change("batch", properties=accepted_properties(state, {hour: accepted})))
    revision = accepted.revision if accepted is not None else 0
    cut = accepted.cut if accepted is not None else state.cuts.get(hour)
    row = ledger.decision(
        hour, "served", revision, cut, now, f"{id}-{hour}", served=layer, reason=why, act=act
    )
    letters = dead_letters.waiting_served(hour, layer, now, f"{id}-{hour}")
    return Publish(id, tuple(changes), state.timeline, decisions=(row,), dead_letters=(letters,))


def serve_hour(publisher: Publisher, hour: str, choice: Choice, why: str) -> Served:
    """Assign a sealed hour to a layer, or remove its override (`auto`); later publishes and merges
    respect it.

    Publishes the override and a swap without copying data; the ledger row and the hour's dead
    letters follow. Raises Refused if the layer's rows do not cover the hour, a file of theirs is
    gone, or the hour has expired, ConfigurationError for an hour before the first, NotYet for an
    hour that is not sealed, Transient.
    """
    lake, stream = publisher.lake, publisher.stream
    act = act_now("override", why)

    def decide() -> Decision[Served] | Again:
        state = load_state(lake, stream.table)
        require_sealed(state, stream, hour)
        # Decision 50: no layer has rows of an expired hour, so a swap would serve an empty one.
        require_kept(state, hour)
        overrides, layer = plan_override(state, hour, choice)
        served = Served(hour, layer, overrides.get(hour), overrides != state.overrides)
        if not served.changed:
            return Decision(state, None, served)
        if merge.needs_merge(state):
            merge.merge(lake, stream)
            return Again.AGAIN
        # The rows that `main` serves now would be replaced by those of files that are gone.
        for table in (state.table, lake.load(stream.dead_letters_table)):
            lost = [one for one in find_lost_files(table, [hour]) if layer in one.branches]
            if lost:
                raise Refused(
                    f"hour {hour}: expected the {layer} layer's files in storage, found none of "
                    f"{lost[0].words}; {state.served_by(hour)} keeps serving it; restore the file "
                    "from a version of the bucket, or restate the hour: `anabranch batch "
                    f"{stream.name} --hour {hour} --restate`"
                )
        accepted = publisher.ledger.accepted(state, hour)
        now = lake.clock.now()
        publish = plan_served(state, hour, overrides, layer, accepted, new_id(), now, why, act)
        return Decision(state, publish, served)

    published = publisher.run(decide, f"serve hour {hour} of {stream.name}")
    if published.landed is not None:
        publisher.record_decisions(published.state)
        publisher.publish_dead_letters(published.state)
        LOG.info(
            "stream %s: hour %s is now served by %s: %s",
            stream.name,
            hour,
            published.result.layer,
            why,
        )
    return published.result
