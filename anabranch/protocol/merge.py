"""The merge: it gives `main`, for each hour, the files of the layer that serves it. Deterministic
and idempotent.

Speed and batch publish to `main` in their own commits, so a merge is seldom needed: after a crash,
an override or a restored branch. A swap copies no data.

Coverage: the part of an hour that a layer's rows account for, from the table's state. Pure.

The seam of `main` and the topic: the offsets of the log that rows of a snapshot of `main` do not
account for. Pure.

A snapshot accounts for the hours that the batch layer serves, whole, and for all offsets of other
hours before the position. Hours that wait for the batch layer may be between accepted ones, so
the rest is a list of ranges, of which only the last is open.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from pyiceberg.manifest import DataFile
from pyiceberg.table import Table

from anabranch.common.errors import Refused
from anabranch.common.fail_points import Step, reach
from anabranch.config import Stream
from anabranch.iceberg.commits import Change
from anabranch.iceberg.lake import Lake
from anabranch.iceberg.manifests import files_by_hour, hours_apart
from anabranch.iceberg.snapshots import heads
from anabranch.offsets.hours import Cut
from anabranch.offsets.position import Offsets, Ranges, clip, ranges_between
from anabranch.protocol.ledger_row import Layer
from anabranch.protocol.publish import Decision, Publish, new_id, run
from anabranch.protocol.state import KEPT, State, load_state, read_state, state_of


def uncovered_reason(state: State, layer: Layer, hour: str) -> str | None:
    """Return why the layer's rows do not account for the hour's whole cut; None if they do.

    An hour that is not sealed has no cut yet: only the speed layer has rows of it.
    """
    if layer == "batch":
        return None if state.is_accepted(hour) else "the batch layer has not accepted it"
    # Decision 56: the swap would remove the imported rows, which no other branch than `batch` has.
    if hour <= state.timeline.imported_through:
        return "it was imported: the speed layer has never read it"
    # The import of the hour was taken back: a `main` that was set back loses its rows again.
    if hour < state.timeline.first:
        return None
    if state.timeline.is_skipped(hour):
        return "the speed layer skipped it, wholly or in part"
    cut = state.cuts.get(hour) if hour >= state.timeline.since else None
    if cut is not None and any(
        state.position.offsets.get(p, 0) < end for p, end in cut.ends.items()
    ):
        return "the speed layer has not read it to its end"
    return None


def unread_part(cut: Cut, offsets: Offsets) -> Ranges:
    """Return the part of a cut from a position on, which is not read yet."""
    return clip(cut.ranges, {p: (offsets.get(p, 0), end) for p, end in cut.ends.items()})


def unread_ranges(state: State, hour: str, cut: Cut) -> Ranges:
    """Return the parts of an hour's cut that the speed layer's rows do not account for.

    The whole cut if the speed layer jumped over the hour, lost a part of it to retention, or
    dropped its rows: which part is not known. Else the offsets from the position on.
    """
    if state.timeline.is_skipped(hour):
        return dict(cut.ranges)
    if hour < state.timeline.since:
        return {}  # `adopt` marked hours that were not read to their ends as skipped
    return unread_part(cut, state.position.offsets)


def unread_hours(state: State, hours: Iterable[str]) -> frozenset[str]:
    """Return those of `hours` whose rows are not all in `main` yet: the speed layer serves them and
    has not read them to their ends.

    Without hours that it jumped over and hours of a log that was left: no more rows of them come.
    """
    timeline, cuts = state.timeline, state.cuts
    of_speed = [
        h
        for h in hours
        if h in cuts and state.served_by(h) == "speed" and not timeline.is_skipped(h)
    ]
    return frozenset(h for h in of_speed if unread_ranges(state, h, cuts[h]))


LOG = logging.getLogger(__name__)

Files = Mapping[str, Mapping[str, "DataFile"]]


@dataclass(frozen=True)
class Swap:
    """An hour whose files in `main` are not those of the layer that should serve it."""

    hour: str
    layer: Layer
    add: tuple[DataFile, ...]
    remove: tuple[DataFile, ...]
    refused: str | None = None
    expired: bool = False


@dataclass(frozen=True)
class Merged:
    """The result of a merge: the swaps made or refused, and the state after it."""

    swaps: list[Swap]
    state: State


def plan_merge(state: State, main: Files, speed: Files, batch: Files) -> list[Swap]:
    """Return the hours in which `main` differs from the layer that should serve them, oldest first.
    Pure.

    A swap that would remove rows is refused if the layer does not cover the hour.
    """
    swaps = []
    for hour in sorted({*main, *speed, *batch}):
        layer = state.served_by(hour)
        # A branch that was rolled back must not restore an expired hour.
        wanted = (
            {} if state.is_expired(hour) else (batch if layer == "batch" else speed).get(hour, {})
        )
        have = main.get(hour, {})
        # Compare paths, so the merge is idempotent: a repeated merge adds no file twice.
        if set(wanted) == set(have):
            continue
        add = tuple(f for path, f in wanted.items() if path not in have)
        remove = tuple(f for path, f in have.items() if path not in wanted)
        reason = None if state.is_expired(hour) else uncovered_reason(state, layer, hour)
        # Never replace rows of `main` by those of a layer that covers fewer offsets.
        refused = f"not swapped to {layer}: {reason}" if reason is not None and remove else None
        swaps.append(Swap(hour, layer, add, remove, refused, state.is_expired(hour)))
    return swaps


def plan_swaps(state: State, swaps: Sequence[Swap], id: str) -> Publish | None:
    """Return the publish that makes the swaps that are not refused and records the hours of the
    others as kept; None if `main` needs none. Pure."""
    kept = tuple(s.hour for s in swaps if s.refused is not None)
    if len(kept) == len(swaps) and state.is_merged and kept == state.retained_hours:
        return None
    # With the position, which may have been set back with `speed`: a lost `speed` is recreated from
    # `main`, and would skip the offsets between the two.
    return Publish(id, (_swap(swaps),), state.timeline, state.position, merges=True)


def _swap(swaps: Sequence[Swap]) -> Change:
    kept = [s.hour for s in swaps if s.refused is not None]
    layers = {s.hour: s.layer for s in swaps if s.refused is None and not s.expired}
    gone = tuple(s.hour for s in swaps if s.expired)
    return Change("main", properties={KEPT: json.dumps(kept)}, copy=layers, clear=gone)


def _hours_to_compare(state: State) -> set[str]:
    """Return the hours in which `main` may differ from the layer that should serve them."""
    layers: tuple[Layer, ...] = ("speed", "batch")
    return {
        h for b in layers for h in hours_apart(state.table, "main", b) if state.served_by(h) == b
    }


def needs_merge(state: State) -> bool:
    """Whether to merge: a branch moved without `main`, or a retained hour is covered. Pure."""
    return not state.is_merged or any(
        uncovered_reason(state, state.served_by(h), h) is None for h in state.retained_hours
    )


def merge(lake: Lake, stream: Stream, dry_run: bool = False, everything: bool = False) -> Merged:
    """Correct `main` in one publish that copies no data; return the swaps made or refused (with
    `dry_run`: to be made or refused) and the state after it.

    Without `everything`, compares nothing if `main` is recorded as merged from the current
    branches.
    """

    def decide() -> Decision[list[Swap]]:
        state = load_state(lake, stream.table)
        if not everything and not needs_merge(state):
            return Decision(state, None, [])
        hours = _hours_to_compare(state)
        swaps = plan_merge(
            state, *(files_by_hour(state.table, b, hours) for b in ("main", "speed", "batch"))
        )
        publish = None if dry_run else plan_swaps(state, swaps, new_id())
        if publish is not None:
            reach(Step.MERGE_PLANNED)
        return Decision(state, publish, swaps)

    published = run(lake, stream.table, decide, f"merge {stream.name}", take_turns=True)
    if published.landed is not None:
        reach(Step.MERGE_PUBLISHED)
    swaps = published.result
    for swap in swaps:
        if swap.refused is not None:
            LOG.warning("stream %s: hour %s %s", stream.name, swap.hour, swap.refused)
        elif not dry_run:
            LOG.info("stream %s: hour %s is now served by %s", stream.name, swap.hour, swap.layer)
    return Merged(swaps, published.state)


@dataclass(frozen=True)
class Seam:
    """The offsets that a snapshot of `main` does not account for: `waiting`, by sealed hour, oldest
    first, and all from `start` on, of `topic_id`'s log, after `adoptions` of other logs."""

    snapshot_id: int
    topic_id: str
    adoptions: int
    waiting: tuple[tuple[str, Ranges], ...]
    start: Offsets

    def ranges(self, ends: Offsets) -> list[Ranges]:
        """Return offsets below `ends` that the snapshot does not account for, each once, in
        order."""
        rest = ranges_between(self.start, ends)
        parts = [*(clip(part, _below(ends)) for _, part in self.waiting), clip(rest, rest)]
        return [part for part in parts if part]

    @property
    def lowest(self) -> Offsets:
        """The first offset of each partition that the snapshot does not account for."""
        lowest = dict(self.start)
        for _, part in self.waiting:
            for p, (start, _) in part.items():
                lowest[p] = min(start, lowest.get(p, start))
        return lowest


