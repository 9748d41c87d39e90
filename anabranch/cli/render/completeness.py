"""Print the completeness of a stream by event time."""

from __future__ import annotations

from anabranch.common.output import print_json, print_table
from anabranch.protocol.completeness import EventTimeCompleteness


def print_completeness(view: EventTimeCompleteness, output: str) -> None:
    if output == "json":
        print_json(view)
        return
    rows: list[tuple[str, object]] = [
        ("events of", view.event_time),
        ("can be in the hours", f"{view.first} to {view.last or 'no bound: the stream has no event_time.past'}"),
        ("accepted", view.accepted),
        ("sealed, not accepted", ", ".join(view.waiting) or "none"),
        ("not sealed yet", f"from {view.open} on" if view.open is not None else "none"),
        ("the last one ends", view.complete_at),
        ("complete", "yes" if view.complete else "no"),
    ]
    print_table((view.stream, ""), rows)
