"""Print the result or the plan of an import of hours."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from anabranch.cli.render import print_result
from anabranch.lifecycle.importing.run import Imported, ImportPlan


def print_planned(stream: str, plan: ImportPlan, output: str) -> None:
    first = f"would import {plan.rows} rows of {plan.files} files into {len(plan.hours)} hours"
    lines = [f"{stream}: {line}" for line in (first, *_left_out(plan))]
    print_result({"stream": stream, "dry_run": True, **_view(plan)}, lines, output)


def print_imported(stream: str, done: Imported, key: Sequence[str], output: str) -> None:
    """Print the result of an import. `key`: the stream's key, by which rows that repeat another
    were left out."""
    counts = {"good": done.good, "duplicate": done.duplicate, "erased": done.erased}
    view = {
        "stream": stream,
        "imported": done.hours,
        "rows": done.rows,
        **counts,
        **_view(done.plan),
    }
    first = (
        f"imported {done.good} of {done.rows} rows into {len(done.hours)} hours; left out "
        f"{done.duplicate} that repeat another by {', '.join(key)}, and {done.erased} that were "
        "erased"
    )
    print_result(view, [f"{stream}: {line}" for line in (first, *_left_out(done.plan))], output)


def _view(plan: ImportPlan) -> dict[str, Any]:
    left = {"before": plan.before, "of_kafkas_hours": plan.after}
    return {
        "files": plan.files,
        "version": plan.version,
        "hours": dict(sorted(plan.hours.items())),
        "known": list(plan.known),
        "left_out": left,
        "notes": list(plan.notes),
    }


def _left_out(plan: ImportPlan) -> Iterator[str]:
    yield from plan.notes
    if plan.known:
        yield (
            f"{len(plan.known)} hours with rows are imported already: {plan.known[0]} to "
            f"{plan.known[-1]}"
        )
    if plan.before:
        yield f"{plan.before} rows are of earlier hours, which are not imported"
    if plan.after:
        yield f"{plan.after} rows are of hours that have Kafka's records, and are not imported"
