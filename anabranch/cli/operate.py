"""Commands that change a stream or its tables on request."""

from __future__ import annotations

import sys
from contextlib import closing
from typing import TYPE_CHECKING, Literal

import click

from anabranch.cli.options import (
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
    from anabranch.config import Environment, Members, Selected, Stream
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
    lists the changes of the subject's latest version. An error of one stream does not stop the
    others; the exit code is that of the first stream with an error. A table that is in storage but
    not in the catalog is not created again: after a lost or restored catalog, or a restored bucket,
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
        with failures.catching(name):
            registered, plan = _plan(environment, shared.get(name, found), register, renamed_from)
            planned[name] = registered, plan.stream
            if output == "text":
                print_changes(name, (*registered, *plan.changes))
    for name, (registered, stream) in planned.items():
        with failures.catching(name):
            changes = _apply(environment, stream, register, rolled_back, renamed_from)
            done[name] = [*registered, *changes]
            if output == "text":
                print_changes(name, changes or ["nothing to change"])
    if output == "json":
        print_applied(selected, done, failures.errors)
    failures.end()


def _list_new(environment: Environment, members: Members, selected: Selected) -> None:
    """Print the streams of families whose tables do not exist yet, before they are created."""
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
    """Register the stream's tables if asked, and plan its changes. Return the registrations as
    text, and the stream with its columns and the changes of its subject."""
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
    from anabranch.protocol import topic_change
    from anabranch.protocol.publisher import Publisher
    from anabranch.protocol.start_offsets import parse_start

    choice = parse_start(begin) if begin is not None else None
    job = open_stream(stream, conf)
    with closing(job.kafka):
        publisher = Publisher(job.lake, job.stream)
        publisher.recover()
        adopted = topic_change.adopt(publisher, job.kafka, choice, why)
    print_adopted(stream, job.stream.topic, adopted, output)


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
@options
def override(
    stream: str,
    hour: str,
    layer: Literal["speed", "batch", "auto"],
    why: str,
    conf: str | None,
    output: str,
) -> None:
    """Choose the layer that serves an hour.

    The hour must be sealed. The choice overrides the rule until it is removed. If the layer's rows
    do not cover the hour's cut, the command is refused with exit code 1 and changes nothing.
    """
    from anabranch.cli.render.operate import print_served
    from anabranch.protocol.override import serve_hour
    from anabranch.protocol.publisher import Publisher

    job = open_stream(stream, conf)
    publisher = Publisher(job.lake, job.stream)
    publisher.recover()
    served = serve_hour(publisher, hour, layer, why)
    print_served(stream, hour, served, output)


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
