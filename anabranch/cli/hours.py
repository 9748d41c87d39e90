"""Commands that report on the hours of a stream. All but `dead-letters --replay` and
`complete-through --tag` only read."""

from __future__ import annotations

import sys
from functools import partial
from typing import TYPE_CHECKING

import click

from anabranch.cli import many
from anabranch.cli.options import (
    HOUR,
    HOURS,
    Failures,
    StreamSelection,
    open_stream,
    options,
    selection,
    stream_argument,
)
from anabranch.cli.watching import watch_options, watched
from anabranch.common.errors import AnabranchError

if TYPE_CHECKING:
    from datetime import timedelta

    from anabranch.common.deadline import Note
    from anabranch.job import Job

hour_argument = click.argument("hour", type=HOUR)
hours_option = click.option(
    "--hours", metavar="A..B", type=HOURS, help="From hour A to hour B, or one hour."
)


@click.command()
@selection
@click.option(
    "--history",
    metavar="[HOUR]",
    is_flag=False,
    flag_value="",
    help="Decisions on one hour, or all: changes, reasons, and how to read replaced rows.",
)
@watch_options
@options
def hours(
    chosen: StreamSelection,
    history: str | None,
    watch: bool,
    interval: timedelta,
    conf: str | None,
    output: str,
) -> None:
    """List each hour: serving layer, counts and checks.

    Lists hours up to the open one, by the newest row of the ledger. Several streams are read
    concurrently; one that does not answer within 6 seconds is named, and the exit code is 75.
    """
    from anabranch.cli.render.history import print_history
    from anabranch.cli.render.status import print_hours, print_hours_of
    from anabranch.offsets.hours import start_of
    from anabranch.operations.reports import status as views
    from anabranch.protocol.decisions import decisions

    if chosen.one() is None:
        if history is not None:
            raise click.UsageError("--history: expected one STREAM")

        def show_hours(found: dict[str, list[views.HourSummary] | AnabranchError]) -> bool:
            print_hours_of(found, output)
            return False

        many.watch_all(
            chosen, conf, watch, interval, lambda job, note: views.hours(job, note=note), show_hours
        )
    if history:
        start_of(history)
    [stream] = chosen.streams
    job = open_stream(stream, conf)
    if history is None:
        watched(watch, interval, lambda: views.hours(job), lambda view: print_hours(view, output))
    else:
        hour = history or None
        show_history = partial(print_history, stream, hour, output=output)
        watched(watch, interval, lambda: decisions(job.lake, job.stream, hour), show_history)


@click.command()
@stream_argument
@click.option("--hour", type=HOUR, help="Only this hour.")
@click.option(
    "--acts",
    is_flag=True,
    help="Operators' acts: who, when, on which host, why, and what followed.",
)
@options
def history(stream: str, hour: str | None, acts: bool, conf: str | None, output: str) -> None:
    """List decisions on hours, or operators' acts.

    Decisions are those of `anabranch hours --history`. An act is a restatement, an acceptance
    despite the rules, a replay, an adoption, a chosen layer, a redelivery, a hold, an erasure, or
    an import. The operating system reports user and host.
    """
    from anabranch.cli.render.history import print_acts, print_history
    from anabranch.operations.reports import acts as act_reports
    from anabranch.protocol.decisions import decisions

    job = open_stream(stream, conf)
    if acts:
        print_acts(stream, act_reports.acts(job, hour), output)
    else:
        print_history(stream, hour, decisions(job.lake, job.stream, hour), output)


@click.command()
@stream_argument
@hour_argument
@options
def explain(stream: str, hour: str, conf: str | None, output: str) -> None:
    """Explain one hour, and what to run next.

    Prints its cut, layers, account, checks and serving layer in sentences, for any hour. Reads only
    the ledger and the snapshots.
    """
    from datetime import UTC, datetime

    from anabranch.cli.render.explanation import print_explanation
    from anabranch.operations.reports import explain

    print_explanation(explain.explain(open_stream(stream, conf), hour, datetime.now(UTC)), output)


@click.command("dead-letters")
@stream_argument
@hours_option
@click.option(
    "--samples",
    type=click.IntRange(0),
    default=3,
    show_default=True,
    help="Samples for each reason.",
)
@click.option(
    "--replay", is_flag=True, help="Rebuild accepted hours with dead letters that decode now."
)
@click.option("--why", metavar="TEXT", help="Reason for --replay, for the ledger.")
@options
def dead_letters(
    stream: str,
    hours: tuple[str, str] | None,
    samples: int,
    replay: bool,
    why: str | None,
    conf: str | None,
    output: str,
) -> None:
    """List the records that could not become rows.

    Prints the number for each reason, and samples, decoded for display. Use --replay after the
    schema or the bounds were widened (`anabranch apply`): it rebuilds the accepted hours with dead
    letters that decode now, from Kafka, else from the table.
    """
    from anabranch.cli.render.dead_letters import print_letters
    from anabranch.operations.reports import dead_letters

    if why and not replay:
        raise click.UsageError("--why: expected --replay with it, found none")
    if replay:
        from anabranch.spark.submit import submit_streams

        only = ["--hour", "..".join(hours)] if hours is not None else []
        reason = [f"--why={why}"] if why else []
        submit_streams("batch_layer", [stream], None, conf, output, ["--replay", *only, *reason])

    print_letters(dead_letters.letters(open_stream(stream, conf), hours, samples), output)


