"""Print the completeness of streams."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from anabranch.cli.render import print_rows
from anabranch.common.errors import AnabranchError
from anabranch.common.output import print_json, print_table
from anabranch.protocol.completeness import EventTimeCompleteness


def print_completeness(view: EventTimeCompleteness, output: str) -> None:
    rows: list[tuple[str, object]] = [
        ("events of", view.event_time),
        (
            "can be in the hours",
            f"{view.first} to {view.last or 'no bound: the stream has no event_time.past'}",
        ),
        ("accepted", view.accepted),
        ("sealed, not accepted", ", ".join(view.waiting) or "none"),
        ("not sealed yet", f"from {view.open} on" if view.open is not None else "none"),
        ("the last one ends", view.complete_at),
        ("complete", "yes" if view.complete else "no"),
    ]
    print_rows(view, (view.stream, ""), rows, output)


def print_complete_through(
    common: str | None,
    found: Mapping[str, str | AnabranchError | None],
    tagged: Sequence[str] | None,
    is_known: bool,
    output: str,
) -> None:
    """Print the last complete hour of each stream, and of all of them (`common`, known only if
    every stream answered). `tagged`: the newly tagged hours, None without --tag."""
    hours = {name: hour for name, hour in found.items() if not isinstance(hour, AnabranchError)}
    if output == "json":
        errors = {
            name: str(error) for name, error in found.items() if isinstance(error, AnabranchError)
        }
        view = {"complete_through": common, "streams": hours, "errors": errors}
        print_json(view | ({"tagged": tagged} if tagged is not None else {}))
        return
    print_table(
        ("stream", "complete through"), [(name, hour or "none") for name, hour in hours.items()]
    )
    print(f"complete through: {common or ('none' if is_known else 'not known')}")
    if tagged is not None:
        print(f"tagged: {', '.join(tagged) or 'no new hour'}")
