"""Commands that change a stream or its tables on request."""

from __future__ import annotations

import sys
from contextlib import closing
from typing import TYPE_CHECKING, Any, Literal

import click

from anabranch.cli import many
from anabranch.cli.options import (
    DURATION,
    HOUR,
    Failures,
    StreamSelection,
    open_stream,
    options,
    output_option,
    selection,
    stream_argument,
)
from anabranch.common.errors import ConfigurationError

if TYPE_CHECKING:
    from datetime import timedelta
    from typing import TextIO

    from anabranch.config import Environment, Members, Selected, Stream
    from anabranch.job import Job
    from anabranch.operations.reports.maintenance import Maintenance
    from anabranch.subjects.resolve import Planned


@click.command()
@selection
@click.option(
    "--register", is_flag=True, help="First register the tables found in storage with the catalog."
)
@click.option(
    "--rolled-back",
    is_flag=True,
    help="Accept that the table has columns which the stream's file lacks.",
)
@click.option(
    "--renamed-from", metavar="OLD", help="Take over the table of OLD, the stream's former name."
)
@options
def apply(
    chosen: StreamSelection,
    register: bool,
    rolled_back: bool,
    renamed_from: str | None,
    conf: str | None,
    output: str,
) -> None:
    """Create or change tables, branches and bucket.

    Without STREAM and --group: for all streams. Prints each change. With `schema: registry`, first
    lists what the subject's latest version changes. An error of one stream does not stop the
    others; the exit code is that of the first stream with an error. A table that storage has and
    the catalog lacks is not created again: after a lost or restored catalog, or a restored bucket,
    stop the stream's jobs and use --register. Columns are never dropped. With --rolled-back, jobs
    run with a file that lacks some columns and write null there, until a file with these columns is
    applied. A table belongs to one stream; after its file was renamed, --renamed-from gives the
    table to the new name.
    """
    from anabranch import config
    from anabranch.cli.render.operate import print_applied, print_changes
    from anabranch.common.logs import configure_logging
    from anabranch.family_streams import FamilyStreams

    streams, chosen = chosen.streams, chosen.or_every()
    if rolled_back and len(streams) != 1:
        raise ConfigurationError(
            f"--rolled-back: expected one STREAM, whose file was put back; found {len(streams)}"
        )
    if renamed_from and len(streams) != 1:
        raise ConfigurationError(
            f"--renamed-from: expected one STREAM, the new name; found {len(streams)}"
        )
    configure_logging()
    environment = config.load_environment(conf)
    families = FamilyStreams(environment, conf)
    selected = families.select(streams, chosen.group, chosen.every)
    for error in families.unanswered:
        raise error
    families.close()
    shared = {} if streams else config.shared_tables(conf)
    failures, done = Failures(), {}
    if output == "text":
        _list_new(environment, families.read_members, selected)
    planned: dict[str, tuple[list[str], Stream]] = {}
    for name, found in selected.items():
        with failures.of(name):
            registered, plan = _plan(environment, shared.get(name, found), register, renamed_from)
            planned[name] = registered, plan.stream
            if output == "text":
                print_changes(name, (*registered, *plan.changes))
    for name, (registered, stream) in planned.items():
        with failures.of(name):
            changes = _apply(environment, stream, register, rolled_back, renamed_from)
            done[name] = [*registered, *changes]
            if output == "text":
                print_changes(name, changes or ["nothing to change"])
    if output == "json":
        print_applied(selected, done, failures.errors)
    failures.end()


def _list_new(environment: Environment, members: Members, selected: Selected) -> None:
    """List the tables of families that do not exist yet, before they are created."""
    from anabranch import config
    from anabranch.cli.render.operate import print_new_streams
    from anabranch.iceberg.lake import Lake

    streams = [stream for stream in config.loaded(selected) if stream.name in members]
    lake = Lake(environment)
    tables = set().union(
        *map(lake.table_names, {stream.table.partition(".")[0] for stream in streams})
    )
    new = [stream for stream in streams if stream.table not in tables]
    print_new_streams(new, members, len(streams))


