"""Commands that report on streams, and the texts of their reports; they only read."""

from __future__ import annotations

import json
import textwrap
from collections import Counter
from collections.abc import Mapping, Sequence
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
from anabranch.cli.report import Report, Result, Table, Text, report, table_of
from anabranch.common.errors import AnabranchError
from anabranch.operations.finding import Finding, Issue, Severity

if TYPE_CHECKING:
    from datetime import timedelta

    from anabranch.common.deadline import Note
    from anabranch.job import Job
    from anabranch.operations.doctor import Report as Examined
    from anabranch.operations.reports.status import ConsumerPosition, StreamStatus, StreamSummary


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
@report
def status(
    chosen: StreamSelection,
    only_list: bool,
    late_after: timedelta | None,
    position: Literal["spark", "kafka", "json"] | None,
) -> Result:
    """Show position, lag, backlog and the serving layers.

    \b
    anabranch status
    anabranch status game_events --late-after '10 minutes'

    The exit code is 1 when the layers differ in an hour without an explanation, or jobs refuse the
    topic; with --late-after also when a record has waited and the position has not moved for that
    long. Several streams are read concurrently, with a line for each; one that does not answer
    within 6 seconds is named, and the exit code is 75. Of views, it prints how many accepted hours
    are precomputed.

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
    from anabranch.operations.reports import status as views

    if only_list:
        return _list_streams(chosen)
    if position is not None:
        if chosen.one is None:
            raise click.UsageError("expected one STREAM with --position")
        return _position(open_stream(chosen.one), position)

    def read(job: Job, note: Note) -> Report[views.StreamStatus]:
        view = views.status(job, late_after, note)
        is_wrong = bool(view.unexplained or view.late or view.unreadable)
        return Report(view, status_text(view), exit_code=is_wrong)

    if chosen.one is not None:
        return many.read_streams(chosen, read)
    selected = many.select(chosen)
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


def _position(job: Job, form: str) -> Report[object]:
    from anabranch.operations.reports.status import position_of

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
    from anabranch.common.deadline import TimedRead
    from anabranch.common.logs import configure_logging
    from anabranch.family_streams import FamilyStreams
    from anabranch.iceberg.lake import Lake
    from anabranch.operations.reports import status

    configure_logging()
    conf = conf_folder()
    environment = config.load_environment(conf)
    families = FamilyStreams(environment, conf)
    selected = families.select(chosen.streams, chosen.group, chosen.every)
    lake = Lake(environment)
    namespaces = {stream.table.rpartition(".")[0] for stream in config.loaded(selected)}
    tables = TimedRead(
        "catalog", lambda: set().union(*map(lake.table_names, namespaces)), _CATALOG_SECONDS
    ).facts()
    groups = {name: config.group_in_file(name, conf) for name in config.broken(selected)}
    known = str(tables) if isinstance(tables, AnabranchError) else tables
    views = status.summarize(selected, groups, known, families.read_members)
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
    from anabranch.operations.doctor import examine

    selected = many.select(chosen)
    found, broken = config.loaded(selected.selected), config.broken(selected.selected).values()
    if not found:
        for error in broken:
            raise error
    done = examine(selected.environment, found, limit)
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
@click.option("--port", type=click.IntRange(1, 65535), default=8090, help="The port to listen at.")
@click.option("--host", default="127.0.0.1", help="The address to listen at.")
@click.option(
    "--behind-proxy", is_flag=True, help="A reverse proxy terminates TLS and authenticates users."
)
@click.option(
    "--allow-host",
    multiple=True,
    metavar="NAME",
    help="Host name of the page that requests may have. [repeatable]",
)
@click.option("--refresh", type=DURATION, default="10 seconds", help="Interval of reads.")
@click.option(
    "--deadline", type=DURATION, default="30 seconds", help="Time after which an answer is overdue."
)
@click.option(
    "--late-after",
    type=DURATION,
    default="10 minutes",
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
    from anabranch.common.errors import installed
    from anabranch.common.logs import configure_logging
    from anabranch.job import StreamFolder

    with installed("page", "Starlette, uvicorn and Jinja2", "anabranch[page]"):
        from anabranch.operations.page.app import Page, Settings, allowed_hosts, listen, run

    hosts = allowed_hosts(host, allow_host, behind_proxy)
    configure_logging()
    app = Page(StreamFolder(conf_folder(), streams), Settings(refresh, deadline, late_after))
    with listen(host, port) as socket:
        click.echo(f"serving http://{f'[{host}]' if ':' in host else host}:{port}/", err=True)
        run(app.app(hosts), socket)


_WIDTH = 80  # columns of a finding


def position_text(view: ConsumerPosition, form: str) -> Text:
    """Return a position in the form of a tool: `spark`, `kafka` or `json`."""
    from anabranch.common.output import plain

    if form == "kafka":
        yield from view.as_csv()
    else:
        shown = view.as_spark() if form == "spark" else plain(view)
        yield json.dumps(shown)


def status_text(view: StreamStatus) -> Text:
    from anabranch.protocol.registers import span_words

    share = view.running_dead_share
    rows: list[tuple[str, object]] = [
        ("topic", f"{view.topic} ({view.topic_id or 'not seen yet'})"),
        ("position", ", ".join(f"{p}: {o}" for p, o in view.position.items())),
        ("position since", view.position_since.isoformat()),
        ("lag", _lag(view, f"{view.lag.offsets} offsets")),
        *(
            (f"last publish to {b}", "never" if at is None else at.isoformat())
            for b, at in view.last_publish.items()
        ),
        ("open hour", view.open_hour),
        ("complete through", view.complete_through or "none"),
        ("ended, to be sealed", ", ".join(view.to_seal) or "none"),
        ("sealed, not accepted", ", ".join(view.backlog) or "none"),
        ("refused", ", ".join(view.refused) or "none"),
        ("refused restatements", ", ".join(view.refused_restatements) or "none"),
        ("hours by batch", sum(1 for layer in view.hours.values() if layer == "batch")),
        ("dead letters", view.dead_letters),
        (
            "newest hour's dead letters",
            f"{max(view.dead_shares)}: {share.words}" if share is not None else "no records",
        ),
        (
            "lost to retention",
            ", ".join(f"{n} offsets in {h}" for h, n in view.lost.items()) or "none",
        ),
        (
            "unexplained differences",
            f"in {len(view.unexplained)} hours" if view.unexplained else "none",
        ),
        ("expired hours", view.expired_hours),
    ]
    yield Table((view.stream, ""), rows)
    if view.views:
        yield Table(
            ("view", "table", "hours filled", "hours missing", "first missing"),
            [
                (v.view, v.table, v.filled, len(v.lacking), ", ".join(v.lacking[:3]))
                for v in view.views
            ],
        )
    yield from _faults(view, *Issue)
    for words in span_words(view.holds):
        yield f"hours {words}"
    for hour, layer in view.overrides.items():
        command = f"anabranch override {view.stream} {hour} --layer auto --why TEXT"
        yield f"hour {hour}: served by {layer} by choice; `{command}` removes the choice"


def statuses_text(views: Mapping[str, StreamStatus]) -> Text:
    """Return the state of many streams, a line each."""
    yield table_of(_status_cells(name, view) for name, view in views.items())
    for view in views.values():
        yield from _faults(view, Issue.TOPIC_MISSING, Issue.TOPIC_RECREATED, Issue.LATE)


def _faults(view: StreamStatus, *of: Issue) -> Text:
    from anabranch.operations.reports.status import faults

    for one in faults(view):
        if one.check in of:
            yield f"{one.subject}: expected {one.expected}, found {one.found}; `{one.remedy}`"
    # No fault, but the reason of exit code 1.
    if view.late and view.is_new and view.unreadable is None:
        name = view.stream
        yield f"{name}: no job has published yet: {view.late}; `anabranch speed {name}`"


def _lag(view: StreamStatus, lag: object) -> object:
    if view.topic_missing:
        return "no such topic"
    # The offsets of another log have nothing to do with the position.
    return "topic recreated" if view.topic_recreated else "log cut off" if view.unreadable else lag


def _status_cells(name: str, view: StreamStatus) -> dict[str, object]:
    from anabranch.protocol.ledger_row import percent

    waiting, share = view.waiting_since, view.running_dead_share
    return {
        "stream": name,
        "lag": _lag(view, view.lag.offsets),
        "waiting since": waiting.isoformat(timespec="seconds") if waiting is not None else "",
        "complete through": view.complete_through or "none",
        "to seal": len(view.to_seal),
        "sealed": len(view.backlog),
        "refused": len(view.refused),
        "dead share": percent(share.share) if share is not None else "",
        "unexplained": len(view.unexplained),
    }


def streams_text(views: Sequence[StreamSummary]) -> Text:
    """Return the streams as their files declare them."""
    yield table_of(map(vars, views))


def doctor_text(examined: Examined) -> Text:
    """Return what was examined, and the findings in 80 columns, the most severe first."""
    yield Table(
        ("examined", "found", "took"),
        [(one.name, _counted(one.findings), f"{one.seconds:.1f} s") for one in examined.examined],
    )
    for severity in Severity:
        for finding in (f for f in examined.findings if f.severity is severity):
            yield from _finding(finding)
    yield (
        f"\nready; next: {examined.next}"
        if examined.ready
        else f"\nnot ready; first: {examined.next}"
    )


def _counted(findings: Sequence[Finding]) -> str:
    counts = Counter(finding.severity for finding in findings)
    return ", ".join(f"{counts[s]} {s}" for s in Severity if counts[s]) or "in order"


def _finding(finding: Finding) -> Text:
    """Return the lines of a finding. The remedy is one line, so that it can be copied."""
    yield f"\n{finding.severity} {finding.check}: {finding.subject}"
    for word, said in (("expected", finding.expected), ("found", finding.found)):
        yield from textwrap.wrap(
            f"{word:<8} {said}",
            _WIDTH,
            initial_indent="  ",
            subsequent_indent=" " * 11,
            break_on_hyphens=False,
            break_long_words=False,
        )
    yield f"  {'remedy':<8} {finding.remedy}"
