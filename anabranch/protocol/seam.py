"""The seam of `main` and the topic: the offsets of the log that rows of a snapshot of `main` do not
account for. Pure.

A snapshot accounts for the hours that the batch layer serves, whole, and for all offsets of other
hours before the position. Hours that wait for the batch layer may be between accepted ones, so
the rest is a list of ranges, of which only the last is open.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from anabranch.common.errors import Refused
from anabranch.iceberg.snapshots import heads
from anabranch.offsets.hours import Cut
from anabranch.offsets.position import Offsets, Ranges, clip, ranges_between
from anabranch.protocol.merge import unread_part
from anabranch.protocol.state import State, read_state, state_of

if TYPE_CHECKING:
    from pyiceberg.table import Table


@dataclass(frozen=True)
class Seam:
    """The offsets that a snapshot of `main` does not account for: `waiting`, by sealed hour, oldest
    first, and all offsets from `start` on, of the log of `topic_id`, after this number of
    `adoptions` of other logs."""

    snapshot_id: int
    topic_id: str
    adoptions: int
    waiting: tuple[tuple[str, Ranges], ...]
    start: Offsets

    def ranges(self, ends: Offsets) -> list[Ranges]:
        """Return the offsets below `ends` that the snapshot does not account for, each once and in
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
    """Return the state that the rows of a snapshot of `main` have. Raises Terminal for a snapshot
    without one."""
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
