"""Commands that change published data: maintenance, holds, erasure, import."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, Literal

import click

from anabranch.cli import many
from anabranch.cli.options import (
    DURATION,
    Failures,
    StreamSelection,
    open_stream,
    options,
    selection,
    stream_argument,
)

if TYPE_CHECKING:
    from datetime import timedelta
    from typing import TextIO

    from anabranch.job import Job
    from anabranch.operations.reports.maintenance import Maintenance


@click.command()
@selection
@click.option("--dry-run", is_flag=True, help="Only show what would be deleted.")
@options
def maintain(chosen: StreamSelection, dry_run: bool, conf: str | None, output: str) -> None:
    """Delete old speed rows, snapshots and orphan files.

    Deletes rows of main only in hours older than the stream's `keep.rows`. The stream's file sets
    the other ages: `maintain: {orphans_after: 3 days, speed_hours: 1 day}`. Also deletes files that
    killed jobs left in this machine's temporary folder. Run it at least once a day; other jobs may
    run at the same time. --dry-run shows what would be deleted, how the last run ended, and the
    pending work of each table; `anabranch page` shows that too. Processes eight streams at a time.
    An error of one does not stop the others; a stream that does not answer within 6 seconds is
    skipped and named.
    """
    from anabranch.cli.render.maintenance import print_maintained
    from anabranch.common.output import print_json

    is_many = chosen.one() is None
    selected = many.select(chosen, conf)
    failures, views = Failures(), []
    for name, result in many.run(selected, many.load_table, lambda job: _maintain(job, dry_run)):
        with failures.catching(name):
            done, known = result()
            if output == "text":
                print_maintained(name, done, known, dry_run)
            views.append(done | (known.as_dict() if known is not None else {}))
    if output == "json":
        found = [*views, *failures.views()]
        print_json(found if is_many else found[0])
    failures.end()


def _maintain(job: Job, dry_run: bool) -> tuple[dict[str, Any], Maintenance | None]:
    """Maintain one stream. Return the result of the run, and with `dry_run` the state of the
    stream's maintenance."""
    from datetime import UTC, datetime

    from anabranch.lifecycle import maintenance
    from anabranch.operations.reports.maintenance import read_maintenance
    from anabranch.protocol.publisher import Publisher
    from anabranch.protocol.state import load_state

    publisher = Publisher(job.lake, job.stream)
    if not dry_run:
        publisher.recover()
    done = maintenance.maintain(job, datetime.now(UTC), dry_run, publisher)
    known = None
    if dry_run:
        known = read_maintenance(job, load_state(job.lake, job.stream.table), datetime.now(UTC))
    return maintenance.view(job.stream.name, done, dry_run), known


@click.command()
@stream_argument
@click.argument("hours")
@click.option("--release", is_flag=True, help="Let the hours expire again.")
@click.option("--why", metavar="TEXT", required=True, help="The reason, for the ledger.")
@options
def hold(stream: str, hours: str, release: bool, why: str, conf: str | None, output: str) -> None:
    """Keep hours beyond the stream's `keep`.

    HOURS is an hour, hours A..B (both included), or a day such as 2026-11-21 (UTC). Their rows do
    not expire until --release. Future hours can be held. An hour that has expired is refused with
    exit code 1.
    """
    from anabranch.cli.render.operate import print_held
    from anabranch.protocol import holding
    from anabranch.protocol.holds import parse_hours
    from anabranch.protocol.publisher import Publisher

    first, last = parse_hours(hours)
    job = open_stream(stream, conf)
    publisher = Publisher(job.lake, job.stream)
    publisher.recover()
    print_held(stream, holding.hold(publisher, first, last, why, release), output)


