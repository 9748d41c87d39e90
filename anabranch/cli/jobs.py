"""Commands that run jobs, and prepare for them."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click

from anabranch.cli import many
from anabranch.cli.options import (
    HOURS,
    StreamSelection,
    conf_folder,
    conf_option,
    master_option,
    named_streams,
    open_stream,
    output_format,
    output_option,
    stream_argument,
)
from anabranch.cli.report import Event, Report, Result, local_report, report, show
from anabranch.common.errors import AnabranchError, ConfigurationError

if TYPE_CHECKING:
    from anabranch.job import Job


@click.command()
@named_streams
@click.option("--available-now", is_flag=True, help="Publish the records present, then exit.")
@click.option(
    "--health", metavar="FILE", help="Write progress to this file, for `anabranch health`."
)
@master_option
@conf_option
@output_option
def speed(
    chosen: StreamSelection, available_now: bool, health: str | None, master: str | None
) -> None:
    """Run the speed layer: publish records within seconds.

    \b
    anabranch speed game_events
    anabranch speed --group small --health /tmp/small.json

    Several streams, --group or --all run in one process. It follows stream files that are added,
    changed or removed. A stream that fails is set aside and restarted while the others continue.

    Runs until stopped (SIGTERM, Ctrl-C). --output json writes a JSON log, one event per line.
    """
    from anabranch.spark.submit import job_of, submit

    flags = ["--available-now"] if available_now else []
    flags += ["--health", health] if health else []
    submit(*job_of(chosen.streams, chosen.group, conf_folder(), output_format(), flags, master))


@click.command()
@click.argument("file", type=click.Path(path_type=Path, dir_okay=False))
@click.option(
    "--within",
    type=click.FloatRange(min=0),
    metavar="SECONDS",
    help="Longest time without progress.",
)
@click.option("--liveness", is_flag=True, help="Ignore restarts, for a liveness probe.")
@local_report
def health(file: Path, within: float | None, liveness: bool) -> Report[object]:
    """Check a speed job by its health file.

    \b
    anabranch health /tmp/small.json --liveness

    `anabranch speed STREAM --health FILE` writes the file. A healthy job is running, has published
    or found nothing to read within the last five minutes and two triggers, and has restarted less
    than twice in 15 minutes. The exit code is 1 for an unhealthy job. A job of many streams is
    healthy while some are set aside; the output names them.
    """
    import time

    from anabranch.common.health import find_fault, is_running, read_record

    record = read_record(file)
    fault = find_fault(record, is_running(file), time.time(), within, liveness)
    set_aside = dict(record.set_aside) if record is not None else {}
    lines = ["healthy: the job makes progress" if fault is None else f"unhealthy: {fault}"]
    lines += [f"stream {name} is set aside: {reason}" for name, reason in sorted(set_aside.items())]
    view = {"healthy": fault is None, "fault": fault, "set_aside": set_aside}
    return Event(view, lines, exit_code=fault is not None)


def _at_most_one(_: click.Context, option: click.Parameter, given: Sequence[str]) -> str | None:
    if len(given) > 1:
        raise click.BadParameter(
            f"expected it once, as HOUR or A..B, found {' '.join(given)}", param=option
        )
    return given[0] if given else None


@click.command()
@named_streams
@click.option(
    "--hour",
    metavar="HOUR",
    multiple=True,
    callback=_at_most_one,
    help="An hour such as 2026-11-21T03 (UTC), or A..B; default: all waiting hours.",
)
@click.option(
    "--backlog",
    type=click.IntRange(min=1),
    metavar="N",
    help="With --hour: rebuild up to N earlier waiting hours first.",
)
@click.option("--restate", is_flag=True, help="Publish a new revision of accepted hours.")
@click.option(
    "--accept",
    is_flag=True,
    help="Publish an hour despite gaps or a failed quality gate; needs --why.",
)
@click.option("--why", metavar="TEXT", help="Reason for --restate or --accept, for the ledger.")
@click.option("--seal-only", is_flag=True, help="Only seal ended hours; needs no Spark.")
@click.option(
    "--lineage-only",
    is_flag=True,
    help="Only send the OpenLineage events of decided hours again; needs no Spark.",
)
@click.option(
    "--at-once",
    type=click.IntRange(min=1),
    metavar="N",
    help="Small hours of many streams to rebuild at once; default: one per core.",
)
@click.option(
    "--parent-run",
    envvar="OPENLINEAGE_PARENT_ID",
    metavar="NAMESPACE/JOB/ID",
    help="Scheduler's run, for the ledger and lineage. [env: OPENLINEAGE_PARENT_ID]",
)
@click.option(
    "--root-run",
    envvar="OPENLINEAGE_ROOT_PARENT_ID",
    metavar="NAMESPACE/JOB/ID",
    help="Root run that contains it. [env: OPENLINEAGE_ROOT_PARENT_ID]",
)
@master_option
@conf_option
@output_option
def batch(
    chosen: StreamSelection,
    hour: str | None,
    backlog: int | None,
    restate: bool,
    accept: bool,
    why: str | None,
    seal_only: bool,
    lineage_only: bool,
    at_once: int | None,
    parent_run: str | None,
    root_run: str | None,
    master: str | None,
) -> None:
    """Run the batch layer: seal and rebuild ended hours.

    \b
    anabranch batch game_events
    anabranch batch game_events --hour 2026-11-21T03 --restate --why "wrong prices"

    Seals every hour that has ended, and rebuilds each that is not accepted, oldest first.
    `anabranch hours` shows why an hour was refused. --accept overrules the stream's rules, but
    never an account that does not close.

    The job sends OpenLineage events to `lineage.url` at its end. --lineage-only sends those of
    --hour, or of all accepted and refused revisions, again, with the same run ids.

    Many streams share one Spark application, and their hours run concurrently. The outcome of one
    does not affect the others. The exit code is 0 when all are done, else the first of 70, 2, 1 and
    75 that a stream has.
    """
    from anabranch.lineage import parse_run

    one = chosen.one
    span = HOURS(hour) if hour is not None else None
    needing = {"--restate": restate, "--accept": accept, "--why": why, "--backlog": backlog}
    for flag, given in needing.items():
        if given and hour is None:
            raise click.UsageError(f"{flag}: expected --hour HOUR with it, found none")
    if accept and not why:
        raise click.UsageError("--accept: expected --why TEXT with it, found none")
    if accept and span is not None and span[0] != span[1]:
        raise click.UsageError(
            f"--accept: expected one hour, found {hour}; accept hours one by one"
        )
    if accept and one is None:
        raise click.UsageError("--accept: expected one stream, found many; accept hours one by one")
    if seal_only:
        sys.exit(show(_seal(one, span) if one is not None else _seal_many(chosen, span)))
    if lineage_only:
        sys.exit(show(_send_lineage(chosen, span)))
    flags = [flag for flag, given in (("--restate", restate), ("--accept", accept)) if given]
    options = [*(["--hour", hour] if hour else []), *flags, *([f"--why={why}"] if why else [])]
    for flag, number in (("--at-once", at_once), ("--backlog", backlog)):
        options += [flag, str(number)] if number is not None else []
    for name, run in (("--parent-run", parent_run), ("--root-run", root_run)):
        if run:
            try:
                parse_run(run)
            except ValueError as error:
                raise click.UsageError(f"{name}: {error}") from None
            options.append(f"{name}={run}")
    if one is not None and span is not None:
        _require_ended(one, span)
    run_batch(chosen, options, master)


def run_batch(chosen: StreamSelection, options: Sequence[str], master: str | None = None) -> None:
    """Run the batch job in this process, and end it with the job's exit code. The job opens Spark
    once an hour needs it. Raises ConfigurationError like `job_of`, and if Java cannot run here."""
    from anabranch.common.process import importing
    from anabranch.job import main
    from anabranch.spark.submit import job_of, require_spark

    environment, arguments = job_of(
        chosen.streams, chosen.group, conf_folder(), output_format(), options
    )
    require_spark(environment)
    with importing():
        from batch_layer import job
    main(job.run, [*arguments, *(["--master", master] if master is not None else [])])


def _require_ended(stream: str, span: tuple[str, str]) -> None:
    """Refuse an hour that has not ended, before Spark starts."""
    from anabranch.protocol import sealing

    job = open_stream(stream)
    sealing.require_ended(job.stream, job.lake, span)


def _seal(stream: str, span: tuple[str, str] | None) -> Report[object]:
    sealed = _sealed_hours(open_stream(stream), span)
    return Report({"stream": stream, "sealed": sealed}, [_sealed_words(stream, sealed)])


def _seal_many(chosen: StreamSelection, span: tuple[str, str] | None) -> Report[object]:
    """Seal the hours of several streams concurrently. A stream's error does not stop the others."""
    from anabranch.common.errors import combined_exit_code

    selected, codes, views, lines = many.select(chosen), [], [], []
    ended = many.run(selected, partial(_sealed_hours, span=span, is_many=True))
    for name, found in sorted(ended, key=lambda one: one[0]):
        failed = found if isinstance(found, AnabranchError) else None
        hours = () if isinstance(found, AnabranchError) else found
        codes.append(failed.exit_code if failed else 0)
        error = str(failed) if failed else None
        views.append({"stream": name, "sealed": hours, "exit_code": codes[-1], "error": error})
        lines.append(f"{name}: failed: {failed}" if failed else _sealed_words(name, hours))
    code = combined_exit_code(codes)
    return Report({"streams": views}, lines, exit_code=code, errors=selected.unanswered)


