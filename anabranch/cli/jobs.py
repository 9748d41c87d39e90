"""The commands that become Spark jobs, and what those need."""

from __future__ import annotations

import click

from anabranch.cli.options import master_option, open_stream, options


@click.command()
@click.argument("stream")
@click.option("--available-now", is_flag=True, help="Publish what is there, then end.")
@master_option
@options
def speed(stream: str, available_now: bool, master: str | None, conf: str | None, output: str) -> None:
    """Run the speed layer: publish the stream's records within seconds, until stopped (SIGTERM, Ctrl-C).

    With --output json its log is JSON, one event a line.
    """
    from anabranch.spark.submit import submit_job

    submit_job("speed_layer", stream, conf, output, ["--available-now"] if available_now else [], master)


@click.command()
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
            sealing.require_sealed(sealed.state, job.stream, hour)
    finally:
        job.kafka.close()
    if output == "json":
        print_json({"stream": stream, "sealed": list(sealed.hours)})
    else:
        click.echo(f"{stream}: sealed {', '.join(sealed.hours) or 'nothing: no hour has ended since'}")


@click.command()
@click.option("--verify", is_flag=True, help="Compute every checksum again, also of a cached folder.")
@click.option("--spark-submit", is_flag=True, help="Let this environment's spark-submit find the jars.")
@click.option("--write-sums", is_flag=True, help="After a change of ivy.xml: write jars.sha256 anew.")
def jars(verify: bool, spark_submit: bool, write_sums: bool) -> None:
    """Resolve the jars that the jobs need, each compared with its checksum, and print their folder."""
    from anabranch.spark import jars as resolved

    click.echo(resolved.resolve(verify, spark_submit, write_sums, lambda message: click.echo(message, err=True)))
