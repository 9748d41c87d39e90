"""Texts of reports on streams: state, views, and the findings of `anabranch doctor`."""

from __future__ import annotations

import json
import textwrap
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from anabranch.cli.report import Table, Text
from anabranch.common.output import plain
from anabranch.protocol.registers import span_words
from anabranch.protocol.shares import percent

if TYPE_CHECKING:
    from anabranch.operations.doctor import Report
    from anabranch.operations.doctor.finding import Finding
    from anabranch.operations.reports.status import StreamStatus
    from anabranch.operations.reports.streams import ConsumerPosition, StreamSummary

_WIDTH = 80  # columns of a finding


def position_text(view: ConsumerPosition, form: str) -> Text:
    """Return a position in the form of a tool: `spark`, `kafka` or `json`."""
    if form == "kafka":
        yield from view.as_csv()
    else:
        shown = view.as_spark() if form == "spark" else plain(view)
        yield json.dumps(shown)


def status_text(view: StreamStatus) -> Text:
    from anabranch.operations.reports.status import overdue_words, unexplained_words

    rows: list[tuple[str, object]] = [
        ("topic", f"{view.topic} ({view.topic_id or 'not seen yet'})"),
        ("position", ", ".join(f"{p}: {o}" for p, o in view.position.items())),
        ("position since", view.position_since.isoformat()),
        ("lag", "no such topic" if view.topic_missing else f"{view.lag.offsets} offsets"),
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
        ("newest hour's dead letters", _dead_words(view)),
        (
            "lost to retention",
            ", ".join(f"{n} offsets in {h}" for h, n in view.lost.items()) or "none",
        ),
        (
            "unexplained differences",
            f"in {len(view.unexplained)} hours" if view.unexplained else "none",
        ),
        ("expired hours", view.expired_hours),
    ]
    yield Table((view.stream, ""), rows)
    if view.views:
        yield Table(
            ("view", "table", "hours filled", "hours missing", "first missing"),
            [
                (v.view, v.table, v.filled, len(v.lacking), ", ".join(v.lacking[:3]))
                for v in view.views
            ],
        )
    if view.late:
        yield f"the speed layer is late: {view.late}"
    for hour in view.too_many_dead:
        yield (
            f"hour {hour}: {view.dead_shares[hour].words} are dead letters, more than "
            f"quality.max_dead; `anabranch dead-letters {view.stream} --hours {hour}` lists them"
        )
    for hour, count in view.conflicts.items():
        yield (
            f"hour {hour}: {count:,} duplicates have other content than the rows that they repeat; "
            f"`anabranch explain {view.stream} {hour} --rows` lists duplicates"
        )
    for words in span_words(view.holds):
        yield f"hours {words}"
    if view.overdue is not None:
        yield overdue_words(view.overdue)
    for hour in view.refused_restatements:
        yield (
            f"hour {hour}: its restatement was refused, the previous revision is served; "
            f"`anabranch explain {view.stream} {hour}` explains it"
        )
    for hour, left in view.unexplained.items():
        yield (
            f"hour {hour}: the layers differ and nothing explains it: {unexplained_words(left)}; "
            f"look at `anabranch explain {view.stream} {hour} --rows`"
        )


def _dead_words(view: StreamStatus) -> str:
    """Return the dead letters of the newest hour with records that is not accepted."""
    share = view.running_dead_share
    return f"{max(view.dead_shares)}: {share.words}" if share is not None else "no records"


def statuses_text(views: Mapping[str, StreamStatus]) -> Text:
    """Return the state of many streams, a line each."""
    columns = (
        "stream",
        "lag",
        "waiting since",
        "complete through",
        "to seal",
        "sealed",
        "refused",
        "dead share",
        "unexplained",
    )
    yield Table(columns, [_status_cells(name, view) for name, view in views.items()])
    for name, view in views.items():
        if view.late:
            yield f"{name}: the speed layer is late: {view.late}"


def _status_cells(name: str, view: StreamStatus) -> list[object]:
    waiting = (
        view.waiting_since.isoformat(timespec="seconds") if view.waiting_since is not None else ""
    )
    hours, share = (
        [len(view.to_seal), len(view.backlog), len(view.refused)],
        view.running_dead_share,
    )
    dead = percent(share.share) if share is not None else ""
    through = view.complete_through or "none"
    lag = "no such topic" if view.topic_missing else view.lag.offsets
    return [name, lag, waiting, through, *hours, dead, len(view.unexplained)]


def streams_text(views: Sequence[StreamSummary]) -> Text:
    """Return the streams as their files declare them."""
    yield Table(
        ("stream", "family", "group", "topic", "table", "state", "error"),
        [(v.stream, v.family, v.group, v.topic, v.table, v.state, v.error) for v in views],
    )


def doctor_text(report: Report) -> Text:
    """Return what was examined, and the findings in 80 columns, the most severe first."""
    from anabranch.operations.doctor.finding import Severity

    yield Table(
        ("examined", "found", "took"),
        [(one.name, _counted(one.findings), f"{one.seconds:.1f} s") for one in report.examined],
    )
    for severity in Severity:
        for finding in (f for f in report.findings if f.severity is severity):
            yield from _finding(finding)
    yield f"\nready; next: {report.next}" if report.ready else f"\nnot ready; first: {report.next}"


def _counted(findings: Sequence[Finding]) -> str:
    from anabranch.operations.doctor.finding import Severity

    counts = Counter(finding.severity for finding in findings)
    return ", ".join(f"{counts[s]} {s}" for s in Severity if counts[s]) or "in order"


def _finding(finding: Finding) -> Text:
    """Return the lines of a finding. The remedy is one line, so that it can be copied."""
    yield f"\n{finding.severity} {finding.check}: {finding.subject}"
    for word, said in (("expected", finding.expected), ("found", finding.found)):
        yield from textwrap.wrap(
            f"{word:<8} {said}",
            _WIDTH,
            initial_indent="  ",
            subsequent_indent=" " * 11,
            break_on_hyphens=False,
            break_long_words=False,
        )
    yield f"  {'remedy':<8} {finding.remedy}"