def _plan(
    environment: Environment,
    found: Stream | ConfigurationError,
    register: bool,
    renamed_from: str | None,
) -> tuple[list[str], Planned]:
    """The tables that were registered first, in words; the stream with its columns, and what its
    subject changes."""
    from anabranch.iceberg.owner import open_lake
    from anabranch.subjects.resolve import plan_table, register_table

    if isinstance(found, ConfigurationError):
        raise found
    lake = open_lake(environment, found, renamed_from)
    registered = register_table(environment, found, lake) if register else []
    return registered, plan_table(environment, found, lake)


def _apply(
    environment: Environment,
    found: Stream,
    register: bool,
    rolled_back: bool,
    renamed_from: str | None,
) -> list[str]:
    from anabranch.iceberg.owner import open_lake
    from anabranch.kafka.client import KafkaAdapter
    from anabranch.protocol import apply

    with KafkaAdapter(environment.kafka) as kafka:
        return apply.apply(
            environment,
            found,
            open_lake(environment, found, renamed_from),
            kafka,
            register,
            rolled_back,
        )


@click.command()
@stream_argument
@click.option(
    "--from",
    "begin",
    metavar="earliest|latest|TIME|OFFSETS",
    help="Start position in a topic that was never read; offsets such as 0=120,1=98.",
)
@click.option("--why", metavar="TEXT", help="The reason, for the ledger.")
@options
def adopt(stream: str, begin: str | None, why: str | None, conf: str | None, output: str) -> None:
    """Continue with another topic, or with a truncated one.

    Seals the open hour at the published position, so that no hour mixes two topics. The next hour
    starts in the topic that the configuration names now. All rows stay served. A topic id that was
    read before continues at its last position. A new topic with records needs --from; without it
    nothing changes, and the exit code is 1.
    """
    from anabranch.cli.render.operate import print_adopted
    from anabranch.notifications import webhook
    from anabranch.protocol import topic_change
    from anabranch.protocol.publisher import Publisher
    from anabranch.protocol.start_offsets import parse_start

    choice = parse_start(begin) if begin is not None else None
    job = open_stream(stream, conf)
    with closing(job.kafka):
        publisher = Publisher(job.lake, job.stream)
        publisher.recover()
        adopted = topic_change.adopt(publisher, job.kafka, choice, why)
        webhook.notify(job)
    print_adopted(stream, job.stream.topic, adopted, output)


@click.command("serve-hour")
@stream_argument
@click.argument("hour", type=HOUR)
@click.option(
    "--layer",
    type=click.Choice(["speed", "batch", "auto"]),
    required=True,
    help="The layer to serve the hour; auto removes the choice.",
)
@click.option("--why", metavar="TEXT", required=True, help="The reason, for the ledger.")
@options
def serve_hour(
    stream: str,
    hour: str,
    layer: Literal["speed", "batch", "auto"],
    why: str,
    conf: str | None,
    output: str,
) -> None:
    """Choose the layer that serves an hour.

    The hour must be sealed. The choice overrides the rule until it is removed. Refused, with exit
    code 1 and without a change, when that layer's rows do not cover the hour's cut.
    """
    from anabranch.cli.render.operate import print_served
    from anabranch.notifications import webhook
    from anabranch.protocol import override
    from anabranch.protocol.publisher import Publisher

    job = open_stream(stream, conf)
    publisher = Publisher(job.lake, job.stream)
    publisher.recover()
    served = override.serve_hour(publisher, hour, layer, why)
    webhook.notify(job)
    print_served(stream, hour, served, output)


