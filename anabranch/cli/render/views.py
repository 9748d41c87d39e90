"""Print how far views are precomputed."""

from __future__ import annotations

from collections.abc import Sequence

from anabranch.common.output import print_json, print_table
from serving_layer.views.fill import FilledView


def print_views(stream: str, found: Sequence[FilledView], output: str) -> None:
    if output == "json":
        print_json({"stream": stream, "views": found})
        return
    rows = [(v.view, v.table, v.filled, len(v.lacking), ", ".join(v.lacking[:3])) for v in found]
    print_table(("view", "table", "hours filled", "hours missing", "first missing"), rows)
