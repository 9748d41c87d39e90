"""Commands that report on a stream, an hour or its tables. All but `dead-letters --replay` only
read."""

from __future__ import annotations

import sys
from contextlib import closing
from functools import partial
from typing import TYPE_CHECKING, Literal, NoReturn, TypeVar

import click

from anabranch.cli import many
from anabranch.cli.options import (
    DURATION,
    HOUR,
    HOURS,
    Failures,
    StreamSelection,
    conf_option,
    open_stream,
    options,
    selection,
    stream_argument,
)
from anabranch.cli.watching import watch_options, watched
from anabranch.common.errors import AnabranchError

if TYPE_CHECKING:
    from collections.abc import Callable
    from datetime import timedelta

    from anabranch.common.deadline import Note
    from anabranch.job import Job


T = TypeVar("T")

_SHOWN_ROWS = 200
_CATALOG_SECONDS = 5.0
hour_argument = click.argument("hour", type=HOUR)
hours_option = click.option(
    "--hours", metavar="A..B", type=HOURS, help="From hour A to hour B, or one hour."
)


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
    exit code is then 1. Eight streams at a time; an error of one does not stop the others, and one
    that does not answer within 6 seconds is left out by name.
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
        with failures.of(name):
            reports.append(result())
            if output == "text" or not is_many:
                print_audit(reports[-1], output)
    if output == "json" and is_many:
        print_json([*(report.as_dict() for report in reports), *failures.views()])
    failures.end()
    if not all(report.agrees for report in reports):
        sys.exit(1)


