"""Overrides: an operator assigns an hour to a layer and gives a reason; the swap and the override
land in one commit."""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Literal

from anabranch.common.errors import Refused
from anabranch.iceberg.commits import Change
from anabranch.iceberg.files import find_lost_files
from anabranch.protocol import dead_letters, ledger, merge
from anabranch.protocol.ledger_row import Act, Layer, act_now
from anabranch.protocol.publish import Again, Decision, Publish, new_id
from anabranch.protocol.publisher import Publisher
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
