"""Print the state of streams, hours and views."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from anabranch.cli.render import print_rows
from anabranch.common.errors import AnabranchError
from anabranch.common.output import print_json, print_table
from anabranch.operations.reports.status import (
    HourSummary,
    StreamStatus,
    cost_words,
    overdue_words,
    unexplained_words,
)
from anabranch.protocol.counts import COUNTS
from anabranch.protocol.holds import span_words

if TYPE_CHECKING:
    from anabranch.operations.reports.streams import StreamSummary
    from serving_layer.views.fill import FilledView


def print_hours(views: Sequence[HourSummary], output: str) -> None:
    columns = (
        "hour",
        "state",
        "revision",
        "served",
        *COUNTS,
        "speed rows",
        "diff",
        "quality",
        "reason",
    )
    print_rows(views, columns, [_hour_cells(view) for view in views], output)


def _hour_cells(view: HourSummary) -> list[object]:
    diff = view.diff
    differing = f"{diff.missing}/{diff.extra}/{diff.changed}" if diff is not None else ""
    passed = {True: "passed", False: "failed", None: ""}[view.quality.passed]
    cells: list[object] = [
        view.hour,
        view.state,
        view.revision or "",
        view.served,
        *view.counts.cells,
    ]
    return [*cells, view.speed_rows, differing, passed, view.reason]


def _why(stream: str, hour: str) -> str:
    return f"`anabranch explain {stream} {hour}` explains it"


def print_status(view: StreamStatus, output: str) -> None:
    if output == "json":
        print_json(view)
        return
    rows: list[tuple[str, object]] = [
        ("topic", f"{view.topic} ({view.topic_id or 'not seen yet'})"),
        ("position", ", ".join(f"{p}: {o}" for p, o in view.position.items())),
        ("position since", view.position_since.isoformat()),
        ("lag", f"{view.lag.offsets} offsets"),
        *(
            (f"last publish to {b}", "never" if at is None else at.isoformat())
            for b, at in view.last_publish.items()
        ),
        ("open hour", view.open_hour),
        ("complete through", view.complete_through or "none"),
        ("ended, to be sealed", ", ".join(view.to_seal) or "none"),
        ("sealed, not accepted", ", ".join(view.backlog) or "none"),
        ("refused", ", ".join(view.refused) or "none"),
        ("refused restatements", ", ".join(view.refused_restatements) or "none"),
        ("hours by batch", sum(1 for layer in view.hours.values() if layer == "batch")),
        ("dead letters", view.dead_letters),
        (
            "lost to retention",
            ", ".join(f"{n} offsets in {h}" for h, n in view.lost.items()) or "none",
        ),
        (
            "unexplained differences",
            f"in {len(view.unexplained)} hours" if view.unexplained else "none",
        ),
        ("expired hours", view.expired_hours),
        (
            "cost of the last day",
            cost_words(view.cost) if view.cost is not None else "not recorded",
        ),
    ]
    print_table((view.stream, ""), rows)
    if view.late:
        print(f"the speed layer is late: {view.late}")
    for words in span_words(view.holds):
        print(f"hours {words}")
    if view.overdue is not None:
        print(overdue_words(view.overdue))
    for hour in view.refused_restatements:
        print(
            f"hour {hour}: its restatement was refused, the previous revision is served; "
            f"{_why(view.stream, hour)}"
        )
    for hour, left in view.unexplained.items():
        print(
            f"hour {hour}: the layers differ and nothing explains it: {unexplained_words(left)}; "
            f"look at `anabranch diff {view.stream} {hour}`"
        )


def print_statuses(views: Mapping[str, StreamStatus | AnabranchError], output: str) -> None:
    """Print the status of many streams: a line each, or a list of objects. The object of a stream
    that did not answer has `stream` and `error`."""
    if output == "json":
        print_json([_or_error(name, view) for name, view in views.items()])
        return
    columns = (
        "stream",
        "lag",
        "waiting since",
        "complete through",
        "to seal",
        "sealed",
        "refused",
        "unexplained",
    )
    rows = [
        _status_cells(name, view) for name, view in views.items() if isinstance(view, StreamStatus)
    ]
    print_table(columns, rows)
    for name, view in views.items():
        if isinstance(view, StreamStatus) and view.late:
            print(f"{name}: the speed layer is late: {view.late}")


def _or_error(name: str, view: object) -> object:
    return {"stream": name, "error": str(view)} if isinstance(view, AnabranchError) else view


def _status_cells(name: str, view: StreamStatus) -> list[object]:
    waiting = (
        view.waiting_since.isoformat(timespec="seconds") if view.waiting_since is not None else ""
    )
    hours = (len(view.to_seal), len(view.backlog), len(view.refused), len(view.unexplained))
    return [name, view.lag.offsets, waiting, view.complete_through or "none", *hours]


def print_hours_of(
    views: Mapping[str, Sequence[HourSummary] | AnabranchError], output: str
) -> None:
    """Print the hours of many streams: a table each, or a list of objects with `stream`, and
    `hours` or `error`."""
    if output == "json":
        found = {
            n: v if isinstance(v, AnabranchError) else {"stream": n, "hours": v}
            for n, v in views.items()
        }
        print_json([_or_error(name, view) for name, view in found.items()])
        return
    for name, view in views.items():
        if not isinstance(view, AnabranchError):
            print(f"{name}:")
            print_hours(view, output)


def print_streams(views: Sequence[StreamSummary], output: str) -> None:
    """Print the streams: a table, or a list of objects."""
    rows = [(v.stream, v.family, v.group, v.topic, v.table, v.state, v.error) for v in views]
    print_rows(
        views, ("stream", "family", "group", "topic", "table", "state", "error"), rows, output
    )


def print_views(stream: str, found: Sequence[FilledView], output: str) -> None:
    rows = [(v.view, v.table, v.filled, len(v.lacking), ", ".join(v.lacking[:3])) for v in found]
    columns = ("view", "table", "hours filled", "hours missing", "first missing")
    print_rows({"stream": stream, "views": found}, columns, rows, output)
