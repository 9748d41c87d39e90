"""Coverage: the part of an hour that a layer's rows account for, by the state of the table.
Pure."""

from __future__ import annotations

from collections.abc import Iterable

from anabranch.offsets.hours import Cut
from anabranch.offsets.position import Offsets, Ranges, clip
from anabranch.protocol.ledger_row import Layer
from anabranch.protocol.state import State


def uncovered_reason(state: State, layer: Layer, hour: str) -> str | None:
    """Why the layer's rows do not account for the whole of the hour's cut; None when they do.

    An hour that is not sealed has no cut yet: the speed layer alone has rows of it.
    """
    if layer == "batch":
        return None if state.is_accepted(hour) else "the batch layer has not accepted it"
    if hour <= state.timeline.imported_through:
        return "it was imported: the speed layer has never read it"
    if state.timeline.is_skipped(hour):
        return "the speed layer skipped it, wholly or in part"
    cut = state.cuts.get(hour) if hour >= state.timeline.since else None
    if cut is not None and any(
        state.position.offsets.get(p, 0) < end for p, end in cut.ends.items()
    ):
        return "the speed layer has not read it to its end"
    return None


def behind(cut: Cut, offsets: Offsets) -> Ranges:
    """The part of a cut that lies behind a position, which is yet to be read."""
    return clip(cut.ranges, {p: (offsets.get(p, 0), end) for p, end in cut.ends.items()})


def unread_ranges(state: State, hour: str, cut: Cut) -> Ranges:
    """The parts of an hour's cut that the speed layer's rows do not account for.

    All of an hour that it jumped over, lost a part of to retention, or whose rows were dropped
    since: which part that was is not known. Else what lies behind the position.
    """
    if state.timeline.is_skipped(hour):
        return dict(cut.ranges)
    if hour < state.timeline.since:
        return {}  # adopt counted hours that were not read to their ends as skipped
    return behind(cut, state.position.offsets)


def unread_hours(state: State, hours: Iterable[str]) -> frozenset[str]:
    """Those of `hours` of which `main` has yet to get rows: the speed layer serves them, and is not
    at their ends.

    Not those that it jumped over, or that are of a log which was given up: nothing more comes of
    them.
    """
    timeline, cuts = state.timeline, state.cuts
    of_speed = [
        h
        for h in hours
        if h in cuts and state.served_by(h) == "speed" and not timeline.is_skipped(h)
    ]
    return frozenset(h for h in of_speed if unread_ranges(state, h, cuts[h]))
