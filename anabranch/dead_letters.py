"""Dead letters: their table follows the rows' publish, which names the staged files.

The two tables cannot move in one commit. The rows' commit is authoritative; the one that follows it is remembered by
id, and whoever starts next rolls a missing one forward.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from pyiceberg.manifest import DataFile

from anabranch.commits import Change, Commit, Outcome
from anabranch.errors import Transient
from anabranch.lake import Lake
from anabranch.manifests import hour_of_file
from anabranch.publish import new_id
from anabranch.snapshots import Staged, branch_properties, find_staged, heads, plan_expiry
from anabranch.state import Layer, State, load_state

if TYPE_CHECKING:
    from pyiceberg.table import Table

LOG = logging.getLogger(__name__)

DONE = "anabranch.dead-letters-done"
_REMEMBERED = 200
_Remembered = Mapping[str, list[str]]


def waiting_speed(staged: Staged, now: datetime) -> dict[str, Any]:
    """What the speed layer's rows publish says about the dead letters of its micro-batch."""
    return {"id": staged.wap_id, "at": now.isoformat(), "layer": "speed", "paths": [f.file_path for f in staged.files]}


def waiting_batch(staged: Staged | None, hour: str, revision: int, now: datetime) -> dict[str, Any]:
    """What the batch layer's rows publish says about the dead letters of its hour; without any, the hour is emptied."""
    paths = [f.file_path for f in staged.files] if staged is not None else []
    wap_id = staged.wap_id if staged is not None else new_id()
    return {
        "id": wap_id, "at": now.isoformat(), "layer": "batch", "hour": hour, "revision": revision, "paths": paths,
    }  # fmt: skip


def waiting_served(hour: str, layer: Layer, now: datetime) -> dict[str, Any]:
    """What a swap of an hour to another layer says: its dead letters in `main` become that layer's."""
    return {"id": new_id(), "at": now.isoformat(), "layer": "main", "hour": hour, "served": layer, "paths": []}


def is_due(state: State, item: Mapping[str, Any]) -> bool:
    """Whether a set of dead letters is to be published: the rows' table, loaded after that of the dead letters, still
    names it, and for no revision that was replaced since. Pure.

    One that is not named any more was published, or is of a rows' publish that was taken back.
    """
    waiting, hour = {i["id"]: i for i in state.dead_letters}, item.get("hour")
    if item["id"] not in waiting or item["layer"] != "batch":
        return item["id"] in waiting
    if (accepted := state.accepted.get(str(hour))) is not None:
        return bool(accepted.revision == item["revision"])
    # No hour is forgotten while dead letters of it wait; by older versions it was.
    newest = max(i["revision"] for i in waiting.values() if i.get("hour") == hour and i["layer"] == "batch")
    return state.is_accepted(str(hour)) and bool(item["revision"] == newest)


def roll_forward(lake: Lake, table_name: str, state: State) -> frozenset[str]:
    """Publish every set of dead letters that a rows' publish named; returns the ids that are published now.

    Each is published once, whoever does it: the dead letters' own snapshots remember the ids. Raises Transient.
    """
    done = set()
    rows_table = ".".join(state.table.name())
    for item in state.dead_letters:
        for _ in range(20):
            if _publish(lake, table_name, rows_table, item):
                break
        else:
            raise Transient(f"dead letters {item['id']} of {table_name}: expected to land in 20 attempts; try again")
        done.add(str(item["id"]))
    return frozenset(done)


def _publish(lake: Lake, table_name: str, rows_table: str, item: Mapping[str, Any]) -> bool:
    table = lake.load(table_name)
    remembered = {b: json.loads(branch_properties(table, b).get(DONE, "[]")) for b in ("speed", "batch", "main")}
    layer, hour = item["layer"], item.get("hour")
    if item["id"] in remembered[layer]:
        return True
    # The rows' state after the dead letters' table: what an acceptance since then publishes refuses this one.
    state = load_state(lake, rows_table)
    if not is_due(state, item):
        LOG.info("dead letters %s: of layer %s, hour %s: done or replaced since", item["id"], layer, hour)
        return True
    if layer == "main":
        return _swap(lake, table, state, item, remembered)
    staged = find_staged(table, item["id"]) if item["paths"] else None
    if item["paths"] and staged is None:
        raise Transient(
            f"dead letters {item['id']} of {table_name}: expected the staged snapshot, found none; "
            "rebuild the hour with `anabranch batch --restate`"
        )
    files: tuple[DataFile, ...] = staged.files if staged is not None else ()
    if hour:
        changes = [Change("batch", files, clear=(hour,))]
        if state.serving_layer(hour) == "batch":
            changes.append(Change("main", files, clear=(hour,)))
    else:
        served = tuple(f for f in files if state.serving_layer(hour_of_file(table, f)) == "speed")
        changes = [Change("speed", files), Change("main", served)]
    landed = _commit(lake, table, item, remembered, changes)
    if landed:
        LOG.info(
            "dead letters %s: %d records of layer %s published", item["id"], sum(f.record_count for f in files), layer
        )
    return landed


def _swap(lake: Lake, table: Table, state: State, item: Mapping[str, Any], remembered: _Remembered) -> bool:
    """The hour's dead letters in `main` become those of the layer that serves it; a swap since then stands for this."""
    hour, served = item["hour"], item["served"]
    if state.serving_layer(hour) != served:
        LOG.info("dead letters %s: hour %s is served by %s since", item["id"], hour, state.serving_layer(hour))
        return True
    return _commit(lake, table, item, remembered, [Change("main", copy={hour: served})])


def _commit(
    lake: Lake, table: Table, item: Mapping[str, Any], remembered: _Remembered, changes: Sequence[Change]
) -> bool:
    """Publish an item's changes; the branches remember it as done."""
    commit = Commit(
        id=str(item["id"]),
        heads=heads(table),
        changes=tuple(
            replace(c, properties={DONE: json.dumps([*remembered[c.branch], item["id"]][-_REMEMBERED:])})
            for c in changes
        ),
        expire=plan_expiry(table, str(item["id"]), datetime.now(UTC)),
    )
    return lake.commit(table, commit) is Outcome.LANDED
