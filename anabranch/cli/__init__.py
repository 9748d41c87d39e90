"""The command line: one verb an action. Heavy imports wait until a command needs them."""

from __future__ import annotations

import importlib
import sys
from typing import Any, Literal, NoReturn

import click

from anabranch import __version__
from anabranch.cli import operate, reports
from anabranch.cli.options import master_option, open_stream, options
from anabranch.errors import AnabranchError, ConfigurationError, Unexpected


class _Commands(click.Group):
    """Turns an error of ours into one line and its exit code, and finds `dev` when it is asked for."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted([*super().list_commands(ctx), "dev"])

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name == "dev":
            command: click.Command = importlib.import_module("anabranch.dev.cli").dev
            return command
        return super().get_command(ctx, name)

    def main(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return super().main(*args, **kwargs)
        except AnabranchError as error:
            _fail(error)
        except Exception as error:
            _fail(_explained(error))


def _explained(error: Exception) -> AnabranchError:
    """The error of ours for one that no command turned into one itself; what nobody meant to happen is shown whole."""
    import traceback

    from anabranch.remote_errors import meant_by_nobody

    found = meant_by_nobody("run the command", error)
    if found.exit_code == Unexpected.exit_code:
        click.echo("".join(traceback.format_exception(error)), err=True, nl=False)
    return found


def _fail(error: AnabranchError) -> NoReturn:
    click.echo(f"anabranch: {error}", err=True)
    sys.exit(error.exit_code)


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="anabranch")
def main() -> None:
    """Kafka to one exact Iceberg table through two arms.

    Exit codes: 0 done, 1 refused or found wanting, 2 wrong usage or configuration, 70 unexpected, 75 transient (try
    again).
    """


@main.command()
@click.argument("stream", required=False)
@click.option("--register", is_flag=True, help="First make the catalog know again the tables that storage holds.")
@click.option(
    "--rolled-back", is_flag=True, help="The stream's file is an older one on purpose: leave its table ahead of it."
)
@options
def apply(stream: str | None, register: bool, rolled_back: bool, conf: str | None, output: str) -> None:
    """Create or evolve tables, branches and bucket; say what changed. Without STREAM: all streams.

    A table that storage holds and the catalog does not know is not made anew: a lost or restored catalog, or a restored
    bucket, is mended by --register, with the stream's jobs stopped. Columns are never taken away: with --rolled-back
    the jobs of a file that lacks some go on, and their rows have null there, until its table's own file is applied.
    """
    from anabranch import config
    from anabranch.output import print_json
    from anabranch.protocol import apply

    if rolled_back and not stream:
        raise ConfigurationError("--rolled-back: expected STREAM, whose file was put back; found none")
    names = [stream] if stream else list(config.stream_names(conf))
    if not names:
        raise AnabranchError(f"{config.resolve_folder(conf)}/streams: expected at least one stream's file, found none")
    done = {}
    for name in names:
        job = open_stream(name, conf)
        try:
            done[name] = apply.apply(job.environment, job.stream, job.lake, job.kafka, register, rolled_back)
        finally:
            job.kafka.close()
        if output == "text":
            for change in done[name] or ["nothing to change"]:
                click.echo(f"{name}: {change}")
    if output == "json":
        print_json([{"stream": name, "changes": changes} for name, changes in done.items()])


@main.command()
@click.argument("stream")
@click.option("--available-now", is_flag=True, help="Publish what is there, then end.")
@master_option
@options
def speed(stream: str, available_now: bool, master: str | None, conf: str | None, output: str) -> None:
    """Run the speed layer: publish the stream's records within seconds, until told to stop (SIGTERM, Ctrl-C).

    With --output json its log is JSON, one event a line.
    """
    from anabranch.spark.submit import submit_job

    submit_job("speed_layer", stream, conf, output, ["--available-now"] if available_now else [], master)


@main.command()
@click.argument("stream")
@click.option("--hour", metavar="HOUR", help="One hour, such as 2026-11-21T03 (UTC); default: all that wait.")
@click.option("--restate", is_flag=True, help="Publish a new revision of an accepted hour.")
@click.option("--accept", is_flag=True, help="Publish an hour in spite of its gaps or its quality gate; needs --why.")
@click.option("--why", metavar="TEXT", help="Why it is restated or accepted, for the ledger.")
@click.option("--seal-only", is_flag=True, help="Only seal the hours that have ended; needs no Spark.")
@master_option
@options
def batch(
    stream: str, hour: str | None, restate: bool, accept: bool, why: str | None, seal_only: bool, master: str | None,
    conf: str | None, output: str,
) -> None:  # fmt: skip
    """Seal every hour that has ended and rebuild each that is not accepted, oldest first.

    A refused hour is left staged and its reason is in `anabranch hours`. What the stream's rules object to may be
    accepted with --accept; an account that does not close never is.
    """
    from anabranch import hours
    from anabranch.spark.submit import submit_job

    if hour is not None:
        hours.start_of(hour)
    for flag, given in (("--restate", restate), ("--accept", accept), ("--why", why)):
        if given and hour is None:
            raise click.UsageError(f"{flag}: expected --hour HOUR with it, found none")
    if accept and not why:
        raise click.UsageError("--accept: expected --why TEXT with it, found none")
    if seal_only:
        _seal(stream, hour, conf, output)
        return
    flags = [flag for flag, given in (("--restate", restate), ("--accept", accept)) if given]
    options = [*(["--hour", hour] if hour else []), *flags, *([f"--why={why}"] if why else [])]
    submit_job("batch_layer", stream, conf, output, options, master)


def _seal(stream: str, hour: str | None, conf: str | None, output: str) -> None:
    from anabranch.output import print_json
    from anabranch.protocol import sealing

    job = open_stream(stream, conf)
    try:
        sealed = sealing.seal(job.stream, job.lake, job.kafka)
        if hour is not None:
            sealing.require_sealed(job.lake, job.stream, hour)
    finally:
        job.kafka.close()
    if output == "json":
        print_json({"stream": stream, "sealed": sealed})
    else:
        click.echo(f"{stream}: sealed {', '.join(sealed) or 'nothing: no hour has ended since'}")


@main.command()
@click.argument("stream")
@click.option("--dry-run", is_flag=True, help="Only say what would change.")
@options
def merge(stream: str, dry_run: bool, conf: str | None, output: str) -> None:
    """Make main right: for each hour the files of the layer that serves it. Nothing is copied."""
    from anabranch.output import print_json
    from anabranch.protocol.state import load_state
    from serving_layer import merge

    job = open_stream(stream, conf)
    swaps = merge.merge(job.lake, job.stream, dry_run=dry_run, everything=True)
    rows = [
        {"hour": s.hour, "served": s.layer, "added": len(s.add), "removed": len(s.remove), "reason": s.refused}
        for s in swaps
    ]
    overrides = load_state(job.lake, job.stream.table).overrides
    if output == "json":
        print_json({"stream": stream, "dry_run": dry_run, "swaps": rows, "overrides": overrides})
    else:
        for row in rows:
            said = row["reason"] or f"served by {row['served']}: {row['added']} files in, {row['removed']} out"
            click.echo(f"{stream}: {row['hour']} {said}")
        if not rows:
            click.echo(f"{stream}: main is right, nothing to swap")
        for hour, layer in sorted(overrides.items()):
            click.echo(f"{stream}: {hour} is served by {layer} by choice (`anabranch serve-hour`)")
    if any(s.refused for s in swaps):
        sys.exit(1)


@main.command()
@click.argument("stream")
@click.option(
    "--history",
    metavar="[HOUR]",
    is_flag=False,
    flag_value="",
    help="Every decision about one hour, or all: what changed, why, and how to read what was replaced.",
)
@options
def hours(stream: str, history: str | None, conf: str | None, output: str) -> None:
    """Every hour up to the running one, by the ledger's newest row: who serves it, its counts and its checks."""
    from anabranch.hours import start_of
    from serving_layer.views import history as decisions
    from serving_layer.views import status as views

    if history:
        start_of(history)
    job = open_stream(stream, conf)
    if history is None:
        views.print_hours(views.hours(job), output)
    else:
        decisions.print_history(stream, history or None, decisions.history(job, history or None), output)


