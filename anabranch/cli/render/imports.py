"""Print what an import of hours does, or would do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from anabranch.common.output import print_json
from anabranch.operations.importing.run import Imported, Plan


def print_planned(stream: str, plan: Plan, output: str) -> None:
    if output == "json":
        print_json({"stream": stream, "dry_run": True, **_view(plan)})
        return
    print(f"{stream}: would import {plan.rows} rows of {plan.files} files into {len(plan.hours)} hours")
    _print_left_out(stream, plan)


def print_imported(stream: str, done: Imported, key: Sequence[str], output: str) -> None:
    """`key`: the stream's key, by which rows that repeat another were left out."""
    if output == "json":
        counts = {"good": done.good, "duplicate": done.duplicate, "erased": done.erased}
        print_json({"stream": stream, "imported": list(done.hours), "rows": done.rows, **counts, **_view(done.plan)})
        return
    print(
        f"{stream}: imported {done.good} of {done.rows} rows into {len(done.hours)} hours; left out {done.duplicate} "
        f"that repeat another by {', '.join(key)}, and {done.erased} that were erased"
    )
    _print_left_out(stream, done.plan)


def _view(plan: Plan) -> dict[str, Any]:
    left = {"before": plan.before, "of_kafkas_hours": plan.after}
    return {
        "files": plan.files,
        "hours": dict(sorted(plan.hours.items())),
        "known": list(plan.known),
        "left_out": left,
        "notes": list(plan.notes),
    }


def _print_left_out(stream: str, plan: Plan) -> None:
    for note in plan.notes:
        print(f"{stream}: {note}")
    if plan.known:
        print(f"{stream}: {len(plan.known)} hours with rows are imported already: {plan.known[0]} to {plan.known[-1]}")
    if plan.before:
        print(f"{stream}: {plan.before} rows are of earlier hours, which are not imported")
    if plan.after:
        print(f"{stream}: {plan.after} rows are of hours that have Kafka's records, and are not imported")