@click.command()
@stream_argument
@click.option(
    "--since", metavar="HOUR|SNAPSHOT|TOKEN", help="Where to continue; default: from the beginning."
)
@click.option("--follow", is_flag=True, help="Keep waiting for changes until stopped.")
@click.option(
    "--every", type=DURATION, default="5 seconds", show_default=True, help="Interval of --follow."
)
@options
def changes(
    stream: str, since: str | None, follow: bool, every: timedelta, conf: str | None, output: str
) -> None:
    """List completed, restated and erased hours in order.

    For consumers that follow the table. Prints one line for each change (one object with --output
    json): hour, kind, revision, layer, snapshot, rows, added and removed files, erasures, and a
    token to continue from. SINCE is such a token; or an hour to start from; or a snapshot of main,
    by id or tag, that the consumer has copied. An hour's rows replace all rows that the consumer
    has of it.
    """
    from contextlib import suppress

    from anabranch.cli.render.changes import print_change
    from serving_layer import changes as feed

    job = open_stream(stream, conf)
    token = feed.start_from(job, since)
    # A follower ends by an interrupt.
    with suppress(KeyboardInterrupt):
        for change in feed.follow(job, token, every) if follow else feed.poll(job, token):
            print_change(change, output)


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

    Prints the ingest hours that can contain events of it, and those that are not accepted yet, by
    the bounds of `event_time:` in the stream's file. The exit code is 1 while the day is not
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
    for `anabranch.open` and other engines. Run it after each hour's batch jobs; a tag that is there
    stays. `maintain.group_hours` of the stream's file is how long tags are kept.
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

    Prints each with the row that it repeats. Found in the speed layer's rows, which keep
    duplicates; says how many of the counted duplicates could be found.
    """
    from anabranch.cli.render.difference import print_duplicates
    from anabranch.operations.reports import diff

    print_duplicates(diff.duplicates(open_stream(stream, conf), hour, limit), output)


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

    Prints the number for each reason, and samples, decoded for display. With --replay, after the
    schema or the bounds were widened (`anabranch apply`), rebuilds the accepted hours with dead
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
    report = examine(selected.environment, found, limit)
    print_report(report, output)
    code = many.report_errors(selected, selected.selected)
    if code or not report.ready:
        sys.exit(code or 1)


@click.command()
@selection
@click.option(
    "--listen", metavar="PORT", type=click.IntRange(1, 65535), help="Serve /metrics at this port."
)
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen at.")
@conf_option
def metrics(chosen: StreamSelection, listen: int | None, host: str, conf: str | None) -> None:
    """Print or serve metrics for Prometheus.

    Without STREAM and --group: all streams. Follows stream files that are added, changed or
    removed, and topics of families. A stream that does not answer within 6 seconds has
    `anabranch_up` 0.
    """
    import threading

    from prometheus_client import CollectorRegistry, generate_latest, start_http_server

    from anabranch.common.errors import ConfigurationError
    from anabranch.common.logs import configure_logging
    from anabranch.job import StreamFolder
    from anabranch.operations.reports.metrics import Streams

    configure_logging()
    if chosen != StreamSelection((), None, False):
        chosen.one()
    collector = Streams(StreamFolder(conf, chosen.streams, chosen.group))
    registry = CollectorRegistry(auto_describe=False)
    registry.register(collector)
    try:
        if listen is None:
            click.echo(generate_latest(registry).decode(), nl=False)
            return
        try:
            server, thread = start_http_server(listen, host, registry)
        except OSError as error:
            raise ConfigurationError(
                f"metrics: expected to listen at {host}:{listen}, found: "
                f"{error.strerror or error}; choose another --listen, or stop the process that "
                "listens there"
            ) from error
        click.echo(f"serving http://{host}:{listen}/metrics", err=True)
        try:
            threading.Event().wait()
        except KeyboardInterrupt:
            server.shutdown()
            thread.join()
    finally:
        collector.close()


@click.command()
@stream_argument
@hour_argument
@options
def explain(stream: str, hour: str, conf: str | None, output: str) -> None:
    """Explain one hour, and what to run next.

    Prints its cut, layers, account, checks and serving layer in sentences, for any hour, from the
    ledger and the snapshots alone.
    """
    from datetime import UTC, datetime

    from anabranch.cli.render.explanation import print_explanation
    from anabranch.operations.reports import explain

    print_explanation(explain.explain(open_stream(stream, conf), hour, datetime.now(UTC)), output)


@click.command("data-docs")
@stream_argument
@click.argument("hour", type=HOUR, required=False)
@click.option(
    "--to", metavar="DIR|S3URL", required=True, help="Folder or s3://bucket/prefix to write to."
)
@click.option(
    "--keep",
    type=DURATION,
    help="Delete pages of earlier runs after it; default: the stream's `keep.docs`.",
)
@options
def data_docs(
    stream: str, hour: str | None, to: str, keep: timedelta | None, conf: str | None, output: str
) -> None:
    """Build Great Expectations' Data Docs of hours.

    Shows the quality gate's decisions on HOUR, or on the newest 48 hours. Reads the ledger alone:
    no rows, no Spark. Each decision on a named HOUR gets a page; without one, the newest of each
    hour. Deletes pages of earlier runs after --keep, and no other file.
    """
    from datetime import UTC, datetime

    from anabranch.cli.render import print_result
    from anabranch.common.errors import Refused
    from anabranch.protocol.state import load_state
    from batch_layer.quality import data_docs as docs

    job = open_stream(stream, conf)
    timeline = load_state(job.lake, job.stream.table).timeline
    rows = docs.find_pages(job.lake, job.stream.hours_table, timeline, hour)
    if not rows:
        raise Refused(
            f"{hour or stream}: expected a decision of the quality gate in the ledger, found "
            "none; name an `expectations:` file in the stream's file, and run `anabranch batch`"
        )
    index = docs.publish(
        job.environment, job.stream, rows, to, datetime.now(UTC), keep or job.stream.keep.docs
    )
    view = {"stream": stream, "index": index, "hours": sorted({row.hour for row in rows})}
    print_result(view, [f"{stream}: {len(rows)} pages: {index}"], output)


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

    Up to the open hour, by the ledger's newest row. Several streams are asked side by side; one
    that does not answer within 6 seconds is named, and the exit code is 75.
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

        _watch_many(
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


def _watch_many(
    chosen: StreamSelection,
    conf: str | None,
    watch: bool,
    interval: timedelta,
    read: Callable[[Job, Note], T],
    show: Callable[[dict[str, T | AnabranchError]], bool],
) -> NoReturn:
    """Ask streams side by side, once or again and again, and end the command. `show` prints the
    answers, and returns whether one of them is a reason for exit code 1."""
    selected, code = many.select(chosen, conf), 0

    def show_all(found: dict[str, T | AnabranchError]) -> None:
        nonlocal code
        is_wrong = show(found)
        code = many.report_errors(selected, found) or int(is_wrong)

    watched(watch, interval, lambda: many.ask(selected, read), show_all)
    sys.exit(0 if watch else code)


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

    A decision is as in `anabranch hours --history`. An act is a restatement, an acceptance in spite
    of the rules, a replay, an adoption, a chosen layer, or a redelivery. User and host are what the
    operating system reports.
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
    asked side by side, a line for each; one that does not answer within 6 seconds is named, and the
    exit code is 75.
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

        _watch_many(
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


@click.command("streams")
@selection
@options
def list_streams(chosen: StreamSelection, conf: str | None, output: str) -> None:
    """List streams: family, group, topic, table and state.

    Without STREAM and --group: every stream, those of families included. `ready`: the stream has
    its table; `new`: it waits for `anabranch apply`; `gone`: Kafka no longer has the topic of a
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
@click.argument("sql", required=False)
@click.option(
    "--output",
    type=click.Choice(["table", "csv", "spreadsheet", "json", "parquet"]),
    default="table",
    help="Output format; spreadsheet: CSV without formulas.",
)
@click.option("--out", metavar="FILE", help="Write to this file.")
@click.option(
    "--limit",
    metavar="N",
    type=click.IntRange(0),
    help="Most rows of a table; 0: all.  [default: 200 on a terminal, else all]",
)
@click.option(
    "--as-of",
    metavar="NAME|TIME",
    help="Read as of a tag, branch, snapshot id or time (UTC) of every table.",
)
@click.option("--only-accepted", is_flag=True, help="Only rows of hours served by the batch layer.")
@click.option(
    "--revision", metavar="N", type=click.IntRange(1), help="Only rows of this revision of --hour."
)
@click.option("--hour", metavar="HOUR", help="Hour of --revision.")
@click.option("--explain", is_flag=True, help="Print the columns, files and bytes that were read.")
@click.option(
    "--provenance",
    is_flag=True,
    help="Print the hours and event dates read, and whether they are complete.",
)
@conf_option
def query(
    sql: str | None,
    output: Literal["table", "csv", "spreadsheet", "json", "parquet"],
    out: str | None,
    limit: int | None,
    as_of: str | None,
    only_accepted: bool,
    revision: int | None,
    hour: str | None,
    explain: bool,
    provenance: bool,
    conf: str | None,
) -> None:
    """Run SQL (DuckDB) over the tables and their views.

    Without SQL, on a terminal: a shell with history.

    --as-of reads the tables as they were: while a snapshot is kept, and by tags for a week
    (`main-<hour>` is the table when that hour was sealed). --revision reads one accepted revision
    of an hour, also a replaced one; `anabranch hours STREAM --history` lists them. --explain and
    --provenance print under a table, and to standard error otherwise.
    """
    from contextlib import ExitStack, redirect_stdout
    from pathlib import Path

    from anabranch.cli.render.query import print_opened, print_provenance
    from anabranch.common.logs import configure_logging
    from anabranch.common.output import write_result
    from serving_layer.query.opened import opened
    from serving_layer.query.reading import QueryProgress, counting
    from serving_layer.reader import open_reader
    from serving_layer.reader.selection import Revision, Selection

    if (revision is None) != (hour is None):
        raise click.UsageError("expected --revision N and --hour HOUR together")
    chosen = Revision(hour, revision) if hour is not None and revision is not None else None
    selection = Selection(as_of, only_accepted, chosen)
    configure_logging()
    reader = open_reader(conf)

    shown = (limit if limit is not None else _SHOWN_ROWS if sys.stdout.isatty() else 0) or None

    def run(statement: str) -> None:
        reading = QueryProgress()
        with ExitStack() as progress:
            progress.enter_context(reading.show_progress("query"))
            with reader.query(statement, selection, reading) as answer:
                rows = answer.rows
                if out is None and sys.stdout.isatty():
                    # The progress display is cleared before the rows are printed.
                    rows = counting(rows, progress.close, at_end=output == "table")
                if write_result(rows, output, Path(out) if out else None, shown):
                    click.echo(
                        f"the first {shown} rows; --limit 0 shows all, --out FILE writes all",
                        err=True,
                    )
        with redirect_stdout(sys.stdout if output == "table" else sys.stderr):
            if explain:
                print_opened(opened(answer.files))
            if provenance:
                print_provenance(reader.provenance(answer, selection))

    if sql is not None:
        run(sql)
    elif sys.stdin.isatty():
        from anabranch.cli.shell import interact

        interact(run, Path(click.get_app_dir("anabranch")) / "query_history")
    else:
        raise click.UsageError("expected SQL, or a terminal for the shell")


@click.command()
@stream_argument
@click.option("--fill", is_flag=True, help="First compute the missing hours.")
@options
def views(stream: str, fill: bool, conf: str | None, output: str) -> None:
    """Show how far a stream's views are precomputed.

    Prints how many accepted hours are read from partials, and which are computed from their rows.
    The result of a view is the same. The batch layer computes partials after it accepted hours;
    --fill does so at once.
    """
    from anabranch.cli.render.status import print_views
    from serving_layer.views import fill as filling

    job = open_stream(stream, conf)
    if fill:
        for view in job.stream.views:
            filling.fill(job.lake, job.stream, view)
    print_views(stream, filling.fill_status(job.lake, job.stream), output)