def _below(ends: Offsets) -> Ranges:
    return {p: (0, end) for p, end in ends.items()}


def state_at(table: Table, snapshot_id: int) -> State:
    """Return the state of a snapshot of `main`. Raises Terminal without one."""
    if snapshot_id == heads(table)["main"] and (state := read_state(table)).is_merged:
        return state
    # Not the state of now: a branch that was set back, or moved without `main`, has other offsets.
    return state_of(table, snapshot_id)


def plan_seam(state: State, snapshot_id: int, only_accepted: bool = False) -> Seam:
    """Return the seam of a snapshot of `main` whose state this is. Raises Refused."""
    timeline, read = state.timeline, {} if only_accepted else state.position.offsets
    # Earlier hours are of another log, and accepted ones that are not listed have no rest.
    cuts = {hour: cut for hour, cut in sorted(state.cuts.items()) if hour >= timeline.since}
    for hour in state.retained_hours:
        # `main` kept the rows of the layer that served the hour before: whole if it is accepted.
        is_whole = state.is_accepted(hour) and not only_accepted
        if hour >= timeline.since and not is_whole:
            raise Refused(
                f"read main and then its topic: expected to know which records of hour {hour} main "
                "has, found rows that it keeps because a layer lost them; run `anabranch batch`, "
                "which rebuilds the hour, then try again"
            )
    waiting = ((hour, _waiting(state, hour, cut, read)) for hour, cut in cuts.items())
    return Seam(
        snapshot_id,
        state.position.topic_id,
        len(timeline.adoptions),
        tuple((hour, part) for hour, part in waiting if part),
        {p: max(timeline.start.get(p, 0), read.get(p, 0)) for p in {**timeline.start, **read}},
    )


def _waiting(state: State, hour: str, cut: Cut, read: Offsets) -> Ranges:
    """Return the part of an hour's cut that `main` does not account for."""
    if state.is_expired(hour) or hour in state.retained_hours:
        return {}
    if state.served_by(hour) == "speed":
        return unread_part(cut, read)
    # Of an hour that the batch layer is to serve and has not accepted, `main` has no rows.
    return {} if state.is_accepted(hour) else dict(cut.ranges)
