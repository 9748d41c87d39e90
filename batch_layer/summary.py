"""Print the results of a batch job's run, by stream and hour.

Not in `anabranch.cli.render`: spark-submit runs the job without the command line.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from anabranch.common.output import print_json, print_table
from batch_layer.many_streams import StreamOutcome
from batch_layer.rebuild import Result

_COUNTS = ("good", "dead", "duplicate", "gap")
_COLUMNS = ("state", "revision", *_COUNTS, "reason")


def exit_code(results: Sequence[Result], hours: Collection[str] | None) -> int:
    """Return 1 if an hour was refused, else 0. Hours restated in addition to the named ones do not
    count. Pure."""
    return 1 if any(r.refused for r in results if hours is None or r.hour in hours) else 0


def exit_code_of(outcome: StreamOutcome, hours: Collection[str] | None) -> int:
    return (
        outcome.error.exit_code if outcome.error is not None else exit_code(outcome.results, hours)
    )


def print_outcome(outcome: StreamOutcome, output: str, nothing: str) -> None:
    """Print the hours of a job of one stream. `nothing`: the end of the line "no hour ..." if there
    are none."""
    if output == "json":
        print_json(_view(outcome))
    elif outcome.results:
        print_table(("hour", *_COLUMNS), [(r.hour, *_cells(r)) for r in outcome.results])
    else:
        print(f"{outcome.stream}: no hour {nothing}")


def print_outcomes(
    outcomes: Sequence[StreamOutcome], hours: Collection[str] | None, output: str, nothing: str
) -> None:
    ordered = sorted(outcomes, key=lambda outcome: outcome.stream)
    if output == "json":
        views = [
            _view(o)
            | {
                "exit_code": exit_code_of(o, hours),
                "error": str(o.error) if o.error is not None else None,
            }
            for o in ordered
        ]
        print_json({"streams": views})
        return
    rows: list[tuple[object, ...]] = []
    for outcome in ordered:
        rows += [(outcome.stream, r.hour, *_cells(r)) for r in outcome.results]
        if outcome.error is not None:
            rows.append(
                (outcome.stream, "", "failed", *("" for _ in _COLUMNS[1:-1]), str(outcome.error))
            )
        elif not outcome.results:
            rows.append((outcome.stream, "", f"no hour {nothing}", *("" for _ in _COLUMNS[1:])))
    print_table(("stream", "hour", *_COLUMNS), rows)


def _view(outcome: StreamOutcome) -> dict[str, Any]:
    rows = [
        {"hour": r.hour, "state": r.decision, "revision": r.revision, "reason": r.reason}
        | r.account.as_dict()
        | ({"served": r.served} if r.served is not None else {})
        for r in outcome.results
    ]
    return {"stream": outcome.stream, "hours": rows}


def _cells(result: Result) -> tuple[object, ...]:
    return (
        result.decision,
        result.revision,
        *(getattr(result.account, name) for name in _COUNTS),
        result.reason,
    )