@click.command()
@stream_argument
@click.argument("hours")
@click.option("--release", is_flag=True, help="Let the hours expire again.")
@click.option("--why", metavar="TEXT", required=True, help="The reason, for the ledger.")
@options
def hold(stream: str, hours: str, release: bool, why: str, conf: str | None, output: str) -> None:
    """Keep hours beyond the stream's `keep`.

    HOURS is an hour, hours A..B (both included), or a day such as 2026-11-21 (UTC). Their rows do
    not expire until --release. Hours to come can be held; refused, with exit code 1, for an hour
    that has expired.
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
    help="The version of a Delta table; by default its newest.",
)
@click.option(
    "--hours",
    metavar="A..B",
    required=True,
    help="The hours to import; A.. is up to the stream's first.",
)
@click.option(
    "--time", metavar="COLUMN", help="The column with the time at which a row was received."
)
@click.option(
    "--seam",
    type=click.Choice(["offsets", "key"]),
    default="offsets",
    show_default=True,
    help="How to find rows that Kafka has; offsets where the files have them.",
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

    Each hour is accepted with an account of its own: source rows in place of offsets. The hours up
    to the stream's first are imported, newest first, some in a commit; the live position is not
    touched. A row's hour follows from --time, by default kafka_timestamp, timestamp or the stream's
    event time. Rows that repeat a row by the stream's key are left out. The same command continues
    an import that was interrupted, of a Delta table from the version that it began with, and
    changes nothing once it is done.
    """
    from anabranch.cli.render.imports import print_imported, print_planned
    from anabranch.lifecycle.importing import run
    from anabranch.notifications import webhook
    from anabranch.protocol.publisher import Publisher

    first, last = _hours_to_import(hours)
    job = open_stream(stream, conf)
    order = run.ImportRequest(files, first, last, time, seam == "key", why, version)
    if dry_run:
        print_planned(stream, run.plan(job, order), output)
        return
    done = run.run(job, Publisher(job.lake, job.stream), order)
    webhook.notify(job)
    print_imported(stream, done, job.stream.key, output)


def _hours_to_import(text: str) -> tuple[str, str | None]:
    from anabranch.offsets.hours import span_of, start_of

    if text.endswith(".."):
        start_of(text[:-2])
        return text[:-2], None
    return span_of(text)


@click.command()
@click.argument("folder", metavar="[DIR]", default=".")
@output_option
def init(folder: str, output: str) -> None:
    """Write a starter folder: configuration, DAGs, containers.

    Writes to DIR, by default the current folder: README.md, conf/, dags/, deploy/, a compose file
    with its Dockerfile. Overwrites nothing.
    """
    from pathlib import Path

    from anabranch.cli import starter
    from anabranch.cli.render.operate import print_written

    print_written(folder, starter.write(Path(folder)), output)


@click.command()
@selection
@click.option("--dry-run", is_flag=True, help="Only show what would be deleted.")
@options
def maintain(chosen: StreamSelection, dry_run: bool, conf: str | None, output: str) -> None:
    """Delete old speed rows, snapshots and orphan files.

    Deletes no row of main, but for hours that were kept as long as the stream's `keep.rows` says.
    The stream sets the other ages: `maintain: {orphans_after: 3 days, speed_hours: 1 day}`. Also
    deletes what killed jobs left in this machine's temporary folder. Run it at least once a day;
    other jobs may run meanwhile. --dry-run shows what would be deleted, how the last run ended, and
    what is waiting for each table; `anabranch metrics` and `anabranch serve` show that too. Eight
    streams at a time; an error of one does not stop the others, and one that does not answer within
    6 seconds is left out by name.
    """
    from anabranch.cli.render.maintenance import print_maintained
    from anabranch.common.output import print_json

    is_many = chosen.one() is None
    selected = many.select(chosen, conf)
    failures, views = Failures(), []
    for name, result in many.run(selected, many.load_table, lambda job: _maintain(job, dry_run)):
        with failures.of(name):
            done, known = result()
            if output == "text":
                print_maintained(name, done, known, dry_run)
            views.append(done | (known.as_dict() if known is not None else {}))
    if output == "json":
        found = [*views, *failures.views()]
        print_json(found if is_many else found[0])
    failures.end()


def _maintain(job: Job, dry_run: bool) -> tuple[dict[str, Any], Maintenance | None]:
    """Maintain one stream. Returns what was done, and with `dry_run` what is known of its
    maintenance."""
    from datetime import UTC, datetime

    from anabranch.lifecycle import maintenance
    from anabranch.operations.reports.maintenance import read_maintenance
    from anabranch.protocol.publisher import Publisher

    publisher = Publisher(job.lake, job.stream)
    if not dry_run:
        publisher.recover()
    done = maintenance.maintain(job, datetime.now(UTC), dry_run, publisher)
    known = read_maintenance(job, datetime.now(UTC)) if dry_run else None
    return maintenance.view(job.stream.name, done, dry_run), known