def _sealed_hours(job: Job, span: tuple[str, str] | None, is_many: bool = False) -> tuple[str, ...]:
    """Seal a stream's ended hours; return the newly sealed. Raises as `sealing.require_sealed` for
    the hours of `span`; with `is_many`, not for those before the stream's first."""
    from anabranch.protocol import sealing
    from anabranch.protocol.publisher import Publisher

    sealing.require_ended(job.stream, job.lake, span or ())
    sealed = sealing.seal(Publisher(job.lake, job.stream), job.kafka)
    for hour in span or ():
        if not is_many or hour >= sealed.state.timeline.first:
            sealing.require_sealed(sealed.state, job.stream, hour)
    return sealed.hours


def _send_lineage(chosen: StreamSelection, span: tuple[str, str] | None) -> Result:
    """Send the events of decisions that a receiver missed."""
    from anabranch.lineage import reporting

    def send(job: Job) -> Report[object]:
        stream, settings = job.stream.name, job.environment.lineage
        if not settings.url:
            raise ConfigurationError(
                "lineage.url: expected the address of a receiver in anabranch.yaml (as it ships: "
                "OPENLINEAGE_URL), found none"
            )
        subject = reporting.subject_of(job)  # names the extra that an environment lacks
        from anabranch.lineage.receiver import Receiver

        receiver, sent = Receiver(settings), []
        for row in reporting.decisions_of(job, span):
            events = subject.events(row)
            receiver.send(events)
            of_row = {name: getattr(row, name) for name in ("hour", "revision", "decision")}
            sent.append({**of_row, "run": events[0].run.runId})
        lines = [
            f"{stream}: {s['hour']}  revision {s['revision']}  {s['decision']}  run {s['run']}"
            for s in sent
        ]
        return Report(
            {"stream": stream, "sent": sent},
            lines or [f"{stream}: nothing to send: no hour was accepted or refused"],
        )

    return many.run_streams(chosen, send)


