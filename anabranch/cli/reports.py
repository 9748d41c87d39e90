"""Commands that report on streams; they only read."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Literal

import click

from anabranch.cli import many
from anabranch.cli.options import (
    DURATION,
    StreamSelection,
    all_streams,
    conf_folder,
    conf_option,
    open_stream,
)
from anabranch.cli.report import Report, Result, report, watched_report
from anabranch.common.errors import AnabranchError

if TYPE_CHECKING:
    from datetime import timedelta

    from anabranch.common.deadline import Note
    from anabranch.job import Job
    from anabranch.operations.reports.streams import StreamSummary


_CATALOG_SECONDS = 5.0


@click.command()
@all_streams
@click.option(
    "--list",
    "only_list",
    is_flag=True,
    help="Only list the streams: family, group, topic, table and state.",
)
@click.option(
    "--late-after", type=DURATION, help="Longest time without progress, such as '10 minutes'."
)
@click.option(
    "--position",
    type=click.Choice(["spark", "kafka", "json"]),
    help="Only print where a consumer of the topic continues after `main`.",
)
@watched_report
def status(
    chosen: StreamSelection,
    only_list: bool,
    late_after: timedelta | None,
    position: Literal["spark", "kafka", "json"] | None,
) -> Callable[[], Result]:
    """Show position, lag, backlog and the serving layers.

    \b
    anabranch status
    anabranch status game_events --late-after '10 minutes' --watch

    The exit code is 1 when the layers differ in an hour without an explanation; with --late-after
    also when a record has waited and the position has not moved for that long. Several streams are
    read concurrently, with a line for each; one that does not answer within 6 seconds is named, and
    the exit code is 75. Of views, it prints how many accepted hours are precomputed.

    --list reads only the configuration and the names of topics and tables. State `ready`: the
    stream has its table; `new`: it needs `anabranch apply`; `gone`: Kafka no longer has the topic
    of a family's stream, whose tables stay; `broken`: its file is wrong; `unknown`: the catalog
    does not answer. The exit code is then 1 when one is broken or unknown, or when Kafka does not
    list the topics.

    --position prints the first offset of each partition that `main` does not account for: as
    `startingOffsets` of Spark's Kafka source, as a file for `kafka-consumer-groups --reset-offsets
    --from-file`, or as JSON with the snapshot. A consumer that has copied this snapshot and begins
    there misses no record. Records that it gets twice, because an earlier hour waits to be
    accepted, are counted.
    """
    from anabranch.cli.render.streams import status_text, statuses_text
    from anabranch.operations.reports import status as views

    if only_list:
        return lambda: _list_streams(chosen)
    if position is not None:
        if chosen.one is None:
            raise click.UsageError("expected one STREAM with --position")
        job = open_stream(chosen.one)
        return lambda: _position(job, position)

    def read(job: Job, note: Note) -> Report[views.StreamStatus]:
        view = views.status(job, late_after, note)
        return Report(view, status_text(view), exit_code=bool(view.unexplained or view.late))

    if chosen.one is not None:
        return many.read_streams(chosen, read)
    selected = many.select(chosen)

    def read_all() -> Report[object]:
        found = many.ask(selected, read)
        reports = {n: r for n, r in found.items() if isinstance(r, Report)}
        return Report(
            [_view(name, answer) for name, answer in found.items()],
            statuses_text({name: one.view for name, one in reports.items()}),
            exit_code=any(one.exit_code for one in reports.values()),
            errors=(
                *selected.unanswered,
                *(error for error in found.values() if isinstance(error, AnabranchError)),
            ),
        )

    return read_all


def _position(job: Job, form: str) -> Report[object]:
    from anabranch.cli.render.streams import position_text
    from anabranch.operations.reports.streams import position_of

    found = position_of(job)
    if found.again:
        click.echo(
            f"from there on, {found.again} offsets are in main too: an earlier hour waits to be "
            "accepted",
            err=True,
        )
    return Report(found.as_spark() if form == "spark" else found, position_text(found, form))


def _view(stream: str, answer: Report[object] | AnabranchError) -> object:
    """Return the JSON of a stream in a list."""
    if isinstance(answer, AnabranchError):
        return {"stream": stream, "error": str(answer)}
    return answer.view


def _list_streams(chosen: StreamSelection) -> Report[list[StreamSummary]]:
    from anabranch import config
    from anabranch.cli.render.streams import streams_text
    from anabranch.common.deadline import TimedRead
    from anabranch.common.logs import configure_logging
    from anabranch.family_streams import FamilyStreams
    from anabranch.iceberg.lake import Lake
    from anabranch.operations.reports import streams

    configure_logging()
    conf = conf_folder()
    environment = config.load_environment(conf)
    families = FamilyStreams(environment, conf)
    selected = families.select(chosen.streams, chosen.group, chosen.every)
    lake, namespaces = Lake(environment), streams.namespaces_of(selected)
    tables = TimedRead(
        "catalog", lambda: set().union(*map(lake.table_names, namespaces)), _CATALOG_SECONDS
    ).facts()
    groups = {name: config.group_in_file(name, conf) for name in config.broken(selected)}
    known = str(tables) if isinstance(tables, AnabranchError) else tables
    views = streams.summarize(selected, groups, known, families.read_members)
    for error in families.unanswered:
        click.echo(f"anabranch: {error}", err=True)
    is_wrong = bool(families.unanswered) or any(v.state in ("broken", "unknown") for v in views)
    return Report(views, streams_text(views), exit_code=is_wrong)


@click.command()
@all_streams
@click.option(
    "--limit",
    metavar="SECONDS",
    type=click.FloatRange(min=1),
    help="Longest time for one check; the others continue.  [default: 6.5 for services, 40 for "
    "other checks]",
)
@report
def doctor(chosen: StreamSelection, limit: float | None) -> Report[Mapping[str, object]]:
    """Examine the installation; name what to run or set.

    \b
    anabranch doctor
    anabranch doctor game_events --output json

    Checks Java, jars, Kafka, S3, catalog, tables and streams; each finding has its remedy. Run it
    first, and when something fails. It only reads, except for a small test object under the
    warehouse, which it deletes. Ends with `ready` and the next command, or with exit code 1 and the
    first remedy when there is an error; warnings leave the exit code 0.
    """
    from anabranch import config
    from anabranch.cli.render.streams import doctor_text
    from anabranch.operations.doctor import examine

    conf = conf_folder()
    selected = many.select(chosen)
    found, broken = config.loaded(selected.selected), config.broken(selected.selected).values()
    if not found:
        for error in broken:
            raise error
    done = examine(selected.environment, found, config.families_of(found, conf), limit)
    view = {
        "ready": done.ready,
        "next": done.next,
        "findings": done.findings,
        "examined": done.examined,
    }
    return Report(
        view, doctor_text(done), exit_code=not done.ready, errors=(*selected.unanswered, *broken)
    )


@click.command()
@click.argument("streams", nargs=-1)
@click.option(
    "--port",
    type=click.IntRange(1, 65535),
    default=8090,
    show_default=True,
    help="The port to listen at.",
)
@click.option("--host", default="127.0.0.1", show_default=True, help="The address to listen at.")
@click.option(
    "--behind-proxy", is_flag=True, help="A reverse proxy terminates TLS and authenticates users."
)
@click.option(
    "--allow-host",
    multiple=True,
    metavar="NAME",
    help="Host name of the page that requests may have. [repeatable]",
)
@click.option(
    "--refresh", type=DURATION, default="10 seconds", show_default=True, help="Interval of reads."
)
@click.option(
    "--deadline",
    type=DURATION,
    default="30 seconds",
    show_default=True,
    help="Time after which an answer is overdue.",
)
@click.option(
    "--late-after",
    type=DURATION,
    default="10 minutes",
    show_default=True,
    help="Longest time without progress of the position while offsets wait.",
)
@conf_option
def page(
    streams: tuple[str, ...],
    port: int,
    host: str,
    behind_proxy: bool,
    allow_host: tuple[str, ...],
    refresh: timedelta,
    deadline: timedelta,
    late_after: timedelta,
) -> None:
    """Serve the status page, and /metrics for Prometheus.

    \b
    anabranch page --port 8090

    Shows the state of all streams, or of STREAMS, a calendar of their hours, and the details of
    each hour. It only reads. Only this machine can connect to it, unless --behind-proxy is given.
    Runs until stopped, and follows stream files that are added, changed or removed, and topics of
    families.
    """
    from anabranch.common.errors import ConfigurationError
    from anabranch.common.logs import configure_logging
    from anabranch.job import StreamFolder

    try:
        from anabranch.operations.page.app import Page, Settings
        from anabranch.operations.page.server import allowed_hosts, listen, run
    except ModuleNotFoundError as error:
        raise ConfigurationError(
            f"page: expected Starlette, uvicorn and Jinja2, found no {error.name}; run `pip "
            "install 'anabranch[page]'`"
        ) from error

    hosts = allowed_hosts(host, allow_host, behind_proxy)
    configure_logging()
    app = Page(StreamFolder(conf_folder(), streams), Settings(refresh, deadline, late_after))
    with listen(host, port) as socket:
        click.echo(f"serving http://{f'[{host}]' if ':' in host else host}:{port}/", err=True)
        run(app.app(hosts), socket)
