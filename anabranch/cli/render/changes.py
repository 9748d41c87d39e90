"""A change as one line of text or one JSON object."""

from __future__ import annotations

from anabranch.cli.render import print_event
from serving_layer.changes import HourChange


def print_change(change: HourChange, output: str) -> None:
    """Print a change as one line to standard output, and flush."""
    print_event(change, _words(change), output)


def _words(change: HourChange) -> str:
    replaced = f" instead of {change.replaces}" if change.replaces is not None else ""
    erased = f"  erased by {', '.join(change.erasures)}" if change.erasures else ""
    left = len(change.removed) if change.removed is not None else "?"
    return (
        f"{change.hour}  revision {change.revision}{replaced}  {change.served}  {change.rows} rows  "
        f"+{len(change.added)} -{left} files{erased}  snapshot {change.snapshot}  {change.token}"
    )
