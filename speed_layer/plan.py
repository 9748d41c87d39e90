"""What the speed layer decides, pure: which hours a micro-batch's offsets belong to, and how it comes back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from anabranch.hours import HourRange
from anabranch.position import Offsets, Ranges, clip, size
from anabranch.state import State


@dataclass(frozen=True)
class Skip:
    """Hours that `main` serves from the batch layer: go on behind them, at `to`."""

    hours: tuple[str, ...]
    to: Offsets


@dataclass(frozen=True)
class Read:
    """The rest of a sealed hour that lies before hours to skip, to be read by its cut."""

    hour: str
    ranges: Ranges


def assign(ranges: Ranges, hours: Sequence[HourRange]) -> dict[str, Ranges]:
    """Split a micro-batch's ranges by ingest hour; `hours` oldest first, the last one open."""
    assigned: dict[str, Ranges] = {}
    floor: Offsets = {}
    for entry in hours:
        within = {
            p: (floor.get(p, 0), e if entry.ends is None else entry.ends.get(p, 0)) for p, (_, e) in ranges.items()
        }
        if part := clip(ranges, within):
            assigned[entry.hour] = part
        if entry.ends is not None:
            floor |= {p: max(e, floor.get(p, 0)) for p, e in entry.ends.items()}
    return assigned


def plan_return(state: State, position: Offsets) -> Skip | Read | None:
    """The next step of a speed layer that comes back: skip hours that batch serves, read what lies before such hours by
    its cut, and None when the rest is for the stream.

    So a refused hour between two accepted ones is never jumped over.
    """
    if (forgotten := _skip_forgotten(state, position)) is not None:
        return forgotten
    cuts = sorted(state.cuts.items())
    remaining = [(h, c) for h, c in cuts if any(e > position.get(p, 0) for p, e in c.ends.items())]
    served = [state.serving_layer(h) == "batch" for h, _ in remaining]
    if not any(served):
        return None
    if not served[0]:
        hour, cut = remaining[0]
        return Read(hour, clip(cut.ranges, {p: (position.get(p, 0), e) for p, e in cut.ends.items()}))
    hours: list[str] = []
    to = dict(position)
    for (hour, cut), by_batch in zip(remaining, served, strict=True):
        if not by_batch:
            break
        hours.append(hour)
        to |= {p: max(e, to.get(p, 0)) for p, e in cut.ends.items()}
    return Skip(tuple(hours), to)


def _skip_forgotten(state: State, position: Offsets) -> Skip | None:
    """From a position whose accepted hours are no longer remembered one by one, go to the first that is."""
    cuts = sorted(state.cuts.items())
    start = cuts[0][1].starts if cuts else state.timeline.start
    behind = {p: (position.get(p, 0), s) for p, s in start.items()}
    if size(behind) == 0 or state.timeline.open == state.timeline.first:
        return None
    return Skip((), dict(position) | {p: max(s, position.get(p, 0)) for p, s in start.items()})


def chunks(ranges: Ranges, at_most: int) -> list[Ranges]:
    """Split ranges into pieces of at most `at_most` offsets, partition by partition in order."""
    pieces: list[Ranges] = []
    room = 0
    for p, (start, end) in sorted(ranges.items()):
        while start < end:
            if room == 0:
                pieces.append({})
                room = at_most
            step = min(room, end - start)
            pieces[-1][p] = (start, start + step)
            start, room = start + step, room - step
    return pieces
