"""Print the files that a merge gives main, by hour."""

from __future__ import annotations

from anabranch.cli.render import print_result
from anabranch.protocol.merge import Merged


def print_merged(stream: str, merged: Merged, dry_run: bool, output: str) -> None:
    overrides = merged.state.overrides
    rows = [
        {"hour": s.hour, "served": s.layer, "added": len(s.add), "removed": len(s.remove), "reason": s.refused}
        for s in merged.swaps
    ]
    lines = []
    for row in rows:
        outcome = row["reason"] or f"served by {row['served']}: {row['added']} files in, {row['removed']} out"
        lines.append(f"{row['hour']} {outcome}")
    lines = lines or ["nothing to merge"]
    for hour, layer in sorted(overrides.items()):
        lines.append(f"{hour} is served by {layer} by choice (`anabranch serve-hour`)")
    view = {"stream": stream, "dry_run": dry_run, "swaps": rows, "overrides": overrides}
    print_result(view, [f"{stream}: {line}" for line in lines], output)
