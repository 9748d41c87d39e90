"""Commands that report on streams; they only read."""

from __future__ import annotations

import sys
from contextlib import closing
from typing import TYPE_CHECKING

import click

from anabranch.cli import many
from anabranch.cli.options import (
    DURATION,
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


_CATALOG_SECONDS = 5.0


@click.command("streams")
@selection
@options
def list_streams(chosen: StreamSelection, conf: str | None, output: str) -> None:
    """List streams: family, group, topic, table and state.

    Without STREAM and --group: all streams, including those of families. `ready`: the stream has
    its table; `new`: it needs `anabranch apply`; `gone`: Kafka no longer has the topic of a
    family's stream, whose tables stay; `broken`: its file is wrong; `unknown`: the catalog does not
    answer. The exit code is 1 when one is broken or unknown, or when Kafka does not list the
    topics.
    """
    from anabranch import config
    from anabranch.cli.render.status import print_streams
    from anabranch.common.deadline import TimedRead
    from anabranch.common.errors import AnabranchError
    from anabranch.common.logs import configure_logging
    from anabranch.family_streams import FamilyStreams
    from anabranch.iceberg.lake import Lake
    from anabranch.operations.reports import streams as report

    configure_logging()
    chosen = chosen.or_every()
    environment = config.load_environment(conf)
    families = FamilyStreams(environment, conf)
    selected = families.select(chosen.streams, chosen.group, chosen.every)
    lake, namespaces = Lake(environment), report.namespaces_of(selected)
    tables = TimedRead(
        "catalog", lambda: set().union(*map(lake.table_names, namespaces)), _CATALOG_SECONDS
    ).facts()
    groups = {name: config.group_in_file(name, conf) for name in config.broken(selected)}
    known = str(tables) if isinstance(tables, AnabranchError) else tables
    views = report.summarize(
        selected, groups, config.shared_tables(conf), known, families.read_members
    )
    print_streams(views, output)
    for error in families.unanswered:
        click.echo(f"anabranch: {error}", err=True)
    if families.unanswered or any(view.state in ("broken", "unknown") for view in views):
        sys.exit(1)


@click.command()
@selection
@click.option(
    "--late-after", type=DURATION, help="Longest time without progress, such as '10 minutes'."
)
@watch_options
@options
def status(
    chosen: StreamSelection,
    late_after: timedelta | None,
    watch: bool,
    interval: timedelta,
    conf: str | None,
    output: str,
) -> None:
    """Show position, lag, backlog and the serving layers.

    The exit code is 1 when the layers differ in an hour without an explanation; with --late-after
    also when a record has waited and the position has not moved for that long. Several streams are
    read concurrently, with a line for each; one that does not answer within 6 seconds is named, and
    the exit code is 75.
    """
    from anabranch.cli.render.status import print_status, print_statuses
    from anabranch.operations.reports import status as views

    if chosen.one() is None:

        def show(found: dict[str, views.StreamStatus | AnabranchError]) -> bool:
            print_statuses(found, output)
            return any(
                isinstance(v, views.StreamStatus) and (v.unexplained or v.late)
                for v in found.values()
            )

        many.watch_all(
            chosen,
            conf,
            watch,
            interval,
            lambda job, note: views.status(job, late_after, note),
            show,
        )
    job = open_stream(chosen.streams[0], conf)
    with closing(job.kafka):
        view = watched(
            watch,
            interval,
            lambda: views.status(job, late_after),
            lambda view: print_status(view, output),
        )
    if view is not None and (view.unexplained or view.late):
        sys.exit(1)


@click.command()
@selection
@click.option(
    "--limit",
    metavar="SECONDS",
    type=click.FloatRange(min=1),
    help="Longest time for one check; the others continue.  [default: 6.5 for services, 40 for "
    "other checks]",
)
@options
def doctor(chosen: StreamSelection, limit: float | None, conf: str | None, output: str) -> None:
    """Examine the installation; name what to run or set.

    Checks Java, jars, Kafka, S3, catalog, tables and streams; each finding has its remedy. Run it
    first, and when something fails. Without STREAM and --group: all streams. It only reads, except
    for a small test object under the warehouse, which it deletes. Ends with `ready` and the next
    command, or with exit code 1 and the first remedy when there is an error; warnings leave the
    exit code 0.
    """
    from anabranch import config
    from anabranch.cli.render.doctor import print_report
    from anabranch.operations.doctor import examine

    if not chosen.streams:
        config.require_different_tables(conf)
    selected = many.select(chosen.or_every(), conf)
    found = config.loaded(selected.selected)
    if not found:
        for error in config.broken(selected.selected).values():
            raise error
    report = examine(selected.environment, found, config.families_of(found, conf), limit)
    print_report(report, output)
    code = many.report_errors(selected, selected.selected)
    if code or not report.ready:
        sys.exit(code or 1)


@click.command()
@stream_argument
@options
def drift(stream: str, conf: str | None, output: str) -> None:
    """List the records' fields that the schema lacks.

    The batch layer counts them by name with each hour (`unknown: count` in the stream's file).
    Prints the number of records with each field, samples, a guessed type, the stream's new
    `schema:`, and the commands to run: `apply`, and the restatement of each hour that Kafka still
    has.
    """
    from anabranch.cli.render.drift import print_drift
    from anabranch.operations.reports import drift

    job = open_stream(stream, conf)
    with closing(job.kafka):
        view = drift.drift(job)
    print_drift(view, output)
