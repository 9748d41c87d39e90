"""Print changes and deliveries of hours, each as one line of text or one JSON object."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from anabranch.cli.render import print_event
from anabranch.protocol.deliveries import Delivery

if TYPE_CHECKING:
    from serving_layer.changes import HourChange
    from serving_layer.egress import Failed


def print_change(change: HourChange, output: str) -> None:
    """Print a change as one line to standard output, and flush."""
    print_event(change, _words(change), output)


def _words(change: HourChange) -> str:
    replaced = f" instead of {change.replaces}" if change.replaces is not None else ""
    erased = f"  erased by {', '.join(change.erasures)}" if change.erasures else ""
    left = len(change.removed) if change.removed is not None else "?"
    return (
        f"{change.hour}  revision {change.revision}{replaced}  {change.served}  {change.rows} "
        f"rows  +{len(change.added)} -{left} files{erased}  snapshot {change.snapshot}  "
        f"{change.token}"
    )


def print_delivery(one: Delivery | Failed, output: str) -> None:
    """Print a delivery, or the failure of a target, and flush."""
    if isinstance(one, Delivery):
        line: dict[str, Any] = vars(one)
        words = f"{one.target}  {one.hour}  revision {one.revision}  {one.served}  {one.rows} rows"
        words += f"  {one.files} files" if one.files else ""
    else:
        line = {"target": one.target, "failed": str(one.error)}
        words = f"{one.target}  failed: {one.error}"
    print_event(line, words, output)
