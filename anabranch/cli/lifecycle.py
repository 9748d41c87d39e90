"""Commands that change published data: maintenance, holds, erasure, import."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import click

from anabranch.cli import many
from anabranch.cli.options import (
    DURATION,
    StreamSelection,
    all_streams,
    master_option,
    named_streams,
    open_stream,
    stream_argument,
)
from anabranch.cli.report import Event, Report, Result, report, show

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from datetime import timedelta
    from typing import TextIO

    from anabranch.job import Job


@click.command()
@named_streams
@click.option("--dry-run", is_flag=True, help="Only show what would be deleted.")
@report
def maintain(chosen: StreamSelection, dry_run: bool) -> Result:
    """Delete old speed rows, snapshots and orphan files.

    \b
    anabranch maintain game_events
    anabranch maintain --all --dry-run

    Deletes rows of main only in hours older than the stream's `keep.rows`. The stream's file sets
    the other ages: `maintain: {orphans_after: 3 days, speed_hours: 1 day}`. Also deletes files that
    killed jobs left in this machine's temporary folder. Run it at least once a day; other jobs may
    run at the same time. --dry-run shows what would be deleted, how the last run ended, and the
    pending work of each table; `anabranch page` shows that too. Processes eight streams at a time.
    An error of one does not stop the others; a stream that does not answer within 6 seconds is
    skipped and named.
    """
    from datetime import UTC, datetime

    from anabranch.cli.render.changes import maintained_text
    from anabranch.lifecycle import maintenance
    from anabranch.operations.reports.maintenance import read_maintenance
    from anabranch.protocol.publisher import Publisher
    from anabranch.protocol.state import load_state

    def work(job: Job) -> Report[dict[str, Any]]:
        stream, publisher = job.stream.name, Publisher(job.lake, job.stream)
        if not dry_run:
            publisher.recover()
        done = maintenance.maintain(job, datetime.now(UTC), dry_run, publisher)
        known = None
        if dry_run:
            known = read_maintenance(job, load_state(job.lake, job.stream.table), datetime.now(UTC))
        view = maintenance.view(stream, done, dry_run)
        text = maintained_text(stream, view, known, dry_run)
        return Report(view | (known.as_dict() if known is not None else {}), text)

    return many.run_streams(chosen, work)


@click.command()
@stream_argument
@click.argument("hours")
@click.option("--release", is_flag=True, help="Let the hours expire again.")
@click.option("--why", metavar="TEXT", required=True, help="The reason, for the ledger.")
@report
def hold(stream: str, hours: str, release: bool, why: str) -> Report[object]:
    """Keep hours beyond the stream's `keep`.

    \b
    anabranch hold game_events 2026-11-21 --why "audit of the year"

    HOURS is an hour, hours A..B (both included), or a day such as 2026-11-21 (UTC). Their rows do
    not expire until --release. Future hours can be held. An hour that has expired is refused with
    exit code 1.
    """
    from anabranch.protocol import acts
    from anabranch.protocol.publisher import Publisher
    from anabranch.protocol.registers import parse_hours, span_words

    first, last = parse_hours(hours)
    job = open_stream(stream)
    publisher = Publisher(job.lake, job.stream)
    publisher.recover()
    held = acts.hold(publisher, first, last, why, release)
    lines = span_words(held.holds) or ["no hours are kept beyond their time"]
    lines += [
        f"erasure {id} was requested before and is not done: these hours lose its records"
        for id in held.erasures
    ]
    return Report({"stream": stream, **vars(held)}, [f"{stream}: {line}" for line in lines])


@click.command()
@stream_argument
@click.option("--yes", is_flag=True, help="Do not ask for the stream's name.")
@report
def drop(stream: str, yes: bool) -> Report[object]:
    """Drop a stream: its tables, their files and its state.

    \b
    anabranch drop game_events

    Shows the tables, and asks for the stream's name. Nothing brings the rows, the dead letters, the
    ledger and its erasures back; only the records that Kafka still has are read again by a new
    stream. Stop the stream's jobs first, and delete its file afterwards. Deliveries of egress stay.
    Refused while `anabranch hold` keeps hours of it.
    """
    from anabranch.lifecycle.maintenance import drop as drop_tables
    from anabranch.lifecycle.maintenance import tables_of

    job = open_stream(stream)
    names = tables_of(job)
    if names and not yes:
        click.echo(f"tables of {stream}: {', '.join(names)}", err=True)
        if click.prompt("name of the stream to drop", err=True) != stream:
            raise click.UsageError(f"expected the name {stream}; nothing was dropped")
    done = drop_tables(job)
    lines = [f"{stream}: {line}" for line in done] or [f"{stream}: no tables"]
    return Report({"stream": stream, "dropped": names}, lines)


@click.command()
@stream_argument
@click.option("--by", "column", metavar="COLUMN", help="The column whose values are erased.")
@click.option(
    "--values",
    "file",
    type=click.File("r", encoding="utf-8-sig"),
    help="A file of values, one a line; - is stdin.",
)
@click.option("--why", metavar="TEXT", help="The reason, for the ledger.")
@click.option(
    "--until", type=DURATION, default="30 days", help="Time until which all copies must be deleted."
)
@click.option("--dry-run", is_flag=True, help="Only show what would be erased.")
@click.option(
    "--again", is_flag=True, help="Also erase what arrived since the same request was done."
)
@click.option(
    "--in-spite-of-hold",
    "in_spite",
    metavar="TEXT",
    help="Also erase records of hours that `anabranch hold` keeps; the reason.",
)
@report
def erase(
    stream: str,
    column: str | None,
    file: TextIO | None,
    why: str | None,
    until: timedelta,
    dry_run: bool,
    again: bool,
    in_spite: str | None,
) -> Report[object]:
    """Erase records by the values of a column.

    \b
    anabranch erase game_events --by player_id --values values.txt --why "request 17"

    Removes rows and dead letters from every branch, and keeps both layers from publishing them
    again; the account of each hour counts them as `erased`. An erasure covers the records that
    Kafka has accepted when it is requested. The same command continues it, and changes nothing once
    it is done; --again makes a new request. Refused while held hours (`anabranch hold`) have such
    records. Needs `erasure.key` in conf/anabranch.yaml. `anabranch erasures` shows the
    rest.
    """
    from anabranch.cli.render.changes import erased_text, found_text
    from anabranch.lifecycle.erasure import run
    from anabranch.protocol.publisher import Publisher

    if column is None or file is None or why is None:
        raise click.UsageError("expected --by COLUMN, --values FILE and --why TEXT")
    try:
        values = frozenset(line.rstrip("\r\n") for line in file if line.strip())
    except UnicodeDecodeError as error:
        raise click.BadParameter(
            f"expected a file in UTF-8, found {error.reason}", param_hint="--values"
        ) from None
    order = run.ErasureRequest(column, values, why, until, again, in_spite)
    job = open_stream(stream)
    if dry_run:
        found = run.find(job, order)
        view = {"stream": stream, "dry_run": True, "found": found}
        return Report(view, found_text(stream, found))
    done = run.erase(job, Publisher(job.lake, job.stream), order)
    return Report(
        {"stream": stream, "erasure": done.erasure, "removed": done.removed, "left": done.left},
        erased_text(stream, done),
    )


@click.command()
@all_streams
@click.option("--verify", is_flag=True, help="Scan every branch for the values again.")
@report
def erasures(chosen: StreamSelection, verify: bool) -> Result:
    """Show each erasure, and what is left of it.

    \b
    anabranch erasures
    anabranch erasures game_events --verify

    The exit code is 1 while something is left.
    """
    from datetime import UTC, datetime

    from anabranch.lifecycle.erasure.status import read_statuses, status_lines, view

    def work(job: Job) -> Report[object]:
        stream, statuses = job.stream.name, read_statuses(job, datetime.now(UTC), verify)
        lines = [line for one in statuses for line in status_lines(one)] or ["no erasure"]
        return Report(
            {"stream": stream, "erasures": view(statuses)},
            [f"{stream}: {line}" for line in lines],
            exit_code=any(not one.is_certificate for one in statuses),
        )

    return many.run_streams(chosen, work)


@click.command("import")
@stream_argument
@click.option(
    "--from",
    "sources",
    metavar="[FORMAT:]PATH|TABLE",
    multiple=True,
    help="A folder (local or s3://…) or a table of the catalog; may be repeated.",
)
@click.option(
    "--version",
    metavar="N",
    type=click.IntRange(0),
    help="The version of a Delta table; default: the newest.",
)
@click.option(
    "--hours", metavar="A..B", help="The hours to import; A.. ends before the stream's first hour."
)
@click.option(
    "--takeover",
    is_flag=True,
    help="Take over from the program that wrote it: all hours, audited before and after.",
)
@click.option("--checkpoint", metavar="FOLDER", help="With --takeover: its checkpoint of Spark.")
@click.option(
    "--time", metavar="COLUMN", help="The column with the time at which a row was received."
)
@click.option(
    "--seam",
    type=click.Choice(["offsets", "key"]),
    default="offsets",
    help="How to detect rows that Kafka also has: by the offsets in the files, or by key.",
)
@click.option("--undo", is_flag=True, help="Take all imported hours back, unless delivered.")
@click.option("--why", metavar="TEXT", help="The reason, for the ledger.")
@click.option("--dry-run", is_flag=True, help="Only show what would be imported, or taken back.")
@master_option
@report
def import_(
    stream: str,
    sources: tuple[str, ...],
    version: int | None,
    hours: str | None,
    takeover: bool,
    checkpoint: str | None,
    time: str | None,
    seam: Literal["offsets", "key"],
    undo: bool,
    why: str | None,
    dry_run: bool,
    master: str | None,
) -> Result:
    """Import hours before the stream's first, by Spark.

    \b
    anabranch import game_events --from s3://archive/events --hours 2026-01-01T00.. --dry-run

    FORMAT is parquet, orc, json (lines), csv (with a header), avro, delta or iceberg; without it,
    the folder's content decides. Each hour is accepted with an account that counts source rows
    instead of offsets. Hours before the stream's first are imported, newest first, several per
    commit; the live position does not change. --time gives the hour of a row, by default
    kafka_timestamp, timestamp or the stream's event time. Rows that repeat a row by the stream's
    key are left out. The same command continues an interrupted import, of a Delta table from the
    version that it began with, and changes nothing once it is done.

    --takeover first prints what the source proves and states, and takes a folder of Spark's file
    sink also without or with a damaged log. It changes nothing in the source.

    --undo takes all imported hours back, so that the import can be repeated, while egress has
    delivered none of them and no later hour was accepted without duplicates of their rows.
    """
    from anabranch.cli.render.changes import imported_text, imported_view, plan_view, planned_text
    from anabranch.lifecycle.importing import run, tasks
    from anabranch.protocol.publisher import Publisher
    from anabranch.spark import session

    if undo:
        if sources or hours is not None or takeover:
            raise click.UsageError("--undo: expected no source and no hours, only --why, --dry-run")
        return _undo_import(stream, why, dry_run)
    if not sources:
        raise click.UsageError("expected --from [FORMAT:]PATH|TABLE, or --undo")
    if (hours is None) != takeover or (checkpoint is not None and not takeover):
        raise click.UsageError("expected --hours A..B, or --takeover [--checkpoint FOLDER]")
    first, last = _hours_to_import(hours) if hours is not None else (None, None)
    job = open_stream(stream)
    if version is not None and len(sources) > 1:
        raise click.UsageError("--version: expected one --from")
    own, *others = sources
    order = run.ImportRequest(
        own, first, last, time, seam == "key", why, version, tuple(others), takeover
    )
    with session.session_here(job.environment, f"anabranch import {stream}", master) as spark:
        workers = tasks.on_spark(spark)
        if takeover:
            show(_what_is_taken_over(job, sources, checkpoint))
        if dry_run:
            plan = run.plan(job, order, workers)
            view = {"stream": stream, "dry_run": True, **plan_view(plan)}
            return Report(view, planned_text(stream, plan))
        done = run.run(job, Publisher(job.lake, job.stream), order, workers)
    found = Report(imported_view(stream, done), imported_text(stream, done, job.stream.key))
    if not takeover:
        return found
    show(found)
    from anabranch.cli.render.hours import audit_text
    from anabranch.operations.audit import audit

    audited = audit(job, None, with_kafka=True)
    return Report(audited, audit_text(audited), exit_code=not audited.agrees)


def _undo_import(stream: str, why: str | None, dry_run: bool) -> Report[object]:
    from anabranch.lifecycle.importing import undo
    from anabranch.protocol.publisher import Publisher

    job = open_stream(stream)
    done = undo.plan(job) if dry_run else undo.undo(job, Publisher(job.lake, job.stream), why)
    span = f", {done.hours[0]} to {done.hours[-1]}" if done.hours else ""
    text = (
        f"{stream}: {'would take' if dry_run else 'took'} {len(done.hours)} imported hours back"
        f"{span}, with {done.rows} rows"
    )
    view = {"stream": stream, "dry_run": dry_run, "undone": done.hours, "rows": done.rows}
    return Report(view, [text])


def _what_is_taken_over(
    job: Job, sources: Sequence[str], checkpoint: str | None
) -> Iterator[Report[object]]:
    """Yield, of each source, what its metadata states and what an audit of it proves."""
    from anabranch.cli.render.hours import other_text
    from anabranch.common.errors import Refused
    from anabranch.lifecycle.importing.files import split_form, stated
    from anabranch.operations.audit.other import AuditRequest, audit_other

    for _, name in map(split_form, sources):
        words = stated(job.environment, name, checkpoint, job.stream.topic)
        yield Event({"source": name, "stated": words}, words)
        try:
            found = audit_other(job.environment, AuditRequest(name, job.stream.topic, records=0))
            yield Event(found, other_text(found))
        except Refused as error:
            # Only Parquet, Iceberg and Delta are audited.
            yield Event({"source": name, "unproven": str(error)}, [f"not audited: {error}"])


def _hours_to_import(text: str) -> tuple[str, str | None]:
    from anabranch.offsets.hours import span_of, start_of

    if text.endswith(".."):
        start_of(text[:-2])
        return text[:-2], None
    return span_of(text)
