"""Print the files that a merge gives main, by hour."""

from __future__ import annotations

from anabranch.common.output import print_json
from anabranch.protocol.merge import Merged


def print_merged(stream: str, merged: Merged, dry_run: bool, output: str) -> None:
    overrides = merged.state.overrides
    rows = [
        {"hour": s.hour, "served": s.layer, "added": len(s.add), "removed": len(s.remove), "reason": s.refused}
        for s in merged.swaps
    ]
    if output == "json":
        print_json({"stream": stream, "dry_run": dry_run, "swaps": rows, "overrides": overrides})
        return
    for row in rows:
        outcome = row["reason"] or f"served by {row['served']}: {row['added']} files in, {row['removed']} out"
        print(f"{stream}: {row['hour']} {outcome}")
    if not rows:
        print(f"{stream}: nothing to merge")
    for hour, layer in sorted(overrides.items()):
        print(f"{stream}: {hour} is served by {layer} by choice (`anabranch serve-hour`)")