@main.command()
@click.argument("stream")
@click.option("--late-after", metavar="DURATION", help="Such as '10 minutes': how long the position may stand still.")
@options
def status(stream: str, late_after: str | None, conf: str | None, output: str) -> None:
    """Position, lag, last publish, backlog, and the serving layer by hour.

    The exit code is 1 when the layers differ in an hour and nothing explains it; with --late-after also when offsets
    wait and the speed layer's position has not moved for so long.
    """
    from anabranch.config import parse_duration
    from serving_layer.views import status as views

    try:
        patience = parse_duration(late_after) if late_after is not None else None
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="--late-after") from error
    job = open_stream(stream, conf)
    try:
        view = views.status(job, patience)
    finally:
        job.kafka.close()
    views.print_status(view, output)
    if view["unexplained"] or view["late"]:
        sys.exit(1)


@main.command()
@click.argument("sql")
@click.option("--output", type=click.Choice(["table", "csv", "json", "parquet"]), default="table", help="How to print.")
@click.option("--out", metavar="FILE", help="Write to a file.")
@click.option("--at", metavar="NAME", help="As of a tag, a branch or a snapshot id, which every table named must have.")
@click.option("--conf", metavar="DIR", help="Configuration folder (ANABRANCH_CONF, else conf).")
def query(
    sql: str,
    output: Literal["table", "csv", "json", "parquet"],
    out: str | None,
    at: str | None,
    conf: str | None,
) -> None:
    """Run SQL (DuckDB) over the serving tables, by their plain names.

    --at reads them as they were: `anabranch hours STREAM --history` names the tags of replaced revisions.
    """
    from pathlib import Path

    from anabranch import config
    from anabranch.logs import configure_logging
    from anabranch.output import write_result
    from anabranch.table.lake import Lake
    from serving_layer.query import run_query

    configure_logging()
    streams = [config.load_stream(name, conf) for name in config.stream_names(conf)]
    lake = Lake(config.load_environment(conf))
    names = [n for s in streams for n in (s.table, s.dead_letters_table, s.hours_table)]
    result = run_query(sql, lake.tables(names), catalog=lake.catalog_name, at=at)
    write_result(result, output, Path(out) if out else None)


main.add_command(operate.adopt)
main.add_command(operate.data_docs)
main.add_command(operate.serve_hour)
main.add_command(operate.maintain)
main.add_command(operate.init)
main.add_command(reports.audit)
main.add_command(reports.diff)
main.add_command(reports.duplicates)
main.add_command(reports.dead_letters)
main.add_command(reports.explain)
main.add_command(reports.metrics)

if __name__ == "__main__":
    main()
