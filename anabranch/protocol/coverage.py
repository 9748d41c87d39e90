"""Coverage: the part of an hour that a layer's rows account for, from the table's state. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from anabranch.offsets.hours import Cut
from anabranch.offsets.position import Offsets, Ranges, clip
from anabranch.protocol.ledger_row import Layer
from anabranch.protocol.state import State


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
