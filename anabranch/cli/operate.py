"""Commands that change a stream or its tables on request, or read a topic's newest records before a
stream has tables."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal

import click

from anabranch.cli import many
from anabranch.cli.options import (
    HOUR,
    StreamSelection,
    all_streams,
    conf_folder,
    explain,
    open_stream,
    output_format,
    stream_argument,
)
from anabranch.cli.report import Report, Result, StreamReports, print_text, report
from anabranch.common.deadline import KAFKA
from anabranch.common.errors import AnabranchError, ConfigurationError

if TYPE_CHECKING:
    from anabranch.common.deadline import Note
    from anabranch.config import Environment, Stream
    from anabranch.job import Job
    from anabranch.operations.check import Check
    from anabranch.operations.draft import Draft
    from anabranch.operations.reports.drift import SchemaDrift
    from anabranch.subjects.follow import Planned

LOG = logging.getLogger(__name__)


@click.command()
@all_streams
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
@report
def apply(
    chosen: StreamSelection, register: bool, rolled_back: bool, renamed_from: str | None
) -> StreamReports:
    """Create or change tables, branches and bucket.

    \b
    anabranch apply
    anabranch apply orders --renamed-from shop_orders

    Prints each change, and for a new stream what `anabranch check` finds, as a warning. With
    `schema: registry`, first lists the changes of the subject's latest version. An error of one
    stream does not stop the others; the exit code is that of the first stream with an error. A
    table that is in storage but not in the catalog is not created again: after a lost or restored
    catalog, or a restored bucket, stop the stream's jobs and use --register. Columns are never
    dropped. With --rolled-back, jobs run with a file that lacks some columns and write null there,
    until a file with these columns is applied. A table belongs to one stream; after its file was
    renamed, --renamed-from gives the table to the new name.
    """
    from anabranch.cli.render.rows import checked_text

    for flag, given, which in (
        ("--rolled-back", rolled_back, "whose file was put back"),
        ("--renamed-from", renamed_from, "the new name"),
    ):
        if given and chosen.one is None:
            raise ConfigurationError(
                f"{flag}: expected one STREAM, {which}; found {len(chosen.streams)}"
            )
    selected = many.select(chosen)
    for error in selected.unanswered:
        raise error
    environment, is_text = selected.environment, output_format() == "text"
    if is_text:
        _list_new(selected)
    planned: dict[str, tuple[list[str], Stream | Exception]] = {}
    for name, found in selected.selected.items():
        try:
            registered, plan = _plan(environment, found, register, renamed_from)
        except Exception as error:
            planned[name] = [], error
            continue
        planned[name] = registered, plan.stream
        if is_text:
            print_text(f"{name}: {change}" for change in (*registered, *plan.changes))

    def applied() -> Iterator[tuple[str, Report[object]]]:
        for name, (changes, found) in planned.items():
            view = {"stream": name, "changes": changes, "check": None, "error": None}
            try:
                if isinstance(found, Exception):
                    raise found
                made, check = _apply(environment, found, register, rolled_back, renamed_from)
            except Exception as error:
                failed = explain(error)
                yield name, Report(view | {"error": str(failed)}, [], errors=(failed,))
                continue
            lines = [*made, *(checked_text(check) if check is not None else ())]
            yield (
                name,
                Report(
                    view | {"changes": [*changes, *made], "check": check},
                    [f"{name}: {line}" for line in lines or ["nothing to change"]],
                ),
            )

    return StreamReports(applied())


def _list_new(selected: many.Many) -> None:
    """Print the streams of families whose tables do not exist yet, before they are created."""
    from anabranch import config
    from anabranch.cli.render.changes import new_streams_text

    streams = [stream for stream in config.loaded(selected.selected) if stream.family is not None]
    spaces = {stream.table.partition(".")[0] for stream in streams}
    tables = set().union(*map(selected.catalog.table_names, spaces))
    print_text(new_streams_text([s for s in streams if s.table not in tables], len(streams)))


def _plan(
    environment: Environment,
    found: Stream | ConfigurationError,
    register: bool,
    renamed_from: str | None,
) -> tuple[list[str], Planned]:
    """Register the stream's tables if asked, and plan its changes. Return the registrations as
    text, and the stream with its columns and the changes of its subject."""
    from anabranch.iceberg.owner import open_lake
    from anabranch.subjects.follow import plan_table, register_table

    if isinstance(found, ConfigurationError):
        raise found
    lake = open_lake(environment, found, renamed_from)
    registered = register_table(found, lake) if register else []
    return registered, plan_table(environment, found, lake)


def _apply(
    environment: Environment,
    found: Stream,
    register: bool,
    rolled_back: bool,
    renamed_from: str | None,
) -> tuple[list[str], Check | None]:
    """Return the changes, and the check of a stream that is new."""
    from anabranch.iceberg.owner import open_lake
    from anabranch.kafka.client import KafkaAdapter
    from anabranch.operations.check import check
    from anabranch.protocol import apply

    with KafkaAdapter(environment.kafka) as kafka:
        lake = open_lake(environment, found, renamed_from)
        is_new = not register and not lake.exists(found.table)
        changes = apply.apply(environment, found, lake, kafka, register, rolled_back)
        try:
            return changes, check(environment, found, kafka) if is_new else None
        except AnabranchError as error:
            # The tables are there: what the check could not read does not undo that.
            LOG.warning("stream %s: its newest records are not checked: %s", found.name, error)
            return changes, None


@click.command()
@stream_argument
@click.option(
    "--from",
    "begin",
    metavar="earliest|latest|TIME|OFFSETS",
    help="Start position in a topic that was never read; offsets such as 0=120,1=98.",
)
@click.option("--why", metavar="TEXT", help="The reason, for the ledger.")
@report
def adopt(stream: str, begin: str | None, why: str | None) -> Report[object]:
    """Continue with another topic, or with a truncated one.

    \b
    anabranch adopt game_events --from earliest --why "the topic was created again"

    Seals the open hour at the published position, so that no hour mixes two topics. The next hour
    starts in the topic that the configuration names now. All rows stay served. A topic id that was
    read before continues at its last position. A new topic with records needs --from; without it
    nothing changes, and the exit code is 1.
    """
    from anabranch.cli.render.changes import adopted_text, adopted_view
    from anabranch.protocol import topic_change
    from anabranch.protocol.publisher import Publisher
    from anabranch.protocol.topic_change import parse_start

    choice = parse_start(begin) if begin is not None else None
    job = open_stream(stream)
    publisher = Publisher(job.lake, job.stream)
    publisher.recover()
    adopted = topic_change.adopt(publisher, job.kafka, choice, why)
    return Report(adopted_view(stream, adopted), adopted_text(stream, job.stream.topic, adopted))


@click.command()
@stream_argument
@click.argument("hour", type=HOUR)
@click.option(
    "--layer",
    type=click.Choice(["speed", "batch", "auto"]),
    required=True,
    help="The layer to serve the hour; auto removes the choice.",
)
@click.option("--why", metavar="TEXT", required=True, help="The reason, for the ledger.")
@report
def override(
    stream: str, hour: str, layer: Literal["speed", "batch", "auto"], why: str
) -> Report[object]:
    """Choose the layer that serves an hour.

    \b
    anabranch override game_events 2026-11-21T03 --layer speed --why "batch lacks a column"

    The hour must be sealed. The choice overrides the rule until it is removed. If the layer's rows
    do not cover the hour's cut, the command is refused with exit code 1 and changes nothing.
    """
    from anabranch.protocol.acts import serve_hour
    from anabranch.protocol.publisher import Publisher

    job = open_stream(stream)
    publisher = Publisher(job.lake, job.stream)
    publisher.recover()
    served = serve_hour(publisher, hour, layer, why)
    view = {
        "stream": stream,
        "hour": hour,
        "served": served.layer,
        "override": served.override,
        "changed": served.changed,
    }
    chosen = "by choice" if served.override else "by the rule"
    now = "now " if served.changed else ""
    return Report(view, [f"{stream}: {hour} is {now}served by {served.layer}, {chosen}"])


@click.command()
@stream_argument
@click.option("--dry-run", is_flag=True, help="Only show what would change.")
@report
def merge(stream: str, dry_run: bool) -> Report[object]:
    """Give main each hour's files from its serving layer.

    \b
    anabranch merge game_events --dry-run

    Adds and removes files by reference; copies none.
    """
    from anabranch.cli.render.changes import merged_text, merged_view
    from anabranch.protocol import merge

    job = open_stream(stream)
    merged = merge.merge(job.lake, job.stream, dry_run=dry_run, everything=True)
    return Report(
        merged_view(stream, merged, dry_run),
        merged_text(stream, merged),
        exit_code=any(swap.refused for swap in merged.swaps),
    )


@click.command()
@click.argument("topic")
@click.option("--write", is_flag=True, help="Write the files to the configuration folder.")
@report
def draft(topic: str, write: bool) -> StreamReports:
    """Print a stream's file for a topic, from its records.

    \b
    anabranch draft shop.orders
    anabranch draft 'shop[.].*' --write

    Reads the newest 1,000 records, the oldest 200, and the subject in the schema registry. TOPIC
    may be a regular expression for whole names. Comments list what you must decide; types are wide
    where the records leave a doubt. --write keeps files that exist, with an error.
    """
    from anabranch import config
    from anabranch.common.logs import configure_logging
    from anabranch.config.plain import resolve_folder
    from anabranch.kafka.client import KafkaAdapter
    from anabranch.operations import draft as drafting

    configure_logging()
    folder = resolve_folder(conf_folder())
    environment = config.load_environment(folder)

    def drafted() -> Iterator[tuple[str, Report[Draft] | AnabranchError]]:
        with KafkaAdapter(environment.kafka) as kafka:
            topics = drafting.topics_of(kafka, topic)
            for of, (name, table) in drafting.names_of(topics).items():
                try:
                    found = drafting.draft(environment, folder, kafka, name, of, table)
                    lines = found.file.splitlines()
                    if write:
                        lines = [f"wrote {drafting.write(folder, found)}"]
                except Exception as error:
                    yield of, explain(error)
                    continue
                between = ["---"] if len(topics) > 1 and not write else []
                yield of, Report(found, [*between, *lines])

    return StreamReports(drafted())


@click.command()
@all_streams
@click.option(
    "--records",
    "count",
    metavar="N",
    type=click.IntRange(min=1),
    default=1000,
    help="Number of records, spread over the partitions.",
)
@click.option("--drift", is_flag=True, help="Instead list fields that the schema lacks.")
@report
def check(chosen: StreamSelection, count: int, drift: bool) -> Result:
    """Decode the newest records by the stream's file.

    \b
    anabranch check orders
    anabranch check game_events --drift

    Prints how many would be rows, dead letters and duplicates, each reason with its first record,
    and the first rows. Needs no tables, reads no more than these records, and writes nothing. The
    exit code is 1 when more are dead letters than `quality.max_dead` of the stream's file, more are
    duplicates with other content than `quality.max_conflicts`, or no record has the key or a column
    that a field nearly names.

    The batch layer counts fields that the schema lacks by name with each hour (`unknown: count` in
    the stream's file). --drift prints the number of records with each, samples, a guessed type, the
    stream's new `schema:`, and the commands to run: `apply`, and the restatement of each hour that
    Kafka still has.
    """
    if drift:
        return many.run_streams(chosen, _drift)

    from anabranch.cli.render.rows import check_text
    from anabranch.operations import check as checking
    from anabranch.subjects.follow import plan_table

    def ready(job: Job, note: Note) -> None:
        note(KAFKA)
        # To confirm that a topic is missing takes as long as an answer may.
        job.kafka.describe(job.stream.topic, confirmed=False)

    def work(job: Job) -> Report[Check]:
        # As `apply` would: a subject may have columns that the table does not have yet.
        stream = plan_table(job.environment, job.stream.without_columns(), job.lake).stream
        found = checking.check(job.environment, stream, job.kafka, count)
        return Report(found, check_text(found), exit_code=bool(found.objections))

    return many.run_streams(chosen, work, ready)


def _drift(job: Job) -> Report[SchemaDrift]:
    from anabranch.cli.render.rows import drift_text
    from anabranch.operations.reports import drift

    view = drift.drift(job)
    return Report(view, drift_text(view))
