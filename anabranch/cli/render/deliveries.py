"""Print deliveries of egress, one line each."""

from __future__ import annotations

from typing import Any

from anabranch.cli.render import print_event
from anabranch.protocol.deliveries import Delivery
from serving_layer.egress import Failed


def print_delivery(one: Delivery | Failed, output: str) -> None:
    """Print a delivery, or the failure of a target, as soon as it is known."""
    if isinstance(one, Delivery):
        line: dict[str, Any] = vars(one)
        words = f"{one.target}  {one.hour}  revision {one.revision}  {one.served}  {one.rows} rows"
        words += f"  {one.files} files" if one.files else ""
    else:
        line = {"target": one.target, "failed": str(one.error)}
        words = f"{one.target}  failed: {one.error}"
    print_event(line, words, output)
