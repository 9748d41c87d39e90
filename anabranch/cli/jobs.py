"""Commands that run Spark jobs, and prepare for them."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from anabranch.cli.options import master_option, open_stream, options, selection, stream_argument


@click.command()
@selection
@click.option("--available-now", is_flag=True, help="Publish the records present, then exit.")
@click.option("--health", metavar="FILE", help="Write progress to this file, for `anabranch health`.")
@master_option
@options
def speed(
    streams: tuple[str, ...],
    group: str | None,
    every: bool,
    available_now: bool,
    health: str | None,
    master: str | None,
    conf: str | None,
    output: str,
) -> None:
    """Run the speed layer: publish records within seconds.

    Several streams, --group or --all run in one process: streams join, change and leave with their
    files, and a stream that fails is set aside and started again while the others continue.

    Runs until stopped (SIGTERM, Ctrl-C). --output json writes a JSON log, one event a line.
    """
    from anabranch.spark.submit import submit_job, submit_streams

    if [bool(streams), group is not None, every].count(True) != 1:
        raise click.UsageError("expected STREAM, or --group NAME, or --all; give one of them")
    flags = ["--available-now"] if available_now else []
    flags += ["--health", health] if health else []
    if len(streams) == 1:
        submit_job("speed_layer", streams[0], conf, output, flags, master)
    submit_streams("speed_layer", streams, group, conf, output, flags, master)


@click.command()
@click.argument("file", type=click.Path(path_type=Path, dir_okay=False))
@click.option("--within", type=click.FloatRange(min=0), metavar="SECONDS", help="Longest time without progress.")
@click.option("--liveness", is_flag=True, help="Ignore restarts, for a liveness probe.")
@click.option("--output", type=click.Choice(["text", "json"]), default="text", help="Output format.")
def health(file: Path, within: float | None, liveness: bool, output: str) -> None:
    """Check a speed job by its health file.

    The job writes the file with `anabranch speed STREAM --health FILE`. A healthy job runs, has published or found
    nothing to read within five minutes and two triggers, and restarted less than twice in 15 minutes. The exit code is
    1 for an unhealthy job.
    """
    import json
    import time

    from anabranch.common.health import find_fault, is_running, read_record

    fault = find_fault(read_record(file), is_running(file), time.time(), within, liveness)
    if output == "json":
        click.echo(json.dumps({"healthy": fault is None, "fault": fault}))
    else:
        click.echo("healthy: the job makes progress" if fault is None else f"unhealthy: {fault}")
    sys.exit(0 if fault is None else 1)


@click.command()
@stream_argument()
@click.option(
    "--hour", metavar="HOUR", help="An hour such as 2026-11-21T03 (UTC), or A..B; default: all waiting hours."
)
@click.option("--restate", is_flag=True, help="Publish a new revision of accepted hours.")
@click.option("--accept", is_flag=True, help="Publish an hour despite gaps or a failed quality gate; needs --why.")
@click.option("--why", metavar="TEXT", help="Reason for --restate or --accept, for the ledger.")
@click.option("--seal-only", is_flag=True, help="Only seal ended hours; needs no Spark.")
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
    help="Outermost run that contains it. [env: OPENLINEAGE_ROOT_PARENT_ID]",
)
@master_option
@options
def batch(
    stream: str,
    hour: str | None,
    restate: bool,
    accept: bool,
    why: str | None,
    seal_only: bool,
    parent_run: str | None,
    root_run: str | None,
    master: str | None,
    conf: str | None,
    output: str,
) -> None:
    """Run the batch layer: seal and rebuild ended hours.

    Seals every hour that has ended, and rebuilds each that is not accepted, oldest first. `anabranch hours` shows the
    reason of a refused hour. --accept overrules the stream's rules, but never an account that does not close.
    """
    from anabranch.offsets.hours import span_of
    from anabranch.operations.notifications.lineage.parents import parse_run
    from anabranch.spark.submit import submit_job

    span = span_of(hour) if hour is not None else None
    for flag, given in (("--restate", restate), ("--accept", accept), ("--why", why)):
        if given and hour is None:
            raise click.UsageError(f"{flag}: expected --hour HOUR with it, found none")
    if accept and not why:
        raise click.UsageError("--accept: expected --why TEXT with it, found none")
    if accept and span is not None and span[0] != span[1]:
        raise click.UsageError(f"--accept: expected one hour, found {hour}; accept hours one by one")
    if seal_only:
        _seal(stream, span, conf, output)
        return
    flags = [flag for flag, given in (("--restate", restate), ("--accept", accept)) if given]
    options = [*(["--hour", hour] if hour else []), *flags, *([f"--why={why}"] if why else [])]
    for name, run in (("--parent-run", parent_run), ("--root-run", root_run)):
        if run:
            try:
                parse_run(run)
            except ValueError as error:
                raise click.UsageError(f"{name}: {error}") from None
            options.append(f"{name}={run}")
    if span is not None:
        _require_ended(stream, span, conf)
    submit_job("batch_layer", stream, conf, output, options, master)


def _require_ended(stream: str, span: tuple[str, str], conf: str | None) -> None:
    """Refuse an open hour before Spark starts."""
    from anabranch.protocol import sealing

    job = open_stream(stream, conf)
    sealing.require_ended(job.stream, job.lake, span)


def _seal(stream: str, span: tuple[str, str] | None, conf: str | None, output: str) -> None:
    from anabranch.common.output import print_json
    from anabranch.protocol import sealing
    from anabranch.protocol.publisher import Publisher

    job = open_stream(stream, conf)
    try:
        sealing.require_ended(job.stream, job.lake, span or ())
        sealed = sealing.seal(Publisher(job.lake, job.stream), job.kafka)
        for hour in span or ():
            sealing.require_sealed(sealed.state, job.stream, hour)
    finally:
        job.kafka.close()
    if output == "json":
        print_json({"stream": stream, "sealed": list(sealed.hours)})
    else:
        click.echo(f"{stream}: sealed {', '.join(sealed.hours) or 'nothing: no other hour has ended'}")


@click.command()
@click.option("--verify", is_flag=True, help="Verify every checksum, also in a cached folder.")
@click.option("--spark-submit", is_flag=True, help="Link the jars into this environment's Spark.")
@click.option("--archive", is_flag=True, help="Archive classes so that jobs start faster (one minute, 250 MB).")
@click.option("--jobs-only", is_flag=True, help="Leave out the jars for `anabranch dev up`.")
@click.option("--write-sums", is_flag=True, help="Write jars.sha256, after a change to ivy.xml.")
def jars(verify: bool, spark_submit: bool, archive: bool, jobs_only: bool, write_sums: bool) -> None:
    """Download the jars of the jobs and print their folder.

    Verifies each checksum, and downloads only missing jars. --archive archives Java's classes once for jobs on this
    machine (spark.master: local[...]), which then start in three quarters of the time. Run it again after an upgrade of
    Java or of Anabranch.
    """
    from anabranch.spark import jars as resolved
    from anabranch.spark.archive import make_archive

    def progress(message: str) -> None:
        click.echo(message, err=True)

    found = resolved.resolve(verify, spark_submit, write_sums, progress, resolved.JOBS if jobs_only else resolved.CONFS)
    if archive:
        make_archive(found, progress)
    click.echo(found.folder)