def _sealed_words(stream: str, sealed: tuple[str, ...]) -> str:
    return f"{stream}: sealed {', '.join(sealed) or 'nothing: no other hour has ended'}"


@click.command()
@stream_argument
@click.option("--target", metavar="NAME", help="Deliver to this target only.")
@click.option(
    "--redeliver", is_flag=True, help="Deliver every accepted hour again, as after a restore."
)
@click.option("--why", metavar="TEXT", help="Reason for --redeliver, for the ledger.")
@report
def egress(
    stream: str, target: str | None, redeliver: bool, why: str | None
) -> Iterator[Report[object]]:
    """Deliver accepted hours to a stream's targets.

    \b
    anabranch egress game_events --target reports

    Ends when each target of the stream's file (`egress:`) has all hours. Prints one line (one
    object with --output json) for each delivered hour. The next run delivers hours accepted or
    restated since, and continues after an interruption. A failed target does not block the others;
    the exit code is then that of the first failure.
    """
    from anabranch.cli.render.changes import delivery_words
    from serving_layer import egress as serving_egress

    if why and not redeliver:
        raise click.UsageError("--why: expected --redeliver with it, found none")
    job = open_stream(stream)
    targets = serving_egress.targets_of(job, target)
    if redeliver:
        serving_egress.record_redelivery(job, targets, why)
    is_current = True
    for one in serving_egress.egress(job, targets, redeliver):
        is_current = False
        if isinstance(one, serving_egress.Failed):
            view: object = {"target": one.target, "failed": str(one.error)}
            yield Event(view, [delivery_words(one)], exit_code=one.error.exit_code)
        else:
            yield Event(vars(one), [delivery_words(one)])
    if is_current and output_format() == "text":
        yield Event(None, [f"{stream}: nothing to deliver"])


@click.command()
@click.option("--spark-submit", is_flag=True, help="Link the jars into this environment's Spark.")
@click.option("--jobs-only", is_flag=True, help="Leave out the jars for `anabranch dev up`.")
@click.option("--write-sums", is_flag=True, help="Write jars.sha256, after a change to ivy.xml.")
def jars(spark_submit: bool, jobs_only: bool, write_sums: bool) -> None:
    """Download the jars of the jobs and print their folder.

    \b
    anabranch jars

    Downloads only missing jars, and verifies each checksum.
    """
    from anabranch.spark import jars as resolved

    def progress(message: str) -> None:
        click.echo(message, err=True)

    found = resolved.resolve(
        spark_submit, write_sums, progress, resolved.JOBS if jobs_only else resolved.CONFS
    )
    click.echo(found.folder)


@click.command()
@click.option(
    "--to",
    "folder",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path("dist"),
    help="Folder for the archive.",
)
@local_report
def pack(folder: Path) -> Report[object]:
    """Archive the Python packages that executors need.

    \b
    anabranch pack --to dist

    Prints the archive and the settings of `spark.conf` that use it. Executors need this machine's
    platform and minor version of Python. Run it again after each upgrade.
    """
    from speed_layer.pack import pack

    packed = pack(folder)
    settings = [f"    {name}: {value}" for name, value in packed.conf.items()]
    return Report(packed, ["spark:", "  conf:", *settings])