@click.command()
@stream_argument
@click.option("--dry-run", is_flag=True, help="Only show what would change.")
@options
def merge(stream: str, dry_run: bool, conf: str | None, output: str) -> None:
    """Give main each hour's files from its serving layer.

    Adds and removes files by reference; copies none.
    """
    from anabranch.cli.render.operate import print_merged
    from anabranch.protocol import merge

    job = open_stream(stream, conf)
    merged = merge.merge(job.lake, job.stream, dry_run=dry_run, everything=True)
    print_merged(stream, merged, dry_run, output)
    if any(swap.refused for swap in merged.swaps):
        sys.exit(1)


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
    "--until", type=DURATION, default="30 days", show_default=True, help="When nothing may be left."
)
@click.option("--dry-run", is_flag=True, help="Only show what would be erased.")
@click.option(
    "--again", is_flag=True, help="Also erase what arrived since the same request was done."
)
@click.option(
    "--in-spite-of-hold",
    "in_spite",
    metavar="TEXT",
    help="Erase records of hours that are kept too; why.",
)
@click.option("--status", is_flag=True, help="Show each erasure, and what is left of it.")
@click.option(
    "--verify", is_flag=True, help="With --status, scan every branch for the values again."
)
@click.option(
    "--scan", is_flag=True, help="Only look for the values in every byte of the stream's tables."
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
    scan: bool,
    conf: str | None,
    output: str,
) -> None:
    """Erase records by the values of a column.

    Removes rows and dead letters from every branch, and keeps both layers from bringing one back;
    the account of each hour has the class `erased`. An erasure is of the records that Kafka has
    accepted when it is requested. The same command continues it, and changes nothing once it is
    done; --again makes the next request. Refused while hours that are held (`anabranch hold`) have
    such records. Needs `erasure.key` in conf/anabranch.yaml. With --status, exit code 1 while
    something is left. --scan reads every object of the stream's tables, versions included; exit
    code 1 if one has a value.
    """
    from anabranch.cli.render.erasures import print_erased, print_found
    from anabranch.lifecycle.erasure import run
    from anabranch.protocol.publisher import Publisher

    if status:
        _erasure_status(stream, verify, conf, output)
        return
    if column is None or file is None or (why is None and not scan):
        raise click.UsageError(
            "expected --by COLUMN, --values FILE and --why TEXT; without --why, --scan; or "
            "--status alone"
        )
    try:
        values = frozenset(line.rstrip("\r\n") for line in file if line.strip())
    except UnicodeDecodeError as error:
        raise click.BadParameter(
            f"expected a file in UTF-8, found {error.reason}", param_hint="--values"
        ) from None
    if scan:
        _erasure_scan(stream, column, values, conf, output)
        return
    assert why is not None
    order = run.ErasureRequest(column, values, why, until, again, in_spite)
    job = open_stream(stream, conf)
    if dry_run:
        print_found(stream, run.find(job, order), output)
        return
    print_erased(stream, run.erase(job, Publisher(job.lake, job.stream), order), output)


def _erasure_scan(
    stream: str, column: str, values: frozenset[str], conf: str | None, output: str
) -> None:
    from anabranch.cli.render.erasures import print_scan
    from anabranch.lifecycle.erasure.scan import scan
    from anabranch.lifecycle.erasure.search import Values

    done = scan(open_stream(stream, conf), Values.of(column, values))
    print_scan(stream, done, len(values), output)
    if done.hits:
        sys.exit(1)


def _erasure_status(stream: str, verify: bool, conf: str | None, output: str) -> None:
    from datetime import UTC, datetime

    from anabranch.cli.render.erasures import print_erasures
    from anabranch.lifecycle.erasure.status import read_statuses

    statuses = read_statuses(open_stream(stream, conf), datetime.now(UTC), verify)
    print_erasures(stream, statuses, output)
    if any(not one.is_certificate for one in statuses):
        sys.exit(1)
