"""Commands that report on hours. All but `dead-letters --replay` only read."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from anabranch.cli import many
from anabranch.cli.options import HOUR, HOURS, StreamSelection, all_streams, conf_folder
from anabranch.cli.report import Report, Result, report
from anabranch.common.deadline import KAFKA
from anabranch.common.errors import AnabranchError

if TYPE_CHECKING:
    from anabranch.common.deadline import Note
    from anabranch.job import Job

hours_option = click.option(
    "--hours", metavar="A..B", type=HOURS, help="From hour A to hour B, or one hour."
)


@click.command()
@all_streams
@report
def hours(chosen: StreamSelection) -> Result:
    """List each hour: serving layer, counts and checks.

    \b
    anabranch hours game_events

    Lists hours up to the open one, by the newest row of the ledger. Several streams are read
    concurrently; one that does not answer within 6 seconds is named, and the exit code is 75.
    """
    from anabranch.cli.render.hours import hours_text
    from anabranch.operations.reports import status

    def read(job: Job, note: Note) -> Report[list[status.HourSummary]]:
        found = status.hours(job)
        return Report(found, hours_text(found), key="hours")

    return many.read_streams(chosen, read)


@click.command()
@all_streams
@click.option("--hour", type=HOUR, help="Only this hour.")
@click.option(
    "--acts",
    is_flag=True,
    help="Operators' acts: who, when, on which host, why, and what followed.",
)
@report
def history(chosen: StreamSelection, hour: str | None, acts: bool) -> Result:
    """List decisions on hours, or operators' acts.

    \b
    anabranch history game_events --hour 2026-11-21T03
    anabranch history --acts

    A decision has its time, the changed counts, the reason, and how to read a replaced revision. An
    act is a restatement, an acceptance despite the rules, a replay, an adoption, a chosen layer, a
    redelivery, a hold, an erasure, or an import. The operating system reports user and host.
    """
    from anabranch.cli.render.hours import acts_text, history_text
    from anabranch.operations.reports import acts as act_reports
    from anabranch.protocol.decisions import decisions

    def read(job: Job, note: Note) -> Report[object]:
        stream = job.stream.name
        if acts:
            records = act_reports.acts(job, hour)
            return Report(records, acts_text(stream, records), key="acts")
        found = decisions(job.lake, job.stream, hour)
        return Report(found, history_text(stream, hour, found), key="decisions")

    return many.read_streams(chosen, read)


@click.command()
@all_streams
@click.argument("hour", type=HOUR)
@click.option(
    "--rows", is_flag=True, help="Also compare the layers' rows, and list the removed duplicates."
)
@click.option(
    "--limit", type=click.IntRange(0), default=10, help="Number of rows of each kind for --rows."
)
@report
def explain(chosen: StreamSelection, hour: str, rows: bool, limit: int) -> Result:
    """Explain one hour, and what to run next.

    \b
    anabranch explain game_events 2026-11-21T03
    anabranch explain game_events 2026-11-21T03 --rows

    Prints its cut, layers, account, checks and serving layer in sentences, for any hour. Without
    --rows, it reads only the ledger and the snapshots.

    --rows compares the rows of both layers in an accepted hour: the numbers, and rows side by side;
    it lists each removed duplicate with the row that it repeats. The exit code is then 1 when a
    difference has no explanation.
    """
    from datetime import UTC, datetime

    from anabranch.cli.render.hours import explanation_text
    from anabranch.cli.render.rows import difference_text, duplicates_text
    from anabranch.common.output import plain
    from anabranch.operations.reports import dead_letters, explain
    from anabranch.operations.reports.explain import explain_sentences

    def read(job: Job, note: Note | None = None) -> Report[dict[str, object]]:
        facts = explain.explain(job, hour, datetime.now(UTC))
        sentences = explain_sentences(facts)
        view = plain(facts) | {"sentences": [f"{subject}: {text}" for subject, text in sentences]}
        text = [*explanation_text(sentences)]
        if not rows:
            return Report(view, text)
        difference, duplicates = dead_letters.compare(job, hour, limit, limit)
        view |= {"difference": difference, "duplicates": duplicates}
        text += ["", *duplicates_text(duplicates), "", *difference_text(difference)]
        return Report(view, text, exit_code=bool(difference.unexplained))

    return many.run_streams(chosen, read) if rows else many.read_streams(chosen, read)


@click.command("dead-letters")
@all_streams
@hours_option
@click.option("--samples", type=click.IntRange(0), default=3, help="Samples for each reason.")
@click.option("--replay", is_flag=True, help="Rebuild hours with dead letters that decode now.")
@click.option("--why", metavar="TEXT", help="Reason for --replay, for the ledger.")
@report
def dead_letters(
    chosen: StreamSelection,
    hours: tuple[str, str] | None,
    samples: int,
    replay: bool,
    why: str | None,
) -> Result:
    """List the records that could not become rows.

    \b
    anabranch dead-letters game_events --hours 2026-11-21T00..2026-11-21T23
    anabranch dead-letters game_events --replay --why "wider schema"

    Prints the number for each reason, and samples, decoded for display. Use --replay after the
    schema or the bounds were widened (`anabranch apply`): it rebuilds the accepted hours of one
    stream with dead letters that decode now, from Kafka, else from the table.
    """
    from anabranch.cli.render.rows import letters_text
    from anabranch.operations.reports import dead_letters

    if why and not replay:
        raise click.UsageError("--why: expected --replay with it, found none")
    if replay:
        from anabranch.cli.jobs import run_batch

        if chosen.one is None:
            raise click.UsageError("--replay: expected one STREAM")
        only = ["--hour", "..".join(hours)] if hours is not None else []
        reason = [f"--why={why}"] if why else []
        options = ["--replay", *only, *reason]
        run_batch(chosen, options)

    def read(job: Job) -> Report[dead_letters.DeadLetters]:
        view = dead_letters.letters(job, hours, samples)
        return Report(view, letters_text(view))

    return many.run_streams(chosen, read)


@click.command()
@all_streams
@click.option(
    "--event-time",
    metavar="DAY|HOUR",
    help="Whether all events of this time are in accepted hours: 2026-11-20, or 2026-11-20T13 "
    "(UTC).",
)
@report
def complete(chosen: StreamSelection, event_time: str | None) -> Result:
    """Show the last hour that all streams have complete.

    \b
    anabranch complete --group small
    anabranch complete game_events --event-time 2026-11-20

    An hour is complete in a stream when it and all earlier hours are accepted. Hours are cut by
    Kafka's time, so the same hour is a consistent cut through all topics. The exit code is 1 while
    a stream has no complete hour, and 75 when a stream does not answer within 6 seconds; then the
    hour is not known.

    --event-time shows the ingest hours that can contain events of a day, by the bounds of
    `event_time:` in the stream's file, and those that are not accepted yet. The exit code is then 1
    while the day is not complete.
    """
    from anabranch.cli.render.hours import complete_text, event_time_text
    from anabranch.protocol import watermarks
    from anabranch.protocol.state import load_state

    if event_time is not None:

        def read_day(job: Job, note: Note) -> Report[watermarks.EventTimeCompleteness]:
            state = load_state(job.lake, job.stream.table)
            view = watermarks.completeness(job.stream, state, event_time)
            return Report(view, event_time_text(view), exit_code=not view.complete)

        return many.read_streams(chosen, read_day)

    def read(job: Job, note: Note) -> str | None:
        return watermarks.complete_through(load_state(job.lake, job.stream.table))

    selected = many.select(chosen)
    found = many.ask(selected, read)
    through = {name: hour for name, hour in found.items() if not isinstance(hour, AnabranchError)}
    failed = {name: error for name, error in found.items() if isinstance(error, AnabranchError)}
    is_known = not failed and not selected.unanswered
    common = watermarks.complete_through_all(through.values()) if is_known else None
    view = {
        "complete_through": common,
        "streams": through,
        "errors": {name: str(error) for name, error in failed.items()},
    }
    return Report(
        view,
        complete_text(common, through, is_known),
        exit_code=common is None,
        errors=(*selected.unanswered, *failed.values()),
    )


@click.command()
@all_streams
@hours_option
@click.option("--no-kafka", is_flag=True, help="Do not read Kafka.")
@click.option(
    "--table",
    metavar="TABLE",
    help="Instead audit a table that another program writes: namespace.table of the catalog, or a "
    "folder of Iceberg, Delta or Parquet.",
)
@click.option("--topic", metavar="TOPIC", help="The topic that --table is written from.")
@click.option("--partition-column", metavar="COLUMN", help="Kafka's partition in --table.")
@click.option("--offset-column", metavar="COLUMN", help="Kafka's offset in --table.")
@click.option("--time-column", metavar="COLUMN", help="Kafka's timestamp in --table.")
@click.option(
    "--records",
    metavar="N",
    type=click.IntRange(0),
    default=10,
    help="Number of missing records of --table to print.",
)
@report
def audit(
    chosen: StreamSelection,
    hours: tuple[str, str] | None,
    no_kafka: bool,
    table: str | None,
    topic: str | None,
    partition_column: str | None,
    offset_column: str | None,
    time_column: str | None,
    records: int,
) -> Result:
    """Count accepted hours again, in files and in Kafka.

    \b
    anabranch audit game_events --hours 2026-11-21T00..2026-11-21T23
    anabranch audit --table lake.events --topic shop.events

    Compares the counts with the ledger, and with Kafka as far as it still has the records. Without
    --hours: all hours. Prints one sentence for each disagreement of ledger, files and Kafka; the
    exit code is then 1. Audits eight streams at a time. An error of one does not stop the others; a
    stream that does not answer within 6 seconds is skipped and named.

    With --table and --topic, it finds the records that a table of Kafka Connect, Flink, Spark or
    another program lacks or has twice, by hour; the exit code is then 1. It needs `kafka`
    and `catalog` of conf/anabranch.yaml, no stream, and writes nothing. Columns such as
    `partition` and `offset`, Connect's `_kafka_metadata`, `redpanda` and `RECORD_METADATA` are
    found; others are named, nested ones with dots. The table's first and last hour may be
    incomplete, unless --hours names them.
    """
    if table is not None or topic is not None:
        named = chosen.streams or chosen.group is not None
        if table is None or topic is None or named:
            raise click.UsageError("expected --table with --topic, and no stream")
        if (partition_column is None) != (offset_column is None):
            raise click.UsageError("expected --partition-column with --offset-column")
        from anabranch import config
        from anabranch.cli.render.hours import other_text
        from anabranch.common.logs import configure_logging
        from anabranch.operations.audit.other import AuditRequest, audit_other

        configure_logging()
        columns = (partition_column, offset_column, time_column)
        request = AuditRequest(table, topic, *columns, hours, not no_kafka, records)
        found = audit_other(config.load_environment(conf_folder()), request)
        return Report(found, other_text(found), exit_code=not found.is_exact)
    if partition_column or offset_column or time_column:
        raise click.UsageError("expected --table and --topic with the columns")

    from anabranch.cli.render.hours import audit_text
    from anabranch.operations.audit import audit as run_audit
    from anabranch.operations.audit.checks import AuditReport

    def ready(job: Job, note: Note) -> None:
        many.load_table(job, note)
        if not no_kafka:
            note(KAFKA)
            job.kafka.describe(job.stream.topic, confirmed=False)

    def work(job: Job) -> Report[AuditReport]:
        view = run_audit(job, hours, with_kafka=not no_kafka)
        return Report(view, audit_text(view), exit_code=not view.agrees)

    return many.run_streams(chosen, work, ready)