@click.command()
@stream_argument
@hour_argument
@click.option(
    "--limit",
    type=click.IntRange(0),
    default=100,
    show_default=True,
    help="Number of duplicates to list.",
)
@options
def duplicates(stream: str, hour: str, limit: int, conf: str | None, output: str) -> None:
    """List the duplicates removed from an accepted hour.

    Prints each duplicate with the row that it repeats, and how many of the counted duplicates were
    found. The search reads the speed layer's rows, which keep duplicates.
    """
    from anabranch.cli.render.difference import print_duplicates
    from anabranch.operations.reports import diff

    print_duplicates(diff.duplicates(open_stream(stream, conf), hour, limit), output)


@click.command()
@stream_argument
@hour_argument
@click.option(
    "--samples",
    type=click.IntRange(0),
    default=5,
    show_default=True,
    help="Rows to show for each kind.",
)
@options
def diff(stream: str, hour: str, samples: int, conf: str | None, output: str) -> None:
    """Compare the layers' rows of an accepted hour.

    Prints counts, and rows side by side. The exit code is 1 when a difference has no explanation.
    """
    from anabranch.cli.render.difference import print_difference
    from anabranch.operations.reports import diff

    view = diff.difference(open_stream(stream, conf), hour, samples)
    print_difference(view, output)
    if view.unexplained:
        sys.exit(1)


@click.command()
@stream_argument
@click.option(
    "--event-time",
    required=True,
    metavar="DAY|HOUR",
    help="Such as 2026-11-20, or 2026-11-20T13 (UTC).",
)
@options
def complete(stream: str, event_time: str, conf: str | None, output: str) -> None:
    """Check whether every event of a day is there.

    Prints the ingest hours that can contain events of the day, by the bounds of `event_time:` in
    the stream's file, and those that are not accepted yet. The exit code is 1 while the day is not
    complete.
    """
    from anabranch.cli.render.completeness import print_completeness
    from anabranch.protocol import completeness
    from anabranch.protocol.state import load_state

    job = open_stream(stream, conf)
    view = completeness.completeness(job.stream, load_state(job.lake, job.stream.table), event_time)
    print_completeness(view, output)
    if not view.complete:
        sys.exit(1)


@click.command("complete-through")
@selection
@click.option(
    "--tag", is_flag=True, help="Tag the group's complete hours on each table; needs --group."
)
@options
def complete_through(chosen: StreamSelection, tag: bool, conf: str | None, output: str) -> None:
    """Show the last hour that several streams have complete.

    An hour is complete in a stream when it and all earlier hours are accepted. Hours are cut by
    Kafka's time, so the same hour is a consistent cut through all topics. The exit code is 1 while
    a stream has no complete hour, and 75 when a stream does not answer within 6 seconds; then the
    hour is not known.

    --tag tags each table with `group-GROUP-HOUR` for each hour that became complete for the group,
    for `anabranch.open` and other engines. Run it after each hour's batch jobs; existing tags stay.
    `maintain.group_hours` of the stream's file sets how long tags are kept.
    """
    from anabranch.cli.render.completeness import print_complete_through
    from anabranch.common.deadline import LAKE
    from anabranch.protocol import group_hours, watermarks
    from anabranch.protocol.state import load_state

    members: dict[str, group_hours.GroupedStream] = {}

    def read(job: Job, note: Note) -> str | None:
        note(LAKE)
        state = load_state(job.lake, job.stream.table)
        members[job.stream.name] = group_hours.GroupedStream(job.lake, job.stream, state)
        return watermarks.complete_through(state)

    chosen.one()
    group = chosen.group
    if tag and group is None:
        raise click.UsageError("--tag: expected --group NAME, whose hours are tagged")
    selected = many.select(chosen, conf)
    found = many.ask(selected, read)
    hours = [hour for hour in found.values() if not isinstance(hour, AnabranchError)]
    is_whole = len(hours) == len(found) and not selected.unanswered
    common = watermarks.complete_through_all(hours) if is_whole else None
    tagged = (
        group_hours.tag_hours(group, common, members.values()) if tag and group and common else []
    )
    print_complete_through(common, found, tagged if tag else None, is_whole, output)
    code = many.report_errors(selected, found)
    if code or common is None:
        sys.exit(code or 1)


@click.command()
@selection
@hours_option
@click.option(
    "--no-kafka", is_flag=True, help="Skip Kafka, which takes a minute for a million records."
)
@options
def audit(
    chosen: StreamSelection,
    hours: tuple[str, str] | None,
    no_kafka: bool,
    conf: str | None,
    output: str,
) -> None:
    """Count accepted hours again, in files and in Kafka.

    Compares the counts with the ledger, and with Kafka as far as it still has the records. Without
    --hours: all hours. Prints one sentence for each disagreement of ledger, files and Kafka; the
    exit code is then 1. Audits eight streams at a time. An error of one does not stop the others; a
    stream that does not answer within 6 seconds is skipped and named.
    """
    from anabranch.cli.render.audit import print_audit
    from anabranch.common.deadline import KAFKA
    from anabranch.common.output import print_json
    from anabranch.operations.audit import audit as run_audit

    is_many = chosen.one() is None
    selected = many.select(chosen, conf)

    def ready(job: Job, note: Note) -> None:
        many.load_table(job, note)
        if not no_kafka:
            note(KAFKA)
            job.kafka.describe(job.stream.topic)

    failures, reports = Failures(), []
    for name, result in many.run(
        selected, ready, lambda job: run_audit(job, hours, with_kafka=not no_kafka)
    ):
        with failures.catching(name):
            reports.append(result())
            if output == "text" or not is_many:
                print_audit(reports[-1], output)
    if output == "json" and is_many:
        print_json([*(report.as_dict() for report in reports), *failures.views()])
    failures.end()
    if not all(report.agrees for report in reports):
        sys.exit(1)