@click.command()
@stream_argument
@click.option("--yes", is_flag=True, help="Do not ask for the stream's name.")
@options
def drop(stream: str, yes: bool, conf: str | None, output: str) -> None:
    """Drop a stream: its tables, their files and its state.

    Shows the tables, and asks for the stream's name. Nothing brings the rows, the dead letters, the
    ledger and its erasures back; only the records that Kafka still has are read again by a new
    stream. Stop the stream's jobs first, and delete its file afterwards. Deliveries of egress stay.
    Refused while `anabranch hold` keeps hours of it.
    """
    from anabranch.cli.render import print_result
    from anabranch.lifecycle.drop import drop as drop_tables
    from anabranch.lifecycle.drop import tables_of

    job = open_stream(stream, conf)
    names = tables_of(job)
    if names and not yes:
        click.echo(f"tables of {stream}: {', '.join(names)}", err=True)
        if click.prompt("name of the stream to drop", err=True) != stream:
            raise click.UsageError(f"expected the name {stream}; nothing was dropped")
    done = drop_tables(job)
    lines = [f"{stream}: {line}" for line in done] or [f"{stream}: no tables"]
    print_result({"stream": stream, "dropped": names}, lines, output)


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
    "--until",
    type=DURATION,
    default="30 days",
    show_default=True,
    help="Time until which all copies must be deleted.",
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
@click.option("--status", is_flag=True, help="Show each erasure, and what is left of it.")
@click.option(
    "--verify", is_flag=True, help="With --status, scan every branch for the values again."
)
@options
def erase(
    stream: str,
    column: str | None,
    file: TextIO | None,
    why: str | None,
    until: timedelta,
    dry_run: bool,
    again: bool,
    in_spite: str | None,
    status: bool,
    verify: bool,
    conf: str | None,
    output: str,
) -> None:
    """Erase records by the values of a column.

    Removes rows and dead letters from every branch, and keeps both layers from publishing them
    again; the account of each hour counts them as `erased`. An erasure covers the records that
    Kafka has accepted when it is requested. The same command continues it, and changes nothing once
    it is done; --again makes a new request. Refused while held hours (`anabranch hold`) have such
    records. Needs `erasure.key` in conf/anabranch.yaml. With --status, the exit code is 1 while
    something is left.
    """
    from anabranch.cli.render.erasures import print_erased, print_found
    from anabranch.lifecycle.erasure import run
    from anabranch.protocol.publisher import Publisher

    if status:
        _erasure_status(stream, verify, conf, output)
        return
    if column is None or file is None or why is None:
        raise click.UsageError(
            "expected --by COLUMN, --values FILE and --why TEXT, or --status alone"
        )
    try:
        values = frozenset(line.rstrip("\r\n") for line in file if line.strip())
    except UnicodeDecodeError as error:
        raise click.BadParameter(
            f"expected a file in UTF-8, found {error.reason}", param_hint="--values"
        ) from None
    order = run.ErasureRequest(column, values, why, until, again, in_spite)
    job = open_stream(stream, conf)
    if dry_run:
        print_found(stream, run.find(job, order), output)
        return
    print_erased(stream, run.erase(job, Publisher(job.lake, job.stream), order), output)


def _erasure_status(stream: str, verify: bool, conf: str | None, output: str) -> None:
    from datetime import UTC, datetime

    from anabranch.cli.render.erasures import print_erasures
    from anabranch.lifecycle.erasure.status import read_statuses

    statuses = read_statuses(open_stream(stream, conf), datetime.now(UTC), verify)
    print_erasures(stream, statuses, output)
    if any(not one.is_certificate for one in statuses):
        sys.exit(1)


@click.command("import")
@stream_argument
@click.option(
    "--files",
    metavar="FOLDER",
    required=True,
    help="Parquet, JSON lines, an Iceberg or Delta table; s3://… or local.",
)
@click.option(
    "--version",
    metavar="N",
    type=click.IntRange(0),
    help="The version of a Delta table; default: the newest.",
)
@click.option(
    "--hours",
    metavar="A..B",
    required=True,
    help="The hours to import; A.. ends before the stream's first hour.",
)
@click.option(
    "--time", metavar="COLUMN", help="The column with the time at which a row was received."
)
@click.option(
    "--seam",
    type=click.Choice(["offsets", "key"]),
    default="offsets",
    show_default=True,
    help="How to detect rows that Kafka also has: by the offsets in the files, or by key.",
)
@click.option("--why", metavar="TEXT", help="The reason, for the ledger.")
@click.option("--dry-run", is_flag=True, help="Only show what would be imported.")
@options
def import_(
    stream: str,
    files: str,
    version: int | None,
    hours: str,
    time: str | None,
    seam: Literal["offsets", "key"],
    why: str | None,
    dry_run: bool,
    conf: str | None,
    output: str,
) -> None:
    """Import hours before the stream's first from files.

    Each hour is accepted with an account that counts source rows instead of offsets. Hours before
    the stream's first are imported, newest first, several per commit; the live position does not
    change. --time gives the hour of a row, by default kafka_timestamp, timestamp or the stream's
    event time. Rows that repeat a row by the stream's key are left out. The same command continues
    an interrupted import, of a Delta table from the version that it began with, and changes nothing
    once it is done.
    """
    from anabranch.cli.render.imports import print_imported, print_planned
    from anabranch.lifecycle.importing import run
    from anabranch.protocol.publisher import Publisher

    first, last = _hours_to_import(hours)
    job = open_stream(stream, conf)
    order = run.ImportRequest(files, first, last, time, seam == "key", why, version)
    if dry_run:
        print_planned(stream, run.plan(job, order), output)
        return
    done = run.run(job, Publisher(job.lake, job.stream), order)
    print_imported(stream, done, job.stream.key, output)


def _hours_to_import(text: str) -> tuple[str, str | None]:
    from anabranch.offsets.hours import span_of, start_of

    if text.endswith(".."):
        start_of(text[:-2])
        return text[:-2], None
    return span_of(text)
